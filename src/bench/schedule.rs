//! When each call of a load is to be sent, drawn before the first one is.
//!
//! **Invariant:** the same seed gives the same times, whatever the server does meanwhile. A call that
//! is sent late is still counted from the time it was meant for, so a server that stalls has to
//! answer for everybody who would have come meanwhile (coordinated omission).

use std::time::Duration;

/// How calls follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// At equal distances.
    Fixed,
    /// As independent callers do: the distances are exponential.
    Poisson,
}

/// A time during which the rate stays the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stretch {
    pub per_s: f64,
    pub lasts: Duration,
}

impl Stretch {
    #[must_use]
    pub fn new(per_s: f64, lasts: Duration) -> Self {
        Self { per_s, lasts }
    }
}

/// Times since the beginning of a load, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    times: Vec<Duration>,
}

impl Schedule {
    /// Draws the times of these stretches, one after the other.
    #[must_use]
    pub fn draw(pace: Pace, stretches: &[Stretch], seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut times = Vec::new();
        let mut begin = Duration::ZERO;
        for Stretch { per_s, lasts } in stretches {
            let (mut nth, mut at_s) = (0.0, 0.0);
            loop {
                match pace {
                    // Multiplied, so that no rounding adds up.
                    Pace::Fixed => at_s = nth / per_s,
                    // `f64` gives [0, 1), and the logarithm of 0 is none.
                    Pace::Poisson => at_s += -(1.0 - random.f64()).ln() / per_s,
                }
                nth += 1.0;
                if at_s >= lasts.as_secs_f64() {
                    break;
                }
                times.push(begin + Duration::from_secs_f64(at_s));
            }
            begin += *lasts;
        }
        Self { times }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.times.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// When the `nth` call is to be sent; `None` when there are no more.
    pub(super) fn at(&self, nth: usize) -> Option<Duration> {
        self.times.get(nth).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_fixed_pace_has_equal_distances() {
        let schedule = Schedule::draw(Pace::Fixed, &[Stretch::new(4.0, SECOND)], 1);
        let times: Vec<u128> = schedule.times.iter().map(Duration::as_millis).collect();
        assert_eq!(times, [0, 250, 500, 750]);
    }

    #[test]
    fn a_poisson_pace_has_the_rate_and_the_spread_of_independent_callers() {
        let schedule = Schedule::draw(Pace::Poisson, &[Stretch::new(10_000.0, 10 * SECOND)], 7);
        let count = schedule.len() as f64;
        assert!((99_000.0..101_000.0).contains(&count), "{count}");
        let gaps: Vec<f64> =
            schedule.times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // The deviation of an exponential distribution is its mean; of equal distances it is 0.
        let spread = variance.sqrt() / mean;
        assert!((0.95..1.05).contains(&spread), "{spread}");
        assert!(schedule.times.is_sorted());
    }

    #[test]
    fn a_seed_gives_the_same_times_again() {
        let draw = |seed| Schedule::draw(Pace::Poisson, &[Stretch::new(1_000.0, SECOND)], seed);
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn stretches_follow_each_other() {
        let stretches = [Stretch::new(1_000.0, SECOND), Stretch::new(10.0, SECOND)];
        let schedule = Schedule::draw(Pace::Fixed, &stretches, 1);
        let first = schedule.times.iter().filter(|time| **time < SECOND).count();
        assert_eq!((first, schedule.len()), (1_000, 1_010));
        assert!(schedule.times.iter().all(|time| *time < 2 * SECOND));
    }
}
