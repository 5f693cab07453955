//! The engine inside this process: the scripts of `lua/`, run by a Lua VM on keys in memory.
//!
//! It needs no server, and forgets everything when the process ends: its start is a rebuild from
//! SQL. It has exactly the Redis commands that our scripts use.
//!
//! **Invariant:** one lock is held from a script's first instruction to its last, so scripts are
//! atomic; nothing awaits under it. An evaluation takes some microseconds and runs on the
//! caller's thread.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use futures_util::future::BoxFuture;
use uuid::Uuid;

use self::{keyspace::Keyspace, lua::Vm};
use super::{Call, Engine, EngineError, Value};
use crate::domain::TimeMs;

mod keyspace;
mod lua;

pub use self::keyspace::{Dumped, DumpedContent};

/// Runs the scripts in this process, on keys in its memory.
pub struct EmbeddedEngine {
    /// Names this engine to the scripts; another instance never has the same.
    server: String,
    vm: Mutex<Vm>,
    /// Locked only while `vm` is.
    keys: Arc<Mutex<Keyspace>>,
}

impl fmt::Debug for EmbeddedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedEngine")
            .field("server", &self.server)
            .finish_non_exhaustive()
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
            server: Uuid::now_v7().to_string(),
            vm: Mutex::new(vm),
            keys,
        }
    }

    /// Everything the engine holds, for tests to compare.
    #[must_use]
    pub fn dump(&self) -> BTreeMap<String, Dumped> {
        let _vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.start(TimeMs::now().0);
        keys.dump()
    }

    fn run(&self, call: &Call) -> Result<Value, EngineError> {
        let Ok(mut vm) = self.vm.lock() else {
            // What that script left behind is anyone's guess.
            return Err(EngineError::NotRun(
                "an earlier script panicked; restart".to_owned(),
            ));
        };
        self.lock_keys().start(TimeMs::now().0);
        let reply = vm.run(call.script, &call.keys, &self.server, &call.args);
        let trash = self.lock_keys().take_trash();
        drop(vm);
        drop(trash);
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
        let poisoned = self.vm.is_poisoned();
        Box::pin(async move {
            match poisoned {
                false => Ok(()),
                true => Err(EngineError::NotRun(
                    "an earlier script panicked; restart".to_owned(),
                )),
            }
        })
    }
}
