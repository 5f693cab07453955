//! Bytes change on the wire to Redis, in the middle of a sale. RESP has no checksum, so a changed
//! figure or id may be believed by Redis or by a server, and a buyer may be told something wrong:
//! that is what TLS is for. What holds all the same is what SQL decides.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future, stream};
use seckill::{api::pb::ReserveOutcome, config::SecretUrl};

use crate::support::{
    calls::{Shop, drained, win},
    databases::{self, Fresh},
    process::Serve,
    wire::Wire,
    within,
    world::{Ground, Sale},
};

const CLIENTS: usize = 16;
/// Fewer than there are buyers.
const UNITS: u64 = 300;
/// On average; a call and its reply have about a thousand bytes.
const ONE_IN: u64 = 20_000;
const CHANGES: u64 = 40;

/// Asks until somebody answers, and gives back what every fourth buyer won. Whatever the answers are:
/// they come, and none of them is a fault of ours.
async fn buy(shop: &Shop, nth: usize, answered: &AtomicUsize) {
    let buyer = format!("buyer-{nth}");
    let until = Instant::now() + Duration::from_secs(30);
    while Instant::now() < until {
        match shop.reserve(&buyer, "first").await {
            Ok(answer) => {
                answered.fetch_add(1, Ordering::Relaxed);
                if let Some(won) = win(&answer)
                    && nth.is_multiple_of(4)
                {
                    shop.release(&won).await.ok();
                }
                return;
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("{buyer} never had an answer");
}

async fn garbled(fresh: &Fresh) {
    let ground = Ground::redis(fresh).await;
    let world = ground.world().await;
    let key = world.open_sale(&Sale { total: UNITS, ..Sale::default() }).await;
    let redis = ground.redis.as_ref().unwrap();
    let wire = Wire::to(([127, 0, 0, 1], redis.port()).into()).await;
    let mut settings = ground.settings();
    settings.engine.url = SecretUrl::new(format!("redis://{}", wire.addr));
    let mut process = Serve::over(&settings).start().await;
    let shop = Shop::new(&key, process.channel().await);

    let seed = fastrand::u64(..);
    #[allow(clippy::print_stdout, reason = "shown when the test fails")]
    {
        println!("garbled with seed {seed}");
    }
    wire.garble(ONE_IN, seed);
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let buyers = stream::iter((0..).take_while(|_| !over.load(Ordering::Relaxed)))
        .map(|nth: usize| buy(&shop, nth, &answered))
        .buffer_unordered(CLIENTS)
        .collect::<Vec<()>>();
    let noise = async {
        within(Duration::from_secs(60), "bytes were changed", async || {
            (wire.garbled() >= CHANGES).then_some(())
        })
        .await;
        wire.mend();
        over.store(true, Ordering::Relaxed);
    };
    future::join(buyers, noise).await;
    assert!(answered.load(Ordering::Relaxed) > 100);

    // The wire is clean: one comparison says what is wrong, and mends it.
    let activity = &key.activity_id;
    within(Duration::from_secs(30), "everything agrees", async || {
        world.parts.reconciler.reconcile(activity, true, "test").await.ok()?;
        drained(process.channel().await, &key).await;
        let report = world.parts.reconciler.reconcile(activity, false, "test").await.ok()?;
        report.differences.is_empty().then_some(())
    })
    .await;
    // And what is left is sold to the unit.
    for nth in 0.. {
        let answer = shop.insist(&format!("late-{nth}"), "first").await;
        if answer.outcome() == ReserveOutcome::SoldOut {
            break;
        }
    }
    process.stop().await;
    world.assert_balanced(&key, i64::try_from(UNITS).unwrap()).await;
    world.close().await;
    let log = process.log();
    assert!(!log.contains("panicked"), "{log}");
}

mod a_sale_over_a_wire_that_changes_bytes_never_oversells_and_is_mended {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_sqlite() {
        databases::run(Fresh::sqlite().await, garbled).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn redis_postgres() {
        databases::run(Fresh::postgres().await, garbled).await;
    }
}
