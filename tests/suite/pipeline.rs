//! What works behind the reservations: the poller, the sweeper, rebuilds, and the start over a
//! database that others left behind.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sea_orm::{
    ActiveValue::Set, ConnectionTrait, DatabaseConnection, DbBackend, EntityTrait, PaginatorTrait,
    QueryResult, Statement,
};
use seckill::{
    database::Acquired,
    domain::{BuyerId, OfferKey, ReleaseOutcome, ReservationId, ReserveOutcome, new_order_no},
    entity::{orders, orders::OrderState, outbox::OutboxState},
    error::Error,
    metrics::EngineDepth,
    outbox::writer::{NewRow, Written},
    server::{Parts, StartError},
};

use crate::support::{
    databases::{self, Fresh},
    stage::LOSE,
    world::{Ground, Sale, World, on_every_ground},
};

/// The lease of the embedded engine, and how long it lasts.
const LEASE: &str = "embedded_engine";

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

/// Puts an order in the way of this reservation's: another one with its number.
async fn poison(world: &World, row: &NewRow) {
    let order = orders::ActiveModel {
        order_no: Set(row.order_no.to_string()),
        reservation_id: Set("another".to_owned()),
        activity_id: Set("another".to_owned()),
        sku_id: Set("another".to_owned()),
        user_id: Set("another".to_owned()),
        slot: Set(Some(1)),
        quantity: Set(1),
        price_minor: Set(1),
        currency: Set("CNY".to_owned()),
        state: Set(OrderState::Created),
        create_time: Set(1),
        confirm_time: Set(None),
        cancel_time: Set(None),
        cancel_reason: Set(None),
    };
    orders::Entity::insert(order)
        .exec_without_returning(world.parts.database.writer())
        .await
        .unwrap();
}

async fn row_state(world: &World, row: &NewRow) -> OutboxState {
    world.row(&row.reservation_id).await.unwrap().state
}

async fn take_and_write(world: &World, key: &OfferKey, buyer: &str) -> NewRow {
    let row = world.take(key, buyer, "r1").await;
    assert!(matches!(world.write(&row).await, Ok(Written::Live(_))));
    row
}

on_every_ground! {
    async fn a_poisoned_row_fails_alone_and_ends_as_a_dead_letter(ground: &Ground<'_>) {
        let mut world = ground.world().await;
        world.settings.outbox.max_attempts = 3;
        world.settings.outbox.backoff_ms = 1;
        world.settings.outbox.max_backoff_ms = 2;
        let key = world.open_sale(&units(5)).await;
        let good = take_and_write(&world, &key, "u1").await;
        let bad = take_and_write(&world, &key, "u2").await;
        let also_good = take_and_write(&world, &key, "u3").await;
        poison(&world, &bad).await;
        let poller = world.parts.poller(&world.settings);
        let pass = poller.run_once().await.unwrap();
        assert_eq!((pass.ordered, pass.failed), (2, 1), "{pass:?}");
        assert_eq!(row_state(&world, &good).await, OutboxState::Done);
        assert_eq!(row_state(&world, &also_good).await, OutboxState::Done);
        let failed = world.row(&bad.reservation_id).await.unwrap();
        assert_eq!((failed.state, failed.attempts), (OutboxState::Pending, 1));
        assert!(failed.last_error.is_some());
        let attempts = AtomicUsize::new(1);
        crate::support::eventually("a dead letter", async || {
            attempts.fetch_add(poller.run_once().await.unwrap().failed, Ordering::Relaxed);
            (row_state(&world, &bad).await == OutboxState::Dead).then_some(())
        })
        .await;
        assert_eq!(attempts.into_inner(), 3);
        // Its units stay taken until somebody decides.
        assert_eq!(world.levels(&key).await.stock, 2);
        assert_eq!(poller.run_once().await.unwrap(), Default::default());
        world.rebuild(&key).await;
        assert_eq!(world.levels(&key).await.stock, 2);

        sql(&world, "DELETE FROM orders WHERE reservation_id = 'another'").await;
        let released = world.release(&key, "u2", &bad.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        world.assert_balanced(&key, 2).await;
    }

    async fn a_database_that_is_away_costs_no_attempt(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let row = take_and_write(&world, &key, "u1").await;
        sql(&world, "ALTER TABLE orders RENAME TO orders_away").await;
        let pass = world.parts.poller(&world.settings).run_once().await;
        assert!(matches!(pass, Err(Error::DatabaseUnavailable)), "{pass:?}");
        sql(&world, "ALTER TABLE orders_away RENAME TO orders").await;
        let found = world.row(&row.reservation_id).await.unwrap();
        assert_eq!((found.state, found.attempts), (OutboxState::Pending, 0));
        world.close_circuits().await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_row_with_a_lower_id_that_commits_later_is_still_claimed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        take_and_write(&world, &key, "u2").await;
        sql(&world, "UPDATE outbox SET id = id + 1000").await;
        world.poll().await;
        let late = take_and_write(&world, &key, "u1").await;
        sql(&world, "UPDATE outbox SET id = 1 WHERE user_id = 'u1'").await;
        let pass = world.parts.poller(&world.settings).run_once().await.unwrap();
        assert_eq!(pass.ordered, 1);
        assert_eq!(row_state(&world, &late).await, OutboxState::Done);
        world.assert_balanced(&key, 2).await;
    }

    async fn two_pollers_at_once_make_one_order_each(ground: &Ground<'_>) {
        let mut world = ground.world().await;
        world.settings.outbox.batch = 7;
        let key = world.open_sale(&units(60)).await;
        let (other_server, _) = world.beside().await;
        let buyers: Vec<String> = (0..60).map(|n| format!("u{n}")).collect();
        futures_util::future::join_all(buyers.iter().map(|b| world.win(&key, b, "r1"))).await;
        let drain = async |server: &World| {
            let poller = server.parts.poller(&server.settings);
            let mut ordered = 0;
            loop {
                let pass = poller.run_once().await.unwrap();
                assert_eq!(pass.failed, 0);
                if pass.ordered == 0 {
                    return ordered;
                }
                ordered += pass.ordered;
            }
        };
        let (one, two) = tokio::join!(drain(&world), drain(&other_server));
        // Either may have left rows that the other had locked.
        let rest = drain(&world).await;
        assert_eq!(one + two + rest, 60);
        let orders = orders::Entity::find().count(world.parts.database.reader()).await.unwrap();
        assert_eq!(orders, 60);
        world.assert_balanced(&key, 60).await;
    }

    async fn the_poller_finishes_releases_that_a_crash_left_behind(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let second = world.win(&key, "u2", "r1").await;
        let (dying, gate) = world.beside().await;
        // One before the engine had it, one after.
        gate.refuse("release");
        dying.release(&key, "u1", &first.reservation_id).await.unwrap_err();
        dying.close_circuits().await;
        gate.lose_reply("release");
        dying.release(&key, "u2", &second.reservation_id).await.unwrap_err();
        assert_eq!(world.levels(&key).await.stock, 1);

        let pass = world.parts.poller(&world.settings).run_once().await.unwrap();
        assert_eq!((pass.released, pass.waiting), (2, 0), "{pass:?}");
        assert_eq!(world.levels(&key).await.stock, 2);
        for reservation in [&first, &second] {
            let row = world.row(&reservation.reservation_id).await.unwrap();
            assert_eq!((row.state, row.attempts), (OutboxState::Released, 0));
        }
        world.assert_balanced(&key, 0).await;
    }

    async fn a_release_that_the_engine_cannot_take_now_waits_without_an_attempt(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let offer = world.offer(&key).await;
        offer.segments.first().scripts.freeze(1, "test").await.unwrap();
        let outcome = world.release(&key, "u1", &first.reservation_id).await;
        assert!(matches!(outcome, Err(Error::OfferFrozen(_))), "{outcome:?}");
        world.rebuilt_since(&key, 0).await;
        let row = world.row(&first.reservation_id).await.unwrap();
        assert_eq!((row.state, row.attempts), (OutboxState::Releasing, 0));
        world.assert_balanced(&key, 0).await;
        world.win(&key, "u1", "r2").await;
    }

    async fn the_sweeper_records_what_a_crash_left_and_twice_at_once_is_harmless(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let (other_server, _) = world.beside().await;
        // One died before the commit, one after it.
        let taken = world.take(&key, "u1", "r1").await;
        let written = take_and_write(&world, &key, "u2").await;
        assert_eq!(world.levels(&key).await.unacked, 2);
        let (one, two) = tokio::join!(world.sweep(), other_server.sweep());
        assert!(one.max(two) == 2, "{one} and {two}");
        for row in [&taken, &written] {
            let found = world.row(&row.reservation_id).await.unwrap();
            assert_eq!(found.order_no, row.order_no.as_str());
            assert_eq!(found.user_id, row.buyer.as_str());
        }
        let offer = world.offer_row(&key).await;
        assert_eq!(offer.reserved, 2);
        world.assert_balanced(&key, 2).await;
        // The buyer repeats and gets what was recorded.
        match world.reserve(&key, "u1", "r1").await.unwrap() {
            ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                assert_eq!(reservation.order_no, taken.order_no);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.sweep().await, 0);
        world.assert_balanced(&key, 2).await;
    }

    async fn the_age_of_what_nobody_acknowledged_is_that_of_the_oldest(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { segments: 2, ..units(5) }).await;
        let offer = world.offer(&key).await;
        let depth = async || world.parts.activities.engine_depth().await.unwrap();
        let is_at_rest = |depth: EngineDepth| depth.unacked == 0 && depth.unacked_age.is_zero();
        assert!(is_at_rest(depth().await));
        let (first, since) = (world.take(&key, "ann", "r1").await, Instant::now());
        let old = Duration::from_millis(50);
        crate::support::eventually("it grows old", async || {
            (depth().await.unacked_age > old).then_some(())
        })
        .await;
        // One in the other segment, and one in the same.
        let second = world.take(&key, "bob", "r1").await;
        let third = world.take(&key, "201605131024011014", "r1").await;
        let homes = [&first, &second, &third].map(|row| offer.home(&row.buyer));
        assert!(Arc::ptr_eq(homes[0], homes[2]) && !Arc::ptr_eq(homes[0], homes[1]));
        let three = depth().await;
        assert_eq!(three.unacked, 3);
        assert!((old..since.elapsed() + old).contains(&three.unacked_age), "{three:?}");
        // SQL holds the first one, and the engine knows it.
        world.write(&first).await.unwrap();
        let acknowledged = [(&first.buyer, first.slot, &first.order_no, None)];
        let written = homes[0].scripts.acknowledge(first.epoch, acknowledged.into_iter());
        written.await.unwrap().unwrap();
        let two = depth().await;
        assert_eq!(two.unacked, 2);
        assert!(two.unacked_age + old / 2 < since.elapsed(), "{two:?}");
        assert_eq!(world.sweep().await, 2);
        crate::support::eventually("none is left", async || {
            is_at_rest(depth().await).then_some(())
        })
        .await;
        world.assert_balanced(&key, 3).await;
    }

    async fn the_sweeper_of_a_server_that_sells_nothing_follows_a_rebuild(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let (dying, _) = world.beside().await;
        dying.rebuild(&key).await;
        dying.take(&key, "u1", "r1").await;
        // No take comes through this server, which knows the old epoch only; the sale may be over.
        assert_eq!(world.offer(&key).await.epoch(), 1);
        assert_eq!(world.sweep().await, 1);
        crate::support::eventually("nothing is left for the sweeper", async || {
            (world.levels(&key).await.unacked == 0).then_some(())
        })
        .await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_repeat_and_the_sweeper_at_once_record_one_reservation(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let (other_server, _) = world.beside().await;
        let taken = world.take(&key, "u1", "r1").await;
        let (repeat, _) = tokio::join!(world.reserve(&key, "u1", "r1"), other_server.sweep());
        match repeat.unwrap() {
            ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                assert_eq!(reservation.order_no, taken.order_no);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.offer_row(&key).await.reserved, 1);
        world.assert_balanced(&key, 1).await;
    }

    async fn a_lost_engine_is_rebuilt_and_winners_stay_winners(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let (other_server, _) = world.beside().await;
        let mut won = Vec::new();
        for buyer in ["u1", "u2", "u3"] {
            won.push(world.win(&key, buyer, "r1").await);
        }
        world.poll().await;
        world.release(&key, "u3", &won[2].reservation_id).await.unwrap();
        ground.flush(&world, &key).await;
        // Both servers meet it at once; nobody hears "not warmed", "sold out" or takes a unit.
        let (one, two) = tokio::join!(
            world.reserve(&key, "u4", "r1"),
            other_server.reserve(&key, "u1", "r1")
        );
        for outcome in [one, two] {
            assert!(
                matches!(
                    outcome,
                    Err(Error::OfferFrozen(_)) | Ok(ReserveOutcome::Reserved { .. })
                ),
                "{outcome:?}"
            );
        }
        for reservation in &won[..2] {
            let buyer = reservation.buyer.as_str();
            match other_server.reserve_decided(&key, buyer, "r1").await {
                ReserveOutcome::Reserved { reservation: again, replayed: true, .. } => {
                    assert_eq!(again.order_no, reservation.order_no);
                }
                other => panic!("{other:?}"),
            }
        }
        let outcome = world.reserve_decided(&key, "u3", "r1").await;
        assert_eq!(outcome, ReserveOutcome::Released);
        for buyer in ["u4", "u5", "u6"] {
            let outcome = world.reserve_decided(&key, buyer, "r1").await;
            assert!(matches!(outcome, ReserveOutcome::Reserved { .. }), "{outcome:?}");
        }
        let outcome = world.reserve_decided(&key, "u7", "r1").await;
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 5).await;
    }

    async fn rebuilders_on_two_servers_come_to_an_end(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(3)).await;
        let (other_server, _) = world.beside().await;
        world.win(&key, "u1", "r1").await;
        world.meddle(&key, LOSE, "").await;
        let (here, there) = (world.offer(&key).await, other_server.offer(&key).await);
        let (one, two) = tokio::join!(
            world.parts.recovery.rebuild_now(&here),
            other_server.parts.recovery.rebuild_now(&there)
        );
        one.unwrap();
        two.unwrap();
        assert!(world.sql_epoch(&key).await <= 6, "they raised epochs past each other");
        let outcome = world.reserve_decided(&key, "u2", "r1").await;
        assert!(matches!(outcome, ReserveOutcome::Reserved { .. }), "{outcome:?}");
        world.assert_balanced(&key, 2).await;
    }

    async fn ids_of_the_greatest_length_are_recorded(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(400)).await;
        let buyers: Vec<String> = (0..300).map(|n| format!("{n:0>128}")).collect();
        let request_id = "r".repeat(128);
        futures_util::future::join_all(buyers.iter().map(|b| world.win(&key, b, &request_id))).await;
        while world.poll().await.ordered > 0 {}
        world.assert_balanced(&key, 300).await;
    }

    async fn a_rebuild_loads_more_than_one_page(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1_400)).await;
        let buyers: Vec<String> = (0..1_300).map(|n| format!("u{n}")).collect();
        for some in buyers.chunks(500) {
            futures_util::future::join_all(some.iter().map(|b| world.win(&key, b, "r1"))).await;
        }
        world.rebuild(&key).await;
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.reservations, levels.unacked), (100, 1_300, 0));
        let offer = world.offer(&key).await;
        let held = offer.segments.first().scripts.holdings().await.unwrap().unwrap();
        let held: HashSet<&str> = held.iter().map(|held| held.buyer.as_str()).collect();
        assert_eq!(held, buyers.iter().map(String::as_str).collect());
        world.win(&key, "one-more", "r1").await;
    }
}

/// How many rows of the outbox PostgreSQL has looked at, by index, and without one.
async fn rows_read(database: &Fresh) -> Option<BTreeMap<String, i64>> {
    let sql = "SELECT indexrelname::TEXT, idx_tup_read FROM pg_stat_user_indexes \
               WHERE relname = 'outbox' AND idx_tup_read > 0 UNION ALL \
               SELECT 'none', seq_tup_read FROM pg_stat_user_tables \
               WHERE relname = 'outbox' AND n_tup_upd > 0";
    let rows = database.reader().query_all_raw(Statement::from_string(DbBackend::Postgres, sql));
    let read =
        |row: QueryResult| (row.try_get_by_index(0).unwrap(), row.try_get_by_index(1).unwrap());
    let read: BTreeMap<String, i64> = rows.await.unwrap().into_iter().map(read).collect();
    read.contains_key("none").then_some(read)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_is_not_read_for_each_row_that_becomes_an_order() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let world = Ground::embedded(fresh).world().await;
        world.open_sale(&units(10_000)).await;
        // As a rush leaves them, before the database has looked at the table.
        sql(
            &world,
            "INSERT INTO outbox (reservation_id, activity_id, sku_id, user_id, quantity, slot, \
             order_no, epoch, batch, state, next_attempt_time, create_time) \
             SELECT 'r' || n, 'sale', 'sku-1', 'u' || n, 1, 1, 'o' || n, 1, 'batch', 'pending', \
             1, 1 FROM generate_series(1, 10000) n",
        )
        .await;
        sql(&world, "UPDATE offers SET reserved = 10000").await;
        let ordered = world.poll().await.ordered as i64;
        assert!(ordered > 0);
        world.close().await;
        let read = crate::support::eventually("statistics", || rows_read(fresh)).await;
        assert!(read.values().sum::<i64>() <= 5 * ordered, "{read:?} to order {ordered}");
    })
    .await;
}

// --- the embedded engine --------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_engine_knows_every_winner_after_a_restart() {
    let on = async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let released = world.win(&key, "u0", "r1").await;
        world.release(&key, "u0", &released.reservation_id).await.unwrap();
        let in_flight = world.take(&key, "u2", "r1").await;
        world.close().await;

        let world = ground.world().await;
        assert_eq!(world.sql_epoch(&key).await, 2);
        match world.reserve(&key, "u1", "r1").await.unwrap() {
            ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                assert_eq!(reservation.order_no, first.order_no);
            }
            other => panic!("{other:?}"),
        }
        let outcome = world.reserve(&key, "u0", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::Released);
        // What was never recorded is on sale again.
        assert_eq!(world.row(&in_flight.reservation_id).await, None);
        world.win(&key, "u3", "r1").await;
        assert_eq!(world.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 2).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

/// The lease is tried for 3.5 s, which pass at once here.
#[tokio::test]
async fn a_second_server_with_an_embedded_engine_is_refused_on_the_same_database() {
    let on = async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let day = Duration::from_secs(86_400);
        let held = fresh.acquire_lease(LEASE, "the other server", day).await.unwrap();
        assert!(matches!(held, Acquired::Granted(_)));
        let settings = ground.settings();
        let (opened, ()) = tokio::join!(Parts::open(&settings), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(4)).await;
            tokio::time::resume();
        });
        match opened {
            Err(StartError::EmbeddedHeld { owner }) => assert_eq!(owner, "the other server"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("two embedded engines on one database"),
        }
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_a_server_starts_when_the_lease_ran_out_and_fences_the_old_one() {
    let on = async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let crashed = ground.world().await;
        let key = crashed.open_sale(&units(1)).await;
        let in_flight = crashed.take(&key, "u1", "r1").await;
        // It is not renewed any more: what is left of it runs out.
        let soon = crashed.parts.database.now().await.unwrap().0 + 300;
        sql(&crashed, &format!("UPDATE leases SET expire_time = {soon}")).await;

        let world = ground.world().await;
        let now = world.parts.database.now().await.unwrap();
        assert!(now.0 >= soon, "it did not wait for the lease");
        world.win(&key, "u2", "r1").await;
        // The old process was only paused, and goes on where it was.
        assert_eq!(crashed.write(&in_flight).await, Ok(Written::OtherEpoch { sql: 2 }));
        world.assert_balanced(&key, 1).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

/// How the last group went to PostgreSQL: the beginning of what was said last.
async fn last_of_a_group(console: &DatabaseConnection) -> String {
    let question = "SELECT left(query, 12) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name = 'seckill' \
             AND (query LIKE 'WITH written%' OR query = 'COMMIT') \
         ORDER BY query_start DESC LIMIT 1";
    let question = Statement::from_string(DbBackend::Postgres, question);
    console.query_one_raw(question).await.unwrap().unwrap().try_get_by_index(0).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_rows_are_one_statement_on_postgres_and_others_a_transaction() {
    let on = async |fresh: &Fresh| {
        let world = Ground::embedded(fresh).world().await;
        let key = world.open_sale(&units(2)).await;
        let console = databases::admin(&fresh.settings().url).await;
        let mut written = Vec::new();
        for buyer in ["u1", "u2"] {
            written.push(take_and_write(&world, &key, buyer).await);
            assert_eq!(last_of_a_group(&console).await, "WITH written");
        }
        // It is there already, and its units are not counted again.
        assert!(matches!(world.write(&written[0]).await, Ok(Written::Live(_))));
        assert_eq!(last_of_a_group(&console).await, "COMMIT");
        // Another of the same buyer is refused, and keeps no unit.
        let rival = NewRow {
            reservation_id: ReservationId::new("rival").unwrap(),
            order_no: new_order_no(),
            ..written[0].clone()
        };
        assert!(matches!(world.write(&rival).await, Ok(Written::Refused(_))));
        assert_eq!(last_of_a_group(&console).await, "COMMIT");
        // One for which no unit is left, and one of an epoch that is over.
        let third = row_of("u3", &written[0]);
        assert!(matches!(world.write(&third).await, Ok(Written::Refused(_))));
        let late = NewRow { epoch: third.epoch + 1, ..row_of("u4", &third) };
        assert!(matches!(world.write(&late).await, Ok(Written::OtherEpoch { .. })));
        assert_eq!(world.parts.poller(&world.settings).run_once().await.unwrap().ordered, 2);
        console.close().await.unwrap();
        let figures = world.books(&key).await;
        assert_eq!(figures.contradictions(), Vec::<String>::new(), "{figures:?}");
        assert_eq!((figures.oversold(), figures.orders_units), (0, 2), "{figures:?}");
    };
    databases::run(Fresh::postgres().await, on).await;
}

/// As `like`, of another buyer.
fn row_of(buyer: &str, like: &NewRow) -> NewRow {
    NewRow {
        buyer: BuyerId::new(buyer).unwrap(),
        reservation_id: ReservationId::new(buyer).unwrap(),
        order_no: new_order_no(),
        ..like.clone()
    }
}
