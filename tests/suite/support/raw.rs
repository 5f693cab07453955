//! A bare HTTP/2 client and a server for it: tonic's own client would mend what a test sends, and
//! it watches deadlines itself.

use std::net::SocketAddr;

use h2::{
    RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap, Request, Response};
use seckill::{
    config::{OptionalAddr, SecretUrl, Settings},
    server::Server,
};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tonic::{Code, Status, codegen::Bytes, transport::Channel};
use tonic_types::StatusExt as _;

pub(crate) const RESERVE: &str = "/seckill.v1.Seckill/Reserve";
pub(crate) const WATCH_STOCK: &str = "/seckill.v1.Seckill/WatchStock";
pub(crate) const CREATE: &str = "/seckill.v1.SeckillAdmin/CreateActivity";

/// A whole server on a port and a database of its own, and two ways to it.
pub(crate) struct Edge {
    pub(crate) channel: Channel,
    pub(crate) raw: SendRequest<Bytes>,
    pub(crate) server: Server,
    _folder: TempDir,
}

impl Edge {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// With other settings than the default ones.
    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> Self {
        let folder = TempDir::new().unwrap();
        let mut settings = Settings::default();
        settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
        settings.http.addr = OptionalAddr(None);
        let path = folder.path().join("seckill.db");
        settings.database.url = SecretUrl::new(format!("sqlite://{}", path.display()));
        change(&mut settings);
        settings.validate().unwrap();
        let server = Server::start(&settings).await.unwrap();
        let uri = format!("http://{}", server.addr);
        let channel = Channel::from_shared(uri).unwrap().connect().await.unwrap();
        let raw = connect(server.addr).await;
        Self { channel, raw, server, _folder: folder }
    }

    /// Opens a call without a client that would mend it or watch its deadline.
    pub(crate) async fn open(
        &self,
        path: &str,
        headers: &[(&str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut raw = self.raw.clone().ready().await.unwrap();
        raw.send_request(request(path, headers), false).unwrap()
    }

    /// Sends these bytes as the body of one call, as they are.
    pub(crate) async fn raw(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let (response, mut send) = self.open(path, headers).await;
        // It may be answered, and closed, already.
        send.send_data(Bytes::copy_from_slice(body), true).ok();
        Answer::read(response).await
    }
}

/// A connection of its own, without TLS.
pub(crate) async fn connect(addr: SocketAddr) -> SendRequest<Bytes> {
    let socket = TcpStream::connect(addr).await.unwrap();
    let (raw, connection) = h2::client::handshake(socket).await.unwrap();
    #[allow(clippy::disallowed_methods, reason = "it ends with the runtime of the test")]
    tokio::spawn(connection);
    raw
}

/// The head of a call.
pub(crate) fn request(path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder()
        .method("POST")
        .uri(format!("http://localhost{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

/// How a call ended.
#[derive(Debug)]
pub(crate) struct Answer {
    /// With the trailers.
    pub(crate) headers: HeaderMap,
    /// Of the body, messages and their headers.
    pub(crate) bytes: usize,
    pub(crate) status: Status,
}

impl Answer {
    pub(crate) async fn read(response: ResponseFuture) -> Self {
        Self::of(response.await.unwrap()).await
    }

    pub(crate) async fn of(response: Response<RecvStream>) -> Self {
        let (parts, mut body) = response.into_parts();
        assert_eq!(parts.status, 200);
        let mut headers = parts.headers;
        let mut bytes = 0;
        while let Some(data) = body.data().await {
            let len = data.unwrap().len();
            body.flow_control().release_capacity(len).unwrap();
            bytes += len;
        }
        headers.extend(body.trailers().await.unwrap().unwrap_or_default());
        let status = Status::from_header_map(&headers).expect("a status");
        Self { headers, bytes, status }
    }

    pub(crate) fn reason(&self) -> String {
        let info = self.status.get_details_error_info().expect("an ErrorInfo");
        assert_eq!(info.domain, "inventory.seckill");
        info.reason
    }

    #[track_caller]
    pub(crate) fn expect(&self, code: Code, reason: &str) {
        assert_eq!((self.status.code(), self.reason().as_str()), (code, reason), "{self:?}");
    }
}

/// A message behind the five bytes that declare its length.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(message);
    bytes
}
