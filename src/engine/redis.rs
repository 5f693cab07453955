//! The engine on a Redis or Valkey server.
//!
//! A few connections carry all calls, many at once; a call goes to the connection that its first
//! key stands for, so the calls of one offer keep their order. Each connection knows the identity
//! of the server that it reached.
//!
//! **Invariant:** a script is never sent again unless it certainly did not run. What was sent and
//! not answered is [`EngineError::Unknown`].

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, IntoConnectionInfo, ProtocolVersion,
    PushInfo, PushKind, RedisConnectionInfo, RedisError, ServerError,
    aio::{AsyncPushSender, MultiplexedConnection, SendError},
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use arc_swap::{ArcSwap, ArcSwapOption};
use bb8::{ErrorSink, ManageConnection, Pool, PooledConnection, RunError};
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use tokio::{sync::watch, time::timeout};

use super::{Call, Engine, EngineError, Script, Value, events::Hearing, scripts};

mod hearing;
mod settings;

pub use self::settings::{Address, Finding, Level, OpenError, RedisSettings};

/// A connection that let so many calls in a row wait too long is given up.
const MAX_TIMEOUTS: u32 = 3;
/// After a failed dial callers hear so at once, for as long.
const REDIAL_PAUSE: Duration = Duration::from_millis(50);
/// How long a caller waits for a connection that another caller makes.
const DIAL_WAIT: Duration = Duration::from_millis(250);

/// Runs the scripts on one Redis or Valkey server.
pub struct RedisEngine {
    address: Address,
    connect_timeout: Duration,
    dialer: Dialer,
    pool: Pool<Dialer>,
    dial_errors: DialErrors,
    slots: Box<[Slot]>,
    hasher: RandomState,
    hashes: HashMap<&'static str, (Script, String)>,
}

impl fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisEngine")
            .field("address", &self.address)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

impl RedisEngine {
    /// Checks the server and connects to it.
    ///
    /// # Errors
    /// [`OpenError`] in one line that says what to change. The server is refused when it is older
    /// than Redis 7, a replica, a member of a cluster, or when it may evict keys.
    pub async fn connect(settings: &RedisSettings) -> Result<Self, OpenError> {
        let dialer = Dialer::new(settings)?;
        let address = dialer.address.clone();
        for finding in dialer.check().await? {
            match finding.level {
                Level::Fine => {}
                Level::Warning => tracing::warn!(%address, "{}", finding.text),
                Level::Error => return Err(OpenError::Misconfigured(finding.text)),
            }
        }
        let dial_errors = DialErrors { address: address.clone(), last: watch::Sender::default() };
        let pool = Pool::builder()
            .max_size(settings.connections)
            .test_on_check_out(false)
            .max_lifetime(None)
            .idle_timeout(None)
            .retry_connection(false)
            .connection_timeout(settings.connect_timeout())
            .error_sink(dial_errors.boxed_clone())
            .build_unchecked(dialer.clone());
        let hash = |script: &Script| ::redis::Script::new(script.source).get_hash().to_owned();
        let engine = Self {
            address: address.clone(),
            connect_timeout: settings.connect_timeout(),
            dialer: dialer.clone(),
            pool,
            dial_errors,
            slots: (0..settings.connections).map(|_| Slot::default()).collect(),
            hasher: RandomState::new(),
            hashes: scripts::ALL.iter().map(|s| (s.name, (*s, hash(s)))).collect(),
        };
        match engine.probe().await {
            Ok(()) => Ok(engine),
            Err(error) => Err(OpenError::Unreachable {
                address: address.to_string(),
                cause: error.to_string(),
            }),
        }
    }

    /// What is good and bad about the server behind these settings, for `doctor`.
    ///
    /// # Errors
    /// [`OpenError`] when it can't be asked.
    pub async fn check(settings: &RedisSettings) -> Result<Vec<Finding>, OpenError> {
        Dialer::new(settings)?.check().await
    }

    /// The process that the server is, as itself knows it: on its machine, in its container.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn process_id(settings: &RedisSettings) -> Result<Option<u32>, OpenError> {
        let dialer = Dialer::new(settings)?;
        let info = dialer.info().await?.1;
        Ok(info.get("process_id").and_then(|id| id.parse().ok()))
    }

    /// The connection for these keys; calls with the same first key get the same one.
    fn slot(&self, keys: &[String]) -> &Slot {
        let hash = keys.first().map_or(0, |key| self.hasher.hash_one(key));
        let len = self.slots.len() as u64;
        &self.slots[usize::try_from(hash % len).unwrap_or(0)]
    }

    async fn run(&self, call: &Call) -> Result<Value, EngineError> {
        let slot = self.slot(&call.keys);
        let link = self.link(slot).await?;
        let server = link.server.load_full();
        let reply = self.send(&link, call, &server).await?;
        if !is_of_another_server(&reply) {
            return Ok(reply);
        }
        // Nothing changed so far. Is it the data that is of another server, or did the server
        // change behind this connection?
        if **link.server.load() == *server {
            let found = link.read_identity().await;
            link.server.store(Arc::new(found.map_err(|cause| self.not_run(cause))?));
        }
        let current = link.server.load_full();
        match current == server {
            true => Ok(reply),
            false => self.send(&link, call, &current).await,
        }
    }

    /// Sends a script by its hash and, if the server does not know it, by its text.
    async fn send(&self, link: &Link, call: &Call, server: &str) -> Result<Value, EngineError> {
        let known = self.hashes.get(call.script.name).filter(|(script, _)| *script == call.script);
        if let Some((_, hash)) = known {
            let reply = link.request(&command("EVALSHA", hash, call, server)).await;
            match reply {
                Err(Failure::Server(error)) if error.code() == "NOSCRIPT" => {}
                other => return self.outcome(link, other),
            }
        }
        let reply = link.request(&command("EVAL", call.script.source, call, server)).await;
        self.outcome(link, reply)
    }

    fn outcome(
        &self,
        link: &Link,
        reply: Result<::redis::Value, Failure>,
    ) -> Result<Value, EngineError> {
        match reply {
            Ok(reply) => value(reply).map_err(|error| EngineError::Script(error_text(&error))),
            Err(Failure::Lost(cause)) => {
                Err(EngineError::Unknown(format!("{}: {cause}", self.address)))
            }
            Err(Failure::Server(error)) => {
                let text = error_text(&error);
                if error.code() == "READONLY" {
                    link.give_up();
                }
                Err(match error.code() {
                    "OOM" | "MISCONF" => EngineError::Full(text),
                    code if means_not_run(code) => EngineError::NotRun(text),
                    _ => EngineError::Script(text),
                })
            }
        }
    }

    fn not_run(&self, cause: impl fmt::Display) -> EngineError {
        EngineError::NotRun(format!("{}: {cause}", self.address))
    }

    /// The slot's connection, made anew when it is broken.
    ///
    /// One caller dials. Others wait a moment for it the first time; while the server is away
    /// they are told so at once.
    async fn link(&self, slot: &Slot) -> Result<Arc<Link>, EngineError> {
        if let Some(link) = slot.link() {
            return Ok(link);
        }
        if let Some(cause) = slot.recent_failure() {
            return Err(self.not_run(cause));
        }
        let busy = || self.not_run("the connection is being made again");
        let _dialing = match slot.dialing.try_lock() {
            Ok(guard) => guard,
            Err(_) if slot.has_failed() => return Err(busy()),
            Err(_) => timeout(DIAL_WAIT, slot.dialing.lock()).await.map_err(|_| busy())?,
        };
        if let Some(link) = slot.link() {
            return Ok(link);
        }
        if let Some(cause) = slot.recent_failure() {
            return Err(self.not_run(cause));
        }
        // The pool takes the broken one back, drops it, and may make another.
        slot.held.store(None);
        match self.dial().await {
            Ok(held) => {
                let link = Arc::clone(&held);
                slot.held.store(Some(Arc::new(Held(held))));
                *slot.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(link)
            }
            Err(cause) => {
                let failure = Some((Instant::now(), cause.clone()));
                *slot.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
                Err(self.not_run(cause))
            }
        }
    }

    async fn dial(&self) -> Result<PooledConnection<'static, Dialer>, String> {
        let late = || format!("no connection within {:?}", self.connect_timeout);
        let dialed = async {
            loop {
                let mut failure = self.dial_errors.last.subscribe();
                let held = futures_util::select_biased! {
                    held = self.pool.get_owned().fuse() => held,
                    _ = failure.changed().fuse() => return Err(failure.borrow().clone()),
                };
                match held {
                    // It may have waited in the pool, after a caller that did not.
                    Ok(held) if held.is_broken() => {}
                    Ok(held) => return Ok(held),
                    Err(RunError::User(cause)) => return Err(cause),
                    Err(RunError::TimedOut) => return Err(late()),
                }
            }
        };
        timeout(self.connect_timeout, dialed).await.unwrap_or_else(|_| Err(late()))
    }

    async fn probe_slot(&self, slot: &Slot) -> Result<(), EngineError> {
        let link = self.link(slot).await?;
        match link.read_identity().await {
            Ok(server) => {
                link.server.store(Arc::new(server));
                Ok(())
            }
            Err(cause) => {
                link.give_up();
                tracing::warn!(address = %self.address, %cause, "a connection is dropped");
                // It was made before, so `link` dials: this one has just asked for all there is.
                self.link(slot).await.map(drop)
            }
        }
    }
}

impl Engine for RedisEngine {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn eval(&self, call: Call) -> BoxFuture<'_, Result<Value, EngineError>> {
        Box::pin(async move { self.run(&call).await })
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async {
            let probes = join_all(self.slots.iter().map(|slot| self.probe_slot(slot))).await;
            probes.into_iter().collect()
        })
    }

    fn hear(&self) -> Hearing {
        hearing::hear(self.dialer.clone())
    }
}

/// The place of one connection.
#[derive(Default)]
struct Slot {
    held: ArcSwapOption<Held>,
    /// Held by whoever makes the connection.
    dialing: tokio::sync::Mutex<()>,
    /// When and why the last dial failed; `None` after one that did not.
    failure: Mutex<Option<(Instant, String)>>,
}

/// A pooled connection for as long as it works; calls go through clones of its handle.
struct Held(PooledConnection<'static, Dialer>);

impl Slot {
    fn link(&self) -> Option<Arc<Link>> {
        let held = self.held.load();
        let link = &held.as_ref()?.0;
        (!link.is_broken()).then(|| Arc::clone(link))
    }

    fn has_failed(&self) -> bool {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn recent_failure(&self) -> Option<String> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, cause) = failure.as_ref()?;
        (at.elapsed() < REDIAL_PAUSE).then(|| cause.clone())
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("link", &self.link()).finish_non_exhaustive()
    }
}

/// One connection and the identity of the server behind it.
struct Link {
    connection: MultiplexedConnection,
    /// `run_id/replid`: a restart changes the first, a promotion the second.
    server: ArcSwap<String>,
    broken: Arc<AtomicBool>,
    timeouts: AtomicU32,
}

/// Why a request has no reply.
enum Failure {
    /// It was sent, or may have been.
    Lost(String),
    Server(ServerError),
}

impl Link {
    async fn request(&self, command: &Cmd) -> Result<::redis::Value, Failure> {
        match self.connection.clone().send_packed_command(command).await {
            Ok(::redis::Value::ServerError(error)) => {
                self.timeouts.store(0, Ordering::Relaxed);
                Err(Failure::Server(error))
            }
            Ok(reply) => {
                self.timeouts.store(0, Ordering::Relaxed);
                Ok(reply)
            }
            Err(error) => {
                let late = error.is_timeout();
                if !late || self.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_TIMEOUTS {
                    self.give_up();
                }
                match late {
                    true => Err(Failure::Lost("no answer in time".to_owned())),
                    false => Err(Failure::Lost(error.to_string())),
                }
            }
        }
    }

    /// No new call goes to this connection; those under way may still be answered.
    fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Asks who the server is; a replica gives the connection up.
    async fn read_identity(&self) -> Result<String, String> {
        let found = Info::ask(&mut self.connection.clone()).await;
        let found = found.map_err(|error| error.to_string()).and_then(|info| info.identity());
        if found.is_err() {
            self.give_up();
        }
        found
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("server", &self.server.load())
            .field("broken", &self.is_broken())
            .finish_non_exhaustive()
    }
}

/// Makes connections for the pool.
#[derive(Clone)]
struct Dialer {
    address: Address,
    client: Client,
    settings: RedisSettings,
}

impl Dialer {
    fn new(settings: &RedisSettings) -> Result<Self, OpenError> {
        let address = settings.address()?;
        let invalid =
            |error: RedisError| OpenError::InvalidUrl(address.without_password(&error.to_string()));
        // RESP3, since only with it redis-rs tells of a connection that closed while it was idle.
        let mut login = RedisConnectionInfo::default()
            .set_db(address.database)
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("seckill", env!("CARGO_PKG_VERSION"));
        if let Some(user) = &address.user {
            login = login.set_username(user);
        }
        if let Some(password) = &address.password {
            login = login.set_password(password);
        }
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(1));
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(Duration::from_millis(settings.tcp_user_timeout_ms));
        let info = ConnectionAddr::Tcp(address.host.clone(), address.port)
            .into_connection_info()
            .map_err(invalid)?
            .set_redis_settings(login)
            .set_tcp_settings(tcp);
        let client = Client::open(info).map_err(invalid)?;
        Ok(Self { address, client, settings: settings.clone() })
    }

    /// Opens a connection that hands over what the server sends unasked.
    async fn open(
        &self,
        unasked: impl AsyncPushSender,
    ) -> Result<MultiplexedConnection, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.settings.connect_timeout()))
            .set_response_timeout(Some(self.settings.response_timeout()))
            .set_pipeline_buffer_size(self.settings.pipeline_buffer)
            .set_push_sender(unasked);
        self.client.get_multiplexed_async_connection_with_config(&config).await
    }

    /// A connection of its own, and what the server tells about itself on it.
    async fn info(&self) -> Result<(MultiplexedConnection, Info), OpenError> {
        let unreachable = |error: RedisError| OpenError::Unreachable {
            address: self.address.to_string(),
            cause: self.address.without_password(&plain_text(&error)),
        };
        let mut connection = self.open(|_| Ok::<_, SendError>(())).await.map_err(unreachable)?;
        let info = Info::ask(&mut connection).await.map_err(unreachable)?;
        Ok((connection, info))
    }

    /// Looks at everything about the server that matters to a sale.
    async fn check(&self) -> Result<Vec<Finding>, OpenError> {
        let (mut connection, info) = self.info().await?;
        let mut findings = vec![info.version_finding(), info.role_finding()];
        if info.get("cluster_enabled") == Some("1") {
            findings.push(Finding::error(
                "the server is a member of a cluster, which is not supported yet: name a \
                 standalone server",
            ));
        }
        let policy = ::redis::cmd("CONFIG").arg("GET").arg("maxmemory-policy").take();
        let policy: Result<HashMap<String, String>, _> = policy.query_async(&mut connection).await;
        findings.push(policy_finding(policy.ok().as_ref()));
        findings.push(info.aof_finding());
        Ok(findings)
    }
}

impl ManageConnection for Dialer {
    type Connection = Arc<Link>;
    type Error = String;

    async fn connect(&self) -> Result<Self::Connection, Self::Error> {
        let broken = Arc::new(AtomicBool::new(false));
        let closed = broken.clone();
        let note_closed = move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                closed.store(true, Ordering::Relaxed);
            }
            Ok::<_, SendError>(())
        };
        let readable = |error: RedisError| self.address.without_password(&plain_text(&error));
        let mut connection = self.open(note_closed).await.map_err(readable)?;
        let info = Info::ask(&mut connection).await.map_err(readable)?;
        let server = ArcSwap::from_pointee(info.identity()?);
        Ok(Arc::new(Link { connection, server, broken, timeouts: AtomicU32::new(0) }))
    }

    async fn is_valid(&self, link: &mut Self::Connection) -> Result<(), Self::Error> {
        link.read_identity().await.map(drop)
    }

    fn has_broken(&self, link: &mut Self::Connection) -> bool {
        link.is_broken()
    }
}

/// Hands the pool's failed dials to whoever waits for one; a pool alone would keep them waiting.
#[derive(Debug, Clone)]
struct DialErrors {
    address: Address,
    last: watch::Sender<String>,
}

impl ErrorSink<String> for DialErrors {
    fn sink(&self, error: String) {
        tracing::warn!(address = %self.address, cause = %error, "no connection");
        self.last.send_replace(error);
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<String>> {
        Box::new(self.clone())
    }
}

/// What `INFO` tells about a server.
struct Info(HashMap<String, String>);

impl Info {
    async fn ask(connection: &mut MultiplexedConnection) -> Result<Self, RedisError> {
        let sections = ["server", "replication", "persistence", "cluster"];
        let mut pipe = ::redis::pipe();
        for section in sections {
            pipe.cmd("INFO").arg(section);
        }
        let texts: Vec<String> = pipe.query_async(connection).await?;
        let lines = texts.iter().flat_map(|text| text.lines());
        let fields = lines.filter_map(|line| line.split_once(':'));
        Ok(Self(fields.map(|(name, field)| (name.to_owned(), field.to_owned())).collect()))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Names this server and this history of its data.
    fn identity(&self) -> Result<String, String> {
        match (self.get("role"), self.get("run_id"), self.get("master_replid")) {
            (Some("master"), Some(run_id), Some(replid)) => Ok(format!("{run_id}/{replid}")),
            (Some("slave" | "replica"), ..) => Err("the server is a replica".to_owned()),
            _ => Err("INFO does not tell role, run_id and master_replid".to_owned()),
        }
    }

    fn version_finding(&self) -> Finding {
        let is_valkey = self.get("server_name") == Some("valkey");
        let version = self.get("valkey_version").or(self.get("redis_version")).unwrap_or("unknown");
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        match (is_valkey, major) {
            (true, _) => Finding::fine(format!("Valkey {version}")),
            (false, Some(7..)) => Finding::fine(format!("Redis {version}")),
            (false, _) => Finding::error(format!(
                "Redis {version} is too old: take Redis 7.0 or newer, or Valkey"
            )),
        }
    }

    fn role_finding(&self) -> Finding {
        match self.identity() {
            Ok(_) => Finding::fine("the server is a master"),
            Err(why) => Finding::error(format!("{why}: name the master in the URL")),
        }
    }

    fn aof_finding(&self) -> Finding {
        match self.get("aof_enabled") {
            Some("1") => Finding::fine("the append-only file is on"),
            _ => Finding::warning(
                "the append-only file is off: after a restart of Redis every sale stands still \
                 until it is rebuilt from SQL; set appendonly yes",
            ),
        }
    }
}

fn policy_finding(reply: Option<&HashMap<String, String>>) -> Finding {
    match reply.and_then(|reply| reply.get("maxmemory-policy")).map(String::as_str) {
        Some("noeviction") => Finding::fine("no key is evicted"),
        Some(policy) => Finding::error(format!(
            "maxmemory-policy is {policy}, so Redis may throw away stock when memory is short: \
             set maxmemory-policy noeviction"
        )),
        None => Finding::warning(
            "CONFIG GET is not allowed here, so nobody checked that maxmemory-policy is \
             noeviction; with another one Redis may throw away stock when memory is short",
        ),
    }
}

impl Finding {
    fn fine(text: impl Into<String>) -> Self {
        Self { level: Level::Fine, text: text.into() }
    }
    fn warning(text: impl Into<String>) -> Self {
        Self { level: Level::Warning, text: text.into() }
    }
    fn error(text: impl Into<String>) -> Self {
        Self { level: Level::Error, text: text.into() }
    }
}

fn command(name: &str, script: &str, call: &Call, server: &str) -> Cmd {
    let mut command = ::redis::cmd(name);
    command.arg(script).arg(call.keys.len());
    for key in call.keys.iter() {
        command.arg(key);
    }
    command.arg(server);
    for arg in &call.args {
        command.arg(arg.as_slice());
    }
    command
}

/// Whether a reply says that the keys were written under another identity; see `lua/guard.lua`.
fn is_of_another_server(reply: &Value) -> bool {
    let Value::Array(items) = reply else {
        return false;
    };
    let is = |at: usize, word: &[u8]| matches!(items.get(at), Some(Value::Bulk(b)) if b == word);
    (is(0, b"frozen") || is(0, b"retry")) && is(3, b"server")
}

/// Codes with which a server refuses a script before its first write. Inside a script Redis
/// checks for READONLY only until something is written.
fn means_not_run(code: &str) -> bool {
    matches!(
        code,
        "NOSCRIPT"
            | "READONLY"
            | "LOADING"
            | "MASTERDOWN"
            | "BUSY"
            | "NOAUTH"
            | "WRONGPASS"
            | "NOREPLICAS"
            | "MOVED"
            | "ASK"
            | "TRYAGAIN"
            | "CLUSTERDOWN"
            | "CROSSSLOT"
    )
}

fn error_text(error: &ServerError) -> String {
    match error.details() {
        Some(details) => format!("{} {details}", error.code()),
        None => error.code().to_owned(),
    }
}

/// A connect error as one would say it.
fn plain_text(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ if error.is_timeout() => "no answer in time".to_owned(),
        _ => error.to_string(),
    }
}

#[allow(clippy::wildcard_enum_match_arm, reason = "redis-rs may add kinds; our scripts have few")]
fn value(reply: ::redis::Value) -> Result<Value, ServerError> {
    use ::redis::Value as Reply;
    Ok(match reply {
        Reply::Int(number) => Value::Int(number),
        Reply::BulkString(bytes) => Value::Bulk(bytes),
        Reply::SimpleString(text) | Reply::VerbatimString { text, .. } => {
            Value::Bulk(text.into_bytes())
        }
        Reply::Okay => Value::Bulk(b"OK".to_vec()),
        Reply::Boolean(true) => Value::Int(1),
        Reply::Array(items) | Reply::Set(items) => {
            Value::Array(items.into_iter().map(value).collect::<Result<_, _>>()?)
        }
        Reply::ServerError(error) => return Err(error),
        _ => Value::Nil,
    })
}
