//! `far-redis`: the engine is 5 ms away, the database is not. How much is won all the same?

use std::{net::ToSocketAddrs as _, time::Duration};

use serde_json::json;
use url::Url;

use super::{
    Error, Plan,
    bed::{Bed, Sale},
    load::{self, RESERVED},
    oracle::Told,
    proxy::Proxy,
    quantile_us,
    report::{Bound, Figure, Run},
    wins::UNITS,
};
use crate::server::redis_settings;

/// How much longer each answer of Redis takes.
const DELAY: Duration = Duration::from_millis(5);
const IN_FLIGHT: [usize; 4] = [64, 256, 1_024, 4_096];
const IDLE_PER_S: f64 = 100.0;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("far_over_near", "× near", "Wins a second with Redis 5 ms away.")
        .goal("G11", Bound::AtLeast(0.9)),
    Figure::plain("near_wins_per_s", "1/s", "Wins a second with Redis on loopback."),
    Figure::plain("far_wins_per_s", "1/s", "Wins a second with Redis 5 ms away."),
    Figure::plain("near_idle_p50_ms", "ms", "The p50 of a lone win with Redis on loopback."),
    Figure::plain("far_idle_p50_ms", "ms", "The p50 of a lone win with Redis 5 ms away."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    if redis_settings(&plan.settings.engine).is_none() {
        return Err(Error::Usage("far-redis needs a Redis: name one by --engine-url".into()));
    }
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let unreadable = |_| Error::Usage("engine.url can't be read".to_owned());
    let mut url = Url::parse(plan.settings.engine.url.expose()).map_err(unreadable)?;
    let host = url.host_str().unwrap_or("localhost").trim_matches(['[', ']']).to_owned();
    let addrs = (host.as_str(), url.port().unwrap_or(6_379)).to_socket_addrs();
    let addr = addrs.ok().and_then(|mut addrs| addrs.next());
    let addr = addr.ok_or_else(|| Error::Unavailable(format!("{host} can't be resolved")))?;
    let proxy = Proxy::open(addr, DELAY).await?;
    let refused = || Error::Internal("the address of the slow wire".to_owned());
    url.set_ip_host(proxy.addr.ip()).map_err(|()| refused())?;
    url.set_port(Some(proxy.addr.port())).map_err(|()| refused())?;

    let near = measure(plan, Sale::of(UNITS), run, NEAR, tell).await?;
    let far = Sale::of(UNITS).with("SECKILL__ENGINE__URL", url);
    let far = measure(plan, far, run, FAR, tell).await?;
    run.set("far_over_near", far / near);
    Ok(())
}

/// What is said of one of the two.
pub(super) struct Names {
    pub(super) name: &'static str,
    pub(super) per_s: &'static str,
    pub(super) idle_p50_ms: &'static str,
}

const NEAR: Names =
    Names { name: "near", per_s: "near_wins_per_s", idle_p50_ms: "near_idle_p50_ms" };
const FAR: Names = Names { name: "far", per_s: "far_wins_per_s", idle_p50_ms: "far_idle_p50_ms" };

/// Wins of a server with these settings: alone, and as many as there are.
pub(super) async fn measure(
    plan: &Plan,
    sale: Sale,
    run: &mut Run,
    names: Names,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<f64, Error> {
    tell(names.name);
    let bed = Bed::of(plan, sale).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);
    bed.drain().await?;
    let idle = bed.target(0).open(plan, "i", IDLE_PER_S, plan.warm_up()).await?;
    told.note(&idle);
    run.set(names.idle_p50_ms, quantile_us(&load::latencies(idle.of(RESERVED)), 0.5) / 1_000.0);
    let best = bed.best("b", plan.levels(&IN_FLIGHT), plan.lasts).await?;
    told += best.told;
    run.set(names.per_s, best.per_s);
    run.detail(
        names.name,
        json!({"in_flight": best.in_flight, "by_calls_in_flight": best.by_in_flight}),
    );
    run.broken.extend(bed.close(told).await?);
    Ok(best.per_s)
}
