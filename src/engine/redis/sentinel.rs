//! Who the master is, by the Sentinels that watch it.
//!
//! All of them are asked, and the one that knows of the latest failover is believed: each
//! failover has a higher epoch, whoever led it. A Sentinel that is cut off from the others goes on
//! naming the old master under the old epoch.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ::redis::{RedisError, aio::MultiplexedConnection};
use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    dialer::Dialer,
    reply::plain_text,
    settings::RedisSettings,
    target::{Host, Target},
};

/// How long a Sentinel may take, if a connection may take longer.
const LIMIT: Duration = Duration::from_millis(500);

/// The Sentinels, with a connection to each of those that answer.
#[derive(Debug)]
pub(super) struct Sentinels {
    master: String,
    watchers: Vec<Watcher>,
    /// The highest that any of them has told.
    epoch: u64,
    limit: Duration,
}

struct Watcher {
    dialer: Dialer,
    connection: Option<MultiplexedConnection>,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dialer.host.fmt(f)
    }
}

/// Where the master is, and all that is known of it.
type Answer = (Option<(String, u16)>, HashMap<String, String>);

/// What one of them says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Vote {
    pub(super) epoch: u64,
    pub(super) master: Host,
}

/// What a round of questions came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Master(Vote),
    /// Why nobody can be believed.
    Nobody(String),
}

impl Sentinels {
    pub(super) fn new(master: &str, target: &Target, settings: &Arc<RedisSettings>) -> Self {
        let watcher = |host: &Host| Watcher {
            dialer: Dialer::to_sentinel(host.clone(), target, settings),
            connection: None,
        };
        Self {
            master: master.to_owned(),
            watchers: target.hosts.iter().map(watcher).collect(),
            epoch: 0,
            limit: settings.connect_timeout().min(LIMIT),
        }
    }

    /// Asks all of them.
    ///
    /// # Errors
    /// Why nobody can be believed.
    pub(super) async fn ask(&mut self) -> Result<Host, String> {
        let votes = self.votes().await;
        let votes = votes.into_iter().map(|(_, vote)| vote).collect();
        match judge(votes, self.epoch) {
            Verdict::Master(vote) => {
                self.epoch = vote.epoch;
                Ok(vote.master)
            }
            Verdict::Nobody(why) => Err(why),
        }
    }

    /// What each of them says.
    pub(super) async fn votes(&mut self) -> Vec<(Host, Result<Vote, String>)> {
        let (master, limit) = (&self.master, self.limit);
        let asks = self.watchers.iter_mut().map(|watcher| async move {
            let host = watcher.dialer.host.clone();
            let asked = timeout(limit, watcher.ask(master)).await;
            let vote = asked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            if vote.is_err() {
                watcher.connection = None;
            }
            let vote = vote.map_err(|cause| format!("{host}: {cause}"));
            (host, vote)
        });
        join_all(asks).await
    }

    /// The replicas that the first of them to answer knows.
    pub(super) async fn replicas(&mut self) -> Vec<Host> {
        for watcher in &mut self.watchers {
            let asked = timeout(self.limit, watcher.replicas(&self.master)).await;
            if let Ok(Ok(replicas)) = asked {
                return replicas;
            }
        }
        Vec::new()
    }
}

impl Watcher {
    async fn connection(&mut self) -> Result<&mut MultiplexedConnection, String> {
        match &mut self.connection {
            Some(connection) => Ok(connection),
            empty => Ok(empty.insert(self.dialer.open_quiet().await?)),
        }
    }

    /// The address and its epoch in one go: both change together when a failover is decided.
    async fn ask(&mut self, master: &str) -> Result<Vote, String> {
        let mut pipe = ::redis::pipe();
        pipe.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        pipe.cmd("SENTINEL").arg("MASTER").arg(master);
        let asked = self.dialer.host.clone();
        let answer = pipe.query_async::<Answer>(self.connection().await?).await;
        let unknown = || format!("it knows no master {master}");
        let (address, facts) = answer.map_err(|error| match self.dialer.readable(&error) {
            text if text.contains("No such master") => unknown(),
            text => text,
        })?;
        let (name, port) = address.ok_or_else(unknown)?;
        let epoch = facts.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let epoch = epoch.ok_or_else(|| "it tells no config-epoch".to_owned())?;
        Ok(Vote { epoch, master: Host::named(&name, port, &asked) })
    }

    async fn replicas(&mut self, master: &str) -> Result<Vec<Host>, String> {
        let ask = ::redis::cmd("SENTINEL").arg("REPLICAS").arg(master).take();
        let asked = self.dialer.host.clone();
        let found: Result<Vec<HashMap<String, String>>, RedisError> =
            ask.query_async(self.connection().await?).await;
        let found = found.map_err(|error| plain_text(&error))?;
        let replicas = found.iter().filter_map(|facts| {
            let port = facts.get("port")?.parse().ok()?;
            Some(Host::named(facts.get("ip")?, port, &asked))
        });
        Ok(replicas.collect())
    }
}

/// Whom to believe, when `known` is the highest epoch that was ever told.
///
/// Fewer than half of them, with an older epoch, are cut off from the rest. More than half are
/// Sentinels that were set up anew, and count from the start.
pub(super) fn judge(votes: Vec<Result<Vote, String>>, known: u64) -> Verdict {
    let asked = votes.len();
    let (mut told, mut failures) = (Vec::new(), Vec::new());
    for vote in votes {
        match vote {
            Ok(vote) => told.push(vote),
            Err(failure) => failures.push(failure),
        }
    }
    let answered = told.len();
    match told.into_iter().max_by_key(|vote| vote.epoch) {
        Some(newest) if newest.epoch >= known || 2 * answered > asked => Verdict::Master(newest),
        Some(newest) => Verdict::Nobody(format!(
            "{answered} of {asked} Sentinels answer, and name a master from before the last failover: \
             {}",
            newest.master
        )),
        None => Verdict::Nobody(failures.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(epoch: u64, name: &str) -> Result<Vote, String> {
        Ok(Vote { epoch, master: Host { name: name.to_owned(), port: 1 } })
    }

    fn away() -> Result<Vote, String> {
        Err("away".to_owned())
    }

    fn believed(votes: Vec<Result<Vote, String>>, known: u64) -> Option<String> {
        match judge(votes, known) {
            Verdict::Master(vote) => Some(vote.master.name),
            Verdict::Nobody(_) => None,
        }
    }

    #[test]
    fn the_latest_failover_is_believed_whoever_tells_of_it() {
        let all = vec![vote(3, "old"), vote(4, "new"), vote(3, "old")];
        assert_eq!(believed(all, 3).as_deref(), Some("new"));
        assert_eq!(believed(vec![away(), vote(4, "new"), away()], 3).as_deref(), Some("new"));
    }

    #[test]
    fn a_sentinel_that_was_cut_off_does_not_lead_back_to_the_old_master() {
        assert_eq!(believed(vec![vote(3, "old"), away(), away()], 4), None);
        assert_eq!(believed(vec![away(), away()], 0), None);
    }

    #[test]
    fn sentinels_that_count_from_the_start_again_are_believed_when_they_are_most() {
        let all = vec![vote(0, "new"), vote(0, "new"), away()];
        assert_eq!(believed(all, 7).as_deref(), Some("new"));
    }
}
