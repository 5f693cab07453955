//! Whatever bytes come: a message is refused with a violation, or is within every limit.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use proptest::{collection::vec, prelude::*};
use prost::Message;
use prost_types::{Duration as PbDuration, Timestamp};

use super::*;

/// Texts that are ids, nearly ids, or nothing of the kind.
fn a_text() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[A-Za-z0-9._-]{1,64}",
        2 => "[!-~]{60,132}",
        1 => Just(String::new()),
        2 => any::<String>(),
        1 => vec(any::<char>(), 0..200).prop_map(|chars| chars.into_iter().collect()),
        1 => "[0-9]{1,40}",
        1 => "[A-Za-z0-9]{0,3}[\u{0}-\u{1f}\u{7f}\u{202e}\u{feff}][A-Za-z0-9]{0,3}",
    ]
}

fn a_number() -> impl Strategy<Value = i64> {
    let edges = [0, 1, 2, 1_000, 1_001, -1, i64::from(i32::MAX), i64::MAX, i64::MIN, 1 << 53];
    prop_oneof![any::<i64>(), 0..2_000_i64, prop::sample::select(edges.to_vec())]
}

#[allow(clippy::cast_possible_truncation, reason = "any number will do")]
fn a_small_number() -> impl Strategy<Value = i32> {
    a_number().prop_map(|number| number as i32)
}

fn a_time() -> impl Strategy<Value = Option<Timestamp>> {
    let time =
        (a_number(), a_small_number()).prop_map(|(seconds, nanos)| Timestamp { seconds, nanos });
    prop_oneof![1 => Just(None), 3 => time.prop_map(Some)]
}

fn a_span() -> impl Strategy<Value = Option<PbDuration>> {
    let span =
        (a_number(), a_small_number()).prop_map(|(seconds, nanos)| PbDuration { seconds, nanos });
    prop_oneof![1 => Just(None), 3 => span.prop_map(Some)]
}

prop_compose! {
    fn a_reserve()(
        activity_id in a_text(), sku_id in a_text(), user_id in a_text(), request_id in a_text(),
        quantity in prop::option::of(a_small_number()),
    ) -> pb::ReserveRequest {
        pb::ReserveRequest { activity_id, sku_id, user_id, quantity, request_id }
    }
}

prop_compose! {
    fn an_offer()(
        (sku_id, title, currency) in (a_text(), a_text(), a_text()),
        (price, total) in (a_number(), a_number()),
        orders in prop::option::of(a_small_number()),
        quantity in prop::option::of(a_small_number()),
        segments in prop::option::of(a_small_number()),
        hold in a_span(),
    ) -> pb::OfferSpec {
        pb::OfferSpec {
            sku_id, title, price_minor: price, currency_code: currency, total,
            max_orders_per_user: orders, max_quantity_per_order: quantity, hold, segments,
        }
    }
}

prop_compose! {
    fn a_creation()(
        (activity_id, title) in (a_text(), a_text()),
        (start_time, end_time) in (a_time(), a_time()),
        retention in a_span(),
        offers in vec(an_offer(), 0..4),
    ) -> pb::CreateActivityRequest {
        let spec = pb::ActivitySpec { activity_id, title, start_time, end_time, retention, offers };
        pb::CreateActivityRequest { spec: Some(spec) }
    }
}

fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn is_token(text: &str) -> bool {
    (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
}

/// What is refused names fields, and never repeats what the caller sent.
fn refused(error: Error, secret: &str) -> Result<(), TestCaseError> {
    let Error::InvalidField(violations) = error else {
        return Err(TestCaseError::fail(format!("{error:?}")));
    };
    prop_assert!(!violations.is_empty());
    for violation in violations {
        prop_assert!(secret.len() < 12 || !violation.description.contains(secret));
    }
    Ok(())
}

/// What is read of bytes must not panic, whatever it is.
fn read_as_anything(bytes: &[u8]) {
    fn read<M: Message + Default>(bytes: &[u8], check: impl FnOnce(M)) {
        if let Ok(message) = M::decode(bytes) {
            check(message);
        }
    }
    read(bytes, |m: pb::ReserveRequest| drop(reserve(&m, false, None)));
    read(bytes, |m| drop(release(m)));
    read(bytes, |m: pb::ConfirmRequest| drop(confirm(&m)));
    read(bytes, |m: pb::GetReservationRequest| drop(reservation_query(&m)));
    read(bytes, |m: pb::WatchStockRequest| drop(watch(&m)));
    read(bytes, |m| drop(activity_spec(m)));
    read(bytes, |m| drop(activity_list(m)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn a_reserve_is_within_every_limit_or_refused(request in a_reserve()) {
        let fine = is_name(&request.activity_id)
            && is_name(&request.sku_id)
            && is_token(&request.user_id)
            && (request.request_id.is_empty() || is_token(&request.request_id))
            && (1..=1_000).contains(&request.quantity.unwrap_or(1));
        match reserve(&request, false, None) {
            Ok(read) => {
                prop_assert!(fine);
                prop_assert_eq!(read.buyer.as_str(), &request.user_id);
                prop_assert_eq!(read.offer.sku_id.as_str(), &request.sku_id);
                prop_assert_eq!(i64::from(read.quantity), i64::from(request.quantity.unwrap_or(1)));
            }
            Err(error) => {
                prop_assert!(!fine);
                refused(error, &request.user_id)?;
            }
        }
    }

    #[test]
    fn an_activity_is_within_every_limit_or_refused(request in a_creation()) {
        let given = request.spec.clone().unwrap();
        match activity_spec(request) {
            Ok(spec) => {
                prop_assert!(is_name(spec.activity_id.as_str()));
                prop_assert!(spec.start_time < spec.end_time);
                prop_assert!((MIN_RETENTION..=MAX_RETENTION).contains(&spec.retention));
                prop_assert!((1..=10_000).contains(&spec.offers.len()));
                for offer in &spec.offers {
                    prop_assert!((1..=MAX_TOTAL).contains(&offer.total));
                    prop_assert!((1..=1_000).contains(&offer.max_quantity));
                    prop_assert!(offer.price_minor >= 0);
                    prop_assert!(offer.hold.is_none_or(|hold| hold <= MAX_HOLD));
                }
            }
            Err(error) => refused(error, &given.title)?,
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in vec(any::<u8>(), 0..256)) {
        read_as_anything(&bytes);
    }

    #[test]
    fn a_message_with_bytes_changed_is_read_without_a_panic(
        request in a_creation(), changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut bytes = request.encode_to_vec();
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        read_as_anything(&bytes);
    }
}
