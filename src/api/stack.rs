//! What every call passes before it reaches a service.
//!
//! tonic wraps these layers into its own: whatever is decided outside of them (`Server::timeout`,
//! load shedding, concurrency limits) is answered without an `ErrorInfo`. Leave those settings
//! alone.

mod arrival;
mod measure;
mod trace;

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{CatchUnwind, Map},
};
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service},
};
use tower::Layer;

use super::{
    Services,
    access::{Access, Guard},
    address::Addresses,
    pb::{ErrorReason, seckill_admin_server::SeckillAdminServer, seckill_server::SeckillServer},
    status::{Fault, is_ours},
};
use crate::{config::Settings, error::Error};

pub use arrival::{Arrival, Awaiting};
pub use measure::{Measure, Measured, MeasuredFuture};
pub use trace::{Trace, Traced, TracedFuture};

/// The largest request of the `Seckill` service, in bytes.
pub const SECKILL_REQUEST_LIMIT: usize = 64 * 1_024;
/// The largest request of the `SeckillAdmin` service, in bytes.
pub const ADMIN_REQUEST_LIMIT: usize = 4 * 1_024 * 1_024;

/// What [`layers`] gives.
pub type Layers = (Measure, Trace, Mend, Catch, Addresses, Guard, Arrival, Deadlines);

/// The layers of every call, from the outside in.
#[must_use]
pub fn layers(settings: &Settings) -> Layers {
    (
        // Outermost, so that it counts what the caller hears, and all of the time.
        Measure,
        // What the layers below write to the log is to show its trace.
        Trace,
        // It must see every status: those that tonic makes by itself get the code and the reason
        // that the contract promises.
        Mend,
        // A panic must neither end a connection nor stay unseen.
        Catch,
        // Whose address is denied, and who may not call, is sent away before anything is done.
        Addresses::new(&settings.limits),
        Guard(Arc::new(Access::new(settings))),
        // A message that does not come must not keep its call.
        Arrival(Duration::from_millis(settings.grpc.request_timeout_ms)),
        // Innermost, so that what it answers is seen by the others too.
        Deadlines,
    )
}

/// The `Seckill` service, within its message limit.
#[must_use]
pub fn seckill(services: Arc<Services>) -> SeckillServer<Services> {
    SeckillServer::from_arc(services).max_decoding_message_size(SECKILL_REQUEST_LIMIT)
}

/// The `SeckillAdmin` service, within its message limit.
#[must_use]
pub fn admin(services: Arc<Services>) -> SeckillAdminServer<Services> {
    SeckillAdminServer::from_arc(services).max_decoding_message_size(ADMIN_REQUEST_LIMIT)
}

// Mend: statuses of tonic's own.

/// Rewrites the statuses that no handler of ours has made.
#[derive(Debug, Clone, Copy)]
pub struct Mend;

/// A service behind [`Mend`].
#[derive(Debug, Clone)]
pub struct Mending<S>(S);

impl<S> Layer<S> for Mend {
    type Service = Mending<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Mending(inner)
    }
}

type MendResult<E> = fn(Result<Response<Body>, E>) -> Result<Response<Body>, E>;

impl<S> Service<Request<Body>> for Mending<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Map<S::Future, MendResult<S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.call(request).map(|result| result.map(mend))
    }
}

/// Mends a response that is nothing but a status of tonic's own.
fn mend(mut response: Response<Body>) -> Response<Body> {
    let Some(code) = response.headers().get(Status::GRPC_STATUS) else {
        // The usual case: a body, whose trailers have the status.
        return response;
    };
    let code = Code::from_bytes(code.as_bytes());
    let status = response.extensions().get::<Status>();
    if status.is_some_and(is_ours) {
        return response;
    }
    let message = status.map(|status| status.message().to_owned()).unwrap_or_default();
    if let Some(fault) = mended(code, &message) {
        let status = fault.into_status();
        // What else is in the headers stays, such as the encodings that are accepted.
        if status.add_header(response.headers_mut()).is_ok() {
            response.extensions_mut().insert(status);
        }
    }
    response
}

/// A status that tonic made of what the caller of a stream sent, as the contract calls it.
pub(super) fn mended_status(status: &Status) -> Status {
    mended(status.code(), status.message()).map_or_else(|| status.clone(), Fault::into_status)
}

/// What the contract calls a status that tonic made before any handler ran.
fn mended(code: Code, message: &str) -> Option<Fault> {
    match code {
        // Undecodable, empty, cut short, or a compressed message without an encoding.
        Code::Internal => Some(Fault::new(
            Code::InvalidArgument,
            ErrorReason::MalformedMessage,
            format!("the request can't be decoded: {message}"),
        )),
        // Plain, and compressed.
        Code::OutOfRange | Code::ResourceExhausted => {
            Some(Fault::new(Code::ResourceExhausted, ErrorReason::MessageTooLarge, message))
        }
        Code::Unimplemented => {
            let message = if message.is_empty() { "there is no such method" } else { message };
            Some(Fault::new(Code::Unimplemented, ErrorReason::Unimplemented, message))
        }
        // Answers of the health and reflection services.
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::InvalidArgument
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => None,
    }
}

// Catch: panics.

/// Turns a panic into INTERNAL, and writes it to the log.
#[derive(Debug, Clone, Copy)]
pub struct Catch;

/// A service behind [`Catch`].
#[derive(Debug, Clone)]
pub struct Catching<S>(S);

impl<S> Layer<S> for Catch {
    type Service = Catching<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Catching(inner)
    }
}

type Caught<E> = Result<Result<Response<Body>, E>, Box<dyn Any + Send>>;
type AnswerCaught<E> = fn(Caught<E>) -> Result<Response<Body>, E>;

impl<S> Service<Request<Body>> for Catching<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Map<CatchUnwind<AssertUnwindSafe<S::Future>>, AnswerCaught<S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The future is dropped after a panic, and nothing that it shares is broken by one: locks
        // are taken over when poisoned.
        let answer = AssertUnwindSafe(self.0.call(request)).catch_unwind();
        answer.map(|caught| caught.unwrap_or_else(|panic| Ok(panicked(&*panic))))
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Response<Body> {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    Status::from(Error::internal(format!("a handler panicked: {text}"))).into_http()
}

// Deadlines.

/// When the caller stops waiting; in the extensions of a request that has a `grpc-timeout`.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub std::time::Instant);

/// Answers DEADLINE_EXCEEDED when the time of `grpc-timeout` is up, and ends streams then.
///
/// tonic has a timer for the same header, which knows only CANCELLED and forgets streams. It is
/// outside of this layer, asks this one before its own timer whenever either wakes up, and
/// started later: so it always hears of the deadline from here.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines;

/// A service behind [`Deadlines`].
#[derive(Debug, Clone)]
pub struct Bounded<S>(S);

impl<S> Layer<S> for Deadlines {
    type Service = Bounded<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Bounded(inner)
    }
}

impl<S> Service<Request<Body>> for Bounded<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoundedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let timeout = timeout(request.headers());
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(Deadline(deadline.into_std()));
        }
        BoundedFuture {
            answer: self.0.call(request),
            started: false,
            sleep: deadline.map(sleep_until),
        }
    }
}

pin_project! {
    /// The answer of a service, or DEADLINE_EXCEEDED.
    #[derive(Debug)]
    pub struct BoundedFuture<F> {
        #[pin]
        answer: F,
        started: bool,
        #[pin]
        sleep: Option<Sleep>,
    }
}

impl<F, E> Future for BoundedFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let Some(sleep) = this.sleep.as_pin_mut() else {
            return this.answer.poll(cx);
        };
        let deadline = sleep.deadline();
        // Nothing is begun for somebody who has left.
        if !*this.started && Instant::now() >= deadline {
            return Poll::Ready(Ok(exceeded().into_http()));
        }
        *this.started = true;
        if let Poll::Ready(answer) = this.answer.poll(cx) {
            return Poll::Ready(answer.map(|response| {
                response.map(|body| Body::new(BoundedBody { body, deadline, sleep: None }))
            }));
        }
        // The clock, and not only the timer: tonic's timer may have fired first.
        if Instant::now() < deadline {
            ready!(sleep.poll(cx));
        }
        Poll::Ready(Ok(exceeded().into_http()))
    }
}

/// A body that ends at the deadline.
#[derive(Debug)]
struct BoundedBody {
    body: Body,
    deadline: Instant,
    /// Made when there is something to wait for; most bodies are whole at once.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for BoundedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) if frame.is_data() && Instant::now() >= this.deadline => {}
            Poll::Ready(frame) => return Poll::Ready(frame),
            Poll::Pending => {
                let sleep = this.sleep.get_or_insert_with(|| Box::pin(sleep_until(this.deadline)));
                ready!(sleep.as_mut().poll(cx));
            }
        }
        // Dropping the body drops the stream behind it.
        this.body = Body::empty();
        let mut trailers = HeaderMap::new();
        exceeded().add_header(&mut trailers)?;
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn exceeded() -> Status {
    Error::DeadlineExceeded.into()
}

/// The `grpc-timeout` of a call; one that breaks the protocol's rule counts as none.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3_600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
