//! `seckill bench`: what a server does on this machine, measured from outside.
//!
//! The thing under test is this program again, as a process of its own on loopback; its CPU time is
//! read from `/proc`. The noop is measured between the others, the same stack with a service that
//! answers at once, so every goal is a ratio of two figures of one run on one machine.
//!
//! **Promises:** every figure is measured, in this run. After every run the books of engine, outbox
//! and orders are compared with each other and with what the buyers were told; a run whose books do
//! not agree has no figures. The generator says when it was the limit itself.
//!
//! - [`schedule`]: when calls are sent; [`load`]: who sends them; `wins` looks for the most.
//! - [`process`]: servers as processes; [`noop`]: the one that does nothing; [`peer`]: those that do it
//!   another way; [`bed`]: a server with a sale on it; `oracle`: whether the books agree.
//! - `script`, `raw`: the engine and the database by themselves; `proxy`: a slow wire.
//! - Scenarios with goals: [`sold_out`], [`steady`], [`drain`], [`streams`], [`peers`], [`far_redis`],
//!   [`overload`], [`watch`]; [`goals`] runs them all. Without: [`slow_commits`], [`burst`],
//!   [`duplicates`], [`releases`], [`many_offers`], [`segments`], [`soak`], [`ablations`], [`scale`].
//! - [`report`]: figures and goals; [`html`]: a page of them; [`machine`]: what they were measured on.

pub mod ablations;
pub mod bed;
pub mod burst;
pub mod drain;
pub mod duplicates;
pub mod far_redis;
pub mod goals;
pub mod html;
pub mod load;
pub mod machine;
pub mod many_offers;
pub mod noop;
mod only_reserve;
mod oracle;
pub mod overload;
pub mod peer;
pub mod peers;
pub mod process;
mod proxy;
mod raw;
pub mod releases;
pub mod report;
pub mod scale;
mod scenario;
pub mod schedule;
mod script;
pub mod segments;
pub mod slow_commits;
pub mod soak;
pub mod sold_out;
pub mod steady;
pub mod streams;
pub mod watch;
mod wins;

use std::{
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use hdrhistogram::Histogram;
use prost_types::Timestamp;
use serde_json::{Map, Value};

use crate::{
    config::Settings,
    domain::{ActivityId, OfferKey, SkuId},
};
use load::{Arrivals, Load, Requests, SOLD_OUT, Seen};
use machine::Machine;
use process::{Folder, Process};
use report::{Report, Run};
pub use scenario::Scenario;
use schedule::{Pace, Schedule, Stretch};

/// Calls in flight when a rate is looked for, over all connections.
const SATURATING: usize = 256;
/// More calls a second than anything here answers.
const MOST_PER_S: f64 = 400_000.0;
/// How far two readings of the noop may be apart before they say little.
const NOOP_DRIFT: f64 = 0.05;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was asked for can't be done.
    #[error("{0}")]
    Usage(String),
    /// A server, the engine or the database does not answer.
    #[error("{0}")]
    Unavailable(String),
    /// A fault of ours.
    #[error("{0}")]
    Internal(String),
}

/// What to measure, and on what.
#[derive(Debug, Clone)]
pub struct Plan {
    pub scenario: Scenario,
    /// A few seconds, for CI; the figures are rough.
    pub quick: bool,
    pub repeats: usize,
    pub seed: u64,
    pub pace: Pace,
    /// Calls a second of a storm; `None`: half of what the noop answers.
    pub rate: Option<f64>,
    /// How long each measurement takes.
    pub lasts: Duration,
    /// The one thing that there is more and more of; `None`: one after the other.
    pub only: Option<scale::Along>,
    /// Of the servers; what they do not say is a default.
    pub settings: Settings,
    /// The settings file that the servers read too.
    pub config: Option<PathBuf>,
    /// Whether each run gets a database file of its own.
    pub own_database: bool,
    /// Where that and the logs are.
    pub folder: PathBuf,
    /// What was set, for the report.
    pub named_settings: Map<String, Value>,
}

/// Measures, and tells what it is at.
///
/// # Errors
/// [`Error`]: something did not start, or broke in between. Books that do not agree are no error; the
/// report says so and has no figures.
pub async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Report, Error> {
    let begun = Instant::now();
    let begin_time = Timestamp::from(SystemTime::now());
    let machine = Machine::look(plan).await?;
    let mut notes = vec![format!(
        "generator, server, engine and database share {} core(s): each is slower for the others",
        machine.cores
    )];
    if cfg!(debug_assertions) {
        notes.push("a debug build: only ratios mean anything, and they are rough".to_owned());
    }
    if machine.load_average > 0.5 {
        let load = machine.load_average;
        notes.push(format!("the machine was not idle before: load average {load}"));
    }
    let runs = plan.scenario.run(plan, tell).await?;
    let report = Report {
        scenario: plan.scenario.name(),
        quick: plan.quick,
        repeats: runs.len(),
        seed: plan.seed,
        begin_time: begin_time.to_string(),
        seconds: begun.elapsed().as_secs_f64(),
        machine,
        settings: plan.named_settings.clone(),
        figures: Vec::new(),
        notes,
        runs: Vec::new(),
        broken: Vec::new(),
    };
    Ok(report.with(plan.scenario.figures(), runs))
}

/// Measures everything once and once more.
async fn repeated(
    plan: &Plan,
    tell: &(dyn Fn(&str) + Sync),
    one: impl AsyncFn(&Plan, &mut Run, &(dyn Fn(&str) + Sync)) -> Result<(), Error>,
) -> Result<Vec<Run>, Error> {
    let mut runs = Vec::new();
    for nth in 1..=plan.repeats {
        let mut run = Run::default();
        one(plan, &mut run, &|what| tell(&format!("run {nth}: {what}"))).await?;
        runs.push(run);
    }
    Ok(runs)
}

/// Does something at this many a second, one after the other; how long each took, in µs.
async fn paced(
    per_s: f64,
    lasts: Duration,
    one: impl AsyncFn(usize) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let mut times = Vec::new();
    let mut turns = tokio::time::interval(Duration::from_secs_f64(1.0 / per_s));
    for nth in 0..count(per_s * lasts.as_secs_f64()) {
        turns.tick().await;
        let begun = Instant::now();
        one(nth).await?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// The middle one; 0 of nothing.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

/// What a call of the noop costs, at one rate.
#[derive(Debug, Clone, Copy)]
struct Noop {
    cpu_us: f64,
    p50_us: f64,
    p99_us: f64,
    per_s: f64,
}

/// Starts the noop.
async fn start_noop(plan: &Plan, folder: &Folder) -> Result<Process, Error> {
    let variables = [("SECKILL__GRPC__ADDR", "127.0.0.1:0")];
    let config = plan.config.as_deref().map(|path| path.to_string_lossy().into_owned());
    let mut args = vec!["bench", "noop"];
    if let Some(config) = &config {
        args.extend(["--config", config]);
    }
    Process::start(&args, &variables, folder.path()).await
}

/// How many calls of the noop are answered in a second, at most.
async fn noop_rate(plan: &Plan) -> Result<f64, Error> {
    let folder = Folder::inside(&plan.folder)?;
    let process = start_noop(plan, &folder).await?;
    saturate(&process, &nowhere(), "w", plan.warm_up()).await?;
    let seen = saturate(&process, &nowhere(), "n", plan.lasts).await?;
    process.stop().await?;
    Ok(seen.rate(SOLD_OUT))
}

/// Measures the noop at one rate, and then without any.
async fn noop(plan: &Plan, rate: f64) -> Result<Noop, Error> {
    let folder = Folder::inside(&plan.folder)?;
    let process = start_noop(plan, &folder).await?;
    storm(plan, &process, &nowhere(), "w", rate, plan.warm_up()).await?;
    let cpu = process.cpu()?;
    let seen = storm(plan, &process, &nowhere(), "n", rate, plan.lasts).await?;
    let cpu = process.cpu()?.saturating_sub(cpu);
    let most = saturate(&process, &nowhere(), "n", plan.warm_up()).await?;
    process.stop().await?;
    let latencies = load::latencies(seen.of(SOLD_OUT));
    Ok(Noop {
        cpu_us: per_call_us(cpu, seen.count(SOLD_OUT)),
        p50_us: quantile_us(&latencies, 0.5),
        p99_us: quantile_us(&latencies, 0.99),
        per_s: most.rate(SOLD_OUT),
    })
}

/// Sends calls of new buyers at this rate, in the open loop.
async fn storm(
    plan: &Plan,
    server: &Process,
    offer: &OfferKey,
    series: &str,
    rate: f64,
    lasts: Duration,
) -> Result<Seen, Error> {
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, lasts)], plan.seed);
    let requests = Requests::reserve(offer, series, schedule.len());
    load::run(Load::new(server.grpc, requests, Arrivals::Open(schedule))).await
}

/// Sends calls of new buyers as fast as they are answered.
async fn saturate(
    server: &Process,
    offer: &OfferKey,
    series: &str,
    lasts: Duration,
) -> Result<Seen, Error> {
    let most = count(MOST_PER_S * lasts.as_secs_f64());
    let requests = Requests::reserve(offer, series, most);
    let arrivals = Arrivals::Closed { in_flight: SATURATING, lasts };
    load::run(Load::new(server.grpc, requests, arrivals)).await
}

/// An offer that only the noop is asked for; names as long as those of a bed.
fn nowhere() -> OfferKey {
    OfferKey {
        activity_id: ActivityId::new(&format!("bench-{}", "0".repeat(32))).expect("digits"),
        sku_id: SkuId::new(bed::SKU).expect("letters"),
    }
}

impl Plan {
    /// What is tried out to find the best: in a hurry, one that is good enough.
    fn levels<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        let middle = all.len().saturating_sub(1) / 2;
        if self.quick { &all[middle..=middle] } else { all }
    }

    fn warm_up(&self) -> Duration {
        self.lasts.min(Duration::from_secs(1))
    }
}

impl Run {
    fn set_noop(&mut self, before: Noop, after: Noop) {
        let mean = |of: fn(&Noop) -> f64| f64::midpoint(of(&before), of(&after));
        let (cpu, drift) = (mean(|noop| noop.cpu_us), (before.cpu_us - after.cpu_us).abs());
        self.set("noop_cpu_us", cpu);
        self.set("noop_p50_us", mean(|noop| noop.p50_us));
        self.set("noop_p99_us", mean(|noop| noop.p99_us));
        self.set("noop_per_s", mean(|noop| noop.per_s));
        if drift > NOOP_DRIFT * cpu {
            self.note(format!(
                "the noop cost {:.2} µs before and {:.2} µs after: the machine was not steady",
                before.cpu_us, after.cpu_us
            ));
        }
    }

    /// Notes when the generator was the limit of a measurement.
    fn check_generator(&mut self, what: &str, seen: &Seen) {
        if let Some(limit) = seen.limit() {
            self.note(format!("{what}: {limit}"));
        }
    }
}

fn per_call_us(cpu: Duration, calls: u64) -> f64 {
    cpu.as_secs_f64() * 1e6 / calls.max(1) as f64
}

fn quantile_us(latencies: &Histogram<u64>, quantile: f64) -> f64 {
    latencies.value_at_quantile(quantile) as f64
}

/// A number of calls.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
fn count(calls: f64) -> usize {
    calls.ceil() as usize
}
