//! Accepted connections, bounded: how many there are, how long one may take to begin, and how long
//! it may last.
//!
//! A client that connects and says nothing is never closed by hyper and would hold up a shutdown
//! for ever (hyper#4170), so the TLS handshake and the 24 bytes of the HTTP/2 preface must be there
//! in time. A call whose answer is never read, with a window of 0, would keep its connection for
//! ever too: it outlives the GOAWAY of its age. So there is an end that nothing puts off.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
    time::{Instant, Sleep, sleep_until, timeout_at},
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::tls::Tls;
use crate::{accept::Port, api::access::Peer, config::GrpcSettings, domain::Networks};

/// The length of the HTTP/2 connection preface.
const PREFACE: usize = 24;
/// How long the last calls may take beyond the ages of connection and streams.
const LAST_CALLS: Duration = Duration::from_secs(60);

/// One connection, ready for HTTP/2.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    peer: Peer,
    /// How many bytes of the preface are still to come.
    missing: usize,
    /// Until when the preface must be there, and then the end of the connection.
    limit: Pin<Box<Sleep>>,
    end: Instant,
    _place: Place,
}

#[derive(Debug)]
enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection that was let in, on its way to the thread that serves it.
#[derive(Debug)]
pub(crate) struct Accepted {
    socket: std::net::TcpStream,
    place: Place,
}

/// One of the connections that there may be, and one of those of a thread.
#[derive(Debug)]
struct Place {
    _permit: OwnedSemaphorePermit,
    share: Option<Arc<AtomicUsize>>,
}

/// Where one thread gets its connections from.
#[derive(Debug)]
pub(crate) struct Door {
    accepted: mpsc::UnboundedReceiver<Accepted>,
    first_byte_timeout: Duration,
    max_life: Duration,
    tls: Option<Arc<Tls>>,
    /// Beside those that are ready, since a handshake takes its time.
    handshakes: JoinSet<Option<Connection>>,
}

/// How long a call may be open, whatever its caller does. Streams last a tenth longer than said.
pub(crate) fn longest_call(settings: &GrpcSettings) -> Duration {
    Duration::from_secs(settings.max_stream_age_s).mul_f64(1.1) + LAST_CALLS
}

/// Lets connections in for ever, at most `most` at a time.
pub(crate) async fn accept_all(
    listener: TcpListener,
    denied: Networks,
    most: usize,
    mut deal: impl FnMut(Accepted),
) {
    let mut port = Port::new(listener, "gRPC");
    let places = Arc::new(Semaphore::new(most));
    loop {
        let permit = places.clone().acquire_owned().await.expect("nobody closes it");
        let socket = loop {
            let socket = port.accept().await;
            // A denied peer is not worth a word.
            if socket.peer_addr().is_ok_and(|peer| denied.contain(peer.ip())) {
                continue;
            }
            // Small answers must not wait for each other; a socket that refuses this is closing.
            let _ = socket.set_nodelay(true);
            // Out of the hands of this runtime. One that can't be moved is closed.
            if let Ok(socket) = socket.into_std() {
                break socket;
            }
        };
        deal(Accepted { socket, place: Place { _permit: permit, share: None } });
    }
}

impl Accepted {
    /// Counts it among `connections` for as long as it lives.
    pub(crate) fn counted(mut self, connections: &Arc<AtomicUsize>) -> Self {
        connections.fetch_add(1, Ordering::Relaxed);
        self.place.share = Some(connections.clone());
        self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(share) = &self.share {
            share.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Door {
    /// A door, and the way to it.
    pub(crate) fn new(
        settings: &GrpcSettings,
        tls: Option<Arc<Tls>>,
    ) -> (mpsc::UnboundedSender<Accepted>, Self) {
        let (way, accepted) = mpsc::unbounded_channel();
        let door = Self {
            accepted,
            first_byte_timeout: Duration::from_millis(settings.first_byte_timeout_ms),
            // It lasts up to a tenth longer than said.
            max_life: Duration::from_secs(settings.max_connection_age_s).mul_f64(1.1)
                + longest_call(settings),
            tls,
            handshakes: JoinSet::new(),
        };
        (way, door)
    }

    /// The connections, on the runtime that asks for them.
    pub(crate) fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        stream::unfold(self, |mut door| async move { Some((Ok(door.next().await?), door)) })
    }

    /// `None` once there will be no more.
    async fn next(&mut self) -> Option<Connection> {
        loop {
            tokio::select! {
                Some(Accepted { socket, place }) = self.accepted.recv() => {
                    // A socket that this runtime can't watch is closed.
                    let Ok(socket) = TcpStream::from_std(socket) else { continue };
                    let now = Instant::now();
                    let (begin, end) = (now + self.first_byte_timeout, now + self.max_life);
                    let Some(tls) = self.tls.clone() else {
                        let peer = Peer { tcp: socket.connect_info(), subject: None };
                        let socket = Socket::Plain(socket);
                        return Some(Connection::new(socket, peer, begin, end, place));
                    };
                    self.handshakes.spawn(shake_hands(socket, tls, begin, end, place));
                }
                Some(connection) = self.handshakes.join_next() => {
                    // A handshake that panicked was one that failed.
                    if let Ok(Some(connection)) = connection {
                        return Some(connection);
                    }
                }
                else => return None,
            }
        }
    }
}

async fn shake_hands(
    socket: TcpStream,
    tls: Arc<Tls>,
    begin: Instant,
    end: Instant,
    place: Place,
) -> Option<Connection> {
    let tcp = socket.connect_info();
    // Anybody can fail here, as often as he likes, so it is no line of the usual log.
    match timeout_at(begin, tls.accept(socket)).await {
        Ok(Ok((stream, subject))) => {
            let peer = Peer { tcp, subject };
            Some(Connection::new(Socket::Tls(Box::new(stream)), peer, begin, end, place))
        }
        Ok(Err(error)) => {
            tracing::debug!(addr = ?tcp.remote_addr, %error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!(addr = ?tcp.remote_addr, "a TLS handshake took too long");
            None
        }
    }
}

impl Connection {
    fn new(socket: Socket, peer: Peer, begin: Instant, end: Instant, place: Place) -> Self {
        let limit = Box::pin(sleep_until(begin));
        Self { socket, peer, missing: PREFACE, limit, end, _place: place }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.peer.clone()
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
        if read.is_pending() {
            ready!(self.limit.as_mut().poll(cx));
            let text = if self.missing > 0 { "the client said nothing" } else { "it is too old" };
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)));
        }
        if self.missing > 0 {
            self.missing = self.missing.saturating_sub(buf.filled().len() - before);
            if self.missing == 0 {
                let end = self.end;
                self.limit.as_mut().reset(end);
            }
        }
        read
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

/// Passes a call on to whichever socket it is.
macro_rules! either {
    ($self:expr, $socket:ident => $call:expr) => {
        match $self {
            Socket::Plain($socket) => $call,
            Socket::Tls($socket) => $call,
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_read(cx, buf))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        either!(self, socket => socket.is_write_vectored())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn connection(settings: &GrpcSettings) -> (TcpStream, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (way, door) = Door::new(settings, None);
        let deal = |accepted| way.send(accepted).unwrap();
        let accepting = accept_all(listener, Networks::default(), 1, deal);
        let mut incoming = Box::pin(door.incoming());
        let client = TcpStream::connect(addr).await.unwrap();
        tokio::select! {
            () = accepting => unreachable!("it never ends"),
            connection = incoming.next() => (client, connection.unwrap().unwrap()),
        }
    }

    async fn ends_with(connection: &mut Connection, text: &str) -> Duration {
        let begun = Instant::now();
        let error = connection.read(&mut [0; 64]).await.unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (io::ErrorKind::TimedOut, text));
        begun.elapsed()
    }

    #[tokio::test]
    async fn a_client_that_says_nothing_is_not_waited_for() {
        let settings = GrpcSettings { first_byte_timeout_ms: 2_000, ..GrpcSettings::default() };
        let (mut client, mut connection) = connection(&settings).await;
        client.write_all(&[b'x'; PREFACE - 1]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE - 1]).await.unwrap();
        tokio::time::pause();
        let waited = ends_with(&mut connection, "the client said nothing").await;
        assert!(waited < Duration::from_secs(3), "{waited:?}");
    }

    #[tokio::test]
    async fn a_connection_ends_whatever_its_calls_wait_for() {
        let settings = GrpcSettings {
            max_connection_age_s: 100,
            max_stream_age_s: 1_000,
            ..GrpcSettings::default()
        };
        let (mut client, mut connection) = connection(&settings).await;
        client.write_all(&[b'x'; PREFACE]).await.unwrap();
        connection.read_exact(&mut [0; PREFACE]).await.unwrap();
        tokio::time::pause();
        let lasted = ends_with(&mut connection, "it is too old").await;
        assert_eq!(lasted.as_secs_f64().round(), 1_270.0, "{lasted:?}");
    }
}
