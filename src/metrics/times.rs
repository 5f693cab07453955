//! How long things take, counted by a few atomic numbers: nothing is allocated, and nothing is kept
//! until somebody adds it up, as the recorder does with its histograms.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::{as_gauge, line};

/// A histogram.
#[derive(Debug)]
pub(super) struct Times {
    bounds: &'static [f64],
    /// How many took at most each of the bounds, and more than the one before; last the rest.
    counts: Box<[AtomicU64]>,
    sum_us: AtomicU64,
}

impl Times {
    /// With these upper bounds, in seconds.
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_us: AtomicU64::new(0) }
    }

    pub(super) fn note(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let place = self.bounds.iter().position(|bound| seconds <= *bound);
        self.counts[place.unwrap_or(self.bounds.len())].fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Writes the series of a family that have these labels.
    pub(super) fn write(&self, text: &mut String, name: &str, labels: &str) {
        let (bucket, comma) = (format!("{name}_bucket"), if labels.is_empty() { "" } else { "," });
        let mut count = 0;
        for (place, here) in self.counts.iter().enumerate() {
            count += here.load(Ordering::Relaxed);
            let bound = self.bounds.get(place).map_or("+Inf".to_owned(), f64::to_string);
            line(text, &bucket, &format!("{labels}{comma}le=\"{bound}\""), count);
        }
        let us = as_gauge(self.sum_us.load(Ordering::Relaxed));
        line(text, &format!("{name}_sum"), labels, us / 1e6);
        line(text, &format!("{name}_count"), labels, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_some_time_is_in_every_bucket_that_is_not_below_it() {
        let times = Times::new(&[0.001, 0.5]);
        for ms in [1, 3, 60_000] {
            times.note(Duration::from_millis(ms));
        }
        for (labels, expected) in [
            (
                "",
                "x_bucket{le=\"0.001\"} 1\nx_bucket{le=\"0.5\"} 2\nx_bucket{le=\"+Inf\"} 3\n\
                 x_sum 60.004\nx_count 3\n",
            ),
            (
                "a=\"b\"",
                "x_bucket{a=\"b\",le=\"0.001\"} 1\nx_bucket{a=\"b\",le=\"0.5\"} 2\n\
                 x_bucket{a=\"b\",le=\"+Inf\"} 3\nx_sum{a=\"b\"} 60.004\nx_count{a=\"b\"} 3\n",
            ),
        ] {
            let mut text = String::new();
            times.write(&mut text, "x", labels);
            assert_eq!(text, expected);
        }
    }
}
