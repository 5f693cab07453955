//! The simulated engine: the real scripts on the embedded engine, as a server that several others
//! reach over connections that break.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};

use super::{Break, Dead, Life, Shared, World};
use crate::engine::{
    Call, Engine, EngineError, Script, Value,
    embedded::{EmbeddedEngine, Snapshot},
    events::Hearing,
    scripts,
};

/// How many writes a failover may lose.
const REMEMBERED: usize = 32;
/// How late a call may run whose caller gave up.
const LATEST_MS: u64 = 4_000;

/// The one engine of a run.
pub(super) struct Store {
    world: Shared,
    engine: Mutex<Arc<EmbeddedEngine>>,
    /// Raised when another server takes over: calls that were on their way to the old one are lost.
    generation: AtomicU64,
    /// What was held before each of the last writes, newest last.
    before: Mutex<VecDeque<Snapshot>>,
}

impl Store {
    pub(super) fn new(world: Shared) -> Self {
        Self {
            world,
            engine: Mutex::new(Arc::new(EmbeddedEngine::new())),
            generation: AtomicU64::new(0),
            before: Mutex::default(),
        }
    }

    fn engine(&self) -> Arc<EmbeddedEngine> {
        self.engine.lock().unwrap().clone()
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// A server takes over that has another identity, and lacks the last `lost` writes.
    pub(super) fn fail_over(&self, lost: usize) {
        let mut before = self.before.lock().unwrap();
        let mut held = self.engine().snapshot();
        for _ in 0..lost {
            if let Some(earlier) = before.pop_back() {
                held = earlier;
            }
        }
        *self.engine.lock().unwrap() = Arc::new(EmbeddedEngine::restored(&held));
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets everything, and stays the same server.
    pub(super) fn flush(&self) {
        self.remember();
        self.engine().restore(&Snapshot::default());
    }

    fn remember(&self) {
        let mut before = self.before.lock().unwrap();
        if before.len() == REMEMBERED {
            before.pop_front();
        }
        before.push_back(self.engine().snapshot());
    }

    /// Runs a script that arrived.
    ///
    /// Answers also how much longer than usual the reply is on its way.
    fn run(&self, call: Call) -> (Result<Value, EngineError>, Duration) {
        let reads = [
            scripts::LEVELS,
            scripts::FIND,
            scripts::UNACKED,
            scripts::HOLDINGS,
            scripts::MEMBERS,
            scripts::ASIDES,
        ];
        if !reads.contains(&call.script) && ![scripts::PING, scripts::TELL].contains(&call.script) {
            self.remember();
        }
        let reply = self.eval(call.clone());
        self.break_after(&call, &reply);
        let held_up = self.strike_after(&call, &reply);
        (reply, held_up)
    }

    /// The worst moment for an engine to forget is right after it gave out units, while the reply
    /// is still on its way.
    fn strike_after(&self, call: &Call, reply: &Result<Value, EngineError>) -> Duration {
        let world = &self.world;
        world.count(format!("{} {}", call.script.name, status(reply)));
        if call.script != scripts::RESERVE || !shown(reply).contains("[taken") {
            return Duration::ZERO;
        }
        if world.strikes(world.plan.rates.failover) {
            let lost = world.dice(|dice| dice.usize(0..4));
            world.note(|| format!("failover, {lost} writes back"));
            self.fail_over(lost);
        } else if world.strikes(world.plan.rates.flush) {
            world.note(|| "flush".to_owned());
            self.flush();
        } else {
            return Duration::ZERO;
        }
        world.span(1_000)
    }

    fn eval(&self, call: Call) -> Result<Value, EngineError> {
        if self.world.is_broken(Break::ReleaseNotRun) && call.script == scripts::RELEASE {
            let levels =
                self.evaluate(Call { script: scripts::LEVELS, args: Vec::new(), ..call })?;
            return Ok(match levels {
                Value::Array(mut items) if items[0] == word("ok") => {
                    items.truncate(4);
                    items[0] = word("not_reserved");
                    Value::Array(items)
                }
                refusal @ (Value::Nil | Value::Int(_) | Value::Bulk(_) | Value::Array(_)) => {
                    refusal
                }
            });
        }
        if self.world.is_broken(Break::RebuildLosesOne) && call.script == scripts::REBUILD_LOAD {
            return self.evaluate(without_the_first(call));
        }
        self.evaluate(call)
    }

    fn evaluate(&self, call: Call) -> Result<Value, EngineError> {
        self.engine().eval(call).now_or_never().expect("the embedded engine never waits")
    }

    /// What a broken protocol would do behind this call.
    fn break_after(&self, call: &Call, reply: &Result<Value, EngineError>) {
        let Ok(Value::Array(items)) = reply else { return };
        if self.world.is_broken(Break::ReleaseTwice)
            && call.script == scripts::RELEASE
            && items[0] == word("released")
        {
            self.meddle(call, "redis.call('INCRBY', KEYS[1], 1) return {'ok'}");
        }
        if self.world.is_broken(Break::AcknowledgeAtOnce) && call.script == scripts::RESERVE {
            self.meddle(call, "redis.call('UNLINK', KEYS[5]) return {'ok'}");
        }
    }

    /// Gives back whatever is not acknowledged, as one would who takes unknown for failed.
    pub(super) fn give_back_unacknowledged(&self, keys: &Arc<[String]>) {
        const GUESS: &str = "
            for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', '+inf')) do
              local record = redis.call('HGET', KEYS[3], member)
              redis.call('HDEL', KEYS[3], member)
              redis.call('SREM', KEYS[2], member)
              redis.call('ZREM', KEYS[5], member)
              redis.call('INCRBY', KEYS[1], tonumber(string.match(record, '^%S+ (%d+)')))
            end
            return {'ok'}";
        let call = Call { script: scripts::PING, keys: keys.clone(), args: Vec::new() };
        self.meddle(&call, GUESS);
    }

    fn meddle(&self, call: &Call, source: &'static str) {
        let script = Script { name: "meddle", source };
        let meddled = self.evaluate(Call { script, keys: call.keys.clone(), args: Vec::new() });
        self.world.note(|| format!("engine meddled with: {meddled:?}"));
    }
}

fn word(text: &str) -> Value {
    Value::Bulk(text.as_bytes().to_vec())
}

/// A chunk of a rebuild without its first reservation.
fn without_the_first(mut call: Call) -> Call {
    let held = String::from_utf8_lossy(&call.args[2]).parse().unwrap_or(0u32);
    if held > 0 {
        call.args[2] = (held - 1).to_string().into_bytes();
        call.args.drain(3..5);
    }
    call
}

/// One server's connection to the engine.
pub(super) struct Line {
    store: Arc<Store>,
    life: Life,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("life", &self.life).finish_non_exhaustive()
    }
}

/// What becomes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Fine,
    NotRun,
    LostBefore,
    LostAfter,
    Late,
    Full,
    Script,
}

impl Line {
    pub(super) fn new(store: Arc<Store>, life: Life) -> Self {
        Self { store, life }
    }

    fn world(&self) -> &World {
        &self.store.world
    }

    fn fate(&self, script: Script) -> Fate {
        let (world, rates) = (self.world(), &self.world().plan.rates);
        // What deletes first runs without memory, and so does what only reads.
        let adds = [scripts::RESERVE, scripts::WARMUP, scripts::REBUILD_LOAD].contains(&script);
        for (probability, fate) in [
            (rates.engine_not_run, Fate::NotRun),
            (rates.engine_lost_before, Fate::LostBefore),
            (rates.engine_lost_after, Fate::LostAfter),
            (rates.engine_late, Fate::Late),
            (if adds { rates.engine_full } else { 0.0 }, Fate::Full),
            (rates.engine_script, Fate::Script),
        ] {
            if world.strikes(probability) {
                return fate;
            }
        }
        Fate::Fine
    }

    async fn call(&self, call: Call) -> Result<Value, EngineError> {
        let (id, name) = (self.life.id, call.script.name);
        let sent_to = self.store.generation();
        let dead = |Dead| EngineError::Unknown("simulated: this server is dead".to_owned());
        if self.life.end.is_cancelled() {
            return Err(dead(Dead));
        }
        let fate = self.fate(call.script);
        if fate != Fate::Fine {
            self.world().count(format!("engine {fate:?}"));
        }
        let unknown = |why: &str| EngineError::Unknown(format!("simulated: {why}"));
        if self.world().strikes(self.world().plan.rates.crash) {
            self.life.end(self.world(), name);
        }
        self.life.wait(self.world().delay()).await.map_err(dead)?;
        if World::is_away(&self.world().engine_away_until) {
            self.world().note(|| format!("{id} {name}: the engine is away"));
            return Err(EngineError::NotRun("simulated: away".to_owned()));
        }
        match fate {
            Fate::NotRun => {
                self.world().note(|| format!("{id} {name}: not run"));
                return Err(EngineError::NotRun("simulated".to_owned()));
            }
            Fate::Full => return Err(EngineError::Full("simulated".to_owned())),
            Fate::Script => {
                self.world().note(|| format!("{id} {name}: script error"));
                return Err(EngineError::Script("simulated".to_owned()));
            }
            Fate::LostBefore => {
                self.world().note(|| format!("{id} {name}: lost"));
                return Err(unknown("lost"));
            }
            Fate::Late => {
                self.world().note(|| format!("{id} {name}: late"));
                self.run_late(call, sent_to);
                return Err(unknown("no answer in time"));
            }
            Fate::Fine | Fate::LostAfter => {}
        }
        if self.store.generation() != sent_to {
            return Err(unknown("the server is gone"));
        }
        let (args, script) = (call.args.clone(), call.script);
        let (reply, held_up) = self.store.run(call);
        self.world().note(|| match &reply {
            // They come in no order.
            Ok(Value::Array(items)) if script == scripts::HOLDINGS => {
                format!("{id} {name} -> {} words", items.len())
            }
            reply => format!("{id} {name} {} -> {}", words(&args), shown(reply)),
        });
        if self.world().strikes(self.world().plan.rates.crash) {
            self.life.end(self.world(), &format!("after {name}"));
        }
        self.life.wait(self.world().delay() + held_up).await.map_err(dead)?;
        if fate == Fate::LostAfter {
            self.world().note(|| format!("{id} {name}: reply lost"));
            return Err(unknown("the reply is lost"));
        }
        reply
    }

    /// The caller has given up; the call is still on its way.
    fn run_late(&self, call: Call, sent_to: u64) {
        let (store, id) = (self.store.clone(), self.life.id);
        let pause = Duration::from_millis(1) + store.world.span(LATEST_MS);
        let late = store.world.late();
        #[allow(clippy::disallowed_methods, reason = "it belongs to nobody any more")]
        tokio::spawn(async move {
            let _late = late;
            tokio::time::sleep(pause).await;
            if store.generation() == sent_to {
                let (name, args) = (call.script.name, words(&call.args));
                let (reply, _) = store.run(call);
                store.world.note(|| format!("{id} {name} {args}, late -> {}", shown(&reply)));
            }
        });
    }
}

impl Engine for Line {
    fn kind(&self) -> &'static str {
        "simulated"
    }

    fn eval(&self, call: Call) -> BoxFuture<'_, Result<Value, EngineError>> {
        Box::pin(self.call(call))
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        let call = Call { script: scripts::PING, keys: Arc::from([]), args: Vec::new() };
        Box::pin(async move { self.call(call).await.map(|_| ()) })
    }

    /// After a failover nobody hears anything any more.
    fn hear(&self) -> Hearing {
        self.store.engine().hear()
    }
}

fn words(args: &[Vec<u8>]) -> String {
    let words: Vec<_> = args.iter().map(|arg| String::from_utf8_lossy(arg)).collect();
    words.join(" ")
}

/// The first words of a reply: how the script ended, and why it refused.
fn status(reply: &Result<Value, EngineError>) -> String {
    match reply {
        Ok(Value::Array(items)) => match (&items[0], items.get(3)) {
            (Value::Bulk(first), Some(why @ Value::Bulk(_)))
                if first == b"frozen" || first == b"retry" =>
            {
                format!("{} {}", shown_value(&items[0]), shown_value(why))
            }
            (first, _) => shown_value(first),
        },
        Ok(_) => "odd".to_owned(),
        Err(_) => "error".to_owned(),
    }
}

fn shown(reply: &Result<Value, EngineError>) -> String {
    match reply {
        Ok(reply) => shown_value(reply),
        Err(error) => error.to_string(),
    }
}

fn shown_value(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Bulk(text) => String::from_utf8_lossy(text).into_owned(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(shown_value).collect::<Vec<_>>().join(" "))
        }
    }
}
