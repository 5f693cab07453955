//! What is good and bad about the servers, before a start and for `doctor`.

use std::sync::Arc;

use super::{
    cluster::View,
    dialer::{Dialer, Role, certificates},
    router::seen_by,
    sentinel::{Sentinels, Verdict, judge},
    settings::{Finding, Level, OpenError, RedisSettings},
    target::{Host, Kind, Target},
};

/// Looks at every server: also a replica's settings matter, since it may be the master tomorrow.
///
/// # Errors
/// [`OpenError`] when a master can't be asked, or nobody tells who it is.
pub(super) async fn check(settings: &RedisSettings) -> Result<Vec<Finding>, OpenError> {
    let target = settings.target()?;
    if target.tls {
        certificates(settings).await.map_err(OpenError::Certificate)?;
    }
    let settings = Arc::new(settings.clone());
    let look = Look { target, settings };
    match &look.target.kind {
        Kind::Server => {
            let host = look.target.hosts.first().ok_or_else(|| look.unreachable("no host"))?;
            look.dialer(host).check(&look.target.kind, Role::Master).await
        }
        Kind::Cluster => look.cluster().await,
        Kind::Sentinel(master) => look.sentinels(master).await,
    }
}

/// A master of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    pub host: String,
    pub port: u16,
    /// The process, as itself knows it: on its machine, in its container.
    pub process_id: Option<u32>,
    /// How many of the keys that were asked about belong there.
    pub keys: usize,
}

/// See [`super::RedisEngine::masters`].
///
/// # Errors
/// [`OpenError`] when nobody tells who they are, or one of them can't be asked.
pub(super) async fn masters(
    settings: &RedisSettings,
    keys: &[String],
) -> Result<Vec<Master>, OpenError> {
    let look = Look { target: settings.target()?, settings: Arc::new(settings.clone()) };
    if look.target.kind != Kind::Cluster {
        return Ok(Vec::new());
    }
    let view = look.view().await?;
    let mut masters = Vec::new();
    for host in view.masters() {
        let info = look.dialer(&host).info().await?.1;
        masters.push(Master {
            process_id: info.get("process_id").and_then(|id| id.parse().ok()),
            keys: keys.iter().filter(|key| view.master_of(key) == Some(&host)).count(),
            host: host.name,
            port: host.port,
        });
    }
    Ok(masters)
}

struct Look {
    target: Target,
    settings: Arc<RedisSettings>,
}

impl Look {
    fn dialer(&self, host: &Host) -> Dialer {
        Dialer::new(host.clone(), &self.target, &self.settings)
    }

    fn unreachable(&self, cause: impl Into<String>) -> OpenError {
        OpenError::Unreachable { address: self.target.to_string(), cause: cause.into() }
    }

    async fn cluster(&self) -> Result<Vec<Finding>, OpenError> {
        let view = self.view().await?;
        let (masters, replicas) = (view.masters(), view.replicas());
        let count =
            format!("the cluster is well: {} masters, {} replicas", masters.len(), replicas.len());
        let mut findings = vec![Finding::fine(count)];
        if view.uncovered() > 0 {
            findings.push(Finding::warning(format!(
                "{} slots are served by nobody: what falls into them can't be sold",
                view.uncovered()
            )));
        }
        let alone = masters.iter().filter(|master| {
            let mut ranges = view.ranges.iter().filter(|range| range.master == **master);
            ranges.all(|range| range.replicas.is_empty())
        });
        for master in alone {
            findings.push(Finding::warning(format!(
                "{master} has no replica: while it is away, what it has is not sold"
            )));
        }
        findings.extend(self.servers(masters, replicas).await?);
        Ok(findings)
    }

    /// The cluster as the first of its named members sees it that is well.
    async fn view(&self) -> Result<View, OpenError> {
        let mut failure = self.unreachable("no host");
        for host in &self.target.hosts {
            match seen_by(&self.dialer(host)).await {
                Ok(view) => return Ok(view),
                Err(why) if why.contains("cluster support disabled") => {
                    return Err(OpenError::Misconfigured(format!(
                        "{host} is no member of a cluster: name it in a URL with redis"
                    )));
                }
                Err(why) => failure = self.unreachable(why),
            }
        }
        Err(failure)
    }

    async fn sentinels(&self, master: &str) -> Result<Vec<Finding>, OpenError> {
        let mut sentinels = Sentinels::new(master, &self.target, &self.settings);
        let votes = sentinels.votes().await;
        let mut findings = Vec::new();
        for (host, vote) in &votes {
            match vote {
                Ok(vote) => findings.push(Finding::fine(format!(
                    "the Sentinel {host} names {} since failover {}",
                    vote.master, vote.epoch
                ))),
                Err(why) => findings.push(Finding::warning(format!("the Sentinel {why}"))),
            }
        }
        let votes = votes.into_iter().map(|(_, vote)| vote).collect();
        let found = match judge(votes, 0) {
            Verdict::Master(vote) => vote.master,
            Verdict::Nobody(why) => return Err(self.unreachable(why)),
        };
        let replicas = sentinels.replicas().await;
        if replicas.is_empty() {
            findings.push(Finding::warning(format!(
                "{found} has no replica: while it is away nothing is sold"
            )));
        }
        findings.extend(self.servers(vec![found], replicas).await?);
        Ok(findings)
    }

    /// What all of them have in common is said once.
    async fn servers(
        &self,
        masters: Vec<Host>,
        replicas: Vec<Host>,
    ) -> Result<Vec<Finding>, OpenError> {
        let count = masters.len() + replicas.len();
        let mut found: Vec<(Finding, Vec<Host>)> = Vec::new();
        let mut note = |finding: Finding, host: &Host| match found
            .iter_mut()
            .find(|(known, _)| *known == finding)
        {
            Some((_, hosts)) => hosts.push(host.clone()),
            None => found.push((finding, vec![host.clone()])),
        };
        let (mut failure, mut there) = (None, 0);
        for host in &masters {
            match self.dialer(host).check(&self.target.kind, Role::Master).await {
                Ok(findings) => {
                    there += 1;
                    findings.into_iter().for_each(|finding| note(finding, host));
                }
                Err(error) => {
                    note(Finding::warning(format!("what it has is not sold: {error}")), host);
                    failure = Some(error);
                }
            }
        }
        // Some of a cluster sell what they have.
        if let (Some(error), 0) = (failure, there) {
            return Err(error);
        }
        for host in &replicas {
            match self.dialer(host).check(&self.target.kind, Role::Replica).await {
                Ok(findings) => findings.into_iter().for_each(|finding| note(finding, host)),
                Err(error) => note(Finding::warning(format!("a replica: {error}")), host),
            }
        }
        let named = found.into_iter().map(|(Finding { level, text }, hosts)| {
            let on = match (level, hosts.len() == count) {
                (_, true) => format!("all {count} servers"),
                (Level::Fine, false) => format!("{} of {count} servers", hosts.len()),
                (Level::Warning | Level::Error, false) => {
                    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                }
            };
            Finding { level, text: format!("{on}: {text}") }
        });
        Ok(named.collect())
    }
}
