//! Several servers on one Redis and one PostgreSQL, behind a client that deals its calls to them: a
//! whole sale, a restart of one after the other, and connections that move to a server that is new.

use std::{
    error::Error,
    iter,
    net::SocketAddr,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future, stream};
use seckill::{
    api::pb::{self, ReleaseOutcome, ReserveOutcome, seckill_admin_client::SeckillAdminClient},
    config::Settings,
    domain::OfferKey,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    net::{TcpListener, TcpStream},
    process::{ChildStdout, Command},
    task::JoinSet,
    time::timeout,
};
use tokio_util::io::InspectReader;
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    clients::python,
    support::{
        calls::{
            Shop, Win, assert_books, assert_history, drained, follow_epochs, lost_connection, win,
        },
        databases::{self, Fresh},
        eventually,
        frames::Goodbye,
        history::Log,
        process::{Process, Serve},
        redis_server::RedisServer,
        scrape, within,
        world::{Ground, Sale, World},
    },
};

const SERVERS: usize = 5;

/// Beside other tests an answer of Redis may take its time, and no server is to give it up for that.
fn patient(settings: &Settings) -> Serve {
    Serve::over(settings)
        .with("ENGINE__RESPONSE_TIMEOUT_MS", 2_000)
        .with("SWEEPER__GRACE_MS", 2_000)
}

/// Servers on the same stores, each with all its workers, and on ports that stay theirs.
struct Fleet {
    serves: Vec<Serve>,
    servers: Vec<Process>,
}

impl Fleet {
    async fn start(settings: &Settings) -> Self {
        let serve = |_| {
            let addr = format!("127.0.0.1:{}", RedisServer::free_port());
            patient(settings)
                .with("GRPC__ADDR", addr)
                .with("HTTP__ADDR", "127.0.0.1:0")
                // Nobody reads an activity again by itself.
                .with("CATALOG__REFRESH_MS", 30_000)
        };
        let serves: Vec<Serve> = (0..SERVERS).map(serve).collect();
        let mut servers: Vec<Process> = serves.iter().map(Serve::spawn).collect();
        future::join_all(servers.iter_mut().map(Process::serves)).await;
        Self { serves, servers }
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.servers.iter().map(|server| server.addr).collect()
    }

    /// A client that deals its calls to all of them.
    fn balanced(&self) -> Channel {
        let endpoint = |addr| Endpoint::from_shared(format!("http://{addr}")).unwrap();
        Channel::balance_list(self.addresses().into_iter().map(endpoint))
    }

    async fn stop(self) {
        for mut server in self.servers {
            server.stop().await;
        }
    }
}

/// How many calls of Reserve this server has answered.
async fn answered(server: &Process) -> f64 {
    let found = scrape::metrics(server.http_addr()).await;
    let of_reserve = found.iter().filter(|(series, _)| {
        series.starts_with("grpc_server_handled_total") && series.contains(r#"method="Reserve""#)
    });
    of_reserve.map(|(_, count)| count).sum()
}

/// What the server itself finds when it compares the engine with SQL.
async fn reconcile(server: &Process, key: &OfferKey) {
    let request = pb::ReconcileRequest { activity_id: key.activity_id.to_string(), repair: false };
    let mut admin = SeckillAdminClient::new(server.channel().await);
    let report = admin.reconcile(request).await.unwrap().into_inner().report.unwrap();
    assert_eq!(report.difference_count, 0, "{report:?}");
}

async fn open_sale(ground: &Ground<'_>, total: u64) -> (World, OfferKey) {
    let world = ground.world().await;
    let key = world.open_sale(&Sale { total, max_quantity: 1, ..Sale::default() }).await;
    world.parts.activities.move_by_clock().await.unwrap();
    (world, key)
}

/// Buyers of one sale, and what they hold.
struct Buyers {
    shops: Vec<Shop>,
    next: AtomicU32,
    wins: Mutex<Vec<Win>>,
}

impl Buyers {
    /// Lets them come up to this one. Every server is asked by somebody all the time.
    async fn come(&self, until: u32) {
        const AT_ONCE: usize = 64;
        let clients = (0..AT_ONCE).map(async |client| {
            let shop = &self.shops[client % self.shops.len()];
            loop {
                let nth = self.next.fetch_add(1, Ordering::Relaxed);
                if nth >= until {
                    return;
                }
                self.buy(shop, nth).await;
            }
        });
        future::join_all(clients).await;
        self.next.store(until, Ordering::Relaxed);
    }

    async fn buy(&self, shop: &Shop, nth: u32) {
        let buyer = format!("buyer-{nth}");
        let answer = shop.insist(&buyer, "first").await;
        let Some(won) = win(&answer) else {
            assert_eq!(answer.outcome(), ReserveOutcome::SoldOut, "{answer:?}");
            return;
        };
        if nth.is_multiple_of(10) {
            // Through another server, most likely; as the library of a client marks it.
            let request = pb::ReserveRequest {
                activity_id: shop.key.activity_id.to_string(),
                sku_id: shop.key.sku_id.to_string(),
                user_id: buyer.clone(),
                quantity: None,
                request_id: "first".to_owned(),
            };
            let again = eventually("the repeat is decided", async || {
                let mut again = Request::new(request.clone());
                again.metadata_mut().insert("grpc-previous-rpc-attempts", "1".parse().unwrap());
                shop.client.clone().reserve(again).await.ok()
            });
            let again = again.await.into_inner();
            assert_eq!(win(&again).as_ref(), Some(&won), "{again:?}");
            assert!(again.replayed);
        }
        if nth % 20 == 1 {
            let released = shop.insist_on_release(&won).await;
            let done = [ReleaseOutcome::Released, ReleaseOutcome::AlreadyReleased];
            assert!(done.contains(&released), "{released:?}");
        } else {
            self.wins.lock().unwrap().push(won);
        }
    }
}

async fn a_sale(ground: &Ground<'_>) {
    const UNITS: u64 = 1_000;
    let (world, key) = open_sale(ground, UNITS).await;
    let mut settings = ground.settings();
    // As in production.
    settings.reserve.believe_sold_out_ms = Settings::default().reserve.believe_sold_out_ms;
    let fleet = Fleet::start(&settings).await;
    let log = Log::new();
    let buyers = Buyers {
        shops: (0..4).map(|_| Shop::new(&key, fleet.balanced()).with_log(&log)).collect(),
        next: AtomicU32::new(0),
        wins: Mutex::default(),
    };
    let sale = async {
        buyers.come(700).await;
        pause_everywhere(&fleet, &key).await;
        buyers.come(3_000).await;
        // What came back late is sold, too.
        for nth in 3_000.. {
            if buyers.wins.lock().unwrap().len() as u64 == UNITS {
                break;
            }
            buyers.buy(&buyers.shops[0], nth).await;
        }
    };
    let epochs = std::pin::pin!(follow_epochs(&log, &world, &key));
    future::select(std::pin::pin!(sale), epochs).await;
    let wins = buyers.wins.into_inner().unwrap();
    assert_eq!(wins.len() as u64, UNITS, "all was sold in the end");
    for server in &fleet.servers {
        drained(server.channel().await, &key).await;
        assert!(answered(server).await > 300.0, "each server took part");
    }
    reconcile(&fleet.servers[3], &key).await;
    assert_books(ground, &key, &wins).await;
    assert_history(&log, &world, &key, 1).await;
    fleet.stop().await;
}

/// A pause at one server reaches all in time, and so does its end. The best time counts: beside other
/// tests a server may not run at all for that long.
async fn pause_everywhere(fleet: &Fleet, key: &OfferKey) {
    let activity_id = key.activity_id.to_string();
    let mut shops = Vec::new();
    for server in &fleet.servers {
        shops.push(Shop::new(key, server.channel().await));
    }
    let all_answer = async |expected: ReserveOutcome| {
        let begun = Instant::now();
        future::join_all(shops.iter().map(async |shop| {
            eventually("it answers as the others", async || {
                let answer = shop.reserve("buyer-0", "first").await.ok()?;
                (answer.outcome() == expected).then_some(())
            })
            .await;
        }))
        .await;
        begun.elapsed()
    };
    let mut first = SeckillAdminClient::new(fleet.servers[0].channel().await);
    let mut last = SeckillAdminClient::new(fleet.servers[SERVERS - 1].channel().await);
    all_answer(ReserveOutcome::Reserved).await;
    let mut best = Duration::MAX;
    for _ in 0..20 {
        if best < Duration::from_millis(100) {
            break;
        }
        let (activity_id, reason) = (activity_id.clone(), "test".to_owned());
        let pause = pb::PauseActivityRequest { activity_id, reason };
        let resume = pb::ResumeActivityRequest {
            activity_id: pause.activity_id.clone(),
            reason: pause.reason.clone(),
        };
        first.pause_activity(pause).await.unwrap();
        let paused = all_answer(ReserveOutcome::Paused).await;
        last.resume_activity(resume).await.unwrap();
        best = best.min(paused.max(all_answer(ReserveOutcome::Reserved).await));
    }
    assert!(best < Duration::from_millis(100), "{best:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_servers_sell_every_unit_once_and_pause_together() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        a_sale(&Ground::redis(fresh).await).await;
    })
    .await;
}

/// A client that says what its buyers were told, line by line.
struct Told {
    lines: Lines<BufReader<ChildStdout>>,
    wins: Vec<Win>,
    /// Code and reason of each error that was no decision.
    errors: Vec<String>,
}

impl Told {
    /// Reads on until `done`, or the client has no more to say; answers whether that was the end.
    async fn read_until(&mut self, done: impl Fn(&Self) -> bool) -> bool {
        while !done(self) {
            let line = timeout(Duration::from_secs(30), self.lines.next_line()).await;
            let line = line.expect("it goes on").unwrap().expect("it says when it is done");
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["done"] => return true,
                ["error", code, reason] => self.errors.push(format!("{code} {reason}")),
                [buyer, "RESERVE_OUTCOME_RESERVED", reservation_id, order_no] => {
                    self.wins.push(Win {
                        buyer: buyer.to_owned(),
                        reservation_id: reservation_id.to_owned(),
                        order_no: order_no.to_owned(),
                    });
                }
                _ => panic!("{line}"),
            }
        }
        false
    }
}

/// Stops a server as an operator does, and sees that it says so before it goes.
async fn restart(serve: &Serve, server: &mut Process) {
    let request = HealthCheckRequest { service: String::new() };
    let mut health = HealthClient::new(server.channel().await);
    let mut health = health.watch(request).await.unwrap().into_inner();
    let said = health.message().await.unwrap().unwrap().status();
    assert_eq!(said, ServingStatus::Serving);
    server.terminate();
    while health.message().await.unwrap().expect("it says so first").status()
        != ServingStatus::NotServing
    {}
    let status = server.ended(Duration::from_secs(20)).await;
    assert!(status.success(), "{status}\n{}", server.log());
    assert!(!server.log().contains("work was still under way"), "{}", server.log());
    *server = serve.start().await;
}

async fn a_rolling_restart(ground: &Ground<'_>) {
    const ROOT: &str = env!("CARGO_MANIFEST_DIR");
    let (world, key) = open_sale(ground, 1_000_000).await;
    let mut fleet = Fleet::start(&ground.settings()).await;
    let addresses: Vec<String> = fleet.addresses().iter().map(ToString::to_string).collect();
    let mut client = Command::new(python())
        .arg(format!("{ROOT}/tests/clients/python/rolling.py"))
        .arg(addresses.join(","))
        .arg(format!("{ROOT}/proto"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let lines = BufReader::new(client.stdout.take().expect("its output is piped")).lines();
    let mut told = Told { lines, wins: Vec::new(), errors: Vec::new() };
    told.read_until(|told| told.wins.len() > 100).await;
    let rolled = AtomicBool::new(false);
    let roll = async {
        for (serve, server) in fleet.serves.iter().zip(&mut fleet.servers) {
            restart(serve, server).await;
            eventually("it is asked again", async || (answered(server).await >= 5.0).then_some(()))
                .await;
        }
        rolled.store(true, Ordering::Relaxed);
    };
    let read = told.read_until(|_| rolled.load(Ordering::Relaxed));
    future::join(roll, read).await;
    drop(client.stdin.take());
    assert!(told.read_until(|_| false).await);
    assert!(client.wait().await.unwrap().success());

    // The library has repeated what a server that goes refused. What is left is named in the README.
    let named =
        ["SHUTTING_DOWN", "ENGINE_UNAVAILABLE"].map(|reason| format!("UNAVAILABLE {reason}"));
    assert!(told.errors.iter().all(|error| named.contains(error)), "{:?}", told.errors);
    assert!(told.errors.len() < 10, "{:?}", told.errors);
    for server in &fleet.servers {
        drained(server.channel().await, &key).await;
    }
    reconcile(&fleet.servers[0], &key).await;
    assert_books(ground, &key, &told.wins).await;
    fleet.stop().await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_five_servers_loses_nothing_and_no_buyer_notices() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        a_rolling_restart(&Ground::redis(fresh).await).await;
    })
    .await;
}

/// Passes connections on, each to the next of the servers that it knows.
struct Balancer {
    addr: SocketAddr,
    servers: Arc<Mutex<Vec<SocketAddr>>>,
    made: Arc<Mutex<Vec<Made>>>,
    _connections: JoinSet<()>,
}

/// A connection that went through the balancer.
#[derive(Debug, Clone, Copy)]
struct Made {
    at: Instant,
    to: SocketAddr,
    /// When the server said that it takes no more on it.
    closed: Option<Instant>,
}

impl Made {
    fn lived(&self) -> Option<Duration> {
        Some(self.closed? - self.at)
    }
}

impl Balancer {
    async fn start(first: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let servers = Arc::new(Mutex::new(vec![first]));
        let made = Arc::new(Mutex::new(Vec::new()));
        let mut connections = JoinSet::new();
        let (known, noted) = (servers.clone(), made.clone());
        connections.spawn(async move {
            let mut passing = JoinSet::new();
            for nth in 0.. {
                let (mut client, _) = listener.accept().await.unwrap();
                let to = {
                    let known = known.lock().unwrap();
                    known[nth % known.len()]
                };
                noted.lock().unwrap().push(Made { at: Instant::now(), to, closed: None });
                let noted = noted.clone();
                passing.spawn(async move {
                    let server = TcpStream::connect(to).await.unwrap();
                    client.set_nodelay(true).unwrap();
                    server.set_nodelay(true).unwrap();
                    let mut goodbye = Goodbye::default();
                    let mut server = InspectReader::new(server, |piece| {
                        if goodbye.is_in(piece) {
                            noted.lock().unwrap()[nth].closed.get_or_insert_with(Instant::now);
                        }
                    });
                    tokio::io::copy_bidirectional(&mut client, &mut server).await.ok();
                });
            }
        });
        Self { addr, servers, made, _connections: connections }
    }

    /// All connections so far, in the order in which they came.
    fn made(&self) -> Vec<Made> {
        self.made.lock().unwrap().clone()
    }
}

/// Whether the client library says that the server has not taken this call: it was not sent any more,
/// or behind the last one that the server took before it closed the connection.
fn was_not_taken(status: &Status) -> bool {
    let mut causes =
        iter::successors(Some(status as &(dyn Error + 'static)), |&error| error.source());
    let closed = causes.find_map(|error| error.downcast_ref::<h2::Error>()).is_some_and(|error| {
        error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR)
    });
    closed || status.code() == Code::Cancelled
}

async fn connections_move(ground: &Ground<'_>) {
    const CLIENTS: usize = 32;
    const AGE: Duration = Duration::from_secs(3);
    let (world, key) = open_sale(ground, 1_000_000).await;
    let serve = patient(&ground.settings()).with("GRPC__MAX_CONNECTION_AGE_S", AGE.as_secs());
    // Both serve before anybody connects, since connections grow old while a server starts.
    let (mut old, mut new) = future::join(serve.start(), serve.start()).await;
    let balancer = Balancer::start(old.addr).await;
    let endpoint = Endpoint::from_shared(format!("http://{}", balancer.addr)).unwrap();
    let mut shops = Vec::new();
    for _ in 0..CLIENTS {
        shops.push(Shop::new(&key, endpoint.connect().await.unwrap()));
    }
    // A client is connected before the balancer has seen it.
    eventually("all go to the old server", async || {
        (balancer.made().len() >= CLIENTS).then_some(())
    })
    .await;
    assert_eq!(balancer.made().len(), CLIENTS, "each has a connection of its own");
    balancer.servers.lock().unwrap().push(new.addr);

    // Everybody goes on buying until all connections are new ones, and one went before its time.
    let (moved, failed) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let buy = |(client, shop): (usize, Shop)| {
        let (moved, failed) = (&moved, &failed);
        async move {
            let mut wins = Vec::new();
            for nth in 0.. {
                if moved.load(Ordering::Relaxed) {
                    break;
                }
                let buyer = format!("buyer-{client}-{nth}");
                let answer = match shop.reserve(&buyer, "first").await {
                    Ok(answer) => answer,
                    Err(status) => {
                        if lost_connection(&status) {
                            failed.lock().unwrap().push(status);
                        }
                        shop.insist(&buyer, "first").await
                    }
                };
                wins.push(win(&answer).expect("there is plenty"));
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            wins
        }
    };
    let is_early = |made: &Made| made.lived().is_some_and(|lived| lived < AGE);
    let watch = async {
        let all = within(10 * AGE, "each has another connection", async || {
            let made = balancer.made();
            let gone = made[..CLIENTS].iter().all(|made| made.closed.is_some());
            (gone && made.len() >= 2 * CLIENTS).then_some(())
        });
        all.await;
        // Beside other tests one that goes early may be seen late, but not each time.
        let made = within(10 * AGE, "one goes before its time", async || {
            let made = balancer.made();
            made.iter().any(is_early).then_some(made)
        });
        let made = made.await;
        moved.store(true, Ordering::Relaxed);
        made
    };
    let buying = stream::iter(shops.into_iter().enumerate()).map(buy);
    let buying = buying.buffer_unordered(CLIENTS).collect::<Vec<_>>();
    let (wins, made) = future::join(buying, watch).await;
    let wins: Vec<Win> = wins.into_iter().flatten().collect();
    let failed = failed.into_inner().unwrap();
    // What the client library had taken when its connection was to end, and the server had not, is all
    // that is lost.
    assert!(failed.iter().all(was_not_taken), "{failed:?}");

    let (first, later) = made.split_at(CLIENTS);
    assert!(first.iter().all(|made| made.to == old.addr), "{first:?}");
    let at_new = later.iter().filter(|made| made.to == new.addr).count();
    assert!(at_new >= later.len() / 3, "{at_new} of {} went to the new server", later.len());
    let shortest = first.iter().filter_map(Made::lived).min().unwrap();
    assert!(shortest >= AGE.mul_f64(0.85), "{shortest:?}");
    // That they came together does not matter.
    assert!(!first.iter().all(is_early), "all went before their time");

    drained(new.channel().await, &key).await;
    old.stop().await;
    new.stop().await;
    assert_books(ground, &key, &wins).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_connections_move_to_a_new_server_and_not_all_at_once() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        connections_move(&Ground::redis(fresh).await).await;
    })
    .await;
}
