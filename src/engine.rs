//! The stock engine: Lua scripts that take and give back units atomically.
//!
//! Everything that touches stock is one of the scripts in `lua/`, run by name with KEYS and ARGV.
//! So an engine is small: it evaluates a script, and it tells whether it is well.
//!
//! **Invariant:** the engine proposes, the SQL row disposes. Nothing here is the last word on
//! who holds a unit; `recovery` rebuilds an engine from SQL whenever the two disagree.

use std::{fmt, sync::Arc};

use futures_util::future::BoxFuture;

pub mod batcher;
pub mod embedded;
pub mod events;
pub mod keys;
pub mod locks;
mod meter;
pub mod redis;
pub mod scripts;
pub mod segments;
pub mod sold_out;
pub mod verdict;

pub use meter::register as register_metrics;

/// One of the scripts in `lua/`, compiled into the binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// The file's name without `.lua`, such as `reserve`.
    pub name: &'static str,
    /// The whole text of the file.
    pub source: &'static str,
}

/// What a script replies: the subset of RESP that our scripts use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Nil,
    Int(i64),
    /// A bulk string or a status reply; ids stay bytes from end to end.
    Bulk(Vec<u8>),
    Array(Vec<Value>),
}

/// One evaluation: the engine passes `ARGV[1]`, the identity of the server that runs the script,
/// and then `args` from `ARGV[2]` on.
#[derive(Debug, Clone)]
pub struct Call {
    pub script: Script,
    /// All in one hash slot.
    pub keys: Arc<[String]>,
    pub args: Vec<Vec<u8>>,
}

/// Why a call has no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The server is well and refused the script before it wrote: no memory (OOM), or it can't save
    /// (MISCONF). Scripts that delete first still run, a release above all. Or it is the slot of
    /// these keys alone that is moving.
    #[error("the engine takes nothing new: {0}")]
    Full(String),
    /// The script certainly did not run: no connection, READONLY, LOADING, CLUSTERDOWN.
    #[error("the engine did not run the script: {0}")]
    NotRun(String),
    /// The server that has these keys is away, and those of other keys sell on: no reason to refuse
    /// everybody. The script may have run.
    #[error("the part of the engine that has these keys is away: {0}")]
    PartAway(String),
    /// The script may have run: a timeout, or a connection that broke while we waited.
    #[error("it is unknown whether the engine ran the script: {0}")]
    Unknown(String),
    /// The script raised an error: a key of another type, or a fault of ours.
    #[error("the script failed: {0}")]
    Script(String),
}

/// An engine that runs our scripts: [`redis::RedisEngine`] or [`embedded::EmbeddedEngine`].
pub trait Engine: Send + Sync + fmt::Debug {
    /// `redis` or `embedded`, for people.
    fn kind(&self) -> &'static str;

    /// Runs one script, start to finish, with nothing in between.
    ///
    /// A reply `{'frozen' or 'retry', epoch, revision, 'server'}` means that the keys were written
    /// under another server identity; an engine reads its identity again and, if it is another
    /// one by now, repeats the call once before it hands that reply on: only then is it a fact
    /// about the data and not about the connection.
    ///
    /// # Errors
    /// [`EngineError`] says whether the script may have run. A call is never sent twice unless
    /// it is certain that the first did not run.
    fn eval(&self, call: Call) -> BoxFuture<'_, Result<Value, EngineError>>;

    /// Reads the server's identity again and checks that it can be written to.
    ///
    /// # Errors
    /// As [`Engine::eval`]; bounded by the engine's own timeouts.
    fn probe(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// What the servers on this engine tell each other from now on.
    fn hear(&self) -> events::Hearing;

    /// How many servers of the engine are away while the others sell on.
    fn parts_away(&self) -> usize {
        0
    }

    /// Waits until something speaks for a probe at once: a part was lost, or there is another master.
    fn stirred(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}
