//! A server for the tests of client commands: the contract behind one lock, in memory.
//!
//! It is as simple as can be, and it can be told to break what a server must keep.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt as _};
use seckill::{
    api::pb::{
        self, ActivityState, ReleaseOutcome, ReservationState, ReserveOutcome,
        get_reservation_request::By,
        seckill_admin_server::{SeckillAdmin, SeckillAdminServer},
        seckill_server::{Seckill, SeckillServer},
    },
    cli::demo::{Books, BooksView, OfferBooks},
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Code, Request, Response, Status, transport::Server};
use tonic_types::{ErrorDetails, StatusExt as _};

/// What the server does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// It sells what it does not have.
    Oversells,
    /// It tells a winner of a reservation and makes no order of it.
    LosesOrders,
    /// A second attempt of a winner wins too.
    AllowsTwo,
    /// Every third Reserve is refused for a moment, after it was decided.
    Falters,
}

#[derive(Debug, Default)]
struct State {
    activities: BTreeMap<String, pb::Activity>,
    /// By the attempt's key: activity, SKU, buyer, request.
    reservations: BTreeMap<[String; 4], pb::Reservation>,
    calls: u64,
}

/// A server on a free port, until it is dropped.
#[derive(Debug, Clone)]
pub(crate) struct StandIn {
    state: Arc<Mutex<State>>,
    fault: Fault,
}

impl StandIn {
    /// Starts it; the tasks in the set are the server.
    pub(crate) async fn start(fault: Fault) -> (Self, SocketAddr, JoinSet<()>) {
        let stand_in = Self { state: Arc::default(), fault };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<SeckillServer<Self>>().await;
        health.set_not_serving::<SeckillAdminServer<Self>>().await;
        let server = Server::builder()
            .add_service(health_service)
            .add_service(SeckillServer::new(stand_in.clone()))
            .add_service(SeckillAdminServer::new(stand_in.clone()));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            server
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .expect("the server runs");
        });
        (stand_in, addr, tasks)
    }

    /// How many reservations hold units now.
    pub(crate) fn live(&self) -> usize {
        self.lock().reservations.values().filter(|held| is_live(held)).count()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics with the lock")
    }

    fn move_to(&self, activity_id: &str, to: ActivityState) -> Result<pb::Activity, Status> {
        let mut state = self.lock();
        let activity = find(&mut state.activities, activity_id)?;
        activity.state = to.into();
        activity.version += 1;
        Ok(activity.clone())
    }
}

fn is_live(held: &pb::Reservation) -> bool {
    held.state() == ReservationState::Ordered
}

fn find<'a>(
    activities: &'a mut BTreeMap<String, pb::Activity>,
    activity_id: &str,
) -> Result<&'a mut pb::Activity, Status> {
    activities.get_mut(activity_id).ok_or_else(|| {
        refusal(Code::NotFound, "UNKNOWN_ACTIVITY", &format!("there is no activity {activity_id}"))
    })
}

fn refusal(code: Code, reason: &str, message: &str) -> Status {
    let mut details = ErrorDetails::with_error_info(reason, "inventory.seckill", []);
    if code == Code::Unavailable {
        details.set_retry_info(Some(Duration::from_millis(1)));
    }
    Status::with_error_details(code, message, details)
}

impl State {
    fn live_units(&self, activity_id: &str, sku_id: &str) -> i64 {
        let live = self.reservations.values().filter(|held| is_live(held));
        live.filter(|held| held.activity_id == activity_id && held.sku_id == sku_id)
            .map(|held| i64::from(held.quantity))
            .sum()
    }

    fn reserve(&mut self, request: pb::ReserveRequest, fault: Fault) -> pb::ReserveResponse {
        let key = [
            request.activity_id.clone(),
            request.sku_id.clone(),
            request.user_id.clone(),
            request.request_id,
        ];
        if let Some(held) = self.reservations.get(&key) {
            let live = is_live(held);
            let outcome = if live { ReserveOutcome::Reserved } else { ReserveOutcome::Released };
            return pb::ReserveResponse {
                outcome: outcome.into(),
                reservation: live.then(|| held.clone()),
                replayed: live,
                ..pb::ReserveResponse::default()
            };
        }
        let existing = self
            .reservations
            .values()
            .find(|held| is_live(held) && held.sku_id == key[1] && held.user_id == key[2]);
        if let Some(existing) = existing.filter(|_| fault != Fault::AllowsTwo) {
            return pb::ReserveResponse {
                outcome: ReserveOutcome::Duplicate.into(),
                existing_reservation: Some(existing.clone()),
                ..pb::ReserveResponse::default()
            };
        }
        let total: i64 = self.activities[&key[0]]
            .offers
            .iter()
            .filter(|offer| offer.sku_id == key[1])
            .map(|offer| offer.total)
            .sum();
        let remaining = total - self.live_units(&key[0], &key[1]);
        if remaining <= 0 && fault != Fault::Oversells {
            return pb::ReserveResponse {
                outcome: ReserveOutcome::SoldOut.into(),
                remaining: Some(0),
                ..pb::ReserveResponse::default()
            };
        }
        let number = self.reservations.len() + 1;
        let held = pb::Reservation {
            reservation_id: format!("r-{number}"),
            order_no: format!("o-{number}"),
            activity_id: key[0].clone(),
            sku_id: key[1].clone(),
            user_id: key[2].clone(),
            quantity: request.quantity.unwrap_or(1),
            state: ReservationState::Ordered.into(),
            ..pb::Reservation::default()
        };
        if fault != Fault::LosesOrders || number != 3 {
            self.reservations.insert(key, held.clone());
        }
        pb::ReserveResponse {
            outcome: ReserveOutcome::Reserved.into(),
            reservation: Some(held),
            remaining: Some(remaining - 1),
            ..pb::ReserveResponse::default()
        }
    }
}

impl Books for StandIn {
    fn read<'a>(&'a self, activity_id: &'a str) -> BoxFuture<'a, Result<BooksView, String>> {
        async move {
            let state = self.lock();
            let activity = state.activities.get(activity_id).ok_or("no such activity")?;
            let offers = activity
                .offers
                .iter()
                .map(|offer| {
                    let live: Vec<_> = state
                        .reservations
                        .values()
                        .filter(|held| is_live(held) && held.sku_id == offer.sku_id)
                        .collect();
                    let units = live.iter().map(|held| i64::from(held.quantity)).sum();
                    let mut orders: BTreeMap<&str, i64> = BTreeMap::new();
                    for held in &live {
                        *orders.entry(&held.user_id).or_default() += 1;
                    }
                    let above = orders.values().filter(|orders| **orders > 1).count();
                    OfferBooks {
                        unmatched: 0,
                        sku_id: offer.sku_id.clone(),
                        total: offer.total,
                        engine_remaining: offer.total - units,
                        engine_units_reserved: units,
                        engine_unacked: 0,
                        engine_in_transfer: 0,
                        sql_reserved: units,
                        sql_sold: units,
                        live_rows_units: units,
                        unfinished_rows: 0,
                        dead_rows: 0,
                        live_orders: i64::try_from(live.len()).expect("few orders"),
                        orders_units: units,
                        buyers_with_more_than_allowed: i64::try_from(above).expect("few buyers"),
                    }
                })
                .collect();
            Ok(BooksView { offers })
        }
        .boxed()
    }
}

#[tonic::async_trait]
impl Seckill for StandIn {
    async fn warmup(
        &self,
        request: Request<pb::WarmupRequest>,
    ) -> Result<Response<pb::WarmupResponse>, Status> {
        let activity_id = request.into_inner().activity_id;
        let activity = self.move_to(&activity_id, ActivityState::Active)?;
        let offers = activity.offers.iter().map(|offer| pb::OfferStock {
            sku_id: offer.sku_id.clone(),
            total: offer.total,
            remaining: offer.total,
            ..pb::OfferStock::default()
        });
        let offers = offers.collect();
        let activity = Some(activity);
        Ok(Response::new(pb::WarmupResponse { activity, offers, already_warm: false }))
    }

    async fn reserve(
        &self,
        request: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        let request = request.into_inner();
        if request.quantity == Some(0) {
            let mut details =
                ErrorDetails::with_error_info("INVALID_FIELD", "inventory.seckill", []);
            details.add_bad_request_violation("quantity", "must be 1 to 1000 (it is 0)");
            return Err(Status::with_error_details(Code::InvalidArgument, "1 field", details));
        }
        let mut state = self.lock();
        find(&mut state.activities, &request.activity_id)?;
        state.calls += 1;
        let answer = state.reserve(request, self.fault);
        if self.fault == Fault::Falters && state.calls.is_multiple_of(3) {
            return Err(refusal(Code::Unavailable, "DATABASE_UNAVAILABLE", "the database is away"));
        }
        Ok(Response::new(answer))
    }

    type ReserveStreamStream = ReceiverStream<Result<pb::ReserveStreamResponse, Status>>;

    async fn reserve_stream(
        &self,
        _: Request<tonic::Streaming<pb::ReserveStreamRequest>>,
    ) -> Result<Response<Self::ReserveStreamStream>, Status> {
        Err(Status::unimplemented("ReserveStream"))
    }

    async fn release(
        &self,
        request: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseResponse>, Status> {
        let request = request.into_inner();
        let mut state = self.lock();
        let held = state
            .reservations
            .values_mut()
            .find(|held| held.reservation_id == request.reservation_id);
        let outcome = match held {
            None => ReleaseOutcome::NotReserved,
            Some(held) if held.user_id != request.user_id => ReleaseOutcome::WrongOwner,
            Some(held) if !is_live(held) => ReleaseOutcome::AlreadyReleased,
            Some(held) => {
                held.state = ReservationState::Released.into();
                ReleaseOutcome::Released
            }
        };
        Ok(Response::new(pb::ReleaseResponse { outcome: outcome.into(), remaining: None }))
    }

    async fn confirm(
        &self,
        _: Request<pb::ConfirmRequest>,
    ) -> Result<Response<pb::ConfirmResponse>, Status> {
        Err(Status::unimplemented("this server does not offer Confirm yet"))
    }

    async fn get_reservation(
        &self,
        request: Request<pb::GetReservationRequest>,
    ) -> Result<Response<pb::GetReservationResponse>, Status> {
        let state = self.lock();
        let held = match request.into_inner().by {
            Some(By::ReservationId(id)) => {
                state.reservations.values().find(|held| held.reservation_id == id)
            }
            Some(By::Key(key)) => {
                state.reservations.get(&[key.activity_id, key.sku_id, key.user_id, key.request_id])
            }
            None => None,
        };
        let held = held.ok_or_else(|| {
            refusal(Code::NotFound, "UNKNOWN_RESERVATION", "there is no such reservation")
        })?;
        Ok(Response::new(pb::GetReservationResponse {
            reservation: Some(held.clone()),
            refusal: 0,
        }))
    }

    type WatchStockStream = ReceiverStream<Result<pb::WatchStockResponse, Status>>;

    /// A snapshot; then the first call breaks, and the second one settles.
    async fn watch_stock(
        &self,
        request: Request<pb::WatchStockRequest>,
    ) -> Result<Response<Self::WatchStockStream>, Status> {
        let activity_id = request.into_inner().activity_id;
        let mut state = self.lock();
        state.calls += 1;
        let first = state.calls == 1;
        let activity = find(&mut state.activities, &activity_id)?;
        let (messages, stream) = mpsc::channel(1_000);
        for offer in &activity.offers {
            let update = pb::WatchStockResponse {
                activity_id: activity_id.clone(),
                sku_id: offer.sku_id.clone(),
                total: offer.total,
                remaining: offer.total,
                state: activity.state,
                snapshot: true,
                ..pb::WatchStockResponse::default()
            };
            messages.try_send(Ok(update)).expect("there is room");
        }
        if first {
            let stopping = refusal(Code::Unavailable, "SHUTTING_DOWN", "the server stops");
            messages.try_send(Err(stopping)).expect("there is room");
        }
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

macro_rules! unimplemented_rpcs {
    ($($rpc:ident($request:ident) -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl SeckillAdmin for StandIn {
            async fn create_activity(
                &self,
                request: Request<pb::CreateActivityRequest>,
            ) -> Result<Response<pb::CreateActivityResponse>, Status> {
                let spec = request.into_inner().spec.unwrap_or_default();
                let activity = pb::Activity {
                    activity_id: spec.activity_id.clone(),
                    title: spec.title,
                    state: ActivityState::PendingReview.into(),
                    start_time: spec.start_time,
                    end_time: spec.end_time,
                    retention: spec.retention,
                    version: 1,
                    offers: spec.offers.into_iter().map(|offer| pb::Offer {
                        sku_id: offer.sku_id,
                        title: offer.title,
                        total: offer.total,
                        max_orders_per_user: 1,
                        max_quantity_per_order: 1,
                        hold: offer.hold,
                        ..pb::Offer::default()
                    }).collect(),
                    ..pb::Activity::default()
                };
                self.lock().activities.insert(spec.activity_id, activity.clone());
                Ok(Response::new(pb::CreateActivityResponse { activity: Some(activity) }))
            }

            async fn get_activity(
                &self,
                request: Request<pb::GetActivityRequest>,
            ) -> Result<Response<pb::GetActivityResponse>, Status> {
                let mut state = self.lock();
                let activity = find(&mut state.activities, &request.into_inner().activity_id)?;
                Ok(Response::new(pb::GetActivityResponse { activity: Some(activity.clone()) }))
            }

            /// One activity per page.
            async fn list_activities(
                &self,
                request: Request<pb::ListActivitiesRequest>,
            ) -> Result<Response<pb::ListActivitiesResponse>, Status> {
                let skip: usize = request.into_inner().page_token.parse().unwrap_or(0);
                let state = self.lock();
                let activities = state.activities.values().skip(skip).take(1).cloned().collect();
                let next_page_token = if skip + 1 < state.activities.len() {
                    (skip + 1).to_string()
                } else {
                    String::new()
                };
                Ok(Response::new(pb::ListActivitiesResponse { activities, next_page_token }))
            }

            async fn approve_activity(
                &self,
                request: Request<pb::ApproveActivityRequest>,
            ) -> Result<Response<pb::ApproveActivityResponse>, Status> {
                let activity_id = request.into_inner().activity_id;
                let activity = self.move_to(&activity_id, ActivityState::Scheduled)?;
                Ok(Response::new(pb::ApproveActivityResponse { activity: Some(activity) }))
            }

            async fn end_activity(
                &self,
                request: Request<pb::EndActivityRequest>,
            ) -> Result<Response<pb::EndActivityResponse>, Status> {
                let activity_id = request.into_inner().activity_id;
                let activity = self.move_to(&activity_id, ActivityState::Ended)?;
                Ok(Response::new(pb::EndActivityResponse { activity: Some(activity) }))
            }

            async fn get_pipeline_status(
                &self,
                request: Request<pb::GetPipelineStatusRequest>,
            ) -> Result<Response<pb::GetPipelineStatusResponse>, Status> {
                let mut offers = Vec::new();
                if let Some(activity_id) = request.into_inner().activity_id {
                    find(&mut self.lock().activities, &activity_id)?;
                    for books in self.read(&activity_id).await.expect("it is there").offers {
                        offers.push(pb::OfferPipeline {
                            sku_id: books.sku_id,
                            total: books.total,
                            remaining: Some(books.engine_remaining),
                            reserved_sql: books.sql_reserved,
                            sold: books.sql_sold,
                            unacked: Some(0),
                            orders_live: books.live_orders,
                            ..pb::OfferPipeline::default()
                        });
                    }
                }
                Ok(Response::new(pb::GetPipelineStatusResponse {
                    unacked: Some(0),
                    outbox_due: Some(0),
                    outbox_pending: Some(0),
                    outbox_releasing: Some(0),
                    outbox_dead: Some(0),
                    orders: Some(i64::try_from(self.live()).expect("few orders")),
                    oldest_pending_age: None,
                    engine_kind: "stand-in".to_owned(),
                    engine_healthy: true,
                    database_kind: "stand-in".to_owned(),
                    database_healthy: true,
                    offers,
                }))
            }

            $(
                async fn $rpc(
                    &self,
                    _: Request<pb::$request>,
                ) -> Result<Response<pb::$response>, Status> {
                    Err(Status::unimplemented("this server does not offer it yet"))
                }
            )*
        }
    };
}

unimplemented_rpcs! {
    pause_activity(PauseActivityRequest) -> PauseActivityResponse;
    resume_activity(ResumeActivityRequest) -> ResumeActivityResponse;
    settle_activity(SettleActivityRequest) -> SettleActivityResponse;
    adjust_stock(AdjustStockRequest) -> AdjustStockResponse;
    reconcile(ReconcileRequest) -> ReconcileResponse;
    rebuild_stock(RebuildStockRequest) -> RebuildStockResponse;
    list_dead_letters(ListDeadLettersRequest) -> ListDeadLettersResponse;
    retry_dead_letter(RetryDeadLetterRequest) -> RetryDeadLetterResponse;
    discard_dead_letter(DiscardDeadLetterRequest) -> DiscardDeadLetterResponse;
    list_audit(ListAuditRequest) -> ListAuditResponse;
}
