//! What the HTTP port answers, and metrics as Prometheus reads them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// What `/metrics` says, by series.
pub(crate) type Series = BTreeMap<String, f64>;

/// An answer of the HTTP port.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends these bytes and reads until the server closes the connection.
pub(crate) async fn send(addr: SocketAddr, request: &str) -> Answer {
    let mut socket = TcpStream::connect(addr).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // Who sent too much may see a reset after the answer.
    let _ =
        timeout(Duration::from_secs(10), socket.read_to_end(&mut answer)).await.expect("an end");
    // What is compressed is no text.
    read_answer(&answer)
}

fn read_answer(answer: &[u8]) -> Answer {
    let answer = String::from_utf8_lossy(answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Answer { code: code.unwrap(), head: head.to_ascii_lowercase(), body: body.to_owned() }
}

pub(crate) async fn ask(addr: SocketAddr, method: &str, path: &str) -> Answer {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: seckill\r\nconnection: close\r\n\r\n");
    send(addr, &head).await
}

pub(crate) async fn get(addr: SocketAddr, path: &str) -> Answer {
    ask(addr, "GET", path).await
}

/// Asks over a connection that stays.
pub(crate) async fn get_over(socket: &mut TcpStream, path: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nhost: seckill\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut read = Vec::new();
    loop {
        let more = timeout(Duration::from_secs(10), socket.read_buf(&mut read)).await;
        assert!(more.expect("an answer").unwrap() > 0, "it ended within an answer");
        let Some(head) = read.windows(4).position(|end| end == b"\r\n\r\n") else { continue };
        let answer = read_answer(&read);
        let length = answer.head.split("content-length: ").nth(1).unwrap();
        let length: usize = length.lines().next().unwrap().parse().unwrap();
        if read.len() == head + 4 + length {
            return answer;
        }
    }
}

/// What `/metrics` says, by series. Every sample must have a type and a text.
pub(crate) async fn metrics(addr: SocketAddr) -> Series {
    read_metrics(&get(addr, "/metrics").await)
}

/// The same, of an answer that is there.
pub(crate) fn read_metrics(answer: &Answer) -> Series {
    assert_eq!(answer.code, 200);
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    let mut samples = BTreeMap::new();
    let (mut helped, mut typed) = (BTreeSet::new(), BTreeMap::new());
    for line in answer.body.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').unwrap();
            assert!(!text.is_empty() && helped.insert(name), "{line}");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(typed.insert(name, kind), None, "{line}");
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .filter_map(|suffix| name.strip_suffix(suffix))
                .find(|family| typed.get(family) == Some(&"histogram"))
                .unwrap_or(name);
            assert!(helped.contains(family) && typed.contains_key(family), "{line}");
            let known = samples.insert(series.to_owned(), value.parse().unwrap());
            assert_eq!(known, None, "twice: {line}");
        }
    }
    samples
}
