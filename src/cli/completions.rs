//! `seckill completions`: what a shell needs to complete our commands.

use clap::Args;
use clap_complete::Shell;

use super::{Context, Exit, completed, failure::Failure};

/// Prints the completions of a shell.
///
/// For example: seckill completions bash > /etc/bash_completion.d/seckill
#[derive(Debug, Args)]
pub struct Completions {
    /// Which shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self, context: &Context) -> Result<Exit, Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut completed(), "seckill", &mut script);
        let script = String::from_utf8(script)
            .map_err(|_| Failure::Internal("the completions are not UTF-8".to_owned()))?;
        context.printer.data(&script);
        Ok(Exit::Ok)
    }
}
