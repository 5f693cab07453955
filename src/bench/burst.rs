//! `burst`: a small stock, twenty times as many buyers, and all of them come within a second. How soon
//! is everything sold, and what do they hear?
//!
//! Who is refused for the load asks again, until nothing is left.

use std::time::Duration;

use serde_json::json;

use super::{
    Error, Plan,
    bed::Bed,
    load::{self, Arrivals, Load, OVERLOADED, RESERVED, Requests, SOLD_OUT, Seen},
    oracle::Told,
    quantile_us,
    report::{Bound, Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, percentiles_ms},
};

const UNITS: u32 = 10_000;
const QUICK_UNITS: u32 = 200;
const BUYERS_PER_UNIT: u32 = 20;
/// Within this all of them come.
const WITHIN: Duration = Duration::from_secs(1);
/// Who was refused for the load comes again this soon, so often.
const AGAIN_PER_S: f64 = 20_000.0;
const ROUNDS: usize = 30;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("unsold_units", "", "Units that are left when everybody was answered.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("sold_out_s", "s", "From the first call until the last unit was won."),
    Figure::plain("wins_per_s", "1/s", "Units over that time."),
    Figure::plain("answers_per_s", "1/s", "Answers of any kind, while the first round lasted."),
    Figure::plain("win_p50_ms", "ms", "The median of a win in the first round, from its time."),
    Figure::plain("win_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("refusal_p50_ms", "ms", "The median of SOLD_OUT in the first round."),
    Figure::plain("refusal_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("overloaded_share", "", "Of the first round's calls, refused for the load."),
    Figure::plain("generator_lag_p99_ms", "ms", "How late the generator was in the first round."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let units = if plan.quick { QUICK_UNITS } else { UNITS };
    let buyers = units * BUYERS_PER_UNIT;
    let bed = Bed::open(plan, units).await?;
    let mut told = Told::default();
    tell(&format!("{buyers} buyers for {units} units"));
    let rate = f64::from(buyers) / WITHIN.as_secs_f64();
    let first = round(plan, &bed, "b", rate, WITHIN).await?;
    told.note(&first);
    run.check_generator("the burst", &first);
    let mut sold_out_us = last_win_us(&first);
    let mut begun_us = first.lasted.as_micros() as f64;

    let mut refused = first.count(OVERLOADED);
    for nth in 0..ROUNDS {
        if refused == 0 || told.wins >= units.into() {
            break;
        }
        tell(&format!("{refused} ask again"));
        let lasts = Duration::from_secs_f64(refused as f64 / AGAIN_PER_S);
        let again = round(plan, &bed, &format!("r{nth:02}"), AGAIN_PER_S, lasts).await?;
        told.note(&again);
        if let Some(at) = last_win_us(&again) {
            sold_out_us = Some(begun_us + at);
        }
        begun_us += again.lasted.as_micros() as f64;
        refused = again.count(OVERLOADED);
    }
    let wins = load::latencies(first.of(RESERVED));
    let refusals = load::latencies(first.of(SOLD_OUT));
    if let Some(us) = sold_out_us {
        run.set("sold_out_s", us / 1e6);
        run.set("wins_per_s", told.wins as f64 / (us / 1e6));
    }
    let lasted = first.lasted.as_secs_f64();
    run.set("unsold_units", f64::from(units) - told.wins as f64);
    run.set("answers_per_s", first.samples.len() as f64 / lasted);
    run.set("win_p50_ms", quantile_us(&wins, 0.5) / 1_000.0);
    run.set("win_p99_ms", quantile_us(&wins, 0.99) / 1_000.0);
    // Under load many are refused before it is known that nothing is left.
    if !refusals.is_empty() {
        run.set("refusal_p50_ms", quantile_us(&refusals, 0.5) / 1_000.0);
        run.set("refusal_p99_ms", quantile_us(&refusals, 0.99) / 1_000.0);
    }
    run.set("overloaded_share", first.count(OVERLOADED) as f64 / first.samples.len() as f64);
    run.set("generator_lag_p99_ms", first.lag().as_secs_f64() * 1_000.0);
    run.detail("told", first.counts());
    run.detail(
        "percentiles_ms",
        json!({
            "winners": percentiles_ms(&first, RESERVED),
            "who came too late": percentiles_ms(&first, SOLD_OUT),
        }),
    );

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

async fn round(
    plan: &Plan,
    bed: &Bed,
    series: &str,
    rate: f64,
    lasts: Duration,
) -> Result<Seen, Error> {
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, lasts)], plan.seed);
    let requests = Requests::reserve(&bed.offer, series, schedule.len());
    let load = Load::new(bed.servers[0].grpc, requests, Arrivals::Open(schedule));
    load::run(Load { connections: CONNECTIONS, ..load }).await
}

/// When the last unit of a round was won.
fn last_win_us(seen: &Seen) -> Option<f64> {
    seen.of(RESERVED).map(load::Sample::answered_us).max().map(|us| us as f64)
}
