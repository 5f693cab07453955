//! A wire that takes its time: everything that a server answers arrives later.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::Error;

const PIECE: usize = 64 * 1_024;
/// Pieces on their way over one connection.
const ON_THE_WAY: usize = 4_096;

/// Listens on a port of loopback until it is dropped.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) addr: SocketAddr,
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// A round trip to `server` takes `delay` longer through this.
    ///
    /// # Errors
    /// No port can be listened on.
    pub(super) async fn open(server: SocketAddr, delay: Duration) -> Result<Self, Error> {
        let fault = |error| Error::Internal(format!("the slow wire: {error}"));
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(fault)?;
        let addr = listener.local_addr().map_err(fault)?;
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut carrying = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                carrying.spawn(carry(client, server, delay));
                while carrying.try_join_next().is_some() {}
            }
        });
        Ok(Self { addr, _accepting: accepting })
    }
}

/// Ends both sides as soon as one of them ends.
async fn carry(client: TcpStream, server: SocketAddr, delay: Duration) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    // A wire that cannot be set up so carries all the same, slower.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((mut ask, answer), (answers, mut asks)) = (client.into_split(), server.into_split());
    tokio::select! {
        _ = copy(&mut ask, &mut asks) => {}
        () = delayed(answers, answer, delay) => {}
    }
}

async fn delayed(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) {
    let (send, mut receive) = mpsc::channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    let read = async move {
        let mut piece = vec![0; PIECE];
        while let Ok(length @ 1..) = from.read(&mut piece).await {
            if send.send((Instant::now() + delay, piece[..length].to_vec())).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = receive.recv().await {
            sleep_until(due).await;
            if to.write_all(&piece).await.is_err() {
                break;
            }
        }
    };
    tokio::join!(read, write);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[tokio::test]
    async fn answers_come_late_and_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let (mut read, mut write) = socket.split();
            copy(&mut read, &mut write).await.unwrap();
        });
        let delay = Duration::from_millis(30);
        let proxy = Proxy::open(server, delay).await.unwrap();
        let mut socket = TcpStream::connect(proxy.addr).await.unwrap();
        for text in [b"first", b"again"] {
            let begun = Instant::now();
            socket.write_all(text).await.unwrap();
            let mut echo = [0; 5];
            socket.read_exact(&mut echo).await.unwrap();
            assert_eq!((&echo, begun.elapsed() >= delay), (text, true));
        }
    }
}
