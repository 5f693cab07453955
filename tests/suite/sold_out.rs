//! Sold out, answered from memory: to whom, for how long, and that it is never a lie for longer.

use std::time::{Duration, Instant};

use seckill::{
    admission::Admit,
    domain::{OfferKey, ReleaseOutcome, ReserveOutcome, ReserveRequest},
};

use crate::support::{
    eventually,
    process::Serve,
    world::{Ground, Sale, World, on_every_ground, on_every_redis, request},
};

const BELIEVED_FOR: Duration = Duration::from_millis(200);

/// A world whose servers refuse by themselves.
async fn world_that_knows(ground: &Ground<'_>) -> World {
    let mut settings = ground.settings();
    settings.reserve.believe_sold_out_ms = u64::try_from(BELIEVED_FOR.as_millis()).unwrap();
    ground.world_with(settings).await
}

/// What admission decides by itself about one unit.
fn refused_here(world: &World, request: &ReserveRequest) -> bool {
    let admit = world.parts.reservations.admit(request).unwrap();
    matches!(admit, Admit::No(ReserveOutcome::SoldOut))
}

/// Asks until this server knows that nothing is left.
async fn known(world: &World, key: &OfferKey) {
    eventually("it is known to be sold out", async || {
        let answer = world.reserve(key, "asker", "r1").await.unwrap();
        assert!(matches!(answer, ReserveOutcome::SoldOut), "{answer:?}");
        refused_here(world, &request(key, "asker", "r2", 1)).then_some(())
    })
    .await;
}

/// Sold out in so many segments, and then there is another epoch.
async fn ends_with_its_epoch(ground: &Ground<'_>, segments: u32) {
    let world = world_that_knows(ground).await;
    let key = world.open_sale(&Sale { total: 1, segments, ..Sale::default() }).await;
    world.win(&key, "u1", "r1").await;
    known(&world, &key).await;
    let offer = world.offer(&key).await;
    offer.adopt(offer.epoch() + 1);
    assert!(!refused_here(&world, &request(&key, "asker", "r2", 1)));
}

on_every_ground! {
    async fn a_storm_after_the_last_unit_does_not_reach_the_engine(ground: &Ground<'_>) {
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 2, ..Sale::default() }).await;
        world.win(&key, "u1", "r1").await;
        world.win(&key, "u2", "r1").await;
        known(&world, &key).await;
        let started = Instant::now();
        let mut asked = 0;
        for buyer in 0..10_000 {
            let request = request(&key, &format!("b{buyer}"), "r1", 1);
            if !refused_here(&world, &request) {
                asked += 1;
                let answer = world.reserve(&key, &format!("b{buyer}"), "r1").await.unwrap();
                assert!(matches!(answer, ReserveOutcome::SoldOut), "{answer:?}");
            }
        }
        // One in 50 ms.
        let most = 2 + started.elapsed().as_millis() / 50;
        assert!(asked <= most, "{asked} of 10,000 in {:?}", started.elapsed());
        world.assert_balanced(&key, 2).await;
    }

    async fn winners_and_whoever_gave_back_hear_the_truth(ground: &Ground<'_>) {
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 2, max_orders: 2, ..Sale::default() }).await;
        let first = world.win(&key, "u1", "r1").await;
        let gone = world.win(&key, "u2", "r1").await;
        let released = world.release(&key, "u2", &gone.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        world.win(&key, "u1", "r2").await;
        known(&world, &key).await;

        let again = world.win(&key, "u1", "r1").await;
        assert_eq!(again.reservation_id, first.reservation_id);
        let third = world.reserve(&key, "u1", "r3").await.unwrap();
        assert!(matches!(third, ReserveOutcome::Duplicate { .. }), "{third:?}");
        let gone = world.reserve(&key, "u2", "r1").await.unwrap();
        assert!(matches!(gone, ReserveOutcome::Released), "{gone:?}");
        let new = world.reserve(&key, "u2", "r2").await.unwrap();
        assert!(matches!(new, ReserveOutcome::SoldOut), "{new:?}");
        let mut repeated = request(&key, "u3", "r1", 1);
        repeated.is_repeat = true;
        known(&world, &key).await;
        assert!(!refused_here(&world, &repeated), "a repeat asks the engine");
        // Before what is left comes what is allowed.
        let many = world.reserve_units(&key, "u3", "r1", 11).await.unwrap();
        assert!(matches!(many, ReserveOutcome::QuantityLimit { .. }), "{many:?}");
        world.assert_balanced(&key, 2).await;
    }

    async fn a_release_reopens_it_here_at_once(ground: &Ground<'_>) {
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 1, ..Sale::default() }).await;
        let held = world.win(&key, "u1", "r1").await;
        known(&world, &key).await;
        world.release(&key, "u1", &held.reservation_id).await.unwrap();
        world.win(&key, "u2", "r1").await;
        known(&world, &key).await;
        let late = world.reserve(&key, "u1", "r2").await.unwrap();
        assert!(matches!(late, ReserveOutcome::SoldOut), "{late:?}");
        world.assert_balanced(&key, 1).await;
    }

    async fn a_reopening_that_nobody_tells_is_noticed_all_the_same(ground: &Ground<'_>) {
        // No worker runs here, so nobody hears a message.
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 1, ..Sale::default() }).await;
        let held = world.win(&key, "u1", "r1").await;
        known(&world, &key).await;
        let (other, _) = world.beside().await;
        other.release(&key, "u1", &held.reservation_id).await.unwrap();
        let released = Instant::now();
        let mut buyer = 0;
        loop {
            buyer += 1;
            let answer = world.reserve(&key, &format!("b{buyer}"), "r1").await.unwrap();
            match answer {
                ReserveOutcome::Reserved { .. } => break,
                ReserveOutcome::SoldOut => {}
                other => panic!("{other:?}"),
            }
            assert!(released.elapsed() < BELIEVED_FOR * 10, "it is still sold out here");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        world.assert_balanced(&key, 1).await;
    }

    async fn what_is_known_ends_with_its_epoch_before_any_message(ground: &Ground<'_>) {
        ends_with_its_epoch(ground, 1).await;
    }

    async fn what_is_known_of_segments_ends_with_their_epoch(ground: &Ground<'_>) {
        ends_with_its_epoch(ground, 3).await;
    }

    async fn what_is_known_of_an_old_epoch_is_dropped(ground: &Ground<'_>) {
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 1, ..Sale::default() }).await;
        world.win(&key, "u1", "r1").await;
        known(&world, &key).await;
        let offer = world.offer(&key).await;
        world.parts.recovery.rebuild_anyway(&offer, "operator").await.unwrap();
        eventually("it asks again", async || {
            world.reserve(&key, "u3", "r1").await.ok();
            (offer.segments.first().seen().epoch > 1).then_some(())
        })
        .await;
        known(&world, &key).await;
        let again = world.win(&key, "u1", "r1").await;
        assert_eq!(again.buyer.as_str(), "u1");
        world.assert_balanced(&key, 1).await;
    }
}

on_every_redis! {
    async fn a_release_reopens_it_on_every_server_within_250_ms(
        ground: &Ground<'_>, _redis: &RedisServer
    ) {
        let world = world_that_knows(ground).await;
        let key = world.open_sale(&Sale { total: 1, max_orders: 1, ..Sale::default() }).await;
        let serve = Serve::over(&ground.settings());
        let servers = [serve.start().await, serve.start().await, serve.start().await];
        let mut clients = Vec::new();
        for server in &servers {
            clients.push(crate::support::calls::Shop::new(&key, server.channel().await));
        }
        let mut held = world.win(&key, "u0", "r").await;
        let mut waits = Vec::new();
        for round in 1..=12 {
            for client in &clients {
                // Until it is known there: most answers cost the engine nothing then.
                for ask in 0..20 {
                    let answer = client.insist("asker", &format!("r{round}-{ask}")).await;
                    assert_eq!(answer.outcome(), seckill::api::pb::ReserveOutcome::SoldOut);
                }
            }
            world.release(&key, held.buyer.as_str(), &held.reservation_id).await.unwrap();
            let released = Instant::now();
            let (buyer, client) = (format!("u{round}"), &clients[round % clients.len()]);
            let won = eventually("the unit is sold again", async || {
                let answer = client.reserve(&buyer, "r").await.unwrap();
                crate::support::calls::win(&answer)
            })
            .await;
            waits.push(released.elapsed());
            held = world.win(&key, &buyer, "r").await;
            assert_eq!(held.reservation_id.as_str(), won.reservation_id);
        }
        // Beside other tests a server may not run at all for that long, but not most of the time.
        waits.sort();
        assert!(waits[waits.len() / 2] < Duration::from_millis(250), "{waits:?}");
        for mut server in servers {
            server.stop().await;
        }
        world.assert_balanced(&key, 1).await;
    }
}
