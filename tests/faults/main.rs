//! The fault suite: breaks real servers, stores and wires, and counts what was oversold and lost.
//!
//! A scenario runs `seckill serve` as processes over a Redis and a database of their own, lets
//! buyers come, breaks something in the middle, and mends it without touching the servers. Then
//! everything that a caller was told must be true, and every unit must be sold or for sale.
//! See "Faults" in CONTRIBUTING.md.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by panicking, on whatever it did not expect"
)]

use std::{
    panic::AssertUnwindSafe,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use clap::Parser;
use futures_util::{FutureExt as _, future::join_all};
use tokio::sync::Mutex;

mod arena;
mod crowd;
mod oracle;
mod scenarios;
mod stores;
#[path = "../suite"]
mod suite {
    #[allow(
        dead_code,
        unused_imports,
        unused_macros,
        reason = "shared with the suite, which needs more of it"
    )]
    pub(crate) mod support;
}
mod table;

use arena::Arena;
use oracle::Verdict;
use scenarios::{Scale, Scenario};
use stores::{Sql, SqlServer};
use suite::support;
use table::{Row, Table};

/// The most that one run may take before it counts as one that does not come back.
const RUN_LIMIT: Duration = Duration::from_secs(180);

/// Breaks real things, and exits with 1 if anything was oversold, lost or did not come back.
#[derive(Debug, Parser)]
#[command(name = "faults")]
struct Args {
    /// Every scenario on every database, with the default settings of a server.
    #[arg(long, conflicts_with = "short")]
    full: bool,
    /// Every scenario on one database, with settings that are quick to settle.
    #[arg(long)]
    short: bool,
    /// Only scenarios whose name contains this; `crash` or `"sql black hole"`.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Only on this database: sqlite, postgres or mariadb.
    #[arg(long, value_name = "NAME")]
    on: Option<String>,
    /// How often each run is repeated.
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// How long the chaos lasts; 20 in the short form and 90 in the full one.
    #[arg(long, value_name = "SECONDS")]
    chaos_s: Option<u64>,
    /// What the dice roll from; a number that was printed repeats a run's dice.
    #[arg(long)]
    seed: Option<u64>,
    /// How many databases are worked on at the same time.
    #[arg(long)]
    jobs: Option<usize>,
    /// Also writes the table as JSON.
    #[arg(long, value_name = "PATH", env = "SECKILL_FAULTS_JSON")]
    json: Option<PathBuf>,
    /// Keeps what the servers wrote, also of runs that went well.
    #[arg(long)]
    keep_logs: bool,
    /// Names the scenarios.
    #[arg(long)]
    list: bool,
    /// `cargo test FILTER` hands its filter to every test binary; this one has its own options.
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    of_cargo: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let scale = Scale {
        is_short: !args.full,
        chaos_s: args.chaos_s.unwrap_or(if args.full { 90 } else { 20 }),
        seed: args.seed.unwrap_or_else(|| fastrand::u64(0..1_000_000)),
    };
    if !args.full && !args.short && !args.list {
        println!("nothing is broken unless you ask: --short, --full, or --list");
        return ExitCode::SUCCESS;
    }
    if args.list {
        for scenario in scenarios::all(scale) {
            let on: Vec<&str> = scenario.sqls.iter().map(|sql| sql.name()).collect();
            println!("{}  ({})", scenario.name, on.join(", "));
        }
        return ExitCode::SUCCESS;
    }
    // The table tells what failed; a backtrace leads to the waiting, not to the cause.
    std::panic::set_hook(Box::new(|panic| progress(&format!("    {panic}"))));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::select! {
            code = run(&args, scale) => code,
            _ = tokio::signal::ctrl_c() => ExitCode::from(130),
        }
    })
}

/// What is to be run on one database, in order.
struct Lane {
    sql: Sql,
    runs: Vec<Scenario>,
}

async fn run(args: &Args, scale: Scale) -> ExitCode {
    let began = Instant::now();
    let mut lanes: Vec<Lane> = Sql::ALL.iter().map(|&sql| Lane { sql, runs: Vec::new() }).collect();
    for (nth, sql) in Sql::ALL.iter().enumerate() {
        for (at, scenario) in scenarios::all(scale).into_iter().enumerate() {
            let turn = scenario.sqls[at % scenario.sqls.len()];
            let is_wanted = (args.only.is_empty()
                || args.only.iter().any(|text| scenario.name.contains(text.as_str())))
                && args.on.as_ref().is_none_or(|name| name == sql.name());
            let is_due = match &args.on {
                Some(_) => scenario.sqls.contains(sql),
                None if scale.is_short => turn == *sql,
                None => scenario.sqls.contains(sql),
            };
            if is_wanted && is_due {
                lanes[nth].runs.push(scenario);
            }
        }
    }
    let total: usize = lanes.iter().map(|lane| lane.runs.len()).sum();
    if total == 0 {
        eprintln!("no scenario has such a name; --list names them");
        return ExitCode::from(64);
    }
    progress(&format!("{total} scenarios, seed {}", scale.seed));
    let jobs = Arc::new(tokio::sync::Semaphore::new(args.jobs.unwrap_or(3)));
    let rows = join_all(lanes.into_iter().map(|lane| {
        let jobs = jobs.clone();
        async move {
            let _permit = jobs.acquire().await.unwrap();
            run_lane(lane, args, scale).await
        }
    }));
    let table = Table { rows: rows.await.concat(), seed: scale.seed, took: began.elapsed() };
    println!("{table}");
    if let Some(path) = &args.json {
        std::fs::write(path, table.json()).unwrap();
    }
    if table.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run_lane(lane: Lane, args: &Args, scale: Scale) -> Vec<Row> {
    let mut rows = Vec::new();
    if lane.runs.is_empty() {
        return rows;
    }
    let mut server = match lane.sql {
        Sql::Sqlite => None,
        Sql::Postgres | Sql::MariaDb => {
            Some(Arc::new(Mutex::new(SqlServer::start(lane.sql).await)))
        }
    };
    for scenario in &lane.runs {
        let mut row = Row::new(&scenario.name, lane.sql.name());
        for nth in 0..args.runs {
            let mut setup = scenario.setup.clone();
            setup.seed = setup.seed.wrapping_add(nth);
            let began = Instant::now();
            let played = play(scenario, setup, lane.sql, server.clone(), scale, args.keep_logs);
            let played = AssertUnwindSafe(played).catch_unwind();
            let verdict = match tokio::time::timeout(RUN_LIMIT, played).await {
                Ok(Ok(verdict)) => verdict,
                Ok(Err(panic)) => broken(panic_text(&*panic)),
                Err(_) => broken(format!("not over after {RUN_LIMIT:?}")),
            };
            let is_fine = verdict.problems.is_empty();
            row.add(&verdict);
            progress(&format!("{} ({:.1} s)", row.line(), began.elapsed().as_secs_f64()));
            for problem in verdict.problems.iter().take(8) {
                progress(&format!("    {problem}"));
            }
            // A run that failed may leave its database held or stopped.
            if !is_fine && server.is_some() {
                drop(server.take());
                server = Some(Arc::new(Mutex::new(SqlServer::start(lane.sql).await)));
            }
        }
        rows.push(row);
    }
    rows
}

async fn play(
    scenario: &Scenario,
    setup: arena::Setup,
    sql: Sql,
    server: Option<Arc<Mutex<SqlServer>>>,
    scale: Scale,
    keep_logs: bool,
) -> Verdict {
    let mut arena = Arena::open(sql, server, setup, scale.is_short).await;
    let struck = (scenario.strike)(&mut arena).await;
    let verdict = oracle::judge(&mut arena, &struck).await;
    if keep_logs || !verdict.problems.is_empty() {
        for path in arena.keep_logs(&scenario.name.replace(' ', "-")) {
            progress(&format!("    its log is {}", path.display()));
        }
    }
    arena.close().await;
    verdict
}

fn broken(problem: String) -> Verdict {
    Verdict { problems: vec![problem], ..Verdict::default() }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// One line for whoever waits.
pub(crate) fn progress(text: &str) {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = BEGAN.get_or_init(Instant::now).elapsed();
    eprintln!("{:>6.1} s  {text}", began.as_secs_f64());
}
