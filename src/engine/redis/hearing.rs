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

use super::{node::Node, router::Router};
use crate::engine::events::{CHANNEL, Heard, Hearing};

/// How many messages may wait for a slow listener; more are a gap.
const WAITING: usize = 1_024;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

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
    line: Option<Line>,
    pause: Duration,
}

/// A connection that subscribed.
struct Line {
    node: Arc<Node>,
    pushes: mpsc::Receiver<PushInfo>,
    /// Whether something did not find room.
    missed: Arc<AtomicBool>,
    _connection: MultiplexedConnection,
}

impl Ear {
    async fn next(&mut self) -> Heard {
        loop {
            let Some(line) = &mut self.line else {
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
            let push = tokio::select! {
                push = line.pushes.recv() => push,
                // A server that is no master any more, or is away, may be cut off from the others. The
                // sender is the router's own.
                Ok(()) = self.changes.changed() => {
                    if !self.router.has(&line.node) || line.node.is_away() {
                        self.line = None;
                    }
                    continue;
                }
            };
            match push {
                Some(PushInfo { kind: PushKind::Message, mut data }) => {
                    if let Some(Value::BulkString(message)) = data.pop() {
                        return Heard::Message(message);
                    }
                }
                Some(PushInfo { kind: PushKind::Disconnection, .. }) | None => self.line = None,
                Some(_) => {}
            }
        }
    }

    async fn subscribe(&mut self) -> Result<Line, String> {
        let mut nodes = self.router.nodes();
        nodes.sort_by_key(|node| node.is_away());
        let there = nodes.iter().filter(|node| !node.is_away()).count().max(1);
        self.turn = self.turn.wrapping_add(1);
        let node = nodes.get(self.turn % there).cloned();
        let node = node.ok_or_else(|| "no master is known".to_owned())?;
        let (sender, pushes) = mpsc::channel(WAITING);
        let missed = Arc::new(AtomicBool::new(false));
        let full = missed.clone();
        let mut connection = node
            .dialer
            .open(move |push: PushInfo| match sender.try_send(push) {
                Ok(()) => Ok(()),
                Err(mpsc::error::TrySendError::Full(_)) => {
                    full.store(true, Ordering::Relaxed);
                    Ok(())
                }
                Err(mpsc::error::TrySendError::Closed(_)) => Err(SendError),
            })
            .await?;
        let subscribed = connection.subscribe(CHANNEL).await;
        subscribed.map_err(|error| node.dialer.readable(&error))?;
        Ok(Line { node, pushes, missed, _connection: connection })
    }
}
