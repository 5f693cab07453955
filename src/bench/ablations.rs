//! `ablations`: each trick left out, as far as settings or the load can do that: what is it worth?

use serde_json::json;

use super::{
    Error, Plan,
    bed::{Bed, Sale},
    load::{
        RESERVED, SOLD_OUT,
        streams::{self, Streams},
    },
    oracle::Told,
    per_call_us,
    report::{Figure, Run},
    wins::UNITS,
};
use crate::server::redis_settings;

const IN_FLIGHT: [usize; 2] = [256, 1_024];
/// Units that are gone before the refusals are counted.
const FEW: u32 = 100;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("batching_gain", "× without", "Wins a second, against one call in flight."),
    Figure::plain("filter_gain", "× without", "Refusals a second, against asking the engine each."),
    Figure::plain("filter_cpu_gain", "× without", "Server CPU per refusal without it, over with."),
    Figure::plain("streams_gain", "× without", "Wins a second on streams, against unary calls."),
    Figure::plain("connections_gain", "× without", "Against one connection to Redis."),
    Figure::plain("poller_batch_gain", "× without", "Orders in batches of 500, against 20."),
    Figure::plain("wins_per_s", "1/s", "Wins a second with everything."),
    Figure::plain("one_in_flight_per_s", "1/s", "With one call in flight: every batch is one."),
    Figure::plain("one_connection_per_s", "1/s", "With one connection to Redis."),
    Figure::plain(
        "small_batches_per_s",
        "1/s",
        "Wins a second while orders are made 20 at a time.",
    ),
    Figure::plain("refusals_per_s", "1/s", "Refusals a second with everything."),
    Figure::plain("unfiltered_refusals_per_s", "1/s", "When the engine is asked each time."),
    Figure::plain("stream_wins_per_s", "1/s", "Wins a second on streams."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    tell("everything");
    let all = wins(plan, run, Sale::of(UNITS), "with everything").await?;
    run.set("wins_per_s", all);

    tell("one call in flight");
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 1, plan.warm_up()).await?);
    let seen = bed.target(0).closed("o", 1, plan.lasts).await?;
    told.note(&seen);
    let alone = seen.rate(RESERVED);
    run.set("one_in_flight_per_s", alone);
    run.set("batching_gain", all / alone);

    tell("streams");
    let load = Streams {
        addr: bed.servers[0].grpc,
        offer: bed.offer.clone(),
        series: "s".to_owned(),
        streams: 16,
        in_flight: 64,
        lasts: plan.lasts,
    };
    let answered = streams::run(load).await?;
    told.wins += answered.wins();
    told.unknown += answered.unknown();
    run.set("stream_wins_per_s", answered.per_s());
    run.set("streams_gain", answered.per_s() / all);
    run.broken.extend(bed.close(told).await?);

    tell("orders 20 at a time");
    // Fewer, and the orders of this one measurement would take minutes.
    let sale = Sale::of(UNITS).with("SECKILL__OUTBOX__BATCH", "20");
    let small = wins(plan, run, sale, "orders 20 at a time").await?;
    run.set("small_batches_per_s", small);
    run.set("poller_batch_gain", all / small);

    if redis_settings(&plan.settings.engine).is_some() {
        tell("one connection to Redis");
        let sale = Sale::of(UNITS).with("SECKILL__ENGINE__CONNECTIONS", "1");
        let single = wins(plan, run, sale, "one connection").await?;
        run.set("one_connection_per_s", single);
        run.set("connections_gain", all / single);
    }

    tell("refusals");
    let (with, with_cpu) = refusals(plan, run, Sale::of(FEW), "refusals").await?;
    tell("refusals by the engine");
    let sale = Sale::of(FEW).with("SECKILL__RESERVE__BELIEVE_SOLD_OUT_MS", "0");
    let (without, without_cpu) = refusals(plan, run, sale, "refusals by the engine").await?;
    run.set("refusals_per_s", with);
    run.set("unfiltered_refusals_per_s", without);
    run.set("filter_gain", with / without);
    run.set("filter_cpu_gain", without_cpu / with_cpu);
    Ok(())
}

/// Wins a second of a server with these settings.
async fn wins(plan: &Plan, run: &mut Run, sale: Sale, name: &str) -> Result<f64, Error> {
    let bed = Bed::of(plan, sale).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);
    let best = bed.best("b", plan.levels(&IN_FLIGHT), plan.lasts).await?;
    told += best.told;
    run.detail(name, json!(best.by_in_flight));
    run.broken.extend(bed.close(told).await?);
    Ok(best.per_s)
}

/// Refusals a second of a server with these settings, and what each costs.
async fn refusals(plan: &Plan, run: &mut Run, sale: Sale, name: &str) -> Result<(f64, f64), Error> {
    let bed = Bed::of(plan, sale).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 64, plan.warm_up()).await?);
    bed.drain().await?;
    let cpu = bed.servers[0].cpu()?;
    let seen = bed.target(0).closed("r", 256, plan.lasts).await?;
    let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
    told.note(&seen);
    run.detail(name, json!(seen.counts()));
    let measured = (seen.rate(SOLD_OUT), per_call_us(cpu, seen.count(SOLD_OUT)));
    run.broken.extend(bed.close(told).await?);
    Ok(measured)
}
