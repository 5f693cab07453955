//! Where a scenario takes place: stores of its own behind wires, servers, a sale and its buyers.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use seckill::{
    api::pb::{self, seckill_admin_client::SeckillAdminClient},
    config::{SecretUrl, Settings},
    domain::OfferKey,
    server::Parts,
};
use tokio::{
    sync::{Mutex, MutexGuard},
    task::JoinSet,
    time::Instant,
};
use tonic::transport::Channel;

use crate::{
    crowd::{Crowd, Mix, door},
    stores::{Sql, SqlServer},
    support::{
        databases::Fresh,
        process::{Process, Serve},
        redis_server::RedisServer,
        small_disk::SmallDisk,
        wire::Wire,
        within,
        world::{Sale, World},
    },
};

/// How long a server may take to serve, on a machine that is busy with others.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// How long the load may take to get going.
const WARM_LIMIT: Duration = Duration::from_secs(30);
/// Reservations before a fault.
const WARM_WINS: usize = 40;

/// How often a supervisor starts a server that does not come up.
const STARTS: usize = 5;
/// The activity of another sale.
const OTHER: &str = "other";

/// What a scenario needs.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) servers: usize,
    pub(crate) total: u64,
    pub(crate) hold: Option<Duration>,
    pub(crate) segments: u32,
    pub(crate) mix: Mix,
    /// Options of the command line of Redis.
    pub(crate) redis: &'static [&'static str],
    /// The sale is warm before the servers start.
    pub(crate) is_warm: bool,
    /// The database server is one for this scenario alone, on a disk of so many MiB.
    pub(crate) disk_mib: Option<usize>,
    pub(crate) seed: u64,
}

impl Setup {
    /// One server, and an AOF that is synced at every write.
    pub(crate) fn usual(seed: u64) -> Self {
        Self {
            servers: 1,
            total: 50_000,
            hold: None,
            segments: 1,
            mix: Mix::USUAL,
            redis: &["--appendonly", "yes", "--appendfsync", "always"],
            is_warm: true,
            disk_mib: None,
            seed,
        }
    }

    pub(crate) fn servers(self, servers: usize) -> Self {
        Self { servers, ..self }
    }
}

/// The scene of one scenario; all of it ends with it.
pub(crate) struct Arena {
    pub(crate) sql: Sql,
    pub(crate) setup: Setup,
    pub(crate) key: OfferKey,
    pub(crate) crowd: Arc<Crowd>,
    pub(crate) servers: Vec<Seat>,
    pub(crate) redis: Option<RedisServer>,
    pub(crate) redis_wire: Option<Wire>,
    pub(crate) sql_wire: Option<Wire>,
    retired: Vec<RedisServer>,
    clients: JoinSet<()>,
    /// Past the wires.
    direct: Settings,
    sql_server: Option<Arc<Mutex<SqlServer>>>,
    fresh: Option<Fresh>,
}

/// A server's place: its port stays when it is started anew.
pub(crate) struct Seat {
    pub(crate) addr: SocketAddr,
    admin: SeckillAdminClient<Channel>,
    pub(crate) serve: Serve,
    pub(crate) process: Option<Process>,
}

impl Arena {
    /// Opens the stores and the sale; no server runs yet.
    pub(crate) async fn open(
        sql: Sql,
        server: Option<Arc<Mutex<SqlServer>>>,
        setup: Setup,
        is_quick: bool,
    ) -> Self {
        let server = match setup.disk_mib {
            None => server,
            Some(mib) => {
                let disk = SmallDisk::mount(mib).expect("it may mount, or is not asked to");
                Some(Arc::new(Mutex::new(SqlServer::start_on(sql, Some(disk)).await)))
            }
        };
        let (fresh, sql_wire) = match &server {
            None => (Fresh::sqlite().await, None),
            Some(server) => {
                let server = server.lock().await;
                (Fresh::on(&server.admin_url()).await, Some(Wire::to(server.addr()).await))
            }
        };
        let mut direct = Settings::default();
        direct.database.url = SecretUrl::new(fresh.settings().url);
        direct.database.max_connections = 2;
        let (redis, redis_wire) = if sql == Sql::Sqlite {
            (None, None)
        } else {
            let redis = RedisServer::start_with(setup.redis).await;
            direct.engine.url = SecretUrl::new(redis.url());
            let wire = Wire::to(([127, 0, 0, 1], redis.port()).into()).await;
            (Some(redis), Some(wire))
        };
        let mut wired = direct.clone();
        if let Some(wire) = &sql_wire {
            let mut url = url::Url::parse(direct.database.url.expose()).unwrap();
            url.set_port(Some(wire.addr.port())).unwrap();
            if sql == Sql::MariaDb {
                // Not one who may write while all is read-only.
                url.set_username("shop").unwrap();
            }
            wired.database.url = SecretUrl::new(url.as_str());
        }
        if let Some(wire) = &redis_wire {
            wired.engine.url = SecretUrl::new(format!("redis://{}", wire.addr));
        }
        let seat = |_| {
            let addr = SocketAddr::from(([127, 0, 0, 1], RedisServer::free_port()));
            let mut serve = Serve::over(&wired).with("GRPC__ADDR", addr);
            if !is_quick {
                // As people run it; the tests of the suite are in more of a hurry.
                let usual = Settings::default();
                serve = serve
                    .with("ENGINE__RESPONSE_TIMEOUT_MS", usual.engine.response_timeout_ms)
                    .with("DATABASE__MAX_CONNECTIONS", usual.database.max_connections)
                    .with("SWEEPER__GRACE_MS", usual.sweeper.grace_ms)
                    .with("SWEEPER__INTERVAL_MS", usual.sweeper.interval_ms)
                    .with("OUTBOX__POLL_INTERVAL_MS", usual.outbox.poll_interval_ms);
            }
            Seat { addr, admin: SeckillAdminClient::new(door(addr)), serve, process: None }
        };
        let servers: Vec<Seat> = (0..setup.servers).map(seat).collect();
        let world = World { parts: Parts::open(&direct).await.unwrap(), settings: direct.clone() };
        let sale = Sale {
            activity: "sale",
            total: setup.total,
            max_orders: 1,
            max_quantity: 1_000,
            hold: setup.hold,
            segments: setup.segments,
        };
        let key =
            if setup.is_warm { world.open_sale(&sale).await } else { world.plan_sale(&sale).await };
        world.close().await;
        let doors: Vec<SocketAddr> = servers.iter().map(|seat| seat.addr).collect();
        let crowd = Crowd::new(&key, &doors, setup.mix, setup.hold.is_some(), setup.seed);
        Self {
            sql,
            setup,
            key,
            crowd,
            servers,
            redis,
            redis_wire,
            sql_wire,
            retired: Vec::new(),
            clients: JoinSet::new(),
            direct,
            sql_server: server,
            fresh: Some(fresh),
        }
    }

    pub(crate) fn redis(&mut self) -> &mut RedisServer {
        self.redis.as_mut().expect("this scenario runs on a Redis")
    }

    pub(crate) fn redis_wire(&self) -> &Wire {
        self.redis_wire.as_ref().expect("this scenario runs on a Redis")
    }

    pub(crate) fn sql_wire(&self) -> &Wire {
        self.sql_wire.as_ref().expect("this scenario runs on a database server")
    }

    pub(crate) async fn sql_server(&self) -> MutexGuard<'_, SqlServer> {
        let server = self.sql_server.as_ref();
        server.expect("this scenario runs on a database server").lock().await
    }

    /// The database of this scenario, past the wire.
    pub(crate) fn database(&self) -> &Fresh {
        self.fresh.as_ref().expect("it is there until the end")
    }

    /// Starts a server and waits until it serves.
    pub(crate) async fn serve(&mut self, at: usize) {
        let seat = &mut self.servers[at];
        let serve = seat.serve.clone();
        seat.process = Some(serve.start().await);
    }

    /// As `serve`; one that does not come up is started again, as every supervisor does.
    pub(crate) async fn keep_serving(&mut self, at: usize) {
        for _ in 0..STARTS {
            let seat = &mut self.servers[at];
            let process = seat.process.insert(seat.serve.spawn());
            let serves = within(SERVE_LIMIT, "the server serves or ends", async || {
                let serves = process.log().contains(r#""message":"serving""#);
                (serves || process.has_ended().is_some()).then_some(serves)
            });
            if serves.await {
                return;
            }
            crate::progress(&format!("    started again: {}", self.process(at).log()));
        }
        panic!("it does not start, {STARTS} times");
    }

    pub(crate) async fn serve_all(&mut self) {
        for at in 0..self.servers.len() {
            self.serve(at).await;
        }
    }

    /// Waits until a server that was only spawned serves.
    pub(crate) async fn serves(&mut self, at: usize) {
        self.process(at).serves().await;
    }

    /// Starts a server that dies the n-th time that it reaches this place, maybe at its start.
    pub(crate) fn serve_dying(&mut self, at: usize, failpoint: &str, nth: u32) {
        let seat = &mut self.servers[at];
        seat.process = Some(seat.serve.clone().dying(failpoint, nth).spawn());
    }

    pub(crate) fn process(&mut self, at: usize) -> &mut Process {
        self.servers[at].process.as_mut().expect("this server runs")
    }

    /// Buyers come from now on.
    pub(crate) fn load(&mut self) {
        self.clients = self.crowd.gather();
    }

    /// Buyers come, and the sale is under way.
    pub(crate) async fn warm_load(&mut self) {
        self.load();
        self.wins(WARM_WINS).await;
    }

    /// Waits until so many reservations more were heard.
    pub(crate) async fn wins(&self, more: usize) {
        let wanted = self.crowd.wins() + more;
        within(WARM_LIMIT, "the sale goes on", async || {
            (self.crowd.wins() >= wanted).then_some(())
        })
        .await;
    }

    pub(crate) fn is_loaded(&self) -> bool {
        !self.clients.is_empty()
    }

    /// From now on the other Redis counts, which took the place of the first.
    pub(crate) fn look_at_redis(&mut self) {
        let url = self.redis().url();
        self.direct.engine.url = SecretUrl::new(url);
    }

    /// A Redis that is out of the game, and lives as long as this.
    pub(crate) fn keep(&mut self, redis: RedisServer) {
        self.retired.push(redis);
    }

    pub(crate) async fn unload(&mut self) {
        let clients = std::mem::take(&mut self.clients);
        self.crowd.disperse(clients).await;
    }

    /// Waits until a server that was armed is dead.
    pub(crate) async fn crashed(&mut self, at: usize) {
        let process = self.process(at);
        within(SERVE_LIMIT, "the failpoint is reached", async || process.has_ended()).await;
        self.process(at).crashed().await;
    }

    /// Another server's parts over the same stores, past the wires; nothing works in them.
    pub(crate) async fn world(&self) -> Result<World, String> {
        let parts = Parts::open(&self.direct).await.map_err(|error| error.to_string())?;
        Ok(World { parts, settings: self.direct.clone() })
    }

    /// Units that are neither for sale nor in a live row; `None` where nobody can tell.
    pub(crate) async fn in_limbo(&self) -> Option<i64> {
        // The embedded engine forgets with its process.
        self.redis.as_ref()?;
        let world = self.world().await.ok()?;
        let books = world.read_books(&self.key).await;
        world.close().await;
        let books = books.ok()?;
        Some((books.total - books.engine_remaining - books.live_rows_units).max(0))
    }

    /// What a server says of the pipeline, once nothing is in it.
    pub(crate) async fn drained(&self, at: usize) -> Option<pb::OfferPipeline> {
        let activity_id = Some(self.key.activity_id.to_string());
        let mut request = tonic::Request::new(pb::GetPipelineStatusRequest { activity_id });
        request.set_timeout(Duration::from_secs(3));
        let mut admin = self.servers[at].admin.clone();
        let status = admin.get_pipeline_status(request).await.ok()?.into_inner();
        let left = [status.unacked, status.outbox_pending, status.outbox_releasing];
        let offer = status.offers.into_iter().next()?;
        (left == [Some(0); 3] && !offer.frozen && offer.remaining.is_some()).then_some(offer)
    }

    /// Waits until every server says that nothing is in the pipeline; when it was so.
    pub(crate) async fn all_drained(&self, limit: Duration) -> Result<Instant, String> {
        let deadline = Instant::now() + limit;
        loop {
            let mut drained = true;
            for at in 0..self.servers.len() {
                drained &= self.drained(at).await.is_some();
            }
            if drained {
                return Ok(Instant::now());
            }
            if Instant::now() >= deadline {
                return Err(format!("the pipeline is not empty after {limit:?}"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the units that are left and those of reservations are all there are: what a server
    /// that died had set aside is put back by the sweeper of another, once its lock has run out. Units
    /// that do not come back are for the books to tell.
    pub(crate) async fn nothing_is_aside(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let is_whole = |offer: pb::OfferPipeline| {
            offer.remaining.unwrap_or(0) + offer.reserved_sql >= offer.total
        };
        while !self.drained(0).await.is_some_and(is_whole) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A sale beside this one that has ended; no server may run yet.
    pub(crate) async fn end_another_sale(&self) {
        let world = self.world().await.unwrap();
        let sale = Sale { activity: OTHER, ..Sale::default() };
        let key = world.open_sale(&sale).await;
        let ended = world.parts.activities.end(&key.activity_id, "test", "").await;
        ended.unwrap();
        world.close().await;
    }

    pub(crate) async fn settle_the_other(&self) -> Result<(), tonic::Status> {
        let request = pb::SettleActivityRequest {
            activity_id: OTHER.to_owned(),
            reason: "it is over".to_owned(),
        };
        self.servers[0].admin.clone().settle_activity(request).await.map(|_| ())
    }

    /// One attempt to adjust the stock of the sale; whether it is applied.
    pub(crate) async fn try_to_adjust(
        &self,
        request_id: &str,
        delta: i64,
    ) -> Result<bool, tonic::Status> {
        let request = pb::AdjustStockRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            delta,
            request_id: request_id.to_owned(),
            reason: "a fault".to_owned(),
        };
        let answer = self.servers[0].admin.clone().adjust_stock(request).await?;
        Ok(answer.into_inner().applied)
    }

    /// Has the first server split the stock into so many segments.
    pub(crate) async fn try_to_split(&self, segments: i32) -> Result<(), tonic::Status> {
        let request = pb::RebuildStockRequest {
            activity_id: self.key.activity_id.to_string(),
            reason: "a fault".to_owned(),
            segments,
            ..Default::default()
        };
        self.servers[0].admin.clone().rebuild_stock(request).await.map(|_| ())
    }

    /// The same, until it is decided.
    pub(crate) async fn adjust(&self, request_id: &str, delta: i64) -> bool {
        within(SERVE_LIMIT, "the stock is adjusted", async || {
            self.try_to_adjust(request_id, delta).await.ok()
        })
        .await
    }

    /// Waits until the engine keeps nothing of the sale that was settled.
    pub(crate) async fn the_other_is_forgotten(&self) {
        let Some(redis) = &self.redis else { return };
        within(SERVE_LIMIT, "what was settled is purged", async || {
            let keys: Vec<String> = redis.command(&["KEYS", &format!("sk:{{{OTHER}:*")]).await;
            keys.is_empty().then_some(())
        })
        .await;
    }

    /// Waits until every hold that nobody confirmed has run out.
    pub(crate) async fn holds_are_over(&self) -> Result<(), String> {
        let deadline = Instant::now() + self.setup.hold.unwrap_or_default() + SERVE_LIMIT;
        let confirmed = self.crowd.ledger().told.values().filter(|told| told.confirmed).count();
        let confirmed = i64::try_from(confirmed).unwrap();
        loop {
            let orders = self.drained(0).await.map(|offer| offer.orders_live);
            if orders == Some(confirmed) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(format!("{confirmed} are confirmed, and {orders:?} orders live"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Keeps what the servers wrote, for whoever looks for the cause.
    pub(crate) fn keep_logs(&self, name: &str) -> Vec<PathBuf> {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("faults");
        std::fs::create_dir_all(&folder).unwrap();
        let mut kept = Vec::new();
        for (at, seat) in self.servers.iter().enumerate() {
            if let Some(process) = &seat.process {
                let path = folder.join(format!("{name}-{}-{at}.log", self.sql.name()));
                std::fs::write(&path, process.log()).unwrap();
                kept.push(path);
            }
        }
        kept
    }

    /// Ends everything, in order, and removes the database.
    pub(crate) async fn close(mut self) {
        self.unload().await;
        for seat in &mut self.servers {
            if let Some(process) = &mut seat.process {
                process.kill();
            }
        }
        if let Some(fresh) = self.fresh.take() {
            fresh.remove().await;
        }
    }
}
