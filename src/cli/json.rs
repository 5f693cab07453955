//! Answers as JSON: the fields of the contract under their names there, enum values without
//! prefix, times in RFC 3339, spans in seconds as in `900s`; what is unset is null.

use prost_types::{Duration, Timestamp};
use serde_json::{Value, json};

use crate::api::pb;

pub(super) fn activity(activity: &pb::Activity) -> Value {
    let mut value = activity_line(activity);
    value["offers"] = activity.offers.iter().map(offer).collect();
    value
}

/// An activity without its offers.
pub(super) fn activity_line(activity: &pb::Activity) -> Value {
    json!({
        "activity_id": activity.activity_id,
        "title": activity.title,
        "state": activity_state(activity.state),
        "start_time": time(activity.start_time.as_ref()),
        "end_time": time(activity.end_time.as_ref()),
        "retention": span(activity.retention.as_ref()),
        "version": activity.version,
        "create_time": time(activity.create_time.as_ref()),
        "update_time": time(activity.update_time.as_ref()),
    })
}

pub(super) fn offer(offer: &pb::Offer) -> Value {
    json!({
        "sku_id": offer.sku_id,
        "title": offer.title,
        "price_minor": offer.price_minor,
        "currency_code": offer.currency_code,
        "total": offer.total,
        "reserved": offer.reserved,
        "sold": offer.sold,
        "max_orders_per_user": offer.max_orders_per_user,
        "max_quantity_per_order": offer.max_quantity_per_order,
        "hold": span(offer.hold.as_ref()),
        "segments": offer.segments,
        "epoch": offer.epoch,
        "warm_time": time(offer.warm_time.as_ref()),
    })
}

pub(super) fn offer_stock(stock: &pb::OfferStock) -> Value {
    json!({
        "sku_id": stock.sku_id,
        "total": stock.total,
        "remaining": stock.remaining,
        "reserved": stock.reserved,
        "unacked": stock.unacked,
        "epoch": stock.epoch,
        "revision": stock.revision,
        "frozen": stock.frozen,
        "frozen_reason": stock.frozen_reason,
    })
}

pub(super) fn reservation(reservation: &pb::Reservation) -> Value {
    json!({
        "reservation_id": reservation.reservation_id,
        "order_no": reservation.order_no,
        "activity_id": reservation.activity_id,
        "sku_id": reservation.sku_id,
        "user_id": reservation.user_id,
        "quantity": reservation.quantity,
        "state": reservation_state(reservation.state),
        "reserve_time": time(reservation.reserve_time.as_ref()),
        "expire_time": time(reservation.expire_time.as_ref()),
    })
}

pub(super) fn stock_update(update: &pb::WatchStockResponse) -> Value {
    json!({
        "activity_id": update.activity_id,
        "sku_id": update.sku_id,
        "total": update.total,
        "remaining": update.remaining,
        "reserved": update.reserved,
        "state": activity_state(update.state),
        "epoch": update.epoch,
        "revision": update.revision,
        "snapshot": update.snapshot,
        "heartbeat": update.heartbeat,
        "observe_time": time(update.observe_time.as_ref()),
    })
}

pub(super) fn pipeline(status: &pb::GetPipelineStatusResponse) -> Value {
    json!({
        "unacked": status.unacked,
        "outbox_due": status.outbox_due,
        "outbox_pending": status.outbox_pending,
        "outbox_releasing": status.outbox_releasing,
        "outbox_dead": status.outbox_dead,
        "orders": status.orders,
        "oldest_pending_age": span(status.oldest_pending_age.as_ref()),
        "engine_kind": status.engine_kind,
        "engine_healthy": status.engine_healthy,
        "database_kind": status.database_kind,
        "database_healthy": status.database_healthy,
        "offers": status.offers.iter().map(offer_pipeline).collect::<Value>(),
    })
}

fn offer_pipeline(offer: &pb::OfferPipeline) -> Value {
    json!({
        "sku_id": offer.sku_id,
        "total": offer.total,
        "remaining": offer.remaining,
        "reserved_sql": offer.reserved_sql,
        "sold": offer.sold,
        "unacked": offer.unacked,
        "pending": offer.pending,
        "releasing": offer.releasing,
        "dead": offer.dead,
        "orders_live": offer.orders_live,
        "epoch": offer.epoch,
        "frozen": offer.frozen,
    })
}

/// Makes a function that names the values of an enum, without the prefix that they share.
macro_rules! names {
    ($($name:ident: $kind:ty = $prefix:literal;)*) => {
        $(
            pub(super) fn $name(value: i32) -> String {
                match <$kind>::try_from(value) {
                    Ok(value) => {
                        let name = value.as_str_name();
                        name.strip_prefix($prefix).unwrap_or(name).to_owned()
                    }
                    // A newer server has more of them.
                    Err(_) => format!("UNKNOWN_{value}"),
                }
            }
        )*
    };
}

names! {
    activity_state: pb::ActivityState = "ACTIVITY_STATE_";
    reservation_state: pb::ReservationState = "RESERVATION_STATE_";
    reserve_outcome: pb::ReserveOutcome = "RESERVE_OUTCOME_";
    release_outcome: pb::ReleaseOutcome = "RELEASE_OUTCOME_";
    confirm_outcome: pb::ConfirmOutcome = "CONFIRM_OUTCOME_";
    difference_kind: pb::DifferenceKind = "DIFFERENCE_KIND_";
}

pub(super) fn time(time: Option<&Timestamp>) -> Option<String> {
    time.map(ToString::to_string)
}

fn span(span: Option<&Duration>) -> Option<String> {
    span.map(ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_no_prefix_and_times_are_rfc_3339() {
        let reserved = pb::Reservation {
            reservation_id: "r-1".to_owned(),
            state: pb::ReservationState::Queued.into(),
            reserve_time: "2026-11-11T00:00:00.250Z".parse().ok(),
            ..pb::Reservation::default()
        };
        let value = reservation(&reserved);
        assert_eq!(value["state"], "QUEUED");
        assert_eq!(value["reserve_time"], "2026-11-11T00:00:00.250Z");
        assert_eq!(value["expire_time"], Value::Null);
        assert_eq!(reserve_outcome(99), "UNKNOWN_99");
        assert_eq!(span(Some(&Duration { seconds: 900, nanos: 0 })), Some("900s".to_owned()));
    }
}
