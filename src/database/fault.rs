//! What an SQL error says about what was kept (I8: an unknown result is never guessed).
#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "the errors are not ours; of one that is new nothing is known, which is the safe answer"
)]

use std::time::Duration;

use sea_orm::{
    ConnAcquireErr, DbErr, RuntimeErr,
    sqlx::{self, mysql::MySqlDatabaseError, postgres::PgDatabaseError, sqlite::SqliteError},
};

/// What an error leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SqlFault {
    /// SQL itself says that nothing is kept: deadlock, serialization, lock wait, busy. Roll the
    /// transaction back and repeat it as a whole: after some of these it is still open.
    RolledBack,
    /// The statement's own data: a constraint, a value. A repeat fails again; the rows are
    /// tried one by one.
    Data,
    /// No connection could be had; nothing was sent.
    Away,
    /// Anything may have happened.
    Unknown,
}

/// Says what an error leaves behind. What is not known for certain is [`SqlFault::Unknown`],
/// timeouts of statements above all.
#[must_use]
pub fn classify(error: &DbErr) -> SqlFault {
    match error {
        // sea-orm's words for a failure to take a connection out of the pool, or to make one.
        DbErr::ConnectionAcquire(_) | DbErr::Conn(RuntimeErr::SqlxError(_)) => SqlFault::Away,
        DbErr::Exec(RuntimeErr::SqlxError(cause)) | DbErr::Query(RuntimeErr::SqlxError(cause)) => {
            classify_sqlx(cause)
        }
        _ => SqlFault::Unknown,
    }
}

/// How often a transaction is repeated that SQL reports as rolled back.
const REPEATS: u32 = 8;

/// Runs a transaction again for as long as SQL itself says that nothing of it was kept, a few
/// times; `attempt` rolls back what it began.
///
/// # Errors
/// Those of the last attempt.
pub async fn repeat<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, DbErr>
where
    F: Future<Output = Result<T, DbErr>>,
{
    for repeats in 0..REPEATS {
        match attempt().await {
            Err(error) if classify(&error) == SqlFault::RolledBack => {
                // Apart from the others that lost the same lock.
                let most_ms = 2u64 << repeats;
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=most_ms))).await;
            }
            other => return other,
        }
    }
    attempt().await
}

/// Whether an error speaks against the database as a whole. One that SQL itself reports as rolled
/// back, a bad row, and a pool with too many waiting do not.
#[must_use]
pub fn is_outage(error: &DbErr) -> bool {
    match classify(error) {
        SqlFault::RolledBack | SqlFault::Data => false,
        SqlFault::Away => !matches!(error, DbErr::ConnectionAcquire(ConnAcquireErr::Timeout)),
        SqlFault::Unknown => true,
    }
}

pub(super) fn classify_sqlx(error: &sqlx::Error) -> SqlFault {
    match error {
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => SqlFault::Away,
        // A value that could not be written down; it was not sent.
        sqlx::Error::Encode(_) => SqlFault::Data,
        sqlx::Error::Database(database) => {
            if let Some(error) = database.try_downcast_ref::<PgDatabaseError>() {
                classify_postgres(error.code())
            } else if let Some(error) = database.try_downcast_ref::<MySqlDatabaseError>() {
                classify_mysql(error.number())
            } else if database.try_downcast_ref::<SqliteError>().is_some() {
                classify_sqlite(database.code().and_then(|code| code.parse().ok()).unwrap_or(0))
            } else {
                SqlFault::Unknown
            }
        }
        _ => SqlFault::Unknown,
    }
}

/// By SQLSTATE: <https://www.postgresql.org/docs/current/errcodes-appendix.html>. 40003 is
/// "statement completion unknown", and 57014 a statement's timeout.
fn classify_postgres(code: &str) -> SqlFault {
    match code {
        "40001" | "40P01" | "55P03" => SqlFault::RolledBack,
        _ if code.starts_with("22") || code.starts_with("23") => SqlFault::Data,
        _ => SqlFault::Unknown,
    }
}

/// By error number: <https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html>,
/// <https://mariadb.com/kb/en/mariadb-error-code-reference/>.
fn classify_mysql(number: u16) -> SqlFault {
    match number {
        // Record changed since last read (MariaDB), lock wait timeout, deadlock, NOWAIT.
        1020 | 1205 | 1213 | 3572 => SqlFault::RolledBack,
        // NULL, duplicates, foreign keys, ranges, types, missing, too long, CHECK (MySQL, MariaDB).
        1048 | 1062 | 1169 | 1216 | 1217 | 1264 | 1265 | 1292 | 1364 | 1366 | 1367 | 1406
        | 1451 | 1452 | 1557 | 1586 | 1690 | 3819 | 4025 => SqlFault::Data,
        _ => SqlFault::Unknown,
    }
}

/// By extended result code, whose low byte is the result: <https://www.sqlite.org/rescode.html>.
fn classify_sqlite(code: i32) -> SqlFault {
    const BUSY: i32 = 5;
    const LOCKED: i32 = 6;
    const TOOBIG: i32 = 18;
    const CONSTRAINT: i32 = 19;
    const MISMATCH: i32 = 20;
    match code & 0xff {
        BUSY | LOCKED => SqlFault::RolledBack,
        TOOBIG | CONSTRAINT | MISMATCH => SqlFault::Data,
        _ => SqlFault::Unknown,
    }
}

/// Whether this connection is gone: the next attempt needs another one.
pub(super) fn is_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => true,
        sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed => true,
        sqlx::Error::Database(database) => {
            if let Some(error) = database.try_downcast_ref::<PgDatabaseError>() {
                // Terminated, crashed, starting or stopping; or the connection failed.
                matches!(error.code(), "57P01" | "57P02" | "57P03" | "57P05")
                    || error.code().starts_with("08")
            } else if let Some(error) = database.try_downcast_ref::<MySqlDatabaseError>() {
                // Shutting down, gone, lost, idle for too long, killed.
                matches!(error.number(), 1053 | 2006 | 2013 | 4031 | 1927)
            } else {
                false
            }
        }
        _ => false,
    }
}

/// Whether a database that is starting, or busy for a moment, answers like this.
pub(super) fn is_starting(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(cause) => cause.kind() == std::io::ErrorKind::ConnectionRefused,
        sqlx::Error::Database(database) => {
            // Starting or stopping; too many connections.
            matches!(database.code().as_deref(), Some("57P03" | "53300" | "08004"))
                || classify_sqlx(error) == SqlFault::RolledBack
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_or_a_lost_answer_is_unknown() {
        // Statement completion unknown, cancelled, shut down, transaction already failed.
        for code in ["40003", "57014", "57P01", "25P02", "08006", "53100", "XX000"] {
            assert_eq!(classify_postgres(code), SqlFault::Unknown, "{code}");
        }
        // Interrupted, over time (MySQL, MariaDB), killed, gone, error during COMMIT, disk full.
        for number in [1317, 3024, 1969, 1927, 2006, 1180, 1021] {
            assert_eq!(classify_mysql(number), SqlFault::Unknown, "{number}");
        }
        // I/O error, full, interrupted, corrupt, and some of their extended codes.
        for code in [10, 13, 9, 11, 266, 2570] {
            assert_eq!(classify_sqlite(code), SqlFault::Unknown, "{code}");
        }
    }

    #[test]
    fn what_sql_calls_rolled_back_is_repeated() {
        for code in ["40001", "40P01", "55P03"] {
            assert_eq!(classify_postgres(code), SqlFault::RolledBack, "{code}");
        }
        for number in [1020, 1205, 1213, 3572] {
            assert_eq!(classify_mysql(number), SqlFault::RolledBack, "{number}");
        }
        // Busy, in recovery, an outdated snapshot, a shared cache locked.
        for code in [5, 261, 517, 6, 262] {
            assert_eq!(classify_sqlite(code), SqlFault::RolledBack, "{code}");
        }
    }
}
