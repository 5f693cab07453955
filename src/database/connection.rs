//! What statements go through: a pool, or a transaction that is committed or rolled back.
//!
//! One place for all statements, so that the simulator can stand here in place of sqlx.

use async_trait::async_trait;
use futures_util::FutureExt as _;
use sea_orm::{
    ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, ExecResult, QueryResult, Statement,
    TransactionOptions,
};

use tokio::sync::OwnedSemaphorePermit;

use super::pools::{OpenTransaction, Pool};

#[cfg(test)]
use crate::simulator::sql::Line;

/// For single statements: each takes a connection out of a pool.
pub type Connection = Link<Pool>;

/// A write transaction; dropped, it is rolled back.
pub type Transaction = Link<OpenTransaction>;

/// A way into SQL.
#[derive(Debug, Clone)]
pub struct Link<C>(Way<C>);

#[derive(Debug, Clone)]
enum Way<C> {
    Sqlx(C),
    #[cfg(test)]
    Simulated(Line),
}

impl<C> From<C> for Link<C> {
    fn from(sqlx: C) -> Self {
        Self(Way::Sqlx(sqlx))
    }
}

impl<C> Link<C> {
    /// A way into the simulator's database.
    #[cfg(test)]
    pub(crate) fn simulated(line: Line) -> Self {
        Self(Way::Simulated(line))
    }
}

impl Connection {
    /// Begins a transaction on a connection of its own.
    pub(super) async fn begin(&self, options: TransactionOptions) -> Result<Transaction, DbErr> {
        match &self.0 {
            Way::Sqlx(pool) => pool.begin(options).boxed().await.map(Transaction::from),
            #[cfg(test)]
            Way::Simulated(line) => line.begin().await.map(Transaction::simulated),
        }
    }

    /// Closes every connection of the pool, once those in use have come back.
    pub(super) async fn close(&self) -> Result<(), DbErr> {
        match &self.0 {
            Way::Sqlx(pool) => pool.close().await,
            #[cfg(test)]
            Way::Simulated(_) => Ok(()),
        }
    }
}

impl Transaction {
    /// Keeps this until it is over.
    pub(super) fn with_turn(self, turn: Option<OwnedSemaphorePermit>) -> Self {
        match self.0 {
            Way::Sqlx(transaction) => transaction.with_turn(turn).into(),
            #[cfg(test)]
            Way::Simulated(_) => self,
        }
    }

    /// For the migrator, which takes nothing else.
    pub(super) fn sqlx(&self) -> &DatabaseTransaction {
        match &self.0 {
            Way::Sqlx(transaction) => transaction.inner(),
            #[cfg(test)]
            Way::Simulated(_) => unreachable!("the simulator starts with the schema"),
        }
    }

    /// Keeps what was done.
    ///
    /// # Errors
    /// Unless [`super::classify`] calls it rolled back, it may be kept all the same.
    pub async fn commit(self) -> Result<(), DbErr> {
        match self.0 {
            Way::Sqlx(transaction) => transaction.commit().await,
            #[cfg(test)]
            Way::Simulated(line) => line.commit().await,
        }
    }

    /// Keeps nothing of it.
    ///
    /// # Errors
    /// The connection is lost, and the database rolls back by itself.
    pub async fn rollback(self) -> Result<(), DbErr> {
        match self.0 {
            Way::Sqlx(transaction) => transaction.rollback().await,
            #[cfg(test)]
            Way::Simulated(line) => line.rollback().await,
        }
    }
}

#[async_trait]
impl<C: ConnectionTrait> ConnectionTrait for Link<C> {
    fn get_database_backend(&self) -> DbBackend {
        match &self.0 {
            Way::Sqlx(sqlx) => sqlx.get_database_backend(),
            #[cfg(test)]
            Way::Simulated(_) => DbBackend::Sqlite,
        }
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        match &self.0 {
            Way::Sqlx(sqlx) => sqlx.execute_raw(statement).await,
            #[cfg(test)]
            Way::Simulated(line) => line.execute(statement).await,
        }
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        match &self.0 {
            Way::Sqlx(sqlx) => sqlx.execute_unprepared(sql).await,
            #[cfg(test)]
            Way::Simulated(line) => {
                line.execute(Statement::from_string(DbBackend::Sqlite, sql)).await
            }
        }
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        match &self.0 {
            Way::Sqlx(sqlx) => sqlx.query_one_raw(statement).await,
            #[cfg(test)]
            Way::Simulated(line) => Ok(line.query(statement).await?.into_iter().next()),
        }
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        match &self.0 {
            Way::Sqlx(sqlx) => sqlx.query_all_raw(statement).await,
            #[cfg(test)]
            Way::Simulated(line) => line.query(statement).await,
        }
    }
}
