//! Requests for one segment travel together.
//!
//! Natural batching, no timer: a worker that is free takes all that is queued, up to a cap. Idle,
//! a batch is one request and waits for nobody; under load it grows by itself.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};
use tokio_util::task::TaskTracker;

use super::{
    EngineError,
    scripts::{Answer, Attempts, Members, Refusal, SegmentScripts, Stamp, Take, Taken},
    sold_out::{Read, SoldOut},
    verdict::Verdict,
};
use crate::{
    domain::{BuyerId, Clock, OrderNo, TimeMs},
    failpoints::failpoint,
    metrics::{self, Depth, UnderWay, Waited},
};

/// The most requests in one call: 64 hold Redis for about half a millisecond, 128 gain nothing.
const BATCH: usize = 64;
/// The most members that one call may ask about; Lua's `unpack` ends at 8,000.
const MEMBERS: usize = 4_096;
/// The most acknowledgements in one call.
const ACKNOWLEDGEMENTS: usize = 256;
/// Calls in flight per segment; the connection keeps their order.
const WORKERS: usize = 2;
/// The same while a full batch waits, so that an engine which is far away gets as many.
const MOST_WORKERS: usize = 8;
/// The most requests that wait for a worker; more are refused at once.
const QUEUE: usize = 20_000;

/// Who waits for a request; the script is not run for somebody who has left.
#[derive(Debug, Clone, Default)]
pub struct Caller {
    connection: Option<Weak<()>>,
    deadline: Option<std::time::Instant>,
}

impl Caller {
    /// A caller who is there as long as `connection` is held, and until `deadline`.
    #[must_use]
    pub fn new(connection: &Arc<()>, deadline: Option<std::time::Instant>) -> Self {
        Self { connection: Some(Arc::downgrade(connection)), deadline }
    }

    fn has_left(&self) -> bool {
        self.connection.as_ref().is_some_and(|held| held.strong_count() == 0)
            || self.deadline.is_some_and(|deadline| deadline <= std::time::Instant::now())
    }
}

/// What a request to take units came to, and what was seen with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakeReply {
    pub taken: Taken,
    pub stamp: Stamp,
    /// Units left in the segment after the whole call.
    pub stock: u64,
    /// The time the script was given: when a `Taken` reservation was made.
    pub time: TimeMs,
}

/// Why a request to take units has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    #[error("the segment refused: {0:?}")]
    Refused(Refusal),
    /// The engine shows an older state than this process has seen: it lost writes.
    #[error("the engine went back to {found:?} behind {seen:?}")]
    WentBack { seen: Stamp, found: Stamp },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("too many requests wait for this offer")]
    Overloaded,
    #[error("the caller left before anything was taken")]
    CallerLeft,
}

/// How the segments of all offers behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentOptions {
    /// How often a buyer may try, over all servers.
    pub attempts: Option<Attempts>,
    /// How long a request may wait for the engine.
    pub max_wait: Duration,
    /// How long it is believed that nothing is left; 0: the engine is always asked.
    pub believe_sold_out: Duration,
}

/// One segment of an offer's stock: its scripts, its epoch, and the requests that wait for it.
#[derive(Debug)]
pub struct Segment {
    pub scripts: SegmentScripts,
    /// Its number among the segments of the offer, from 0.
    pub number: u32,
    pub sold_out: SoldOut,
    /// One call at a time gathers units here from other segments.
    pub gathering: tokio::sync::Mutex<()>,
    max_orders: u32,
    /// The epoch that calls are made under; of all segments of the offer.
    epoch: Arc<AtomicU64>,
    /// Of all segments of the offer, where they are several.
    verdict: Option<Arc<Verdict>>,
    /// The newest state that this process has seen.
    seen: Mutex<Stamp>,
    queue: Mutex<Queue>,
    asked: UnderWay,
    acknowledgements: Mutex<Acknowledgements>,
    max_wait: Duration,
    clock: Clock,
    tasks: TaskTracker,
}

/// A reservation that SQL holds.
#[derive(Debug)]
struct Acknowledgement {
    buyer: BuyerId,
    slot: u32,
    order_no: OrderNo,
    expire_time: Option<TimeMs>,
}

#[derive(Debug, Default)]
struct Acknowledgements {
    waiting: Vec<Acknowledgement>,
    at_work: bool,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    workers: usize,
}

#[derive(Debug)]
struct Waiting {
    take: Take,
    since: Instant,
    caller: Caller,
    reply: oneshot::Sender<Result<TakeReply, TakeError>>,
}

impl Segment {
    /// A segment that is called under the epoch of its offer; its workers run in `tasks`. What waited too long for
    /// one of them is refused.
    #[must_use]
    pub fn new(
        scripts: SegmentScripts,
        number: u32,
        max_orders: u32,
        (epoch, verdict): (Arc<AtomicU64>, Option<Arc<Verdict>>),
        options: SegmentOptions,
        clock: Clock,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            scripts,
            number,
            sold_out: SoldOut::new(options.believe_sold_out),
            gathering: tokio::sync::Mutex::default(),
            max_orders,
            epoch,
            verdict,
            seen: Mutex::default(),
            queue: Mutex::default(),
            asked: UnderWay::default(),
            acknowledgements: Mutex::default(),
            max_wait: options.max_wait,
            clock,
            tasks,
        }
    }

    /// The epoch that calls are made under.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The newest state that this process has seen.
    pub fn seen(&self) -> Stamp {
        *locked(&self.seen)
    }

    /// Notes what a reply showed. `before` is what was seen when the call was sent: replies may
    /// overtake each other here, but none may show less than that.
    ///
    /// # Errors
    /// [`TakeError::WentBack`] when the engine has lost writes.
    pub fn observe(&self, before: Stamp, found: Stamp) -> Result<(), TakeError> {
        if found < before {
            return Err(TakeError::WentBack { seen: before, found });
        }
        let mut seen = locked(&self.seen);
        *seen = found.max(*seen);
        drop(seen);
        self.hear(found);
        Ok(())
    }

    /// Notes that the segment is, or was, at this state, or beyond it.
    pub fn hear(&self, stamp: Stamp) {
        self.sold_out.hear(stamp);
        if let Some(verdict) = &self.verdict {
            verdict.hear(self.number, stamp);
        }
    }

    /// Takes units for one buyer, together with whoever else asks.
    ///
    /// # Errors
    /// [`TakeError`]; only after `Engine(Unknown)` and `WentBack` may units be held.
    pub async fn take(
        self: &Arc<Self>,
        take: Take,
        caller: Caller,
    ) -> Result<TakeReply, TakeError> {
        let (reply, answer) = oneshot::channel();
        {
            let mut queue = locked(&self.queue);
            if queue.waiting.len() >= QUEUE {
                return Err(TakeError::Overloaded);
            }
            queue.waiting.push_back(Waiting { take, since: Instant::now(), caller, reply });
            let most = if queue.waiting.len() < BATCH { WORKERS } else { MOST_WORKERS };
            if queue.workers < most {
                queue.workers += 1;
                self.tasks.spawn(self.clone().work());
            }
        }
        answer.await.unwrap_or_else(|_| {
            Err(TakeError::Engine(EngineError::Unknown("the worker of this segment died".into())))
        })
    }

    /// The requests that wait for a worker, and those that the engine was asked for.
    pub fn requests(&self) -> Depth {
        Depth { waiting: locked(&self.queue).waiting.len(), under_way: self.asked.count() }
    }

    /// Tells the engine, in the background and together with others, that SQL holds this
    /// reservation. What gets lost here is found again by the sweeper.
    pub fn acknowledge(
        self: &Arc<Self>,
        buyer: BuyerId,
        slot: u32,
        order_no: OrderNo,
        expire_time: Option<TimeMs>,
    ) {
        let mut queue = locked(&self.acknowledgements);
        queue.waiting.push(Acknowledgement { buyer, slot, order_no, expire_time });
        if !queue.at_work {
            queue.at_work = true;
            self.tasks.spawn(self.clone().acknowledge_all());
        }
    }

    async fn acknowledge_all(self: Arc<Self>) {
        loop {
            let batch: Vec<Acknowledgement> = {
                let mut queue = locked(&self.acknowledgements);
                if queue.waiting.is_empty() {
                    queue.at_work = false;
                    return;
                }
                let most = ACKNOWLEDGEMENTS.min(queue.waiting.len());
                queue.waiting.drain(..most).collect()
            };
            let written = batch.iter().map(|a| (&a.buyer, a.slot, &a.order_no, a.expire_time));
            failpoint!("before_acknowledge_script");
            let acknowledged = self.scripts.acknowledge(self.epoch(), written).await;
            failpoint!("after_acknowledge_script");
            match acknowledged {
                Ok(Ok(())) => {}
                Ok(Err(refusal)) => tracing::debug!(?refusal, "acknowledgements were refused"),
                Err(error) => tracing::debug!(%error, "acknowledgements were lost"),
            }
        }
    }

    async fn work(self: Arc<Self>) {
        let _at_work = AtWork(&self);
        while let Some(batch) = self.next_batch() {
            if batch.is_empty() {
                continue;
            }
            metrics::engine_batch(batch.len());
            for waiting in &batch {
                metrics::waited(Waited::Engine, waiting.since.elapsed());
            }
            let now = self.clock.now();
            let (before, asked) = (self.seen(), Instant::now());
            let takes = batch.iter().map(|waiting| &waiting.take);
            let under_way = self.asked.begin(batch.len());
            let result = self.scripts.reserve(self.epoch(), now, takes).await;
            drop(under_way);
            if let Ok(Ok(reserved)) = &result {
                self.sold_out.observe(reserved.stamp, asked);
                // One of several is read when all of them have nothing: it may get units until then.
                let over = self.verdict.as_ref().is_none_or(|verdict| verdict.is_sold_out());
                if reserved.stock == 0 && over && self.sold_out.begin() {
                    self.tasks.spawn(self.clone().read_sold_out());
                }
            }
            self.answer(batch, now, before, result);
        }
    }

    /// Learns who would not hear `sold_out`, while that is the answer to everybody else.
    async fn read_sold_out(self: Arc<Self>) {
        let mut read = self.sold_out.read();
        let found = match self.read_members(&mut read).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "a sold out segment was not read");
                None
            }
        };
        self.sold_out.finish(read, found);
    }

    /// At which state the segment had no stock from the first page to the last, if at any; and when
    /// the last page was asked for.
    async fn read_members(
        &self,
        read: &mut Read<'_>,
    ) -> Result<Option<(Stamp, Instant)>, EngineError> {
        let mut found = None;
        for what in [Members::Buyers, Members::Marks] {
            let mut cursor = "0".to_owned();
            loop {
                let asked = Instant::now();
                let Ok(page) = self.scripts.members_page(what, &cursor).await? else {
                    return Ok(None);
                };
                // Of another epoch, the segment may not be the home of whom this process sends here.
                let moved = found.is_some_and(|(stamp, _)| stamp != page.stamp)
                    || page.stamp.epoch != self.epoch();
                if moved || page.stock > 0 || read.is_too_long() {
                    return Ok(None);
                }
                found = Some((page.stamp, asked));
                for name in &page.names {
                    match what {
                        Members::Buyers => read.buyer(name),
                        Members::Marks => read.mark(name),
                    }
                }
                cursor = page.next;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// What this worker does next; `None` when it may go home.
    fn next_batch(&self) -> Option<Vec<Waiting>> {
        let mut queue = locked(&self.queue);
        if queue.waiting.is_empty() {
            queue.workers -= 1;
            return None;
        }
        let most = BATCH.min((MEMBERS / self.max_orders.max(1) as usize).max(1));
        let mut batch = Vec::with_capacity(most.min(queue.waiting.len()));
        while batch.len() < most
            && let Some(waiting) = queue.waiting.pop_front()
        {
            // An answer that comes this late is of no use, and the next one would be later still.
            if waiting.since.elapsed() > self.max_wait {
                let _ = waiting.reply.send(Err(TakeError::Overloaded));
            } else if waiting.caller.has_left() {
                // Nobody waits for this answer any more, so a failed send is what we expect.
                let _ = waiting.reply.send(Err(TakeError::CallerLeft));
            } else {
                batch.push(waiting);
            }
        }
        Some(batch)
    }

    fn answer(
        &self,
        batch: Vec<Waiting>,
        time: TimeMs,
        before: Stamp,
        result: Result<Answer<super::scripts::Reserved>, EngineError>,
    ) {
        let failure = match result {
            Ok(Ok(reserved)) if reserved.answers.len() == batch.len() => {
                match self.observe(before, reserved.stamp) {
                    Ok(()) => {
                        for (waiting, taken) in batch.into_iter().zip(reserved.answers) {
                            let (stamp, stock) = (reserved.stamp, reserved.stock);
                            // The task that waits may have been aborted with the runtime.
                            let _ = waiting.reply.send(Ok(TakeReply { taken, stamp, stock, time }));
                        }
                        return;
                    }
                    Err(went_back) => went_back,
                }
            }
            Ok(Ok(reserved)) => TakeError::Engine(EngineError::Script(format!(
                "reserve.lua gave {} answers to {} requests",
                reserved.answers.len(),
                batch.len()
            ))),
            Ok(Err(refusal)) => TakeError::Refused(refusal),
            Err(error) => TakeError::Engine(error),
        };
        for waiting in batch {
            let _ = waiting.reply.send(Err(failure.clone()));
        }
    }
}

/// Makes room for another worker when this one panics.
struct AtWork<'a>(&'a Segment);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            locked(&self.0.queue).workers -= 1;
        }
    }
}

/// A poisoned lock is taken all the same: what it guards is whole between two statements.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
