//! All validation: a message comes in, a checked domain type or every violation comes out; and
//! the way back, from domain views to messages.
//!
//! The limits are those of the `Limit:` lines in the proto files; a test compares them. Texts in
//! violations never repeat what the caller sent, only its length or the place of the fault.

mod answers;
#[cfg(test)]
mod any;
mod check;
#[cfg(test)]
mod tests;

use std::{net::IpAddr, time::Duration};

pub use answers::{release_response, reservation_response};
use check::Check;

use super::pb;
use crate::{
    domain::{
        ActivityId, ActivityListQuery, ActivitySpec, ActivityState, AdjustRequest, BuyerId,
        ConfirmRequest, MAX_OFFERS, MAX_ORDERS_PER_USER, MAX_QUANTITY, MAX_SEGMENTS, MAX_TOTAL,
        OfferSpec, PageQuery, ReleaseRequest, RequestId, ReservationId, ReservationQuery,
        ReserveRequest, SkuId, WatchRequest,
    },
    error::Error,
};

/// The longest title, in characters.
pub const MAX_TITLE_CHARS: usize = 200;
/// The longest reason, in characters.
pub const MAX_REASON_CHARS: usize = 200;
/// The highest price of one unit, in minor units of its currency.
pub const MAX_PRICE_MINOR: u64 = MAX_TOTAL;
/// The length of a currency code.
pub const CURRENCY_LEN: usize = 3;
/// How long the engine may keep its data of an activity after its end.
pub const MIN_RETENTION: Duration = Duration::from_secs(3_600);
/// See [`MIN_RETENTION`].
pub const MAX_RETENTION: Duration = Duration::from_secs(7_776_000);
/// The retention of an activity that names none.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(604_800);
/// The longest that an order may stay unconfirmed.
pub const MAX_HOLD: Duration = Duration::from_secs(7_776_000);
/// The most entries in a page.
pub const MAX_PAGE_SIZE: u32 = 1_000;
/// The entries in a page of a list whose caller names no number.
pub const DEFAULT_PAGE_SIZE: u32 = 50;
/// The longest page token, in bytes.
pub const MAX_PAGE_TOKEN_LEN: usize = 1_024;
/// The most SKUs that one stream may name.
pub const MAX_WATCHED: usize = 10_000;
/// The longest `min_interval` of a stream.
pub const MAX_MIN_INTERVAL: Duration = Duration::from_secs(60);

/// Reads a ReserveRequest. `is_repeat` is what the client library says about the call, `address`
/// where it comes from.
///
/// # Errors
/// `InvalidField` with every violation; so do all functions below.
pub fn reserve(
    request: &pb::ReserveRequest,
    is_repeat: bool,
    address: Option<IpAddr>,
) -> Result<ReserveRequest, Error> {
    let mut check = Check::default();
    let offer = check.offer("", &request.activity_id, &request.sku_id);
    let buyer = check.id("user_id", &request.user_id, BuyerId::new);
    let quantity = check.number("quantity", request.quantity, 1, MAX_QUANTITY);
    let request_id = match request.request_id.as_str() {
        "" => None,
        text => check.id("request_id", text, RequestId::new),
    };
    check.finish(|| {
        Some(ReserveRequest {
            offer: offer?,
            buyer: buyer?,
            quantity: quantity?,
            request_id,
            is_repeat,
            address,
        })
    })
}

/// Reads a ReleaseRequest.
pub fn release(request: pb::ReleaseRequest) -> Result<ReleaseRequest, Error> {
    let mut check = Check::default();
    let offer = check.offer("", &request.activity_id, &request.sku_id);
    let buyer = check.id("user_id", &request.user_id, BuyerId::new);
    let reservation_id = check.id("reservation_id", &request.reservation_id, ReservationId::new);
    check.text(format_args!("reason"), &request.reason, 0, MAX_REASON_CHARS);
    check.finish(|| {
        Some(ReleaseRequest {
            offer: offer?,
            buyer: buyer?,
            reservation_id: reservation_id?,
            reason: request.reason,
        })
    })
}

/// Reads a ConfirmRequest.
pub fn confirm(request: &pb::ConfirmRequest) -> Result<ConfirmRequest, Error> {
    let mut check = Check::default();
    let offer = check.offer("", &request.activity_id, &request.sku_id);
    let buyer = check.id("user_id", &request.user_id, BuyerId::new);
    let reservation_id = check.id("reservation_id", &request.reservation_id, ReservationId::new);
    check.finish(|| {
        Some(ConfirmRequest { offer: offer?, buyer: buyer?, reservation_id: reservation_id? })
    })
}

/// Reads a GetReservationRequest.
pub fn reservation_query(request: &pb::GetReservationRequest) -> Result<ReservationQuery, Error> {
    use pb::get_reservation_request::By;

    let mut check = Check::default();
    match &request.by {
        None => Err(Error::invalid("by", "must be set: reservation_id or key")),
        Some(By::ReservationId(text)) => {
            let id = check.id("reservation_id", text, ReservationId::new);
            check.finish(|| Some(ReservationQuery::ById(id?)))
        }
        Some(By::Key(key)) => {
            let offer = check.offer("key.", &key.activity_id, &key.sku_id);
            let buyer = check.id("key.user_id", &key.user_id, BuyerId::new);
            let request_id = check.id("key.request_id", &key.request_id, RequestId::new);
            check.finish(|| {
                Some(ReservationQuery::ByRequest {
                    offer: offer?,
                    buyer: buyer?,
                    request_id: request_id?,
                })
            })
        }
    }
}

/// Reads a WatchStockRequest. A SKU that is named twice is watched once.
pub fn watch(request: &pb::WatchStockRequest) -> Result<WatchRequest, Error> {
    let mut check = Check::default();
    let activity_id = check.id("activity_id", &request.activity_id, ActivityId::new);
    let mut sku_ids = Vec::new();
    if check.count("sku_ids", request.sku_ids.len(), 0, MAX_WATCHED) {
        for (at, text) in request.sku_ids.iter().enumerate() {
            sku_ids.extend(check.id_at(format_args!("sku_ids[{at}]"), text, SkuId::new));
        }
    }
    sku_ids.sort_unstable();
    sku_ids.dedup();
    let min_interval = match &request.min_interval {
        None => Some(Duration::ZERO),
        Some(given) => {
            check.span(format_args!("min_interval"), given, Duration::ZERO, MAX_MIN_INTERVAL)
        }
    };
    check.finish(|| {
        Some(WatchRequest { activity_id: activity_id?, sku_ids, min_interval: min_interval? })
    })
}

/// Reads the `activity_id` of a request that has nothing else.
pub fn activity_id(text: &str) -> Result<ActivityId, Error> {
    let mut check = Check::default();
    let id = check.id("activity_id", text, ActivityId::new);
    check.finish(|| id)
}

/// Reads the `activity_id` and the `reason` of a request that moves an activity.
pub fn activity_move(text: &str, reason: &str) -> Result<ActivityId, Error> {
    let mut check = Check::default();
    let id = check.id("activity_id", text, ActivityId::new);
    check.text(format_args!("reason"), reason, 0, MAX_REASON_CHARS);
    check.finish(|| id)
}

/// Reads a ListActivitiesRequest. Whether the token is one of ours, the list itself must say.
pub fn activity_list(request: pb::ListActivitiesRequest) -> Result<ActivityListQuery, Error> {
    let mut check = Check::default();
    let page_size = check.page_size(request.page_size);
    check.page_token(&request.page_token);
    let state = match pb::ActivityState::try_from(request.state) {
        Ok(state) => activity_state_filter(state),
        Err(_) => {
            check.fail(
                format_args!("state"),
                format_args!("must be a member of ActivityState (it is {})", request.state),
            );
            None
        }
    };
    check.finish(|| {
        Some(ActivityListQuery { page_size: page_size?, page_token: request.page_token, state })
    })
}

fn activity_state_filter(state: pb::ActivityState) -> Option<ActivityState> {
    match state {
        pb::ActivityState::Unspecified => None,
        pb::ActivityState::PendingReview => Some(ActivityState::PendingReview),
        pb::ActivityState::Scheduled => Some(ActivityState::Scheduled),
        pb::ActivityState::Active => Some(ActivityState::Active),
        pb::ActivityState::Paused => Some(ActivityState::Paused),
        pb::ActivityState::Ended => Some(ActivityState::Ended),
        pb::ActivityState::Settled => Some(ActivityState::Settled),
    }
}

/// Reads a CreateActivityRequest, fills in the defaults, and sorts the offers.
pub fn activity_spec(request: pb::CreateActivityRequest) -> Result<ActivitySpec, Error> {
    let Some(spec) = request.spec else {
        return Err(Error::invalid("spec", "must be set"));
    };
    let mut check = Check::default();
    let activity_id = check.id("spec.activity_id", &spec.activity_id, ActivityId::new);
    check.text(format_args!("spec.title"), &spec.title, 1, MAX_TITLE_CHARS);
    let start_time = check.time("spec.start_time", spec.start_time.as_ref());
    let end_time = check.time("spec.end_time", spec.end_time.as_ref());
    if let (Some(start), Some(end)) = (start_time, end_time)
        && end <= start
    {
        let path = format_args!("spec.end_time");
        check.fail(path, "must be after start_time, by a millisecond or more");
    }
    let retention = match &spec.retention {
        None => Some(DEFAULT_RETENTION),
        Some(given) => {
            let path = format_args!("spec.retention");
            check.whole_seconds(path, given, MIN_RETENTION, MAX_RETENTION)
        }
    };
    let mut offers = Vec::new();
    if check.count("spec.offers", spec.offers.len(), 1, MAX_OFFERS) {
        check.distinct_skus(&spec.offers);
        offers = Vec::with_capacity(spec.offers.len());
        for (at, offer) in spec.offers.into_iter().enumerate() {
            offers.extend(offer_spec(&mut check, at, offer));
        }
        offers.sort_unstable_by(|a, b| a.sku_id.cmp(&b.sku_id));
    }
    check.finish(|| {
        Some(ActivitySpec {
            activity_id: activity_id?,
            title: spec.title,
            start_time: start_time?,
            end_time: end_time?,
            retention: retention?,
            offers,
        })
    })
}

fn offer_spec(check: &mut Check, at: usize, spec: pb::OfferSpec) -> Option<OfferSpec> {
    macro_rules! path {
        ($field:literal) => {
            format_args!(concat!("spec.offers[{}].", $field), at)
        };
    }
    let sku_id = check.id_at(path!("sku_id"), &spec.sku_id, SkuId::new);
    check.text(path!("title"), &spec.title, 1, MAX_TITLE_CHARS);
    let price = check.range(path!("price_minor"), spec.price_minor, 0, MAX_PRICE_MINOR);
    let code = spec.currency_code.as_bytes();
    if code.len() != CURRENCY_LEN || !code.iter().all(u8::is_ascii_uppercase) {
        let rule = format_args!("must be {CURRENCY_LEN} of A-Z (it has {} bytes)", code.len());
        check.fail(path!("currency_code"), rule);
    }
    let total = check.range(path!("total"), spec.total, 1, MAX_TOTAL);
    let max_orders = check.number_at(
        path!("max_orders_per_user"),
        spec.max_orders_per_user,
        1,
        MAX_ORDERS_PER_USER,
    );
    let max_quantity = check.number_at(
        path!("max_quantity_per_order"),
        spec.max_quantity_per_order,
        1,
        MAX_QUANTITY,
    );
    let hold = match &spec.hold {
        None => Some(Duration::ZERO),
        Some(given) => check.whole_seconds(path!("hold"), given, Duration::ZERO, MAX_HOLD),
    };
    let segments = check.number_at(path!("segments"), spec.segments, 1, MAX_SEGMENTS);
    Some(OfferSpec {
        sku_id: sku_id?,
        title: spec.title,
        price_minor: i64::try_from(price?).ok()?,
        currency: spec.currency_code,
        total: total?,
        max_orders: max_orders?,
        max_quantity: max_quantity?,
        hold: Some(hold?).filter(|hold| !hold.is_zero()),
        segments: segments?,
    })
}

/// Reads an AdjustStockRequest.
pub fn adjust_stock(request: pb::AdjustStockRequest) -> Result<AdjustRequest, Error> {
    let mut check = Check::default();
    let offer = check.offer("", &request.activity_id, &request.sku_id);
    let delta = request.delta;
    if delta == 0 || delta.unsigned_abs() > MAX_TOTAL {
        let rule = format_args!("must be -{MAX_TOTAL} to {MAX_TOTAL}, and not 0 (it is {delta})");
        check.fail(format_args!("delta"), rule);
    }
    let request_id = check.id("request_id", &request.request_id, RequestId::new);
    check.text(format_args!("reason"), &request.reason, 0, MAX_REASON_CHARS);
    check.finish(|| {
        Some(AdjustRequest {
            offer: offer?,
            delta,
            request_id: request_id?,
            reason: request.reason,
        })
    })
}

/// Reads a RebuildStockRequest: the activity, the offer unless all are meant, and the number of
/// segments unless it stays.
pub fn rebuild_stock(
    request: &pb::RebuildStockRequest,
) -> Result<(ActivityId, Option<SkuId>, Option<u32>), Error> {
    let mut check = Check::default();
    let activity_id = check.id("activity_id", &request.activity_id, ActivityId::new);
    let sku_id = match request.sku_id.as_str() {
        "" => Some(None),
        text => check.id("sku_id", text, SkuId::new).map(Some),
    };
    check.text(format_args!("reason"), &request.reason, 0, MAX_REASON_CHARS);
    let segments = check.number("segments", Some(request.segments), 0, MAX_SEGMENTS);
    check.finish(|| Some((activity_id?, sku_id?, Some(segments?).filter(|&segments| segments > 0))))
}

/// Reads the `reservation_id` and the `reason` of what is done with a dead letter.
pub fn dead_letter(text: &str, reason: &str) -> Result<ReservationId, Error> {
    let mut check = Check::default();
    let id = check.id("reservation_id", text, ReservationId::new);
    check.text(format_args!("reason"), reason, 0, MAX_REASON_CHARS);
    check.finish(|| id)
}

/// Reads one page of a list by id, of all activities or of one.
pub fn page(
    page_size: i32,
    page_token: String,
    activity_id: Option<&str>,
) -> Result<PageQuery, Error> {
    let mut check = Check::default();
    let page_size = check.page_size(page_size);
    check.page_token(&page_token);
    let activity_id = match activity_id {
        None => Some(None),
        Some(text) => check.id("activity_id", text, ActivityId::new).map(Some),
    };
    check
        .finish(|| Some(PageQuery { page_size: page_size?, page_token, activity_id: activity_id? }))
}

/// Reads the `activity_id` of a GetPipelineStatusRequest.
pub fn pipeline_status(
    request: &pb::GetPipelineStatusRequest,
) -> Result<Option<ActivityId>, Error> {
    request.activity_id.as_deref().map(activity_id).transpose()
}
