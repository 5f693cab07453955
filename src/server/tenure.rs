//! Who may run an embedded engine over a database: one process, for as long as it renews a lease.
//!
//! Replays, duplicates and "sold out" are answered by the engine alone, without a look into SQL. A
//! process that was held (SIGSTOP, a suspended machine) while another took its place wakes up with
//! yesterday's stock in its memory, and would answer from it until it reads the lease.
//!
//! **Promise:** the engine answers only what it ran while the lease was certainly held: each answer
//! is checked against the time of the last renewal, by a clock that goes on while the process is
//! held.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::StartError;
use crate::{
    database::{Acquired, Database, Lease},
    engine::embedded::EmbeddedEngine,
};

const NAME: &str = "embedded_engine";
const TTL: Duration = Duration::from_secs(3);
const RENEW_EVERY: Duration = Duration::from_millis(500);

/// The lease, renewed until it is given back.
#[derive(Debug, Clone)]
pub(super) struct Tenure {
    database: Database,
    lease: Lease,
    over: CancellationToken,
    renewing: TaskTracker,
}

impl Tenure {
    /// Takes the lease, and makes the engine that may run under it. A lease that a crash left behind
    /// runs out soon; one that is renewed meanwhile belongs to a live process.
    ///
    /// `lost` is cancelled when another process has taken over: it sells under a higher epoch that
    /// fences this one, and there is nothing left to serve.
    pub(super) async fn begin(
        database: &Database,
        lost: &CancellationToken,
    ) -> Result<(Self, Arc<EmbeddedEngine>), StartError> {
        let now = prost_types::Timestamp::from(SystemTime::now());
        let owner = format!("process {} since {now}", std::process::id());
        let deadline = Instant::now() + TTL + Duration::from_millis(500);
        let mut told = false;
        let (lease, until) = loop {
            let asked = std::time::Instant::now();
            match database.acquire_lease(NAME, &owner, TTL).await? {
                Acquired::Granted(lease) => break (lease, asked + TTL),
                Acquired::Held { owner, remaining } => {
                    if Instant::now() >= deadline {
                        return Err(StartError::EmbeddedHeld { owner });
                    }
                    if !told {
                        tracing::info!(
                            owner,
                            "waiting for another server's embedded engine to end"
                        );
                        told = true;
                    }
                    let pause = remaining.min(Duration::from_millis(200));
                    tokio::time::sleep(pause.max(Duration::from_millis(10))).await;
                }
            }
        };
        let engine = Arc::new(EmbeddedEngine::held_until(until));
        let tenure = Self {
            database: database.clone(),
            lease,
            over: CancellationToken::new(),
            renewing: TaskTracker::new(),
        };
        tenure.renewing.spawn(tenure.clone().renew(engine.clone(), lost.clone()));
        Ok((tenure, engine))
    }

    async fn renew(self, engine: Arc<EmbeddedEngine>, lost: CancellationToken) {
        while self.over.run_until_cancelled(tokio::time::sleep(RENEW_EVERY)).await.is_some() {
            let asked = std::time::Instant::now();
            match self.database.renew_lease(&self.lease, TTL).await {
                Ok(true) => engine.hold_until(asked + TTL),
                Ok(false) => {
                    tracing::error!("another process took over the embedded engine: stopping");
                    lost.cancel();
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the embedded engine's lease was not renewed");
                }
            }
        }
    }

    /// Gives the lease back, when the engine has nothing left to do.
    pub(super) async fn end(self) -> Result<(), sea_orm::DbErr> {
        self.over.cancel();
        self.renewing.close();
        self.renewing.wait().await;
        self.database.release_lease(&self.lease).await.map(|_| ())
    }
}
