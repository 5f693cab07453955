//! All validation: a message comes in, a checked domain type or every violation comes out.
//!
//! The limits are those of the `Limit:` lines in the proto files; a test compares them. Texts in
//! violations never repeat what the caller sent, only its length or the place of the fault.

use std::{collections::HashMap, fmt, time::Duration};

use prost_types::{Duration as PbDuration, Timestamp};

use super::{pb, status::LISTED_VIOLATIONS};
use crate::{
    domain::{
        self, ActivityId, ActivityListQuery, ActivitySpec, ActivityState, ActivityView, BuyerId,
        ConfirmOutcome, ConfirmRequest, IdError, MAX_OFFERS, MAX_ORDERS_PER_USER, MAX_QUANTITY,
        MAX_SEGMENTS, MAX_TOTAL, OfferKey, OfferPipeline, OfferSpec, OfferView, PipelineStatus,
        RefusedBecause, ReleaseOutcome, ReleaseRequest, RequestId, Reservation, ReservationId,
        ReservationQuery, ReservationState, ReserveOutcome, ReserveRequest, SkuId, StockUpdate,
        StockView, TimeMs, WarmUpReport, WatchRequest,
    },
    error::{Error, Violation},
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
/// The most segments that an offer may have in this version; [`MAX_SEGMENTS`] is the contract's.
const SUPPORTED_SEGMENTS: u32 = 1;

// Requests.

/// Reads a ReserveRequest. `is_repeat` is what the client library says about the call.
///
/// # Errors
/// `InvalidField` with every violation; so do all functions below.
pub fn reserve(request: &pb::ReserveRequest, is_repeat: bool) -> Result<ReserveRequest, Error> {
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
        })
    })
}

/// Reads a ReleaseRequest.
pub fn release(request: pb::ReleaseRequest) -> Result<ReleaseRequest, Error> {
    let mut check = Check::default();
    let offer = check.offer("", &request.activity_id, &request.sku_id);
    let buyer = check.id("user_id", &request.user_id, BuyerId::new);
    let reservation_id = check.id(
        "reservation_id",
        &request.reservation_id,
        ReservationId::new,
    );
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
    let reservation_id = check.id(
        "reservation_id",
        &request.reservation_id,
        ReservationId::new,
    );
    check.finish(|| {
        Some(ConfirmRequest {
            offer: offer?,
            buyer: buyer?,
            reservation_id: reservation_id?,
        })
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
        Some(given) => check.span(
            format_args!("min_interval"),
            given,
            Duration::ZERO,
            MAX_MIN_INTERVAL,
        ),
    };
    check.finish(|| {
        Some(WatchRequest {
            activity_id: activity_id?,
            sku_ids,
            min_interval: min_interval?,
        })
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
    let page_size = match request.page_size {
        0 => Some(DEFAULT_PAGE_SIZE),
        given => check.number("page_size", Some(given), 0, MAX_PAGE_SIZE),
    };
    if request.page_token.len() > MAX_PAGE_TOKEN_LEN {
        check.fail(
            format_args!("page_token"),
            format_args!(
                "must be 0 to {MAX_PAGE_TOKEN_LEN} bytes (it has {})",
                request.page_token.len()
            ),
        );
    }
    let state = match pb::ActivityState::try_from(request.state) {
        Ok(state) => activity_state_filter(state),
        Err(_) => {
            check.fail(
                format_args!("state"),
                format_args!(
                    "must be a member of ActivityState (it is {})",
                    request.state
                ),
            );
            None
        }
    };
    check.finish(|| {
        Some(ActivityListQuery {
            page_size: page_size?,
            page_token: request.page_token,
            state,
        })
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
        let rule = format_args!(
            "must be {CURRENCY_LEN} of A-Z (it has {} bytes)",
            code.len()
        );
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
    if let Some(segments) = segments
        && segments > SUPPORTED_SEGMENTS
    {
        let rule = format_args!("must be {SUPPORTED_SEGMENTS} in this version (it is {segments})");
        check.fail(path!("segments"), rule);
    }
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

/// Reads the `activity_id` of a GetPipelineStatusRequest.
pub fn pipeline_status(
    request: &pb::GetPipelineStatusRequest,
) -> Result<Option<ActivityId>, Error> {
    request.activity_id.as_deref().map(activity_id).transpose()
}

/// The violations of one request, in the order in which they are found.
///
/// Only those that an answer lists are described. The others count, but stay without text: a
/// message of a few KiB can break thousands of rules.
#[derive(Debug, Default)]
struct Check {
    violations: Vec<Violation>,
}

impl Check {
    fn fail(&mut self, path: fmt::Arguments<'_>, rule: impl fmt::Display) {
        let violation = if self.violations.len() < LISTED_VIOLATIONS {
            Violation {
                field: path.to_string(),
                description: rule.to_string(),
            }
        } else {
            Violation {
                field: String::new(),
                description: String::new(),
            }
        };
        self.violations.push(violation);
    }

    /// The request, unless something was wrong; `build` must succeed when nothing was.
    fn finish<T>(self, build: impl FnOnce() -> Option<T>) -> Result<T, Error> {
        if !self.violations.is_empty() {
            return Err(Error::InvalidField(self.violations));
        }
        build().ok_or_else(|| Error::internal("a field is missing, and no check has said so"))
    }

    fn id<T>(
        &mut self,
        field: &str,
        text: &str,
        new: impl FnOnce(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        self.id_at(format_args!("{field}"), text, new)
    }

    fn id_at<T>(
        &mut self,
        path: fmt::Arguments<'_>,
        text: &str,
        new: impl FnOnce(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        new(text).map_err(|broken| self.fail(path, broken)).ok()
    }

    fn offer(&mut self, parent: &str, activity_id: &str, sku_id: &str) -> Option<OfferKey> {
        let activity_id = self.id_at(
            format_args!("{parent}activity_id"),
            activity_id,
            ActivityId::new,
        );
        let sku_id = self.id_at(format_args!("{parent}sku_id"), sku_id, SkuId::new);
        Some(OfferKey {
            activity_id: activity_id?,
            sku_id: sku_id?,
        })
    }

    fn number(&mut self, field: &str, given: Option<i32>, min: u32, max: u32) -> Option<u32> {
        self.number_at(format_args!("{field}"), given, min, max)
    }

    /// An optional number; unset is 1.
    fn number_at(
        &mut self,
        path: fmt::Arguments<'_>,
        given: Option<i32>,
        min: u32,
        max: u32,
    ) -> Option<u32> {
        let given = i64::from(given.unwrap_or(1));
        let number = self.range(path, given, min.into(), max.into())?;
        u32::try_from(number).ok()
    }

    fn range(&mut self, path: fmt::Arguments<'_>, given: i64, min: u64, max: u64) -> Option<u64> {
        let number = u64::try_from(given)
            .ok()
            .filter(|number| (min..=max).contains(number));
        if number.is_none() {
            self.fail(path, format_args!("must be {min} to {max} (it is {given})"));
        }
        number
    }

    fn count(&mut self, field: &str, len: usize, min: usize, max: usize) -> bool {
        let allowed = (min..=max).contains(&len);
        if !allowed {
            let rule = format_args!("must have {min} to {max} items (it has {len})");
            self.fail(format_args!("{field}"), rule);
        }
        allowed
    }

    fn text(&mut self, path: fmt::Arguments<'_>, text: &str, min: usize, max: usize) {
        let len = text.chars().count();
        if !(min..=max).contains(&len) {
            self.fail(
                path,
                format_args!("must be {min} to {max} characters (it has {len})"),
            );
        } else if let Some(at) = text.chars().position(char::is_control) {
            let rule = format_args!("may not hold control characters (character {at} is one)");
            self.fail(path, rule);
        }
    }

    /// A required time, down to the millisecond that it lies in.
    fn time(&mut self, field: &str, given: Option<&Timestamp>) -> Option<TimeMs> {
        let path = format_args!("{field}");
        let Some(given) = given else {
            self.fail(path, "must be set");
            return None;
        };
        // What google.protobuf.Timestamp allows: the years 1 to 9999.
        if !(-62_135_596_800..=253_402_300_799).contains(&given.seconds) {
            self.fail(path, "must be within the years 1 to 9999");
            return None;
        }
        if !(0..=999_999_999).contains(&given.nanos) {
            let rule = format_args!(
                "must have nanos of 0 to 999999999 (they are {})",
                given.nanos
            );
            self.fail(path, rule);
            return None;
        }
        Some(TimeMs(
            given.seconds * 1_000 + i64::from(given.nanos / 1_000_000),
        ))
    }

    fn span(
        &mut self,
        path: fmt::Arguments<'_>,
        given: &PbDuration,
        min: Duration,
        max: Duration,
    ) -> Option<Duration> {
        // Seconds and nanos of one duration have the same sign, and nanos stay below a second.
        let (seconds, nanos) = (given.seconds, given.nanos);
        let proper = nanos.unsigned_abs() < 1_000_000_000
            && (seconds == 0 || nanos == 0 || (seconds < 0) == (nanos < 0));
        if !proper {
            let rule = "must have nanos below a second in size and of the sign of its seconds";
            self.fail(path, rule);
            return None;
        }
        let span = match (u64::try_from(seconds), u32::try_from(nanos)) {
            (Ok(seconds), Ok(nanos)) => Some(Duration::new(seconds, nanos)),
            _ => None,
        };
        let span = span.filter(|span| (min..=max).contains(span));
        if span.is_none() {
            let (min, max) = (min.as_secs(), max.as_secs());
            self.fail(path, format_args!("must be {min} to {max} seconds"));
        }
        span
    }

    fn whole_seconds(
        &mut self,
        path: fmt::Arguments<'_>,
        given: &PbDuration,
        min: Duration,
        max: Duration,
    ) -> Option<Duration> {
        let span = self.span(path, given, min, max)?;
        if span.subsec_nanos() != 0 {
            self.fail(path, "must be whole seconds");
            return None;
        }
        Some(span)
    }

    fn distinct_skus(&mut self, offers: &[pb::OfferSpec]) {
        let mut first_at = HashMap::with_capacity(offers.len());
        for (at, offer) in offers.iter().enumerate() {
            // An empty one is a violation by itself.
            if offer.sku_id.is_empty() {
                continue;
            }
            let first = *first_at.entry(offer.sku_id.as_str()).or_insert(at);
            if first != at {
                let rule = format_args!("must be distinct; spec.offers[{first}] has the same");
                self.fail(format_args!("spec.offers[{at}].sku_id"), rule);
            }
        }
    }
}

// Answers.

impl From<ReserveOutcome> for pb::ReserveResponse {
    fn from(outcome: ReserveOutcome) -> Self {
        use pb::ReserveOutcome as Pb;

        let answer = |outcome: Pb| Self {
            outcome: outcome.into(),
            ..Self::default()
        };
        match outcome {
            ReserveOutcome::NotStarted => answer(Pb::NotStarted),
            ReserveOutcome::Paused => answer(Pb::Paused),
            ReserveOutcome::Ended => answer(Pb::Ended),
            ReserveOutcome::QuantityLimit { max: _ } => answer(Pb::QuantityLimit),
            ReserveOutcome::NotWarmed => answer(Pb::NotWarmed),
            ReserveOutcome::Reserved {
                reservation,
                replayed,
                remaining,
            } => Self {
                reservation: Some(reservation.into()),
                replayed,
                remaining: remaining.map(int64),
                ..answer(Pb::Reserved)
            },
            ReserveOutcome::Released => answer(Pb::Released),
            ReserveOutcome::Duplicate { existing } => Self {
                existing_reservation: existing.map(Into::into),
                ..answer(Pb::Duplicate)
            },
            ReserveOutcome::SoldOut => Self {
                remaining: Some(0),
                ..answer(Pb::SoldOut)
            },
            ReserveOutcome::Insufficient { remaining } => Self {
                remaining: Some(int64(remaining)),
                ..answer(Pb::Insufficient)
            },
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
    pb::ReleaseResponse {
        outcome: outcome.into(),
        remaining: remaining.map(int64),
    }
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
        Self {
            outcome: outcome.into(),
            reservation,
        }
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
    pb::GetReservationResponse {
        reservation: Some(reservation.into()),
        refusal: refusal.into(),
    }
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

fn timestamp(time: domain::TimeMs) -> Timestamp {
    let millis = i32::try_from(time.0.rem_euclid(1_000)).expect("a remainder of 1,000 is small");
    Timestamp {
        seconds: time.0.div_euclid(1_000),
        nanos: millis * 1_000_000,
    }
}

fn duration(span: Duration) -> PbDuration {
    let nanos = i32::try_from(span.subsec_nanos()).expect("there are 10^9 nanoseconds in a second");
    PbDuration {
        seconds: int64(span.as_secs()),
        nanos,
    }
}

/// Figures are at most 2^53 - 1, so this never cuts one.
fn int64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Quantities are at most 1,000, so this never cuts one.
fn int32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
