//! Locks: one holder at a time, renewed, given back; and nothing breaks when one is stolen.

use std::{sync::Arc, time::Duration};

use seckill::engine::{
    Call, Engine, Script,
    embedded::EmbeddedEngine,
    keys,
    locks::{LEASE, Locks},
};
use tokio_util::task::TaskTracker;

use crate::support::{
    eventually,
    redis_server::RedisServer,
    world::{Sale, on_every_ground},
};

const STEAL: Script =
    Script { name: "steal", source: "return redis.call('SET', KEYS[1], 'a thief', 'PX', 60000)" };
const DROP: Script = Script { name: "drop", source: "return redis.call('DEL', KEYS[1])" };

async fn run(engine: &dyn Engine, name: &str, script: Script) {
    let call = Call { script, keys: keys::lock(name), args: Vec::new() };
    engine.eval(call).await.unwrap();
}

async fn on_both_engines(test: impl AsyncFn(Arc<dyn Engine>, Locks)) {
    let server = RedisServer::start().await;
    for engine in
        [Arc::new(EmbeddedEngine::new()) as Arc<dyn Engine>, Arc::new(server.engine().await)]
    {
        let locks = Locks::new(engine.clone(), TaskTracker::new());
        test(engine, locks).await;
    }
}

#[tokio::test]
async fn a_lock_has_one_holder_at_a_time_and_rising_tokens() {
    on_both_engines(async |_, locks| {
        let first = locks.acquire("a", Duration::ZERO).await.unwrap().unwrap();
        assert!(locks.acquire("a", Duration::from_millis(50)).await.unwrap().is_none());
        let other = locks.acquire("b", Duration::ZERO).await.unwrap();
        assert!(other.is_some(), "another name is another lock");
        let token = first.token();
        drop(first);
        let second = locks.acquire("a", Duration::from_secs(2)).await.unwrap().unwrap();
        assert!(second.token() > token);
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_renewed_for_as_long_as_it_is_held() {
    on_both_engines(async |_, locks| {
        let lock = locks.acquire("a", Duration::ZERO).await.unwrap().unwrap();
        tokio::time::sleep(LEASE + Duration::from_millis(500)).await;
        assert!(!lock.is_lost());
        assert!(locks.acquire("a", Duration::ZERO).await.unwrap().is_none());
    })
    .await;
}

#[tokio::test]
async fn a_lock_of_a_dead_holder_ends_with_its_lease() {
    on_both_engines(async |engine, locks| {
        let lock = locks.acquire("a", Duration::ZERO).await.unwrap().unwrap();
        // Its watchdog dies with the process.
        std::mem::forget(lock);
        run(&*engine, "a", DROP).await;
        assert!(locks.acquire("a", Duration::ZERO).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test]
async fn an_engine_that_is_full_keeps_no_lock_and_holds_up_nobody() {
    let server = RedisServer::start().await;
    let engine: Arc<dyn Engine> = Arc::new(server.engine().await);
    let locks = Locks::new(engine, TaskTracker::new());
    let () = server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    for _ in 0..2 {
        let lock = locks.acquire("a", Duration::ZERO).await.unwrap().unwrap();
        assert_eq!((lock.token(), lock.is_lost()), (None, true));
    }
}

#[tokio::test]
async fn a_stolen_lock_is_noticed_and_the_thief_keeps_it() {
    on_both_engines(async |engine, locks| {
        let lock = locks.acquire("a", Duration::ZERO).await.unwrap().unwrap();
        run(&*engine, "a", STEAL).await;
        eventually("the loss is noticed", async || lock.is_lost().then_some(())).await;
        // Giving it back gives back nothing of the thief's.
        drop(lock);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(locks.acquire("a", Duration::ZERO).await.unwrap().is_none());
    })
    .await;
}

on_every_ground! {
    async fn whoever_loses_the_lock_in_the_middle_does_no_harm(ground: &Ground<'_>) {
        let world = Arc::new(ground.world().await);
        let sale = Sale { total: 50, max_orders: 3, ..Sale::default() };
        let key = world.open_sale(&sale).await;
        for buyer in 0..20 {
            let held = world.win(&key, &format!("u{buyer}"), "r").await;
            if buyer % 4 == 0 {
                world.release(&key, &format!("u{buyer}"), &held.reservation_id).await.unwrap();
            }
        }
        world.poll().await;
        // Every lock is dropped again and again while two of each are at work.
        let names = ["rebuild:sale/sku-1", "reconcile:sale", "settle:sale", "warm_up:sale"];
        let engine = world.parts.engine.clone();
        let thief = tokio::spawn(async move {
            loop {
                for name in names {
                    run(&*engine, name, DROP).await;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        let offer = world.offer(&key).await;
        for _ in 0..5 {
            let recovery = &world.parts.recovery;
            let reconciler = &world.parts.reconciler;
            let activities = &world.parts.activities;
            let (a, b, c, d, e) = tokio::join!(
                recovery.rebuild_anyway(&offer, "test"),
                recovery.rebuild_anyway(&offer, "test"),
                reconciler.reconcile(&key.activity_id, true, "test"),
                reconciler.reconcile(&key.activity_id, true, "test"),
                activities.warm_up(&key.activity_id, "test"),
            );
            // Frozen for a moment is what a rebuild looks like from outside.
            for outcome in [a, b, c.map(drop), d.map(drop), e.map(drop)] {
                let passing = outcome.as_ref().map_or_else(|e| e.retry_after().is_some(), |()| true);
                assert!(passing, "{outcome:?}");
            }
            world.healthy(&key).await;
        }
        world.assert_balanced(&key, 15).await;
        world.parts.activities.end(&key.activity_id, "test", "").await.unwrap();
        let (a, b) = tokio::join!(
            world.parts.activities.settle(&key.activity_id, "test", ""),
            world.parts.activities.settle(&key.activity_id, "test", ""),
        );
        thief.abort();
        assert_eq!(usize::from(a.is_ok()) + usize::from(b.is_ok()), 1, "{a:?} {b:?}");
    }
}
