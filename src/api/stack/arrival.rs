//! Arrival: a message that does not come is not waited for, and one that has come is counted.
//!
//! A caller without a deadline who sends half of a message would keep his call, and a place among
//! those of his connection, until the end of the connection.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::Request;
use http_body::{Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service},
};
use tower::Layer;

use super::{
    ErrorReason, Fault,
    measure::{Messages, meter},
};
use crate::metrics::MethodMeter;

/// The methods whose callers send one message after the other, whenever they like.
const STREAMING: [&str; 3] = [
    "/seckill.v1.Seckill/ReserveStream",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// Bounds how long the message of a call may take, by this.
#[derive(Debug, Clone, Copy)]
pub struct Arrival(pub Duration);

/// A service behind [`Arrival`].
#[derive(Debug, Clone)]
pub struct Awaiting<S> {
    limit: Duration,
    inner: S,
}

impl<S> Layer<S> for Arrival {
    type Service = Awaiting<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Awaiting { limit: self.0, inner }
    }
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Awaiting<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let limit = (!STREAMING.contains(&path)).then_some(self.limit);
        let (meter, messages) = (meter(path), Messages::default());
        let body = |body| Body::new(AwaitedBody { body, meter, messages, limit, sleep: None });
        self.inner.call(request.map(body))
    }
}

/// A body that ends with an error when it takes too long.
#[derive(Debug)]
struct AwaitedBody {
    body: Body,
    meter: &'static MethodMeter,
    messages: Messages,
    /// `None` where messages come whenever the caller likes.
    limit: Option<Duration>,
    /// Made when there is something to wait for; most bodies come with their headers.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for AwaitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if let Some(Ok(frame)) = &frame
                && let Some(data) = frame.data_ref()
            {
                this.meter.received(this.messages.count(data));
            }
            return Poll::Ready(frame);
        }
        let Some(limit) = this.limit else { return Poll::Pending };
        ready!(this.sleep.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(cx));
        let message = format!("the message did not arrive within {} ms", limit.as_millis());
        let fault = Fault::new(Code::InvalidArgument, ErrorReason::MalformedMessage, message);
        Poll::Ready(Some(Err(fault.into_status())))
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
    fn only_methods_that_take_a_stream_wait_for_it() {
        let ours = prost_types::FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
        let mut streaming = Vec::new();
        for file in &ours.file {
            for service in &file.service {
                for method in service.method.iter().filter(|method| method.client_streaming()) {
                    let (package, service) = (file.package(), service.name());
                    streaming.push(format!("/{package}.{service}/{}", method.name()));
                }
            }
        }
        let listed: Vec<_> =
            STREAMING.iter().filter(|path| path.starts_with("/seckill.")).copied().collect();
        assert_eq!(listed, streaming);
    }
}
