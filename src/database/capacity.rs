//! How many connections a database server allows, before somebody finds out in the middle of a sale.

use sea_orm::{ConnectionTrait, DbErr, Statement};

use super::{Backend, Database};

/// What a database server allows its user, and what is in use of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// The smallest of the limits that apply: the server's, the database's, the user's.
    pub allowed: u64,
    /// How many connections clients have now, ours among them.
    pub in_use: u64,
}

/// Without a limit of the database or the role it is -1. What is reserved is for superusers only;
/// PostgreSQL 16 has a second reserve, which older ones do not know.
const POSTGRES: &str = "
    SELECT
        LEAST(
            current_setting('max_connections')::bigint
                - CASE WHEN role.rolsuper THEN 0 ELSE
                    current_setting('superuser_reserved_connections')::bigint
                    + COALESCE(current_setting('reserved_connections', true), '0')::bigint
                  END,
            CASE WHEN role.rolconnlimit < 0 OR role.rolsuper THEN 9999999
                ELSE role.rolconnlimit END,
            CASE WHEN home.datconnlimit < 0 OR role.rolsuper THEN 9999999
                ELSE home.datconnlimit END
        )::bigint AS allowed,
        (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::bigint
            AS in_use
    FROM pg_roles AS role, pg_database AS home
    WHERE role.rolname = current_user AND home.datname = current_database()";

/// Without a limit for the user `max_user_connections` is 0.
const MYSQL: &str = "
    SELECT CAST(
        CASE WHEN @@max_user_connections > 0
            THEN LEAST(@@max_connections, @@max_user_connections)
            ELSE @@max_connections END
    AS SIGNED) AS allowed";

impl Database {
    /// What the server allows; `None` for SQLite, which has no such limit.
    ///
    /// # Errors
    /// Those of any statement.
    pub async fn capacity(&self) -> Result<Option<Capacity>, DbErr> {
        let (allowed, in_use): (i64, i64) = match self.backend() {
            Backend::Sqlite => return Ok(None),
            Backend::Postgres => {
                let row = self.row(POSTGRES).await?;
                (row.try_get("", "allowed")?, row.try_get("", "in_use")?)
            }
            Backend::MySql => {
                let allowed = self.row(MYSQL).await?.try_get("", "allowed")?;
                // Its table has another place in MariaDB than in MySQL.
                let in_use = self.row("SHOW GLOBAL STATUS LIKE 'Threads_connected'").await?;
                let in_use: String = in_use.try_get_by_index(1)?;
                (allowed, in_use.parse().unwrap_or(0))
            }
        };
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        Ok(Some(Capacity { allowed: count(allowed), in_use: count(in_use) }))
    }

    async fn row(&self, sql: &str) -> Result<sea_orm::QueryResult, DbErr> {
        let statement = Statement::from_string(self.reader().get_database_backend(), sql);
        let row = self.reader().query_one_raw(statement).await?;
        row.ok_or_else(|| DbErr::RecordNotFound(String::from("no row")))
    }
}
