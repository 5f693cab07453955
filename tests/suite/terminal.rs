//! What is drawn on a terminal, and that the terminal is left as it was.

use std::{fmt::Write as _, process::Stdio, time::Duration};

use seckill::config::Settings;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use crate::{clients::python, support::process::Serve};

const LINES: usize = 10;
const COLUMNS: usize = 60;
const LIMIT: Duration = Duration::from_secs(30);

/// A sale of more offers than the screen has lines, with long names.
fn sale() -> String {
    let mut file =
        String::from("activity_id: wide\ntitle: Wide\nstart_time: now\nend_time: +1h\noffers:\n");
    for nth in 0..30 {
        let name = format!("{}-{nth:02}", "x".repeat(40));
        writeln!(
            file,
            "  - {{sku_id: {name}, title: T, price_minor: 1, currency_code: CNY, total: 9}}"
        )
        .unwrap();
    }
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_draws_within_the_screen_and_leaves_it_as_it_was() {
    let serve = Serve::over(&Settings::default()).with("DATABASE__URL", "sqlite::memory:");
    let mut process = serve.start().await;
    let server = format!("http://{}", process.addr);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sale.yaml");
    std::fs::write(&file, sale()).unwrap();
    let seckill = env!("CARGO_BIN_EXE_seckill");
    let output = Command::new(seckill)
        .args(["--server", &server, "activity", "create", "-f"])
        .arg(&file)
        .output();
    assert!(output.await.unwrap().status.success());

    let watch = ["--server", &server, "watch", "wide"];
    let output = Command::new(python())
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/python/terminal.py"))
        .args([LINES.to_string(), COLUMNS.to_string(), LIMIT.as_secs().to_string()])
        .arg("more offers; name some")
        .arg(seckill)
        .args(watch)
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let drawn = String::from_utf8(output.stdout).unwrap();
    // Each drawing but the first begins by going back over the one before.
    let frames: Vec<&str> = drawn.split("\x1b[J").collect();
    for frame in &frames {
        let frame = frame.split("\x1b[").next().unwrap();
        let lines: Vec<&str> = frame.lines().collect();
        assert!(lines.len() < LINES, "{lines:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS), "{lines:?}");
    }
    let last = frames.last().unwrap();
    assert!(last.contains("SKU_ID") && last.contains("more offers; name some"), "{drawn:?}");
    // Nothing is switched on that somebody would have to switch off.
    assert!(!drawn.contains("\x1b[?"), "{drawn:?}");

    // Elsewhere there is a line for each change, and nothing is drawn.
    let mut watching = Command::new(seckill)
        .args(watch)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    for _ in 0..30 {
        let line = timeout(LIMIT, lines.next_line()).await.expect("a line for each offer");
        let line = line.unwrap().expect("it goes on");
        assert!(line.contains(" remaining=9 ") && !line.contains('\x1b'), "{line:?}");
    }
    let more = timeout(Duration::from_secs(1), lines.next_line()).await;
    assert!(more.is_err(), "nothing has changed: {more:?}");
    process.stop().await;
}
