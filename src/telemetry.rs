//! The log: lines on stderr, text for people and JSON for machines.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan};

use crate::config::{self, LogFormat, LogSettings};

/// Libraries that tell much at info level that only they understand.
const QUIET: &str = "sqlx=warn,sea_orm=warn,sea_orm_migration=warn,h2=warn,hyper=warn,\
                     hyper_util=warn,tower=warn,tonic=warn,bb8=warn";

/// Starts the log of this process. A second call changes nothing, so that tests may call it.
///
/// # Errors
/// A sentence when RUST_LOG can't be read as a filter.
pub fn init(settings: &LogSettings) -> Result<(), String> {
    let filter = filter(settings, config::rust_log())?;
    let json = match settings.format {
        LogFormat::Text => false,
        LogFormat::Json => true,
        LogFormat::Auto => !io::stderr().is_terminal(),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // A line that can't be written, on a full disk or to a pipe that nobody reads, is lost. To
        // complain on stderr in turn would be a panic in whatever wrote it.
        .log_internal_errors(false)
        .with_span_events(FmtSpan::NONE)
        .with_ansi(!json && io::stderr().is_terminal() && !config::no_color());
    // It fails only when there is a log already.
    let _ = if json { builder.json().flatten_event(true).try_init() } else { builder.try_init() };
    Ok(())
}

/// RUST_LOG if it is set, and otherwise the level of the settings with noisy libraries turned
/// down.
fn filter(settings: &LogSettings, rust_log: Option<String>) -> Result<EnvFilter, String> {
    match rust_log {
        Some(directives) => EnvFilter::builder().parse(&directives).map_err(|error| {
            format!("RUST_LOG = {directives:?}: {error}; write it as in seckill=debug,warn")
        }),
        None => EnvFilter::builder()
            .parse(format!("{},{QUIET}", settings.level.as_str()))
            .map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Level;

    fn shown(level: Level, rust_log: Option<&str>) -> Result<String, String> {
        let settings = LogSettings { level, ..LogSettings::default() };
        filter(&settings, rust_log.map(str::to_owned)).map(|filter| filter.to_string())
    }

    #[test]
    fn the_level_is_the_settings_and_libraries_are_quiet() {
        let filter = shown(Level::Info, None).expect("a filter");
        assert!(filter.contains("info") && filter.contains("h2=warn"), "{filter}");
    }

    #[test]
    fn rust_log_overrides_the_settings() {
        let filter = shown(Level::Info, Some("seckill=trace")).expect("a filter");
        assert_eq!(filter, "seckill=trace");
        assert!(shown(Level::Info, Some("seckill=loud")).is_err());
    }
}
