//! `soak`: a whole sale at a bearable rate: nearly everybody comes too late, some ask twice, some give
//! back what they won, and others watch. Does anything grow, and do the books agree?

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::mpsc;

use super::{
    Error, Plan,
    bed::{self, Bed, call},
    load::{
        self, Arrivals, Load, Method, RESERVED, Requests, SOLD_OUT, Win,
        watchers::{Watch, Watchers},
    },
    oracle::Told,
    quantile_us,
    report::{Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, percentiles_ms},
};
use crate::api::pb::{ReleaseOutcome, seckill_client::SeckillClient};

/// Calls a second where the plan says nothing.
const RATE: f64 = 5_000.0;
/// How many measurements long a sale is.
const MEASUREMENTS: u32 = 6;
/// One of so many calls can win, and one of so many is a buyer's second one.
const ONE_OF: usize = 100;
const WATCHERS: usize = 500;
const QUICK_WATCHERS: usize = 50;
/// Every so many a winner gives back.
const GIVES_BACK: usize = 10;
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("calls_per_s", "1/s", "Calls sent a second."),
    Figure::plain("win_p50_ms", "ms", "The median of a win, from its time."),
    Figure::plain("win_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("refusal_p50_ms", "ms", "The median of SOLD_OUT, from its time."),
    Figure::plain("refusal_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("release_p50_ms", "ms", "The median of a Release."),
    Figure::plain("release_max_ms", "ms", "The slowest Release."),
    Figure::plain("resold", "", "Wins beyond the stock: units that came back and were sold again."),
    Figure::plain("server_cores", "cores", "CPU of the server."),
    Figure::plain("memory_mib", "MiB", "Memory of the server in the end."),
    Figure::plain("memory_growth_mib", "MiB", "How much of it came in the second half."),
    Figure::plain("updates_per_s", "1/s", "Stock updates that were read."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let rate = plan.rate.unwrap_or(if plan.quick { RATE / 10.0 } else { RATE });
    let lasts = plan.lasts * MEASUREMENTS;
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, lasts)], plan.seed);
    let calls = schedule.len();
    let units = u32::try_from(calls / ONE_OF).unwrap_or(u32::MAX).max(1);
    let bed = Bed::open(plan, units).await?;
    let mut told = Told::default();
    let watch = Watch {
        addr: bed.servers[0].grpc,
        offer: bed.offer.clone(),
        streams: if plan.quick { QUICK_WATCHERS } else { WATCHERS },
        stalled: 1,
    };
    let watchers = Watchers::open(watch).await?;
    tell(&format!("{calls} calls for {units} units in {lasts:?}"));
    // Every hundredth call is the one before it by the same buyer, with another request.
    let requests = Requests::each(Method::Reserve, calls, |nth| {
        let is_second = nth % ONE_OF == ONE_OF - 1;
        let buyer = nth - usize::from(is_second);
        load::attempt(&bed.offer, "s", buyer, 1 + usize::from(is_second))
    });
    let (wins, won) = mpsc::unbounded_channel();
    let load = Load::new(bed.servers[0].grpc, requests, Arrivals::Open(schedule));
    let load = Load { connections: CONNECTIONS, wins: Some(wins), ..load };
    let cpu = bed.servers[0].cpu()?;
    let middle = async {
        tokio::time::sleep(lasts / 2).await;
        bed.servers[0].memory()
    };
    let (seen, releases, memory) = tokio::join!(load::run(load), give_back(&bed, won), middle);
    let (seen, releases, memory) = (seen?, releases?, memory?);
    let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
    let end = bed.servers[0].memory()?;
    told.note(&seen);
    told.released += releases.times_ms.len() as u64;
    run.check_generator("the sale", &seen);

    let lasted = seen.lasted.as_secs_f64();
    let mib = 1_048_576.0;
    let (wins, refusals) = (load::latencies(seen.of(RESERVED)), load::latencies(seen.of(SOLD_OUT)));
    run.set("calls_per_s", calls as f64 / lasted);
    run.set("win_p50_ms", quantile_us(&wins, 0.5) / 1_000.0);
    run.set("win_p99_ms", quantile_us(&wins, 0.99) / 1_000.0);
    run.set("refusal_p50_ms", quantile_us(&refusals, 0.5) / 1_000.0);
    run.set("refusal_p99_ms", quantile_us(&refusals, 0.99) / 1_000.0);
    run.set("release_max_ms", releases.times_ms.iter().copied().fold(0.0, f64::max));
    run.set("release_p50_ms", super::median(releases.times_ms));
    run.set("resold", seen.count(RESERVED) as f64 - f64::from(units));
    run.set("server_cores", cpu.as_secs_f64() / lasted);
    run.set("memory_mib", end as f64 / mib);
    run.set("memory_growth_mib", (end as f64 - memory as f64) / mib);
    run.set("updates_per_s", watchers.messages() as f64 / lasted);
    run.detail("told", seen.counts());
    run.detail(
        "percentiles_ms",
        json!({
            "winners": percentiles_ms(&seen, RESERVED),
            "who came too late": percentiles_ms(&seen, SOLD_OUT),
        }),
    );
    watchers.close().await?;

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

struct Releases {
    times_ms: Vec<f64>,
}

/// Every tenth winner gives back, until nobody wins any more.
async fn give_back(bed: &Bed, mut won: mpsc::UnboundedReceiver<Win>) -> Result<Releases, Error> {
    let mut seckill = SeckillClient::new(bed.channel(0).await?);
    let (mut nth, mut times_ms) = (0, Vec::new());
    while let Some(win) = won.recv().await {
        nth += 1;
        // Who asked twice won by either of his requests.
        if nth % GIVES_BACK != 0 || win.nth % ONE_OF >= ONE_OF - 2 {
            continue;
        }
        let begun = Instant::now();
        let release = bed::release(&bed.offer, "s", win.nth);
        let answer = call(RELEASE_LIMIT, seckill.release(release)).await?;
        if answer.outcome() != ReleaseOutcome::Released {
            return Err(Error::Internal(format!("a winner's Release came to {answer:?}")));
        }
        times_ms.push(begun.elapsed().as_secs_f64() * 1_000.0);
    }
    Ok(Releases { times_ms })
}
