//! gRPC-Web: the services as a browser calls them, over HTTP/1.1.
//!
//! It leads to the stack of the gRPC port: the same table of who may call what, the same limits of
//! messages, the same counts. What stands in front of that is for browsers alone, since a browser
//! calls for any page that it shows.
//!
//! **Promises:** a page of another origin is not served, whatever its token, and no answer allows
//! it to be read there (no CORS). Where callers are not asked who they are, a page must have come
//! from an address or from `localhost`: a name can be pointed at this machine by whoever owns it.
//! At most [`MOST_CALLS`] calls are open.

use std::{
    convert::Infallible,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use http::{
    HeaderMap, HeaderValue, Request, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderName, ORIGIN, X_CONTENT_TYPE_OPTIONS},
};
use http_body::{Frame, SizeHint};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::{
    Code, Status, body::Body, codegen::Bytes, service::Routes, transport::server::Connected as _,
};
use tonic_web::GrpcWebLayer;
use tower::{Layer as _, ServiceExt as _, util::BoxCloneSyncService};

use super::{
    Services,
    access::Peer,
    pb::{ErrorReason, seckill_admin_server, seckill_server},
    stack,
    status::Fault,
};
use crate::config::Settings;

/// How many calls may be open on the HTTP port, streams among them.
pub const MOST_CALLS: usize = 64;
/// The names of the services, which their paths begin with.
pub const SERVICES: [&str; 2] = [seckill_server::SERVICE_NAME, seckill_admin_server::SERVICE_NAME];

const PLAIN_TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const GRPC_WEB: HeaderValue = HeaderValue::from_static("application/grpc-web+proto");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The other end of a connection of the HTTP port; in the extensions of each of its requests.
#[derive(Debug, Clone)]
pub struct Caller {
    peer: Peer,
    calls: Arc<AtomicUsize>,
}

impl Caller {
    #[must_use]
    pub fn new(socket: &TcpStream) -> Self {
        // The port has no TLS, so nobody is known by a certificate here.
        let peer = Peer { tcp: socket.connect_info(), subject: None };
        Self { peer, calls: Arc::default() }
    }

    /// Whether a call of this connection is open.
    #[must_use]
    pub fn is_calling(&self) -> bool {
        self.calls.load(Ordering::Relaxed) > 0
    }

    /// A call that is open for ever.
    #[cfg(test)]
    pub(crate) fn begin_call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

/// The services, as a browser reaches them.
#[derive(Debug, Clone)]
pub struct Web {
    stack: BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>,
    places: Arc<Semaphore>,
    /// Whether callers are asked who they are.
    asks: bool,
}

impl Web {
    #[must_use]
    pub fn new(settings: &Settings, services: &Arc<Services>) -> Self {
        let routes = Routes::new(stack::seckill(services.clone()))
            .add_service(stack::admin(services.clone()))
            .prepare();
        let stack = GrpcWebLayer::new().layer(stack::layers(settings).layer(routes));
        Self {
            stack: BoxCloneSyncService::new(stack),
            places: Arc::new(Semaphore::new(MOST_CALLS)),
            asks: settings.asks_callers(),
        }
    }

    /// Answers one request of a connection.
    pub async fn call<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes, Error: std::error::Error + Send + Sync> + Send + 'static,
    {
        if let Err(why) = self.judge_page(request.headers()) {
            return refused(StatusCode::FORBIDDEN, why);
        }
        let Some(caller) = request.extensions().get::<Caller>().cloned() else {
            return refused(StatusCode::FORBIDDEN, "this call came from nowhere");
        };
        let Ok(place) = self.places.clone().try_acquire_owned() else { return full() };
        let open = Open::new(caller.calls, place);
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(caller.peer);
        let answer = self.stack.clone().oneshot(request).await;
        let mut answer = answer.unwrap_or_else(|never| match never {});
        let headers = answer.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        answer.map(|body| Body::new(OpenBody { body, _open: open }))
    }

    /// Whether the page that makes a call may make it. What no page sends is no browser's.
    fn judge_page(&self, headers: &HeaderMap) -> Result<(), &'static str> {
        const STRANGE: &str = "calls are taken from the pages of this port alone; a proxy in \
                               front of it has to pass on the Host header\n";
        let site = headers.get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
        if site.is_some_and(|site| site != b"same-origin" && site != b"none") {
            return Err(STRANGE);
        }
        let mut origins = headers.get_all(ORIGIN).iter();
        let Some(origin) = origins.next() else { return Ok(()) };
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let own = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        let (Some(host), Some((_, own)), None) = (host, own, origins.next()) else {
            return Err(STRANGE);
        };
        if !own.eq_ignore_ascii_case(host) {
            return Err(STRANGE);
        }
        if self.asks || is_address(host) {
            Ok(())
        } else {
            Err("where callers are not asked who they are, calls are taken from pages at an \
                 address or at localhost; set auth.tokens to use another name\n")
        }
    }
}

/// Whether this host, with or without a port, is a name that nobody can point elsewhere.
fn is_address(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let inner = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    name.eq_ignore_ascii_case("localhost") || inner.unwrap_or(name).parse::<IpAddr>().is_ok()
}

fn refused(code: StatusCode, why: &'static str) -> Response<Body> {
    let mut answer = Response::new(Body::new(why.to_owned()));
    *answer.status_mut() = code;
    answer.headers_mut().insert(CONTENT_TYPE, PLAIN_TEXT);
    answer
}

fn full() -> Response<Body> {
    let message = format!("{MOST_CALLS} calls are open on this port, and that is all it takes");
    let fault = Fault::new(Code::ResourceExhausted, ErrorReason::Overloaded, message);
    let mut answer = fault.into_status().into_http();
    answer.headers_mut().insert(CONTENT_TYPE, GRPC_WEB);
    answer
}

/// A call that is open, with its place; closed when it is dropped.
#[derive(Debug)]
struct Open {
    calls: Arc<AtomicUsize>,
    _place: OwnedSemaphorePermit,
}

impl Open {
    fn new(calls: Arc<AtomicUsize>, place: OwnedSemaphorePermit) -> Self {
        calls.fetch_add(1, Ordering::Relaxed);
        Self { calls, _place: place }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer, which keeps its call open.
#[derive(Debug)]
struct OpenBody {
    body: Body,
    _open: Open,
}

impl http_body::Body for OpenBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(cx)
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
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[test]
    fn only_what_nobody_can_point_elsewhere_is_an_address() {
        for host in ["127.0.0.1:9090", "127.0.0.1", "[::1]:9090", "[::1]", "10.0.0.7", "localhost"]
        {
            assert!(is_address(host), "{host}");
        }
        assert!(is_address("LOCALHOST:9090"));
        for host in ["evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", ""] {
            assert!(!is_address(host), "{host}");
        }
    }
}
