//! The log: lines on stderr, text for people and JSON for machines; and traces, where a collector
//! is named.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::{
    EnvFilter, Layer as _, fmt, fmt::format::FmtSpan, layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::config::{self, LogFormat, LogSettings, TracesSettings};

pub mod spans;

/// Libraries that tell much at info level that only they understand.
const QUIET: &str = "sqlx=warn,sea_orm=warn,sea_orm_migration=warn,h2=warn,hyper=warn,\
                     hyper_util=warn,tower=warn,tonic=warn,bb8=warn,opentelemetry=warn";

/// Starts the log of this process. A second call changes nothing, so that tests may call it.
///
/// # Errors
/// A sentence when RUST_LOG can't be read as a filter.
pub fn init(settings: &LogSettings) -> Result<(), String> {
    let filter = filter(settings, config::rust_log())?;
    let json = is_json(settings);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // A line that can't be written, on a full disk or to a pipe that nobody reads, is lost. To
        // complain on stderr in turn would be a panic in whatever wrote it.
        .log_internal_errors(false)
        .with_span_events(FmtSpan::NONE)
        .with_ansi(has_colours(json));
    // It fails only when there is a log already.
    let _ = if json { builder.json().flatten_event(true).try_init() } else { builder.try_init() };
    Ok(())
}

/// As [`init`], and begins to send traces if the settings name a collector. The last of them are
/// sent by [`spans::stop`].
///
/// # Errors
/// As [`init`]; or the collector can't be called like that.
pub fn init_with_traces(settings: &LogSettings, traces: &TracesSettings) -> Result<(), String> {
    if traces.endpoint.expose().is_empty() {
        return init(settings);
    }
    // A filter for each, so that spans do not depend on the level of the log.
    let filter = filter(settings, config::rust_log())?;
    let is_json = is_json(settings);
    let lines = fmt::layer()
        .with_writer(io::stderr)
        .log_internal_errors(false)
        .with_span_events(FmtSpan::NONE)
        .with_ansi(has_colours(is_json));
    let lines = match is_json {
        true => lines.json().flatten_event(true).boxed(),
        false => lines.boxed(),
    };
    let spans = spans::start(traces)?;
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans).try_init();
    Ok(())
}

fn is_json(settings: &LogSettings) -> bool {
    match settings.format {
        LogFormat::Text => false,
        LogFormat::Json => true,
        LogFormat::Auto => !io::stderr().is_terminal(),
    }
}

fn has_colours(is_json: bool) -> bool {
    !is_json && io::stderr().is_terminal() && !config::no_color()
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
