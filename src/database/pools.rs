//! The pools of connections, and how they are given up together.
//!
//! A network may lose a connection without a word, and a database may hold still; sqlx then waits
//! for ever. **Promise:** every statement ends. The server keeps the limits on statements and
//! locks, so an answer that is later than those proves that nobody will give it: then all pools
//! are replaced, and whatever waits on the old ones fails with an unknown result (I8).
//!
//! Only here may an SQL future be dropped: its connection goes back to a pool that is closed and
//! used by nobody, so it can't hand an open transaction to the next one.

use std::{pin::pin, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use futures_util::{FutureExt as _, future::join, poll};
use sea_orm::{
    ConnAcquireErr, ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr,
    ExecResult, QueryResult, RuntimeErr, Statement, TransactionOptions, TransactionTrait,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::{DatabaseSettings, SqlFault, classify, connect, location::Location, server_pool};
use crate::metrics::{self, SqlError};

/// What an answer may take on its way, beside the server's limits.
const ON_THE_WAY: Duration = Duration::from_secs(2);

/// Pools that stand and fall together.
#[derive(Debug)]
struct Generation {
    reader: DatabaseConnection,
    writer: DatabaseConnection,
    /// One connection that is never busy with anything else, so that its silence tells something.
    probe: DatabaseConnection,
    given_up: CancellationToken,
}

/// The pools in use; a clone is the same.
#[derive(Debug, Clone)]
pub(super) struct Pools {
    current: Arc<ArcSwap<Generation>>,
    /// How to make others, and how long a statement may be without an answer. `None` for SQLite,
    /// which is no network away.
    remote: Option<Arc<Remote>>,
}

#[derive(Debug)]
struct Remote {
    url: String,
    settings: DatabaseSettings,
    statement_limit: Duration,
    acquire_limit: Duration,
}

/// Which of the pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Reader,
    Writer,
    Probe,
}

/// One pool of the current ones.
#[derive(Debug, Clone)]
pub struct Pool {
    pools: Pools,
    backend: DbBackend,
    side: Side,
}

/// A transaction of one of them; dropped, it is rolled back.
#[derive(Debug)]
pub struct OpenTransaction {
    inner: DatabaseTransaction,
    pools: Pools,
    generation: Arc<Generation>,
    turn: Option<OwnedSemaphorePermit>,
}

impl Pools {
    /// Over pools that are open.
    pub(super) async fn new(
        location: &Location,
        settings: &DatabaseSettings,
        reader: DatabaseConnection,
        writer: DatabaseConnection,
    ) -> Result<Self, DbErr> {
        let ms = Duration::from_millis;
        let remote = match location {
            Location::Memory | Location::File(_) => None,
            Location::Postgres(url) | Location::MySql(url) => Some(Arc::new(Remote {
                url: url.as_str().to_owned(),
                settings: settings.clone(),
                statement_limit: ON_THE_WAY
                    + ms(settings.statement_timeout_ms.max(settings.lock_timeout_ms)),
                acquire_limit: ms(settings.acquire_timeout_ms),
            })),
        };
        let probe = match &remote {
            None => writer.clone(),
            Some(remote) => remote.probe().await?,
        };
        let generation = Generation { reader, writer, probe, given_up: CancellationToken::new() };
        Ok(Self { current: Arc::new(ArcSwap::from_pointee(generation)), remote })
    }

    pub(super) fn pool(&self, side: Side) -> Pool {
        let backend = self.current.load().writer.get_database_backend();
        Pool { pools: self.clone(), backend, side }
    }

    async fn begin(
        &self,
        side: Side,
        options: TransactionOptions,
    ) -> Result<OpenTransaction, DbErr> {
        let generation = self.current.load_full();
        let begun = generation.side(side).begin_with_options(options).boxed();
        let begun = self.pool_answered(&generation, begun);
        match begun.await {
            Ok(inner) => Ok(OpenTransaction { inner, pools: self.clone(), generation, turn: None }),
            // Nothing was kept of a transaction that never began.
            Err(error) if is_silence(&error) => {
                Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed))
            }
            Err(error) => Err(error),
        }
    }

    /// Leaves the current pools to themselves and takes new ones.
    pub(super) async fn give_up(&self) {
        self.replace(&self.current.load_full()).await;
    }

    async fn replace(&self, silent: &Arc<Generation>) {
        let Some(remote) = &self.remote else { return };
        let made = async { Ok((remote.pool().await?, remote.probe().await?)) }.await;
        let (pool, probe) = match made {
            Ok(made) => made,
            Err::<_, DbErr>(error) => return tracing::error!(%error, "no new connections"),
        };
        let given_up = CancellationToken::new();
        let fresh = Arc::new(Generation { reader: pool.clone(), writer: pool, probe, given_up });
        let before = self.current.compare_and_swap(silent, fresh);
        if !Arc::ptr_eq(&before, silent) {
            // Somebody else was faster.
            return;
        }
        tracing::error!("the database does not answer: its connections are given up");
        let silent = Arc::clone(silent);
        #[allow(clippy::disallowed_methods, reason = "nobody needs its end, which may never come")]
        tokio::spawn(async move {
            let closing = join(silent.writer.close_by_ref(), silent.probe.close_by_ref());
            let mut closing = pin!(closing);
            // Closed from here on, so that what is dropped next goes to nobody.
            let _ = poll!(&mut closing);
            silent.given_up.cancel();
            let _ = closing.await;
        });
    }

    /// Waits for the answer to a statement, but not for one that nobody will give.
    async fn answered<T>(
        &self,
        generation: &Arc<Generation>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        let limit = self.remote.as_ref().map_or(Duration::ZERO, |remote| remote.statement_limit);
        self.answered_within(limit, generation, work).await
    }

    /// As `answered`, for what first waits for a connection.
    async fn pool_answered<T>(
        &self,
        generation: &Arc<Generation>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        let limit = |remote: &Arc<Remote>| remote.acquire_limit + remote.statement_limit;
        let limit = self.remote.as_ref().map_or(Duration::ZERO, limit);
        self.answered_within(limit, generation, work).await
    }

    async fn answered_within<T>(
        &self,
        limit: Duration,
        generation: &Arc<Generation>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        if self.remote.is_none() {
            return work.await.inspect_err(count);
        }
        // Dropped at the end, when the pool that it would go back to is given up.
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            answer = &mut work => answer.inspect_err(count),
            () = generation.given_up.cancelled() => Err(silence()).inspect_err(count),
            () = tokio::time::sleep(limit) => {
                self.replace(generation).await;
                Err(silence()).inspect_err(count)
            }
        }
    }
}

impl Remote {
    /// Whether anybody answers is what the first statement finds out.
    async fn pool(&self) -> Result<DatabaseConnection, DbErr> {
        let mut options = server_pool(&self.url, &self.settings);
        options.connect_lazy(true);
        connect(options).await
    }

    async fn probe(&self) -> Result<DatabaseConnection, DbErr> {
        let mut options = server_pool(&self.url, &self.settings);
        options.connect_lazy(true).max_connections(1);
        connect(options).await
    }
}

impl Generation {
    fn side(&self, side: Side) -> &DatabaseConnection {
        match side {
            Side::Reader => &self.reader,
            Side::Writer => &self.writer,
            Side::Probe => &self.probe,
        }
    }
}

impl OpenTransaction {
    pub(super) fn with_turn(self, turn: Option<OwnedSemaphorePermit>) -> Self {
        Self { turn, ..self }
    }

    /// As sea-orm knows it, for what takes nothing else.
    pub(super) fn inner(&self) -> &DatabaseTransaction {
        &self.inner
    }

    /// Makes what was done last.
    ///
    /// # Errors
    /// Of any but [`super::SqlFault::RolledBack`] it is unknown what was kept.
    pub async fn commit(self) -> Result<(), DbErr> {
        let Self { inner, pools, generation, turn: _turn } = self;
        // In a box, as every statement is: the futures of whole flows nest deep.
        async move { pools.answered(&generation, inner.commit()).await }.boxed().await
    }

    /// Takes back what was done.
    ///
    /// # Errors
    /// The connection is lost, and the transaction with it.
    pub async fn rollback(self) -> Result<(), DbErr> {
        let Self { inner, pools, generation, turn: _turn } = self;
        async move { pools.answered(&generation, inner.rollback()).await }.boxed().await
    }
}

#[async_trait]
impl ConnectionTrait for OpenTransaction {
    fn get_database_backend(&self) -> DbBackend {
        self.inner.get_database_backend()
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        self.pools.answered(&self.generation, self.inner.execute_raw(statement)).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        self.pools.answered(&self.generation, self.inner.execute_unprepared(sql)).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        self.pools.answered(&self.generation, self.inner.query_one_raw(statement)).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.pools.answered(&self.generation, self.inner.query_all_raw(statement)).await
    }
}

impl Pool {
    pub(super) async fn begin(
        &self,
        options: TransactionOptions,
    ) -> Result<OpenTransaction, DbErr> {
        self.pools.begin(self.side, options).await
    }

    /// Closes every connection, once those in use have come back.
    pub(super) async fn close(&self) -> Result<(), DbErr> {
        self.pools.current.load_full().side(self.side).close_by_ref().await
    }
}

#[async_trait]
impl ConnectionTrait for Pool {
    fn get_database_backend(&self) -> DbBackend {
        self.backend
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let generation = self.pools.current.load_full();
        self.pools
            .pool_answered(&generation, generation.side(self.side).execute_raw(statement))
            .await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        let generation = self.pools.current.load_full();
        self.pools
            .pool_answered(&generation, generation.side(self.side).execute_unprepared(sql))
            .await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        let generation = self.pools.current.load_full();
        self.pools
            .pool_answered(&generation, generation.side(self.side).query_one_raw(statement))
            .await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        let generation = self.pools.current.load_full();
        self.pools
            .pool_answered(&generation, generation.side(self.side).query_all_raw(statement))
            .await
    }
}

fn count(error: &DbErr) {
    metrics::database_failed(match classify(error) {
        SqlFault::RolledBack => SqlError::RolledBack,
        SqlFault::Data => SqlError::Data,
        SqlFault::Away => SqlError::Away,
        SqlFault::Unknown => SqlError::Unknown,
    });
}

const SILENCE: &str = "the database did not answer";

fn silence() -> DbErr {
    DbErr::Conn(RuntimeErr::Internal(SILENCE.to_owned()))
}

fn is_silence(error: &DbErr) -> bool {
    matches!(error, DbErr::Conn(RuntimeErr::Internal(text)) if text == SILENCE)
}
