//! How often an activity, a buyer and an address may ask: token buckets of this server.
//!
//! A limit across all servers is in `reserve.lua`, at no further round trip; these cost nothing but
//! memory. **Promise:** that memory is bounded. Beyond [`MOST`] names all are forgotten, which lets
//! everybody ask anew: a flood of invented names must not lock out those who are real.

use std::{
    hash::{BuildHasher, Hash},
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU32,
    sync::Arc,
};

use arc_swap::ArcSwap;
use foldhash::quality::RandomState;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter, clock::Clock as _};

use crate::{
    domain::{Networks, ReserveRequest},
    error::Error,
};

/// The most names that one limit remembers, about 40 bytes each.
pub const MOST: usize = 1_000_000;

/// How often and how many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rate {
    /// Per second; 0: without limit.
    pub per_s: u32,
    /// At once, after a while of silence; 0: as many as in a second.
    pub burst: u32,
}

/// What is limited, and how far.
#[derive(Debug, Clone, Default)]
pub struct LimitOptions {
    pub activity: Rate,
    pub user: Rate,
    pub address: Rate,
    /// Addresses that have no limit.
    pub unlimited: Networks,
}

/// What a limit is for, as the caller is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Activity,
    User,
    Address,
}

impl Scope {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Activity => "activity",
            Self::User => "user",
            Self::Address => "address",
        }
    }
}

/// The buckets of one server.
#[derive(Debug)]
pub struct Limits {
    activity: Option<Buckets>,
    user: Option<Buckets>,
    address: Option<Buckets>,
    unlimited: Networks,
    hasher: RandomState,
}

/// One bucket per name.
#[derive(Debug)]
struct Buckets {
    scope: Scope,
    quota: Quota,
    limiter: ArcSwap<DefaultKeyedRateLimiter<u64>>,
}

impl Limits {
    #[must_use]
    pub fn new(options: LimitOptions) -> Self {
        Self {
            activity: Buckets::new(Scope::Activity, options.activity),
            user: Buckets::new(Scope::User, options.user),
            address: Buckets::new(Scope::Address, options.address),
            unlimited: options.unlimited,
            hasher: RandomState::default(),
        }
    }

    /// Counts a Reserve.
    ///
    /// # Errors
    /// `RateLimited`. A limit that comes before has counted it then, and one that comes after has not:
    /// first what one caller can do alone.
    pub fn check(&self, request: &ReserveRequest) -> Result<(), Error> {
        if let (Some(buckets), Some(address)) = (&self.address, request.address)
            && !self.unlimited.contain(address)
        {
            buckets.check(self.hash(&network_of(address)))?;
        }
        if let Some(buckets) = &self.user {
            buckets.check(self.hash(request.buyer.as_str()))?;
        }
        if let Some(buckets) = &self.activity {
            buckets.check(self.hash(request.offer.activity_id.as_str()))?;
        }
        Ok(())
    }

    /// Forgets whoever has been silent long enough; run it now and then.
    pub fn forget(&self) {
        for buckets in [&self.activity, &self.user, &self.address].into_iter().flatten() {
            buckets.forget();
        }
    }

    /// How many names are remembered.
    pub fn len(&self) -> usize {
        let all = [&self.activity, &self.user, &self.address];
        all.into_iter().flatten().map(|buckets| buckets.limiter.load().len()).sum()
    }

    /// Whether nobody has asked for a while.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn hash(&self, name: &(impl Hash + ?Sized)) -> u64 {
        self.hasher.hash_one(name)
    }
}

impl Buckets {
    fn new(scope: Scope, rate: Rate) -> Option<Self> {
        let per_s = NonZeroU32::new(rate.per_s)?;
        let burst = NonZeroU32::new(rate.burst).unwrap_or(per_s);
        let quota = Quota::per_second(per_s).allow_burst(burst);
        Some(Self { scope, quota, limiter: ArcSwap::from_pointee(RateLimiter::keyed(quota)) })
    }

    fn check(&self, name: u64) -> Result<(), Error> {
        let limiter = self.limiter.load();
        limiter.check_key(&name).map_err(|not_until| Error::RateLimited {
            scope: self.scope.as_str(),
            wait: not_until.wait_time_from(limiter.clock().now()),
        })
    }

    fn forget(&self) {
        let limiter = self.limiter.load();
        limiter.retain_recent();
        if limiter.len() > MOST {
            tracing::warn!(scope = self.scope.as_str(), "too many names: their limits begin anew");
            self.limiter.store(Arc::new(RateLimiter::keyed(self.quota)));
        } else {
            limiter.shrink_to_fit();
        }
    }
}

/// Whom an address counts for: who has one address of IPv6 usually has 2^64 of them.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(network))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use std::time::Duration;

    use super::*;
    use crate::domain::{ActivityId, BuyerId, OfferKey, SkuId};

    fn request(activity: &str, buyer: &str, address: &str) -> ReserveRequest {
        let activity_id = ActivityId::new(activity).unwrap();
        ReserveRequest {
            offer: OfferKey { activity_id, sku_id: SkuId::new("s").unwrap() },
            buyer: BuyerId::new(buyer).unwrap(),
            quantity: 1,
            request_id: None,
            is_repeat: false,
            address: address.parse().ok(),
        }
    }

    fn rate(per_s: u32, burst: u32) -> Rate {
        Rate { per_s, burst }
    }

    fn refused(limits: &Limits, request: &ReserveRequest) -> Option<&'static str> {
        match limits.check(request) {
            Ok(()) => None,
            Err(Error::RateLimited { scope, wait }) => {
                assert!(wait > Duration::ZERO && wait <= Duration::from_secs(1), "{wait:?}");
                Some(scope)
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_settings_nothing_is_limited_or_remembered() {
        let limits = Limits::new(LimitOptions::default());
        for _ in 0..10_000 {
            assert_eq!(refused(&limits, &request("a", "u", "10.0.0.1")), None);
        }
        assert!(limits.is_empty());
    }

    #[test]
    fn each_limit_refuses_the_one_beyond_its_burst_and_names_itself() {
        let user = LimitOptions { user: rate(1, 3), ..LimitOptions::default() };
        let activity = LimitOptions { activity: rate(1, 3), ..LimitOptions::default() };
        let address = LimitOptions { address: rate(1, 3), ..LimitOptions::default() };
        for (options, scope) in
            [(user, Scope::User), (activity, Scope::Activity), (address, Scope::Address)]
        {
            let limits = Limits::new(options);
            let asked = request("a", "u", "10.0.0.1");
            for _ in 0..3 {
                assert_eq!(refused(&limits, &asked), None);
            }
            assert_eq!(refused(&limits, &asked), Some(scope.as_str()));
            // Somebody else is not concerned.
            assert_eq!(refused(&limits, &request("b", "v", "10.0.0.2")), None);
        }
    }

    #[test]
    fn addresses_of_one_network_of_ipv6_count_together() {
        let limits = Limits::new(LimitOptions { address: rate(1, 1), ..LimitOptions::default() });
        assert_eq!(refused(&limits, &request("a", "u", "2001:db8::1")), None);
        let neighbour = request("a", "u", "2001:db8::ffff:2");
        assert_eq!(refused(&limits, &neighbour), Some("address"));
        assert_eq!(refused(&limits, &request("a", "u", "2001:db8:0:1::1")), None);
        assert_eq!(refused(&limits, &request("a", "u", "10.0.0.1")), None);
        let mapped = request("a", "u", "::ffff:10.0.0.1");
        assert_eq!(refused(&limits, &mapped), Some("address"));
    }

    #[test]
    fn an_address_without_limit_is_never_refused() {
        let limits = Limits::new(LimitOptions {
            address: rate(1, 1),
            unlimited: "10.0.0.0/8".parse().unwrap(),
            ..LimitOptions::default()
        });
        for _ in 0..10 {
            assert_eq!(refused(&limits, &request("a", "u", "10.1.2.3")), None);
        }
    }

    #[test]
    fn a_million_names_are_bounded_memory() {
        let limits = Limits::new(LimitOptions { user: rate(1, 1), ..LimitOptions::default() });
        let buckets = limits.user.as_ref().unwrap();
        for name in 0..=u64::try_from(MOST).unwrap() {
            buckets.check(name).unwrap();
        }
        assert!(limits.len() > MOST);
        limits.forget();
        assert!(limits.len() <= MOST, "{}", limits.len());
    }
}
