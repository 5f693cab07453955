//! The same steps on two servers, step by step with the model.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::Arc,
    time::Duration,
};

use sea_orm::ConnectionTrait;
use seckill::{
    books,
    config::Settings,
    domain::{
        BuyerId, ConfirmOutcome, OfferKey, ReleaseOutcome, RequestId, ReservationId,
        ReservationQuery, ReservationState, ReserveOutcome, name_reservation,
    },
    engine::{
        Call, Engine, Script,
        embedded::{Dumped, DumpedContent, EmbeddedEngine},
        keys,
    },
    entity::outbox::OutboxState,
    error::Error,
    outbox::sweeper::sweep,
    server::Parts,
};

use super::{
    Loss, ReleaseFault, ReserveFault, Step,
    expected::{Fate, Heard, Id, MAX_ORDERS, MAX_QUANTITY, Model, State, TOTAL},
};
use crate::support::{
    arg,
    databases::Fresh,
    redis_server::RedisServer,
    stage::Gate,
    world::{Ground, Sale, World},
};

/// Runs any one command.
const COMMAND: Script = Script { name: "command", source: "return redis.call(unpack(ARGV, 2))" };
/// Ends the hold of every reservation that has one.
const AGE: Script = Script {
    name: "age",
    source: "local page = redis.call('HSCAN', KEYS[3], '0', 'COUNT', '1000') \
             for i = 1, #page[2], 2 do \
               local record = string.gsub(page[2][i + 1], ' [1-9]%d*$', ' 1000') \
               redis.call('HSET', KEYS[3], page[2][i], record) \
             end \
             return {'ok'}",
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Embedded,
    Redis,
}

/// What all sequences share.
pub(super) struct Stage {
    redis: Option<(RedisServer, Arc<dyn Engine>)>,
}

impl Stage {
    pub(super) async fn open(kind: Kind) -> Self {
        if kind == Kind::Embedded {
            return Self { redis: None };
        }
        let server = RedisServer::start().await;
        let engine: Arc<dyn Engine> = Arc::new(server.engine().await);
        Self { redis: Some((server, engine)) }
    }
}

type Dump = BTreeMap<String, Dumped>;

/// The engine lost something and was not rebuilt since.
#[derive(Debug)]
struct Lost {
    /// The epoch in SQL at that time.
    epoch: u64,
    /// Whether only a server that has seen more can tell.
    only_seen: bool,
}

struct Real<'a> {
    stage: &'a Stage,
    fresh: &'a Fresh,
    settings: Settings,
    embedded: Option<Arc<EmbeddedEngine>>,
    engine: Arc<dyn Engine>,
    servers: Vec<(World, Arc<Gate>)>,
    key: OfferKey,
    model: Model,
    lost: Option<Lost>,
    /// Requests that the engine alone has had: when it goes back, it may have them again.
    ghosts: BTreeSet<Id>,
    /// What each request was told first.
    told: BTreeMap<Id, (String, String)>,
    dumps: BTreeMap<usize, Dump>,
}

/// Runs one sequence in a new database; says what went wrong, and after which steps.
pub(super) async fn run(stage: &Stage, fresh: &Fresh, steps: &[Step]) -> Result<(), String> {
    let mut real = Real::open(stage, fresh).await;
    // The engine's state is kept in front of the steps that some loss goes back to.
    let kept: BTreeSet<usize> = steps
        .iter()
        .enumerate()
        .filter_map(|(nth, step)| match step {
            Step::Lose(Loss::GoesBack { steps, .. }) => Some(nth.saturating_sub(*steps)),
            _ => None,
        })
        .collect();
    for (nth, step) in steps.iter().enumerate() {
        if kept.contains(&nth) {
            real.dumps.insert(nth, real.dump().await);
        }
        let outcome = match real.step(nth, step).await {
            Ok(()) => real.compare().await,
            wrong => wrong,
        };
        if let Err(wrong) = outcome {
            return Err(story(&wrong, &steps[..=nth]));
        }
    }
    real.settle().await.map_err(|wrong| story(&format!("at the end, {wrong}"), steps))
}

fn story(wrong: &str, steps: &[Step]) -> String {
    let mut story = format!("{wrong}\nafter");
    for (nth, step) in steps.iter().enumerate() {
        write!(story, "\n  {nth}: {step:?}").unwrap();
    }
    story
}

fn must<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, and the model says {expected:?}"))
}

impl<'a> Real<'a> {
    async fn open(stage: &'a Stage, fresh: &'a Fresh) -> Self {
        let mut settings = Ground::embedded(fresh).settings();
        settings.outbox.backoff_ms = 1;
        let (embedded, engine) = match &stage.redis {
            Some((server, engine)) => {
                server.command::<()>(&["FLUSHALL"]).await;
                (None, engine.clone())
            }
            None => {
                let engine = Arc::new(EmbeddedEngine::new());
                (Some(engine.clone()), engine as Arc<dyn Engine>)
            }
        };
        let mut real = Self {
            stage,
            fresh,
            settings,
            embedded,
            engine,
            servers: Vec::new(),
            key: OfferKey {
                activity_id: seckill::domain::ActivityId::new("sale").unwrap(),
                sku_id: seckill::domain::SkuId::new("sku-1").unwrap(),
            },
            model: Model::default(),
            lost: None,
            ghosts: BTreeSet::new(),
            told: BTreeMap::new(),
            dumps: BTreeMap::new(),
        };
        let sale = Sale {
            total: TOTAL,
            max_orders: u32::try_from(MAX_ORDERS).unwrap(),
            max_quantity: MAX_QUANTITY,
            hold: Some(Duration::from_secs(600)),
            ..Sale::default()
        };
        let base = real.base();
        real.key = base.open_sale(&sale).await;
        for _ in 0..2 {
            real.servers.push(base.beside().await);
        }
        real
    }

    /// A server without a gate.
    fn base(&self) -> World {
        let database = (**self.fresh).clone();
        let parts = Parts::over(&self.settings, database, self.engine.clone());
        World { parts, settings: self.settings.clone() }
    }

    async fn step(&mut self, nth: usize, step: &Step) -> Result<(), String> {
        match step {
            Step::Reserve { server, id, quantity, fault } => {
                self.reserve(*server, *id, *quantity, *fault).await?;
            }
            Step::Release { server, buyer, id, fault } => {
                self.release(*server, *buyer, *id, *fault).await?;
            }
            Step::Confirm { server, buyer, id } => self.confirm(*server, *buyer, *id).await?,
            Step::GetByRequest { server, id } => self.get(*server, *id, true).await?,
            Step::GetById { server, id } => self.get(*server, *id, false).await?,
            Step::WarmUp { server } => self.warm_up(*server).await?,
            Step::Status { server } => self.status(*server).await?,
            Step::Poll { server } => self.poll(*server).await?,
            Step::Sweep { server } => self.sweep(*server).await?,
            Step::Expire { server } => self.expire(*server).await?,
            Step::HoldsEnd => {
                self.sql("UPDATE outbox SET expire_time = 1000 WHERE expire_time IS NOT NULL")
                    .await;
                self.script(AGE, &[]).await;
                self.model.holds_end();
            }
            Step::DeadLetter { id } => {
                let fate = self.model.fates.get_mut(id);
                if let Some(fate) = fate.filter(|fate| fate.state == State::Pending) {
                    fate.state = State::Dead;
                    let id = self.reservation_id(*id);
                    let sql = "UPDATE outbox SET state = 'dead' WHERE reservation_id";
                    self.sql(&format!("{sql} = '{id}'")).await;
                }
            }
            Step::Lose(loss) => self.lose(nth, *loss).await,
            Step::Crash { server } => {
                if self.lost.as_ref().is_some_and(|lost| lost.only_seen) {
                    // Who has not seen it can tell by the server's identity only.
                    self.change_identity().await;
                }
                self.servers[*server] = self.base().beside().await;
            }
            Step::End { server } => self.end(*server).await?,
        }
        self.rest().await;
        Ok(())
    }

    async fn reserve(
        &mut self,
        server: usize,
        id: Id,
        quantity: u32,
        fault: ReserveFault,
    ) -> Result<(), String> {
        let gate = self.servers[server].1.clone();
        match fault {
            ReserveFault::None => {}
            ReserveFault::ReplyLost => gate.lose_reply("reserve"),
            ReserveFault::NotAcknowledged => gate.refuse("acknowledge"),
        }
        let was_lost = self.lost.is_some() && self.model.refusal(quantity).is_none();
        let offer = self.servers[server].0.offer(&self.key).await;
        let is_behind = offer.segment.epoch() < self.servers[server].0.sql_epoch(&self.key).await;
        let mut heard = self.ask_reserve(server, id, quantity).await?;
        self.rest().await;
        if was_lost {
            must("a reserve of an engine that lost something", heard, Heard::Undecided)?;
            if fault == ReserveFault::ReplyLost {
                // What it took may be recorded before anybody notices; and it has caught up.
                self.ghosts.insert(id);
                gate.open();
                self.change_identity().await;
                return Ok(());
            }
            must("whether it is rebuilt", self.lost.is_none(), true)?;
            heard = self.ask_reserve(server, id, quantity).await?;
        }
        if is_behind && fault == ReserveFault::ReplyLost && heard == Heard::Undecided {
            // It called under an old epoch, so what it did not hear was a refusal.
            return Ok(());
        }
        let expected = self.model.reserve(id, quantity, fault);
        if self.model.fates.get(&id).is_some_and(|fate| fate.state == State::Taken) {
            self.ghosts.insert(id);
        }
        must("a reserve", heard, expected)?;
        self.rest().await;
        gate.open();
        Ok(())
    }

    async fn ask_reserve(&mut self, server: usize, id: Id, units: u32) -> Result<Heard, String> {
        let world = &self.servers[server].0;
        let outcome = world.reserve_units(&self.key, &buyer(id.buyer), &request(id), units).await;
        Ok(match outcome {
            Ok(ReserveOutcome::Ended) => Heard::Ended,
            Ok(ReserveOutcome::QuantityLimit { .. }) => Heard::QuantityLimit,
            Ok(ReserveOutcome::Reserved { reservation, replayed, .. }) => {
                let told =
                    (reservation.reservation_id.to_string(), reservation.order_no.to_string());
                must("its buyer", reservation.buyer.to_string(), buyer(id.buyer))?;
                must("its units", reservation.quantity, units)?;
                let first = self.told.entry(id).or_insert_with(|| told.clone()).clone();
                must("what a request is told again", told, first)?;
                Heard::Reserved { replayed }
            }
            Ok(ReserveOutcome::Released) => Heard::Released,
            Ok(ReserveOutcome::Duplicate { existing }) => {
                let existing = existing.map(|existing| existing.buyer.to_string());
                must("whose it is", existing, Some(buyer(id.buyer)))?;
                Heard::Duplicate
            }
            Ok(ReserveOutcome::SoldOut) => Heard::SoldOut,
            Ok(ReserveOutcome::Insufficient { remaining }) => Heard::Insufficient(remaining),
            Err(Error::RequestIdConflict { .. }) => Heard::Conflict,
            other => undecided(other)?,
        })
    }

    async fn release(
        &mut self,
        server: usize,
        buyer: u8,
        id: Id,
        fault: ReleaseFault,
    ) -> Result<(), String> {
        let gate = self.servers[server].1.clone();
        match fault {
            ReleaseFault::None => {}
            ReleaseFault::NotRun => gate.refuse("release"),
            ReleaseFault::ReplyLost => gate.lose_reply("release"),
        }
        let was_lost = self.lost.is_some();
        let is_ghost = self.is_ghost(id);
        // SQL comes first, whatever the engine is like.
        let expected =
            if is_ghost { Heard::Undecided } else { self.model.release(buyer, id, fault) };
        let mut heard = self.ask_release(server, buyer, id).await?;
        self.rest().await;
        gate.open();
        if fault == ReleaseFault::ReplyLost && self.lost.as_ref().is_some_and(|l| l.only_seen) {
            self.change_identity().await;
        }
        if is_ghost {
            // SQL tells what it came to, in `rest`.
            return Ok(());
        }
        for _ in 0..3 {
            if was_lost && heard == Heard::Undecided && expected != Heard::Undecided {
                heard = self.ask_release(server, buyer, id).await?;
                self.rest().await;
                if expected == Heard::Released && heard == Heard::AlreadyReleased {
                    // By the attempt before.
                    heard = Heard::Released;
                }
            }
        }
        must("a release", heard, expected)
    }

    async fn ask_release(&self, server: usize, by: u8, id: Id) -> Result<Heard, String> {
        let world = &self.servers[server].0;
        match world.release(&self.key, &buyer(by), &self.reservation_id(id)).await {
            Ok(ReleaseOutcome::Released) => Ok(Heard::Released),
            Ok(ReleaseOutcome::AlreadyReleased) => Ok(Heard::AlreadyReleased),
            Ok(ReleaseOutcome::NotReserved) => Ok(Heard::NotReserved),
            Ok(ReleaseOutcome::WrongOwner) => Ok(Heard::WrongOwner),
            Ok(ReleaseOutcome::Confirmed) => Ok(Heard::Confirmed),
            other => undecided(other),
        }
    }

    async fn confirm(&mut self, server: usize, by: u8, id: Id) -> Result<(), String> {
        let expected = self.model.confirm(by, id);
        self.look(id, "a confirm", expected, async |real| {
            let world = &real.servers[server].0;
            match world.confirm(&real.key, &buyer(by), &real.reservation_id(id)).await {
                Ok(ConfirmOutcome::Confirmed(_)) => Ok(Heard::Confirmed),
                Ok(ConfirmOutcome::Expired) => Ok(Heard::Expired),
                Ok(ConfirmOutcome::Released) => Ok(Heard::Released),
                Ok(ConfirmOutcome::NotReserved) => Ok(Heard::NotReserved),
                Ok(ConfirmOutcome::WrongOwner) => Ok(Heard::WrongOwner),
                Ok(ConfirmOutcome::NotOrderedYet) => Ok(Heard::NotOrderedYet),
                other => undecided(other),
            }
        })
        .await
    }

    async fn get(&mut self, server: usize, id: Id, by_request: bool) -> Result<(), String> {
        let expected = self.model.get(id, by_request);
        self.look(id, "a look", expected, async |real| {
            let query = if by_request {
                ReservationQuery::ByRequest {
                    offer: real.key.clone(),
                    buyer: BuyerId::new(&buyer(id.buyer)).unwrap(),
                    request_id: RequestId::new(&request(id)).unwrap(),
                }
            } else {
                ReservationQuery::ById(real.reservation_id(id))
            };
            match real.servers[server].0.parts.reservations.get(query).await {
                Ok((reservation, None)) => Ok(Heard::Found(match reservation.state {
                    ReservationState::Held => State::Taken,
                    ReservationState::Queued => State::Pending,
                    ReservationState::Ordered => State::Ordered,
                    ReservationState::Confirmed => State::Confirmed,
                    ReservationState::Released => State::Released,
                    ReservationState::Dead => State::Dead,
                    ReservationState::Refused => return Err(format!("refused: {reservation:?}")),
                })),
                Err(Error::UnknownReservation) => Ok(Heard::Unknown),
                other => undecided(other),
            }
        })
        .await
    }

    /// A call that takes nothing from the engine: while that has lost something, it may have to
    /// be repeated.
    async fn look(
        &mut self,
        id: Id,
        what: &str,
        expected: Heard,
        ask: impl AsyncFn(&Self) -> Result<Heard, String>,
    ) -> Result<(), String> {
        let (was_lost, is_ghost) = (self.lost.is_some(), self.is_ghost(id));
        let mut heard = ask(self).await?;
        self.rest().await;
        if is_ghost {
            return Ok(());
        }
        if was_lost && heard == Heard::Undecided {
            heard = ask(self).await?;
        }
        must(what, heard, expected)
    }

    async fn warm_up(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        match activities.warm_up(&self.key.activity_id, "test").await {
            Ok(report) if !self.model.ended => {
                must("whether it was warm", report.already_warm, true)?;
                if self.lost.is_none() {
                    must("what is left", report.stocks[0].remaining, self.model.stock())?;
                }
                Ok(())
            }
            Err(Error::WrongActivityState { .. }) if self.model.ended => Ok(()),
            Err(Error::OfferFrozen(_)) if self.lost.is_some() => Ok(()),
            other => Err(format!("a warm-up: {other:?}")),
        }
    }

    async fn status(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        let status = activities.pipeline_status(Some(&self.key.activity_id)).await;
        let status = status.map_err(|error| format!("a status: {error:?}"))?;
        let offer = &status.offers[0];
        let model = &self.model;
        let figure = |count: u64| i64::try_from(count).unwrap();
        let count = |state| figure(model.count(|fate| fate.state == state));
        let found = [offer.pending, offer.releasing, offer.dead, offer.orders_live];
        let orders = figure(model.count(Fate::is_ordered));
        let expected = [State::Pending, State::Releasing, State::Dead].map(count);
        let expected = [expected[0], expected[1], expected[2], orders];
        must("pending, releasing, dead and ordered", found, expected)?;
        if self.lost.is_none() {
            let unacked = model.count(|fate| fate.in_engine && !fate.acknowledged);
            let expected = (Some(model.stock()), Some(unacked), false);
            must("what is left", (offer.remaining, offer.unacked, offer.frozen), expected)?;
        }
        Ok(())
    }

    async fn poll(&mut self, server: usize) -> Result<(), String> {
        // As much later as any pause was.
        self.sql("UPDATE outbox SET next_attempt_time = 0").await;
        let world = &self.servers[server].0;
        let passed = world.parts.poller(&world.settings).run_once().await;
        if self.lost.is_none() {
            passed.map_err(|error| format!("a pass of the poller: {error:?}"))?;
            self.model.poll();
        } else {
            self.model.order();
        }
        Ok(())
    }

    async fn sweep(&mut self, server: usize) -> Result<(), String> {
        // Not a single millisecond of grace: what was taken in this one counts too.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let reservations = &self.servers[server].0.parts.reservations;
        let swept = sweep(reservations, Duration::ZERO).await;
        if self.lost.is_none() {
            let unacked = self.model.count(|fate| fate.in_engine && !fate.acknowledged);
            let swept = swept.map_err(|error| format!("a sweep: {error:?}"))?;
            must("what was settled", swept as u64, unacked)?;
            self.model.sweep();
        }
        Ok(())
    }

    async fn expire(&mut self, server: usize) -> Result<(), String> {
        let is_due =
            |fate: &Fate| fate.over && matches!(fate.state, State::Pending | State::Ordered);
        let due = self.model.count(is_due);
        self.model.expire(self.lost.is_none());
        let expired = self.servers[server].0.parts.reservations.expire_holds(100).await;
        if self.lost.is_none() {
            let expired = expired.map_err(|error| format!("an expiry: {error:?}"))?;
            must("holds that were over", expired as u64, due)?;
        }
        Ok(())
    }

    async fn end(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        let ended = activities.end(&self.key.activity_id, "test", "").await;
        ended.map_err(|error| format!("the end: {error:?}"))?;
        for (world, _) in &self.servers {
            world.parts.catalog.refresh().await.unwrap();
        }
        self.model.ended = true;
        Ok(())
    }

    async fn lose(&mut self, nth: usize, loss: Loss) {
        let mut only_seen = false;
        match loss {
            Loss::Everything => self.restore(&Dump::new()).await,
            Loss::Restart if self.embedded.is_some() => {
                let engine = Arc::new(EmbeddedEngine::new());
                self.embedded = Some(engine.clone());
                self.engine = engine;
                for server in 0..self.servers.len() {
                    self.servers[server] = self.base().beside().await;
                }
            }
            Loss::Restart => self.change_identity().await,
            Loss::GoesBack { steps, failed_over } => {
                let dump = self.dumps[&nth.saturating_sub(steps)].clone();
                let (now, then) = (meta(&self.dump().await), meta(&dump));
                let same_server = now.2 == then.2;
                if same_server && !failed_over && now == then {
                    return;
                }
                self.restore(&dump).await;
                // One more write, and the revision would have caught up.
                let far = |(epoch, revision): (u64, u64)| {
                    epoch > then.0 || epoch == then.0 && revision > then.1 + 1
                };
                only_seen = same_server && !failed_over;
                for (world, _) in &self.servers {
                    let seen = world.offer(&self.key).await.segment.seen();
                    only_seen &= far((seen.epoch, seen.revision));
                }
                if !only_seen {
                    self.change_identity().await;
                }
            }
        }
        let epoch = self.servers[0].0.sql_epoch(&self.key).await;
        self.lost = Some(Lost { epoch, only_seen });
        self.model.fates.retain(|_, fate| fate.state != State::Taken);
        if loss == Loss::Restart && self.embedded.is_some() {
            // Its start is a rebuild.
            self.servers[0].0.rebuild_lost(&self.key).await;
        }
    }

    /// Waits until nothing moves, and notes what a loss came to.
    async fn rest(&mut self) {
        for (world, _) in &self.servers {
            while !world.parts.tasks.is_empty() {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            world.close_circuits().await;
        }
        let Some(lost) = &self.lost else { return };
        for id in self.ghosts.clone() {
            let known = self.model.fates.contains_key(&id);
            let row = self.servers[0].0.row(&self.reservation_id(id)).await;
            if let Some(row) = row.filter(|_| !known) {
                let fate = Fate {
                    quantity: row.units(),
                    state: state_of(row.state),
                    in_engine: false,
                    acknowledged: false,
                    over: false,
                    expired: false,
                };
                self.model.fates.insert(id, fate);
            }
        }
        for (id, fate) in &mut self.model.fates {
            if fate.state == State::Releasing {
                let id = reservation_id(&self.key, *id);
                let row = self.servers[0].0.row(&id).await.expect("a row is never gone");
                fate.state = state_of(row.state);
            }
        }
        let offer = self.servers[0].0.offer(&self.key).await;
        if let Ok(Ok(levels)) = offer.segment.scripts.levels().await
            && levels.stamp.epoch > lost.epoch
        {
            self.lost = None;
            self.model.rebuilt();
        }
    }

    /// The books are those of the model.
    async fn compare(&self) -> Result<(), String> {
        if self.lost.is_some() {
            return Ok(());
        }
        let world = &self.servers[0].0;
        let books = world.read_books(&self.key).await.map_err(|error| format!("{error:?}"))?;
        let model = &self.model;
        let units = |is: fn(&Fate) -> bool| i64::try_from(model.units(is)).unwrap();
        let count = |is: fn(&Fate) -> bool| i64::try_from(model.count(is)).unwrap();
        let expected = books::OfferBooks {
            sku_id: self.key.sku_id.to_string(),
            total: i64::try_from(TOTAL).unwrap(),
            engine_remaining: i64::try_from(model.stock()).unwrap(),
            engine_units_reserved: units(|fate| fate.in_engine),
            engine_unacked: count(|fate| fate.in_engine && !fate.acknowledged),
            sql_reserved: units(Fate::is_live),
            sql_sold: units(Fate::is_ordered),
            live_rows_units: units(Fate::is_live),
            unfinished_rows: count(|f| matches!(f.state, State::Pending | State::Releasing)),
            dead_rows: count(|fate| fate.state == State::Dead),
            live_orders: count(Fate::is_ordered),
            orders_units: units(Fate::is_ordered),
            buyers_with_more_than_allowed: 0,
            unmatched: count(|fate| fate.in_engine != fate.is_live()),
        };
        must("the books", books, expected)
    }

    /// Everything is finished: the books balance, and whoever was told has the order.
    async fn settle(&mut self) -> Result<(), String> {
        if self.lost.is_some() {
            self.change_identity().await;
            self.sweep(0).await?;
            self.rest().await;
            must("whether it is rebuilt", self.lost.is_none(), true)?;
        }
        self.sweep(0).await?;
        self.rest().await;
        self.poll(1).await?;
        self.rest().await;
        self.compare().await?;
        let orders = self.servers[0].0.live_orders(&self.key).await;
        for (id, fate) in &self.model.fates {
            let order = orders.get(self.reservation_id(*id).as_str());
            must("whether it has an order", order.is_some(), fate.is_ordered())?;
            if let (Some(order), Some((_, told))) = (order, self.told.get(id)) {
                must("its order", order, told)?;
            }
        }
        Ok(())
    }

    fn is_ghost(&self, id: Id) -> bool {
        self.lost.is_some() && self.ghosts.contains(&id) && !self.model.fates.contains_key(&id)
    }

    fn reservation_id(&self, id: Id) -> ReservationId {
        reservation_id(&self.key, id)
    }

    async fn sql(&self, statement: &str) {
        self.fresh.writer().execute_unprepared(statement).await.unwrap();
    }

    /// Runs a script on the keys of the offer, past the servers.
    async fn script(&self, script: Script, args: &[&[u8]]) {
        let args = args.iter().map(|arg| arg.to_vec()).collect();
        let call = Call { script, keys: keys::segment(&self.key, 0), args };
        self.engine.eval(call).await.unwrap();
    }

    async fn dump(&self) -> Dump {
        match (&self.stage.redis, &self.embedded) {
            (Some((server, _)), _) => server.dump().await,
            (None, Some(engine)) => engine.dump(),
            (None, None) => unreachable!("one of the two runs"),
        }
    }

    /// The engine holds this and nothing else.
    async fn restore(&self, dump: &Dump) {
        for key in keys::segment(&self.key, 0).iter() {
            self.script(COMMAND, &[b"DEL", key.as_bytes()]).await;
        }
        for (key, value) in dump {
            let key = key.as_bytes();
            match &value.content {
                DumpedContent::Text(text) => self.script(COMMAND, &[b"SET", key, text]).await,
                DumpedContent::Hash(fields) => {
                    for (field, value) in fields {
                        self.script(COMMAND, &[b"HSET", key, field, value]).await;
                    }
                }
                DumpedContent::Set(members) => {
                    for member in members {
                        self.script(COMMAND, &[b"SADD", key, member]).await;
                    }
                }
                DumpedContent::SortedSet(members) => {
                    for (member, score) in members {
                        self.script(COMMAND, &[b"ZADD", key, score.as_bytes(), member]).await;
                    }
                }
            }
            if let Some(at) = value.expires_at {
                self.script(COMMAND, &[b"PEXPIREAT", key, &arg(at)]).await;
            }
        }
    }

    /// The engine is another server from here on, with the same data.
    async fn change_identity(&mut self) {
        let meta_key = keys::segment(&self.key, 0)[5].clone();
        if self.dump().await.contains_key(&meta_key) {
            let words: [&[u8]; 4] = [b"HSET", meta_key.as_bytes(), b"server", b"another"];
            self.script(COMMAND, &words).await;
        }
        if let Some(lost) = &mut self.lost {
            lost.only_seen = false;
        }
    }
}

/// Epoch, revision and server of the segment that was dumped.
fn meta(dump: &Dump) -> (u64, u64, Vec<u8>) {
    let meta = dump.iter().find(|(key, _)| key.ends_with(":meta"));
    let Some((_, Dumped { content: DumpedContent::Hash(fields), .. })) = meta else {
        return (0, 0, Vec::new());
    };
    let number = |field: &[u8]| {
        let text = fields.get(field).map(|text| String::from_utf8_lossy(text).into_owned());
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    (number(b"epoch"), number(b"revision"), fields.get(&b"server"[..]).cloned().unwrap_or_default())
}

fn buyer(number: u8) -> String {
    format!("u{number}")
}

fn request(id: Id) -> String {
    format!("r{}", id.request)
}

fn reservation_id(key: &OfferKey, id: Id) -> ReservationId {
    let buyer = BuyerId::new(&buyer(id.buyer)).unwrap();
    name_reservation(key, &buyer, Some(&RequestId::new(&request(id)).unwrap()))
}

fn state_of(row: OutboxState) -> State {
    match row {
        OutboxState::Pending => State::Pending,
        OutboxState::Done => State::Ordered,
        OutboxState::Dead => State::Dead,
        OutboxState::Releasing => State::Releasing,
        OutboxState::Released => State::Released,
        OutboxState::Refused => panic!("nothing is refused where every loss is noticed"),
    }
}

/// What an error means to the caller; anything else is a fault.
fn undecided<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Result<Heard, String> {
    match outcome {
        Err(Error::OfferFrozen(_) | Error::EngineUnavailable | Error::DatabaseUnavailable) => {
            Ok(Heard::Undecided)
        }
        other => Err(format!("{other:?}")),
    }
}
