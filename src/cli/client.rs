//! Calls to a server, each with a deadline.

use std::time::Duration;

use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};

use super::{
    Global,
    failure::{Failure, RpcFailure},
};
use crate::api::pb::{seckill_admin_client::SeckillAdminClient, seckill_client::SeckillClient};

/// The largest answer that is read; a list of 1,000 activities with long titles fits.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// How long a server may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How much longer than the server we wait, so that its own answer arrives first.
const SLACK: Duration = Duration::from_millis(500);

/// A server, connected.
#[derive(Debug, Clone)]
pub(super) struct Client {
    channel: Channel,
    timeout: Duration,
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
        let channel = connect(&global.server, timeout.min(CONNECT_LIMIT)).await?;
        Ok(Self { channel, timeout })
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
        call(self.timeout, request, rpc).await
    }
}

/// Opens one connection.
pub(super) async fn connect(server: &str, timeout: Duration) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(server.to_owned())
        .ok()
        .filter(|endpoint| {
            endpoint.uri().scheme_str() == Some("http") && endpoint.uri().host().is_some()
        })
        .ok_or_else(|| {
            Failure::Usage(format!(
                "--server {server:?}: must be a URL as in http://127.0.0.1:50051"
            ))
        })?;
    endpoint
        .connect_timeout(timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .connect()
        .await
        .map_err(|error| Failure::NoServer { server: server.to_owned(), cause: root_cause(&error) })
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
    timeout: Duration,
    rpc: impl Future<Output = Result<Response<A>, Status>>,
) -> Result<A, Failure> {
    match tokio::time::timeout(timeout + SLACK, rpc).await {
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
