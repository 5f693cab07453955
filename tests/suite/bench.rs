//! `seckill bench` runs to its end on a machine of any speed: the fields are there, the books agree,
//! and ratios are not absurd.

use serde_json::Value;
use tokio::{process::Command, sync::Mutex};

/// Two at a time would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

async fn bench(args: &[&str]) -> Value {
    let _alone = ONE_AT_A_TIME.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(["bench", "--output", "json"])
        .args(args)
        .args(["--quick", "--json", "report.json", "--folder", "."])
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        // The engine is asked so often in a second, however many are refused; and a debug build on a
        // busy machine refuses few.
        .env("SECKILL__RESERVE__BELIEVE_SOLD_OUT_MS", "2000")
        .env("SECKILL__SWEEPER__INTERVAL_MS", "60000")
        .env("SECKILL__HOLDS__INTERVAL_MS", "60000")
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
    // All of them, but for those whom a busy machine refused unseen.
    let again = &report["runs"][0]["details"]["winners_who_asked_again"];
    assert!(again["RESERVED replayed"].as_u64().is_some_and(|count| count > 500), "{again}");
}

#[tokio::test]
async fn overload_is_refused_and_passes() {
    let report = bench(&["overload"]).await;
    assert!(figure(&report, "saturation_per_s") > 0.0);
    // How much is left of it at 5x says more about the other tests that run beside this one.
    assert!(figure(&report, "goodput_0.5x") > 0.0, "{report}");
    for level in ["1x", "2x", "5x"] {
        let told = report["runs"][0]["details"][level]["told"].as_object().unwrap();
        let answered: u64 = told.values().filter_map(Value::as_u64).sum();
        assert!(answered > 0, "nobody was told anything at {level}: {report}");
    }
    for beside in ["release_max_ms", "health_max_ms", "admin_max_ms"] {
        assert!(figure(&report, beside) > 0.0, "{beside}: {report}");
    }
    let rush = &report["runs"][0]["details"]["5x"];
    assert!(rush["told"].is_object() && rush["beside"]["failures"].is_array(), "{rush}");
    assert!(report["settings"]["reserve.believe_sold_out_ms"] == 2_000, "{report}");
}
