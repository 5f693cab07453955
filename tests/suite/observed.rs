//! What operators see of a server: every call and outcome in the metrics, and rules and a dashboard
//! that ask for nothing else.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use sea_orm::{ConnectionTrait as _, TransactionTrait as _};
use seckill::{
    api::{
        access::TABLE,
        pb::{
            self, ReserveOutcome, seckill_admin_client::SeckillAdminClient,
            seckill_client::SeckillClient,
        },
    },
    metrics::{FAMILIES, Kind},
};
use serde_json::Value;
use tonic::Code;

use crate::support::{
    alerts::assert_seen_by,
    calls::Shop,
    certs::{Authority, DAY, Wanted},
    databases::{self, Fresh, admin},
    eventually,
    process::{Process, Serve},
    redis_server::RedisServer,
    scrape::{Series, get, metrics},
    wire::{AtCommit, Wire},
    within,
    world::{Ground, Sale},
};

/// A server of its own, since all servers of a process count together; it sells two units.
async fn with_a_sale(run: impl AsyncFnOnce(&mut Process, Shop)) {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 2, ..Sale::default() }).await;
        world.close().await;
        let serve = Serve::over(&ground.settings()).with("HTTP__ADDR", "127.0.0.1:0");
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);
        run(&mut process, shop).await;
        process.stop().await;
    })
    .await;
}

fn handled(service: &str, method: &str, kind: &str, code: &str) -> String {
    format!(
        "grpc_server_handled_total{{grpc_service=\"{service}\",grpc_method=\"{method}\",\
         grpc_type=\"{kind}\",grpc_code=\"{code}\"}}"
    )
}

fn of_seckill(method: &str, kind: &str, code: &str) -> String {
    handled("seckill.v1.Seckill", method, kind, code)
}

fn assert_series(found: &Series, expected: &[(&str, f64)]) {
    for (series, value) in expected {
        assert_eq!(found.get(*series), Some(value), "{series} in {found:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_is_counted_by_what_became_of_it() {
    with_a_sale(async |process, shop| {
        let addr = process.http_addr();
        let before = metrics(addr).await;
        for (rpc, _) in TABLE {
            let (service, method) = rpc.split_once('/').unwrap();
            let name = format!("grpc_service=\"{service}\",grpc_method=\"{method}\"");
            let seen = before.keys().filter(|series| series.contains(&name)).count();
            // Started, 17 codes, both kinds of messages, 15 buckets, sum and count.
            assert_eq!(seen, 37, "{rpc} is there before its first call");
        }
        assert_series(&before, &[(of_seckill("Reserve", "unary", "OK").as_str(), 0.0)]);

        for buyer in ["u1", "u1", "u2", "u3"] {
            shop.insist(buyer, "r").await;
        }
        let mut client = shop.client.clone();
        let request = |sku_id: &str| pb::ReserveRequest {
            activity_id: shop.key.activity_id.to_string(),
            sku_id: sku_id.to_owned(),
            user_id: "u4".to_owned(),
            ..Default::default()
        };
        let unknown = client.reserve(request("no-such")).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound);
        let invalid = client.reserve(request("")).await.unwrap_err();
        assert_eq!(invalid.code(), Code::InvalidArgument);
        let twice = client.reserve(request("no-such")).await.unwrap_err();
        assert_eq!(twice.code(), Code::NotFound);

        let after = metrics(addr).await;
        let labels = "grpc_service=\"seckill.v1.Seckill\",grpc_method=\"Reserve\",\
                      grpc_type=\"unary\"";
        let (started, times, received, sent) = (
            format!("grpc_server_started_total{{{labels}}}"),
            format!("grpc_server_handling_seconds_count{{{labels}}}"),
            format!("grpc_server_msg_received_total{{{labels}}}"),
            format!("grpc_server_msg_sent_total{{{labels}}}"),
        );
        let of_offer = |outcome: &str| {
            format!(
                "seckill_offer_outcomes_total{{activity_id=\"sale\",sku_id=\"sku-1\",\
                 outcome=\"{outcome}\"}}"
            )
        };
        assert_series(
            &after,
            &[
                (&started, 7.0),
                (&times, 7.0),
                (&received, 7.0),
                // Refusals by a status are no messages.
                (&sent, 4.0),
                (&of_seckill("Reserve", "unary", "OK"), 4.0),
                (&of_seckill("Reserve", "unary", "NotFound"), 2.0),
                (&of_seckill("Reserve", "unary", "InvalidArgument"), 1.0),
                ("seckill_reserve_outcomes_total{outcome=\"reserved\"}", 2.0),
                ("seckill_reserve_outcomes_total{outcome=\"replayed\"}", 1.0),
                ("seckill_reserve_outcomes_total{outcome=\"sold_out\"}", 1.0),
                ("seckill_reserve_outcomes_total{outcome=\"duplicate\"}", 0.0),
                (&of_offer("reserved"), 2.0),
                (&of_offer("replayed"), 1.0),
                (&of_offer("sold_out"), 1.0),
                ("seckill_reserve_errors_total{reason=\"unknown_offer\"}", 2.0),
                ("seckill_reserve_errors_total{reason=\"invalid\"}", 1.0),
                ("seckill_writer_group_rows_sum", 2.0),
                ("seckill_reserve_room_taken", 0.0),
                ("seckill_writer_longest_wait_seconds", 0.0),
            ],
        );
        let of_offers =
            after.keys().filter(|name| name.starts_with("seckill_offer_outcomes_total"));
        assert_eq!(of_offers.count(), 3, "neither what did not happen nor an invented SKU");
        assert!(after["seckill_reserve_room_places"] >= 64.0, "{after:?}");
        assert!(after["seckill_engine_batch_requests_count"] >= 3.0, "{after:?}");
        assert!(after["process_resident_memory_bytes"] > 1e6, "{after:?}");
        let waits =
            |pool: &str| after[&format!("seckill_pool_wait_seconds_count{{pool=\"{pool}\"}}")];
        assert!(waits("engine") >= 3.0 && waits("database") >= 2.0, "{after:?}");

        // No method, no series of its own.
        let channel = process.channel().await;
        let mut grpc = tonic::client::Grpc::new(channel);
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<pb::ReserveRequest, pb::ReserveResponse>::default();
        let path = "/seckill.v1.Seckill/Invent".parse().unwrap();
        grpc.unary(tonic::Request::new(request("s")), path, codec).await.unwrap_err();
        let after = metrics(addr).await;
        assert_series(&after, &[(&handled("other", "other", "unary", "Unimplemented"), 1.0)]);
        assert!(after.keys().all(|series| !series.contains("Invent")));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_counts_until_its_reader_has_left() {
    with_a_sale(async |process, shop| {
        let addr = process.http_addr();
        // A connection of its own, to leave by.
        let mut client = SeckillClient::new(process.channel().await);
        let request = pb::WatchStockRequest {
            activity_id: shop.key.activity_id.to_string(),
            ..Default::default()
        };
        let mut updates = client.watch_stock(request).await.unwrap().into_inner();
        updates.message().await.unwrap().expect("a snapshot");
        let canceled = of_seckill("WatchStock", "server_stream", "Canceled");
        let open = metrics(addr).await;
        assert_series(&open, &[("seckill_watch_streams", 1.0), (&canceled, 0.0)]);
        drop((updates, client));
        eventually("the stream is over", async || {
            let after = metrics(addr).await;
            (after["seckill_watch_streams"] == 0.0 && after[&canceled] == 1.0).then_some(())
        })
        .await;

        let request = pb::WatchStockRequest { activity_id: "none".into(), ..Default::default() };
        let unknown = shop.client.clone().watch_stock(request).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound);
        let refused = of_seckill("WatchStock", "server_stream", "NotFound");
        assert_series(&metrics(addr).await, &[(&refused, 1.0), (&canceled, 1.0)]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_message_of_a_stream_is_counted() {
    with_a_sale(async |process, shop| {
        let addr = process.http_addr();
        let request = |buyer: &str| pb::ReserveStreamRequest {
            request: Some(pb::ReserveRequest {
                activity_id: shop.key.activity_id.to_string(),
                sku_id: shop.key.sku_id.to_string(),
                user_id: buyer.to_owned(),
                quantity: None,
                request_id: buyer.to_owned(),
            }),
        };
        let requests: Vec<_> = ["u1", "u2", "u3", "u4", "u5"].map(request).into();
        let requests = tokio_stream::iter(requests);
        let mut answers = shop.client.clone().reserve_stream(requests).await.unwrap().into_inner();
        let mut count = 0;
        while answers.message().await.unwrap().is_some() {
            count += 1;
        }
        assert_eq!(count, 5);
        let labels = "grpc_service=\"seckill.v1.Seckill\",grpc_method=\"ReserveStream\",\
                      grpc_type=\"bidi_stream\"";
        let found = metrics(addr).await;
        assert_series(
            &found,
            &[
                (&format!("grpc_server_msg_received_total{{{labels}}}"), 5.0),
                (&format!("grpc_server_msg_sent_total{{{labels}}}"), 5.0),
                ("seckill_reserve_outcomes_total{outcome=\"reserved\"}", 2.0),
                ("seckill_reserve_outcomes_total{outcome=\"sold_out\"}", 3.0),
            ],
        );
        let lag = "seckill_grpc_thread_lag_seconds_count";
        assert!(found[lag] >= 1.0 && metrics(addr).await[lag] >= found[lag], "{found:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pipeline_and_the_offers_on_sale_are_measured() {
    with_a_sale(async |process, shop| {
        let addr = process.http_addr();
        let before = metrics(addr).await;
        for (buyer, request_id, outcome) in [
            ("u1", "r", ReserveOutcome::Reserved),
            ("u1", "r", ReserveOutcome::Reserved),
            ("u1", "again", ReserveOutcome::Duplicate),
        ] {
            assert_eq!(shop.insist(buyer, request_id).await.outcome(), outcome);
        }
        let offer = "{activity_id=\"sale\",sku_id=\"sku-1\"}";
        let found = eventually("the offer is measured", async || {
            let found = metrics(addr).await;
            let remaining = found.get(&format!("seckill_offer_remaining_units{offer}"));
            (remaining == Some(&1.0)).then_some(found)
        })
        .await;
        assert_series(
            &found,
            &[
                (&format!("seckill_offer_total_units{offer}"), 2.0),
                ("seckill_outbox_rows{state=\"pending\"}", 0.0),
                ("seckill_outbox_rows{state=\"dead\"}", 0.0),
                ("seckill_outbox_lag_seconds", 0.0),
                ("seckill_unacked_reservations", 0.0),
                ("seckill_unacked_age_seconds", 0.0),
                ("seckill_poller_rows_total{result=\"ordered\"}", 1.0),
                ("seckill_poller_batch_orders_sum", 1.0),
            ],
        );
        assert!(found["seckill_sweeper_pass_seconds_count"] >= 1.0);
        assert_seen_by(&["SeckillDuplicateJump", "SeckillNearlySoldOut"], &before, &found);

        assert_eq!(shop.insist("u2", "r").await.outcome(), ReserveOutcome::Reserved);
        assert_eq!(shop.insist("u3", "r").await.outcome(), ReserveOutcome::SoldOut);
        assert_seen_by(&["SeckillSoldOutJump"], &before, &metrics(addr).await);
    })
    .await;
}

/// A reservation stays taken and not recorded by this fault, which tells its buyer: its age shows
/// until the sweeper is there.
async fn grows_old(
    ground: &Ground<'_>,
    grace_ms: u64,
    fault: impl AsyncFnOnce(&Wire, &Shop) -> String,
) {
    let world = ground.world().await;
    let key = world.open_sale(&Sale { total: 20, ..Sale::default() }).await;
    world.close().await;
    let settings = ground.settings();
    let mut url = url::Url::parse(settings.database.url.expose()).unwrap();
    let store = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
    let wire = Wire::to(store.parse().unwrap()).await;
    url.set_port(Some(wire.addr.port())).unwrap();
    // What the sweeper does after it has settled something fails all the time.
    let database = admin(settings.database.url.expose()).await.begin().await.unwrap();
    let lock = "LOCK TABLE adjustments IN ACCESS EXCLUSIVE MODE";
    database.execute_unprepared(lock).await.unwrap();
    let serve = Serve::over(&settings)
        .with("DATABASE__URL", url)
        .with("DATABASE__LOCK_TIMEOUT_MS", 100)
        .with("SWEEPER__GRACE_MS", grace_ms)
        .with("HTTP__ADDR", "127.0.0.1:0");
    let mut process = serve.start().await;
    let addr = process.http_addr();
    let shop = Shop::new(&key, process.channel().await);
    let before = metrics(addr).await;
    assert_series(
        &before,
        &[("seckill_unacked_age_seconds", 0.0), ("seckill_unacked_reservations", 0.0)],
    );

    let begun = Instant::now();
    let buyer = fault(&wire, &shop).await;
    let found = within(Duration::from_secs(20), "its age shows", async || {
        let found = metrics(addr).await;
        (found["seckill_unacked_age_seconds"] > 0.0).then_some(found)
    })
    .await;
    assert_series(&found, &[("seckill_unacked_reservations", 1.0)]);
    assert_seen_by(&["SeckillUnackedGrowing", "SeckillUnackedOld"], &before, &found);
    let age = found["seckill_unacked_age_seconds"];
    assert!(age <= begun.elapsed().as_secs_f64() + 0.1, "{age}");

    wire.mend();
    let recorded = within(Duration::from_secs(20), "it is recorded", async || {
        let found = metrics(addr).await;
        (found["seckill_unacked_age_seconds"] == 0.0).then_some(found)
    })
    .await;
    assert_series(&recorded, &[("seckill_sweeper_settled_total", 1.0)]);
    assert!(recorded["seckill_worker_failures_total{worker=\"sweeper\"}"] >= 1.0);
    database.commit().await.unwrap();
    let answer = shop.insist(&buyer, "r").await;
    assert!(answer.replayed, "it is the same: {answer:?}");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_age_of_what_is_not_recorded_shows_until_it_is() {
    let lost_commit = async |fresh: &Fresh| {
        // Long enough to be measured before the sweeper comes.
        grows_old(&Ground::embedded(fresh), 7_000, async |wire, shop| {
            for nth in 0.. {
                let buyer = format!("u{nth}");
                // Somebody else's COMMIT may come first.
                wire.trap(AtCommit::LoseRequest, 1);
                if let Err(unknown) = shop.reserve(&buyer, "r").await {
                    assert_eq!(unknown.code(), Code::Unavailable);
                    return buyer;
                }
            }
            unreachable!("it goes on for ever")
        })
        .await;
    };
    let silent_database = async |fresh: &Fresh| {
        grows_old(&Ground::redis(fresh).await, 500, async |wire, shop| {
            wire.open_hole();
            let unknown = shop.reserve("u1", "r").await.unwrap_err();
            assert_eq!(unknown.code(), Code::Unavailable);
            "u1".to_owned()
        })
        .await;
    };
    // Each waits for seconds until the next measurement.
    tokio::join!(
        databases::run(Fresh::postgres().await, lost_commit),
        databases::run(Fresh::postgres().await, silent_database),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_ended_is_counted_though_another_one_is_in_the_way() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let hold = Some(Duration::from_secs(2));
        let key = world.open_sale(&Sale { hold, ..Sale::default() }).await;
        world.close().await;
        let serve = Serve::over(&ground.settings())
            .with("HTTP__ADDR", "127.0.0.1:0")
            .with("DATABASE__LOCK_TIMEOUT_MS", 100)
            .with("HOLDS__INTERVAL_MS", 100);
        let mut process = serve.start().await;
        let addr = process.http_addr();
        let shop = Shop::new(&key, process.channel().await);
        assert_series(&metrics(addr).await, &[("seckill_holds_expired_total", 0.0)]);
        shop.insist("u1", "r").await;
        let other = admin(&fresh.settings().url).await.begin().await.unwrap();
        let lock = "SELECT id FROM outbox WHERE user_id = 'u1' FOR UPDATE";
        other.execute_unprepared(lock).await.unwrap();
        shop.insist("u2", "r").await;
        let becomes = async |count: f64| {
            eventually("so many are counted", async || {
                let found = metrics(addr).await;
                (found["seckill_holds_expired_total"] == count).then_some(())
            })
            .await;
        };
        becomes(1.0).await;
        eventually("a pass failed", async || {
            let failures = "seckill_worker_failures_total{worker=\"expiry\"}";
            (metrics(addr).await[failures] >= 1.0).then_some(())
        })
        .await;
        other.commit().await.unwrap();
        becomes(2.0).await;
        process.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_nobody_warmed_up_shows_before_its_start_and_after() {
    with_a_sale(async |process, _| {
        let addr = process.http_addr();
        let (now, minutes) = (SystemTime::now(), |count: u64| Duration::from_secs(60 * count));
        let mut admin = SeckillAdminClient::new(process.channel().await);
        let (soon, begun) = ("seckill_activities_starting_cold", "seckill_activities_not_warmed");
        let before = metrics(addr).await;
        assert_series(&before, &[(soon, 0.0), (begun, 0.0)]);
        let shows = async |expected: [f64; 2]| {
            eventually("the activities are counted", async || {
                Some(metrics(addr).await).filter(|found| [found[soon], found[begun]] == expected)
            })
            .await
        };
        for (activity_id, start_time, cold) in
            [("soon", now + minutes(10), [1.0, 0.0]), ("begun", now - minutes(1), [1.0, 1.0])]
        {
            let offer = pb::OfferSpec {
                sku_id: "sku-1".to_owned(),
                title: "A thing".to_owned(),
                price_minor: 1_999,
                currency_code: "CNY".to_owned(),
                total: 5,
                ..Default::default()
            };
            let activity_id = activity_id.to_owned();
            let spec = pb::ActivitySpec {
                activity_id: activity_id.clone(),
                title: "A sale".to_owned(),
                start_time: Some(start_time.into()),
                end_time: Some((now + minutes(20)).into()),
                retention: None,
                offers: vec![offer],
            };
            admin.create_activity(pb::CreateActivityRequest { spec: Some(spec) }).await.unwrap();
            let approve = pb::ApproveActivityRequest { activity_id, reason: "test".to_owned() };
            admin.approve_activity(approve).await.unwrap();
            shows(cold).await;
        }
        let cold = metrics(addr).await;
        assert_seen_by(&["SeckillStartsCold", "SeckillNotWarmed"], &before, &cold);
        let mut seckill = SeckillClient::new(process.channel().await);
        let request = pb::ReserveRequest {
            activity_id: "begun".to_owned(),
            sku_id: "sku-1".to_owned(),
            user_id: "u1".to_owned(),
            ..Default::default()
        };
        let answer = seckill.reserve(request).await.unwrap().into_inner();
        assert_eq!(answer.outcome(), ReserveOutcome::NotWarmed);
        assert_seen_by(&["SeckillNotWarmedSeen"], &cold, &metrics(addr).await);
        for activity_id in ["soon", "begun"].map(str::to_owned) {
            seckill.warmup(pb::WarmupRequest { activity_id }).await.unwrap();
        }
        shows([0.0, 0.0]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_certificate_in_use_shows() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new("servers");
        let (cert, key) = authority.for_server().write(folder.path());
        let serve = Serve::over(&Ground::embedded(fresh).settings())
            .with("HTTP__ADDR", "127.0.0.1:0")
            .with("TLS__CERT_FILE", cert.display())
            .with("TLS__KEY_FILE", key.display());
        let mut process = serve.start().await;
        let addr = process.http_addr();
        let end_in = async |days: f64| {
            let what = format!("it ends in {days} days");
            eventually(&what, async || {
                let found = metrics(addr).await;
                let end = found["seckill_tls_certificate_expiry_timestamp_seconds"];
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
                let left = (end - now) / 86_400.0;
                (days - 1.0..=days).contains(&left).then_some(found)
            })
            .await
        };
        let before = end_in(30.0).await;
        let now = SystemTime::now();
        let validity = Some((now - DAY, now + 5 * DAY));
        let wanted = Wanted { dns: &["localhost"], validity, ..Wanted::default() };
        authority.issue(&wanted).write(folder.path());
        process.signal("HUP");
        let after = end_in(5.0).await;
        assert_seen_by(&["SeckillCertificateExpires"], &before, &after);
        process.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_away_is_two_lines_in_the_log_and_not_hundreds() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let redis = RedisServer::start_with_aof().await;
        let wire = Wire::to(([127, 0, 0, 1], redis.port()).into()).await;
        let serve = Serve::over(&Ground::embedded(fresh).settings())
            .with("ENGINE__URL", format!("redis://{}", wire.addr))
            .with("HTTP__ADDR", "127.0.0.1:0");
        let mut process = serve.start().await;
        wire.cut();
        process.logged("no connection").await;
        // It is dialled again and again, and nobody hears of that.
        let dialled = wire.refused();
        eventually("it is dialled twenty times", async || {
            (wire.refused() >= dialled + 20).then_some(())
        })
        .await;
        wire.mend();
        process.logged("connected again").await;
        process.stop().await;
        let log = process.log();
        let count = |text: &str| log.lines().filter(|line| line.contains(text)).count();
        assert_eq!((count("no connection"), count("connected again")), (1, 1), "{log}");
        let end = log.lines().find(|line| line.contains("connected again")).unwrap();
        let end: Value = serde_json::from_str(end).unwrap();
        assert!(end["failed"].as_u64().unwrap() >= 10, "{end}");
    })
    .await;
}

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

/// Runs promtool beside the rules, with this to read.
fn promtool(arguments: &[&str], input: &str) {
    let mut promtool = Command::new("promtool")
        .args(arguments)
        .current_dir(deploy("prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is installed: run scripts/install-services");
    promtool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {arguments:?}:\n{text}");
}

#[test]
fn the_rules_are_right_and_pass_their_tests() {
    promtool(&["check", "rules", "rules.yml"], "");
    promtool(&["test", "rules", "rules_test.yml"], "");
    let rules = yaml("prometheus/rules.yml");
    let tests = yaml("prometheus/rules_test.yml");
    let tests: Vec<&Value> = tests["tests"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|test| test["alert_rule_test"].as_array().unwrap())
        .collect();
    for rule in alerts(&rules) {
        for fires in [true, false] {
            let shows = |test: &&&Value| {
                let expected = test["exp_alerts"].as_array().unwrap();
                test["alertname"] == rule["alert"] && expected.is_empty() != fires
            };
            assert_eq!(tests.iter().filter(shows).count(), 1, "{} fires: {fires}", rule["alert"]);
        }
    }
}

fn yaml(path: &str) -> Value {
    serde_yaml_ng::from_str(&fs::read_to_string(deploy(path)).unwrap()).unwrap()
}

fn alerts(rules: &Value) -> Vec<&Value> {
    let groups = rules["groups"].as_array().unwrap();
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
    rules.filter(|rule| rule.get("alert").is_some()).collect()
}

#[test]
fn every_alert_has_a_place_in_the_runbook() {
    let runbook = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations.md");
    let runbook = fs::read_to_string(runbook).unwrap();
    let mut anchors = BTreeSet::new();
    let rules = yaml("prometheus/rules.yml");
    for rule in alerts(&rules) {
        let name = rule["alert"].as_str().unwrap();
        assert!(["page", "ticket"].contains(&rule["labels"]["severity"].as_str().unwrap()));
        let notes = &rule["annotations"];
        assert!(notes["summary"].is_string() && notes["description"].is_string(), "{name}");
        let anchor = notes["runbook"].as_str().unwrap().strip_prefix("docs/operations.md#");
        let anchor = anchor.unwrap_or_else(|| panic!("{name} has no anchor"));
        assert_eq!(anchor, name.to_lowercase());
        assert!(runbook.contains(&format!("\n### {name}\n")), "the runbook has no {name}");
        anchors.insert(name);
    }
    let headings = runbook.lines().filter_map(|line| line.strip_prefix("### Seckill"));
    for heading in headings {
        let name = format!("Seckill{heading}");
        assert!(anchors.contains(name.as_str()), "{name} is no alert");
    }
}

/// The names in an expression of PromQL that are metrics of a server.
fn named(expression: &str) -> BTreeSet<String> {
    expression
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| {
            ["seckill_", "grpc_server_", "process_"].iter().any(|first| word.starts_with(first))
        })
        .map(str::to_owned)
        .collect()
}

/// Every string below `value` that stands under one of these keys.
fn strings<'a>(value: &'a Value, keys: &[&str], found: &mut Vec<&'a str>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                match value.as_str() {
                    Some(text) if keys.contains(&key.as_str()) => found.push(text),
                    _ => strings(value, keys, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| strings(value, keys, found)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_and_dashboard_ask_for_what_a_server_shows() {
    with_a_sale(async |process, shop| {
        let addr = process.http_addr();
        shop.insist("u1", "r").await;
        let shown: BTreeSet<String> = eventually("the offer is measured", async || {
            let shown = metrics(addr).await;
            let names = shown.keys().map(|series| series.split('{').next().unwrap().to_owned());
            let names: BTreeSet<String> = names.collect();
            names.contains("seckill_offer_remaining_units").then_some(names)
        })
        .await;
        for family in FAMILIES {
            let name = match family.kind {
                Kind::Histogram(_) => format!("{}_bucket", family.name),
                Kind::Counter | Kind::Gauge => family.name.to_owned(),
            };
            assert!(shown.contains(&name), "{name} is not shown");
        }
        // Names and types by the conventions of Prometheus.
        promtool(&["check", "metrics"], &get(addr, "/metrics").await.body);
        let (rules, dashboard) = (yaml("prometheus/rules.yml"), dashboard());
        let mut expressions = Vec::new();
        strings(&rules, &["expr"], &mut expressions);
        let of_rules = expressions.len();
        strings(&dashboard, &["expr", "query"], &mut expressions);
        assert!(of_rules >= 12 && expressions.len() - of_rules >= 20);
        let mut asked = 0;
        for expression in expressions {
            for name in named(expression) {
                assert!(shown.contains(&name), "{name} is asked for: {expression}");
                asked += 1;
            }
        }
        assert!(asked >= 40, "the expressions are not what this test reads");
    })
    .await;
}

fn dashboard() -> Value {
    serde_json::from_str(&fs::read_to_string(deploy("grafana/seckill.json")).unwrap()).unwrap()
}

#[test]
fn the_dashboard_is_what_grafana_imports() {
    let dashboard = dashboard();
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 39);
    assert_eq!(dashboard["uid"], "seckill");
    assert!(dashboard.get("id").is_none_or(Value::is_null), "an id belongs to one Grafana");
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!(variables[0]["name"], "datasource");
    assert_eq!(
        (&variables[0]["type"], &variables[0]["query"]),
        (&"datasource".into(), &"prometheus".into())
    );
    let (mut ids, mut titles) = (BTreeSet::new(), BTreeSet::new());
    let mut taken: BTreeSet<(u64, u64)> = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(titles.insert(title), "{title} is there twice");
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title} has the id of another panel");
        let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                assert!(x < 24 && taken.insert((x, y)), "{title} lies over another panel");
            }
        }
        if panel["type"] == "row" {
            continue;
        }
        let uid = "${datasource}";
        assert_eq!(panel["datasource"]["uid"], uid, "{title}");
        assert!(panel["description"].as_str().is_some_and(|text| text.len() > 10), "{title}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            assert_eq!(target["datasource"]["uid"], uid, "{title}");
            assert!(target["refId"].is_string() && target["expr"].is_string(), "{title}");
        }
    }
    for row in ["Traffic", "Outcomes", "Latency", "Pipeline", "Engine", "Database", "Process"] {
        assert!(titles.contains(row), "there is no row {row}");
    }
}
