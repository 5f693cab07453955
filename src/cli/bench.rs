//! `seckill bench`: measures a server of its own, and says what was reached.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};

mod show;

use super::{Context, Exit, failure::Failure, serve, span};
use crate::{
    bench::{
        self, Plan, Scenario, noop,
        peer::{self, Kind},
        scale::Along,
        schedule::Pace,
    },
    config::{Flag, Level, Loaded, LogSettings},
    domain::{ActivityId, OfferKey, SkuId},
    telemetry,
};
use show::{shown, shown_goals};

/// What to measure; `cli` has the help of it all.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// A storm of buyers who come too late: what a refusal costs, what winners hear, how soon a unit
    /// that came back is sold again.
    SoldOut(Stormy),
    /// More buyers than the server can serve: how many of them it serves, what the others hear, and
    /// how soon all is well again.
    Overload(Plain),
    /// What others do in place of this, over the same stores: an SQL row lock, a distributed lock, a
    /// naive script. How fast each is, and what each loses when it is killed.
    Peers(Plain),
    /// A durable win against what it is made of: a call that does nothing, a script, an INSERT.
    Steady(Plain),
    /// Wins over ReserveStream, against one call each.
    Streams(Plain),
    /// The outbox by itself: rows into it, and out of it into orders, against plain INSERTs.
    Drain(Plain),
    /// Thousands of streams of stock: what an update costs, what buyers notice, what a stream keeps.
    Watch(Plain),
    /// The Redis is 5 ms away: how much is won all the same.
    FarRedis(Plain),
    /// Each commit of PostgreSQL takes 2 ms longer, as on the disks of a cloud: how much is won all
    /// the same. Needs a superuser there.
    SlowCommits(Plain),
    /// 200,000 buyers within a second, for 10,000 units.
    Burst(Plain),
    /// Buyers who ask four times, and get one unit.
    Duplicates(Plain),
    /// Winners who give back what they have.
    Releases(Plain),
    /// 10,000 offers, some wanted more than others.
    ManyOffers(Plain),
    /// One offer in 1 to 8 segments on a Redis Cluster: how much is won, and by which node.
    Segments(Plain),
    /// A whole sale: most come too late, some ask twice, some give back, others watch.
    Soak(Stormy),
    /// Each trick left out: what is it worth?
    Ablations(Plain),
    /// Ever more offers, reservations, watchers: what each keeps in memory, what a call costs among
    /// them, how long a server takes to start and an offer to be rebuilt.
    #[command(mut_args(|arg| SCALE.tell(arg)))]
    Scale(Scaled),
    /// Every goal of the documentation: 20 minutes, one table, and whether each is met.
    #[command(mut_args(|arg| GOALS.tell(arg)))]
    Goals(Plain),
    Report(Written),
    #[command(hide = true)]
    Noop(Noop),
    #[command(hide = true)]
    Peer(Peer),
}

/// A scenario with a rate.
#[derive(Debug, Args)]
pub struct Stormy {
    #[command(flatten)]
    options: Options,
    /// Calls a second in the storm [without it: half of what the noop answers; soak: 5,000].
    #[arg(long, value_name = "PER_S", value_parser = clap::value_parser!(u32).range(100..=400_000))]
    rate: Option<u32>,
}

/// The scenario with ever more of something.
#[derive(Debug, Args)]
pub struct Scaled {
    #[command(flatten)]
    options: Options,
    /// What there is more and more of [without it: each of them, one after the other].
    #[arg(long, value_enum, value_name = "WHAT")]
    only: Option<AlongName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AlongName {
    Offers,
    Reservations,
    Watchers,
}

/// A scenario without options of its own.
#[derive(Debug, Args)]
pub struct Plain {
    #[command(flatten)]
    options: Options,
}

/// Makes a page of what earlier runs wrote.
#[derive(Debug, Args)]
pub struct Written {
    /// The files that were written by --json.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The page to write.
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
}

/// A server with another algorithm behind Reserve.
#[derive(Debug, Args)]
pub struct Peer {
    #[arg(value_enum)]
    kind: PeerKind,
    activity_id: String,
    sku_id: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PeerKind {
    RowLock,
    DistributedLock,
    DistributedLockFailFast,
    NaiveLua,
}

/// A server that answers Reserve with a constant.
#[derive(Debug, Args)]
pub struct Noop {}

/// What every scenario takes.
#[derive(Debug, Args)]
struct Options {
    /// A few seconds in all, one run, for CI; the figures are rough.
    #[arg(long)]
    quick: bool,
    #[arg(
        long,
        value_parser = clap::value_parser!(u8).range(1..=100),
        help = USUAL.help_of_repeats(),
    )]
    repeats: Option<u8>,
    #[arg(
        long,
        value_name = "SPAN",
        value_parser = span::parse,
        help = USUAL.help_of_lasts(),
    )]
    lasts: Option<Duration>,
    /// Writes everything into this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes a page with charts into this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// How calls of the open loop follow each other.
    #[arg(long, value_enum, default_value_t = PaceName::Poisson)]
    pace: PaceName,
    /// The same seed gives calls at the same times.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The stock engine (engine.url) [not set anywhere: the embedded one].
    #[arg(long, alias = "engine", value_name = "URL")]
    engine_url: Option<String>,
    /// The SQL database (database.url) [not set anywhere: a SQLite file for each run].
    #[arg(long, alias = "database", value_name = "URL")]
    database_url: Option<String>,
    /// Where that file and the logs of the servers are while it runs [without it: the folder of this
    /// system for temporary files].
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// How often a scenario is measured, and how long, unless somebody says.
#[derive(Debug, Clone, Copy)]
struct Usual {
    repeats: usize,
    lasts: Duration,
}

const USUAL: Usual = Usual { repeats: 5, lasts: Duration::from_secs(5) };
/// So that all of it takes less than 20 minutes.
const GOALS: Usual = Usual { repeats: 3, lasts: Duration::from_millis(1_500) };
/// A million reservations take their time.
const SCALE: Usual = Usual { repeats: 1, lasts: Duration::from_secs(3) };
/// In a hurry all are measured alike.
const QUICK: Usual = Usual { repeats: 1, lasts: Duration::from_secs(1) };

impl Usual {
    fn help_of_repeats(self) -> String {
        let (repeats, quick) = (self.repeats, QUICK.repeats);
        format!("How often everything is measured [without it: {repeats}; {quick} with --quick]")
    }

    fn help_of_lasts(self) -> String {
        let (lasts, quick) = (span::written(self.lasts), span::written(QUICK.lasts));
        format!("How long one measurement takes [without it: {lasts}; {quick} with --quick]")
    }

    /// The help of an option of a scenario that has others than the rest.
    fn tell(self, arg: clap::Arg) -> clap::Arg {
        match arg.get_id().as_str() {
            "repeats" => arg.help(self.help_of_repeats()),
            "lasts" => arg.help(self.help_of_lasts()),
            _ => arg,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PaceName {
    Poisson,
    Fixed,
}

impl Bench {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let (scenario, options, rate) = match self {
            Self::SoldOut(Stormy { options, rate }) => (Scenario::SoldOut, options, rate),
            Self::Soak(Stormy { options, rate }) => (Scenario::Soak, options, rate),
            Self::Overload(Plain { options }) => (Scenario::Overload, options, None),
            Self::Peers(Plain { options }) => (Scenario::Peers, options, None),
            Self::Steady(Plain { options }) => (Scenario::Steady, options, None),
            Self::Streams(Plain { options }) => (Scenario::Streams, options, None),
            Self::Drain(Plain { options }) => (Scenario::Drain, options, None),
            Self::Watch(Plain { options }) => (Scenario::Watch, options, None),
            Self::FarRedis(Plain { options }) => (Scenario::FarRedis, options, None),
            Self::SlowCommits(Plain { options }) => (Scenario::SlowCommits, options, None),
            Self::Burst(Plain { options }) => (Scenario::Burst, options, None),
            Self::Duplicates(Plain { options }) => (Scenario::Duplicates, options, None),
            Self::Releases(Plain { options }) => (Scenario::Releases, options, None),
            Self::ManyOffers(Plain { options }) => (Scenario::ManyOffers, options, None),
            Self::Segments(Plain { options }) => (Scenario::Segments, options, None),
            Self::Ablations(Plain { options }) => (Scenario::Ablations, options, None),
            Self::Scale(scaled) => return scale(&scaled, context).await,
            Self::Goals(Plain { options }) => return goals(&options, context).await,
            Self::Report(Written { files, html }) => return write_page(&files, &html),
            Self::Peer(peer) => return serve_peer(peer, context).await,
            Self::Noop(Noop {}) => return serve_noop(context).await,
        };
        measure(&plan(scenario, &options, USUAL, rate, context)?, &options, context).await
    }
}

async fn measure(plan: &Plan, options: &Options, context: &Context) -> Result<Exit, Failure> {
    let printer = context.printer;
    let tell = |text: &str| printer.note(text);
    let report = tokio::select! {
        report = bench::run(plan, &tell) => report.map_err(failure)?,
        // The servers go with what started them.
        () = serve::stop_signal() => {
            return Err(Failure::Unavailable("interrupted, nothing was measured".to_owned()));
        }
    };
    write(options, &json!(report))?;
    if printer.is_json() {
        printer.answer(&json!(report));
    } else {
        printer.data(&shown(&report));
    }
    Ok(Exit::of(report.broken.is_empty()))
}

async fn scale(scaled: &Scaled, context: &Context) -> Result<Exit, Failure> {
    let Scaled { options, only } = scaled;
    let mut plan = plan(Scenario::Scale, options, SCALE, None, context)?;
    plan.only = only.map(|only| match only {
        AlongName::Offers => Along::Offers,
        AlongName::Reservations => Along::Reservations,
        AlongName::Watchers => Along::Watchers,
    });
    measure(&plan, options, context).await
}

/// Every goal, one after the other.
async fn goals(options: &Options, context: &Context) -> Result<Exit, Failure> {
    let plan = plan(Scenario::SoldOut, options, GOALS, None, context)?;
    let printer = context.printer;
    let tell = |text: &str| printer.note(text);
    let goals = tokio::select! {
        goals = bench::goals::run(&plan, &tell) => goals,
        // The servers go with what started them.
        () = serve::stop_signal() => {
            return Err(Failure::Unavailable("interrupted, nothing was measured".to_owned()));
        }
    };
    let answer = json!(goals);
    write(options, &answer)?;
    if printer.is_json() {
        printer.answer(&answer);
    } else {
        printer.data(&shown_goals(&goals));
    }
    Ok(Exit::of(goals.is_whole()))
}

/// Writes the files that were asked for.
fn write(options: &Options, answer: &Value) -> Result<(), Failure> {
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(answer)
            .map_err(|error| Failure::Internal(error.to_string()))?;
        write_file(path, text + "\n")?;
    }
    if let Some(path) = &options.html {
        write_file(path, bench::html::page(std::slice::from_ref(answer)))?;
    }
    Ok(())
}

fn write_page(files: &[PathBuf], html: &Path) -> Result<Exit, Failure> {
    let mut reports = Vec::new();
    for path in files {
        let wrong = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
        let text = fs::read(path).map_err(|error| wrong(error.to_string()))?;
        let report: Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if report["scenario"].is_null() && report["goals"].is_null() {
            return Err(wrong("this is no report of a bench".to_owned()));
        }
        reports.push(report);
    }
    write_file(html, bench::html::page(&reports))?;
    Ok(Exit::Ok)
}

fn write_file(path: &Path, text: String) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
}

fn plan(
    scenario: Scenario,
    options: &Options,
    usual: Usual,
    rate: Option<u32>,
    context: &Context,
) -> Result<Plan, Failure> {
    let mut flags = Vec::new();
    let named = [
        ("--engine-url", "engine.url", &options.engine_url),
        ("--database-url", "database.url", &options.database_url),
    ];
    for (name, key, value) in named {
        if let Some(value) = value {
            flags.push(Flag { name, key, value: value.clone() });
        }
    }
    let Loaded { settings, file, origins } = context.settings(flags)?;
    // The books are read by parts of a server, which tell more than anybody wants to know here.
    let log = LogSettings { level: Level::Warn, ..settings.log.clone() };
    telemetry::init(&log).map_err(Failure::Usage)?;
    let all = json!(settings);
    let mut named_settings = Map::new();
    for key in origins.keys() {
        let value = key.split('.').try_fold(&all, |value, part| value.get(part));
        named_settings.insert(key.clone(), value.cloned().unwrap_or(Value::Null));
    }
    let usual = if options.quick { QUICK } else { usual };
    let absolute = |path: PathBuf| {
        fs::canonicalize(&path)
            .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
    };
    Ok(Plan {
        scenario,
        quick: options.quick,
        repeats: options.repeats.map_or(usual.repeats, usize::from),
        seed: options.seed,
        pace: match options.pace {
            PaceName::Poisson => Pace::Poisson,
            PaceName::Fixed => Pace::Fixed,
        },
        rate: rate.map(f64::from),
        lasts: options.lasts.unwrap_or(usual.lasts),
        only: None,
        own_database: !origins.contains_key("database.url"),
        settings,
        config: file.map(absolute).transpose()?,
        folder: absolute(options.folder.clone().unwrap_or_else(std::env::temp_dir))?,
        named_settings,
    })
}

fn failure(error: bench::Error) -> Failure {
    match error {
        bench::Error::Usage(text) => Failure::Usage(text),
        bench::Error::Unavailable(text) => Failure::Unavailable(text),
        bench::Error::Internal(text) => Failure::Internal(text),
    }
}

async fn serve_peer(peer: Peer, context: &Context) -> Result<Exit, Failure> {
    let Loaded { settings, .. } = context.settings(Vec::new())?;
    telemetry::init(&settings.log).map_err(Failure::Usage)?;
    let ready = |addr: std::net::SocketAddr| {
        context.printer.answer(&json!({"grpc_addr": addr.to_string()}));
    };
    let kind = match peer.kind {
        PeerKind::RowLock => Kind::RowLock,
        PeerKind::DistributedLock => Kind::DistributedLock,
        PeerKind::DistributedLockFailFast => Kind::DistributedLockFailFast,
        PeerKind::NaiveLua => Kind::NaiveLua,
    };
    let offer = OfferKey {
        activity_id: ActivityId::new(&peer.activity_id)
            .map_err(|error| Failure::Usage(format!("activity_id: {error:?}")))?,
        sku_id: SkuId::new(&peer.sku_id)
            .map_err(|error| Failure::Usage(format!("sku_id: {error:?}")))?,
    };
    peer::serve(&settings, kind, offer, ready, serve::stop_signal()).await.map_err(failure)?;
    Ok(Exit::Ok)
}

async fn serve_noop(context: &Context) -> Result<Exit, Failure> {
    let Loaded { settings, .. } = context.settings(Vec::new())?;
    telemetry::init(&settings.log).map_err(Failure::Usage)?;
    let ready = |addr: std::net::SocketAddr| {
        context.printer.answer(&json!({"grpc_addr": addr.to_string()}));
    };
    noop::serve(&settings, ready, serve::stop_signal()).await.map_err(failure)?;
    Ok(Exit::Ok)
}
