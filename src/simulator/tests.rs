//! Which seeds are run, how long, and that a broken protocol is found.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock},
    time::{Duration, Instant},
};

use super::{
    Break,
    run::{Outcome, run},
};
use crate::database::{Database, DatabaseSettings};

/// Run every time, whatever else there is time for.
const FIRST_SEEDS: u64 = 100;
/// How long the search goes on, unless `SECKILL_SIM_SECONDS` says.
const SECONDS: u64 = 45;
/// In how many seeds each broken protocol must be found.
const FOUND_WITHIN: u64 = 150;

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

/// Seeds that failed once.
fn seeds_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/seeds/simulator.txt")
}

fn known_seeds() -> Vec<u64> {
    let text = fs::read_to_string(seeds_file()).unwrap();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    lines.filter(|line| !line.is_empty()).map(|line| line.parse().unwrap()).collect()
}

#[allow(clippy::disallowed_methods, reason = "what a test is told is no setting")]
fn told(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a whole number, not {text}")))
}

fn simulate(seed: u64, broken: Option<Break>) -> Outcome {
    run(seed, schema(), broken, false)
}

#[test]
fn no_seed_breaks_a_promise() {
    if let Some(seed) = told("SECKILL_SIM_SEED") {
        let outcome = run(seed, schema(), None, true);
        outcome.lines.iter().for_each(|line| println!("{line}"));
        assert_eq!(outcome.violations, Vec::<String>::new());
        return;
    }
    let limit = Duration::from_secs(told("SECKILL_SIM_SECONDS").unwrap_or(SECONDS));
    let fresh = told("SECKILL_SIM_FROM").unwrap_or_else(|| fastrand::u64(..) >> 16);
    let sure = known_seeds().into_iter().chain(0..FIRST_SEEDS);
    let search = Search { end: Instant::now() + limit, total: Mutex::default() };
    let seeds =
        Mutex::new(sure.map(|seed| (seed, true)).chain((fresh..).map(|seed| (seed, false))));
    std::thread::scope(|scope| {
        for _ in 0..told("SECKILL_SIM_THREADS").unwrap_or(1) {
            scope.spawn(|| search.work(&seeds));
        }
    });
    let Total { seeds, steps, won, seen, failed } = search.total.into_inner().unwrap();
    seen.iter().for_each(|(what, times)| println!("{times:>9} {what}"));
    println!("{seeds} seeds, the fresh ones from {fresh}: {steps} steps, {won} reservations");
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(won as u64 > seeds, "the runs hardly sell anything: {won} reservations");
}

/// A search for a seed that breaks a promise.
struct Search {
    end: Instant,
    total: Mutex<Total>,
}

#[derive(Default)]
struct Total {
    seeds: u64,
    steps: u64,
    won: usize,
    seen: BTreeMap<String, u64>,
    failed: Vec<String>,
}

impl Search {
    /// Runs seeds until one fails, or the time is over and those are done that must be.
    fn work(&self, seeds: &Mutex<impl Iterator<Item = (u64, bool)>>) {
        loop {
            let next = seeds.lock().unwrap().next();
            let Some((seed, _)) = next.filter(|(_, must)| *must || Instant::now() < self.end)
            else {
                return;
            };
            let outcome = simulate(seed, None);
            let mut total = self.total.lock().unwrap();
            total.seeds += 1;
            total.steps += outcome.steps;
            total.won += outcome.won;
            for (what, times) in outcome.seen {
                *total.seen.entry(what).or_default() += times;
            }
            if !outcome.violations.is_empty() {
                total.failed.push(keep(seed, &outcome.violations));
            }
            if !total.failed.is_empty() {
                return;
            }
        }
    }
}

/// Keeps the seed of a failure, and says how to see it again.
fn keep(seed: u64, violations: &[String]) -> String {
    if !known_seeds().contains(&seed)
        && let Ok(mut file) = fs::OpenOptions::new().append(true).open(seeds_file())
    {
        // A source tree that can't be written to does not change the finding.
        let _ = writeln!(file, "{seed} # {:.100}", violations[0]);
    }
    format!(
        "seed {seed} breaks {} promises, first: {}\n\
         to see each step: SECKILL_SIM_SEED={seed} cargo test --lib simulator -- --nocapture",
        violations.len(),
        violations[0]
    )
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..12 {
        let (first, second) = (run(seed, schema(), None, true), run(seed, schema(), None, true));
        for (n, (a, b)) in first.lines.iter().zip(&second.lines).enumerate() {
            assert_eq!(a, b, "seed {seed}, step {n}");
        }
        assert_eq!((first.hash, first.steps), (second.hash, second.steps), "seed {seed}");
    }
}

#[test]
fn every_broken_protocol_is_found() {
    for broken in [
        Break::CommitNotKept,
        Break::ReleaseTwice,
        Break::AcknowledgeAtOnce,
        Break::ReleaseNotRun,
        Break::EpochNotCompared,
        Break::UnknownGuessed,
        Break::RebuildLosesOne,
    ] {
        let found = (0..FOUND_WITHIN).find_map(|seed| {
            simulate(seed, Some(broken)).violations.into_iter().next().map(|v| (seed, v))
        });
        println!("{broken:?}: {found:?}");
        assert!(found.is_some(), "{broken:?} is not found in {FOUND_WITHIN} seeds");
    }
}
