//! A Redis Cluster of its own for a test: three masters, each with a replica.

use std::time::Duration;

use futures_util::future::join_all;
use seckill::{
    config::{SecretUrl, Settings},
    engine::redis::{RedisEngine, RedisSettings},
};

use super::{redis_server::RedisServer, secured::Secured, within};

const MASTERS: usize = 3;
const SLOTS: usize = 16_384;
/// How long a member may be silent before the others give it up.
const NODE_TIMEOUT_MS: &str = "1000";

#[derive(Debug)]
pub(crate) struct Cluster {
    /// First those that begin as masters, then the replica of each.
    pub(crate) servers: Vec<RedisServer>,
    secured: Option<Secured>,
}

impl Cluster {
    /// A cluster that is well, with every replica in step.
    pub(crate) async fn start() -> Self {
        Self::start_as(None).await
    }

    /// The same, which speaks TLS and nothing else but with the test.
    pub(crate) async fn start_secured() -> Self {
        Self::start_as(Some(Secured::new())).await
    }

    async fn start_as(secured: Option<Secured>) -> Self {
        let members = (0..2 * MASTERS).map(|_| Self::start_member(secured.as_ref()));
        let cluster = Self { servers: join_all(members).await, secured };
        cluster.form().await;
        cluster
    }

    async fn start_member(secured: Option<&Secured>) -> RedisServer {
        let tls = secured.map(|secured| {
            let mut options = secured.options(RedisServer::free_port());
            options.extend(["--tls-cluster", "yes"].map(String::from));
            options
        });
        // The usual bus port, 10,000 above, may be one of those that outgoing connections take.
        let bus = RedisServer::free_port().to_string();
        let mut options = vec![
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            &bus,
            "--cluster-node-timeout",
            NODE_TIMEOUT_MS,
            "--cluster-require-full-coverage",
            "no",
            // However old its data is, a replica is better than nothing.
            "--cluster-replica-validity-factor",
            "0",
            "--appendonly",
            "yes",
            "--appendfsync",
            "no",
        ];
        options.extend(tls.iter().flatten().map(String::as_str));
        RedisServer::start_with(&options).await
    }

    async fn form(&self) {
        let limit = Duration::from_secs(20);
        for (at, server) in self.servers.iter().enumerate() {
            let epoch = (at + 1).to_string();
            server.command::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).await;
        }
        for (at, master) in self.masters().iter().enumerate() {
            let (first, last) = (at * SLOTS / MASTERS, (at + 1) * SLOTS / MASTERS - 1);
            let (first, last) = (first.to_string(), last.to_string());
            master.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]).await;
        }
        for server in &self.servers[1..] {
            let (port, bus) = (server.known_port().to_string(), bus_port(server).await);
            let meet = ["CLUSTER", "MEET", "127.0.0.1", &port, &bus];
            self.servers[0].command::<()>(&meet).await;
        }
        within(limit, "all members know each other", async || {
            for server in &self.servers {
                let known: String = server.command(&["CLUSTER", "NODES"]).await;
                let known = known.lines().filter(|line| !line.contains("handshake")).count();
                if known < self.servers.len() {
                    return None;
                }
            }
            Some(())
        })
        .await;
        for (at, replica) in self.servers[MASTERS..].iter().enumerate() {
            let id: String = self.servers[at].command(&["CLUSTER", "MYID"]).await;
            replica.command::<()>(&["CLUSTER", "REPLICATE", &id]).await;
        }
        for master in self.masters() {
            master.command::<i64>(&["PUBLISH", "anything", "at all"]).await;
        }
        within(limit, "the cluster is well", async || {
            for (at, server) in self.servers.iter().enumerate() {
                let info: String = server.command(&["CLUSTER", "INFO"]).await;
                let is_replica = at >= MASTERS;
                let in_step =
                    !is_replica || server.follows(self.servers[at - MASTERS].known_port()).await;
                // A replica is shown once it has got anything.
                let slots: Vec<Vec<redis::Value>> = server.command(&["CLUSTER", "SLOTS"]).await;
                let shown = slots.iter().all(|range| range.len() == 4);
                if !info.contains("cluster_state:ok") || !in_step || !shown {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// Those that begin as masters.
    pub(crate) fn masters(&self) -> &[RedisServer] {
        &self.servers[..MASTERS]
    }

    /// Three of its members.
    pub(crate) fn url(&self) -> String {
        self.url_of("")
    }

    /// The same, for somebody, as in `user:password@`.
    pub(crate) fn url_of(&self, login: &str) -> String {
        let hosts: Vec<String> = self
            .masters()
            .iter()
            .map(|server| format!("127.0.0.1:{}", server.known_port()))
            .collect();
        let scheme = if self.secured.is_some() { "rediss" } else { "redis" };
        format!("{scheme}-cluster://{login}{}", hosts.join(","))
    }

    pub(crate) fn set(&self, settings: &mut Settings) {
        settings.engine.url = SecretUrl::new(self.url());
        if let Some(secured) = &self.secured {
            secured.set_all(settings);
        }
    }

    pub(crate) async fn engine(&self) -> RedisEngine {
        RedisEngine::connect(&RedisSettings::new(self.url())).await.unwrap()
    }

    pub(crate) async fn slot_of(&self, key: &str) -> String {
        self.servers[0].command::<u16>(&["CLUSTER", "KEYSLOT", key]).await.to_string()
    }

    /// Whose this key is now, by its place.
    pub(crate) async fn owner_of(&self, key: &str) -> usize {
        within(Duration::from_secs(5), "a member owns the key", async || {
            for (at, server) in self.servers.iter().enumerate() {
                let Ok(mut connection) = server.connect().await else { continue };
                let exists = redis::cmd("EXISTS").arg(key).take();
                if exists.query_async::<i64>(&mut connection).await.is_ok() {
                    return Some(at);
                }
            }
            None
        })
        .await
    }

    /// The replica of this member, in the beginning.
    pub(crate) fn replica_of(&self, master: usize) -> &RedisServer {
        &self.servers[master + MASTERS]
    }

    /// Has the replica of this member take over, although the member is well.
    pub(crate) async fn fail_over(&self, master: usize) {
        self.replica_of(master).command::<()>(&["CLUSTER", "FAILOVER"]).await;
        self.replaced(master).await;
    }

    /// Waits until a replica sells in place of this member, which is gone.
    pub(crate) async fn replaced(&self, gone: usize) {
        let replica = self.replica_of(gone);
        within(Duration::from_secs(15), "the replica is promoted", async || {
            replica.is_master().await.then_some(())
        })
        .await;
    }

    /// Begins to move a slot.
    pub(crate) async fn open_slot(&self, slot: &str, from: usize, to: usize) {
        let (from, to) = (&self.servers[from], &self.servers[to]);
        let from_id: String = from.command(&["CLUSTER", "MYID"]).await;
        let to_id: String = to.command(&["CLUSTER", "MYID"]).await;
        to.command::<()>(&["CLUSTER", "SETSLOT", slot, "IMPORTING", &from_id]).await;
        from.command::<()>(&["CLUSTER", "SETSLOT", slot, "MIGRATING", &to_id]).await;
    }

    /// Moves one key of a slot that is moving.
    pub(crate) async fn carry(&self, key: &str, from: usize, to: usize) {
        let port = self.servers[to].port().to_string();
        let migrate = ["MIGRATE", "127.0.0.1", &port, key, "0", "5000"];
        self.servers[from].command::<redis::Value>(&migrate).await;
    }

    /// Moves all keys that a slot has left.
    pub(crate) async fn carry_all(&self, slot: &str, from: usize, to: usize) {
        loop {
            let count = ["CLUSTER", "GETKEYSINSLOT", slot, "100"];
            let keys: Vec<String> = self.servers[from].command(&count).await;
            if keys.is_empty() {
                return;
            }
            for key in keys {
                self.carry(&key, from, to).await;
            }
        }
    }

    /// Ends the move.
    pub(crate) async fn close_slot(&self, slot: &str, from: usize, to: usize) {
        let id: String = self.servers[to].command(&["CLUSTER", "MYID"]).await;
        for at in [to, from].into_iter().chain((0..MASTERS).filter(|at| ![from, to].contains(at))) {
            self.servers[at].command::<()>(&["CLUSTER", "SETSLOT", slot, "NODE", &id]).await;
        }
    }

    /// How often all members together have answered with this error code.
    pub(crate) async fn errors(&self, code: &str) -> u64 {
        let mut errors = 0;
        for server in &self.servers {
            if server.connect().await.is_ok() {
                errors += server.errors(code).await;
            }
        }
        errors
    }
}

async fn bus_port(server: &RedisServer) -> String {
    // `id 127.0.0.1:port@bus …`
    let myself: String = server.command(&["CLUSTER", "NODES"]).await;
    let address = myself.split(' ').nth(1).unwrap();
    address.rsplit_once('@').unwrap().1.split(',').next().unwrap().to_owned()
}
