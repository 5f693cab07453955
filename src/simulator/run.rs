//! One run: servers, buyers and disasters, then peace, and then the books.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sea_orm::EntityTrait;
use tokio::{task::JoinHandle, time::Instant};

use super::{
    Break, InSimulation, Life, Shared, World, engine,
    history::{Account, History, Wish},
    plan::{Disaster, Plan},
    sql,
};
use crate::{
    books,
    database::Database,
    domain::{
        BuyerId, ConfirmRequest, OfferKey, ReleaseRequest, RequestId, ReservationId,
        ReservationQuery, ReserveOutcome, ReserveRequest, name_reservation,
    },
    engine::{batcher::Caller, keys},
    entity::{offers, outbox::OutboxState},
    error::Error,
    server::Parts,
};

/// How long everything may take to come to rest once nothing goes wrong any more.
const REST_WITHIN: Duration = Duration::from_secs(60);
/// So often, five times a second, nothing must be left to do: what was slow is over by then.
const CALM_LOOKS: u32 = 6;
/// How long a call may take that nothing disturbs, and one that everything does.
const CALL_WITHIN: Duration = Duration::from_secs(120);

/// What a run came to.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) violations: Vec<String>,
    /// The same for the same seed.
    pub(super) hash: u64,
    pub(super) steps: u64,
    pub(super) lines: Vec<String>,
    pub(super) won: usize,
    pub(super) seen: BTreeMap<String, u64>,
}

/// Runs a seed over a copy of `schema`, a database file without data.
pub(super) fn run(seed: u64, schema: &Path, broken: Option<Break>, verbose: bool) -> Outcome {
    let folder = match Path::new("/dev/shm") {
        shm if shm.is_dir() => tempfile::tempdir_in(shm),
        _ => tempfile::tempdir(),
    };
    let folder = folder.unwrap();
    let file = folder.path().join("simulated.db");
    std::fs::copy(schema, &file).unwrap();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let outcome = runtime.unwrap().block_on(async {
        let simulated = InSimulation::begin(seed);
        let world = Arc::new(World::new(Plan::of(seed), broken, verbose));
        let stage = Arc::new(Stage::new(world.clone(), &file));
        // In a task, so that a panic ends it and not the run.
        let played = spawn({
            let stage = stage.clone();
            async move { stage.play().await }
        });
        world.check(played.await.is_ok(), || "the run panicked".to_owned());
        simulated.panics().into_iter().for_each(|panic| world.violation(panic));
        let won = stage.history.accounts().values().filter(|a| a.reserved.is_some()).count();
        let mut trace = world.trace.lock().unwrap();
        Outcome {
            violations: world.violations.lock().unwrap().clone(),
            hash: trace.hash,
            steps: trace.steps,
            lines: trace.lines.take().unwrap_or_default(),
            won,
            seen: std::mem::take(&mut trace.seen),
        }
    });
    drop(folder);
    outcome
}

/// One server that runs, or is dead.
#[derive(Clone)]
struct Server {
    life: Life,
    parts: Parts,
}

struct Stage {
    world: Shared,
    engine: Arc<engine::Store>,
    sql: Arc<sql::Store>,
    history: History,
    servers: Mutex<Vec<Server>>,
    started: Mutex<u32>,
    is_over: AtomicBool,
}

impl Stage {
    fn new(world: Shared, file: &Path) -> Self {
        let engine = Arc::new(engine::Store::new(world.clone()));
        let sql = Arc::new(sql::Store::open(world.clone(), file));
        let stage = Self {
            history: History::new(world.clone()),
            engine,
            sql,
            world,
            servers: Mutex::default(),
            started: Mutex::default(),
            is_over: AtomicBool::new(false),
        };
        let offers = stage.offers().iter().map(|offer| keys::segment(offer, 0)).collect();
        *stage.sql.guesses.lock().unwrap() = Some((stage.engine.clone(), offers));
        stage
    }

    fn offers(&self) -> Vec<OfferKey> {
        let activity = &self.world.plan.activity;
        let key = |sku_id: &crate::domain::SkuId| OfferKey {
            activity_id: activity.activity_id.clone(),
            sku_id: sku_id.clone(),
        };
        activity.offers.iter().map(|spec| key(&spec.sku_id)).collect()
    }

    /// SQL as it is, for the run to look at.
    fn aside(&self) -> Database {
        Database::simulated(&sql::Line::aside(self.sql.clone()))
    }

    async fn play(self: &Arc<Self>) {
        let plan = &self.world.plan;
        self.world.note(|| format!("{plan:?}"));
        self.prepare().await;
        for _ in 0..plan.servers {
            self.start_server();
        }
        let buyers: Vec<_> = (0..plan.buyers).map(|n| spawn(self.clone().buyer(n))).collect();
        let warming = spawn(self.clone().warm_up());
        let disasters = spawn(self.clone().disasters());
        for (what, task) in
            buyers.into_iter().map(|task| ("a buyer", task)).chain([("the warm-up", warming)])
        {
            match tokio::time::timeout(10 * CALL_WITHIN, task).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.world.violation(format!("{what} panicked: {error}")),
                Err(_) => self.world.violation(format!("{what} waits for ever")),
            }
        }
        if disasters.await.is_err() {
            self.world.violation("the disasters panicked");
        }
        self.make_peace().await;
        if !self.was_warm().await {
            let rows = sql::rows(&self.aside()).await;
            self.world.check(rows.is_empty(), || format!("sold without warm-up: {rows:?}"));
        } else if self.comes_to_rest().await {
            self.check_books("at rest").await;
            self.history.settle(&self.aside()).await;
            self.ask_again().await;
            if self.comes_to_rest().await {
                self.check_books("after asking again").await;
                self.history.settle(&self.aside()).await;
            }
        }
        self.is_over.store(true, Ordering::Relaxed);
        self.end_all("the end");
        // What was begun finds that its server is dead.
        tokio::time::sleep(Duration::from_secs(10)).await;
    }

    /// Creates and approves the sale; nothing goes wrong yet.
    async fn prepare(&self) {
        self.world.calm.store(true, Ordering::Relaxed);
        let server = self.new_server();
        let spec = self.world.plan.activity.clone();
        let id = spec.activity_id.clone();
        let activities = &server.parts.activities;
        activities.create(spec, "simulator").await.unwrap();
        activities.approve(&id, "simulator", "").await.unwrap();
        server.life.end.cancel();
        self.world.calm.store(false, Ordering::Relaxed);
    }

    fn new_server(&self) -> Server {
        let mut started = self.started.lock().unwrap();
        *started += 1;
        let life = Life::new(*started);
        let database = Database::simulated(&sql::Line::new(self.sql.clone(), life.clone()));
        let engine = Arc::new(engine::Line::new(self.engine.clone(), life.clone()));
        let parts = Parts::over(&self.world.plan.settings, database, engine);
        Server { life, parts }
    }

    /// Starts a server in the background; it serves once it has read the sales. When it dies,
    /// another follows.
    fn start_server(self: &Arc<Self>) {
        let (stage, server) = (self.clone(), self.new_server());
        self.world.note(|| format!("{} starts", server.life.id));
        spawn(async move {
            while !server.life.end.is_cancelled() && server.parts.catalog.refresh().await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            server.parts.start_workers(&stage.world.plan.settings);
            for _ in 0..stage.world.plan.pollers {
                server.parts.tasks.spawn(poll(stage.clone(), server.clone()));
            }
            stage.servers.lock().unwrap().push(server.clone());
            server.life.end.cancelled().await;
            // Ends loops that would go on without any effect.
            server.parts.shutdown.cancel();
            if !stage.is_over.load(Ordering::Relaxed) {
                tokio::time::sleep(stage.world.span(2_000)).await;
                stage.start_server();
            }
        });
    }

    fn alive(&self) -> Vec<Server> {
        let mut servers = self.servers.lock().unwrap();
        servers.retain(|server| !server.life.end.is_cancelled());
        servers.clone()
    }

    fn end_all(&self, why: &str) {
        self.alive().iter().for_each(|server| server.life.end(&self.world, why));
    }

    async fn some_server(&self) -> Server {
        loop {
            let alive = self.alive();
            if !alive.is_empty() {
                return alive[self.world.dice(|dice| dice.usize(..alive.len()))].clone();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Asks a server as the API does: in a task of its own, which goes on without the caller.
    /// `None` when the server died, or the caller did not wait.
    async fn ask<T: Send + 'static>(
        &self,
        server: &Server,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let patience = match self.world.strikes(0.05) {
            true => self.world.span(100),
            false => CALL_WITHIN,
        };
        let work = server.parts.tasks.spawn(work);
        tokio::select! {
            biased;
            () = server.life.end.cancelled() => None,
            answer = work => match answer {
                Ok(answer) => Some(answer),
                Err(error) => {
                    self.world.violation(format!("a call panicked: {error}"));
                    None
                }
            },
            () = tokio::time::sleep(patience) => {
                self.world.check(patience < CALL_WITHIN, || "a call waits for ever".to_owned());
                None
            }
        }
    }

    async fn warm_up(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.world.span(200)).await;
            let server = self.some_server().await;
            let id = self.world.plan.activity.activity_id.clone();
            let activities = server.parts.activities.clone();
            let asked = async move { activities.warm_up(&id, "simulator").await };
            match self.ask(&server, asked).await {
                Some(Ok(_)) => break,
                Some(Err(Error::WrongActivityState { .. })) => return,
                Some(Err(error)) => {
                    self.world.note(|| format!("warm-up: {error:?}"));
                    // The engine may forget what was written before it is read back.
                    if !matches!(error, Error::WarmupMismatch { .. }) {
                        self.history.failed("warm-up", &error);
                    }
                }
                None => {}
            }
        }
        self.world.note(|| "warmed up".to_owned());
    }

    async fn disasters(self: Arc<Self>) {
        let begin = Instant::now();
        for (at, disaster) in self.world.plan.disasters.clone() {
            tokio::time::sleep_until(begin + at).await;
            self.world.note(|| format!("disaster: {disaster:?}"));
            let until = |span| Some(Instant::now() + span);
            match disaster {
                Disaster::Crash => {
                    let server = self.some_server().await;
                    server.life.end(&self.world, "killed");
                }
                Disaster::CrashAll => self.end_all("killed with all others"),
                Disaster::Failover(lost) => self.engine.fail_over(lost),
                Disaster::Flush => self.engine.flush(),
                Disaster::EngineAway(span) => {
                    *self.world.engine_away_until.lock().unwrap() = until(span);
                }
                Disaster::SqlAway(span) => {
                    *self.world.sql_away_until.lock().unwrap() = until(span);
                }
            }
        }
    }

    async fn make_peace(&self) {
        self.world.calm.store(true, Ordering::Relaxed);
        *self.world.engine_away_until.lock().unwrap() = None;
        *self.world.sql_away_until.lock().unwrap() = None;
        self.world.note(|| "peace".to_owned());
        self.some_server().await;
    }

    async fn buyer(self: Arc<Self>, number: u32) {
        let buyer = BuyerId::new(&format!("buyer-{number}")).unwrap();
        for _ in 0..self.world.plan.calls_per_buyer {
            tokio::time::sleep(self.world.span(self.world.plan.pause_ms)).await;
            let server = self.some_server().await;
            match self.world.dice(|dice| dice.u32(0..100)) {
                0..60 => {
                    let wish = self.wish(&buyer);
                    self.reserve(&server, wish).await;
                }
                60..78 => self.release(&server, &buyer).await,
                78..90 => self.confirm(&server, &buyer).await,
                _ => self.look_up(&server, &buyer).await,
            }
        }
    }

    /// One of the few purchases that the buyer tries; the quantity belongs to its name.
    fn wish(&self, buyer: &BuyerId) -> Wish {
        let offers = self.offers();
        let (offer, name, quantity, named) = self.world.dice(|dice| {
            let offer = dice.usize(..offers.len());
            let most = self.world.plan.activity.offers[offer].max_quantity;
            let name = dice.u32(0..self.world.plan.wishes);
            (offer, name, dice.u32(1..=most), dice.u32(0..12) > 0)
        });
        let most = self.world.plan.activity.offers[offer].max_quantity;
        let number = buyer.as_str().bytes().map(u32::from).sum::<u32>();
        let quantity = if named { 1 + (number + 3 * name) % most } else { quantity };
        Wish {
            offer: offers[offer].clone(),
            buyer: buyer.clone(),
            request_id: named.then(|| RequestId::new(&format!("wish-{name}")).unwrap()),
            quantity,
        }
    }

    async fn reserve(&self, server: &Server, wish: Wish) -> Option<ReserveOutcome> {
        let id = wish
            .request_id
            .as_ref()
            .map(|request_id| name_reservation(&wish.offer, &wish.buyer, Some(request_id)));
        let since = self.history.asks(&wish, id.as_ref());
        let request = ReserveRequest {
            offer: wish.offer.clone(),
            buyer: wish.buyer.clone(),
            quantity: wish.quantity,
            request_id: wish.request_id.clone(),
            is_repeat: false,
        };
        let reservations = server.parts.reservations.clone();
        // A buyer who goes away hangs up.
        let connection = Arc::new(());
        let caller = Caller::new(&connection, None);
        let asked = async move { reservations.reserve(request, caller).await };
        let answer = self.ask(server, asked).await;
        drop(connection);
        self.world.note(|| format!("{} answers {wish:?} ({id:?}): {answer:?}", server.life.id));
        match answer? {
            // So says the state of the sale as this server knows it; it reads it now and then.
            Ok(ReserveOutcome::NotWarmed | ReserveOutcome::Ended) => None,
            Ok(outcome) => {
                let aside = self.aside();
                self.history.reserved(since, &wish, id.as_ref(), &outcome, &aside).await;
                Some(outcome)
            }
            Err(error) => {
                self.history.failed("reserve", &error);
                None
            }
        }
    }

    /// One of the reservations that were asked for, mostly of this buyer.
    fn some_account(&self, buyer: &BuyerId) -> Option<(ReservationId, Account)> {
        let mut accounts: Vec<_> = self.history.accounts().into_iter().collect();
        if self.world.dice(|dice| dice.u32(0..12)) > 0 {
            accounts.retain(|(_, account)| account.wish.buyer == *buyer);
        }
        if accounts.is_empty() {
            return None;
        }
        Some(accounts.swap_remove(self.world.dice(|dice| dice.usize(..accounts.len()))))
    }

    async fn release(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        let by_owner = account.wish.buyer == *buyer;
        let since = match by_owner {
            true => self.history.asks_release(&id),
            false => self.history.step(),
        };
        let request = ReleaseRequest {
            offer: account.wish.offer,
            buyer: buyer.clone(),
            reservation_id: id.clone(),
            reason: String::new(),
        };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.release(request).await }).await;
        self.world
            .note(|| format!("{} answers {buyer} releasing {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok((outcome, _))) => self.history.gave_back(since, &id, by_owner, outcome),
            Some(Err(error)) => self.history.failed("release", &error),
            None => {}
        }
    }

    async fn confirm(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        if account.wish.buyer != *buyer {
            return;
        }
        let since = self.history.asks_confirm(&id);
        let request = ConfirmRequest {
            offer: account.wish.offer,
            buyer: buyer.clone(),
            reservation_id: id.clone(),
        };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.confirm(request).await }).await;
        self.world.note(|| format!("{} answers confirming {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok(outcome)) => self.history.confirmed(since, &id, &outcome),
            Some(Err(error)) => self.history.failed("confirm", &error),
            None => {}
        }
    }

    async fn look_up(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        let Wish { offer, buyer, request_id, .. } = account.wish;
        let Some(request_id) = request_id else { return };
        let since = self.history.step();
        let query = ReservationQuery::ByRequest { offer, buyer, request_id };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.get(query).await }).await;
        self.world.note(|| format!("{} answers looking up {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok((found, _))) => self.history.looked_up(since, &id, Some(found.state)),
            Some(Err(Error::UnknownReservation)) => self.history.looked_up(since, &id, None),
            Some(Err(error)) => self.history.failed("look-up", &error),
            None => {}
        }
    }

    /// Whether the sale was ever on; one that ended before its warm-up was not.
    async fn was_warm(&self) -> bool {
        let offers = offers::Entity::find().all(self.aside().reader()).await.unwrap();
        offers.iter().all(|offer| offer.warm_time.is_some())
    }

    /// Whether nothing is left to do, within the time that it may take (I3).
    async fn comes_to_rest(&self) -> bool {
        let begin = Instant::now();
        let (mut restless, mut calm_looks) = (String::new(), 0);
        while begin.elapsed() < REST_WITHIN {
            match self.unrest().await {
                None if calm_looks == CALM_LOOKS => return true,
                None => calm_looks += 1,
                Some(why) => (restless, calm_looks) = (why, 0),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.world.violation(format!("I3: it does not come to rest: {restless}"));
        false
    }

    /// What is still to be done; a hold that will be over is, too.
    async fn unrest(&self) -> Option<String> {
        if !self.world.all_arrived() {
            return Some("a late call is still on its way".to_owned());
        }
        for row in sql::rows(&self.aside()).await {
            match row.state {
                OutboxState::Pending | OutboxState::Releasing | OutboxState::Dead => {
                    return Some(format!("{row:?}"));
                }
                OutboxState::Done if row.expire_time.is_some() => return Some(format!("{row:?}")),
                OutboxState::Done | OutboxState::Released | OutboxState::Refused => {}
            }
        }
        let server = self.some_server().await;
        for key in self.offers() {
            let Ok(offer) = server.parts.catalog.offer(&key).await else {
                return Some(format!("{key} is unknown"));
            };
            match offer.segment.scripts.levels().await {
                Ok(Ok(levels)) if levels.unacked == 0 => {}
                other => return Some(format!("{key}: {other:?}")),
            }
        }
        None
    }

    async fn check_books(&self, when: &str) {
        let server = self.some_server().await;
        let id = &self.world.plan.activity.activity_id;
        match books::read(&self.aside(), &server.parts.catalog, id).await {
            Ok(books) => {
                for offer in books {
                    let contradictions = offer.contradictions();
                    self.world.check(contradictions.is_empty() && offer.oversold() == 0, || {
                        format!("I3, {when}: {contradictions:?} in {offer:?}")
                    });
                }
            }
            Err(error) => self.world.violation(format!("{when}, no books: {error:?}")),
        }
    }

    /// In peace every request is answered as it was, and what is left can be bought.
    async fn ask_again(&self) {
        for (_, account) in self.history.accounts() {
            let server = self.some_server().await;
            if account.wish.request_id.is_some() {
                self.decided(&server, account.wish).await;
            }
        }
        for offer in self.offers() {
            let server = self.some_server().await;
            let Ok(found) = server.parts.catalog.offer(&offer).await else { continue };
            let Ok(Ok(levels)) = found.segment.scripts.levels().await else { continue };
            // Whoever has a free slot gets a unit as long as there is one.
            let (mut left, expires) = (levels.stock, found.hold.is_some());
            for number in 0..self.world.plan.buyers {
                let buyer = BuyerId::new(&format!("buyer-{number}")).unwrap();
                let rows = sql::rows(&self.aside()).await;
                let held = rows
                    .iter()
                    .filter(|row| row.user_id == buyer.as_str() && row.slot.is_some())
                    .filter(|row| row.sku_id == offer.sku_id.as_str());
                let has_room = held.count() < found.max_orders as usize;
                let request_id = Some(RequestId::new("at-last").unwrap());
                let wish = Wish { offer: offer.clone(), buyer, request_id, quantity: 1 };
                let outcome = self.decided(&server, wish.clone()).await;
                let won = matches!(outcome, Some(ReserveOutcome::Reserved { .. }));
                // What is held for a moment only may be free again by now.
                let any = expires || self.has_ended();
                self.world.check(any || won == (has_room && left > 0), || {
                    format!("{wish:?} hears {outcome:?} with {left} left; room: {has_room}")
                });
                left -= u64::from(won && left > 0);
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.aside().clock() >= self.world.plan.activity.end_time
    }

    /// In peace there is a decision; it may take some tries.
    async fn decided(&self, server: &Server, wish: Wish) -> Option<ReserveOutcome> {
        for _ in 0..20 {
            if let Some(outcome) = self.reserve(server, wish.clone()).await {
                return Some(outcome);
            }
            if self.has_ended() {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        self.world.violation(format!("{wish:?} is not decided"));
        None
    }
}

/// One more poller, at times of its own.
async fn poll(stage: Arc<Stage>, server: Server) {
    let poller = server.parts.poller(&stage.world.plan.settings);
    while server.life.wait(stage.world.span(1_500)).await.is_ok() {
        // What it can't do now is due again.
        let _ = poller.run_once().await;
    }
}

fn spawn(work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    #[allow(clippy::disallowed_methods, reason = "a run ends with its runtime")]
    tokio::spawn(work)
}
