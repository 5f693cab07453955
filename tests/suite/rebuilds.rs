//! Rebuilds among several servers, and rebuilds that must not happen.

use std::{sync::Arc, time::Duration};

use sea_orm::{
    ActiveModelTrait,
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, EntityTrait, QueryFilter,
};
use seckill::{
    config::SecretUrl,
    database::insert_ignore,
    domain::{
        ReleaseOutcome, ReservationId, ReservationQuery, ReserveOutcome, TimeMs, name_reservation,
    },
    engine::batcher::Caller,
    entity::outbox,
    error::Error,
    server::Parts,
};
use tokio::{task::JoinSet, time::Instant};

use crate::support::{
    databases::{self, Fresh},
    eventually,
    world::{Ground, Sale, World, on_every_ground, on_every_redis, request},
};

/// Buyers who ask two servers until each has an answer that is no UNAVAILABLE.
async fn ask_both(worlds: &[Arc<World>], buyers: u32) -> u32 {
    let mut asks = JoinSet::new();
    let key = worlds[0].key("sale");
    for buyer in 0..buyers {
        let world = worlds[buyer as usize % worlds.len()].clone();
        let key = key.clone();
        asks.spawn(async move {
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                let request = request(&key, &format!("u{buyer}"), "r", 1);
                match world.parts.reservations.reserve(request, Caller::default()).await {
                    Ok(outcome) => return matches!(outcome, ReserveOutcome::Reserved { .. }),
                    Err(error) => assert!(Instant::now() < deadline, "u{buyer}: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    let mut won = 0;
    while let Some(ask) = asks.join_next().await {
        won += u32::from(ask.unwrap());
    }
    won
}

/// Adds so many rows like this one, of other buyers, as if they had been orders for long.
async fn copy_row(world: &World, id: &ReservationId, copies: i64) {
    let query = outbox::Entity::find().filter(outbox::Column::ReservationId.eq(id.as_str()));
    let row = query.one(world.parts.database.reader()).await.unwrap().unwrap();
    let rows = (0..copies).map(|nth| {
        let mut copy = outbox::ActiveModel::from(row.clone()).reset_all();
        copy.id = NotSet;
        copy.reservation_id = Set(format!("copy-{nth}"));
        copy.user_id = Set(format!("copy-{nth}"));
        copy
    });
    let transaction = world.parts.database.begin().await.unwrap();
    insert_ignore(&transaction, rows.collect()).await.unwrap();
    transaction.commit().await.unwrap();
    let (activity, sku) = (&row.activity_id, &row.sku_id);
    let sql = format!(
        "UPDATE offers SET reserved = reserved + {copies}, sold = sold + {copies} \
         WHERE activity_id = '{activity}' AND sku_id = '{sku}'"
    );
    world.parts.database.writer().execute_unprepared(&sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_do_not_undo_each_others_rebuilds() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let ground = Ground::redis(fresh).await;
        let worlds = [Arc::new(ground.world().await), Arc::new(ground.world().await)];
        let key = worlds[0].open_sale(&Sale { total: 150, ..Sale::default() }).await;
        worlds[1].parts.catalog.refresh().await.unwrap();
        assert_eq!(ask_both(&worlds, 100).await, 100);
        let redis = ground.redis.as_ref().unwrap();
        redis.command::<()>(&["FLUSHALL"]).await;
        // The first hundred again, who all have won, and a hundred more.
        assert_eq!(ask_both(&worlds, 200).await, 150);
        let rebuilds: u64 = worlds.iter().map(|world| world.parts.recovery.rebuilds()).sum();
        assert!((1..=2).contains(&rebuilds), "{rebuilds} rebuilds after one loss");
        worlds[0].assert_balanced(&key, 150).await;
    })
    .await;
}

on_every_redis! {
    async fn two_engines_that_both_believe_to_be_the_master_never_oversell(
        ground: &Ground<'_>, _redis: &RedisServer
    ) {
        let first = ground.world().await;
        let key = first.open_sale(&Sale { total: 30, ..Sale::default() }).await;
        // A split brain: the second server sees another master, which knows nothing.
        let other = RedisServer::start_with_aof().await;
        let mut settings = ground.settings();
        settings.engine.url = SecretUrl::new(other.url());
        let parts = Parts::open(&settings).await.unwrap();
        let worlds = [Arc::new(first), Arc::new(World { parts, settings })];
        let mut buyers = JoinSet::new();
        for buyer in 0..80 {
            let (world, key) = (worlds[buyer % 2].clone(), key.clone());
            buyers.spawn(async move {
                for _ in 0..10 {
                    let asked = world.reserve(&key, &format!("u{buyer}"), "r").await;
                    if let Ok(outcome) = asked {
                        return matches!(outcome, ReserveOutcome::Reserved { .. });
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                false
            });
        }
        let mut won = 0;
        while let Some(buyer) = buyers.join_next().await {
            won += i64::from(buyer.unwrap());
        }
        assert!((1..=30).contains(&won), "{won} of 30 units");
        // The first master is gone for good; the other has all that SQL has.
        let [first, second] = worlds;
        Arc::into_inner(first).unwrap().close().await;
        for buyer in 100..140 {
            let bought = eventually("an answer", async || {
                second.reserve(&key, &format!("u{buyer}"), "r").await.ok()
            });
            bought.await;
        }
        second.assert_balanced(&key, 30).await;
    }
}

on_every_ground! {
    async fn what_the_engine_forgot_for_good_is_not_rebuilt(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let held = world.win(&key, "u1", "r1").await;
        world.assert_balanced(&key, 1).await;
        let epoch = world.offer(&key).await.epoch();
        // The end and the retention are over.
        let past = TimeMs::now().minus(Duration::from_secs(7_200)).0;
        let sql = format!("UPDATE activities SET start_time = {past} - 1, end_time = {past}, version = 99");
        world.parts.database.writer().execute_unprepared(&sql).await.unwrap();
        world.parts.catalog.refresh().await.unwrap();
        assert!(world.offer(&key).await.is_forgotten());

        let unknown = ReservationId::new("never").unwrap();
        let outcome = world.release(&key, "u1", &unknown).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::NotReserved);
        let asked = request(&key, "u9", "r9", 1);
        let query = ReservationQuery::ByRequest {
            offer: key.clone(),
            buyer: asked.buyer.clone(),
            request_id: asked.request_id.clone().unwrap(),
        };
        let found = world.parts.reservations.get(query).await;
        assert!(matches!(found, Err(Error::UnknownReservation)), "{found:?}");
        // What is in SQL can still be given back.
        let outcome = world.release(&key, "u1", &held.reservation_id).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::Released);
        assert_eq!(world.offer(&key).await.epoch(), epoch);
        assert_eq!(world.parts.recovery.rebuilds(), 0);
    }

    async fn units_that_sql_would_refuse_are_not_put_on_sale_again(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 5, ..Sale::default() }).await;
        world.win(&key, "u1", "r1").await;
        // A counter that somebody mended by hand, and wrongly.
        let sql = "UPDATE offers SET reserved = 4";
        world.parts.database.writer().execute_unprepared(sql).await.unwrap();
        let offer = world.offer(&key).await;
        offer.segments.first().scripts.freeze(offer.epoch(), "test").await.unwrap();
        world.parts.recovery.rebuild_now(&offer).await.unwrap();
        let levels = offer.levels().await.unwrap().unwrap();
        assert_eq!(levels.stock, 1);
        world.win(&key, "u2", "r1").await;
        let outcome = world.reserve(&key, "u3", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        assert_eq!(world.parts.recovery.rebuilds(), 1);
    }

    async fn a_long_rebuild_holds_up_nobody_else(ground: &Ground<'_>) {
        let world = ground.world().await;
        let long = Sale { activity: "long", total: 3_000, ..Sale::default() };
        let long = world.open_sale(&long).await;
        let held = world.win(&long, "u1", "r1").await;
        let short = world.open_sale(&Sale { activity: "short", ..Sale::default() }).await;
        world.poll().await;
        copy_row(&world, &held.reservation_id, 2_500).await;
        let (rebuilder, gate) = world.beside().await;
        let offer = rebuilder.offer(&long).await;
        offer.segments.first().scripts.freeze(offer.epoch(), "test").await.unwrap();

        let mut first = gate.stop_before("rebuild_load");
        let mut second = gate.stop_before("rebuild_load");
        let (rebuilt, ()) = tokio::join!(rebuilder.parts.recovery.rebuild_now(&offer), async {
            first.reached().await;
            first.go();
            second.reached().await;
            // In the middle of the load everybody else sells, orders, and is answered.
            let other = world.win(&short, "u1", "r1").await;
            world.poll().await;
            let outcome = world.release(&short, "u1", &other.reservation_id).await.unwrap();
            assert_eq!(outcome, ReleaseOutcome::Released);
            let frozen = world.reserve(&long, "u9", "r1").await;
            assert!(matches!(frozen, Err(Error::OfferFrozen(_))), "{frozen:?}");
            let frozen = world.release(&long, "u1", &held.reservation_id).await;
            assert!(matches!(frozen, Err(Error::OfferFrozen(_))), "{frozen:?}");
            second.go();
        });
        rebuilt.unwrap();
        let levels = offer.levels().await.unwrap().unwrap();
        assert_eq!((levels.reservations, levels.held, levels.stock), (2_501, 2_501, 499));
        world.poll().await;
        let levels = offer.levels().await.unwrap().unwrap();
        assert_eq!((levels.held, levels.stock), (2_500, 500), "the release is finished afterwards");
        world.assert_balanced(&short, 0).await;
    }

    async fn a_release_between_the_raised_epoch_and_its_page_counts_once(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 3, ..Sale::default() }).await;
        let first = world.win(&key, "u1", "r1").await;
        world.win(&key, "u2", "r1").await;
        let (rebuilder, gate) = world.beside().await;
        let offer = rebuilder.offer(&key).await;
        offer.segments.first().scripts.freeze(offer.epoch(), "test").await.unwrap();
        // The epoch is raised and the counter read; no row is.
        let mut stop = gate.stop_before("rebuild_begin");
        let (rebuilt, ()) = tokio::join!(rebuilder.parts.recovery.rebuild_now(&offer), async {
            stop.reached().await;
            let refused = world.release(&key, "u1", &first.reservation_id).await;
            assert!(matches!(refused, Err(Error::OfferFrozen(_))), "{refused:?}");
            stop.go();
        });
        rebuilt.unwrap();
        let levels = offer.levels().await.unwrap().unwrap();
        assert_eq!((levels.stock, levels.held), (2, 1));
        world.assert_balanced(&key, 1).await;
    }

    async fn a_release_of_what_is_in_flight_is_answered_released_once(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let offer = world.offer(&key).await;
        let asked = request(&key, "u1", "r1", 1);
        let id = name_reservation(&key, &asked.buyer, asked.request_id.as_ref());
        let take = seckill::engine::scripts::Take {
            buyer: asked.buyer.clone(),
            reservation_id: id.clone(),
            quantity: 1,
            order_no: seckill::domain::new_order_no(),
            again: false,
        };
        offer.segments.first().take(take, Caller::default()).await.unwrap();
        assert_eq!(world.release(&key, "u1", &id).await.unwrap(), ReleaseOutcome::Released);
        assert_eq!(world.release(&key, "u1", &id).await.unwrap(), ReleaseOutcome::AlreadyReleased);
        let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::Released);
        world.assert_balanced(&key, 0).await;
    }
}
