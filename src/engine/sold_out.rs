//! Sold out, as this process knows it: nine of ten answers of a sale, given from memory.
//!
//! A flag with a time to live would lie twice: to winners who ask again, and after a release. So
//! what is known is all that a segment without stock could answer differently: the buyers who hold
//! something and the ids that are marked, read at one epoch and revision. While the engine stands
//! there, everybody else hears `sold_out` from `reserve.lua`, and may hear it here.
//!
//! **Promises:** winners, marked ids and calls that say that they are repeats go to the engine. What
//! is known is dropped when a reply or a message shows a newer state, and believed for a moment only
//! after the last reply that confirmed it; one call in a quarter of that goes to the engine for all.
//! So a lost message delays a reopening by that moment; nothing here can oversell.

use std::{
    hash::BuildHasher,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use foldhash::quality::RandomState;
use tokio::time::Instant;

use super::scripts::Stamp;
use crate::domain::{BuyerId, ReservationId};

/// How often one call goes to the engine although the answer is known: so many times in the time
/// for which that is believed.
const ASKED: u64 = 4;
/// The most of its time that a segment is read: a reading is followed by this many times its own
/// length of rest.
const REST: u32 = 9;
/// The most names that are remembered, 8 bytes each; an offer with more is always asked.
const MOST: usize = 4_000_000;

/// What a segment that has no stock could say, or nothing.
#[derive(Debug)]
pub struct SoldOut {
    /// How long what the engine said is believed, in µs; 0: never.
    believed_us: u64,
    known: ArcSwapOption<Known>,
    reading: Mutex<Reading>,
    /// Without a fixed seed: nobody can choose names that look like a winner's.
    hasher: RandomState,
}

#[derive(Debug)]
struct Known {
    stamp: Stamp,
    /// Hashes of the buyers and the marked ids, sorted.
    names: Box<[u64]>,
    /// Whether any id is marked; otherwise nobody's id is looked for.
    marks: bool,
    since: Instant,
    /// When the question was asked whose answer confirmed this last, in µs after `since`.
    confirmed_us: AtomicU64,
    /// When a call was last let through, in µs after `since`.
    asked_us: AtomicU64,
}

#[derive(Debug, Default)]
struct Reading {
    at_work: bool,
    not_before: Option<Instant>,
    /// The newest state that was heard of, in whatever way.
    newest: Stamp,
}

/// What was read of a segment, page by page.
#[derive(Debug)]
pub(super) struct Read<'a> {
    sold_out: &'a SoldOut,
    begun: Instant,
    names: Vec<u64>,
    marks: bool,
}

impl SoldOut {
    /// Nothing is known yet; what will be is believed for so long.
    #[must_use]
    pub fn new(believed_for: Duration) -> Self {
        Self {
            believed_us: micros(believed_for),
            known: ArcSwapOption::empty(),
            reading: Mutex::default(),
            hasher: RandomState::default(),
        }
    }

    /// Whether the answer to this call is known to be sold out. `id` names its reservation.
    pub fn refuses(&self, buyer: &BuyerId, id: impl FnOnce() -> ReservationId) -> bool {
        let known = self.known.load();
        let Some(known) = known.as_ref() else { return false };
        let now_us = micros(known.since.elapsed());
        let age_us = now_us.saturating_sub(known.confirmed_us.load(Ordering::Acquire));
        if age_us > self.believed_us
            || known.has(self.hash(buyer.as_str()))
            || (known.marks && known.has(self.hash(id().as_str())))
        {
            return false;
        }
        let ask_every_us = self.believed_us / ASKED;
        !(age_us > ask_every_us && known.is_first_to_ask(now_us, ask_every_us))
    }

    /// Whether the segment was read at this state, and this call would have heard then that it is
    /// sold out; of several segments the age of that is the verdict's to judge.
    pub(super) fn has_nothing_for(
        &self,
        stamp: Stamp,
        buyer: &BuyerId,
        id: impl FnOnce() -> ReservationId,
    ) -> bool {
        let known = self.known.load();
        let Some(known) = known.as_ref().filter(|known| known.stamp == stamp) else { return false };
        let has_some = known.has(self.hash(buyer.as_str()))
            || (known.marks && known.has(self.hash(id().as_str())));
        !has_some
    }

    /// Whether anything is known now.
    pub fn is_known(&self) -> bool {
        self.known.load().is_some()
    }

    /// Notes the state that a reply to a call sent at `asked` showed.
    pub(super) fn observe(&self, stamp: Stamp, asked: Instant) {
        let known = self.known.load();
        match known.as_ref() {
            Some(known) if known.stamp == stamp => {
                let asked_us = micros(asked.saturating_duration_since(known.since));
                known.confirmed_us.fetch_max(asked_us, Ordering::AcqRel);
            }
            Some(_) | None => self.hear(stamp),
        }
    }

    /// Notes that the segment is, or was, at this state, or beyond it.
    pub fn hear(&self, stamp: Stamp) {
        let mut reading = self.reading();
        reading.newest = reading.newest.max(stamp);
        if self.known.load().as_ref().is_some_and(|known| known.stamp < stamp) {
            self.known.store(None);
        }
    }

    /// Whether the caller is to read the segment, and then to say so by `finish`.
    pub(super) fn begin(&self) -> bool {
        let mut reading = self.reading();
        let now = Instant::now();
        if self.believed_us == 0
            || reading.at_work
            || self.is_known()
            || reading.not_before.is_some_and(|not_before| now < not_before)
        {
            return false;
        }
        reading.at_work = true;
        true
    }

    pub(super) fn read(&self) -> Read<'_> {
        Read { sold_out: self, begun: Instant::now(), names: Vec::new(), marks: false }
    }

    /// Ends a reading, and knows what was read, if the segment stood at `found` without stock from
    /// first to last. `asked` is when the last page was asked for.
    pub(super) fn finish(&self, read: Read<'_>, found: Option<(Stamp, Instant)>) {
        let Read { begun, mut names, marks, .. } = read;
        names.sort_unstable();
        names.dedup();
        let mut reading = self.reading();
        let now = Instant::now();
        reading.at_work = false;
        reading.not_before = Some(now + begun.elapsed() * REST);
        if let Some((stamp, asked)) = found
            && reading.newest <= stamp
        {
            let known = Known {
                stamp,
                names: names.into(),
                marks,
                since: asked,
                confirmed_us: AtomicU64::new(0),
                asked_us: AtomicU64::new(0),
            };
            self.known.store(Some(Arc::new(known)));
        }
    }

    fn hash(&self, name: &str) -> u64 {
        self.hasher.hash_one(name)
    }

    fn reading(&self) -> MutexGuard<'_, Reading> {
        // Whole between two statements, also after a panic.
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn has(&self, hash: u64) -> bool {
        self.names.binary_search(&hash).is_ok()
    }

    fn is_first_to_ask(&self, now_us: u64, ask_every_us: u64) -> bool {
        let asked_us = self.asked_us.load(Ordering::Acquire);
        now_us.saturating_sub(asked_us) >= ask_every_us
            && self
                .asked_us
                .compare_exchange(asked_us, now_us, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }
}

impl Read<'_> {
    pub(super) fn buyer(&mut self, buyer: &str) {
        self.names.push(self.sold_out.hash(buyer));
    }

    pub(super) fn mark(&mut self, id: &str) {
        self.marks = true;
        self.names.push(self.sold_out.hash(id));
    }

    /// Whether there are more names than are remembered.
    pub(super) fn is_too_long(&self) -> bool {
        self.names.len() > MOST
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    const BELIEVED_FOR: Duration = Duration::from_millis(200);
    const ASK_EVERY: Duration = Duration::from_millis(50);

    fn buyer(name: &str) -> BuyerId {
        BuyerId::new(name).unwrap()
    }

    fn id(name: &str) -> ReservationId {
        ReservationId::new(name).unwrap()
    }

    fn at(revision: u64) -> Stamp {
        Stamp { epoch: 1, revision }
    }

    /// A segment that was read at revision 5: `winner` holds something, `gone` is marked.
    fn known() -> SoldOut {
        let sold_out = SoldOut::new(BELIEVED_FOR);
        assert!(sold_out.begin());
        let mut read = sold_out.read();
        read.buyer("winner");
        read.mark("gone");
        sold_out.finish(read, Some((at(5), Instant::now())));
        sold_out
    }

    fn refuses(sold_out: &SoldOut, name: &str) -> bool {
        sold_out.refuses(&buyer(name), || id("new"))
    }

    #[tokio::test(start_paused = true)]
    async fn only_who_holds_nothing_is_refused() {
        let sold_out = known();
        assert!(refuses(&sold_out, "loser"));
        assert!(!refuses(&sold_out, "winner"));
        assert!(!sold_out.refuses(&buyer("loser"), || id("gone")));
        assert!(!refuses(&SoldOut::new(BELIEVED_FOR), "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_confirms_is_believed_for_a_moment_only() {
        let sold_out = known();
        tokio::time::advance(BELIEVED_FOR).await;
        sold_out.observe(at(5), Instant::now() - Duration::from_millis(10));
        assert!(refuses(&sold_out, "loser"));
        tokio::time::advance(BELIEVED_FOR).await;
        assert!(!refuses(&sold_out, "loser"));
        assert!(!refuses(&sold_out, "loser"));
        sold_out.observe(at(5), Instant::now());
        assert!(refuses(&sold_out, "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn one_call_asks_for_all() {
        let sold_out = known();
        tokio::time::advance(ASK_EVERY + Duration::from_millis(1)).await;
        let asked = (0..100).filter(|_| !refuses(&sold_out, "loser")).count();
        assert_eq!(asked, 1);
        sold_out.observe(at(5), Instant::now());
        assert!(refuses(&sold_out, "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_newer_state_ends_it_and_an_older_one_does_not() {
        let sold_out = known();
        sold_out.observe(at(4), Instant::now());
        sold_out.hear(at(5));
        assert!(refuses(&sold_out, "loser"));
        sold_out.hear(at(6));
        assert!(!sold_out.is_known());

        let sold_out = known();
        sold_out.observe(Stamp { epoch: 2, revision: 1 }, Instant::now());
        assert!(!sold_out.is_known());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_overtaken_while_it_was_read_is_not_known() {
        let sold_out = SoldOut::new(BELIEVED_FOR);
        assert!(sold_out.begin());
        assert!(!sold_out.begin());
        let read = sold_out.read();
        sold_out.hear(at(6));
        sold_out.finish(read, Some((at(5), Instant::now())));
        assert!(!sold_out.is_known());
    }

    #[tokio::test(start_paused = true)]
    async fn reading_takes_a_tenth_of_the_time_at_most() {
        let sold_out = SoldOut::new(BELIEVED_FOR);
        assert!(sold_out.begin());
        let read = sold_out.read();
        tokio::time::advance(Duration::from_millis(100)).await;
        sold_out.finish(read, None);
        assert!(!sold_out.begin());
        tokio::time::advance(Duration::from_millis(899)).await;
        assert!(!sold_out.begin());
        tokio::time::advance(Duration::from_millis(2)).await;
        assert!(sold_out.begin());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_never_believed_is_never_read() {
        assert!(!SoldOut::new(Duration::ZERO).begin());
    }
}
