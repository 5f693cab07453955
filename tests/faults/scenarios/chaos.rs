//! Everything at once, by dice: two servers, a Redis, a database, and wires in between.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};

use super::{Scale, Scenario, Struck, scenario};
use crate::{
    arena::{Arena, Setup},
    stores::Sql,
    support::wire::AtCommit,
};

/// What may be broken, each by one fault at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Redis,
    Sql,
    Server(usize),
}

/// A fault that lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Held,
    WireCut,
    BlackHole,
    Slow,
    OutOfMemory,
}

/// What is broken now.
#[derive(Debug, Clone, Copy)]
struct Broken {
    part: Part,
    fault: Fault,
    until: Instant,
}

pub(super) fn all(usual: &dyn Fn() -> Setup, scale: Scale) -> Vec<Scenario> {
    let setup = Setup { total: 400_000, ..usual().servers(2) };
    let span = Duration::from_secs(scale.chaos_s);
    let name = format!("chaos for {} s", scale.chaos_s);
    vec![scenario(name, &Sql::SERVERS, setup, move |arena| chaos(arena, span).boxed_local())]
}

async fn chaos(arena: &mut Arena, span: Duration) -> Struck {
    let mut dice = fastrand::Rng::with_seed(arena.setup.seed);
    arena.serve_all().await;
    arena.warm_load().await;
    let over = Instant::now() + span;
    let mut broken: Vec<Broken> = Vec::new();
    let mut struck = Vec::new();
    while Instant::now() < over {
        let part = match dice.u8(0..10) {
            0..=3 => Part::Redis,
            4..=7 => Part::Sql,
            nth => Part::Server(usize::from(nth) % 2),
        };
        if broken.iter().all(|broken| broken.part != part)
            && let Some(fault) = strike(arena, part, &mut dice).await
        {
            struck.push((part, fault));
            let until = Instant::now() + Duration::from_millis(dice.u64(300..3_500));
            broken.push(Broken { part, fault, until });
        }
        sleep(Duration::from_millis(dice.u64(100..900))).await;
        mend(arena, &mut broken, Instant::now()).await;
    }
    while !broken.is_empty() {
        mend(arena, &mut broken, over + span).await;
    }
    crate::progress(&format!("chaos: {} lasting faults: {struck:?}", struck.len()));
    Struck::at(Instant::now(), arena.in_limbo().await)
}

/// Breaks one part; `None` when it was over at once.
async fn strike(arena: &mut Arena, part: Part, dice: &mut fastrand::Rng) -> Option<Fault> {
    match part {
        Part::Redis => match dice.u8(0..8) {
            0 => {
                arena.redis().kill();
                Some(Fault::Killed)
            }
            1 => {
                arena.redis().signal("STOP");
                Some(Fault::Held)
            }
            2 => {
                arena.redis_wire().cut();
                Some(Fault::WireCut)
            }
            3 => {
                arena.redis_wire().open_hole();
                Some(Fault::BlackHole)
            }
            4 => {
                arena.redis().command::<String>(&["CONFIG", "SET", "maxmemory", "1mb"]).await;
                Some(Fault::OutOfMemory)
            }
            5 => {
                arena.redis().command::<String>(&["FLUSHALL"]).await;
                None
            }
            6 => {
                arena.redis().command::<String>(&["SCRIPT", "FLUSH"]).await;
                None
            }
            _ => {
                arena.redis().drop_clients().await;
                None
            }
        },
        Part::Sql => match dice.u8(0..9) {
            0 => {
                arena.sql_server().await.crash().await;
                Some(Fault::Killed)
            }
            1 => {
                arena.sql_server().await.hold();
                Some(Fault::Held)
            }
            2 => {
                arena.sql_wire().cut();
                Some(Fault::WireCut)
            }
            3 => {
                arena.sql_wire().open_hole();
                Some(Fault::BlackHole)
            }
            4 => {
                arena.sql_wire().slow(Duration::from_millis(dice.u64(20..300)));
                Some(Fault::Slow)
            }
            nth => {
                let kinds = [AtCommit::LoseRequest, AtCommit::LoseReply, AtCommit::SwallowReply];
                arena.sql_wire().trap(kinds[usize::from(nth) % 3], dice.i64(1..6));
                None
            }
        },
        Part::Server(at) => match dice.bool() {
            true => {
                arena.process(at).kill();
                Some(Fault::Killed)
            }
            false => {
                arena.process(at).signal("STOP");
                Some(Fault::Held)
            }
        },
    }
}

/// Mends what has been broken for long enough.
async fn mend(arena: &mut Arena, broken: &mut Vec<Broken>, now: Instant) {
    let stores_are_there = broken.iter().all(|broken| matches!(broken.part, Part::Server(_)));
    let mut at = 0;
    while at < broken.len() {
        let Broken { part, fault, until } = broken[at];
        // A server does not start while a store is away.
        let starts = matches!((part, fault), (Part::Server(_), Fault::Killed));
        if until > now || (starts && !stores_are_there) {
            at += 1;
            continue;
        }
        broken.remove(at);
        match (part, fault) {
            (Part::Redis, Fault::Killed) => arena.redis().start_again().await,
            (Part::Redis, Fault::Held) => arena.redis().signal("CONT"),
            (Part::Redis, Fault::OutOfMemory) => {
                arena.redis().command::<String>(&["CONFIG", "SET", "maxmemory", "0"]).await;
            }
            (Part::Redis, _) => arena.redis_wire().mend(),
            (Part::Sql, Fault::Killed) => arena.sql_server().await.run().await,
            (Part::Sql, Fault::Held) => arena.sql_server().await.let_go(),
            (Part::Sql, _) => arena.sql_wire().mend(),
            (Part::Server(server), Fault::Killed) => arena.keep_serving(server).await,
            (Part::Server(server), _) => arena.process(server).signal("CONT"),
        }
    }
}
