//! The simulated database: a real SQLite that several servers reach over connections that break.
//!
//! sqlx runs SQLite in a thread of its own. Here the thread of the run waits for it, so a statement
//! takes no simulated time and nothing runs beside it. What takes time, and goes wrong, is the way
//! there and back.

use std::{
    collections::BTreeMap,
    future::Future,
    path::Path,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use sea_orm::{
    DbErr, EntityTrait, ExecResult, QueryResult, RuntimeErr, Statement, Values,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions, Executor,
        sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous},
    },
};
use sea_query_sqlx::SqlxValues;
use tokio::sync::OwnedMutexGuard;

mod check;

use self::check::Known;
use super::{Break, Dead, Life, Shared, World, engine};
use crate::{database::Database, entity::outbox};

/// How long a transaction waits for another to end.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// How late a commit may arrive whose caller gave up.
const LATEST_MS: u64 = 2_000;

/// The one database of a run.
pub(super) struct Store {
    world: Shared,
    connections: Mutex<Connections>,
    /// SQLite has one writer.
    writing: Arc<tokio::sync::Mutex<()>>,
    /// SQLite's own word for "another one writes".
    busy: Arc<sqlx::Error>,
    /// The rows of the outbox as of the last commit.
    rows: Mutex<BTreeMap<String, Known>>,
    /// Where a broken run gives units back on a guess.
    pub(super) guesses: Mutex<Option<Guesses>>,
}

/// An engine, and the keys of each offer there.
type Guesses = (Arc<engine::Store>, Vec<Arc<[String]>>);

struct Connections {
    writer: SqliteConnection,
    reader: SqliteConnection,
}

impl Store {
    /// Over the file of a database that has the schema.
    pub(super) fn open(world: Shared, file: &Path) -> Self {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off)
            .foreign_keys(true)
            .busy_timeout(Duration::ZERO);
        let mut writer = block(options.connect()).unwrap();
        let mut reader = block(options.connect()).unwrap();
        block(writer.execute("BEGIN IMMEDIATE")).unwrap();
        let busy = Arc::new(block(reader.execute("BEGIN IMMEDIATE")).unwrap_err());
        block(writer.execute("ROLLBACK")).unwrap();
        Self {
            world,
            connections: Mutex::new(Connections { writer, reader }),
            writing: Arc::default(),
            busy,
            rows: Mutex::default(),
            guesses: Mutex::default(),
        }
    }

    fn busy(&self) -> DbErr {
        DbErr::Exec(RuntimeErr::SqlxError(self.busy.clone()))
    }

    /// Runs a command of ours, which can't fail.
    fn command(&self, sql: &'static str) {
        let mut connections = self.connections.lock().unwrap();
        if let Err(error) = block(connections.writer.execute(sql)) {
            self.world.violation(format!("{sql} failed: {error}"));
        }
    }

    fn execute(&self, statement: &Statement) -> Result<ExecResult, DbErr> {
        let mut connections = self.connections.lock().unwrap();
        let sql = AssertSqlSafe(self.rewritten(&statement.sql));
        let query = sqlx::query_with(sql, values(statement));
        match block(query.execute(&mut connections.writer)) {
            Ok(result) => Ok(result.into()),
            Err(error) => {
                // The protocol decides before a constraint has to.
                self.world.violation(format!("{} failed: {error}", statement.sql));
                Err(DbErr::Exec(RuntimeErr::SqlxError(Arc::new(error))))
            }
        }
    }

    fn query(&self, statement: &Statement, writer: bool) -> Result<Vec<QueryResult>, DbErr> {
        let mut connections = self.connections.lock().unwrap();
        let Connections { writer: first, reader: second } = &mut *connections;
        let connection = if writer { first } else { second };
        let sql = AssertSqlSafe(statement.sql.clone());
        let query = sqlx::query_with(sql, values(statement));
        match block(query.fetch_all(connection)) {
            Ok(rows) => Ok(rows.into_iter().map(QueryResult::from).collect()),
            Err(error) => {
                self.world.violation(format!("{} failed: {error}", statement.sql));
                Err(DbErr::Query(RuntimeErr::SqlxError(Arc::new(error))))
            }
        }
    }

    fn rewritten(&self, sql: &str) -> String {
        let compared = "\"offers\".\"epoch\" = ? AND \"reserved\"";
        if self.world.is_broken(Break::EpochNotCompared) && sql.contains(compared) {
            return sql.replace(compared, "\"offers\".\"epoch\" >= ? AND \"reserved\"");
        }
        sql.to_owned()
    }
}

fn values(statement: &Statement) -> SqlxValues {
    SqlxValues(statement.values.clone().unwrap_or(Values(Vec::new())))
}

/// The connection broke.
fn lost() -> DbErr {
    let cause = std::io::Error::other("simulated: the connection is lost");
    DbErr::Exec(RuntimeErr::SqlxError(Arc::new(sqlx::Error::Io(cause))))
}

/// The connection broke at BEGIN, or could not be made.
fn lost_at_begin() -> DbErr {
    let cause = std::io::Error::other("simulated: no connection");
    DbErr::Query(RuntimeErr::SqlxError(Arc::new(sqlx::Error::Io(cause))))
}

/// One server's connections to the database, or one of its transactions.
#[derive(Clone)]
pub(crate) struct Line {
    store: Arc<Store>,
    life: Life,
    /// The run's own look: without delay or fault.
    aside: bool,
    transaction: Option<Arc<Open>>,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("life", &self.life).finish_non_exhaustive()
    }
}

/// A transaction that is open in SQLite for as long as it holds the lock.
struct Open {
    store: Arc<Store>,
    lock: Mutex<Option<OwnedMutexGuard<()>>>,
    is_lost: AtomicBool,
}

impl Open {
    fn end(&self, how: &'static str) {
        let Some(lock) = self.lock.lock().unwrap().take() else { return };
        self.store.command(how);
        if how == "COMMIT" {
            self.store.check();
        }
        drop(lock);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end("ROLLBACK");
    }
}

impl Line {
    pub(super) fn new(store: Arc<Store>, life: Life) -> Self {
        Self { store, life, aside: false, transaction: None }
    }

    /// Looks without being part of the run.
    pub(super) fn aside(store: Arc<Store>) -> Self {
        Self { store, life: Life::new(0), aside: true, transaction: None }
    }

    fn world(&self) -> &World {
        &self.store.world
    }

    async fn travel(&self) -> Result<(), DbErr> {
        if self.aside {
            return Ok(());
        }
        if self.life.end.is_cancelled() {
            return Err(lost());
        }
        if self.strikes(self.world().plan.rates.crash) {
            let place = if self.transaction.is_some() { "in a transaction" } else { "at SQL" };
            self.life.end(self.world(), place);
        }
        self.life.wait(self.world().delay()).await.map_err(|Dead| lost())
    }

    fn is_away(&self) -> bool {
        !self.aside && World::is_away(&self.world().sql_away_until)
    }

    fn strikes(&self, probability: f64) -> bool {
        !self.aside && self.world().strikes(probability)
    }

    fn note(&self, what: impl FnOnce() -> String) {
        if !self.aside {
            self.world().note(|| format!("{} sql {}", self.life.id, what()));
        }
    }

    fn fault(&self, what: &str) {
        self.note(|| what.to_owned());
        self.world().count(format!("sql {what}"));
    }

    async fn lock(&self) -> Result<OwnedMutexGuard<()>, DbErr> {
        let lock = self.store.writing.clone().lock_owned();
        tokio::select! {
            biased;
            () = self.life.end.cancelled() => Err(lost()),
            lock = tokio::time::timeout(LOCK_WAIT, lock) => lock.map_err(|_| {
                self.fault("waited too long");
                self.store.busy()
            }),
        }
    }

    pub(crate) async fn begin(&self) -> Result<Self, DbErr> {
        self.travel().await.map_err(|_| lost_at_begin())?;
        if self.is_away() || self.strikes(self.world().plan.rates.sql_begin) {
            self.fault("no connection");
            return Err(lost_at_begin());
        }
        let lock = self.lock().await?;
        self.store.command("BEGIN IMMEDIATE");
        let lock = Mutex::new(Some(lock));
        let open = Open { store: self.store.clone(), lock, is_lost: AtomicBool::new(false) };
        let line = Self { transaction: Some(Arc::new(open)), ..self.clone() };
        line.travel().await?;
        Ok(line)
    }

    /// What becomes of a statement; after an error its transaction is over.
    fn disturb(&self, open: Option<&Open>) -> Result<(), DbErr> {
        let rates = &self.world().plan.rates;
        let is_lost = open.is_some_and(|open| open.is_lost.load(Ordering::Relaxed));
        let error = if is_lost || self.is_away() || self.strikes(rates.sql_statement) {
            lost()
        } else if open.is_some() && self.strikes(rates.sql_deadlock / 4.0) {
            self.store.busy()
        } else {
            return Ok(());
        };
        self.fault("a statement failed");
        if let Some(open) = open {
            open.is_lost.store(true, Ordering::Relaxed);
            open.end("ROLLBACK");
        }
        Err(error)
    }

    pub(crate) async fn execute(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        self.travel().await?;
        let Some(open) = &self.transaction else {
            return self.execute_alone(statement).await;
        };
        self.disturb(Some(open))?;
        let result = self.store.execute(&statement)?;
        self.note(|| shown(&statement, result.rows_affected()));
        if result.rows_affected() == 0 && statement.sql.contains("\"reserved\" + ?") {
            self.world().count("sql units not counted: another epoch, or too many");
        }
        self.travel().await?;
        Ok(result)
    }

    /// A statement that commits by itself.
    async fn execute_alone(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let lock = self.lock().await?;
        self.disturb(None)?;
        if self.strikes(self.world().plan.rates.commit_refused) {
            return Err(self.store.busy());
        }
        let result = self.store.execute(&statement)?;
        self.store.check();
        drop(lock);
        self.note(|| shown(&statement, result.rows_affected()));
        self.travel().await?;
        if self.strikes(self.world().plan.rates.commit_lost_after) {
            self.fault("the answer is lost");
            return Err(lost());
        }
        Ok(result)
    }

    pub(crate) async fn query(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.travel().await?;
        self.disturb(self.transaction.as_deref())?;
        let rows = self.store.query(&statement, self.transaction.is_some())?;
        self.note(|| shown(&statement, rows.len() as u64));
        self.travel().await?;
        Ok(rows)
    }

    pub(crate) async fn commit(self) -> Result<(), DbErr> {
        self.travel().await?;
        let open = self.transaction.clone().expect("only a transaction is committed");
        if open.is_lost.load(Ordering::Relaxed) {
            return Err(lost());
        }
        let rates = &self.world().plan.rates;
        if self.is_away() || self.strikes(rates.commit_lost_before) {
            self.fault("COMMIT lost");
            open.end("ROLLBACK");
            return Err(lost());
        }
        if self.strikes(rates.commit_refused) {
            self.fault("COMMIT refused");
            open.end("ROLLBACK");
            return Err(self.store.busy());
        }
        if self.strikes(rates.commit_late) {
            self.commit_late(open);
            return Err(self.unknown());
        }
        if self.world().is_broken(Break::CommitNotKept) && self.strikes(0.05) {
            self.note(|| "COMMIT, not kept".to_owned());
            open.end("ROLLBACK");
            return Ok(());
        }
        open.end("COMMIT");
        self.note(|| "COMMIT".to_owned());
        self.travel().await?;
        if self.strikes(rates.commit_lost_after) {
            self.fault("the answer to COMMIT is lost");
            return Err(self.unknown());
        }
        Ok(())
    }

    /// What a commit is answered with that may have been applied.
    fn unknown(&self) -> DbErr {
        if self.world().is_broken(Break::UnknownGuessed)
            && let Some((engine, offers)) = &*self.store.guesses.lock().unwrap()
        {
            offers.iter().for_each(|keys| engine.give_back_unacknowledged(keys));
        }
        lost()
    }

    /// The caller has given up; the commit is still on its way, and the lock is held.
    fn commit_late(&self, open: Arc<Open>) {
        let (id, kept) = (self.life.id, self.world().dice(fastrand::Rng::bool));
        let pause = Duration::from_millis(1) + self.world().span(LATEST_MS);
        self.fault("COMMIT late");
        let late = self.world().late();
        #[allow(clippy::disallowed_methods, reason = "it belongs to nobody any more")]
        tokio::spawn(async move {
            let _late = late;
            tokio::time::sleep(pause).await;
            let how = if kept { "COMMIT" } else { "ROLLBACK" };
            open.end(how);
            open.store.world.note(|| format!("{id} sql {how}, late"));
        });
    }

    pub(crate) async fn rollback(self) -> Result<(), DbErr> {
        let open = self.transaction.clone().expect("only a transaction is rolled back");
        open.end("ROLLBACK");
        self.travel().await
    }
}

fn shown(statement: &Statement, rows: u64) -> String {
    let sql: String = statement.sql.chars().take(260).collect();
    let values = statement.values.iter().flat_map(|values| &values.0).map(ToString::to_string);
    format!("{sql}… [{}] -> {rows}", values.collect::<Vec<_>>().join(" "))
}

/// Wakes the thread that waits.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for SQLite's thread; meanwhile nothing else runs, and no simulated time passes.
pub(super) fn block<F: Future>(future: F) -> F::Output {
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}

/// Every row of the outbox.
pub(super) async fn rows(database: &Database) -> Vec<outbox::Model> {
    outbox::Entity::find().all(database.reader()).await.unwrap()
}
