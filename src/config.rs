//! Settings: one struct per component, from a TOML file, the environment and flags, in this order.
//!
//! **Promises:** the later source wins, key by key. A key that nobody knows is an error. All is
//! checked before anything opens. No message and no `Debug` shows a password. This is the only
//! module that reads the environment.

mod load;
mod render;
mod secret;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use serde::{Deserialize, Serialize};

pub use load::{Flag, Loaded, Origin, Sources};
pub use render::example;
pub use secret::{SecretUrl, masked};

/// How large `seckill` lets a span of time be set: one day, in milliseconds.
const DAY_MS: u64 = 86_400_000;

/// One key of the settings file, for messages and for `config.example.toml`.
#[derive(Debug, Clone)]
struct Key {
    section: &'static str,
    name: &'static str,
    /// Its documentation, line by line.
    docs: &'static [&'static str],
    /// What may be written there, as the end of a sentence that begins with "must be".
    allowed: String,
    default: toml::Value,
}

impl Key {
    fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

/// A value that breaks its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Breach {
    /// As in `outbox.batch`.
    key: String,
    /// The value as it may be shown.
    value: String,
    /// A sentence that goes on from the value.
    text: String,
}

/// What the type of a setting accepts.
trait Kind: Serialize {
    const ALLOWED: &'static str;
}

macro_rules! kinds {
    ($($kind:ty: $allowed:literal,)*) => {
        $(impl Kind for $kind { const ALLOWED: &'static str = $allowed; })*
    };
}

kinds! {
    u32: "a whole number",
    u64: "a whole number",
    usize: "a whole number",
    SocketAddr: "an IP address and a port, such as 127.0.0.1:50051",
    SecretUrl: "a URL",
    Level: "one of off, error, warn, info, debug, trace",
    LogFormat: "one of auto, text, json",
}

/// A part of the settings that one component reads.
trait Component {
    const SECTION: &'static str;
    const ABOUT: &'static [&'static str];

    fn keys() -> Vec<Key>;

    /// Holds every value against its range.
    fn check_ranges(&self, breaches: &mut Vec<Breach>);
}

/// Declares a component: its fields with documentation, default and range.
macro_rules! component {
    (
        $(#[doc = $about:literal])*
        $name:ident = $section:literal {
            $(
                $(#[doc = $doc:literal])*
                $field:ident: $kind:ty = $default:expr $(=> $range:expr)?;
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $kind, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl Component for $name {
            const SECTION: &'static str = $section;
            const ABOUT: &'static [&'static str] = &[$($about),*];

            fn keys() -> Vec<Key> {
                let default = Self::default();
                vec![$(
                    Key {
                        section: $section,
                        name: stringify!($field),
                        docs: &[$($doc),*],
                        allowed: {
                            let allowed = <$kind as Kind>::ALLOWED.to_owned();
                            $( let allowed = format!("{allowed} in {:?}", $range); )?
                            allowed
                        },
                        default: toml::Value::try_from(&default.$field)
                            .expect("every kind of setting has a TOML value"),
                    },
                )*]
            }

            fn check_ranges(&self, breaches: &mut Vec<Breach>) {
                let _ = &breaches;
                $( $(
                    if !($range).contains(&self.$field) {
                        breaches.push(Breach {
                            key: format!("{}.{}", $section, stringify!($field)),
                            value: self.$field.to_string(),
                            text: format!("must be {} in {:?}", <$kind as Kind>::ALLOWED, $range),
                        });
                    }
                )? )*
            }
        }
    };
}

component! {
    /// The port that order services, operators and dashboards call.
    GrpcSettings = "grpc" {
        /// Where to listen. Port 0 takes a free one. Callers are not asked who they are yet, so an
        /// address that others can reach needs `seckill serve --insecure`.
        addr: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 50051);
        /// How many calls one connection may have open; the client queues what is above.
        max_concurrent_streams: u32 = 1_000 => 1..=100_000;
        /// How many connections may be open; more wait until one closes.
        max_connections: usize = 10_000 => 1..=1_000_000;
        /// After how long a connection is asked to go, so that clients spread over new servers.
        max_connection_age_s: u64 = 600 => 1..=86_400;
        /// After how long a stream such as WatchStock ends; its client calls again.
        max_stream_age_s: u64 = 3_600 => 1..=86_400;
        /// How often an idle connection is asked whether it is still there.
        keepalive_s: u64 = 30 => 1..=7_200;
        /// How long a new connection may stay silent.
        first_byte_timeout_ms: u64 = 5_000 => 10..=60_000;
        /// How long a stop waits for calls that are under way.
        shutdown_grace_ms: u64 = 15_000 => 0..=600_000;
    }
}

component! {
    /// The stock engine, which runs the Lua scripts.
    EngineSettings = "engine" {
        /// `redis://[:password@]host:port[/db]`. Empty: the embedded engine, inside this process
        /// and for this one alone; its stock is rebuilt from the database at each start.
        url: SecretUrl = SecretUrl::new("");
        /// How many connections to the engine share the work.
        connections: usize = 2 => 1..=256;
        /// How long a new connection may take.
        connect_timeout_ms: u64 = 1_000 => 10..=60_000;
        /// How long a reply may take; after that it is unknown whether the script ran.
        response_timeout_ms: u64 = 1_000 => 10..=60_000;
    }
}

component! {
    /// The SQL database, which has the last word on who holds a unit.
    DatabaseSettings = "database" {
        /// `sqlite://path`, `sqlite::memory:`, `postgres://user@host/name` or
        /// `mysql://user@host/name`. The environment variable `SECKILL__DATABASE__URL_FILE` names
        /// a file that holds it.
        url: SecretUrl = SecretUrl::new("sqlite://data/seckill.db");
        /// The most connections of one server process; SQLite: readers, besides the one writer.
        max_connections: u32 = 10 => 1..=1_000;
        /// How long to wait at start for a database that does not answer yet.
        connect_timeout_ms: u64 = 5_000 => 1..=3_600_000;
        /// How long to wait for a connection of the pool.
        acquire_timeout_ms: u64 = 3_000 => 1..=3_600_000;
        /// When the server gives up on a statement; SQLite has no such limit.
        statement_timeout_ms: u64 = 5_000 => 1..=3_600_000;
        /// When the server gives up waiting for a lock; MySQL counts it in whole seconds.
        lock_timeout_ms: u64 = 3_000 => 1..=3_600_000;
    }
}

component! {
    /// Admission of Reserve.
    ReserveSettings = "reserve" {
        /// How many reservations may be under way at once; more are refused with OVERLOADED.
        max_in_flight: usize = 10_000 => 1..=1_000_000;
    }
}

component! {
    /// The outbox, which makes orders of reservations.
    OutboxSettings = "outbox" {
        /// How often to look for rows that nobody told the poller about.
        poll_interval_ms: u64 = 500 => 1..=60_000;
        /// How many rows one transaction takes.
        batch: u32 = 500 => 1..=10_000;
        /// After how many failed attempts a row becomes a dead letter.
        max_attempts: u32 = 12 => 1..=1_000;
        /// How long a row waits after its first failure; it doubles with each further one.
        backoff_ms: u64 = 200 => 1..=DAY_MS;
        /// The longest wait between two attempts.
        max_backoff_ms: u64 = 300_000 => 1..=DAY_MS;
    }
}

component! {
    /// The sweeper, which finds reservations that no outbox row acknowledges.
    SweeperSettings = "sweeper" {
        /// How often to look.
        interval_ms: u64 = 1_000 => 10..=60_000;
        /// How old a reservation must be before it counts as forgotten.
        grace_ms: u64 = 5_000 => 10..=600_000;
    }
}

component! {
    /// The expiry of holds.
    HoldsSettings = "holds" {
        /// How often to look for holds that have expired.
        interval_ms: u64 = 500 => 10..=60_000;
    }
}

component! {
    /// The activities in memory.
    CatalogSettings = "catalog" {
        /// How often to read them from the database again.
        refresh_ms: u64 = 1_000 => 10..=30_000;
    }
}

component! {
    /// WatchStock.
    WatchSettings = "watch" {
        /// How often the stock of a watched offer is read.
        sample_ms: u64 = 50 => 5..=1_000;
        /// After how long without a change a stream shows that it is alive.
        heartbeat_ms: u64 = 10_000 => 100..=15_000;
    }
}

component! {
    /// The log, on stderr.
    LogSettings = "log" {
        /// `off`, `error`, `warn`, `info`, `debug` or `trace`. The environment variable RUST_LOG
        /// overrides it, module by module.
        level: Level = Level::Info;
        /// `text`, `json`, or `auto`: text on a terminal and JSON elsewhere.
        format: LogFormat = LogFormat::Auto;
    }
}

/// From which weight on something is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl Level {
    /// The word in the settings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// What a line of the log looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    Text,
    Json,
}

/// Calls a macro with every field of [`Settings`] and its type.
macro_rules! for_every_component {
    ($with:ident) => {
        $with! {
            grpc: GrpcSettings,
            engine: EngineSettings,
            database: DatabaseSettings,
            reserve: ReserveSettings,
            outbox: OutboxSettings,
            sweeper: SweeperSettings,
            holds: HoldsSettings,
            catalog: CatalogSettings,
            watch: WatchSettings,
            log: LogSettings,
        }
    };
}

macro_rules! settings {
    ($($field:ident: $component:ty,)*) => {
        /// Everything that can be set.
        #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Settings {
            $( pub $field: $component, )*
        }

        /// The sections in order, each with what it is about and its keys.
        fn sections() -> Vec<(&'static str, &'static [&'static str], Vec<Key>)> {
            vec![$((
                <$component as Component>::SECTION,
                <$component as Component>::ABOUT,
                <$component as Component>::keys(),
            ),)*]
        }

        impl Settings {
            fn check_ranges(&self, breaches: &mut Vec<Breach>) {
                $( self.$field.check_ranges(breaches); )*
            }
        }
    };
}

for_every_component!(settings);

impl Settings {
    /// Checks ranges and relations; nothing is opened.
    ///
    /// # Errors
    /// [`SettingsError`] with everything that is wrong.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let breaches = self.breaches();
        if breaches.is_empty() {
            return Ok(());
        }
        let problems = breaches
            .into_iter()
            .map(|breach| format!("{} = {}: {}", breach.key, breach.value, breach.text))
            .collect();
        Err(SettingsError { problems })
    }

    /// Callers can't be told apart yet, so an address that others can reach is refused.
    ///
    /// # Errors
    /// A sentence that says what to change.
    pub fn check_exposure(&self, insecure: bool) -> Result<(), SettingsError> {
        let addr = self.grpc.addr;
        if insecure || addr.ip().is_loopback() {
            return Ok(());
        }
        Err(SettingsError {
            problems: vec![format!(
                "grpc.addr = {addr}: others can reach this address, and no tokens are set. \
                 Listen on 127.0.0.1 or [::1], or add --insecure where the network keeps \
                 strangers out"
            )],
        })
    }

    fn breaches(&self) -> Vec<Breach> {
        let mut breaches = Vec::new();
        self.check_ranges(&mut breaches);
        self.check_urls(&mut breaches);
        self.check_relations(&mut breaches);
        breaches
    }

    fn check_urls(&self, breaches: &mut Vec<Breach>) {
        const ENGINES: &[&str] = &["redis", "rediss", "valkey", "valkeys", "redis+unix", "unix"];
        const DATABASES: &[&str] = &["sqlite", "postgres", "postgresql", "mysql", "mariadb"];
        let urls = [
            ("engine.url", &self.engine.url, ENGINES, "empty or redis://host:port"),
            (
                "database.url",
                &self.database.url,
                DATABASES,
                "sqlite://path, postgres://user@host/name or mysql://user@host/name",
            ),
        ];
        for (key, url, schemes, allowed) in urls {
            if key == "engine.url" && url.expose().is_empty() {
                continue;
            }
            if !url.has_scheme_of(schemes) {
                breaches.push(Breach {
                    key: key.to_owned(),
                    value: url.to_string(),
                    text: format!("must be {allowed}"),
                });
            }
        }
    }

    fn check_relations(&self, breaches: &mut Vec<Breach>) {
        let relations = [
            (
                "outbox.backoff_ms",
                self.outbox.backoff_ms,
                "outbox.max_backoff_ms",
                self.outbox.max_backoff_ms,
            ),
            (
                "database.lock_timeout_ms",
                self.database.lock_timeout_ms,
                "database.statement_timeout_ms",
                self.database.statement_timeout_ms,
            ),
            (
                "watch.sample_ms",
                self.watch.sample_ms,
                "watch.heartbeat_ms",
                self.watch.heartbeat_ms,
            ),
            // Otherwise the sweeper takes up what its own server is still busy with.
            (
                "engine.response_timeout_ms",
                self.engine.response_timeout_ms,
                "sweeper.grace_ms",
                self.sweeper.grace_ms,
            ),
        ];
        for (key, value, other_key, other) in relations {
            if value > other {
                breaches.push(Breach {
                    key: key.to_owned(),
                    value: value.to_string(),
                    text: format!("must be at most {other_key}, which is {other}"),
                });
            }
        }
    }
}

/// Everything that is wrong with the settings, one sentence each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingsError {
    pub problems: Vec<String>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl std::error::Error for SettingsError {}

/// Whether the terminal's user asked for plain text (<https://no-color.org>).
#[must_use]
pub fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// The log filter in RUST_LOG, if there is one.
#[must_use]
pub fn rust_log() -> Option<String> {
    std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_valid() {
        assert_eq!(Settings::default().validate(), Ok(()));
        assert_eq!(Settings::default().check_exposure(false), Ok(()));
    }

    #[test]
    fn all_that_is_wrong_is_told_at_once() {
        let mut settings = Settings::default();
        settings.outbox.batch = 0;
        settings.outbox.backoff_ms = 400_000;
        settings.database.url = SecretUrl::new("oracle://scott:tiger@host/x");
        let error = settings.validate().expect_err("three values are wrong");
        assert_eq!(
            error.problems,
            [
                "outbox.batch = 0: must be a whole number in 1..=10000",
                "database.url = oracle://scott:***@host/x: must be sqlite://path, \
                 postgres://user@host/name or mysql://user@host/name",
                "outbox.backoff_ms = 400000: must be at most outbox.max_backoff_ms, which is 300000",
            ]
        );
    }

    #[test]
    fn an_address_that_others_reach_needs_insecure() {
        let mut settings = Settings::default();
        for (addr, open) in [
            ("127.0.0.1:1", false),
            ("127.8.0.1:1", false),
            ("[::1]:1", false),
            ("0.0.0.0:1", true),
            ("[::]:1", true),
            ("10.0.0.1:1", true),
        ] {
            settings.grpc.addr = addr.parse().expect("an address");
            assert_eq!(settings.check_exposure(false).is_err(), open, "{addr}");
            assert_eq!(settings.check_exposure(true), Ok(()), "{addr}");
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let mut settings = Settings::default();
        settings.engine.url = SecretUrl::new("redis://:hunter2@host:6379");
        settings.database.url = SecretUrl::new("postgres://app:hunter2@host/db");
        let text = format!("{settings:?}");
        assert!(!text.contains("hunter2"), "{text}");
        assert!(text.contains("app:***@host"), "{text}");
    }
}
