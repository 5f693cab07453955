//! `seckill version`.

use clap::Args;
use serde_json::json;

use super::{Context, Exit, failure::Failure};

/// Shows the version.
#[derive(Debug, Args)]
pub struct Version {}

impl Version {
    #[expect(clippy::unnecessary_wraps, reason = "every command answers alike")]
    pub(super) fn run(self, context: &Context) -> Result<Exit, Failure> {
        let version = env!("CARGO_PKG_VERSION");
        if context.printer.is_json() {
            context.printer.answer(&json!({"name": "seckill", "version": version}));
        } else {
            context.printer.data(&format!("seckill {version}"));
        }
        Ok(Exit::Ok)
    }
}
