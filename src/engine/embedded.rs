//! The engine inside this process: the scripts of `lua/`, run by a Lua VM on keys in memory.
//!
//! It needs no server, and forgets everything when the process ends: its start is a rebuild from
//! SQL. It has exactly the Redis commands that our scripts use.
//!
//! **Invariant:** one lock is held from a script's first instruction to its last, so scripts are
//! atomic; nothing awaits under it. An evaluation takes some microseconds and runs on the
//! caller's thread. Under a lease, no reply of a script is handed on that ended when the lease may
//! have run out: what this memory holds may be yesterday's.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use futures_util::{StreamExt, future::BoxFuture, stream};
use tokio::sync::broadcast;
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};

use self::{keyspace::Keyspace, lua::Vm};
use super::{
    Call, Engine, EngineError, Value,
    events::{Heard, Hearing},
};
use crate::domain::{TimeMs, new_uuid};

mod keyspace;
mod lua;

pub use self::keyspace::{Dumped, DumpedContent};

/// How many messages a slow listener may be behind.
const MESSAGES: usize = 1_024;
const NOT_HELD: &str = "the lease of the embedded engine ran out, and is not renewed yet";

/// Runs the scripts in this process, on keys in its memory.
pub struct EmbeddedEngine {
    /// Names this engine to the scripts; another instance never has the same.
    server: String,
    vm: Mutex<Vm>,
    /// Locked only while `vm` is.
    keys: Arc<Mutex<Keyspace>>,
    told: broadcast::Sender<Vec<u8>>,
    made: Instant,
    /// Until when it may answer, in microseconds since it was made.
    held_until_us: AtomicU64,
}

/// What an engine held at one moment.
#[cfg(test)]
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot(Keyspace);

impl fmt::Debug for EmbeddedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedEngine").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Default for EmbeddedEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl EmbeddedEngine {
    /// An empty engine with an identity of its own.
    ///
    /// # Panics
    /// When there is no memory for a Lua VM.
    #[must_use]
    pub fn new() -> Self {
        let keys = Arc::default();
        let vm = Vm::new(&keys).expect("the prelude is part of this binary and compiles");
        Self {
            server: new_uuid().to_string(),
            vm: Mutex::new(vm),
            keys,
            told: broadcast::Sender::new(MESSAGES),
            made: Instant::now(),
            held_until_us: AtomicU64::new(u64::MAX),
        }
    }

    /// An empty engine that answers until then, or until [`EmbeddedEngine::hold_until`] says more.
    #[must_use]
    pub fn held_until(until: Instant) -> Self {
        let engine = Self::new();
        engine.hold_until(until);
        engine
    }

    /// It is certain that no other engine answers for the same stock until then.
    pub fn hold_until(&self, until: Instant) {
        let us = until.saturating_duration_since(self.made).as_micros();
        self.held_until_us.store(u64::try_from(us).unwrap_or(u64::MAX), Ordering::Release);
    }

    fn is_held(&self) -> bool {
        let until_us = self.held_until_us.load(Ordering::Acquire);
        until_us == u64::MAX || self.made.elapsed().as_micros() < u128::from(until_us)
    }

    /// Everything the engine holds, for tests to compare.
    #[must_use]
    pub fn dump(&self) -> BTreeMap<String, Dumped> {
        let _vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.start(TimeMs::now().0);
        keys.dump()
    }

    /// What the engine holds, to be restored later.
    #[cfg(test)]
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot(self.lock_keys().clone())
    }

    /// An engine with an identity of its own that holds what another did.
    #[cfg(test)]
    pub(crate) fn restored(snapshot: &Snapshot) -> Self {
        let engine = Self::new();
        engine.restore(snapshot);
        engine
    }

    /// Holds from now on what it, or another, did then.
    #[cfg(test)]
    pub(crate) fn restore(&self, snapshot: &Snapshot) {
        *self.lock_keys() = snapshot.0.clone();
    }

    fn run(&self, call: &Call) -> Result<Value, EngineError> {
        if !self.is_held() {
            return Err(EngineError::NotRun(NOT_HELD.to_owned()));
        }
        let Ok(mut vm) = self.vm.lock() else {
            // What that script left behind is anyone's guess.
            return Err(EngineError::NotRun("an earlier script panicked; restart".to_owned()));
        };
        self.lock_keys().start(TimeMs::now().0);
        let reply = vm.run(call.script, &call.keys, &self.server, &call.args);
        let (trash, published) = {
            let mut keys = self.lock_keys();
            (keys.take_trash(), keys.take_published())
        };
        drop(vm);
        drop(trash);
        for message in published {
            // Nobody may be there to hear it.
            let _ = self.told.send(message.into());
        }
        // Only now: the process may have been held at any instruction before.
        if !self.is_held() {
            return Err(EngineError::Unknown(NOT_HELD.to_owned()));
        }
        reply.map_err(EngineError::Script)
    }

    fn lock_keys(&self) -> std::sync::MutexGuard<'_, Keyspace> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for EmbeddedEngine {
    fn kind(&self) -> &'static str {
        "embedded"
    }

    fn eval(&self, call: Call) -> BoxFuture<'_, Result<Value, EngineError>> {
        Box::pin(async move { self.run(&call) })
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        let well = match (self.vm.is_poisoned(), self.is_held()) {
            (true, _) => Err("an earlier script panicked; restart"),
            (false, false) => Err(NOT_HELD),
            (false, true) => Ok(()),
        };
        Box::pin(async move { well.map_err(|why| EngineError::NotRun(why.to_owned())) })
    }

    fn hear(&self) -> Hearing {
        let messages = BroadcastStream::new(self.told.subscribe()).map(|message| match message {
            Ok(message) => Heard::Message(message),
            Err(BroadcastStreamRecvError::Lagged(_)) => Heard::Gap,
        });
        stream::iter([Heard::Gap]).chain(messages).chain(stream::pending()).boxed()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::engine::{Script, scripts};

    fn call(script: Script, args: &[&str]) -> Call {
        let keys = ["stock", "buyers", "reservations", "released", "unacked", "meta", "transfers"];
        Call {
            script,
            keys: keys.iter().map(|key| format!("sk:{{a:b:0}}:{key}")).collect(),
            args: args.iter().map(|arg| arg.as_bytes().to_vec()).collect(),
        }
    }

    fn eval(engine: &EmbeddedEngine, script: Script, args: &[&str]) -> Result<Value, EngineError> {
        engine.eval(call(script, args)).now_or_never().expect("it never waits")
    }

    fn run(source: &'static str) -> Result<Value, EngineError> {
        eval(&EmbeddedEngine::new(), Script { name: "test", source }, &[])
    }

    fn refusal(source: &'static str) -> String {
        match run(source) {
            Err(EngineError::Script(text)) => text,
            other => panic!("{source}: {other:?}"),
        }
    }

    #[test]
    fn a_reservation_is_taken_found_and_given_back() {
        let engine = EmbeddedEngine::new();
        let word = |text: &str| Value::Bulk(text.as_bytes().to_vec());
        let written = eval(&engine, scripts::WARMUP, &["1", "5", "5", "4102444800000"]);
        assert_eq!(written, Ok(Value::Array(vec![word("written"), word("1")])));
        let request = ["1", "1", "1000", "0", "0", "ann", "r1", "2", "o1"];
        let taken = vec![
            word("ok"),
            word("1"),
            Value::Int(2),
            Value::Int(3),
            Value::Array(vec![word("taken"), Value::Int(1)]),
        ];
        assert_eq!(eval(&engine, scripts::RESERVE, &request), Ok(Value::Array(taken)));
        let released = vec![word("released"), word("1"), Value::Int(3), Value::Int(5)];
        let release = eval(&engine, scripts::RELEASE, &["1", "r1", "ann", "1"]);
        assert_eq!(release, Ok(Value::Array(released)));
    }

    #[test]
    fn a_held_process_does_not_answer_from_what_it_remembers() {
        let engine = EmbeddedEngine::new();
        eval(&engine, scripts::WARMUP, &["1", "5", "5", "4102444800000"]).unwrap();
        let request = ["1", "1", "1000", "0", "0", "ann", "r1", "2", "o1"];
        let before = eval(&engine, scripts::RESERVE, &request).unwrap();
        let dumped = engine.dump();

        engine.hold_until(Instant::now());
        let refused = eval(&engine, scripts::RESERVE, &request).unwrap_err();
        assert!(matches!(&refused, EngineError::NotRun(why) if why == NOT_HELD), "{refused}");
        assert!(engine.probe().now_or_never().unwrap().is_err());
        assert_eq!(engine.dump(), dumped, "and nothing changed");

        engine.hold_until(Instant::now() + Duration::from_secs(60));
        assert!(engine.probe().now_or_never().unwrap().is_ok());
        assert_ne!(before, eval(&engine, scripts::RESERVE, &request).unwrap(), "a replay");
    }

    /// The lease runs out in the middle of a script: what it did stays, and its reply is not heard.
    #[test]
    fn what_a_script_replies_after_the_lease_ran_out_is_unknown() {
        let slow = Script {
            name: "slow",
            source: "redis.call('SET', KEYS[1], '1')
                     local x = 0 for i = 1, 2000000 do x = x + 1 end return x",
        };
        let engine = EmbeddedEngine::held_until(Instant::now() + Duration::from_millis(2));
        let unknown = eval(&engine, slow, &[]).unwrap_err();
        assert!(matches!(&unknown, EngineError::Unknown(why) if why == NOT_HELD), "{unknown}");
        assert_eq!(engine.dump().len(), 1);
    }

    #[test]
    fn two_engines_never_have_the_same_identity() {
        let identity = Script { name: "identity", source: "return ARGV[1]" };
        let ask = || eval(&EmbeddedEngine::new(), identity, &[]).unwrap();
        assert_ne!(ask(), ask());
    }

    #[test]
    fn a_command_that_our_scripts_do_not_use_is_refused_by_name() {
        for (source, name) in [
            ("return redis.call('FLUSHALL')", "FLUSHALL"),
            ("return redis.call('expire', KEYS[1], 5)", "expire"),
            ("return redis.call('a-command-with-quite-a-long-name')", "quite-a-long-name"),
            ("return redis.call('SET', KEYS[1], 1, 'NX')", "SET with 'NX'"),
            ("return redis.call('ZADD', KEYS[1], 'GT', 1, 'm')", "ZADD with 'GT'"),
            ("return redis.call('PEXPIREAT', KEYS[1], 1, 'XX')", "PEXPIREAT with 'XX'"),
            ("return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 1, 'WITHSCORES')", "WITHSCORES"),
        ] {
            let text = refusal(source);
            assert!(text.contains("the embedded engine does not have"), "{text}");
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn a_script_reaches_nothing_but_its_keys() {
        for name in [
            "io",
            "os",
            "load",
            "loadstring",
            "loadfile",
            "dofile",
            "require",
            "package",
            "debug",
            "print",
            "collectgarbage",
            "coroutine",
            "getfenv",
            "setfenv",
            "getmetatable",
            "setmetatable",
            "rawset",
            "pcall",
            "_G",
        ] {
            // Leaked, as a script lives as long as the program.
            let source: &'static str = format!("return {name}").leak();
            assert!(refusal(source).contains("nonexistent global"), "{name}");
        }
        assert!(refusal("return math.random()").contains("attempt to call"));
        assert!(refusal("return ('x'):dump()").contains("attempt to call"));
    }

    #[test]
    fn a_script_leaves_nothing_behind() {
        for source in [
            "leak = 1",
            "redis = nil",
            "redis.call = nil",
            "string.format = nil",
            "table.leak = 1",
            "math.pi = 3",
        ] {
            assert!(refusal(source).contains("Attempt to modify a readonly table"), "{source}");
        }
    }

    #[test]
    fn a_script_that_never_ends_is_stopped() {
        let engine = EmbeddedEngine::new();
        let before = Instant::now();
        let stuck = Script { name: "stuck", source: "while true do end" };
        let stopped = eval(&engine, stuck, &[]).unwrap_err().to_string();
        assert!(stopped.contains("ran for too long"), "{stopped}");
        assert!(before.elapsed() < Duration::from_secs(20));
        assert!(eval(&engine, scripts::PING, &[]).is_ok(), "the next one runs");
    }

    #[test]
    fn the_longest_of_our_scripts_is_not_stopped() {
        let engine = EmbeddedEngine::new();
        eval(&engine, scripts::REBUILD_BEGIN, &["1", "1000", "4102444800000"]).unwrap();
        let mut chunk = vec!["1".to_owned(), "1".to_owned(), "1000".to_owned()];
        for n in 0..1000 {
            chunk.extend([format!("buyer-{n}"), format!("r-{n} 1 o-{n} 1000 0")]);
        }
        chunk.extend((0..1000).map(|n| format!("gone-{n}")));
        let chunk: Vec<_> = chunk.iter().map(String::as_str).collect();
        let loaded = eval(&engine, scripts::REBUILD_LOAD, &chunk).unwrap();
        let word = |text: &str| Value::Bulk(text.as_bytes().to_vec());
        assert_eq!(loaded, Value::Array(vec![word("loaded"), word("1")]));
        let dump = engine.dump();
        let DumpedContent::Set(marks) = &dump["sk:{a:b:0}:released"].content else { panic!() };
        assert_eq!(marks.len(), 1000);
    }

    #[test]
    fn a_key_is_gone_when_its_time_is_over() {
        let engine = EmbeddedEngine::new();
        let soon = (TimeMs::now().0 + 30).to_string();
        eval(&engine, scripts::WARMUP, &["1", "5", "5", &soon]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while !engine.dump().is_empty() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        let levels = eval(&engine, scripts::LEVELS, &[]).unwrap();
        let Value::Array(levels) = levels else { panic!("{levels:?}") };
        assert_eq!(levels[0], Value::Bulk(b"not_warmed".to_vec()));
    }

    #[test]
    fn a_whole_number_above_2_to_the_53_is_what_redis_makes_of_it() {
        let source = "redis.call('SET', KEYS[1], '9007199254740993') \
                      return redis.call('INCRBY', KEYS[1], 0)";
        assert_eq!(run(source), Ok(Value::Int(9_007_199_254_740_992)));
    }
}
