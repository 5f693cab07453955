//! `seckill serve`: the server.

use clap::Args;
use serde_json::json;

use super::{Context, Exit, failure::Failure};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    config::{self, Flag, Settings},
    database,
    engine::redis,
    server::{Server, StartError, tls::Tls},
    telemetry,
};

/// Runs the server, until SIGTERM or SIGINT.
///
/// Settings come from a file, from variables such as SECKILL__GRPC__ADDR, and from these flags; the
/// later wins. --print-config shows all of them, and where each comes from.
///
/// For example: seckill serve --engine-url redis://127.0.0.1:6379
#[derive(Debug, Args)]
pub struct Serve {
    /// Keep everything in memory and take a free port: for tests. Prints the address when ready.
    #[arg(long)]
    ephemeral: bool,
    /// Listen where others can reach it, though callers are not asked who they are, or tokens
    /// travel without TLS.
    #[arg(long)]
    insecure: bool,
    /// Print the settings in force, with secrets masked, and end.
    #[arg(long)]
    print_config: bool,
    /// Check the settings, and the certificates that they name, and end.
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,
    /// Print config.example.toml and end.
    #[arg(long, hide = true)]
    print_example_config: bool,
    /// Where to listen (grpc.addr) [not set anywhere: 127.0.0.1:50051].
    #[arg(long, value_name = "ADDR")]
    grpc_addr: Option<String>,
    /// Where to listen for metrics and probes (http.addr); empty: nowhere [not set anywhere:
    /// 127.0.0.1:9090].
    #[arg(long, value_name = "ADDR")]
    http_addr: Option<String>,
    /// The stock engine (engine.url) [not set anywhere, or empty: the embedded one].
    #[arg(long, value_name = "URL")]
    engine_url: Option<String>,
    /// The SQL database (database.url) [not set anywhere: sqlite://data/seckill.db].
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
}

/// Flags for settings that keep everything in memory, on a free port.
fn ephemeral() -> Vec<Flag> {
    let settings = [
        ("grpc.addr", "127.0.0.1:0"),
        ("http.addr", ""),
        ("engine.url", ""),
        ("database.url", "sqlite::memory:"),
    ];
    settings.map(|(key, value)| Flag { name: "--ephemeral", key, value: value.to_owned() }).to_vec()
}

impl Serve {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        if self.print_example_config {
            context.printer.data(&config::example());
            return Ok(Exit::Ok);
        }
        let loaded = context.settings(self.flags())?;
        loaded.settings.check_exposure(self.insecure).map_err(Failure::Settings)?;
        if self.print_config {
            if context.printer.is_json() {
                context.printer.answer(&json!(loaded.settings));
            } else {
                context.printer.data(&loaded.to_toml());
            }
            return Ok(Exit::Ok);
        }
        if self.check_config {
            let tls = Tls::load(&loaded.settings).await;
            tls.map_err(|error| start_failure(StartError::Tls(error)))?;
            telemetry::spans::tls(&loaded.settings.traces).map_err(Failure::Usage)?;
            context.printer.note("the settings are valid");
            return Ok(Exit::Ok);
        }
        let (log, traces) = (&loaded.settings.log, &loaded.settings.traces);
        telemetry::init_with_traces(log, traces).map_err(Failure::Usage)?;
        let printer = context.printer;
        let announce = loaded.settings.grpc.addr.port() == 0;
        serve(loaded.settings, move |server| {
            if announce {
                // Nobody knows a port that was taken because it was free. This is the one line that
                // those who start us in their tests wait for.
                let addr = server.addr.to_string();
                match (printer.is_json(), server.http_addr()) {
                    (true, None) => printer.answer(&json!({"grpc_addr": addr})),
                    (true, Some(http)) => {
                        printer.answer(&json!({"grpc_addr": addr, "http_addr": http.to_string()}));
                    }
                    (false, _) => printer.data(&addr),
                }
            }
        })
        .await?;
        Ok(Exit::Ok)
    }

    fn flags(&self) -> Vec<Flag> {
        let mut flags = if self.ephemeral { ephemeral() } else { Vec::new() };
        let named = [
            ("--grpc-addr", "grpc.addr", &self.grpc_addr),
            ("--http-addr", "http.addr", &self.http_addr),
            ("--engine-url", "engine.url", &self.engine_url),
            ("--database-url", "database.url", &self.database_url),
        ];
        for (name, key, value) in named {
            if let Some(value) = value {
                flags.push(Flag { name, key, value: value.clone() });
            }
        }
        flags
    }
}

/// Runs the server until a signal stops it; `ready` hears of it once it serves.
async fn serve(settings: Settings, ready: impl FnOnce(&Server)) -> Result<(), Failure> {
    let server = Server::start(&settings).await.map_err(start_failure)?;
    let mut signals = StopSignals::listen();
    ready(&server);
    tokio::select! {
        () = signals.next() => tracing::info!("stopping: a second signal ends it at once"),
        () = server.ended() => {}
    }
    let taken_over = server.parts.shutdown.is_cancelled();
    tokio::select! {
        () = server.stop() => {}
        () = signals.next() => {
            // Whoever asked twice knows; it is no fault of ours.
            return Err(Failure::Unavailable(
                "ended by a second signal, before all was done".into(),
            ));
        }
    }
    telemetry::spans::stop().await;
    if taken_over {
        return Err(Failure::Unavailable(
            "another process took over the embedded engine of this database".into(),
        ));
    }
    Ok(())
}

/// Why a server did not start, by exit code.
pub(super) fn start_failure(error: StartError) -> Failure {
    match error {
        StartError::Tls(_)
        | StartError::Database(database::OpenError::InvalidUrl { .. })
        | StartError::Database(database::OpenError::Unwritable { .. })
        | StartError::Engine(
            redis::OpenError::InvalidUrl(_)
            | redis::OpenError::Misconfigured(_)
            | redis::OpenError::Certificate(_),
        )
        | StartError::SchemaBehind
        | StartError::SchemaAhead(_) => Failure::Usage(error.to_string()),
        StartError::Database(
            database::OpenError::Unreachable { .. } | database::OpenError::Locked { .. },
        )
        | StartError::Engine(redis::OpenError::Unreachable { .. })
        | StartError::EmbeddedHeld { .. }
        | StartError::Bind { .. }
        | StartError::Sql(_)
        | StartError::Threads(_)
        | StartError::Rebuild(_) => Failure::Unavailable(error.to_string()),
    }
}

/// SIGTERM or SIGINT.
pub(super) async fn stop_signal() {
    StopSignals::listen().next().await;
}

/// SIGTERM and SIGINT, each of them once it is made: none is lost that comes between two questions.
struct StopSignals([Option<Signal>; 2]);

impl StopSignals {
    fn listen() -> Self {
        Self([SignalKind::terminate(), SignalKind::interrupt()].map(|kind| {
            signal(kind)
                .inspect_err(|error| tracing::warn!(%error, "a signal is not heard: {kind:?}"))
                .ok()
        }))
    }

    async fn next(&mut self) {
        let [term, int] = &mut self.0;
        tokio::select! {
            () = heard(term) => {}
            () = heard(int) => {}
        }
    }
}

async fn heard(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        process::{Command, id},
        time::Duration,
    };

    use tokio::time::timeout;

    use super::*;

    /// Sends it to this process; returns when it was delivered.
    fn send(signal: &str) {
        assert!(Command::new("kill").arg(signal).arg(id().to_string()).status().unwrap().success());
    }

    #[tokio::test]
    async fn a_signal_that_comes_while_nobody_waits_is_heard_later() {
        let mut signals = StopSignals::listen();
        for signal in ["-TERM", "-INT", "-TERM"] {
            send(signal);
            let heard = timeout(Duration::from_secs(10), signals.next()).await;
            assert!(heard.is_ok(), "{signal} is lost");
        }
    }
}
