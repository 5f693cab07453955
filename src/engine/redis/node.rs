//! One server: a few connections that carry all its calls, and what it answers.
//!
//! A call goes to the connection that its first key stands for, so the calls of one offer keep
//! their order. Each connection knows the identity of the server that it reached.
//!
//! **Invariant:** a script is never sent again unless it certainly did not run.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use bb8_redis::bb8::{ErrorSink, Pool, PooledConnection, RunError};
use futures_util::{FutureExt, future::join_all};
use tokio::time::timeout;

use super::{
    dialer::{DialErrors, Dialer},
    link::{Failure, Link},
    reply::{Refused, command, is_of_another_server, value},
    settings::RedisSettings,
    target::Host,
};
use crate::engine::{Call, EngineError, Script, Value, scripts};

/// After a failed dial callers hear so at once, for as long.
const REDIAL_PAUSE: Duration = Duration::from_millis(50);
/// How long a caller waits for what another caller does: a connection, a look at who is master.
pub(super) const DIAL_WAIT: Duration = Duration::from_millis(250);

/// The hash of every script.
pub(super) type Hashes = HashMap<&'static str, (Script, String)>;

pub(super) fn hashes() -> Hashes {
    let hash = |script: &Script| ::redis::Script::new(script.source).get_hash().to_owned();
    scripts::ALL.iter().map(|s| (s.name, (*s, hash(s)))).collect()
}

/// How a script is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To the server whose slot it is.
    Owned,
    /// To the one that the slot is moving to.
    Asking,
}

pub(super) struct Node {
    connect_timeout: Duration,
    pub(super) dialer: Dialer,
    pool: Pool<Dialer>,
    dial_errors: DialErrors,
    places: Box<[Place]>,
    hasher: RandomState,
    hashes: Arc<Hashes>,
    /// Whether nothing is sent here until a probe succeeds; in a cluster only, where the others go on.
    away: AtomicBool,
}

impl Node {
    /// Connects when it is first needed.
    pub(super) fn new(dialer: Dialer, settings: &RedisSettings, hashes: &Arc<Hashes>) -> Self {
        let dial_errors = DialErrors::new(dialer.host.clone());
        let pool = Pool::builder()
            .max_size(settings.connections)
            .test_on_check_out(false)
            .max_lifetime(None)
            .idle_timeout(None)
            .retry_connection(false)
            .connection_timeout(settings.connect_timeout())
            .error_sink(dial_errors.boxed_clone())
            .build_unchecked(dialer.clone());
        Self {
            connect_timeout: settings.connect_timeout(),
            dialer,
            pool,
            dial_errors,
            places: (0..settings.connections).map(|_| Place::default()).collect(),
            hasher: RandomState::new(),
            hashes: hashes.clone(),
            away: AtomicBool::new(false),
        }
    }

    pub(super) fn host(&self) -> &Host {
        &self.dialer.host
    }

    /// The place for these keys; calls with the same first key get the same one.
    fn place(&self, keys: &[String]) -> &Place {
        let hash = keys.first().map_or(0, |key| self.hasher.hash_one(key));
        let len = self.places.len() as u64;
        &self.places[usize::try_from(hash % len).unwrap_or(0)]
    }

    /// Runs a script under the identity of this server.
    pub(super) async fn run(&self, call: &Call, way: Way) -> Result<Value, Refused> {
        let place = self.place(&call.keys);
        let link = self.link(place).await.map_err(Refused::Unfit)?;
        let server = link.server.load_full();
        let reply = self.send(&link, call, &server, way).await?;
        if !is_of_another_server(&reply) {
            return Ok(reply);
        }
        // Nothing changed so far. Is it the data that is of another server, or did the server
        // change behind this connection?
        if **link.server.load() == *server {
            let found = link.read_identity().await;
            let found = found.map_err(|cause| Refused::Unfit(self.not_run(cause)))?;
            link.server.store(Arc::new(found));
        }
        let current = link.server.load_full();
        match current == server {
            true => Ok(reply),
            false => self.send(&link, call, &current, way).await,
        }
    }

    /// Sends a script by its hash and, if the server does not know it, by its text.
    async fn send(
        &self,
        link: &Link,
        call: &Call,
        server: &str,
        way: Way,
    ) -> Result<Value, Refused> {
        let by_text = || command("EVAL", call.script.source, call, server);
        if way == Way::Asking {
            return self.outcome(link, link.request_asking(by_text()).await);
        }
        let known = self.hashes.get(call.script.name).filter(|(script, _)| *script == call.script);
        if let Some((_, hash)) = known {
            let reply = link.request(&command("EVALSHA", hash, call, server)).await;
            match reply {
                Err(Failure::Server(error)) if error.code() == "NOSCRIPT" => {}
                other => return self.outcome(link, other),
            }
        }
        let reply = link.request(&by_text()).await;
        self.outcome(link, reply)
    }

    fn outcome(
        &self,
        link: &Link,
        reply: Result<::redis::Value, Failure>,
    ) -> Result<Value, Refused> {
        match reply {
            Ok(reply) => value(reply).map_err(Refused::Error),
            Err(Failure::Lost(cause)) => {
                Err(Refused::Error(EngineError::Unknown(format!("{}: {cause}", self.host()))))
            }
            Err(Failure::Server(error)) => {
                if error.code() == "READONLY" {
                    link.give_up();
                }
                Err(Refused::by(self.host(), &error))
            }
        }
    }

    pub(super) fn is_away(&self) -> bool {
        self.away.load(Ordering::Acquire)
    }

    /// Nothing is sent here until [`Node::regain`]; answers whether that is news.
    pub(super) fn lose(&self) -> bool {
        !self.away.swap(true, Ordering::AcqRel)
    }

    /// A probe succeeded; answers whether that is news.
    pub(super) fn regain(&self) -> bool {
        self.away.swap(false, Ordering::AcqRel)
    }

    pub(super) fn not_run(&self, cause: impl fmt::Display) -> EngineError {
        EngineError::NotRun(format!("{}: {cause}", self.host()))
    }

    /// Whether a connection is there now.
    pub(super) fn is_connected(&self) -> bool {
        self.places.iter().any(|place| place.link().is_some())
    }

    /// A connection for what is no script.
    pub(super) async fn any_link(&self) -> Result<Arc<Link>, EngineError> {
        let connected = self.places.iter().find_map(Place::link);
        match (connected, self.places.first()) {
            (Some(link), _) => Ok(link),
            (None, Some(place)) => self.link(place).await,
            (None, None) => Err(self.not_run("it has no connections")),
        }
    }

    /// The place's connection, made anew when it is broken.
    ///
    /// One caller dials. Others wait a moment for it the first time; while the server is away
    /// they are told so at once.
    async fn link(&self, place: &Place) -> Result<Arc<Link>, EngineError> {
        if let Some(link) = place.link() {
            return Ok(link);
        }
        if let Some(cause) = place.recent_failure() {
            return Err(self.not_run(cause));
        }
        let busy = || self.not_run("the connection is being made again");
        let _dialing = match place.dialing.try_lock() {
            Ok(guard) => guard,
            Err(_) if place.has_failed() => return Err(busy()),
            Err(_) => timeout(DIAL_WAIT, place.dialing.lock()).await.map_err(|_| busy())?,
        };
        if let Some(link) = place.link() {
            return Ok(link);
        }
        if let Some(cause) = place.recent_failure() {
            return Err(self.not_run(cause));
        }
        // The pool takes the broken one back, drops it, and may make another.
        place.held.store(None);
        match self.dial().await {
            Ok(held) => {
                self.dial_errors.end();
                let link = Arc::clone(&held);
                place.held.store(Some(Arc::new(Held(held))));
                *place.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(link)
            }
            Err(cause) => {
                let failure = Some((Instant::now(), cause.clone()));
                *place.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
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

    /// Reads the identity again on every connection, and makes those that are broken.
    pub(super) async fn probe(&self) -> Result<(), EngineError> {
        let probes = join_all(self.places.iter().map(|place| self.probe_place(place))).await;
        probes.into_iter().collect()
    }

    async fn probe_place(&self, place: &Place) -> Result<(), EngineError> {
        let link = self.link(place).await?;
        match link.read_identity().await {
            Ok(server) => {
                link.server.store(Arc::new(server));
                Ok(())
            }
            Err(cause) => {
                link.give_up();
                tracing::warn!(address = %self.host(), %cause, "a connection is dropped");
                // It was made before, so `link` dials: this one has just asked for all there is.
                self.link(place).await.map(drop)
            }
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("host", self.host())
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}

/// The place of one connection.
#[derive(Default)]
struct Place {
    held: ArcSwapOption<Held>,
    /// Held by whoever makes the connection.
    dialing: tokio::sync::Mutex<()>,
    /// When and why the last dial failed; `None` after one that did not.
    failure: Mutex<Option<(Instant, String)>>,
}

/// A pooled connection for as long as it works; calls go through clones of its handle.
struct Held(PooledConnection<'static, Dialer>);

impl Place {
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

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("link", &self.link()).finish_non_exhaustive()
    }
}
