//! Which server a call goes to, and finding out again when that may have changed.
//!
//! There is one [`Node`] per master. One server has one, for ever; behind Sentinels there is one
//! that changes at a failover; a cluster has several, and a map of its slots.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::{
    sync::{Mutex, Notify, watch},
    time::{Instant, timeout},
};

use super::{
    cluster::{SLOTS, View, slot_of},
    dialer::Dialer,
    node::{DIAL_WAIT, Hashes, Node, hashes},
    sentinel::Sentinels,
    settings::RedisSettings,
    target::{Host, Kind, Target},
};
use crate::engine::EngineError;

/// Callers that meet a server which is gone look around this often, all together.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long one member may take to tell who is master of what: others can be asked.
const MEMBER_LIMIT: Duration = Duration::from_millis(400);
/// Stands for a slot that nobody serves.
const NOBODY: u16 = u16::MAX;

#[derive(Debug)]
pub(super) struct Router {
    pub(super) target: Target,
    settings: Arc<RedisSettings>,
    hashes: Arc<Hashes>,
    routes: ArcSwap<Routes>,
    /// Counts the answers to who is master of what, changed or not.
    looks: AtomicU64,
    /// Sent when a master is another one, is lost, or is back.
    changed: watch::Sender<()>,
    /// Told when a probe is due at once.
    pub(super) stir: Notify,
    /// Held by whoever looks around.
    scout: Mutex<Scout>,
}

/// The masters, and which slots are whose.
#[derive(Debug)]
pub(super) struct Routes {
    nodes: Vec<Arc<Node>>,
    /// In a cluster: the place in `nodes` of each slot's master.
    slots: Option<Box<[u16]>>,
}

/// Whoever finds out.
#[derive(Debug)]
struct Scout {
    sentinels: Option<Sentinels>,
    /// Where the next look at a cluster begins, so that one bad member does not spoil them all.
    turn: usize,
    looked: Option<Instant>,
}

impl Router {
    /// Nothing is asked yet: until the first look a cluster and Sentinels lead nowhere.
    pub(super) fn new(target: Target, settings: RedisSettings) -> Self {
        let settings = Arc::new(settings);
        let sentinels = match &target.kind {
            Kind::Sentinel(master) => Some(Sentinels::new(master, &target, &settings)),
            Kind::Server | Kind::Cluster => None,
        };
        let router = Self {
            hashes: Arc::new(hashes()),
            routes: ArcSwap::from_pointee(Routes { nodes: Vec::new(), slots: None }),
            looks: AtomicU64::new(0),
            changed: watch::Sender::default(),
            stir: Notify::new(),
            scout: Mutex::new(Scout { sentinels, turn: 0, looked: None }),
            target,
            settings,
        };
        if router.target.kind == Kind::Server {
            let nodes = router.target.hosts.iter().map(|host| router.node(host)).collect();
            router.routes.store(Arc::new(Routes { nodes, slots: None }));
        }
        router
    }

    fn node(&self, host: &Host) -> Arc<Node> {
        let dialer = Dialer::new(host.clone(), &self.target, &self.settings);
        Arc::new(Node::new(dialer, &self.settings, &self.hashes))
    }

    /// The ways to the Sentinels.
    pub(super) fn dialers_to_sentinels(&self) -> impl Iterator<Item = Dialer> {
        let to = |host: &Host| Dialer::to_sentinel(host.clone(), &self.target, &self.settings);
        self.target.hosts.iter().map(to)
    }

    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.routes.load().nodes.clone()
    }

    /// Whether the server is still a master, as far as is known.
    pub(super) fn has(&self, node: &Arc<Node>) -> bool {
        self.routes.load().nodes.iter().any(|known| Arc::ptr_eq(known, node))
    }

    /// Changes whenever a master is another one, is lost, or is back.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The master for these keys; without keys any, as one is as good as another.
    ///
    /// # Errors
    /// Nobody serves them.
    pub(super) fn master_of(&self, keys: &[String]) -> Result<Arc<Node>, EngineError> {
        let routes = self.routes.load();
        let at = match (&routes.slots, keys.first()) {
            (None, _) => 0,
            (Some(slots), Some(key)) => slots[usize::from(slot_of(key))],
            (Some(_), None) => {
                let is_there = |node: &Arc<Node>| node.is_connected() && !node.is_away();
                let connected = routes.nodes.iter().position(is_there);
                u16::try_from(connected.unwrap_or(0)).unwrap_or(0)
            }
        };
        match routes.nodes.get(usize::from(at)) {
            Some(node) => Ok(node.clone()),
            // The others sell on, so it is not the engine that is away.
            None if at == NOBODY => {
                Err(EngineError::PartAway("no server of the cluster serves this slot".to_owned()))
            }
            None => Err(EngineError::NotRun(format!("{}: no master is known", self.target))),
        }
    }

    /// What an error of this master says about the engine: in a cluster whose others are there it is
    /// a part that is away, which nobody calls any more until it has passed a probe.
    pub(super) fn judge(&self, node: &Arc<Node>, error: EngineError) -> EngineError {
        let (EngineError::NotRun(why) | EngineError::Unknown(why)) = &error else { return error };
        if !self.has_others(node) {
            return error;
        }
        if node.lose() {
            tracing::error!(
                master = %node.host(), why, "a master is away: what it has is not sold, all else is"
            );
            self.stir.notify_one();
            self.changed.send_replace(());
        }
        EngineError::PartAway(why.clone())
    }

    fn has_others(&self, node: &Arc<Node>) -> bool {
        let routes = self.routes.load();
        let is_other = |other: &Arc<Node>| !Arc::ptr_eq(other, node) && !other.is_away();
        self.target.kind == Kind::Cluster && routes.nodes.iter().any(is_other)
    }

    /// This master has passed a probe.
    pub(super) fn is_well(&self, node: &Arc<Node>) {
        if node.regain() {
            tracing::info!(master = %node.host(), "a master is back");
            self.changed.send_replace(());
        }
    }

    /// The server at this address, which a redirection named: it may have no slots yet.
    pub(super) fn node_at(&self, host: &Host) -> Arc<Node> {
        let find = |routes: &Routes| routes.nodes.iter().find(|node| node.host() == host).cloned();
        if let Some(node) = find(&self.routes.load()) {
            return node;
        }
        let new = self.node(host);
        self.routes.rcu(|routes| {
            let mut nodes = routes.nodes.clone();
            // Places in `slots` are those of before, so it comes last.
            if find(routes).is_none() {
                nodes.push(new.clone());
            }
            Routes { nodes, slots: routes.slots.clone() }
        });
        find(&self.routes.load()).unwrap_or(new)
    }

    /// How many looks there have been; see [`Router::look_after`].
    pub(super) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Acquire)
    }

    /// Finds out who is master of what.
    ///
    /// # Errors
    /// Why nobody can tell.
    pub(super) async fn look(&self) -> Result<(), String> {
        self.look_with(&mut *self.scout.lock().await, None).await
    }

    /// The same, unless somebody did since `looks`; `first` knows best.
    pub(super) async fn look_after(&self, looks: u64, first: &Arc<Node>) -> Result<(), String> {
        let late = "somebody else is finding out who the master is";
        let mut scout = timeout(DIAL_WAIT, self.scout.lock()).await.map_err(|_| late.to_owned())?;
        match self.looks() == looks {
            true => self.look_with(&mut scout, Some(first)).await,
            false => Ok(()),
        }
    }

    /// The same, unless somebody is at it or has just been; answers whether it was done.
    pub(super) async fn look_if_nobody_does(&self) -> bool {
        if self.target.kind == Kind::Server {
            return false;
        }
        let Ok(mut scout) = self.scout.try_lock() else { return false };
        if scout.looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return false;
        }
        self.look_with(&mut scout, None).await.is_ok()
    }

    async fn look_with(&self, scout: &mut Scout, first: Option<&Arc<Node>>) -> Result<(), String> {
        scout.looked = Some(Instant::now());
        match (&self.target.kind, &mut scout.sentinels) {
            (Kind::Sentinel(_), Some(sentinels)) => {
                let master = sentinels.ask().await?;
                self.adopt(&[master], None);
            }
            (Kind::Cluster, _) => {
                scout.turn = scout.turn.wrapping_add(1);
                let view = self.view(first, scout.turn).await?;
                let masters = view.masters();
                self.adopt(&masters, Some(slots_of(&view, &masters)));
            }
            (Kind::Server | Kind::Sentinel(_), _) => {}
        }
        self.looks.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// The cluster as the first member sees it that is well.
    async fn view(&self, first: Option<&Arc<Node>>, turn: usize) -> Result<View, String> {
        let mut nodes = self.nodes();
        if !nodes.is_empty() {
            let turn = turn % nodes.len();
            nodes.rotate_left(turn);
        }
        nodes.sort_by_key(|node| (node.is_away(), !node.is_connected()));
        let (mut failure, mut silent) = ("no member is known".to_owned(), Vec::new());
        for node in first.into_iter().chain(&nodes) {
            match timeout(MEMBER_LIMIT, view_of(node)).await {
                Ok(Ok(view)) => {
                    for node in silent {
                        self.judge(node, node.not_run("it does not answer"));
                    }
                    return Ok(view);
                }
                Ok(Err(why)) => failure = why,
                Err(_) => {
                    failure = format!("{}: no answer in time", node.host());
                    silent.push(node);
                }
            }
        }
        for host in &self.target.hosts {
            if nodes.iter().any(|node| node.host() == host) {
                continue;
            }
            let dialer = Dialer::new(host.clone(), &self.target, &self.settings);
            match seen_by(&dialer).await {
                Ok(view) => return Ok(view),
                Err(why) => failure = why,
            }
        }
        Err(failure)
    }

    /// Takes the answer into use; servers that are still masters keep their connections.
    fn adopt(&self, masters: &[Host], slots: Option<Box<[u16]>>) {
        let current = self.routes.load();
        let same = current.nodes.iter().map(|node| node.host()).eq(masters);
        if same && current.slots == slots {
            return;
        }
        let known = |host: &Host| current.nodes.iter().find(|node| node.host() == host).cloned();
        let nodes = masters.iter().map(|host| known(host).unwrap_or_else(|| self.node(host)));
        let nodes: Vec<_> = nodes.collect();
        if !same {
            tracing::info!(engine = %self.target, ?masters, "the masters of the engine");
        }
        self.routes.store(Arc::new(Routes { nodes, slots }));
        self.changed.send_replace(());
    }
}

/// Whose each slot is, by the place in `masters`.
fn slots_of(view: &View, masters: &[Host]) -> Box<[u16]> {
    let mut slots = vec![NOBODY; SLOTS];
    for range in &view.ranges {
        let at = masters.binary_search(&range.master).ok().and_then(|at| u16::try_from(at).ok());
        slots[usize::from(range.first)..=usize::from(range.last)].fill(at.unwrap_or(NOBODY));
    }
    slots.into()
}

async fn view_of(node: &Node) -> Result<View, String> {
    let link = node.any_link().await.map_err(|error| error.to_string())?;
    let view = View::ask(&mut link.connection(), node.host()).await;
    view.map_err(|why| node.dialer.hide(&why))
}

/// The cluster as this server sees it, over a connection of its own.
pub(super) async fn seen_by(dialer: &Dialer) -> Result<View, String> {
    let connection = dialer.open_quiet().await;
    let mut connection = connection.map_err(|cause| format!("{}: {cause}", dialer.host))?;
    View::ask(&mut connection, &dialer.host).await.map_err(|why| dialer.hide(&why))
}
