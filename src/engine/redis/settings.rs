//! Where Redis is and how long to wait for it, and what can be wrong with that.

use std::{fmt, time::Duration};

use serde::Deserialize;
use url::Url;

/// How to reach one Redis or Valkey server.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisSettings {
    /// `redis://[user:password@]host[:port][/database]`
    pub url: String,
    /// Calls share these; each carries many calls at once. 1 to 64.
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
}

impl RedisSettings {
    /// The server at this URL, everything else as by default.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections: Self::default_connections(),
            connect_timeout_ms: Self::default_connect_timeout_ms(),
            response_timeout_ms: Self::default_response_timeout_ms(),
            tcp_user_timeout_ms: Self::default_tcp_user_timeout_ms(),
            pipeline_buffer: Self::default_pipeline_buffer(),
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

    /// Checks the figures, and takes the URL apart.
    ///
    /// # Errors
    /// [`OpenError::InvalidUrl`] or [`OpenError::Misconfigured`] says what to change; neither
    /// holds the password.
    pub fn address(&self) -> Result<Address, OpenError> {
        if !(1..=64).contains(&self.connections) {
            return Err(OpenError::Misconfigured("connections must be 1 to 64".to_owned()));
        }
        let figures = [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("response_timeout_ms", self.response_timeout_ms),
            ("tcp_user_timeout_ms", self.tcp_user_timeout_ms),
            ("pipeline_buffer", self.pipeline_buffer as u64),
        ];
        if let Some((name, _)) = figures.into_iter().find(|(_, figure)| *figure == 0) {
            return Err(OpenError::Misconfigured(format!("{name} must be at least 1")));
        }
        Address::parse(&self.url)
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
            .finish()
    }
}

/// A URL taken apart; [`fmt::Display`] shows host and port alone.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
}

impl Address {
    fn parse(text: &str) -> Result<Self, OpenError> {
        let invalid = |why: &str| {
            OpenError::InvalidUrl(format!(
                "{}: {why}; it should look like redis://localhost:6379",
                mask(text)
            ))
        };
        let url = Url::parse(text).map_err(|error| invalid(&error.to_string()))?;
        match url.scheme() {
            "redis" | "valkey" => {}
            "rediss" | "valkeys" => return Err(invalid("TLS is not supported yet")),
            scheme if scheme.contains("cluster") => {
                return Err(invalid("Redis Cluster is not supported yet"));
            }
            scheme if scheme.contains("sentinel") => {
                return Err(invalid("Redis Sentinel is not supported yet"));
            }
            _ => return Err(invalid("the scheme must be redis")),
        }
        let host = url.host_str().filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| invalid("the host is missing"))?;
        let decode =
            |text: &str| percent_decode(text).ok_or_else(|| invalid("a %-escape is not UTF-8"));
        let user = match url.username() {
            "" => None,
            user => Some(decode(user)?),
        };
        let password = url.password().map(decode).transpose()?;
        let database = match url.path().trim_matches('/') {
            "" => 0,
            path => path.parse().map_err(|_| invalid("the database must be a number"))?,
        };
        if url.query().is_some() || url.fragment().is_some() {
            return Err(invalid("nothing may follow the database"));
        }
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { host, port: url.port().unwrap_or(6379), user, password, database })
    }

    /// The text without the password, should it be in there.
    pub(super) fn without_password(&self, text: &str) -> String {
        match self.password.as_deref() {
            Some(password) if !password.is_empty() => text.replace(password, "***"),
            _ => text.to_owned(),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self}/{})", self.database)
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
}

/// One thing that a check of the server found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub level: Level,
    /// What it is, what is at stake, what to change.
    pub text: String,
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

/// A URL whose user and password are hidden, however broken the rest is.
fn mask(url: &str) -> String {
    match (url.find("://"), url.rfind('@')) {
        (Some(scheme), Some(at)) if scheme + 3 <= at => {
            format!("{}***{}", &url[..scheme + 3], &url[at..])
        }
        (None, Some(at)) => format!("***{}", &url[at..]),
        _ => url.to_owned(),
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            bytes.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        let address = Address::parse("redis://sales:p%40ss:word@cache.internal:6380/3").unwrap();
        assert_eq!(address.user.as_deref(), Some("sales"));
        assert_eq!(address.password.as_deref(), Some("p@ss:word"));
        assert_eq!(
            (address.host.as_str(), address.port, address.database),
            ("cache.internal", 6380, 3)
        );
        assert_eq!(Address::parse("redis://[::1]").unwrap().to_string(), "[::1]:6379");
    }

    #[test]
    fn a_url_that_is_no_use_says_what_to_change_and_hides_the_password() {
        for (url, why) in [
            ("rediss://u:hunter2@h", "TLS"),
            ("redis+sentinel://u:hunter2@h", "Sentinel"),
            ("redis+cluster://u:hunter2@h", "Cluster"),
            ("http://u:hunter2@h", "scheme"),
            ("redis://u:hunter2@h/sales", "number"),
            ("redis://u:hunter2@h:notaport", "port"),
            ("u:hunter2@h", "redis://localhost:6379"),
            ("redis://u:hun@ter2@h/0?x=1", "follow"),
        ] {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert!(!error.contains("ter2"), "{error}");
        }
    }

    #[test]
    fn settings_have_defaults_and_refuse_what_they_do_not_know() {
        let settings: RedisSettings = toml::from_str("url = 'redis://localhost'").unwrap();
        assert_eq!(settings, RedisSettings::new("redis://localhost"));
        let error = toml::from_str::<RedisSettings>("url = 'redis://h'\nconections = 3");
        assert!(error.unwrap_err().to_string().contains("conections"));
    }

    #[test]
    fn settings_never_show_the_password() {
        let settings = RedisSettings::new("redis://u:hunter2@h");
        assert!(!format!("{settings:?} {:?}", settings.address().unwrap()).contains("hunter2"));
    }
}
