//! The words of a sale as types: what has one of these has been checked.
//!
//! **Invariant:** identifiers are opaque strings from end to end (I11). They are never parsed
//! as numbers, here or in Lua, so an id above 2^53 comes back as it went in.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use uuid::Uuid;

mod networks;
mod operations;
mod page;

pub use networks::{Networks, NoNetwork};
pub use operations::{
    AdjustRequest, Adjusted, AuditView, DeadLetterView, Difference, DifferenceKind, OfferFigures,
    ReconcileReport, SegmentFigures,
};
pub use page::{InvalidToken, PageQuery, open_token, seal_token};

/// The most units that one offer may have: the largest whole number that a Lua number holds.
pub const MAX_TOTAL: u64 = (1 << 53) - 1;
/// The most units in one reservation.
pub const MAX_QUANTITY: u32 = 1_000;
/// The most orders one buyer may have of one offer.
pub const MAX_ORDERS_PER_USER: u32 = 100;
/// The most offers in one activity.
pub const MAX_OFFERS: usize = 10_000;
/// The most segments of one offer.
pub const MAX_SEGMENTS: u32 = 256;
/// The longest activity or SKU id, in bytes.
pub const MAX_NAME_LEN: usize = 64;
/// The longest buyer or request id, in bytes.
pub const MAX_TOKEN_LEN: usize = 128;

/// Why a text is not an id; the sentence goes to the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("must be 1 to {max} of A-Z a-z 0-9 . _ - (it has {len} bytes)")]
    NameLength { max: usize, len: usize },
    #[error("may only hold A-Z a-z 0-9 . _ - (byte {at} is another)")]
    NameCharacter { at: usize },
    #[error("must be 1 to {max} bytes of visible ASCII without spaces (it has {len} bytes)")]
    TokenLength { max: usize, len: usize },
    #[error("may only hold visible ASCII without spaces (byte {at} is another)")]
    TokenCharacter { at: usize },
}

fn check_name(text: &str) -> Result<(), IdError> {
    if text.is_empty() || text.len() > MAX_NAME_LEN {
        return Err(IdError::NameLength { max: MAX_NAME_LEN, len: text.len() });
    }
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    match text.bytes().position(|b| !allowed(b)) {
        Some(at) => Err(IdError::NameCharacter { at }),
        None => Ok(()),
    }
}

fn check_token(text: &str) -> Result<(), IdError> {
    if text.is_empty() || text.len() > MAX_TOKEN_LEN {
        return Err(IdError::TokenLength { max: MAX_TOKEN_LEN, len: text.len() });
    }
    match text.bytes().position(|b| !b.is_ascii_graphic()) {
        Some(at) => Err(IdError::TokenCharacter { at }),
        None => Ok(()),
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $check:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks the text and keeps it as it is.
            ///
            /// # Errors
            /// [`IdError`] when the text is empty, too long, or holds another character.
            pub fn new(text: &str) -> Result<Self, IdError> {
                $check(text)?;
                Ok(Self(text.into()))
            }

            /// The id as it came.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// The name of one sale.
    ActivityId, check_name
);
id!(
    /// The name of what is sold.
    SkuId, check_name
);
id!(
    /// The user a reservation is for (`user_id` in the API).
    BuyerId, check_token
);
id!(
    /// The caller's name for one attempt to buy; a repeat with it is the same attempt (I6).
    RequestId, check_token
);
id!(
    /// Names one reservation; see [`name_reservation`].
    ReservationId, check_token
);
id!(
    /// Names the order that a reservation becomes; made together with the reservation.
    OrderNo, check_token
);

/// One SKU inside an activity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OfferKey {
    pub activity_id: ActivityId,
    pub sku_id: SkuId,
}

impl fmt::Display for OfferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.activity_id, self.sku_id)
    }
}

/// The namespace of reservation ids: UUIDv5 of the DNS name `inventory.seckill`.
const RESERVATIONS: Uuid = Uuid::from_u128(0x7b3f_5f0e_5d0c_5c0a_9a52_64c1_7d1e_9f21);

/// Names the reservation of one attempt to buy.
///
/// With a `request_id` the name follows from the four ids alone, so a repeat, through any
/// server, is recognised. Each id is hashed behind its length: (`a:b`, `c`) and (`a`, `b:c`)
/// differ. Without one the name is new.
#[must_use]
pub fn name_reservation(
    offer: &OfferKey,
    buyer: &BuyerId,
    request_id: Option<&RequestId>,
) -> ReservationId {
    let uuid = match request_id {
        None => new_uuid(),
        Some(request_id) => {
            let parts = [
                offer.activity_id.as_str(),
                offer.sku_id.as_str(),
                buyer.as_str(),
                request_id.as_str(),
            ];
            let mut name = Vec::with_capacity(512);
            for part in parts {
                name.extend_from_slice(&(part.len() as u64).to_be_bytes());
                name.extend_from_slice(part.as_bytes());
            }
            Uuid::new_v5(&RESERVATIONS, &name)
        }
    };
    ReservationId(uuid.hyphenated().to_string().into())
}

/// A new order number: a UUIDv7 as 26 characters of Crockford's base 32, so it sorts by time.
#[must_use]
pub fn new_order_no() -> OrderNo {
    const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let bits = new_uuid().as_u128();
    let text: String = (0..26u32)
        .rev()
        .map(|place| char::from(ALPHABET[((bits >> (5 * place)) & 31) as usize]))
        .collect();
    OrderNo(text.into())
}

/// A name that nothing else has: a UUIDv7.
pub(crate) fn new_uuid() -> Uuid {
    #[cfg(test)]
    if let Some(uuid) = crate::simulator::new_uuid() {
        return uuid;
    }
    Uuid::now_v7()
}

/// Milliseconds since 1970-01-01T00:00:00Z: every time in the engine and in SQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TimeMs(pub i64);

impl TimeMs {
    /// This machine's clock.
    #[must_use]
    pub fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = crate::simulator::now() {
            return now;
        }
        let since =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }

    /// This time, later by `span`.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }

    /// This time, earlier by `span`.
    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long after `earlier` this is; zero when it is not.
    #[must_use]
    pub fn since(self, earlier: TimeMs) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

/// The database's clock as far as this process knows it; a clone is the same one. Everything that
/// outlives a process is timed by it, so that servers whose clocks differ agree.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    ahead_ms: Arc<AtomicI64>,
}

impl Clock {
    /// The database's time, without asking.
    #[must_use]
    pub fn now(&self) -> TimeMs {
        TimeMs(TimeMs::now().0.saturating_add(self.ahead_ms.load(Ordering::Relaxed)))
    }

    /// Notes how far the database's clock is ahead of this machine's.
    pub fn set_ahead(&self, ahead_ms: i64) {
        self.ahead_ms.store(ahead_ms, Ordering::Relaxed);
    }
}

/// What became of a reservation, as callers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservationState {
    /// Taken in the engine, not in SQL yet.
    Held,
    /// In the outbox, durable.
    Queued,
    Ordered,
    Confirmed,
    Released,
    Refused,
    /// A dead letter: an operator decides.
    Dead,
}

/// `quantity` units of one offer, taken for one buyer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    pub reservation_id: ReservationId,
    pub order_no: OrderNo,
    pub offer: OfferKey,
    pub buyer: BuyerId,
    pub quantity: u32,
    pub state: ReservationState,
    pub reserve_time: TimeMs,
    /// When the hold ends unless it is confirmed; `None` when it never does.
    pub expire_time: Option<TimeMs>,
}

/// The states of an activity; they only move forward, but for `Active ⇄ Paused`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActivityState {
    PendingReview,
    Scheduled,
    Active,
    Paused,
    Ended,
    Settled,
}

impl ActivityState {
    pub const ALL: [ActivityState; 6] = [
        Self::PendingReview,
        Self::Scheduled,
        Self::Active,
        Self::Paused,
        Self::Ended,
        Self::Settled,
    ];

    /// The word in SQL and in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PendingReview => "pending_review",
            Self::Scheduled => "scheduled",
            Self::Active => "active",
            Self::Paused => "paused",
            Self::Ended => "ended",
            Self::Settled => "settled",
        }
    }

    /// The state of this word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// What a Reserve comes to, first that applies; the order of the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReserveOutcome {
    NotStarted,
    Paused,
    Ended,
    QuantityLimit {
        max: u32,
    },
    NotWarmed,
    /// This call's request holds the reservation; `replayed` when it won before.
    Reserved {
        reservation: Reservation,
        replayed: bool,
        remaining: Option<u64>,
    },
    /// This request won and was given back.
    Released,
    /// The buyer has all allowed orders; the one held, where it could be told.
    Duplicate {
        existing: Option<Reservation>,
    },
    SoldOut,
    /// Some are left, fewer than asked.
    Insufficient {
        remaining: u64,
    },
}

/// What a Release comes to; only `Released` changes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseOutcome {
    Released,
    AlreadyReleased,
    NotReserved,
    WrongOwner,
    Confirmed,
}

/// What a Confirm comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfirmOutcome {
    Confirmed(Reservation),
    Expired,
    Released,
    NotReserved,
    WrongOwner,
    NotOrderedYet,
}

/// A request to take units, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReserveRequest {
    pub offer: OfferKey,
    pub buyer: BuyerId,
    /// At least 1, at most [`MAX_QUANTITY`].
    pub quantity: u32,
    pub request_id: Option<RequestId>,
    /// The client library says that it sends this call again.
    pub is_repeat: bool,
    /// Where the call comes from, if that is known.
    pub address: Option<IpAddr>,
}

/// A request to give a reservation back, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseRequest {
    pub offer: OfferKey,
    pub buyer: BuyerId,
    pub reservation_id: ReservationId,
    /// For the records; may be empty.
    pub reason: String,
}

/// A request to make a reservation final, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfirmRequest {
    pub offer: OfferKey,
    pub buyer: BuyerId,
    pub reservation_id: ReservationId,
}

/// How a reservation is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservationQuery {
    ById(ReservationId),
    ByRequest { offer: OfferKey, buyer: BuyerId, request_id: RequestId },
}

/// Why SQL refused a reservation that the engine had taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedBecause {
    Duplicate,
    SoldOut,
}

/// What a new activity is made of, checked, defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivitySpec {
    pub activity_id: ActivityId,
    pub title: String,
    pub start_time: TimeMs,
    pub end_time: TimeMs,
    /// Whole seconds.
    pub retention: Duration,
    /// Distinct, at least one, in the order of their `sku_id`.
    pub offers: Vec<OfferSpec>,
}

/// What a new offer is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferSpec {
    pub sku_id: SkuId,
    pub title: String,
    pub price_minor: i64,
    pub currency: String,
    pub total: u64,
    pub max_orders: u32,
    pub max_quantity: u32,
    /// Whole seconds; `None` when reservations do not expire.
    pub hold: Option<Duration>,
    pub segments: u32,
}

/// An activity as SQL has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivityView {
    pub activity_id: String,
    pub title: String,
    pub state: ActivityState,
    pub start_time: TimeMs,
    pub end_time: TimeMs,
    pub retention: Duration,
    pub version: i64,
    pub create_time: TimeMs,
    pub update_time: TimeMs,
    /// By `sku_id`; empty in lists.
    pub offers: Vec<OfferView>,
}

/// An offer as SQL has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferView {
    pub sku_id: String,
    pub title: String,
    pub price_minor: i64,
    pub currency: String,
    pub total: i64,
    pub reserved: i64,
    pub sold: i64,
    pub max_orders: i32,
    pub max_quantity: i32,
    pub hold: Option<Duration>,
    pub segments: i32,
    pub epoch: i64,
    pub warm_time: Option<TimeMs>,
}

/// What the engine has of one offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StockView {
    pub sku_id: String,
    pub total: u64,
    pub remaining: u64,
    /// Units in reservations.
    pub reserved: u64,
    /// Reservations, not units.
    pub unacked: u64,
    pub epoch: u64,
    pub revision: u64,
    /// Why the offer sells nothing now, in one word.
    pub frozen: Option<String>,
}

/// What a warm-up came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmUpReport {
    pub activity: ActivityView,
    /// By `sku_id`.
    pub stocks: Vec<StockView>,
    pub already_warm: bool,
}

/// Which activities to list, newest start first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivityListQuery {
    pub page_size: u32,
    /// Opaque; empty for the first page.
    pub page_token: String,
    pub state: Option<ActivityState>,
}

/// How much work is on its way; a figure is `None` while its store is away.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PipelineStatus {
    pub unacked: Option<u64>,
    pub outbox_due: Option<i64>,
    pub outbox_pending: Option<i64>,
    pub outbox_releasing: Option<i64>,
    pub outbox_dead: Option<i64>,
    /// Orders that are not cancelled.
    pub orders: Option<i64>,
    pub oldest_pending_age: Option<Duration>,
    pub engine_kind: &'static str,
    pub engine_healthy: bool,
    pub database_kind: &'static str,
    pub database_healthy: bool,
    /// By `sku_id`, when one activity was asked for.
    pub offers: Vec<OfferPipeline>,
}

/// The pipeline of one offer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OfferPipeline {
    pub sku_id: String,
    pub total: i64,
    pub remaining: Option<u64>,
    pub reserved_sql: i64,
    pub sold: i64,
    pub unacked: Option<u64>,
    pub pending: i64,
    pub releasing: i64,
    pub dead: i64,
    pub orders_live: i64,
    pub epoch: i64,
    pub frozen: bool,
}

/// Which offers to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchRequest {
    pub activity_id: ActivityId,
    /// Distinct; empty means all.
    pub sku_ids: Vec<SkuId>,
    pub min_interval: Duration,
}

/// The stock of one offer at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StockUpdate {
    pub activity_id: ActivityId,
    pub sku_id: SkuId,
    pub total: u64,
    pub remaining: u64,
    pub reserved: u64,
    pub state: ActivityState,
    pub epoch: u64,
    pub revision: u64,
    pub snapshot: bool,
    pub heartbeat: bool,
    pub observe_time: TimeMs,
}
