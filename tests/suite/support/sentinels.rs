//! A master with a replica, and three Sentinels that watch them; all of them want a password.

use std::time::Duration;

use futures_util::future::join_all;
use seckill::{
    config::{SecretText, SecretUrl, Settings},
    engine::redis::RedisSettings,
};

use super::{redis_server::RedisServer, secured::Secured, within};

/// Of the user `sales` at the servers.
const PASSWORD: &str = "brass-horse";
/// Of the user `scout` at the Sentinels.
const SENTINEL_PASSWORD: &str = "iron-horse";

#[derive(Debug)]
pub(crate) struct Guarded {
    /// The first is the master, in the beginning.
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) sentinels: Vec<RedisServer>,
    secured: Option<Secured>,
}

impl Guarded {
    pub(crate) async fn start() -> Self {
        Self::start_as(None).await
    }

    /// The same, all of whom speak TLS and nothing else but with the test.
    pub(crate) async fn start_secured() -> Self {
        Self::start_as(Some(Secured::new())).await
    }

    async fn start_as(secured: Option<Secured>) -> Self {
        let tls = || match &secured {
            Some(secured) => secured.options(RedisServer::free_port()),
            None => Vec::new(),
        };
        let password = format!(">{PASSWORD}");
        let mut options = vec!["--appendonly", "yes", "--appendfsync", "no"];
        options.extend(["--user", "sales", "on", &password]);
        options.extend(["~sk:*", "&sk:events", "+@all", "-@admin", "+config|get"]);
        let start = async |tls: Vec<String>| {
            let mut options = options.clone();
            options.extend(tls.iter().map(String::as_str));
            RedisServer::start_with(&options).await
        };
        let (master, replica) = tokio::join!(start(tls()), start(tls()));
        replica.follow(&master).await;
        let settings = format!(
            "sentinel monitor shop 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds shop 1000\n\
             sentinel failover-timeout shop 4000\n\
             sentinel sentinel-user peer\n\
             sentinel sentinel-pass peer\n\
             user default on nopass -@all +@connection +ping\n\
             user peer on >peer ~* &* +@all\n\
             user scout on >{SENTINEL_PASSWORD} &* -@all +auth +hello +client +ping +subscribe \
             +sentinel|get-master-addr-by-name +sentinel|master +sentinel|replicas\n",
            master.known_port()
        );
        let start = async |tls: Vec<String>| {
            RedisServer::start_sentinel(&settings, "peer:peer@", &tls).await
        };
        let sentinels = join_all((0..3).map(|_| start(tls()))).await;
        let guarded = Self { servers: vec![master, replica], sentinels, secured };
        within(Duration::from_secs(20), "the Sentinels know all", async || {
            for sentinel in &guarded.sentinels {
                let shown: redis::Value = sentinel.command(&["SENTINEL", "MASTER", "shop"]).await;
                let shown: std::collections::HashMap<String, String> =
                    redis::from_redis_value(shown).unwrap();
                if (shown["num-slaves"].as_str(), shown["num-other-sentinels"].as_str())
                    != ("1", "2")
                {
                    return None;
                }
            }
            Some(())
        })
        .await;
        guarded
    }

    pub(crate) fn redis_settings(&self) -> RedisSettings {
        let hosts: Vec<String> = self
            .sentinels
            .iter()
            .map(|sentinel| format!("127.0.0.1:{}", sentinel.known_port()))
            .collect();
        let scheme = if self.secured.is_some() { "rediss" } else { "redis" };
        let mut settings = RedisSettings {
            sentinel_user: "scout".to_owned(),
            sentinel_password: SENTINEL_PASSWORD.to_owned(),
            ..RedisSettings::new(format!(
                "{scheme}-sentinel://sales:{PASSWORD}@{}/shop",
                hosts.join(",")
            ))
        };
        if let Some(secured) = &self.secured {
            secured.set(&mut settings);
        }
        settings
    }

    pub(crate) fn set(&self, settings: &mut Settings) {
        let redis = self.redis_settings();
        settings.engine.url = SecretUrl::new(redis.url);
        settings.engine.sentinel_user = redis.sentinel_user;
        if let Some(secured) = &self.secured {
            secured.set_all(settings);
        }
        settings.engine.sentinel_password = SecretText::new(redis.sentinel_password);
    }

    /// Has the Sentinels make the replica the master, although the master is well.
    pub(crate) async fn fail_over(&self) {
        within(Duration::from_secs(5), "a Sentinel begins a failover", async || {
            let mut connection = self.sentinels[0].connect().await.ok()?;
            let begin = redis::cmd("SENTINEL").arg("FAILOVER").arg("shop").take();
            begin.query_async::<()>(&mut connection).await.ok()
        })
        .await;
    }

    /// Whether a server of ours listens to what this Sentinel tells.
    pub(crate) async fn is_listened_to(&self, sentinel: &RedisServer) -> bool {
        let clients: String = sentinel.command(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
        clients.lines().any(|line| line.contains("user=scout"))
    }

    /// Whether any Sentinel names this server by now.
    pub(crate) async fn is_named(&self, at: usize) -> bool {
        let port = self.servers[at].known_port().to_string();
        for sentinel in &self.sentinels {
            let ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop"];
            let named: Vec<String> = sentinel.command(&ask).await;
            if named[1] == port {
                return true;
            }
        }
        false
    }

    /// Waits until this server is the master as all Sentinels see it.
    pub(crate) async fn leads(&self, at: usize) {
        let port = self.servers[at].known_port().to_string();
        let ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop"];
        within(Duration::from_secs(20), "the Sentinels name the new master", async || {
            for sentinel in &self.sentinels {
                let named: Vec<String> = sentinel.command(&ask).await;
                if named[1] != port {
                    return None;
                }
            }
            self.servers[at].is_master().await.then_some(())
        })
        .await;
    }
}
