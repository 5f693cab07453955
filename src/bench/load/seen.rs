//! What a load came to.

use std::{collections::BTreeMap, time::Duration};

use hdrhistogram::Histogram;

/// A generator that is later than this, one time in a hundred, was the limit itself.
const LATE: Duration = Duration::from_millis(1);
/// A generator that used more of its core than this had nothing to spare.
const BUSY: f64 = 0.9;

/// What a call came to. `latency_us` runs from the time that the call was meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    pub nth: u32,
    pub intended_us: u32,
    pub latency_us: u32,
    label: u8,
}

impl Sample {
    /// When it was answered or given up, in µs since the beginning of the load.
    #[must_use]
    pub fn answered_us(self) -> u64 {
        u64::from(self.intended_us) + u64::from(self.latency_us)
    }
}

/// Everything that a load came to.
#[derive(Debug)]
pub struct Seen {
    /// In the order of the answers.
    pub samples: Vec<Sample>,
    labels: Vec<String>,
    /// How much later than its time the generator turned to a call, in µs: its own fault.
    pub(super) lag: Histogram<u64>,
    /// Calls that then waited, since every connection had as many open as the server allows.
    pub held_back: u64,
    /// When the last call was sent that was sent.
    pub sending: Duration,
    /// CPU time of the generator, and how long it ran.
    pub cpu: Duration,
    pub lasted: Duration,
}

pub const RESERVED: &str = "RESERVED";
pub const REPLAYED: &str = "RESERVED replayed";
pub const SOLD_OUT: &str = "SOLD_OUT";
pub const OVERLOADED: &str = "OVERLOADED";
/// Given up at its deadline, unanswered.
pub const TOO_LATE: &str = "no answer in time";
/// Given up at its deadline, when it was not even sent.
pub const NOT_SENT: &str = "not sent in time";

impl Seen {
    pub(super) fn new(expected: usize) -> Self {
        Self {
            samples: Vec::with_capacity(expected),
            labels: Vec::new(),
            lag: histogram(),
            held_back: 0,
            sending: Duration::ZERO,
            cpu: Duration::ZERO,
            lasted: Duration::ZERO,
        }
    }

    /// The calls that came to this.
    pub fn of(&self, label: &str) -> impl Iterator<Item = Sample> {
        let found = self.labels.iter().position(|known| known == label);
        let is = move |sample: &&Sample| Some(usize::from(sample.label)) == found;
        self.samples.iter().filter(is).copied()
    }

    /// How many calls came to this.
    #[must_use]
    pub fn count(&self, label: &str) -> u64 {
        self.of(label).count() as u64
    }

    /// How many calls came to what.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.counts_of(|_| true)
    }

    /// The same, of some of them.
    #[must_use]
    pub fn counts_of(&self, which: impl Fn(&Sample) -> bool) -> BTreeMap<String, u64> {
        let mut counts = vec![0; self.labels.len()];
        for sample in self.samples.iter().filter(|sample| which(sample)) {
            counts[usize::from(sample.label)] += 1;
        }
        let counts = self.labels.iter().cloned().zip(counts);
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// How many calls came to this in a second, while calls were sent.
    #[must_use]
    pub fn rate(&self, label: &str) -> f64 {
        let until = u64::from(micros(self.sending));
        let count = self.of(label).filter(|sample| sample.answered_us() <= until).count();
        if count == 0 {
            // Every answer took longer than calls were sent.
            return self.count(label) as f64 / self.lasted.as_secs_f64().max(f64::EPSILON);
        }
        count as f64 / self.sending.as_secs_f64().max(f64::EPSILON)
    }

    /// What nobody can know the outcome of: it may have won.
    #[must_use]
    pub fn unknown(&self) -> u64 {
        let decided = |label: &str| {
            // Names of outcomes, calls that never left, and refusals before anything was taken.
            label.starts_with(|c: char| c.is_ascii_uppercase()) || label == NOT_SENT
        };
        let known: u64 =
            self.counts().iter().filter(|(label, _)| decided(label)).map(|(_, count)| count).sum();
        self.samples.len() as u64 - known
    }

    /// How late the generator was, one time in a hundred.
    #[must_use]
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.lag.value_at_quantile(0.99))
    }

    /// The share of one core that the generator used.
    #[must_use]
    pub fn busy(&self) -> f64 {
        self.cpu.as_secs_f64() / self.lasted.as_secs_f64().max(f64::EPSILON)
    }

    /// The buyers whose calls came to this.
    #[must_use]
    pub fn who(&self, label: &str) -> Vec<usize> {
        self.of(label).map(|sample| sample.nth as usize).collect()
    }

    /// Whether the generator itself was the limit, and by what.
    #[must_use]
    pub fn limit(&self) -> Option<String> {
        let (lag, busy) = (self.lag(), self.busy());
        if busy > BUSY {
            return Some(format!("the generator used {:.0} % of a core", busy * 100.0));
        }
        (lag > LATE)
            .then(|| format!("the generator was {:.1} ms late (p99)", lag.as_secs_f64() * 1_000.0))
    }

    pub(super) fn note(&mut self, nth: usize, intended: Duration, latency: Duration, label: &str) {
        let known = self.labels.iter().position(|known| known == label);
        let label = known.unwrap_or_else(|| {
            self.labels.push(label.to_owned());
            self.labels.len() - 1
        });
        self.samples.push(Sample {
            nth: u32::try_from(nth).unwrap_or(u32::MAX),
            intended_us: micros(intended),
            latency_us: micros(latency),
            // There are some 30 outcomes and reasons; a 256th would count as the last one.
            label: u8::try_from(label).unwrap_or(u8::MAX),
        });
    }
}

/// The distribution of latencies, in µs.
#[must_use]
pub fn latencies(samples: impl Iterator<Item = Sample>) -> Histogram<u64> {
    let mut histogram = histogram();
    for sample in samples {
        histogram.saturating_record(sample.latency_us.into());
    }
    histogram
}

/// From 1 µs to as much as a sample holds, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, u32::MAX.into(), 3).expect("these bounds are allowed")
}

pub(super) fn micros(span: Duration) -> u32 {
    u32::try_from(span.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load of a second whose calls were so late, and whose generator ran for so long.
    fn seen(lags_us: impl IntoIterator<Item = u64>, cpu_ms: u64) -> Seen {
        let mut seen = Seen::new(0);
        for lag in lags_us {
            seen.lag.saturating_record(lag);
        }
        seen.cpu = Duration::from_millis(cpu_ms);
        seen.lasted = Duration::from_secs(1);
        seen
    }

    #[test]
    fn a_generator_that_is_late_or_busy_says_that_it_was_the_limit() {
        let late = |calls: usize| {
            let lags = (0..1_000).map(move |nth| if nth < calls { 5_000 } else { 100 });
            seen(lags, 500)
        };
        assert_eq!(late(9).limit(), None, "fewer than one in a hundred");
        let limit = late(20).limit().expect("two in a hundred are late");
        assert_eq!(limit, "the generator was 5.0 ms late (p99)");
        assert_eq!(seen([100], 890).limit(), None, "a tenth of the core is left");
        let limit = seen([100], 910).limit().expect("it has nothing to spare");
        assert_eq!(limit, "the generator used 91 % of a core");
    }
}
