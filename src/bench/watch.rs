//! `watch`: thousands of dashboards watch the stock of an offer that changes all the time; one in a
//! hundred stops reading. What does an update cost, what do buyers notice, and what does a stream that
//! is idle keep in memory?

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{
    Error, Plan,
    bed::Bed,
    load::{
        self, RESERVED, SOLD_OUT, Seen,
        watchers::{Watch, Watchers},
    },
    nowhere,
    oracle::Told,
    per_call_us,
    process::Folder,
    quantile_us,
    report::{Bound, Figure, Run},
    start_noop,
    wins::{Target, UNITS, percentiles_ms},
};

const STREAMS: usize = 10_000;
const QUICK_STREAMS: usize = 500;
/// One of so many stops reading.
pub(super) const STALLED: usize = 100;
/// Buyers a second: the stock changes with each.
const RATE: f64 = 500.0;
/// The newest value is there within this, by the promise of WatchStock.
const CONVERGENCE: Duration = Duration::from_secs(2);

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("update_cpu_ratio", "× noop", "Server CPU per update that was delivered.")
        .goal("G15", Bound::AtMost(0.5)),
    Figure::plain("reserve_p99_ratio", "× without", "The p99 of a win with watchers, and without.")
        .goal("G16", Bound::AtMost(1.3)),
    Figure::plain("stream_kib", "KiB", "Memory of the server per idle stream.")
        .goal("G17", Bound::AtMost(32.0)),
    Figure::plain("updates_per_s", "1/s", "Updates that were read, of all streams."),
    Figure::plain("update_cpu_us", "µs", "Server CPU per update, above what the buyers cost."),
    Figure::plain("noop_cpu_us", "µs", "Server CPU of a noop call, at up to 20,000 a second."),
    Figure::plain("without_p99_ms", "ms", "The p99 of a win without watchers, before and after."),
    Figure::plain("with_p99_ms", "ms", "The p99 of a win with watchers."),
    Figure::plain("with_cores", "cores", "CPU of the server with watchers."),
    Figure::plain("readers_cores", "cores", "CPU of all watchers together."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let streams = if plan.quick { QUICK_STREAMS } else { STREAMS };
    let bed = Bed::open(plan, UNITS).await?;
    tell(&format!("{streams} idle streams"));
    let watch = Watch {
        addr: bed.servers[0].grpc,
        offer: bed.offer.clone(),
        streams,
        stalled: streams / STALLED,
    };
    // Before anything else: what a server has had in use once, it may use again.
    sleep(plan.warm_up()).await;
    let memory = bed.servers[0].memory()?;
    let watchers = Watchers::open(watch.clone()).await?;
    sleep(plan.warm_up()).await;
    let grown = bed.servers[0].memory()?.saturating_sub(memory);
    run.set("stream_kib", grown as f64 / 1_024.0 / streams as f64);
    watchers.close().await?;

    let mut told = Told::default();
    let mut buyers = async |series: &str| -> Result<(Seen, Duration), Error> {
        let cpu = bed.servers[0].cpu()?;
        let seen = bed.target(0).open(plan, series, RATE, plan.lasts).await?;
        told.note(&seen);
        Ok((seen, bed.servers[0].cpu()?.saturating_sub(cpu)))
    };
    tell("buyers alone");
    buyers("w").await?;
    let (before, cpu_before) = buyers("a").await?;
    bed.drain().await?;

    let watchers = Watchers::open(watch).await?;
    tell(&format!("{streams} streams, {RATE} buyers a second"));
    let messages = watchers.messages();
    let (during, cpu_during) = buyers("b").await?;
    let updates = watchers.messages() - messages;
    let ended = Instant::now();
    bed.drain().await?;
    let (_, readers_cpu) = check(watchers, &bed, streams, ended, run).await?;

    tell("buyers alone again");
    sleep(plan.warm_up()).await;
    let (after, cpu_after) = buyers("c").await?;

    tell("the noop");
    let folder = Folder::inside(&plan.folder)?;
    let noop = start_noop(plan, &folder).await?;
    let offer = nowhere();
    let target = Target { server: &noop, engine_id: None, offer: &offer };
    // A busy one, as the server with its watchers is: an idle one costs more for each call.
    let rate = (updates as f64 / plan.lasts.as_secs_f64()).clamp(RATE, 20_000.0);
    target.open(plan, "w", rate, plan.warm_up()).await?;
    let cpu = noop.cpu()?;
    let seen = target.open(plan, "n", rate, plan.lasts).await?;
    let noop_cpu = per_call_us(noop.cpu()?.saturating_sub(cpu), seen.count(SOLD_OUT));
    noop.stop().await?;

    let without = (cpu_before + cpu_after) / 2;
    let update_cpu = per_call_us(cpu_during.saturating_sub(without), updates);
    let p99 = |seen: &Seen| quantile_us(&load::latencies(seen.of(RESERVED)), 0.99) / 1_000.0;
    let without_p99 = f64::midpoint(p99(&before), p99(&after));
    run.set("updates_per_s", updates as f64 / during.lasted.as_secs_f64());
    run.set("update_cpu_us", update_cpu);
    run.set("noop_cpu_us", noop_cpu);
    run.set("update_cpu_ratio", update_cpu / noop_cpu);
    run.set("without_p99_ms", without_p99);
    run.set("with_p99_ms", p99(&during));
    run.set("reserve_p99_ratio", p99(&during) / without_p99);
    run.set("with_cores", cpu_during.as_secs_f64() / during.lasted.as_secs_f64());
    run.set("readers_cores", readers_cpu.as_secs_f64() / during.lasted.as_secs_f64());
    run.check_generator("buyers with watchers", &during);
    run.detail("noop_rate", rate);
    run.detail("told_with_watchers", during.counts());
    run.detail(
        "percentiles_ms",
        json!({
            "without watchers": percentiles_ms(&before, RESERVED),
            "with watchers": percentiles_ms(&during, RESERVED),
        }),
    );

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

/// Everybody who reads on has the newest figures soon.
pub(super) async fn check(
    watchers: Watchers,
    bed: &Bed,
    streams: usize,
    ended: Instant,
    run: &mut Run,
) -> Result<(u64, Duration), Error> {
    tokio::time::sleep_until(ended + CONVERGENCE).await;
    let (last, cpu) = watchers.close().await?;
    let remaining = bed.remaining().await?;
    let wrong = last.iter().filter(|message| message.remaining != remaining).count();
    let expected = streams - streams / STALLED;
    if wrong > 0 || last.len() != expected {
        run.broken.push(format!(
            "{wrong} of {} watchers ({expected} expected) had other figures than {remaining} left \
             {CONVERGENCE:?} after the last change",
            last.len()
        ));
    }
    Ok((last.len() as u64, cpu))
}
