//! What systems of this kind got wrong, where no other test is about it.

use sea_orm::EntityTrait;
use seckill::{
    domain::{OfferKey, ReserveOutcome, SkuId},
    engine::{Engine, EngineError, embedded::EmbeddedEngine, scripts},
    entity::orders,
};

use crate::support::{
    EXPIRE_TIME, Segment, answer, arg,
    redis_server::RedisServer,
    status,
    world::{Sale, on_every_ground, spec_of},
};

/// The units left, by `levels.lua`.
async fn stock(engine: &dyn Engine, segment: &Segment) -> seckill::engine::Value {
    let levels = segment.eval(engine, scripts::LEVELS, Vec::new()).await.unwrap();
    assert_eq!(status(&levels), "ok");
    levels
}

async fn takes_whole_quantities_only(engine: &dyn Engine) {
    let segment = Segment::of("activity", "sku");
    segment.warm_up(engine, 10).await;
    let before = stock(engine, &segment).await;
    for quantity in ["0", "-5", "1.5", "abc", "", "nan"] {
        let mut args = vec![arg(1), arg(1), arg(1_000), arg(0), arg(0)];
        args.extend([arg("buyer"), arg("id"), arg(quantity), arg("no")]);
        let refused = segment.eval(engine, scripts::RESERVE, args).await;
        assert!(matches!(refused, Err(EngineError::Script(_))), "{quantity:?}: {refused:?}");
        assert_eq!(stock(engine, &segment).await, before, "{quantity:?}");
    }
}

#[tokio::test]
async fn a_quantity_that_is_no_whole_number_is_refused_by_the_script_too() {
    takes_whole_quantities_only(&EmbeddedEngine::new()).await;
    takes_whole_quantities_only(&RedisServer::start().await.engine().await).await;
}

async fn sell_and_give_back(engine: &dyn Engine) {
    let segment = Segment::of("activity", "sku");
    segment.warm_up(engine, 10).await;
    for buyer in ["ann", "bob"] {
        assert_eq!(answer(&segment.reserve(engine, buyer).await.unwrap()), "taken");
    }
    assert_eq!(status(&segment.release(engine, "ann").await.unwrap()), "released");
}

#[tokio::test]
async fn every_key_of_an_offer_has_its_expiry_once_it_exists() {
    let embedded = EmbeddedEngine::new();
    sell_and_give_back(&embedded).await;
    let server = RedisServer::start().await;
    sell_and_give_back(&server.engine().await).await;
    for dump in [embedded.dump(), server.dump().await] {
        assert!(dump.len() >= 6, "{dump:?}");
        for (key, value) in dump {
            assert_eq!(value.expires_at, Some(EXPIRE_TIME), "{key}");
        }
    }
}

#[tokio::test]
async fn a_key_that_is_gone_is_not_made_again_by_reserve_or_release() {
    let server = RedisServer::start().await;
    let engine = server.engine().await;
    sell_and_give_back(&engine).await;
    let () = server.command(&["FLUSHALL"]).await;
    let segment = Segment::of("activity", "sku");
    assert_eq!(status(&segment.reserve(&engine, "eve").await.unwrap()), "not_warmed");
    assert_eq!(status(&segment.release(&engine, "bob").await.unwrap()), "retry");
    assert!(server.dump().await.is_empty());
}

on_every_ground! {
    async fn a_buyer_of_two_skus_of_one_activity_gets_both_orders(ground: &Ground<'_>) {
        let world = ground.world().await;
        let mut spec = spec_of(&Sale::default());
        let mut second = spec.offers[0].clone();
        second.sku_id = SkuId::new("sku-2").unwrap();
        spec.offers.push(second);
        let activity_id = spec.activity_id.clone();
        let activities = &world.parts.activities;
        activities.create(spec, "test").await.unwrap();
        activities.approve(&activity_id, "test", "").await.unwrap();
        activities.warm_up(&activity_id, "test").await.unwrap();
        let first = world.key("sale");
        let other = OfferKey { sku_id: SkuId::new("sku-2").unwrap(), ..first.clone() };
        for key in [&first, &other] {
            let outcome = world.reserve(key, "u1", "r1").await.unwrap();
            assert!(matches!(outcome, ReserveOutcome::Reserved { replayed: false, .. }));
        }
        world.assert_balanced(&first, 1).await;
        world.assert_balanced(&other, 1).await;
        let orders = orders::Entity::find().all(world.parts.database.reader()).await.unwrap();
        assert_eq!(orders.len(), 2, "{orders:?}");
    }
}
