//! Calls of gRPC, under the names that ready-made dashboards know.
//!
//! A refusal takes some microseconds, so what is noted here is a few atomic numbers: no name is
//! looked up, nothing is allocated.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use metrics::{Counter, counter, with_local_recorder};

use super::{
    METRICS,
    families::{
        CALLS_HANDLED, CALLS_STARTED, HANDLING_SECONDS, HANDLING_TIMES, MESSAGES_RECEIVED,
        MESSAGES_SENT,
    },
    head,
    times::Times,
};

/// By the number of the code.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];
const UNKNOWN: usize = 2;

/// A method, as the labels name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrpcMethod {
    pub service: &'static str,
    pub method: &'static str,
    /// `unary`, `client_stream`, `server_stream` or `bidi_stream`.
    pub kind: &'static str,
}

/// The handles of one method.
#[derive(Debug)]
pub struct MethodMeter {
    method: GrpcMethod,
    started: Counter,
    /// In the order of [`CODES`].
    handled: [Counter; CODES.len()],
    received: Counter,
    sent: Counter,
    times: Times,
}

/// All that were made, for [`write`].
static METHODS: Mutex<Vec<Arc<MethodMeter>>> = Mutex::new(Vec::new());

/// Makes the handles of a method, or finds them.
#[must_use]
pub fn grpc_method(method: GrpcMethod) -> Arc<MethodMeter> {
    let mut methods = METHODS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = methods.iter().find(|known| known.method == method) {
        return known.clone();
    }
    let GrpcMethod { service, method: name, kind } = method;
    let labels = [("grpc_service", service), ("grpc_method", name), ("grpc_type", kind)];
    let meter = with_local_recorder(&METRICS.recorder, || MethodMeter {
        method,
        started: counter!(CALLS_STARTED.name, &labels),
        handled: CODES.map(|code| {
            let [service, name, kind] = labels;
            counter!(CALLS_HANDLED.name, &[service, name, kind, ("grpc_code", code)])
        }),
        received: counter!(MESSAGES_RECEIVED.name, &labels),
        sent: counter!(MESSAGES_SENT.name, &labels),
        times: Times::new(HANDLING_SECONDS),
    });
    let meter = Arc::new(meter);
    methods.push(meter.clone());
    meter
}

impl MethodMeter {
    /// Of the method, without its service.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.method.method
    }

    /// Whether its answers are streams.
    #[must_use]
    pub fn streams(&self) -> bool {
        matches!(self.method.kind, "server_stream" | "bidi_stream")
    }

    /// A call came in.
    pub fn start(&self) {
        self.started.increment(1);
    }

    /// A call ended with the code that has this number.
    pub fn end(&self, code: usize, took: Duration) {
        self.handled.get(code).unwrap_or(&self.handled[UNKNOWN]).increment(1);
        self.times.note(took);
    }

    /// So many messages came in whole.
    pub fn received(&self, messages: u64) {
        self.received.increment(messages);
    }

    /// So many messages went out.
    pub fn sent(&self, messages: u64) {
        self.sent.increment(messages);
    }
}

/// Writes the histogram; the counters are the recorder's.
pub(super) fn write(text: &mut String) {
    head(text, HANDLING_TIMES);
    let methods = METHODS.lock().unwrap_or_else(PoisonError::into_inner);
    for meter in methods.iter() {
        let GrpcMethod { service, method, kind } = meter.method;
        let labels =
            format!("grpc_service=\"{service}\",grpc_method=\"{method}\",grpc_type=\"{kind}\"");
        meter.times.write(text, HANDLING_TIMES.name, &labels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_in_every_bucket_that_is_not_below_it() {
        let method = GrpcMethod { service: "test", method: "Buckets", kind: "unary" };
        let meter = grpc_method(method);
        for ms in [1, 3, 60_000] {
            meter.start();
            meter.end(0, Duration::from_millis(ms));
        }
        meter.end(99, Duration::ZERO);
        let mut text = String::new();
        write(&mut text);
        let labels = "grpc_service=\"test\",grpc_method=\"Buckets\",grpc_type=\"unary\"";
        for (suffix, bound, value) in [
            ("_bucket", ",le=\"0.0005\"", "1"),
            ("_bucket", ",le=\"0.001\"", "2"),
            ("_bucket", ",le=\"0.0025\"", "2"),
            ("_bucket", ",le=\"0.005\"", "3"),
            ("_bucket", ",le=\"10\"", "3"),
            ("_bucket", ",le=\"+Inf\"", "4"),
            ("_sum", "", "60.004"),
            ("_count", "", "4"),
        ] {
            let line = format!("grpc_server_handling_seconds{suffix}{{{labels}{bound}}} {value}\n");
            assert!(text.contains(&line), "{line} in {text}");
        }
        assert!(Arc::ptr_eq(&meter, &grpc_method(method)), "they are made once");
    }
}
