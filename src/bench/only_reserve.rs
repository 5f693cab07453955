//! A server with the port, layers, codec and limits of the real one, whose service answers Reserve and
//! nothing else.
//!
//! So whatever stands behind Reserve, a constant or another algorithm, is the only difference.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures_util::Stream;
use tokio::{net::TcpListener, runtime::Handle};
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
            self,
            seckill_server::{Seckill, SeckillServer},
        },
        stack,
    },
    config::Settings,
    server::{self, fronts::Fronts},
};

/// What stands behind Reserve.
pub(super) trait Reserve: Send + Sync + 'static {
    fn reserve(
        &self,
        request: pb::ReserveRequest,
    ) -> impl Future<Output = Result<pb::ReserveResponse, Status>> + Send;
}

/// Serves until `stop`; `ready` hears of the address. What is answered from a store runs on `stores`, as
/// with the real server, beside the threads that speak gRPC.
///
/// # Errors
/// The address can't be listened on, or the port ended.
pub(super) async fn serve(
    settings: &Settings,
    reserve: impl Reserve,
    stores: Option<Handle>,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let port = |error: &dyn std::error::Error| Error::Unavailable(format!("the port: {error}"));
    let listener = TcpListener::bind(settings.grpc.addr).await.map_err(|error| port(&error))?;
    let addr = listener.local_addr().map_err(|error| port(&error))?;
    let service = OnlyReserve { reserve: Arc::new(reserve), stores };
    let mut fronts = Fronts::start(settings, listener, None, None, &Arc::default(), || {
        let (reflection_v1, reflection_v1alpha) = api::reflection();
        let service = SeckillServer::new(service.clone())
            .max_decoding_message_size(stack::SECKILL_REQUEST_LIMIT);
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

#[derive(Debug)]
struct OnlyReserve<R> {
    reserve: Arc<R>,
    stores: Option<Handle>,
}

impl<R> Clone for OnlyReserve<R> {
    fn clone(&self) -> Self {
        Self { reserve: self.reserve.clone(), stores: self.stores.clone() }
    }
}

type Nothing<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl<R: Reserve> Seckill for OnlyReserve<R> {
    async fn reserve(
        &self,
        request: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        let (reserve, request) = (self.reserve.clone(), request.into_inner());
        let answer = match &self.stores {
            None => reserve.reserve(request).await,
            Some(stores) => {
                let work = stores.spawn(async move { reserve.reserve(request).await });
                work.await.unwrap_or_else(|died| Err(Status::internal(died.to_string())))
            }
        };
        answer.map(Response::new)
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
