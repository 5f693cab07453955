//! Ever more watchers. The first of two offers is watched, and the second is sold out.

use std::time::Instant;

use tokio::time::sleep;

use super::{
    super::{
        Error, Plan,
        bed::{Bed, Sale},
        load::{
            self, Method, REPLAYED, RESERVED, Requests,
            watchers::{Watch, Watchers},
        },
        oracle::Told,
        quantile_us,
        report::Run,
        sold_out::sell_out,
        watch,
        wins::UNITS,
    },
    Charts, MIB,
    step::{Step, Titles, Used, WINS_PER_S},
};

const WATCHERS: [usize; 3] = [100, 1_000, 10_000];
/// One: each step waits for what is promised to converge.
const QUICK_WATCHERS: [usize; 1] = [200];
const WATCHED_WINS_PER_S: f64 = 500.0;

const TITLES: Titles = Titles {
    cpu: "Watchers: CPU of the server, µs a call or an update",
    engine_cpu: "Watchers: CPU of Redis, µs a call",
    memory: "Watchers: memory, MiB",
    seconds: "Watchers: seconds",
    idle: "Watchers: cores while nobody calls",
};

pub(super) async fn run(
    plan: &Plan,
    run: &mut Run,
    charts: &mut Charts,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), Error> {
    let titles = TITLES;
    let steps: &[usize] = if plan.quick { &QUICK_WATCHERS } else { &WATCHERS };
    let sale = Sale { offers: 2, scarce: Some(1), ..Sale::of(UNITS) };
    let bed = Bed::of(plan, sale).await?;
    let mut told = Told::default();
    let [watched, sold_out] = [&bed.offers[0], &bed.offers[1]];
    sell_out(&bed, &Requests::reserve(sold_out, "w", 1), run, &mut told).await?;
    let target = bed.target(0);
    told.note(&target.open(plan, "v", WATCHED_WINS_PER_S, plan.warm_up()).await?);
    tell("buyers alone");
    let before = Used::by(&bed)?;
    told.note(&target.open(plan, "a", WATCHED_WINS_PER_S, plan.lasts).await?);
    let alone = Used::by(&bed)?.since(before)[0].unwrap_or_default();
    bed.drain().await?;
    for &number in steps {
        tell(&format!("{number} watchers"));
        let mut step = Step { plan, run, charts, titles, number, idle: [None; 2] };
        sleep(plan.warm_up()).await;
        let memory = bed.servers[0].memory()?;
        let begun = Instant::now();
        let (addr, stalled) = (bed.servers[0].grpc, number / watch::STALLED);
        let watch = Watch { addr, offer: watched.clone(), streams: number, stalled };
        let watchers = Watchers::open(watch).await?;
        step.note(titles.seconds, "until all have their snapshot", begun.elapsed().as_secs_f64());
        sleep(plan.warm_up()).await;
        let grown = bed.servers[0].memory()?.saturating_sub(memory);
        step.note(titles.memory, "server, for all idle streams", grown as f64 / MIB);
        step.idle(&bed).await?;
        step.refusals(&bed, "a refusal", &[sold_out], &format!("r{number:07}")).await?;

        let series = format!("b{number:07}");
        let (before, messages) = (Used::by(&bed)?, watchers.messages());
        let rate = step.per_s(WATCHED_WINS_PER_S);
        let seen = target.open(plan, &series, rate, plan.lasts).await?;
        let after = Used::by(&bed)?;
        let updates = (watchers.messages() - messages).max(1);
        told.note(&seen);
        let cores = after.since(before)[0].unwrap_or_default() - alone;
        let lasted = (after.at - before.at).as_secs_f64();
        step.note(titles.cpu, "an update", cores.max(0.0) * lasted * 1e6 / updates as f64);
        let wins = load::latencies(seen.of(RESERVED));
        step.note(titles.seconds, "p99 of a win", quantile_us(&wins, 0.99) / 1e6);
        step.run.check_generator(&format!("wins beside {number} watchers"), &seen);
        let ended = tokio::time::Instant::now();
        bed.drain().await?;
        sleep(plan.warm_up()).await;

        // Nothing changes for those who watch when winners ask again.
        let winners = seen.who(RESERVED);
        let schedule = step.schedule(WINS_PER_S);
        let requests = Requests::each(Method::Reserve, schedule.len(), |nth| {
            load::attempt(watched, &series, winners[nth % winners.len()], 1)
        });
        let seen = step.cost(&bed, "a replay", requests, schedule, REPLAYED).await?;
        told.note(&seen);
        watch::check(watchers, &bed, number, ended, step.run).await?;
    }
    tell("reading the books");
    run.broken.extend(bed.close(told).await?);

    let streams = "server, for all idle streams";
    if let Some([_, (number, mib)]) = charts.ends(titles.memory, streams) {
        run.set("watcher_bytes", mib * MIB / number as f64);
    }
    charts.set_last(run, "watchers_idle_cores", titles.idle, "server");
    charts.set_last(run, "watchers_refusal_us", titles.cpu, "a refusal");
    charts.set_growth(run, "watchers_refusal_growth", titles.cpu, "a refusal");
    charts.set_last(run, "watchers_replay_us", titles.cpu, "a replay");
    charts.set_growth(run, "watchers_replay_growth", titles.cpu, "a replay");
    charts.set_last(run, "watchers_update_us", titles.cpu, "an update");
    if let Some([_, (_, s)]) = charts.ends(titles.seconds, "p99 of a win") {
        run.set("watchers_win_p99_ms", s * 1_000.0);
    }
    Ok(())
}
