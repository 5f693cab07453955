//! What one watcher of stock was sent, and one validator for each guarantee of `WatchStock`, by
//! the names that they have in the proto file. Plain data, so that any test program can use it.

use std::{collections::HashMap, time::Duration};

/// The longest silence on a stream.
pub(crate) const SILENCE: Duration = Duration::from_secs(15);
/// How soon the true value is sent after the last change.
pub(crate) const CONVERGENCE: Duration = Duration::from_secs(2);
/// How much later than it was sent a message may be read on a busy machine.
const LATE: Duration = Duration::from_secs(1);

/// One message, when it was read. Times are since any beginning, by a monotonic clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) at: Duration,
    pub(crate) sku: String,
    pub(crate) total: i64,
    pub(crate) remaining: i64,
    pub(crate) reserved: i64,
    /// The state of the activity, as the word of the API without its prefix.
    pub(crate) state: String,
    pub(crate) epoch: i64,
    pub(crate) revision: i64,
    pub(crate) snapshot: bool,
    pub(crate) heartbeat: bool,
}

impl Message {
    fn stamp(&self) -> (i64, i64) {
        (self.epoch, self.revision)
    }

    fn figures(&self) -> (i64, i64, i64) {
        (self.total, self.remaining, self.reserved)
    }
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Ok,
    Unavailable,
    Other,
}

/// One stream, as far as it was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Watched {
    pub(crate) skus: Vec<String>,
    pub(crate) began: Duration,
    pub(crate) messages: Vec<Message>,
    pub(crate) end: Option<End>,
    /// Until when the reader waited for messages.
    pub(crate) until: Duration,
}

impl Watched {
    /// All that needs no knowledge of what happened to the stock. For a stream whose reader was
    /// there all the time.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.snapshot_first()?;
        self.order()?;
        self.sanity()?;
        self.life()?;
        self.ends_rightly()
    }

    /// Snapshot first: the first message about each offer, and no other, is its snapshot; all of
    /// them come before any change.
    pub(crate) fn snapshot_first(&self) -> Result<(), String> {
        let mut missing: Vec<&str> = self.skus.iter().map(String::as_str).collect();
        for message in &self.messages {
            if !self.skus.contains(&message.sku) {
                return Err(format!("nobody asked for {message:?}"));
            }
            let first = missing.contains(&&*message.sku);
            missing.retain(|sku| *sku != message.sku);
            if first && (!message.snapshot || message.heartbeat) {
                return Err(format!("no snapshot comes first: {message:?}"));
            }
            if !first && message.snapshot {
                return Err(format!("a second snapshot: {message:?}"));
            }
            if !first && !missing.is_empty() {
                return Err(format!("before the snapshot of {missing:?}: {message:?}"));
            }
        }
        Ok(())
    }

    /// Order: the epoch never goes back, nor does the revision within an epoch; it is another one
    /// for other figures, and nothing is told twice but by a heartbeat.
    pub(crate) fn order(&self) -> Result<(), String> {
        let mut last = HashMap::<&str, &Message>::new();
        let mut last_change = HashMap::<&str, &Message>::new();
        for message in &self.messages {
            if let Some(before) = last.insert(&message.sku, message) {
                if message.stamp() < before.stamp() {
                    return Err(format!("{message:?} goes back behind {before:?}"));
                }
                if message.stamp() == before.stamp() && message.figures() != before.figures() {
                    return Err(format!("{message:?} has the revision of {before:?}"));
                }
            }
            if message.heartbeat {
                continue;
            }
            if let Some(before) = last_change.insert(&message.sku, message)
                && (before.stamp(), &before.state) == (message.stamp(), &message.state)
            {
                return Err(format!("told twice: {message:?}"));
            }
        }
        Ok(())
    }

    /// Sanity: no value is ever sent that can't be.
    pub(crate) fn sanity(&self) -> Result<(), String> {
        let impossible = |message: &&Message| {
            let (total, remaining, reserved) = message.figures();
            remaining < 0 || reserved < 0 || remaining + reserved > total
        };
        match self.messages.iter().find(impossible) {
            Some(message) => Err(format!("impossible: {message:?}")),
            None => Ok(()),
        }
    }

    /// Convergence: the truth is told within `limit` of the last change, and nothing else after
    /// that. Nothing may have changed since until the reader left.
    pub(crate) fn convergence(
        &self,
        sku: &str,
        changed: Duration,
        remaining: i64,
        limit: Duration,
    ) -> Result<(), String> {
        let deadline = changed + limit;
        if self.until < deadline && self.end.is_none() {
            return Err(format!("read until {:?} only, not until {deadline:?}", self.until));
        }
        let of_sku = || self.messages.iter().filter(|message| message.sku == sku);
        let last = of_sku().rfind(|message| message.at <= deadline);
        let Some(last) = last.filter(|message| message.remaining == remaining) else {
            return Err(format!("{remaining} are left, and {limit:?} later it was {last:?}"));
        };
        match of_sku().find(|m| m.at > deadline && m.remaining != remaining) {
            Some(wrong) => Err(format!("after {last:?}, which is right, came {wrong:?}")),
            None => Ok(()),
        }
    }

    /// Newest wins: after a stall the reader finds at most `most` older values, those that were
    /// on the wire, and then the newest, of this (epoch, revision).
    pub(crate) fn newest_wins(
        &self,
        resumed: Duration,
        newest: (i64, i64),
        most: usize,
    ) -> Result<(), String> {
        let after = || self.messages.iter().filter(|message| message.at >= resumed);
        let old = after().take_while(|message| message.stamp() < newest).count();
        if old > most {
            return Err(format!("{old} old values were kept for a reader that stalled"));
        }
        match after().nth(old) {
            Some(message) if message.stamp() == newest => Ok(()),
            next => Err(format!("{newest:?} is the newest, and {next:?} came")),
        }
    }

    /// Life: no silence is longer than allowed.
    pub(crate) fn life(&self) -> Result<(), String> {
        let mut before = self.began;
        let ends = self.end.is_none().then_some(self.until);
        for at in self.messages.iter().map(|message| message.at).chain(ends) {
            if at.saturating_sub(before) > SILENCE + LATE {
                return Err(format!("nothing was sent from {before:?} to {at:?}"));
            }
            before = at;
        }
        Ok(())
    }

    /// End: with OK only after the last state of every offer, and else with UNAVAILABLE.
    pub(crate) fn ends_rightly(&self) -> Result<(), String> {
        let mut state = HashMap::<&str, &str>::new();
        for message in &self.messages {
            let before = state.insert(&message.sku, &message.state);
            if before == Some("SETTLED") && message.state != "SETTLED" {
                return Err(format!("after the last state: {message:?}"));
            }
        }
        match self.end {
            None | Some(End::Unavailable) => Ok(()),
            Some(End::Other) => Err("it broke off with another status".to_owned()),
            Some(End::Ok) => match self
                .skus
                .iter()
                .find(|sku| state.get(sku.as_str()).is_none_or(|state| *state != "SETTLED"))
            {
                Some(sku) => Err(format!("it ended without the last state of {sku}")),
                None => Ok(()),
            },
        }
    }
}
