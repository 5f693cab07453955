//! Winners: calls of new buyers while stock is ample, so that each becomes a durable row.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    Error, Plan, count,
    load::{self, Arrivals, Load, Requests, Seen},
    per_call_us,
    process::{Process, cpu_of},
    quantile_us,
    schedule::{Schedule, Stretch},
};
use crate::domain::OfferKey;

/// More than anybody gets to reserve here.
pub(super) const UNITS: u32 = 100_000_000;
/// Enough that the limit of calls per connection does not keep the load away from the server.
pub(super) const CONNECTIONS: usize = 32;
const MOST_WINS_PER_S: f64 = 100_000.0;

/// Who is asked for what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) server: &'a Process,
    /// The process of the engine, where it has one here.
    pub(super) engine_id: Option<u32>,
    pub(super) offer: &'a OfferKey,
}

/// The most wins a second that a closed loop gets.
#[derive(Debug, Clone, Default)]
pub(super) struct Best {
    pub(super) per_s: f64,
    pub(super) in_flight: usize,
    /// Of the server, and of the engine, per win.
    pub(super) cpu_us: f64,
    pub(super) engine_cpu_us: Option<f64>,
    pub(super) told: super::oracle::Told,
    /// By the number of calls in flight.
    pub(super) by_in_flight: serde_json::Map<String, Value>,
    /// What limited the generator, if anything did.
    pub(super) limit: Option<String>,
}

impl Target<'_> {
    /// Keeps so many calls in flight for so long.
    pub(super) async fn closed(
        self,
        series: &str,
        in_flight: usize,
        lasts: Duration,
    ) -> Result<Seen, Error> {
        let most = count(MOST_WINS_PER_S * lasts.as_secs_f64());
        let requests = Requests::reserve(self.offer, series, most);
        let arrivals = Arrivals::Closed { in_flight, lasts };
        let load = Load::new(self.server.grpc, requests, arrivals);
        load::run(Load { connections: CONNECTIONS, ..load }).await
    }

    /// Sends calls at this rate, in the open loop.
    pub(super) async fn open(
        self,
        plan: &Plan,
        series: &str,
        rate: f64,
        lasts: Duration,
    ) -> Result<Seen, Error> {
        let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, lasts)], plan.seed);
        let requests = Requests::reserve(self.offer, series, schedule.len());
        let load = Load::new(self.server.grpc, requests, Arrivals::Open(schedule));
        load::run(Load { connections: CONNECTIONS, ..load }).await
    }

    /// Tries these numbers of calls in flight, and counts what comes to `label`; `settle` waits
    /// between them until what was won is behind the server.
    pub(super) async fn best(
        self,
        label: &str,
        series: &str,
        in_flight: &[usize],
        lasts: Duration,
        settle: impl AsyncFn() -> Result<(), Error>,
    ) -> Result<Best, Error> {
        let mut best = Best::default();
        for &in_flight in in_flight {
            settle().await?;
            let series = format!("{series}{in_flight:05}");
            let (cpu, engine) = (self.server.cpu()?, self.engine_cpu());
            let seen = self.closed(&series, in_flight, lasts).await?;
            let cpu = self.server.cpu()?.saturating_sub(cpu);
            let engine = self.engine_cpu().zip(engine).map(|(now, then)| now.saturating_sub(then));
            best.told.note(&seen);
            let (per_s, wins) = (seen.rate(label), seen.count(label));
            best.by_in_flight.insert(in_flight.to_string(), described(&seen, label, cpu));
            if per_s > best.per_s {
                best.per_s = per_s;
                best.in_flight = in_flight;
                best.cpu_us = per_call_us(cpu, wins);
                best.engine_cpu_us = engine.map(|cpu| per_call_us(cpu, wins));
                best.limit = seen.limit();
            }
        }
        settle().await?;
        if best.per_s < 1.0 {
            return Err(Error::Unavailable(format!("nobody wins: {:?}", best.by_in_flight)));
        }
        Ok(best)
    }

    fn engine_cpu(self) -> Option<Duration> {
        cpu_of(self.engine_id?).ok()
    }
}

fn described(seen: &Seen, label: &str, cpu: Duration) -> Value {
    let latencies = load::latencies(seen.of(label));
    json!({
        "per_s": seen.rate(label),
        "p50_ms": quantile_us(&latencies, 0.5) / 1_000.0,
        "p99_ms": quantile_us(&latencies, 0.99) / 1_000.0,
        "server_cores": cpu.as_secs_f64() / seen.lasted.as_secs_f64(),
        "generator_cores": seen.busy(),
        "told": seen.counts(),
    })
}

/// Latencies for a chart: the percentiles of what was won, in ms.
pub(super) fn percentiles_ms(seen: &Seen, label: &str) -> Value {
    let latencies = load::latencies(seen.of(label));
    let at = |quantile| quantile_us(&latencies, quantile) / 1_000.0;
    json!({
        "50": at(0.5), "75": at(0.75), "90": at(0.9), "95": at(0.95), "99": at(0.99),
        "99.9": at(0.999), "100": at(1.0),
    })
}
