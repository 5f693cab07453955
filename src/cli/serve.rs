//! `seckill serve`: the server.

use std::net::SocketAddr;

use clap::Args;
use serde_json::json;

use super::{Context, Exit, failure::Failure};
use crate::{
    config::{self, Flag, Settings},
    telemetry,
};

/// Runs the server.
#[derive(Debug, Args)]
pub struct Serve {
    /// Keep everything in memory and take a free port: for tests. Prints the address when ready.
    #[arg(long)]
    ephemeral: bool,
    /// Listen where others can reach it, though callers are not asked who they are.
    #[arg(long)]
    insecure: bool,
    /// Print the settings in force, with secrets masked, and end.
    #[arg(long)]
    print_config: bool,
    /// Check the settings and end.
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,
    /// Print config.example.toml and end.
    #[arg(long, hide = true)]
    print_example_config: bool,
    /// Where to listen (grpc.addr).
    #[arg(long, value_name = "ADDR")]
    grpc_addr: Option<String>,
    /// The stock engine (engine.url); empty: the embedded one.
    #[arg(long, value_name = "URL")]
    engine_url: Option<String>,
    /// The SQL database (database.url).
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
}

/// Flags for settings that keep everything in memory, on a free port.
pub(super) fn ephemeral(name: &'static str) -> Vec<Flag> {
    [
        ("grpc.addr", "127.0.0.1:0"),
        ("engine.url", ""),
        ("database.url", "sqlite::memory:"),
    ]
    .map(|(key, value)| Flag {
        name,
        key,
        value: value.to_owned(),
    })
    .to_vec()
}

impl Serve {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        if self.print_example_config {
            context.printer.data(&config::example());
            return Ok(Exit::Ok);
        }
        let loaded = context.settings(self.flags())?;
        loaded
            .settings
            .check_exposure(self.insecure)
            .map_err(Failure::Settings)?;
        if self.print_config {
            if context.printer.is_json() {
                context.printer.answer(&json!(loaded.settings));
            } else {
                context.printer.data(&loaded.to_toml());
            }
            return Ok(Exit::Ok);
        }
        if self.check_config {
            context.printer.note("the settings are valid");
            return Ok(Exit::Ok);
        }
        telemetry::init(&loaded.settings.log).map_err(Failure::Usage)?;
        let printer = context.printer;
        let announce = self.ephemeral;
        serve(loaded.settings, move |addr| {
            if announce {
                // The one line that those who start us in their tests wait for.
                match printer.is_json() {
                    true => printer.answer(&json!({"grpc_addr": addr.to_string()})),
                    false => printer.data(&addr.to_string()),
                }
            }
        })
        .await?;
        Ok(Exit::Ok)
    }

    fn flags(&self) -> Vec<Flag> {
        let mut flags = if self.ephemeral {
            ephemeral("--ephemeral")
        } else {
            Vec::new()
        };
        let named = [
            ("--grpc-addr", "grpc.addr", &self.grpc_addr),
            ("--engine-url", "engine.url", &self.engine_url),
            ("--database-url", "database.url", &self.database_url),
        ];
        for (name, key, value) in named {
            if let Some(value) = value {
                flags.push(Flag {
                    name,
                    key,
                    value: value.clone(),
                });
            }
        }
        flags
    }
}

/// HOOK: runs the server until a signal stops it; `ready` hears the address once it serves.
///
/// A port in use, and an engine or a database that is away, are [`Failure::Unavailable`].
async fn serve(settings: Settings, ready: impl FnOnce(SocketAddr)) -> Result<(), Failure> {
    let _ = (settings, ready);
    Err(Failure::Internal(
        "the server is not part of this build".to_owned(),
    ))
}
