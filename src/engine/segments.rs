//! The segments of one offer: which of them sells to whom, and what they have together.
//!
//! **The home of a buyer** is segment `spread(buyer) mod count`, where `spread` is the 64-bit FNV-1a
//! hash of the name's bytes, finished with the mixer of MurmurHash3. It is unsigned, the same on
//! every machine and in every version, and never changes: two servers that disagree about a home
//! would sell a buyer what one order of hers forbids.
//!
//! **Invariant:** all segments are called under one epoch, and an epoch is adopted only when it is
//! known to be of this number of segments. A number that was raised makes another `Segments`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures_util::future::try_join_all;

use super::{
    EngineError,
    batcher::Segment,
    scripts::{Answer, Levels, Refusal, Stamp},
    verdict::Verdict,
};
use crate::domain::{BuyerId, TimeMs};

/// All segments of one offer, in their order; at least one.
#[derive(Debug)]
pub struct Segments {
    first: Arc<Segment>,
    all: Box<[Arc<Segment>]>,
    epoch: Arc<AtomicU64>,
    verdict: Option<Arc<Verdict>>,
}

/// What the segments of an offer have together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfferLevels {
    /// The epoch of all, and the sum of their revisions: it rises with every change.
    pub stamp: Stamp,
    /// Units on sale, also those on their way between segments.
    pub stock: u64,
    pub total: u64,
    pub held: u64,
    pub reservations: u64,
    pub unacked: u64,
    /// When the reservation was taken that has been unacknowledged longest.
    pub oldest_unacked: Option<TimeMs>,
    pub aside: u64,
    /// Units that are on their way between segments, or were a moment ago.
    pub out: u64,
}

impl OfferLevels {
    /// The sums, if all were read under one epoch. No step of a transfer changes what is added up
    /// here, so units that move while the segments are read count once.
    #[must_use]
    pub fn of(all: &[Levels]) -> Option<Self> {
        let epoch = all.first()?.stamp.epoch;
        if all.iter().any(|levels| levels.stamp.epoch != epoch) {
            return None;
        }
        let sum = |figure: fn(&Levels) -> u64| all.iter().map(figure).sum();
        let at_least_0 = |figure: fn(&Levels) -> i64| {
            u64::try_from(all.iter().map(figure).sum::<i64>()).unwrap_or(0)
        };
        Some(Self {
            stamp: Stamp { epoch, revision: sum(|levels| levels.stamp.revision) },
            stock: at_least_0(Levels::on_sale),
            total: at_least_0(|levels| levels.total),
            held: sum(|levels| levels.held),
            reservations: sum(|levels| levels.reservations),
            unacked: sum(|levels| levels.unacked),
            oldest_unacked: all.iter().filter_map(|levels| levels.oldest_unacked).min(),
            aside: sum(|levels| levels.aside),
            out: sum(|levels| levels.out),
        })
    }

    /// Units of the offer that are on sale or in reservations; more than `total` in no state.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.total.saturating_sub(self.aside)
    }
}

impl Segments {
    /// These segments, called under `epoch`; `verdict` is theirs when they are several.
    #[must_use]
    pub fn new(
        first: Segment,
        others: impl Iterator<Item = Segment>,
        epoch: Arc<AtomicU64>,
        verdict: Option<Arc<Verdict>>,
    ) -> Self {
        let first = Arc::new(first);
        let all = std::iter::once(first.clone()).chain(others.map(Arc::new)).collect();
        Self { first, all, epoch, verdict }
    }

    #[must_use]
    pub fn all(&self) -> &[Arc<Segment>] {
        &self.all
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.all.len()).unwrap_or(u32::MAX)
    }

    /// The segment with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Arc<Segment>> {
        self.all.get(number as usize)
    }

    /// Segment 0, which every offer has.
    #[must_use]
    pub fn first(&self) -> &Arc<Segment> {
        &self.first
    }

    /// The one segment that sells to this buyer and holds what she reserves.
    #[must_use]
    pub fn home(&self, buyer: &BuyerId) -> &Arc<Segment> {
        self.home_of(buyer.as_str())
    }

    /// As [`Segments::home`], by the name alone; adjustments have homes by their request ids.
    #[must_use]
    pub fn home_of(&self, name: &str) -> &Arc<Segment> {
        if self.all.len() == 1 {
            return &self.first;
        }
        self.all.get(home_among(name, self.all.len())).unwrap_or(&self.first)
    }

    /// What is known of a sale that is over in all segments; `None` where there is one.
    #[must_use]
    pub fn verdict(&self) -> Option<&Arc<Verdict>> {
        self.verdict.as_ref()
    }

    /// The epoch that calls are made under.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Takes over a higher epoch, of this number of segments; a lower one is ignored. What was known
    /// under the one before, such as that nothing is left, is forgotten.
    pub fn adopt(&self, epoch: u64) {
        if self.epoch.fetch_max(epoch, Ordering::AcqRel) < epoch {
            let begins = Stamp { epoch, revision: 0 };
            self.all.iter().for_each(|segment| segment.hear(begins));
        }
    }

    /// Takes over the epoch of a refusal for that reason; whether a call may be made anew. An epoch
    /// of another number of segments is not taken over.
    #[must_use]
    pub fn adopt_refused(&self, refusal: &Refusal) -> bool {
        match refusal {
            Refusal::Frozen { stamp, reason, segments }
                if reason == "epoch"
                    && *segments == self.count()
                    && stamp.epoch >= self.epoch() =>
            {
                self.adopt(stamp.epoch);
                true
            }
            Refusal::Frozen { .. } | Refusal::NotWarmed => false,
        }
    }

    /// Reads the figures of every segment, in their order.
    ///
    /// # Errors
    /// See [`EngineError`]. The first refusal is that of the offer.
    pub async fn levels_of_each(&self) -> Result<Answer<Vec<Levels>>, EngineError> {
        if self.all.len() == 1 {
            return Ok(self.first.scripts.levels().await?.map(|levels| vec![levels]));
        }
        let all = try_join_all(self.all.iter().map(|segment| segment.scripts.levels())).await?;
        Ok(all.into_iter().collect())
    }

    /// Reads the figures of the offer.
    ///
    /// # Errors
    /// See [`EngineError`]. Segments of several epochs are refused as the lowest of them.
    pub async fn levels(&self) -> Result<Answer<OfferLevels>, EngineError> {
        let all = match self.levels_of_each().await? {
            Ok(all) => all,
            Err(refusal) => return Ok(Err(refusal)),
        };
        Ok(OfferLevels::of(&all).ok_or_else(|| Refusal::Frozen {
            stamp: all.iter().map(|levels| levels.stamp).min().unwrap_or_default(),
            reason: "epoch".to_owned(),
            segments: self.count(),
        }))
    }
}

/// How many of `units` segment `number` of `count` has when they are spread evenly: the remainder
/// goes to the first ones.
#[must_use]
pub fn share(units: u64, count: u32, number: u32) -> u64 {
    let count = u64::from(count.max(1));
    units / count + u64::from(u64::from(number) < units % count)
}

fn home_among(name: &str, count: usize) -> usize {
    let count = u64::try_from(count.max(1)).unwrap_or(1);
    usize::try_from(spread(name) % count).unwrap_or(0)
}

/// Spreads names over segments; see the head of this file.
fn spread(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_of_a_name_is_the_same_in_every_version() {
        let vectors = VECTORS;
        for (name, hash, of_16) in vectors {
            assert_eq!(spread(name), hash, "{name}");
            assert_eq!(home_among(name, 16), of_16, "{name}");
            assert_eq!(home_among(name, 1), 0, "{name}");
        }
        // A hash of the top half is no negative number, so it has a home like any other.
        assert!(vectors.iter().any(|(_, hash, _)| *hash > u64::MAX / 2));
        assert!(vectors.iter().any(|(_, hash, _)| *hash < u64::MAX / 2));
    }

    const VECTORS: [(&str, u64, usize); 6] = [
        ("", 0xefd0_1f60_ba99_2926, 6),
        ("ann", 0x6ef4_c3ab_a814_f113, 3),
        ("bob", 0xf649_3629_e565_4ae0, 0),
        ("201605131024011014", 0xb066_cfe4_c879_a6cd, 13),
        ("user-0000001", 0xd63a_099a_4b54_178f, 15),
        ("user-0000002", 0xfc19_24ad_a7a0_11de, 14),
    ];

    #[test]
    fn homes_are_spread_evenly() {
        for count in [2, 3, 7, 16, 100, 256] {
            let mut homes = vec![0_u32; count];
            for number in 0..100 * count {
                homes[home_among(&format!("user-{number:07}"), count)] += 1;
            }
            assert!(homes.iter().all(|&many| (50..150).contains(&many)), "{count}: {homes:?}");
        }
    }

    #[test]
    fn shares_are_even_and_lose_nothing() {
        for (units, count) in [(1_000, 16), (5, 16), (0, 3), (u64::from(u32::MAX), 256), (7, 1)] {
            let shares: Vec<u64> = (0..count).map(|number| share(units, count, number)).collect();
            assert_eq!(shares.iter().sum::<u64>(), units);
            assert!(shares.is_sorted_by(|a, b| a >= b), "{shares:?}");
            assert!(shares[0] - shares[shares.len() - 1] <= 1, "{shares:?}");
        }
    }
}
