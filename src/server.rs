//! Composition: opens the stores, starts the workers, serves, and stops all of it in order.
//!
//! Nobody imports this but the command line and the tests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use sea_orm::DbErr;
use tokio::{
    net::TcpListener,
    runtime::Handle,
    sync::{Notify, Semaphore},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tower::layer::util::{Identity, Stack};

pub(crate) mod fronts;
mod listener;
mod tenure;
pub mod tls;
mod workers;

use crate::{
    activities::Activities,
    admission::{
        catalog::Catalog,
        limits::{LimitOptions, Limits, Rate},
    },
    api::{self, Services, pb, seckill::jittered, stack, web::Web},
    circuit::Circuit,
    config::{self, Settings},
    database::{self, Backend, Database, DatabaseSettings},
    engine::{
        self, Engine,
        batcher::SegmentOptions,
        locks::Locks,
        redis::{self, RedisEngine, RedisSettings},
        scripts::Attempts,
    },
    error::Error,
    failpoints::failpoint,
    http, metrics,
    outbox::{
        dead_letters::DeadLetters,
        poller::{Poller, PollerOptions},
        writer::Writer,
    },
    reconcile::Reconciler,
    recovery::Recovery,
    reservations::Reservations,
    stock_feed::{FeedOptions, StockFeed},
};
use fronts::Fronts;
use tenure::Tenure;

/// The services whose health can be asked for.
pub(crate) const SERVICES: [&str; 2] =
    [pb::seckill_server::SERVICE_NAME, pb::seckill_admin_server::SERVICE_NAME];
/// How long the database may take to be closed.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
const MAX_PENDING_RESETS: usize = 1_000;
const MAX_HEADER_BYTES: u32 = 16 * 1_024;
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a start that failed waits for what it had begun.
const ABANDON_LIMIT: Duration = Duration::from_secs(2);
/// Offers rebuilt at the same time when the embedded engine starts.
const REBUILDS_AT_ONCE: usize = 8;

/// Why the server did not start; one line each, which says what to change.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    #[error(transparent)]
    Database(#[from] database::OpenError),
    #[error("the database did not answer: {0}")]
    Sql(#[from] DbErr),
    #[error(
        "the schema of the database is behind this server: run `seckill migrate up` with the same \
         settings first"
    )]
    SchemaBehind,
    #[error("the schema of the database is newer than this program: {0}")]
    SchemaAhead(String),
    #[error(transparent)]
    Engine(#[from] redis::OpenError),
    #[error(
        "another server ({owner}) runs the embedded engine over this database; stop it, or set \
         engine.url to a Redis that both can use"
    )]
    EmbeddedHeld { owner: String },
    #[error("{addr} can't be listened on: {cause}; set {key} to another address")]
    Bind { key: &'static str, addr: SocketAddr, cause: std::io::Error },
    #[error("the threads of the gRPC port can't be started: {0}")]
    Threads(std::io::Error),
    #[error("the offers could not be rebuilt from the database: {0}")]
    Rebuild(Error),
}

/// Everything that a running server is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    pub database: Database,
    pub engine: Arc<dyn Engine>,
    pub catalog: Arc<Catalog>,
    pub recovery: Arc<Recovery>,
    pub reservations: Arc<Reservations>,
    pub activities: Arc<Activities>,
    pub reconciler: Arc<Reconciler>,
    pub dead_letters: Arc<DeadLetters>,
    pub locks: Locks,
    pub feed: Arc<StockFeed>,
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
    /// Where the work on reservations runs.
    pub tasks: TaskTracker,
    pub shutdown: CancellationToken,
    /// Of the embedded engine.
    tenure: Option<Tenure>,
}

impl Parts {
    /// Opens the stores and puts the parts together; nothing runs yet, no port is open.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn open(settings: &Settings) -> Result<Self, StartError> {
        let database = open_database(settings).await?;
        let shutdown = CancellationToken::new();
        let (engine, tenure) = open_engine(settings, &database, &shutdown).await?;
        failpoint!("after_stores_opened");
        let parts = Self { tenure, ..Self::with(settings, database, engine, shutdown) };
        match parts.read_sales().await {
            Ok(()) => Ok(parts),
            Err(error) => {
                parts.abandon().await;
                Err(error)
            }
        }
    }

    /// The parts of a server over stores that are open. The catalog is empty until it is refreshed.
    #[must_use]
    pub fn over(settings: &Settings, database: Database, engine: Arc<dyn Engine>) -> Self {
        Self::with(settings, database, engine, CancellationToken::new())
    }

    fn with(
        settings: &Settings,
        database: Database,
        engine: Arc<dyn Engine>,
        shutdown: CancellationToken,
    ) -> Self {
        let tasks = TaskTracker::new();
        let engine_circuit = Arc::new(Circuit::new("engine"));
        let database_circuit = Arc::new(Circuit::new("database"));
        let due = Arc::new(Notify::new());
        let segments = segment_options(settings);
        let catalog =
            Arc::new(Catalog::new(database.clone(), engine.clone(), segments, tasks.clone()));
        let locks = Locks::new(engine.clone(), tasks.clone());
        let recovery = Arc::new(Recovery::new(
            database.clone(),
            catalog.clone(),
            locks.clone(),
            engine_circuit.clone(),
            database_circuit.clone(),
            tasks.clone(),
            shutdown.clone(),
        ));
        let writer = Arc::new(Writer::new(
            database.clone(),
            database_circuit.clone(),
            tasks.clone(),
            due.clone(),
            settings.reserve.max_in_flight,
        ));
        let reservations = Arc::new(Reservations {
            catalog: catalog.clone(),
            database: database.clone(),
            writer,
            recovery: recovery.clone(),
            engine_circuit: engine_circuit.clone(),
            database_circuit: database_circuit.clone(),
            max_wait: segments.max_wait,
            limits: Limits::new(limit_options(&settings.limits)),
            lookups: Semaphore::new(lookups(settings, &database)),
            lookups_waiting: Default::default(),
            due,
        });
        let reconciler = Arc::new(Reconciler {
            catalog: catalog.clone(),
            database: database.clone(),
            recovery: recovery.clone(),
            locks: locks.clone(),
            comparing: Semaphore::new(1),
            engine_circuit: engine_circuit.clone(),
            database_circuit: database_circuit.clone(),
        });
        let dead_letters = Arc::new(DeadLetters { reservations: reservations.clone() });
        let activities = Arc::new(Activities {
            catalog: catalog.clone(),
            database: database.clone(),
            engine: engine.clone(),
            recovery: recovery.clone(),
            reconciler: reconciler.clone(),
            locks: locks.clone(),
            engine_circuit: engine_circuit.clone(),
            database_circuit: database_circuit.clone(),
        });
        let feed = Arc::new(StockFeed::new(
            catalog.clone(),
            recovery.clone(),
            engine_circuit.clone(),
            FeedOptions {
                sample: Duration::from_millis(settings.watch.sample_ms),
                heartbeat: Duration::from_millis(settings.watch.heartbeat_ms),
            },
            tasks.clone(),
            shutdown.clone(),
        ));
        Self {
            database,
            engine,
            catalog,
            recovery,
            reservations,
            activities,
            reconciler,
            dead_letters,
            locks,
            feed,
            engine_circuit,
            database_circuit,
            tasks,
            shutdown,
            tenure: None,
        }
    }

    async fn read_sales(&self) -> Result<(), StartError> {
        self.catalog.refresh().await?;
        failpoint!("after_catalog_read");
        if self.tenure.is_some() {
            self.rebuild_all().await?;
        }
        Ok(())
    }

    /// Ends a start that failed: the next one must not have to wait for a lease to run out.
    async fn abandon(self) {
        self.close(tokio::time::Instant::now() + ABANDON_LIMIT).await;
    }

    /// A poller over these parts.
    #[must_use]
    pub fn poller(&self, settings: &Settings) -> Poller {
        let outbox = &settings.outbox;
        let options = PollerOptions {
            batch: u64::from(outbox.batch),
            max_attempts: i32::try_from(outbox.max_attempts).unwrap_or(i32::MAX),
            backoff: Duration::from_millis(outbox.backoff_ms),
            max_backoff: Duration::from_millis(outbox.max_backoff_ms),
        };
        Poller::new(self.reservations.clone(), options)
    }

    /// Starts the workers without a port.
    #[cfg(test)]
    pub(crate) fn start_workers(&self, settings: &Settings) {
        workers::start(self, settings, HealthReporter::new());
    }

    /// The embedded engine keeps nothing on disk: its start is a rebuild, and the raised epoch
    /// ends any older process on the same database.
    async fn rebuild_all(&self) -> Result<(), StartError> {
        use futures_util::{StreamExt, stream};
        let activities = self.catalog.all();
        let offers: Vec<_> = activities
            .iter()
            .flat_map(|activity| activity.offers.values())
            .filter(|offer| offer.is_in_engine())
            .cloned()
            .collect();
        if !offers.is_empty() {
            tracing::info!(offers = offers.len(), "rebuilding the embedded engine from SQL");
        }
        stream::iter(offers)
            .map(|offer| async move { self.recovery.rebuild_at_start(&offer).await })
            .buffer_unordered(REBUILDS_AT_ONCE)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect::<Result<(), _>>()
            .map_err(StartError::Rebuild)
    }
}

/// What the settings say about the database.
#[must_use]
pub fn sql_settings(settings: &config::DatabaseSettings) -> DatabaseSettings {
    DatabaseSettings {
        url: settings.url.expose().to_owned(),
        max_connections: settings.max_connections,
        connect_timeout_ms: settings.connect_timeout_ms,
        acquire_timeout_ms: settings.acquire_timeout_ms,
        statement_timeout_ms: settings.statement_timeout_ms,
        lock_timeout_ms: settings.lock_timeout_ms,
    }
}

fn segment_options(settings: &Settings) -> SegmentOptions {
    let limits = &settings.limits;
    let attempts = Attempts {
        most: limits.user_attempts,
        window: Duration::from_millis(limits.user_window_ms),
    };
    SegmentOptions {
        attempts: (attempts.most > 0).then_some(attempts),
        max_wait: Duration::from_millis(settings.reserve.max_wait_ms),
        believe_sold_out: Duration::from_millis(settings.reserve.believe_sold_out_ms),
    }
}

fn limit_options(settings: &config::LimitsSettings) -> LimitOptions {
    let rate = |per_s, burst| Rate { per_s, burst };
    LimitOptions {
        activity: rate(settings.activity_per_s, settings.activity_burst),
        user: rate(settings.user_per_s, settings.user_burst),
        address: rate(settings.address_per_s, settings.address_burst),
        unlimited: settings.address_unlimited.clone(),
    }
}

/// What the settings say about Redis; `None` for the embedded engine.
#[must_use]
pub fn redis_settings(settings: &config::EngineSettings) -> Option<RedisSettings> {
    let url = settings.url.expose();
    if url.is_empty() {
        return None;
    }
    Some(RedisSettings {
        connections: u32::try_from(settings.connections).unwrap_or(u32::MAX),
        connect_timeout_ms: settings.connect_timeout_ms,
        response_timeout_ms: settings.response_timeout_ms,
        ca_file: settings.ca_file.clone(),
        cert_file: settings.cert_file.clone(),
        key_file: settings.key_file.clone(),
        sentinel_user: settings.sentinel_user.clone(),
        sentinel_password: settings.sentinel_password.expose().to_owned(),
        ..RedisSettings::new(url)
    })
}

async fn open_database(settings: &Settings) -> Result<Database, StartError> {
    let settings = sql_settings(&settings.database);
    let database = Database::open(&settings).await?;
    if !database.is_current().await.map_err(schema_failure)? {
        if database.backend() != Backend::Sqlite {
            return Err(StartError::SchemaBehind);
        }
        database.migrate_up(None).await?;
    }
    Ok(database)
}

/// Why the schema could not be looked at.
pub(crate) fn schema_failure(error: DbErr) -> StartError {
    // It was read, and this program does not know it.
    if let DbErr::Migration(text) = error {
        return StartError::SchemaAhead(text);
    }
    StartError::Sql(error)
}

/// How many calls of Release, Confirm and GetReservation are in SQL at once. One writer serves
/// SQLite, in the order of asking, so few may ask before the outbox does.
fn lookups(settings: &Settings, database: &Database) -> usize {
    match database.backend() {
        Backend::Sqlite => 4,
        Backend::Postgres | Backend::MySql => {
            (settings.database.max_connections as usize / 2).max(1)
        }
    }
}

async fn open_engine(
    settings: &Settings,
    database: &Database,
    shutdown: &CancellationToken,
) -> Result<(Arc<dyn Engine>, Option<Tenure>), StartError> {
    let Some(settings) = redis_settings(&settings.engine) else {
        let (tenure, engine) = Tenure::begin(database, shutdown).await?;
        tracing::info!(
            "the embedded engine serves this process alone; its stock is rebuilt from the \
             database at each start. Set engine.url to a Redis for more than one server"
        );
        return Ok((engine, Some(tenure)));
    };
    Ok((Arc::new(RedisEngine::connect(&settings).await?), None))
}

/// A server that serves.
#[derive(Debug)]
pub struct Server {
    /// Where it listens; the port is the real one when port 0 was asked for.
    pub addr: SocketAddr,
    pub parts: Parts,
    health: HealthReporter,
    grace: Duration,
    fronts: Fronts,
    http: Option<HttpPort>,
}

/// The port for metrics, probes and the dashboard, which outlives everything else.
#[derive(Debug)]
struct HttpPort {
    addr: SocketAddr,
    serving: JoinHandle<()>,
    stop: CancellationToken,
}

impl Server {
    /// Opens everything, starts the workers and serves.
    ///
    /// # Errors
    /// [`StartError`]; then nothing runs.
    pub async fn start(settings: &Settings) -> Result<Self, StartError> {
        let tls = tls::Tls::load(settings).await?;
        let parts = Parts::open(settings).await?;
        let ((listener, addr), http) = match listen(settings).await {
            Ok(bound) => bound,
            Err(error) => {
                parts.abandon().await;
                return Err(error);
            }
        };

        let health = HealthReporter::new();
        set_health(&health, false).await;
        workers::start(&parts, settings, health.clone());

        let services = Arc::new(Services {
            reservations: parts.reservations.clone(),
            activities: parts.activities.clone(),
            reconciler: parts.reconciler.clone(),
            dead_letters: parts.dead_letters.clone(),
            feed: parts.feed.clone(),
            tasks: parts.tasks.clone(),
            shutdown: parts.shutdown.clone(),
            stores: Handle::current(),
            max_stream_age: Duration::from_secs(settings.grpc.max_stream_age_s),
        });
        if let Some(tls) = tls.clone() {
            parts.tasks.spawn(tls.keep_current(parts.shutdown.clone()));
        }
        let room = parts.reservations.writer.room();
        let fronts =
            Fronts::start(settings, listener, tls.as_ref(), Some(room), parts.feed.turns(), || {
                let (reflection_v1, reflection_v1alpha) = api::reflection();
                grpc(settings)
                    .add_service(HealthServer::new(HealthService::from_health_reporter(
                        health.clone(),
                    )))
                    .add_service(reflection_v1)
                    .add_service(reflection_v1alpha)
                    .add_service(stack::admin(services.clone()))
                    .add_service(stack::seckill(services.clone()))
            });
        let fronts = match fronts {
            Ok(fronts) => fronts,
            Err(error) => {
                parts.abandon().await;
                return Err(StartError::Threads(error));
            }
        };
        failpoint!("before_serving");
        set_health(&health, true).await;
        let engine = parts.engine.kind();
        engine::register_metrics();
        metrics::serves_on(engine, parts.database.backend().as_str());
        let http = http.map(|bound| HttpPort::start(bound, settings, &parts, &services));
        let http_addr = http.as_ref().map(|http| tracing::field::display(http.addr));
        tracing::info!(%addr, http_addr, engine, "serving");
        Ok(Self {
            addr,
            parts,
            health,
            grace: Duration::from_millis(settings.grpc.shutdown_grace_ms),
            fronts,
            http,
        })
    }

    /// Where metrics and probes are; the port is the real one when port 0 was asked for.
    #[must_use]
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(|http| http.addr)
    }

    /// Stops in order, within the grace period: health says so, no new calls, streams end, what
    /// is under way finishes, the workers finish their pass, the pools close. Metrics and probes
    /// are there until the end.
    pub async fn stop(mut self) {
        let deadline = tokio::time::Instant::now() + self.grace;
        set_health(&self.health, false).await;
        self.parts.shutdown.cancel();
        self.fronts.stop();
        // A client with an open stream, or one that never says a word, could hold this for ever.
        if tokio::time::timeout_at(deadline, self.fronts.ended()).await.is_err() {
            tracing::warn!("some connections did not end within the grace period");
            self.fronts.abort().await;
        }
        self.parts.close(deadline).await;
        if let Some(http) = self.http {
            http.stop().await;
        }
        tracing::info!("stopped");
    }

    /// Waits for the end of the server on its own account: it lost the embedded engine's lease.
    pub async fn ended(&self) {
        self.parts.shutdown.cancelled().await;
    }
}

impl HttpPort {
    fn start(
        (listener, addr): Bound,
        settings: &Settings,
        parts: &Parts,
        services: &Arc<Services>,
    ) -> Self {
        let web = settings.check_dashboard().map(|()| Web::new(settings, services));
        if let Err(why) = web
            && settings.http.dashboard
        {
            tracing::warn!("the dashboard is not served: {why}");
        }
        let view = http::View {
            engine: parts.engine.clone(),
            engine_circuit: parts.engine_circuit.clone(),
            database_circuit: parts.database_circuit.clone(),
            recovery: parts.recovery.clone(),
            reservations: parts.reservations.clone(),
            shutdown: parts.shutdown.clone(),
            web,
            longest_call: listener::longest_call(&settings.grpc),
        };
        let stop = CancellationToken::new();
        #[allow(clippy::disallowed_methods, reason = "`stop` waits for it, after all the rest")]
        let serving = tokio::spawn(http::serve(listener, view, stop.clone()));
        Self { addr, serving, stop }
    }

    async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.serving.await {
            tracing::error!(%error, "the HTTP port ended");
        }
    }
}

/// The gRPC port before it has a service: every limit, and what every call passes.
pub(crate) fn grpc(
    settings: &Settings,
) -> tonic::transport::Server<Stack<stack::Layers, Identity>> {
    tonic::transport::Server::builder()
        .layer(stack::layers(settings))
        .max_concurrent_streams(settings.grpc.max_concurrent_streams)
        // A gateway whose callers all hit one deadline resets as many calls as it has open.
        .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .http2_keepalive_interval(Some(Duration::from_secs(settings.grpc.keepalive_s)))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        // Never with a grace: that turns GOAWAY off.
        .max_connection_age(jittered(Duration::from_secs(settings.grpc.max_connection_age_s)))
}

type Bound = (TcpListener, SocketAddr);

/// Takes both ports.
async fn listen(settings: &Settings) -> Result<(Bound, Option<Bound>), StartError> {
    let grpc = bind("grpc.addr", settings.grpc.addr).await?;
    let http = match settings.http.addr.0 {
        Some(addr) => Some(bind("http.addr", addr).await?),
        None => None,
    };
    Ok((grpc, http))
}

async fn bind(key: &'static str, addr: SocketAddr) -> Result<Bound, StartError> {
    let bound = match TcpListener::bind(addr).await {
        Ok(listener) => listener.local_addr().map(|addr| (listener, addr)),
        Err(cause) => Err(cause),
    };
    bound.map_err(|cause| StartError::Bind { key, addr, cause })
}

impl Parts {
    /// Waits until the work that was begun is finished, and closes the stores.
    pub async fn close(self, deadline: tokio::time::Instant) {
        self.shutdown.cancel();
        self.tasks.close();
        if tokio::time::timeout_at(deadline, self.tasks.wait()).await.is_err() {
            tracing::error!(
                tasks = self.tasks.len(),
                "work was still under way at the end of the grace period; the sweeper of another \
                 server, or of the next start, finishes it"
            );
        }
        // In a task, since no SQL future may be dropped; and bounded, since a connection may be
        // dead without a word.
        #[allow(clippy::disallowed_methods, reason = "it is waited for, below")]
        let closing = tokio::spawn(async move {
            if let Some(tenure) = self.tenure {
                tenure.end().await?;
            }
            self.database.close().await
        });
        match tokio::time::timeout(CLOSE_LIMIT, closing).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the database was not closed in order"),
            Ok(Err(error)) => tracing::warn!(%error, "the database was not closed in order"),
            Err(_) => tracing::warn!("the database did not answer at the end"),
        }
    }
}

/// All names, the empty one too, or those who watch the whole server would miss it.
async fn set_health(health: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in [""].into_iter().chain(SERVICES) {
        health.set_service_status(name, status).await;
    }
}
