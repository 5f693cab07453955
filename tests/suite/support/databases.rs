//! A new database for each test, on each of the three.
//!
//! SQLite is a file in a folder of its own. PostgreSQL and MariaDB come from the environment,
//! and a test that does not find them fails: one that is skipped proves nothing.

use std::{ops::Deref, panic::AssertUnwindSafe, path::Path};

use futures_util::FutureExt;
use sea_orm::{ConnectionTrait, DatabaseConnection};
use seckill::database::{Database, DatabaseSettings};
use tempfile::TempDir;

/// A database with the current schema and no rows; it derefs to the open [`Database`].
pub(crate) struct Fresh {
    database: Database,
    settings: DatabaseSettings,
    home: Home,
}

enum Home {
    Folder(#[expect(dead_code, reason = "removed when it is dropped")] TempDir),
    Server { admin_url: String, name: String },
}

impl Deref for Fresh {
    type Target = Database;

    fn deref(&self) -> &Database {
        &self.database
    }
}

impl Fresh {
    pub(crate) async fn sqlite() -> Self {
        Self::sqlite_in(&std::env::temp_dir()).await
    }

    /// In a new folder in this one.
    pub(crate) async fn sqlite_in(folder: &Path) -> Self {
        let folder = TempDir::new_in(folder).unwrap();
        let url = format!("sqlite://{}", folder.path().join("seckill.db").display());
        Self::open(&url, Home::Folder(folder)).await
    }

    pub(crate) async fn postgres() -> Self {
        Self::on_server("SECKILL_TEST_POSTGRES_URL").await
    }

    pub(crate) async fn mysql() -> Self {
        Self::on_server("SECKILL_TEST_MYSQL_URL").await
    }

    async fn on_server(variable: &str) -> Self {
        let Ok(admin_url) = std::env::var(variable) else {
            panic!("{variable} is not set: run `make test` or scripts/with-services COMMAND");
        };
        Self::on(&admin_url).await
    }

    /// On the server where this URL may create databases.
    pub(crate) async fn on(admin_url: &str) -> Self {
        let admin_url = admin_url.to_owned();
        let name = format!("seckill_{}", uuid::Uuid::now_v7().simple());
        let admin = admin(&admin_url).await;
        admin.execute_unprepared(&format!("CREATE DATABASE {name}")).await.unwrap();
        admin.close().await.unwrap();
        let mut url = url::Url::parse(&admin_url).unwrap();
        url.set_path(&name);
        Self::open(url.as_str(), Home::Server { admin_url, name }).await
    }

    async fn open(url: &str, home: Home) -> Self {
        let settings = DatabaseSettings {
            max_connections: 5,
            lock_timeout_ms: 1_000,
            ..DatabaseSettings::at(url)
        };
        let database = Database::open(&settings).await.unwrap();
        database.migrate_up(None).await.unwrap();
        Self { database, settings, home }
    }

    /// The settings that it was opened with, to open it once more.
    pub(crate) fn settings(&self) -> DatabaseSettings {
        self.settings.clone()
    }

    /// The name of a database on a server, and who may do anything to it.
    pub(crate) fn on_its_server(&self) -> (&str, &str) {
        match &self.home {
            Home::Server { admin_url, name } => (name, admin_url),
            Home::Folder(_) => panic!("a file is on no server"),
        }
    }

    /// The same database as another server process has it.
    pub(crate) async fn again(&self) -> Database {
        Database::open(&self.settings).await.unwrap()
    }

    pub(crate) async fn remove(self) {
        self.database.close().await.unwrap();
        if let Home::Server { admin_url, name } = &self.home {
            let force = if admin_url.starts_with("postgres") { "WITH (FORCE)" } else { "" };
            let admin = admin(admin_url).await;
            admin.execute_unprepared(&format!("DROP DATABASE {name} {force}")).await.unwrap();
            admin.close().await.unwrap();
        }
    }
}

/// A connection that may do anything.
pub(crate) async fn admin(url: &str) -> DatabaseConnection {
    let mut options = sea_orm::ConnectOptions::new(url);
    options.max_connections(1).sqlx_logging(false);
    sea_orm::Database::connect(options).await.unwrap()
}

/// Runs a test on a database and removes it afterwards, also when the test failed.
pub(crate) async fn run(fresh: Fresh, test: impl AsyncFnOnce(&Fresh)) {
    let outcome = AssertUnwindSafe(test(&fresh)).catch_unwind().await;
    fresh.remove().await;
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Makes three tests of each: `name::sqlite`, `name::postgres`, `name::mysql`.
macro_rules! on_every_database {
    ($($(#[$attribute:meta])* async fn $name:ident($db:ident: &Fresh) $body:block)*) => {$(
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports, reason = "not every test needs all of it")]
            use super::*;

            async fn test($db: &$crate::support::databases::Fresh) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                let fresh = $crate::support::databases::Fresh::sqlite().await;
                $crate::support::databases::run(fresh, test).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                let fresh = $crate::support::databases::Fresh::postgres().await;
                $crate::support::databases::run(fresh, test).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mysql() {
                let fresh = $crate::support::databases::Fresh::mysql().await;
                $crate::support::databases::run(fresh, test).await;
            }
        }
    )*};
}

pub(crate) use on_every_database;
