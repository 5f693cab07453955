//! How often one may ask, and what is refused of those who ask too often: nothing reaches the stock.

use std::time::{Duration, Instant};

use seckill::{
    api::pb::{self, seckill_client::SeckillClient},
    config::Settings,
    domain::{ReserveOutcome, TimeMs},
    engine::{
        batcher::Caller,
        scripts::{Attempts, SegmentScripts, Take, Taken},
    },
    error::Error,
    server::Server,
};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::support::{
    eventually,
    redis_server::RedisServer,
    world::{Ground, Sale, World, on_every_ground, request},
};

const WINDOW: Duration = Duration::from_millis(400);

/// A server that lets a buyer try three times in a window.
async fn limited(ground: &Ground<'_>) -> World {
    let mut settings = ground.settings();
    settings.limits.user_attempts = 3;
    settings.limits.user_window_ms = u64::try_from(WINDOW.as_millis()).unwrap();
    ground.world_with(settings).await
}

fn wait_of(outcome: Result<ReserveOutcome, Error>) -> Option<Duration> {
    match outcome {
        Ok(_) => None,
        Err(Error::RateLimited { scope: "user", wait }) => Some(wait),
        Err(other) => panic!("{other:?}"),
    }
}

on_every_ground! {
    async fn attempts_count_over_all_servers_and_change_nothing(ground: &Ground<'_>) {
        let world = limited(ground).await;
        let key = world.open_sale(&Sale { total: 1, ..Sale::default() }).await;
        let (other, _) = world.beside().await;
        let held = world.win(&key, "u1", "r1").await;
        world.sweep().await;
        let before = world.levels(&key).await;
        // Where four attempts take longer than the window, somebody else makes four.
        let mut comers = 0;
        let (buyer, wait) = eventually("the fourth is refused", async || {
            comers += 1;
            let buyer = format!("comer-{comers}");
            for (server, request_id) in [(&world, "r1"), (&other, "r2"), (&world, "r3")] {
                let outcome = server.reserve(&key, &buyer, request_id).await;
                assert_eq!(outcome.unwrap(), ReserveOutcome::SoldOut);
            }
            let wait = wait_of(other.reserve(&key, &buyer, "r4").await)?;
            Some((buyer, wait))
        })
        .await;
        assert!(wait <= WINDOW, "{wait:?}");
        assert_eq!(world.levels(&key).await, before);
        // Nobody else is concerned, and a winner always hears that he won.
        for _ in 0..5 {
            let again = world.win(&key, "u1", "r1").await;
            assert_eq!(again.reservation_id, held.reservation_id);
        }
        assert_eq!(world.reserve(&key, "u3", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        eventually("the window is over", async || {
            wait_of(world.reserve(&key, &buyer, "r5").await).is_none().then_some(())
        })
        .await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_batch_with_one_who_asks_too_often_serves_the_others(ground: &Ground<'_>) {
        let world = limited(ground).await;
        let key = world.open_sale(&Sale { total: 10, max_orders: 1, ..Sale::default() }).await;
        let offer = world.offer(&key).await;
        let keys = seckill::engine::keys::segment(&key, 0);
        let attempts = Attempts { most: 1, window: Duration::from_secs(60) };
        let scripts = SegmentScripts::new(world.parts.engine.clone(), keys, 1);
        let scripts = scripts.limited(Some(attempts));
        let take = |buyer: &str, id: &str| {
            let request = request(&key, buyer, id, 1);
            Take {
                reservation_id: seckill::domain::name_reservation(
                    &key, &request.buyer, request.request_id.as_ref(),
                ),
                order_no: seckill::domain::new_order_no(),
                buyer: request.buyer,
                quantity: 1,
                again: false,
            }
        };
        let takes = [take("u1", "r1"), take("u1", "r2"), take("u2", "r1"), take("u1", "r1")];
        let reserved = scripts.reserve(offer.epoch(), TimeMs::now(), takes.iter()).await;
        let reserved = reserved.unwrap().unwrap();
        assert!(
            matches!(
                reserved.answers[..],
                [
                    Taken::Taken { .. },
                    Taken::RateLimited { .. },
                    Taken::Taken { .. },
                    Taken::Replayed { .. },
                ]
            ),
            "{reserved:?}"
        );
        assert_eq!(reserved.stock, 8);
        world.assert_balanced(&key, 2).await;
    }
}

#[tokio::test]
async fn counting_attempts_never_outlives_its_window() {
    let redis = RedisServer::start().await;
    let fresh = crate::support::databases::Fresh::sqlite().await;
    let ground = Ground { database: &fresh, redis: Some(redis) };
    let world = limited(&ground).await;
    let key = world.open_sale(&Sale::default()).await;
    for buyer in 0..20 {
        world.win(&key, &format!("u{}", buyer % 10), "r").await;
    }
    let redis = ground.redis.as_ref().unwrap();
    let counters = eventually("attempts are counted", async || {
        world.win(&key, "u0", "r").await;
        let counters: Vec<String> = redis.command(&["KEYS", "*attempts*"]).await;
        (!counters.is_empty()).then_some(counters)
    })
    .await;
    for counter in &counters {
        let left: i64 = redis.command(&["PTTL", counter]).await;
        // It may have gone in between.
        assert!(left == -2 || (0..=400).contains(&left), "{counter}: {left}");
    }
    eventually("they are gone", async || {
        let counters: Vec<String> = redis.command(&["KEYS", "*attempts*"]).await;
        counters.is_empty().then_some(())
    })
    .await;
    drop(world);
}

/// A server in this process, with a sale of ten units on it.
async fn serve(
    change: impl FnOnce(&mut Settings),
) -> (Server, SeckillClient<tonic::transport::Channel>) {
    let mut settings = Settings::default();
    settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
    settings.http.addr = seckill::config::OptionalAddr(None);
    settings.database.url = seckill::config::SecretUrl::new("sqlite::memory:");
    settings.limits.proxies = "127.0.0.0/8".parse().unwrap();
    change(&mut settings);
    let server = Server::start(&settings).await.unwrap();
    let world = World { parts: server.parts.clone(), settings };
    world.open_sale(&Sale { max_orders: 10, ..Sale::default() }).await;
    let channel = crate::support::process::channel(server.addr).await;
    (server, SeckillClient::new(channel))
}

async fn ask(
    client: &mut SeckillClient<tonic::transport::Channel>,
    user: &str,
    from: &str,
    request_id: &str,
) -> Result<pb::ReserveOutcome, Status> {
    let mut request = tonic::Request::new(pb::ReserveRequest {
        activity_id: "sale".to_owned(),
        sku_id: "sku-1".to_owned(),
        user_id: user.to_owned(),
        quantity: Some(1),
        request_id: request_id.to_owned(),
    });
    request.metadata_mut().insert("x-forwarded-for", from.parse().unwrap());
    client.reserve(request).await.map(|answer| answer.into_inner().outcome())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_of_this_server_says_whom_it_is_for_and_when_to_come_back() {
    struct Case {
        scope: &'static str,
        change: fn(&mut Settings),
        /// Somebody whom the limit concerns, and who it does not, if anybody.
        somebody: [&'static str; 2],
        other: [&'static str; 2],
    }
    let somebody = ["u1", "192.0.2.1"];
    let cases = [
        Case {
            scope: "user",
            change: |s| (s.limits.user_per_s, s.limits.user_burst) = (1, 2),
            somebody,
            other: ["u2", "192.0.2.1"],
        },
        Case {
            scope: "address",
            change: |s| (s.limits.address_per_s, s.limits.address_burst) = (1, 2),
            somebody,
            other: ["u1", "192.0.2.2"],
        },
        Case {
            scope: "activity",
            change: |s| (s.limits.activity_per_s, s.limits.activity_burst) = (1, 2),
            somebody,
            other: ["u2", "192.0.2.2"],
        },
    ];
    for Case { scope, change, somebody: [user, from], other: [other_user, elsewhere] } in cases {
        let (server, mut client) = serve(change).await;
        // Two at once, and one more in each second that this takes.
        let begun = Instant::now();
        let mut let_in = 0;
        let (asked, refused) = loop {
            let asked = Instant::now();
            match ask(&mut client, user, from, &format!("r{let_in}")).await {
                Ok(outcome) => assert_eq!(outcome, pb::ReserveOutcome::Reserved),
                Err(refused) => break (asked, refused),
            }
            let_in += 1;
            assert!(let_in <= 2 + begun.elapsed().as_secs(), "{let_in} were let in");
        };
        assert!(let_in >= 2, "only {let_in} were let in");
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
        let info = refused.get_details_error_info().unwrap();
        assert_eq!(
            (info.reason.as_str(), info.metadata["scope"].as_str()),
            ("RATE_LIMITED", scope)
        );
        let wait = refused.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!(wait > Duration::ZERO && wait <= Duration::from_secs(1), "{wait:?}");
        let pushback = refused.metadata().get("grpc-retry-pushback-ms").unwrap();
        assert_eq!(pushback.to_str().unwrap(), wait.as_millis().to_string());
        assert_eq!(refused.metadata().get("retry-after").unwrap(), "1");
        assert!(refused.message().contains(&format!("this {scope}")), "{}", refused.message());
        let other = ask(&mut client, other_user, elsewhere, "other").await;
        let is_late = scope == "activity" && asked.elapsed() >= wait;
        assert!(other.is_err() == (scope == "activity") || is_late, "{other:?}");
        tokio::time::sleep(wait).await;
        let again = ask(&mut client, user, from, "again").await;
        assert!(again.is_ok() || is_late, "{again:?}");
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_address_is_refused_and_takes_nothing() {
    let (server, mut client) =
        serve(|settings| settings.limits.denied = "198.51.100.0/24".parse().unwrap()).await;
    let refused = ask(&mut client, "u1", "198.51.100.7", "r1").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert_eq!(refused.get_details_error_info().unwrap().reason, "ADDRESS_DENIED");
    assert!(ask(&mut client, "u1", "203.0.113.1, 198.51.100.7", "r1").await.is_err());
    let world = World { parts: server.parts.clone(), settings: Settings::default() };
    let key = world.key("sale");
    assert_eq!(world.levels(&key).await.stock, 10);
    let taken = ask(&mut client, "u1", "198.51.101.7", "r1").await.unwrap();
    assert_eq!(taken, pb::ReserveOutcome::Reserved);
    server.stop().await;

    // A peer that is denied does not even get a connection.
    let mut settings = Settings::default();
    settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
    settings.http.addr = seckill::config::OptionalAddr(None);
    settings.database.url = seckill::config::SecretUrl::new("sqlite::memory:");
    settings.limits.denied = "127.0.0.0/8".parse().unwrap();
    let server = Server::start(&settings).await.unwrap();
    let mut socket = tokio::net::TcpStream::connect(server.addr).await.unwrap();
    let mut bytes = [0; 8];
    let read = tokio::io::AsyncReadExt::read(&mut socket, &mut bytes);
    let read = tokio::time::timeout(Duration::from_secs(5), read).await.unwrap();
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    server.stop().await;
}

#[tokio::test]
async fn what_waited_too_long_is_refused_and_takes_nothing() {
    let fresh = crate::support::databases::Fresh::sqlite().await;
    let ground = Ground::embedded(&fresh);
    let mut settings = ground.settings();
    settings.reserve.max_wait_ms = 200;
    let world = ground.world_with(settings).await;
    let key = world.open_sale(&Sale::default()).await;
    let (slow, gate) = world.beside().await;
    // Both workers of the segment are held up, and one more request waits behind them.
    let mut stops = [gate.stop_before("reserve"), gate.stop_before("reserve")];
    let ask = |buyer: &str| {
        let request = request(&key, buyer, "r1", 1);
        let reservations = slow.parts.reservations.clone();
        tokio::spawn(async move { reservations.reserve(request, Caller::default()).await })
    };
    let mut asked = Vec::new();
    for (stop, buyer) in stops.iter_mut().zip(["u1", "u2"]) {
        asked.push(ask(buyer));
        stop.reached().await;
    }
    asked.push(ask("u3"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    let begun = Instant::now();
    for stop in stops {
        stop.go();
    }
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(answer.await.unwrap());
    }
    assert!(begun.elapsed() < Duration::from_secs(2));
    let overloaded = |answer: &&Result<_, _>| matches!(answer, Err(Error::Overloaded));
    assert_eq!(answers.iter().filter(overloaded).count(), 1, "{answers:?}");
    world.assert_balanced(&key, 2).await;
    drop(slow);
}
