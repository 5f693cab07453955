//! What `engine.url` names: one server, a cluster by some of its members, or a master by the
//! Sentinels that know it.

use std::fmt;

use url::Url;

use super::settings::OpenError;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26_379;

/// A URL taken apart; [`fmt::Display`] shows hosts and ports alone.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    pub(super) kind: Kind,
    /// The server, some members of the cluster, or the Sentinels; at least one.
    pub(super) hosts: Vec<Host>,
    pub(super) tls: bool,
    /// At the servers that hold stock.
    pub(super) login: Login,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Server,
    Cluster,
    /// The master of this name.
    Sentinel(String),
}

/// Where one server listens.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Host {
    pub(super) name: String,
    pub(super) port: u16,
}

/// Who connects, and to which database.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
}

impl Target {
    pub(super) fn parse(text: &str) -> Result<Self, OpenError> {
        let invalid = |why: &str| {
            OpenError::InvalidUrl(format!(
                "{}: {why}; it should look like redis://localhost:6379, redis-cluster://a:6379,b:6379 \
                 or redis-sentinel://a:26379,b:26379/master",
                mask(text)
            ))
        };
        let (first, hosts) = split_hosts(text).ok_or_else(|| invalid("it is no URL"))?;
        let url = Url::parse(&first).map_err(|error| invalid(&error.to_string()))?;
        let (tls, scheme) = match url.scheme() {
            "rediss" | "valkeys" => (true, "redis"),
            "redis" | "valkey" => (false, "redis"),
            "rediss-cluster" => (true, "cluster"),
            "redis-cluster" => (false, "cluster"),
            "rediss-sentinel" => (true, "sentinel"),
            "redis-sentinel" => (false, "sentinel"),
            _ => {
                return Err(invalid(
                    "the scheme must be redis, redis-cluster or redis-sentinel, or one of them with \
                     rediss for TLS",
                ));
            }
        };
        let decode =
            |text: &str| percent_decode(text).ok_or_else(|| invalid("a %-escape is not UTF-8"));
        let port = if scheme == "sentinel" { SENTINEL_PORT } else { PORT };
        let hosts: Result<Vec<Host>, String> =
            hosts.iter().map(|host| Host::parse(host, port)).collect();
        let hosts = hosts.map_err(|why| invalid(&why))?;
        let user = match url.username() {
            "" => None,
            user => Some(decode(user)?),
        };
        let password = url.password().map(decode).transpose()?;
        let number = |text: &str| match text {
            "" => Ok(0),
            text => text.parse().map_err(|_| invalid("the database must be a number")),
        };
        let path = url.path().trim_matches('/');
        let (kind, database) = match scheme {
            "sentinel" => {
                let (master, database) = path.split_once('/').unwrap_or((path, ""));
                if master.is_empty() {
                    return Err(invalid("the name of the master is missing"));
                }
                (Kind::Sentinel(decode(master)?), number(database)?)
            }
            "cluster" if number(path)? != 0 => {
                return Err(invalid("a cluster has database 0 alone"));
            }
            "cluster" => (Kind::Cluster, 0),
            _ if hosts.len() > 1 => {
                return Err(invalid(
                    "several servers are a cluster, redis-cluster, or Sentinels, redis-sentinel",
                ));
            }
            _ => (Kind::Server, number(path)?),
        };
        if url.query().is_some() || url.fragment().is_some() {
            return Err(invalid("nothing may follow the database"));
        }
        Ok(Self { kind, hosts, tls, login: Login { user, password, database } })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, host) in self.hosts.iter().enumerate() {
            write!(f, "{}{host}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({:?} {self}/{})", self.kind, self.login.database)
    }
}

impl Host {
    fn parse(text: &str, default_port: u16) -> Result<Self, String> {
        let url = Url::parse(&format!("redis://{text}")).map_err(|error| error.to_string())?;
        let name = url.host_str().filter(|host| !host.is_empty());
        let name = name.ok_or_else(|| "the host is missing".to_owned())?;
        let name = name.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { name, port: url.port().unwrap_or(default_port) })
    }

    /// As a server names another one; an empty name stands for the one that was asked.
    pub(super) fn named(name: &str, port: u16, asked: &Self) -> Self {
        let name = if name.is_empty() || name == "?" { &asked.name } else { name };
        Self { name: name.to_owned(), port }
    }

    /// As in a redirection, `host:port`.
    pub(super) fn redirected(text: &str, asked: &Self) -> Option<Self> {
        let (name, port) = text.rsplit_once(':')?;
        Some(Self::named(name, port.parse().ok()?, asked))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.contains(':') {
            true => write!(f, "[{}]:{}", self.name, self.port),
            false => write!(f, "{}:{}", self.name, self.port),
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Login {
    /// The text without the password, should it be in there.
    pub(super) fn hide(&self, text: &str) -> String {
        match self.password.as_deref() {
            Some(password) if !password.is_empty() => text.replace(password, "***"),
            _ => text.to_owned(),
        }
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The URL with its first host alone, and all hosts; no URL has several for the parser.
fn split_hosts(text: &str) -> Option<(String, Vec<&str>)> {
    let start = text.find("://")? + 3;
    let end = text[start..].find(['/', '?', '#']).map_or(text.len(), |at| start + at);
    let start = text[start..end].rfind('@').map_or(start, |at| start + at + 1);
    let hosts: Vec<&str> = text[start..end].split(',').collect();
    Some((format!("{}{}{}", &text[..start], hosts.first()?, &text[end..]), hosts))
}

/// A URL whose user and password are hidden, however broken the rest is.
pub(super) fn mask(url: &str) -> String {
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

    fn hosts(target: &Target) -> Vec<String> {
        target.hosts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_url_is_taken_apart() {
        let target = Target::parse("redis://sales:p%40ss:word@cache.internal:6380/3").unwrap();
        assert_eq!(target.login.user.as_deref(), Some("sales"));
        assert_eq!(target.login.password.as_deref(), Some("p@ss:word"));
        assert_eq!(
            (hosts(&target), target.login.database),
            (vec!["cache.internal:6380".into()], 3)
        );
        assert_eq!((target.kind.clone(), target.tls), (Kind::Server, false));
        assert_eq!(Target::parse("redis://[::1]").unwrap().to_string(), "[::1]:6379");
        assert!(Target::parse("rediss://h").unwrap().tls);
    }

    #[test]
    fn a_cluster_and_sentinels_are_named_by_several_hosts() {
        let target = Target::parse("rediss-cluster://sales:pw@a:7001,b,[::1]:7003").unwrap();
        assert_eq!(hosts(&target), ["a:7001", "b:6379", "[::1]:7003"]);
        assert_eq!((target.kind.clone(), target.tls), (Kind::Cluster, true));
        assert_eq!(target.login.password.as_deref(), Some("pw"));

        let target = Target::parse("redis-sentinel://:p,w@a,b:1/my%2Fsales/2").unwrap();
        assert_eq!(hosts(&target), ["a:26379", "b:1"]);
        assert_eq!(target.kind, Kind::Sentinel("my/sales".to_owned()));
        assert_eq!((target.login.password.as_deref(), target.login.database), (Some("p,w"), 2));
    }

    #[test]
    fn a_url_that_is_no_use_says_what_to_change_and_hides_the_password() {
        for (url, why) in [
            ("http://u:hunter2@h", "scheme"),
            ("redis+cluster://u:hunter2@h", "redis-cluster"),
            ("redis://u:hunter2@h/sales", "number"),
            ("redis://u:hunter2@h:notaport", "port"),
            ("redis://u:hunter2@a,b", "several"),
            ("redis-cluster://u:hunter2@a,b/1", "database 0"),
            ("redis-cluster://u:hunter2@a,:7", "host"),
            ("redis-sentinel://u:hunter2@a,b", "master"),
            ("u:hunter2@h", "redis://localhost:6379"),
            ("redis://u:hun@ter2@h/0?x=1", "follow"),
        ] {
            let error = Target::parse(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert!(!error.contains("ter2"), "{error}");
        }
    }

    #[test]
    fn a_redirection_without_a_name_stays_with_the_server_that_was_asked() {
        let asked = Host { name: "a".to_owned(), port: 1 };
        let found = |text| Host::redirected(text, &asked).map(|host| host.to_string());
        assert_eq!(found("10.0.0.1:7002").as_deref(), Some("10.0.0.1:7002"));
        assert_eq!(found(":7002").as_deref(), Some("a:7002"));
        assert_eq!(found("::1:7002").as_deref(), Some("[::1]:7002"));
        assert_eq!(found("7002"), None);
    }
}
