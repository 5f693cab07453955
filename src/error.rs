//! What was not decided, by who must act. Expected results of a sale are outcomes, not errors.
//!
//! `Display` may be read by a stranger; what only we should see is in `source` or in the log.

use std::time::Duration;

use crate::{
    database::{SqlFault, classify},
    domain::{ActivityState, InvalidToken, OfferKey},
    engine::EngineError,
};

/// One field that breaks its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The path of the field, such as `offers[3].sku_id`.
    pub field: String,
    /// A sentence that goes on from the field's name.
    pub description: String,
}

/// Every reason for which a call is not decided.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    // The caller must mend the request.
    #[error("the request has {} invalid field(s): {}", .0.len(), first_violations(.0))]
    InvalidField(Vec<Violation>),
    #[error("request_id was used before with another {field}: then {before}, now {now}")]
    RequestIdConflict { field: &'static str, before: String, now: String },
    #[error("there is no activity {0}")]
    UnknownActivity(String),
    #[error("activity {activity_id} has no offer {sku_id}")]
    UnknownOffer { activity_id: String, sku_id: String },
    #[error("there is no such reservation")]
    UnknownReservation,
    #[error("activity {0} exists with other content")]
    ActivityExists(String),

    #[error("calls from this address are not taken")]
    AddressDenied,

    // Somebody must change the world first.
    #[error("activity {activity_id} is {}: {needed}", .current.as_str())]
    WrongActivityState { activity_id: String, current: ActivityState, needed: &'static str },
    #[error("activity {activity_id} can't be settled yet: {detail}")]
    NotDrained { activity_id: String, detail: String },
    #[error("offer {offer} does not match what the engine holds: {detail}")]
    WarmupMismatch { offer: OfferKey, detail: String },

    // The caller should come back later.
    #[error("too many requests from this {scope}; try again in {} ms", .wait.as_millis())]
    RateLimited { scope: &'static str, wait: Duration },
    #[error("too many requests are in flight")]
    Overloaded,
    #[error("{0} is under way already")]
    InProgress(&'static str),
    #[error("the stock engine is away")]
    EngineUnavailable,
    #[error("the database is away")]
    DatabaseUnavailable,
    #[error("offer {0} is being rebuilt from the database")]
    OfferFrozen(OfferKey),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the deadline passed; repeat with the same request_id to learn the outcome")]
    DeadlineExceeded,

    #[error("this server does not offer {0} yet")]
    Unimplemented(&'static str),

    /// A fault of ours; the text goes to the log and never to a caller.
    #[error("internal fault")]
    Internal(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// A fault of ours, described for the log.
    pub fn internal(text: impl Into<String>) -> Self {
        Error::Internal(text.into().into())
    }

    /// One invalid field.
    pub fn invalid(field: impl Into<String>, description: impl Into<String>) -> Self {
        Error::InvalidField(vec![Violation {
            field: field.into(),
            description: description.into(),
        }])
    }

    /// When a repeat can help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            // Who comes back at once only costs.
            Error::RateLimited { wait, .. } => Some((*wait).max(Duration::from_millis(10))),
            Error::Overloaded => Some(Duration::from_millis(100)),
            Error::InProgress(_) => Some(Duration::from_millis(500)),
            Error::OfferFrozen(_) => Some(Duration::from_millis(200)),
            Error::EngineUnavailable | Error::DatabaseUnavailable => {
                Some(Duration::from_millis(500))
            }
            Error::ShuttingDown => Some(Duration::from_millis(50)),
            Error::InvalidField(_)
            | Error::RequestIdConflict { .. }
            | Error::UnknownActivity(_)
            | Error::UnknownOffer { .. }
            | Error::UnknownReservation
            | Error::ActivityExists(_)
            | Error::AddressDenied
            | Error::WrongActivityState { .. }
            | Error::NotDrained { .. }
            | Error::WarmupMismatch { .. }
            | Error::DeadlineExceeded
            | Error::Unimplemented(_)
            | Error::Internal(_) => None,
        }
    }
}

impl From<InvalidToken> for Error {
    fn from(error: InvalidToken) -> Self {
        Error::invalid("page_token", error.to_string())
    }
}

impl From<sea_orm::DbErr> for Error {
    fn from(error: sea_orm::DbErr) -> Self {
        match classify(&error) {
            SqlFault::Data => Error::Internal(Box::new(error)),
            SqlFault::RolledBack | SqlFault::Away | SqlFault::Unknown => {
                tracing::warn!(%error, "the database did not answer as it should");
                Error::DatabaseUnavailable
            }
        }
    }
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Full(_) | EngineError::NotRun(_) | EngineError::Unknown(_) => {
                tracing::warn!(%error, "the engine did not answer as it should");
                Error::EngineUnavailable
            }
            // Said once, when it was lost.
            EngineError::PartAway(_) => Error::EngineUnavailable,
            EngineError::Script(_) => Error::Internal(Box::new(error)),
        }
    }
}

fn first_violations(violations: &[Violation]) -> String {
    const SHOWN: usize = 3;
    let shown: Vec<String> = violations
        .iter()
        .take(SHOWN)
        .map(|violation| format!("{} {}", violation.field, violation.description))
        .collect();
    let rest = violations.len().saturating_sub(SHOWN);
    let shown = shown.join("; ");
    if rest == 0 { shown } else { format!("{shown}; and {rest} more") }
}
