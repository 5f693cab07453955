//! Client commands against a server: what they print and how they end.

use std::{net::SocketAddr, process::Output};

use serde_json::Value;

use crate::support::stand_in::{Fault, StandIn};

const SALE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/sale.yaml");

async fn seckill(addr: SocketAddr, args: &[&str]) -> Output {
    tokio::process::Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(args)
        .env_clear()
        .env("SECKILL_SERVER", format!("http://{addr}"))
        .output()
        .await
        .expect("the binary runs")
}

/// The lines of stdout as JSON.
fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// Runs a command that must end with `code`; answers with its one object.
async fn json(addr: SocketAddr, code: i32, args: &[&str]) -> Value {
    let output = seckill(addr, &[args, &["--output", "json"]].concat()).await;
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", errors(&output));
    let mut lines = lines(&output);
    assert_eq!(lines.len(), 1, "{args:?}");
    lines.remove(0)
}

#[tokio::test]
async fn a_sale_runs_from_its_file_to_its_end() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    let created = json(addr, 0, &["activity", "create", "-f", SALE]).await;
    assert_eq!(created["activity_id"], "double-11");
    assert_eq!(created["state"], "PENDING_REVIEW");
    assert_eq!(created["offers"][0]["hold"], "900s");
    assert_eq!(json(addr, 0, &["activity", "approve", "double-11"]).await["state"], "SCHEDULED");
    assert_eq!(json(addr, 0, &["warmup", "double-11"]).await["offers"][0]["remaining"], 1000);

    let reserve = ["reserve", "double-11", "phone-1", "u-1", "--request-id", "q-1"];
    let won = json(addr, 0, &reserve).await;
    assert_eq!(won["outcome"], "RESERVED");
    assert_eq!(won["request_id"], "q-1");
    let id = won["reservation"]["reservation_id"].as_str().expect("an id").to_owned();
    assert_eq!(json(addr, 0, &reserve).await["replayed"], true);
    let second = json(addr, 1, &["reserve", "double-11", "phone-1", "u-1"]).await;
    assert_eq!(second["outcome"], "DUPLICATE");
    assert_eq!(second["existing_reservation"]["reservation_id"], id.as_str());
    assert_eq!(second["request_id"].as_str().map(str::len), Some(36));

    let by_id = json(addr, 0, &["reservation", &id]).await;
    let key = ["reservation", "--key", "double-11", "phone-1", "u-1", "--request-id", "q-1"];
    assert_eq!(json(addr, 0, &key).await, by_id);
    assert_eq!(by_id["reservation"]["state"], "ORDERED");

    let stranger = ["release", "double-11", "phone-1", "u-2", &id];
    assert_eq!(json(addr, 1, &stranger).await["outcome"], "WRONG_OWNER");
    let release = ["release", "double-11", "phone-1", "u-1", &id];
    assert_eq!(json(addr, 0, &release).await["outcome"], "RELEASED");
    assert_eq!(json(addr, 0, &release).await["outcome"], "ALREADY_RELEASED");
    assert_eq!(json(addr, 1, &reserve).await["outcome"], "RELEASED");

    assert_eq!(json(addr, 0, &["status", "double-11"]).await["offers"][0]["total"], 1000);
    assert_eq!(json(addr, 0, &["activity", "end", "double-11"]).await["state"], "ENDED");
}

#[tokio::test]
async fn people_see_tables() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    seckill(addr, &["activity", "create", "-f", SALE]).await;
    let shown = text(&seckill(addr, &["activity", "show", "double-11"]).await);
    assert!(shown.starts_with("activity_id  double-11\n"), "{shown}");
    assert!(shown.contains("\nSKU_ID"), "{shown}");
    let listed = text(&seckill(addr, &["activity", "list"]).await);
    assert!(listed.starts_with("ACTIVITY_ID  TITLE"), "{listed}");
    let status = text(&seckill(addr, &["status"]).await);
    assert!(status.contains("engine_healthy    yes\n"), "{status}");
}

#[tokio::test]
async fn a_list_has_all_pages() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    let dir = tempfile::tempdir().expect("a directory");
    let sale = std::fs::read_to_string(SALE).expect("the example");
    for name in ["a", "b", "c"] {
        let file = dir.path().join(name);
        std::fs::write(&file, sale.replace("double-11", name)).expect("a file");
        json(addr, 0, &["activity", "create", "-f", file.to_str().expect("UTF-8")]).await;
    }
    let list = json(addr, 0, &["activity", "list"]).await;
    let names: Vec<&Value> =
        list["activities"].as_array().expect("a list").iter().map(|a| &a["activity_id"]).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn errors_are_told_to_people_and_to_machines() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    let output = seckill(addr, &["activity", "show", "single-1"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(errors(&output), "error: there is no activity single-1 (UNKNOWN_ACTIVITY)\n");
    assert_eq!(text(&output), "");
    let error = json(addr, 1, &["activity", "show", "single-1"]).await;
    assert_eq!(error["error"]["code"], "NOT_FOUND");
    assert_eq!(error["error"]["reason"], "UNKNOWN_ACTIVITY");

    let reserve = ["reserve", "double-11", "phone-1", "u-1", "--quantity", "0"];
    let output = seckill(addr, &reserve).await;
    assert_eq!(output.status.code(), Some(64));
    assert_eq!(
        errors(&output),
        "error: the request has an invalid field (INVALID_FIELD)\n  \
         quantity: must be 1 to 1000 (it is 0)\n"
    );
    let error = json(addr, 64, &reserve).await;
    assert_eq!(error["error"]["violations"][0]["field"], "quantity");

    let error = json(addr, 69, &["activity", "pause", "double-11"]).await;
    assert_eq!(error["error"]["code"], "UNIMPLEMENTED");
}

#[tokio::test]
async fn an_attempt_that_may_have_won_names_its_request_id() {
    let (stand_in, addr, _server) = StandIn::start(Fault::Falters).await;
    json(addr, 0, &["activity", "create", "-f", SALE]).await;
    for user in ["u-1", "u-2"] {
        json(addr, 0, &["reserve", "double-11", "phone-1", user]).await;
    }
    let reserve = ["reserve", "double-11", "phone-1", "u-3", "--request-id", "q-3"];
    let output = seckill(addr, &reserve).await;
    assert_eq!(output.status.code(), Some(69));
    assert_eq!(
        errors(&output),
        "it may still be reserved; repeat it with --request-id q-3\n\
         error: the database is away (DATABASE_UNAVAILABLE)\n  retry after 1 ms\n"
    );
    assert_eq!(json(addr, 0, &reserve).await["replayed"], true);
    assert_eq!(stand_in.live(), 3);
}

#[tokio::test]
async fn health_is_an_exit_code() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    assert_eq!(json(addr, 0, &["health"]).await["status"], "SERVING");
    let order = ["health", "--service", "seckill.v1.Seckill"];
    assert_eq!(json(addr, 0, &order).await["status"], "SERVING");
    let admin = ["health", "--service", "seckill.v1.SeckillAdmin"];
    assert_eq!(json(addr, 1, &admin).await["status"], "NOT_SERVING");
    let typo = json(addr, 64, &["health", "--service", "seckill.v1.Sekill"]).await;
    assert_eq!(
        typo["error"]["message"],
        "--service \"seckill.v1.Sekill\": the server has no such service; one of Seckill has \
         seckill.v1.Seckill and seckill.v1.SeckillAdmin"
    );
}

#[tokio::test]
async fn a_watch_comes_back_after_its_stream_broke() {
    let (_, addr, _server) = StandIn::start(Fault::None).await;
    json(addr, 0, &["activity", "create", "-f", SALE]).await;
    let output = seckill(addr, &["watch", "double-11", "--output", "json"]).await;
    assert_eq!(output.status.code(), Some(0));
    let messages = lines(&output);
    assert_eq!(messages.len(), 4, "two offers, twice");
    assert_eq!(messages[0]["snapshot"], true);
    let said = errors(&output);
    assert!(said.starts_with("lost the server (the server stops); trying again in "), "{said}");

    let output = seckill(addr, &["watch", "double-11"]).await;
    assert!(text(&output).contains(" phone-1 PENDING_REVIEW remaining=1000 "), "{}", text(&output));
    assert_eq!(json(addr, 1, &["watch", "single-1"]).await["error"]["reason"], "UNKNOWN_ACTIVITY");
}

#[tokio::test]
async fn a_smoke_test_leaves_nothing_behind() {
    for (fault, code) in [(Fault::None, 0), (Fault::AllowsTwo, 1), (Fault::Falters, 69)] {
        let (stand_in, addr, _server) = StandIn::start(fault).await;
        json(addr, 0, &["activity", "create", "-f", SALE]).await;
        let idle = json(addr, 1, &["smoke", "double-11"]).await;
        assert_eq!(idle["steps"][0]["text"], "is PENDING_REVIEW");
        json(addr, 0, &["warmup", "double-11"]).await;
        let output = seckill(addr, &["smoke", "double-11", "phone-1"]).await;
        assert_eq!(output.status.code(), Some(code), "{fault:?}: {}", text(&output));
        assert!(text(&output).contains("ok      reserve       r-1\n"), "{}", text(&output));
        assert_eq!(stand_in.live(), 0, "{fault:?}");
    }
}

#[tokio::test]
async fn a_reader_that_has_enough_ends_a_command_quietly() {
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(["completions", "bash"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().await.expect("it ends");
    assert_eq!(errors(&output), "");
    assert_eq!(output.status.code(), Some(0));
}
