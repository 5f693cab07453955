//! `seckill man`: the manual, of the same words as `--help`.

use std::{fs, path::PathBuf};

use clap::Args;

use super::{Context, Exit, command, failure::Failure};

/// Prints the manual page, or writes a page for each command.
///
/// For example: seckill man | man -l -, or seckill man --dir /usr/local/share/man/man1
#[derive(Debug, Args)]
pub struct Man {
    /// Write seckill.1 and a page for each command into this folder; it is created if need be.
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

impl Man {
    pub(super) fn run(self, context: &Context) -> Result<Exit, Failure> {
        if let Some(folder) = self.dir {
            fs::create_dir_all(&folder)
                .and_then(|()| clap_mangen::generate_to(command(), &folder))
                .map_err(|error| {
                    Failure::Usage(format!("{} can't be written: {error}", folder.display()))
                })?;
            return Ok(Exit::Ok);
        }
        let mut page = Vec::new();
        clap_mangen::Man::new(command())
            .render(&mut page)
            .map_err(|error| Failure::Internal(format!("the page was not made: {error}")))?;
        context.printer.data(&String::from_utf8_lossy(&page));
        Ok(Exit::Ok)
    }
}
