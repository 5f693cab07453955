//! Reconcile: each kind of difference is found, named and, where SQL can decide it, mended; and
//! what is merely on its way is none.

use std::{sync::Arc, time::Duration};

use sea_orm::ConnectionTrait;
use seckill::{
    domain::{
        ActivityId, DifferenceKind, OfferKey, PageQuery, ReconcileReport, ReleaseOutcome,
        ReserveOutcome,
    },
    engine::{Call, Script},
    error::Error,
};
use tokio::task::JoinSet;

use crate::support::{
    arg,
    world::{Sale, World, on_every_ground},
};

/// Runs any one command on the segment's keys, as somebody with a console might.
const VANDAL: Script = Script { name: "vandal", source: "return redis.call(unpack(ARGV, 2))" };

async fn vandalise(world: &World, key: &OfferKey, words: &[&str]) {
    let keys = seckill::engine::keys::segment(key, 0);
    let args = words.iter().map(|word| arg(keys_in(&keys, word))).collect();
    world.parts.engine.eval(Call { script: VANDAL, keys, args }).await.unwrap();
}

/// `@stock` stands for the key of that name.
fn keys_in(keys: &[String], word: &str) -> String {
    match word.strip_prefix('@') {
        Some(part) => keys.iter().find(|key| key.ends_with(&format!(":{part}"))).unwrap().clone(),
        None => word.to_owned(),
    }
}

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

async fn compare(world: &World, key: &OfferKey) -> ReconcileReport {
    world.parts.reconciler.reconcile(&key.activity_id, false, "test").await.unwrap()
}

async fn repair(world: &World, key: &OfferKey) -> ReconcileReport {
    world.parts.reconciler.reconcile(&key.activity_id, true, "test").await.unwrap()
}

fn kinds(report: &ReconcileReport) -> Vec<DifferenceKind> {
    report.differences.iter().map(|difference| difference.kind).collect()
}

/// Three orders and one reservation that the poller has not seen.
async fn a_sale(world: &World) -> OfferKey {
    let key = world.open_sale(&Sale::default()).await;
    for buyer in ["u1", "u2", "u3"] {
        world.win(&key, buyer, "r").await;
    }
    world.assert_balanced(&key, 3).await;
    key
}

/// The difference is found and named; a dry run changes nothing; a repair mends it.
async fn assert_found_and_mended(
    world: &World,
    key: &OfferKey,
    expected: &[DifferenceKind],
    named: &[&str],
) {
    for _ in 0..2 {
        let report = compare(world, key).await;
        assert_eq!(kinds(&report), expected, "{report:?}");
        assert_eq!(report.difference_count, expected.len() as u64);
        assert!(report.differences.iter().all(|difference| !difference.repaired));
        assert_eq!(report.differences[0].reservation_ids, named, "{report:?}");
    }
    let report = repair(world, key).await;
    assert_eq!(kinds(&report), expected, "{report:?}");
    assert!(report.differences.iter().all(|difference| difference.repaired), "{report:?}");
    let after = compare(world, key).await;
    assert_eq!(kinds(&after), [], "{after:?}");
}

on_every_ground! {
    async fn a_sale_that_agrees_has_no_difference_and_shows_its_figures(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        world.win(&key, "u4", "r").await;
        let report = compare(&world, &key).await;
        assert_eq!(kinds(&report), []);
        assert_eq!((report.pending, report.releasing, report.dead), (1, 0, 0));
        let figures = &report.offers[0];
        assert_eq!((figures.total, figures.recorded, figures.ordered), (10, 4, 3));
        let segment = figures.segments[0];
        assert_eq!((segment.remaining, segment.in_transfer, segment.held), (6, 0, 4));
        let query = PageQuery { page_size: 10, page_token: String::new(), activity_id: None };
        let (audit, _) = seckill::audit::list(&world.parts.database, &query).await.unwrap();
        assert_eq!(audit[0].action, "reconcile");
        assert!(audit[0].detail.contains("\"recorded\":4"), "{}", audit[0].detail);
    }

    async fn what_is_merely_on_its_way_is_no_difference(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        // Taken and nowhere in SQL: its server died.
        world.take(&key, "u9", "r").await;
        // Given back in SQL only.
        sql(&world, "UPDATE outbox SET state = 'releasing', slot = NULL WHERE user_id = 'u1'").await;
        sql(&world, "UPDATE orders SET state = 'cancelled', slot = NULL WHERE user_id = 'u1'").await;
        sql(&world, "UPDATE offers SET reserved = reserved - 1, sold = sold - 1").await;
        let report = compare(&world, &key).await;
        assert_eq!(kinds(&report), [], "{report:?}");
        assert_eq!((report.unacked, report.releasing), (1, 1));
        world.assert_balanced(&key, 3).await;
    }

    async fn a_reservation_that_only_the_engine_has_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        vandalise(&world, &key, &["HSET", "@reservations", "ghost", "r-ghost 2 order-9 1000 0"]).await;
        vandalise(&world, &key, &["SADD", "@buyers", "ghost"]).await;
        vandalise(&world, &key, &["DECRBY", "@stock", "2"]).await;
        vandalise(&world, &key, &["HINCRBY", "@meta", "held", "2"]).await;
        let expected = [DifferenceKind::TakenNotRecorded];
        assert_found_and_mended(&world, &key, &expected, &["r-ghost"]).await;
        world.assert_balanced(&key, 3).await;
    }

    async fn a_reservation_that_the_engine_has_lost_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let id = world.win(&key, "u4", "r").await.reservation_id;
        vandalise(&world, &key, &["HDEL", "@reservations", "u4"]).await;
        vandalise(&world, &key, &["SREM", "@buyers", "u4"]).await;
        vandalise(&world, &key, &["ZREM", "@unacked", "u4"]).await;
        let expected = [DifferenceKind::RecordedNotTaken];
        assert_found_and_mended(&world, &key, &expected, &[id.as_str()]).await;
        world.assert_balanced(&key, 4).await;
        // And it is its buyer's as before.
        let outcome = world.reserve(&key, "u4", "r").await.unwrap();
        assert!(matches!(outcome, ReserveOutcome::Reserved { replayed: true, .. }), "{outcome:?}");
    }

    async fn a_reservation_of_another_quantity_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let held = world.win(&key, "u4", "r").await;
        world.assert_balanced(&key, 4).await;
        let record = format!("{} 3 {} 1000 0", held.reservation_id, held.order_no);
        vandalise(&world, &key, &["HSET", "@reservations", "u4", &record]).await;
        let expected = [DifferenceKind::RecordedNotTaken];
        assert_found_and_mended(&world, &key, &expected, &[held.reservation_id.as_str()]).await;
        world.assert_balanced(&key, 4).await;
    }

    async fn a_released_reservation_that_the_engine_still_holds_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let held = world.win(&key, "u4", "r").await;
        world.assert_balanced(&key, 4).await;
        let released = world.release(&key, "u4", &held.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        let record = format!("{} 1 {} 1000 0", held.reservation_id, held.order_no);
        vandalise(&world, &key, &["HSET", "@reservations", "u4", &record]).await;
        vandalise(&world, &key, &["SADD", "@buyers", "u4"]).await;
        let expected = [DifferenceKind::ReleasedStillHeld];
        assert_found_and_mended(&world, &key, &expected, &[held.reservation_id.as_str()]).await;
        world.assert_balanced(&key, 3).await;
    }

    async fn units_that_are_for_sale_nowhere_or_twice_are_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        for (units, kind) in
            [("-2", DifferenceKind::UnitsMissing), ("3", DifferenceKind::UnitsExcess)]
        {
            vandalise(&world, &key, &["INCRBY", "@stock", units]).await;
            assert_found_and_mended(&world, &key, &[kind], &[]).await;
            world.assert_balanced(&key, 3).await;
        }
    }

    /// A release that reached another hash than that of the reservations: SQL and the reservations
    /// agree, stock and held add up, and a unit is for sale nowhere.
    async fn units_that_count_as_held_and_are_in_no_reservation_are_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        for (units, kind) in
            [("1", DifferenceKind::UnitsMissing), ("-1", DifferenceKind::UnitsExcess)]
        {
            let opposite = if units == "1" { "-1" } else { "1" };
            vandalise(&world, &key, &["HINCRBY", "@meta", "held", units]).await;
            vandalise(&world, &key, &["INCRBY", "@stock", opposite]).await;
            assert_found_and_mended(&world, &key, &[kind], &[]).await;
            world.assert_balanced(&key, 3).await;
        }
    }

    async fn a_record_that_nobody_can_read_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        vandalise(&world, &key, &["HSET", "@reservations", "u2", "no record"]).await;
        assert_found_and_mended(&world, &key, &[DifferenceKind::NegativeStock], &[]).await;
    }

    async fn stock_that_is_no_figure_is_found(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        for stock in ["-3", "abc", "1.5"] {
            vandalise(&world, &key, &["SET", "@stock", stock]).await;
            assert_found_and_mended(&world, &key, &[DifferenceKind::NegativeStock], &[]).await;
            world.assert_balanced(&key, 3).await;
        }
        // A key of another type.
        vandalise(&world, &key, &["DEL", "@stock"]).await;
        vandalise(&world, &key, &["SADD", "@stock", "x"]).await;
        assert_found_and_mended(&world, &key, &[DifferenceKind::NegativeStock], &[]).await;
        world.assert_balanced(&key, 3).await;
    }

    async fn counters_that_drifted_are_found_and_added_up_anew(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        sql(&world, "UPDATE offers SET reserved = reserved + 4, sold = sold + 1").await;
        let report = compare(&world, &key).await;
        assert_eq!(kinds(&report), [DifferenceKind::CounterDrift; 2]);
        let figures = |at: usize| (report.differences[at].expected, report.differences[at].actual);
        assert_eq!((figures(0), figures(1)), ((3, 7), (3, 4)));
        let expected = [DifferenceKind::CounterDrift; 2];
        assert_found_and_mended(&world, &key, &expected, &[]).await;
        world.assert_balanced(&key, 3).await;
    }

    async fn an_order_without_its_row_is_left_to_a_person(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let orders = world.live_orders(&key).await;
        let (id, _) = orders.iter().next().unwrap();
        sql(&world, &format!("DELETE FROM outbox WHERE reservation_id = '{id}'")).await;
        let report = compare(&world, &key).await;
        let mut expected = vec![
            DifferenceKind::TakenNotRecorded,
            DifferenceKind::OrderWithoutRow,
            DifferenceKind::CounterDrift,
        ];
        assert_eq!(kinds(&report), expected, "{report:?}");
        assert_eq!(report.differences[1].reservation_ids, std::slice::from_ref(id));
        let repaired = repair(&world, &key).await;
        let order = repaired.differences.iter().find(|d| !d.kind.is_repairable()).unwrap();
        assert!(!order.repaired, "no repair may touch an order");
        assert!(world.live_orders(&key).await.contains_key(id));
        let after = compare(&world, &key).await;
        expected.retain(|kind| kinds(&after).contains(kind));
        assert!(expected.contains(&DifferenceKind::OrderWithoutRow), "{after:?}");
    }

    async fn a_row_without_its_order_is_left_to_a_person(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let orders = world.live_orders(&key).await;
        let (id, _) = orders.iter().next().unwrap();
        sql(&world, &format!("DELETE FROM orders WHERE reservation_id = '{id}'")).await;
        let report = compare(&world, &key).await;
        let expected = [DifferenceKind::RowWithoutOrder, DifferenceKind::CounterDrift];
        assert_eq!(kinds(&report), expected, "{report:?}");
        assert_eq!(report.differences[0].reservation_ids, std::slice::from_ref(id));
        let repaired = repair(&world, &key).await;
        let mended: Vec<bool> = repaired.differences.iter().map(|d| d.repaired).collect();
        assert_eq!(mended, [false, true]);
    }

    async fn an_activity_that_nobody_knows_is_not_compared(ground: &Ground<'_>) {
        let world = ground.world().await;
        let id = ActivityId::new("nowhere").unwrap();
        let refused = world.parts.reconciler.reconcile(&id, true, "test").await;
        assert!(matches!(refused, Err(Error::UnknownActivity(_))), "{refused:?}");
    }

    async fn a_sale_that_was_never_warmed_up_is_compared_in_sql_alone(ground: &Ground<'_>) {
        let world = ground.world().await;
        let spec = crate::support::world::spec_of(&Sale::default());
        let id = spec.activity_id.clone();
        world.parts.activities.create(spec, "test").await.unwrap();
        let report = world.parts.reconciler.reconcile(&id, false, "test").await.unwrap();
        assert_eq!(kinds(&report), []);
        assert_eq!(report.offers[0].segments, []);
    }

    async fn a_repair_that_another_call_makes_is_in_progress(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = a_sale(&world).await;
        let lock = world.parts.locks.acquire("reconcile:sale", Duration::ZERO).await.unwrap();
        let refused = world.parts.reconciler.reconcile(&key.activity_id, true, "test").await;
        assert!(matches!(refused, Err(Error::InProgress(_))), "{refused:?}");
        // Looking is always possible.
        compare(&world, &key).await;
        drop(lock);
    }

    async fn a_sale_in_full_swing_shows_no_difference(ground: &Ground<'_>) {
        let world = Arc::new(ground.world().await);
        let sale = Sale { total: 400, max_orders: 2, ..Sale::default() };
        let key = world.open_sale(&sale).await;
        let mut buyers = JoinSet::new();
        for buyer in 0..6 {
            let (world, key) = (world.clone(), key.clone());
            buyers.spawn(async move {
                for round in 0..60 {
                    let buyer = format!("u{buyer}-{}", round % 20);
                    let outcome = world.reserve(&key, &buyer, &format!("r{round}")).await;
                    if let Ok(ReserveOutcome::Reserved { reservation, .. }) = outcome
                        && round % 3 == 0
                    {
                        let id = reservation.reservation_id;
                        let _ = world.release(&key, &buyer, &id).await.unwrap();
                    }
                    if round % 10 == 0 {
                        // Another poller may have the rows, or the database be busy.
                        let _ = world.parts.poller(&world.settings).run_once().await;
                    }
                }
            });
        }
        let mut looks = 0;
        while !buyers.is_empty() {
            let report = compare(&world, &key).await;
            assert_eq!(kinds(&report), [], "{report:?}");
            looks += 1;
            while let Some(done) = buyers.try_join_next() {
                done.unwrap();
            }
        }
        assert!(looks >= 3, "the sale was over before anybody looked: {looks}");
        let held = world.books(&key).await.live_rows_units;
        world.assert_balanced(&key, held).await;
        assert_eq!(kinds(&compare(&world, &key).await), []);
    }
}
