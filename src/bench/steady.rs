//! `steady`: a durable win against what it is made of: a call that does nothing, a script, an INSERT.

use serde_json::json;

use super::{
    Error, Plan,
    bed::Bed,
    load::{self, RESERVED, SOLD_OUT},
    median, nowhere,
    oracle::Told,
    per_call_us,
    process::Folder,
    quantile_us,
    raw::Raw,
    report::{Bound, Figure, Run},
    script::Alone,
    start_noop,
    wins::{Best, Target, UNITS, percentiles_ms},
};

/// Calls in flight when saturation is looked for, of wins and of the noop.
const IN_FLIGHT: [usize; 3] = [64, 256, 1_024];
/// A rate at which nobody waits for anybody.
const IDLE_PER_S: f64 = 100.0;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("wins_over_noop", "× noop", "Wins a second against noop calls a second.")
        .goal("G3", Bound::AtLeast(0.35)),
    Figure::plain("win_cpu_ratio", "× noop", "Server CPU per win, at the same number a second.")
        .goal("G4", Bound::AtMost(2.0)),
    Figure::plain(
        "engine_cpu_ratio",
        "× script",
        "Redis CPU per win at saturation against one request a call by redis-benchmark.",
    )
    .goal("G5", Bound::AtMost(0.5)),
    Figure::plain(
        "idle_ratio",
        "× its parts",
        "The p50 of a lone win against those of noop, script and INSERT together.",
    )
    .goal("G12", Bound::AtMost(1.2)),
    Figure::plain("half_p99_ms", "ms", "The p99 of a win at half of saturation, from its time.")
        .goal("G13", Bound::AtMost(5.0)),
    Figure::plain("wins_per_s", "1/s", "Wins a second at saturation, rows durable."),
    Figure::plain("noop_per_s", "1/s", "Noop calls a second at saturation."),
    Figure::plain("win_cpu_us", "µs", "Server CPU per win at saturation."),
    Figure::plain("noop_cpu_us", "µs", "Server CPU of a noop call at that rate."),
    Figure::plain("engine_cpu_us", "µs", "Redis CPU per win at saturation."),
    Figure::plain("script_cpu_us", "µs", "Redis CPU of the script with one request."),
    Figure::plain("script_per_s", "1/s", "Of those, by redis-benchmark."),
    Figure::plain("idle_p50_us", "µs", "The p50 of a win, 100 a second."),
    Figure::plain("noop_p50_us", "µs", "The p50 of a noop call, 100 a second."),
    Figure::plain("script_p50_us", "µs", "The p50 of the script, 100 a second."),
    Figure::plain("insert_p50_us", "µs", "The p50 of the INSERT of one row, 100 a second."),
    Figure::plain("half_p50_ms", "ms", "The median of a win at half of saturation."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let wins = wins(plan, run, tell).await?;

    tell("the noop");
    let folder = Folder::inside(&plan.folder)?;
    let noop = start_noop(plan, &folder).await?;
    let offer = nowhere();
    let target = Target { server: &noop, engine_id: None, offer: &offer };
    target.open(plan, "i", IDLE_PER_S, plan.warm_up()).await?;
    let idle = target.open(plan, "n", IDLE_PER_S, plan.lasts).await?;
    let nothing = async || Ok(());
    let most = target.best(SOLD_OUT, "m", plan.levels(&IN_FLIGHT), plan.lasts / 2, nothing).await?;
    let cpu = noop.cpu()?;
    let seen = target.open(plan, "r", wins.per_s, plan.lasts).await?;
    let noop_cpu = per_call_us(noop.cpu()?.saturating_sub(cpu), seen.count(SOLD_OUT));
    noop.stop().await?;
    run.set("noop_per_s", most.per_s);
    run.set("noop_cpu_us", noop_cpu);
    run.set("wins_over_noop", wins.per_s / most.per_s);
    run.set("win_cpu_ratio", wins.cpu_us / noop_cpu);
    if let Some(limit) = &most.limit {
        run.note(format!("the noop at saturation: {limit}"));
    }
    run.detail("noop_by_calls_in_flight", most.by_in_flight);
    let noop_p50 = quantile_us(&load::latencies(idle.of(SOLD_OUT)), 0.5);

    tell("the script by itself");
    let alone = Alone::open(plan).await?;
    let script_p50 = median(alone.call_us(IDLE_PER_S, plan.lasts).await?);
    match (alone.benchmark(plan.lasts / 2).await?, wins.engine_cpu_us) {
        (Some(script), Some(engine_cpu)) => {
            run.set("script_per_s", script.per_s);
            run.set("script_cpu_us", script.cpu_us);
            run.set("engine_cpu_us", engine_cpu);
            run.set("engine_cpu_ratio", engine_cpu / script.cpu_us);
        }
        _ => run.note("G5 needs a Redis on this machine, and redis-benchmark"),
    }
    alone.close().await?;

    tell("an INSERT by itself");
    let raw = Raw::open(plan).await?;
    let insert_p50 = median(raw.insert_us(IDLE_PER_S, plan.lasts).await?);
    raw.close().await?;
    run.set("noop_p50_us", noop_p50);
    run.set("script_p50_us", script_p50);
    run.set("insert_p50_us", insert_p50);
    if let Some(idle) = run.figures.get("idle_p50_us").copied() {
        run.set("idle_ratio", idle / (noop_p50 + script_p50 + insert_p50));
    }
    Ok(())
}

/// Wins alone, at saturation, and at half of it.
async fn wins(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<Best, Error> {
    tell("opening");
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);
    bed.drain().await?;

    tell("a win now and then");
    told.note(&bed.target(0).open(plan, "i", IDLE_PER_S, plan.warm_up()).await?);
    let idle = bed.target(0).open(plan, "n", IDLE_PER_S, plan.lasts).await?;
    told.note(&idle);
    run.set("idle_p50_us", quantile_us(&load::latencies(idle.of(RESERVED)), 0.5));

    tell("saturation");
    let best = bed.best("b", plan.levels(&IN_FLIGHT), plan.lasts).await?;
    told += best.told;
    run.set("wins_per_s", best.per_s);
    run.set("win_cpu_us", best.cpu_us);
    if let Some(limit) = &best.limit {
        run.note(format!("saturation: {limit}"));
    }
    run.detail("wins_by_calls_in_flight", best.by_in_flight.clone());

    tell(&format!("half of it, {:.0} calls/s", best.per_s / 2.0));
    told.note(&bed.target(0).open(plan, "v", best.per_s / 2.0, plan.warm_up()).await?);
    let half = bed.target(0).open(plan, "h", best.per_s / 2.0, plan.lasts).await?;
    told.note(&half);
    run.check_generator("half of saturation", &half);
    let latencies = load::latencies(half.of(RESERVED));
    run.set("half_p50_ms", quantile_us(&latencies, 0.5) / 1_000.0);
    run.set("half_p99_ms", quantile_us(&latencies, 0.99) / 1_000.0);
    run.detail("told_at_half", half.counts());
    run.detail(
        "percentiles_ms",
        json!({
            "a win now and then": percentiles_ms(&idle, RESERVED),
            "at half of saturation": percentiles_ms(&half, RESERVED),
        }),
    );
    let refused = half.samples.len() as u64 - half.count(RESERVED);
    if refused * 100 > half.samples.len() as u64 {
        run.note(format!("at half of saturation {:?}", half.counts()));
    }

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(best)
}
