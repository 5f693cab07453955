//! What happens to a Redis.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};

use super::{Scenario, Struck, scenario};
use crate::{
    arena::{Arena, Setup},
    stores::Sql,
    support::{redis_server::RedisServer, within},
};

/// How long a Redis is away.
const AWAY: Duration = Duration::from_secs(3);
/// By then every circuit is open.
const NOTICED: Duration = Duration::from_millis(2_800);

pub(super) fn all(usual: &dyn Fn() -> Setup) -> Vec<Scenario> {
    let on = &Sql::SERVERS;
    let everysec =
        Setup { redis: &["--appendonly", "yes", "--appendfsync", "everysec"], ..usual() };
    let forgetful = Setup { redis: &[], ..usual() };
    let small = Setup { redis: &["--appendonly", "yes", "--maxmemory", "1gb"], ..usual() };
    vec![
        scenario("redis kill -9, aof always", on, usual(), |a| kill(a).boxed_local()),
        scenario("redis kill -9, aof everysec, tail lost", on, everysec, |a| {
            lose_tail(a).boxed_local()
        }),
        scenario("redis kill -9, no persistence", on, forgetful, |a| kill(a).boxed_local()),
        scenario("redis away for 3 s", on, usual(), |a| away(a).boxed_local()),
        scenario("redis script flush under load", on, usual(), |a| script_flush(a).boxed_local()),
        scenario("redis flushall", on, usual(), |a| flush(a).boxed_local()),
        scenario("redis client pause", on, usual(), |a| client_pause(a).boxed_local()),
        scenario("redis client kill", on, usual(), |a| client_kill(a).boxed_local()),
        scenario("redis out of memory", on, small, |a| out_of_memory(a).boxed_local()),
        scenario("redis held by SIGSTOP 3 s", on, usual(), |a| hold(a).boxed_local()),
        scenario("redis black hole", on, usual(), |a| black_hole(a).boxed_local()),
        scenario("redis wire cut", on, usual(), |a| cut(a).boxed_local()),
        scenario("redis replica promoted one write behind", on, usual(), |a| {
            promote(a, false).boxed_local()
        }),
        scenario("redis failover and back", on, usual(), |a| promote(a, true).boxed_local()),
    ]
}

async fn kill(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis().restart().await;
    Struck::at(Instant::now(), arena.in_limbo().await)
}

/// The writes of the last second never reached the disk.
async fn lose_tail(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    // Redis writes before it answers, and a killed process leaves that to the kernel: a machine
    // that loses its power does not. The tail is cut off by hand.
    arena.redis().kill();
    arena.redis().cut_aof(2_000);
    arena.redis().start_again().await;
    Struck::at(Instant::now(), arena.in_limbo().await)
}

async fn away(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis().kill();
    let hit = Instant::now();
    sleep(AWAY).await;
    let away = Some((hit + NOTICED / 2, Instant::now()));
    arena.redis().start_again().await;
    let lifted = Instant::now();
    Struck { away, ..Struck::at(lifted, arena.in_limbo().await) }
}

async fn script_flush(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    let until = Instant::now() + AWAY;
    while Instant::now() < until {
        arena.redis().command::<String>(&["SCRIPT", "FLUSH"]).await;
        sleep(Duration::from_millis(20)).await;
    }
    let failures = arena.crowd.ledger().calls.iter().filter(|call| call.failure.is_some()).count();
    assert_eq!(failures, 0, "scripts are loaded again unseen");
    Struck::at(Instant::now(), arena.in_limbo().await)
}

async fn flush(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis().command::<String>(&["FLUSHALL"]).await;
    Struck::at(Instant::now(), arena.in_limbo().await)
}

async fn client_pause(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    let pause = AWAY.as_millis().to_string();
    arena.redis().command::<String>(&["CLIENT", "PAUSE", &pause, "ALL"]).await;
    let hit = Instant::now();
    sleep(AWAY).await;
    let lifted = Instant::now();
    Struck { away: Some((hit + NOTICED, lifted)), ..Struck::at(lifted, arena.in_limbo().await) }
}

async fn client_kill(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    for _ in 0..20 {
        arena.redis().drop_clients().await;
        sleep(Duration::from_millis(100)).await;
    }
    Struck::at(Instant::now(), arena.in_limbo().await)
}

/// Nothing new is taken, and what is given back gets through.
async fn out_of_memory(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    let held = arena.crowd.held().expect("somebody holds a unit");
    arena.redis().command::<String>(&["CONFIG", "SET", "maxmemory", "1mb"]).await;
    let before = arena.crowd.wins();
    within(Duration::from_secs(10), "Redis takes nothing new", async || {
        let failure = arena.crowd.last_failure()?;
        (failure.reason == "ENGINE_UNAVAILABLE").then_some(())
    })
    .await;
    let outcome = arena.crowd.release(&held.buyer, &held).await;
    assert!(outcome.is_some(), "a release gets no answer: {:?}", arena.crowd.last_failure());
    let (in_limbo, taken) = (arena.in_limbo().await, arena.crowd.wins() - before);
    assert!(taken < 50, "{taken} were taken without memory");
    arena.redis().command::<String>(&["CONFIG", "SET", "maxmemory", "1gb"]).await;
    Struck::at(Instant::now(), in_limbo)
}

async fn hold(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis().signal("STOP");
    let hit = Instant::now();
    sleep(AWAY).await;
    let lifted = Instant::now();
    arena.redis().signal("CONT");
    Struck { away: Some((hit + NOTICED, lifted)), ..Struck::at(lifted, arena.in_limbo().await) }
}

async fn black_hole(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis_wire().open_hole();
    let hit = Instant::now();
    sleep(AWAY / 2).await;
    let in_limbo = arena.in_limbo().await;
    sleep(AWAY).await;
    let lifted = Instant::now();
    arena.redis_wire().mend();
    Struck { away: Some((hit + NOTICED, lifted)), ..Struck::at(lifted, in_limbo) }
}

async fn cut(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.redis_wire().cut();
    let hit = Instant::now();
    sleep(AWAY / 2).await;
    let in_limbo = arena.in_limbo().await;
    sleep(AWAY / 2).await;
    let lifted = Instant::now();
    arena.redis_wire().mend();
    Struck { away: Some((hit + NOTICED / 2, lifted)), ..Struck::at(lifted, in_limbo) }
}

/// A failover to a replica that the last writes did not reach; maybe back to the first server,
/// which then has older data under its old name.
async fn promote(arena: &mut Arena, and_back: bool) -> Struck {
    let replica = RedisServer::start_with(arena.setup.redis).await;
    arena.serve_all().await;
    arena.warm_load().await;
    arena.unload().await;
    arena.all_drained(Duration::from_secs(10)).await.unwrap();
    let primary = arena.redis.as_ref().expect("this scenario runs on a Redis");
    replica.follow(primary).await;
    // From here on nothing reaches the replica. One buyer more is served by the primary.
    replica.promote().await;
    arena.crowd.reserve("behind").await.expect("the primary is there");
    arena.all_drained(Duration::from_secs(10)).await.unwrap();
    let hit = Instant::now();
    let here = ([127, 0, 0, 1], replica.port()).into();
    arena.redis_wire().lead_to(here);
    let first = std::mem::replace(arena.redis.as_mut().unwrap(), replica);
    arena.look_at_redis();
    let in_limbo = arena.in_limbo().await;
    arena.load();
    if !and_back {
        // It stays up, as a primary that lost its network does.
        arena.keep(first);
        return Struck::at(hit, in_limbo);
    }
    arena.wins(20).await;
    let hit = Instant::now();
    arena.redis_wire().lead_to(([127, 0, 0, 1], first.port()).into());
    let second = std::mem::replace(arena.redis.as_mut().unwrap(), first);
    arena.keep(second);
    arena.look_at_redis();
    Struck::at(hit, arena.in_limbo().await)
}
