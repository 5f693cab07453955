//! How much an offer of several segments has left when that is too little, as this process knows it.
//!
//! One pass over the segments proves nothing: a unit may move from one that is yet to be read to one
//! that was read. Two passes, one wholly after the other, that show every segment at the same epoch
//! and revision do: between them nothing changed, so all of it was so at one moment.
//!
//! **Promise:** a verdict is bound to the stamps of all segments. Whatever shows a newer one of any
//! segment, a reply or a message, ends it; and it is believed for a moment only after the last pass
//! that confirmed it, as in `sold_out`.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use super::{scripts::Stamp, sold_out::SoldOut};
use crate::domain::{BuyerId, ReservationId};

/// How often one call asks all segments although the answer is known: so many times in the time for
/// which that is believed.
const ASKED: u64 = 4;

/// What was found of all segments at one moment, or nothing.
#[derive(Debug)]
pub struct Verdict {
    /// How long it is believed without being confirmed, in µs; 0: never.
    believed_us: u64,
    known: ArcSwapOption<Known>,
    /// The newest state that was heard of, by segment.
    newest: Mutex<Box<[Stamp]>>,
}

#[derive(Debug)]
struct Known {
    stamps: Arc<[Stamp]>,
    /// Units on sale in all segments together; none were on their way.
    left: u64,
    since: Instant,
    /// When the last pass that found it so was begun, in µs after `since`.
    confirmed_us: AtomicU64,
    /// When a call was last let through, in µs after `since`.
    asked_us: AtomicU64,
}

impl Verdict {
    /// Nothing is known yet of so many segments; what will be is believed for so long.
    #[must_use]
    pub fn new(segments: u32, believed_for: Duration) -> Self {
        Self {
            believed_us: micros(believed_for),
            known: ArcSwapOption::empty(),
            newest: Mutex::new(vec![Stamp::default(); segments as usize].into()),
        }
    }

    /// Notes that segment `number` is, or was, at this state, or beyond it.
    pub fn hear(&self, number: u32, stamp: Stamp) {
        let number = number as usize;
        let mut newest = self.newest();
        if let Some(newest) = newest.get_mut(number) {
            *newest = stamp.max(*newest);
        }
        if self.known.load().as_ref().is_some_and(|known| known.is_behind(number, stamp)) {
            self.known.store(None);
        }
    }

    /// The state at which all segments were found together, to be compared with a pass that begins
    /// now.
    pub fn stamps(&self) -> Option<Arc<[Stamp]>> {
        self.known.load().as_ref().map(|known| known.stamps.clone())
    }

    /// Notes what two passes found alike; the later one was begun at `begun`.
    pub fn found(&self, stamps: Arc<[Stamp]>, left: u64, begun: Instant) {
        let newest = self.newest();
        if newest.len() != stamps.len() || newest.iter().zip(&*stamps).any(|(a, b)| a > b) {
            return;
        }
        let known = self.known.load();
        match known.as_ref() {
            Some(known) if known.stamps == stamps => {
                let begun_us = micros(begun.saturating_duration_since(known.since));
                known.confirmed_us.fetch_max(begun_us, Ordering::AcqRel);
            }
            Some(_) | None => self.known.store(Some(Arc::new(Known {
                stamps,
                left,
                since: begun,
                confirmed_us: AtomicU64::new(0),
                asked_us: AtomicU64::new(0),
            }))),
        }
    }

    /// How much was left in all, at a moment after `since` at which segment `home` was at `stamp`.
    pub fn left_since(&self, since: Instant, home: u32, stamp: Stamp) -> Option<u64> {
        let known = self.known.load();
        let known = known.as_ref()?;
        let confirmed =
            known.since + Duration::from_micros(known.confirmed_us.load(Ordering::Acquire));
        (confirmed >= since && known.stamps.get(home as usize) == Some(&stamp))
            .then_some(known.left)
    }

    /// Whether nothing was left when the offer was last looked at.
    pub fn is_sold_out(&self) -> bool {
        self.known.load().as_ref().is_some_and(|known| known.left == 0)
    }

    /// Whether the answer to this call is known to be sold out. `sold_out` is what is known of the
    /// buyer's home, and `id` names her reservation.
    pub fn refuses(
        &self,
        home: u32,
        sold_out: &SoldOut,
        buyer: &BuyerId,
        id: impl FnOnce() -> ReservationId,
    ) -> bool {
        let known = self.known.load();
        let Some(known) = known.as_ref() else { return false };
        let now_us = micros(known.since.elapsed());
        let age_us = now_us.saturating_sub(known.confirmed_us.load(Ordering::Acquire));
        if self.believed_us == 0 || age_us > self.believed_us || known.left > 0 {
            return false;
        }
        let Some(stamp) = known.stamps.get(home as usize) else { return false };
        if !sold_out.has_nothing_for(*stamp, buyer, id) {
            return false;
        }
        let ask_every_us = self.believed_us / ASKED;
        !(age_us > ask_every_us && known.is_first_to_ask(now_us, ask_every_us))
    }

    fn newest(&self) -> MutexGuard<'_, Box<[Stamp]>> {
        // Whole between two statements, also after a panic.
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn is_behind(&self, number: usize, stamp: Stamp) -> bool {
        self.stamps.get(number).is_some_and(|known| *known < stamp)
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

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    const BELIEVED_FOR: Duration = Duration::from_millis(200);

    fn at(revisions: [u64; 2]) -> Arc<[Stamp]> {
        revisions.map(|revision| Stamp { epoch: 1, revision }).into()
    }

    /// Both segments are empty, at revisions 5 and 7; of the first it is known who holds something.
    fn known() -> (Verdict, SoldOut) {
        let verdict = Verdict::new(2, BELIEVED_FOR);
        verdict.found(at([5, 7]), 0, Instant::now());
        let home = SoldOut::new(BELIEVED_FOR);
        assert!(home.begin());
        let mut read = home.read();
        read.buyer("winner");
        home.finish(read, Some((at([5, 7])[0], Instant::now())));
        (verdict, home)
    }

    fn refuses(verdict: &Verdict, home: &SoldOut, name: &str) -> bool {
        let id = || ReservationId::new("new").unwrap();
        verdict.refuses(0, home, &BuyerId::new(name).unwrap(), id)
    }

    #[tokio::test(start_paused = true)]
    async fn only_who_holds_nothing_is_refused_and_only_while_nothing_is_left() {
        let (verdict, home) = known();
        assert!(refuses(&verdict, &home, "loser"));
        assert!(!refuses(&verdict, &home, "winner"));
        assert!(!refuses(&verdict, &SoldOut::new(BELIEVED_FOR), "loser"));
        let some_left = Verdict::new(2, BELIEVED_FOR);
        some_left.found(at([5, 7]), 1, Instant::now());
        assert!(!refuses(&some_left, &home, "loser"));
        let never = Verdict::new(2, Duration::ZERO);
        never.found(at([5, 7]), 0, Instant::now());
        assert!(!refuses(&never, &home, "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_newer_state_of_any_segment_ends_it() {
        for number in [0, 1] {
            let (verdict, home) = known();
            verdict.hear(number, at([5, 7])[number as usize]);
            assert!(refuses(&verdict, &home, "loser"));
            verdict.hear(number, Stamp { epoch: 1, revision: 8 });
            assert!(!refuses(&verdict, &home, "loser"));
            assert_eq!(verdict.stamps(), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_overtaken_while_it_was_read_is_not_known() {
        let verdict = Verdict::new(2, BELIEVED_FOR);
        verdict.hear(1, Stamp { epoch: 1, revision: 8 });
        verdict.found(at([5, 7]), 0, Instant::now());
        assert_eq!(verdict.stamps(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_at_another_state_is_asked() {
        let (verdict, home) = known();
        home.hear(Stamp { epoch: 1, revision: 6 });
        assert!(!refuses(&verdict, &home, "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_believed_for_a_moment_and_one_call_asks_for_all() {
        let (verdict, home) = known();
        tokio::time::advance(Duration::from_millis(51)).await;
        let asked = (0..100).filter(|_| !refuses(&verdict, &home, "loser")).count();
        assert_eq!(asked, 1);
        tokio::time::advance(Duration::from_millis(150)).await;
        assert!(!refuses(&verdict, &home, "loser"));
        verdict.found(at([5, 7]), 0, Instant::now());
        assert!(refuses(&verdict, &home, "loser"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_learns_what_was_found_after_she_came() {
        let (verdict, _) = known();
        let came = Instant::now();
        assert_eq!(verdict.left_since(came, 0, at([5, 7])[0]), Some(0));
        assert_eq!(verdict.left_since(came, 0, at([4, 7])[0]), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        let came = Instant::now();
        assert_eq!(verdict.left_since(came, 0, at([5, 7])[0]), None);
        verdict.found(at([5, 7]), 0, Instant::now());
        assert_eq!(verdict.left_since(came, 0, at([5, 7])[0]), Some(0));
    }
}
