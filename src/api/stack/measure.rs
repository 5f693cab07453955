//! Measure: how many calls and messages, what became of them, and how long they took; and a line of
//! the log for each that failed, where somebody wants them (`RUST_LOG=seckill::calls=debug`).
//!
//! A refusal passes here in a fraction of a microsecond: its handles are found by its path, and its
//! future and its answer are not boxed for this.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, LazyLock},
    task::{Context, Poll, ready},
    time::Instant,
};

use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service},
};
use tonic_types::{ErrorDetails, StatusExt as _};
use tower::Layer;

use super::super::access::TABLE;
use crate::{
    metrics::{self, GrpcMethod, MethodMeter},
    telemetry::spans,
};

/// The name under which failed calls are in the log. A rush has a hundred thousand refusals a second,
/// so only at level debug.
macro_rules! calls {
    () => {
        "seckill::calls"
    };
}

/// The methods that are not unary.
const STREAMS: [(&str, &str); 5] = [
    ("seckill.v1.Seckill/ReserveStream", "bidi_stream"),
    ("seckill.v1.Seckill/WatchStock", "server_stream"),
    ("grpc.health.v1.Health/Watch", "server_stream"),
    ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "bidi_stream"),
    ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "bidi_stream"),
];
/// What is not in the table of methods.
const OTHER: GrpcMethod = GrpcMethod { service: "other", method: "other", kind: "unary" };

/// Every method of the server, by path.
struct Meters {
    by_path: HashMap<String, Arc<MethodMeter>, foldhash::fast::RandomState>,
    other: Arc<MethodMeter>,
}

static METERS: LazyLock<Meters> = LazyLock::new(|| Meters {
    by_path: TABLE
        .iter()
        .map(|(rpc, _)| {
            let (service, method) = rpc.split_once('/').expect("the table has service/Method");
            let stream = STREAMS.iter().find(|(name, _)| name == rpc);
            let kind = stream.map_or("unary", |(_, kind)| *kind);
            (format!("/{rpc}"), metrics::grpc_method(GrpcMethod { service, method, kind }))
        })
        .collect(),
    other: metrics::grpc_method(OTHER),
});

/// The handles of the method that has this path.
pub(super) fn meter(path: &str) -> &'static MethodMeter {
    METERS.by_path.get(path).unwrap_or(&METERS.other)
}

/// Finds the messages in a body, however its frames are cut: each is a flag, its length in four
/// bytes, and so many bytes.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// How much of the head of the next one has come, and its length as far as that tells.
    head: u8,
    length: u32,
    /// How much of it is still to come, once its head is there.
    left: usize,
}

const HEAD: u8 = 5;

impl Messages {
    /// How many are whole with this.
    pub(super) fn count(&mut self, mut data: &[u8]) -> u64 {
        let mut whole = 0;
        while !data.is_empty() {
            if self.head < HEAD {
                // The flag is shifted out again.
                self.length = self.length << 8 | u32::from(data[0]);
                self.head += 1;
                data = &data[1..];
                if self.head == HEAD {
                    self.left = usize::try_from(self.length).unwrap_or(usize::MAX);
                }
            } else {
                let here = self.left.min(data.len());
                self.left -= here;
                data = &data[here..];
            }
            if self.head == HEAD && self.left == 0 {
                (self.head, self.length) = (0, 0);
                whole += 1;
            }
        }
        whole
    }
}

/// Counts and times every call.
#[derive(Debug, Clone, Copy)]
pub struct Measure;

/// A service behind [`Measure`].
#[derive(Debug, Clone)]
pub struct Measured<S>(S);

impl<S> Layer<S> for Measure {
    type Service = Measured<S>;

    fn layer(&self, inner: S) -> Self::Service {
        // All series are there before the first call.
        LazyLock::force(&METERS);
        Measured(inner)
    }
}

impl<S> Service<Request<Body>> for Measured<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = MeasuredFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let meter = meter(request.uri().path());
        meter.start();
        let call = UnderWay {
            meter,
            begun: Instant::now(),
            code: Code::Cancelled,
            noted: Noted::of(request.headers()),
        };
        MeasuredFuture { answer: self.0.call(request), call: Some(call) }
    }
}

/// A call that has not ended; it ends when this is dropped.
#[derive(Debug)]
struct UnderWay {
    meter: &'static MethodMeter,
    begun: Instant,
    /// As long as it is not known: nobody waits for it any more.
    code: Code,
    /// Where the log wants calls that fail.
    noted: Option<Box<Noted>>,
}

/// What the log says of a call that failed.
#[derive(Debug, Default)]
struct Noted {
    trace_id: Option<String>,
    /// Not the message, which may repeat what the caller sent.
    reason: Option<String>,
}

impl Noted {
    fn of(request: &HeaderMap) -> Option<Box<Self>> {
        tracing::enabled!(target: calls!(), tracing::Level::DEBUG)
            .then(|| Box::new(Self { trace_id: spans::told(request), reason: None }))
    }
}

impl UnderWay {
    /// What the headers or trailers of the answer say that hold its code.
    fn note(&mut self, code: Code, answer: &HeaderMap) {
        self.code = code;
        if let Some(noted) = &mut self.noted {
            noted.trace_id = noted.trace_id.take().or_else(|| spans::told(answer));
            let details = Status::from_header_map(answer).map(|status| status.get_error_details());
            let info = details.as_ref().and_then(ErrorDetails::error_info);
            noted.reason = info.map(|info| info.reason.clone());
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        self.meter.end(self.code as usize, took);
        if let Some(Noted { trace_id, reason }) = self.noted.as_deref()
            && self.code != Code::Ok
        {
            let took_us = took.as_micros();
            tracing::debug!(
                target: calls!(),
                method = self.meter.name(),
                code = ?self.code,
                reason,
                trace_id,
                took_us,
                "a call failed"
            );
        }
    }
}

pin_project! {
    /// The answer of a service, measured.
    #[derive(Debug)]
    pub struct MeasuredFuture<F> {
        #[pin]
        answer: F,
        call: Option<UnderWay>,
    }
}

impl<F, E> Future for MeasuredFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let answer = ready!(this.answer.poll(cx));
        let Some(mut call) = this.call.take() else { return Poll::Ready(answer) };
        let response = match answer {
            Ok(response) => response,
            Err(error) => {
                call.code = Code::Unknown;
                return Poll::Ready(Err(error));
            }
        };
        if let Some(code) = response.headers().get(Status::GRPC_STATUS) {
            call.note(Code::from_bytes(code.as_bytes()), response.headers());
        } else if call.meter.streams() {
            let messages = Messages::default();
            let body = |body| Body::new(MeasuredBody { body, messages, call: Some(call) });
            return Poll::Ready(Ok(response.map(body)));
        } else {
            // The one message of a unary answer is there, and its trailers say so.
            call.code = Code::Ok;
            call.meter.sent(1);
        }
        Poll::Ready(Ok(response))
    }
}

/// A stream of answers, whose trailers have the code.
#[derive(Debug)]
struct MeasuredBody {
    body: Body,
    messages: Messages,
    call: Option<UnderWay>,
}

impl MeasuredBody {
    fn end(&mut self, code: Code) {
        if let Some(mut call) = self.call.take() {
            call.code = code;
        }
    }
}

impl http_body::Body for MeasuredBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(data), Some(call)) = (frame.data_ref(), &this.call) {
                    call.meter.sent(this.messages.count(data));
                }
                if let Some(trailers) = frame.trailers_ref()
                    && let Some(code) = trailers.get(Status::GRPC_STATUS)
                    && let Some(mut call) = this.call.take()
                {
                    call.note(Code::from_bytes(code.as_bytes()), trailers);
                }
            }
            Some(Err(status)) => this.end(status.code()),
            None => this.end(Code::Unknown),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::api::FILE_DESCRIPTOR_SET;

    #[test]
    fn messages_are_found_however_their_frames_are_cut() {
        let long = [vec![1, 0, 1, 0, 0], vec![0; 65_536]].concat();
        let body = [&[0, 0, 0, 0, 2, 7, 7][..], &[0, 0, 0, 0, 0], &long, &[0, 0, 0, 0, 1]].concat();
        for size in [1, 2, 3, 5, 7, 4_096, body.len()] {
            let mut messages = Messages::default();
            let found: u64 = body.chunks(size).map(|frame| messages.count(frame)).sum();
            assert_eq!(found, 3, "in frames of {size} bytes; the last is not whole");
            assert_eq!(messages.count(&[9]), 1);
        }
    }

    #[test]
    fn every_method_has_the_type_of_its_proto_file() {
        let ours = prost_types::FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
        let mut streaming = Vec::new();
        for file in &ours.file {
            for service in &file.service {
                for method in &service.method {
                    let kind = match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => continue,
                        (true, false) => "client_stream",
                        (false, true) => "server_stream",
                        (true, true) => "bidi_stream",
                    };
                    let (package, service) = (file.package(), service.name());
                    streaming.push((format!("{package}.{service}/{}", method.name()), kind));
                }
            }
        }
        let listed: Vec<_> = STREAMS
            .iter()
            .filter(|(rpc, _)| rpc.starts_with("seckill."))
            .map(|(rpc, kind)| ((*rpc).to_owned(), *kind))
            .collect();
        assert_eq!(listed, streaming);
        assert!(STREAMS.iter().all(|(rpc, _)| TABLE.iter().any(|(known, _)| known == rpc)));
    }
}
