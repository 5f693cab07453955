//! Bringing the schema up to date, one process at a time: sea-orm's migrator takes no lock.

use std::time::Duration;

use sea_orm::{
    ConnectionTrait, DatabaseConnection, DbErr, Statement, sqlx::postgres::PgConnectOptions,
};
use seckill_migrations::{Migrator, MigratorTrait};
use tokio::time::Instant;

use super::{Backend, Database, SqlFault, classify, connect, location::Location, pool};

/// How long one migration waits for another.
const PATIENCE: Duration = Duration::from_secs(600);

enum Direction {
    Up(Option<u32>),
    Down(u32),
}

impl Database {
    /// Applies the next `steps`, or all that are missing. Two at once both succeed: the later one waits, and
    /// finds nothing left to do.
    ///
    /// # Errors
    /// Of the step that failed. On PostgreSQL and SQLite it left nothing behind.
    pub async fn migrate_up(&self, steps: Option<u32>) -> Result<(), DbErr> {
        self.migrate(Direction::Up(steps)).await
    }

    /// Takes the last `steps` steps back, **with the data in them**.
    ///
    /// # Errors
    /// As [`Database::migrate_up`].
    pub async fn migrate_down(&self, steps: u32) -> Result<(), DbErr> {
        self.migrate(Direction::Down(steps)).await
    }

    /// The steps that this program knows, in order, and whether each is applied.
    ///
    /// # Errors
    /// When the database has steps that this program does not know: it is too old for it.
    pub async fn migration_status(&self) -> Result<Vec<(String, bool)>, DbErr> {
        let known = Migrator::migrations();
        let applied = applied_steps(self.reader()).await?;
        if let Some(newer) = applied.iter().find(|name| known.iter().all(|k| k.name() != **name)) {
            return Err(DbErr::Migration(format!(
                "the database has the step {newer}, which this program does not know: use a \
                 newer program"
            )));
        }
        let status = |name: &str| (name.to_owned(), applied.iter().any(|one| one == name));
        Ok(known.iter().map(|step| status(step.name())).collect())
    }

    /// Whether every step is applied.
    ///
    /// # Errors
    /// As [`Database::migration_status`].
    pub async fn is_current(&self) -> Result<bool, DbErr> {
        Ok(self.migration_status().await?.iter().all(|(_, applied)| *applied))
    }

    async fn migrate(&self, direction: Direction) -> Result<(), DbErr> {
        match &self.inner.location {
            Location::Memory | Location::File(_) => self.migrate_sqlite(direction).await,
            Location::Postgres(url) | Location::MySql(url) => {
                // One connection of its own, without the limits on statements: a step may take
                // its time. If it breaks, so does the migration, together with its lock.
                let mut options = pool(url.as_str(), &self.inner.settings);
                options.max_connections(1).idle_timeout(None).max_lifetime(None);
                options.map_sqlx_postgres_opts(|postgres: PgConnectOptions| {
                    let patience_ms = PATIENCE.as_millis().to_string();
                    postgres.application_name("seckill migrate").options([
                        ("statement_timeout", "0"),
                        ("lock_timeout", patience_ms.as_str()),
                    ])
                });
                let db = connect(options).await?;
                let result = migrate_server(&db, direction).await;
                // Ends the session, and the lock with it.
                db.close().await?;
                result
            }
        }
    }

    /// SQLite's write lock, held from the first step to the last.
    async fn migrate_sqlite(&self, direction: Direction) -> Result<(), DbErr> {
        let deadline = Instant::now() + PATIENCE;
        let tx = loop {
            match self.begin().await {
                Err(error) if classify(&error) == SqlFault::RolledBack => {
                    if Instant::now() >= deadline {
                        return Err(error);
                    }
                }
                begun => break begun?,
            }
        };
        match direction {
            Direction::Up(steps) => Migrator::up(tx.sqlx(), steps).await?,
            Direction::Down(steps) => Migrator::down(tx.sqlx(), Some(steps)).await?,
        }
        tx.commit().await
    }
}

/// The names in the migrator's table. Its own reader would create the table, which not everyone
/// may who may look.
async fn applied_steps(db: &impl ConnectionTrait) -> Result<Vec<String>, DbErr> {
    let backend = db.get_database_backend();
    let exists = match Backend::of(db) {
        Backend::Postgres => {
            "SELECT 1 FROM information_schema.tables \
             WHERE table_schema = current_schema() AND table_name = 'seaql_migrations'"
        }
        Backend::MySql => {
            "SELECT 1 FROM information_schema.tables \
             WHERE table_schema = DATABASE() AND table_name = 'seaql_migrations'"
        }
        Backend::Sqlite => {
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'seaql_migrations'"
        }
    };
    if db.query_one_raw(Statement::from_string(backend, exists)).await?.is_none() {
        return Ok(Vec::new());
    }
    let names = "SELECT version FROM seaql_migrations ORDER BY version";
    let rows = db.query_all_raw(Statement::from_string(backend, names)).await?;
    rows.iter().map(|row| row.try_get_by_index(0)).collect()
}

async fn migrate_server(db: &DatabaseConnection, direction: Direction) -> Result<(), DbErr> {
    let backend = db.get_database_backend();
    if Backend::of(db) == Backend::Postgres {
        // "seckill" in ASCII; locks of this kind belong to one database.
        let lock = "SELECT pg_advisory_lock(x'7365636b696c6c'::bigint)";
        db.execute_unprepared(lock).await?;
    } else {
        // These belong to the whole server.
        let lock = format!(
            "SELECT GET_LOCK(CONCAT('seckill ', LEFT(SHA2(DATABASE(), 256), 40)), {})",
            PATIENCE.as_secs()
        );
        let row = db.query_one_raw(Statement::from_string(backend, lock)).await?;
        let locked: Option<i64> = row.map(|row| row.try_get_by_index(0)).transpose()?.flatten();
        if locked != Some(1) {
            return Err(DbErr::Migration("another migration is still running".to_owned()));
        }
    }
    match direction {
        Direction::Up(steps) => Migrator::up(db, steps).await,
        Direction::Down(steps) => Migrator::down(db, Some(steps)).await,
    }
}
