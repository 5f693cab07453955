//! `duplicates`: every buyer asks four times, twice with the same request and twice with others. He
//! gets one unit, and hears of it each time.

use super::{
    Error, Plan,
    bed::Bed,
    load::{self, Arrivals, Load, Method, OVERLOADED, REPLAYED, RESERVED, Requests, Seen},
    oracle::Told,
    per_call_us, quantile_us,
    report::{Bound, Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, UNITS, percentiles_ms},
};

const DUPLICATE: &str = "DUPLICATE";
/// How often each buyer asks.
const CALLS: usize = 4;
/// Which request each of them is; a buyer's first one comes twice.
const ATTEMPTS: [usize; CALLS] = [1, 1, 2, 3];
const MOST_PER_S: f64 = 100_000.0;
const IN_FLIGHT: usize = 256;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("reservations_per_buyer", "", "Units that a buyer got who asked four times.")
        .goal("", Bound::AtMost(1.0)),
    Figure::plain("calls_per_s", "1/s", "Calls answered a second, in a closed loop."),
    Figure::plain("call_cpu_us", "µs", "Server CPU per call there."),
    Figure::plain("win_p99_ms", "ms", "The p99 of a first win at half of that, from its time."),
    Figure::plain("replay_p99_ms", "ms", "Of the same request again."),
    Figure::plain("duplicate_p99_ms", "ms", "Of another request of the same buyer."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", IN_FLIGHT, plan.warm_up()).await?);
    bed.drain().await?;

    tell("saturation");
    let arrivals = Arrivals::Closed { in_flight: IN_FLIGHT, lasts: plan.lasts };
    let cpu = bed.servers[0].cpu()?;
    let most = super::count(MOST_PER_S * plan.lasts.as_secs_f64());
    let seen = send(&bed, "c", most, arrivals).await?;
    let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
    told.note(&seen);
    check(run, &seen);
    let answered = seen.samples.len() as u64;
    let rate = answered as f64 / seen.sending.as_secs_f64();
    run.set("calls_per_s", rate);
    run.set("call_cpu_us", per_call_us(cpu, answered));
    run.detail("told_at_saturation", seen.counts());
    bed.drain().await?;

    tell(&format!("half of it, {:.0} calls/s", rate / 2.0));
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate / 2.0, plan.lasts)], plan.seed);
    let seen = send(&bed, "o", schedule.len(), Arrivals::Open(schedule)).await?;
    told.note(&seen);
    check(run, &seen);
    run.check_generator("half of saturation", &seen);
    let p99 = |label: &str| quantile_us(&load::latencies(seen.of(label)), 0.99) / 1_000.0;
    run.set("win_p99_ms", p99(RESERVED));
    run.set("replay_p99_ms", p99(REPLAYED));
    run.set("duplicate_p99_ms", p99(DUPLICATE));
    let mut winners: Vec<usize> = seen.who(RESERVED).iter().map(|nth| nth / CALLS).collect();
    let wins = winners.len();
    winners.sort_unstable();
    winners.dedup();
    run.set("reservations_per_buyer", wins as f64 / winners.len().max(1) as f64);
    run.detail("told_at_half", seen.counts());
    run.detail(
        "percentiles_ms",
        serde_json::json!({
            "first wins": percentiles_ms(&seen, RESERVED),
            "the same again": percentiles_ms(&seen, REPLAYED),
            "another request": percentiles_ms(&seen, DUPLICATE),
        }),
    );

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

async fn send(bed: &Bed, series: &str, calls: usize, arrivals: Arrivals) -> Result<Seen, Error> {
    let requests = Requests::each(Method::Reserve, calls, |nth| {
        load::attempt(&bed.offer, series, nth / CALLS, ATTEMPTS[nth % CALLS])
    });
    let load = Load::new(bed.servers[0].grpc, requests, arrivals);
    load::run(Load { connections: CONNECTIONS, ..load }).await
}

/// Nobody hears anything else than that he has it.
fn check(run: &mut Run, seen: &Seen) {
    let known: u64 =
        [RESERVED, REPLAYED, DUPLICATE, OVERLOADED].iter().map(|label| seen.count(label)).sum();
    if known != seen.samples.len() as u64 {
        run.broken.push(format!("buyers with units to be had heard {:?}", seen.counts()));
    }
}
