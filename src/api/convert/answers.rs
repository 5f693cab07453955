//! Domain views as messages.

use std::time::Duration;

use prost_types::{Duration as PbDuration, Timestamp};

use crate::{
    api::pb,
    domain::{
        ActivityState, ActivityView, Adjusted, AuditView, ConfirmOutcome, DeadLetterView,
        Difference, DifferenceKind, OfferFigures, OfferPipeline, OfferView, PipelineStatus,
        ReconcileReport, RefusedBecause, ReleaseOutcome, Reservation, ReservationState,
        ReserveOutcome, SegmentFigures, StockUpdate, StockView, TimeMs, WarmUpReport,
    },
};

impl From<ReserveOutcome> for pb::ReserveResponse {
    fn from(outcome: ReserveOutcome) -> Self {
        use pb::ReserveOutcome as Pb;

        let answer = |outcome: Pb| Self { outcome: outcome.into(), ..Self::default() };
        match outcome {
            ReserveOutcome::NotStarted => answer(Pb::NotStarted),
            ReserveOutcome::Paused => answer(Pb::Paused),
            ReserveOutcome::Ended => answer(Pb::Ended),
            ReserveOutcome::QuantityLimit { max: _ } => answer(Pb::QuantityLimit),
            ReserveOutcome::NotWarmed => answer(Pb::NotWarmed),
            ReserveOutcome::Reserved { reservation, replayed, remaining } => Self {
                reservation: Some(reservation.into()),
                replayed,
                remaining: remaining.map(int64),
                ..answer(Pb::Reserved)
            },
            ReserveOutcome::Released => answer(Pb::Released),
            ReserveOutcome::Duplicate { existing } => {
                Self { existing_reservation: existing.map(Into::into), ..answer(Pb::Duplicate) }
            }
            ReserveOutcome::SoldOut => Self { remaining: Some(0), ..answer(Pb::SoldOut) },
            ReserveOutcome::Insufficient { remaining } => {
                Self { remaining: Some(int64(remaining)), ..answer(Pb::Insufficient) }
            }
        }
    }
}

/// The answer to a Release.
#[must_use]
pub fn release_response(outcome: ReleaseOutcome, remaining: Option<u64>) -> pb::ReleaseResponse {
    use pb::ReleaseOutcome as Pb;

    let outcome = match outcome {
        ReleaseOutcome::Released => Pb::Released,
        ReleaseOutcome::AlreadyReleased => Pb::AlreadyReleased,
        ReleaseOutcome::NotReserved => Pb::NotReserved,
        ReleaseOutcome::WrongOwner => Pb::WrongOwner,
        ReleaseOutcome::Confirmed => Pb::Confirmed,
    };
    pb::ReleaseResponse { outcome: outcome.into(), remaining: remaining.map(int64) }
}

impl From<ConfirmOutcome> for pb::ConfirmResponse {
    fn from(outcome: ConfirmOutcome) -> Self {
        use pb::ConfirmOutcome as Pb;

        let (outcome, reservation) = match outcome {
            ConfirmOutcome::Confirmed(reservation) => (Pb::Confirmed, Some(reservation.into())),
            ConfirmOutcome::Expired => (Pb::Expired, None),
            ConfirmOutcome::Released => (Pb::Released, None),
            ConfirmOutcome::NotReserved => (Pb::NotReserved, None),
            ConfirmOutcome::WrongOwner => (Pb::WrongOwner, None),
            ConfirmOutcome::NotOrderedYet => (Pb::NotOrderedYet, None),
        };
        Self { outcome: outcome.into(), reservation }
    }
}

/// The answer to a GetReservation.
#[must_use]
pub fn reservation_response(
    reservation: Reservation,
    refused: Option<RefusedBecause>,
) -> pb::GetReservationResponse {
    let refusal = match refused {
        None => pb::ReserveOutcome::Unspecified,
        Some(RefusedBecause::Duplicate) => pb::ReserveOutcome::Duplicate,
        Some(RefusedBecause::SoldOut) => pb::ReserveOutcome::SoldOut,
    };
    pb::GetReservationResponse { reservation: Some(reservation.into()), refusal: refusal.into() }
}

impl From<Reservation> for pb::Reservation {
    fn from(reservation: Reservation) -> Self {
        Self {
            reservation_id: reservation.reservation_id.as_str().to_owned(),
            order_no: reservation.order_no.as_str().to_owned(),
            activity_id: reservation.offer.activity_id.as_str().to_owned(),
            sku_id: reservation.offer.sku_id.as_str().to_owned(),
            user_id: reservation.buyer.as_str().to_owned(),
            quantity: int32(reservation.quantity),
            state: pb::ReservationState::from(reservation.state).into(),
            reserve_time: Some(timestamp(reservation.reserve_time)),
            expire_time: reservation.expire_time.map(timestamp),
        }
    }
}

impl From<ReservationState> for pb::ReservationState {
    fn from(state: ReservationState) -> Self {
        match state {
            ReservationState::Held => Self::Held,
            ReservationState::Queued => Self::Queued,
            ReservationState::Ordered => Self::Ordered,
            ReservationState::Confirmed => Self::Confirmed,
            ReservationState::Released => Self::Released,
            ReservationState::Refused => Self::Refused,
            ReservationState::Dead => Self::Dead,
        }
    }
}

impl From<ActivityState> for pb::ActivityState {
    fn from(state: ActivityState) -> Self {
        match state {
            ActivityState::PendingReview => Self::PendingReview,
            ActivityState::Scheduled => Self::Scheduled,
            ActivityState::Active => Self::Active,
            ActivityState::Paused => Self::Paused,
            ActivityState::Ended => Self::Ended,
            ActivityState::Settled => Self::Settled,
        }
    }
}

impl From<ActivityView> for pb::Activity {
    fn from(view: ActivityView) -> Self {
        Self {
            activity_id: view.activity_id,
            title: view.title,
            state: pb::ActivityState::from(view.state).into(),
            start_time: Some(timestamp(view.start_time)),
            end_time: Some(timestamp(view.end_time)),
            retention: Some(duration(view.retention)),
            version: view.version,
            create_time: Some(timestamp(view.create_time)),
            update_time: Some(timestamp(view.update_time)),
            offers: view.offers.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<OfferView> for pb::Offer {
    fn from(view: OfferView) -> Self {
        Self {
            sku_id: view.sku_id,
            title: view.title,
            price_minor: view.price_minor,
            currency_code: view.currency,
            total: view.total,
            reserved: view.reserved,
            sold: view.sold,
            max_orders_per_user: view.max_orders,
            max_quantity_per_order: view.max_quantity,
            hold: view.hold.map(duration),
            segments: view.segments,
            epoch: view.epoch,
            warm_time: view.warm_time.map(timestamp),
        }
    }
}

impl From<Adjusted> for pb::AdjustStockResponse {
    fn from(adjusted: Adjusted) -> Self {
        let Adjusted { offer, possible, applied } = adjusted;
        Self { offer: Some(offer.into()), possible, applied }
    }
}

impl From<StockView> for pb::OfferStock {
    fn from(view: StockView) -> Self {
        Self {
            sku_id: view.sku_id,
            total: int64(view.total),
            remaining: int64(view.remaining),
            reserved: int64(view.reserved),
            unacked: int64(view.unacked),
            epoch: int64(view.epoch),
            revision: int64(view.revision),
            frozen: view.frozen.is_some(),
            frozen_reason: view.frozen.unwrap_or_default(),
        }
    }
}

impl From<WarmUpReport> for pb::WarmupResponse {
    fn from(report: WarmUpReport) -> Self {
        Self {
            activity: Some(report.activity.into()),
            offers: report.stocks.into_iter().map(Into::into).collect(),
            already_warm: report.already_warm,
        }
    }
}

impl From<PipelineStatus> for pb::GetPipelineStatusResponse {
    fn from(status: PipelineStatus) -> Self {
        Self {
            unacked: status.unacked.map(int64),
            outbox_due: status.outbox_due,
            outbox_pending: status.outbox_pending,
            outbox_releasing: status.outbox_releasing,
            outbox_dead: status.outbox_dead,
            orders: status.orders,
            oldest_pending_age: status.oldest_pending_age.map(duration),
            engine_kind: status.engine_kind.to_owned(),
            engine_healthy: status.engine_healthy,
            database_kind: status.database_kind.to_owned(),
            database_healthy: status.database_healthy,
            offers: status.offers.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<OfferPipeline> for pb::OfferPipeline {
    fn from(offer: OfferPipeline) -> Self {
        Self {
            sku_id: offer.sku_id,
            total: offer.total,
            remaining: offer.remaining.map(int64),
            reserved_sql: offer.reserved_sql,
            sold: offer.sold,
            unacked: offer.unacked.map(int64),
            pending: offer.pending,
            releasing: offer.releasing,
            dead: offer.dead,
            orders_live: offer.orders_live,
            epoch: offer.epoch,
            frozen: offer.frozen,
        }
    }
}

impl From<AuditView> for pb::AuditEntry {
    fn from(view: AuditView) -> Self {
        Self {
            audit_id: view.audit_id,
            create_time: Some(timestamp(view.create_time)),
            actor: view.actor,
            action: view.action,
            activity_id: view.activity_id,
            sku_id: view.sku_id,
            detail: view.detail,
        }
    }
}

impl From<DeadLetterView> for pb::DeadLetter {
    fn from(view: DeadLetterView) -> Self {
        Self {
            reservation: Some(view.reservation.into()),
            attempts: view.attempts,
            last_error: view.last_error,
            create_time: Some(timestamp(view.create_time)),
            fail_time: Some(timestamp(view.fail_time)),
        }
    }
}

impl From<ReconcileReport> for pb::ReconcileReport {
    fn from(report: ReconcileReport) -> Self {
        Self {
            activity_id: report.activity_id,
            observe_time: Some(timestamp(report.observe_time)),
            offers_checked: i32::try_from(report.offers.len()).unwrap_or(i32::MAX),
            differences: report.differences.into_iter().map(Into::into).collect(),
            difference_count: int64(report.difference_count),
            unacked: int64(report.unacked),
            pending: int64(report.pending),
            releasing: int64(report.releasing),
            dead: int64(report.dead),
            offers: report.offers.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<OfferFigures> for pb::OfferFigures {
    fn from(figures: OfferFigures) -> Self {
        Self {
            sku_id: figures.sku_id,
            total: figures.total,
            segments: figures.segments.into_iter().map(Into::into).collect(),
            recorded: figures.recorded,
            ordered: figures.ordered,
            epoch: figures.epoch,
        }
    }
}

impl From<SegmentFigures> for pb::SegmentFigures {
    fn from(figures: SegmentFigures) -> Self {
        Self {
            segment: int32(figures.segment),
            remaining: int64(figures.remaining),
            in_transfer: int64(figures.in_transfer),
            held: int64(figures.held),
        }
    }
}

impl From<Difference> for pb::Difference {
    fn from(difference: Difference) -> Self {
        Self {
            kind: pb::DifferenceKind::from(difference.kind).into(),
            sku_id: difference.sku_id,
            reservation_ids: difference.reservation_ids,
            reservation_count: int64(difference.reservation_count),
            expected: difference.expected,
            actual: difference.actual,
            detail: difference.detail,
            repaired: difference.repaired,
        }
    }
}

impl From<DifferenceKind> for pb::DifferenceKind {
    fn from(kind: DifferenceKind) -> Self {
        match kind {
            DifferenceKind::TakenNotRecorded => Self::TakenNotRecorded,
            DifferenceKind::RecordedNotTaken => Self::RecordedNotTaken,
            DifferenceKind::OrderWithoutRow => Self::OrderWithoutRow,
            DifferenceKind::RowWithoutOrder => Self::RowWithoutOrder,
            DifferenceKind::ReleasedStillHeld => Self::ReleasedStillHeld,
            DifferenceKind::CounterDrift => Self::CounterDrift,
            DifferenceKind::UnitsMissing => Self::UnitsMissing,
            DifferenceKind::UnitsExcess => Self::UnitsExcess,
            DifferenceKind::NegativeStock => Self::NegativeStock,
            DifferenceKind::Oversold => Self::Oversold,
        }
    }
}

impl From<StockUpdate> for pb::WatchStockResponse {
    fn from(update: StockUpdate) -> Self {
        Self {
            activity_id: update.activity_id.as_str().to_owned(),
            sku_id: update.sku_id.as_str().to_owned(),
            total: int64(update.total),
            remaining: int64(update.remaining),
            reserved: int64(update.reserved),
            state: pb::ActivityState::from(update.state).into(),
            epoch: int64(update.epoch),
            revision: int64(update.revision),
            snapshot: update.snapshot,
            heartbeat: update.heartbeat,
            observe_time: Some(timestamp(update.observe_time)),
        }
    }
}

fn timestamp(time: TimeMs) -> Timestamp {
    let millis = i32::try_from(time.0.rem_euclid(1_000)).expect("a remainder of 1,000 is small");
    Timestamp { seconds: time.0.div_euclid(1_000), nanos: millis * 1_000_000 }
}

fn duration(span: Duration) -> PbDuration {
    let nanos = i32::try_from(span.subsec_nanos()).expect("there are 10^9 nanoseconds in a second");
    PbDuration { seconds: int64(span.as_secs()), nanos }
}

/// Figures are at most 2^53 - 1, so this never cuts one.
fn int64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Quantities are at most 1,000, so this never cuts one.
fn int32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
