//! One HTTP/2 connection of the generator.

use std::{
    net::SocketAddr,
    task::{Context, Poll},
    time::Duration,
};

use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderValue, Request, Version};
use tokio::{net::TcpStream, task::JoinSet};

use super::{Body, Error};

/// Answers are small; nothing should wait for a window.
const WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 24;
/// Many calls meet their deadline at once; a client that forgets those it gave up would take late
/// answers for a fault.
const MOST_RESETS: usize = 100_000;

/// A connection, and how many calls are open on it.
#[derive(Debug)]
pub(super) struct Link {
    sender: SendRequest<Body>,
    head: Request<()>,
    pub(super) open: usize,
    pub(super) failed: bool,
    /// Carries the bytes; ends with the link.
    carrying: JoinSet<()>,
}

impl Link {
    pub(super) async fn open(addr: SocketAddr, path: &str) -> Result<Self, Error> {
        let unreachable = |error: &dyn std::error::Error| {
            Error::Unavailable(format!("{addr} does not answer: {error}"))
        };
        let socket = TcpStream::connect(addr).await.map_err(|error| unreachable(&error))?;
        socket.set_nodelay(true).map_err(|error| unreachable(&error))?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_concurrent_reset_streams(MOST_RESETS)
            .max_local_error_reset_streams(None)
            .handshake(socket)
            .await
            .map_err(|error| unreachable(&error))?;
        let mut carrying = JoinSet::new();
        carrying.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection of the generator broke");
            }
        });
        let mut sender = sender.ready().await.map_err(|error| unreachable(&error))?;
        let head = head(addr, path);
        // A call without a message: the limits of the server are known once it has answered.
        let (response, _) =
            sender.send_request(head.clone(), true).map_err(|error| unreachable(&error))?;
        response.await.map_err(|error| unreachable(&error))?;
        Ok(Self { sender, head, open: 0, failed: false, carrying })
    }

    /// Whether the server allows one more call; where h2 knows when it will, it wakes us.
    pub(super) fn has_room(&mut self, cx: &mut Context<'_>) -> bool {
        if self.failed || self.open >= self.sender.current_max_send_streams() {
            return false;
        }
        match self.sender.poll_ready(cx) {
            Poll::Ready(ready) => {
                self.failed |= ready.is_err();
                ready.is_ok()
            }
            Poll::Pending => false,
        }
    }

    /// Sends a call; `left` is how long its caller waits.
    pub(super) fn send(
        &mut self,
        body: Body,
        left: Option<Duration>,
    ) -> Result<ResponseFuture, h2::Error> {
        let mut head = self.head.clone();
        if let Some(left) = left {
            // At most eight digits, by the protocol.
            let left_ms = left.as_millis().clamp(1, 99_999_999);
            if let Ok(value) = HeaderValue::from_str(&format!("{left_ms}m")) {
                head.headers_mut().insert("grpc-timeout", value);
            }
        }
        let (response, mut stream) = self.sender.send_request(head, false)?;
        stream.send_data(body, true)?;
        self.open += 1;
        Ok(response)
    }

    /// A call broke; if the connection did, it is used no more.
    pub(super) fn note_failure(&mut self) {
        self.failed |= self.carrying.try_join_next().is_some();
    }
}

/// What every call begins with.
fn head(addr: SocketAddr, path: &str) -> Request<()> {
    Request::post(format!("http://{addr}{path}"))
        .version(Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .header("user-agent", "seckill-bench")
        .body(())
        .expect("an address is part of a URL")
}
