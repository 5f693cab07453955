//! A master that Sentinels watch as the engine: failovers in the middle of a sale, and the books
//! balance.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future};
use seckill::engine::{
    Engine, EngineError,
    events::Heard,
    redis::{Level, OpenError, RedisEngine, RedisSettings},
};

use crate::support::{
    Segment, answer,
    databases::{self, Fresh},
    eventually, identity,
    sentinels::Guarded,
    status,
    storm::{self, Storm},
    within,
    world::Ground,
};

const UNITS: u64 = 300;
const BUYERS: u32 = 900;

async fn open(fresh: &Fresh, guarded: &Guarded) -> (seckill::server::Server, Arc<Storm>) {
    let mut settings = Ground::embedded(fresh).settings();
    guarded.set(&mut settings);
    let server = storm::serve(settings).await;
    let key = storm::sell(&server, "guarded", UNITS).await;
    (server, Storm::new(&key, UNITS, BUYERS))
}

async fn a_planned_failover_and_a_death(fresh: &Fresh) {
    let mut guarded = Guarded::start().await;
    let (server, storm) = open(fresh, &guarded).await;
    storm.let_in(150);
    let meddle = async {
        storm.answered(100).await;
        storm.let_in(400);
        guarded.fail_over().await;
        guarded.leads(1).await;
        eventually("the server has found the new master", async || {
            (server.parts.recovery.rebuilds() > 0).then_some(())
        })
        .await;
        storm.let_in(600);
        storm.answered(450).await;
        // The Sentinels do that too, ten seconds later.
        guarded.servers[0].follow(&guarded.servers[1]).await;
        storm.let_in(BUYERS);
        guarded.servers[1].kill();
        guarded.leads(0).await;
    };
    storm.rage(&server, meddle).await;
    let rebuilds = server.parts.recovery.rebuilds();
    assert!(rebuilds >= 2, "{rebuilds} rebuilds after two failovers");
    storm.settle(&server).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_goes_on_through_a_planned_failover_and_the_death_of_a_master() {
    databases::run(Fresh::postgres().await, a_planned_failover_and_a_death).await;
}

async fn a_replica_lags(fresh: &Fresh) {
    let mut guarded = Guarded::start().await;
    let (server, storm) = open(fresh, &guarded).await;
    storm.let_in(150);
    let meddle = async {
        storm.answered(100).await;
        guarded.servers[0].leave_replicas_behind().await;
        storm.let_in(300);
        storm.answered(250).await;
        storm.let_in(BUYERS);
        guarded.servers[0].kill();
        guarded.leads(1).await;
    };
    storm.rage(&server, meddle).await;
    assert!(server.parts.recovery.rebuilds() >= 1);
    storm.settle(&server).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_goes_on_when_a_replica_that_lags_is_made_the_master() {
    databases::run(Fresh::mysql().await, a_replica_lags).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_was_demoted_is_left_at_once_and_nothing_is_written_there() {
    let guarded = Guarded::start().await;
    let settings = guarded.redis_settings();
    let findings = RedisEngine::check(&settings).await.unwrap();
    assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:?}");
    let engine = RedisEngine::connect(&settings).await.unwrap();
    assert!(!format!("{engine:?}").contains("horse"), "no password is shown");
    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    let before = identity(&engine).await.unwrap();
    let mut ear = engine.hear();
    assert_eq!(ear.next().await, Some(Heard::Gap));

    // As somebody does by hand: the Sentinels know nothing yet, and still name this one.
    let (old, new) = (&guarded.servers[0], &guarded.servers[1]);
    old.command::<()>(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]).await;
    let refused = segment.reserve(&engine, "ann").await.unwrap_err();
    assert!(
        matches!(&refused, EngineError::NotRun(text) if text.contains("READONLY")),
        "{refused}"
    );
    assert!(old.errors("READONLY").await > 0);
    let refused = engine.probe().await.unwrap_err();
    assert!(refused.to_string().contains("replica"), "{refused}");

    // Once they name another one, it is found without a restart; the ear has moved along.
    old.promote().await;
    guarded.fail_over().await;
    guarded.leads(1).await;
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    let after = identity(&engine).await.unwrap();
    assert_ne!(before, after);
    let info: String = new.command(&["INFO", "server"]).await;
    assert!(info.contains(after.split('/').next().unwrap()), "it is the one that they name");
    assert_eq!(ear.next().await, Some(Heard::Gap));
    let reply = segment.reserve(&engine, "ann").await.unwrap();
    assert!(["frozen", "not_warmed"].contains(&status(&reply).as_str()), "{reply:?}");
}

/// How long until an engine that nobody probes has a new master, once the Sentinels have one.
async fn noticed(guarded: &Guarded, engine: &RedisEngine, to: usize) -> Duration {
    let before = identity(engine).await.unwrap();
    let mut last = None;
    guarded.fail_over().await;
    within(Duration::from_secs(20), "the engine has the new master", async || {
        // Only reads, so that the old one refuses nothing and nobody is made to look around.
        let found = identity(engine).await;
        let leads = guarded.is_named(to).await;
        let since = leads.then(|| *last.get_or_insert_with(Instant::now))?;
        found.is_ok_and(|found| found != before).then(|| since.elapsed())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_noticed_when_the_sentinels_tell_of_it_and_not_by_a_call_that_fails() {
    let mut guarded = Guarded::start().await;
    let engine = RedisEngine::connect(&guarded.redis_settings()).await.unwrap();
    for sentinel in &guarded.sentinels {
        eventually("somebody listens", async || {
            guarded.is_listened_to(sentinel).await.then_some(())
        })
        .await;
    }
    let took = noticed(&guarded, &engine, 1).await;
    assert!(took < Duration::from_millis(500), "{took:?}");
    // The Sentinels tell it to the engine, which tells whoever probes.
    eventually("a probe is wanted", async || {
        tokio::time::timeout(Duration::ZERO, engine.stirred()).await.ok()
    })
    .await;

    // A listener that lost its Sentinel comes back to it.
    guarded.sentinels[2].kill();
    guarded.sentinels[2].start_again().await;
    eventually("it listens again", async || {
        guarded.is_listened_to(&guarded.sentinels[2]).await.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_nobody_told_of_is_noticed_by_asking() {
    let guarded = Guarded::start().await;
    for sentinel in &guarded.sentinels {
        sentinel.command::<()>(&["ACL", "SETUSER", "scout", "-subscribe"]).await;
    }
    let engine = RedisEngine::connect(&guarded.redis_settings()).await.unwrap();
    let before = identity(&engine).await.unwrap();
    guarded.fail_over().await;
    guarded.leads(1).await;
    assert_eq!(identity(&engine).await.unwrap(), before, "nobody has told it");
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    assert_ne!(identity(&engine).await.unwrap(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_are_away_stop_no_sale_and_a_start_says_what_is_wrong() {
    let mut guarded = Guarded::start().await;
    let settings = guarded.redis_settings();
    let engine = RedisEngine::connect(&settings).await.unwrap();
    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    let other = |change: fn(&mut RedisSettings)| {
        let mut settings = settings.clone();
        change(&mut settings);
        async move { RedisEngine::connect(&settings).await.unwrap_err() }
    };
    let (unknown, wrong, nobody) = future::join3(
        other(|s| s.url = s.url.replace("/shop", "/stop")),
        other(|s| s.sentinel_password = "wooden-horse".to_owned()),
        other(|s| s.url = s.url.replace("brass", "tin")),
    )
    .await;
    for (error, why) in [(unknown, "no master stop"), (wrong, "WRONGPASS"), (nobody, "WRONGPASS")] {
        assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert!(!format!("{error} {error:?}").contains("horse"), "{error:?}");
    }

    guarded.sentinels[0].kill();
    let findings = RedisEngine::check(&settings).await.unwrap();
    let warnings = findings.iter().filter(|finding| finding.level == Level::Warning).count();
    assert_eq!(warnings, 1, "{findings:?}");
    guarded.sentinels[1].kill();
    guarded.sentinels[2].kill();
    engine.probe().await.unwrap();
    assert_eq!(answer(&segment.reserve(&engine, "ann").await.unwrap()), "taken");
    let error = RedisEngine::connect(&settings).await.unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
}
