//! HTTP/2 frames as no library would send them, over a socket of their own.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout},
};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// SETTINGS_INITIAL_WINDOW_SIZE.
const INITIAL_WINDOW: u8 = 4;

/// What became of a flood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flood {
    /// The server closed the connection.
    Closed,
    /// The server took nothing more for a while.
    Blocked,
    /// All of it was sent.
    Sent,
}

/// A connection that has sent the preface.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) socket: TcpStream,
}

impl Raw {
    /// With the usual windows.
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        Self::with_settings(addr, &[]).await
    }

    /// A client that gives the server no room for a single byte of an answer.
    pub(crate) async fn without_window(addr: SocketAddr) -> Self {
        Self::with_settings(addr, &[0, INITIAL_WINDOW, 0, 0, 0, 0]).await
    }

    async fn with_settings(addr: SocketAddr, settings: &[u8]) -> Self {
        let mut socket = TcpStream::connect(addr).await.unwrap();
        socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        socket.write_all(&frame(SETTINGS, 0, 0, settings)).await.unwrap();
        Self { socket }
    }

    /// Sends piece after piece, and reads nothing.
    pub(crate) async fn flood(
        &mut self,
        pieces: impl IntoIterator<Item = Vec<u8>>,
        patience: Duration,
    ) -> Flood {
        for piece in pieces {
            match timeout(patience, self.socket.write_all(&piece)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Flood::Closed,
                Err(_) => return Flood::Blocked,
            }
        }
        Flood::Sent
    }

    /// The same, and reads all that comes; answers also with the reason of a GOAWAY.
    pub(crate) async fn flood_and_read(
        &mut self,
        pieces: impl IntoIterator<Item = Vec<u8>>,
        patience: Duration,
    ) -> (Flood, Option<h2::Reason>) {
        let (mut read, mut write) = self.socket.split();
        let mut answers = Vec::new();
        let flood = {
            let reading = read.read_to_end(&mut answers);
            let writing = async {
                for piece in pieces {
                    match timeout(patience, write.write_all(&piece)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => return Flood::Closed,
                        Err(_) => return Flood::Blocked,
                    }
                }
                Flood::Sent
            };
            tokio::select! {
                biased;
                _ = reading => Flood::Closed,
                flood = writing => flood,
            }
        };
        if flood == Flood::Closed {
            // What the server wrote before it closed the connection is still to be read.
            timeout(patience, read.read_to_end(&mut answers)).await.ok();
        }
        (flood, goaway(&answers))
    }

    /// Reads until the server closes the connection; whether it did so in time.
    pub(crate) async fn is_closed_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut rest = vec![0; 64 * 1_024];
        loop {
            match tokio::time::timeout_at(deadline, self.socket.read(&mut rest)).await {
                Ok(Ok(0)) => return true,
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return error.kind() != io::ErrorKind::Interrupted,
                Err(_) => return false,
            }
        }
    }
}

/// Looks for a GOAWAY in what a server sends, piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Goodbye {
    head: Vec<u8>,
    /// How much of the present frame is still to come.
    left: usize,
}

impl Goodbye {
    /// Whether a GOAWAY begins in this piece.
    pub(crate) fn is_in(&mut self, mut piece: &[u8]) -> bool {
        let mut found = false;
        while !piece.is_empty() {
            let of_frame = self.left.min(piece.len());
            (self.left, piece) = (self.left - of_frame, &piece[of_frame..]);
            let of_head = if self.left > 0 { 0 } else { piece.len().min(9 - self.head.len()) };
            self.head.extend(&piece[..of_head]);
            piece = &piece[of_head..];
            if let [a, b, c, kind, _, _, _, _, _] = self.head[..] {
                found |= kind == GOAWAY;
                self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                self.head.clear();
            }
        }
        found
    }
}

/// The reason of the last GOAWAY among these frames.
fn goaway(mut frames: &[u8]) -> Option<h2::Reason> {
    let mut reason = None;
    while let Some((head, rest)) = frames.split_at_checked(9) {
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let Some((payload, rest)) = rest.split_at_checked(length) else { break };
        if head[3] == GOAWAY {
            let code = payload[4..8].try_into().unwrap();
            reason = Some(h2::Reason::from(u32::from_be_bytes(code)));
        }
        frames = rest;
    }
    reason
}

/// A frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The compressed headers of a call, without any table.
pub(crate) fn call(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    // :method POST, :scheme http.
    let mut block = vec![0x83, 0x86];
    let usual = [
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    for (name, value) in usual.iter().chain(more) {
        block.push(0);
        string(&mut block, name.as_bytes());
        string(&mut block, value.as_bytes());
    }
    block
}

/// A text without Huffman's code, behind its length.
pub(crate) fn string(block: &mut Vec<u8>, text: &[u8]) {
    integer(block, 7, 0, text.len());
    block.extend_from_slice(text);
}

/// An integer in what is left of a byte beside `flags`.
pub(crate) fn integer(block: &mut Vec<u8>, bits: u32, flags: u8, value: usize) {
    let full = (1_usize << bits) - 1;
    if value < full {
        block.push(flags | u8::try_from(value).unwrap());
        return;
    }
    block.push(flags | u8::try_from(full).unwrap());
    let mut rest = value - full;
    while rest >= 128 {
        block.push(u8::try_from(rest % 128).unwrap() | 128);
        rest /= 128;
    }
    block.push(u8::try_from(rest).unwrap());
}

/// The id of the n-th stream of a client, from 0 on.
pub(crate) fn stream(nth: u32) -> u32 {
    2 * nth + 1
}
