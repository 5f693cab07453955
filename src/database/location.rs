//! Where the database is: the URL read and checked by us, since others print it when they can't
//! read it, password and all.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use sea_orm::sqlx;
use url::Url;

use super::{Backend, OpenError, SqlFault, fault::classify_sqlx};

/// A URL that has been checked. `Display` has no password.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Location {
    Memory,
    File(PathBuf),
    Postgres(Url),
    MySql(Url),
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("sqlite::memory:"),
            Self::File(path) => write!(f, "sqlite://{}", path.display()),
            Self::Postgres(url) | Self::MySql(url) => {
                write!(f, "{}://{}", url.scheme(), url.host_str().unwrap_or_default())?;
                if let Some(port) = url.port() {
                    write!(f, ":{port}")?;
                }
                f.write_str(url.path())
            }
        }
    }
}

impl Location {
    /// Reads a URL; the error is a sentence that goes on after "database.url" and quotes nothing.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        const KNOWN: &str = "must begin with sqlite:, postgres:// or mysql://";
        let Some((scheme, rest)) = text.split_once(':') else {
            return Err(KNOWN.to_owned());
        };
        match scheme {
            "sqlite" => parse_sqlite(rest),
            "postgres" | "postgresql" => Ok(Self::Postgres(parse_server("postgres", rest)?)),
            "mysql" | "mariadb" => Ok(Self::MySql(parse_server("mysql", rest)?)),
            _ => Err(KNOWN.to_owned()),
        }
    }

    pub(super) fn backend(&self) -> Backend {
        match self {
            Self::Memory | Self::File(_) => Backend::Sqlite,
            Self::Postgres(_) => Backend::Postgres,
            Self::MySql(_) => Backend::MySql,
        }
    }
}

fn parse_sqlite(rest: &str) -> Result<Location, String> {
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    if path == ":memory:" || query == "mode=memory" {
        return Ok(Location::Memory);
    }
    if !matches!(query, "" | "mode=rwc" | "mode=rw") {
        return Err("takes no parameters after sqlite: but mode=rwc or mode=memory".to_owned());
    }
    if path.is_empty() || path.ends_with('/') {
        return Err("must name a file, as in sqlite://data/seckill.db".to_owned());
    }
    Ok(Location::File(PathBuf::from(path)))
}

fn parse_server(scheme: &str, rest: &str) -> Result<Url, String> {
    const ESCAPE: &str = "write @ : / ? # and % in a user name or password as %40 %3A %2F %3F %23 \
                          and %25";
    let url = Url::parse(&format!("{scheme}:{rest}"))
        .map_err(|error| format!("can't be read ({error}); {ESCAPE}"))?;
    // A password with one of these in it ends up in the path, the query or the fragment.
    if url.fragment().is_some() || url.path().contains('@') || url.query().is_some_and(has_at) {
        return Err(format!("can't be read; {ESCAPE}"));
    }
    if url.cannot_be_a_base() || (url.host_str().is_none() && url.query().is_none()) {
        return Err(format!("must name a host, as in {scheme}://user@localhost/seckill"));
    }
    if url.path().trim_matches('/').is_empty() {
        return Err(format!("must name a database, as in {scheme}://user@localhost/seckill"));
    }
    Ok(url)
}

fn has_at(query: &str) -> bool {
    query.contains('@')
}

/// The URL for people's eyes; `***` stands for a password, wherever it is.
pub(super) fn masked(text: &str) -> String {
    match Location::parse(text) {
        Ok(Location::Memory | Location::File(_)) => text.to_owned(),
        Ok(Location::Postgres(mut url) | Location::MySql(mut url)) => {
            if url.password().is_some() {
                // Only fails on a URL without a host, which has no password either.
                let _ = url.set_password(Some("***"));
            }
            if url.query().is_some() {
                let pairs: Vec<(String, String)> = url
                    .query_pairs()
                    .map(|(key, value)| {
                        let secret = key.contains("password") || key.contains("key");
                        (key.into_owned(), if secret { "***".into() } else { value.into_owned() })
                    })
                    .collect();
                url.query_pairs_mut().clear().extend_pairs(pairs);
            }
            url.to_string()
        }
        Err(_) => "(not a database URL)".to_owned(),
    }
}

/// Makes the folder of a database file when the folder around it is there: a typing error in a
/// long path should be told, not built.
pub(super) fn prepare_folder(path: &Path) -> Result<(), String> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    if folder.is_dir() {
        return Ok(());
    }
    std::fs::create_dir(folder).map_err(|error| {
        format!("the folder {} can't be created ({error}); create it yourself", folder.display())
    })
}

/// The cause of a failed connection in words that say what to change.
pub(super) fn explain(location: &Location, error: &sqlx::Error, waited_ms: u64) -> OpenError {
    let code = error.as_database_error().and_then(|database| database.code());
    let number = error
        .as_database_error()
        .and_then(|e| e.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>())
        .map(sqlx::mysql::MySqlDatabaseError::number);
    if let Location::File(path) = location {
        let path = path.display().to_string();
        if classify_sqlx(error) == SqlFault::RolledBack {
            return OpenError::Locked { path, waited_ms };
        }
        return OpenError::Unwritable {
            path,
            reason: format!("{error}; check the permissions of the file and of its folder"),
        };
    }
    let reason = match (code.as_deref(), number, error) {
        (Some("28000" | "28P01"), ..) | (_, Some(1044 | 1045 | 1698), _) => {
            "it refuses this user or password; correct database.url".to_owned()
        }
        (Some("3D000"), ..) | (_, Some(1049), _) => {
            "the server is there, the database is not; create it".to_owned()
        }
        (.., sqlx::Error::Io(cause)) if cause.kind() == std::io::ErrorKind::ConnectionRefused => {
            "nothing listens there; start the database or correct database.url".to_owned()
        }
        _ => error.to_string(),
    };
    OpenError::Unreachable { at: location.to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> Result<Location, String> {
        Ok(Location::File(PathBuf::from(path)))
    }

    #[test]
    fn every_way_to_write_a_sqlite_url_is_read() {
        assert_eq!(Location::parse("sqlite://data/seckill.db"), file("data/seckill.db"));
        assert_eq!(Location::parse("sqlite:data/seckill.db"), file("data/seckill.db"));
        assert_eq!(Location::parse("sqlite:///var/lib/s.db?mode=rwc"), file("/var/lib/s.db"));
        assert_eq!(Location::parse("sqlite:///a folder/100%.db"), file("/a folder/100%.db"));
        assert_eq!(Location::parse("sqlite::memory:"), Ok(Location::Memory));
        assert_eq!(Location::parse("sqlite://:memory:"), Ok(Location::Memory));
        assert!(Location::parse("sqlite://").is_err());
        assert!(Location::parse("sqlite://a.db?mode=ro").is_err());
    }

    #[test]
    fn a_password_is_in_no_message() {
        for text in [
            "postgres://shop:s3cret@db/seckill",
            "postgres://shop:s3cret@db/",
            "postgres://db/seckill?user=shop&password=s3cret",
            "postgres://shop:s3cret#1@db/seckill",
            "postgres://shop:12/s3cret@db/seckill",
            "postgres://shop:12?s3cret@db/seckill",
            "postgres://shop:x/s3cret@db/seckill",
            "postgres:shop:s3cret@db",
            "mysql://shop:s3cret@db:port/seckill",
            "mariadb://shop:s3cret@db:3307/seckill",
            "redis://shop:s3cret@db",
            "shop:s3cret@db",
        ] {
            let settings = super::super::DatabaseSettings::at(text);
            let parsed = Location::parse(text);
            let said = format!("{settings:?} {parsed:?} {:?}", settings.violations());
            assert!(!said.contains("s3cret"), "{said}");
        }
        assert_eq!(masked("mysql://shop:s3cret@db:3307/s"), "mysql://shop:***@db:3307/s");
    }
}
