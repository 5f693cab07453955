//! How many rows one transaction writes, measured.
//!
//! A larger group costs less per row, since what the way to the database and its disk take is shared
//! by more. It also makes everybody wait longer: those in it, those behind it, and every Release. So
//! a group may take about twice as long as one of a few rows, and a short time in any case: beyond
//! that there is little left to share. What a few rows take is found out now and then, also under
//! load.

use std::time::Duration;

use tokio::time::Instant;

/// What nobody has to save.
const SHORT: Duration = Duration::from_millis(25);
/// So much longer than a few rows may a group take.
const STRETCH: u32 = 2;
/// A few rows.
const FEW: usize = 16;
/// How often they are written alone, to see what they take.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LEAST: usize = 64;
const FIRST: usize = 256;

/// The size of groups.
#[derive(Debug)]
pub(super) struct Pace {
    most: usize,
    cap: usize,
    few_take: Duration,
    looked: Instant,
}

impl Pace {
    /// Groups of at most `most` rows.
    pub(super) fn new(most: usize) -> Self {
        Self { most, cap: FIRST.min(most), few_take: Duration::ZERO, looked: Instant::now() }
    }

    /// The most rows of a group in these times.
    pub(super) fn cap(&self) -> usize {
        self.cap
    }

    /// How many of the rows that wait are to be written next.
    pub(super) fn take(&mut self, waiting: usize) -> usize {
        if waiting > FEW && self.looked.elapsed() >= LOOK_EVERY {
            self.looked = Instant::now();
            return FEW.min(self.most);
        }
        waiting.min(self.cap)
    }

    /// A transaction of so many rows took so long.
    pub(super) fn note(&mut self, rows: usize, took: Duration) {
        if rows <= FEW {
            self.few_take = if self.few_take.is_zero() { took } else { (self.few_take + took) / 2 };
            self.looked = Instant::now();
            return;
        }
        if took > SHORT.max(self.few_take * STRETCH) {
            if rows >= self.cap / 2 {
                self.cap = (self.cap - self.cap / 4).max(LEAST).min(self.most);
            }
        } else if rows >= self.cap {
            self.cap = (self.cap + self.cap / 4).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A database that takes `fixed` for each transaction and `per_row` for each row, with more
    /// waiting than it can write; answers the mean rows a second, and what a group takes at the end.
    async fn saturate(pace: &mut Pace, fixed_us: u64, per_row_us: u64) -> (f64, Duration) {
        let begun = Instant::now();
        let (mut rows, mut last) = (0, Duration::ZERO);
        while begun.elapsed() < Duration::from_secs(30) {
            let group = pace.take(10_000);
            let took = Duration::from_micros(fixed_us + per_row_us * group as u64);
            tokio::time::sleep(took).await;
            pace.note(group, took);
            rows += group;
            last = if group > FEW { took } else { last };
        }
        (rows as f64 / begun.elapsed().as_secs_f64(), last)
    }

    #[tokio::test(start_paused = true)]
    async fn rows_that_are_dear_make_small_groups() {
        let (rate, took) = saturate(&mut Pace::new(512), 300, 120).await;
        assert!(took <= Duration::from_millis(32), "{took:?}");
        assert!(rate > 0.9 * (1e6 / 120.0), "{rate}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_database_that_is_far_away_gets_large_groups() {
        for (far_ms, share) in [(10, 0.7), (50, 0.8), (400, 0.7)] {
            let mut pace = Pace::new(512);
            let (rate, took) = saturate(&mut pace, far_ms * 1_000, 50).await;
            let best = 512.0 / (0.001 * far_ms as f64 + 512.0 * 50e-6);
            assert!(rate > share * best, "{far_ms} ms: {rate} of {best}, groups of {}", pace.cap());
            assert!(took < Duration::from_millis(2 * far_ms + 40), "{far_ms} ms: {took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_database_that_became_fast_again_is_believed() {
        let mut pace = Pace::new(512);
        saturate(&mut pace, 300, 2_000).await;
        assert_eq!(pace.cap(), LEAST);
        saturate(&mut pace, 300, 20).await;
        assert_eq!(pace.cap(), 512);
    }

    #[tokio::test(start_paused = true)]
    async fn small_groups_of_an_idle_server_say_nothing_against_large_ones() {
        let mut pace = Pace::new(512);
        for _ in 0..100 {
            pace.note(3, Duration::from_millis(2));
            pace.note(40, Duration::from_millis(200));
        }
        assert_eq!(pace.cap(), FIRST);
    }
}
