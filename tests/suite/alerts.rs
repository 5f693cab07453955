//! What an alert reads moves when that happens which it is for: real servers over real stores, and
//! their metrics before and after.

use std::{fs, path::Path, time::Duration};

use sea_orm::{ConnectionTrait as _, DatabaseTransaction, TransactionTrait as _};
use seckill::{
    api::pb::{
        ReconcileRequest, ReserveOutcome, ReserveResponse, seckill_admin_client::SeckillAdminClient,
    },
    domain::OfferKey,
    engine::keys,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::support::{
    alerts::{alerts, assert_seen_by, reads_metrics},
    calls::Shop,
    databases::{self, Fresh, admin},
    process::{Process, Serve},
    redis_server::RedisServer,
    scrape::{Series, metrics},
    within,
    world::{Ground, Sale},
};

/// What is measured now and then is there after this.
const MEASURED: Duration = Duration::from_secs(20);

/// A server that sells twenty units, and the stores that it stands on.
struct Stand<'a> {
    process: Process,
    shop: Shop,
    redis: &'a RedisServer,
    fresh: &'a Fresh,
}

impl Stand<'_> {
    async fn metrics(&self) -> Series {
        metrics(self.process.http_addr()).await
    }

    /// Waits until the metrics are so.
    async fn shows(&self, what: &str, is_so: impl Fn(&Series) -> bool) -> Series {
        within(MEASURED, what, async || Some(self.metrics().await).filter(&is_so)).await
    }

    /// Nobody else writes to this table until the answer is committed.
    async fn hold(&self, table: &str) -> DatabaseTransaction {
        let holding = admin(&self.fresh.settings().url).await.begin().await.unwrap();
        let lock = format!("LOCK TABLE {table} IN EXCLUSIVE MODE");
        holding.execute_unprepared(&lock).await.unwrap();
        holding
    }

    /// Somebody else's list is where the server has this lock.
    async fn overwrite_lock(&self, name: &str) {
        let write = "redis.call('DEL', KEYS[1]) return redis.call('LPUSH', KEYS[1], 'x')";
        let key = &keys::lock(name)[0];
        assert_eq!(self.redis.command::<u64>(&["EVAL", write, "1", key]).await, 1);
    }
}

async fn on_stores(change: impl FnOnce(Serve) -> Serve, run: impl AsyncFnOnce(&Stand<'_>)) {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 20, ..Sale::default() }).await;
        world.close().await;
        let serve = Serve::over(&ground.settings()).with("HTTP__ADDR", "127.0.0.1:0");
        let process = change(serve).start().await;
        let shop = Shop::new(&key, process.channel().await);
        let redis = ground.redis.as_ref().unwrap();
        let mut stand = Stand { process, shop, redis, fresh };
        run(&stand).await;
        stand.process.stop().await;
        let world = ground.world().await;
        let books = world.books(&key).await;
        assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
        world.close().await;
    })
    .await;
}

/// How many wait in this queue, and how many have left it and are not done.
fn queue(found: &Series, name: &str) -> (f64, f64) {
    let of = |state: &str| found[&format!("{name}{{state=\"{state}\"}}")];
    (of("waiting"), of("under_way"))
}

const ENGINE: &str = "seckill_engine_requests";
const WRITER: &str = "seckill_writer_rows";

/// Six buyers come to a store that does not answer: two calls are sent to it, and four wait in front
/// of it.
async fn queue_up(
    stand: &Stand<'_>,
    full: &str,
    empty: &str,
    names: &'static str,
) -> JoinSet<ReserveResponse> {
    assert_eq!(queue(&stand.metrics().await, full), (0.0, 0.0));
    let mut calls = JoinSet::new();
    for (come, waiting, under_way) in [(0..1, 0.0, 1.0), (1..2, 0.0, 2.0), (2..6, 4.0, 2.0)] {
        for nth in come {
            let shop = stand.shop.clone();
            calls.spawn(async move { shop.insist(&format!("{names}-{nth}"), "r").await });
        }
        let what = format!("{waiting} wait in {full} and {under_way} are under way");
        let found = stand.shows(&what, |found| queue(found, full) == (waiting, under_way)).await;
        assert_eq!(queue(&found, empty), (0.0, 0.0), "the other store is not the limit");
        assert_eq!(found["seckill_reserve_room_taken"], waiting + under_way);
    }
    calls
}

async fn all_reserved(stand: &Stand<'_>, calls: JoinSet<ReserveResponse>) -> Series {
    for answer in calls.join_all().await {
        assert_eq!(answer.outcome(), ReserveOutcome::Reserved, "{answer:?}");
    }
    let found = stand.metrics().await;
    assert_eq!((queue(&found, ENGINE), queue(&found, WRITER)), ((0.0, 0.0), (0.0, 0.0)));
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_that_is_the_limit_has_the_queue_in_front_of_it() {
    let patient = |serve: Serve| {
        serve.with("ENGINE__RESPONSE_TIMEOUT_MS", 10_000).with("SWEEPER__GRACE_MS", 20_000)
    };
    on_stores(patient, async |stand| {
        stand.redis.signal("STOP");
        let calls = queue_up(stand, ENGINE, WRITER, "engine").await;
        stand.redis.signal("CONT");
        let before = all_reserved(stand, calls).await;

        let outbox = stand.hold("outbox").await;
        let calls = queue_up(stand, WRITER, ENGINE, "database").await;
        let waits = |found: &Series| found["seckill_writer_longest_wait_seconds"] > 1.0;
        stand.shows("they wait for too long", waits).await;
        let refused = stand.shop.reserve("late", "r").await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
        outbox.commit().await.unwrap();
        let after = all_reserved(stand, calls).await;
        assert_seen_by(&["SeckillOverload", "SeckillSlow"], &before, &after);
        let slow = "grpc_server_handling_seconds_bucket{grpc_service=\"seckill.v1.Seckill\",\
                    grpc_method=\"Reserve\",grpc_type=\"unary\",le=";
        let rose = |bound: &str| {
            let bucket = format!("{slow}\"{bound}\"}}");
            after[&bucket] - before[&bucket]
        };
        assert_eq!(rose("+Inf") - rose("0.5"), 6.0, "all but the refusal");
        assert_eq!(after["seckill_reserve_errors_total{reason=\"overloaded\"}"], 1.0);
        let late = stand.shop.insist("late", "r").await;
        assert!(!late.replayed && late.outcome() == ReserveOutcome::Reserved, "{late:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_that_are_held_up_show_until_they_are_made() {
    let patient = |serve: Serve| {
        serve
            .with("DATABASE__LOCK_TIMEOUT_MS", 30_000)
            .with("DATABASE__STATEMENT_TIMEOUT_MS", 40_000)
    };
    on_stores(patient, async |stand| {
        let (pending, lag) =
            ("seckill_outbox_rows{state=\"pending\"}", "seckill_outbox_lag_seconds");
        let before = stand.metrics().await;
        assert_eq!((before[pending], before[lag]), (0.0, 0.0));
        let orders = stand.hold("orders").await;
        assert_eq!(stand.shop.insist("u1", "r").await.outcome(), ReserveOutcome::Reserved);
        let held_up =
            stand.shows("it waits", |found| found[pending] == 1.0 && found[lag] > 0.0).await;
        assert_seen_by(&["SeckillOutboxBacklog", "SeckillOutboxLag"], &before, &held_up);

        orders.commit().await.unwrap();
        let ordered = "seckill_poller_rows_total{result=\"ordered\"}";
        let after = stand.shows("it is an order", |found| found[ordered] == 1.0).await;
        assert_seen_by(&["SeckillPollerSlow"], &before, &after);
        let batches =
            |bound: &str| after[&format!("seckill_poller_batch_seconds_bucket{{le=\"{bound}\"}}")];
        assert_eq!((batches("1"), batches("+Inf")), (0.0, 1.0), "it took more than a second");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_somebody_else_writes_to_shows() {
    let quick = |serve: Serve| serve.with("SEGMENTS__BALANCE_MS", 50);
    on_stores(quick, async |stand| {
        for buyer in ["u1", "u2", "u3"] {
            stand.shop.insist(buyer, "r").await;
        }
        let frozen = "seckill_engine_frozen_offers";
        let went_back = "seckill_engine_divergence_total{reason=\"went_back\"}";
        let before = stand.metrics().await;
        assert_eq!((before[frozen], before[went_back]), (0.0, 0.0));
        // It can't be rebuilt meanwhile.
        let offers = stand.hold("offers").await;
        let meta = &keys::segment(&stand.shop.key, 0)[5];
        stand.redis.command::<u64>(&["HSET", meta, "revision", "0"]).await;
        let refused = stand.shop.reserve("u4", "r").await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
        let during = stand.shows("it is frozen", |found| found[frozen] == 1.0).await;
        assert!(during[went_back] >= 1.0, "{during:?}");
        assert_seen_by(
            &["SeckillDivergence", "SeckillFrozenOffers", "SeckillErrors"],
            &before,
            &during,
        );
        offers.commit().await.unwrap();
        assert_eq!(stand.shop.insist("u4", "r").await.outcome(), ReserveOutcome::Reserved);
        let before = stand.shows("it sells again", |found| found[frozen] == 0.0).await;

        let OfferKey { activity_id, .. } = &stand.shop.key;
        for lock in ["balance", &format!("reconcile:{activity_id}")] {
            stand.overwrite_lock(lock).await;
        }
        let mut client = SeckillAdminClient::new(stand.process.channel().await);
        let activity_id = activity_id.to_string();
        let request = ReconcileRequest { activity_id, repair: true };
        let fault = client.reconcile(request).await.unwrap_err();
        assert_eq!(fault.code(), Code::Internal, "{fault:?}");
        let failures = "seckill_worker_failures_total{worker=\"balance\"}";
        assert_eq!(before[failures], 0.0);
        let after = stand.shows("it fails time and again", |found| found[failures] >= 2.0).await;
        assert_seen_by(&["SeckillInternalErrors", "SeckillWorkerFailing"], &before, &after);
    })
    .await;
}

/// The alerts whose metrics this code asserts to be moved.
fn seen_in(code: &str) -> Vec<String> {
    let code: String = code.lines().map(|line| line.split("//").next().unwrap()).collect();
    let calls = code.split("assert_seen_by(").skip(1);
    let words =
        calls.flat_map(|call| call.split(';').next().unwrap().split('"').skip(1).step_by(2));
    words.map(str::to_owned).collect()
}

#[test]
fn every_alert_reads_what_a_test_moves() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite");
    let mut seen = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            seen.extend(seen_in(&fs::read_to_string(path).unwrap()));
        }
    }
    let rules = alerts();
    assert!(rules.len() > 20, "the rules are not what this test reads");
    for (alert, expression) in rules {
        if reads_metrics(&expression) {
            assert!(seen.contains(&alert), "no test moves what {alert} reads: {expression}");
        }
    }
}
