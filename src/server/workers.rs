//! The background work: who wakes it, how often, and that it ends.
//!
//! A pass that fails because a store is away is simply due again; nothing is counted or lost.

use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use tokio::time::Instant;
use tonic_health::server::HealthReporter;

use super::{Parts, redis_settings, set_health};
use crate::{
    circuit::Circuit,
    config::Settings,
    engine::{
        events::{Event, Heard},
        redis::{Level, RedisEngine, RedisSettings},
    },
    error::Error,
    metrics::{self, Polled, Worker},
    outbox::{poller::Pass, sweeper::sweep},
    telemetry::spans,
    transfers::balance_all,
};

/// How often the stores are probed while all is well.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// How often a store is probed that is away.
const PROBE_AWAY_EVERY: Duration = Duration::from_millis(100);
/// How long a store may take to answer a probe.
const PROBE_LIMIT: Duration = Duration::from_millis(1_500);
/// How often the settings of Redis are looked at.
const CHECK_REDIS_EVERY: Duration = Duration::from_secs(30);
/// How long a pass keeps other servers from the same: one that hangs must not hold up everybody.
const ALONE_FOR: Duration = Duration::from_secs(10);
/// How often the pipeline is measured, for the metrics; and how much longer than that it rests.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
const REST: u32 = 9;
/// How often limits forget who has been silent.
const FORGET_EVERY: Duration = Duration::from_secs(1);
/// How long rows are gathered before they become orders: what a batch takes hardly grows with the
/// first rows of it, and the next buyers need the cores.
const GATHER: Duration = Duration::from_millis(10);
/// So many are worth a batch at once.
const WORTH_A_BATCH: usize = 64;
/// Holds released in one pass; few in the simulator.
const EXPIRE_AT_ONCE: u64 = if cfg!(test) { 2 } else { 200 };

/// Starts every worker of a server.
pub(super) fn start(parts: &Parts, settings: &Settings, health: HealthReporter) {
    let ms = Duration::from_millis;
    parts.tasks.spawn(probe_engine(parts.clone(), health.clone()));
    parts.tasks.spawn(probe_database(parts.clone(), health));
    parts.tasks.spawn(poll(parts.clone(), settings.clone()));
    let grace = ms(settings.sweeper.grace_ms);
    parts.tasks.spawn(every(
        parts.clone(),
        Worker::Sweeper,
        Needs::EngineAlone,
        ms(settings.sweeper.interval_ms),
        {
            let reservations = parts.reservations.clone();
            move || {
                let reservations = reservations.clone();
                async move {
                    let begun = Instant::now();
                    let settled = sweep(&reservations, grace).await?;
                    metrics::swept(begun.elapsed());
                    if settled > 0 {
                        tracing::info!(settled, "the sweeper settled forgotten reservations");
                    }
                    Ok(())
                }
            }
        },
    ));
    if settings.segments.balance_ms > 0 {
        parts.tasks.spawn(every(
            parts.clone(),
            Worker::Balance,
            Needs::EngineAlone,
            ms(settings.segments.balance_ms),
            {
                let (catalog, recovery) = (parts.catalog.clone(), parts.recovery.clone());
                move || {
                    let (catalog, recovery) = (catalog.clone(), recovery.clone());
                    async move { balance_all(&recovery, &catalog).await }
                }
            },
        ));
    }
    parts.tasks.spawn(every(
        parts.clone(),
        Worker::Expiry,
        Needs::EngineAlone,
        ms(settings.holds.interval_ms),
        {
            let (reservations, shutdown) = (parts.reservations.clone(), parts.shutdown.clone());
            move || {
                let (reservations, shutdown) = (reservations.clone(), shutdown.clone());
                async move {
                    while !shutdown.is_cancelled()
                        && reservations.expire_holds(EXPIRE_AT_ONCE).await? > 0
                    {
                    }
                    Ok(())
                }
            }
        },
    ));
    parts.tasks.spawn(every(
        parts.clone(),
        Worker::Catalog,
        Needs::Database,
        ms(settings.catalog.refresh_ms),
        {
            let (catalog, activities) = (parts.catalog.clone(), parts.activities.clone());
            move || {
                let (catalog, activities) = (catalog.clone(), activities.clone());
                async move {
                    catalog.refresh().await?;
                    activities.move_by_clock().await.map(|_| ())
                }
            }
        },
    ));
    parts.tasks.spawn(measure(parts.clone()));
    parts.tasks.spawn(add_up(parts.clone()));
    parts.tasks.spawn(forget(parts.clone()));
    parts.tasks.spawn(hear(parts.clone()));
    parts.tasks.spawn({
        let activities = parts.activities.clone();
        async move {
            if let Err(error) = activities.purge_settled().await {
                note_failure(Worker::Purge, &error);
            }
        }
    });
    if let Some(redis) = redis_settings(&settings.engine) {
        parts.tasks.spawn(check_redis(parts.clone(), redis));
    }
}

/// Keeps the memory of the limits small.
async fn forget(parts: Parts) {
    while sleep(&parts, FORGET_EVERY).await {
        parts.reservations.limits.forget();
    }
}

/// Measures the pipeline, and what is left of the offers; a tenth of the time at most.
async fn measure(parts: Parts) {
    let mut pause = MEASURE_EVERY;
    while sleep(&parts, pause).await {
        let begun = Instant::now();
        // What is taken and not recorded shows best while the database is away.
        if let Some(depth) = parts.activities.engine_depth().await {
            metrics::engine_measured(depth);
        }
        if !parts.database_circuit.is_open() {
            match parts.activities.outbox_depth().await {
                Ok(depth) => metrics::outbox_measured(depth),
                Err(error) => note_failure(Worker::Figures, &error),
            }
        }
        pause = MEASURE_EVERY.max(begun.elapsed() * REST);
    }
}

/// Adds up what was measured, also while nobody reads it.
async fn add_up(parts: Parts) {
    while sleep(&parts, metrics::UPKEEP_EVERY).await {
        metrics::upkeep();
    }
}

/// Does what other servers tell, and reads everything again after a gap.
async fn hear(parts: Parts) {
    let mut hearing = parts.engine.hear();
    while let Some(Some(heard)) = parts.shutdown.run_until_cancelled(hearing.next()).await {
        let done = match &heard {
            Heard::Gap => parts.catalog.refresh().await,
            Heard::Message(message) => match Event::read(message) {
                Some(event) => parts.catalog.hear(event).await,
                None => {
                    tracing::debug!("a message that no server of ours sends");
                    Ok(())
                }
            },
        };
        if let Err(error) = done {
            // The catalog is read again soon in any case.
            note_failure(Worker::Hearing, &error.into());
        }
    }
}

/// What a pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Database,
    /// The engine too; and one server at a time is enough.
    EngineAlone,
}

/// Runs `pass` now and then, while the stores that it needs are there, until the shutdown.
async fn every<F, W>(parts: Parts, worker: Worker, needs: Needs, interval: Duration, pass: F)
where
    F: Fn() -> W,
    W: Future<Output = Result<(), Error>>,
{
    while sleep(&parts, interval).await {
        if parts.database_circuit.is_open() {
            continue;
        }
        let passed = match needs {
            Needs::Database => pass().await,
            Needs::EngineAlone if parts.engine_circuit.is_open() => continue,
            Needs::EngineAlone => alone(&parts, worker.as_str(), pass()).await,
        };
        if let Err(error) = passed {
            note_failure(worker, &error);
        }
    }
}

/// Runs a pass unless another server is at it; that saves work and nothing else.
async fn alone(
    parts: &Parts,
    name: &'static str,
    pass: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    let Some(lock) = parts.locks.acquire(name, Duration::ZERO).await? else { return Ok(()) };
    let mut pass = std::pin::pin!(pass);
    match tokio::time::timeout(ALONE_FOR, &mut pass).await {
        Ok(passed) => passed,
        Err(_) => {
            drop(lock);
            pass.await
        }
    }
}

/// A fresh commit wakes the poller; the interval is the fallback.
async fn poll(parts: Parts, settings: Settings) {
    let poller = parts.poller(&settings);
    let interval = Duration::from_millis(settings.outbox.poll_interval_ms);
    loop {
        tokio::select! {
            biased;
            () = parts.reservations.due.notified() => {}
            () = tokio::time::sleep(interval) => {}
            () = parts.shutdown.cancelled() => return,
        }
        let mut found = 0;
        while (found >= WORTH_A_BATCH || sleep(&parts, GATHER).await)
            && !parts.shutdown.is_cancelled()
            && !parts.database_circuit.is_open()
        {
            let begun = SystemTime::now();
            match poller.run_once().await {
                Ok(pass) => {
                    note_pass(&pass, begun);
                    found = pass.settled();
                    if found == 0 {
                        break;
                    }
                }
                Err(error) => {
                    note_failure(Worker::Poller, &error);
                    break;
                }
            }
        }
    }
}

fn note_pass(pass: &Pass, begun: SystemTime) {
    if pass.settled() > 0 {
        let counts =
            [("ordered", pass.ordered), ("released", pass.released), ("failed", pass.failed)];
        spans::worked("poller batch", begun, &counts);
    }
    metrics::polled(Polled::Ordered, pass.ordered);
    metrics::polled(Polled::Released, pass.released);
    metrics::polled(Polled::Failed, pass.failed);
    metrics::polled(Polled::Waiting, pass.waiting);
}

fn note_failure(worker: Worker, error: &Error) {
    metrics::worker_failed(worker);
    let name = worker.as_str();
    if let Error::Internal(cause) = error {
        tracing::error!(name, %cause, "a background pass failed");
    } else {
        // Whoever saw a store fail has tripped its circuit; a lost deadlock must not.
        tracing::debug!(name, %error, "a background pass was put off");
    }
}

async fn probe_engine(parts: Parts, health: HealthReporter) {
    while wait_for_engine(&parts).await {
        let probe = tokio::time::timeout(PROBE_LIMIT, parts.engine.probe());
        match probe.await {
            Ok(Ok(())) => parts.engine_circuit.close(),
            Ok(Err(error)) => parts.engine_circuit.trip(&error.to_string()),
            Err(_) => parts.engine_circuit.trip("no answer to a probe"),
        }
        follow(&parts, &health).await;
    }
}

async fn probe_database(parts: Parts, health: HealthReporter) {
    while wait_for_probe(&parts, &parts.database_circuit).await {
        let (database, away) = (parts.database.clone(), parts.database_circuit.is_open());
        let mut probe = parts.tasks.spawn(async move {
            if away {
                // While all is well the outbox shows that writing works.
                database.try_write().await?;
            }
            database.read_clock().await
        });
        let answer = match tokio::time::timeout(PROBE_LIMIT, &mut probe).await {
            Ok(answer) => answer,
            Err(_) => {
                parts.database_circuit.trip("no answer to a probe");
                follow(&parts, &health).await;
                // It may have paused; once only.
                let patience = if away { Duration::ZERO } else { PROBE_LIMIT };
                let answer = tokio::time::timeout(patience, &mut probe).await;
                if !matches!(answer, Ok(Ok(Ok(())))) {
                    // Whoever waits on these connections may wait for ever.
                    parts.database.give_up().await;
                }
                match answer {
                    Ok(answer) => answer,
                    Err(_) => probe.await,
                }
            }
        };
        match answer {
            Ok(Ok(())) => parts.database_circuit.close(),
            Ok(Err(error)) => parts.database_circuit.trip(&error.to_string()),
            Err(error) => parts.database_circuit.trip(&error.to_string()),
        }
        follow(&parts, &health).await;
    }
}

/// Waits for the next probe of the engine, which may want one at once.
async fn wait_for_engine(parts: &Parts) -> bool {
    let pause = match parts.engine.parts_away() {
        0 => PROBE_EVERY,
        _ => PROBE_AWAY_EVERY,
    };
    tokio::select! {
        biased;
        () = tokio::time::sleep(pause) => true,
        () = parts.engine.stirred() => true,
        waited = wait_for_probe(parts, &parts.engine_circuit) => waited,
    }
}

/// Waits for the next probe; false when the server stops.
async fn wait_for_probe(parts: &Parts, circuit: &Circuit) -> bool {
    let pause = if circuit.is_open() { PROBE_AWAY_EVERY } else { PROBE_EVERY };
    tokio::select! {
        biased;
        () = tokio::time::sleep(pause) => true,
        () = circuit.tripped.notified() => sleep(parts, PROBE_AWAY_EVERY).await,
        () = parts.shutdown.cancelled() => false,
    }
}

/// Health follows both stores, both ways.
async fn follow(parts: &Parts, health: &HealthReporter) {
    if !parts.shutdown.is_cancelled() {
        let away = parts.engine_circuit.is_open() || parts.database_circuit.is_open();
        set_health(health, !away).await;
    }
}

/// Looks now and then whether Redis is still set up for sales: a policy that evicts keys can be set
/// at any time, and would drop stock.
async fn check_redis(parts: Parts, settings: RedisSettings) {
    while sleep(&parts, CHECK_REDIS_EVERY).await {
        // A Redis that is away is the probe's business.
        for finding in RedisEngine::check(&settings).await.unwrap_or_default() {
            if finding.level == Level::Error {
                tracing::error!("Redis is not set up for sales any more: {}", finding.text);
            }
        }
    }
}

/// Sleeps; false when the server stops meanwhile.
async fn sleep(parts: &Parts, pause: Duration) -> bool {
    let until = Instant::now() + pause;
    tokio::select! {
        biased;
        () = tokio::time::sleep_until(until) => !parts.shutdown.is_cancelled(),
        () = parts.shutdown.cancelled() => false,
    }
}
