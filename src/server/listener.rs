//! Accepted sockets, bounded: how many there are, and how long one may stay silent.
//!
//! A client that connects and says nothing is never closed by hyper and would hold up a shutdown
//! for ever (hyper#4170), so the 24 bytes of the HTTP/2 preface must arrive in time.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Sleep,
};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::{config::GrpcSettings, domain::Networks};

/// The length of the HTTP/2 connection preface.
const PREFACE: usize = 24;
/// How long to wait after a failed accept, such as without a free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// One accepted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: TcpStream,
    /// How many bytes are still to come, and until when; gone once they came.
    preface: Option<(usize, Pin<Box<Sleep>>)>,
    _place: OwnedSemaphorePermit,
}

/// The accepted connections, for as long as the listener lives.
pub(crate) fn incoming(
    listener: TcpListener,
    denied: Networks,
    settings: &GrpcSettings,
) -> impl Stream<Item = io::Result<Connection>> + use<> {
    let places = Arc::new(Semaphore::new(settings.max_connections));
    let first_byte_timeout = Duration::from_millis(settings.first_byte_timeout_ms);
    let denied = Arc::new(denied);
    stream::unfold((listener, places, denied), move |(listener, places, denied)| async move {
        let place = places.clone().acquire_owned().await.ok()?;
        let socket = loop {
            match listener.accept().await {
                // Without a word: it is not worth one.
                Ok((_, peer)) if denied.contain(peer.ip()) => {}
                Ok((socket, _)) => break socket,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        // Small answers must not wait for each other; a socket that refuses this is closing.
        let _ = socket.set_nodelay(true);
        let limit = Box::pin(tokio::time::sleep(first_byte_timeout));
        let connection = Connection { socket, preface: Some((PREFACE, limit)), _place: place };
        Some((Ok(connection), (listener, places, denied)))
    })
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.socket.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buf);
        let Some((missing, limit)) = &mut self.preface else { return read };
        match read {
            Poll::Ready(result) => {
                let arrived = buf.filled().len() - before;
                *missing = missing.saturating_sub(arrived);
                if *missing == 0 || arrived == 0 {
                    self.preface = None;
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(limit.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client said nothing")))
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}
