//! Passwords, and URLs that may hold one.
//!
//! **Invariant:** only `expose` gives the whole text away; `Display`, `Debug` and serde show it
//! masked.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};
use url::Url;

/// Parameters of a URL that hold a secret, by a part of their names.
const SECRET_PARAMETERS: [&str; 4] = ["pass", "secret", "token", "key"];

/// A URL that is shown without its password.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(String);

impl SecretUrl {
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The URL with its password, for the one who connects.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether this is a URL with one of these schemes.
    pub fn has_scheme_of(&self, schemes: &[&str]) -> bool {
        let first = one_host(&self.0).map(|(first, _)| first);
        Url::parse(first.as_deref().unwrap_or(&self.0))
            .is_ok_and(|url| schemes.contains(&url.scheme()))
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&masked(&self.0))
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", masked(&self.0))
    }
}

impl Serialize for SecretUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&masked(&self.0))
    }
}

/// A password that is not shown.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretText {
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The password, for the one who connects.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn shown(&self) -> &'static str {
        if self.0.is_empty() { "" } else { "***" }
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.shown())
    }
}

impl Serialize for SecretText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.shown())
    }
}

/// A URL that names several hosts, with the first of them alone, and where its host ends: there the
/// others were. No parser takes all of them.
fn one_host(text: &str) -> Option<(String, &str)> {
    let start = text.find("://")? + 3;
    let end = text[start..].find(['/', '?', '#']).map_or(text.len(), |at| start + at);
    let start = text[start..end].rfind('@').map_or(start, |at| start + at + 1);
    let comma = start + text[start..end].find(',')?;
    Some((format!("{}{}", &text[..comma], &text[end..]), &text[start..end]))
}

/// The URL with `***` in place of its secrets. Of a text that is no URL, only a text without
/// `@`, `?` and `:` is shown: anything else may hold a password in the wrong place.
#[must_use]
pub fn masked(text: &str) -> String {
    let Some((first, hosts)) = one_host(text) else { return masked_url(text) };
    // Hosts are no secret; their place is found again behind the user.
    let name = hosts.split(',').next().unwrap_or(hosts);
    let masked = masked_url(&first);
    let found = ["@", "://"].iter().find_map(|mark| {
        let at = masked.find(&format!("{mark}{name}"))? + mark.len();
        Some(format!("{}{hosts}{}", &masked[..at], &masked[at + name.len()..]))
    });
    // Nothing is left of what has no host, and so may hold a password in the wrong place.
    found.unwrap_or_else(|| "(not a URL; not shown)".to_owned())
}

fn masked_url(text: &str) -> String {
    let Ok(mut url) = Url::parse(text) else {
        let harmless = !text.contains(['@', '?', ':']);
        return if harmless { text.to_owned() } else { "(not a URL; not shown)".to_owned() };
    };
    // `scheme:user:password@host` and `scheme:/user:password@host` parse as paths without a host.
    let misplaced = |part: &str| part.contains('@');
    if (url.host().is_none() && misplaced(text))
        || misplaced(url.path())
        || url.fragment().is_some_and(misplaced)
    {
        return format!("{}:***", url.scheme());
    }
    let secret_in_query = url.query_pairs().any(|(name, _)| is_secret(&name));
    if url.password().is_none() && !secret_in_query {
        return text.to_owned();
    }
    if url.password().is_some() && url.set_password(Some("***")).is_err() {
        return format!("{}:***", url.scheme());
    }
    if secret_in_query {
        let pairs: Vec<String> =
            url.query_pairs()
                .map(|(name, value)| {
                    if is_secret(&name) { format!("{name}=***") } else { format!("{name}={value}") }
                })
                .collect();
        url.set_query(Some(&pairs.join("&")));
    }
    url.to_string()
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_PARAMETERS.iter().any(|part| name.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_secrets_are_masked() {
        for (text, shown) in [
            ("", ""),
            ("sqlite://data/seckill.db", "sqlite://data/seckill.db"),
            ("sqlite::memory:", "sqlite::memory:"),
            ("redis://host:6379/2", "redis://host:6379/2"),
            ("redis://:hunter2@host:6379", "redis://:***@host:6379"),
            ("postgres://app:hunter2@host/db", "postgres://app:***@host/db"),
            ("postgres://app:hun@ter2@host/db", "postgres://app:***@host/db"),
            (
                "postgres://host/db?user=app&password=hunter2",
                "postgres://host/db?user=app&password=***",
            ),
            ("redis-cluster://a:1,b:2", "redis-cluster://a:1,b:2"),
            ("redis-cluster://u:hunter2@a:1,b:2", "redis-cluster://u:***@a:1,b:2"),
            ("redis-sentinel://:hunter2@a,b/main/1", "redis-sentinel://:***@a,b/main/1"),
            ("redis-sentinel://u:hun,ter2@a:x,b/main", "(not a URL; not shown)"),
            ("redis-cluster://h/u:hunter2@a,b", "redis-cluster:***"),
            ("mysql://host/db?ssl-key=hunter2", "mysql://host/db?ssl-key=***"),
            ("redis:app:hunter2@host", "redis:***"),
            ("app:hunter2@host", "app:***"),
            ("postgres:/app:hunter2@host/db", "postgres:***"),
            ("postgres:///app:hunter2@host/db", "postgres:***"),
            ("postgres://host/app:hunter2@host/db", "postgres:***"),
            ("//app:hunter2@host", "(not a URL; not shown)"),
            ("postgres://app:hunter2@ho st/db", "(not a URL; not shown)"),
        ] {
            assert_eq!(masked(text), shown, "{text}");
            assert!(!format!("{:?}", SecretUrl::new(text)).contains("hunter2"), "{text}");
        }
    }
}
