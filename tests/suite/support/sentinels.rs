//! A master with a replica, and three Sentinels that watch them; all of them want a password.

use std::time::Duration;

use futures_util::future::join_all;
use seckill::{
    config::{SecretText, SecretUrl, Settings},
    engine::redis::RedisSettings,
};

use super::{redis_server::RedisServer, within};

/// Of the user `sales` at the servers.
const PASSWORD: &str = "brass-horse";
/// Of the user `scout` at the Sentinels.
const SENTINEL_PASSWORD: &str = "iron-horse";

#[derive(Debug)]
pub(crate) struct Guarded {
    /// The first is the master, in the beginning.
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) sentinels: Vec<RedisServer>,
}

impl Guarded {
    pub(crate) async fn start() -> Self {
        let password = format!(">{PASSWORD}");
        let mut options = vec!["--appendonly", "yes", "--appendfsync", "no"];
        options.extend(["--user", "sales", "on", &password]);
        options.extend(["~sk:*", "&sk:events", "+@all", "-@admin", "+config|get"]);
        let (master, replica) =
            tokio::join!(RedisServer::start_with(&options), RedisServer::start_with(&options));
        replica.follow(&master).await;
        let settings = format!(
            "sentinel monitor shop 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds shop 1000\n\
             sentinel failover-timeout shop 4000\n\
             sentinel sentinel-user peer\n\
             sentinel sentinel-pass peer\n\
             user default on nopass -@all +@connection +ping\n\
             user peer on >peer ~* &* +@all\n\
             user scout on >{SENTINEL_PASSWORD} &* -@all +auth +hello +client +ping \
             +sentinel|get-master-addr-by-name +sentinel|master +sentinel|replicas\n",
            master.port()
        );
        let sentinels =
            join_all((0..3).map(|_| RedisServer::start_sentinel(&settings, "peer:peer@"))).await;
        let guarded = Self { servers: vec![master, replica], sentinels };
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
            .map(|sentinel| format!("127.0.0.1:{}", sentinel.port()))
            .collect();
        RedisSettings {
            sentinel_user: "scout".to_owned(),
            sentinel_password: SENTINEL_PASSWORD.to_owned(),
            ..RedisSettings::new(format!(
                "redis-sentinel://sales:{PASSWORD}@{}/shop",
                hosts.join(",")
            ))
        }
    }

    pub(crate) fn set(&self, settings: &mut Settings) {
        let redis = self.redis_settings();
        settings.engine.url = SecretUrl::new(redis.url);
        settings.engine.sentinel_user = redis.sentinel_user;
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

    /// Waits until this server is the master as all Sentinels see it.
    pub(crate) async fn leads(&self, at: usize) {
        let port = self.servers[at].port().to_string();
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
