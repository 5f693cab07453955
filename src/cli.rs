//! The command line: one binary that is the server and the tool of its operators.
//!
//! **Promises:** data goes to stdout and everything else to stderr; the exit code tells what
//! came of it, by [`Exit`].

mod activity;
mod adjust;
mod audit;
mod bench;
mod client;
mod completions;
mod credentials;
mod dead_letters;
pub mod demo;
pub mod doctor;
pub mod failure;
mod health;
mod json;
mod man;
mod migrate;
mod output;
mod reconcile;
mod reservation;
mod scope;
pub mod serve;
mod smoke;
mod span;
mod status;
mod token;
mod version;
mod warmup;
mod watch;

use std::{
    ffi::OsString,
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{
    Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum, error::ErrorKind,
};
use futures_util::FutureExt as _;

use failure::Failure;
use output::Printer;

use crate::{
    config::{Flag, Loaded, Settings, SettingsError, Sources},
    server::{redis_settings, sql_settings},
};

/// Where `seckill serve` listens unless told otherwise.
const DEFAULT_SERVER: &str = "http://127.0.0.1:50051";

/// The head of the options that say whom to call, and as whom.
const CALLING: &str = "Calling a server";

/// What every `--help` ends with.
const EXIT_CODES: &str = "\
Exit codes:
   0  it went well
   1  the answer is no: not serving, not reserved, not found, an invariant is broken
  64  the command line, a file or a setting is wrong
  69  a service is unavailable: no server, no TLS with it, the port is in use, no engine,
      no database
  70  a fault of ours; please report it";

/// Takes and gives back the units of flash sales: a server, and the tool of its operators.
#[derive(Debug, Parser)]
#[command(
    name = "seckill",
    version,
    after_help = EXIT_CODES,
    arg_required_else_help = true,
    propagate_version = true,
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// What commands have in common; `scope` says which of it one takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Common options")]
pub struct Global {
    /// How answers are shown; JSON is one object per answer.
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    /// The settings file [without it: ./seckill.toml, if it is there].
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SECKILL_CONFIG",
        hide_env_values = true
    )]
    pub config: Option<PathBuf>,
    /// The server to call.
    #[arg(
        long,
        global = true,
        help_heading = CALLING,
        value_name = "URL",
        env = "SECKILL_SERVER",
        hide_env_values = true,
        default_value = DEFAULT_SERVER
    )]
    pub server: String,
    /// How long a call may take, as in 500ms, 5s or 1m [without it: 5s; 10m for what goes through
    /// all reservations of an activity].
    #[arg(
        long,
        global = true,
        help_heading = CALLING,
        value_name = "SPAN",
        value_parser = span::parse
    )]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub credentials: credentials::Credentials,
}

impl Global {
    /// How long a call may take that looks at a few rows.
    fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(5))
    }

    /// How long a call may take that goes through all reservations of an activity.
    fn long_timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(600))
    }
}

/// How answers are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Table,
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    Serve(serve::Serve),
    Migrate(migrate::Migrate),
    Demo(demo::Options),
    Smoke(smoke::Smoke),
    /// Measures a server on this machine, against a call that does nothing.
    ///
    /// It starts the server as a process of its own on a free port of loopback and ends it again. The
    /// generator runs in this process, so both share the cores; let nothing else run beside it. Exits
    /// 1 when the books do not agree afterwards; then there are no figures. A goal that is missed is
    /// a figure like any other.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Makes, shows and moves activities.
    #[command(subcommand)]
    Activity(activity::Activity),
    Warmup(warmup::Warmup),
    Reserve(reservation::Reserve),
    Release(reservation::Release),
    Confirm(reservation::Confirm),
    Reservation(reservation::Get),
    Watch(watch::Watch),
    Adjust(adjust::Adjust),
    Status(status::Status),
    Reconcile(reconcile::Reconcile),
    Rebuild(reconcile::Rebuild),
    /// Lists, retries and discards reservations that could not become orders.
    #[command(subcommand)]
    DeadLetters(dead_letters::DeadLetters),
    Audit(audit::Audit),
    /// Makes tokens for callers.
    #[command(subcommand)]
    Token(token::TokenCommand),
    Health(health::Health),
    Doctor(doctor::Doctor),
    Completions(completions::Completions),
    Man(man::Man),
    Version(version::Version),
}

/// What came of a command, as the exit code tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Ok,
    /// The question was answered, and the answer is no.
    No,
    /// The command line, a file or a setting is wrong.
    Usage,
    /// A service that is needed does not answer.
    Unavailable,
    /// A fault of ours.
    Internal,
}

impl Exit {
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::No => 1,
            Self::Usage => 64,
            Self::Unavailable => 69,
            Self::Internal => 70,
        }
    }

    /// `Ok` for yes.
    fn of(yes: bool) -> Self {
        if yes { Self::Ok } else { Self::No }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// What a command has at hand.
#[derive(Debug)]
struct Context {
    global: Global,
    printer: Printer,
}

impl Context {
    /// The settings of this process under these flags.
    fn settings(&self, flags: Vec<Flag>) -> Result<Loaded, Failure> {
        let sources = Sources::of_process(self.global.config.clone(), flags);
        let loaded = sources.load().map_err(Failure::Settings)?;
        let problems = unusable_urls(&loaded);
        if problems.is_empty() {
            Ok(loaded)
        } else {
            Err(Failure::Settings(SettingsError { problems }))
        }
    }
}

/// What is wrong with the URLs of the stores beyond their schemes: only the stores read them.
fn unusable_urls(loaded: &Loaded) -> Vec<String> {
    let from = |key| match loaded.origins.get(key) {
        Some(origin) => format!(" ({origin})"),
        None => String::new(),
    };
    let Settings { database, engine, .. } = &loaded.settings;
    let of_database = sql_settings(database).violations().into_iter();
    let of_database = of_database.filter(|(key, _)| *key == "url").map(|(_, text)| {
        format!("database.url = {}{}: {text}", database.url, from("database.url"))
    });
    let of_engine = redis_settings(engine).and_then(|redis| redis.target().err());
    let of_engine = of_engine.map(|error| format!("{error}{}", from("engine.url")));
    of_database.chain(of_engine).collect()
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> Exit {
    panic::set_hook(Box::new(output::panicked));
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let failure = Failure::Internal(format!("no runtime: {error}"));
            return Printer::new(cli.global.output).failure(&failure);
        }
    };
    // What a command left running, such as a read of the terminal, must not hold up the exit.
    let exit = runtime.block_on(run(cli));
    runtime.shutdown_timeout(Duration::from_secs(1));
    exit
}

/// The whole command line; the long help of each command ends with the exit codes.
fn command() -> clap::Command {
    scope::as_read(with_exit_codes(Cli::command()))
}

/// The same for the completions of a shell.
fn completed() -> clap::Command {
    scope::as_completed(Cli::command())
}

fn with_exit_codes(command: clap::Command) -> clap::Command {
    let names: Vec<String> =
        command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |command| with_exit_codes(command.after_long_help(EXIT_CODES)))
    })
}

/// Reads the arguments; prints help, the version, or what is wrong with them.
fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Exit> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    // Many a tool takes `help COMMAND` for `COMMAND --help`.
    if args.get(1).is_some_and(|word| word == "help") {
        args.remove(1);
        args.push("--help".into());
    }
    let parsed = command().try_get_matches_from(args).and_then(|matches| {
        if let Some(text) = scope::useless(&command(), &matches) {
            return Err(command().error(ErrorKind::UnknownArgument, text));
        }
        Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command()))
    });
    parsed.map_err(|error| {
        // Nothing can be done where even this can't be printed.
        let _ = error.print();
        if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
            Exit::Ok
        } else {
            Exit::Usage
        }
    })
}

/// Runs one command to its end.
pub async fn run(cli: Cli) -> Exit {
    let context = Context { printer: Printer::new(cli.global.output), global: cli.global };
    settle(dispatch(cli.command, &context), context.printer).await
}

/// Turns what a command came to into an exit code; a panic is a fault of ours.
async fn settle(command: impl Future<Output = Result<Exit, Failure>>, printer: Printer) -> Exit {
    match AssertUnwindSafe(command).catch_unwind().await {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => printer.failure(&failure),
        // The hook has said why.
        Err(_) => Exit::Internal,
    }
}

async fn dispatch(command: Command, context: &Context) -> Result<Exit, Failure> {
    match command {
        Command::Serve(serve) => serve.run(context).await,
        Command::Migrate(migrate) => migrate.run(context).await,
        Command::Demo(options) => demo::run(options, context).await,
        Command::Smoke(smoke) => smoke.run(context).await,
        Command::Bench(bench) => bench.run(context).await,
        Command::Activity(activity) => activity.run(context).await,
        Command::Warmup(warmup) => warmup.run(context).await,
        Command::Reserve(reserve) => reserve.run(context).await,
        Command::Release(release) => release.run(context).await,
        Command::Confirm(confirm) => confirm.run(context).await,
        Command::Reservation(get) => get.run(context).await,
        Command::Watch(watch) => watch.run(context).await,
        Command::Adjust(adjust) => adjust.run(context).await,
        Command::Status(status) => status.run(context).await,
        Command::Reconcile(reconcile) => reconcile.run(context).await,
        Command::Rebuild(rebuild) => rebuild.run(context).await,
        Command::DeadLetters(dead_letters) => dead_letters.run(context).await,
        Command::Audit(audit) => audit.run(context).await,
        Command::Token(token) => token.run(context),
        Command::Health(health) => health.run(context).await,
        Command::Doctor(doctor) => doctor.run(context).await,
        Command::Completions(completions) => completions.run(context),
        Command::Man(man) => man.run(context),
        Command::Version(version) => version.run(context),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
        completed().debug_assert();
    }

    #[tokio::test]
    async fn a_panic_is_a_fault_of_ours() {
        let exit = settle(async { panic!("on purpose") }, Printer::new(Output::Table)).await;
        assert_eq!((exit, exit.code()), (Exit::Internal, 70));
    }

    #[test]
    fn every_command_says_what_it_does() {
        for command in command().get_subcommands() {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
        }
    }
}
