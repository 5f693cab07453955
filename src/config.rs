//! Settings: one struct per component, from a TOML file, the environment and flags, in this order.
//!
//! **Promises:** the later source wins, key by key. A key that nobody knows is an error. All is
//! checked before anything opens. No message and no `Debug` shows a password. This is the only
//! module that reads the environment.
#![allow(clippy::disallowed_methods, reason = "this is the module that reads the environment")]

mod address;
#[cfg(test)]
mod any;
mod auth;
mod components;
mod load;
mod otel;
mod render;
mod secret;

use std::{fmt, net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

use components::{Breach, Component, Key};

pub use address::OptionalAddr;
pub use auth::{DIGEST_BYTES, Role, Subject, Subjects, Token, Tokens, digest};
pub use components::{
    AuthSettings, CatalogSettings, DatabaseSettings, EngineSettings, GrpcSettings, HoldsSettings,
    HttpSettings, LimitsSettings, LogSettings, OutboxSettings, ReserveSettings, SegmentsSettings,
    SweeperSettings, TlsSettings, TracesSettings, WatchSettings,
};
pub use load::{Flag, Loaded, Origin, Sources};
pub use render::example;
pub use secret::{SecretText, SecretUrl, masked};

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

/// Whether a client needs a certificate to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientCerts {
    Optional,
    Required,
}

/// Calls a macro with every field of [`Settings`] and its type.
macro_rules! for_every_component {
    ($with:ident) => {
        $with! {
            grpc: GrpcSettings,
            http: HttpSettings,
            auth: AuthSettings,
            tls: TlsSettings,
            engine: EngineSettings,
            database: DatabaseSettings,
            reserve: ReserveSettings,
            limits: LimitsSettings,
            outbox: OutboxSettings,
            sweeper: SweeperSettings,
            segments: SegmentsSettings,
            holds: HoldsSettings,
            catalog: CatalogSettings,
            watch: WatchSettings,
            log: LogSettings,
            traces: TracesSettings,
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

    /// Whether callers are asked who they are.
    #[must_use]
    pub fn asks_callers(&self) -> bool {
        !self.auth.tokens.is_empty() || !self.tls.client_ca_file.is_empty()
    }

    /// What `seckill serve --insecure` allows and nothing else does: to let strangers in, or to
    /// have tokens travel in the clear.
    ///
    /// # Errors
    /// A sentence for each address that says what to change.
    pub fn check_exposure(&self, insecure: bool) -> Result<(), SettingsError> {
        let problems: Vec<String> = self.exposed().map(|exposed| exposed.to_string()).collect();
        if insecure || problems.is_empty() { Ok(()) } else { Err(SettingsError { problems }) }
    }

    /// The addresses that others can reach and should not as things are.
    pub fn exposed(&self) -> impl Iterator<Item = Exposed> {
        let reachable = |addr: SocketAddr| !addr.ip().is_loopback();
        let grpc = Some(self.grpc.addr).filter(|addr| reachable(*addr)).and_then(|addr| {
            let has_tls = !self.tls.cert_file.is_empty() || self.tls.terminated_in_front;
            let danger = match (self.asks_callers(), has_tls) {
                (false, _) => Danger::NobodyIsAsked,
                (true, false) => Danger::TokensInTheClear,
                (true, true) => return None,
            };
            Some(Exposed { key: "grpc.addr", addr, danger })
        });
        let http = self.http.addr.0.filter(|addr| reachable(*addr) && !self.http.open);
        let http = http.map(|addr| Exposed { key: "http.addr", addr, danger: Danger::Figures });
        grpc.into_iter().chain(http)
    }

    /// Whether the dashboard is served, with its calls; if not, why.
    ///
    /// The HTTP port has no TLS. So at an address that others can reach it takes calls only if the
    /// gRPC port takes them without TLS of its own: it opens no door that is shut there.
    ///
    /// # Errors
    /// A sentence that says what to change.
    pub fn check_dashboard(&self) -> Result<(), &'static str> {
        let reachable = |addr: SocketAddr| !addr.ip().is_loopback();
        if !self.http.dashboard {
            return Err("it is turned off by http.dashboard");
        }
        if !self.http.addr.0.is_some_and(reachable) {
            return Ok(());
        }
        let asks = self.asks_callers();
        let is_open = reachable(self.grpc.addr) && (!asks || self.tls.cert_file.is_empty());
        match (asks, self.tls.terminated_in_front) {
            (true, true) => Ok(()),
            (_, _) if is_open => Ok(()),
            (true, false) => {
                Err("others can reach http.addr, and tokens would travel without TLS; put a proxy \
                 with TLS in front and set tls.terminated_in_front = true, or listen on 127.0.0.1")
            }
            (false, _) => {
                Err("others can reach http.addr, and callers are not asked who they are; set \
                 auth.tokens, or listen on 127.0.0.1")
            }
        }
    }

    fn breaches(&self) -> Vec<Breach> {
        let mut breaches = Vec::new();
        self.check_ranges(&mut breaches);
        self.check_urls(&mut breaches);
        self.check_engine(&mut breaches);
        self.check_callers(&mut breaches);
        self.check_relations(&mut breaches);
        breaches
    }

    fn check_urls(&self, breaches: &mut Vec<Breach>) {
        const ENGINES: &[&str] = &[
            "redis",
            "rediss",
            "redis-cluster",
            "rediss-cluster",
            "redis-sentinel",
            "rediss-sentinel",
        ];
        const DATABASES: &[&str] = &["sqlite", "postgres", "postgresql", "mysql", "mariadb"];
        let urls = [
            (
                "engine.url",
                &self.engine.url,
                ENGINES,
                "empty, redis://host:port, redis-cluster://host:port,host:port or \
                 redis-sentinel://host:port,host:port/master, or one of them with rediss for TLS",
            ),
            (
                "database.url",
                &self.database.url,
                DATABASES,
                "sqlite://path, postgres://user@host/name or mysql://user@host/name",
            ),
            (
                "traces.endpoint",
                &self.traces.endpoint,
                &["http", "https"],
                "empty, http://host:port or https://host:port",
            ),
        ];
        for (key, url, schemes, allowed) in urls {
            if key != "database.url" && url.expose().is_empty() {
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

    /// What only some URLs have a use for.
    fn check_engine(&self, breaches: &mut Vec<Breach>) {
        let engine = &self.engine;
        let mut breach = |key: &str, value: &str, text: &str| {
            let (key, value, text) = (format!("engine.{key}"), value.to_owned(), text.to_owned());
            breaches.push(Breach { key, value, text });
        };
        let with_tls = ["rediss", "rediss-cluster", "rediss-sentinel"];
        let files = [
            ("ca_file", &engine.ca_file),
            ("cert_file", &engine.cert_file),
            ("key_file", &engine.key_file),
        ];
        for (key, path) in files {
            if !path.is_empty() && !engine.url.has_scheme_of(&with_tls) {
                breach(key, path, "needs an engine.url with TLS, which begins with rediss");
            }
        }
        match (engine.cert_file.as_str(), engine.key_file.as_str()) {
            ("", "") => {}
            ("", key) => breach("key_file", key, "needs engine.cert_file too"),
            (cert, "") => breach("cert_file", cert, "needs engine.key_file too"),
            _ => {}
        }
        let has_sentinels = engine.url.has_scheme_of(&["redis-sentinel", "rediss-sentinel"]);
        if !engine.sentinel_user.is_empty() && !has_sentinels {
            breach("sentinel_user", &engine.sentinel_user, "needs a redis-sentinel URL");
        }
        if !engine.sentinel_password.expose().is_empty() && !has_sentinels {
            breach("sentinel_password", "(not shown)", "needs a redis-sentinel URL");
        } else if engine.sentinel_password.expose().is_empty() && !engine.sentinel_user.is_empty() {
            breach("sentinel_user", &engine.sentinel_user, "needs engine.sentinel_password too");
        }
    }

    fn check_callers(&self, breaches: &mut Vec<Breach>) {
        let (auth, tls) = (&self.auth, &self.tls);
        let mut breach = |key: &str, value: &str, text: &str| {
            let (key, value, text) = (key.to_owned(), value.to_owned(), text.to_owned());
            breaches.push(Breach { key, value, text });
        };
        for problem in auth.tokens.read().err().unwrap_or_default() {
            breach("auth.tokens", "(not shown)", &problem);
        }
        for problem in auth.subjects.read().err().unwrap_or_default() {
            breach("auth.subjects", &format!("{:?}", auth.subjects), &problem);
        }
        if tls.cert_file.is_empty() != tls.key_file.is_empty() {
            let (key, value, other) = if tls.cert_file.is_empty() {
                ("tls.key_file", &tls.key_file, "tls.cert_file")
            } else {
                ("tls.cert_file", &tls.cert_file, "tls.key_file")
            };
            breach(key, value, &format!("needs {other} too"));
        }
        if tls.client_ca_file.is_empty() {
            if !auth.subjects.is_empty() {
                let value = format!("{:?}", auth.subjects);
                breach("auth.subjects", &value, "needs tls.client_ca_file");
            }
            if tls.client_certs == ClientCerts::Required {
                breach("tls.client_certs", "required", "needs tls.client_ca_file");
            }
        } else if tls.cert_file.is_empty() {
            breach(
                "tls.client_ca_file",
                &tls.client_ca_file,
                "needs tls.cert_file and tls.key_file",
            );
        } else if auth.subjects.is_empty() && auth.tokens.is_empty() {
            let text = "nobody could call; set auth.subjects or auth.tokens";
            breach("tls.client_ca_file", &tls.client_ca_file, text);
        } else if auth.subjects.is_empty() && tls.client_certs == ClientCerts::Optional {
            let text = "no certificate would mean anything; set auth.subjects, or \
                        tls.client_certs = \"required\"";
            breach("tls.client_ca_file", &tls.client_ca_file, text);
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

/// An address that others can reach, and what is wrong with that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exposed {
    /// As in `grpc.addr`.
    pub key: &'static str,
    pub addr: SocketAddr,
    pub danger: Danger,
}

/// What others could do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Danger {
    /// Call everything.
    NobodyIsAsked,
    /// Read the tokens of others on their way.
    TokensInTheClear,
    /// Read the metrics.
    Figures,
}

impl Danger {
    /// What is wrong, as a sentence goes on after the address.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::NobodyIsAsked => {
                "others can reach this address, and callers are not asked who they are"
            }
            Self::TokensInTheClear => {
                "others can reach this address, and tokens travel without TLS"
            }
            Self::Figures => "others can reach this address, and nobody is asked who he is",
        }
    }

    /// What to change.
    #[must_use]
    pub fn change(self) -> &'static str {
        match self {
            Self::NobodyIsAsked => {
                "Set auth.tokens or tls.client_ca_file, or listen on 127.0.0.1 or [::1], or add \
                 --insecure where the network keeps strangers out"
            }
            Self::TokensInTheClear => {
                "Set tls.cert_file and tls.key_file, or tls.terminated_in_front = true where a \
                 proxy or a mesh has TLS, or listen on 127.0.0.1 or [::1]"
            }
            Self::Figures => {
                "Set http.open = true if they may see metrics and probes, or listen on 127.0.0.1 \
                 or [::1]"
            }
        }
    }
}

impl fmt::Display for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, addr, danger } = self;
        write!(f, "{key} = {addr}: {}. {}", danger.text(), danger.change())
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

/// Whether OTEL_SERVICE_NAME names this service, for its traces.
#[must_use]
pub fn names_service() -> bool {
    std::env::var_os("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty())
}

/// The file that OpenTelemetry's variables name for this purpose, `CERTIFICATE` for one, and the
/// variable: the one for traces before the one for everything that is sent.
#[must_use]
pub fn otlp_file(purpose: &str) -> Option<(String, PathBuf)> {
    ["OTEL_EXPORTER_OTLP_TRACES", "OTEL_EXPORTER_OTLP"].into_iter().find_map(|first| {
        let variable = format!("{first}_{purpose}");
        let path = std::env::var_os(&variable).filter(|path| !path.is_empty())?;
        Some((variable, path.into()))
    })
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

    const DIGEST: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

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
    fn callers_who_are_asked_over_tls_may_be_others() {
        let mut settings = Settings::default();
        settings.grpc.addr = "0.0.0.0:1".parse().expect("an address");
        let danger = |settings: &Settings| settings.exposed().next().map(|found| found.danger);
        assert_eq!(danger(&settings), Some(Danger::NobodyIsAsked));
        settings.tls.cert_file = "cert.pem".into();
        assert_eq!(danger(&settings), Some(Danger::NobodyIsAsked), "TLS alone asks nobody");
        settings.tls.client_ca_file = "ca.pem".into();
        assert_eq!(danger(&settings), None);

        settings.tls = TlsSettings::default();
        settings.auth.tokens = Tokens::new(&format!("a:ops:{DIGEST}"));
        assert_eq!(danger(&settings), Some(Danger::TokensInTheClear));
        settings.tls.terminated_in_front = true;
        assert_eq!(danger(&settings), None);
        settings.tls = TlsSettings { cert_file: "cert.pem".into(), ..TlsSettings::default() };
        assert_eq!(danger(&settings), None);
    }

    #[test]
    fn the_http_port_is_opened_on_its_own() {
        let mut settings = Settings::default();
        settings.http.addr = OptionalAddr(Some("0.0.0.0:1".parse().expect("an address")));
        settings.auth.tokens = Tokens::new(&format!("a:ops:{DIGEST}"));
        assert!(settings.check_exposure(false).is_err(), "tokens do not help there");
        settings.http.open = true;
        assert_eq!(settings.check_exposure(false), Ok(()));
        settings.grpc.addr = "0.0.0.0:1".parse().expect("an address");
        settings.auth.tokens = Tokens::default();
        let danger = settings.exposed().next().map(|found| found.danger);
        assert_eq!(danger, Some(Danger::NobodyIsAsked), "it opens one port only");
    }

    #[test]
    fn the_dashboard_opens_no_door_that_is_shut_at_the_grpc_port() {
        let anywhere: SocketAddr = "0.0.0.0:1".parse().expect("an address");
        let shown = Settings {
            http: HttpSettings {
                addr: OptionalAddr(Some(anywhere)),
                open: true,
                ..HttpSettings::default()
            },
            ..Settings::default()
        };
        let with_tokens = || {
            let mut settings = shown.clone();
            settings.auth.tokens = Tokens::new(&format!("a:ops:{DIGEST}"));
            settings
        };
        let why = |settings: &Settings| settings.check_dashboard().expect_err("it is not served");
        assert_eq!(Settings::default().check_dashboard(), Ok(()));
        assert!(why(&shown).contains("callers are not asked"));
        assert!(why(&with_tokens()).contains("without TLS"));
        let mut over_tls = with_tokens();
        over_tls.grpc.addr = anywhere;
        over_tls.tls.cert_file = "cert.pem".into();
        assert!(why(&over_tls).contains("without TLS"));
        let mut in_front = with_tokens();
        in_front.tls.terminated_in_front = true;
        assert_eq!(in_front.check_dashboard(), Ok(()));
        // These two need --insecure for the gRPC port.
        for mut insecure in [shown.clone(), with_tokens()] {
            insecure.grpc.addr = anywhere;
            assert_eq!(insecure.check_dashboard(), Ok(()));
        }
        let mut off = in_front;
        off.http.dashboard = false;
        assert!(why(&off).contains("turned off"));
    }

    #[test]
    fn settings_of_callers_must_fit_together() {
        let check = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.validate().expect_err("something is missing").problems
        };
        for (problems, expected) in [
            (check(|s| s.tls.cert_file = "c".into()), "tls.cert_file = c: needs tls.key_file too"),
            (check(|s| s.tls.key_file = "k".into()), "tls.key_file = k: needs tls.cert_file too"),
            (
                check(|s| s.tls.client_ca_file = "ca".into()),
                "tls.client_ca_file = ca: needs tls.cert_file and tls.key_file",
            ),
            (
                check(|s| s.auth.subjects = Subjects::new("a=ops")),
                "auth.subjects = [\"a=ops\"]: needs tls.client_ca_file",
            ),
            (
                check(|s| s.tls.client_certs = ClientCerts::Required),
                "tls.client_certs = required: needs tls.client_ca_file",
            ),
            (
                check(|s| {
                    s.tls.cert_file = "c".into();
                    s.tls.key_file = "k".into();
                    s.tls.client_ca_file = "ca".into();
                }),
                "tls.client_ca_file = ca: nobody could call; set auth.subjects or auth.tokens",
            ),
            (
                check(|s| s.auth.tokens = Tokens::new("hunter2")),
                "auth.tokens = (not shown): entry 1 of 1 is not name:role:sha256",
            ),
        ] {
            assert_eq!(problems, [expected]);
        }
    }

    #[test]
    fn settings_of_the_engine_must_fit_together() {
        let check = |url: &str, change: fn(&mut EngineSettings)| {
            let mut settings = Settings::default();
            settings.engine.url = SecretUrl::new(url);
            change(&mut settings.engine);
            settings.validate().err().map(|error| error.problems).unwrap_or_default()
        };
        let nothing: fn(&mut EngineSettings) = |_| {};
        for url in [
            "redis://h",
            "rediss://u:pw@h:6379/1",
            "redis-cluster://u:pw@a:1,b:2",
            "rediss-sentinel://a:1,b:2/sales",
        ] {
            assert_eq!(check(url, nothing), Vec::<String>::new(), "{url}");
        }
        for (problems, expected) in [
            (
                check("redis://h", |e| e.ca_file = "ca".into()),
                "engine.ca_file = ca: needs an engine.url with TLS, which begins with rediss",
            ),
            (
                check("rediss://h", |e| e.cert_file = "c".into()),
                "engine.cert_file = c: needs engine.key_file too",
            ),
            (
                check("rediss://h", |e| e.key_file = "k".into()),
                "engine.key_file = k: needs engine.cert_file too",
            ),
            (
                check("redis-cluster://h", |e| e.sentinel_password = SecretText::new("hunter2")),
                "engine.sentinel_password = (not shown): needs a redis-sentinel URL",
            ),
            (
                check("redis-sentinel://a,b/m", |e| e.sentinel_user = "u".into()),
                "engine.sentinel_user = u: needs engine.sentinel_password too",
            ),
        ] {
            assert_eq!(problems, [expected]);
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let mut settings = Settings::default();
        settings.engine.sentinel_password = SecretText::new("hunter2");
        settings.engine.url = SecretUrl::new("redis://:hunter2@host:6379");
        settings.database.url = SecretUrl::new("postgres://app:hunter2@host/db");
        settings.auth.tokens = Tokens::new(&format!("anna:ops:{DIGEST},hunter2"));
        let text = format!("{settings:?}");
        assert!(!text.contains("hunter2") && !text.contains(DIGEST), "{text}");
        assert!(text.contains("anna:ops:***"), "{text}");
        assert!(text.contains("app:***@host"), "{text}");
    }
}
