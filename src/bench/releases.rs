//! `releases`: winners give back what they have. How many can, how long does it take, and is every unit
//! for sale again?

use serde_json::json;

use super::{
    Error, Plan,
    bed::Bed,
    load::{self, Arrivals, Load, RESERVED, Requests, Seen},
    oracle::Told,
    per_call_us, quantile_us,
    report::{Bound, Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, UNITS, percentiles_ms},
};

const RELEASED: &str = "RELEASED";
/// As many as a server lets into SQL, some times over.
const IN_FLIGHT: usize = 64;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("units_not_back", "", "Units that were given back and are not for sale again.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("releases_per_s", "1/s", "Releases a second, in a closed loop."),
    Figure::plain("release_cpu_us", "µs", "Server CPU per release there."),
    Figure::plain(
        "release_p50_ms",
        "ms",
        "The median of a release at half of that, from its time.",
    ),
    Figure::plain("release_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("win_p99_ms", "ms", "The p99 of a win beside it, at as many a second."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    tell("selling");
    let sold = bed.target(0).closed("w", 256, plan.lasts * 2).await?;
    told.note(&sold);
    bed.drain().await?;

    tell("saturation");
    let mut winners = sold.who(RESERVED);
    let half = winners.split_off(winners.len() / 2);
    let requests = Requests::release(&bed.offer, "w", &winners);
    let arrivals = Arrivals::Closed { in_flight: IN_FLIGHT, lasts: plan.lasts };
    let cpu = bed.servers[0].cpu()?;
    let load = Load::new(bed.servers[0].grpc, requests, arrivals);
    let seen = load::run(Load { connections: CONNECTIONS, ..load }).await?;
    let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
    note(&mut told, &seen);
    let rate = seen.rate(RELEASED);
    run.set("releases_per_s", rate);
    run.set("release_cpu_us", per_call_us(cpu, seen.count(RELEASED)));
    run.detail("told_at_saturation", seen.counts());
    bed.drain().await?;

    tell(&format!("half of it, {:.0} releases/s, and as many buyers", rate / 2.0));
    let rate = rate / 2.0;
    let lasts = plan.lasts.mul_f64((half.len() as f64 / rate / plan.lasts.as_secs_f64()).min(1.0));
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, lasts)], plan.seed);
    let requests = Requests::release(&bed.offer, "w", &half);
    let load = Load::new(bed.servers[0].grpc, requests, Arrivals::Open(schedule));
    let load = Load { connections: CONNECTIONS, ..load };
    let (given_back, bought) =
        tokio::join!(load::run(load), bed.target(0).open(plan, "b", rate, lasts));
    let (given_back, bought) = (given_back?, bought?);
    note(&mut told, &given_back);
    told.note(&bought);
    run.check_generator("releases at half of saturation", &given_back);
    let latencies = load::latencies(given_back.of(RELEASED));
    run.set("release_p50_ms", quantile_us(&latencies, 0.5) / 1_000.0);
    run.set("release_p99_ms", quantile_us(&latencies, 0.99) / 1_000.0);
    run.set("win_p99_ms", quantile_us(&load::latencies(bought.of(RESERVED)), 0.99) / 1_000.0);
    run.detail("told_at_half", given_back.counts());
    run.detail(
        "percentiles_ms",
        json!({
            "releases": percentiles_ms(&given_back, RELEASED),
            "wins": percentiles_ms(&bought, RESERVED),
        }),
    );
    bed.drain().await?;
    let held = i64::from(UNITS) - bed.remaining().await?;
    let expected = i64::try_from(told.wins.saturating_sub(told.released)).unwrap_or(i64::MAX);
    let uncertain = i64::try_from(told.unknown).unwrap_or(i64::MAX);
    run.set("units_not_back", (held - expected - uncertain).max(0) as f64);

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

fn note(told: &mut Told, seen: &Seen) {
    told.released += seen.count(RELEASED);
    told.perhaps_released += seen.samples.len() as u64 - seen.count(RELEASED);
}
