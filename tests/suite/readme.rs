//! The commands in README.md and in the quick start, run as they stand, so that neither can lie.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use seckill::config::Settings;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::{Instant, timeout},
};

use crate::{
    clients::python,
    support::process::{Process, Serve},
};

/// The address in the documents.
const ADDRESS: &str = "127.0.0.1:50051";
const LIMIT: Duration = Duration::from_secs(60);
/// How long what has no end is watched.
const WATCHED: Duration = Duration::from_secs(3);

/// The sections of README.md whose commands are run, and those whose commands are not, with why.
const RUN: &[&str] =
    &["From an activity to a confirmed order", "The same with the `seckill` command"];
const NOT_RUN: &[(&str, &str)] = &[
    ("How fast it is on your machine", "it takes minutes, and bench.rs runs each of them quickly"),
    ("Going to production", "it names hosts, files and tokens of the reader"),
];

/// A fenced block.
#[derive(Debug, Clone)]
struct Block {
    section: String,
    language: String,
    text: String,
}

fn blocks(document: &str) -> Vec<Block> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
    let text = fs::read_to_string(path).unwrap();
    let mut found: Vec<Block> = Vec::new();
    let (mut section, mut inside) = (String::new(), false);
    for line in text.lines() {
        match line.strip_prefix("```") {
            Some(_) if inside => inside = false,
            Some(language) => {
                inside = true;
                let language = language.to_owned();
                found.push(Block { section: section.clone(), language, text: String::new() });
            }
            None if inside => {
                let block = found.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            }
            None if line.starts_with('#') => {
                section = line.trim_start_matches('#').trim().to_owned();
            }
            None => {}
        }
    }
    found
}

/// The commands of a block of shell, each with its further lines.
fn commands(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let (mut open, mut until) = (false, None);
    for line in text.lines() {
        if open || until.is_some() {
            let command = found.last_mut().unwrap();
            command.push('\n');
            command.push_str(line);
        } else if !line.trim().is_empty() {
            found.push(line.to_owned());
        }
        if until.as_deref() == Some(line) {
            until = None;
        } else if let Some((_, word)) = line.split_once("<<'") {
            until = Some(word.trim_end_matches('\'').to_owned());
        }
        open = line.ends_with('\\');
    }
    found
}

/// A fresh folder, with the programs that a reader has and the files that the commands name.
struct Reader {
    folder: TempDir,
    server: Process,
}

impl Reader {
    async fn new() -> Self {
        const ROOT: &str = env!("CARGO_MANIFEST_DIR");
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        symlink(env!("CARGO_BIN_EXE_seckill"), bin.join("seckill")).unwrap();
        symlink(format!("{ROOT}/examples"), folder.path().join("examples")).unwrap();
        let grpcurl = bin.join("grpcurl");
        let python = python();
        let script = format!(
            "#!/bin/sh\nexport PYTHONDONTWRITEBYTECODE=1\nexec {python} {ROOT}/tests/clients/python/grpcurl.py \"$@\"\n"
        );
        fs::write(&grpcurl, script).unwrap();
        fs::set_permissions(&grpcurl, fs::Permissions::from_mode(0o755)).unwrap();
        let serve = Serve::over(&Settings::default()).with("DATABASE__URL", "sqlite::memory:");
        Self { folder, server: serve.start().await }
    }

    /// Runs a command as it stands, but for the address.
    async fn run(&self, command: &str) -> Output {
        let command = command.replace(ADDRESS, &self.server.addr.to_string());
        // What has no end is ended, together with its children.
        let mut shell = Command::new("timeout");
        let limit = if has_no_end(&command) { WATCHED } else { LIMIT };
        shell
            .arg(limit.as_secs().to_string())
            .args(["sh", "-c", &command])
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", format!("{}/bin:/usr/bin:/bin", self.folder.path().display()))
            .env("SECKILL_SERVER", format!("http://{}", self.server.addr))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        timeout(2 * LIMIT, shell.output()).await.expect("it ends").unwrap()
    }

    /// Runs a command that must go well; answers with what it printed.
    async fn succeeds(&self, command: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let output = self.run(command).await;
            let printed = String::from_utf8(output.stdout).unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            // The order is made a moment after the reservation, as the text says.
            if printed.contains("NOT_ORDERED_YET") && Instant::now() < deadline {
                continue;
            }
            let expected = if has_no_end(command) { 124 } else { 0 };
            assert_eq!(output.status.code(), Some(expected), "{command}\n{printed}{errors}");
            assert!(!printed.is_empty(), "{command} prints nothing: {errors}");
            return printed;
        }
    }

    /// Runs the blocks in order; a block of JSON behind one of shell is what it prints.
    async fn replay(&self, blocks: &[Block]) -> usize {
        let mut count = 0;
        for (nth, block) in blocks.iter().enumerate() {
            if block.language != "sh" {
                continue;
            }
            for command in commands(&block.text) {
                let printed = self.succeeds(&command).await;
                count += 1;
                if let Some(shown) = blocks.get(nth + 1).filter(|next| next.language == "json") {
                    assert_like(&printed, &shown.text);
                }
                if command.contains("seckill.v1.Seckill/Reserve") {
                    let again = self.succeeds(&command).await;
                    assert!(again.contains("\"replayed\": true"), "{again}");
                }
                if command.contains("seckill.v1.Seckill/Confirm") {
                    let release = command.replace("Seckill/Confirm", "Seckill/Release");
                    let refused = self.succeeds(&release).await;
                    assert!(refused.contains("RELEASE_OUTCOME_CONFIRMED"), "{refused}");
                }
            }
        }
        count
    }
}

fn has_no_end(command: &str) -> bool {
    command.contains("Seckill/WatchStock") || command.starts_with("seckill watch")
}

/// The same members with the same values, but for times and what differs from run to run.
fn assert_like(printed: &str, shown: &str) {
    fn blanked(value: &mut Value) {
        for (name, value) in value.as_object_mut().into_iter().flatten() {
            if name == "orderNo" || name.ends_with("Time") {
                assert!(value.is_string());
                *value = Value::Null;
            }
            blanked(value);
        }
    }
    let read = |text: &str| {
        let mut value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
        blanked(&mut value);
        value
    };
    assert_eq!(read(printed), read(shown));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_in_the_readme_goes_as_it_is_told() {
    let all = blocks("README.md");
    for block in all.iter().filter(|block| block.language == "sh") {
        let is_run = RUN.contains(&block.section.as_str());
        let is_not = NOT_RUN.iter().any(|(section, _)| *section == block.section);
        assert!(is_run || is_not, "nobody runs the commands of '{}'", block.section);
    }
    for section in RUN {
        let blocks: Vec<Block> =
            all.iter().filter(|block| block.section == *section).cloned().collect();
        let mut reader = Reader::new().await;
        let count = reader.replay(&blocks).await;
        assert!(count > 6, "{section}: {count} commands");
        reader.server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_quick_start_goes_as_it_is_told() {
    let mut reader = Reader::new().await;
    let count = reader.replay(&blocks("docs/quick-start.md")).await;
    assert!(count > 6, "{count} commands");
    reader.server.stop().await;
}

/// As the documents tell it to those who test their own programs, with a setting that is a file's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ephemeral_server_tells_its_address_first_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let seckill = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seckill"));
        command.args(words).current_dir(folder.path()).env_clear().kill_on_drop(true);
        command
    };
    let mut server = seckill(&["serve", "--ephemeral"])
        .env("SECKILL__DATABASE__URL", "sqlite://kept.db")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut printed = BufReader::new(server.stdout.take().unwrap()).lines();
    let address = timeout(LIMIT, printed.next_line()).await.unwrap().unwrap().unwrap();
    let server_url = format!("http://{address}");
    let health = seckill(&["health", "--server", &server_url]).output().await.unwrap();
    assert!(health.status.success(), "{address}: {health:?}");

    let end = Command::new("kill").arg(server.id().unwrap().to_string()).status().await.unwrap();
    assert!(end.success());
    let status = timeout(LIMIT, server.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_in_the_readme_prints_what_is_shown() {
    let all = blocks("README.md");
    let shown = all.iter().find(|block| block.text.contains("-- demo\nopening")).unwrap();
    let reader = Reader::new().await;
    let output = reader.run("seckill demo").await;
    assert!(output.status.success(), "{output:?}");
    // What a terminal shows of both, in this order.
    let printed = [output.stderr, output.stdout].concat();
    let printed = String::from_utf8(printed).unwrap();
    let lines = |text: &str| -> Vec<String> {
        let measured = ["sale ", "sent again", "second attempt"];
        text.lines()
            .filter(|line| !line.starts_with('$') && !line.is_empty())
            .map(|line| {
                let line = line.split(" in ").next().unwrap();
                let is_measured = measured.iter().any(|begin| line.starts_with(begin));
                let words = line.split_whitespace().map(|word| {
                    let is_number = word.bytes().any(|byte| byte.is_ascii_digit());
                    if is_measured && is_number && word != "p50" && word != "p99" {
                        "N"
                    } else {
                        word
                    }
                });
                words.collect::<Vec<_>>().join(" ")
            })
            .collect()
    };
    assert_eq!(lines(&printed), lines(&shown.text));
}
