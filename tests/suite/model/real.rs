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
    domain::{ActivityId, BuyerId, OfferKey, RequestId, ReservationId, SkuId, name_reservation},
    engine::{Engine, embedded::EmbeddedEngine, scripts::Found},
    entity::outbox::OutboxState,
    server::Parts,
};

use super::{
    Loss, Step,
    engine::{AGE, Dump, Stage},
    expected::{Fate, Id, MAX_ORDERS, MAX_QUANTITY, Model, State, TOTAL},
};
use crate::support::{
    databases::Fresh,
    stage::Gate,
    world::{Ground, Sale, World},
};

/// The engine lost something and was not rebuilt since.
#[derive(Debug)]
pub(super) struct Lost {
    /// The epoch in SQL at that time.
    pub(super) epoch: u64,
    /// Whether only a server that has seen more can tell.
    pub(super) only_seen: bool,
}

pub(super) struct Real<'a> {
    pub(super) stage: &'a Stage,
    fresh: &'a Fresh,
    settings: Settings,
    pub(super) embedded: Option<Arc<EmbeddedEngine>>,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) servers: Vec<(World, Arc<Gate>)>,
    pub(super) key: OfferKey,
    pub(super) segments: u32,
    pub(super) model: Model,
    pub(super) lost: Option<Lost>,
    /// Requests that the engine alone has had: when it goes back, it may have them again.
    pub(super) ghosts: BTreeSet<Id>,
    /// What each request was told first.
    pub(super) told: BTreeMap<Id, (String, String)>,
    pub(super) dumps: BTreeMap<usize, Dump>,
}

/// Runs one sequence in a new database; says what went wrong, and after which steps.
pub(super) async fn run(
    stage: &Stage,
    fresh: &Fresh,
    segments: u32,
    steps: &[Step],
) -> Result<(), String> {
    let mut real = Real::open(stage, fresh, segments).await;
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
            return Err(story(&wrong, segments, &steps[..=nth]));
        }
    }
    real.settle().await.map_err(|wrong| story(&format!("at the end, {wrong}"), segments, steps))
}

fn story(wrong: &str, segments: u32, steps: &[Step]) -> String {
    let mut story = format!("{wrong}\nwith {segments} segment(s), after");
    for (nth, step) in steps.iter().enumerate() {
        write!(story, "\n  {nth}: {step:?}").unwrap();
    }
    story
}

pub(super) fn must<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: T,
    expected: T,
) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, and the model says {expected:?}"))
}

impl<'a> Real<'a> {
    async fn open(stage: &'a Stage, fresh: &'a Fresh, segments: u32) -> Self {
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
                activity_id: ActivityId::new("sale").unwrap(),
                sku_id: SkuId::new("sku-1").unwrap(),
            },
            segments,
            model: Model::default(),
            lost: None,
            ghosts: BTreeSet::new(),
            told: BTreeMap::new(),
            dumps: BTreeMap::new(),
        };
        let sale = Sale {
            total: TOTAL,
            segments,
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
    pub(super) fn base(&self) -> World {
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
            Step::Transfer { server, source, target, scripts } => {
                self.transfer(*server, *source, *target, *scripts).await?;
            }
            Step::Balance { server } => self.balance(*server).await?,
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

    /// Waits until nothing moves, and notes what a loss came to.
    pub(super) async fn rest(&mut self) {
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
        if let Ok(Ok(levels)) = offer.levels().await
            && levels.stamp.epoch > lost.epoch
        {
            self.lost = None;
            self.model.rebuilt();
            // What an expiry gave back beside the rebuild may have been read before, or after.
            for (id, fate) in &mut self.model.fates {
                if fate.state == State::Releasing {
                    let buyer = BuyerId::new(&buyer(id.buyer)).unwrap();
                    let id = reservation_id(&self.key, *id);
                    let found = offer.segments.home(&buyer).scripts.find(&id, &buyer).await;
                    fate.in_engine = matches!(found, Ok(Ok((_, Found::Held { .. }))));
                    fate.acknowledged = fate.in_engine;
                }
            }
        }
    }

    /// The books are those of the model.
    async fn compare(&self) -> Result<(), String> {
        if self.lost.is_some() {
            return Ok(());
        }
        let world = &self.servers[0].0;
        if self.segments > 1 {
            // While units are on their way the books wait for them, and nobody finishes it here.
            let levels = world.offer(&self.key).await.levels().await;
            let levels = levels.map_err(|error| format!("{error:?}"))?;
            let levels = levels.map_err(|refusal| format!("{refusal:?}"))?;
            let held = self.model.units(|fate| fate.in_engine);
            must("what is left and held", (levels.stock, levels.held), (TOTAL - held, held))?;
            if levels.out > 0 {
                return Ok(());
            }
        }
        let books = world.read_books(&self.key).await.map_err(|error| format!("{error:?}"))?;
        let model = &self.model;
        let units = |is: fn(&Fate) -> bool| i64::try_from(model.units(is)).unwrap();
        let count = |is: fn(&Fate) -> bool| i64::try_from(model.count(is)).unwrap();
        let expected = books::OfferBooks {
            sku_id: self.key.sku_id.to_string(),
            total: i64::try_from(TOTAL).unwrap(),
            engine_remaining: i64::try_from(model.stock()).unwrap(),
            engine_units_reserved: units(|fate| fate.in_engine),
            engine_in_transfer: 0,
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
        let levels = self.servers[0].0.levels(&self.key).await;
        must("what is on its way behind a sweep", levels.out, 0)?;
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

    pub(super) fn is_ghost(&self, id: Id) -> bool {
        self.lost.is_some() && self.ghosts.contains(&id) && !self.model.fates.contains_key(&id)
    }

    pub(super) fn reservation_id(&self, id: Id) -> ReservationId {
        reservation_id(&self.key, id)
    }

    pub(super) async fn sql(&self, statement: &str) {
        self.fresh.writer().execute_unprepared(statement).await.unwrap();
    }
}

pub(super) fn buyer(number: u8) -> String {
    format!("u{number}")
}

pub(super) fn request(id: Id) -> String {
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
