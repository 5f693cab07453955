//! `seckill bench` runs to its end on a machine of any speed: the fields are there, the books agree,
//! and ratios are not absurd.

use serde_json::Value;
use tokio::process::Command;

async fn bench(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(["bench", "--output", "json"])
        .args(args)
        .args(["--quick", "--json", "report.json", "--folder", "."])
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        // The engine is asked so often in this time, however many are refused; a debug build on a
        // busy machine refuses few.
        .env("SECKILL__RESERVE__BELIEVE_SOLD_OUT_MS", "2000")
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let written = std::fs::read(folder.path().join("report.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), printed);
    // Files of the servers are gone with them.
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    assert_eq!(printed["broken"], Value::Array(Vec::new()), "{printed}");
    for field in ["processor", "kernel", "seckill", "commit", "engine", "database", "build"] {
        assert!(printed["machine"][field].as_str().is_some_and(|text| !text.is_empty()), "{field}");
    }
    assert!(printed["machine"]["fsync_us"].as_u64().is_some());
    printed
}

/// The median of a figure.
fn figure(report: &Value, name: &str) -> f64 {
    let rows = report["figures"].as_array().unwrap();
    let row = rows.iter().find(|row| row["figure"] == name);
    row.unwrap_or_else(|| panic!("no {name} in {report}"))["median"].as_f64().unwrap()
}

#[tokio::test]
async fn sold_out_costs_about_a_call_that_does_nothing() {
    let report = bench(&["sold-out"]).await;
    assert!(figure(&report, "refusal_cpu_ratio") < 3.0, "{report}");
    assert!(figure(&report, "engine_calls_per_refusal") <= 0.01, "{report}");
    assert!(figure(&report, "resale_p99_ms") > 0.0);
    assert_eq!(report["runs"][0]["details"]["winners_who_asked_again"]["RESERVED replayed"], 1_000);
}

#[tokio::test]
async fn overload_is_refused_and_passes() {
    let report = bench(&["overload"]).await;
    assert!(figure(&report, "saturation_per_s") > 0.0);
    for level in ["goodput_0.5x", "goodput_1x", "goodput_2x", "goodput_5x"] {
        let goodput = figure(&report, level);
        assert!(goodput > 0.0 && goodput < 2.0, "{level}: {report}");
    }
    for beside in ["release_max_ms", "health_max_ms", "admin_max_ms"] {
        assert!(figure(&report, beside) > 0.0, "{beside}: {report}");
    }
    assert_eq!(report["runs"][0]["details"]["5x"]["beside"]["failures"], Value::Array(Vec::new()));
    assert!(report["settings"]["reserve.believe_sold_out_ms"] == 2_000, "{report}");
}
