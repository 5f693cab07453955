//! The binary as people and scripts run it: arguments, exit codes, stdout and stderr.

use std::{
    process::{Command, Output},
    time::Duration,
};

/// Runs the binary in an empty directory, with nothing of ours in its environment.
fn seckill(args: &[&str]) -> Output {
    seckill_with(args, &[])
}

fn seckill_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(args)
        .current_dir(dir.path())
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// The one line of JSON on stdout.
fn json(output: &Output) -> serde_json::Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn help_is_data_and_tells_the_exit_codes() {
    let output = seckill(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("69  a service is unavailable"));
    assert_eq!(stderr(&output), "");
}

#[test]
fn help_is_a_word_too() {
    for words in [&[][..], &["serve"], &["activity", "create"]] {
        let asked = seckill(&[&["help"], words].concat());
        assert_eq!(asked.status.code(), Some(0), "{words:?}");
        let help = seckill(&[words, &["--help"]].concat());
        assert_eq!(stdout(&asked), stdout(&help), "{words:?}");
    }
    assert_eq!(seckill(&["help", "no-such-command"]).status.code(), Some(64));
}

#[test]
fn wrong_arguments_end_with_64() {
    for args in [
        &["--no-such-flag"][..],
        &["no-such-command"],
        &[],
        &["reserve", "double-11"],
        &["--timeout", "soon", "status"],
        &["reservation"],
        &["reservation", "--key", "a-1", "s-1", "u-1"],
        &["reservation", "r-1", "--request-id", "q-1"],
        &["--server", "127.0.0.1:1", "status"],
        &["--server", "ftp://127.0.0.1", "status"],
        &["activity", "create", "-f", "no-such-file"],
        &["serve", "--config", "no-such-file"],
        &["serve", "--print-config", "--check-config"],
    ] {
        let output = seckill(args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
        assert!(!stderr(&output).is_empty(), "{args:?}");
    }
}

#[test]
fn the_version_is_printed() {
    let output = seckill(&["version"]);
    assert_eq!(stdout(&output), format!("seckill {}\n", env!("CARGO_PKG_VERSION")));
    let output = seckill(&["version", "--output", "json"]);
    assert_eq!(json(&output)["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn the_settings_in_force_are_printed_without_secrets() {
    let args = ["serve", "--print-config", "--grpc-addr", "127.0.0.1:7000"];
    let variables = [("SECKILL__DATABASE__URL", "postgres://app:hunter2@host/db")];
    let output = seckill_with(&args, &variables);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("addr = \"127.0.0.1:7000\" # --grpc-addr\n"), "{text}");
    assert!(text.contains("postgres://app:***@host/db"), "{text}");
    assert!(!text.contains("hunter2") && !stderr(&output).contains("hunter2"));

    let output = seckill_with(&["serve", "--print-config", "--output", "json"], &variables);
    assert_eq!(json(&output)["database"]["url"], "postgres://app:***@host/db");
}

#[test]
fn what_is_printed_can_be_read_again() {
    let printed = stdout(&seckill(&["serve", "--print-config"]));
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("settings.toml");
    std::fs::write(&file, printed).expect("a file");
    let file = file.to_str().expect("UTF-8");
    assert_eq!(seckill(&["serve", "--check-config", "--config", file]).status.code(), Some(0));
    let variables = [("SECKILL_CONFIG", file)];
    let output = seckill_with(&["serve", "--print-config"], &variables);
    assert!(stdout(&output).contains("settings.toml:"), "{}", stdout(&output));
}

#[test]
fn settings_are_checked_before_anything_opens() {
    let output = seckill(&["serve", "--check-config"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));

    let variables = [("SECKILL__GRPC__MAX_CONECTIONS", "1"), ("SECKILL__OUTBOX__BATCH", "many")];
    for args in [&["serve"][..], &["serve", "--check-config"]] {
        let output = seckill_with(args, &variables);
        assert_eq!(output.status.code(), Some(64));
        let text = stderr(&output);
        assert!(text.contains("did you mean grpc.max_connections?"), "{text}");
        assert!(
            text.contains("outbox.batch = \"many\" (SECKILL__OUTBOX__BATCH): must be"),
            "{text}"
        );
    }
    let output = seckill_with(&["serve", "--output", "json"], &variables);
    assert_eq!(output.status.code(), Some(64));
    assert_eq!(json(&output)["error"]["violations"].as_array().map(Vec::len), Some(2));
}

#[test]
fn only_insecure_opens_the_server_to_others() {
    let args = ["serve", "--check-config", "--grpc-addr", "0.0.0.0:50051"];
    let output = seckill(&args);
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("--insecure"), "{}", stderr(&output));
    assert_eq!(seckill(&[&args[..], &["--insecure"]].concat()).status.code(), Some(0));
}

#[test]
fn the_example_file_is_printed() {
    let output = seckill(&["serve", "--print-example-config"]);
    let written = concat!(env!("CARGO_MANIFEST_DIR"), "/config.example.toml");
    assert_eq!(stdout(&output), std::fs::read_to_string(written).expect("the example"));
}

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = seckill(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0), "{shell}");
        assert!(stdout(&output).contains("warmup"), "{shell}");
    }
}

/// Every command with those below it: its words, and its help.
fn commands(words: &[&str], help: &str, found: &mut Vec<(String, String)>) {
    let list = help.split("Commands:\n").nth(1).unwrap_or_default();
    for line in list.lines().take_while(|line| !line.is_empty()) {
        let Some(name) = line.strip_prefix("  ").and_then(|line| line.split(' ').next()) else {
            continue;
        };
        if name.is_empty() {
            continue;
        }
        let words = [words, &[name]].concat();
        let output = seckill(&[&words[..], &["--help"]].concat());
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        found.push((words.join("-"), stdout(&output)));
        commands(&words, &stdout(&output), found);
    }
}

#[test]
fn every_command_has_help_with_the_exit_codes_and_a_page() {
    let mut found = Vec::new();
    commands(&[], &stdout(&seckill(&["--help"])), &mut found);
    assert!(found.len() > 30, "{found:?}");
    let folder = tempfile::tempdir().expect("a directory");
    let dir = folder.path().join("man1");
    let output = seckill(&["man", "--dir", dir.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for (words, help) in found {
        assert!(help.contains("69  a service is unavailable"), "{words}");
        let page = dir.join(format!("seckill-{words}.1"));
        let page = std::fs::read_to_string(&page).unwrap_or_else(|_| panic!("{page:?}"));
        assert!(page.contains(".SH SYNOPSIS"), "{words}");
    }
    let page = stdout(&seckill(&["man"]));
    assert!(page.contains(".TH seckill 1") && page.contains("Exit codes"), "{page}");
    let output = seckill(&["man", "--dir", "/dev/null/man1"]);
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("/dev/null/man1 can't be written"), "{}", stderr(&output));
}

#[test]
fn a_command_shows_and_takes_only_what_it_does_something_with() {
    let callers = "activity adjust audit confirm dead-letters health rebuild reconcile release \
                   reservation reserve smoke status warmup watch";
    let of_callers = "server timeout token token-file ca-file cert-file key-file";
    let mut found = Vec::new();
    commands(&[], &stdout(&seckill(&["--help"])), &mut found);
    let fish = stdout(&seckill(&["completions", "fish"]));
    for (words, help) in found {
        let first = words.split('-').next().expect("a word");
        let calls = words != "activity-schema"
            && callers
                .split(' ')
                .any(|name| words == name || words.starts_with(&format!("{name}-")));
        let reads = ["serve", "migrate", "demo", "bench", "doctor"].contains(&first)
            && words != "bench-report";
        let shows = |option: &str| help.contains(&format!(" --{option} <"));
        for option in of_callers.split(' ') {
            let takes = calls || (words == "demo" && option == "timeout");
            assert_eq!(shows(option), takes, "{words} {option}");
        }
        assert_eq!(shows("config"), reads, "{words}");
        assert!(shows("output"), "{words}");
        if !words.contains('-') {
            let completes = |option: &str| {
                let end = if help.contains("Commands:\n") { "; and not" } else { "\"" };
                let command = format!("using_subcommand {words}{end}");
                let lines = fish.lines().filter(|line| line.contains(&command));
                lines.filter(|line| line.contains(&format!("-l {option} "))).count() > 0
            };
            assert_eq!(completes("server"), calls, "{words}");
            assert_eq!(completes("config"), reads, "{words}");
        }
    }

    for (args, says) in [
        (
            &["serve", "--check-config", "--server", "http://a"][..],
            "`seckill serve` takes no --server",
        ),
        (
            &["--token", "hunter2", "serve", "--check-config"],
            "takes no --token: it calls no server",
        ),
        (&["migrate", "status", "--timeout", "1s"], "`seckill migrate status` takes no --timeout"),
        (&["token", "new", "n", "--role", "ops", "--ca-file", "f"], "takes no --ca-file"),
        (&["activity", "schema", "--server", "http://a"], "`seckill activity schema` takes no"),
        (&["status", "--config", "f"], "`seckill status` takes no --config: it reads no settings"),
    ] {
        let output = seckill(args);
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        let text = stderr(&output);
        assert!(text.contains(says) && !text.contains("hunter2"), "{args:?}: {text}");
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    // What the environment says holds for all commands.
    let variables = [("SECKILL_SERVER", "http://a"), ("SECKILL_TOKEN", "hunter2")];
    let output = seckill_with(&["serve", "--check-config"], &variables);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = seckill_with(&["activity", "schema"], &[("SECKILL_CONFIG", "no-such-file")]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn the_schema_of_a_sale_is_printed() {
    let output = seckill(&["activity", "schema"]);
    let written = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/sale.schema.json");
    assert_eq!(stdout(&output), std::fs::read_to_string(written).expect("the schema"));
}

#[test]
fn without_a_server_it_says_how_to_start_one() {
    // A port that was just free; nothing listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let server = format!("http://{}", free.local_addr().expect("an address"));
    drop(free);
    for args in [
        &["health"][..],
        &["status"],
        &["reserve", "double-11", "phone-1", "u-1"],
        &["watch", "double-11"],
        &["activity", "list"],
    ] {
        let output = seckill(&[&["--server", &server], args].concat());
        assert_eq!(output.status.code(), Some(69), "{args:?}: {}", stderr(&output));
        let expected = format!("error: no server at {server}: start one with `seckill serve`\n");
        assert_eq!(stderr(&output), expected, "{args:?}");
        assert_eq!(stdout(&output), "");
    }
    let output = seckill_with(&["health", "--output", "json"], &[("SECKILL_SERVER", &server)]);
    assert_eq!(output.status.code(), Some(69));
    assert_eq!(json(&output)["error"]["code"], "UNAVAILABLE");
    assert_eq!(json(&output)["error"]["reason"], "NO_SERVER");
}

#[test]
fn a_host_without_an_address_is_told_as_such() {
    // No resolver asks anybody for a label of so many letters.
    let server = format!("http://{}.example:50051", "a".repeat(64));
    let output = seckill(&["--server", &server, "status"]);
    assert_eq!(output.status.code(), Some(69));
    let text = stderr(&output);
    assert!(text.contains(&format!("no server at {server}: its host has no address")), "{text}");
    assert!(!text.contains("seckill serve"), "{text}");
    let output = seckill(&["--server", &server, "status", "--output", "json"]);
    assert_eq!(json(&output)["error"]["reason"], "NO_SERVER");
}

#[tokio::test]
async fn a_host_that_says_nothing_is_told_as_such() {
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let listener = socket.listen(1).expect("a port");
    let addr = listener.local_addr().expect("an address");
    // Nobody accepts, so that the kernel lets no more in after a few.
    let mut inside = Vec::new();
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&addr, Duration::from_millis(300)) {
        inside.push(stream);
    }
    let server = format!("http://{addr}");
    let output = seckill(&["--server", &server, "--timeout", "500ms", "status"]);
    assert_eq!(output.status.code(), Some(69));
    let text = stderr(&output);
    assert!(text.contains(&format!("no connection to {server} within 500 ms")), "{text}");
    assert!(!text.contains("seckill serve"), "{text}");
}

#[test]
fn who_retries_dead_letters_hears_that_all_can_be_meant() {
    for decision in ["retry", "discard"] {
        let output = seckill(&["dead-letters", decision]);
        assert_eq!(output.status.code(), Some(64));
        assert!(stderr(&output).contains("--all"), "{}", stderr(&output));
        let output = seckill(&["dead-letters", decision, "r-1", "--all"]);
        assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
        let output = seckill(&["dead-letters", decision, "r-1", "--activity-id", "a"]);
        assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    }
}
