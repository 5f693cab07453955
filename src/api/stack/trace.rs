//! Trace: a span around every call that is traced. Without traces it only passes calls on.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tonic::{Code, Status, body::Body, codegen::Service};
use tower::Layer;
use tracing::{Instrument as _, Span, instrument::Instrumented};

use crate::telemetry::spans;

/// Puts every call that is sampled into a span.
#[derive(Debug, Clone, Copy)]
pub struct Trace;

/// A service behind [`Trace`].
#[derive(Debug, Clone)]
pub struct Traced<S>(S);

impl<S> Layer<S> for Trace {
    type Service = Traced<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Traced(inner)
    }
}

impl<S> Service<Request<Body>> for Traced<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = TracedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let span = if spans::is_on() {
            spans::call(request.uri().path(), spans::origin(request.headers()))
        } else {
            Span::none()
        };
        let answer = span.in_scope(|| self.0.call(request));
        TracedFuture { answer: answer.instrument(span) }
    }
}

pin_project! {
    /// The answer of a service, in its span; that of a stream ends with its headers.
    #[derive(Debug)]
    pub struct TracedFuture<F> {
        #[pin]
        answer: Instrumented<F>,
    }
}

impl<F, E> Future for TracedFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let mut answer = ready!(this.answer.as_mut().poll(cx));
        let span = this.answer.span();
        if !span.is_none()
            && let Ok(response) = &mut answer
        {
            let code = response.headers().get(Status::GRPC_STATUS);
            let code = code.map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()));
            spans::answered(span, code.into(), response.headers_mut());
        }
        Poll::Ready(answer)
    }
}
