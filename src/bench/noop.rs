//! What a call costs that does nothing: the same port, layers, codec and limits, and a service that
//! answers Reserve with a constant.
//!
//! Everything that a real refusal costs above this is ours; everything else is that of tonic, hyper
//! and h2 on this machine.

use std::{net::SocketAddr, pin::Pin};

use futures_util::Stream;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use super::Error;
use crate::{
    api::{
        self,
        pb::{
            self, ReserveOutcome,
            seckill_server::{Seckill, SeckillServer},
        },
        stack,
    },
    config::Settings,
    server::{self, fronts::Fronts},
};

/// The service that answers at once.
#[derive(Debug, Clone, Copy)]
struct Noop;

/// Serves until `stop`; `ready` hears of the address.
///
/// # Errors
/// The address can't be listened on, or the port ended.
pub async fn serve(
    settings: &Settings,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let port = |error: &dyn std::error::Error| Error::Unavailable(format!("the port: {error}"));
    let listener = TcpListener::bind(settings.grpc.addr).await.map_err(|error| port(&error))?;
    let addr = listener.local_addr().map_err(|error| port(&error))?;
    let mut fronts = Fronts::start(settings, listener, None, || {
        let (reflection_v1, reflection_v1alpha) = api::reflection();
        let service =
            SeckillServer::new(Noop).max_decoding_message_size(stack::SECKILL_REQUEST_LIMIT);
        let health = HealthService::from_health_reporter(HealthReporter::new());
        server::grpc(settings)
            .add_service(HealthServer::new(health))
            .add_service(reflection_v1)
            .add_service(reflection_v1alpha)
            .add_service(service)
    })
    .map_err(|error| port(&error))?;
    ready(addr);
    stop.await;
    fronts.stop();
    fronts.ended().await;
    Ok(())
}

type Nothing<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Seckill for Noop {
    async fn reserve(
        &self,
        _: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        Ok(Response::new(pb::ReserveResponse {
            outcome: ReserveOutcome::SoldOut.into(),
            reservation: None,
            existing_reservation: None,
            remaining: Some(0),
            replayed: false,
        }))
    }

    async fn warmup(
        &self,
        _: Request<pb::WarmupRequest>,
    ) -> Result<Response<pb::WarmupResponse>, Status> {
        Err(only_reserve())
    }

    type ReserveStreamStream = Nothing<pb::ReserveStreamResponse>;

    async fn reserve_stream(
        &self,
        _: Request<Streaming<pb::ReserveStreamRequest>>,
    ) -> Result<Response<Self::ReserveStreamStream>, Status> {
        Err(only_reserve())
    }

    async fn release(
        &self,
        _: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseResponse>, Status> {
        Err(only_reserve())
    }

    async fn confirm(
        &self,
        _: Request<pb::ConfirmRequest>,
    ) -> Result<Response<pb::ConfirmResponse>, Status> {
        Err(only_reserve())
    }

    async fn get_reservation(
        &self,
        _: Request<pb::GetReservationRequest>,
    ) -> Result<Response<pb::GetReservationResponse>, Status> {
        Err(only_reserve())
    }

    type WatchStockStream = Nothing<pb::WatchStockResponse>;

    async fn watch_stock(
        &self,
        _: Request<pb::WatchStockRequest>,
    ) -> Result<Response<Self::WatchStockStream>, Status> {
        Err(only_reserve())
    }
}

fn only_reserve() -> Status {
    Status::unimplemented("this server knows Reserve only")
}
