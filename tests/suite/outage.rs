//! A store goes away in the middle of a sale and comes back: calls are refused at once meanwhile,
//! and nothing is lost.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use futures_util::{StreamExt as _, future, stream};
use sea_orm::ConnectionTrait;
use seckill::{
    config::{SecretUrl, Settings},
    domain::OfferKey,
    server::Server,
};
use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_health::{
    ServingStatus,
    pb::{HealthCheckRequest, health_check_response, health_client::HealthClient},
};
use tonic_types::StatusExt as _;

use crate::support::{
    calls::{Shop, Win, assert_history, drained, follow_epochs, win},
    databases::{self, Fresh, admin},
    process::channel,
    wire::Wire,
    within,
    world::{Ground, Sale, World},
};

/// After the first failure every call is refused within this time.
const AT_ONCE: Duration = Duration::from_millis(300);
/// A server serves again this long after its store is back.
const BACK: Duration = Duration::from_secs(3);
const CLIENTS: usize = 8;
const PLENTY: u64 = 100_000;

/// A whole server with a sale under way.
struct Shopping {
    server: Server,
    settings: Settings,
    shop: Shop,
}

/// How one call of the sale went.
struct Call {
    buyer: String,
    sent: Instant,
    answered: Instant,
    answer: Result<Option<Win>, Status>,
}

impl Shopping {
    async fn open(mut settings: Settings) -> Self {
        settings.sweeper.interval_ms = 100;
        settings.sweeper.grace_ms = 1_000;
        settings.outbox.poll_interval_ms = 50;
        let server = Server::start(&settings).await.unwrap();
        let world = World { parts: server.parts.clone(), settings: settings.clone() };
        let key = world.open_sale(&Sale { total: PLENTY, ..Sale::default() }).await;
        let shop = Shop::new(&key, channel(server.addr).await);
        Self { server, settings, shop }
    }

    fn key(&self) -> &OfferKey {
        &self.shop.key
    }

    async fn health(&self) -> ServingStatus {
        let mut client = HealthClient::new(channel(self.server.addr).await);
        let request = HealthCheckRequest { service: "seckill.v1.Seckill".to_owned() };
        match client.check(request).await.unwrap().into_inner().status() {
            health_check_response::ServingStatus::Serving => ServingStatus::Serving,
            health_check_response::ServingStatus::NotServing => ServingStatus::NotServing,
            other => panic!("{other:?}"),
        }
    }

    async fn is_healthy(&self, expected: ServingStatus, limit: Duration) {
        let what = format!("health is {expected:?}");
        within(limit, &what, async || (self.health().await == expected).then_some(())).await;
    }

    /// Buyers come all the time, while the store goes away and comes back.
    async fn survive(self, away: impl AsyncFnOnce(), back: impl AsyncFnOnce()) {
        let over = AtomicBool::new(false);
        let (won, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let calls = stream::iter((0..).take_while(|_| !over.load(Ordering::Relaxed)))
            .map(async |nth: usize| {
                let buyer = format!("buyer-{nth}");
                let sent = Instant::now();
                let answer = self.shop.reserve(&buyer, "first").await.map(|answer| win(&answer));
                match &answer {
                    Ok(_) => won.fetch_add(1, Ordering::Relaxed),
                    // Who is refused at once would fill the log of this test.
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        refused.fetch_add(1, Ordering::Relaxed)
                    }
                };
                Call { buyer, sent, answered: Instant::now(), answer }
            })
            .buffer_unordered(CLIENTS)
            .collect::<Vec<Call>>();
        let outage = async {
            self.wins(&won, 50).await;
            let left = Instant::now();
            away().await;
            self.is_healthy(ServingStatus::NotServing, Duration::from_secs(3)).await;
            within(Duration::from_secs(3), "calls are refused", async || {
                (refused.load(Ordering::Relaxed) > 4 * CLIENTS).then_some(())
            })
            .await;
            back().await;
            let returned = Instant::now();
            self.is_healthy(ServingStatus::Serving, BACK).await;
            self.wins(&won, won.load(Ordering::Relaxed) + 1).await;
            let recovered = returned.elapsed();
            assert!(recovered < BACK, "it took {recovered:?}");
            self.wins(&won, won.load(Ordering::Relaxed) + 50).await;
            over.store(true, Ordering::Relaxed);
            (left, returned)
        };
        let world = World { parts: self.server.parts.clone(), settings: self.settings.clone() };
        let (calls, (left, returned)) = tokio::select! {
            over = future::join(calls, outage) => over,
            () = follow_epochs(&self.shop.log, &world, self.key()) => unreachable!("it never ends"),
        };
        assert_refused_at_once(&calls, left, returned);
        self.settle(calls).await;
    }

    async fn wins(&self, won: &AtomicUsize, wins: usize) {
        within(Duration::from_secs(10), "the sale goes on", async || {
            (won.load(Ordering::Relaxed) >= wins).then_some(())
        })
        .await;
    }

    /// What was in flight is settled by the server itself; everybody who asks again holds one
    /// unit, the same as before.
    async fn settle(self, calls: Vec<Call>) {
        drained(channel(self.server.addr).await, self.key()).await;
        let again = stream::iter(&calls)
            .map(async |call| (call, win(&self.shop.insist(&call.buyer, "first").await)))
            .buffer_unordered(CLIENTS);
        for (call, won) in again.collect::<Vec<_>>().await {
            let won = won.expect("there is plenty");
            if let Ok(before) = &call.answer {
                assert_eq!(before.as_ref(), Some(&won));
            }
        }
        drained(channel(self.server.addr).await, self.key()).await;
        let world = World { parts: self.server.parts.clone(), settings: self.settings };
        let books = world.read_books(&self.shop.key).await.unwrap();
        assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
        assert_eq!(books.live_orders, i64::try_from(calls.len()).unwrap(), "{books:?}");
        assert_history(&self.shop.log, &world, &self.shop.key, 1).await;
        self.server.stop().await;
    }
}

/// From the first failure on, every call during the outage hears UNAVAILABLE with RetryInfo, at
/// once.
fn assert_refused_at_once(calls: &[Call], left: Instant, returned: Instant) {
    let failed = |call: &&Call| call.answer.is_err();
    let first = calls.iter().filter(failed).map(|call| call.answered).min();
    let first = first.expect("some call failed");
    assert!(first > left);
    let mut refused = 0;
    for call in calls {
        let Err(status) = &call.answer else { continue };
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(status.get_details_retry_info().is_some(), "{status:?}");
        if call.sent < returned {
            let took = call.answered - call.sent.max(first);
            assert!(took < AT_ONCE, "{took:?}: {status:?}");
            refused += 1;
        }
    }
    assert!(refused > CLIENTS, "only {refused} calls were refused");
}

async fn redis_goes_away(fresh: &Fresh) {
    let mut ground = Ground::redis(fresh).await;
    let settings = ground.settings();
    let shopping = Shopping::open(settings).await;
    let redis = tokio::sync::Mutex::new(ground.redis.as_mut().unwrap());
    let kill = async || redis.lock().await.kill();
    let start = async || redis.lock().await.start_again().await;
    shopping.survive(kill, start).await;
}

/// A sale with a wire between the server and its database, whatever it is.
async fn over_a_wire(fresh: &Fresh) -> (Shopping, Wire, Ground<'_>) {
    let ground = Ground::redis(fresh).await;
    let mut url = url::Url::parse(&fresh.settings().url).unwrap();
    let store = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
    let wire = Wire::to(store.parse().unwrap()).await;
    url.set_port(Some(wire.addr.port())).unwrap();
    let mut settings = ground.settings();
    settings.database.url = SecretUrl::new(url.as_str());
    (Shopping::open(settings).await, wire, ground)
}

/// PostgreSQL itself ends the sessions and lets nobody in.
async fn postgres_shuts(fresh: &Fresh) {
    let ground = Ground::redis(fresh).await;
    let (name, admin_url) = fresh.on_its_server();
    let admin = admin(admin_url).await;
    let run = async |sql: String| {
        admin.execute_unprepared(&sql).await.unwrap();
    };
    let shut = async || {
        run(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await;
        run(format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        ))
        .await;
    };
    let open = async || run(format!("ALTER DATABASE {name} ALLOW_CONNECTIONS true")).await;
    Shopping::open(ground.settings()).await.survive(shut, open).await;
}

mod the_sale_goes_on_after_redis_was_killed {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_sqlite() {
        databases::run(Fresh::sqlite().await, redis_goes_away).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_postgres() {
        databases::run(Fresh::postgres().await, redis_goes_away).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_mysql() {
        databases::run(Fresh::mysql().await, redis_goes_away).await;
    }
}

mod the_sale_goes_on_after_the_wire_to_the_database_was_cut {
    use super::*;

    async fn on_redis(fresh: &Fresh) {
        let (shopping, wire, _ground) = over_a_wire(fresh).await;
        shopping.survive(async || wire.cut(), async || wire.mend()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_postgres() {
        databases::run(Fresh::postgres().await, on_redis).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_mysql() {
        databases::run(Fresh::mysql().await, on_redis).await;
    }
}

mod the_sale_goes_on_after_the_database_fell_silent {
    use super::*;

    async fn on_redis(fresh: &Fresh) {
        let (shopping, wire, _ground) = over_a_wire(fresh).await;
        shopping.survive(async || wire.open_hole(), async || wire.mend()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_postgres() {
        databases::run(Fresh::postgres().await, on_redis).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_mysql() {
        databases::run(Fresh::mysql().await, on_redis).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sale_goes_on_after_postgres_ended_every_session() {
    databases::run(Fresh::postgres().await, postgres_shuts).await;
}
