//! Why a command did not do what it was asked, for people and for machines.

use std::{error::Error, fmt::Write as _, io, time::Duration};

use serde_json::{Value, json};
use tokio_rustls::rustls;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::Exit;
use crate::{config::SettingsError, server::tls::SPEAKS_TLS};

/// What the caller of an address without TLS hears where there is TLS.
pub(super) const SERVER_SPEAKS_TLS: &str = "the server speaks TLS: give its address as https://…";

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// The arguments, or a file that they name, are wrong.
    Usage(String),
    Settings(SettingsError),
    /// No connection.
    NoServer {
        server: String,
        why: NoConnection,
        cause: String,
    },
    /// The two ends do not agree on TLS, or do not trust each other.
    Tls(String),
    /// The server answered with an error.
    Rpc(Box<RpcFailure>),
    /// Something else that is needed does not answer: a port, the engine, the database.
    Unavailable(String),
    /// A fault of ours.
    Internal(String),
}

/// Why there is no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoConnection {
    /// Nothing listens at the address.
    Refused,
    /// The host has no address.
    UnknownHost,
    /// Nobody said anything in this time.
    Silence(Duration),
    Other,
}

impl NoConnection {
    /// What an error of connecting comes from, after so long at most.
    pub(super) fn of(error: &(dyn Error + 'static), limit: Duration) -> Self {
        let mut cause = Some(error);
        while let Some(error) = cause {
            match error.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(io::ErrorKind::ConnectionRefused) => return Self::Refused,
                Some(io::ErrorKind::TimedOut) => return Self::Silence(limit),
                // The resolver's errors have no kind of their own.
                Some(_) if error.to_string().contains("failed to lookup address") => {
                    return Self::UnknownHost;
                }
                Some(_) | None => cause = error.source(),
            }
        }
        Self::Other
    }
}

/// An error of the server, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcFailure {
    pub code: Code,
    /// The ErrorReason without its prefix.
    pub reason: Option<String>,
    pub message: String,
    /// Fields with what is wrong with each.
    pub violations: Vec<(String, String)>,
    pub retry_after: Option<Duration>,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        // A server may refuse a certificate after the handshake, and TLS where there is none.
        tls_failure(&status).unwrap_or_else(|| Failure::Rpc(Box::new(RpcFailure::from(&status))))
    }
}

/// What is wrong with TLS, if that is what an error comes from.
pub(super) fn tls_failure(error: &(dyn Error + 'static)) -> Option<Failure> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        // An io::Error leaves out what it holds when it is asked for its source.
        let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let error_of_tls = held.and_then(|held| held.downcast_ref::<rustls::Error>());
        if let Some(error) = error_of_tls.or_else(|| error.downcast_ref::<rustls::Error>()) {
            return Some(Failure::Tls(tls_text(error)));
        }
        if error.source().is_none() && error.to_string().contains(SPEAKS_TLS) {
            return Some(Failure::Tls(SERVER_SPEAKS_TLS.to_owned()));
        }
        cause = error.source();
    }
    None
}

/// For people. The library's own words come last: they name the details.
#[expect(clippy::wildcard_enum_match_arm, reason = "an enum of a library, which grows")]
fn tls_text(error: &rustls::Error) -> String {
    use rustls::{CertificateError as Bad, Error::InvalidCertificate};
    let text = match error {
        InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => {
            "the certificate of the server has expired"
        }
        InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => {
            "the certificate of the server is not good yet; is this machine's clock right?"
        }
        InvalidCertificate(Bad::UnknownIssuer | Bad::BadSignature) => {
            "the certificate of the server is of no CA that is trusted here; name its CA with \
             --ca-file"
        }
        InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "the certificate of the server is for another name than the one in its address"
        }
        InvalidCertificate(_) => "the certificate of the server is not good",
        rustls::Error::InvalidMessage(_) => {
            "the server speaks no TLS: give its address as http://…"
        }
        rustls::Error::AlertReceived(_) => {
            "the server refuses the handshake; it may want another client certificate: give it \
             with --cert-file and --key-file"
        }
        _ => "no TLS with the server",
    };
    format!("{text} ({error})")
}

impl From<&Status> for RpcFailure {
    fn from(status: &Status) -> Self {
        let details = status.get_error_details();
        // tonic's client ends a call at its deadline by itself, under another code.
        let expired = status.code() == Code::Cancelled && status.message() == "Timeout expired";
        let (code, message) = if expired {
            (Code::DeadlineExceeded, "no answer within the timeout")
        } else {
            (status.code(), status.message())
        };
        Self {
            code,
            reason: details.error_info().map(|info| info.reason.clone()),
            message: if message.is_empty() { code.description() } else { message }.to_owned(),
            violations: details
                .bad_request()
                .map(|bad| bad.field_violations.as_slice())
                .unwrap_or_default()
                .iter()
                .map(|violation| (violation.field.clone(), violation.description.clone()))
                .collect(),
            retry_after: details.retry_info().and_then(|info| info.retry_delay),
        }
    }
}

impl RpcFailure {
    /// The call was not answered in time, and nobody knows what came of it.
    pub fn deadline() -> Self {
        Self {
            code: Code::DeadlineExceeded,
            reason: None,
            message: "no answer within the timeout".to_owned(),
            violations: Vec::new(),
            retry_after: None,
        }
    }

    /// Whether the same call may get another answer later.
    pub fn is_passing(&self) -> bool {
        self.retry_after.is_some()
            || matches!(self.code, Code::Unavailable | Code::DeadlineExceeded)
    }

    /// Whether the connection ended before the server said anything.
    pub(super) fn is_lost_connection(&self) -> bool {
        self.reason.is_none() && matches!(self.code, Code::Cancelled | Code::Unknown)
    }

    fn exit(&self) -> Exit {
        match self.code {
            Code::Ok => Exit::Ok,
            Code::InvalidArgument | Code::OutOfRange => Exit::Usage,
            Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::PermissionDenied
            | Code::Unauthenticated => Exit::No,
            Code::Cancelled
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Unavailable
            | Code::Unimplemented => Exit::Unavailable,
            Code::Unknown | Code::Internal | Code::DataLoss => Exit::Internal,
        }
    }

    fn text(&self) -> String {
        let reason = self.reason.as_deref().unwrap_or(code_name(self.code));
        // The message may tell the violations already; the list below is easier to read.
        let message = match self.violations.len() {
            0 => self.message.clone(),
            1 => "the request has an invalid field".to_owned(),
            count => format!("the request has {count} invalid fields"),
        };
        let mut text = format!("{message} ({reason})");
        for (field, description) in &self.violations {
            let _ = write!(text, "\n  {field}: {description}");
        }
        if reason == "MISSING_TOKEN" {
            text.push_str("\n  give one with SECKILL_TOKEN, --token-file or --token");
        }
        if let Some(after) = self.retry_after {
            let _ = write!(text, "\n  retry after {} ms", after.as_millis());
        }
        text
    }
}

impl Failure {
    /// What the process ends with.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Settings(_) => Exit::Usage,
            Self::NoServer { .. } | Self::Tls(_) | Self::Unavailable(_) => Exit::Unavailable,
            Self::Rpc(rpc) => rpc.exit(),
            Self::Internal(_) => Exit::Internal,
        }
    }

    /// For people: a line with what happened, and below it what helps to mend it.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Usage(text) | Self::Tls(text) | Self::Unavailable(text) => text.clone(),
            Self::Settings(error) => match error.problems.as_slice() {
                [problem] => problem.clone(),
                problems => {
                    format!("{} settings are wrong\n  {}", problems.len(), problems.join("\n  "))
                }
            },
            Self::NoServer { server, why, cause } => match why {
                NoConnection::Refused => {
                    format!("no server at {server}: start one with `seckill serve`")
                }
                NoConnection::UnknownHost => format!(
                    "no server at {server}: its host has no address here ({cause}); check the name"
                ),
                NoConnection::Silence(limit) => format!(
                    "no connection to {server} within {} ms: check the address and --timeout, \
                     and whether a firewall lets it through",
                    limit.as_millis()
                ),
                NoConnection::Other => format!("no connection to {server}: {cause}"),
            },
            Self::Rpc(rpc) => rpc.text(),
            Self::Internal(text) => format!("a fault of ours: {text}"),
        }
    }

    /// For machines: `{"error": {…}}`, the same members in every case.
    #[must_use]
    pub fn json(&self) -> Value {
        let (code, reason, violations, retry_after) = match self {
            Self::Usage(_) => (Code::InvalidArgument, Some("USAGE"), Vec::new(), None),
            Self::Settings(error) => {
                let all = error.problems.iter().map(|problem| violation("", problem)).collect();
                (Code::InvalidArgument, Some("SETTINGS"), all, None)
            }
            Self::NoServer { .. } => (Code::Unavailable, Some("NO_SERVER"), Vec::new(), None),
            Self::Tls(_) => (Code::Unavailable, Some("TLS"), Vec::new(), None),
            Self::Unavailable(_) => (Code::Unavailable, None, Vec::new(), None),
            Self::Internal(_) => (Code::Internal, None, Vec::new(), None),
            Self::Rpc(rpc) => {
                let all = rpc.violations.iter().map(|(field, text)| violation(field, text));
                (rpc.code, rpc.reason.as_deref(), all.collect(), rpc.retry_after)
            }
        };
        let message = match self {
            Self::NoServer {
                why: NoConnection::Refused | NoConnection::Silence(_), cause, ..
            } => {
                format!("{} ({cause})", self.text())
            }
            Self::Rpc(rpc) => rpc.message.clone(),
            Self::Usage(_)
            | Self::Settings(_)
            | Self::NoServer { why: NoConnection::UnknownHost | NoConnection::Other, .. }
            | Self::Tls(_)
            | Self::Unavailable(_)
            | Self::Internal(_) => self.text(),
        };
        json!({"error": {
            "code": code_name(code),
            "reason": reason,
            "message": message,
            "violations": violations,
            "retry_after_ms": retry_after.map(|span| u64::try_from(span.as_millis()).ok()),
        }})
    }
}

fn violation(field: &str, description: &str) -> Value {
    json!({"field": field, "description": description})
}

/// The name of a code as in the contract, such as `RESOURCE_EXHAUSTED`.
pub(super) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::{ErrorDetails, FieldViolation};

    use super::*;

    #[test]
    fn violations_become_a_list() {
        let mut details =
            ErrorDetails::with_error_info("INVALID_FIELD", "inventory.seckill", HashMap::new());
        details.set_bad_request(vec![
            FieldViolation::new("quantity", "must be 1 to 1000 (it is 0)"),
            FieldViolation::new("sku_id", "must not be empty"),
        ]);
        let failure = Failure::from(Status::with_error_details(
            Code::InvalidArgument,
            "2 fields are invalid: …",
            details,
        ));
        assert_eq!(
            failure.text(),
            "the request has 2 invalid fields (INVALID_FIELD)\n  \
             quantity: must be 1 to 1000 (it is 0)\n  sku_id: must not be empty"
        );
        assert_eq!(failure.exit(), Exit::Usage);
        assert_eq!(failure.json()["error"]["violations"][1]["field"], "sku_id");
    }

    #[test]
    fn a_passing_refusal_says_when_to_come_back() {
        let mut details =
            ErrorDetails::with_error_info("OFFER_FROZEN", "inventory.seckill", HashMap::new());
        details.set_retry_info(Some(Duration::from_millis(500)));
        let failure = Failure::from(Status::with_error_details(
            Code::Unavailable,
            "offer a/s is frozen",
            details,
        ));
        assert_eq!(failure.text(), "offer a/s is frozen (OFFER_FROZEN)\n  retry after 500 ms");
        assert_eq!(failure.exit(), Exit::Unavailable);
        assert_eq!(
            failure.json(),
            json!({"error": {
                "code": "UNAVAILABLE",
                "reason": "OFFER_FROZEN",
                "message": "offer a/s is frozen",
                "violations": [],
                "retry_after_ms": 500,
            }})
        );
    }

    #[test]
    fn an_error_without_details_shows_its_code() {
        let failure = Failure::from(Status::unimplemented("this server does not offer it yet"));
        assert_eq!(failure.text(), "this server does not offer it yet (UNIMPLEMENTED)");
        assert_eq!(failure.json()["error"]["reason"], Value::Null);
        let failure = Failure::from(Status::cancelled("Timeout expired"));
        assert_eq!(failure.text(), "no answer within the timeout (DEADLINE_EXCEEDED)");
    }
}
