//! `segments`: one hot offer in 1, 2, 4 and 8 segments on a Redis Cluster: how much is won, what it
//! costs the server, and how the work falls to the nodes.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{
    Error, Plan,
    bed::{Bed, Sale, is_here},
    load::{self, RESERVED},
    oracle::Told,
    per_call_us,
    process::cpu_of,
    quantile_us,
    report::{Figure, Run},
    wins::UNITS,
};
use crate::{
    domain::OfferKey,
    engine::{
        keys,
        redis::{Master, RedisEngine},
    },
    server::redis_settings,
};

const IN_FLIGHT: [usize; 2] = [256, 1_024];

/// A number of segments, and what is measured of it.
struct Split {
    segments: u32,
    wins_per_s: &'static str,
    server_cpu_us: &'static str,
    nodes_cpu_us: &'static str,
    busiest_share: &'static str,
}

const SPLITS: [Split; 4] = [
    Split {
        segments: 1,
        wins_per_s: "wins_per_s_of_1",
        server_cpu_us: "server_cpu_us_of_1",
        nodes_cpu_us: "nodes_cpu_us_of_1",
        busiest_share: "busiest_share_of_1",
    },
    Split {
        segments: 2,
        wins_per_s: "wins_per_s_of_2",
        server_cpu_us: "server_cpu_us_of_2",
        nodes_cpu_us: "nodes_cpu_us_of_2",
        busiest_share: "busiest_share_of_2",
    },
    Split {
        segments: 4,
        wins_per_s: "wins_per_s_of_4",
        server_cpu_us: "server_cpu_us_of_4",
        nodes_cpu_us: "nodes_cpu_us_of_4",
        busiest_share: "busiest_share_of_4",
    },
    Split {
        segments: 8,
        wins_per_s: "wins_per_s_of_8",
        server_cpu_us: "server_cpu_us_of_8",
        nodes_cpu_us: "nodes_cpu_us_of_8",
        busiest_share: "busiest_share_of_8",
    },
];

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("eight_over_one", "× one", "Wins a second in 8 segments, against in 1."),
    Figure::plain("wins_per_s_of_1", "1/s", "Wins a second in 1 segment."),
    Figure::plain("wins_per_s_of_2", "1/s", "In 2."),
    Figure::plain("wins_per_s_of_4", "1/s", "In 4."),
    Figure::plain("wins_per_s_of_8", "1/s", "In 8."),
    Figure::plain("busiest_share_of_1", "of all", "CPU time of the busiest node, in 1 segment."),
    Figure::plain("busiest_share_of_2", "of all", "In 2."),
    Figure::plain("busiest_share_of_4", "of all", "In 4."),
    Figure::plain("busiest_share_of_8", "of all", "In 8."),
    Figure::plain("nodes_cpu_us_of_1", "µs", "CPU of all nodes per win, in 1 segment."),
    Figure::plain("nodes_cpu_us_of_2", "µs", "In 2."),
    Figure::plain("nodes_cpu_us_of_4", "µs", "In 4."),
    Figure::plain("nodes_cpu_us_of_8", "µs", "In 8."),
    Figure::plain("server_cpu_us_of_1", "µs", "Server CPU per win, in 1 segment."),
    Figure::plain("server_cpu_us_of_2", "µs", "In 2."),
    Figure::plain("server_cpu_us_of_4", "µs", "In 4."),
    Figure::plain("server_cpu_us_of_8", "µs", "In 8."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    // Before anything is put on sale.
    nodes(plan, &[]).await?;
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let (mut first, mut last) = (0.0, 0.0);
    for (nth, split) in SPLITS.iter().enumerate() {
        tell(&format!("{} segment(s)", split.segments));
        last = measure(plan, run, split).await?;
        first = if nth == 0 { last } else { first };
    }
    run.set("eight_over_one", last / first);
    Ok(())
}

/// Puts an offer on sale in so many segments, and tries how many units are won in a second.
async fn measure(plan: &Plan, run: &mut Run, split: &Split) -> Result<f64, Error> {
    let bed = Bed::of(plan, Sale::of(UNITS).in_segments(split.segments)).await?;
    let nodes = nodes(plan, &stocks(&bed.offer, split.segments)).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);
    let (mut best, mut tried) = (0.0, Map::new());
    for &in_flight in plan.levels(&IN_FLIGHT) {
        bed.drain().await?;
        let (server, before) = (bed.servers[0].cpu()?, cpu_of_each(&nodes)?);
        let seen = bed.target(0).closed(&format!("b{in_flight:05}"), in_flight, plan.lasts).await?;
        let server = bed.servers[0].cpu()?.saturating_sub(server);
        let after = cpu_of_each(&nodes)?;
        told.note(&seen);
        let spent: Vec<Duration> =
            after.iter().zip(&before).map(|(now, then)| now.saturating_sub(*then)).collect();
        let (per_s, wins) = (seen.rate(RESERVED), seen.count(RESERVED));
        let all: Duration = spent.iter().sum();
        let busiest = spent.iter().max().copied().unwrap_or_default();
        let latencies = load::latencies(seen.of(RESERVED));
        tried.insert(
            in_flight.to_string(),
            json!({
                "per_s": per_s,
                "p50_ms": quantile_us(&latencies, 0.5) / 1_000.0,
                "p99_ms": quantile_us(&latencies, 0.99) / 1_000.0,
                "server_cores": server.as_secs_f64() / seen.lasted.as_secs_f64(),
                "generator_cores": seen.busy(),
                "nodes": described(&nodes, &spent, seen.lasted),
                "told": seen.counts(),
            }),
        );
        if per_s > best {
            best = per_s;
            run.set(split.wins_per_s, per_s);
            run.set(split.server_cpu_us, per_call_us(server, wins));
            if !all.is_zero() {
                run.set(split.nodes_cpu_us, per_call_us(all, wins));
                run.set(split.busiest_share, busiest.as_secs_f64() / all.as_secs_f64());
            }
        }
    }
    if best < 1.0 {
        return Err(Error::Unavailable(format!("nobody wins: {tried:?}")));
    }
    run.detail(&format!("{} segment(s), by calls in flight", split.segments), tried);
    run.broken.extend(bed.close(told).await?);
    Ok(best)
}

/// The keys of the stock of each segment; where they are, the segment is.
fn stocks(offer: &OfferKey, segments: u32) -> Vec<String> {
    (0..segments).filter_map(|number| keys::segment(offer, number).first().cloned()).collect()
}

/// The masters of the cluster, all on this machine, and how many of these keys each has.
async fn nodes(plan: &Plan, keys: &[String]) -> Result<Vec<(u32, Master)>, Error> {
    let needed = || Error::Usage("name a Redis Cluster on this machine by --engine-url".to_owned());
    let settings = redis_settings(&plan.settings.engine).ok_or_else(needed)?;
    let masters = RedisEngine::masters(&settings, keys).await;
    let masters = masters.map_err(|error| Error::Unavailable(error.to_string()))?;
    let here = |master: Master| {
        let id = master.process_id.filter(|id| is_here(&master.host, *id))?;
        Some((id, master))
    };
    let nodes: Option<Vec<_>> = masters.into_iter().map(here).collect();
    nodes.filter(|nodes| !nodes.is_empty()).ok_or_else(needed)
}

fn cpu_of_each(nodes: &[(u32, Master)]) -> Result<Vec<Duration>, Error> {
    nodes.iter().map(|(id, _)| cpu_of(*id)).collect()
}

/// What each node had and did.
fn described(nodes: &[(u32, Master)], spent: &[Duration], lasted: Duration) -> Vec<Value> {
    let nodes = nodes.iter().zip(spent).map(|((_, master), spent)| {
        json!({
            "port": master.port,
            "segments": master.keys,
            "cores": spent.as_secs_f64() / lasted.as_secs_f64(),
        })
    });
    nodes.collect()
}
