//! The service of order services and dashboards: parse, act, answer.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use tonic::{Request, Response, Status, Streaming, metadata::MetadataMap};

use super::{
    Services,
    address::CallerAddress,
    admin::actor,
    convert, pb,
    reserve_stream::{self, Origin},
    stack::Deadline,
    status::{count_error, counted},
};
use crate::{
    admission::Admit, domain::StockUpdate, engine::batcher::Caller, error::Error, metrics,
    telemetry::spans,
};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl pb::seckill_server::Seckill for Services {
    async fn warmup(
        &self,
        request: Request<pb::WarmupRequest>,
    ) -> Result<Response<pb::WarmupResponse>, Status> {
        let actor = actor(&request);
        let id = convert::activity_id(&request.get_ref().activity_id)?;
        let activities = self.activities.clone();
        let report = self.run(async move { activities.warm_up(&id, &actor).await }).await?;
        Ok(Response::new(report.into()))
    }

    async fn reserve(
        &self,
        request: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        let deadline = request.extensions().get().map(|deadline: &Deadline| deadline.0);
        let address = request.extensions().get().map(|address: &CallerAddress| address.0);
        let is_repeat = is_repeat(request.metadata());
        let request = convert::reserve(request.get_ref(), is_repeat, address);
        let request = request.inspect_err(count_error)?;
        // Most are refused here, from memory and on the spot.
        let admit = spans::step("admission").in_scope(|| self.reservations.admit(&request));
        let admit = admit.inspect_err(count_error)?;
        if let Admit::No(outcome) = admit {
            metrics::reserve_outcome(&request.offer, &outcome);
            return Ok(Response::new(outcome.into()));
        }
        // Lives as long as this future, that is, as long as somebody waits for the answer. A
        // request whose caller has left is dropped before the engine is asked.
        let connection = Arc::new(());
        let caller = Caller::new(&connection, deadline);
        let (reservations, offer) = (self.reservations.clone(), request.offer.clone());
        let work = async move {
            counted(&offer, reservations.reserve_after(admit, request, caller).await)
        };
        Ok(Response::new(self.run(work).await?.into()))
    }

    type ReserveStreamStream = Answers<pb::ReserveStreamResponse>;

    async fn reserve_stream(
        &self,
        request: Request<Streaming<pb::ReserveStreamRequest>>,
    ) -> Result<Response<Self::ReserveStreamStream>, Status> {
        let address = request.extensions().get().map(|address: &CallerAddress| address.0);
        let from = Origin { address, span: spans::origin(request.metadata().as_ref()) };
        let services = Arc::new(self.clone());
        let answers =
            reserve_stream::answer(services, request.into_inner(), from, self.end_of_stream());
        Ok(Response::new(Box::pin(answers)))
    }

    async fn release(
        &self,
        request: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseResponse>, Status> {
        let request = convert::release(request.into_inner())?;
        let reservations = self.reservations.clone();
        let work = async move { reservations.release(request).await };
        let (outcome, remaining) = self.run(work).await?;
        Ok(Response::new(convert::release_response(outcome, remaining)))
    }

    async fn confirm(
        &self,
        request: Request<pb::ConfirmRequest>,
    ) -> Result<Response<pb::ConfirmResponse>, Status> {
        let request = convert::confirm(request.get_ref())?;
        let reservations = self.reservations.clone();
        let outcome = self.run(async move { reservations.confirm(request).await }).await?;
        Ok(Response::new(outcome.into()))
    }

    async fn get_reservation(
        &self,
        request: Request<pb::GetReservationRequest>,
    ) -> Result<Response<pb::GetReservationResponse>, Status> {
        let query = convert::reservation_query(request.get_ref())?;
        let reservations = self.reservations.clone();
        let (reservation, refused) = self.run(async move { reservations.get(query).await }).await?;
        Ok(Response::new(convert::reservation_response(reservation, refused)))
    }

    type WatchStockStream = Answers<pb::WatchStockResponse>;

    async fn watch_stock(
        &self,
        request: Request<pb::WatchStockRequest>,
    ) -> Result<Response<Self::WatchStockStream>, Status> {
        let request = convert::watch(request.get_ref())?;
        let feed = self.feed.clone();
        let work = async move { Ok(feed.watch(request).await?.boxed()) };
        let updates = self.run(work).await?;
        Ok(Response::new(Box::pin(until(updates, self.end_of_stream()))))
    }
}

impl Services {
    /// When a stream that begins now has to end: the server stops, or it has lived long enough.
    fn end_of_stream(&self) -> impl Future<Output = ()> + Send + use<> {
        let shutdown = self.shutdown.clone();
        let age = jittered(self.max_stream_age);
        async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = tokio::time::sleep(age) => {}
            }
        }
    }
}

/// The updates, up to `end`, which is `ShuttingDown`. Its deadline ends a stream in the stack.
fn until(
    updates: impl Stream<Item = Result<StockUpdate, Error>> + Send,
    end: impl Future<Output = ()> + Send,
) -> impl Stream<Item = Result<pb::WatchStockResponse, Status>> + Send {
    let both = Some((Box::pin(updates), Box::pin(end)));
    stream::unfold(both, |both| async {
        let (mut updates, mut end) = both?;
        tokio::select! {
            biased;
            () = &mut end => Some((Err(Error::ShuttingDown.into()), None)),
            update = updates.next() => match update? {
                Ok(update) => Some((Ok(update.into()), Some((updates, end)))),
                Err(error) => Some((Err(error.into()), None)),
            }
        }
    })
}

/// `age` ±10 %, so that streams that began together do not end together.
pub(crate) fn jittered(age: Duration) -> Duration {
    age.mul_f64(0.9 + 0.2 * fastrand::f64())
}

/// Whether the client library says that it sends this call again (gRFC A6).
fn is_repeat(metadata: &MetadataMap) -> bool {
    let attempts = metadata.get("grpc-previous-rpc-attempts");
    let attempts = attempts.and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    attempts.is_some_and(|attempts| attempts > 0)
}

#[cfg(test)]
mod tests {
    use std::future;

    use tonic::Code;
    use tonic_types::StatusExt as _;

    use super::*;
    use crate::domain::{ActivityId, ActivityState, SkuId, TimeMs};

    fn an_update() -> StockUpdate {
        StockUpdate {
            activity_id: ActivityId::new("a-1").unwrap(),
            sku_id: SkuId::new("s-1").unwrap(),
            total: 10,
            remaining: 7,
            reserved: 3,
            state: ActivityState::Active,
            epoch: 1,
            revision: 4,
            snapshot: true,
            heartbeat: false,
            observe_time: TimeMs(1_000),
        }
    }

    fn codes(answers: &[Result<pb::WatchStockResponse, Status>]) -> Vec<Code> {
        let code = |answer: &Result<_, Status>| match answer {
            Ok(_) => Code::Ok,
            Err(status) => status.code(),
        };
        answers.iter().map(code).collect()
    }

    #[tokio::test]
    async fn a_stream_ends_as_its_feed_does() {
        let settled = stream::iter([Ok(an_update()), Ok(an_update())]);
        let answers: Vec<_> = until(settled, future::pending()).collect().await;
        assert_eq!(codes(&answers), [Code::Ok, Code::Ok]);

        let broken = stream::iter([Ok(an_update()), Err(Error::EngineUnavailable)]);
        let broken = broken.chain(stream::iter([Ok(an_update())]));
        let answers: Vec<_> = until(broken, future::pending()).collect().await;
        assert_eq!(codes(&answers), [Code::Ok, Code::Unavailable]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_with_shutting_down_also_when_it_never_waits() {
        for pace in [Duration::from_millis(300), Duration::from_secs(3_600)] {
            let updates = stream::repeat(()).then(move |()| async move {
                tokio::time::sleep(pace).await;
                Ok(an_update())
            });
            let end = tokio::time::sleep(Duration::from_secs(1));
            let answers: Vec<_> = until(updates, end).collect().await;
            let status = answers.last().unwrap().as_ref().unwrap_err();
            let info = status.get_details_error_info().unwrap();
            assert_eq!((status.code(), info.reason.as_str()), (Code::Unavailable, "SHUTTING_DOWN"));
        }
        let ready = stream::repeat_with(|| Ok(an_update()));
        let answers: Vec<_> = until(ready, future::ready(())).collect().await;
        assert_eq!(codes(&answers), [Code::Unavailable]);
    }

    #[test]
    fn streams_live_as_long_as_allowed_within_a_tenth() {
        let age = Duration::from_secs(100);
        let ages: Vec<_> = (0..1_000).map(|_| jittered(age).as_secs()).collect();
        assert!(ages.iter().all(|age| (90..=110).contains(age)));
        assert!(ages.iter().min() < ages.iter().max());
    }

    #[test]
    fn only_a_positive_number_of_attempts_is_a_repeat() {
        let cases = [
            (Some("1"), true),
            (Some("4"), true),
            (Some("0"), false),
            (Some("-1"), false),
            (Some(""), false),
            (Some("yes"), false),
            (Some("99999999999"), false),
            (None, false),
        ];
        for (text, expected) in cases {
            let mut metadata = MetadataMap::new();
            if let Some(text) = text {
                metadata.insert("grpc-previous-rpc-attempts", text.parse().unwrap());
            }
            assert_eq!(is_repeat(&metadata), expected, "{text:?}");
        }
    }
}
