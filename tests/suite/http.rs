//! The HTTP port: metrics that parse and tell the truth, and probes that follow the stores.

use std::{net::SocketAddr, time::Duration};

use sea_orm::ConnectionTrait as _;
use seckill::{
    api::pb::{ReconcileRequest, seckill_admin_client::SeckillAdminClient},
    config::{OptionalAddr, SecretUrl, Settings},
    server::{Server, StartError},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use url::Url;

use crate::support::{
    alerts::assert_seen_by,
    calls::Shop,
    databases::{self, Fresh},
    eventually,
    process::Serve,
    redis_server::RedisServer,
    scrape::{ask, get, metrics, send},
    wire::Wire,
    world::{Ground, Sale},
};

fn free() -> OptionalAddr {
    OptionalAddr(Some(([127, 0, 0, 1], 0).into()))
}

/// A server with both ports, in memory.
async fn in_memory() -> Server {
    let mut settings = Settings::default();
    settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
    settings.http.addr = free();
    settings.database.url = SecretUrl::new("sqlite::memory:");
    Server::start(&settings).await.unwrap()
}

fn http(server: &Server) -> SocketAddr {
    server.http_addr().unwrap()
}

async fn readiness(addr: SocketAddr) -> (u16, String) {
    let answer = get(addr, "/readyz?verbose").await;
    (answer.code, answer.body)
}

async fn becomes(addr: SocketAddr, code: u16, text: &str) {
    let what = format!("readiness is {code} {text:?}");
    eventually(&what, async || (readiness(addr).await == (code, text.to_owned())).then_some(()))
        .await;
    assert_eq!(get(addr, "/readyz").await.code, code);
    assert_eq!(get(addr, "/livez").await.code, 200, "the process runs all the same");
}

const READY: &str = "engine: there\ndatabase: there\nshutting down: no\nready\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_went_wrong_shows_in_the_metrics() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::redis(fresh).await;
        let redis = ground.redis.as_ref().unwrap();
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let well = world.plan_sale(&Sale { activity: "well", ..Sale::default() }).await;
        world.win(&key, "unlucky", "r").await;
        let poison = "UPDATE outbox SET state = 'dead', last_error = 'in the way', settle_time = 1";
        for broken in [poison, "UPDATE offers SET sold = 1 WHERE activity_id = 'sale'"] {
            world.parts.database.writer().execute_unprepared(broken).await.unwrap();
        }
        world.close().await;

        let serve = Serve::over(&ground.settings()).with("HTTP__ADDR", "127.0.0.1:0");
        let mut process = serve.start().await;
        let addr = process.http_addr();
        let shop = Shop::new(&key, process.channel().await);
        shop.insist("u1", "r").await;
        let before = metrics(addr).await;
        let lost = "seckill_engine_rebuilds_total{reason=\"missing\"}";
        let reserved = "seckill_engine_calls_total{script=\"reserve\",result=\"ok\"}";
        let version = env!("CARGO_PKG_VERSION");
        let info = format!(
            "seckill_build_info{{version=\"{version}\",engine=\"redis\",database=\"sqlite\"}}"
        );
        for (series, value) in [
            (lost, 0.0),
            (reserved, 1.0),
            (info.as_str(), 1.0),
            ("seckill_engine_up", 1.0),
            ("seckill_database_up", 1.0),
            ("seckill_engine_frozen_offers", 0.0),
            ("seckill_engine_rebuild_seconds_count", 0.0),
            ("seckill_engine_call_seconds_count{script=\"reserve\"}", 1.0),
        ] {
            assert_eq!(before.get(series), Some(&value), "{series} in {before:?}");
        }

        redis.command::<String>(&["FLUSHALL"]).await;
        shop.insist("u2", "r").await;
        let after = eventually("no offer is frozen", async || {
            let after = metrics(addr).await;
            (after["seckill_engine_frozen_offers"] == 0.0).then_some(after)
        })
        .await;
        assert_eq!(after[lost], 1.0, "{after:?}");
        assert_eq!(after["seckill_engine_rebuild_seconds_count"], 1.0);
        assert!(after["seckill_engine_rebuild_seconds_sum"] > 0.0);
        assert!(after[reserved] > before[reserved]);
        let dead = eventually("the dead letter", async || {
            Some(metrics(addr).await).filter(|found| found["seckill_dead_letters"] == 1.0)
        })
        .await;
        assert_seen_by(&["SeckillDeadLetters"], &before, &dead);

        let before = metrics(addr).await;
        let mut admin = SeckillAdminClient::new(process.channel().await);
        // Of another activity there is nothing to tell; that says nothing of this one.
        for activity_id in [&key.activity_id, &well.activity_id].map(ToString::to_string) {
            admin.reconcile(ReconcileRequest { activity_id, ..Default::default() }).await.unwrap();
        }
        let compared = metrics(addr).await;
        for (kind, differences) in [("counter_drift", 1.0), ("oversold", 0.0)] {
            let series = format!("seckill_reconcile_differences{{kind=\"{kind}\"}}");
            assert_eq!(compared.get(&series), Some(&differences), "{series} in {compared:?}");
        }
        assert_seen_by(&["SeckillContradiction"], &before, &compared);
        for repair in [true, false] {
            let activity_id = key.activity_id.to_string();
            admin.reconcile(ReconcileRequest { activity_id, repair }).await.unwrap();
        }
        let drift = "seckill_reconcile_differences{kind=\"counter_drift\"}";
        assert_eq!(metrics(addr).await[drift], 0.0, "it was repaired and compared again");
        process.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_engine_both_ways() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let redis = RedisServer::start_with_aof().await;
        let wire = Wire::to(([127, 0, 0, 1], redis.port()).into()).await;
        let mut settings = Ground::embedded(fresh).settings();
        settings.http.addr = free();
        settings.engine.url = SecretUrl::new(format!("redis://{}", wire.addr));
        let server = Server::start(&settings).await.unwrap();
        becomes(http(&server), 200, READY).await;
        let before = metrics(http(&server)).await;
        wire.cut();
        let away = "engine: away\ndatabase: there\nshutting down: no\nnot ready\n";
        becomes(http(&server), 503, away).await;
        let after = metrics(http(&server)).await;
        assert_eq!(after["seckill_engine_up"], 0.0);
        assert_seen_by(&["SeckillEngineDown"], &before, &after);
        wire.mend();
        becomes(http(&server), 200, READY).await;
        assert_eq!(metrics(http(&server)).await["seckill_engine_up"], 1.0);
        server.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_database_both_ways() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let redis = RedisServer::start().await;
        let mut settings = Ground::embedded(fresh).settings();
        let mut url = Url::parse(&fresh.settings().url).unwrap();
        let store = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
        let wire = Wire::to(store.parse().unwrap()).await;
        url.set_port(Some(wire.addr.port())).unwrap();
        settings.database.url = SecretUrl::new(url);
        settings.engine.url = SecretUrl::new(redis.url());
        settings.http.addr = free();
        let server = Server::start(&settings).await.unwrap();
        becomes(http(&server), 200, READY).await;
        let before = metrics(http(&server)).await;
        wire.cut();
        let away = "engine: there\ndatabase: away\nshutting down: no\nnot ready\n";
        becomes(http(&server), 503, away).await;
        let after = metrics(http(&server)).await;
        assert_eq!(after["seckill_database_up"], 0.0);
        assert_seen_by(&["SeckillDatabaseDown"], &before, &after);
        wire.mend();
        becomes(http(&server), 200, READY).await;
        server.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_server_that_stops_is_not_ready_and_alive_until_the_end() {
    let server = in_memory().await;
    let addr = http(&server);
    server.parts.shutdown.cancel();
    let stopping = "engine: there\ndatabase: there\nshutting down: yes\nnot ready\n";
    assert_eq!(readiness(addr).await, (503, stopping.to_owned()));
    assert_eq!(get(addr, "/livez").await.code, 200);
    assert_eq!(metrics(addr).await["seckill_engine_up"], 1.0);
    // Neither of them may hold up the stop.
    let silent = TcpStream::connect(addr).await.unwrap();
    let mut idle = TcpStream::connect(addr).await.unwrap();
    idle.write_all(b"GET /livez HTTP/1.1\r\nhost: seckill\r\n\r\n").await.unwrap();
    idle.readable().await.unwrap();
    timeout(Duration::from_secs(5), server.stop()).await.expect("it stops");
    assert!(TcpStream::connect(addr).await.is_err(), "the port is closed");
    drop((silent, idle));
}

#[tokio::test]
async fn a_port_in_use_fails_the_start_and_leaves_nothing_behind() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = taken.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
    settings.http.addr = OptionalAddr(Some(addr));
    let path = folder.path().join("seckill.db");
    settings.database.url = SecretUrl::new(format!("sqlite://{}", path.display()));
    let error = Server::start(&settings).await.unwrap_err();
    assert!(matches!(error, StartError::Bind { key: "http.addr", .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("{addr} can't be listened on")), "{text}");
    assert!(text.ends_with("set http.addr to another address"), "{text}");

    settings.http.addr = OptionalAddr(None);
    let server = Server::start(&settings).await.unwrap();
    assert_eq!(server.http_addr(), None);
    server.stop().await;
}

#[tokio::test]
async fn two_servers_in_one_process_show_what_is_their_own() {
    let (first, second) = (in_memory().await, in_memory().await);
    // Nobody probes any more what was told to stop.
    second.parts.shutdown.cancel();
    second.parts.tasks.close();
    second.parts.tasks.wait().await;
    second.parts.engine_circuit.trip("test");
    for _ in 0..3 {
        assert_eq!(metrics(http(&first)).await["seckill_engine_up"], 1.0);
        assert_eq!(metrics(http(&second)).await["seckill_engine_up"], 0.0);
    }
    assert_eq!(get(http(&first), "/readyz").await.code, 200);
    assert_eq!(get(http(&second), "/readyz").await.code, 503);
    second.stop().await;
    assert_eq!(get(http(&first), "/readyz").await.code, 200);
    first.stop().await;
}

#[tokio::test]
async fn what_is_not_there_is_refused_and_what_is_sent_is_bounded() {
    let server = in_memory().await;
    let addr = http(&server);
    let mut silent = TcpStream::connect(addr).await.unwrap();
    for path in ["/dashboard", "/metrics/", "/healthz", "/readyz/engine"] {
        assert_eq!(get(addr, path).await.code, 404, "{path}");
    }
    for path in ["/metrics", "/livez", "/readyz"] {
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            assert_eq!(ask(addr, method, path).await.code, 405, "{method} {path}");
        }
        let answer = ask(addr, "HEAD", path).await;
        assert_eq!((answer.code, answer.body.as_str()), (200, ""), "{path}");
    }
    let long = format!("GET /livez HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(20_000));
    assert_eq!(send(addr, &long).await.code, 431);
    // Nobody reads a body, so its sender is not waited for.
    let body = "POST /livez HTTP/1.1\r\nhost: seckill\r\ncontent-length: 1000000000\r\n\r\nx";
    assert_eq!(send(addr, body).await.code, 405);
    let read = timeout(Duration::from_secs(10), silent.read(&mut [0])).await;
    assert_eq!(read.expect("a silent connection is closed").unwrap(), 0);
    server.stop().await;
}
