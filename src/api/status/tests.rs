use std::{collections::BTreeMap, io};

use super::*;
use crate::domain::{ActivityId, ActivityState, OfferKey, SkuId};

fn an_offer() -> OfferKey {
    OfferKey { activity_id: ActivityId::new("a-1").unwrap(), sku_id: SkuId::new("s-1").unwrap() }
}

/// What a variant becomes: the code, the reason, and the metadata.
type Expected = (Code, &'static str, &'static [(&'static str, &'static str)]);

/// The table of the contract. A new variant does not compile before it stands here.
fn expected(error: &Error) -> Expected {
    match error {
        Error::InvalidField(_) => (Code::InvalidArgument, "INVALID_FIELD", &[]),
        Error::RequestIdConflict { .. } => (
            Code::InvalidArgument,
            "REQUEST_ID_CONFLICT",
            &[("before", "1"), ("field", "quantity"), ("now", "2")],
        ),
        Error::UnknownActivity(_) => {
            (Code::NotFound, "UNKNOWN_ACTIVITY", &[("activity_id", "a-1")])
        }
        Error::UnknownOffer { .. } => {
            (Code::NotFound, "UNKNOWN_OFFER", &[("activity_id", "a-1"), ("sku_id", "s-1")])
        }
        Error::UnknownReservation => (Code::NotFound, "UNKNOWN_RESERVATION", &[]),
        Error::ActivityExists(_) => {
            (Code::AlreadyExists, "ACTIVITY_EXISTS", &[("activity_id", "a-1")])
        }
        Error::WrongActivityState { .. } => (
            Code::FailedPrecondition,
            "WRONG_ACTIVITY_STATE",
            &[("activity_id", "a-1"), ("needed", "approve it"), ("state", "PENDING_REVIEW")],
        ),
        Error::WarmupMismatch { .. } => (
            Code::FailedPrecondition,
            "WARMUP_MISMATCH",
            &[("activity_id", "a-1"), ("detail", "total 500"), ("sku_id", "s-1")],
        ),
        Error::NotDrained { .. } => (
            Code::FailedPrecondition,
            "NOT_DRAINED",
            &[("activity_id", "a-1"), ("detail", "3 dead letters")],
        ),
        Error::InProgress(_) => (Code::Aborted, "IN_PROGRESS", &[("what", "a repair")]),
        Error::RateLimited { .. } => {
            (Code::ResourceExhausted, "RATE_LIMITED", &[("scope", "user")])
        }
        Error::AddressDenied => (Code::PermissionDenied, "ADDRESS_DENIED", &[]),
        Error::Overloaded => (Code::ResourceExhausted, "OVERLOADED", &[]),
        Error::EngineUnavailable => (Code::Unavailable, "ENGINE_UNAVAILABLE", &[]),
        Error::DatabaseUnavailable => (Code::Unavailable, "DATABASE_UNAVAILABLE", &[]),
        Error::OfferFrozen(_) => {
            (Code::Unavailable, "OFFER_FROZEN", &[("activity_id", "a-1"), ("sku_id", "s-1")])
        }
        Error::ShuttingDown => (Code::Unavailable, "SHUTTING_DOWN", &[]),
        Error::DeadlineExceeded => (Code::DeadlineExceeded, "DEADLINE_EXCEEDED", &[]),
        Error::Unimplemented(_) => (Code::Unimplemented, "UNIMPLEMENTED", &[("method", "Reserve")]),
        Error::Internal(_) => (Code::Internal, "INTERNAL", &[]),
    }
}

fn one_of_each() -> Vec<Error> {
    let id = || "a-1".to_owned();
    vec![
        Error::invalid("quantity", "must be 1 to 1000 (it is 0)"),
        Error::RequestIdConflict { field: "quantity", before: "1".into(), now: "2".into() },
        Error::UnknownActivity(id()),
        Error::UnknownOffer { activity_id: id(), sku_id: "s-1".into() },
        Error::UnknownReservation,
        Error::ActivityExists(id()),
        Error::WrongActivityState {
            activity_id: id(),
            current: ActivityState::PendingReview,
            needed: "approve it",
        },
        Error::WarmupMismatch { offer: an_offer(), detail: "total 500".into() },
        Error::NotDrained { activity_id: id(), detail: "3 dead letters".into() },
        Error::InProgress("a repair"),
        Error::RateLimited { scope: "user", wait: Duration::from_millis(1) },
        Error::AddressDenied,
        Error::Overloaded,
        Error::EngineUnavailable,
        Error::DatabaseUnavailable,
        Error::OfferFrozen(an_offer()),
        Error::ShuttingDown,
        Error::DeadlineExceeded,
        Error::Unimplemented("Reserve"),
        Error::internal("secret"),
    ]
}

#[test]
fn each_error_has_its_code_its_reason_and_its_metadata() {
    for error in one_of_each() {
        let (code, reason, metadata) = expected(&error);
        let message = error.to_string();
        let is_internal = matches!(error, Error::Internal(_));
        let status = Status::from(error);
        assert_eq!(status.code(), code, "{reason}");
        assert!(is_ours(&status), "{reason}");
        let info = status.get_details_error_info().expect(reason);
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, DOMAIN));
        if is_internal {
            continue;
        }
        assert_eq!(status.message(), message);
        let found: BTreeMap<_, _> =
            info.metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(found, metadata.iter().copied().collect(), "{reason}");
    }
}

#[test]
fn a_status_says_when_to_come_back_exactly_when_a_repeat_can_help() {
    for error in one_of_each() {
        let wait = error.retry_after();
        let status = Status::from(error);
        let header = |name| {
            status.metadata().get(name).map(|value| value.to_str().unwrap().parse::<u64>().unwrap())
        };
        let delay = status.get_details_retry_info().and_then(|info| info.retry_delay);
        assert_eq!(delay, wait, "{status:?}");
        let millis = wait.map(|wait| u64::try_from(wait.as_millis()).unwrap());
        assert_eq!(header(PUSHBACK), millis, "{status:?}");
        // Whole seconds, rounded up.
        assert_eq!(header(RETRY_AFTER), wait.map(|_| 1), "{status:?}");
        let retryable =
            matches!(status.code(), Code::Unavailable | Code::ResourceExhausted | Code::Aborted);
        assert_eq!(wait.is_some(), retryable, "{status:?}");
    }
}

#[test]
fn no_inner_text_of_an_internal_error_reaches_the_caller() {
    let cause = io::Error::other("password=hunter2");
    let status = Status::from(Error::Internal(Box::new(cause)));
    let everything = format!("{status:?}{}", String::from_utf8_lossy(status.details()));
    assert!(!everything.contains("hunter2"), "{everything}");
    let info = status.get_details_error_info().unwrap();
    let trace_id = &info.metadata["trace_id"];
    assert_eq!(trace_id.len(), 32);
    assert!(status.message().contains(trace_id));
}

#[test]
fn at_most_twenty_violations_are_listed_and_the_rest_is_counted() {
    let many = |len: usize| {
        let violations = (0..len)
            .map(|at| Violation { field: format!("f{at}"), description: "is wrong".to_owned() });
        let status = Status::from(Error::InvalidField(violations.collect()));
        assert!(status.details().len() < 4_096, "{} bytes", status.details().len());
        status.get_details_bad_request().unwrap().field_violations
    };
    assert_eq!(many(1).len(), 1);
    assert_eq!(many(20).len(), 20);
    assert_eq!(many(20)[19].field, "f19");
    let listed = many(10_000);
    assert_eq!(listed.len(), 21);
    assert_eq!(listed[19].field, "f19");
    assert_eq!(listed[20].description, "9980 more violations are not listed");
}

#[test]
fn reasons_are_what_aip_193_allows() {
    for error in one_of_each() {
        let (_, reason, _) = expected(&error);
        assert!(reason.len() <= 63);
        assert!(reason.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{reason}");
        let name = format!("ERROR_REASON_{reason}");
        assert!(ErrorReason::from_str_name(&name).is_some(), "{name}");
    }
}
