//! `peers`: what this gains over the three ways in which it is done elsewhere, and what those lose.
//!
//! The same load goes to this server and to each peer in one run. Then each is sold out by buyers who
//! ask twice, and killed in the middle of a load; the order rows are held against what the buyers
//! were told.

use std::{net::SocketAddr, time::Duration};

use serde_json::json;
use tokio::{sync::mpsc, time::sleep};

mod bed;

use super::{
    Error, Plan,
    bed::{Bed, Sale},
    load::{self, Arrivals, Load, Method, RESERVED, Requests, Seen, buyer},
    oracle::{self, Told},
    peer::Kind,
    process::Process,
    report::{Bound, Figure, Run},
    wins::{Best, CONNECTIONS, Target, UNITS},
};
use crate::{
    api::pb,
    database::Database,
    domain::OfferKey,
    server::{redis_settings, sql_settings},
};
use bed::{PeerBed, Tally};

/// Calls in flight; each gets the number that suits it.
const IN_FLIGHT: [usize; 4] = [16, 64, 256, 1_024];
const SELLING_OUT: u32 = 1_000;
/// How often each buyer asks for them.
const ASKED: usize = 2;
/// How many calls are in flight when units run out, and when a server is killed.
const AT_ONCE: usize = 256;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("over_row_lock", "× peer", "Wins a second against the SQL row lock.")
        .goal("G8", Bound::AtLeast(10.0)),
    Figure::plain(
        "over_distributed_lock",
        "× peer",
        "Against the distributed lock, the better form.",
    )
    .goal("G9", Bound::AtLeast(10.0)),
    Figure::plain("over_naive_lua", "× peer", "Against naive Lua.")
        .goal("G10", Bound::AtLeast(3.0)),
    Figure::plain("wins_per_s", "1/s", "Wins a second of this server, rows durable."),
    Figure::plain("row_lock_per_s", "1/s", "Of the SQL row lock."),
    Figure::plain("distributed_lock_per_s", "1/s", "Of the distributed lock; orders come later."),
    Figure::plain("distributed_lock_fail_fast_per_s", "1/s", "Of its form that does not wait."),
    Figure::plain("naive_lua_per_s", "1/s", "Of naive Lua."),
    Figure::plain("lost_orders", "", "Wins without an order after kill -9, here.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("row_lock_lost_orders", "", "The same of the SQL row lock."),
    Figure::plain("distributed_lock_lost_orders", "", "The same of the distributed lock."),
    Figure::plain("naive_lua_lost_orders", "", "The same of naive Lua."),
    Figure::plain("row_lock_lost_units", "", "Units that nobody has and nobody can buy after it."),
    Figure::plain("distributed_lock_lost_units", "", "The same of the distributed lock."),
    Figure::plain("naive_lua_lost_units", "", "The same of naive Lua."),
    Figure::plain("sold_out_lost_orders", "", "Wins without an order, sold out and alive, here.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("row_lock_sold_out_lost_orders", "", "The same of the SQL row lock."),
    Figure::plain("distributed_lock_sold_out_lost_orders", "", "The same of the distributed lock."),
    Figure::plain(
        "distributed_lock_fail_fast_sold_out_lost_orders",
        "",
        "The same of its form that does not wait.",
    ),
    Figure::plain("naive_lua_sold_out_lost_orders", "", "The same of naive Lua."),
    Figure::plain("oversold", "", "Orders beyond the units, sold out and killed, here.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("row_lock_oversold", "", "The same of the SQL row lock."),
    Figure::plain("distributed_lock_oversold", "", "The same of the distributed lock."),
    Figure::plain(
        "distributed_lock_fail_fast_oversold",
        "",
        "The same of its form that does not wait, sold out.",
    ),
    Figure::plain("naive_lua_oversold", "", "The same of naive Lua."),
    Figure::plain("doubled", "", "A buyer's orders beyond the first, sold out and killed, here.")
        .goal("", Bound::AtMost(0.0)),
    Figure::plain("row_lock_doubled", "", "The same of the SQL row lock."),
    Figure::plain("distributed_lock_doubled", "", "The same of the distributed lock."),
    Figure::plain(
        "distributed_lock_fail_fast_doubled",
        "",
        "The same of its form that does not wait, sold out.",
    ),
    Figure::plain("naive_lua_doubled", "", "The same of naive Lua."),
];

/// The names of the figures of this server or of a peer.
struct Names {
    per_s: &'static str,
    sold_out_lost_orders: &'static str,
    oversold: &'static str,
    doubled: &'static str,
    killed: Option<Killed>,
}

/// Those of one that is killed as well.
struct Killed {
    lost_orders: &'static str,
    lost_units: &'static str,
}

fn names(kind: Kind) -> Names {
    match kind {
        Kind::RowLock => Names {
            per_s: "row_lock_per_s",
            sold_out_lost_orders: "row_lock_sold_out_lost_orders",
            oversold: "row_lock_oversold",
            doubled: "row_lock_doubled",
            killed: Some(Killed {
                lost_orders: "row_lock_lost_orders",
                lost_units: "row_lock_lost_units",
            }),
        },
        Kind::DistributedLock => Names {
            per_s: "distributed_lock_per_s",
            sold_out_lost_orders: "distributed_lock_sold_out_lost_orders",
            oversold: "distributed_lock_oversold",
            doubled: "distributed_lock_doubled",
            killed: Some(Killed {
                lost_orders: "distributed_lock_lost_orders",
                lost_units: "distributed_lock_lost_units",
            }),
        },
        Kind::DistributedLockFailFast => Names {
            per_s: "distributed_lock_fail_fast_per_s",
            sold_out_lost_orders: "distributed_lock_fail_fast_sold_out_lost_orders",
            oversold: "distributed_lock_fail_fast_oversold",
            doubled: "distributed_lock_fail_fast_doubled",
            killed: None,
        },
        Kind::NaiveLua => Names {
            per_s: "naive_lua_per_s",
            sold_out_lost_orders: "naive_lua_sold_out_lost_orders",
            oversold: "naive_lua_oversold",
            doubled: "naive_lua_doubled",
            killed: Some(Killed {
                lost_orders: "naive_lua_lost_orders",
                lost_units: "naive_lua_lost_units",
            }),
        },
    }
}

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let has_redis = redis_settings(&plan.settings.engine).is_some();
    if !has_redis {
        run.note("without a Redis (--engine-url) only the SQL row lock can be compared");
    }
    tell("this server");
    let wins = this_server(plan, run, tell).await?;
    let mut found = std::collections::BTreeMap::new();
    for kind in Kind::ALL.into_iter().filter(|kind| has_redis || !kind.needs_redis()) {
        tell(kind.name());
        let per_s = peer(plan, kind, run, tell).await?;
        found.insert(kind.name(), per_s);
    }
    let per_s = |kind: Kind| found.get(kind.name()).copied();
    let lock = per_s(Kind::DistributedLock).zip(per_s(Kind::DistributedLockFailFast));
    let ratios = [
        ("over_row_lock", per_s(Kind::RowLock)),
        ("over_distributed_lock", lock.map(|(waits, fails)| waits.max(fails))),
        ("over_naive_lua", per_s(Kind::NaiveLua)),
    ];
    for (name, peer) in ratios {
        if let Some(peer) = peer {
            run.set(name, wins / peer);
        }
    }
    Ok(())
}

async fn this_server(
    plan: &Plan,
    run: &mut Run,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<f64, Error> {
    let mut bed = Bed::of(plan, Sale::of(UNITS)).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("warm", AT_ONCE, plan.warm_up()).await?);
    let best = bed.best("b", plan.levels(&IN_FLIGHT), plan.lasts).await?;
    told += best.told;
    run.set("wins_per_s", best.per_s);
    note_best(run, "this-server", &best);

    tell("this server, killed");
    let server = bed.servers.remove(0);
    let sent = load_and_kill(plan, server, &bed.offer).await?;
    told.note(&sent.seen);
    bed.add_server(plan).await?;
    bed.drain().await?;
    let killed = tally_here(&bed, &sent, UNITS).await?;
    run.set("lost_orders", killed.lost_orders as f64);
    run.detail("this-server killed", json!({"tally": killed, "told": sent.seen.counts()}));
    run.broken.extend(bed.close(told).await?);

    tell("this server, sold out");
    let bed = Bed::open(plan, SELLING_OUT).await?;
    let sent = sell_out(bed.servers[0].grpc, &bed.offer).await?;
    bed.drain().await?;
    let tally = tally_here(&bed, &sent, SELLING_OUT).await?;
    run.set("sold_out_lost_orders", tally.lost_orders as f64);
    run.set("oversold", (killed.oversold + tally.oversold) as f64);
    run.set("doubled", (killed.doubled + tally.doubled) as f64);
    run.detail("this-server sold out", json!({"tally": tally, "told": sent.seen.counts()}));
    let mut told = Told::default();
    told.note(&sent.seen);
    run.broken.extend(bed.close(told).await?);
    Ok(best.per_s)
}

async fn tally_here(bed: &Bed, sent: &Sent, total: u32) -> Result<Tally, Error> {
    let database = open_database(&bed.settings.database).await?;
    let orders = oracle::buyers_with_orders(&database, bed.activity_id()).await.map_err(sql)?;
    close(&database).await?;
    Ok(Tally::of(sent, &orders, total))
}

async fn peer(
    plan: &Plan,
    kind: Kind,
    run: &mut Run,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<f64, Error> {
    let names = names(kind);
    let bed = PeerBed::open(plan, kind, UNITS).await?;
    let target = Target { server: &bed.server, engine_id: None, offer: &bed.offer };
    target.closed("warm", AT_ONCE, plan.warm_up()).await?;
    let settle = async || bed.settle().await;
    let best = target.best(RESERVED, "b", plan.levels(&IN_FLIGHT), plan.lasts, settle).await?;
    run.set(names.per_s, best.per_s);
    note_best(run, kind.name(), &best);
    bed.close().await?;

    let (mut oversold, mut doubled) = (0, 0);
    if let Some(Killed { lost_orders, lost_units }) = names.killed {
        tell(&format!("{}, killed", kind.name()));
        let bed = PeerBed::open(plan, kind, UNITS).await?;
        let (sent, bed) = bed.load_and_kill(plan).await?;
        bed.settle().await?;
        let tally = bed.tally(&sent, UNITS).await?;
        run.set(lost_orders, tally.lost_orders as f64);
        run.set(lost_units, tally.lost_units as f64);
        (oversold, doubled) = (tally.oversold, tally.doubled);
        run.detail(
            &format!("{} killed", kind.name()),
            json!({"tally": tally, "told": sent.seen.counts()}),
        );
        bed.close().await?;
    }

    tell(&format!("{}, sold out", kind.name()));
    let bed = PeerBed::open(plan, kind, SELLING_OUT).await?;
    let sent = sell_out(bed.server.grpc, &bed.offer).await?;
    bed.settle().await?;
    let tally = bed.tally(&sent, SELLING_OUT).await?;
    run.set(names.sold_out_lost_orders, tally.lost_orders as f64);
    run.set(names.oversold, (oversold + tally.oversold) as f64);
    run.set(names.doubled, (doubled + tally.doubled) as f64);
    run.detail(
        &format!("{} sold out", kind.name()),
        json!({"tally": tally, "told": sent.seen.counts()}),
    );
    bed.close().await?;
    Ok(best.per_s)
}

fn note_best(run: &mut Run, who: &str, best: &Best) {
    if let Some(limit) = &best.limit {
        run.note(format!("{who}: {limit}"));
    }
    run.detail(
        who,
        json!({
            "per_s": best.per_s,
            "in_flight": best.in_flight,
            "server_cpu_us": best.cpu_us,
            "by_calls_in_flight": best.by_in_flight,
        }),
    );
}

/// What a load came to, and who sent each of its calls.
struct Sent {
    seen: Seen,
    who: fn(usize) -> String,
}

impl Sent {
    /// Calls of one buyer follow each other, and each is an attempt of its own.
    async fn by(
        who: fn(usize) -> String,
        offer: &OfferKey,
        calls: usize,
        load: impl FnOnce(Requests) -> Load,
    ) -> Result<Self, Error> {
        let requests = Requests::each(Method::Reserve, calls, |nth| pb::ReserveRequest {
            user_id: who(nth),
            ..load::attempt(offer, "", 0, 1 + nth % ASKED)
        });
        Ok(Self { seen: load::run(load(requests)).await?, who })
    }

    /// The buyers who were told of a new reservation, once for each time.
    fn winners(&self) -> impl Iterator<Item = String> {
        self.seen.who(RESERVED).into_iter().map(self.who)
    }
}

/// A load in whose middle the server is killed.
async fn load_and_kill(plan: &Plan, server: Process, offer: &OfferKey) -> Result<Sent, Error> {
    let calls = super::count(100_000.0 * plan.lasts.as_secs_f64());
    let arrivals = Arrivals::Closed { in_flight: AT_ONCE, lasts: plan.lasts };
    let addr = server.grpc;
    let half = plan.lasts / 2;
    let (wins, mut won) = mpsc::unbounded_channel();
    let kill = async move {
        // Not before somebody is served: it takes a while to open the connections.
        let _ = won.recv().await;
        drop(won);
        sleep(half).await;
        server.kill();
    };
    let sent = Sent::by(
        |nth| buyer("k", nth),
        offer,
        calls,
        |requests| Load {
            may_break: true,
            wins: Some(wins),
            ..Load::new(addr, requests, arrivals)
        },
    );
    tokio::join!(sent, kill).0
}

/// Sells more than there is, to buyers who ask twice at the same time.
async fn sell_out(addr: SocketAddr, offer: &OfferKey) -> Result<Sent, Error> {
    let calls = SELLING_OUT as usize * 2 * ASKED;
    let arrivals = Arrivals::Closed { in_flight: AT_ONCE, lasts: Duration::from_secs(60) };
    let load = |requests| Load { connections: CONNECTIONS, ..Load::new(addr, requests, arrivals) };
    Sent::by(|nth| buyer("s", nth / ASKED), offer, calls, load).await
}

async fn open_database(settings: &crate::config::DatabaseSettings) -> Result<Database, Error> {
    let opened = Database::open(&sql_settings(settings)).await;
    opened.map_err(|error| Error::Unavailable(error.to_string()))
}

async fn close(database: &Database) -> Result<(), Error> {
    database.close().await.map_err(sql)
}

fn sql(error: sea_orm::DbErr) -> Error {
    Error::Unavailable(format!("the database: {error}"))
}
