//! Starts that fail: one clear line, the right exit code, and nothing left behind.

use std::{
    net::{SocketAddr, TcpListener},
    process::Output,
    time::{Duration, SystemTime},
};

use sea_orm::{
    ConnectionTrait as _,
    sqlx::{
        ConnectOptions as _, Executor as _, Row as _,
        sqlite::{SqliteConnectOptions, SqliteJournalMode},
    },
};
use seckill::config::Settings;
use tokio::{process::Command, time::timeout};

use crate::support::{
    certs::{Authority, DAY, Wanted},
    databases::{Fresh, on_every_database},
    process::Serve,
    redis_server::RedisServer,
};

const USAGE: i32 = 64;
const UNAVAILABLE: i32 = 69;

/// Runs the binary to its end, with nothing but these variables in its environment.
async fn seckill(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_seckill"));
    command
        .args(args)
        .current_dir(folder.path())
        .env_clear()
        .env("SECKILL__GRPC__ADDR", "127.0.0.1:0")
        .env("SECKILL__HTTP__ADDR", "")
        .env("SECKILL__DATABASE__CONNECT_TIMEOUT_MS", "300")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    timeout(Duration::from_secs(15), command.output()).await.expect("it ends").unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The server does not start, and says so in the last line; that line holds all of `words`.
async fn refuses(variables: &[(&str, &str)], code: i32, words: &[&str]) -> String {
    let output = seckill(&["serve"], variables).await;
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let errors = text.lines().filter(|line| line.starts_with("error: ")).count();
    let last = text.lines().last().unwrap_or_default();
    assert_eq!((errors, last.starts_with("error: ")), (1, true), "{text}");
    for word in words {
        assert!(last.contains(word), "{word:?} is not in {last:?}");
    }
    text
}

/// An address where nothing listens.
fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn sqlite_in(folder: &tempfile::TempDir) -> String {
    format!("sqlite://{}", folder.path().join("seckill.db").display())
}

#[tokio::test]
async fn a_port_in_use_is_told_and_the_next_start_need_not_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let url = sqlite_in(&folder);
    let variables = [("SECKILL__GRPC__ADDR", addr.as_str()), ("SECKILL__DATABASE__URL", &url)];
    refuses(&variables, UNAVAILABLE, &[&addr, "can't be listened on", "grpc.addr"]).await;

    let settings = Settings::default();
    let mut process = Serve::over(&settings).with("DATABASE__URL", &url).start().await;
    let log = process.log();
    assert!(!log.contains("waiting for another server"), "the lease was left behind: {log}");
    process.stop().await;
}

#[tokio::test]
async fn an_engine_that_is_not_there_is_told() {
    let addr = free_addr();
    let url = format!("redis://:s3cret@{addr}");
    let variables = [("SECKILL__ENGINE__URL", url.as_str())];
    let variables = [&variables[..], &[("SECKILL__DATABASE__URL", "sqlite::memory:")]].concat();
    let text = refuses(&variables, UNAVAILABLE, &[&addr.to_string()]).await;
    assert!(!text.contains("s3cret"), "{text}");
}

#[tokio::test]
async fn a_database_that_is_not_there_is_told() {
    let addr = free_addr();
    for scheme in ["postgres", "mysql"] {
        let url = format!("{scheme}://shop:s3cret@{addr}/seckill");
        let variables = [("SECKILL__DATABASE__URL", url.as_str())];
        let words = [&addr.to_string(), "nothing listens there", "database.url"];
        let text = refuses(&variables, UNAVAILABLE, &words).await;
        assert!(!text.contains("s3cret"), "{text}");
    }
}

#[tokio::test]
async fn a_wrong_url_names_its_setting_and_hides_its_password() {
    for (variable, url) in [
        ("SECKILL__DATABASE__URL", "oracle://shop:s3cret@db/seckill"),
        ("SECKILL__DATABASE__URL", "shop:s3cret@db"),
        ("SECKILL__DATABASE__URL", "postgres://shop:s3cret@db"),
        ("SECKILL__DATABASE__URL", "postgres://shop:s3cret@db:port/seckill"),
        ("SECKILL__DATABASE__URL", "mysql://shop:x/s3cret@db/seckill"),
        ("SECKILL__DATABASE__URL", ""),
        ("SECKILL__ENGINE__URL", "http://:s3cret@cache:6379"),
        ("SECKILL__ENGINE__URL", "redis://:s3cret@cache:port"),
        ("SECKILL__ENGINE__URL", "redis://:s3cret@cache:6379/first"),
        ("SECKILL__ENGINE__URL", "garbage"),
    ] {
        let key = variable.trim_start_matches("SECKILL__").to_ascii_lowercase().replace("__", ".");
        let memory = ("SECKILL__DATABASE__URL", "sqlite::memory:");
        let text = refuses(&[memory, (variable, url)], USAGE, &[&key]).await;
        assert!(!text.contains("s3cret"), "{text}");
        // Nobody needs to start anything to hear of it.
        let checked = seckill(&["serve", "--check-config"], &[memory, (variable, url)]).await;
        assert_eq!(checked.status.code(), Some(USAGE), "{checked:?}");
        assert_eq!(stderr(&checked), text);
        let output = seckill(&["serve", "--output", "json"], &[memory, (variable, url)]).await;
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(!printed.contains("s3cret") && !stderr(&output).contains("s3cret"), "{printed}");
    }
}

#[tokio::test]
async fn a_folder_that_can_not_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a-file");
    std::fs::write(&file, "not a folder").unwrap();
    let under_a_file = file.join("seckill.db").display().to_string();
    for path in [under_a_file.as_str(), "/proc/seckill/seckill.db"] {
        let url = format!("sqlite://{path}");
        refuses(&[("SECKILL__DATABASE__URL", &url)], USAGE, &[path]).await;
    }
    let left: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "not a folder");
}

#[tokio::test]
async fn a_database_file_that_another_process_keeps_locked_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let url = sqlite_in(&folder);
    let path = folder.path().join("seckill.db");
    let mut options = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
    options = options.journal_mode(SqliteJournalMode::Wal);
    let mut other = options.connect().await.unwrap();
    other.execute("BEGIN IMMEDIATE").await.unwrap();
    let limit = ("SECKILL__DATABASE__LOCK_TIMEOUT_MS", "200");
    let words = [path.to_str().unwrap(), "is locked", "200 ms", "database.lock_timeout_ms"];
    refuses(&[("SECKILL__DATABASE__URL", &url), limit], UNAVAILABLE, &words).await;
    other.execute("ROLLBACK").await.unwrap();
    let tables = "SELECT count(*) FROM sqlite_master";
    let count = other.fetch_one(tables).await.unwrap().get::<i64, _>(0);
    assert_eq!(count, 0, "nothing was written");
}

#[tokio::test]
async fn a_second_embedded_engine_on_one_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let url = sqlite_in(&folder);
    let serve = Serve::over(&Settings::default()).with("DATABASE__URL", &url);
    let mut process = serve.start().await;
    let words = ["runs the embedded engine over this database", "engine.url"];
    refuses(&[("SECKILL__DATABASE__URL", &url)], UNAVAILABLE, &words).await;
    process.stop().await;
}

#[tokio::test]
async fn an_unknown_setting_is_named() {
    let variables = [("SECKILL__ENGINE__URI", "redis://localhost")];
    refuses(&variables, USAGE, &["engine.uri", "did you mean engine.url?"]).await;
    let variables = [("SECKILL_ENGINE_URL", "redis://localhost")];
    refuses(&variables, USAGE, &["SECKILL_ENGINE_URL", "mean SECKILL__ENGINE__URL?"]).await;
}

#[tokio::test]
async fn an_engine_that_may_evict_stock_is_refused() {
    let options = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let redis = RedisServer::start_with(&options).await;
    let url = redis.url();
    let variables =
        [("SECKILL__ENGINE__URL", url.as_str()), ("SECKILL__DATABASE__URL", "sqlite::memory:")];
    refuses(&variables, USAGE, &["allkeys-lru", "noeviction"]).await;
    assert!(redis.dump().await.is_empty());
}

#[tokio::test]
async fn certificates_that_can_not_be_used_are_told_before_the_port_opens() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let authority = Authority::new("servers");
    let until = |begin, end| {
        let validity = Some((begin, end));
        authority.issue(&Wanted { dns: &["localhost"], validity, ..Wanted::default() })
    };
    let good = authority.for_server();
    let expired = until(now - 3 * DAY, now - DAY);
    let early = until(now + DAY, now + 3 * DAY);
    let other = authority.for_server();
    for (cert, key, words) in [
        (None, Some(&good.key), ["tls.cert_file", "cert.pem", "can't be read"]),
        (Some(&good.cert), None, ["tls.key_file", "key.pem", "can't be read"]),
        (Some(&good.cert), Some(&other.key), ["tls.key_file", "key.pem", "is not the key"]),
        (Some(&good.key), Some(&good.key), ["tls.cert_file", "cert.pem", "no certificate"]),
        (Some(&good.cert), Some(&good.cert), ["tls.key_file", "key.pem", "no private key"]),
        (Some(&expired.cert), Some(&expired.key), ["tls.cert_file", "cert.pem", "expired at 2"]),
        (Some(&early.cert), Some(&early.key), ["tls.cert_file", "cert.pem", "is good from 2"]),
    ] {
        let mut paths = Vec::new();
        for (name, contents) in [("cert.pem", cert), ("key.pem", key)] {
            let path = folder.path().join(name);
            std::fs::remove_file(&path).ok();
            if let Some(contents) = contents {
                std::fs::write(&path, contents).unwrap();
            }
            paths.push(path.display().to_string());
        }
        // The database is not even looked for, so the port is not either.
        let variables = [
            ("SECKILL__DATABASE__URL", "postgres://127.0.0.1:1/none"),
            ("SECKILL__TLS__CERT_FILE", &paths[0]),
            ("SECKILL__TLS__KEY_FILE", &paths[1]),
        ];
        let text = refuses(&variables, USAGE, &words).await;
        assert!(!text.contains("PRIVATE KEY") && !text.contains(&good.key[40..60]), "{text}");
        let checked = seckill(&["serve", "--check-config"], &variables).await;
        assert_eq!(checked.status.code(), Some(USAGE), "{checked:?}");
    }
    let (cert, key) = good.write(folder.path());
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let variables = [("SECKILL__TLS__CERT_FILE", cert.as_str()), ("SECKILL__TLS__KEY_FILE", &key)];
    let checked = seckill(&["serve", "--check-config"], &variables).await;
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    let ca = folder.path().join("ca.pem").display().to_string();
    std::fs::write(&ca, "garbage").unwrap();
    let with_ca = [
        &variables[..],
        &[("SECKILL__TLS__CLIENT_CA_FILE", &ca), ("SECKILL__AUTH__SUBJECTS", "a=ops")],
    ]
    .concat();
    refuses(&with_ca, USAGE, &["tls.client_ca_file", "ca.pem", "no certificate"]).await;
}

#[tokio::test]
async fn an_entry_of_a_token_that_can_not_be_read_is_told_and_not_shown() {
    let memory = ("SECKILL__DATABASE__URL", "sqlite::memory:");
    for entry in ["s3cret", "shop:order:s3cret", "shop:s3cret:s3cret", "s3cret:order"] {
        let words = ["auth.tokens = (not shown)", "SECKILL__AUTH__TOKENS", "entry 1 of 1"];
        let text = refuses(&[memory, ("SECKILL__AUTH__TOKENS", entry)], USAGE, &words).await;
        assert!(!text.contains("s3cret"), "{text}");
    }
}

/// Runs `seckill migrate` on a database; the exit code, and for each step whether it is applied.
async fn migrate(db: &Fresh, args: &[&str]) -> (Option<i32>, Vec<bool>) {
    let url = db.settings().url;
    let args = [&["migrate", "--output", "json", "--database-url", &url], args].concat();
    let output = seckill(&args, &[]).await;
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let steps = answer["steps"].as_array().unwrap_or_else(|| panic!("{output:?}"));
    let applied = steps.iter().map(|step| step["applied"].as_bool().unwrap()).collect();
    (output.status.code(), applied)
}

on_every_database! {
    async fn the_schema_goes_down_and_up_by_hand(db: &Fresh) {
        let (code, all) = migrate(db, &["status"]).await;
        assert_eq!(code, Some(0));
        assert!(!all.is_empty() && all.iter().all(|applied| *applied), "{all:?}");

        let none = vec![false; all.len()];
        let (code, left) = migrate(db, &["down", "--steps", &all.len().to_string()]).await;
        assert_eq!((code, &left), (Some(0), &none));
        assert_eq!(migrate(db, &["status"]).await, (Some(1), none));

        let url = db.settings().url;
        if !url.starts_with("sqlite") {
            let variables = [("SECKILL__DATABASE__URL", url.as_str())];
            refuses(&variables, USAGE, &["seckill migrate up"]).await;
            assert_eq!(migrate(db, &["status"]).await.0, Some(1), "the server changed the schema");
        }

        let mut first = all.clone();
        first.fill(false);
        first[0] = true;
        assert_eq!(migrate(db, &["up", "--steps", "1"]).await, (Some(0), first));
        assert_eq!(migrate(db, &["up"]).await, (Some(0), all.clone()));
        assert_eq!(migrate(db, &["up"]).await, (Some(0), all));
    }

    async fn a_schema_that_is_newer_stays_so_until_somebody_takes_a_newer_program(db: &Fresh) {
        let newer = "INSERT INTO seaql_migrations (version, applied_at) VALUES ('m9', 0)";
        db.writer().execute_unprepared(newer).await.unwrap();
        let url = db.settings().url;
        let variables = [("SECKILL__DATABASE__URL", url.as_str())];
        let words = ["the schema of the database is newer than this program", "m9"];
        refuses(&variables, USAGE, &words).await;
        let looked = seckill(&["doctor"], &variables).await;
        let said = String::from_utf8_lossy(&looked.stdout);
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert_eq!(looked.status.code(), Some(USAGE), "{said}");
        for direction in ["status", "up", "down"] {
            let refused = seckill(&["migrate", direction], &variables).await;
            assert_eq!(refused.status.code(), Some(USAGE), "{refused:?}");
            assert!(stderr(&refused).contains(words[0]), "{refused:?}");
        }
        let older = "DELETE FROM seaql_migrations WHERE version = 'm9'";
        db.writer().execute_unprepared(older).await.unwrap();
        assert!(db.is_current().await.unwrap(), "a step is gone");
    }

    async fn two_migrations_at_once_both_succeed(db: &Fresh) {
        let (_, all) = migrate(db, &["status"]).await;
        let steps = all.len().to_string();
        assert_eq!(migrate(db, &["down", "--steps", &steps]).await.0, Some(0));
        let (one, other) = tokio::join!(migrate(db, &["up"]), migrate(db, &["up"]));
        assert_eq!(one, (Some(0), all.clone()));
        assert_eq!(other, (Some(0), all.clone()));
        assert_eq!(migrate(db, &["status"]).await, (Some(0), all));
    }
}
