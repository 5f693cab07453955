//! Ever more reservations of one offer. Most of them are written by the outbox alone, and the engine is
//! rebuilt from them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, StreamExt as _, stream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        Error, Plan,
        bed::{Afterwards, Bed},
        drain::new_row,
        load::{self, Method, REPLAYED, Requests},
        oracle::Told,
        process::memory_of,
        report::Run,
        wins::UNITS,
    },
    Charts, MIB,
    step::{Step, Titles, WINS_PER_S},
};
use crate::{
    api::pb::{ReserveOutcome, seckill_client::SeckillClient},
    outbox::writer::Written,
    server::Parts,
};

const RESERVATIONS: [usize; 3] = [10_000, 100_000, 1_000_000];
const QUICK_RESERVATIONS: [usize; 2] = [200, 2_000];

/// Rows that wait for the writer at once: two full groups and the next two.
const WAITING: usize = 2_048;
/// How long the buyer rests whom a frozen offer has sent away.
const ASK_AGAIN: Duration = Duration::from_millis(2);
/// How long that buyer asks before and after a rebuild.
const AROUND: Duration = Duration::from_millis(200);
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// Buyers of the rows that were there before a server was.
const EARLIER: &str = "f";

const TITLES: Titles = Titles {
    cpu: "Reservations: CPU of the server, µs a call",
    engine_cpu: "Reservations: CPU of Redis, µs a call",
    memory: "Reservations: memory, MiB",
    seconds: "Reservations: seconds",
    idle: "Reservations: cores while nobody calls",
};
pub(super) async fn run(
    plan: &Plan,
    run: &mut Run,
    charts: &mut Charts,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), Error> {
    let titles = TITLES;
    let steps: &[usize] = if plan.quick { &QUICK_RESERVATIONS } else { &RESERVATIONS };
    let mut bed = Bed::open(plan, UNITS).await?;
    let (mut told, mut earlier) = (Told::default(), 0);
    for &number in steps {
        tell(&format!("{number} reservations, writing them"));
        let mut step = Step { plan, run, charts, titles, number, idle: [None; 2] };
        bed.stop_servers().await?;
        fill(&bed, earlier..number).await?;
        told.wins += (number - earlier) as u64;
        earlier = number;
        tell(&format!("{number} reservations, starting servers"));
        step.restart(&mut bed).await?;
        step.second(&mut bed).await?;
        // A Redis has not heard of those that were written yet.
        let frozen = frozen(&bed, &format!("z{number:07}"), &mut told).await?;
        step.note(titles.seconds, "a rebuild", frozen.rebuild.as_secs_f64());
        step.note(titles.seconds, "without a win meanwhile", frozen.longest.as_secs_f64());
        step.memory(&bed).await?;

        tell(&format!("{number} reservations, calls"));
        step.idle(&bed).await?;
        step.replays(&bed, number, &mut told).await?;
        let series = format!("c{number:07}");
        step.wins(&bed, ["a win", "a replay of a new one"], &[&bed.offer], &series, &mut told)
            .await?;
        let left = bed.remaining().await?;
        bed.adjust(-left).await?;
        step.refusals(&bed, "a refusal", &[&bed.offer], &format!("r{number:07}")).await?;
        step.note(titles.memory, "server, sold out", bed.servers[0].memory()? as f64 / MIB);
        bed.adjust(left).await?;
    }
    let Some(&number) = steps.last() else { return Ok(()) };
    tell(&format!("{number} reservations, reading the books"));
    let before = bed.servers[0].memory()?;
    let begun = Instant::now();
    run.broken.extend(bed.compare().await?);
    charts.note(titles.seconds, "Reconcile", number, begun.elapsed().as_secs_f64());
    let grown = bed.servers[0].memory()?.saturating_sub(before);
    run.set("reconcile_server_mib", grown as f64 / MIB);
    let begun = Instant::now();
    run.broken.extend(bed.end(told, Afterwards::Stays).await?);
    charts.note(titles.seconds, "the oracle", number, begun.elapsed().as_secs_f64());
    run.set("oracle_mib", memory_of(std::process::id(), "VmHWM")? as f64 / MIB);

    charts.set_each(run, "reservation_server_bytes", titles.memory, "server");
    charts.set_each(run, "reservation_redis_bytes", titles.memory, "Redis");
    charts.set_last(run, "reservations_refusal_us", titles.cpu, "a refusal");
    charts.set_growth(run, "reservations_refusal_growth", titles.cpu, "a refusal");
    charts.set_last(run, "reservations_win_us", titles.cpu, "a win");
    charts.set_growth(run, "reservations_win_growth", titles.cpu, "a win");
    charts.set_last(run, "reservations_replay_us", titles.cpu, "a replay");
    charts.set_growth(run, "reservations_replay_growth", titles.cpu, "a replay");
    charts.set_last(run, "reservations_idle_cores", titles.idle, "server");
    charts.set_last(run, "reservations_restart_s", titles.seconds, "a restart");
    charts.set_last(run, "reservations_second_s", titles.seconds, "a second server");
    charts.set_last(run, "rebuild_s", titles.seconds, "a rebuild");
    charts.set_last(run, "frozen_s", titles.seconds, "without a win meanwhile");
    charts.set_last(run, "reservations_reconcile_s", titles.seconds, "Reconcile");
    charts.set_last(run, "reservations_oracle_s", titles.seconds, "the oracle");
    Ok(())
}

impl Step<'_> {
    /// Buyers of any of the rows that were written ask again.
    async fn replays(&mut self, bed: &Bed, all: usize, told: &mut Told) -> Result<(), Error> {
        let mut random = fastrand::Rng::with_seed(self.plan.seed);
        let schedule = self.schedule(WINS_PER_S);
        let requests = Requests::each(Method::Reserve, schedule.len(), |_| {
            load::attempt(&bed.offer, EARLIER, random.usize(0..all), 1)
        });
        let seen = self.cost(bed, "a replay", requests, schedule, REPLAYED).await?;
        told.note(&seen);
        Ok(())
    }
}

/// Writes these rows, and makes orders of them.
async fn fill(bed: &Bed, rows: std::ops::Range<usize>) -> Result<(), Error> {
    let parts = Parts::open(&bed.settings).boxed().await;
    let parts = parts.map_err(|error| Error::Unavailable(error.to_string()))?;
    let filled = fill_with(bed, &parts, rows).boxed().await;
    parts.close(tokio::time::Instant::now() + CLOSE_LIMIT).await;
    filled
}

async fn fill_with(bed: &Bed, parts: &Parts, rows: std::ops::Range<usize>) -> Result<(), Error> {
    let failed = |error: crate::error::Error| Error::Unavailable(format!("the outbox: {error}"));
    let epoch = parts.catalog.offer(&bed.offer).await.map_err(failed)?.epoch();
    let writes = stream::iter(rows).map(|nth| {
        let (row, writer) =
            (new_row(&bed.offer, epoch, EARLIER, nth), Arc::clone(&parts.reservations.writer));
        async move { Ok(writer.write(row?).await) }
    });
    let mut writes = writes.buffer_unordered(WAITING);
    while let Some(written) = writes.next().await {
        match written? {
            Ok(Written::Live(_)) => {}
            other => return Err(Error::Unavailable(format!("a row came to {other:?}"))),
        }
    }
    let poller = parts.poller(&bed.settings);
    while poller.run_once().await.map_err(failed)?.ordered > 0 {}
    Ok(())
}

/// What a rebuild was to whoever asked for it, and to buyers.
struct Frozen {
    rebuild: Duration,
    /// Between two wins.
    longest: Duration,
}

/// Has the offer rebuilt, while one buyer after the other asks for a unit.
async fn frozen(bed: &Bed, series: &str, told: &mut Told) -> Result<Frozen, Error> {
    let stop = CancellationToken::new();
    let rebuilding = async {
        sleep(AROUND).await;
        let begun = Instant::now();
        let rebuilt = bed.rebuild().await;
        let took = begun.elapsed();
        sleep(AROUND).await;
        stop.cancel();
        rebuilt.map(|()| took)
    };
    let (longest, rebuild) = tokio::join!(ask(bed, series, &stop, told), rebuilding);
    Ok(Frozen { rebuild: rebuild?, longest: longest? })
}

/// The longest time between two wins.
async fn ask(
    bed: &Bed,
    series: &str,
    stop: &CancellationToken,
    told: &mut Told,
) -> Result<Duration, Error> {
    let mut seckill = SeckillClient::new(bed.channel(0).await?);
    let (mut last, mut longest, mut nth) = (Instant::now(), Duration::ZERO, 0);
    while !stop.is_cancelled() {
        let answer = seckill.reserve(load::attempt(&bed.offer, series, nth, 1)).await;
        nth += 1;
        match answer {
            Ok(answer) if answer.get_ref().outcome() == ReserveOutcome::Reserved => {
                told.wins += 1;
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
            Ok(answer) => {
                return Err(Error::Internal(format!("a rebuild: {:?}", answer.into_inner())));
            }
            // It may have won.
            Err(_) => {
                told.unknown += 1;
                sleep(ASK_AGAIN).await;
            }
        }
    }
    Ok(longest.max(last.elapsed()))
}
