//! `seckill doctor`: looks at what a server needs, and says what to change.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use tokio::net::TcpListener;

use super::{Context, Exit, failure::Failure, output::Printer, serve::start_failure};
use crate::{
    config::{Exposed, Loaded, Role, Settings, SettingsError},
    database::{Backend, Capacity, Database},
    domain::TimeMs,
    engine::redis::{self, RedisEngine},
    server::{
        StartError, redis_settings, schema_failure, sql_settings,
        tls::{EXPIRY_WARNING, Tls},
    },
};

/// How far two clocks may be apart before holds and start times feel it.
const CLOCK_WARN: Duration = Duration::from_millis(500);
/// How far they may be apart before holds expire at the wrong time for everyone.
const CLOCK_ERROR: Duration = Duration::from_secs(5);
/// Before this, a clock was never set: 2025-01-01T00:00:00Z.
const CLOCK_EPOCH_MS: i64 = 1_735_689_600_000;

/// Checks settings, callers, certificate, engine, database, clock and ports, and says what to
/// change.
///
/// It only looks: nothing is made, written or migrated.
///
/// Exits as `serve` would: 64 when somebody must change something, such as a setting or the schema,
/// and 69 when what is needed does not answer. An address that others can reach is a warning:
/// `serve --insecure` would listen there.
#[derive(Debug, Args)]
pub struct Doctor {}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    /// A server runs with it, and somebody should look.
    Warn,
    /// A server does not run with it.
    Error,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: Level,
    /// What was looked at, in a word or two, such as `engine`.
    pub check: String,
    /// What was found.
    pub text: String,
    /// What to change.
    pub change: Option<String>,
    /// What a server would end with.
    #[serde(skip)]
    pub exit: Exit,
}

impl Finding {
    pub fn ok(check: &str, text: impl Into<String>) -> Self {
        let (check, text) = (check.to_owned(), text.into());
        Self { level: Level::Ok, check, text, change: None, exit: Exit::Ok }
    }

    pub fn warn(check: &str, text: impl Into<String>, change: impl Into<String>) -> Self {
        let change = Some(change.into());
        Self { level: Level::Warn, change, ..Self::ok(check, text) }
    }

    /// Something does not answer.
    pub fn error(check: &str, text: impl Into<String>, change: impl Into<String>) -> Self {
        let change = Some(change.into());
        let (level, exit) = (Level::Error, Exit::Unavailable);
        Self { level, change, exit, ..Self::ok(check, text) }
    }

    /// Something is wrong, and stays wrong until somebody changes it.
    fn wrong(check: &str, text: impl Into<String>, change: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, ..Self::error(check, text, change) }
    }

    /// A server would not start for this.
    fn refused(check: &str, error: StartError, change: &str) -> Self {
        let text = error.to_string();
        Self { exit: start_failure(error).exit(), ..Self::error(check, text, change) }
    }
}

impl Doctor {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let loaded = match context.settings(Vec::new()) {
            Ok(loaded) => loaded,
            Err(Failure::Settings(error)) => {
                let findings = settings_findings(&error);
                show(context.printer, &findings);
                return Ok(exit(&findings));
            }
            Err(failure) => return Err(failure),
        };
        let settings = &loaded.settings;
        let mut findings = vec![check_settings(&loaded)];
        findings.extend(check_exposure(settings));
        findings.push(check_callers(settings));
        findings.extend(check_certificate(settings).await);
        findings.push(check_port("grpc port", "grpc.addr", settings.grpc.addr).await);
        if let Some(addr) = settings.http.addr.0 {
            findings.push(check_port("http port", "http.addr", addr).await);
        }
        findings.push(check_own_clock(TimeMs::now()));
        findings.extend(check_engine(settings).await);
        findings.extend(check_database(settings).await);
        show(context.printer, &findings);
        Ok(exit(&findings))
    }
}

/// What cannot mend itself goes before what can.
fn exit(findings: &[Finding]) -> Exit {
    let found = |exit| findings.iter().any(|finding| finding.exit == exit);
    [Exit::Usage, Exit::Unavailable].into_iter().find(|exit| found(*exit)).unwrap_or(Exit::Ok)
}

fn show(printer: Printer, findings: &[Finding]) {
    if printer.is_json() {
        printer.answer(&json!({"findings": findings}));
    } else {
        printer.data(&rendered(findings));
    }
}

/// Findings for people: one line each, and below it what to change.
#[must_use]
pub fn rendered(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for finding in findings {
        let mark = match finding.level {
            Level::Ok => "ok   ",
            Level::Warn => "warn ",
            Level::Error => "ERROR",
        };
        lines.push(format!("{mark}  {:width$}  {}", finding.check, finding.text));
        if let Some(change) = &finding.change {
            lines.push(format!("       {:width$}  -> {change}", ""));
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    lines.push(match (count(Level::Error), count(Level::Warn)) {
        (0, 0) => "all is well".to_owned(),
        (errors, warnings) => format!("errors: {errors}, warnings: {warnings}"),
    });
    lines.join("\n")
}

fn settings_findings(error: &SettingsError) -> Vec<Finding> {
    error
        .problems
        .iter()
        .map(|problem| Finding::wrong("settings", problem, "change it; see config.example.toml"))
        .collect()
}

fn check_settings(loaded: &Loaded) -> Finding {
    let from = match &loaded.file {
        Some(path) => format!("from {}", path.display()),
        None => "no file".to_owned(),
    };
    Finding::ok("settings", format!("valid; {from}, {} set", loaded.origins.len()))
}

fn check_exposure(settings: &Settings) -> impl Iterator<Item = Finding> {
    settings.exposed().map(|Exposed { key, addr, danger }| {
        Finding::warn("exposure", format!("{key} = {addr}: {}", danger.text()), danger.change())
    })
}

/// Who may call.
fn check_callers(settings: &Settings) -> Finding {
    let (tokens, subjects) = (&settings.auth.tokens, &settings.auth.subjects);
    let (tokens, subjects) =
        (tokens.read().unwrap_or_default(), subjects.read().unwrap_or_default());
    let count = |role| {
        let of_tokens = tokens.iter().filter(|token| token.role == role).count();
        of_tokens + subjects.iter().filter(|subject| subject.role == role).count()
    };
    if !settings.asks_callers() {
        return Finding::ok(
            "callers",
            "nobody is asked who he is: no token and no client CA is set",
        );
    }
    let text = format!(
        "tokens: {}, certificates: {}; ops: {}, order: {}, viewer: {}",
        tokens.len(),
        subjects.len(),
        count(Role::Ops),
        count(Role::Order),
        count(Role::Viewer)
    );
    if count(Role::Ops) == 0 {
        let change = "add an entry with the role ops: `seckill token new NAME --role ops`";
        return Finding::warn("callers", format!("{text}; nobody may run a sale"), change);
    }
    Finding::ok("callers", text)
}

/// Whether the certificate can be used, and for how long; nothing where there is no TLS.
async fn check_certificate(settings: &Settings) -> Option<Finding> {
    const CHECK: &str = "certificate";
    let expires = match Tls::load(settings).await {
        Ok(tls) => tls?.expires(),
        Err(error) => {
            let change = "the file that it names; all of them are PEM";
            return Some(Finding::refused(CHECK, error.into(), change));
        }
    };
    let left = expires.is_in();
    let text = format!("expires at {expires}, in {} days", left.as_secs() / 86_400);
    Some(if left > EXPIRY_WARNING {
        Finding::ok(CHECK, text)
    } else {
        Finding::warn(CHECK, text, "replace its files; a running server takes them into use itself")
    })
}

/// Whether a server could listen there now.
async fn check_port(check: &str, key: &str, addr: SocketAddr) -> Finding {
    match TcpListener::bind(addr).await {
        Ok(_) => Finding::ok(check, format!("{addr} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Finding::warn(
            check,
            format!("{addr} is in use"),
            format!(
                "fine if that is the server itself; otherwise stop the other one, or set {key}"
            ),
        ),
        Err(error) => Finding::error(
            check,
            format!("{addr} can't be used: {error}"),
            format!("set {key} to an address of this machine and a port that you may use"),
        ),
    }
}

/// Whether this machine's clock was ever set.
fn check_own_clock(now: TimeMs) -> Finding {
    let shown = UNIX_EPOCH + Duration::from_millis(u64::try_from(now.0).unwrap_or(0));
    let shown = prost_types::Timestamp::from(SystemTime::max(shown, UNIX_EPOCH));
    if now.0 < CLOCK_EPOCH_MS {
        return Finding::error(
            "clock",
            format!("this machine's clock says {shown}"),
            "set it, and keep it set with NTP",
        );
    }
    Finding::ok("clock", format!("{shown}"))
}

/// Compares another clock with this machine's.
///
/// `before` and `after` are this machine's time around the reading, so half of the way there and
/// back is the error of the comparison.
#[must_use]
pub fn check_clock(check: &str, before: TimeMs, theirs: TimeMs, after: TimeMs) -> Finding {
    let error_ms = after.0.saturating_sub(before.0).max(0) / 2;
    let offset_ms = theirs.0.saturating_sub(before.0.saturating_add(error_ms));
    let text = format!("{offset_ms:+} ms from this machine (to within {error_ms} ms)");
    let certain =
        Duration::from_millis(offset_ms.unsigned_abs().saturating_sub(error_ms.unsigned_abs()));
    let change = "keep both clocks set with NTP";
    if certain > CLOCK_ERROR {
        Finding::error(check, text, change)
    } else if certain > CLOCK_WARN {
        Finding::warn(check, text, change)
    } else {
        Finding::ok(check, text)
    }
}

/// Whether the engine answers, may be written to, and keeps what it is given.
async fn check_engine(settings: &Settings) -> Vec<Finding> {
    const CHECK: &str = "engine";
    let Some(redis) = redis_settings(&settings.engine) else {
        let text = "embedded: for one server process, rebuilt from the database at each start";
        return vec![Finding::ok(CHECK, text)];
    };
    match RedisEngine::check(&redis).await {
        Ok(findings) => findings
            .into_iter()
            .map(|finding| match finding.level {
                redis::Level::Fine => Finding::ok(CHECK, finding.text),
                redis::Level::Warning => {
                    Finding::warn(CHECK, finding.text, "the settings of Redis, as it says")
                }
                redis::Level::Error => {
                    Finding::wrong(CHECK, finding.text, "the settings of Redis, as it says")
                }
            })
            .collect(),
        Err(error @ redis::OpenError::Certificate(_)) => {
            let change = "the file that it names; all of them are PEM";
            vec![Finding::refused(CHECK, error.into(), change)]
        }
        Err(error) => {
            let change = "engine.url, or start the server that it names";
            vec![Finding::refused(CHECK, error.into(), change)]
        }
    }
}

/// Whether the database answers, its schema is current, and its clock agrees.
async fn check_database(settings: &Settings) -> Vec<Finding> {
    const CHECK: &str = "database";
    let url = &settings.database.url;
    let sql = sql_settings(&settings.database);
    // Opening it would make it.
    if let Some(file) = sql.file_to_make() {
        return vec![check_place(&file)];
    }
    let database = match Database::open(&sql).await {
        Ok(database) => database,
        Err(error) => {
            let change = "database.url, or start the server that it names";
            return vec![Finding::refused(CHECK, error.into(), change)];
        }
    };
    let mut findings = vec![Finding::ok(CHECK, format!("{url} answers"))];
    findings.push(match (database.is_current().await, database.backend()) {
        (Ok(true), _) => Finding::ok("schema", "current"),
        (Ok(false), Backend::Sqlite) => Finding::ok("schema", "behind; `seckill serve` mends that"),
        (Ok(false), Backend::Postgres | Backend::MySql) => {
            Finding::wrong("schema", "behind this program", "run `seckill migrate up`")
        }
        (Err(error), _) => {
            let change =
                "the rights of the database's user, or take a program as new as the schema";
            Finding::refused("schema", schema_failure(error), change)
        }
    });
    findings.extend(match database.capacity().await {
        Ok(capacity) => capacity.map(|found| check_pool(sql.max_connections, found)),
        Err(error) => {
            let text = format!("what the database allows can't be read: {error}");
            Some(Finding::warn("connections", text, "compare them with database.max_connections"))
        }
    });
    let before = TimeMs::now();
    findings.push(match database.now().await {
        Ok(theirs) => check_clock("database clock", before, theirs, TimeMs::now()),
        Err(error) => Finding::error("database clock", error.to_string(), "see the line above"),
    });
    // What was found out counts, however it ends.
    let _ = database.close().await;
    findings
}

/// Whether a SQLite file that is not there can be made; its folder may be missing, but no more.
fn check_place(file: &Path) -> Finding {
    const CHECK: &str = "database";
    let shown = file.display();
    let folder = |of: &Path| match of.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        Some(_) | None => PathBuf::from("."),
    };
    let place = folder(file);
    if place.is_dir() || folder(&place).is_dir() {
        return Finding::ok(CHECK, format!("{shown} is not there yet; `seckill serve` makes it"));
    }
    let text = format!("{shown} is not there, and neither is its folder's folder");
    Finding::wrong(CHECK, text, format!("create the folder {}", place.display()))
}

/// Whether the database has room for this server's connections.
fn check_pool(max_connections: u32, found: Capacity) -> Finding {
    const CHECK: &str = "connections";
    // And the one of its probe.
    let wanted = u64::from(max_connections) + 1;
    let Capacity { allowed, in_use } = found;
    let text = format!(
        "a server takes up to {wanted}; the database allows {allowed}, of which {in_use} are in use"
    );
    if wanted > allowed {
        let change = "lower database.max_connections, or raise max_connections of the database";
        return Finding::error(CHECK, text, change);
    }
    Finding::ok(CHECK, format!("{text}: room for {} servers", allowed / wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_say_what_to_change() {
        let findings = [
            Finding::ok("settings", "valid"),
            Finding::error("engine", "no answer", "start Redis"),
        ];
        assert_eq!(
            rendered(&findings),
            "ok     settings  valid\n\
             ERROR  engine    no answer\n                 -> start Redis\n\
             errors: 1, warnings: 0"
        );
        assert!(rendered(&findings[..1]).ends_with("all is well"));
    }

    #[test]
    fn a_clock_is_judged_within_the_error_of_its_reading() {
        let level = |before, theirs, after| {
            check_clock("clock", TimeMs(before), TimeMs(theirs), TimeMs(after)).level
        };
        assert_eq!(level(1_000, 1_005, 1_010), Level::Ok);
        assert_eq!(level(1_000, 1_500, 1_010), Level::Ok);
        assert_eq!(level(1_000, 1_600, 1_010), Level::Warn);
        assert_eq!(level(10_000, 4_000, 10_010), Level::Error);
        // The answer took so long that nothing is certain.
        assert_eq!(level(0, 2_000, 4_000), Level::Ok);
        assert_eq!(check_own_clock(TimeMs(5_000)).level, Level::Error);
    }

    #[test]
    fn a_pool_must_fit_into_what_the_database_allows() {
        let level = |max_connections, allowed| {
            check_pool(max_connections, Capacity { allowed, in_use: 3 }).level
        };
        assert_eq!(level(10, 11), Level::Ok);
        assert_eq!(level(11, 11), Level::Error);
    }

    #[tokio::test]
    async fn a_port_in_use_is_found() {
        let taken = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = taken.local_addr().expect("an address");
        assert_eq!(check_port("port", "grpc.addr", addr).await.level, Level::Warn);
        drop(taken);
        assert_eq!(check_port("port", "grpc.addr", addr).await.level, Level::Ok);
    }
}
