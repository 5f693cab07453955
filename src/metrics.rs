//! What is counted and measured: one table of names, and handles that are made once.
//!
//! Everything that has a name here is registered at once, so that a series is there, at 0, before
//! anything happens. Labels are bounded: what is not in a closed set counts as `other`.
//!
//! There is one recorder per process. What several servers in one process count adds up; what they
//! show ([`Shown`]) is written while one of them is asked, and is its own.

use std::{
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use ::metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram, with_local_recorder,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};

use crate::domain::{Difference, DifferenceKind};

/// How often what was measured is added up; until then it takes memory.
pub const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// What a family is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Counter,
    Gauge,
    /// In seconds, with these upper bounds.
    Histogram(&'static [f64]),
}

impl Kind {
    /// As in `# TYPE`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

/// All series of one name.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    /// The text of `# HELP`.
    pub help: &'static str,
}

macro_rules! families {
    ($($const:ident = $name:literal, $kind:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub(crate) const $const: Family = Family {
            name: $name,
            kind: $kind,
            labels: &[$($label),*],
            help: $help,
        };)*
        /// Every family, in the order of the documentation.
        pub const FAMILIES: &[Family] = &[$($const),*];
    };
}

/// A script takes from a few microseconds to a timeout.
const CALL_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
];
const REBUILD_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

families! {
    BUILD_INFO = "seckill_build_info", Kind::Gauge, ["version", "engine", "database"],
        "Always 1; the labels say what runs.";
    DATABASE_UP = "seckill_database_up", Kind::Gauge, [],
        "Whether the database answers: 1 or 0.";
    ENGINE_UP = "seckill_engine_up", Kind::Gauge, [],
        "Whether the stock engine answers: 1 or 0.";
    CALLS = "seckill_engine_calls_total", Kind::Counter, ["script", "result"],
        "Scripts that were run, by what is certain of them.";
    CALL_TIMES = "seckill_engine_call_seconds", Kind::Histogram(CALL_SECONDS), ["script"],
        "How long a script took, as the server waited for it.";
    DIVERGENCE = "seckill_engine_divergence_total", Kind::Counter, ["reason"],
        "How often this server had an offer frozen, since engine and SQL disagreed.";
    FROZEN_OFFERS = "seckill_engine_frozen_offers", Kind::Gauge, [],
        "Offers that do not sell until this server, or another one, has rebuilt them.";
    REBUILDS = "seckill_engine_rebuilds_total", Kind::Counter, ["reason"],
        "Rebuilds of an offer from SQL that this server finished.";
    REBUILD_TIMES = "seckill_engine_rebuild_seconds", Kind::Histogram(REBUILD_SECONDS), [],
        "How long such a rebuild kept its offer frozen.";
    COLD_ACTIVITIES = "seckill_activities_not_warmed", Kind::Gauge, [],
        "Activities that are past their start and do not start, since nobody warmed them up.";
    DEAD_LETTERS = "seckill_dead_letters", Kind::Gauge, [],
        "Reservations that could not become orders and wait for an operator.";
    DIFFERENCES = "seckill_reconcile_differences", Kind::Gauge, ["kind"],
        "Contradictions of engine, outbox and orders that this server's last comparison listed.";
}

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
    "server",
    "went_back",
    OTHER,
];
const OTHER: &str = "other";

/// What a server is asked for, when its metrics are read.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    pub engine_up: bool,
    pub database_up: bool,
    pub frozen_offers: usize,
}

/// What is certain of a call of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    Ok,
    Full,
    NotRun,
    Unknown,
    Script,
}

impl CallResult {
    const ALL: [Self; 5] = [Self::Ok, Self::Full, Self::NotRun, Self::Unknown, Self::Script];

    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Full => "full",
            Self::NotRun => "not_run",
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
    cold_activities: Gauge,
    dead_letters: Gauge,
    /// In the order of [`DifferenceKind::ALL`].
    differences: Vec<Gauge>,
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
            cold_activities: gauge!(COLD_ACTIVITIES.name),
            dead_letters: gauge!(DEAD_LETTERS.name),
            differences: DifferenceKind::ALL.iter().map(difference).collect(),
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

/// How many dead letters there are.
pub fn count_dead_letters(count: u64) {
    METRICS.dead_letters.set(as_gauge(count));
}

/// What a comparison listed.
pub fn compared(differences: &[Difference]) {
    for (kind, gauge) in DifferenceKind::ALL.iter().zip(&METRICS.differences) {
        let count = differences.iter().filter(|difference| difference.kind == *kind).count();
        gauge.set(as_gauge(count as u64));
    }
}

/// Adds up what was measured since the last time, which takes memory until then.
pub fn upkeep() {
    METRICS.recorder.handle().run_upkeep();
}

/// Everything in the text format of Prometheus.
#[must_use]
pub fn text(shown: Shown) -> String {
    let _showing = METRICS.showing.lock().unwrap_or_else(PoisonError::into_inner);
    METRICS.engine_up.set(u8::from(shown.engine_up));
    METRICS.database_up.set(u8::from(shown.database_up));
    METRICS.frozen_offers.set(as_gauge(shown.frozen_offers as u64));
    METRICS.recorder.handle().render()
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
        serves_on("embedded", "sqlite");
        let text = text(Shown { engine_up: true, database_up: false, frozen_offers: 3 });
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
            assert_eq!(matches!(kind, Kind::Histogram(_)), name.ends_with("_seconds"), "{name}");
            assert!(name.starts_with("seckill_") && help.ends_with('.'), "{name}");
        }
    }

    #[test]
    fn a_reason_that_nobody_knows_is_another_one() {
        let count = |line: &str| {
            let text = text(Shown { engine_up: true, database_up: true, frozen_offers: 0 });
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
    }
}
