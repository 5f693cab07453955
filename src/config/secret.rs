//! URLs that may hold a password.
//!
//! **Invariant:** only [`SecretUrl::expose`] gives the whole text away; `Display`, `Debug` and
//! serde show it masked.

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
    pub(super) fn has_scheme_of(&self, schemes: &[&str]) -> bool {
        Url::parse(&self.0).is_ok_and(|url| schemes.contains(&url.scheme()))
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

/// The URL with `***` in place of its secrets. Of a text that is no URL, only a text without
/// `@`, `?` and `:` is shown: anything else may hold a password in the wrong place.
#[must_use]
pub fn masked(text: &str) -> String {
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
