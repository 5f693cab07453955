//! `seckill doctor` finds what is really wrong, says what to change, and changes nothing itself.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use serde_json::Value;

use crate::support::{
    certs::{Authority, DAY, Wanted},
    databases::{self, Fresh},
    redis_server::RedisServer,
};

/// What came of one look.
#[derive(Debug)]
struct Looked {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Looked {
    /// The one finding about this that is no good news, as `LEVEL TEXT -> CHANGE`; or nothing.
    fn about(&self, check: &str) -> String {
        let bad = |finding: &&Value| finding["check"] == check && finding["level"] != "ok";
        let found: Vec<&Value> = self.findings.iter().filter(bad).collect();
        assert!(found.len() < 2, "{self:?}");
        let shown = |finding: &&Value| {
            let word = |key: &str| finding[key].as_str().unwrap().to_owned();
            format!("{} {} -> {}", word("level"), word("text"), word("change"))
        };
        found.first().map(shown).unwrap_or_default()
    }

    /// Whether a check was made and found nothing.
    fn is_well(&self, check: &str) -> bool {
        self.findings.iter().any(|finding| finding["check"] == check)
            && self.about(check).is_empty()
    }
}

/// Looks in this folder, on a free port unless the settings say otherwise.
fn look_in(folder: &Path, settings: &[(&str, &str)]) -> Looked {
    let common = [("SECKILL__GRPC__ADDR", "127.0.0.1:0"), ("SECKILL__HTTP__ADDR", "")];
    let output = Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(["doctor", "--output", "json"])
        .current_dir(folder)
        .env_clear()
        .envs(common)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let answer: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{text} {}", String::from_utf8_lossy(&output.stderr)));
    Looked { code: output.status.code(), findings: answer["findings"].as_array().unwrap().clone() }
}

fn look(settings: &[(&str, &str)]) -> Looked {
    look_in(tempfile::tempdir().unwrap().path(), settings)
}

/// Every file below a folder, with what is in it.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.insert(path.clone(), Vec::new());
            found.extend(files(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
    found
}

#[tokio::test]
async fn a_redis_that_evicts_is_found() {
    let redis = RedisServer::start_with_aof().await;
    let _: () = redis.command(&["SET", "somebody's", "1"]).await;
    let url = redis.url();
    let engine = [("SECKILL__ENGINE__URL", url.as_str())];
    let well = look(&engine);
    assert!(well.is_well("engine") && well.code == Some(0), "{well:?}");

    let _: () = redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    let before = redis.dump().await;
    let looked = look(&engine);
    let found = looked.about("engine");
    assert!(found.starts_with("error maxmemory-policy is allkeys-lru"), "{found}");
    assert!(found.contains("set maxmemory-policy noeviction"), "{found}");
    // As `serve` ends there: it stays wrong until somebody changes it.
    assert_eq!(looked.code, Some(64));
    let policy: Vec<String> = redis.command(&["CONFIG", "GET", "maxmemory-policy"]).await;
    assert_eq!(policy[1], "allkeys-lru");
    assert_eq!(redis.dump().await, before);
}

#[test]
fn a_store_that_is_away_may_come_back() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (redis, sql) = (format!("redis://{free}"), format!("postgres://u@{free}/seckill"));
    let soon = ("SECKILL__DATABASE__CONNECT_TIMEOUT_MS", "100");
    for (setting, url, check) in
        [("SECKILL__ENGINE__URL", &redis, "engine"), ("SECKILL__DATABASE__URL", &sql, "database")]
    {
        let looked = look(&[(setting, url), soon]);
        assert!(looked.about(check).starts_with("error "), "{looked:?}");
        assert_eq!(looked.code, Some(69), "{looked:?}");
        // What cannot mend itself counts for more.
        let files = [("SECKILL__TLS__CERT_FILE", "none"), ("SECKILL__TLS__KEY_FILE", "none")];
        let looked = look(&[&[(setting, url.as_str()), soon][..], &files].concat());
        assert!(looked.about(check).starts_with("error "), "{looked:?}");
        assert_eq!(looked.code, Some(64), "{looked:?}");
    }
}

#[tokio::test]
async fn a_redis_that_keeps_nothing_on_disk_is_found() {
    let redis = RedisServer::start().await;
    let _: () = redis.command(&["SET", "somebody's", "1"]).await;
    let before = redis.dump().await;
    let url = redis.url();
    let looked = look(&[("SECKILL__ENGINE__URL", url.as_str())]);
    let found = looked.about("engine");
    assert!(found.starts_with("warn the append-only file is off"), "{found}");
    assert!(found.contains("set appendonly yes"), "{found}");
    // A server runs on it.
    assert_eq!(looked.code, Some(0));
    let setting: Vec<String> = redis.command(&["CONFIG", "GET", "appendonly"]).await;
    assert_eq!(setting[1], "no");
    assert_eq!(redis.dump().await, before);
}

/// A schema that lacks its last step, and a pool that does not fit.
async fn looks_at_a_database(fresh: Fresh) {
    databases::run(fresh, async |fresh: &Fresh| {
        let url = fresh.settings().url;
        let database = ("SECKILL__DATABASE__URL", url.as_str());
        let well = look(&[database]);
        let all = ["database", "schema", "connections", "database clock"];
        assert!(all.iter().all(|check| well.is_well(check)) && well.code == Some(0), "{well:?}");

        // No server that anybody runs for tests allows so many.
        let looked = look(&[database, ("SECKILL__DATABASE__MAX_CONNECTIONS", "1000")]);
        let found = looked.about("connections");
        assert!(
            found.starts_with("error a server takes up to 1001; the database allows"),
            "{found}"
        );
        assert!(found.contains("-> lower database.max_connections"), "{found}");
        assert_eq!(looked.code, Some(69));

        fresh.migrate_down(1).await.unwrap();
        let before = fresh.migration_status().await.unwrap();
        let looked = look(&[database]);
        let found = looked.about("schema");
        assert_eq!(found, "error behind this program -> run `seckill migrate up`");
        assert_eq!(looked.code, Some(64));
        assert_eq!(fresh.migration_status().await.unwrap(), before);
        assert!(!before.last().unwrap().1, "a step is missing");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_behind_and_a_pool_too_large_are_found_on_postgres() {
    looks_at_a_database(Fresh::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_behind_and_a_pool_too_large_are_found_on_mysql() {
    looks_at_a_database(Fresh::mysql().await).await;
}

/// The library that lies about the time.
fn faketime() -> String {
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/locate.sh");
    let command = format!(". {scripts}; find_faketime");
    let output = Command::new("bash").args(["-c", &command]).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    let first = found.lines().next().map(str::to_owned);
    first.unwrap_or_else(|| panic!("no libfaketime: run scripts/install-services"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_off_is_found() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let url = fresh.settings().url;
        let library = faketime();
        let before = fresh.migration_status().await.unwrap();
        for (ahead, level, sign) in [("-2s", "warn", '+'), ("+60s", "error", '-')] {
            let looked = look(&[
                ("SECKILL__DATABASE__URL", url.as_str()),
                ("LD_PRELOAD", library.as_str()),
                ("FAKETIME", ahead),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ]);
            let found = looked.about("database clock");
            assert!(found.starts_with(&format!("{level} {sign}")), "{ahead}: {found}");
            assert!(found.ends_with("-> keep both clocks set with NTP"), "{found}");
            assert_eq!(looked.code, Some(if level == "error" { 69 } else { 0 }), "{looked:?}");
        }
        assert_eq!(fresh.migration_status().await.unwrap(), before);
    })
    .await;
}

#[test]
fn a_port_that_is_taken_is_found() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    for (setting, check) in
        [("SECKILL__GRPC__ADDR", "grpc port"), ("SECKILL__HTTP__ADDR", "http port")]
    {
        let looked = look(&[(setting, addr.as_str())]);
        let found = looked.about(check);
        assert!(found.starts_with("warn ") && found.contains(&addr), "{found}");
        // It may be the server that somebody wants to know about.
        assert_eq!(looked.code, Some(0));
    }
    // Whoever has it still has it, and was not called.
    taken.set_nonblocking(true).unwrap();
    assert_eq!(taken.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_certificate_that_is_over_is_found() {
    let (folder, now) = (tempfile::tempdir().unwrap(), SystemTime::now());
    let authority = Authority::new("servers");
    let over = Wanted {
        dns: &["localhost"],
        validity: Some((now - 3 * DAY, now - DAY)),
        ..Wanted::default()
    };
    let (cert, key) = authority.issue(&over).write(folder.path());
    let before = files(folder.path());
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let looked = look(&[
        ("SECKILL__TLS__CERT_FILE", cert.as_str()),
        ("SECKILL__TLS__KEY_FILE", key.as_str()),
    ]);
    let found = looked.about("certificate");
    assert!(found.starts_with("error ") && found.contains("expired"), "{found}");
    assert_eq!(looked.code, Some(64));
    assert_eq!(files(folder.path()), before);
}

#[tokio::test]
async fn a_look_makes_no_database() {
    let folder = tempfile::tempdir().unwrap();
    let looked = look_in(folder.path(), &[]);
    assert!(looked.is_well("database") && looked.code == Some(0), "{looked:?}");
    assert_eq!(files(folder.path()), BTreeMap::new());
    let deep = [("SECKILL__DATABASE__URL", "sqlite://no/such/folder/seckill.db")];
    let looked = look_in(folder.path(), &deep);
    assert!(looked.about("database").starts_with("error "), "{looked:?}");
    assert_eq!(looked.code, Some(64));
    assert_eq!(files(folder.path()), BTreeMap::new());

    let fresh = Fresh::sqlite_in(folder.path()).await;
    fresh.close().await.unwrap();
    let before = files(folder.path());
    let url = fresh.settings().url;
    let looked = look(&[("SECKILL__DATABASE__URL", url.as_str())]);
    assert!(looked.is_well("schema") && looked.code == Some(0), "{looked:?}");
    assert_eq!(files(folder.path()), before);
}
