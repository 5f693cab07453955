//! The simulator: whole servers over one simulated engine and one SQLite, in one thread and in
//! simulated time, so that a seed is a run and the same seed is the same run.
//!
//! Everything between the API and the stores is the real code. What is simulated stands below it:
//! `engine` and `sql` lose calls, lose replies, are late, are away, and the engine forgets.
//! `run` is one run, as `plan` makes it of a seed: `buyers` and disasters, then `peace`, in which
//! everything must come to rest. `history` is what the buyers heard, and what they must never hear.
//!
//! Nothing of this is in the library; it is compiled for its own tests only.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::domain::TimeMs;

mod buyers;
mod engine;
mod history;
mod peace;
mod plan;
mod run;
pub(crate) mod sql;
mod tests;

use plan::Plan;

/// When every run begins: 2026-11-11.
const BEGIN: TimeMs = TimeMs(1_794_355_200_000);

thread_local! {
    static SIMULATED: RefCell<Option<Simulated>> = const { RefCell::new(None) };
}

/// Notes every panic of a run, also in tasks that nobody waits for.
fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let noted = SIMULATED.try_with(|simulated| {
                let mut simulated = simulated.try_borrow_mut().ok()?;
                simulated.as_mut()?.panics.push(panic.to_string());
                Some(())
            });
            if !matches!(noted, Ok(Some(()))) {
                before(panic);
            }
        }));
    });
}

/// What the run of this thread has in place of the machine's clock and randomness.
struct Simulated {
    begin: Instant,
    random: fastrand::Rng,
    panics: Vec<String>,
}

/// The simulated time, in a thread that simulates.
pub(crate) fn now() -> Option<TimeMs> {
    SIMULATED.with_borrow(|simulated| Some(BEGIN.plus(simulated.as_ref()?.begin.elapsed())))
}

/// A UUIDv7 of the simulated time, in a thread that simulates.
pub(crate) fn new_uuid() -> Option<Uuid> {
    let millis = u64::try_from(now()?.0).ok()?;
    SIMULATED.with_borrow_mut(|simulated| {
        let mut random = [0; 10];
        simulated.as_mut()?.random.fill(&mut random);
        Some(uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid())
    })
}

/// Ends the simulation of this thread when it is dropped.
struct InSimulation;

impl InSimulation {
    /// Begins it; inside of a runtime whose time is paused.
    fn begin(seed: u64) -> Self {
        fastrand::seed(seed);
        let random = fastrand::Rng::with_seed(seed ^ 0x5EED);
        SIMULATED.set(Some(Simulated { begin: Instant::now(), random, panics: Vec::new() }));
        note_panics();
        Self
    }
}

impl InSimulation {
    fn panics(&self) -> Vec<String> {
        SIMULATED.with_borrow(|simulated| {
            simulated.as_ref().map(|simulated| simulated.panics.clone()).unwrap_or_default()
        })
    }
}

impl Drop for InSimulation {
    fn drop(&mut self) {
        SIMULATED.set(None);
    }
}

/// Broken on purpose, to see that the simulator finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// A commit is answered as done, and rolled back.
    CommitNotKept,
    /// release.lua gives the units back twice.
    ReleaseTwice,
    /// What was taken counts as acknowledged although SQL does not have it yet.
    AcknowledgeAtOnce,
    /// release.lua is answered, and did not run.
    ReleaseNotRun,
    /// SQL takes rows of an older epoch.
    EpochNotCompared,
    /// A commit without an answer counts as failed: the units are given back.
    UnknownGuessed,
    /// A rebuild forgets one reservation.
    RebuildLosesOne,
}

/// What all parts of a run share: its plan, its dice, what happened, and what went wrong.
struct World {
    plan: Plan,
    broken: Option<Break>,
    dice: Mutex<fastrand::Rng>,
    /// No faults from here on.
    calm: AtomicBool,
    engine_away_until: Mutex<Option<Instant>>,
    sql_away_until: Mutex<Option<Instant>>,
    /// One for each call that is on its way although its caller gave up.
    late: Arc<()>,
    trace: Mutex<Trace>,
    violations: Mutex<Vec<String>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("seed", &self.plan.seed).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Trace {
    hash: u64,
    steps: u64,
    /// How often what happened: what no run ever walks through is not tested.
    seen: BTreeMap<String, u64>,
    /// Kept only when somebody will read them.
    lines: Option<Vec<String>>,
}

impl World {
    fn new(mut plan: Plan, broken: Option<Break>, verbose: bool) -> Self {
        if broken.is_some() {
            // What is broken shows only when something else goes wrong; that is not to be waited for.
            plan.rates.failover = 0.1;
            plan.rates.commit_lost_after = 0.1;
        }
        let dice = Mutex::new(fastrand::Rng::with_seed(plan.seed));
        let trace = Trace { lines: verbose.then(Vec::new), ..Trace::default() };
        Self {
            plan,
            broken,
            dice,
            calm: AtomicBool::new(false),
            engine_away_until: Mutex::default(),
            sql_away_until: Mutex::default(),
            late: Arc::default(),
            trace: Mutex::new(trace),
            violations: Mutex::default(),
        }
    }

    fn dice<T>(&self, roll: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
        roll(&mut self.dice.lock().unwrap())
    }

    /// Whether something happens that does so with this probability; never in peace.
    fn strikes(&self, probability: f64) -> bool {
        !self.is_calm() && probability > 0.0 && self.dice(fastrand::Rng::f64) < probability
    }

    fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    fn is_broken(&self, how: Break) -> bool {
        self.broken == Some(how)
    }

    /// Up to `most`, in milliseconds.
    fn span(&self, most_ms: u64) -> Duration {
        Duration::from_millis(self.dice(|dice| dice.u64(0..=most_ms)))
    }

    /// How long a call is on its way.
    fn delay(&self) -> Duration {
        let most_ms = self.plan.delay_ms;
        let slow = self.strikes(self.plan.rates.slow);
        self.span(if slow { 900 } else { most_ms })
    }

    /// Notes a step; the same seed gives the same steps.
    fn note(&self, step: impl FnOnce() -> String) {
        let at = now().unwrap_or_default().since(BEGIN);
        let line = format!("{:>8.3} {}", at.as_secs_f64(), step());
        let mut trace = self.trace.lock().unwrap();
        for byte in line.bytes() {
            trace.hash = (trace.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
        trace.steps += 1;
        if let Some(lines) = &mut trace.lines {
            lines.push(line);
        }
    }

    /// To be held while a call is on its way whose caller gave up.
    fn late(&self) -> Arc<()> {
        self.late.clone()
    }

    /// Whether nobody's calls are still on their way.
    fn all_arrived(&self) -> bool {
        Arc::strong_count(&self.late) == 1
    }

    /// Counts what happened.
    fn count(&self, what: impl Into<String>) {
        *self.trace.lock().unwrap().seen.entry(what.into()).or_default() += 1;
    }

    /// Notes that a promise was broken.
    fn violation(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(|| format!("VIOLATION {what}"));
        self.violations.lock().unwrap().push(what);
    }

    fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violation(what());
        }
    }

    fn is_away(until: &Mutex<Option<Instant>>) -> bool {
        until.lock().unwrap().is_some_and(|until| Instant::now() < until)
    }
}

/// One server's life. What it began ends with it, and nothing that it does later has an effect.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    id: u32,
    end: CancellationToken,
}

impl Life {
    fn new(id: u32) -> Self {
        Self { id, end: CancellationToken::new() }
    }

    /// The server dies here and now.
    fn end(&self, world: &World, where_: &str) {
        world.note(|| format!("{} dies: {where_}", self.id));
        world.count(format!("crash: {where_}"));
        self.end.cancel();
    }

    /// Waits; an error when the server dies meanwhile.
    async fn wait(&self, pause: Duration) -> Result<(), Dead> {
        if pause.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::select! {
                biased;
                () = self.end.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        if self.end.is_cancelled() { Err(Dead) } else { Ok(()) }
    }
}

/// The server died while it waited.
#[derive(Debug)]
struct Dead;

type Shared = Arc<World>;
