//! Calls to a server, each with a deadline.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::{
    Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use super::{
    DEFAULT_SERVER, Global,
    credentials::Credentials,
    failure::{Failure, NoConnection, RpcFailure, SERVER_SPEAKS_TLS, tls_failure},
};
use crate::{
    api::pb::{seckill_admin_client::SeckillAdminClient, seckill_client::SeckillClient},
    server::tls::SPEAKS_TLS,
};

/// The largest answer that is read; a list of 1,000 activities with long titles fits.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// How long a server may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long it may take to find out why a connection ended.
const PROBE_LIMIT: Duration = Duration::from_secs(2);
/// How much longer than the server we wait, so that its own answer arrives first.
const SLACK: Duration = Duration::from_millis(500);

/// A server, connected.
#[derive(Debug, Clone)]
pub(super) struct Client {
    channel: Channel,
    timeout: Duration,
    authorization: Option<MetadataValue<Ascii>>,
    server: String,
    is_tls: bool,
}

impl Client {
    /// Connects to the server of the command line.
    pub(super) async fn connect(global: &Global) -> Result<Self, Failure> {
        Self::connect_with(global, global.timeout()).await
    }

    /// The same, for calls that go through all reservations of an activity.
    pub(super) async fn connect_for_long(global: &Global) -> Result<Self, Failure> {
        Self::connect_with(global, global.long_timeout()).await
    }

    async fn connect_with(global: &Global, timeout: Duration) -> Result<Self, Failure> {
        let authorization = global.credentials.authorization()?;
        let limit = timeout.min(CONNECT_LIMIT);
        let channel = connect(&global.server, &global.credentials, limit).await?;
        let is_tls = global.server.starts_with("https:");
        Ok(Self { channel, timeout, authorization, server: global.server.clone(), is_tls })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn seckill(&self) -> SeckillClient<Channel> {
        SeckillClient::new(self.channel()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(super) fn admin(&self) -> SeckillAdminClient<Channel> {
        SeckillAdminClient::new(self.channel()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    /// One call with the deadline of the command line.
    pub(super) async fn call<Q, A>(
        &self,
        request: Q,
        rpc: impl AsyncFnOnce(Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, Failure> {
        let mut request = self.request(request);
        request.set_timeout(self.timeout);
        match answer(self.timeout, rpc(request)).await {
            Err(Failure::Rpc(rpc)) if rpc.is_lost_connection() => Err(self.explained(rpc).await),
            answer => answer,
        }
    }

    /// Why a connection may have ended before an answer came: the call itself hears no more than
    /// that it is gone.
    async fn explained(&self, rpc: Box<RpcFailure>) -> Failure {
        if self.is_tls {
            // In TLS 1.3 a server refuses a certificate after the client's part of the handshake.
            return Failure::Tls(format!(
                "the connection ended before an answer came; so does a server that refuses this \
                 client's certificate, or wants one (--cert-file and --key-file) ({})",
                rpc.message
            ));
        }
        match timeout(PROBE_LIMIT, spoken(&self.server)).await {
            Ok(Ok(Spoken::Tls)) => Failure::Tls(SERVER_SPEAKS_TLS.to_owned()),
            Ok(Ok(Spoken::Http1)) => Failure::Unavailable(format!(
                "{} speaks HTTP/1.1, as the port of metrics and the dashboard does; give the \
                 address of gRPC (grpc.addr), as in {DEFAULT_SERVER}",
                self.server
            )),
            Ok(Ok(Spoken::Other) | Err(_)) | Err(_) => Failure::Rpc(rpc),
        }
    }

    /// A request that says who calls, without a deadline.
    pub(super) fn request<Q>(&self, request: Q) -> Request<Q> {
        let mut request = Request::new(request);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }
}

/// Opens one connection.
pub(super) async fn connect(
    server: &str,
    credentials: &Credentials,
    timeout: Duration,
) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(server.to_owned())
        .ok()
        .filter(|endpoint| endpoint.uri().host().is_some())
        .ok_or_else(|| not_a_server(server))?;
    let endpoint = match (endpoint.uri().scheme_str(), credentials.tls_flag()) {
        (Some("https"), _) => endpoint.tls_config(credentials.tls()?).map_err(|error| {
            Failure::Usage(format!("the certificates can't be used: {}", root_cause(&error)))
        })?,
        (Some("http"), None) => endpoint,
        (Some("http"), Some(flag)) => {
            return Err(Failure::Usage(format!("{flag} needs an https server, not {server}")));
        }
        (_, _) => return Err(not_a_server(server)),
    };
    endpoint
        .connect_timeout(timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .connect()
        .await
        .map_err(|error| {
            tls_failure(&error).unwrap_or_else(|| Failure::NoServer {
                server: server.to_owned(),
                why: NoConnection::of(&error, timeout),
                cause: root_cause(&error),
            })
        })
}

/// What is spoken where a call without TLS ended without an answer.
enum Spoken {
    /// A server of ours that wants TLS.
    Tls,
    Http1,
    Other,
}

async fn spoken(server: &str) -> io::Result<Spoken> {
    let Some(authority) = server.strip_prefix("http://") else { return Ok(Spoken::Other) };
    let authority = authority.trim_end_matches('/');
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut socket = TcpStream::connect(authority).await?;
    socket.write_all(preface).await?;
    socket.shutdown().await?;
    if said(socket).await.contains(SPEAKS_TLS) {
        return Ok(Spoken::Tls);
    }
    let get = format!("GET / HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n");
    let mut socket = TcpStream::connect(authority).await?;
    socket.write_all(get.as_bytes()).await?;
    let is_http1 = said(socket).await.starts_with("HTTP/1.");
    Ok(if is_http1 { Spoken::Http1 } else { Spoken::Other })
}

/// The beginning of what comes, also where it ends in a reset.
async fn said(socket: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = socket.take(1_024).read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

fn not_a_server(server: &str) -> Failure {
    Failure::Usage(format!(
        "--server {server:?}: must be a URL as in http://127.0.0.1:50051 or https://seckill:50051"
    ))
}

/// One call with a deadline, which the server is told.
pub(super) async fn call<Q, A>(
    timeout: Duration,
    request: Q,
    rpc: impl AsyncFnOnce(Request<Q>) -> Result<Response<A>, Status>,
) -> Result<A, Failure> {
    answer(timeout, rpc(with_deadline(timeout, request))).await
}

/// A request that tells the server its deadline.
pub(super) fn with_deadline<Q>(timeout: Duration, request: Q) -> Request<Q> {
    let mut request = Request::new(request);
    request.set_timeout(timeout);
    request
}

/// Waits for an answer, but not for ever.
pub(super) async fn answer<A>(
    limit: Duration,
    rpc: impl Future<Output = Result<Response<A>, Status>>,
) -> Result<A, Failure> {
    match tokio::time::timeout(limit + SLACK, rpc).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Failure::Rpc(Box::new(RpcFailure::deadline()))),
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
