//! What other servers tell, over a connection of its own that is made again for as long as it takes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ::redis::{
    PushInfo, PushKind, RedisError, Value,
    aio::{MultiplexedConnection, SendError},
};
use futures_util::{StreamExt, stream};
use tokio::sync::mpsc;

use super::Dialer;
use crate::engine::events::{CHANNEL, Heard, Hearing};

/// How many messages may wait for a slow listener; more are a gap.
const WAITING: usize = 1_024;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn hear(dialer: Dialer) -> Hearing {
    let ear = Ear { dialer, line: None, pause: FIRST_PAUSE };
    stream::unfold(ear, |mut ear| async move { Some((ear.next().await, ear)) }).boxed()
}

struct Ear {
    dialer: Dialer,
    line: Option<Line>,
    pause: Duration,
}

/// A connection that subscribed.
struct Line {
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
            match line.pushes.recv().await {
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

    async fn subscribe(&self) -> Result<Line, RedisError> {
        let (sender, pushes) = mpsc::channel(WAITING);
        let missed = Arc::new(AtomicBool::new(false));
        let full = missed.clone();
        let mut connection = self
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
        connection.subscribe(CHANNEL).await?;
        Ok(Line { pushes, missed, _connection: connection })
    }
}
