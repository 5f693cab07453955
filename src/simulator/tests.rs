//! Which seeds are run, how long, and that a broken protocol is found.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};

use super::{
    Break,
    run::{Outcome, run},
};
use crate::database::{Database, DatabaseSettings};

/// A database with the schema and nothing else; made once, by the real migrations.
fn schema() -> &'static Path {
    static SCHEMA: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_folder, file) = SCHEMA.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("schema.db");
        let settings = DatabaseSettings::at(&format!("sqlite://{}", file.display()));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let database = Database::open(&settings).await.unwrap();
            database.migrate_up(None).await.unwrap();
            database.close().await.unwrap();
        });
        (folder, file)
    });
    file
}

#[allow(clippy::disallowed_methods, reason = "what a test is told is no setting")]
fn told(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a whole number, not {text}")))
}

fn simulate(seed: u64) -> Outcome {
    run(seed, schema(), None, false)
}

#[test]
fn try_some() {
    let from = told("SECKILL_SIM_SEED");
    if let Some(seed) = from {
        let outcome = run(seed, schema(), None, true);
        for line in &outcome.lines {
            println!("{line}");
        }
        println!("{:#?}", outcome.violations);
        return;
    }
    let begin = Instant::now();
    let (mut runs, mut steps, mut won) = (0, 0, 0);
    let mut bad = 0;
    for seed in 0..told("SECKILL_SIM_SEEDS").unwrap_or(50) {
        let outcome = simulate(seed);
        runs += 1;
        steps += outcome.steps;
        won += outcome.won;
        if let Some(first) = outcome.violations.first() {
            bad += 1;
            println!("seed {seed}: {first}");
        }
    }
    println!("{runs} runs, {steps} steps, {won} won, {bad} bad in {:?}", begin.elapsed());
}
