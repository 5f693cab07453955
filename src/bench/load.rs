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
    collections::VecDeque,
    net::SocketAddr,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future::poll_fn, stream::FuturesUnordered};
use prost::bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

mod call;
mod frames;
mod link;
mod requests;
mod seen;
pub mod streams;
mod timer;
pub mod watchers;

use super::{Error, schedule::Schedule};
use call::{Answer, Told, call};
use frames::Frames;
use link::Link;
pub use requests::{Method, Requests, attempt, buyer, reservation};
use seen::micros;
pub use seen::{
    NOT_SENT, OVERLOADED, REPLAYED, RESERVED, SOLD_OUT, Sample, Seen, TOO_LATE, latencies,
};
use timer::Timer;

/// How many calls are sent before answers are looked at again.
const TURN: usize = 64;
/// How long answers are waited for after the last call, where no deadline says so.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// What is to be sent, where, and when.
#[derive(Debug)]
pub struct Load {
    pub addr: SocketAddr,
    pub connections: usize,
    pub requests: Requests,
    pub arrivals: Arrivals,
    /// How long after its time a call is given up, as gRPC clients do; the server is told.
    pub deadline: Option<Duration>,
    /// Whether the server may go away in the middle; what was under way then is unknown.
    pub may_break: bool,
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
            may_break: false,
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

/// Sends a load and waits for what it comes to.
///
/// # Errors
/// The server can't be reached, or all connections to it broke.
pub async fn run(load: Load) -> Result<Seen, Error> {
    on_a_thread(move || drive(load)).await
}

/// Runs a generator on a thread of its own, so that its CPU time is known and nothing else of this
/// process is in its way.
async fn on_a_thread<T, W>(work: impl FnOnce() -> W + Send + 'static) -> Result<T, Error>
where
    T: Send + 'static,
    W: Future<Output = Result<T, Error>>,
{
    let (done, answer) = oneshot::channel();
    let thread = std::thread::Builder::new().name("load".to_owned());
    let spawned = thread.spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let worked = runtime
            .map_err(|error| Error::Internal(format!("no runtime for the generator: {error}")))
            .and_then(|runtime| runtime.block_on(work()));
        // Nobody waits any more when the bench was interrupted.
        let _ = done.send(worked);
    });
    spawned.map_err(|error| Error::Internal(format!("no thread for the generator: {error}")))?;
    answer.await.unwrap_or_else(|_| Err(Error::Internal("the generator panicked".to_owned())))
}

async fn drive(load: Load) -> Result<Seen, Error> {
    let mut links = Vec::new();
    for _ in 0..load.connections {
        links.push(Link::open(load.addr, load.requests.method.path()).await?);
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
    let mut reasons = call::Reasons::of(load.requests.method);
    let mut gone = false;
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
            let stopped = gone || load.stop.is_cancelled();
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
            if load.may_break && links.iter().all(|link| link.failed) {
                // Nobody hears of those that were not even sent.
                gone = true;
                due.clear();
            } else if links.iter().all(|link| link.failed) {
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
                _ if gone || stopped || next == most => None,
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

type Body = Bytes;

#[cfg(test)]
mod tests;
