//! Steps of the protocol one by one, and an engine that stops where a test says so: with them a
//! test drives one exact interleaving of servers, crashes and lost replies.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::BoxFuture;
use sea_orm::{
    ColumnTrait, EntityTrait, QueryFilter, QueryOrder,
    sea_query::{Expr, ExprTrait},
};
use seckill::{
    domain::{
        BuyerId, OfferKey, RequestId, ReservationId, ReserveOutcome, TimeMs, name_reservation,
        new_order_no,
    },
    engine::{
        Call, Engine, EngineError, Script, Value,
        batcher::Caller,
        events::Hearing,
        keys,
        scripts::{Found, Held, RebuildStep, Record, Take, Taken},
        segments::OfferLevels,
    },
    entity::{offers, outbox, outbox::OutboxState},
    error::Error,
    outbox::{
        Row,
        writer::{NewRow, WriteError, Written},
    },
    server::Parts,
};
use tokio::sync::oneshot;

use super::{
    arg, eventually,
    world::{Ground, World},
};

/// In front of an engine: stops, loses or refuses the calls that a test names.
#[derive(Debug)]
pub(crate) struct Gate {
    inner: Arc<dyn Engine>,
    orders: Mutex<VecDeque<(&'static str, What)>>,
}

#[derive(Debug)]
enum What {
    Before(Halt),
    After(Halt),
    NotRun,
    ReplyLost,
}

#[derive(Debug)]
struct Halt {
    reached: oneshot::Sender<()>,
    go: oneshot::Receiver<()>,
}

/// A call that is to stop; it goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Stop {
    reached: oneshot::Receiver<()>,
    go: oneshot::Sender<()>,
}

impl Stop {
    /// Waits until the call is there.
    pub(crate) async fn reached(&mut self) {
        let limit = Duration::from_secs(8);
        let reached = tokio::time::timeout(limit, &mut self.reached).await;
        reached.expect("the call did not come").expect("the gate is gone");
    }

    /// Lets the call go on.
    pub(crate) fn go(self) {
        self.go.send(()).ok();
    }
}

impl Gate {
    /// The next call of this script stops before it runs.
    pub(crate) fn stop_before(&self, script: &'static str) -> Stop {
        let (halt, stop) = halt();
        self.order(script, What::Before(halt));
        stop
    }

    /// The next call of this script runs, and stops before its caller hears of it.
    pub(crate) fn stop_after(&self, script: &'static str) -> Stop {
        let (halt, stop) = halt();
        self.order(script, What::After(halt));
        stop
    }

    /// The next call of this script does not reach the engine, and the caller knows it.
    pub(crate) fn refuse(&self, script: &'static str) {
        self.order(script, What::NotRun);
    }

    /// The next call of this script runs, and its reply is lost.
    pub(crate) fn lose_reply(&self, script: &'static str) {
        self.order(script, What::ReplyLost);
    }

    /// No call is stopped, lost or refused any more.
    pub(crate) fn open(&self) {
        self.orders.lock().unwrap().clear();
    }

    fn order(&self, script: &'static str, what: What) {
        self.orders.lock().unwrap().push_back((script, what));
    }

    fn order_for(&self, script: &str) -> Option<What> {
        let mut orders = self.orders.lock().unwrap();
        let at = orders.iter().position(|(name, _)| *name == script)?;
        orders.remove(at).map(|(_, what)| what)
    }
}

fn halt() -> (Halt, Stop) {
    let (reached, was_reached) = oneshot::channel();
    let (let_go, go) = oneshot::channel();
    (Halt { reached, go }, Stop { reached: was_reached, go: let_go })
}

impl Engine for Gate {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn eval(&self, call: Call) -> BoxFuture<'_, Result<Value, EngineError>> {
        Box::pin(async move {
            match self.order_for(call.script.name) {
                None => self.inner.eval(call).await,
                Some(What::Before(Halt { reached, go })) => {
                    reached.send(()).ok();
                    go.await.ok();
                    self.inner.eval(call).await
                }
                Some(What::After(Halt { reached, go })) => {
                    let reply = self.inner.eval(call).await;
                    reached.send(()).ok();
                    go.await.ok();
                    reply
                }
                Some(What::NotRun) => Err(EngineError::NotRun("the gate is shut".to_owned())),
                Some(What::ReplyLost) => {
                    self.inner.eval(call).await?;
                    Err(EngineError::Unknown("the reply was lost".to_owned()))
                }
            }
        })
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        self.inner.probe()
    }

    fn hear(&self) -> Hearing {
        self.inner.hear()
    }
}

impl World {
    /// Another server over the same engine and database, also where the engine is embedded, with
    /// a gate in front of its engine. It has seen nothing yet.
    pub(crate) async fn beside(&self) -> (World, Arc<Gate>) {
        let inner = self.parts.engine.clone();
        let gate = Arc::new(Gate { inner, orders: Mutex::default() });
        let parts = Parts::over(&self.settings, self.parts.database.clone(), gate.clone());
        parts.catalog.refresh().await.unwrap();
        (World { parts, settings: self.settings.clone() }, gate)
    }

    /// Takes one unit in the engine and does no more, like a server that dies after the script.
    pub(crate) async fn take(&self, key: &OfferKey, buyer: &str, request_id: &str) -> NewRow {
        let offer = self.offer(key).await;
        let buyer = BuyerId::new(buyer).unwrap();
        let request_id = RequestId::new(request_id).unwrap();
        let take = Take {
            reservation_id: name_reservation(key, &buyer, Some(&request_id)),
            order_no: new_order_no(),
            buyer: buyer.clone(),
            quantity: 1,
            again: false,
        };
        let reply = offer.home(&buyer).take(take.clone(), Caller::default()).await.unwrap();
        let Taken::Taken { slot } = reply.taken else { panic!("not taken: {reply:?}") };
        NewRow {
            offer: key.clone(),
            epoch: reply.stamp.epoch,
            buyer,
            slot,
            reservation_id: take.reservation_id,
            quantity: 1,
            order_no: take.order_no,
            request_id: Some(request_id),
            reserve_time: reply.time,
            hold: offer.hold,
        }
    }

    /// Takes one unit if there is one, and does no more, whatever the engine says.
    pub(crate) async fn take_and_die(&self, key: &OfferKey, buyer: &str, request_id: &str) {
        let buyer = BuyerId::new(buyer).unwrap();
        let request_id = RequestId::new(request_id).unwrap();
        let take = Take {
            reservation_id: name_reservation(key, &buyer, Some(&request_id)),
            order_no: new_order_no(),
            buyer,
            quantity: 1,
            again: false,
        };
        let offer = self.offer(key).await;
        let _died = offer.home(&take.buyer.clone()).take(take, Caller::default()).await;
    }

    /// Step 5 alone.
    pub(crate) async fn write(&self, row: &NewRow) -> Result<Written, WriteError> {
        self.parts.reservations.writer.write(row.clone()).await
    }

    /// Asks until there is a decision; a store that is back is used again, as the probe would.
    pub(crate) async fn decided<T, F>(&self, mut call: impl FnMut() -> F) -> T
    where
        F: Future<Output = Result<T, Error>>,
    {
        eventually("a decision", || {
            let asked = call();
            async {
                match asked.await {
                    Ok(decision) => Some(decision),
                    Err(
                        Error::OfferFrozen(_)
                        | Error::EngineUnavailable
                        | Error::DatabaseUnavailable,
                    ) => {
                        self.close_circuits().await;
                        None
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
        })
        .await
    }

    /// The first decision on a reserve that is repeated until there is one.
    pub(crate) async fn reserve_decided(
        &self,
        key: &OfferKey,
        buyer: &str,
        request_id: &str,
    ) -> ReserveOutcome {
        self.decided(|| self.reserve(key, buyer, request_id)).await
    }

    /// Closes the circuits of the stores that answer.
    pub(crate) async fn close_circuits(&self) {
        if self.parts.engine.probe().await.is_ok() {
            self.parts.engine_circuit.close();
        }
        if self.parts.database.read_clock().await.is_ok() {
            self.parts.database_circuit.close();
        }
    }

    pub(crate) async fn levels(&self, key: &OfferKey) -> OfferLevels {
        self.offer(key).await.levels().await.unwrap().unwrap()
    }

    pub(crate) async fn find(&self, key: &OfferKey, buyer: &str, id: &ReservationId) -> Found {
        let buyer = BuyerId::new(buyer).unwrap();
        let offer = self.offer(key).await;
        offer.home(&buyer).scripts.find(id, &buyer).await.unwrap().unwrap().1
    }

    pub(crate) async fn row(&self, id: &ReservationId) -> Option<Row> {
        outbox::Entity::find()
            .filter(outbox::Column::ReservationId.eq(id.as_str()))
            .one(self.parts.database.reader())
            .await
            .unwrap()
    }

    pub(crate) async fn offer_row(&self, key: &OfferKey) -> offers::Model {
        offers::Entity::find_by_id((key.activity_id.to_string(), key.sku_id.to_string()))
            .one(self.parts.database.reader())
            .await
            .unwrap()
            .unwrap()
    }

    pub(crate) async fn sql_epoch(&self, key: &OfferKey) -> u64 {
        u64::try_from(self.offer_row(key).await.epoch).unwrap()
    }

    /// Waits until the rebuild that something started is over, and more than `before` were made.
    pub(crate) async fn rebuilt_since(&self, key: &OfferKey, before: u64) {
        eventually("a rebuild", async || (self.parts.recovery.rebuilds() > before).then_some(()))
            .await;
        self.healthy(key).await;
    }

    /// Freezes the offer and rebuilds it, to the end.
    pub(crate) async fn rebuild(&self, key: &OfferKey) {
        let offer = self.offer(key).await;
        let epoch = offer.epoch();
        for segment in offer.segments.all() {
            segment.scripts.freeze(epoch, "test").await.unwrap();
        }
        self.parts.recovery.rebuild_now(&offer).await.unwrap();
        assert!(offer.epoch() > epoch);
    }

    /// Rebuilds an offer that the engine has lost.
    pub(crate) async fn rebuild_lost(&self, key: &OfferKey) {
        let offer = self.offer(key).await;
        self.parts.recovery.rebuild_now(&offer).await.unwrap();
    }

    /// Changes the engine behind the protocol's back.
    pub(crate) async fn meddle(&self, key: &OfferKey, script: Script, word: &str) {
        let call = Call { script, keys: keys::segment(key, 0), args: vec![arg(word)] };
        self.parts.engine.eval(call).await.unwrap();
    }
}

impl Ground<'_> {
    /// The engine forgets everything, as after FLUSHALL or a restart without a disk.
    pub(crate) async fn flush(&self, world: &World, key: &OfferKey) {
        match &self.redis {
            Some(redis) => redis.command(&["FLUSHALL"]).await,
            None => world.meddle(key, LOSE, "").await,
        }
    }
}

/// Loses every key of the offer.
pub(crate) const LOSE: Script =
    Script { name: "lose", source: "redis.call('DEL', unpack(KEYS)) return {'ok'}" };

/// Forgets the reservation of the member in ARGV[2], and puts its unit back on sale.
pub(crate) const FORGET: Script = Script {
    name: "forget",
    source: "redis.call('HDEL', KEYS[3], ARGV[2]) redis.call('SREM', KEYS[2], ARGV[2]) \
             redis.call('ZREM', KEYS[5], ARGV[2]) redis.call('INCRBY', KEYS[1], 1) return {'ok'}",
};

/// Forgets that the id in ARGV[2] was given back.
pub(crate) const UNMARK: Script =
    Script { name: "unmark", source: "redis.call('SREM', KEYS[4], ARGV[2]) return {'ok'}" };

/// Sets the revision.
pub(crate) const REWIND: Script = Script {
    name: "rewind",
    source: "redis.call('HSET', KEYS[6], 'revision', ARGV[2]) return {'ok'}",
};

/// Puts units on sale that nobody has.
pub(crate) const INFLATE: Script =
    Script { name: "inflate", source: "redis.call('INCRBY', KEYS[1], ARGV[2]) return {'ok'}" };

/// A rebuild by hand: its step in SQL is done, those in the engine follow when the test says so.
#[derive(Debug)]
pub(crate) struct Rebuild {
    pub(crate) epoch: u64,
    total: u64,
    pub(crate) held: Vec<Held>,
    pub(crate) marks: Vec<ReservationId>,
}

impl Rebuild {
    /// Raises the epoch in SQL and reads the snapshot, in one transaction.
    pub(crate) async fn raise(world: &World, key: &OfferKey) -> Self {
        let transaction = world.parts.database.begin().await.unwrap();
        offers::Entity::update_many()
            .col_expr(offers::Column::Epoch, Expr::col(offers::Column::Epoch).add(1))
            .filter(offers::Column::ActivityId.eq(key.activity_id.as_str()))
            .filter(offers::Column::SkuId.eq(key.sku_id.as_str()))
            .exec(&transaction)
            .await
            .unwrap();
        let offer =
            offers::Entity::find_by_id((key.activity_id.to_string(), key.sku_id.to_string()))
                .one(&transaction)
                .await
                .unwrap()
                .unwrap();
        let rows = outbox::Entity::find()
            .filter(outbox::Column::ActivityId.eq(key.activity_id.as_str()))
            .order_by_asc(outbox::Column::Id)
            .all(&transaction)
            .await
            .unwrap();
        transaction.commit().await.unwrap();
        let (mut held, mut marks) = (Vec::new(), Vec::new());
        for row in rows {
            let reservation = row.reservation().unwrap();
            match row.state {
                OutboxState::Pending | OutboxState::Done | OutboxState::Dead => held.push(Held {
                    buyer: reservation.buyer,
                    slot: u32::try_from(row.slot.unwrap()).unwrap(),
                    record: Record {
                        reservation_id: reservation.reservation_id,
                        quantity: reservation.quantity,
                        order_no: reservation.order_no,
                        reserve_time: reservation.reserve_time,
                        expire_time: reservation.expire_time,
                    },
                }),
                OutboxState::Releasing | OutboxState::Released | OutboxState::Refused => {
                    marks.push(reservation.reservation_id);
                }
            }
        }
        let epoch = u64::try_from(offer.epoch).unwrap();
        Self { epoch, total: u64::try_from(offer.total).unwrap(), held, marks }
    }

    pub(crate) async fn begin(&self, world: &World, key: &OfferKey) -> RebuildStep {
        let offer = world.offer(key).await;
        let expire = TimeMs::now().plus(Duration::from_secs(3_600));
        offer.segments.first().scripts.rebuild_begin(self.epoch, self.total, expire).await.unwrap()
    }

    /// All of the snapshot as one chunk of this number.
    pub(crate) async fn load(&self, world: &World, key: &OfferKey, chunk: u64) -> RebuildStep {
        let offer = world.offer(key).await;
        let scripts = &offer.segments.first().scripts;
        scripts.rebuild_load(self.epoch, chunk, &self.held, &self.marks).await.unwrap()
    }

    pub(crate) async fn end(&self, world: &World, key: &OfferKey, chunks: u64) -> RebuildStep {
        let offer = world.offer(key).await;
        let scripts = &offer.segments.first().scripts;
        let held: u64 = self.held.iter().map(|held| u64::from(held.record.quantity)).sum();
        let stock = self.total - held;
        scripts.rebuild_end(self.epoch, chunks, stock, self.total).await.unwrap()
    }
}
