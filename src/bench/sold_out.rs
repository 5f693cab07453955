//! `sold-out`: most of a sale is people who come too late. What does it cost to tell them, what do
//! winners hear who ask again in the middle of it, and how soon is a unit sold again that came back?

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    Error, Plan,
    bed::{self, Bed, call},
    load::{self, Arrivals, Load, OVERLOADED, REPLAYED, RESERVED, Requests, SOLD_OUT, Seen, Win},
    noop, noop_rate,
    oracle::Told,
    per_call_us, quantile_us,
    report::{Bound, Figure, Run},
    saturate,
    schedule::{Schedule, Stretch},
    storm,
};
use crate::api::pb::{ReleaseOutcome, seckill_client::SeckillClient};

/// Units of the offer, each for one winner.
const UNITS: u32 = 1_000;
const WINNERS: &str = "w";
/// How often buyers ask who are refused for the load.
const ATTEMPTS: u32 = 20;
/// How many winners buy at once.
const BUYING: usize = 64;
/// The storm in which units come back; it has to be encoded beforehand for longer than it takes.
const MOST_RESALE_PER_S: f64 = 20_000.0;
const RELEASE_LIMIT: Duration = Duration::from_secs(5);
/// A unit that found nobody for this long is not sold again.
const RESALE_LIMIT: Duration = Duration::from_secs(5);
/// How long to wait until the next unit comes back, so that all hear SOLD_OUT from memory again.
const BETWEEN_MS: std::ops::Range<u64> = 50..150;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain(
        "refusal_cpu_ratio",
        "× noop",
        "Server CPU of a refusal against that of a call that does nothing.",
    )
    .goal("G1", Bound::AtMost(1.15)),
    Figure::plain(
        "engine_calls_per_refusal",
        "",
        "Scripts run while nothing was sold, per refusal.",
    )
    .goal("G2", Bound::AtMost(0.01)),
    Figure::plain(
        "resale_p99_ms",
        "ms",
        "From the call that gives a unit back until a buyer of the storm was told that he has it.",
    )
    .goal("G18", Bound::AtMost(250.0)),
    Figure::plain(
        "resale_other_server_p99_ms",
        "ms",
        "The same, when the unit comes back through another server than the one with the storm.",
    )
    .goal("G18", Bound::AtMost(250.0)),
    Figure::plain("resale_p50_ms", "ms", "The median of the same, on one server."),
    Figure::plain("resale_other_server_p50_ms", "ms", "The median of the same, on two servers."),
    Figure::plain("refusal_cpu_us", "µs", "Server CPU of a refusal."),
    Figure::plain("noop_cpu_us", "µs", "Server CPU of a call that does nothing, at the same rate."),
    Figure::plain("engine_cpu_us", "µs", "Redis CPU per refusal."),
    Figure::plain("storm_per_s", "1/s", "Calls sent in the storm, per second."),
    Figure::plain("refusal_p50_us", "µs", "Latency of a refusal in the storm, from its time."),
    Figure::plain("refusal_p99_us", "µs", "The 99th percentile of the same."),
    Figure::plain("noop_p50_us", "µs", "Latency of a noop call at the same rate."),
    Figure::plain("noop_p99_us", "µs", "The 99th percentile of the same."),
    Figure::plain("refusals_per_s", "1/s", "Refusals at saturation."),
    Figure::plain("noop_per_s", "1/s", "Noop calls at saturation."),
    Figure::plain("generator_busy", "cores", "CPU of the generator in the storm."),
    Figure::plain("generator_lag_p99_us", "µs", "How late the generator was in the storm."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    let rate = match plan.rate {
        Some(rate) => rate,
        None => {
            tell("looking for the rate of a noop");
            noop_rate(plan).await? / 2.0
        }
    };
    tell(&format!("noop at {rate:.0} calls/s"));
    let mut before = noop(plan, rate).await?;
    let mut runs = Vec::new();
    for nth in 1..=plan.repeats {
        let mut run = Run::default();
        one(plan, rate, &mut run, &|what| tell(&format!("run {nth}: {what}"))).await?;
        tell(&format!("noop at {rate:.0} calls/s"));
        let after = noop(plan, rate).await?;
        run.set_noop(before, after);
        let noop_cpu = f64::midpoint(before.cpu_us, after.cpu_us);
        if let Some(cpu) = run.figures.get("refusal_cpu_us").copied() {
            run.set("refusal_cpu_ratio", cpu / noop_cpu);
        }
        runs.push(run);
        before = after;
    }
    Ok(runs)
}

async fn one(
    plan: &Plan,
    rate: f64,
    run: &mut Run,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), Error> {
    tell("selling out");
    let mut bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    let winners = Requests::reserve(&bed.offer, WINNERS, UNITS as usize);
    sell_out(&bed, &winners, run, &mut told).await?;
    bed.drain().await?;

    tell(&format!("the storm, {rate:.0} calls/s"));
    measure_storm(plan, rate, &bed, run).await?;

    tell("winners ask again in the storm");
    let again = Schedule::draw(
        plan.pace,
        &[Stretch::new(f64::from(UNITS) / plan.lasts.as_secs_f64(), plan.lasts)],
        plan.seed,
    );
    let again = Load::new(bed.servers[0].grpc, winners, Arrivals::Open(again));
    let (seen, replayed) = tokio::join!(
        storm(plan, &bed.servers[0], &bed.offer, "r", rate, plan.lasts),
        load::run(again)
    );
    expect_all(run, "the storm while winners ask again", &seen?, SOLD_OUT);
    let replayed = replayed?;
    expect_all(run, "winners who ask again", &replayed, REPLAYED);
    run.detail("winners_who_asked_again", replayed.counts());

    tell("units come back in the storm");
    let back = if plan.quick { 10 } else { 50 };
    let resold = resale(plan, rate, &bed, 0..back, "b", run).await?;
    set_resale(run, &resold, "resale_p50_ms", "resale_p99_ms", "resale_ms");
    told.wins += resold.wins;
    told.released += resold.released;
    if bed.may_have_more_servers() {
        tell("units come back through another server");
        bed.add_server(plan).await?;
        let resold = resale(plan, rate, &bed, back..2 * back, "o", run).await?;
        set_resale(
            run,
            &resold,
            "resale_other_server_p50_ms",
            "resale_other_server_p99_ms",
            "resale_other_server_ms",
        );
        told.wins += resold.wins;
        told.released += resold.released;
    }

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

/// What a refusal costs, at the rate and at saturation.
async fn measure_storm(plan: &Plan, rate: f64, bed: &Bed, run: &mut Run) -> Result<(), Error> {
    let server = &bed.servers[0];
    storm(plan, server, &bed.offer, "u", rate, plan.warm_up()).await?;
    let calls = server.engine_calls().await?;
    let (cpu, engine_cpu) = (server.cpu()?, bed.engine_cpu());
    let seen = storm(plan, server, &bed.offer, "s", rate, plan.lasts).await?;
    let cpu = server.cpu()?.saturating_sub(cpu);
    let used = bed.engine_cpu().zip(engine_cpu).map(|(now, then)| now.saturating_sub(then));
    let calls_after = server.engine_calls().await?;
    expect_all(run, "the storm", &seen, SOLD_OUT);
    run.check_generator("the storm", &seen);
    let refusals = seen.count(SOLD_OUT);
    run.set("refusal_cpu_us", per_call_us(cpu, refusals));
    if let Some(used) = used {
        run.set("engine_cpu_us", per_call_us(used, refusals));
    }
    let mut by_script = serde_json::Map::new();
    let mut all = 0;
    for (script, count) in calls_after {
        let earlier = calls.iter().find(|(known, _)| *known == script).map_or(0, |known| known.1);
        let count = count - earlier;
        all += count;
        if count > 0 {
            by_script.insert(script, count.into());
        }
    }
    run.set("engine_calls_per_refusal", all as f64 / refusals.max(1) as f64);
    run.detail("engine_calls_in_the_storm", by_script);
    run.detail("refusals_in_the_storm", refusals);
    run.set("storm_per_s", seen.samples.len() as f64 / plan.lasts.as_secs_f64());
    let latencies = load::latencies(seen.of(SOLD_OUT));
    run.set("refusal_p50_us", quantile_us(&latencies, 0.5));
    run.set("refusal_p99_us", quantile_us(&latencies, 0.99));
    run.set("generator_busy", seen.busy());
    run.set("generator_lag_p99_us", seen.lag().as_secs_f64() * 1e6);

    let seen = saturate(server, &bed.offer, "c", plan.warm_up()).await?;
    expect_all(run, "the storm at saturation", &seen, SOLD_OUT);
    run.set("refusals_per_s", seen.rate(SOLD_OUT));
    Ok(())
}

/// Sells every unit; who is refused for the load asks again.
pub(super) async fn sell_out(
    bed: &Bed,
    winners: &Requests,
    run: &mut Run,
    told: &mut Told,
) -> Result<(), Error> {
    for _ in 0..ATTEMPTS {
        let arrivals = Arrivals::Closed { in_flight: BUYING, lasts: Duration::from_secs(60) };
        let seen = load::run(Load::new(bed.servers[0].grpc, winners.clone(), arrivals)).await?;
        told.wins += seen.count(RESERVED);
        told.unknown += seen.unknown();
        if seen.count(OVERLOADED) == 0 {
            let won = seen.count(RESERVED) + seen.count(REPLAYED);
            if won != seen.samples.len() as u64 {
                run.broken.push(format!("selling out came to {:?}", seen.counts()));
            }
            return Ok(());
        }
    }
    Err(Error::Unavailable("the server is too slow to sell its units".to_owned()))
}

/// Anything else than this one answer breaks the run; being refused for the load, before anything was
/// looked at, is noted.
pub(super) fn expect_all(run: &mut Run, what: &str, seen: &Seen, label: &str) {
    let (right, overloaded) = (seen.count(label), seen.count(OVERLOADED));
    if right + overloaded != seen.samples.len() as u64 || right == 0 {
        run.broken.push(format!("{what}: all should hear {label}, and it is {:?}", seen.counts()));
    }
    if overloaded > 0 {
        run.note(format!(
            "{what}: {overloaded} of {} were refused for the load",
            right + overloaded
        ));
    }
}

/// How long units took to be sold again.
struct Resold {
    times: Vec<Duration>,
    wins: u64,
    released: u64,
}

/// Gives the units of these winners back, one after the other, through the first server, in a storm
/// on the last one.
async fn resale(
    plan: &Plan,
    rate: f64,
    bed: &Bed,
    winners: std::ops::Range<usize>,
    series: &str,
    run: &mut Run,
) -> Result<Resold, Error> {
    let rate = rate.min(MOST_RESALE_PER_S);
    let longest = Duration::from_millis(2 * BETWEEN_MS.end)
        * u32::try_from(winners.len()).unwrap_or(1)
        + RESALE_LIMIT;
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(rate, longest)], plan.seed);
    let requests = Requests::reserve(&bed.offer, series, schedule.len());
    let server = &bed.servers[bed.servers.len() - 1];
    let (wins, won) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let load = Load {
        wins: Some(wins),
        stop: stop.clone(),
        ..Load::new(server.grpc, requests, Arrivals::Open(schedule))
    };
    // Each unit is to find the storm for as long as it may take.
    let until = Instant::now() + (longest - RESALE_LIMIT);
    let give_back = async {
        let given_back = give_back(plan, bed, winners, until, won).await;
        stop.cancel();
        given_back
    };
    let (seen, given_back) = tokio::join!(load::run(load), give_back);
    let (seen, (times, released)) = (seen?, given_back?);
    let wins = seen.count(RESERVED);
    let refused = seen.count(SOLD_OUT) + seen.count(OVERLOADED);
    if wins != released || refused + wins != seen.samples.len() as u64 {
        run.broken.push(format!("{released} units came back in a storm of {:?}", seen.counts()));
    }
    if (times.len() as u64) < released {
        run.broken.push(format!(
            "{released} units came back, and {} were sold within {RESALE_LIMIT:?}",
            times.len()
        ));
    }
    Ok(Resold { times, wins, released })
}

async fn give_back(
    plan: &Plan,
    bed: &Bed,
    winners: std::ops::Range<usize>,
    until: Instant,
    mut won: mpsc::UnboundedReceiver<Win>,
) -> Result<(Vec<Duration>, u64), Error> {
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut seckill = SeckillClient::new(bed.channel(0).await?);
    let (mut times, mut released) = (Vec::new(), 0);
    for nth in winners {
        tokio::time::sleep(Duration::from_millis(random.u64(BETWEEN_MS))).await;
        let sent = Instant::now();
        if sent > until {
            break;
        }
        let answer =
            call(RELEASE_LIMIT, seckill.release(bed::release(&bed.offer, WINNERS, nth))).await?;
        if answer.outcome() != ReleaseOutcome::Released {
            return Err(Error::Internal(format!("a winner's Release came to {answer:?}")));
        }
        released += 1;
        match tokio::time::timeout(RESALE_LIMIT, won.recv()).await {
            Ok(Some(win)) => times.push(win.at.saturating_duration_since(sent)),
            Ok(None) | Err(_) => break,
        }
    }
    Ok((times, released))
}

fn set_resale(run: &mut Run, resold: &Resold, p50: &'static str, p99: &'static str, detail: &str) {
    let mut times_ms: Vec<f64> =
        resold.times.iter().map(|time| time.as_secs_f64() * 1_000.0).collect();
    times_ms.sort_by(f64::total_cmp);
    // The smallest that so many are not above: of fewer than 100 the largest.
    let at = |percent: usize| {
        let place = (times_ms.len() * percent).div_ceil(100).saturating_sub(1);
        times_ms.get(place).copied()
    };
    if let (Some(median), Some(late)) = (at(50), at(99)) {
        run.set(p50, median);
        run.set(p99, late);
    }
    run.detail(detail, times_ms.iter().map(|ms| (ms * 100.0).round() / 100.0).collect::<Vec<_>>());
}
