//! The command line as a caller: its token, its certificate, and what it says when they do not do.

use std::{
    path::PathBuf,
    process::Output,
    time::{Duration, SystemTime},
};

use seckill::config::Settings;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{
    certs::{Authority, DAY, Issued, Wanted},
    eventually,
    process::{Process, Serve},
};

async fn seckill(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    tokio::process::Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(args)
        .current_dir(folder.path())
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .await
        .unwrap()
}

/// Runs a command that must end with this code; answers with all that it printed.
#[track_caller]
fn printed(output: &Output, code: i32) -> String {
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// A token and its entry, as an operator makes them.
async fn new_token(name: &str, role: &str) -> (String, String) {
    let output = seckill(&["token", "new", name, "--role", role, "--output", "json"], &[]).await;
    let made = json(&output);
    let text = |member: &str| made[member].as_str().unwrap().to_owned();
    (text("token"), text("entry"))
}

/// A server with TLS and tokens, as a process.
struct Shop {
    server: Process,
    url: String,
    ca: String,
    clients_ca: Authority,
    ops: String,
    viewer: String,
    folder: TempDir,
}

impl Shop {
    async fn open() -> Self {
        let (authority, clients_ca) = (Authority::new("servers"), Authority::new("clients"));
        let (folder, issued) = (TempDir::new().unwrap(), authority.for_server());
        let (cert, key) = issued.write(folder.path());
        let write = |name: &str, pem: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, pem).unwrap();
            path.display().to_string()
        };
        let ca = write("ca.pem", &authority.pem);
        let client_ca = write("clients.pem", &clients_ca.pem);
        let (ops, ops_entry) = new_token("anna", "ops").await;
        let (viewer, viewer_entry) = new_token("eve", "viewer").await;
        let server = Serve::over(&Settings::default())
            .with("DATABASE__URL", "sqlite::memory:")
            .with("TLS__CERT_FILE", cert.display())
            .with("TLS__KEY_FILE", key.display())
            .with("TLS__CLIENT_CA_FILE", client_ca)
            .with("AUTH__SUBJECTS", "checkout.shop=order")
            .with("AUTH__TOKENS", format!("{ops_entry},{viewer_entry}"));
        let server = server.start().await;
        let url = format!("https://localhost:{}", server.addr.port());
        Self { server, url, ca, clients_ca, ops, viewer, folder }
    }

    /// Runs a client command that trusts this server.
    async fn run(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut all = vec![("SECKILL_SERVER", self.url.as_str()), ("SECKILL_CA_FILE", &self.ca)];
        all.extend_from_slice(variables);
        seckill(args, &all).await
    }

    fn write(&self, issued: &Issued) -> (String, String) {
        let folder = self.folder.path().join("client");
        std::fs::create_dir_all(&folder).unwrap();
        let (cert, key) = issued.write(&folder);
        (cert.display().to_string(), key.display().to_string())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[tokio::test]
async fn a_token_comes_from_a_flag_a_variable_or_a_file() {
    let mut shop = Shop::open().await;
    printed(&shop.run(&["health"], &[]).await, 0);
    let file = shop.file("token", &format!("{}\n", shop.ops)).display().to_string();
    let list = ["activity", "list"];
    for (flags, variables) in [
        (&["--token", &shop.ops][..], &[][..]),
        (&["--token-file", &file], &[]),
        (&[], &[("SECKILL_TOKEN", shop.ops.as_str())]),
        (&[], &[("SECKILL_TOKEN_FILE", file.as_str())]),
        (&["--token-file", &file], &[("SECKILL_TOKEN", "")]),
    ] {
        printed(&shop.run(&[&list[..], flags].concat(), variables).await, 0);
    }
    // A stream carries it too: the answer is about the activity, not about the caller.
    let watch = shop.run(&["watch", "none", "--token", &shop.viewer], &[]).await;
    assert!(printed(&watch, 1).contains("UNKNOWN_ACTIVITY"));
    shop.server.stop().await;
}

#[tokio::test]
async fn a_caller_who_is_refused_hears_why_and_what_to_give() {
    let mut shop = Shop::open().await;
    let missing = printed(&shop.run(&["activity", "list"], &[]).await, 1);
    assert!(missing.contains("(MISSING_TOKEN)"), "{missing}");
    assert!(missing.contains("SECKILL_TOKEN, --token-file or --token"), "{missing}");
    let bad = shop.run(&["activity", "list"], &[("SECKILL_TOKEN", "hunter2")]).await;
    let bad = printed(&bad, 1);
    assert!(bad.contains("(BAD_TOKEN)") && !bad.contains("hunter2"), "{bad}");
    let end = ["activity", "end", "none", "--token", &shop.viewer];
    let wrong = printed(&shop.run(&end, &[]).await, 1);
    assert!(wrong.contains("needs the role ops") && wrong.contains("(WRONG_ROLE)"), "{wrong}");
    let as_json = shop.run(&["activity", "list", "--output", "json"], &[]).await;
    assert_eq!(json(&as_json)["error"]["reason"], "MISSING_TOKEN");
    assert_eq!(json(&as_json)["error"]["code"], "UNAUTHENTICATED");
    shop.server.stop().await;
}

#[tokio::test]
async fn a_client_certificate_is_a_caller() {
    let mut shop = Shop::open().await;
    let known = shop.clients_ca.issue(&Wanted { dns: &["checkout.shop"], ..Wanted::default() });
    let (cert, key) = shop.write(&known);
    let flags = ["--cert-file", &cert, "--key-file", &key];
    printed(&shop.run(&[&["activity", "list"], &flags[..]].concat(), &[]).await, 0);

    let stranger = shop.clients_ca.issue(&Wanted { dns: &["x.shop"], ..Wanted::default() });
    shop.write(&stranger);
    let text = printed(&shop.run(&[&["activity", "list"], &flags[..]].concat(), &[]).await, 1);
    assert!(text.contains("(MISSING_TOKEN)"), "{text}");

    let now = SystemTime::now();
    let wanted = Wanted {
        dns: &["checkout.shop"],
        validity: Some((now - 3 * DAY, now - DAY)),
        ..Wanted::default()
    };
    for refused in [Authority::new("clients").for_server(), shop.clients_ca.issue(&wanted)] {
        shop.write(&refused);
        let output = shop.run(&[&["health"], &flags[..]].concat(), &[]).await;
        let text = printed(&output, 69);
        // Which of the two it says depends on whether the alert was read before the call failed.
        let says = ["refuses the handshake", "refuses this client's certificate"];
        assert!(says.iter().any(|words| text.contains(words)), "{text}");
    }
    shop.server.stop().await;
}

#[tokio::test]
async fn a_server_that_is_not_trusted_is_not_called() {
    let mut shop = Shop::open().await;
    let other = shop.file("other.pem", &Authority::new("servers").pem).display().to_string();
    let url = ("SECKILL_SERVER", shop.url.as_str());
    let token = ("SECKILL_TOKEN", shop.ops.as_str());
    for variables in [vec![url, token, ("SECKILL_CA_FILE", &other)], vec![url, token]] {
        let output = seckill(&["activity", "list", "--output", "json"], &variables).await;
        let text = printed(&output, 69);
        // A machine without any CA of its own says so, and trusts nobody either.
        let says = text.contains("name its CA with --ca-file");
        assert!(says || variables.len() == 2, "{text}");
        assert!(!text.contains(&shop.ops), "{text}");
    }
    let by_address = format!("https://127.0.0.2:{}", shop.server.addr.port());
    let elsewhere = [("SECKILL_SERVER", by_address.as_str()), ("SECKILL_CA_FILE", &shop.ca)];
    printed(&seckill(&["health"], &elsewhere).await, 69);
    shop.server.stop().await;
}

#[tokio::test]
async fn a_certificate_of_another_name_or_time_is_told() {
    let authority = Authority::new("servers");
    let folder = TempDir::new().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &authority.pem).unwrap();
    // A server that is started with it finds it good; it ends a moment later.
    let moment = Duration::from_secs(5);
    for (dns, lasts, words) in
        [(&["other.shop"], DAY, "is for another name"), (&["localhost"], moment, "has expired")]
    {
        let now = SystemTime::now();
        let validity = Some((now - DAY, now + lasts));
        let wanted = Wanted { dns, validity, ..Wanted::default() };
        let (cert, key) = authority.issue(&wanted).write(folder.path());
        let mut server = Serve::over(&Settings::default())
            .with("DATABASE__URL", "sqlite::memory:")
            .with("TLS__CERT_FILE", cert.display())
            .with("TLS__KEY_FILE", key.display())
            .start()
            .await;
        let url = format!("https://localhost:{}", server.addr.port());
        let ca = ca.display().to_string();
        eventually(words, async || {
            let variables = [("SECKILL_SERVER", url.as_str()), ("SECKILL_CA_FILE", &ca)];
            let output = seckill(&["health"], &variables).await;
            (output.status.code() != Some(0)).then(|| {
                let text = printed(&output, 69);
                assert!(text.contains(words), "{text}");
            })
        })
        .await;
        server.stop().await;
    }
}

#[tokio::test]
async fn the_wrong_scheme_is_told() {
    let mut shop = Shop::open().await;
    let http = shop.url.replace("https:", "http:");
    let text = printed(&seckill(&["health"], &[("SECKILL_SERVER", &http)]).await, 69);
    assert!(text.contains("the server speaks TLS: give its address as https://"), "{text}");
    shop.server.stop().await;

    let serve = Serve::over(&Settings::default())
        .with("DATABASE__URL", "sqlite::memory:")
        .with("HTTP__ADDR", "127.0.0.1:0");
    let mut plain = serve.start().await;
    let metrics = format!("http://{}", plain.http_addr());
    let text = printed(&seckill(&["health"], &[("SECKILL_SERVER", &metrics)]).await, 69);
    assert!(text.contains("speaks HTTP/1.1") && text.contains("(grpc.addr)"), "{text}");
    let https = format!("https://localhost:{}", plain.addr.port());
    let variables = [("SECKILL_SERVER", https.as_str()), ("SECKILL_CA_FILE", shop.ca.as_str())];
    let text = printed(&seckill(&["health"], &variables).await, 69);
    assert!(text.contains("no TLS"), "{text}");
    plain.stop().await;
}

#[tokio::test]
async fn flags_of_callers_that_do_not_fit_are_usage_errors() {
    let folder = TempDir::new().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let empty = empty.display().to_string();
    let spaces = folder.path().join("spaces");
    std::fs::write(&spaces, "hunter2 hunter2").unwrap();
    let spaces = spaces.display().to_string();
    let https = ["--server", "https://127.0.0.1:1"];
    for (flags, words) in [
        (&["--ca-file", &empty][..], "needs an https server"),
        (&["--cert-file", &empty], "needs an https server"),
        (&[https[0], https[1], "--ca-file", &empty], "holds no certificate"),
        (&[https[0], https[1], "--ca-file", "/no/such"], "can't be read"),
        (&[https[0], https[1], "--cert-file", &empty], "needs --key-file"),
        (&[https[0], https[1], "--key-file", &empty], "needs --cert-file"),
        (&["--token-file", "/no/such"], "can't be read"),
        (&["--token-file", &empty], "is no token"),
        (&["--token-file", &spaces], "is no token"),
        (&["--token", "hunter2", "--token-file", &empty], "both given"),
        (&["--token", "hunter2\n2"], "is no token"),
    ] {
        let text = printed(&seckill(&[&["health"], flags].concat(), &[]).await, 64);
        assert!(text.contains(words), "{flags:?}: {text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[tokio::test]
async fn a_token_is_made_with_its_entry() {
    let (token, entry) = new_token("shop", "order").await;
    assert!(token.starts_with("skt_") && entry.starts_with("shop:order:"), "{token} {entry}");
    assert!(!entry.contains(&token[4..]));
    let settings = [("SECKILL__AUTH__TOKENS", entry.as_str())];
    printed(&seckill(&["serve", "--check-config"], &settings).await, 0);
    let text = printed(&seckill(&["token", "new", "shop", "--role", "order"], &[]).await, 0);
    assert!(text.contains("skt_") && text.contains("shop:order:"), "{text}");
    for args in [
        &["token", "new", "a b", "--role", "ops"][..],
        &["token", "new", "system", "--role", "ops"],
        &["token", "new", "clock", "--role", "ops"],
        &["token", "new", "a", "--role", "root"],
        &["token", "new", "a"],
    ] {
        printed(&seckill(args, &[]).await, 64);
    }
}

#[tokio::test]
async fn doctor_looks_at_callers_and_at_the_certificate() {
    let authority = Authority::new("servers");
    let (folder, now) = (TempDir::new().unwrap(), SystemTime::now());
    let in_days = |days| Wanted {
        dns: &["localhost"],
        validity: Some((now - 30 * DAY, now + days * DAY - Duration::from_secs(60))),
        ..Wanted::default()
    };
    let finding = async |variables: &[(&str, &str)], check: &str| {
        let common = [
            ("SECKILL__GRPC__ADDR", "127.0.0.1:0"),
            ("SECKILL__HTTP__ADDR", ""),
            ("SECKILL__DATABASE__URL", "sqlite::memory:"),
        ];
        let variables = [&common[..], variables].concat();
        let findings = json(&seckill(&["doctor", "--output", "json"], &variables).await);
        let found = findings["findings"].as_array().unwrap().iter();
        let mut found = found.filter(|finding| finding["check"] == check);
        found.next().map(|finding| format!("{} {}", finding["level"], finding["text"]))
    };
    let (cert, key) = authority.issue(&in_days(60)).write(folder.path());
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let tls = [("SECKILL__TLS__CERT_FILE", cert.as_str()), ("SECKILL__TLS__KEY_FILE", &key)];
    for (days, level, words) in [(60, "ok", "in 59 days"), (10, "warn", "in 9 days")] {
        authority.issue(&in_days(days)).write(folder.path());
        let found = finding(&tls, "certificate").await.unwrap();
        assert!(found.contains(level) && found.contains(words), "{found}");
    }
    let over = Wanted { validity: Some((now - 3 * DAY, now - DAY)), ..in_days(1) };
    authority.issue(&over).write(folder.path());
    let found = finding(&tls, "certificate").await.unwrap();
    assert!(found.contains("error") && found.contains("expired"), "{found}");
    assert_eq!(finding(&[], "certificate").await, None);

    let reachable = ("SECKILL__GRPC__ADDR", "0.0.0.0:0");
    let found = finding(&[reachable], "exposure").await.unwrap();
    assert!(found.contains("warn") && found.contains("not asked who they are"), "{found}");
    let (_, entry) = new_token("anna", "ops").await;
    let tokens = ("SECKILL__AUTH__TOKENS", entry.as_str());
    let found = finding(&[reachable, tokens], "exposure").await.unwrap();
    assert!(found.contains("tokens travel without TLS"), "{found}");
    assert_eq!(finding(&[reachable, tokens, tls[0], tls[1]], "exposure").await, None);
    let found = finding(&[tokens], "callers").await.unwrap();
    assert!(found.contains("ok") && found.contains("ops: 1"), "{found}");
    let (_, entry) = new_token("shop", "order").await;
    let found = finding(&[("SECKILL__AUTH__TOKENS", &entry)], "callers").await.unwrap();
    assert!(found.contains("warn") && found.contains("nobody may run a sale"), "{found}");
}

#[tokio::test]
async fn the_demo_runs_beside_tokens_in_the_settings() {
    let (_, entry) = new_token("anna", "ops").await;
    let args = ["demo", "--units", "5", "--buyers", "20", "--output", "json"];
    printed(&seckill(&args, &[("SECKILL__AUTH__TOKENS", &entry)]).await, 0);
}
