//! What operators see: the audit, dead letters, and the comparison of engine, outbox and orders.

use serde::Serialize;

use super::{OfferKey, OfferView, RequestId, Reservation, TimeMs};

/// One entry of the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditView {
    pub audit_id: i64,
    pub create_time: TimeMs,
    pub actor: String,
    pub action: String,
    /// Empty: it concerned none.
    pub activity_id: String,
    /// Empty: it concerned the whole activity.
    pub sku_id: String,
    /// A JSON object.
    pub detail: String,
}

/// More or fewer units of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdjustRequest {
    pub offer: OfferKey,
    /// Not 0.
    pub delta: i64,
    pub request_id: RequestId,
    /// For the audit.
    pub reason: String,
}

/// What an adjustment came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adjusted {
    /// The offer as SQL has it now.
    pub offer: OfferView,
    /// The delta, if it was applied; else the one nearest to it that could have been.
    pub possible: i64,
    /// The whole delta, or nothing.
    pub applied: bool,
}

/// A reservation that could not become an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetterView {
    pub reservation: Reservation,
    pub attempts: i32,
    pub last_error: String,
    pub create_time: TimeMs,
    /// When the last attempt failed.
    pub fail_time: TimeMs,
}

/// How engine, outbox and orders contradict each other; the proto file says more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceKind {
    TakenNotRecorded,
    RecordedNotTaken,
    OrderWithoutRow,
    RowWithoutOrder,
    ReleasedStillHeld,
    CounterDrift,
    UnitsMissing,
    UnitsExcess,
    NegativeStock,
    Oversold,
}

impl DifferenceKind {
    /// Every kind.
    pub const ALL: [Self; 10] = [
        Self::TakenNotRecorded,
        Self::RecordedNotTaken,
        Self::OrderWithoutRow,
        Self::RowWithoutOrder,
        Self::ReleasedStillHeld,
        Self::CounterDrift,
        Self::UnitsMissing,
        Self::UnitsExcess,
        Self::NegativeStock,
        Self::Oversold,
    ];

    /// As in JSON and in tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TakenNotRecorded => "taken_not_recorded",
            Self::RecordedNotTaken => "recorded_not_taken",
            Self::OrderWithoutRow => "order_without_row",
            Self::RowWithoutOrder => "row_without_order",
            Self::ReleasedStillHeld => "released_still_held",
            Self::CounterDrift => "counter_drift",
            Self::UnitsMissing => "units_missing",
            Self::UnitsExcess => "units_excess",
            Self::NegativeStock => "negative_stock",
            Self::Oversold => "oversold",
        }
    }

    /// Whether the database alone can decide it: by a rebuild, or by adding up counters anew. The
    /// rest needs a person.
    #[must_use]
    pub fn is_repairable(self) -> bool {
        match self {
            Self::TakenNotRecorded
            | Self::RecordedNotTaken
            | Self::ReleasedStillHeld
            | Self::CounterDrift
            | Self::UnitsMissing
            | Self::UnitsExcess
            | Self::NegativeStock => true,
            Self::OrderWithoutRow | Self::RowWithoutOrder | Self::Oversold => false,
        }
    }
}

/// One contradiction in one offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub kind: DifferenceKind,
    pub sku_id: String,
    /// Which reservations are behind it, at most [`Difference::MAX_NAMED`] of them.
    pub reservation_ids: Vec<String>,
    /// How many are behind it; 0: it is about a figure.
    pub reservation_count: u64,
    /// Units.
    pub expected: i64,
    pub actual: i64,
    /// A sentence for the operator.
    pub detail: String,
    pub repaired: bool,
}

impl Difference {
    /// The most reservations that one difference names.
    pub const MAX_NAMED: usize = 50;
}

/// Where the units of one segment are, as the engine has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SegmentFigures {
    pub segment: u32,
    /// Units that can still be reserved.
    pub remaining: u64,
    /// Units on their way to another segment.
    pub in_transfer: u64,
    /// Units of reservations.
    pub held: u64,
}

/// The figures of one offer, from each of the three books.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct OfferFigures {
    pub sku_id: String,
    /// Units, by the offer's row: `total = remaining + in transfer + held`.
    pub total: i64,
    /// Empty while the engine has nothing of the offer: before the warm-up, after the settlement.
    pub segments: Vec<SegmentFigures>,
    /// Units of outbox rows that hold units.
    pub recorded: i64,
    /// Units of orders that are not cancelled.
    pub ordered: i64,
    pub epoch: i64,
}

/// A comparison of engine, outbox and orders of one activity.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ReconcileReport {
    pub activity_id: String,
    #[serde(skip)]
    pub observe_time: TimeMs,
    /// By `sku_id`.
    pub offers: Vec<OfferFigures>,
    /// By `sku_id` and kind; at most [`ReconcileReport::MAX_LISTED`].
    pub differences: Vec<Difference>,
    pub difference_count: u64,
    /// In flight, and so no difference: between engine and outbox …
    pub unacked: u64,
    /// … between outbox and orders …
    pub pending: u64,
    /// … back into the engine …
    pub releasing: u64,
    /// … and waiting for an operator.
    pub dead: u64,
}

impl ReconcileReport {
    /// The most differences that a report lists.
    pub const MAX_LISTED: usize = 1_000;
}
