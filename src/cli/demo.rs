//! `seckill demo`: a whole sale in front of you, and the books afterwards.
//!
//! **Promise:** every figure of the report is either what a caller was told or what was read back
//! from the engine and the database; none is derived from what should have happened.

mod books;
mod buyers;
mod report;
mod sale;

use std::{net::SocketAddr, sync::Arc};

use clap::Args;
use futures_util::future::BoxFuture;
use indicatif::{ProgressBar, ProgressStyle};
use tonic::transport::Channel;

use super::{
    Context, Exit, client, credentials::Credentials, failure::Failure, output::Printer, serve,
};
use crate::{
    config::{Flag, Loaded, SecretUrl, Settings},
    server::Server,
    telemetry,
};

pub use books::{Books, BooksView, OfferBooks};
pub use report::DemoReport;
pub use sale::Demo;

/// Buyers that share a connection; a client opens several so that no window holds it up.
const TASKS_PER_CHANNEL: u32 = 16;
const MAX_CHANNELS: u32 = 8;

/// Runs a whole sale in front of you: buyers, orders, returns, and the books afterwards.
///
/// It starts a server of its own on the engine and the database of the settings; what is not set
/// is kept in memory. Exits 1 when a unit was sold twice or lost, or when a buyer got more than
/// allowed.
///
/// For example: seckill demo --units 100 --buyers 1000
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Units for sale, over all offers.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub units: u32,
    /// Buyers who want one unit each.
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub buyers: u32,
    /// Buyers at the same time.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub concurrency: u32,
    /// Offers that the units are spread over.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub offers: u32,
    /// Segments that the stock of each offer is split into.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub segments: u32,
    /// The stock engine (engine.url) [not set anywhere: the embedded one].
    #[arg(long, value_name = "URL")]
    pub engine_url: Option<String>,
    /// The SQL database (database.url) [not set anywhere: in memory].
    #[arg(long, value_name = "URL")]
    pub database_url: Option<String>,
}

/// A server inside this process.
struct Running {
    addr: SocketAddr,
    books: Arc<dyn Books>,
    /// Stops the server in order and waits until it has.
    stop: BoxFuture<'static, ()>,
}

/// Starts a server with these settings in this process.
async fn start_server(settings: Settings) -> Result<Running, Failure> {
    let server = Server::start(&settings).await.map_err(serve::start_failure)?;
    Ok(Running {
        addr: server.addr,
        books: Arc::new(server.parts.clone()),
        stop: Box::pin(server.stop()),
    })
}

pub(super) async fn run(options: Options, context: &Context) -> Result<Exit, Failure> {
    if options.offers > options.units {
        return Err(Failure::Usage(format!(
            "--offers {}: must be at most --units, which is {}",
            options.offers, options.units
        )));
    }
    let Loaded { mut settings, origins, .. } = context.settings(flags(&options))?;
    if !origins.contains_key("database.url") {
        settings.database.url = SecretUrl::new("sqlite::memory:");
    }
    // The server is for this process alone, on a loopback address and until the sale is over.
    (settings.auth, settings.tls) = Default::default();
    telemetry::init(&settings.log).map_err(Failure::Usage)?;
    let Running { addr, books, stop } = start_server(settings).await?;
    let report = run_against(addr, &*books, options, context).await;
    stop.await;
    let report = report?;
    if context.printer.is_json() {
        context.printer.answer(&serde_json::json!(report));
    } else {
        context.printer.data(&report.to_string());
    }
    Ok(Exit::of(report.broken.is_empty()))
}

async fn run_against(
    addr: SocketAddr,
    books: &dyn Books,
    options: Options,
    context: &Context,
) -> Result<DemoReport, Failure> {
    let (server, timeout) = (format!("http://{addr}"), context.global.timeout());
    let mut channels: Vec<Channel> = Vec::new();
    for _ in 0..options.concurrency.div_ceil(TASKS_PER_CHANNEL).min(MAX_CHANNELS) {
        channels.push(client::connect(&server, &Credentials::default(), timeout).await?);
    }
    let progress = Progress::new(context.printer);
    Demo::new(channels, options, context.global.timeout(), progress).run(books).await
}

/// A port of its own, beside a server that may run; the sale is an activity of its own, so it
/// harms nobody on the stores that the settings name.
fn flags(options: &Options) -> Vec<Flag> {
    // The log would run through the progress bar.
    let mut flags = [("grpc.addr", "127.0.0.1:0"), ("http.addr", ""), ("log.level", "warn")]
        .map(|(key, value)| Flag { name: "demo", key, value: value.to_owned() })
        .to_vec();
    let named = [
        ("--engine-url", "engine.url", &options.engine_url),
        ("--database-url", "database.url", &options.database_url),
    ];
    for (name, key, value) in named {
        if let Some(value) = value {
            flags.push(Flag { name, key, value: value.clone() });
        }
    }
    flags
}

/// How far the sale is: a bar on a terminal, a line per phase elsewhere.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Where to say which phase begins.
    printer: Option<Printer>,
    bar: ProgressBar,
}

impl Progress {
    pub(super) fn new(printer: Printer) -> Self {
        // It draws on stderr, and nothing where that is no terminal.
        let bar = ProgressBar::no_length();
        let template = "{prefix:<24} {bar:32} {pos:>7}/{len} {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("##."));
        }
        Self { printer: Some(printer), bar }
    }

    /// Shows nothing.
    #[must_use]
    pub fn silent() -> Self {
        Self { printer: None, bar: ProgressBar::hidden() }
    }

    /// Begins something of `steps` steps.
    fn begin(&self, what: &str, steps: u64) {
        if self.bar.is_hidden() {
            if let Some(printer) = self.printer {
                printer.note(what);
            }
            return;
        }
        self.bar.set_prefix(what.to_owned());
        self.bar.set_message(String::new());
        self.bar.set_length(steps);
        self.bar.reset();
    }

    fn step(&self) {
        self.bar.inc(1);
    }

    fn tell(&self, text: String) {
        self.bar.set_message(text);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
