//! `seckill migrate`: the SQL schema, forwards and back.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Context, Exit, failure::Failure, serve::start_failure};
use crate::{
    config::{DatabaseSettings, Flag},
    database::Database,
    server::{schema_failure, sql_settings},
};

/// Brings the schema of the database up to date, or back, or shows where it stands.
///
/// A server brings SQLite up to date by itself; on other databases it waits for this.
///
/// For example: seckill migrate status
#[derive(Debug, Args)]
pub struct Migrate {
    /// The SQL database (database.url) [not set anywhere: sqlite://data/seckill.db].
    #[arg(long, global = true, value_name = "URL")]
    database_url: Option<String>,
    #[command(subcommand)]
    direction: Direction,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Direction {
    /// Applies what is missing.
    Up {
        /// At most this many steps [without it: all].
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        steps: Option<u32>,
    },
    /// Takes steps back, the newest first; this deletes data.
    Down {
        /// How many steps.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        steps: u32,
    },
    /// Shows every step and whether it is applied; exits 1 when one is missing.
    Status,
}

/// One step of the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) applied: bool,
}

impl Migrate {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let flags = self.database_url.map(|value| Flag {
            name: "--database-url",
            key: "database.url",
            value,
        });
        let loaded = context.settings(flags.into_iter().collect())?;
        let database = &loaded.settings.database;
        let working = context.printer.spinner("working on the schema");
        let moved = match self.direction {
            Direction::Up { steps } => up(database, steps).await,
            Direction::Down { steps } => down(database, steps).await,
            Direction::Status => Ok(()),
        };
        working.finish_and_clear();
        moved?;
        let steps = status(database).await?;
        let all = steps.iter().all(|step| step.applied);
        let rows: Value =
            steps.iter().map(|step| json!({"step": step.name, "applied": step.applied})).collect();
        context.printer.answer(&json!({"steps": rows}));
        match self.direction {
            Direction::Status => Ok(Exit::of(all)),
            Direction::Up { .. } | Direction::Down { .. } => Ok(Exit::Ok),
        }
    }
}

/// Opens the database, with its schema as it is, unless that is newer than this program.
async fn open(database: &DatabaseSettings) -> Result<Database, Failure> {
    let database = Database::open(&sql_settings(database))
        .await
        .map_err(|error| start_failure(error.into()))?;
    let seen = database.migration_status().await;
    seen.map_err(|error| start_failure(schema_failure(error)))?;
    Ok(database)
}

async fn up(database: &DatabaseSettings, steps: Option<u32>) -> Result<(), Failure> {
    open(database).await?.migrate_up(steps).await.map_err(failed)
}

async fn down(database: &DatabaseSettings, steps: u32) -> Result<(), Failure> {
    open(database).await?.migrate_down(steps).await.map_err(failed)
}

async fn status(database: &DatabaseSettings) -> Result<Vec<Step>, Failure> {
    let steps = open(database).await?.migration_status().await.map_err(failed)?;
    Ok(steps.into_iter().map(|(name, applied)| Step { name, applied }).collect())
}

fn failed(error: sea_orm::DbErr) -> Failure {
    Failure::Unavailable(format!("the migration did not succeed: {error}"))
}
