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

use tokio_util::{sync::CancellationToken, task::TaskTracker};

mod rebuild;

use crate::{
    circuit::Circuit,
    database::{Database, is_outage},
    domain::OfferKey,
    engine::{EngineError, scripts::Refusal},
    error::Error,
    offer::Offer,
};

/// How long another server's rebuild is waited for before it counts as dead.
const PATIENCE: Duration = Duration::from_secs(3);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Freezes and rebuilds offers, each at most once at a time in this process.
#[derive(Debug)]
pub struct Recovery {
    pub(crate) database: Database,
    engine_circuit: Arc<Circuit>,
    database_circuit: Arc<Circuit>,
    running: Mutex<HashSet<OfferKey>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
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

/// How one attempt to rebuild ended.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The offer sells under this epoch.
    Healthy { epoch: u64 },
    /// Another rebuild is under way, or overtook this one.
    Overtaken,
}

impl Recovery {
    /// Runs its work in `tasks` and ends it on `shutdown`.
    #[must_use]
    pub fn new(
        database: Database,
        engine_circuit: Arc<Circuit>,
        database_circuit: Arc<Circuit>,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            database,
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
        self.start(offer, Some((epoch, reason)));
    }

    /// Makes the offer sell again and waits for it.
    ///
    /// # Errors
    /// A store is away, or others rebuild the offer for too long.
    pub async fn rebuild_now(&self, offer: &Arc<Offer>) -> Result<(), Error> {
        let started = tokio::time::Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let patient = started.elapsed() < PATIENCE;
            match self.attempt(offer, patient).await {
                Ok(Attempt::Healthy { .. }) => return Ok(()),
                Ok(Attempt::Overtaken) if started.elapsed() > 3 * PATIENCE => {
                    return Err(Error::OfferFrozen(offer.key.clone()));
                }
                Err(error) if started.elapsed() > 3 * PATIENCE => return Err(error),
                Ok(Attempt::Overtaken) | Err(_) => pause = wait(pause).await,
            }
        }
    }

    fn start(self: &Arc<Self>, offer: &Arc<Offer>, freeze: Option<(u64, &'static str)>) {
        let first = self.running().insert(offer.key.clone());
        if !first && freeze.is_none() {
            return;
        }
        let (recovery, offer) = (self.clone(), offer.clone());
        self.tasks.spawn(async move {
            if let Some((epoch, reason)) = freeze
                && let Err(error) = offer.segment.scripts.freeze(epoch, reason).await
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
        let started = tokio::time::Instant::now();
        let mut pause = FIRST_PAUSE;
        while !self.shutdown.is_cancelled() {
            match self.attempt(offer, started.elapsed() < PATIENCE).await {
                Ok(Attempt::Healthy { .. }) => return,
                Ok(Attempt::Overtaken) => {}
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

    /// Looks whether anything is to be done at all, and does it.
    async fn attempt(&self, offer: &Arc<Offer>, patient: bool) -> Result<Attempt, Error> {
        if offer.is_forgotten() {
            return Ok(Attempt::Healthy { epoch: offer.segment.epoch() });
        }
        let known = offer.segment.epoch();
        // SQL first: an engine that is at SQL's epoch, or was when SQL was read, is not behind it.
        let sql = self.sql_epoch(offer).await?;
        let engine = match offer.segment.scripts.levels().await {
            Ok(Ok(levels)) if levels.stamp.epoch == sql && sql >= known => {
                // It may be healthy and yet older than what was seen; then it was frozen before.
                offer.segment.adopt(sql);
                return Ok(Attempt::Healthy { epoch: sql });
            }
            Ok(Ok(levels)) => levels.stamp.epoch,
            Ok(Err(Refusal::NotWarmed)) => 0,
            Ok(Err(Refusal::Frozen { stamp, reason })) => {
                // Above SQL's epoch: it is not committed yet.
                if reason == "rebuilding" && stamp.epoch >= sql && patient {
                    return Ok(Attempt::Overtaken);
                }
                stamp.epoch
            }
            // A key of another type is what a rebuild mends.
            Err(EngineError::Script(_)) => 0,
            Err(error) => return Err(self.engine_failed(error)),
        };
        let started = tokio::time::Instant::now();
        let attempt = rebuild::rebuild(self, offer, sql, engine.max(known)).await?;
        if let Attempt::Healthy { epoch } = attempt {
            offer.segment.adopt(epoch);
            self.rebuilds.fetch_add(1, Ordering::Relaxed);
            let frozen_ms = started.elapsed().as_millis();
            tracing::info!(offer = %offer.key, epoch, frozen_ms, "rebuilt from SQL");
        }
        Ok(attempt)
    }

    pub(crate) fn engine_failed(&self, error: EngineError) -> Error {
        match &error {
            EngineError::NotRun(why) | EngineError::Unknown(why) => self.engine_circuit.trip(why),
            EngineError::Full(_) | EngineError::Script(_) => {}
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

/// Sleeps for about `pause` and answers how long to sleep the next time. The jitter keeps two
/// rebuilders from raising epochs past each other for ever.
async fn wait(pause: Duration) -> Duration {
    tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
    (pause * 2).min(LONGEST_PAUSE)
}
