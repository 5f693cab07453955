//! The SQL database: SQLite by default, PostgreSQL and MySQL/MariaDB by URL.
//!
//! **Promises:** a write transaction is READ COMMITTED on the servers and BEGIN IMMEDIATE
//! through one writer on SQLite. Statements and lock waits end by limits that the server keeps,
//! so no SQL future needs a timeout of ours, but where nobody answers at all (`pools`). A connection goes back to the pool without an open
//! transaction, also when the future of [`Database::begin`] was dropped. No message holds a
//! password.
//!
//! SQLite in memory has one connection for everything: what reads through
//! [`Database::reader`] while it holds a transaction waits for itself.

mod capacity;
mod connection;
mod fault;
mod finish;
mod lease;
mod location;
mod migrate;
mod pools;
mod rows;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use sea_orm::{
    ConnAcquireErr, ConnectOptions, ConnectionTrait, DatabaseConnection, DbBackend, DbErr,
    RuntimeErr, SqliteTransactionMode, Statement, TransactionOptions,
    sqlx::{
        self, ConnectOptions as _, Connection as _, Executor as _,
        mysql::MySqlConnectOptions,
        postgres::PgConnectOptions,
        sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous},
    },
};
use serde::{Deserialize, Serialize, Serializer};
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    domain::{Clock, TimeMs},
    metrics::{self, Waited},
};

pub use capacity::Capacity;
pub use connection::{Connection, Link, Transaction};
pub use fault::{SqlFault, classify, is_outage, repeat};
pub use finish::finish;
pub use lease::{Acquired, Lease};
pub use pools::{OpenTransaction, Pool};
pub use rows::{
    BYTES_PER_STATEMENT, ROWS_PER_STATEMENT, column, insert_ignore, is_among, lock_free_rows,
    lock_rows,
};

use location::Location;
use pools::{Pools, Side};

/// A connection that was idle for this long is tried before it is handed out. Busier ones are
/// not: that would be one round trip per transaction.
const TRUSTED_WHILE_IDLE_FOR: Duration = Duration::from_secs(1);

/// Not even a machine that is short of time lets a transaction of ours wait for so long.
const SHORTEST_IDLE_LIMIT_MS: u64 = 3_000;

/// Which database, and the limits that keep every wait short.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseSettings {
    /// `sqlite://path`, `sqlite::memory:`, `postgres://user@host/name` or `mysql://user@host/name`.
    #[serde(serialize_with = "without_password")]
    pub url: String,
    /// The most connections of one server process, beside the one of its probe; SQLite: readers,
    /// beside the one writer.
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
        Self { url: url.to_owned(), ..Self::default() }
    }

    /// The URL with `***` in place of its password; nothing of a URL that can't be read.
    #[must_use]
    pub fn masked_url(&self) -> String {
        location::masked(&self.url)
    }

    /// The SQLite file that [`Database::open`] would make, if it is not there yet.
    #[must_use]
    pub fn file_to_make(&self) -> Option<PathBuf> {
        match Location::parse(&self.url) {
            Ok(Location::File(path)) if !path.exists() => Some(path),
            Ok(
                Location::File(_) | Location::Memory | Location::Postgres(_) | Location::MySql(_),
            )
            | Err(_) => None,
        }
    }

    /// When the server ends a transaction whose client says nothing: one that is gone without a word
    /// would keep its locks for ever. Ours never think for so long.
    fn idle_limit_ms(&self) -> u64 {
        self.lock_timeout_ms.max(SHORTEST_IDLE_LIMIT_MS)
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
    #[error(
        "the database file {path} is locked: another process writes to it, and did not end within \
         {waited_ms} ms (database.lock_timeout_ms); find it with `fuser {path}`, or try again"
    )]
    Locked { path: String, waited_ms: u64 },
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

    /// For people and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::MySql => "mysql",
        }
    }
}

/// An open database; a clone is the same one.
#[derive(Debug, Clone)]
pub struct Database {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    backend: Backend,
    reader: Connection,
    writer: Connection,
    /// Nobody else uses it, so that its silence tells something.
    probe: Connection,
    pools: Option<Pools>,
    /// The turn of groups, on SQLite.
    groups: Option<Arc<Semaphore>>,
    location: Location,
    settings: DatabaseSettings,
    clock: Clock,
}

impl Database {
    /// Opens the database. The schema is not looked at; see [`Database::migrate_up`].
    ///
    /// The folder of a SQLite file is created when the folder around it exists.
    ///
    /// # Errors
    /// [`OpenError`]: one line that says what to change.
    pub async fn open(settings: &DatabaseSettings) -> Result<Self, OpenError> {
        let location =
            Location::parse(&settings.url).map_err(|reason| OpenError::InvalidUrl { reason })?;
        if let Location::File(path) = &location {
            location::prepare_folder(path).map_err(|reason| OpenError::Unwritable {
                path: path.display().to_string(),
                reason,
            })?;
        }
        probe(&location, settings).await?;
        let (writer, reader) = match &location {
            Location::Memory => {
                let only = connect(memory_pool(settings)).await.map_err(|e| at(&location, &e))?;
                (only.clone(), only)
            }
            Location::File(path) => {
                let writer = connect(file_pool(path, settings, false));
                let writer = writer.await.map_err(|e| at(&location, &e))?;
                let reader = connect(file_pool(path, settings, true));
                (writer, reader.await.map_err(|e| at(&location, &e))?)
            }
            Location::Postgres(url) | Location::MySql(url) => {
                let pool = connect(server_pool(url.as_str(), settings));
                let pool = pool.await.map_err(|e| at(&location, &e))?;
                (pool.clone(), pool)
            }
        };
        let backend = location.backend();
        let pools = Pools::new(&location, settings, reader, writer).await;
        let pools = pools.map_err(|error| at(&location, &error))?;
        let database = Self {
            inner: Arc::new(Inner {
                backend,
                reader: pools.pool(Side::Reader).into(),
                writer: pools.pool(Side::Writer).into(),
                probe: pools.pool(Side::Probe).into(),
                pools: Some(pools),
                groups: (backend == Backend::Sqlite).then(|| Arc::new(Semaphore::new(1))),
                location,
                settings: settings.clone(),
                clock: Clock::default(),
            }),
        };
        database.read_clock().await.map_err(|e| at(&database.inner.location, &e))?;
        Ok(database)
    }

    /// The simulator's database, as one of its servers reaches it.
    #[cfg(test)]
    pub(crate) fn simulated(line: &crate::simulator::sql::Line) -> Self {
        let inner = Inner {
            backend: Backend::Sqlite,
            reader: Connection::simulated(line.clone()),
            writer: Connection::simulated(line.clone()),
            probe: Connection::simulated(line.clone()),
            pools: None,
            groups: None,
            location: Location::Memory,
            settings: DatabaseSettings::default(),
            clock: Clock::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    #[must_use]
    pub fn backend(&self) -> Backend {
        self.inner.backend
    }

    /// For statements outside of a transaction, reads above all: on SQLite a pool that can't
    /// write. Transactions begin with [`Database::begin`] only.
    #[must_use]
    pub fn reader(&self) -> &Connection {
        &self.inner.reader
    }

    /// Begins a write transaction.
    ///
    /// A connection that turns out to be dead is replaced: a BEGIN that failed kept nothing. It
    /// runs in a task of its own, because with sqlx 0.9.0 a BEGIN dropped half-way leaves its
    /// connection inside a transaction (sqlx#4385): a caller that goes away drops the finished
    /// transaction instead, which rolls back.
    ///
    /// After a statement that failed, only roll back (or go back to a savepoint): PostgreSQL
    /// answers the COMMIT of a failed transaction by rolling it back, and sqlx calls that fine.
    ///
    /// # Errors
    /// [`classify`] calls them [`SqlFault::Away`], or on SQLite [`SqlFault::RolledBack`] when
    /// another process kept its lock for too long. Nothing was kept.
    pub async fn begin(&self) -> Result<Transaction, DbErr> {
        self.begin_on(Side::Writer, false).await
    }

    /// As [`Database::begin`], for what works on many rows. On SQLite, where one transaction at a
    /// time writes, one such group waits with all others for its turn, and the next group behind
    /// it: whoever changes a row alone waits for one group at most.
    ///
    /// # Errors
    /// As [`Database::begin`].
    pub async fn begin_group(&self) -> Result<Transaction, DbErr> {
        self.begin_on(Side::Writer, true).await
    }

    async fn begin_on(&self, side: Side, is_group: bool) -> Result<Transaction, DbErr> {
        let inner = Arc::clone(&self.inner);
        #[allow(clippy::disallowed_methods, reason = "it must outlive the caller; see above")]
        let begun = tokio::spawn(async move {
            let asked = Instant::now();
            let turn = match (&inner.groups, is_group) {
                (Some(groups), true) => groups.clone().acquire_owned().await.ok(),
                (Some(_), false) | (None, _) => None,
            };
            let begun = inner.begin(side).await;
            if side != Side::Probe {
                metrics::waited(Waited::Database, asked.elapsed());
            }
            Ok(begun?.with_turn(turn))
        });
        match begun.await {
            Ok(begun) => begun,
            Err(stopped) => match stopped.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down.
                Err(_) => Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed)),
            },
        }
    }

    /// The database's clock; SQLite has that of this machine.
    ///
    /// # Errors
    /// Those of any read.
    pub async fn now(&self) -> Result<TimeMs, DbErr> {
        now_on(&self.inner.reader).await
    }

    /// For single statements that write, outside of a transaction.
    #[must_use]
    pub fn writer(&self) -> &Connection {
        &self.inner.writer
    }

    /// The database's clock as far as this process knows it, without asking.
    #[must_use]
    pub fn clock(&self) -> TimeMs {
        self.inner.clock.now()
    }

    /// That clock itself, for who has no database at hand.
    #[must_use]
    pub fn shared_clock(&self) -> Clock {
        self.inner.clock.clone()
    }

    /// Asks for the database's clock and keeps its distance to this machine's, for
    /// [`Database::clock`]. Also the smallest question that shows whether the database answers:
    /// it has a connection of its own, and waits for nobody.
    ///
    /// # Errors
    /// Those of any read.
    pub async fn read_clock(&self) -> Result<(), DbErr> {
        let before = TimeMs::now();
        let there = now_on(&self.inner.probe).await?;
        let after = TimeMs::now();
        let here = before.0 + (after.0 - before.0) / 2;
        self.inner.clock.set_ahead(there.0 - here);
        Ok(())
    }

    /// Whether a transaction that writes can be committed: a full disk or a standby answers reads.
    ///
    /// # Errors
    /// Those of any transaction.
    pub async fn try_write(&self) -> Result<(), DbErr> {
        let transaction = self.begin_on(Side::Probe, false).await?;
        match lease::acquire(transaction, "write_probe", "", Duration::ZERO).await? {
            Acquired::Granted(_) | Acquired::Held { .. } => Ok(()),
        }
    }

    /// Leaves every connection to itself and takes new ones: the database does not answer on those,
    /// and says nothing. What waits for an answer fails, with an unknown result. SQLite is never
    /// given up.
    pub async fn give_up(&self) {
        if let Some(pools) = &self.inner.pools {
            pools.give_up().await;
        }
    }

    /// Closes every connection, once those in use have come back.
    ///
    /// # Errors
    /// None that is known.
    pub async fn close(&self) -> Result<(), DbErr> {
        self.inner.probe.close().await?;
        self.inner.reader.close().await?;
        self.inner.writer.close().await
    }
}

/// The database's clock, asked through this connection or transaction: the time of the question,
/// not of the transaction's begin.
///
/// # Errors
/// Those of any statement.
pub async fn now_on<C: ConnectionTrait>(db: &C) -> Result<TimeMs, DbErr> {
    let sql = match Backend::of(db) {
        Backend::Sqlite => return Ok(TimeMs::now()),
        Backend::Postgres => "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint",
        // sqlx sets the time zone of each session to UTC, so that no hour comes twice.
        Backend::MySql => "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
    };
    let row = db.query_one_raw(Statement::from_string(db.get_database_backend(), sql)).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound("the clock".to_owned()))?;
    Ok(TimeMs(row.try_get_by_index(0)?))
}

impl Inner {
    async fn begin(&self, side: Side) -> Result<Transaction, DbErr> {
        let connection = match side {
            Side::Reader => &self.reader,
            Side::Writer => &self.writer,
            Side::Probe => &self.probe,
        };
        let sqlite_transaction_mode = match self.backend {
            Backend::Sqlite => Some(SqliteTransactionMode::Immediate),
            Backend::Postgres | Backend::MySql => None,
        };
        let options = TransactionOptions { sqlite_transaction_mode, ..Default::default() };
        // After a restart of the database every connection of the pool may be dead.
        let mut left = self.settings.max_connections;
        loop {
            match connection.begin(options).await {
                Err(DbErr::Query(RuntimeErr::SqlxError(cause))) if fault::is_lost(&cause) => {
                    if left == 0 {
                        return Err(DbErr::Conn(RuntimeErr::SqlxError(cause)));
                    }
                    left -= 1;
                }
                begun => return begun,
            }
        }
    }
}

async fn connect(options: ConnectOptions) -> Result<DatabaseConnection, DbErr> {
    sea_orm::Database::connect(options).await
}

/// What holds for every pool.
fn pool(url: &str, settings: &DatabaseSettings) -> ConnectOptions {
    let mut options = ConnectOptions::new(url);
    options
        .max_connections(settings.max_connections)
        .acquire_timeout(Duration::from_millis(settings.acquire_timeout_ms))
        .test_before_acquire_if_idle_for(TRUSTED_WHILE_IDLE_FOR)
        .sqlx_logging(false)
        .record_stmt_in_spans(false);
    options
}

fn memory_pool(settings: &DatabaseSettings) -> ConnectOptions {
    let mut options = pool("sqlite::memory:", settings);
    // One connection, and for ever: the data is gone with it.
    options.max_connections(1).idle_timeout(None).max_lifetime(None);
    options.map_sqlx_sqlite_opts(|sqlite| sqlite.foreign_keys(true));
    options
}

fn file_pool(path: &std::path::Path, settings: &DatabaseSettings, reads: bool) -> ConnectOptions {
    // The path goes in below: in a URL it would have to be escaped.
    let mut options = pool("sqlite::memory:", settings);
    options.idle_timeout(None).max_lifetime(None);
    let query_only = if reads { "ON" } else { "OFF" };
    if !reads {
        options.max_connections(1);
    }
    let sqlite = sqlite_options(path, settings).pragma("query_only", query_only);
    options.map_sqlx_sqlite_opts(move |_| sqlite.clone().disable_statement_logging());
    options.map_sqlx_sqlite_pool_opts(|pool| pool.after_release(|c, _| Box::pin(is_at_rest(c))));
    options
}

/// Whether a connection that comes back has no transaction; one that has is closed.
///
/// On a full disk, or when the file can't be written, SQLite itself rolls back, and then refuses
/// ROLLBACK; sqlx 0.9.0 counts that transaction as open ever after. What is begun next would be a
/// savepoint, and once one of those is rolled back the connection never leaves its transaction:
/// each COMMIT succeeds, and nothing is kept.
async fn is_at_rest(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    // Behind the rollback of a transaction that was dropped, which is done in the background.
    connection.ping().await?;
    Ok(!connection.is_in_transaction())
}

fn sqlite_options(path: &std::path::Path, settings: &DatabaseSettings) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(Duration::from_millis(settings.lock_timeout_ms))
}

fn server_pool(url: &str, settings: &DatabaseSettings) -> ConnectOptions {
    let mut options = pool(url, settings);
    let limits = settings.clone();
    options.map_sqlx_postgres_opts(move |postgres| postgres_session(postgres, &limits));
    let session = mysql_session(settings);
    options.map_sqlx_mysql_pool_opts(move |pool| {
        let session = session.clone();
        pool.after_connect(move |connection, _| {
            let session = session.clone();
            Box::pin(async move {
                connection.execute(sqlx::AssertSqlSafe(session)).await?;
                Ok(())
            })
        })
    });
    options
}

/// What each session of PostgreSQL is told: the limits, and how to plan. What it knows of the outbox
/// was true before the sale that fills it, so no plan is kept, and none rests on how many rows there
/// may be: every statement has its index, and what is due is read in the order of it. Without this a
/// batch goes over all rows that wait, or all that there are, several times.
fn postgres_session(options: PgConnectOptions, settings: &DatabaseSettings) -> PgConnectOptions {
    options.application_name("seckill").options([
        ("statement_timeout", settings.statement_timeout_ms.to_string()),
        ("lock_timeout", settings.lock_timeout_ms.to_string()),
        ("idle_in_transaction_session_timeout", settings.idle_limit_ms().to_string()),
        ("tcp_keepalives_idle", "30".to_owned()),
        ("tcp_keepalives_interval", "10".to_owned()),
        ("tcp_keepalives_count", "3".to_owned()),
        ("default_transaction_isolation", "read committed".to_owned()),
        ("plan_cache_mode", "force_custom_plan".to_owned()),
        ("enable_bitmapscan", "off".to_owned()),
        ("enable_seqscan", "off".to_owned()),
        // Where a table is read as a whole all the same, that is taken for endlessly dear, which would
        // be worth compiling for.
        ("jit", "off".to_owned()),
    ])
}

/// What each session of MySQL or MariaDB is told: READ COMMITTED, or a select after a conflict
/// may not see the rival's row; strict, or values are cut to fit; and the limits. The comments
/// are code, each for one of the two. MySQL limits SELECT statements only, and ends a transaction
/// whose client is gone without a word by ending every session that says nothing for so long.
fn mysql_session(settings: &DatabaseSettings) -> String {
    format!(
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SET SESSION sql_mode = 'STRICT_ALL_TABLES,PIPES_AS_CONCAT,NO_ENGINE_SUBSTITUTION,\
         NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO', \
         innodb_lock_wait_timeout = {lock_s} \
         /*M!, max_statement_time = {statement_s}, idle_transaction_timeout = {idle_s} */ \
         /*!80000 , max_execution_time = {statement_ms}, wait_timeout = {idle_s} */",
        lock_s = settings.lock_timeout_ms.div_ceil(1_000),
        statement_s = Duration::from_millis(settings.statement_timeout_ms).as_secs_f64(),
        statement_ms = settings.statement_timeout_ms,
        idle_s = settings.idle_limit_ms().div_ceil(1_000),
    )
}

/// One connection, made and closed, so that a failure shows its cause: the pool only says that
/// it waited. A server that refuses connections may be starting; others are not waited for.
async fn probe(location: &Location, settings: &DatabaseSettings) -> Result<(), OpenError> {
    let deadline = Instant::now() + Duration::from_millis(settings.connect_timeout_ms);
    let mut seen = unreachable(location, "it did not answer in time");
    loop {
        // Dropping an attempt at the deadline is fine: it has no transaction.
        match tokio::time::timeout_at(deadline, probe_once(location, settings)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                seen = location::explain(location, &error, settings.lock_timeout_ms);
                if !fault::is_starting(&error) {
                    return Err(seen);
                }
            }
            Err(_) => return Err(seen),
        }
        if Instant::now() >= deadline {
            return Err(seen);
        }
        let pause = Instant::now() + Duration::from_millis(100);
        tokio::time::sleep_until(deadline.min(pause)).await;
    }
}

async fn probe_once(location: &Location, settings: &DatabaseSettings) -> Result<(), sqlx::Error> {
    match location {
        Location::Memory => Ok(()),
        Location::File(path) => {
            let mut connection = sqlite_options(path, settings).connect().await?;
            // Takes the write lock, which a file or folder without write permission refuses.
            connection.execute("BEGIN IMMEDIATE; ROLLBACK").await?;
            connection.close().await
        }
        Location::Postgres(url) => {
            let options = PgConnectOptions::from_url(url)?;
            postgres_session(options, settings).connect().await?.close().await
        }
        Location::MySql(url) => {
            let mut connection = MySqlConnectOptions::from_url(url)?.connect().await?;
            connection.execute(sqlx::AssertSqlSafe(mysql_session(settings))).await?;
            connection.close().await
        }
    }
}

fn unreachable(location: &Location, reason: &str) -> OpenError {
    OpenError::Unreachable { at: location.to_string(), reason: reason.to_owned() }
}

/// What failed between the probe and the pool.
fn at(location: &Location, error: &DbErr) -> OpenError {
    unreachable(location, &error.to_string())
}
