//! The engine on Redis or Valkey: one server, a cluster, or a master that Sentinels know.
//!
//! A call goes to the master of its keys (`router`), over one of the few connections to it
//! (`node`), under the identity of exactly that server.
//!
//! **Invariant:** a script is never sent again unless it certainly did not run. What was sent and
//! not answered is [`EngineError::Unknown`].
//!
//! A slot that moved is not believed to be complete: `meta` names the server that wrote the keys,
//! the new one is another, and so the segment is frozen and rebuilt. Its data may well be whole,
//! but only if neither server failed over to a replica on the way, and nobody can tell afterwards.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, join_all};
use tokio::{task::JoinSet, time::timeout};

use super::{Call, Engine, EngineError, Value, events::Hearing};

mod check;
mod cluster;
mod dialer;
mod hearing;
mod info;
mod link;
mod node;
mod reply;
mod router;
mod sentinel;
mod settings;
mod switches;
mod target;

pub use self::{
    check::Master,
    settings::{Finding, Level, OpenError, RedisSettings},
    target::Target,
};
use self::{
    dialer::Dialer,
    node::{Node, Way},
    reply::Refused,
    router::Router,
    target::Kind,
};

/// How often a call is sent on because the slot of its keys is moving; a key takes a moment.
const MOVING_TRIES: u32 = 20;
const MOVING_PAUSE: Duration = Duration::from_millis(3);
/// How long one master of a cluster may take to answer a probe: the others are not held up by it.
const PART_LIMIT: Duration = Duration::from_millis(900);

/// Runs the scripts on Redis or Valkey.
pub struct RedisEngine {
    router: Arc<Router>,
    /// Whether no Sentinel could be believed when they were last asked.
    blind: AtomicBool,
    /// Those who listen to the Sentinels; they end with the engine.
    _listeners: JoinSet<()>,
}

impl fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisEngine").field("router", &self.router).finish_non_exhaustive()
    }
}

impl RedisEngine {
    /// Checks the servers and connects to the masters.
    ///
    /// # Errors
    /// [`OpenError`] in one line that says what to change. A server is refused when it is older
    /// than Redis 7, or may evict keys; what should be a master, when it is a replica.
    pub async fn connect(settings: &RedisSettings) -> Result<Self, OpenError> {
        let target = settings.target()?;
        for finding in check::check(settings).await? {
            match finding.level {
                Level::Fine => {}
                Level::Warning => tracing::warn!(address = %target, "{}", finding.text),
                Level::Error => return Err(OpenError::Misconfigured(finding.text)),
            }
        }
        let router = Arc::new(Router::new(target, settings.clone()));
        let listeners = switches::follow(&router);
        let engine = Self { router, blind: AtomicBool::new(false), _listeners: listeners };
        engine.probe().await.map(|()| engine).map_err(|error| OpenError::Unreachable {
            address: settings.target().map_or_else(|_| String::new(), |target| target.to_string()),
            cause: error.to_string(),
        })
    }

    /// What is good and bad about the servers behind these settings, for `doctor`.
    ///
    /// # Errors
    /// [`OpenError`] when they can't be asked.
    pub async fn check(settings: &RedisSettings) -> Result<Vec<Finding>, OpenError> {
        check::check(settings).await
    }

    /// The process that the one server is, as itself knows it: on its machine, in its container.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn process_id(settings: &RedisSettings) -> Result<Option<u32>, OpenError> {
        let id = Self::told_by_itself(settings, "process_id").await?;
        Ok(id.and_then(|id| id.parse().ok()))
    }

    /// Bytes that the one server has handed out for data and buffers, by its own count.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn used_memory(settings: &RedisSettings) -> Result<Option<u64>, OpenError> {
        let bytes = Self::told_by_itself(settings, "used_memory").await?;
        Ok(bytes.and_then(|bytes| bytes.parse().ok()))
    }

    /// One line of what a server tells about itself; `None` where there is more than one.
    async fn told_by_itself(
        settings: &RedisSettings,
        name: &str,
    ) -> Result<Option<String>, OpenError> {
        let target = settings.target()?;
        let (Kind::Server, Some(host)) = (&target.kind, target.hosts.first()) else {
            return Ok(None);
        };
        let dialer = Dialer::new(host.clone(), &target, &Arc::new(settings.clone()));
        let info = dialer.info().await?.1;
        Ok(info.get(name).map(str::to_owned))
    }

    /// The masters of a cluster, in order, and how many of these keys each of them has; none when
    /// it is no cluster.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn masters(
        settings: &RedisSettings,
        keys: &[String],
    ) -> Result<Vec<Master>, OpenError> {
        check::masters(settings, keys).await
    }

    async fn run(&self, call: &Call) -> Result<Value, EngineError> {
        let node = self.router.master_of(&call.keys)?;
        let refused = match node.is_away() {
            true => Refused::Unfit(node.not_run("it is away")),
            false => match node.run(call, Way::Owned).await {
                Ok(reply) => return Ok(reply),
                Err(refused) => refused,
            },
        };
        Box::pin(self.run_elsewhere(call, node, refused)).await
    }

    /// The script did not run; another server may be the one to ask, or this one a moment later.
    async fn run_elsewhere(
        &self,
        call: &Call,
        mut node: Arc<Node>,
        mut refused: Refused,
    ) -> Result<Value, EngineError> {
        let router = &self.router;
        let (mut moved, mut unfit, mut moving) = (false, false, 0);
        loop {
            let way = match refused {
                Refused::Error(error) => return Err(router.judge(&node, error)),
                Refused::Moved(text) if moved => return Err(EngineError::PartAway(text)),
                Refused::Moved(_) => {
                    moved = true;
                    let looks = router.looks();
                    router.look_after(looks, &node).await.map_err(EngineError::PartAway)?;
                    node = router.master_of(&call.keys)?;
                    Way::Owned
                }
                Refused::Unfit(error) if unfit => return Err(router.judge(&node, error)),
                Refused::Unfit(error) => {
                    unfit = true;
                    if !router.look_if_nobody_does().await {
                        return Err(router.judge(&node, error));
                    }
                    let master = router.master_of(&call.keys)?;
                    if Arc::ptr_eq(&master, &node) {
                        return Err(router.judge(&node, error));
                    }
                    node = master;
                    Way::Owned
                }
                // Nothing is wrong with the engine, so its circuit stays closed.
                Refused::TryAgain(text) if moving >= MOVING_TRIES => {
                    return Err(EngineError::Full(text));
                }
                Refused::Ask(host) if moving >= MOVING_TRIES => {
                    return Err(EngineError::Full(format!("the slot is moving to {host}")));
                }
                Refused::TryAgain(_) => {
                    moving += 1;
                    tokio::time::sleep(MOVING_PAUSE.mul_f64(0.5 + fastrand::f64())).await;
                    node = router.master_of(&call.keys)?;
                    Way::Owned
                }
                Refused::Ask(host) => {
                    moving += 1;
                    node = router.node_at(&host);
                    Way::Asking
                }
            };
            refused = match node.run(call, way).await {
                Ok(reply) => return Ok(reply),
                Err(refused) => refused,
            };
        }
    }

    async fn probe_all(&self) -> Result<(), EngineError> {
        // Without Sentinels a master that still is one goes on.
        let looked = self.router.look().await;
        let nodes = self.router.nodes();
        match (looked, &self.router.target.kind) {
            (Err(why), Kind::Sentinel(_)) if !nodes.is_empty() => {
                if !self.blind.swap(true, Ordering::Relaxed) {
                    tracing::warn!(why, "no Sentinel can be believed: the master stays as it is");
                }
            }
            (Err(why), _) => return Err(EngineError::NotRun(why)),
            (Ok(()), _) => {
                if self.blind.swap(false, Ordering::Relaxed) {
                    tracing::info!("the Sentinels are back");
                }
            }
        }
        match self.router.target.kind {
            Kind::Server | Kind::Sentinel(_) => {
                let probes = join_all(nodes.iter().map(|node| node.probe())).await;
                probes.into_iter().collect()
            }
            Kind::Cluster => self.probe_parts(&nodes).await,
        }
    }

    /// The cluster is there while one master is; the others are parts that are away.
    async fn probe_parts(&self, nodes: &[Arc<Node>]) -> Result<(), EngineError> {
        let probes = nodes.iter().map(|node| async move {
            let probed = timeout(PART_LIMIT, node.probe()).await;
            (node, probed.unwrap_or_else(|_| Err(node.not_run("no answer to a probe"))))
        });
        let (well, away): (Vec<_>, Vec<_>) =
            join_all(probes).await.into_iter().partition(|(_, probed)| probed.is_ok());
        for (node, _) in &well {
            self.router.is_well(node);
        }
        for (node, probed) in away {
            if let Err(error) = probed.map_err(|error| self.router.judge(node, error))
                && well.is_empty()
            {
                return Err(error);
            }
        }
        Ok(())
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
        Box::pin(self.probe_all())
    }

    fn hear(&self) -> Hearing {
        hearing::hear(self.router.clone())
    }

    fn parts_away(&self) -> usize {
        self.router.nodes().iter().filter(|node| node.is_away()).count()
    }

    fn stirred(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.router.stir.notified())
    }
}
