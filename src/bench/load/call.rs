//! One call, from its sending to what its caller was told.

use std::time::{Duration, Instant};

use h2::client::ResponseFuture;
use http::HeaderMap;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{Method, OVERLOADED, REPLAYED, RESERVED, TOO_LATE};
use crate::api::pb::{ReleaseOutcome, ReserveOutcome};

/// How long the prefix of a message is.
const PREFIX: usize = 5;
/// The keys of `ReserveResponse.outcome` and `ReserveResponse.replayed` on the wire.
const OUTCOME: u8 = 1 << 3;
const REPLAYED_KEY: u8 = 5 << 3;
/// The most reasons whose texts are remembered.
const MOST_REASONS: usize = 64;

/// What a caller was told.
#[derive(Debug)]
pub(super) enum Told {
    /// A new reservation.
    Reserved,
    Replayed,
    Outcome(u8),
    /// An error, by its trailers.
    Status(Box<HeaderMap>),
    TooLate,
    /// The stream or the connection ended without an answer.
    Broken(String),
}

/// A call that is over.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) link: usize,
    pub(super) nth: usize,
    pub(super) intended: Duration,
    pub(super) told: Told,
    pub(super) at: Instant,
}

/// Waits for the answer to a call that was sent, until its deadline.
pub(super) async fn call(
    link: usize,
    nth: usize,
    intended: Duration,
    response: ResponseFuture,
    until: Option<tokio::time::Instant>,
) -> Answer {
    let told = match until {
        None => read(response).await,
        // Dropped, the stream is reset, as any client does at its deadline.
        Some(until) => {
            tokio::time::timeout_at(until, read(response)).await.unwrap_or(Ok(Told::TooLate))
        }
    };
    let told = told.unwrap_or_else(|error| Told::Broken(error.to_string()));
    Answer { link, nth, intended, told, at: Instant::now() }
}

async fn read(response: ResponseFuture) -> Result<Told, h2::Error> {
    let (head, mut body) = response.await?.into_parts();
    if head.headers.contains_key(Status::GRPC_STATUS) {
        return Ok(Told::Status(Box::new(head.headers)));
    }
    let mut told = None;
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        // An answer has some 200 bytes, and comes as one frame.
        told = told.or_else(|| peek(&chunk));
    }
    let trailers = body.trailers().await?.unwrap_or_default();
    match (trailers.get(Status::GRPC_STATUS).map(|status| status.as_bytes()), told) {
        (Some(b"0"), Some(told)) => Ok(told),
        (Some(b"0"), None) => Ok(Told::Broken("an answer without an outcome".to_owned())),
        (Some(_), _) => Ok(Told::Status(Box::new(trailers))),
        (None, _) => Ok(Told::Broken("an answer without a status".to_owned())),
    }
}

/// The outcome of a `ReserveResponse`, without decoding the rest: fields stand in order, so the
/// first is the outcome, and `replayed` is the last.
fn peek(frame: &[u8]) -> Option<Told> {
    let message = frame.get(PREFIX..)?;
    match (message, message) {
        ([OUTCOME, outcome, ..], [.., REPLAYED_KEY, 1])
            if i32::from(*outcome) == ReserveOutcome::Reserved as i32 =>
        {
            Some(Told::Replayed)
        }
        ([OUTCOME, outcome, ..], _) if i32::from(*outcome) == ReserveOutcome::Reserved as i32 => {
            Some(Told::Reserved)
        }
        ([OUTCOME, outcome, ..], _) => Some(Told::Outcome(*outcome)),
        _ => None,
    }
}

/// Names what callers were told, and remembers the reasons behind the texts of errors, so that a
/// flood of the same refusal is decoded once.
#[derive(Debug)]
pub(super) struct Reasons {
    method: Method,
    known: Vec<(Vec<u8>, String)>,
    last: String,
}

impl Reasons {
    pub(super) fn of(method: Method) -> Self {
        Self { method, known: Vec::new(), last: String::new() }
    }

    pub(super) fn name(&mut self, told: &Told) -> &str {
        let outcome = match told {
            Told::Reserved => ReserveOutcome::Reserved as i32,
            Told::Outcome(outcome) => i32::from(*outcome),
            Told::Replayed | Told::TooLate | Told::Broken(_) | Told::Status(_) => 0,
        };
        if self.method == Method::Release && outcome > 0 {
            let name = ReleaseOutcome::try_from(outcome).unwrap_or_default().as_str_name();
            return name.strip_prefix("RELEASE_OUTCOME_").unwrap_or(name);
        }
        match told {
            Told::Reserved => RESERVED,
            Told::Replayed => REPLAYED,
            Told::TooLate => TOO_LATE,
            Told::Outcome(outcome) => {
                let outcome = ReserveOutcome::try_from(i32::from(*outcome)).unwrap_or_default();
                let name = outcome.as_str_name();
                name.strip_prefix("RESERVE_OUTCOME_").unwrap_or(name)
            }
            Told::Broken(why) => {
                self.last = format!("broken: {why}");
                &self.last
            }
            Told::Status(trailers) => self.reason(trailers),
        }
    }

    fn reason(&mut self, trailers: &HeaderMap) -> &str {
        let text = trailers.get("grpc-message").map(|text| text.as_bytes()).unwrap_or_default();
        if let Some(at) = self.known.iter().position(|(known, _)| known == text) {
            return &self.known[at].1;
        }
        let status = Status::from_header_map(trailers);
        let code = status.as_ref().map_or(Code::Unknown, Status::code);
        let info = status.and_then(|status| status.get_details_error_info());
        self.last = match info {
            // Refused before anything was taken; after other errors it may have won.
            Some(info) if info.reason == OVERLOADED => info.reason,
            Some(info) => format!("error {}", info.reason),
            None => format!("error {code:?}"),
        };
        if self.known.len() < MOST_REASONS {
            self.known.push((text.to_vec(), self.last.clone()));
        }
        &self.last
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::api::pb::{Reservation, ReserveResponse};

    fn told(response: &ReserveResponse) -> String {
        let mut frame = vec![0; PREFIX];
        response.encode(&mut frame).expect("a vector grows");
        let told = peek(&frame).expect("an outcome");
        Reasons::of(Method::Reserve).name(&told).to_owned()
    }

    #[test]
    fn outcomes_are_read_without_decoding() {
        let reservation =
            Some(Reservation { order_no: "0".repeat(26), quantity: 1, ..Reservation::default() });
        for (outcome, replayed, expected) in [
            (ReserveOutcome::Reserved, false, "RESERVED"),
            (ReserveOutcome::Reserved, true, "RESERVED replayed"),
            (ReserveOutcome::SoldOut, false, "SOLD_OUT"),
            (ReserveOutcome::Duplicate, false, "DUPLICATE"),
        ] {
            for remaining in [None, Some(0), Some(40), Some(10_241)] {
                let response = ReserveResponse {
                    outcome: outcome.into(),
                    reservation: reservation
                        .clone()
                        .filter(|_| outcome == ReserveOutcome::Reserved),
                    existing_reservation: None,
                    remaining,
                    replayed,
                };
                assert_eq!(told(&response), expected, "{response:?}");
            }
        }
        assert!(peek(&[0; PREFIX]).is_none());
    }

    #[test]
    fn the_same_number_is_another_outcome_of_a_release() {
        let mut reasons = Reasons::of(Method::Release);
        assert_eq!(reasons.name(&Told::Outcome(1)), "RELEASED");
        assert_eq!(Reasons::of(Method::Reserve).name(&Told::Outcome(1)), "NOT_STARTED");
    }
}
