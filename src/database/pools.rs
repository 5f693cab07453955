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
use futures_util::{FutureExt as _, future::join, poll};
use sea_orm::{
    ConnAcquireErr, ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr,
    ExecResult, QueryResult, RuntimeErr, Statement, TransactionOptions,
    prelude::async_trait::async_trait,
};
use tokio_util::sync::CancellationToken;

use super::{
    DatabaseSettings, connect,
    connection::{self, Connection},
    location::Location,
    server_pool,
};

/// What an answer may take on its way, beside the server's limits.
const ON_THE_WAY: Duration = Duration::from_secs(2);

/// Connections that stand and fall together.
#[derive(Debug)]
struct Pools {
    reader: Connection,
    writer: Connection,
    /// One connection that is never busy with anything else, so that its silence tells something.
    probe: Connection,
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

/// One pool of the current ones, for statements outside of a transaction.
#[derive(Debug, Clone)]
pub struct Pool {
    connections: Connections,
    backend: DbBackend,
    side: Side,
}

/// A transaction that is open; dropped, it is rolled back.
#[derive(Debug)]
pub struct Transaction {
    inner: connection::Transaction,
    connections: Connections,
    pools: Arc<Pools>,
}

impl Connections {
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
        let pools = Pools {
            reader: reader.into(),
            writer: writer.into(),
            probe: probe.into(),
            given_up: CancellationToken::new(),
        };
        Ok(Self { current: Arc::new(ArcSwap::from_pointee(pools)), remote })
    }

    /// Over the simulator's database.
    #[cfg(test)]
    pub(super) fn simulated(line: &crate::simulator::sql::Line) -> Self {
        let connection = || Connection::simulated(line.clone());
        let pools = Pools {
            reader: connection(),
            writer: connection(),
            probe: connection(),
            given_up: CancellationToken::new(),
        };
        Self { current: Arc::new(ArcSwap::from_pointee(pools)), remote: None }
    }

    pub(super) fn pool(&self, side: Side) -> Pool {
        let backend = self.current.load().writer.get_database_backend();
        Pool { connections: self.clone(), backend, side }
    }

    pub(super) async fn begin(
        &self,
        side: Side,
        options: TransactionOptions,
    ) -> Result<Transaction, DbErr> {
        let pools = self.current.load_full();
        let begun = Box::pin(pools.side(side).begin(options));
        let begun = self.pool_answered(&pools, begun);
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
        pools.probe.close().await?;
        pools.reader.close().await?;
        pools.writer.close().await
    }

    async fn replace(&self, silent: &Arc<Pools>) {
        let Some(remote) = &self.remote else { return };
        let made = async { Ok((remote.pool().await?, remote.probe().await?)) }.await;
        let (pool, probe) = match made {
            Ok(made) => made,
            Err::<_, DbErr>(error) => return tracing::error!(%error, "no new connections"),
        };
        let given_up = CancellationToken::new();
        let pool = Connection::from(pool);
        let (reader, writer, probe) = (pool.clone(), pool, probe.into());
        let fresh = Arc::new(Pools { reader, writer, probe, given_up });
        let before = self.current.compare_and_swap(silent, fresh);
        if !Arc::ptr_eq(&before, silent) {
            // Somebody else was faster.
            return;
        }
        tracing::error!("the database does not answer: its connections are given up");
        let silent = Arc::clone(silent);
        #[allow(clippy::disallowed_methods, reason = "nobody needs its end, which may never come")]
        tokio::spawn(async move {
            let closing = join(silent.writer.close(), silent.probe.close());
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
        pools: &Arc<Pools>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        let limit = self.remote.as_ref().map_or(Duration::ZERO, |remote| remote.statement_limit);
        self.answered_within(limit, pools, work).await
    }

    /// As `answered`, for what first waits for a connection.
    async fn pool_answered<T>(
        &self,
        pools: &Arc<Pools>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        let limit = |remote: &Arc<Remote>| remote.acquire_limit + remote.statement_limit;
        let limit = self.remote.as_ref().map_or(Duration::ZERO, limit);
        self.answered_within(limit, pools, work).await
    }

    async fn answered_within<T>(
        &self,
        limit: Duration,
        pools: &Arc<Pools>,
        work: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        if self.remote.is_none() {
            return work.await;
        }
        tokio::select! {
            biased;
            answer = work => answer,
            () = pools.given_up.cancelled() => Err(silence()),
            () = tokio::time::sleep(limit) => {
                self.replace(pools).await;
                Err(silence())
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

impl Pools {
    fn side(&self, side: Side) -> &Connection {
        match side {
            Side::Reader => &self.reader,
            Side::Writer => &self.writer,
            Side::Probe => &self.probe,
        }
    }
}

impl Transaction {
    /// For the migrator, which takes nothing else.
    pub(super) fn sqlx(&self) -> &DatabaseTransaction {
        self.inner.sqlx()
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

#[async_trait]
impl ConnectionTrait for Pool {
    fn get_database_backend(&self) -> DbBackend {
        self.backend
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.pool_answered(&pools, pools.side(self.side).execute_raw(statement)).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.pool_answered(&pools, pools.side(self.side).execute_unprepared(sql)).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.pool_answered(&pools, pools.side(self.side).query_one_raw(statement)).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        let pools = self.connections.current.load_full();
        self.connections.pool_answered(&pools, pools.side(self.side).query_all_raw(statement)).await
    }
}

const SILENCE: &str = "the database did not answer";

fn silence() -> DbErr {
    DbErr::Conn(RuntimeErr::Internal(SILENCE.to_owned()))
}

fn is_silence(error: &DbErr) -> bool {
    matches!(error, DbErr::Conn(RuntimeErr::Internal(text)) if text == SILENCE)
}
