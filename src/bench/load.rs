//! The load generator: a client that costs little, and times that it does not choose.
//!
//! It runs on a thread of its own inside this process, over a few HTTP/2 connections, with bodies that
//! were encoded beforehand. In the open loop every call has the time that a [`Schedule`] drew for it,
//! and its latency runs from then to the last byte of the answer, however late it was sent. The closed
//! loop keeps so many calls in flight and finds how many are answered; its latencies say nothing
//! about a time at which somebody wanted something.
//!
//! **Promise:** it tells how late it was by its own fault, and what it cost.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future::poll_fn, stream::FuturesUnordered};
use hdrhistogram::Histogram;
use prost::bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

mod call;
mod link;
mod requests;
mod timer;

use super::{Error, schedule::Schedule};
use call::{Answer, Told, call};
use link::Link;
pub use requests::{Requests, buyer, reservation};
use timer::Timer;

/// How many calls are sent before answers are looked at again.
const TURN: usize = 64;
/// How long answers are waited for after the last call, where no deadline says so.
const LAST_ANSWERS: Duration = Duration::from_secs(10);
/// A generator that is later than this, one time in a hundred, was the limit itself.
const LATE: Duration = Duration::from_millis(1);
/// A generator that used more of its core than this had nothing to spare.
const BUSY: f64 = 0.9;

/// What is to be sent, where, and when.
#[derive(Debug)]
pub struct Load {
    pub addr: SocketAddr,
    pub connections: usize,
    pub requests: Requests,
    pub arrivals: Arrivals,
    /// How long after its time a call is given up, as gRPC clients do; the server is told.
    pub deadline: Option<Duration>,
    /// Who wants to hear of each win at once.
    pub wins: Option<mpsc::UnboundedSender<Win>>,
    /// Ends the sending early.
    pub stop: CancellationToken,
}

impl Load {
    /// Without a deadline, and with nobody who listens.
    #[must_use]
    pub fn new(addr: SocketAddr, requests: Requests, arrivals: Arrivals) -> Self {
        Self {
            addr,
            connections: 8,
            requests,
            arrivals,
            deadline: None,
            wins: None,
            stop: CancellationToken::new(),
        }
    }
}

/// Who decides when the next call is sent.
#[derive(Debug)]
pub enum Arrivals {
    /// The schedule alone.
    Open(Schedule),
    /// The answers: so many calls are in flight, for so long.
    Closed { in_flight: usize, lasts: Duration },
}

/// A buyer who was told of a new reservation.
#[derive(Debug, Clone, Copy)]
pub struct Win {
    pub nth: usize,
    pub at: Instant,
}

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
    lag: Histogram<u64>,
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
    fn new(expected: usize) -> Self {
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

    fn note(&mut self, nth: usize, intended: Duration, latency: Duration, label: &str) {
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

/// Sends a load and waits for what it comes to.
///
/// # Errors
/// The server can't be reached, or all connections to it broke.
pub async fn run(load: Load) -> Result<Seen, Error> {
    let (done, answer) = oneshot::channel();
    let thread = std::thread::Builder::new().name("load".to_owned());
    let spawned = thread.spawn(move || {
        // Nobody waits any more when the bench was interrupted.
        let _ = done.send(on_this_thread(load));
    });
    spawned.map_err(|error| Error::Internal(format!("no thread for the generator: {error}")))?;
    answer.await.unwrap_or_else(|_| Err(Error::Internal("the generator panicked".to_owned())))
}

fn on_this_thread(load: Load) -> Result<Seen, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| Error::Internal(format!("no runtime for the generator: {error}")))?;
    runtime.block_on(drive(load))
}

async fn drive(load: Load) -> Result<Seen, Error> {
    let mut links = Vec::new();
    for _ in 0..load.connections {
        links.push(Link::open(load.addr).await?);
    }
    let mut timer = Timer::new().map_err(|error| Error::Internal(format!("no timer: {error}")))?;
    let expected = match &load.arrivals {
        Arrivals::Open(schedule) => schedule.len(),
        Arrivals::Closed { .. } => load.requests.len(),
    };
    let mut seen = Seen::new(expected);
    let most = load.requests.len();
    let mut in_flight = FuturesUnordered::new();
    // Calls whose time has come, oldest first.
    let mut due: VecDeque<(usize, Duration)> = VecDeque::new();
    let mut next = 0;
    let mut reasons = call::Reasons::default();
    let mut last_sent = Duration::ZERO;
    let mut turn = 0;
    let cpu = thread_cpu();
    let begun = Instant::now();

    poll_fn(|cx| {
        loop {
            while let Poll::Ready(Some(answer)) = in_flight.poll_next_unpin(cx) {
                let Answer { link, nth, intended, told, at } = answer;
                let link: &mut Link = &mut links[link];
                link.open -= 1;
                if let Told::Broken(_) = &told {
                    link.note_failure();
                }
                if let (Told::Reserved, Some(wins)) = (&told, &load.wins) {
                    // Whoever listened may have heard enough.
                    let _ = wins.send(Win { nth, at });
                }
                let answered = at.saturating_duration_since(begun);
                seen.note(nth, intended, answered.saturating_sub(intended), reasons.name(&told));
            }
            let now = begun.elapsed();
            let stopped = load.stop.is_cancelled();
            match &load.arrivals {
                Arrivals::Open(schedule) => {
                    while !stopped
                        && next < most
                        && let Some(at) = schedule.at(next).filter(|at| *at <= now)
                    {
                        seen.lag.saturating_record(micros(now - at).into());
                        due.push_back((next, at));
                        next += 1;
                    }
                }
                Arrivals::Closed { in_flight: at_once, lasts } => {
                    while !stopped
                        && next < most
                        && now < *lasts
                        && in_flight.len() + due.len() < *at_once
                    {
                        due.push_back((next, now));
                        next += 1;
                    }
                }
            }
            let mut sent = 0;
            while sent < TURN
                && let Some(&(nth, intended)) = due.front()
            {
                let left = match load.deadline {
                    Some(limit) => match (intended + limit).checked_sub(begun.elapsed()) {
                        Some(left) if !left.is_zero() => Some(left),
                        _ => {
                            due.pop_front();
                            seen.note(nth, intended, limit, NOT_SENT);
                            continue;
                        }
                    },
                    None => None,
                };
                let Some(link) = free(&mut links, &mut turn, cx) else {
                    seen.held_back += u64::from(intended > last_sent);
                    break;
                };
                due.pop_front();
                let body = load.requests.nth(nth).expect("nobody is due beyond the last one");
                last_sent = intended;
                sent += 1;
                match links[link].send(body, left) {
                    Ok(response) => {
                        let until = left.map(|left| tokio::time::Instant::now() + left);
                        in_flight.push(call(link, nth, intended, response, until));
                    }
                    Err(error) => {
                        links[link].note_failure();
                        let told = Told::Broken(error.to_string());
                        let late = begun.elapsed().saturating_sub(intended);
                        seen.note(nth, intended, late, reasons.name(&told));
                    }
                }
            }
            if links.iter().all(|link| link.failed) {
                return Poll::Ready(Err(Error::Unavailable(format!(
                    "all connections to {} broke: {:?}",
                    load.addr,
                    seen.counts()
                ))));
            }
            if sent == TURN {
                // The connections write before more is sent.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if sent > 0 {
                // An answer that was never asked for wakes nobody.
                continue;
            }
            let next_at = match &load.arrivals {
                _ if stopped || next == most => None,
                Arrivals::Open(schedule) => schedule.at(next),
                Arrivals::Closed { lasts, .. } => (now < *lasts).then_some(*lasts),
            };
            let wake_at = match next_at {
                Some(at) => at,
                None if in_flight.is_empty() && due.is_empty() => return Poll::Ready(Ok(())),
                None => last_sent + load.deadline.unwrap_or_default() + LAST_ANSWERS,
            };
            match timer.poll(cx, wake_at, begun.elapsed()) {
                Poll::Ready(Ok(())) if next_at.is_none() => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(Error::Internal(format!("the timer: {error}"))));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await?;
    seen.lasted = begun.elapsed();
    seen.sending = last_sent;
    seen.cpu = thread_cpu().saturating_sub(cpu);
    let given_up = in_flight.len() + due.len();
    if given_up > 0 {
        return Err(Error::Unavailable(format!(
            "{given_up} calls were not answered within {LAST_ANSWERS:?} after the last one"
        )));
    }
    Ok(seen)
}

/// A connection with room for another call, taking turns.
fn free(links: &mut [Link], turn: &mut usize, cx: &mut Context<'_>) -> Option<usize> {
    let count = links.len();
    let mut in_turn = (0..count).map(|ahead| (*turn + ahead) % count);
    let found = in_turn.find(|at| links[*at].has_room(cx))?;
    *turn = found + 1;
    Some(found)
}

/// CPU time of this thread.
fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or_default(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

fn micros(span: Duration) -> u32 {
    u32::try_from(span.as_micros()).unwrap_or(u32::MAX)
}

type Body = Bytes;

#[cfg(test)]
mod tests;
