use std::{collections::BTreeMap, time::Duration};

use prost_types::{Duration as PbDuration, Timestamp};

use super::*;
use crate::{
    api::{
        stack::{ADMIN_REQUEST_LIMIT, SECKILL_REQUEST_LIMIT},
        status::LISTED_VIOLATIONS,
    },
    domain::{
        ConfirmOutcome, MAX_NAME_LEN, MAX_TOKEN_LEN, OfferKey, OrderNo, RefusedBecause,
        ReleaseOutcome, Reservation, ReservationState, ReserveOutcome, TimeMs,
    },
    error::Violation,
};

const PROTO: [&str; 3] = [
    include_str!("../../../proto/seckill/v1/seckill.proto"),
    include_str!("../../../proto/seckill/v1/admin.proto"),
    include_str!("../../../proto/seckill/v1/types.proto"),
];

/// Every `Limit:` of the contract, by `Message.field`.
fn proto_limits() -> BTreeMap<String, String> {
    let mut limits = BTreeMap::new();
    for text in PROTO {
        let mut message = "";
        let mut limit: Option<&str> = None;
        for line in text.lines().map(str::trim) {
            if let Some(rest) = line.strip_prefix("message ") {
                message = rest.trim_end_matches(" {");
            } else if let Some(rest) = line.strip_prefix("// Limit: ") {
                assert!(limit.replace(rest).is_none(), "two limits before {line}");
            } else if let Some((declared, _)) = line.split_once(" = ")
                && let Some(limit) = limit.take()
            {
                let field = declared.rsplit(' ').next().unwrap();
                limits.insert(format!("{message}.{field}"), limit.to_owned());
            }
        }
        assert_eq!(limit, None, "a limit that belongs to no field");
    }
    limits
}

/// What the constants say about a field; fields of one name have one rule, but for two.
fn limit_in_code(path: &str) -> String {
    let name = format!("1..={MAX_NAME_LEN} of A-Z a-z 0-9 . _ -");
    let (_, field) = path.split_once('.').unwrap();
    match (path, field) {
        ("RebuildStockRequest.sku_id", _) => name.replacen('1', "0", 1),
        ("RebuildStockRequest.segments", _) => format!("0..={MAX_SEGMENTS}"),
        (_, "activity_id" | "sku_id") => name,
        (_, "sku_ids") => format!("0..={MAX_WATCHED} items, each {name}"),
        (_, "user_id" | "request_id" | "reservation_id") => {
            format!("1..={MAX_TOKEN_LEN} bytes of visible ASCII without spaces")
        }
        (_, "reason") => format!("0..={MAX_REASON_CHARS} characters without control characters"),
        (_, "title") => format!("1..={MAX_TITLE_CHARS} characters without control characters"),
        (_, "page_size") => format!("0..={MAX_PAGE_SIZE}"),
        (_, "page_token") => format!("0..={MAX_PAGE_TOKEN_LEN} bytes, as the server gave it"),
        (_, "quantity" | "max_quantity_per_order") => format!("1..={MAX_QUANTITY}"),
        (_, "max_orders_per_user") => format!("1..={MAX_ORDERS_PER_USER}"),
        (_, "segments") => format!("1..={MAX_SEGMENTS}"),
        (_, "offers") => format!("1..={MAX_OFFERS} items"),
        (_, "total") => format!("1..={MAX_TOTAL}"),
        (_, "price_minor") => format!("0..={MAX_PRICE_MINOR}"),
        (_, "delta") => format!("-{MAX_TOTAL}..={MAX_TOTAL}, not 0"),
        (_, "currency_code") => format!("{CURRENCY_LEN}..={CURRENCY_LEN} of A-Z"),
        (_, "retention") => format!(
            "{}..={} seconds (1 hour to 90 days), whole seconds",
            MIN_RETENTION.as_secs(),
            MAX_RETENTION.as_secs()
        ),
        (_, "hold") => format!("0..={} seconds (90 days), whole seconds", MAX_HOLD.as_secs()),
        (_, "min_interval") => format!("0..={} seconds", MAX_MIN_INTERVAL.as_secs()),
        (_, "start_time") => "before end_time".to_owned(),
        (_, "end_time") => "after start_time".to_owned(),
        _ => panic!("{path} has a limit in the contract and none here"),
    }
}

#[test]
fn the_limits_of_the_contract_are_those_of_the_code() {
    let limits = proto_limits();
    assert!(limits.len() > 60, "{} limits were found", limits.len());
    for (path, limit) in limits {
        assert_eq!(limit, limit_in_code(&path), "{path}");
    }
}

#[test]
fn an_adjustment_is_checked_whole() {
    let max = i64::try_from(MAX_TOTAL).unwrap();
    let request = |delta| pb::AdjustStockRequest {
        activity_id: "double-11".into(),
        sku_id: "phone-1".into(),
        delta,
        request_id: "more-1".into(),
        reason: "a pallet was found".into(),
    };
    for delta in [1, -1, max, -max] {
        assert_eq!(adjust_stock(request(delta)).unwrap().delta, delta);
    }
    for delta in [0, max + 1, -max - 1, i64::MIN, i64::MAX] {
        expect(adjust_stock(request(delta)), "delta", false, &format!("{delta}"));
    }
    let nothing = adjust_stock(pb::AdjustStockRequest::default());
    let Err(Error::InvalidField(violations)) = nothing else { panic!("{nothing:?}") };
    let fields: Vec<_> = violations.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(fields, ["activity_id", "sku_id", "delta", "request_id"]);
}

#[test]
fn the_sizes_and_defaults_of_the_contract_are_those_of_the_code() {
    let [seckill, admin, types] = PROTO.map(|text| text.replace("\n  // ", " "));
    let kib = SECKILL_REQUEST_LIMIT / 1_024;
    let mib = ADMIN_REQUEST_LIMIT / 1_024 / 1_024;
    assert!(seckill.contains(&format!("// A request has at most {kib} KiB.")));
    assert!(admin.contains(&format!("A request has at most {mib} MiB.")));
    assert!(admin.contains(&format!("has at most. 0: {DEFAULT_PAGE_SIZE}.")));
    let days = DEFAULT_RETENTION.as_secs() / 86_400;
    let retention = format!("Unset: {} seconds ({days} days)", DEFAULT_RETENTION.as_secs());
    assert!(types.contains(&retention));
}

fn violations<T: std::fmt::Debug>(result: Result<T, Error>) -> Vec<Violation> {
    match result {
        Ok(accepted) => panic!("accepted: {accepted:?}"),
        Err(Error::InvalidField(violations)) => violations,
        Err(other) => panic!("another error: {other:?}"),
    }
}

/// Asserts that the result is fine, or that this field and no other breaks its rule.
#[track_caller]
fn expect<T: std::fmt::Debug>(result: Result<T, Error>, field: &str, fine: bool, case: &str) {
    match result {
        Ok(_) => assert!(fine, "{field} accepts {case}"),
        Err(error) => {
            assert!(!fine, "{field} refuses {case}: {error}");
            let violations = violations::<()>(Err(error));
            let fields: Vec<_> = violations.iter().map(|violation| &violation.field).collect();
            assert_eq!(fields, [field], "for {case}");
        }
    }
}

fn a_reserve() -> pb::ReserveRequest {
    pb::ReserveRequest {
        activity_id: "double-11".into(),
        sku_id: "phone-1".into(),
        user_id: "u-1".into(),
        quantity: None,
        request_id: "r-1".into(),
    }
}

fn a_release() -> pb::ReleaseRequest {
    pb::ReleaseRequest {
        activity_id: "double-11".into(),
        sku_id: "phone-1".into(),
        user_id: "u-1".into(),
        reservation_id: "0b7e".into(),
        reason: String::new(),
    }
}

fn a_confirm() -> pb::ConfirmRequest {
    pb::ConfirmRequest {
        activity_id: "double-11".into(),
        sku_id: "phone-1".into(),
        user_id: "u-1".into(),
        reservation_id: "0b7e".into(),
    }
}

fn a_key() -> pb::ReservationKey {
    pb::ReservationKey {
        activity_id: "double-11".into(),
        sku_id: "phone-1".into(),
        user_id: "u-1".into(),
        request_id: "r-1".into(),
    }
}

fn by_key(key: pb::ReservationKey) -> pb::GetReservationRequest {
    pb::GetReservationRequest { by: Some(pb::get_reservation_request::By::Key(key)) }
}

fn an_offer(sku_id: &str) -> pb::OfferSpec {
    pb::OfferSpec {
        sku_id: sku_id.into(),
        title: "A phone".into(),
        price_minor: 99_900,
        currency_code: "CNY".into(),
        total: 100,
        max_orders_per_user: None,
        max_quantity_per_order: None,
        hold: None,
        segments: None,
    }
}

fn a_spec() -> pb::ActivitySpec {
    pb::ActivitySpec {
        activity_id: "double-11".into(),
        title: "双十一".into(),
        start_time: Some(Timestamp { seconds: 1_700_000_000, nanos: 0 }),
        end_time: Some(Timestamp { seconds: 1_700_003_600, nanos: 0 }),
        retention: None,
        offers: vec![an_offer("phone-1")],
    }
}

fn spec(edit: impl FnOnce(&mut pb::ActivitySpec)) -> Result<ActivitySpec, Error> {
    let mut spec = a_spec();
    edit(&mut spec);
    activity_spec(pb::CreateActivityRequest { spec: Some(spec) })
}

fn offer(edit: impl FnOnce(&mut pb::OfferSpec)) -> Result<ActivitySpec, Error> {
    spec(|spec| edit(&mut spec.offers[0]))
}

fn watch_of(edit: impl FnOnce(&mut pb::WatchStockRequest)) -> Result<WatchRequest, Error> {
    let mut request =
        pb::WatchStockRequest { activity_id: "a".into(), sku_ids: vec![], min_interval: None };
    edit(&mut request);
    watch(&request)
}

/// A valid request with one field changed, checked.
macro_rules! with {
    ($read:expr, $request:expr, $field:ident = $value:expr) => {{
        let mut request = $request;
        request.$field = $value;
        $read(request)
    }};
}

#[test]
fn names_hold_1_to_64_of_their_characters() {
    let cases: &[(&str, bool)] = &[
        ("", false),
        ("a", true),
        ("AZaz09._-", true),
        ("..", true),
        ("9007199254740993", true),
        (&"x".repeat(64), true),
        (&"x".repeat(65), false),
        (&"x".repeat(100_000), false),
        ("a b", false),
        (" a", false),
        ("a/b", false),
        ("a:b", false),
        ("a{b}", false),
        ("a*", false),
        ("a\0", false),
        ("a\n", false),
        ("a\r\n", false),
        ("a\t", false),
        ("a\u{7f}", false),
        ("é", false),
        ("手机", false),
        ("а", false), // Cyrillic
        ("\u{202e}a", false),
        ("\u{feff}a", false),
    ];
    for &(text, fine) in cases {
        let case = format!("{text:.80?}");
        let own = || text.to_owned();
        let reserve = |request| reserve(&request, false, None);
        expect(with!(reserve, a_reserve(), activity_id = own()), "activity_id", fine, &case);
        expect(with!(reserve, a_reserve(), sku_id = own()), "sku_id", fine, &case);
        expect(with!(release, a_release(), activity_id = own()), "activity_id", fine, &case);
        expect(with!(release, a_release(), sku_id = own()), "sku_id", fine, &case);
        let confirm = |request| confirm(&request);
        expect(with!(confirm, a_confirm(), activity_id = own()), "activity_id", fine, &case);
        expect(with!(confirm, a_confirm(), sku_id = own()), "sku_id", fine, &case);
        let query = |key| reservation_query(&by_key(key));
        expect(with!(query, a_key(), activity_id = own()), "key.activity_id", fine, &case);
        expect(with!(query, a_key(), sku_id = own()), "key.sku_id", fine, &case);
        expect(watch_of(|it| it.activity_id = own()), "activity_id", fine, &case);
        expect(watch_of(|it| it.sku_ids = vec![own()]), "sku_ids[0]", fine, &case);
        expect(activity_id(text), "activity_id", fine, &case);
        expect(activity_move(text, ""), "activity_id", fine, &case);
        let rebuild = |sku_id: &str, activity_id: &str| {
            rebuild_stock(&pb::RebuildStockRequest {
                activity_id: activity_id.to_owned(),
                sku_id: sku_id.to_owned(),
                reason: String::new(),
                segments: 0,
            })
        };
        expect(rebuild("", text), "activity_id", fine, &case);
        // Empty means every offer.
        expect(rebuild(text, "a"), "sku_id", fine || text.is_empty(), &case);
        expect(page(0, String::new(), Some(text)), "activity_id", fine, &case);
        let status = pb::GetPipelineStatusRequest { activity_id: Some(own()) };
        expect(pipeline_status(&status), "activity_id", fine, &case);
        expect(spec(|it| it.activity_id = own()), "spec.activity_id", fine, &case);
        expect(offer(|it| it.sku_id = own()), "spec.offers[0].sku_id", fine, &case);
    }
}

#[test]
fn tokens_hold_1_to_128_bytes_of_visible_ascii() {
    let visible: String = ('!'..='~').collect();
    let cases: &[(&str, bool)] = &[
        ("", false),
        ("a", true),
        (&visible, true),
        (&"x".repeat(128), true),
        (&"x".repeat(129), false),
        ("a b", false),
        ("a\tb", false),
        ("a\0", false),
        ("a\u{7f}", false),
        ("é", false),
        (&"é".repeat(64), false),
        ("用户", false),
        ("\u{a0}", false),
    ];
    for &(text, fine) in cases {
        let case = format!("{text:.80?}");
        let own = || text.to_owned();
        let reserve = |request| reserve(&request, false, None);
        expect(with!(reserve, a_reserve(), user_id = own()), "user_id", fine, &case);
        // Empty means that there is none.
        let fine_here = fine || text.is_empty();
        expect(with!(reserve, a_reserve(), request_id = own()), "request_id", fine_here, &case);
        expect(with!(release, a_release(), user_id = own()), "user_id", fine, &case);
        expect(with!(release, a_release(), reservation_id = own()), "reservation_id", fine, &case);
        let confirm = |request| confirm(&request);
        expect(with!(confirm, a_confirm(), user_id = own()), "user_id", fine, &case);
        expect(with!(confirm, a_confirm(), reservation_id = own()), "reservation_id", fine, &case);
        let query = |key| reservation_query(&by_key(key));
        expect(with!(query, a_key(), user_id = own()), "key.user_id", fine, &case);
        expect(with!(query, a_key(), request_id = own()), "key.request_id", fine, &case);
        let by = Some(pb::get_reservation_request::By::ReservationId(own()));
        let by_id = reservation_query(&pb::GetReservationRequest { by });
        expect(by_id, "reservation_id", fine, &case);
        expect(dead_letter(text, ""), "reservation_id", fine, &case);
    }
}

#[test]
fn texts_are_counted_in_characters_and_hold_no_control_characters() {
    let cases: &[(&str, bool)] = &[
        ("a", true),
        ("  ", true),
        ("限时秒杀 – 50 % 🎉", true),
        (&"x".repeat(200), true),
        (&"x".repeat(201), false),
        (&"商".repeat(200), true),
        (&"商".repeat(201), false),
        (&"🎉".repeat(200), true),
        ("a\0b", false),
        ("a\nb", false),
        ("\u{1b}[2J", false),
        ("a\u{7f}", false),
        ("a\u{85}", false),
        ("a\u{9f}", false),
    ];
    for &(text, fine) in cases.iter().chain(&[("", true)]) {
        let case = format!("{text:.80?}");
        let own = || text.to_owned();
        expect(with!(release, a_release(), reason = own()), "reason", fine, &case);
        expect(activity_move("a", text), "reason", fine, &case);
        expect(dead_letter("r-1", text), "reason", fine, &case);
        let rebuild = pb::RebuildStockRequest {
            activity_id: "a".to_owned(),
            sku_id: String::new(),
            reason: own(),
            segments: 0,
        };
        expect(rebuild_stock(&rebuild), "reason", fine, &case);
    }
    for &(text, fine) in cases.iter().chain(&[("", false)]) {
        let case = format!("{text:.80?}");
        let own = || text.to_owned();
        expect(spec(|it| it.title = own()), "spec.title", fine, &case);
        expect(offer(|it| it.title = own()), "spec.offers[0].title", fine, &case);
    }
}

#[test]
fn numbers_are_accepted_up_to_their_edges() {
    let max = i64::try_from(MAX_TOTAL).unwrap();
    for (number, fine) in [(0, false), (1, true), (max, true), (max + 1, false), (-1, false)] {
        let case = number.to_string();
        expect(offer(|it| it.total = number), "spec.offers[0].total", fine, &case);
    }
    for (number, fine) in [(-1, false), (0, true), (max, true), (max + 1, false)] {
        let case = number.to_string();
        expect(offer(|it| it.price_minor = number), "spec.offers[0].price_minor", fine, &case);
    }
    for number in [i64::MIN, i64::MAX] {
        expect(offer(|it| it.total = number), "spec.offers[0].total", false, "an end of i64");
    }
    let edges = |max: i32| {
        [
            (0, false),
            (1, true),
            (max, true),
            (max + 1, false),
            (-1, false),
            (i32::MIN, false),
            (i32::MAX, false),
        ]
    };
    for (number, fine) in edges(1_000) {
        let case = number.to_string();
        let reserve = |request| reserve(&request, false, None);
        expect(with!(reserve, a_reserve(), quantity = Some(number)), "quantity", fine, &case);
        let path = "spec.offers[0].max_quantity_per_order";
        expect(offer(|it| it.max_quantity_per_order = Some(number)), path, fine, &case);
    }
    for (number, fine) in edges(100) {
        let path = "spec.offers[0].max_orders_per_user";
        let case = number.to_string();
        expect(offer(|it| it.max_orders_per_user = Some(number)), path, fine, &case);
    }
    for (number, fine) in [(-1, false), (0, true), (1, true), (1_000, true), (1_001, false)] {
        let request = pb::ListActivitiesRequest { page_size: number, ..Default::default() };
        expect(activity_list(request), "page_size", fine, &number.to_string());
        expect(page(number, String::new(), None), "page_size", fine, &number.to_string());
    }
}

#[test]
fn an_offer_has_1_to_256_segments_and_may_get_more() {
    let rebuild = |segments| {
        rebuild_stock(&pb::RebuildStockRequest {
            activity_id: "a".to_owned(),
            segments,
            ..Default::default()
        })
    };
    for number in [1_u8, 2, 3, 255] {
        let spec = offer(|it| it.segments = Some(number.into())).unwrap();
        assert_eq!(spec.offers[0].segments, u32::from(number));
        assert_eq!(rebuild(number.into()).unwrap().2, Some(number.into()));
    }
    assert_eq!(offer(|it| it.segments = Some(256)).unwrap().offers[0].segments, 256);
    assert_eq!(rebuild(0).unwrap().2, None);
    for number in [-1, 257] {
        let refused = violations(rebuild(number));
        assert_eq!(refused[0].description, format!("must be 0 to 256 (it is {number})"));
    }
    for number in [0, 257, -1] {
        let refused = violations(offer(|it| it.segments = Some(number)));
        assert_eq!(refused[0].description, format!("must be 1 to 256 (it is {number})"));
    }
}

#[test]
fn currency_codes_are_three_capitals() {
    let cases = [
        ("CNY", true),
        ("", false),
        ("CN", false),
        ("CNYY", false),
        ("cny", false),
        ("C1Y", false),
    ];
    for (text, fine) in cases.into_iter().chain([("C\0Y", false), ("元", false), ("ÄÖ", false)])
    {
        let path = "spec.offers[0].currency_code";
        expect(offer(|it| it.currency_code = text.into()), path, fine, text);
    }
}

#[test]
fn page_tokens_have_at_most_1024_bytes() {
    for (len, fine) in [(0, true), (1_024, true), (1_025, false)] {
        let request =
            pb::ListActivitiesRequest { page_token: "x".repeat(len), ..Default::default() };
        expect(activity_list(request), "page_token", fine, &len.to_string());
        expect(page(0, "x".repeat(len), None), "page_token", fine, &len.to_string());
    }
}

#[test]
fn a_list_may_name_every_state_but_no_unknown_one() {
    for (number, expected) in [(0, None)].into_iter().chain(
        ActivityState::ALL
            .into_iter()
            .map(|state| (pb::ActivityState::from(state).into(), Some(state))),
    ) {
        let request = pb::ListActivitiesRequest { state: number, ..Default::default() };
        assert_eq!(activity_list(request).unwrap().state, expected);
    }
    for number in [-1, 7, i32::MAX] {
        let request = pb::ListActivitiesRequest { state: number, ..Default::default() };
        expect(activity_list(request), "state", false, &number.to_string());
    }
}

#[test]
fn times_lie_in_the_years_1_to_9999_and_have_proper_nanos() {
    let (first, last) = (-62_135_596_800, 253_402_300_799);
    let cases = [
        (first, 0, true),
        (first - 1, 0, false),
        (i64::MIN, 0, false),
        (0, 999_999_999, true),
        (0, 1_000_000_000, false),
        (0, -1, false),
        (0, i32::MIN, false),
    ];
    for (seconds, nanos, fine) in cases {
        let case = format!("{seconds} s {nanos} ns");
        let start = Some(Timestamp { seconds, nanos });
        expect(spec(|it| it.start_time = start), "spec.start_time", fine, &case);
    }
    for (seconds, fine) in [(last, true), (last + 1, false), (i64::MAX, false)] {
        let end = Some(Timestamp { seconds, nanos: 999_999_999 });
        expect(spec(|it| it.end_time = end), "spec.end_time", fine, &seconds.to_string());
    }
    expect(spec(|it| it.start_time = None), "spec.start_time", false, "none");
    expect(spec(|it| it.end_time = None), "spec.end_time", false, "none");

    let start = Some(Timestamp { seconds: -1, nanos: 1_999_999 });
    assert_eq!(spec(|it| it.start_time = start).unwrap().start_time, TimeMs(-999));
}

#[test]
fn a_window_ends_after_it_starts() {
    let start = 1_700_000_000;
    let cases = [
        (start, 1_000_000, true),
        (start, 999_999, false), // in the same millisecond
        (start, 0, false),
        (start - 1, 999_999_999, false),
    ];
    for (seconds, nanos, fine) in cases {
        let end = Some(Timestamp { seconds, nanos });
        let case = format!("{seconds} s {nanos} ns");
        expect(spec(|it| it.end_time = end), "spec.end_time", fine, &case);
    }
}

#[test]
fn durations_are_accepted_up_to_their_edges() {
    let whole = [
        (0, 500_000_000, false),
        (3_600, 1, false),
        (-1, 0, false),
        (-3_600, 0, false),
        (i64::MIN, 0, false),
        (i64::MAX, 0, false),
        (3_600, 1_000_000_000, false),
        (3_600, -1, false),
        (-3_600, 1, false),
        (7_776_000, 0, true),
        (7_776_001, 0, false),
        (3_600, 0, true),
    ];
    for (seconds, nanos, fine) in whole {
        let case = format!("{seconds} s {nanos} ns");
        let given = Some(PbDuration { seconds, nanos });
        expect(spec(|it| it.retention = given), "spec.retention", fine, &case);
        expect(offer(|it| it.hold = given), "spec.offers[0].hold", fine, &case);
    }
    for (seconds, hold) in [(0, None), (1, Some(Duration::from_secs(1)))] {
        let given = Some(PbDuration { seconds, nanos: 0 });
        expect(spec(|it| it.retention = given), "spec.retention", false, "below an hour");
        assert_eq!(offer(|it| it.hold = given).unwrap().offers[0].hold, hold);
    }
    expect(
        spec(|it| it.retention = Some(PbDuration { seconds: 3_599, nanos: 0 })),
        "spec.retention",
        false,
        "3599 s",
    );
    let intervals =
        [(0, 0, true), (0, 1, true), (60, 0, true), (60, 1, false), (61, 0, false), (0, -1, false)];
    for (seconds, nanos, fine) in intervals {
        let given = Some(PbDuration { seconds, nanos });
        let case = format!("{seconds} s {nanos} ns");
        expect(watch_of(|it| it.min_interval = given), "min_interval", fine, &case);
    }
}

#[test]
fn items_are_accepted_up_to_their_number() {
    let offers = |len: usize| (0..len).map(|at| an_offer(&format!("sku-{at}"))).collect();
    for (len, fine) in [(0, false), (1, true), (10_000, true), (10_001, false)] {
        expect(spec(|it| it.offers = offers(len)), "spec.offers", fine, &len.to_string());
    }
    let skus = |len: usize| (0..len).map(|at| format!("sku-{at}")).collect();
    for (len, fine) in [(0, true), (10_000, true), (10_001, false)] {
        expect(watch_of(|it| it.sku_ids = skus(len)), "sku_ids", fine, &len.to_string());
    }
}

#[test]
fn each_sku_is_offered_once() {
    let names = ["a", "b", "a", "A", "a"];
    let refused = violations(spec(|it| it.offers = names.map(an_offer).into()));
    let texts: Vec<_> = refused
        .iter()
        .map(|violation| format!("{} {}", violation.field, violation.description))
        .collect();
    assert_eq!(
        texts,
        [
            "spec.offers[2].sku_id must be distinct; spec.offers[0] has the same",
            "spec.offers[4].sku_id must be distinct; spec.offers[0] has the same",
        ]
    );
}

#[test]
fn a_sku_that_is_watched_twice_is_watched_once() {
    let request = watch_of(|it| it.sku_ids = ["b", "a", "b"].map(Into::into).into()).unwrap();
    assert_eq!(request.sku_ids, ["a", "b"].map(|sku| SkuId::new(sku).unwrap()));
}

#[test]
fn what_is_not_set_has_its_default() {
    let request = reserve(&a_reserve(), true, None).unwrap();
    assert_eq!(request.quantity, 1);
    assert!(request.is_repeat);
    let spec = spec(|spec| spec.offers = ["b", "a"].map(an_offer).into()).unwrap();
    assert_eq!(spec.retention, DEFAULT_RETENTION);
    let skus: Vec<_> = spec.offers.iter().map(|offer| offer.sku_id.as_str()).collect();
    assert_eq!(skus, ["a", "b"]);
    let offer = &spec.offers[0];
    assert_eq!((offer.max_orders, offer.max_quantity, offer.segments), (1, 1, 1));
    assert_eq!(offer.hold, None);
    let list = activity_list(pb::ListActivitiesRequest::default()).unwrap();
    assert_eq!((list.page_size, list.state), (DEFAULT_PAGE_SIZE, None));
    assert_eq!(watch_of(|_| ()).unwrap().min_interval, Duration::ZERO);
    assert_eq!(pipeline_status(&pb::GetPipelineStatusRequest::default()).unwrap(), None);
    let nothing = reservation_query(&pb::GetReservationRequest { by: None });
    expect(nothing, "by", false, "neither");
    let nothing = activity_spec(pb::CreateActivityRequest { spec: None });
    expect(nothing, "spec", false, "none");
}

#[test]
fn every_violation_of_a_request_is_found() {
    let fields = |violations: Vec<Violation>| -> Vec<String> {
        violations.into_iter().map(|violation| violation.field).collect()
    };
    let empty = violations(reserve(
        &pb::ReserveRequest { quantity: Some(0), ..Default::default() },
        false,
        None,
    ));
    assert_eq!(fields(empty), ["activity_id", "sku_id", "user_id", "quantity"]);
    let empty = violations(activity_spec(pb::CreateActivityRequest {
        spec: Some(pb::ActivitySpec {
            offers: vec![pb::OfferSpec::default()],
            ..Default::default()
        }),
    }));
    assert_eq!(
        fields(empty),
        [
            "spec.activity_id",
            "spec.title",
            "spec.start_time",
            "spec.end_time",
            "spec.offers[0].sku_id",
            "spec.offers[0].title",
            "spec.offers[0].currency_code",
            "spec.offers[0].total",
        ]
    );
}

#[test]
fn ten_thousand_violations_cost_no_text() {
    let refused = violations(watch_of(|it| it.sku_ids = vec![String::new(); 10_000]));
    assert_eq!(refused.len(), 10_000);
    assert_eq!(refused[19].field, "sku_ids[19]");
    let texts: usize = refused[LISTED_VIOLATIONS..]
        .iter()
        .map(|violation| violation.field.capacity() + violation.description.capacity())
        .sum();
    assert_eq!(texts, 0);
}

#[test]
fn violations_do_not_repeat_what_was_sent() {
    let hostile = "\u{1b}]0;owned\u{7}<script>";
    let request = pb::ReserveRequest {
        activity_id: hostile.into(),
        sku_id: hostile.into(),
        user_id: hostile.into(),
        quantity: None,
        request_id: hostile.into(),
    };
    let error = reserve(&request, false, None).unwrap_err();
    assert!(!error.to_string().contains("script"), "{error}");
    assert_eq!(violations::<()>(Err(error)).len(), 4);
}

fn a_reservation() -> Reservation {
    Reservation {
        reservation_id: ReservationId::new("res-1").unwrap(),
        order_no: OrderNo::new("01ABC").unwrap(),
        offer: OfferKey {
            activity_id: ActivityId::new("double-11").unwrap(),
            sku_id: SkuId::new("9007199254740993").unwrap(),
        },
        buyer: BuyerId::new("u-1").unwrap(),
        quantity: 2,
        state: ReservationState::Queued,
        reserve_time: TimeMs(-1),
        expire_time: Some(TimeMs(1_500)),
    }
}

#[test]
fn a_reservation_is_rendered_as_it_is() {
    let rendered = pb::Reservation::from(a_reservation());
    assert_eq!(rendered.sku_id, "9007199254740993");
    assert_eq!(rendered.state(), pb::ReservationState::Queued);
    let before_1970 = Timestamp { seconds: -1, nanos: 999_000_000 };
    assert_eq!(rendered.reserve_time, Some(before_1970));
    assert_eq!(rendered.expire_time, Some(Timestamp { seconds: 1, nanos: 500_000_000 }));
}

#[test]
fn only_a_win_has_a_reservation() {
    let reserved = ReserveOutcome::Reserved {
        reservation: a_reservation(),
        replayed: true,
        remaining: Some(3),
    };
    let won = pb::ReserveResponse::from(reserved);
    assert_eq!(won.outcome(), pb::ReserveOutcome::Reserved);
    assert!(won.reservation.is_some() && won.replayed && won.existing_reservation.is_none());
    assert_eq!(won.remaining, Some(3));

    use pb::ReserveOutcome as Pb;
    let refusals = [
        (ReserveOutcome::NotStarted, Pb::NotStarted, None),
        (ReserveOutcome::Paused, Pb::Paused, None),
        (ReserveOutcome::Ended, Pb::Ended, None),
        (ReserveOutcome::QuantityLimit { max: 2 }, Pb::QuantityLimit, None),
        (ReserveOutcome::NotWarmed, Pb::NotWarmed, None),
        (ReserveOutcome::Released, Pb::Released, None),
        (ReserveOutcome::Duplicate { existing: None }, Pb::Duplicate, None),
        (ReserveOutcome::SoldOut, Pb::SoldOut, Some(0)),
        (ReserveOutcome::Insufficient { remaining: 4 }, Pb::Insufficient, Some(4)),
    ];
    for (outcome, code, remaining) in refusals {
        let answer = pb::ReserveResponse::from(outcome);
        assert_eq!(answer.outcome(), code);
        assert_eq!(answer.remaining, remaining);
        assert!(answer.reservation.is_none() && answer.existing_reservation.is_none());
        assert!(!answer.replayed);
    }
    let existing = Some(a_reservation());
    let duplicate = pb::ReserveResponse::from(ReserveOutcome::Duplicate { existing });
    assert!(duplicate.reservation.is_none() && duplicate.existing_reservation.is_some());
}

#[test]
fn outcomes_of_release_and_confirm_keep_their_names() {
    let releases = [
        (ReleaseOutcome::Released, pb::ReleaseOutcome::Released),
        (ReleaseOutcome::AlreadyReleased, pb::ReleaseOutcome::AlreadyReleased),
        (ReleaseOutcome::NotReserved, pb::ReleaseOutcome::NotReserved),
        (ReleaseOutcome::WrongOwner, pb::ReleaseOutcome::WrongOwner),
        (ReleaseOutcome::Confirmed, pb::ReleaseOutcome::Confirmed),
    ];
    for (outcome, code) in releases {
        assert_eq!(release_response(outcome, Some(1)).outcome(), code);
    }
    let confirms = [
        (ConfirmOutcome::Confirmed(a_reservation()), pb::ConfirmOutcome::Confirmed),
        (ConfirmOutcome::Expired, pb::ConfirmOutcome::Expired),
        (ConfirmOutcome::Released, pb::ConfirmOutcome::Released),
        (ConfirmOutcome::NotReserved, pb::ConfirmOutcome::NotReserved),
        (ConfirmOutcome::WrongOwner, pb::ConfirmOutcome::WrongOwner),
        (ConfirmOutcome::NotOrderedYet, pb::ConfirmOutcome::NotOrderedYet),
    ];
    for (outcome, code) in confirms {
        let answer = pb::ConfirmResponse::from(outcome);
        assert_eq!(answer.outcome(), code);
        assert_eq!(answer.reservation.is_some(), code == pb::ConfirmOutcome::Confirmed);
    }
    let refusals = [
        (None, pb::ReserveOutcome::Unspecified),
        (Some(RefusedBecause::Duplicate), pb::ReserveOutcome::Duplicate),
        (Some(RefusedBecause::SoldOut), pb::ReserveOutcome::SoldOut),
    ];
    for (refused, code) in refusals {
        assert_eq!(reservation_response(a_reservation(), refused).refusal(), code);
    }
}
