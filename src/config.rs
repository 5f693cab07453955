//! Settings: one struct per component, from a TOML file, the environment and flags, in this order.
//!
//! **Promises:** the later source wins, key by key. A key that nobody knows is an error. All is
//! checked before anything opens. No message and no `Debug` shows a password. This is the only
//! module that reads the environment.
#![allow(clippy::disallowed_methods, reason = "this is the module that reads the environment")]

mod address;
#[cfg(test)]
mod any;
mod components;
mod load;
mod render;
mod secret;

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

use components::{Breach, Component, Key};

pub use address::OptionalAddr;
pub use components::{
    CatalogSettings, DatabaseSettings, EngineSettings, GrpcSettings, HoldsSettings, HttpSettings,
    LimitsSettings, LogSettings, OutboxSettings, ReserveSettings, SweeperSettings, WatchSettings,
};
pub use load::{Flag, Loaded, Origin, Sources};
pub use render::example;
pub use secret::{SecretUrl, masked};

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
            http: HttpSettings,
            engine: EngineSettings,
            database: DatabaseSettings,
            reserve: ReserveSettings,
            limits: LimitsSettings,
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
        let problem = |(key, addr)| {
            format!(
                "{key} = {addr}: others can reach this address, and no tokens are set. \
                 Listen on 127.0.0.1 or [::1], or add --insecure where the network keeps \
                 strangers out"
            )
        };
        let problems: Vec<String> = self.exposed().map(problem).collect();
        if insecure || problems.is_empty() { Ok(()) } else { Err(SettingsError { problems }) }
    }

    /// The addresses that others can reach, each with its key.
    pub fn exposed(&self) -> impl Iterator<Item = (&'static str, SocketAddr)> {
        [("grpc.addr", Some(self.grpc.addr)), ("http.addr", self.http.addr.0)]
            .into_iter()
            .filter_map(|(key, addr)| Some((key, addr?)))
            .filter(|(_, addr)| !addr.ip().is_loopback())
    }

    fn breaches(&self) -> Vec<Breach> {
        let mut breaches = Vec::new();
        self.check_ranges(&mut breaches);
        self.check_urls(&mut breaches);
        self.check_relations(&mut breaches);
        breaches
    }

    fn check_urls(&self, breaches: &mut Vec<Breach>) {
        const ENGINES: &[&str] = &["redis"];
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

            let mut settings = Settings::default();
            settings.http.addr = OptionalAddr(Some(addr.parse().expect("an address")));
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
