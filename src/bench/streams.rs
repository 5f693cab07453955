//! `streams`: the same wins over ReserveStream, which many requests share, and one call each.

use super::{
    Error, Plan,
    bed::Bed,
    load::streams::{self, Streams},
    oracle::Told,
    report::{Bound, Figure, Run},
    wins::UNITS,
};

/// Calls in flight, and streams with requests under way on each; the best of each counts.
const UNARY: [usize; 3] = [64, 256, 1_024];
const STREAMS: [(usize, usize); 3] = [(8, 64), (16, 64), (16, 256)];

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("streams_over_unary", "× unary", "Wins a second on streams against unary calls.")
        .goal("G19", Bound::AtLeast(2.0)),
    Figure::plain("stream_wins_per_s", "1/s", "Wins a second on streams."),
    Figure::plain("unary_wins_per_s", "1/s", "Wins a second by unary calls."),
    Figure::plain("stream_win_cpu_us", "µs", "Server CPU per win on streams."),
    Figure::plain("unary_win_cpu_us", "µs", "Server CPU per win by unary calls."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    tell("unary calls");
    let bed = Bed::open(plan, UNITS).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);
    let unary = bed.best("u", plan.levels(&UNARY), plan.lasts).await?;
    told += unary.told;
    run.set("unary_wins_per_s", unary.per_s);
    run.set("unary_win_cpu_us", unary.cpu_us);
    run.detail("unary_by_calls_in_flight", unary.by_in_flight);

    let mut best: f64 = 0.0;
    let mut found = serde_json::Map::new();
    for &(streams, in_flight) in plan.levels(&STREAMS) {
        tell(&format!("{streams} streams with {in_flight} requests each"));
        let load = Streams {
            addr: bed.servers[0].grpc,
            offer: bed.offer.clone(),
            series: format!("s{streams:03}x{in_flight:04}-"),
            streams,
            in_flight,
            lasts: plan.lasts,
        };
        let cpu = bed.servers[0].cpu()?;
        let answered = streams::run(load).await?;
        let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
        bed.drain().await?;
        told.wins += answered.wins();
        told.unknown += answered.unknown();
        let per_s = answered.per_s();
        let busy = answered.cpu.as_secs_f64() / answered.lasted.as_secs_f64();
        if per_s > best {
            best = per_s;
            run.set("stream_wins_per_s", per_s);
            run.set("stream_win_cpu_us", super::per_call_us(cpu, answered.wins()));
            if busy > 0.9 {
                run.note(format!("streams: the generator used {:.0} % of a core", busy * 100.0));
            }
        }
        found.insert(
            format!("{streams} × {in_flight}"),
            serde_json::json!({
                "per_s": per_s, "told": answered.counts, "generator_cores": busy,
            }),
        );
    }
    run.set("streams_over_unary", best / unary.per_s);
    run.detail("streams", found);

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}
