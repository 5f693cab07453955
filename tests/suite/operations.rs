//! An operator at work: the command line against a real server whose books were tampered with.

use std::{process::Output, time::Duration};

use sea_orm::ConnectionTrait;
use serde_json::Value;
use tokio::time::timeout;

use crate::support::{
    eventually,
    process::{Process, Serve},
    world::{Ground, Sale, on_every_ground},
};

async fn run(server: &Process, args: &[&str]) -> Output {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_seckill"))
        .args(args)
        .env_clear()
        .env("SECKILL_SERVER", format!("http://{}", server.addr))
        .kill_on_drop(true)
        .output();
    timeout(Duration::from_secs(60), output).await.expect("the command ends").unwrap()
}

/// The one object that the command answers with, after it ended with `code`.
async fn json(server: &Process, code: i32, args: &[&str]) -> Value {
    let output = run(server, &[args, &["--output", "json"]].concat()).await;
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stdout}{stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{args:?}: {stdout}"))
}

async fn table(server: &Process, code: i32, args: &[&str]) -> String {
    let output = run(server, args).await;
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stdout}");
    stdout
}

async fn sql(ground: &Ground<'_>, statement: &str) {
    ground.database.writer().execute_unprepared(statement).await.unwrap();
}

on_every_ground! {
    async fn an_operator_comes_back_from_an_incident(ground: &Ground<'_>) {
        let world = ground.world().await;
        world.open_sale(&Sale { total: 5, ..Sale::default() }).await;
        // The embedded engine has one process.
        world.close().await;
        let server = Serve::over(&ground.settings()).with("OUTBOX__BACKOFF_MS", 10);
        let server = server.with("OUTBOX__MAX_ATTEMPTS", 2).start().await;
        for buyer in ["u1", "u2", "u3"] {
            let won = json(&server, 0, &["reserve", "sale", "sku-1", buyer]).await;
            assert_eq!(won["outcome"], "RESERVED");
        }
        eventually("three orders", async || {
            let status = json(&server, 0, &["status", "sale"]).await;
            (status["orders"] == 3 && status["unacked"] == 0).then_some(())
        })
        .await;

        // All is well.
        let report = json(&server, 0, &["reconcile", "sale"]).await;
        for (figure, expected) in
            [("oversold", 0), ("lost", 0), ("difference_count", 0), ("offers_checked", 1)]
        {
            assert_eq!(report[figure], expected, "{report}");
        }
        assert_eq!(report["to_do"], "nothing");
        let offer = &report["offers"][0];
        assert_eq!((&offer["remaining"], &offer["held"]), (&2.into(), &3.into()));
        assert_eq!(offer["segments"][0]["remaining"], 2);

        // A counter that somebody wrote over.
        sql(ground, "UPDATE offers SET sold = sold - 1, reserved = reserved - 1").await;
        let shown = table(&server, 1, &["reconcile", "sale"]).await;
        for part in ["COUNTER_DRIFT", "run it again with --repair", "DIFFERENCE"] {
            assert!(shown.to_uppercase().contains(&part.to_uppercase()), "no {part} in {shown}");
        }
        let repaired = json(&server, 0, &["reconcile", "sale", "--repair"]).await;
        assert_eq!(repaired["differences"][0]["repaired"], true);
        json(&server, 0, &["reconcile", "sale"]).await;

        // Two reservations that did not become orders.
        for buyer in ["u4", "u5"] {
            sql(ground, &format!(
                "INSERT INTO orders (order_no, reservation_id, activity_id, sku_id, user_id, slot, \
                 quantity, price_minor, currency, state, create_time) VALUES ('x-{buyer}', \
                 'x-{buyer}', 'sale', 'sku-1', '{buyer}', 1, 1, 1, 'CNY', 'created', 1)"
            ))
            .await;
            json(&server, 0, &["reserve", "sale", "sku-1", buyer]).await;
        }
        let letters = eventually("two dead letters", async || {
            let output = run(&server, &["dead-letters", "list", "--output", "json"]).await;
            let letters: Value = serde_json::from_slice(&output.stdout).unwrap();
            (letters["dead_letters"].as_array().unwrap().len() == 2).then_some(letters)
        })
        .await;
        let id = |at: usize| letters["dead_letters"][at]["reservation_id"].as_str().unwrap();
        assert!(letters["dead_letters"][0]["last_error"].as_str().unwrap().contains("in the way"));
        let found = json(&server, 1, &["reconcile", "sale"]).await;
        assert_eq!(found["dead"], 2);
        assert_eq!(found["differences"][0]["kind"], "ORDER_WITHOUT_ROW");
        assert!(found["to_do"].as_str().unwrap().contains("no repair"), "{found}");
        sql(ground, "DELETE FROM orders WHERE order_no LIKE 'x-%'").await;
        let retried = json(&server, 0, &["dead-letters", "retry", id(0), "--reason", "gone"]).await;
        // The poller may have been faster than the answer.
        let state = retried["reservations"][0]["state"].as_str().unwrap();
        assert!(["QUEUED", "ORDERED"].contains(&state), "{retried}");
        let discarded = json(&server, 0, &["dead-letters", "discard", "--all"]).await;
        assert_eq!(discarded["reservations"][0]["reservation_id"], id(1));
        assert_eq!(discarded["reservations"][0]["state"], "RELEASED");
        let none = json(&server, 0, &["dead-letters", "list"]).await;
        assert_eq!(none["dead_letters"], Value::Array(vec![]));

        // A rebuild by hand, the end, the settlement.
        let rebuilt = json(&server, 0, &["rebuild", "sale", "--reason", "to be sure"]).await;
        assert_eq!(rebuilt["offers"][0]["remaining"], 1);
        let more = ["rebuild", "sale", "sku-1", "--segments", "3", "--reason", "a rush"];
        assert_eq!(json(&server, 0, &more).await["offers"][0]["remaining"], 1);
        let report = json(&server, 0, &["reconcile", "sale"]).await;
        assert_eq!(report["difference_count"], 0, "{report}");
        assert_eq!(report["offers"][0]["segments"].as_array().unwrap().len(), 3, "{report}");
        let fewer = json(&server, 64, &["rebuild", "sale", "--segments", "2"]).await;
        assert!(fewer.to_string().contains("must be at least 3"), "{fewer}");
        for (verb, state) in [("pause", "PAUSED"), ("resume", "ACTIVE"), ("end", "ENDED")] {
            assert_eq!(json(&server, 0, &["activity", verb, "sale"]).await["state"], state);
        }
        eventually("the books are closed", async || {
            let output = run(&server, &["activity", "settle", "sale", "--output", "json"]).await;
            let said: Value = serde_json::from_slice(&output.stdout).unwrap();
            let waits = said["error"]["reason"] == "NOT_DRAINED";
            assert!(waits || said["state"] == "SETTLED", "{said}");
            (!waits).then_some(())
        })
        .await;
        let last = table(&server, 0, &["watch", "sale"]).await;
        assert!(last.contains("SETTLED remaining=1 reserved=4 total=5"), "{last}");
        let audit = json(&server, 0, &["audit", "sale", "--limit", "100"]).await;
        let actions: Vec<&str> = audit["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["action"].as_str().unwrap())
            .collect();
        for action in [
            "count_anew",
            "repair",
            "reconcile",
            "retry_dead_letter",
            "discard_dead_letter",
            "rebuild_stock",
            "rebuild",
            "raise_segments",
            "create_activity",
            "approve_activity",
            "warm_up",
            "start_activity",
            "pause_activity",
            "resume_activity",
            "end_activity",
            "settle_activity",
        ] {
            assert!(actions.contains(&action), "{action} is not in {actions:?}");
        }
        assert_eq!(audit["entries"][0]["detail"]["to"], "settled");
        let started = audit["entries"].as_array().unwrap().iter();
        let started = started.filter(|entry| entry["action"] == "start_activity");
        let by: Vec<_> = started.map(|entry| (&entry["actor"], &entry["detail"]["reason"])).collect();
        assert_eq!(by, [(&"clock".into(), &"start_time".into())], "once, and by the clock");
        let first = json(&server, 0, &["audit", "sale", "--limit", "1"]).await;
        assert_eq!(first["entries"].as_array().unwrap().len(), 1);

        let unknown = json(&server, 1, &["reconcile", "nowhere"]).await;
        assert_eq!(unknown["error"]["reason"], "UNKNOWN_ACTIVITY");
        let unknown = json(&server, 1, &["dead-letters", "retry", "nobody"]).await;
        assert_eq!(unknown["error"]["reason"], "UNKNOWN_RESERVATION");
    }

    async fn an_operator_adjusts_the_stock_of_a_sale(ground: &Ground<'_>) {
        let world = ground.world().await;
        world.open_sale(&Sale { total: 5, ..Sale::default() }).await;
        world.close().await;
        let server = Serve::over(&ground.settings()).start().await;
        let adjust = |delta: &'static str, id: &'static str| {
            ["adjust", "sale", "sku-1", delta, "--request-id", id, "--reason", "a pallet"]
        };
        for _ in 0..2 {
            let more = json(&server, 0, &adjust("3", "a1")).await;
            assert_eq!((&more["applied"], &more["possible"]), (&true.into(), &3.into()), "{more}");
            assert_eq!((&more["request_id"], &more["offer"]["total"]), (&"a1".into(), &8.into()));
        }
        let fewer = json(&server, 0, &adjust("-6", "a2")).await;
        assert_eq!(fewer["offer"]["total"], 2, "{fewer}");
        let refused = json(&server, 1, &adjust("-2", "a3")).await;
        assert_eq!(
            (&refused["applied"], &refused["possible"], &refused["offer"]["total"]),
            (&false.into(), &(-1).into(), &2.into()),
        );
        let conflict = json(&server, 64, &adjust("4", "a1")).await;
        assert_eq!(conflict["error"]["reason"], "REQUEST_ID_CONFLICT", "{conflict}");
        let nothing = run(&server, &adjust("0", "a4")).await;
        assert_eq!(nothing.status.code(), Some(64), "{nothing:?}");
        let nameless = json(&server, 0, &["adjust", "sale", "sku-1", "1"]).await;
        assert_eq!(nameless["request_id"].as_str().unwrap().len(), 36, "{nameless}");
        let shown = json(&server, 0, &["activity", "show", "sale"]).await;
        assert_eq!(shown["offers"][0]["total"], 3, "{shown}");
        let audit = json(&server, 0, &["audit", "sale", "--limit", "1"]).await;
        assert_eq!(audit["entries"][0]["action"], "adjust_stock", "{audit}");
        assert_eq!(audit["entries"][0]["detail"]["total"], 3, "{audit}");
    }
}
