//! The pools of connections, and how they are given up together.
//!
//! A network may lose a connection without a word, and a database may hold still; sqlx then waits
//! for ever. **Promise:** every statement ends. The server keeps the limits on statements and
//! locks, so an answer that is later than those proves that nobody will give it: then all pools
//! are replaced, and whatever waits on the old ones fails with an unknown result (I8).
//!
//! Only here may an SQL future be dropped: its connection goes back to a pool that is closed and
//! used by nobody, so it can't hand an open transaction to the next one.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use sea_orm::{
    ConnAcquireErr, ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr,
    ExecResult, QueryResult, RuntimeErr, Statement, TransactionOptions, TransactionTrait,
    prelude::async_trait::async_trait,
};
use tokio_util::sync::CancellationToken;

use super::{DatabaseSettings, connect, location::Location, server_pool};

/// What an answer may take on its way, beside the server's limits.
const ON_THE_WAY: Duration = Duration::from_secs(2);

/// Connections that stand and fall together.
#[derive(Debug)]
struct Pools {
    reader: DatabaseConnection,
    writer: DatabaseConnection,
    given_up: CancellationToken,
}

/// The pools in use; a clone is the same.
#[derive(Debug, Clone)]
pub(super) struct Connections {
    current: Arc<ArcSwap<Pools>>,
    /// How to make others, and how long a statement may be without an answer. `None` for SQLite,
    /// which is no network away.
    remote: Option<Arc<Remote>>,
}

#[derive(Debug)]
struct Remote {
    url: String,
    settings: DatabaseSettings,
    limit: Duration,
}

/// One pool of the current ones, for statements outside of a transaction.
#[derive(Debug, Clone)]
pub struct Pool {
    connections: Connections,
    backend: DbBackend,
    writes: bool,
}

/// A transaction that is open; dropped, it is rolled back.
#[derive(Debug)]
pub struct Transaction {
    inner: DatabaseTransaction,
    connections: Connections,
    pools: Arc<Pools>,
}

impl Connections {
    pub(super) fn new(
        location: &Location,
        settings: &DatabaseSettings,
        reader: DatabaseConnection,
        writer: DatabaseConnection,
    ) -> Self {
        let remote = match location {
            Location::Memory | Location::File(_) => None,
            Location::Postgres(url) | Location::MySql(url) => Some(Arc::new(Remote {
                url: url.as_str().to_owned(),
                settings: settings.clone(),
                limit: ON_THE_WAY
                    + Duration::from_millis(
                        settings.acquire_timeout_ms
                            + settings.statement_timeout_ms
                            + settings.lock_timeout_ms,
                    ),
            })),
        };
        let pools = Pools { reader, writer, given_up: CancellationToken::new() };
        Self { current: Arc::new(ArcSwap::from_pointee(pools)), remote }
    }

    pub(super) fn pool(&self, writes: bool) -> Pool {
        let backend = self.current.load().writer.get_database_backend();
        Pool { connections: self.clone(), backend, writes }
    }

    pub(super) async fn begin(&self, options: TransactionOptions) -> Result<Transaction, DbErr> {
        let pools = self.current.load_full();
        let begun = Box::pin(pools.writer.begin_with_options(options));
        let begun = self.answered(&pools, begun);
        match begun.await {
            Ok(inner) => Ok(Transaction { inner, connections: self.clone(), pools }),
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

    pub(super) async fn close(&self) -> Result<(), DbErr> {
        let pools = self.current.load_full();
        pools.reader.close_by_ref().await?;
        pools.writer.close_by_ref().await
    }

    async fn replace(&self, silent: &Arc<Pools>) {
        let Some(remote) = &self.remote else { return };
        let mut options = server_pool(&remote.url, &remote.settings);
        // Whether anybody answers is what the next statement finds out.
        options.connect_lazy(true);
        let pool = match connect(options).await {
            Ok(pool) => pool,
            Err(error) => return tracing::error!(%error, "no new pool of connections"),
        };
        let given_up = CancellationToken::new();
        let fresh = Arc::new(Pools { reader: pool.clone(), writer: pool, given_up });
        let before = self.current.compare_and_swap(silent, fresh);
        if !Arc::ptr_eq(&before, silent) {
            // Somebody else was faster.
            return;
        }
        tracing::error!("the database does not answer: its connections are given up");
        let silent = Arc::clone(silent);
        #[allow(clippy::disallowed_methods, reason = "nobody needs its end, which may never come")]
        tokio::spawn(async move {
            // Closed first, so that nothing goes back into it.
            let closing = silent.writer.close_by_ref();
            silent.given_up.cancel();
            let _ = closing.await;
        });
    }

    /// Waits for an answer, but not for one that nobody will give.
    async fn answered<T>(
        &self,
        pools: &Arc<Pools>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        let Some(remote) = &self.remote else { return work.await };
        tokio::select! {
            biased;
            answer = work => answer,
            () = pools.given_up.cancelled() => Err(silence()),
            () = tokio::time::sleep(remote.limit) => {
                self.replace(pools).await;
                Err(silence())
            }
        }
    }
}

impl Transaction {
    /// As sea-orm knows it, for what takes nothing else.
    pub(super) fn inner(&self) -> &DatabaseTransaction {
        &self.inner
    }

    /// Makes what was done last.
    ///
    /// # Errors
    /// Of any but [`super::SqlFault::RolledBack`] it is unknown what was kept.
    pub async fn commit(self) -> Result<(), DbErr> {
        let Self { inner, connections, pools } = self;
        // In a box, as every statement is: the futures of whole flows nest deep.
        async move { connections.answered(&pools, inner.commit()).await }.boxed().await
    }

    /// Takes back what was done.
    ///
    /// # Errors
    /// The connection is lost, and the transaction with it.
    pub async fn rollback(self) -> Result<(), DbErr> {
        let Self { inner, connections, pools } = self;
        async move { connections.answered(&pools, inner.rollback()).await }.boxed().await
    }
}

#[async_trait]
impl ConnectionTrait for Transaction {
    fn get_database_backend(&self) -> DbBackend {
        self.inner.get_database_backend()
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        self.connections.answered(&self.pools, self.inner.execute_raw(statement)).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        self.connections.answered(&self.pools, self.inner.execute_unprepared(sql)).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        self.connections.answered(&self.pools, self.inner.query_one_raw(statement)).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.connections.answered(&self.pools, self.inner.query_all_raw(statement)).await
    }
}

impl Pool {
    fn side<'a>(&self, pools: &'a Pools) -> &'a DatabaseConnection {
        if self.writes { &pools.writer } else { &pools.reader }
    }
}

#[async_trait]
impl ConnectionTrait for Pool {
    fn get_database_backend(&self) -> DbBackend {
        self.backend
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.answered(&pools, self.side(&pools).execute_raw(statement)).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.answered(&pools, self.side(&pools).execute_unprepared(sql)).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.answered(&pools, self.side(&pools).query_one_raw(statement)).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.answered(&pools, self.side(&pools).query_all_raw(statement)).await
    }
}

const SILENCE: &str = "the database did not answer";

fn silence() -> DbErr {
    DbErr::Conn(RuntimeErr::Internal(SILENCE.to_owned()))
}

fn is_silence(error: &DbErr) -> bool {
    matches!(error, DbErr::Conn(RuntimeErr::Internal(text)) if text == SILENCE)
}
