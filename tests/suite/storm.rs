//! A whole sale at once, on every engine and database, while nothing goes wrong but the engine.

use std::{future, sync::atomic::Ordering};

use seckill::{domain::OfferKey, server::Server};

use crate::support::{
    storm::{self, Storm},
    world::{Ground, on_every_ground, on_every_redis},
};

/// On two cores a debug build takes some 10 to 25 seconds for them.
const CROWD: u32 = 20_000;

async fn serve(ground: &Ground<'_>, total: u64) -> (Server, OfferKey) {
    let server = storm::serve(ground.settings()).await;
    let key = storm::sell(&server, "storm", total).await;
    (server, key)
}

on_every_ground! {
    async fn a_crowd_of_buyers_gets_a_thousand_units(ground: &Ground<'_>) {
        const UNITS: u64 = 1_000;
        let (server, key) = serve(ground, UNITS).await;
        let storm = Storm::new(&key, UNITS, CROWD);
        storm.rage(&server, future::ready(())).await;
        assert_eq!(storm.undecided.load(Ordering::Relaxed), 0);
        storm.settle(&server).await;
        server.stop().await;
    }

}

on_every_redis! {
    async fn scripts_that_were_flushed_are_loaded_again_unseen(ground: &Ground<'_>, redis: &RedisServer) {
        let (server, key) = serve(ground, 200).await;
        let storm = Storm::new(&key, 200, 600);
        let flush = async {
            for buyers in [50, 100, 150, 300] {
                storm.answered(buyers).await;
                redis.command::<String>(&["SCRIPT", "FLUSH"]).await;
            }
        };
        storm.rage(&server, flush).await;
        assert_eq!(storm.undecided.load(Ordering::Relaxed), 0);
        assert_eq!(server.parts.recovery.rebuilds(), 0);
        storm.settle(&server).await;
        server.stop().await;
    }

    async fn a_flushed_engine_is_rebuilt_in_the_middle_of_the_sale(ground: &Ground<'_>, redis: &RedisServer) {
        let (server, key) = serve(ground, 400).await;
        let storm = Storm::new(&key, 400, 1_200);
        let flush = async {
            for buyers in [100, 300] {
                storm.answered(buyers).await;
                redis.command::<String>(&["FLUSHALL"]).await;
            }
        };
        storm.rage(&server, flush).await;
        assert!(server.parts.recovery.rebuilds() >= 1);
        storm.settle(&server).await;
        server.stop().await;
    }
}
