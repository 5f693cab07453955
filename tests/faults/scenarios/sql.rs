//! What happens to a database.

use std::time::Duration;

use futures_util::FutureExt as _;
use sea_orm::{ConnectionTrait, TransactionTrait};
use tokio::time::{Instant, sleep};

use super::{Scenario, Struck, scenario};
use crate::{
    arena::{Arena, Setup},
    stores::Sql,
    support::{databases, small_disk::SmallDisk, wire::AtCommit, within},
};

/// How long a database is away.
const AWAY: Duration = Duration::from_secs(4);
/// Of a disk that both databases fit on when they are empty.
const DISK_MIB: usize = 320;
/// By then every circuit is open.
const NOTICED: Duration = Duration::from_millis(3_200);

pub(super) fn all(usual: &dyn Fn() -> Setup) -> Vec<Scenario> {
    let on = &Sql::SERVERS;
    let small = Setup { disk_mib: Some(DISK_MIB), ..usual() };
    let mut all = vec![
        scenario("sql restarted", on, usual(), |a| restart(a, false).boxed_local()),
        scenario("sql kill -9", on, usual(), |a| restart(a, true).boxed_local()),
        scenario("sql away for 4 s", on, usual(), |a| away(a).boxed_local()),
        scenario("sql held by SIGSTOP 8 s", on, usual(), |a| hold(a).boxed_local()),
        scenario("sql black hole", on, usual(), |a| black_hole(a).boxed_local()),
        scenario("sql black hole 2 s", on, usual(), |a| short_hole(a).boxed_local()),
        scenario("sql wire cut", on, usual(), |a| cut(a).boxed_local()),
        scenario("sql wire cut, and redis forgets", on, usual(), |a| both(a).boxed_local()),
        scenario("sql slow by 200 ms", on, usual(), |a| slow(a).boxed_local()),
        scenario("sql rival lock on the offer", on, usual(), |a| rival_lock(a).boxed_local()),
        scenario("sql commit lost, request", on, usual(), |a| {
            cut_at_commit(a, AtCommit::LoseRequest).boxed_local()
        }),
        scenario("sql commit lost, reply", on, usual(), |a| {
            cut_at_commit(a, AtCommit::LoseReply).boxed_local()
        }),
        scenario("sql commit, then silence", on, usual(), |a| {
            cut_at_commit(a, AtCommit::SwallowReply).boxed_local()
        }),
        scenario("sql read-only", on, usual(), |a| read_only(a).boxed_local()),
    ];
    // A small disk is a mount.
    match SmallDisk::mount(1) {
        Some(_) => all.push(scenario("sql disk full", on, small, |a| fill_disk(a).boxed_local())),
        None => crate::progress("this user may mount nothing: `sql disk full` is left out"),
    }
    all
}

async fn restart(arena: &mut Arena, at_once: bool) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    {
        let mut server = arena.sql_server().await;
        match at_once {
            true => server.crash().await,
            false => server.stop().await,
        }
        server.run().await;
    }
    Struck::at(Instant::now(), arena.in_limbo().await)
}

async fn away(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_server().await.stop().await;
    let hit = Instant::now();
    sleep(AWAY).await;
    let away = Some((hit + NOTICED / 2, Instant::now()));
    arena.sql_server().await.run().await;
    let lifted = Instant::now();
    Struck { away, ..Struck::at(lifted, arena.in_limbo().await) }
}

async fn hold(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_server().await.hold();
    let hit = Instant::now();
    sleep(2 * AWAY).await;
    let lifted = Instant::now();
    arena.sql_server().await.let_go();
    Struck { away: Some((hit + NOTICED, lifted)), ..Struck::at(lifted, arena.in_limbo().await) }
}

async fn black_hole(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_wire().open_hole();
    let hit = Instant::now();
    sleep(AWAY).await;
    let in_limbo = arena.in_limbo().await;
    sleep(AWAY).await;
    let lifted = Instant::now();
    arena.sql_wire().mend();
    Struck { away: Some((hit + NOTICED, lifted)), ..Struck::at(lifted, in_limbo) }
}

/// Over before anybody gives the connections up; those who were connected hear nothing more.
async fn short_hole(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_wire().open_hole();
    sleep(AWAY / 2).await;
    arena.sql_wire().mend();
    Struck::at(Instant::now(), arena.in_limbo().await)
}

async fn cut(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_wire().cut();
    let hit = Instant::now();
    sleep(AWAY / 2).await;
    let in_limbo = arena.in_limbo().await;
    sleep(AWAY / 2).await;
    let lifted = Instant::now();
    arena.sql_wire().mend();
    Struck { away: Some((hit + NOTICED / 2, lifted)), ..Struck::at(lifted, in_limbo) }
}

/// What was in flight to the database is nowhere any more: whoever was told that it is theirs was
/// told so too early.
async fn both(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_wire().cut();
    sleep(AWAY / 4).await;
    let in_limbo = arena.in_limbo().await;
    arena.redis().command::<String>(&["FLUSHALL"]).await;
    arena.sql_wire().mend();
    Struck::at(Instant::now(), in_limbo)
}

async fn slow(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_wire().slow(Duration::from_millis(200));
    sleep(AWAY).await;
    let in_limbo = arena.in_limbo().await;
    arena.sql_wire().mend();
    Struck::at(Instant::now(), in_limbo)
}

/// Somebody at a console locks the offer's row and goes to lunch.
async fn rival_lock(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    let console = databases::admin(&arena.database().settings().url).await;
    let rival = console.begin().await.unwrap();
    rival.execute_unprepared("UPDATE offers SET sold = sold").await.unwrap();
    sleep(AWAY).await;
    let in_limbo = arena.in_limbo().await;
    rival.rollback().await.unwrap();
    Struck::at(Instant::now(), in_limbo)
}

async fn cut_at_commit(arena: &mut Arena, kind: AtCommit) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    // Silence holds whoever met it, so in the end both writers and the poller have met it.
    let times = if kind == AtCommit::SwallowReply { 4 } else { 5 };
    for nth in 1..=times {
        arena.sql_wire().trap(kind, 2);
        within(Duration::from_secs(20), "a COMMIT meets the trap", async || {
            (arena.sql_wire().trapped() >= nth).then_some(())
        })
        .await;
    }
    Struck::at(Instant::now(), arena.in_limbo().await)
}

/// What fits where there was room before is still written; the first that needs more fails.
async fn fill_disk(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    arena.sql_server().await.disk.as_ref().expect("it is on a small one").fill();
    within(Duration::from_secs(60), "something does not fit", async || {
        let failure = arena.crowd.last_failure()?;
        (failure.reason == "DATABASE_UNAVAILABLE").then_some(())
    })
    .await;
    sleep(AWAY).await;
    let in_limbo = arena.in_limbo().await;
    arena.sql_server().await.disk.as_ref().expect("it is on a small one").make_room();
    Struck::at(Instant::now(), in_limbo)
}

/// As after a failover to a standby: it answers, and takes nothing.
async fn read_only(arena: &mut Arena) -> Struck {
    arena.serve_all().await;
    arena.warm_load().await;
    let (on, off) = match arena.sql {
        Sql::Postgres => (
            "ALTER SYSTEM SET default_transaction_read_only = on",
            "ALTER SYSTEM SET default_transaction_read_only = off",
        ),
        Sql::MariaDb | Sql::Sqlite => ("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"),
    };
    let set = async |arena: &Arena, statement: &str| {
        let server = arena.sql_server().await;
        server.run_sql(statement).await;
        if server.sql == Sql::Postgres {
            server.run_sql("SELECT pg_reload_conf()").await;
        }
    };
    set(arena, on).await;
    let hit = Instant::now();
    sleep(AWAY).await;
    let in_limbo = arena.in_limbo().await;
    set(arena, off).await;
    let lifted = Instant::now();
    Struck { away: Some((hit + NOTICED / 2, lifted)), ..Struck::at(lifted, in_limbo) }
}
