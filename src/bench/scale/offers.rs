//! Ever more offers in one activity. Every second one has one unit, which somebody has; of the others
//! there is more than enough.

use std::time::Instant;

use super::{
    super::{
        Error, Plan,
        bed::{Afterwards, Bed, Sale},
        load::{self, Method, Requests},
        oracle::Told,
        report::Run,
        sold_out::sell_out,
        wins::UNITS,
    },
    Charts, MIB,
    step::{Step, Titles},
};
use crate::domain::OfferKey;

const OFFERS: [usize; 3] = [100, 1_000, 10_000];
const QUICK_OFFERS: [usize; 2] = [4, 40];

const TITLES: Titles = Titles {
    cpu: "Offers: CPU of the server, µs a call",
    engine_cpu: "Offers: CPU of Redis, µs a call",
    memory: "Offers: memory, MiB",
    seconds: "Offers: seconds",
    idle: "Offers: cores while nobody calls",
};
pub(super) async fn run(
    plan: &Plan,
    run: &mut Run,
    charts: &mut Charts,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), Error> {
    let titles = TITLES;
    let steps: &[usize] = if plan.quick { &QUICK_OFFERS } else { &OFFERS };
    for &number in steps {
        tell(&format!("putting {number} offers up"));
        let sale = Sale { offers: number, scarce: Some(1), ..Sale::of(UNITS) };
        let mut bed = Bed::of(plan, sale).await?;
        let mut step = Step { plan, run, charts, titles, number, idle: [None; 2] };
        step.memory(&bed).await?;
        tell(&format!("{number} offers, calls"));
        step.idle(&bed).await?;
        let mut told = Told::default();
        let all = bed.offers.clone();
        let ample: Vec<&OfferKey> = all.iter().step_by(2).collect();
        let scarce: Vec<&OfferKey> = all.iter().skip(1).step_by(2).collect();
        let winners = Requests::each(Method::Reserve, scarce.len(), |nth| {
            load::attempt(scarce[nth], "w", nth, 1)
        });
        sell_out(&bed, &winners, step.run, &mut told).await?;
        bed.drain().await?;
        step.refusals(&bed, "a refusal", &scarce[..1], "a").await?;
        step.refusals(&bed, "a refusal of half of them in turn", &scarce, "b").await?;
        step.wins(&bed, ["a win", "a replay"], &ample[..1], "c", &mut told).await?;
        let lines = ["a win of half of them in turn", "a replay of half of them in turn"];
        step.wins(&bed, lines, &ample, "d", &mut told).await?;
        step.note(titles.memory, "server after it", bed.servers[0].memory()? as f64 / MIB);
        tell(&format!("{number} offers, starting servers"));
        step.second(&mut bed).await?;
        step.restart(&mut bed).await?;
        tell(&format!("{number} offers, reading the books"));
        // What later servers share with this one they would read too.
        let afterwards = match plan.own_database {
            true => Afterwards::Stays,
            false => Afterwards::Settled,
        };
        let begun = Instant::now();
        step.run.broken.extend(bed.compare().await?);
        step.note(titles.seconds, "Reconcile", begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        step.run.broken.extend(bed.end(told, afterwards).await?);
        step.note(titles.seconds, "the oracle", begun.elapsed().as_secs_f64());
    }
    charts.set_each(run, "offer_server_bytes", titles.memory, "server");
    charts.set_each(run, "offer_redis_bytes", titles.memory, "Redis");
    charts.set_last(run, "offers_refusal_us", titles.cpu, "a refusal");
    charts.set_growth(run, "offers_refusal_growth", titles.cpu, "a refusal");
    charts.set_last(run, "offers_win_us", titles.cpu, "a win");
    charts.set_growth(run, "offers_win_growth", titles.cpu, "a win");
    charts.set_last(run, "offers_replay_us", titles.cpu, "a replay");
    charts.set_growth(run, "offers_replay_growth", titles.cpu, "a replay");
    let spread = "a refusal of half of them in turn";
    charts.set_growth(run, "offers_spread_refusal_growth", titles.cpu, spread);
    let spread = "a win of half of them in turn";
    charts.set_growth(run, "offers_spread_win_growth", titles.cpu, spread);
    charts.set_last(run, "offers_idle_cores", titles.idle, "server");
    charts.set_last(run, "offers_restart_s", titles.seconds, "a restart");
    charts.set_last(run, "offers_second_s", titles.seconds, "a second server");
    charts.set_last(run, "offers_reconcile_s", titles.seconds, "Reconcile");
    charts.set_last(run, "offers_oracle_s", titles.seconds, "the oracle");
    Ok(())
}
