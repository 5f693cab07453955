//! What happens to the servers themselves, and to their clocks.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};

use super::{Scenario, Struck, scenario};
use crate::{
    arena::{Arena, Setup},
    crowd::Mix,
    stores::{Sql, faketime},
    support::within,
};

pub(super) fn all(usual: &dyn Fn() -> Setup) -> Vec<Scenario> {
    let (any, on) = (&Sql::ALL[..], &Sql::SERVERS[..]);
    let two = || usual().servers(2);
    let holds = Setup {
        hold: Some(Duration::from_secs(3)),
        mix: Mix { confirm: 20, ..Mix::USUAL },
        ..two()
    };
    vec![
        scenario("server kill -9", any, usual(), |a| kill(a).boxed_local()),
        scenario("three servers, one killed", on, usual().servers(3), |a| kill(a).boxed_local()),
        scenario("server held by SIGSTOP 5 s", on, two(), |a| hold(a).boxed_local()),
        scenario("server stopped under load", any, usual(), |a| stop(a).boxed_local()),
        scenario("embedded engine held past its lease", &[Sql::Sqlite], two(), |a| {
            take_over(a).boxed_local()
        }),
        scenario("clocks apart by 5 s", on, holds.clone(), |a| {
            clocks_apart(a, "+5s").boxed_local()
        }),
        // Longer than the window and the retention of the sale.
        scenario("clocks apart by 3 h", on, holds, |a| clocks_apart(a, "+3h").boxed_local()),
    ]
}

async fn kill(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.process(0).kill();
    let hit = Instant::now();
    let in_limbo = if arena.servers.len() == 1 { arena.in_limbo().await } else { None };
    arena.serve(0).await;
    Struck::at(hit, in_limbo)
}

async fn hold(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.process(0).signal("STOP");
    sleep(Duration::from_secs(5)).await;
    let in_limbo = arena.in_limbo().await;
    arena.process(0).signal("CONT");
    Struck::at(Instant::now(), in_limbo)
}

/// A stop in good order finishes what it began, and leaves nothing to settle.
async fn stop(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.process(0).terminate();
    let hit = Instant::now();
    let status = arena.process(0).ended(Duration::from_secs(20)).await;
    assert!(status.success(), "{status}");
    if arena.redis.is_some() {
        let world = arena.world().await.unwrap();
        let books = world.read_books(&arena.key).await.unwrap();
        world.close().await;
        assert_eq!(books.engine_unacked, 0, "{books:?}");
    }
    let in_limbo = arena.in_limbo().await;
    arena.serve(0).await;
    Struck::at(hit, in_limbo)
}

/// Another process takes the database over, and the first wakes up with the stock in its memory.
async fn take_over(arena: &mut Arena) -> Struck {
    arena.serve(0).await;
    arena.load();
    arena.wins(20).await;
    arena.unload().await;
    // Held in the middle of a transaction it would keep SQLite's lock, too.
    within(Duration::from_secs(10), "it has nothing to do", async || arena.drained(0).await).await;
    arena.process(0).signal("STOP");
    // Its lease is renewed by a write of its own: let it finish that one.
    while arena.database().try_write().await.is_err() {
        arena.process(0).signal("CONT");
        sleep(Duration::from_millis(20)).await;
        arena.process(0).signal("STOP");
    }
    let hit = Instant::now();
    arena.serve(1).await;
    arena.load();
    arena.wins(20).await;
    arena.process(0).signal("CONT");
    let mut first = arena.servers.remove(0);
    let process = first.process.as_mut().unwrap();
    within(Duration::from_secs(20), "the first one ends itself", async || process.has_ended())
        .await;
    Struck::at(hit, None)
}

/// The second server's clock is ahead, and holds run by the database's.
async fn clocks_apart(arena: &mut Arena, ahead: &str) -> Struck {
    let serve = arena.servers[1].serve.clone();
    arena.servers[1].serve = serve
        .with_variable("LD_PRELOAD", faketime())
        .with_variable("FAKETIME", ahead)
        .with_variable("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    arena.serve_all().await;
    arena.warm_load().await;
    sleep(Duration::from_secs(5)).await;
    // The crash of the one whose clock is right makes the other settle what it took.
    arena.process(0).kill();
    let hit = Instant::now();
    sleep(Duration::from_secs(1)).await;
    arena.serve(0).await;
    Struck::at(hit, None)
}
