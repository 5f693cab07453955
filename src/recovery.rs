//! The one repair: an offer whose engine contradicts SQL, or may have forgotten something, is
//! frozen and rebuilt from SQL under a higher epoch.
//!
//! **Invariant:** nothing that SQL committed before the epoch was raised is missing from the
//! rebuild, and nothing taken under an older epoch is stored after it.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

mod rebuild;

use crate::{
    admission::catalog::Catalog,
    audit,
    circuit::Circuit,
    database::{Database, is_outage},
    domain::OfferKey,
    engine::{
        EngineError,
        locks::{Lock, Locks},
        scripts::Refusal,
    },
    error::Error,
    metrics,
    offer::Offer,
};
use rebuild::Rebuilt;

/// How long a caller waits for an offer to sell again.
const PATIENCE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause while another server rebuilds the offer, or a dead one holds its lock.
const LONGEST_WAIT: Duration = Duration::from_millis(250);
/// The longest pause while a store is away.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Freezes and rebuilds offers, each at most once at a time in this process.
#[derive(Debug)]
pub struct Recovery {
    pub(crate) database: Database,
    catalog: Arc<Catalog>,
    locks: Locks,
    engine_circuit: Arc<Circuit>,
    database_circuit: Arc<Circuit>,
    running: Mutex<HashSet<OfferKey>>,
    tasks: TaskTracker,
    pub(crate) shutdown: CancellationToken,
    rebuilds: AtomicU64,
}

/// Makes room for the next rebuild of the offer, also when this one panicked.
struct Running<'a> {
    recovery: &'a Recovery,
    key: &'a OfferKey,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.recovery.running().remove(self.key);
    }
}

/// How one attempt to make an offer sell ended.
#[derive(Debug)]
enum Attempt {
    /// The offer sells, or never will again, or not under this number of segments: who asks the
    /// catalog for it gets another.
    Healthy,
    /// Another rebuild is under way, or overtook this one.
    Overtaken,
}

/// Whether a rebuild is told to the audit.
#[derive(Debug, Clone, Copy)]
enum Audit {
    Yes,
    No,
}

/// What a look at engine and SQL found.
enum Found {
    Healthy,
    /// To be rebuilt, from SQL at epoch `sql`, above both that and `engine`.
    Sick {
        sql: u64,
        engine: u64,
        reason: String,
    },
}

impl Recovery {
    /// Runs its work in `tasks` and ends it on `shutdown`.
    #[must_use]
    pub fn new(
        database: Database,
        catalog: Arc<Catalog>,
        locks: Locks,
        engine_circuit: Arc<Circuit>,
        database_circuit: Arc<Circuit>,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            database,
            catalog,
            locks,
            engine_circuit,
            database_circuit,
            running: Mutex::default(),
            tasks,
            shutdown,
            rebuilds: AtomicU64::new(0),
        }
    }

    /// How many rebuilds this process has finished.
    pub fn rebuilds(&self) -> u64 {
        self.rebuilds.load(Ordering::Relaxed)
    }

    /// How many offers this process is making sell again, for as long as that does not succeed.
    pub fn frozen_offers(&self) -> usize {
        self.running().len()
    }

    /// Makes the offer sell again, in the background, for as long as that takes.
    pub fn rebuild(self: &Arc<Self>, offer: &Arc<Offer>) {
        self.start(offer, None);
    }

    /// Freezes the offer, if the engine is still at `epoch`, and rebuilds it in the background.
    pub fn freeze_and_rebuild(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        epoch: u64,
        reason: &'static str,
    ) {
        tracing::warn!(offer = %offer.key, epoch, reason, "engine and SQL disagree: freezing");
        metrics::diverged(reason);
        self.start(offer, Some((epoch, reason)));
    }

    /// Makes the offer sell again and waits for it.
    ///
    /// # Errors
    /// A store is away, or others rebuild the offer for too long.
    pub async fn rebuild_now(&self, offer: &Arc<Offer>) -> Result<(), Error> {
        self.make_sell(offer, Audit::Yes).await
    }

    /// As [`Recovery::rebuild_now`], for an engine that keeps nothing and so forgot all: that is no
    /// news for the audit.
    ///
    /// # Errors
    /// As [`Recovery::rebuild_now`].
    pub async fn rebuild_at_start(&self, offer: &Arc<Offer>) -> Result<(), Error> {
        self.make_sell(offer, Audit::No).await
    }

    async fn make_sell(&self, offer: &Arc<Offer>, audit: Audit) -> Result<(), Error> {
        let started = tokio::time::Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            if self.shutdown.is_cancelled() {
                return Err(Error::ShuttingDown);
            }
            match self.attempt(offer, audit).await {
                Ok(Attempt::Healthy) => return Ok(()),
                Ok(Attempt::Overtaken) if started.elapsed() > PATIENCE => {
                    return Err(Error::OfferFrozen(offer.key.clone()));
                }
                Err(error) if started.elapsed() > PATIENCE => return Err(error),
                Ok(Attempt::Overtaken) => pause = wait(pause.min(LONGEST_WAIT)).await,
                Err(_) => pause = wait(pause).await,
            }
        }
    }

    /// Freezes the offer, wherever it stands, and rebuilds it; answers once it sells again.
    ///
    /// # Errors
    /// As [`Recovery::rebuild_now`].
    pub async fn rebuild_anyway(
        &self,
        offer: &Arc<Offer>,
        reason: &'static str,
    ) -> Result<(), Error> {
        match offer.levels().await {
            Ok(Ok(levels)) => {
                let frozen = freeze_all(offer, levels.stamp.epoch, reason).await;
                frozen.map_err(|error| self.engine_failed(error))?;
            }
            // What can't be read or sells nothing is rebuilt in any case.
            Ok(Err(_)) | Err(EngineError::Script(_)) => {}
            Err(error) => return Err(self.engine_failed(error)),
        }
        self.rebuild_now(offer).await
    }

    fn start(self: &Arc<Self>, offer: &Arc<Offer>, freeze: Option<(u64, &'static str)>) {
        let first = self.running().insert(offer.key.clone());
        if !first && freeze.is_none() {
            return;
        }
        let (recovery, offer) = (self.clone(), offer.clone());
        self.tasks.spawn(async move {
            if let Some((epoch, reason)) = freeze
                && let Err(error) = freeze_all(&offer, epoch, reason).await
            {
                tracing::warn!(offer = %offer.key, %error, "could not freeze");
            }
            if first {
                let _running = Running { recovery: &recovery, key: &offer.key };
                recovery.run(&offer).await;
                // A freeze that arrived while the last attempt ended would be left alone here;
                // the next call on the offer meets it and starts anew.
            }
        });
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashSet<OfferKey>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(&self, offer: &Arc<Offer>) {
        let mut pause = FIRST_PAUSE;
        while !self.shutdown.is_cancelled() {
            match self.attempt(offer, Audit::Yes).await {
                Ok(Attempt::Healthy) => return,
                Ok(Attempt::Overtaken) => pause = pause.min(LONGEST_WAIT),
                Err(error) => {
                    tracing::warn!(offer = %offer.key, %error, "the rebuild did not succeed yet");
                }
            }
            pause = tokio::select! {
                biased;
                pause = wait(pause) => pause,
                () = self.shutdown.cancelled() => return,
            };
        }
    }

    /// Looks whether anything is to be done at all, and does it, unless another server is at it.
    async fn attempt(&self, offer: &Arc<Offer>, audit: Audit) -> Result<Attempt, Error> {
        if offer.is_forgotten() {
            return Ok(Attempt::Healthy);
        }
        let (sql, engine, reason) = match self.examine(offer).await? {
            Found::Healthy => return Ok(Attempt::Healthy),
            Found::Sick { sql, engine, reason } => (sql, engine, reason),
        };
        let lock = self.locks.acquire(&lock_name(&offer.key), Duration::ZERO).await;
        let Some(lock) = lock.map_err(|error| self.engine_failed(error))? else {
            return Ok(Attempt::Overtaken);
        };
        // The holder before this one may have rebuilt it since; then SQL is at another epoch, and
        // this rebuild is not begun.
        let started = tokio::time::Instant::now();
        let Some(rebuilt) = rebuild::rebuild(self, offer, sql, engine).await? else {
            return Ok(Attempt::Overtaken);
        };
        offer.adopt(rebuilt.epoch);
        self.rebuilds.fetch_add(1, Ordering::Relaxed);
        let frozen = started.elapsed();
        metrics::rebuilt(&reason, frozen);
        let (epoch, reservations, frozen_ms) =
            (rebuilt.epoch, rebuilt.reservations, frozen.as_millis());
        tracing::info!(offer = %offer.key, epoch, reason, reservations, frozen_ms, "rebuilt from SQL");
        match audit {
            Audit::Yes => self.note(offer, &reason, &rebuilt, &lock, frozen).await,
            Audit::No => {}
        }
        Ok(Attempt::Healthy)
    }

    async fn examine(&self, offer: &Arc<Offer>) -> Result<Found, Error> {
        let known = offer.epoch();
        // SQL first: an engine that is at SQL's epoch, or was when SQL was read, is not behind it.
        let Some(row) = rebuild::row_to_sell_under(self, offer).await? else {
            return Ok(Found::Healthy);
        };
        if row.segments != offer.segments.count() {
            // Another server has raised the number. What is known here is of the one before.
            let read = self.catalog.refresh_one(&offer.key.activity_id).await;
            read.map_err(|error| self.sql_failed(error))?;
            return Ok(Found::Healthy);
        }
        let sql = row.epoch;
        // One lost segment rebuilds the offer.
        let (mut engine, mut sick) = (known, None);
        let looks = offer.segments.all().iter().map(|segment| segment.scripts.levels());
        for look in join_all(looks).await {
            let (epoch, reason) = match look {
                Ok(Ok(levels)) if levels.stamp.epoch == sql && sql >= known => continue,
                Ok(Ok(levels)) => (levels.stamp.epoch, "behind".to_owned()),
                Ok(Err(Refusal::NotWarmed)) => (0, "missing".to_owned()),
                Ok(Err(Refusal::Frozen { stamp, reason, .. })) => (stamp.epoch, reason),
                // A key of another type is what a rebuild mends.
                Err(EngineError::Script(_)) => (0, "unreadable".to_owned()),
                Err(error) => return Err(self.engine_failed(error)),
            };
            engine = engine.max(epoch);
            sick.get_or_insert(reason);
        }
        match sick {
            Some(reason) => Ok(Found::Sick { sql, engine, reason }),
            None => {
                // It may be healthy and yet older than what was seen; then it was frozen before.
                offer.adopt(sql);
                Ok(Found::Healthy)
            }
        }
    }

    /// Tells the audit of a rebuild.
    async fn note(
        &self,
        offer: &Offer,
        reason: &str,
        rebuilt: &Rebuilt,
        lock: &Lock,
        frozen: Duration,
    ) {
        let Rebuilt { epoch, stock, reservations, .. } = *rebuilt;
        let detail = serde_json::json!({
            "reason": reason,
            "epoch": epoch,
            "stock": stock,
            "reservations": reservations,
            "frozen_ms": u64::try_from(frozen.as_millis()).unwrap_or(u64::MAX),
            "token": lock.token(),
        });
        let entry = audit::Entry::of_offer(&offer.key, audit::SYSTEM, "rebuild", detail);
        let now = self.database.clock();
        if let Err(error) = audit::write(self.database.writer(), now, entry).await {
            tracing::warn!(offer = %offer.key, %error, "a rebuild is not in the audit");
        }
    }

    pub(crate) fn engine_failed(&self, error: EngineError) -> Error {
        match &error {
            EngineError::NotRun(why) | EngineError::Unknown(why) => self.engine_circuit.trip(why),
            EngineError::Full(_) | EngineError::PartAway(_) | EngineError::Script(_) => {}
        }
        error.into()
    }

    pub(crate) fn sql_failed(&self, error: sea_orm::DbErr) -> Error {
        if is_outage(&error) {
            self.database_circuit.trip(&error.to_string());
        }
        error.into()
    }
}

/// Stops the sale of every segment that is at this epoch. One that did not hear of it goes on until
/// the rebuild, under an epoch that SQL does not take any more.
async fn freeze_all(offer: &Offer, epoch: u64, reason: &str) -> Result<(), EngineError> {
    let all = offer.segments.all().iter();
    let frozen = join_all(all.map(|segment| segment.scripts.freeze(epoch, reason))).await;
    frozen.into_iter().collect()
}

fn lock_name(key: &OfferKey) -> String {
    format!("rebuild:{key}")
}

/// Sleeps for about `pause` and answers how long to sleep the next time. The jitter keeps two
/// rebuilders from raising epochs past each other for ever.
async fn wait(pause: Duration) -> Duration {
    tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
    (pause * 2).min(LONGEST_PAUSE)
}
