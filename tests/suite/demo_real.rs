//! `seckill demo` against real servers: a whole sale, and books that agree.

use std::process::Output;

use serde_json::Value;
use tokio::process::Command;

use crate::support::{cluster::Cluster, world::on_every_ground};

async fn demo(variables: &[(&str, &str)], args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_seckill"));
    command
        .args(["demo", "--output", "json"])
        .args(args)
        .current_dir(folder.path())
        .env_clear()
        // Nobody shall be refused for the speed of a debug build among many tests.
        .env("SECKILL__RESERVE__MAX_WAIT_MS", "1000")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    let output = command.output().await.unwrap();
    let left: Vec<_> = folder.path().read_dir().unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    output
}

/// All was sold, and every book says the same.
fn assert_sound(output: &Output) -> Value {
    let text = format!("{output:?}");
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (figure, expected) in [
        ("units", 1_000),
        ("buyers", 5_000),
        ("wins", 1_000),
        ("orders", 1_000),
        ("remaining", 0),
        ("oversold", 0),
        ("lost", 0),
        ("duplicates", 0),
        ("repeats", 0),
    ] {
        assert_eq!(report[figure], expected, "{figure} in {text}");
    }
    assert_eq!(report["broken"], Value::Array(Vec::new()), "{text}");
    assert_eq!(report["outcomes"]["RESERVED"], 1_000, "{text}");
    assert_eq!(report["outcomes"]["SOLD_OUT"], 4_000, "{text}");
    report
}

#[tokio::test]
async fn the_demo_needs_nothing_and_leaves_nothing() {
    assert_sound(&demo(&[], &[]).await);
}

#[tokio::test]
async fn the_demo_sells_over_segments() {
    assert_sound(&demo(&[], &["--segments", "16"]).await);
}

#[tokio::test]
async fn the_demo_sells_over_segments_on_all_masters_of_a_cluster() {
    let cluster = Cluster::start().await;
    assert_sound(&demo(&[], &["--segments", "16", "--engine-url", &cluster.url()]).await);
    let mut of_masters = Vec::new();
    for master in cluster.masters() {
        let mut buyers = 0;
        for key in master.command::<Vec<String>>(&["KEYS", "sk:*:buyers"]).await {
            buyers += master.command::<u64>(&["SCARD", &key]).await;
        }
        of_masters.push(buyers);
    }
    assert_eq!(of_masters.iter().sum::<u64>(), 1_000, "{of_masters:?}");
    assert!(!of_masters.contains(&0), "{of_masters:?}");
}

on_every_ground! {
    async fn the_demo_sells_on_the_stores_of_the_settings(ground: &Ground<'_>) {
        let settings = ground.settings();
        let engine = settings.engine.url.expose();
        let database = settings.database.url.expose();
        let report = match &ground.redis {
            // One of the two by flag, one by environment.
            Some(_) => {
                let variables = [("SECKILL__DATABASE__URL", database)];
                assert_sound(&demo(&variables, &["--engine-url", engine]).await)
            }
            None => assert_sound(&demo(&[], &["--database-url", database]).await),
        };
        // What it sold is there, and not in memory.
        let world = ground.world().await;
        let sold = world.parts.catalog.all();
        assert_eq!(sold.len(), 1);
        assert_eq!(report["activity_id"], sold[0].id.as_str());
        world.close().await;
    }
}
