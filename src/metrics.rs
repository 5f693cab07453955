//! What is counted and measured: one table of names, and handles that are made once.
//!
//! Everything that has a name here is registered at once, so that a series is there, at 0, before
//! anything happens. Labels are bounded: what is not in a closed set counts as `other`.
//!
//! There is one recorder per process. What several servers in one process count adds up; what they
//! show ([`Shown`]) is written while one of them is asked, and is its own.

use std::{
    collections::HashMap,
    fmt::Write as _,
    iter::Sum,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ::metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram, with_local_recorder,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};

use crate::domain::{ActivityId, Difference, DifferenceKind, OfferKey, ReserveOutcome};

mod calls;
mod families;
mod outcomes;
mod process;
mod times;

pub use calls::{GrpcMethod, MethodMeter, grpc_method};
pub use families::{FAMILIES, Family, Kind};

pub(crate) use families::CALLS;
use families::*;
use outcomes::OFFERS;
use times::Times;

/// How often what was measured is added up; until then it takes memory.
pub const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Why offers are frozen and rebuilt: what `guard.lua` finds, what `recovery` finds, and what
/// others ask it for.
const REASONS: &[&str] = &[
    "adjustment",
    "behind",
    "corrupt",
    "unreadable",
    "epoch",
    "fenced",
    "missing",
    "no_row",
    "not_held",
    "operator",
    "rebuilding",
    "reconcile",
    "refused",
    "segments",
    "server",
    "went_back",
    OTHER,
];
const OTHER: &str = "other";

/// What [`reserve_outcome`] counts, in its order.
const OUTCOMES: [&str; 11] = [
    "not_started",
    "paused",
    "ended",
    "quantity_limit",
    "not_warmed",
    "replayed",
    "released",
    "duplicate",
    "sold_out",
    "insufficient",
    "reserved",
];

/// The most offers that have series of their own.
pub const MOST_OFFERS: usize = 200;

/// What a server is asked for, when its metrics are read.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shown {
    pub engine_up: bool,
    pub database_up: bool,
    pub frozen_offers: usize,
    pub room: usize,
    pub room_taken: usize,
    pub masters_away: usize,
    pub engine_requests: Depth,
    pub writer_rows: Depth,
    pub writer_wait: Duration,
    pub lookups_waiting: usize,
}

/// How many stand in a queue, and how many have left it and are not done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    pub waiting: usize,
    pub under_way: usize,
}

impl Sum for Depth {
    fn sum<I: Iterator<Item = Self>>(depths: I) -> Self {
        depths.fold(Self::default(), |sum, depth| Self {
            waiting: sum.waiting + depth.waiting,
            under_way: sum.under_way + depth.under_way,
        })
    }
}

/// Counts what has left a queue and is not done.
#[derive(Debug, Default)]
pub struct UnderWay(AtomicUsize);

/// Some of it, until this is dropped.
#[derive(Debug)]
pub struct Begun<'a> {
    of: &'a UnderWay,
    count: usize,
}

impl UnderWay {
    /// So many more are under way.
    #[must_use]
    pub fn begin(&self, count: usize) -> Begun<'_> {
        self.0.fetch_add(count, Ordering::Relaxed);
        Begun { of: self, count }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.of.0.fetch_sub(self.count, Ordering::Relaxed);
    }
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($member:ident = $word:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($member),*
        }

        impl $name {
            const ALL: &'static [Self] = &[$(Self::$member),*];

            /// The word for it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$member => $word),*
                }
            }
        }
    };
}

words! {
    /// Why a request for a reservation was not decided.
    Undecided {
        Invalid = "invalid",
        Unknown = "unknown_offer",
        RateLimited = "rate_limited",
        Overloaded = "overloaded",
        Engine = "engine_unavailable",
        Database = "database_unavailable",
        Frozen = "offer_frozen",
        ShuttingDown = "shutting_down",
        Deadline = "deadline_exceeded",
        Internal = "internal",
        Other = "other",
    }
}

words! {
    /// What became of an outbox row that was polled.
    Polled {
        Ordered = "ordered",
        Released = "released",
        Failed = "failed",
        Waiting = "waiting",
    }
}

words! {
    /// An outbox row that is not at its end.
    Unfinished {
        Pending = "pending",
        Releasing = "releasing",
        Dead = "dead",
    }
}

words! {
    /// A background worker of a server.
    Worker {
        Balance = "balance",
        Catalog = "catalog",
        Expiry = "expiry",
        Figures = "figures",
        Hearing = "hearing",
        Poller = "poller",
        Purge = "purge",
        Sweeper = "sweeper",
    }
}

words! {
    /// What is waited for.
    Waited {
        Engine = "engine",
        Database = "database",
    }
}

words! {
    /// What an error of SQL leaves behind.
    SqlError {
        RolledBack = "rolled_back",
        Data = "data",
        Away = "away",
        Unknown = "unknown",
    }
}

/// What lies between the outbox and the orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutboxDepth {
    pub pending: u64,
    pub releasing: u64,
    pub dead: u64,
    pub lag: Duration,
}

/// What the engine tells of reservations that it does not know to be in SQL, and of the units left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDepth {
    pub unacked: u64,
    /// How old the oldest of them is; 0 if there is none.
    pub unacked_age: Duration,
    pub offers: Vec<OfferDepth>,
}

/// What is left of one offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferDepth {
    pub offer: OfferKey,
    pub total: u64,
    pub remaining: u64,
}

/// What is certain of a call of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    Ok,
    Full,
    NotRun,
    PartAway,
    Unknown,
    Script,
}

impl CallResult {
    const ALL: [Self; 6] =
        [Self::Ok, Self::Full, Self::NotRun, Self::PartAway, Self::Unknown, Self::Script];

    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Full => "full",
            Self::NotRun => "not_run",
            Self::PartAway => "part_away",
            Self::Unknown => "unknown",
            Self::Script => "script",
        }
    }
}

/// The handles of one script.
#[derive(Debug)]
pub struct ScriptMeter {
    /// In the order of [`CallResult::ALL`].
    calls: [Counter; CallResult::ALL.len()],
    seconds: Histogram,
}

impl ScriptMeter {
    /// Counts one call, without a look-up of names or an allocation of its own.
    pub fn note(&self, result: CallResult, took: Duration) {
        self.calls[result as usize].increment(1);
        self.seconds.record(took);
    }
}

/// The two series of a [`Depth`].
struct DepthGauges {
    waiting: Gauge,
    under_way: Gauge,
}

impl DepthGauges {
    fn of(family: Family) -> Self {
        let gauge = |state: &'static str| gauge!(family.name, "state" => state);
        Self { waiting: gauge("waiting"), under_way: gauge("under_way") }
    }

    fn set(&self, depth: Depth) {
        self.waiting.set(as_gauge(depth.waiting as u64));
        self.under_way.set(as_gauge(depth.under_way as u64));
    }
}

/// The recorder, and the handles of everything that is not one server's own.
struct Metrics {
    recorder: Arc<PrometheusRecorder>,
    /// In the order of [`REASONS`].
    rebuilds: Vec<Counter>,
    divergence: Vec<Counter>,
    rebuild_seconds: Histogram,
    engine_up: Gauge,
    database_up: Gauge,
    frozen_offers: Gauge,
    masters_away: Gauge,
    cold_activities: Gauge,
    starting_cold: Gauge,
    dead_letters: Gauge,
    /// In the order of [`DifferenceKind::ALL`].
    differences: Vec<Gauge>,
    /// How many of each kind, in the same order; of activities that have any.
    compared: Mutex<HashMap<ActivityId, Vec<usize>>>,
    /// In the order of [`OUTCOMES`].
    outcomes: [Counter; OUTCOMES.len()],
    /// In the order of [`Undecided::ALL`].
    errors: Vec<Counter>,
    sold_out_from_memory: Counter,
    room: Gauge,
    room_taken: Gauge,
    thread_lag: Times,
    /// In the order of [`Waited::ALL`].
    pool_waits: Vec<Times>,
    /// In the order of [`SqlError::ALL`].
    database_errors: Vec<Counter>,
    engine_batches: Histogram,
    group_rows: Histogram,
    group_seconds: Histogram,
    engine_requests: DepthGauges,
    writer_rows: DepthGauges,
    writer_wait: Gauge,
    lookups: Gauge,
    /// In the order of [`Unfinished::ALL`].
    outbox_rows: Vec<Gauge>,
    outbox_lag: Gauge,
    unacked: Gauge,
    unacked_age: Gauge,
    batch_orders: Histogram,
    batch_seconds: Histogram,
    /// In the order of [`Polled::ALL`].
    polled: Vec<Counter>,
    swept: Counter,
    sweep_seconds: Histogram,
    expired_holds: Counter,
    /// In the order of [`Worker::ALL`].
    worker_failures: Vec<Counter>,
    watch_streams: Gauge,
    certificate_ends: Gauge,
    /// Those that have series now; shown by [`text`], since a series of the recorder stays for ever.
    offers: Mutex<Vec<OfferDepth>>,
    /// Held from the gauges of one server to the end of its text.
    showing: Mutex<()>,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::install);

impl Metrics {
    fn install() -> Self {
        let mut builder = PrometheusBuilder::new();
        for family in FAMILIES {
            if let Kind::Histogram(bounds) = family.kind {
                let name = Matcher::Full(family.name.to_owned());
                builder = builder.set_buckets_for_metric(name, bounds).expect("there are bounds");
            }
        }
        let recorder = Arc::new(builder.build_recorder());
        // A process that has a recorder keeps it; ours is used directly all the same.
        let _ = ::metrics::set_global_recorder(recorder.clone());
        with_local_recorder(&recorder.clone(), || Self::register(recorder))
    }

    fn register(recorder: Arc<PrometheusRecorder>) -> Self {
        for Family { name, kind, help, .. } in FAMILIES {
            match kind {
                Kind::Counter => describe_counter!(*name, *help),
                Kind::Gauge => describe_gauge!(*name, *help),
                Kind::Histogram(_) => describe_histogram!(*name, *help),
            }
        }
        let by_reason = |family: Family| {
            REASONS.iter().map(|reason| counter!(family.name, "reason" => *reason)).collect()
        };
        let difference = |kind: &DifferenceKind| gauge!(DIFFERENCES.name, "kind" => kind.as_str());
        Self {
            recorder,
            rebuilds: by_reason(REBUILDS),
            divergence: by_reason(DIVERGENCE),
            rebuild_seconds: histogram!(REBUILD_TIMES.name),
            engine_up: gauge!(ENGINE_UP.name),
            database_up: gauge!(DATABASE_UP.name),
            frozen_offers: gauge!(FROZEN_OFFERS.name),
            masters_away: gauge!(MASTERS_AWAY.name),
            cold_activities: gauge!(COLD_ACTIVITIES.name),
            starting_cold: gauge!(STARTING_COLD.name),
            dead_letters: gauge!(DEAD_LETTERS.name),
            differences: DifferenceKind::ALL.iter().map(difference).collect(),
            compared: Mutex::default(),
            outcomes: OUTCOMES.map(|outcome| counter!(RESERVE_OUTCOMES.name, "outcome" => outcome)),
            errors: Undecided::ALL
                .iter()
                .map(|reason| counter!(RESERVE_ERRORS.name, "reason" => reason.as_str()))
                .collect(),
            sold_out_from_memory: counter!(SOLD_OUT_FROM_MEMORY.name),
            room: gauge!(ROOM.name),
            room_taken: gauge!(ROOM_TAKEN.name),
            thread_lag: Times::new(LAG_SECONDS),
            pool_waits: Waited::ALL.iter().map(|_| Times::new(WAIT_SECONDS)).collect(),
            database_errors: SqlError::ALL
                .iter()
                .map(|fault| counter!(DATABASE_ERRORS.name, "fault" => fault.as_str()))
                .collect(),
            engine_batches: histogram!(ENGINE_BATCHES.name),
            group_rows: histogram!(GROUP_ROWS.name),
            group_seconds: histogram!(GROUP_TIMES.name),
            engine_requests: DepthGauges::of(ENGINE_REQUESTS),
            writer_rows: DepthGauges::of(WRITER_ROWS),
            writer_wait: gauge!(WRITER_WAIT.name),
            lookups: gauge!(LOOKUPS.name),
            outbox_rows: Unfinished::ALL
                .iter()
                .map(|state| gauge!(OUTBOX_ROWS.name, "state" => state.as_str()))
                .collect(),
            outbox_lag: gauge!(OUTBOX_LAG.name),
            unacked: gauge!(UNACKED.name),
            unacked_age: gauge!(UNACKED_AGE.name),
            batch_orders: histogram!(BATCH_ORDERS.name),
            batch_seconds: histogram!(BATCH_TIMES.name),
            polled: Polled::ALL
                .iter()
                .map(|result| counter!(POLLED_ROWS.name, "result" => result.as_str()))
                .collect(),
            swept: counter!(SWEPT.name),
            sweep_seconds: histogram!(SWEEP_TIMES.name),
            expired_holds: counter!(EXPIRED_HOLDS.name),
            worker_failures: Worker::ALL
                .iter()
                .map(|worker| counter!(WORKER_FAILURES.name, "worker" => worker.as_str()))
                .collect(),
            watch_streams: gauge!(WATCH_STREAMS.name),
            certificate_ends: gauge!(CERTIFICATE_ENDS.name),
            offers: Mutex::default(),
            showing: Mutex::default(),
        }
    }
}

/// The handles of the script with this name; there is one name per file in `lua/`.
#[must_use]
pub fn script(name: &'static str) -> ScriptMeter {
    with_local_recorder(&METRICS.recorder, || ScriptMeter {
        calls: CallResult::ALL
            .map(|result| counter!(CALLS.name, "script" => name, "result" => result.as_str())),
        seconds: histogram!(CALL_TIMES.name, "script" => name),
    })
}

/// A server runs on these.
pub fn serves_on(engine: &'static str, database: &'static str) {
    with_local_recorder(&METRICS.recorder, || {
        let version = env!("CARGO_PKG_VERSION");
        gauge!(BUILD_INFO.name, "version" => version, "engine" => engine, "database" => database)
            .set(1);
    });
}

/// A rebuild ended, and the offer sells again.
pub fn rebuilt(reason: &str, frozen: Duration) {
    by_reason(&METRICS.rebuilds, reason).increment(1);
    METRICS.rebuild_seconds.record(frozen);
}

/// Engine and SQL disagree, and the offer is to be frozen.
pub fn diverged(reason: &str) {
    by_reason(&METRICS.divergence, reason).increment(1);
}

fn by_reason<'a>(counters: &'a [Counter], reason: &str) -> &'a Counter {
    let place = REASONS.iter().position(|known| *known == reason);
    &counters[place.unwrap_or(REASONS.len() - 1)]
}

/// How many activities should have started, and were not warmed up.
pub fn count_cold_activities(count: u64) {
    METRICS.cold_activities.set(as_gauge(count));
}

/// How many activities start soon, and are not warmed up.
pub fn count_starting_cold(count: usize) {
    METRICS.starting_cold.set(as_gauge(count as u64));
}

/// A request for a reservation of this offer was decided.
pub fn reserve_outcome(offer: &OfferKey, outcome: &ReserveOutcome) {
    let place = match outcome {
        ReserveOutcome::NotStarted => 0,
        ReserveOutcome::Paused => 1,
        ReserveOutcome::Ended => 2,
        ReserveOutcome::QuantityLimit { .. } => 3,
        ReserveOutcome::NotWarmed => 4,
        ReserveOutcome::Reserved { replayed: true, .. } => 5,
        ReserveOutcome::Released => 6,
        ReserveOutcome::Duplicate { .. } => 7,
        ReserveOutcome::SoldOut => 8,
        ReserveOutcome::Insufficient { .. } => 9,
        ReserveOutcome::Reserved { replayed: false, .. } => 10,
    };
    METRICS.outcomes[place].increment(1);
    OFFERS.count(offer, place);
}

/// A request for a reservation was not decided.
pub fn reserve_error(why: Undecided) {
    METRICS.errors[why as usize].increment(1);
}

/// An answer SOLD_OUT was given from memory.
pub fn sold_out_from_memory() {
    METRICS.sold_out_from_memory.increment(1);
}

/// A thread of gRPC came so late to what was due.
pub fn thread_lag(lag: Duration) {
    METRICS.thread_lag.note(lag);
}

/// Somebody waited so long for this.
pub fn waited(what: Waited, time: Duration) {
    METRICS.pool_waits[what as usize].note(time);
}

/// The database answered a statement with an error.
pub fn database_failed(fault: SqlError) {
    METRICS.database_errors[fault as usize].increment(1);
}

/// One run of `reserve.lua` is for so many requests.
pub fn engine_batch(requests: usize) {
    METRICS.engine_batches.record(as_gauge(requests as u64));
}

/// A commit to the outbox recorded so many reservations.
pub fn group_written(rows: usize, took: Duration) {
    METRICS.group_rows.record(as_gauge(rows as u64));
    METRICS.group_seconds.record(took);
}

/// A transaction of the poller made so many orders.
pub fn batch_ordered(orders: usize, took: Duration) {
    METRICS.batch_orders.record(as_gauge(orders as u64));
    METRICS.batch_seconds.record(took);
}

/// The poller did this with so many rows.
pub fn polled(result: Polled, rows: usize) {
    METRICS.polled[result as usize].increment(rows as u64);
}

/// The sweeper settled so many reservations.
pub fn settled(count: usize) {
    METRICS.swept.increment(count as u64);
}

/// The sweeper walked all offers once.
pub fn swept(took: Duration) {
    METRICS.sweep_seconds.record(took);
}

/// So many holds were given back.
pub fn holds_expired(count: usize) {
    METRICS.expired_holds.increment(count as u64);
}

/// A pass of this worker failed.
pub fn worker_failed(worker: Worker) {
    METRICS.worker_failures[worker as usize].increment(1);
}

/// Counts an open WatchStock stream for as long as it lives.
#[derive(Debug)]
pub struct Watching(());

/// A WatchStock stream begins.
#[must_use]
pub fn watching() -> Watching {
    METRICS.watch_streams.increment(1);
    Watching(())
}

impl Drop for Watching {
    fn drop(&mut self) {
        METRICS.watch_streams.decrement(1);
    }
}

/// When the certificate of the gRPC port ends.
pub fn certificate_ends(at: SystemTime) {
    METRICS.certificate_ends.set(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
}

/// What lies between the outbox and the orders; it stays so until the database tells anew.
pub fn outbox_measured(depth: OutboxDepth) {
    for (state, rows) in Unfinished::ALL.iter().zip([depth.pending, depth.releasing, depth.dead]) {
        METRICS.outbox_rows[*state as usize].set(as_gauge(rows));
    }
    METRICS.dead_letters.set(as_gauge(depth.dead));
    METRICS.outbox_lag.set(depth.lag.as_secs_f64());
}

/// What the engine holds; it stays so until the engine tells anew.
pub fn engine_measured(depth: EngineDepth) {
    METRICS.unacked.set(as_gauge(depth.unacked));
    METRICS.unacked_age.set(depth.unacked_age.as_secs_f64());
    *METRICS.offers.lock().unwrap_or_else(PoisonError::into_inner) = depth.offers;
}

/// What a comparison of this activity listed; it stays so until the next one of the same.
pub fn compared(activity: &ActivityId, differences: &[Difference]) {
    let count = |kind: &DifferenceKind| {
        differences.iter().filter(|difference| difference.kind == *kind).count()
    };
    let mut compared = METRICS.compared.lock().unwrap_or_else(PoisonError::into_inner);
    if differences.is_empty() {
        compared.remove(activity);
    } else {
        compared.insert(activity.clone(), DifferenceKind::ALL.iter().map(count).collect());
    }
    for (place, gauge) in METRICS.differences.iter().enumerate() {
        let sum: usize = compared.values().map(|counts| counts[place]).sum();
        gauge.set(as_gauge(sum as u64));
    }
}

/// Adds up what was measured since the last time, which takes memory until then.
pub fn upkeep() {
    METRICS.recorder.handle().run_upkeep();
    OFFERS.forget(Instant::now());
}

/// Everything in the text format of Prometheus.
#[must_use]
pub fn text(shown: Shown) -> String {
    let _showing = METRICS.showing.lock().unwrap_or_else(PoisonError::into_inner);
    METRICS.engine_up.set(u8::from(shown.engine_up));
    METRICS.database_up.set(u8::from(shown.database_up));
    METRICS.frozen_offers.set(as_gauge(shown.frozen_offers as u64));
    METRICS.room.set(as_gauge(shown.room as u64));
    METRICS.room_taken.set(as_gauge(shown.room_taken as u64));
    METRICS.masters_away.set(as_gauge(shown.masters_away as u64));
    METRICS.engine_requests.set(shown.engine_requests);
    METRICS.writer_rows.set(shown.writer_rows);
    METRICS.writer_wait.set(shown.writer_wait.as_secs_f64());
    METRICS.lookups.set(as_gauge(shown.lookups_waiting as u64));
    let mut text = METRICS.recorder.handle().render();
    calls::write(&mut text);
    OFFERS.write(&mut text);
    head(&mut text, THREAD_LAG);
    METRICS.thread_lag.write(&mut text, THREAD_LAG.name, "");
    head(&mut text, POOL_WAITS);
    for (what, times) in Waited::ALL.iter().zip(&METRICS.pool_waits) {
        times.write(&mut text, POOL_WAITS.name, &format!("pool=\"{}\"", what.as_str()));
    }
    let offers = METRICS.offers.lock().unwrap_or_else(PoisonError::into_inner);
    write_offers(&mut text, OFFER_TOTAL, &offers, |offer| offer.total);
    write_offers(&mut text, OFFER_REMAINING, &offers, |offer| offer.remaining);
    process::write(&mut text);
    text
}

fn write_offers(
    text: &mut String,
    family: Family,
    offers: &[OfferDepth],
    units: impl Fn(&OfferDepth) -> u64,
) {
    head(text, family);
    for depth in offers.iter().take(MOST_OFFERS) {
        // Ids have no character that would have to be escaped.
        let OfferKey { activity_id, sku_id } = &depth.offer;
        let labels = format!("activity_id=\"{activity_id}\",sku_id=\"{sku_id}\"");
        line(text, family.name, &labels, units(depth));
    }
}

/// What stands above the series of a family that is not the recorder's.
fn head(text: &mut String, family: Family) {
    let Family { name, kind, help, .. } = family;
    // Writing to a string does not fail.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {}\n", kind.as_str());
}

fn line(text: &mut String, name: &str, labels: &str, value: impl std::fmt::Display) {
    let _ = if labels.is_empty() {
        writeln!(text, "{name} {value}")
    } else {
        writeln!(text, "{name}{{{labels}}} {value}")
    };
}

/// Gauges are `f64`, which is exact for all that can be counted here.
#[expect(clippy::cast_precision_loss, reason = "nobody counts to 2^53")]
fn as_gauge(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_described_from_the_start() {
        let _levels = script("levels");
        let (service, method) = ("seckill.v1.Seckill", "Reserve");
        let reserve = grpc_method(GrpcMethod { service, method, kind: "unary" });
        reserve.start();
        reserve.end(8, Duration::from_millis(2));
        serves_on("embedded", "sqlite");
        let text = text(Shown { engine_up: true, frozen_offers: 3, ..Shown::default() });
        for Family { name, kind, help, .. } in FAMILIES {
            assert!(text.contains(&format!("# HELP {name} {help}\n")), "{name}: {text}");
            assert!(text.contains(&format!("# TYPE {name} {}\n", kind.as_str())), "{name}: {text}");
        }
        assert!(text.contains("seckill_engine_frozen_offers 3\n"), "{text}");
        assert!(text.contains("seckill_engine_rebuild_seconds_bucket{le=\"+Inf\"} "), "{text}");
    }

    #[test]
    fn names_follow_the_conventions() {
        for Family { name, kind, help, .. } in FAMILIES {
            assert_eq!(*kind == Kind::Counter, name.ends_with("_total"), "{name}");
            let units = ["_seconds", "_rows", "_orders", "_requests"];
            let has_unit = units.iter().any(|unit| name.ends_with(unit));
            assert!(has_unit || !matches!(kind, Kind::Histogram(_)), "{name}");
            let first = ["seckill_", "grpc_server_", "process_"];
            assert!(first.iter().any(|first| name.starts_with(first)), "{name}");
            assert!(help.ends_with('.'), "{name}");
        }
    }

    #[test]
    fn a_reason_that_nobody_knows_is_another_one() {
        let count = |line: &str| {
            let text = text(Shown::default());
            let line = text.lines().find(|found| found.starts_with(line)).expect("it is there");
            line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok()).expect("a number")
        };
        let other = "seckill_engine_divergence_total{reason=\"other\"} ";
        let before = count(other);
        diverged("a reason\nthat came out of Redis");
        assert_eq!(count(other), before + 1);
    }

    #[test]
    fn results_stand_in_the_order_of_their_handles() {
        for (place, result) in CallResult::ALL.into_iter().enumerate() {
            assert_eq!(result as usize, place);
        }
        for (place, why) in Undecided::ALL.iter().enumerate() {
            assert_eq!(*why as usize, place);
        }
    }

    #[test]
    fn every_reason_of_the_guard_has_a_series() {
        let guard = include_str!("../lua/guard.lua");
        let reasons = guard.split("reason = '").skip(1).filter_map(|rest| rest.split('\'').next());
        let reasons: Vec<&str> = reasons.collect();
        assert!(reasons.len() >= 6, "{reasons:?}");
        for reason in reasons {
            assert!(REASONS.contains(&reason), "{reason} would count as other");
        }
    }

    #[test]
    fn what_is_under_way_counts_until_it_is_dropped() {
        let under_way = UnderWay::default();
        let (some, more) = (under_way.begin(3), under_way.begin(2));
        assert_eq!(under_way.count(), 5);
        drop(some);
        assert_eq!(under_way.count(), 2);
        drop(more);
        assert_eq!(under_way.count(), 0);
    }
}
