//! The SQL database: SQLite by default, PostgreSQL and MySQL/MariaDB by URL.
//!
//! **Promises:** a write transaction is READ COMMITTED on the servers and BEGIN IMMEDIATE
//! through one writer on SQLite. Statements and lock waits end by limits that the server keeps,
//! so no SQL future needs a timeout of ours. A connection goes back to the pool without an open
//! transaction, also when the future of [`Database::begin`] was dropped. No message holds a
//! password.
//!
//! SQLite in memory has one connection for everything: what reads through
//! [`Database::reader`] while it holds a transaction waits for itself.

mod fault;
mod lease;
mod location;
mod migrate;
mod rows;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sea_orm::{
    ConnAcquireErr, ConnectOptions, ConnectionTrait, DatabaseConnection, DatabaseTransaction,
    DbBackend, DbErr, RuntimeErr, SqliteTransactionMode, Statement, TransactionOptions,
    TransactionTrait,
    sqlx::{
        self, ConnectOptions as _, Connection as _, Executor as _,
        mysql::MySqlConnectOptions,
        postgres::PgConnectOptions,
        sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
    },
};
use serde::{Deserialize, Serialize, Serializer};
use tokio::time::Instant;

use crate::domain::TimeMs;

pub use fault::{SqlFault, classify};
pub use lease::{Acquired, Lease};
pub use rows::{ROWS_PER_STATEMENT, insert_ignore, lock_free_rows, lock_rows};

use location::Location;

/// A connection that was idle for this long is tried before it is handed out. Busier ones are
/// not: that would be one round trip per transaction.
const TRUSTED_WHILE_IDLE_FOR: Duration = Duration::from_secs(1);

/// Which database, and the limits that keep every wait short.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseSettings {
    /// `sqlite://path`, `sqlite::memory:`, `postgres://user@host/name` or `mysql://user@host/name`.
    #[serde(serialize_with = "without_password")]
    pub url: String,
    /// The most connections of one server process; SQLite: readers, besides the one writer.
    pub max_connections: u32,
    /// How long to wait at start for a database that does not answer yet.
    pub connect_timeout_ms: u64,
    /// How long to wait for a connection of the pool.
    pub acquire_timeout_ms: u64,
    /// When the server gives up on a statement; SQLite has no such limit.
    pub statement_timeout_ms: u64,
    /// When the server gives up waiting for a lock; MySQL counts it in whole seconds.
    pub lock_timeout_ms: u64,
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self {
            url: "sqlite://data/seckill.db".to_owned(),
            max_connections: 10,
            connect_timeout_ms: 5_000,
            acquire_timeout_ms: 3_000,
            statement_timeout_ms: 5_000,
            lock_timeout_ms: 3_000,
        }
    }
}

impl fmt::Debug for DatabaseSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseSettings")
            .field("url", &self.masked_url())
            .field("max_connections", &self.max_connections)
            .field("connect_timeout_ms", &self.connect_timeout_ms)
            .field("acquire_timeout_ms", &self.acquire_timeout_ms)
            .field("statement_timeout_ms", &self.statement_timeout_ms)
            .field("lock_timeout_ms", &self.lock_timeout_ms)
            .finish()
    }
}

impl DatabaseSettings {
    /// The default limits on another database.
    #[must_use]
    pub fn at(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            ..Self::default()
        }
    }

    /// The URL with `***` in place of its password; nothing of a URL that can't be read.
    #[must_use]
    pub fn masked_url(&self) -> String {
        location::masked(&self.url)
    }

    /// What is wrong with the settings, as (key, sentence); nothing is opened.
    #[must_use]
    pub fn violations(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        if let Err(reason) = Location::parse(&self.url) {
            found.push(("url", reason));
        }
        if !(1..=1_000).contains(&self.max_connections) {
            found.push(("max_connections", "must be 1 to 1000".to_owned()));
        }
        for (key, value_ms) in [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("acquire_timeout_ms", self.acquire_timeout_ms),
            ("statement_timeout_ms", self.statement_timeout_ms),
            ("lock_timeout_ms", self.lock_timeout_ms),
        ] {
            if !(1..=3_600_000).contains(&value_ms) {
                found.push((key, "must be 1 to 3600000 (one hour)".to_owned()));
            }
        }
        found
    }
}

fn without_password<S: Serializer>(url: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&location::masked(url))
}

/// Why a database could not be opened, and what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("database.url {reason}")]
    InvalidUrl { reason: String },
    #[error("no database at {at}: {reason}")]
    Unreachable { at: String, reason: String },
    #[error("the database file {path} can't be written: {reason}")]
    Unwritable { path: String, reason: String },
}

/// Which SQL is spoken; MariaDB counts as MySQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    Sqlite,
    Postgres,
    MySql,
}

impl Backend {
    /// What this connection or transaction speaks.
    pub fn of<C: ConnectionTrait>(db: &C) -> Self {
        let backend = db.get_database_backend();
        if backend == DbBackend::Postgres {
            Self::Postgres
        } else if backend == DbBackend::MySql {
            Self::MySql
        } else {
            Self::Sqlite
        }
    }
}

/// An open database; a clone is the same one.
#[derive(Debug, Clone)]
pub struct Database {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub enum SqlFault {
    RolledBack,
    Data,
    Away,
    Unknown,
}
pub fn classify(_: &sea_orm::DbErr) -> SqlFault {
    SqlFault::Unknown
}
