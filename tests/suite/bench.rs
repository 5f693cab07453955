//! `seckill bench` runs to its end on a machine of any speed: the fields are there, the books agree,
//! and ratios are not absurd.

use serde_json::Value;
use tokio::{process::Command, sync::Mutex};

use crate::support::{cluster::Cluster, databases::Fresh, redis_server::RedisServer};

/// Two at a time would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Runs a scenario on the embedded engine and a file.
async fn bench(args: &[&str]) -> Value {
    bench_on(args, &[]).await
}

/// Runs a scenario on a Redis of its own and a new database of PostgreSQL.
async fn bench_on_servers(args: &[&str]) -> Value {
    let (redis, database) = (RedisServer::start().await, Fresh::postgres().await);
    let (redis_url, settings) = (redis.url(), database.settings());
    let stores = [("SECKILL__ENGINE__URL", &*redis_url), ("SECKILL__DATABASE__URL", &settings.url)];
    let report = bench_on(args, &stores).await;
    database.remove().await;
    report
}

async fn bench_on(args: &[&str], stores: &[(&str, &str)]) -> Value {
    let _alone = ONE_AT_A_TIME.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(["bench", "--output", "json"])
        .args(args)
        .args(["--quick", "--json", "report.json", "--html", "page.html", "--folder", "."])
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        // The engine is asked so often in a second, however many are refused; and a debug build on a
        // busy machine refuses few.
        .env("SECKILL__RESERVE__BELIEVE_SOLD_OUT_MS", "2000")
        .env("SECKILL__SWEEPER__INTERVAL_MS", "60000")
        .env("SECKILL__HOLDS__INTERVAL_MS", "60000")
        .envs(stores.iter().copied())
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let written = std::fs::read(folder.path().join("report.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), printed);
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<table>"), "{page}");
    // Files of the servers are gone with them.
    assert_eq!(folder.path().read_dir().unwrap().count(), 2);
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

/// As short as a measurement can be here.
const SHORT: [&str; 2] = ["--lasts", "300ms"];

/// Runs a scenario for a moment, on a file.
async fn short(scenario: &str) -> Value {
    bench(&[scenario, SHORT[0], SHORT[1]]).await
}

/// The same on servers.
async fn short_on_servers(scenario: &str) -> Value {
    bench_on_servers(&[scenario, SHORT[0], SHORT[1]]).await
}

/// Each of these was measured, and is not absurd.
fn assert_measured(report: &Value, names: &[&str]) {
    for name in names {
        let figure = figure(report, name);
        assert!(figure > 0.0 && figure < 1e7, "{name} is {figure}: {report}");
    }
}

#[tokio::test]
async fn a_win_is_held_against_what_it_is_made_of() {
    let report = short_on_servers("steady").await;
    let ratios = ["wins_over_noop", "win_cpu_ratio", "idle_ratio", "half_p99_ms"];
    assert_measured(&report, &ratios);
    assert_measured(&report, &["noop_p50_us", "script_p50_us", "insert_p50_us", "wins_per_s"]);
    assert!(figure(&report, "wins_over_noop") < 1.5, "{report}");
}

#[tokio::test]
async fn others_are_asked_the_same_and_none_sells_too_much() {
    let report = short_on_servers("peers").await;
    let ratios = ["over_row_lock", "over_distributed_lock", "over_naive_lua"];
    assert_measured(&report, &ratios);
    // Killed in the middle of a load: what SQL has committed stays.
    assert_eq!(figure(&report, "lost_orders"), 0.0);
    assert_eq!(figure(&report, "row_lock_lost_orders"), 0.0);
    assert_eq!(figure(&report, "row_lock_lost_units"), 0.0);
    let details = &report["runs"][0]["details"];
    for peer in ["row-lock", "distributed-lock", "naive-lua"] {
        let sold_out = &details[format!("{peer} sold out")];
        assert_eq!(sold_out["tally"]["oversold"], 0, "{peer}: {sold_out}");
        assert_eq!(sold_out["tally"]["doubled"], 0, "{peer}: {sold_out}");
        // Each offer had 1,000 units.
        let orders = sold_out["tally"]["orders"].as_u64().unwrap();
        assert!((1..=1_000).contains(&orders), "{peer}: {sold_out}");
        let killed = &details[format!("{peer} killed")];
        assert!(killed["told"]["RESERVED"].as_u64().is_some_and(|wins| wins > 0), "{killed}");
    }
    assert_eq!(details["row-lock sold out"]["tally"]["orders"], 1_000, "{details}");
}

#[tokio::test]
async fn a_redis_that_is_far_away_makes_each_win_wait_for_it() {
    let report = short_on_servers("far-redis").await;
    assert_measured(&report, &["far_over_near", "near_wins_per_s", "far_wins_per_s"]);
    assert!(figure(&report, "far_idle_p50_ms") >= 5.0, "{report}");
}

#[tokio::test]
async fn both_ends_of_the_outbox_are_held_against_inserts() {
    let report = short("drain").await;
    assert_measured(&report, &["outbox_over_raw", "drain_over_raw", "drained_per_s"]);
}

#[tokio::test]
async fn streams_win_too() {
    let report = short("streams").await;
    assert_measured(&report, &["streams_over_unary", "stream_wins_per_s", "stream_win_cpu_us"]);
}

#[tokio::test]
async fn watchers_have_the_newest_figures_in_the_end() {
    let report = short("watch").await;
    assert_measured(&report, &["updates_per_s", "reserve_p99_ratio", "with_p99_ms"]);
    let kib = figure(&report, "stream_kib");
    assert!((0.0..200.0).contains(&kib), "{kib}");
}

#[tokio::test]
async fn a_burst_sells_everything() {
    let report = short("burst").await;
    assert_eq!(figure(&report, "unsold_units"), 0.0, "{report}");
    assert_measured(&report, &["sold_out_s", "win_p99_ms", "answers_per_s"]);
}

#[tokio::test]
async fn who_asks_four_times_gets_one_unit() {
    let report = short("duplicates").await;
    assert_eq!(figure(&report, "reservations_per_buyer"), 1.0, "{report}");
    let told = &report["runs"][0]["details"]["told_at_saturation"];
    assert!(told["DUPLICATE"].as_u64() > Some(0), "{told}");
    assert!(told["RESERVED replayed"].as_u64() > Some(0), "{told}");
}

#[tokio::test]
async fn what_is_given_back_is_for_sale_again() {
    let report = short("releases").await;
    assert_eq!(figure(&report, "units_not_back"), 0.0, "{report}");
    assert_measured(&report, &["releases_per_s", "release_p99_ms"]);
}

#[tokio::test]
async fn many_offers_are_sold_at_once() {
    let report = short("many-offers").await;
    assert_measured(&report, &["many_over_one", "half_p99_ms"]);
    assert!(figure(&report, "offers_sold") > 10.0, "{report}");
}

#[tokio::test]
async fn segments_are_shared_by_the_nodes_of_a_cluster() {
    let (cluster, database) = (Cluster::start().await, Fresh::postgres().await);
    let (cluster_url, settings) = (cluster.url(), database.settings());
    let stores =
        [("SECKILL__ENGINE__URL", &*cluster_url), ("SECKILL__DATABASE__URL", &settings.url)];
    let report = bench_on(&["segments", SHORT[0], SHORT[1]], &stores).await;
    database.remove().await;
    assert_measured(&report, &["eight_over_one", "wins_per_s_of_1", "wins_per_s_of_8"]);
    assert_measured(&report, &["server_cpu_us_of_1", "server_cpu_us_of_8"]);
    for segments in [1, 2, 4, 8] {
        let tried =
            &report["runs"][0]["details"][format!("{segments} segment(s), by calls in flight")];
        let (_, tried) = tried.as_object().unwrap().iter().next().unwrap();
        let nodes = tried["nodes"].as_array().unwrap();
        assert_eq!(nodes.len(), 3, "{tried}");
        let of_nodes = nodes.iter().map(|node| node["segments"].as_u64().unwrap());
        assert_eq!(of_nodes.sum::<u64>(), segments, "{tried}");
        assert!(nodes.iter().all(|node| node["cores"].is_number()), "{tried}");
    }
}

#[tokio::test]
async fn segments_are_not_measured_without_a_cluster() {
    let redis = RedisServer::start().await;
    for engine in [String::new(), redis.url()] {
        let folder = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_seckill"))
            .args(["bench", "segments", "--quick", "--folder", "."])
            .current_dir(folder.path())
            .env_clear()
            .env("SECKILL__ENGINE__URL", &engine)
            .output()
            .await
            .unwrap();
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("name a Redis Cluster on this machine"), "{said}");
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
    assert_eq!(redis.command::<i64>(&["DBSIZE"]).await, 0);
}

#[tokio::test]
async fn a_whole_sale_goes_through() {
    let report = short("soak").await;
    let told = &report["runs"][0]["details"]["told"];
    assert!(told["SOLD_OUT"].as_u64() > told["RESERVED"].as_u64(), "{told}");
    assert_measured(&report, &["win_p99_ms", "server_cores", "memory_mib"]);
}

#[tokio::test]
async fn tricks_can_be_left_out() {
    let report = short("ablations").await;
    assert_measured(&report, &["batching_gain", "filter_gain", "streams_gain"]);
}

/// Runs `scale` along one thing; the lines of its charts are as long as there are steps.
async fn scaled(what: &str, on_servers: bool) -> (Value, Value) {
    // Each step has half a dozen measurements.
    let args = ["scale", "--only", what, "--lasts", "100ms"];
    let report = if on_servers { bench_on_servers(&args).await } else { bench(&args).await };
    let charts = report["runs"][0]["details"]["by_number"].clone();
    for (title, lines) in charts.as_object().unwrap() {
        for (line, points) in lines.as_object().unwrap() {
            let once = ["Reconcile", "the oracle"].contains(&line.as_str());
            let steps = if once || what == "watchers" { 1..=2 } else { 2..=2 };
            assert!(
                steps.contains(&points.as_object().unwrap().len()),
                "{title}, {line}: {points}"
            );
        }
    }
    (report, charts)
}

#[tokio::test]
async fn ever_more_offers_are_measured() {
    let (report, charts) = scaled("offers", true).await;
    assert_measured(&report, &["offers_restart_s", "offers_second_s", "offers_reconcile_s"]);
    let memory = charts["Offers: memory, MiB"].as_object().unwrap();
    assert!(memory.contains_key("server") && memory.contains_key("Redis"), "{charts}");
    let calls = charts["Offers: CPU of the server, µs a call"].as_object().unwrap();
    for line in ["a refusal", "a win", "a replay", "a win of half of them in turn"] {
        assert!(calls.contains_key(line), "{line}: {charts}");
    }
}

#[tokio::test]
async fn ever_more_reservations_are_measured() {
    let (report, charts) = scaled("reservations", false).await;
    assert_measured(&report, &["rebuild_s", "frozen_s", "reservations_restart_s", "oracle_mib"]);
    let calls = charts["Reservations: CPU of the server, µs a call"].as_object().unwrap();
    for line in ["a refusal", "a win", "a replay", "a replay of a new one"] {
        assert!(calls.contains_key(line), "{line}: {charts}");
    }
}

#[tokio::test]
async fn ever_more_watchers_are_measured() {
    let (report, charts) = scaled("watchers", false).await;
    assert_measured(&report, &["watchers_win_p99_ms"]);
    let calls = charts["Watchers: CPU of the server, µs a call or an update"].as_object().unwrap();
    for line in ["a refusal", "an update", "a replay"] {
        assert!(calls.contains_key(line), "{line}: {charts}");
    }
}

#[tokio::test]
async fn a_page_is_made_of_earlier_reports() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &'static [&str]| {
        Command::new(env!("CARGO_BIN_EXE_seckill"))
            .arg("bench")
            .args(args)
            .current_dir(folder.path())
            .output()
    };
    let report = r#"{"scenario": "steady", "figures": [], "runs": [], "notes": ["one"]}"#;
    std::fs::write(folder.path().join("one.json"), report).unwrap();
    std::fs::write(folder.path().join("other.json"), "{}").unwrap();
    let made = run(&["report", "one.json", "one.json", "--html", "page.html"]).await.unwrap();
    assert_eq!(made.status.code(), Some(0), "{made:?}");
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert_eq!(page.matches("<h2>steady</h2>").count(), 2, "{page}");
    let refused = run(&["report", "other.json", "--html", "none.html"]).await.unwrap();
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    assert!(!folder.path().join("none.html").exists());
}
