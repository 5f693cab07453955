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

use tokio::{task::JoinHandle, time::Instant};

use super::{
    Break, InSimulation, Life, Shared, World, engine,
    history::History,
    plan::{Disaster, Plan},
    sql,
};
use crate::{database::Database, domain::OfferKey, engine::keys, error::Error, server::Parts};

/// How long a call may take that nothing disturbs, and one that everything does.
pub(super) const CALL_WITHIN: Duration = Duration::from_secs(120);

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
pub(super) struct Server {
    pub(super) life: Life,
    pub(super) parts: Parts,
}

/// Where it all happens.
pub(super) struct Stage {
    pub(super) world: Shared,
    engine: Arc<engine::Store>,
    sql: Arc<sql::Store>,
    pub(super) history: History,
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
        let segments = stage.world.plan.activity.offers.iter().map(|spec| spec.segments);
        let of_offer = |(offer, count)| (0..count).map(move |number| keys::segment(&offer, number));
        let segments = stage.offers().into_iter().zip(segments).flat_map(of_offer).collect();
        *stage.sql.guesses.lock().unwrap() = Some((stage.engine.clone(), segments));
        stage
    }

    pub(super) fn offers(&self) -> Vec<OfferKey> {
        let activity = &self.world.plan.activity;
        let key = |sku_id: &crate::domain::SkuId| OfferKey {
            activity_id: activity.activity_id.clone(),
            sku_id: sku_id.clone(),
        };
        activity.offers.iter().map(|spec| key(&spec.sku_id)).collect()
    }

    /// SQL as it is, for the run to look at.
    pub(super) fn aside(&self) -> Database {
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

    pub(super) async fn some_server(&self) -> Server {
        loop {
            let alive = self.alive();
            if !alive.is_empty() {
                return alive[self.world.dice(|dice| dice.usize(..alive.len()))].clone();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
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
