//! How to reach Redis and how long to wait for it, and what can be wrong with that.

use std::{fmt, time::Duration};

use serde::Deserialize;

use super::target::{Kind, Login, Target, mask};

/// How to reach Redis or Valkey.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisSettings {
    /// `redis://[user:password@]host[:port][/database]`,
    /// `redis-cluster://[user:password@]host[:port],host[:port]…` or
    /// `redis-sentinel://[user:password@]host[:port],host[:port]…/master[/database]`; `rediss`
    /// in place of `redis` is TLS.
    pub url: String,
    /// Calls share these, per server; each carries many calls at once. 1 to 64.
    #[serde(default = "RedisSettings::default_connections")]
    pub connections: u32,
    /// How long a connection may take to be made, with all that is asked on it first.
    #[serde(default = "RedisSettings::default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
    /// How long a call may take; after it the call is unknown.
    #[serde(default = "RedisSettings::default_response_timeout_ms")]
    pub response_timeout_ms: u64,
    /// How long sent bytes may stay unacknowledged before the kernel gives the connection up:
    /// what ends a connection whose packets vanish.
    #[serde(default = "RedisSettings::default_tcp_user_timeout_ms")]
    pub tcp_user_timeout_ms: u64,
    /// How many calls may wait to be written to one connection.
    #[serde(default = "RedisSettings::default_pipeline_buffer")]
    pub pipeline_buffer: usize,
    /// The CAs that servers are checked against; empty: those of the system. PEM, as the next two.
    #[serde(default)]
    pub ca_file: String,
    /// The certificate that servers are shown, and those between it and its CA; empty: none.
    #[serde(default)]
    pub cert_file: String,
    /// The key of that certificate.
    #[serde(default)]
    pub key_file: String,
    /// Who connects to the Sentinels; empty: nobody in particular.
    #[serde(default)]
    pub sentinel_user: String,
    /// The password of the Sentinels; empty: they want none.
    #[serde(default)]
    pub sentinel_password: String,
}

impl RedisSettings {
    /// What is at this URL, everything else as by default.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections: Self::default_connections(),
            connect_timeout_ms: Self::default_connect_timeout_ms(),
            response_timeout_ms: Self::default_response_timeout_ms(),
            tcp_user_timeout_ms: Self::default_tcp_user_timeout_ms(),
            pipeline_buffer: Self::default_pipeline_buffer(),
            ca_file: String::new(),
            cert_file: String::new(),
            key_file: String::new(),
            sentinel_user: String::new(),
            sentinel_password: String::new(),
        }
    }

    fn default_connections() -> u32 {
        2
    }
    fn default_connect_timeout_ms() -> u64 {
        1_000
    }
    fn default_response_timeout_ms() -> u64 {
        1_000
    }
    fn default_tcp_user_timeout_ms() -> u64 {
        2_000
    }
    fn default_pipeline_buffer() -> usize {
        256
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(super) fn response_timeout(&self) -> Duration {
        Duration::from_millis(self.response_timeout_ms)
    }

    /// Who connects to the Sentinels.
    pub(super) fn sentinel_login(&self) -> Login {
        let set = |text: &String| (!text.is_empty()).then(|| text.clone());
        let (user, password) = (set(&self.sentinel_user), set(&self.sentinel_password));
        Login { user, password, database: 0 }
    }

    /// Checks the figures, and takes the URL apart.
    ///
    /// # Errors
    /// [`OpenError::InvalidUrl`] or [`OpenError::Misconfigured`] says what to change; neither
    /// holds a password.
    pub fn target(&self) -> Result<Target, OpenError> {
        let misconfigured = |text: &str| Err(OpenError::Misconfigured(text.to_owned()));
        if !(1..=64).contains(&self.connections) {
            return misconfigured("connections must be 1 to 64");
        }
        let figures = [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("response_timeout_ms", self.response_timeout_ms),
            ("tcp_user_timeout_ms", self.tcp_user_timeout_ms),
            ("pipeline_buffer", self.pipeline_buffer as u64),
        ];
        if let Some((name, _)) = figures.into_iter().find(|(_, figure)| *figure == 0) {
            return misconfigured(&format!("{name} must be at least 1"));
        }
        let target = Target::parse(&self.url)?;
        let has_files =
            [&self.ca_file, &self.cert_file, &self.key_file].iter().any(|f| !f.is_empty());
        if has_files && !target.tls {
            return misconfigured("certificates are for a URL with TLS, which begins with rediss");
        }
        if self.cert_file.is_empty() != self.key_file.is_empty() {
            return misconfigured("cert_file and key_file need each other");
        }
        match &target.kind {
            Kind::Sentinel(_) => {}
            Kind::Server | Kind::Cluster if self.sentinel_login() == Login::default() => {}
            Kind::Server | Kind::Cluster => {
                return misconfigured(
                    "sentinel_user and sentinel_password are for redis-sentinel URLs",
                );
            }
        }
        Ok(target)
    }
}

impl fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSettings")
            .field("url", &mask(&self.url))
            .field("connections", &self.connections)
            .field("connect_timeout_ms", &self.connect_timeout_ms)
            .field("response_timeout_ms", &self.response_timeout_ms)
            .field("tcp_user_timeout_ms", &self.tcp_user_timeout_ms)
            .field("pipeline_buffer", &self.pipeline_buffer)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("sentinel_user", &self.sentinel_user)
            .finish_non_exhaustive()
    }
}

/// Why the engine could not be opened; one line that says what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("engine.url is not usable: {0}")]
    InvalidUrl(String),
    #[error("no usable Redis at {address}: {cause}")]
    Unreachable { address: String, cause: String },
    #[error("Redis is not set up for sales: {0}")]
    Misconfigured(String),
    #[error("{0}")]
    Certificate(String),
}

/// One thing that a check of the servers found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub level: Level,
    /// What it is, what is at stake, what to change.
    pub text: String,
}

impl Finding {
    pub(super) fn fine(text: impl Into<String>) -> Self {
        Self { level: Level::Fine, text: text.into() }
    }
    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self { level: Level::Warning, text: text.into() }
    }
    pub(super) fn error(text: impl Into<String>) -> Self {
        Self { level: Level::Error, text: text.into() }
    }
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// It works, with a risk.
    Warning,
    /// The engine refuses to start.
    Error,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[test]
    fn settings_have_defaults_and_refuse_what_they_do_not_know() {
        let settings: RedisSettings = toml::from_str("url = 'redis://localhost'").unwrap();
        assert_eq!(settings, RedisSettings::new("redis://localhost"));
        let error = toml::from_str::<RedisSettings>("url = 'redis://h'\nconections = 3");
        assert!(error.unwrap_err().to_string().contains("conections"));
    }

    #[test]
    fn settings_never_show_a_password() {
        let mut settings = RedisSettings::new("redis-sentinel://u:hunter2@h,i/m");
        settings.sentinel_password = "hunter2".to_owned();
        let shown = format!("{settings:?} {:?}", settings.target().unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(!format!("{:?}", settings.sentinel_login()).contains("hunter2"));
    }

    #[test]
    fn settings_must_fit_the_url() {
        let refused = |url: &str, change: fn(&mut RedisSettings)| {
            let mut settings = RedisSettings::new(url);
            change(&mut settings);
            settings.target().unwrap_err().to_string()
        };
        assert!(refused("redis://h", |s| s.ca_file = "ca".into()).contains("rediss"));
        assert!(refused("rediss://h", |s| s.cert_file = "c".into()).contains("key_file"));
        assert!(refused("redis://h", |s| s.sentinel_user = "u".into()).contains("redis-sentinel"));
        assert!(refused("redis://h", |s| s.connections = 0).contains("1 to 64"));
        assert!(refused("redis://h", |s| s.pipeline_buffer = 0).contains("at least 1"));
    }
}
