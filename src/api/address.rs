//! Where a call comes from, and whether calls from there are taken.

use std::{
    net::IpAddr,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::{Either, Ready, ready};
use http::{HeaderMap, Request, Response};
use tonic::{Status, body::Body, codegen::Service};
use tower::Layer;

use super::access::Peer;
use crate::{config::LimitsSettings, domain::Networks, error::Error};

/// The address that a call counts for, among the extensions of its request.
#[derive(Debug, Clone, Copy)]
pub struct CallerAddress(pub IpAddr);

/// Names the caller's address, and refuses those that are denied before a byte of the body is read.
#[derive(Debug, Clone, Default)]
pub struct Addresses {
    pub denied: Networks,
    /// Who may name another address than its own, in `x-forwarded-for`.
    pub proxies: Networks,
}

/// A service behind [`Addresses`].
#[derive(Debug, Clone)]
pub struct Addressed<S> {
    inner: S,
    addresses: Arc<Addresses>,
}

impl Addresses {
    #[must_use]
    pub fn new(settings: &LimitsSettings) -> Self {
        Self { denied: settings.denied.clone(), proxies: settings.proxies.clone() }
    }

    /// The caller's address: the peer's, or, behind proxies of ours, the last that is none of ours.
    fn caller(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut caller = peer;
        if !self.proxies.contain(peer) {
            return caller;
        }
        let lines = headers.get_all("x-forwarded-for").iter().rev();
        let texts = lines.filter_map(|line| line.to_str().ok());
        for text in texts.flat_map(|text| text.rsplit(',')) {
            // What a stranger wrote before this is not worth reading.
            let Ok(address) = text.trim().parse::<IpAddr>() else { return caller };
            caller = address;
            if !self.proxies.contain(address) {
                break;
            }
        }
        caller
    }
}

impl<S> Layer<S> for Addresses {
    type Service = Addressed<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Addressed { inner, addresses: Arc::new(self.clone()) }
    }
}

impl<S> Service<Request<Body>> for Addressed<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let peer = request.extensions().get::<Peer>();
        let peer = peer.and_then(|peer| peer.tcp.remote_addr()).map(|peer| peer.ip());
        if let Some(peer) = peer {
            let caller = self.addresses.caller(peer, request.headers());
            if self.addresses.denied.contain(caller) {
                let status: Status = Error::AddressDenied.into();
                return Either::Right(ready(Ok(status.into_http())));
            }
            request.extensions_mut().insert(CallerAddress(caller));
        }
        Either::Left(self.inner.call(request))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    fn caller(peer: &str, forwarded: &[&str]) -> String {
        let addresses =
            Addresses { denied: Networks::default(), proxies: "10.0.0.0/8".parse().unwrap() };
        let mut headers = HeaderMap::new();
        for line in forwarded {
            headers.append("x-forwarded-for", line.parse().unwrap());
        }
        addresses.caller(peer.parse().unwrap(), &headers).to_string()
    }

    #[test]
    fn only_a_proxy_of_ours_may_name_another_address() {
        assert_eq!(caller("192.0.2.1", &["198.51.100.7"]), "192.0.2.1");
        assert_eq!(caller("10.0.0.1", &["198.51.100.7"]), "198.51.100.7");
        assert_eq!(caller("10.0.0.1", &[]), "10.0.0.1");
    }

    #[test]
    fn what_stands_before_the_last_stranger_is_not_believed() {
        assert_eq!(caller("10.0.0.1", &["203.0.113.9, 198.51.100.7, 10.0.0.2"]), "198.51.100.7");
        assert_eq!(
            caller("10.0.0.1", &["203.0.113.9", "198.51.100.7", "10.0.0.2"]),
            "198.51.100.7"
        );
        assert_eq!(caller("10.0.0.1", &["junk"]), "10.0.0.1");
        assert_eq!(caller("10.0.0.1", &["junk, 10.0.0.2"]), "10.0.0.2");
        assert_eq!(caller("10.0.0.1", &["10.0.0.3, 10.0.0.2"]), "10.0.0.3");
    }
}
