//! `overload`: more buyers than the server can serve. How many of them does it serve all the same, how
//! do others fare beside them, and how soon is all well once the rush is over?
//!
//! Every buyer is new and stock is ample, so each call that is admitted becomes a durable row.
//! Saturation is what a closed loop gets; overload is a multiple of that in the open loop, from
//! callers who wait a second and no longer.

use std::time::Duration;

use serde_json::json;

mod beside;

use super::{
    Error, Plan,
    bed::Bed,
    load::{self, Arrivals, Load, OVERLOADED, RESERVED, Requests, Sample, Seen},
    oracle::Told,
    quantile_us,
    report::{Bound, Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, UNITS},
};
use beside::{Holders, Slowest, beside};

/// How long a caller waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Calls in flight with which saturation is looked for.
const IN_FLIGHT: [usize; 3] = [64, 256, 1_024];
/// In the windows after the rush a p99 counts as back below twice that of before, and below this in
/// any case: a few milliseconds are noise here.
const WINDOW_US: u32 = 100_000;
const CALM_US: f64 = 10_000.0;
/// So many windows in a row must be calm.
const CALM_WINDOWS: usize = 3;
/// How long the time after the rush is watched at least.
const AFTERWARDS: Duration = Duration::from_secs(3);

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("goodput_2x", "× saturation", "Wins in time at twice saturation.")
        .goal("G14", Bound::AtLeast(0.9)),
    Figure::plain("goodput_5x", "× saturation", "Wins in time at five times saturation.")
        .goal("G14", Bound::AtLeast(0.9)),
    Figure::plain("release_max_ms", "ms", "The slowest Release beside 2× and 5×.")
        .goal("", Bound::AtMost(100.0)),
    Figure::plain("health_max_ms", "ms", "The slowest answer of the health service there.")
        .goal("", Bound::AtMost(100.0)),
    Figure::plain("admin_max_ms", "ms", "The slowest GetActivity there.")
        .goal("", Bound::AtMost(100.0)),
    Figure::plain(
        "recovery_s",
        "s",
        "From the end of the rush until the p99 at half of saturation is what it was before.",
    )
    .goal("", Bound::AtMost(2.0)),
    Figure::plain("saturation_per_s", "1/s", "Wins a second in a closed loop, rows durable."),
    Figure::plain("goodput_0.5x", "× saturation", "Wins in time at half of saturation."),
    Figure::plain("goodput_1x", "× saturation", "Wins in time at saturation."),
    Figure::plain("p99_0.5x_ms", "ms", "The p99 of a win at half of saturation, from its time."),
    Figure::plain("p99_1x_ms", "ms", "At saturation."),
    Figure::plain("p99_2x_ms", "ms", "At twice saturation."),
    Figure::plain("p99_5x_ms", "ms", "At five times saturation."),
    Figure::plain("win_cpu_us", "µs", "Server CPU per win, at saturation."),
    Figure::plain("server_cores_5x", "cores", "CPU of the server at five times saturation."),
    Figure::plain("generator_cores_5x", "cores", "CPU of the generator at five times saturation."),
];

/// What is offered, and the names of its figures.
struct Level {
    name: &'static str,
    factor: f64,
    goodput: &'static str,
    p99_ms: &'static str,
}

const HALF: Level =
    Level { name: "0.5x", factor: 0.5, goodput: "goodput_0.5x", p99_ms: "p99_0.5x_ms" };
const FULL: Level = Level { name: "1x", factor: 1.0, goodput: "goodput_1x", p99_ms: "p99_1x_ms" };
const TWICE: Level = Level { name: "2x", factor: 2.0, goodput: "goodput_2x", p99_ms: "p99_2x_ms" };
const RUSH: Level = Level { name: "5x", factor: 5.0, goodput: "goodput_5x", p99_ms: "p99_5x_ms" };

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    tell("opening");
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    let warm = bed.target(0).closed("warm", 256, plan.warm_up()).await?;
    told.note(&warm);

    tell("saturation");
    let best = bed.best("sat", plan.levels(&IN_FLIGHT), plan.lasts).await?;
    told += best.told;
    let saturation = best.per_s;
    run.set("saturation_per_s", saturation);
    run.set("win_cpu_us", best.cpu_us);
    run.detail("saturation_by_calls_in_flight", best.by_in_flight);
    let mut holders = Holders { series: "warm", left: warm.who(RESERVED) };
    let mut slowest = Slowest::default();
    let mut calm_us = CALM_US;
    for level in [HALF, FULL, TWICE, RUSH] {
        bed.drain().await?;
        let rate = level.factor * saturation;
        tell(&format!("{} of saturation, {rate:.0} calls/s", level.name));
        let mut stretches = vec![Stretch::new(rate, plan.lasts)];
        let is_rush = level.name == RUSH.name;
        if is_rush {
            stretches.push(Stretch::new(HALF.factor * saturation, plan.lasts.max(AFTERWARDS)));
        }
        let cpu = bed.servers[0].cpu()?;
        let (seen, beside) = tokio::join!(
            open(plan, &bed, level.name, &stretches),
            beside(&bed, &mut holders, plan.lasts)
        );
        let (seen, beside) = (seen?, beside?);
        let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
        told.note(&seen);
        told.released += beside.released;
        told.perhaps_released += beside.perhaps_released;

        let end_us = u32::try_from(plan.lasts.as_micros()).unwrap_or(u32::MAX);
        let in_time = |sample: &Sample| sample.intended_us < end_us;
        let wins = seen.of(RESERVED).filter(in_time).count();
        run.set(level.goodput, wins as f64 / plan.lasts.as_secs_f64() / saturation);
        let latencies = load::latencies(seen.of(RESERVED).filter(in_time));
        let p99_us = quantile_us(&latencies, 0.99);
        run.set(level.p99_ms, p99_us / 1_000.0);
        let refused = load::latencies(seen.of(OVERLOADED).filter(in_time));
        let lasted_s = seen.lasted.as_secs_f64();
        run.detail(
            level.name,
            json!({
                "offered_per_s": rate,
                "told": seen.counts_of(in_time),
                "told_afterwards": seen.counts_of(|sample| !in_time(sample)),
                "p50_ms": quantile_us(&latencies, 0.5) / 1_000.0,
                "p99_ms": p99_us / 1_000.0,
                "refused_p99_ms": quantile_us(&refused, 0.99) / 1_000.0,
                "waited_for_a_stream": seen.held_back,
                "server_cores": cpu.as_secs_f64() / lasted_s,
                "generator_cores": seen.busy(),
                "generator_lag_p99_ms": seen.lag().as_secs_f64() * 1_000.0,
                "beside": beside,
            }),
        );
        run.check_generator(level.name, &seen);
        if level.factor > 1.0 {
            slowest.add(&beside);
        }
        if level.name == HALF.name {
            calm_us = (2.0 * p99_us).max(CALM_US);
        }
        if is_rush {
            run.set("server_cores_5x", cpu.as_secs_f64() / lasted_s);
            run.set("generator_cores_5x", seen.busy());
            let after: Vec<(u32, u32, bool)> = samples_after(&seen, end_us);
            match recovery_us(&after, calm_us) {
                Some(us) => run.set("recovery_s", f64::from(us) / 1e6),
                None => {
                    let watched = plan.lasts.max(AFTERWARDS);
                    run.set("recovery_s", watched.as_secs_f64());
                    run.note(format!("the p99 was not back {watched:?} after the rush"));
                }
            }
        }
    }
    run.set("release_max_ms", slowest.release);
    run.set("health_max_ms", slowest.health);
    run.set("admin_max_ms", slowest.admin);

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

async fn open(plan: &Plan, bed: &Bed, series: &str, stretches: &[Stretch]) -> Result<Seen, Error> {
    let schedule = Schedule::draw(plan.pace, stretches, plan.seed);
    let requests = Requests::reserve(&bed.offer, series, schedule.len());
    let load = Load::new(bed.servers[0].grpc, requests, Arrivals::Open(schedule));
    load::run(Load { connections: CONNECTIONS, deadline: Some(PATIENCE), ..load }).await
}

/// Calls after the rush: when, how long, and whether it was a win. Those that waited their time out
/// in the generator are as late as any.
fn samples_after(seen: &Seen, end_us: u32) -> Vec<(u32, u32, bool)> {
    let mut labels = seen.counts();
    labels.remove(RESERVED);
    let wins = seen.of(RESERVED).map(|sample| (sample, true));
    let others = labels.keys().flat_map(|label| seen.of(label).map(|sample| (sample, false)));
    wins.chain(others)
        .filter(|(sample, _)| sample.intended_us >= end_us)
        .map(|(sample, won)| (sample.intended_us - end_us, sample.latency_us, won))
        .collect()
}

/// When the first calm windows begin: everybody wins, and the p99 is at most `calm_us`.
fn recovery_us(calls: &[(u32, u32, bool)], calm_us: f64) -> Option<u32> {
    let last = calls.iter().map(|(at_us, ..)| at_us / WINDOW_US).max()?;
    let is_calm = |window: u32| {
        let of_window = calls.iter().filter(|(at_us, ..)| at_us / WINDOW_US == window);
        let mut latencies: Vec<u32> = Vec::new();
        for (_, latency_us, won) in of_window {
            if !won {
                return false;
            }
            latencies.push(*latency_us);
        }
        latencies.sort_unstable();
        let place = (latencies.len() * 99).div_ceil(100).saturating_sub(1);
        latencies.get(place).is_none_or(|p99_us| f64::from(*p99_us) <= calm_us)
    };
    let calm: Vec<bool> = (0..=last).map(is_calm).collect();
    let begins = calm.windows(CALM_WINDOWS).position(|windows| windows.iter().all(|calm| *calm))?;
    Some(u32::try_from(begins).ok()? * WINDOW_US)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten calls in each window, of these latencies.
    fn calls(latencies_ms: &[u32]) -> Vec<(u32, u32, bool)> {
        let window = |(nth, ms): (u32, &u32)| {
            let ms = *ms;
            (0..10).map(move |call| (nth * WINDOW_US + call * 1_000, ms * 1_000, true))
        };
        (0..).zip(latencies_ms).flat_map(window).collect()
    }

    #[test]
    fn it_is_back_when_it_stays_back() {
        assert_eq!(recovery_us(&calls(&[1, 1, 1]), 10_000.0), Some(0));
        assert_eq!(recovery_us(&calls(&[900, 300, 1, 1, 1]), 10_000.0), Some(2 * WINDOW_US));
        assert_eq!(recovery_us(&calls(&[900, 1, 1, 300, 1, 1, 1]), 10_000.0), Some(4 * WINDOW_US));
        assert_eq!(recovery_us(&calls(&[900, 1, 1]), 10_000.0), None);
        assert_eq!(recovery_us(&[], 10_000.0), None);
    }

    #[test]
    fn it_is_not_back_while_somebody_is_refused() {
        let mut calls = calls(&[1, 1, 1, 1]);
        calls.push((500, 100, false));
        assert_eq!(recovery_us(&calls, 10_000.0), Some(WINDOW_US));
    }
}
