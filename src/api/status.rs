//! The one place where an [`Error`] becomes a `tonic::Status`.
//!
//! Every status has an `ErrorInfo` with a reason of [`ErrorReason`]; what stands in the message
//! stands in its metadata too (AIP-193). **Invariant:** no inner text of `Internal` reaches a
//! caller.

use std::{
    collections::HashMap,
    error, fmt,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tonic::{Code, Status, metadata::MetadataMap};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

use super::pb::{self, ErrorReason};
use crate::{
    domain::{OfferKey, ReserveOutcome},
    error::{Error, Violation},
    metrics::{self, Undecided},
    telemetry::spans,
};

/// The domain of every `ErrorInfo`.
pub const DOMAIN: &str = "inventory.seckill";

/// The most violations that a status lists; one more entry counts the rest. Details travel in a
/// header, and many proxies take 8 KiB of those.
pub const LISTED_VIOLATIONS: usize = 20;

/// The trailer that standard gRPC clients obey (gRFC A6).
const PUSHBACK: &str = "grpc-retry-pushback-ms";
/// The header that gateways know, in seconds.
const RETRY_AFTER: &str = "retry-after";

/// Made once: in an overload nearly every answer is this one.
static OVERLOADED: LazyLock<Status> =
    LazyLock::new(|| Fault::from(Error::Overloaded).into_status());

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        if let Error::Overloaded = error {
            return OVERLOADED.clone();
        }
        Fault::from(error).into_status()
    }
}

/// Counts what became of a request for a reservation.
pub(super) fn counted(
    offer: &OfferKey,
    result: Result<ReserveOutcome, Error>,
) -> Result<ReserveOutcome, Error> {
    result.inspect(|outcome| metrics::reserve_outcome(offer, outcome)).inspect_err(count_error)
}

/// Counts a request for a reservation that was not decided.
pub(super) fn count_error(error: &Error) {
    metrics::reserve_error(match error {
        Error::InvalidField(_) | Error::RequestIdConflict { .. } => Undecided::Invalid,
        Error::UnknownActivity(_) | Error::UnknownOffer { .. } => Undecided::Unknown,
        Error::RateLimited { .. } => Undecided::RateLimited,
        Error::Overloaded => Undecided::Overloaded,
        Error::EngineUnavailable => Undecided::Engine,
        Error::DatabaseUnavailable => Undecided::Database,
        Error::OfferFrozen(_) => Undecided::Frozen,
        Error::ShuttingDown => Undecided::ShuttingDown,
        Error::DeadlineExceeded => Undecided::Deadline,
        Error::Internal(_) => Undecided::Internal,
        Error::UnknownReservation
        | Error::ActivityExists(_)
        | Error::AddressDenied
        | Error::WrongActivityState { .. }
        | Error::NotDrained { .. }
        | Error::WarmupMismatch { .. }
        | Error::InProgress(_)
        | Error::Unimplemented(_) => Undecided::Other,
    });
}

/// What the status of a unary call would have said, for one request of a stream.
pub(super) fn stream_error(error: Error) -> pb::StreamError {
    let Fault { code, reason, message, retry_after, .. } = Fault::from(error);
    pb::StreamError {
        code: code.into(),
        message,
        reason: reason_name(reason).to_owned(),
        retry_after: retry_after.and_then(|wait| wait.try_into().ok()),
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let retry_after = error.retry_after();
        let message = error.to_string();
        let fault = |code, reason| Fault::new(code, reason, message);
        let fault = match error {
            Error::InvalidField(violations) => Fault {
                violations: listed(violations),
                ..fault(Code::InvalidArgument, ErrorReason::InvalidField)
            },
            Error::RequestIdConflict { field, before, now } => {
                fault(Code::InvalidArgument, ErrorReason::RequestIdConflict)
                    .with("field", field)
                    .with("before", before)
                    .with("now", now)
            }
            Error::UnknownActivity(activity_id) => {
                fault(Code::NotFound, ErrorReason::UnknownActivity).with("activity_id", activity_id)
            }
            Error::UnknownOffer { activity_id, sku_id } => {
                fault(Code::NotFound, ErrorReason::UnknownOffer)
                    .with("activity_id", activity_id)
                    .with("sku_id", sku_id)
            }
            Error::UnknownReservation => fault(Code::NotFound, ErrorReason::UnknownReservation),
            Error::ActivityExists(activity_id) => {
                fault(Code::AlreadyExists, ErrorReason::ActivityExists)
                    .with("activity_id", activity_id)
            }
            Error::WrongActivityState { activity_id, current, needed } => {
                fault(Code::FailedPrecondition, ErrorReason::WrongActivityState)
                    .with("activity_id", activity_id)
                    .with("state", current.as_str().to_ascii_uppercase())
                    .with("needed", needed)
            }
            Error::NotDrained { activity_id, detail } => {
                fault(Code::FailedPrecondition, ErrorReason::NotDrained)
                    .with("activity_id", activity_id)
                    .with("detail", detail)
            }
            Error::WarmupMismatch { offer, detail } => {
                fault(Code::FailedPrecondition, ErrorReason::WarmupMismatch)
                    .with("activity_id", offer.activity_id.as_str())
                    .with("sku_id", offer.sku_id.as_str())
                    .with("detail", detail)
            }
            Error::RateLimited { scope, .. } => {
                fault(Code::ResourceExhausted, ErrorReason::RateLimited).with("scope", scope)
            }
            Error::AddressDenied => fault(Code::PermissionDenied, ErrorReason::AddressDenied),
            Error::Overloaded => fault(Code::ResourceExhausted, ErrorReason::Overloaded),
            Error::InProgress(what) => {
                fault(Code::Aborted, ErrorReason::InProgress).with("what", what)
            }
            Error::EngineUnavailable => fault(Code::Unavailable, ErrorReason::EngineUnavailable),
            Error::DatabaseUnavailable => {
                fault(Code::Unavailable, ErrorReason::DatabaseUnavailable)
            }
            Error::OfferFrozen(offer) => fault(Code::Unavailable, ErrorReason::OfferFrozen)
                .with("activity_id", offer.activity_id.as_str())
                .with("sku_id", offer.sku_id.as_str()),
            Error::ShuttingDown => fault(Code::Unavailable, ErrorReason::ShuttingDown),
            Error::DeadlineExceeded => fault(Code::DeadlineExceeded, ErrorReason::DeadlineExceeded),
            Error::Unimplemented(method) => {
                fault(Code::Unimplemented, ErrorReason::Unimplemented).with("method", method)
            }
            Error::Internal(cause) => internal(&*cause),
        };
        Fault { retry_after, ..fault }
    }
}

/// Writes a fault of ours to the log, and makes a status that only names its place there.
fn internal(cause: &(dyn error::Error + 'static)) -> Fault {
    let trace_id = spans::trace_id().unwrap_or_else(|| format!("{:032x}", fastrand::u128(..)));
    tracing::error!(trace_id, cause = %Chain(cause), "internal error");
    let message = format!("internal error; trace id {trace_id}");
    Fault::new(Code::Internal, ErrorReason::Internal, message).with("trace_id", trace_id)
}

/// An error with all its sources.
struct Chain<'a>(&'a (dyn error::Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(inner) = cause {
            write!(f, ": {inner}")?;
            cause = inner.source();
        }
        Ok(())
    }
}

fn listed(violations: Vec<Violation>) -> Vec<FieldViolation> {
    let rest = violations.len().saturating_sub(LISTED_VIOLATIONS);
    let mut listed: Vec<FieldViolation> = violations
        .into_iter()
        .take(LISTED_VIOLATIONS)
        .map(|violation| FieldViolation::new(violation.field, violation.description))
        .collect();
    if rest > 0 {
        listed.push(FieldViolation::new("", format!("{rest} more violations are not listed")));
    }
    listed
}

/// What a status is made of.
#[derive(Debug)]
pub(super) struct Fault {
    code: Code,
    reason: ErrorReason,
    message: String,
    metadata: HashMap<String, String>,
    violations: Vec<FieldViolation>,
    retry_after: Option<Duration>,
}

impl Fault {
    pub(super) fn new(code: Code, reason: ErrorReason, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            metadata: HashMap::new(),
            violations: Vec::new(),
            retry_after: None,
        }
    }

    pub(super) fn with(mut self, key: &str, value: impl Into<String>) -> Self {
        self.metadata.insert(key.to_owned(), value.into());
        self
    }

    pub(super) fn into_status(self) -> Status {
        let mut details = ErrorDetails::new();
        details.set_error_info(reason_name(self.reason), DOMAIN, self.metadata);
        if !self.violations.is_empty() {
            details.set_bad_request(self.violations);
        }
        let mut metadata = MetadataMap::new();
        if let Some(wait) = self.retry_after {
            details.set_retry_info(Some(wait));
            metadata.insert(PUSHBACK, wait.as_millis().to_string().parse().expect("digits"));
            let seconds = wait.as_millis().div_ceil(1_000);
            metadata.insert(RETRY_AFTER, seconds.to_string().parse().expect("digits"));
        } else if matches!(self.code, Code::ResourceExhausted | Code::Unavailable) {
            // Libraries repeat these codes; a repeat of this one is in vain (gRFC A6).
            metadata.insert(PUSHBACK, "-1".parse().expect("digits"));
        }
        let mut status =
            Status::with_error_details_and_metadata(self.code, self.message, details, metadata);
        status.set_source(Arc::new(Ours));
        status
    }
}

/// The reason as it stands in `ErrorInfo`.
fn reason_name(reason: ErrorReason) -> &'static str {
    let name = reason.as_str_name();
    name.strip_prefix("ERROR_REASON_").unwrap_or(name)
}

/// The source of every status that is made here. tonic leaves the status in the extensions of a
/// response that is an error, so the layers can tell ours from tonic's; nothing of it is sent.
#[derive(Debug)]
struct Ours;

impl fmt::Display for Ours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a status of this server")
    }
}

impl error::Error for Ours {}

/// Whether this status was made here, and not by tonic.
pub(super) fn is_ours(status: &Status) -> bool {
    error::Error::source(status).is_some_and(|source| source.is::<Ours>())
}

#[cfg(test)]
mod tests;
