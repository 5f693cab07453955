//! What other servers tell, over a connection of its own that is made again for as long as it takes.
//!
//! In a cluster whatever is published at one server reaches all, so any of them will do.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ::redis::{
    PushInfo, PushKind, Value,
    aio::{MultiplexedConnection, SendError},
};
use futures_util::{StreamExt, stream};
use tokio::sync::{mpsc, watch};

use super::{dialer::Dialer, node::Node, router::Router};
use crate::engine::events::{CHANNEL, Heard, Hearing};

/// How many messages may wait for a slow listener; more are a gap.
const WAITING: usize = 1_024;
/// How long to wait before a lost connection is made again, at first and at most.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn hear(router: Arc<Router>) -> Hearing {
    let turn = fastrand::usize(..1_024);
    let changes = router.changes();
    let ear = Ear { router, changes, turn, line: None, pause: FIRST_PAUSE };
    stream::unfold(ear, |mut ear| async move { Some((ear.next().await, ear)) }).boxed()
}

struct Ear {
    router: Arc<Router>,
    changes: watch::Receiver<()>,
    /// Which of the masters to listen at next.
    turn: usize,
    /// Where it listens now.
    line: Option<(Arc<Node>, Line)>,
    pause: Duration,
}

/// A connection that subscribed.
pub(super) struct Line {
    pushes: mpsc::Receiver<PushInfo>,
    /// Whether something did not find room.
    missed: Arc<AtomicBool>,
    _connection: MultiplexedConnection,
}

impl Line {
    /// Listens on this channel.
    ///
    /// # Errors
    /// What went wrong, without a password.
    pub(super) async fn open(dialer: &Dialer, channel: &str) -> Result<Self, String> {
        let (sender, pushes) = mpsc::channel(WAITING);
        let missed = Arc::new(AtomicBool::new(false));
        let full = missed.clone();
        let mut connection = dialer
            .open(move |push: PushInfo| match sender.try_send(push) {
                Ok(()) => Ok(()),
                Err(mpsc::error::TrySendError::Full(_)) => {
                    full.store(true, Ordering::Relaxed);
                    Ok(())
                }
                Err(mpsc::error::TrySendError::Closed(_)) => Err(SendError),
            })
            .await?;
        let subscribed = connection.subscribe(channel).await;
        subscribed.map_err(|error| dialer.readable(&error))?;
        Ok(Self { pushes, missed, _connection: connection })
    }

    /// The next message; `None` once the connection is gone.
    pub(super) async fn message(&mut self) -> Option<Vec<u8>> {
        loop {
            match self.pushes.recv().await? {
                PushInfo { kind: PushKind::Message, mut data } => {
                    if let Some(Value::BulkString(message)) = data.pop() {
                        return Some(message);
                    }
                }
                PushInfo { kind: PushKind::Disconnection, .. } => return None,
                _ => {}
            }
        }
    }
}

impl Ear {
    async fn next(&mut self) -> Heard {
        loop {
            let Some((node, line)) = &mut self.line else {
                match self.subscribe().await {
                    Ok(line) => {
                        self.line = Some(line);
                        self.pause = FIRST_PAUSE;
                        return Heard::Gap;
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the engine can't be listened to");
                        tokio::time::sleep(self.pause.mul_f64(0.5 + fastrand::f64())).await;
                        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                    }
                }
                continue;
            };
            if line.missed.swap(false, Ordering::Relaxed) {
                return Heard::Gap;
            }
            let message = tokio::select! {
                message = line.message() => message,
                // A server that is no master any more, or is away, may be cut off from the others. The
                // sender is the router's own.
                Ok(()) = self.changes.changed() => {
                    if !self.router.has(node) || node.is_away() {
                        self.line = None;
                    }
                    continue;
                }
            };
            match message {
                Some(message) => return Heard::Message(message),
                None => self.line = None,
            }
        }
    }

    async fn subscribe(&mut self) -> Result<(Arc<Node>, Line), String> {
        let mut nodes = self.router.nodes();
        nodes.sort_by_key(|node| node.is_away());
        let there = nodes.iter().filter(|node| !node.is_away()).count().max(1);
        self.turn = self.turn.wrapping_add(1);
        let node = nodes.get(self.turn % there).cloned();
        let node = node.ok_or_else(|| "no master is known".to_owned())?;
        let line = Line::open(&node.dialer, CHANNEL).await?;
        Ok((node, line))
    }
}
