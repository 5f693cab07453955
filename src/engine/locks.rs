//! Locks in the engine: what one server at a time should do.
//!
//! **Correctness never depends on a lock.** The engine may forget it, and a holder may be paused
//! for longer than its lease: whatever is done under one must be right when it is done twice. It
//! saves work, and keeps two rebuilders from raising epochs past each other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::{
    Engine, EngineError, keys,
    meter::run,
    scripts::{Id, Reply},
};
use crate::domain::{TimeMs, new_uuid};

/// How long a lock outlives a holder that died.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long somebody waits for a lock before it counts as busy.
pub const WAIT: Duration = Duration::from_millis(200);
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long the tokens of a lock go on rising after its last use.
const FENCE_LIFE: Duration = Duration::from_secs(24 * 3_600);

/// Takes locks; a clone takes the same ones.
#[derive(Debug, Clone)]
pub struct Locks {
    engine: Arc<dyn Engine>,
    tasks: TaskTracker,
}

/// A lock that is held, and renewed until it is dropped.
#[derive(Debug)]
pub struct Lock {
    /// Higher than that of every holder before, while the engine remembers.
    token: Option<u64>,
    lost: Arc<AtomicBool>,
    _stop: Option<DropGuard>,
}

impl Locks {
    /// Locks in this engine; they are renewed in `tasks`.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, tasks: TaskTracker) -> Self {
        Self { engine, tasks }
    }

    /// Takes the lock, or `None` when another holder keeps it for all of `wait`.
    ///
    /// An engine that takes nothing new, as one that is out of memory, keeps no lock either. Then
    /// the work goes on without: releases, a purge, a rebuild delete first, and make room. So it does
    /// while only the server that keeps this lock is away.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn acquire(&self, name: &str, wait: Duration) -> Result<Option<Lock>, EngineError> {
        let keys = keys::lock(name);
        let owner = new_uuid().simple().to_string();
        let give_up = Instant::now() + wait;
        let token = loop {
            match self.try_acquire(&keys, &owner).await {
                Ok(Some(token)) => break token,
                Ok(None) => {}
                Err(EngineError::Full(_) | EngineError::PartAway(_)) => {
                    return Ok(Some(Lock::none()));
                }
                Err(error) => return Err(error),
            }
            if Instant::now() >= give_up {
                return Ok(None);
            }
            tokio::time::sleep(ASK_EVERY.mul_f64(0.5 + fastrand::f64())).await;
        };
        let lost = Arc::new(AtomicBool::new(false));
        let stop = CancellationToken::new();
        let watchdog = Watchdog { locks: self.clone(), keys, owner, lost: lost.clone() };
        self.tasks.spawn(watchdog.run(stop.clone()));
        Ok(Some(Lock { token: Some(token), lost, _stop: Some(stop.drop_guard()) }))
    }

    async fn try_acquire(
        &self,
        keys: &Arc<[String]>,
        owner: &str,
    ) -> Result<Option<u64>, EngineError> {
        let fence_expires = TimeMs::now().plus(FENCE_LIFE).0.to_string();
        let args = vec![owner.into(), lease_ms(), fence_expires.into_bytes()];
        let mut reply = self.eval(Id::LOCK_ACQUIRE, keys, args).await?;
        match reply.word()?.as_str() {
            "acquired" => reply.number().map(Some),
            "held" => Ok(None),
            other => Err(reply.unexpected(other)),
        }
    }

    async fn eval(
        &self,
        id: Id,
        keys: &Arc<[String]>,
        args: Vec<Vec<u8>>,
    ) -> Result<Reply, EngineError> {
        run(&*self.engine, id, keys.clone(), args).await
    }
}

impl Lock {
    fn none() -> Self {
        Self { token: None, lost: Arc::new(AtomicBool::new(true)), _stop: None }
    }

    /// Higher than that of every holder before, while the engine remembers; for the audit. `None`
    /// when the engine keeps no locks now.
    #[must_use]
    pub fn token(&self) -> Option<u64> {
        self.token
    }

    /// Whether it is known that another holder may have it by now.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

/// Renews a lock every third of its lease, and gives it back in the end.
struct Watchdog {
    locks: Locks,
    keys: Arc<[String]>,
    owner: String,
    lost: Arc<AtomicBool>,
}

impl Watchdog {
    async fn run(self, stop: CancellationToken) {
        let mut good_until = Instant::now() + LEASE;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = tokio::time::sleep(LEASE / 3) => {}
            }
            let asked = Instant::now();
            match self.extend().await {
                Ok(true) => good_until = asked + LEASE,
                Ok(false) => return self.lost.store(true, Ordering::Release),
                // The lease runs on; it may be renewed yet.
                Err(_) if Instant::now() < good_until => {}
                Err(_) => return self.lost.store(true, Ordering::Release),
            }
        }
        let args = vec![self.owner.clone().into_bytes()];
        if let Err(error) = self.locks.eval(Id::LOCK_RELEASE, &self.keys, args).await {
            tracing::debug!(%error, "a lock was not given back; it ends with its lease");
        }
    }

    async fn extend(&self) -> Result<bool, EngineError> {
        let args = vec![self.owner.clone().into_bytes(), lease_ms()];
        let mut reply = self.locks.eval(Id::LOCK_EXTEND, &self.keys, args).await?;
        match reply.word()?.as_str() {
            "extended" => Ok(true),
            "lost" => Ok(false),
            other => Err(reply.unexpected(other)),
        }
    }
}

fn lease_ms() -> Vec<u8> {
    LEASE.as_millis().to_string().into_bytes()
}
