//! Calls over gRPC as an order service makes them.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use sea_orm::{ColumnTrait, EntityTrait, QueryFilter};
use seckill::{
    api::pb::{
        self, ReleaseOutcome, ReserveOutcome, seckill_admin_client::SeckillAdminClient,
        seckill_client::SeckillClient,
    },
    domain::{BuyerId, OfferKey, RequestId, name_reservation},
    entity::{orders, orders::OrderState},
};
use tokio::{sync::watch, task::JoinHandle, time::Instant};
use tonic::{Code, Request, Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use super::{
    eventually,
    history::{Answer, Ask, AtRest, History, Log, Order},
    watched::{End, Message, Watched},
    world::{Ground, World},
};

/// How long a caller repeats what was not decided.
const PATIENCE: Duration = Duration::from_secs(20);

/// A unit that a buyer holds, as far as the buyer was told.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Win {
    pub(crate) buyer: String,
    pub(crate) reservation_id: String,
    pub(crate) order_no: String,
}

/// How long units may be free before nobody may be turned away for want of them.
const SOLD_OUT_GRACE: Duration = Duration::from_millis(250);

/// An order service that sells one offer, and writes down what it asks and is told.
#[derive(Debug, Clone)]
pub(crate) struct Shop {
    pub(crate) key: OfferKey,
    pub(crate) client: SeckillClient<Channel>,
    pub(crate) log: Log,
}

impl Shop {
    pub(crate) fn new(key: &OfferKey, channel: Channel) -> Self {
        Self { key: key.clone(), client: SeckillClient::new(channel), log: Log::new() }
    }

    /// The same, writing into this log.
    pub(crate) fn with_log(self, log: &Log) -> Self {
        Self { log: log.clone(), ..self }
    }

    /// One attempt, with a deadline.
    pub(crate) async fn reserve(
        &self,
        buyer: &str,
        request_id: &str,
    ) -> Result<pb::ReserveResponse, Status> {
        let mut request = Request::new(pb::ReserveRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            quantity: None,
            request_id: request_id.to_owned(),
        });
        request.set_timeout(Duration::from_secs(10));
        let names = name_reservation(
            &self.key,
            &BuyerId::new(buyer).unwrap(),
            Some(&RequestId::new(request_id).unwrap()),
        );
        let (request_id, names) = (request_id.to_owned(), names.to_string());
        let call = self.log.invoked(buyer, Ask::Reserve { request_id, quantity: 1, names });
        let answer = self.client.clone().reserve(request).await?.into_inner();
        self.log.returned(call, answer_of(&answer));
        Ok(answer)
    }

    pub(crate) async fn release(&self, win: &Win) -> Result<ReleaseOutcome, Status> {
        let mut request = Request::new(pb::ReleaseRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: win.buyer.clone(),
            reservation_id: win.reservation_id.clone(),
            reason: "test".to_owned(),
        });
        request.set_timeout(Duration::from_secs(10));
        let reservation_id = win.reservation_id.clone();
        let call = self.log.invoked(&win.buyer, Ask::Release { reservation_id });
        let outcome = self.client.clone().release(request).await?.into_inner().outcome();
        self.log.returned(call, release_answer(outcome));
        Ok(outcome)
    }

    /// Repeats an attempt until it is decided.
    pub(crate) async fn insist(&self, buyer: &str, request_id: &str) -> pb::ReserveResponse {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.reserve(buyer, request_id).await {
                Ok(answer) => return answer,
                Err(status) => wait_to_repeat(&status, deadline).await,
            }
        }
    }

    /// Repeats a release until it is decided.
    pub(crate) async fn insist_on_release(&self, win: &Win) -> ReleaseOutcome {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.release(win).await {
                Ok(outcome) => return outcome,
                Err(status) => wait_to_repeat(&status, deadline).await,
            }
        }
    }
}

fn answer_of(answer: &pb::ReserveResponse) -> Answer {
    match answer.outcome() {
        ReserveOutcome::Reserved => {
            let win = win(answer).expect("a win has its reservation");
            Answer::Reserved { reservation_id: win.reservation_id, order_no: win.order_no }
        }
        ReserveOutcome::Released => Answer::Released,
        ReserveOutcome::Duplicate => Answer::Duplicate,
        ReserveOutcome::SoldOut => Answer::SoldOut,
        ReserveOutcome::Insufficient => Answer::Insufficient {
            remaining: u64::try_from(answer.remaining.expect("it says how many")).unwrap(),
        },
        _ => Answer::Refused,
    }
}

fn release_answer(outcome: ReleaseOutcome) -> Answer {
    match outcome {
        ReleaseOutcome::Released => Answer::Released,
        ReleaseOutcome::AlreadyReleased => Answer::AlreadyReleased,
        ReleaseOutcome::NotReserved => Answer::NotReserved,
        _ => Answer::Refused,
    }
}

/// Notes in the log under which epoch the engine sells, for ever.
pub(crate) async fn follow_epochs(log: &Log, world: &World, key: &OfferKey) {
    let offer = world.offer(key).await;
    loop {
        let asked = log.now();
        if let Ok(Ok(levels)) = offer.levels().await {
            log.whole(levels.stamp.epoch, asked);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Whether all that clients were told can be true, with what the stores hold at rest.
pub(crate) async fn assert_history(log: &Log, world: &World, key: &OfferKey, max_orders: u32) {
    let (history, at_rest) = history_of(log, world, key, max_orders).await;
    if let Err(wrong) = history.check(SOLD_OUT_GRACE, &at_rest) {
        panic!("{wrong}\nafter {} calls", history.calls.len());
    }
}

/// The same but for the order of the calls, where nobody can tell exactly when a rebuild was.
pub(crate) async fn assert_history_in_any_order(log: &Log, world: &World, key: &OfferKey) {
    let (history, at_rest) = history_of(log, world, key, 1).await;
    if let Err(wrong) = history.check_in_any_order(SOLD_OUT_GRACE, &at_rest) {
        panic!("{wrong}\nafter {} calls", history.calls.len());
    }
}

async fn history_of(
    log: &Log,
    world: &World,
    key: &OfferKey,
    max_orders: u32,
) -> (History, AtRest) {
    let books = world.read_books(key).await.unwrap();
    let count = |figure: i64| u64::try_from(figure).unwrap();
    let orders = orders::Entity::find()
        .filter(orders::Column::ActivityId.eq(key.activity_id.as_str()))
        .filter(orders::Column::SkuId.eq(key.sku_id.as_str()))
        .all(world.parts.database.reader());
    let orders = orders.await.unwrap().into_iter().map(|order| Order {
        reservation_id: order.reservation_id,
        order_no: order.order_no,
        buyer: order.user_id,
        units: u64::try_from(order.quantity).unwrap(),
        is_live: order.state != OrderState::Cancelled,
    });
    let at_rest = AtRest {
        engine_remaining: count(books.engine_remaining),
        engine_reserved: count(books.engine_units_reserved),
        sql_reserved: count(books.sql_reserved),
        orders: orders.collect(),
    };
    (log.history(count(books.total), max_orders), at_rest)
}

/// Watches the stock of one offer and writes down what is sent.
#[derive(Debug)]
pub(crate) struct Recorder {
    began: Instant,
    seen: Arc<Mutex<Watched>>,
    /// Whether it reads.
    reads: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Recorder {
    /// Starts to watch, and has read the snapshot.
    pub(crate) async fn start(channel: Channel, key: &OfferKey) -> Self {
        let request = pb::WatchStockRequest {
            activity_id: key.activity_id.to_string(),
            sku_ids: vec![key.sku_id.to_string()],
            ..Default::default()
        };
        let began = Instant::now();
        let stream = SeckillClient::new(channel).watch_stock(request).await.unwrap().into_inner();
        let skus = vec![key.sku_id.to_string()];
        let seen = Arc::new(Mutex::new(Watched { skus, ..Watched::default() }));
        let (reads, may_read) = watch::channel(true);
        #[allow(clippy::disallowed_methods, reason = "it ends with the stream or the test")]
        let task = tokio::spawn(record(stream, began, seen.clone(), may_read));
        let recorder = Self { began, seen, reads, task };
        eventually("a snapshot", async || (!recorder.seen().messages.is_empty()).then_some(()))
            .await;
        recorder
    }

    /// The time in what it writes down.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was sent up to now.
    pub(crate) fn seen(&self) -> Watched {
        let mut seen = self.seen.lock().unwrap().clone();
        if seen.end.is_none() {
            seen.until = self.now();
        }
        seen
    }

    /// Reads no more, but stays.
    pub(crate) fn stall(&mut self) {
        self.reads.send_replace(false);
    }

    /// Reads on; answers since when.
    pub(crate) fn resume(&mut self) -> Duration {
        let now = self.now();
        self.reads.send_replace(true);
        now
    }

    /// All that was sent, once the stream has ended.
    pub(crate) async fn ended(self) -> Watched {
        tokio::time::timeout(PATIENCE, self.task).await.expect("the stream ends").unwrap();
        self.seen.lock().unwrap().clone()
    }
}

async fn record(
    mut stream: Streaming<pb::WatchStockResponse>,
    began: Instant,
    seen: Arc<Mutex<Watched>>,
    mut may_read: watch::Receiver<bool>,
) {
    loop {
        if may_read.wait_for(|reads| *reads).await.is_err() {
            return;
        }
        let next = stream.message().await;
        let mut seen = seen.lock().unwrap();
        let at = began.elapsed();
        seen.until = at;
        match next {
            Ok(Some(update)) => seen.messages.push(Message {
                at,
                state: update.state().as_str_name().replace("ACTIVITY_STATE_", ""),
                sku: update.sku_id,
                total: update.total,
                remaining: update.remaining,
                reserved: update.reserved,
                epoch: update.epoch,
                revision: update.revision,
                snapshot: update.snapshot,
                heartbeat: update.heartbeat,
            }),
            ended => {
                seen.end = Some(match ended {
                    Err(status) if status.code() == Code::Unavailable => End::Unavailable,
                    Err(_) => End::Other,
                    Ok(_) => End::Ok,
                });
                return;
            }
        }
    }
}

async fn wait_to_repeat(status: &Status, deadline: Instant) {
    assert!(may_pass(status), "{status:?}");
    assert!(Instant::now() < deadline, "still not decided: {status:?}");
    let pause = status.get_details_retry_info().and_then(|info| info.retry_delay);
    // Who is told to wait a long time may come back a little earlier.
    let pause = pause.unwrap_or_default().min(Duration::from_millis(50));
    tokio::time::sleep(pause.max(Duration::from_millis(5))).await;
}

/// Whether a repeat may be decided.
pub(crate) fn may_pass(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled
    ) || lost_connection(status)
}

/// Whether the connection ended before the answer came.
pub(crate) fn lost_connection(status: &Status) -> bool {
    status.get_details_error_info().is_none() && status.code() != Code::InvalidArgument
}

/// The reservation of an answer that says RESERVED.
pub(crate) fn win(answer: &pb::ReserveResponse) -> Option<Win> {
    if answer.outcome() != ReserveOutcome::Reserved {
        assert_eq!(answer.reservation, None, "a refusal holds nothing: {answer:?}");
        return None;
    }
    let reservation = answer.reservation.as_ref().expect("RESERVED comes with its reservation");
    Some(Win {
        buyer: reservation.user_id.clone(),
        reservation_id: reservation.reservation_id.clone(),
        order_no: reservation.order_no.clone(),
    })
}

/// Waits until the server itself has settled and ordered everything.
pub(crate) async fn drained(channel: Channel, key: &OfferKey) -> pb::GetPipelineStatusResponse {
    let client = SeckillAdminClient::new(channel);
    eventually("the pipeline is empty", async || {
        let activity_id = Some(key.activity_id.to_string());
        let request = pb::GetPipelineStatusRequest { activity_id };
        let status = client.clone().get_pipeline_status(request).await.ok()?.into_inner();
        let left = [status.unacked, status.outbox_pending, status.outbox_releasing];
        (left == [Some(0); 3]).then_some(status)
    })
    .await
}

/// The books, read by another server's parts that settle nothing: they balance as they are, and
/// the units that are held are those of these buyers.
pub(crate) async fn assert_books(ground: &Ground<'_>, key: &OfferKey, wins: &[Win]) {
    let world = ground.world().await;
    let books = world.read_books(key).await.unwrap();
    assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
    assert_eq!((books.oversold(), books.missing()), (0, 0), "{books:?}");
    let told: BTreeSet<&Win> = wins.iter().collect();
    assert_eq!(told.len(), wins.len(), "a reservation was told to two buyers");
    let held = i64::try_from(wins.len()).unwrap();
    assert_eq!(books.orders_units, held, "{books:?}");
    let orders = world.live_orders(key).await;
    for win in wins {
        assert_eq!(orders.get(&win.reservation_id), Some(&win.order_no), "{win:?}");
    }
    world.close().await;
}
