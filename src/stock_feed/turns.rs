//! Streams hear of news in turns, some hundred at a time.
//!
//! Thousands of streams that wake at once stand in front of every buyer's call on the threads that
//! speak gRPC. So one group is told, and the next one when these threads have come through it and
//! were free for others for `REST` times as long: the streams of an activity take a quarter of the
//! threads. Where others keep the threads busy, that takes longer, and streams hear less often.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};

/// The rest after a turn, in lengths of it.
const REST: u32 = 3;

/// Knows the threads that serve streams.
#[derive(Debug, Default)]
pub struct Turns {
    threads: Mutex<Vec<mpsc::UnboundedSender<oneshot::Sender<()>>>>,
}

impl Turns {
    /// Runs on each thread that serves streams, as a task of its own: tells when the thread has come
    /// through the tasks that were due before.
    pub async fn keep(&self) {
        let (ask, mut asked) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(ask);
        while let Some(through) = asked.recv().await {
            // Who asked may have lost patience.
            let _ = through.send(());
        }
    }

    /// Tells a group of streams, and waits until the next one may be told: `most` at the longest, so
    /// that nobody hears nothing for as long as there is a rush.
    pub(super) async fn take(&self, most: Duration, tell: impl FnOnce()) {
        let begun = Instant::now();
        tell();
        let _ = timeout(most, join_all(self.ask())).await;
        sleep_until(begun + (begun.elapsed() * (1 + REST)).min(most)).await;
    }

    /// Each is answered, or dropped with its thread, once the thread is through.
    fn ask(&self) -> Vec<oneshot::Receiver<()>> {
        let mut through = Vec::new();
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).retain(|thread| {
            let (answer, answered) = oneshot::channel();
            let is_there = thread.send(answer).is_ok();
            if is_there {
                through.push(answered);
            }
            is_there
        });
        through
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::runtime;

    use super::*;

    /// Long enough for what takes no time.
    const PATIENCE: Duration = Duration::from_secs(10);

    /// A thread that serves streams, and is busy for so long after each piece of news.
    fn a_thread(turns: &Arc<Turns>, mut news: mpsc::UnboundedReceiver<Duration>) {
        let known = turns.clone();
        std::thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let busy = runtime.spawn(async move {
                while let Some(long) = news.recv().await {
                    #[allow(clippy::disallowed_methods, reason = "a busy thread")]
                    std::thread::sleep(long);
                }
            });
            runtime.spawn(async move { known.keep().await });
            runtime.block_on(busy).unwrap();
        });
        while turns.threads.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
    }

    async fn length_of_a_turn(turns: &Turns, most: Duration, tell: impl FnOnce()) -> Duration {
        let begun = Instant::now();
        turns.take(most, tell).await;
        begun.elapsed()
    }

    #[tokio::test]
    async fn a_thread_is_free_for_others_three_times_as_long_as_a_turn_keeps_it_busy() {
        let turns = Arc::new(Turns::default());
        let (tell, news) = mpsc::unbounded_channel();
        a_thread(&turns, news);
        let long = Duration::from_millis(50);
        let took = length_of_a_turn(&turns, PATIENCE, || tell.send(long).unwrap()).await;
        assert!(took >= long * 4, "{took:?}");
        assert!(took < PATIENCE, "{took:?}");
    }

    #[tokio::test]
    async fn a_turn_is_over_in_time_whatever_the_threads_have_to_do() {
        let turns = Arc::new(Turns::default());
        let (tell, news) = mpsc::unbounded_channel();
        a_thread(&turns, news);
        let most = Duration::from_millis(100);
        let busy = Duration::from_secs(1);
        let took = length_of_a_turn(&turns, most, || tell.send(busy).unwrap()).await;
        assert!((most..busy).contains(&took), "{took:?}");
    }

    #[tokio::test]
    async fn a_thread_that_is_gone_keeps_nobody_waiting() {
        let turns = Arc::new(Turns::default());
        let (tell, news) = mpsc::unbounded_channel();
        a_thread(&turns, news);
        drop(tell);
        let took = length_of_a_turn(&turns, PATIENCE, || {}).await;
        assert!(took < PATIENCE, "{took:?}");
    }
}
