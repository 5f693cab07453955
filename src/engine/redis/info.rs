//! What `INFO` tells about a server, and what is good and bad about that.

use std::collections::HashMap;

use ::redis::{RedisError, aio::MultiplexedConnection};

use super::settings::Finding;

pub(super) struct Info(HashMap<String, String>);

impl Info {
    pub(super) async fn ask(connection: &mut MultiplexedConnection) -> Result<Self, RedisError> {
        let sections = ["server", "memory", "replication", "persistence", "cluster"];
        let mut pipe = ::redis::pipe();
        for section in sections {
            pipe.cmd("INFO").arg(section);
        }
        let texts: Vec<String> = pipe.query_async(connection).await?;
        Ok(Self(fields(texts.iter().map(String::as_str))))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Names this server and this history of its data.
    pub(super) fn identity(&self) -> Result<String, String> {
        match (self.get("role"), self.get("run_id"), self.get("master_replid")) {
            (Some("master"), Some(run_id), Some(replid)) => Ok(format!("{run_id}/{replid}")),
            (Some("slave" | "replica"), ..) => Err("the server is a replica".to_owned()),
            _ => Err("INFO does not tell role, run_id and master_replid".to_owned()),
        }
    }

    pub(super) fn is_in_cluster(&self) -> bool {
        self.get("cluster_enabled") == Some("1")
    }

    pub(super) fn version_finding(&self) -> Finding {
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

    pub(super) fn master_finding(&self) -> Finding {
        match self.identity() {
            Ok(_) => Finding::fine("the server is a master"),
            Err(why) => Finding::error(format!("{why}: name the master in the URL")),
        }
    }

    pub(super) fn aof_finding(&self) -> Finding {
        match self.get("aof_enabled") {
            Some("1") => Finding::fine("the append-only file is on"),
            _ => Finding::warning(
                "the append-only file is off: after a restart of Redis every sale stands still \
                 until it is rebuilt from SQL; set appendonly yes",
            ),
        }
    }
}

/// The lines `name:value` of what INFO, and CLUSTER INFO, answer.
pub(super) fn fields<'a>(texts: impl Iterator<Item = &'a str>) -> HashMap<String, String> {
    let fields = texts.flat_map(str::lines).filter_map(|line| line.split_once(':'));
    fields.map(|(name, field)| (name.to_owned(), field.trim().to_owned())).collect()
}

/// Whether keys may be thrown away; `reply` to CONFIG GET, if that is allowed.
pub(super) fn policy_finding(reply: Option<&HashMap<String, String>>) -> Finding {
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
