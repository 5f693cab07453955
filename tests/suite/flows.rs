//! Reserve, Release, Confirm and GetReservation, with what public systems of this kind got wrong.

use std::{collections::HashSet, time::Duration};

use sea_orm::ConnectionTrait;
use seckill::{
    domain::{
        BuyerId, ConfirmOutcome, OfferKey, RefusedBecause, ReleaseOutcome, RequestId,
        ReservationId, ReservationQuery, ReservationState, ReserveOutcome,
    },
    engine::scripts::Found,
    entity::outbox::OutboxState,
    error::Error,
};

use crate::support::{
    eventually,
    stage::{FORGET, INFLATE},
    world::{Sale, World, on_every_ground, won},
};

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

/// The state of a reservation and why it was refused, by its id.
async fn state(world: &World, id: &ReservationId) -> (ReservationState, Option<RefusedBecause>) {
    let query = ReservationQuery::ById(id.clone());
    let (reservation, refused) = world.parts.reservations.get(query).await.unwrap();
    assert_eq!(&reservation.reservation_id, id);
    (reservation.state, refused)
}

async fn by_request(
    world: &World,
    key: &OfferKey,
    buyer: &str,
    request_id: &str,
) -> Result<ReservationState, Error> {
    let query = ReservationQuery::ByRequest {
        offer: key.clone(),
        buyer: BuyerId::new(buyer).unwrap(),
        request_id: RequestId::new(request_id).unwrap(),
    };
    world.parts.reservations.get(query).await.map(|(reservation, _)| reservation.state)
}

on_every_ground! {
    async fn a_duplicate_is_decided_before_anything_is_taken(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(3)).await;
        let first = world.win(&key, "u1", "r1").await;
        let before = world.levels(&key).await;
        for request_id in ["r2", "r3", "r4"] {
            match world.reserve(&key, "u1", request_id).await.unwrap() {
                ReserveOutcome::Duplicate { existing: Some(existing) } => {
                    assert_eq!(existing.reservation_id, first.reservation_id);
                }
                other => panic!("{other:?}"),
            }
        }
        let after = world.levels(&key).await;
        assert_eq!((after.stock, after.stamp), (before.stock, before.stamp));
        world.assert_balanced(&key, 1).await;
    }

    async fn one_buyer_who_asks_many_times_at_once_gets_one(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let ids: Vec<String> = (0..20).map(|n| format!("r{n}")).collect();
        let asked = ids.iter().map(|request_id| world.reserve(&key, "u1", request_id));
        let mut won = 0;
        for outcome in futures_util::future::join_all(asked).await {
            match outcome.unwrap() {
                ReserveOutcome::Reserved { .. } => won += 1,
                ReserveOutcome::Duplicate { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(won, 1);
        world.assert_balanced(&key, 1).await;
    }

    async fn exactly_the_total_is_sold_and_the_last_unit_too(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(20)).await;
        let (other_server, _) = world.beside().await;
        let buyers: Vec<String> = (0..60).map(|n| format!("u{n}")).collect();
        let asked = buyers.iter().enumerate().map(|(n, buyer)| {
            let server = if n % 2 == 0 { &world } else { &other_server };
            server.reserve(&key, buyer, "r1")
        });
        let (mut won, mut order_numbers) = (0, HashSet::new());
        for outcome in futures_util::future::join_all(asked).await {
            match outcome.unwrap() {
                ReserveOutcome::Reserved { reservation, .. } => {
                    won += 1;
                    order_numbers.insert(reservation.order_no.to_string());
                }
                ReserveOutcome::SoldOut => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((won, order_numbers.len()), (20, 20));
        world.assert_balanced(&key, 20).await;
    }

    async fn quantities_are_limited_per_order_and_by_what_is_left(ground: &Ground<'_>) {
        let world = ground.world().await;
        let sale = Sale { total: 5, max_quantity: 3, ..Sale::default() };
        let key = world.open_sale(&sale).await;
        let outcome = world.reserve_units(&key, "u1", "r1", 4).await.unwrap();
        assert_eq!(outcome, ReserveOutcome::QuantityLimit { max: 3 });
        assert_eq!(world.levels(&key).await.stock, 5);
        let first = won(world.reserve_units(&key, "u1", "r1", 3).await);
        assert_eq!(first.quantity, 3);
        let outcome = world.reserve_units(&key, "u2", "r1", 3).await.unwrap();
        assert_eq!(outcome, ReserveOutcome::Insufficient { remaining: 2 });
        won(world.reserve_units(&key, "u2", "r1", 2).await);
        let outcome = world.reserve_units(&key, "u3", "r1", 1).await.unwrap();
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 5).await;
        // Exactly what was taken comes back.
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(world.levels(&key).await.stock, 3);
        world.assert_balanced(&key, 2).await;
    }

    async fn ids_come_back_as_they_went_in(ground: &Ground<'_>) {
        let world = ground.world().await;
        let buyers = [
            "201605131024011014", "9007199254740993", "18446744073709551615",
            "13835058055282163712", "0042", "1e5", "0x10", "u#1", "u", "a:b", "a}b{", "{c}",
            "nan", "-5", "a'b\"c\\",
        ];
        for (activity, max_orders) in [("ids-1", 1), ("ids-3", 3)] {
            let sale = Sale { activity, total: 20, max_orders, ..Sale::default() };
            let key = world.open_sale(&sale).await;
            for buyer in buyers {
                let first = world.win(&key, buyer, buyer).await;
                assert_eq!(first.buyer.as_str(), buyer);
                match world.reserve(&key, buyer, buyer).await.unwrap() {
                    ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                        assert_eq!(reservation.buyer.as_str(), buyer);
                        assert_eq!(reservation.reservation_id, first.reservation_id);
                        assert_eq!(reservation.order_no, first.order_no);
                    }
                    other => panic!("{buyer}: {other:?}"),
                }
                let row = world.row(&first.reservation_id).await.unwrap();
                assert_eq!(row.user_id, buyer);
                assert_eq!(row.request_id.as_deref(), Some(buyer));
            }
            let offer = world.offer(&key).await;
            let held = offer.segments.first().scripts.holdings().await.unwrap().unwrap();
            let held: HashSet<&str> = held.iter().map(|held| held.buyer.as_str()).collect();
            assert_eq!(held, HashSet::from(buyers));
            world.assert_balanced(&key, 15).await;
        }
    }

    async fn a_winner_who_asks_again_after_the_sell_out_hears_of_the_win(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let winner = world.win(&key, "u1", "r1").await;
        assert_eq!(world.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        for _ in 0..3 {
            match world.reserve(&key, "u1", "r1").await.unwrap() {
                ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                    assert_eq!(reservation.order_no, winner.order_no);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(
            world.reserve(&key, "u1", "r2").await.unwrap(),
            ReserveOutcome::Duplicate { .. }
        ));
        world.assert_balanced(&key, 1).await;
    }

    async fn a_release_reopens_a_sold_out_offer_on_every_server(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let (other_server, _) = world.beside().await;
        let first = world.win(&key, "u1", "r1").await;
        for server in [&world, &other_server] {
            assert_eq!(server.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        }
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        other_server.win(&key, "u2", "r1").await;
        assert_eq!(world.reserve(&key, "u3", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 1).await;
    }

    async fn the_same_release_twice_moves_nothing_the_second_time(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let id = &first.reservation_id;
        // At once, and later again.
        let (one, two) =
            tokio::join!(world.release(&key, "u1", id), world.release(&key, "u1", id));
        let outcomes = [one.unwrap(), two.unwrap()];
        assert!(outcomes.contains(&ReleaseOutcome::Released), "{outcomes:?}");
        assert!(outcomes.contains(&ReleaseOutcome::AlreadyReleased), "{outcomes:?}");
        let before = world.levels(&key).await;
        let again = world.release(&key, "u1", id).await.unwrap();
        assert_eq!(again, ReleaseOutcome::AlreadyReleased);
        assert_eq!(world.levels(&key).await, before);
        assert_eq!(before.stock, 2);
        assert_eq!(world.offer_row(&key).await.reserved, 0);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_late_second_release_does_not_touch_the_buyers_newer_reservation(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        let second = world.win(&key, "u1", "r2").await;
        let before = world.levels(&key).await;
        let late = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(late, ReleaseOutcome::AlreadyReleased);
        assert_eq!(world.levels(&key).await.stock, before.stock);
        let found = world.find(&key, "u1", &second.reservation_id).await;
        assert!(matches!(found, Found::Held { .. }), "{found:?}");
        world.assert_balanced(&key, 1).await;
    }

    async fn nobody_releases_or_confirms_what_is_anothers_or_is_not_there(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let id = &first.reservation_id;
        let unknown = ReservationId::new("00000000-0000-5000-8000-000000000000").unwrap();
        for _ in 0..2 {
            world.sweep().await;
            let before = world.read_books(&key).await.unwrap();
            let wrong = world.release(&key, "u2", id).await.unwrap();
            assert_eq!(wrong, ReleaseOutcome::WrongOwner);
            let wrong = world.confirm(&key, "u2", id).await.unwrap();
            assert_eq!(wrong, ConfirmOutcome::WrongOwner);
            let nothing = world.release(&key, "u1", &unknown).await.unwrap();
            assert_eq!(nothing, ReleaseOutcome::NotReserved);
            let nothing = world.confirm(&key, "u1", &unknown).await.unwrap();
            assert_eq!(nothing, ConfirmOutcome::NotReserved);
            assert_eq!(world.read_books(&key).await.unwrap(), before);
            // Once in the outbox, once as an order.
            world.books(&key).await;
        }
        world.assert_balanced(&key, 1).await;
    }

    async fn cycles_of_reserve_and_release_end_where_they_began(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(12)).await;
        // A thousand reservations, ten at a time; fewer where each is a few round trips.
        let cycles = if ground.redis.is_none() { 100 } else { 25 };
        let buyers: Vec<String> = (0..10).map(|n| format!("u{n}")).collect();
        for cycle in 0..cycles {
            let request_id = format!("r{cycle}");
            let won = futures_util::future::join_all(
                buyers.iter().map(|buyer| world.win(&key, buyer, &request_id)),
            )
            .await;
            if cycle % 3 == 0 {
                world.poll().await;
            }
            let released = futures_util::future::join_all(
                won.iter().map(|r| world.release(&key, r.buyer.as_str(), &r.reservation_id)),
            )
            .await;
            for outcome in released {
                assert_eq!(outcome.unwrap(), ReleaseOutcome::Released);
            }
        }
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.reservations), (12, 0));
        let row = world.offer_row(&key).await;
        assert_eq!((row.reserved, row.sold, row.epoch), (0, 0, 1));
        world.assert_balanced(&key, 0).await;
    }

    async fn a_release_works_in_every_state_but_confirmed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(4)).await;
        let pending = world.win(&key, "pending", "r1").await;
        assert_eq!(world.row(&pending.reservation_id).await.unwrap().state, OutboxState::Pending);
        let released = world.release(&key, "pending", &pending.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);

        let done = world.win(&key, "done", "r1").await;
        let confirmed = world.win(&key, "confirmed", "r1").await;
        world.poll().await;
        let outcome = world.confirm(&key, "confirmed", &confirmed.reservation_id).await.unwrap();
        assert!(matches!(outcome, ConfirmOutcome::Confirmed(_)), "{outcome:?}");
        let released = world.release(&key, "done", &done.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        let row = world.offer_row(&key).await;
        assert_eq!((row.reserved, row.sold), (1, 1));

        let dead = world.win(&key, "dead", "r1").await;
        sql(&world, "UPDATE outbox SET state = 'dead' WHERE user_id = 'dead'").await;
        let released = world.release(&key, "dead", &dead.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);

        world.sweep().await;
        let before = world.read_books(&key).await.unwrap();
        let refused = world.release(&key, "confirmed", &confirmed.reservation_id).await.unwrap();
        assert_eq!(refused, ReleaseOutcome::Confirmed);
        assert_eq!(world.read_books(&key).await.unwrap(), before);
        assert_eq!(state(&world, &confirmed.reservation_id).await.0, ReservationState::Confirmed);
        world.assert_balanced(&key, 1).await;
    }

    async fn a_hold_is_confirmed_once_it_is_an_order_and_again_without_effect(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let hold = Some(Duration::from_secs(600));
        let key = world.open_sale(&Sale { total: 2, hold, ..Sale::default() }).await;
        let taken = world.take(&key, "u2", "r1").await;
        let outcome = world.confirm(&key, "u2", &taken.reservation_id).await.unwrap();
        assert_eq!(outcome, ConfirmOutcome::NotOrderedYet);

        let first = world.win(&key, "u1", "r1").await;
        let id = &first.reservation_id;
        assert!(first.expire_time.is_some());
        assert_eq!(world.confirm(&key, "u1", id).await.unwrap(), ConfirmOutcome::NotOrderedYet);
        world.poll().await;
        for _ in 0..2 {
            match world.confirm(&key, "u1", id).await.unwrap() {
                ConfirmOutcome::Confirmed(reservation) => {
                    assert_eq!(reservation.state, ReservationState::Confirmed);
                    assert_eq!(reservation.order_no, first.order_no);
                    assert_eq!(reservation.expire_time, None);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(world.parts.reservations.expire_holds(10).await.unwrap(), 0);
        world.assert_balanced(&key, 2).await;
    }

    async fn a_hold_that_is_over_is_not_confirmed_although_the_worker_was_not_there(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let hold = Some(Duration::from_secs(600));
        let key = world.open_sale(&Sale { total: 2, hold, ..Sale::default() }).await;
        let pending = world.win(&key, "u1", "r1").await;
        sql(&world, "UPDATE outbox SET expire_time = 1000").await;
        let outcome = world.confirm(&key, "u1", &pending.reservation_id).await.unwrap();
        assert_eq!(outcome, ConfirmOutcome::Expired);
        world.poll().await;
        let outcome = world.confirm(&key, "u1", &pending.reservation_id).await.unwrap();
        assert_eq!(outcome, ConfirmOutcome::Expired, "a late payment won");
        assert_eq!(state(&world, &pending.reservation_id).await.0, ReservationState::Ordered);

        // A second buyer, whose hold is not over, stays.
        world.win(&key, "u2", "r1").await;
        assert_eq!(world.parts.reservations.expire_holds(10).await.unwrap(), 1);
        assert_eq!(world.parts.reservations.expire_holds(10).await.unwrap(), 0);
        assert_eq!(world.levels(&key).await.stock, 1);
        let outcome = world.confirm(&key, "u1", &pending.reservation_id).await.unwrap();
        assert_eq!(outcome, ConfirmOutcome::Expired);
        assert_eq!(world.reserve(&key, "u1", "r1").await.unwrap(), ReserveOutcome::Released);
        let again = world.release(&key, "u1", &pending.reservation_id).await.unwrap();
        assert_eq!(again, ReleaseOutcome::AlreadyReleased);
        world.assert_balanced(&key, 1).await;
    }

    async fn a_late_confirm_does_not_touch_the_buyer_who_got_the_unit(ground: &Ground<'_>) {
        let world = ground.world().await;
        let hold = Some(Duration::from_secs(600));
        let key = world.open_sale(&Sale { total: 1, hold, ..Sale::default() }).await;
        let first = world.win(&key, "u1", "r1").await;
        world.poll().await;
        sql(&world, "UPDATE outbox SET expire_time = 1000").await;
        world.parts.reservations.expire_holds(10).await.unwrap();
        let second = world.win(&key, "u2", "r1").await;
        world.poll().await;
        let late = world.confirm(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(late, ConfirmOutcome::Expired);
        let late = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(late, ReleaseOutcome::AlreadyReleased);
        assert_eq!(state(&world, &second.reservation_id).await.0, ReservationState::Ordered);
        world.assert_balanced(&key, 1).await;
    }

    async fn a_released_hold_is_not_confirmed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        world.poll().await;
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        let late = world.confirm(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(late, ConfirmOutcome::Released);
        world.assert_balanced(&key, 0).await;
    }

    async fn of_a_confirm_and_a_release_at_once_exactly_one_wins(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(50)).await;
        let (other_server, _) = world.beside().await;
        let buyers: Vec<String> = (0..50).map(|n| format!("u{n}")).collect();
        let won = futures_util::future::join_all(
            buyers.iter().map(|buyer| world.win(&key, buyer, "r1")),
        )
        .await;
        world.poll().await;
        let mut confirmed = 0;
        for (n, first) in won.iter().enumerate() {
            let (buyer, id) = (first.buyer.as_str(), &first.reservation_id);
            let confirm = async {
                if n % 2 == 0 { tokio::task::yield_now().await; }
                world.confirm(&key, buyer, id).await.unwrap()
            };
            let release = async {
                if n % 2 == 1 { tokio::task::yield_now().await; }
                other_server.release(&key, buyer, id).await.unwrap()
            };
            match tokio::join!(confirm, release) {
                (ConfirmOutcome::Confirmed(_), ReleaseOutcome::Confirmed) => confirmed += 1,
                (ConfirmOutcome::Released, ReleaseOutcome::Released) => {}
                both => panic!("{both:?}"),
            }
        }
        world.assert_balanced(&key, confirmed).await;
    }

    async fn a_buyer_may_have_as_many_orders_as_the_offer_says(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 10, max_orders: 3, ..Sale::default() }).await;
        let mut won = Vec::new();
        for request_id in ["r1", "r2", "r3"] {
            won.push(world.win(&key, "u1", request_id).await);
        }
        let slot = async |n: usize| world.row(&won[n].reservation_id).await.unwrap().slot;
        assert_eq!((slot(0).await, slot(1).await, slot(2).await), (Some(1), Some(2), Some(3)));
        let full = world.reserve(&key, "u1", "r4").await.unwrap();
        assert!(matches!(full, ReserveOutcome::Duplicate { .. }), "{full:?}");
        for (request_id, first) in ["r1", "r2", "r3"].into_iter().zip(&won) {
            match world.reserve(&key, "u1", request_id).await.unwrap() {
                ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                    assert_eq!(reservation.reservation_id, first.reservation_id);
                }
                other => panic!("{other:?}"),
            }
        }
        // The slot in the middle is free again, and is the one that is taken next.
        world.release(&key, "u1", &won[1].reservation_id).await.unwrap();
        let fourth = world.win(&key, "u1", "r4").await;
        assert_eq!(world.row(&fourth.reservation_id).await.unwrap().slot, Some(2));
        let full = world.reserve(&key, "u1", "r5").await.unwrap();
        assert!(matches!(full, ReserveOutcome::Duplicate { .. }), "{full:?}");
        world.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 4).await;
        // The slots survive a rebuild.
        world.rebuild(&key).await;
        let full = world.reserve(&key, "u1", "r5").await.unwrap();
        assert!(matches!(full, ReserveOutcome::Duplicate { .. }), "{full:?}");
        world.assert_balanced(&key, 4).await;
    }

    async fn a_request_id_used_again_with_another_quantity_is_a_conflict(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let first = won(world.reserve_units(&key, "u1", "r1", 2).await);
        let before = world.levels(&key).await;
        let conflict = world.reserve_units(&key, "u1", "r1", 3).await;
        assert!(
            matches!(&conflict, Err(Error::RequestIdConflict { field: "quantity", before, now })
                if before == "2" && now == "3"),
            "{conflict:?}"
        );
        assert_eq!(world.levels(&key).await.stamp, before.stamp);
        let again = won(world.reserve_units(&key, "u1", "r1", 2).await);
        assert_eq!(again.reservation_id, first.reservation_id);
        world.assert_balanced(&key, 2).await;
    }

    async fn without_a_request_id_a_repeat_is_another_request(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { max_orders: 2, ..Sale::default() }).await;
        let mut request = crate::support::world::request(&key, "u1", "r1", 1);
        request.request_id = None;
        let reserve = || world.parts.reservations.reserve(request.clone(), Default::default());
        let (first, second) = (won(reserve().await), won(reserve().await));
        assert_ne!(first.reservation_id, second.reservation_id);
        let third = reserve().await.unwrap();
        assert!(matches!(third, ReserveOutcome::Duplicate { .. }), "{third:?}");
        world.assert_balanced(&key, 2).await;
    }

    async fn get_reservation_tells_every_state(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let unknown = by_request(&world, &key, "u1", "r1").await;
        assert!(matches!(unknown, Err(Error::UnknownReservation)), "{unknown:?}");

        let taken = world.take(&key, "u1", "r1").await;
        let id = &taken.reservation_id;
        let is = async |expected: ReservationState| {
            assert_eq!(by_request(&world, &key, "u1", "r1").await.unwrap(), expected);
            assert_eq!(state(&world, id).await, (expected, None));
        };
        assert_eq!(by_request(&world, &key, "u1", "r1").await.unwrap(), ReservationState::Held);
        world.write(&taken).await.unwrap();
        is(ReservationState::Queued).await;
        world.poll().await;
        is(ReservationState::Ordered).await;
        world.confirm(&key, "u1", id).await.unwrap();
        is(ReservationState::Confirmed).await;

        let dead = world.win(&key, "u2", "r1").await;
        sql(&world, "UPDATE outbox SET state = 'dead' WHERE user_id = 'u2'").await;
        assert_eq!(state(&world, &dead.reservation_id).await, (ReservationState::Dead, None));
        world.release(&key, "u2", &dead.reservation_id).await.unwrap();
        assert_eq!(state(&world, &dead.reservation_id).await, (ReservationState::Released, None));
        world.assert_balanced(&key, 1).await;
    }

    async fn a_duplicate_that_only_sql_knows_is_refused_and_the_engine_rebuilt(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(3)).await;
        let first = world.win(&key, "u1", "r1").await;
        world.meddle(&key, FORGET, "u1").await;
        match world.reserve(&key, "u1", "r2").await.unwrap() {
            ReserveOutcome::Duplicate { existing: Some(existing) } => {
                assert_eq!(existing.reservation_id, first.reservation_id);
            }
            other => panic!("{other:?}"),
        }
        world.rebuilt_since(&key, 0).await;
        assert_eq!(world.sql_epoch(&key).await, 2);
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.reservations), (2, 1));
        // The refusal is stored: the same request hears it again, with the reservation that won.
        match world.reserve(&key, "u1", "r2").await.unwrap() {
            ReserveOutcome::Duplicate { existing: Some(existing) } => {
                assert_eq!(existing.reservation_id, first.reservation_id);
            }
            other => panic!("{other:?}"),
        }
        let refused = by_request(&world, &key, "u1", "r2").await.unwrap();
        assert_eq!(refused, ReservationState::Refused);
        world.assert_balanced(&key, 1).await;
    }

    async fn units_that_only_the_engine_has_are_refused_and_the_engine_rebuilt(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        world.win(&key, "u1", "r1").await;
        world.meddle(&key, INFLATE, "5").await;
        assert_eq!(world.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.rebuilt_since(&key, 0).await;
        assert_eq!(world.levels(&key).await.stock, 0);
        assert_eq!(world.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        let row = {
            let query = ReservationQuery::ByRequest {
                offer: key.clone(),
                buyer: BuyerId::new("u2").unwrap(),
                request_id: RequestId::new("r1").unwrap(),
            };
            world.parts.reservations.get(query).await.unwrap()
        };
        assert_eq!(row.0.state, ReservationState::Refused);
        assert_eq!(row.1, Some(RefusedBecause::SoldOut));
        assert_eq!(
            world.release(&key, "u2", &row.0.reservation_id).await.unwrap(),
            ReleaseOutcome::NotReserved
        );
        world.assert_balanced(&key, 1).await;
    }

    async fn a_batch_that_does_not_fit_is_sold_to_those_who_were_first(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(3)).await;
        world.meddle(&key, INFLATE, "20").await;
        let buyers: Vec<String> = (0..12).map(|n| format!("u{n}")).collect();
        let asked = buyers.iter().map(|buyer| world.reserve(&key, buyer, "r1"));
        let mut reserved = 0;
        for outcome in futures_util::future::join_all(asked).await {
            match outcome {
                Ok(ReserveOutcome::Reserved { .. }) => reserved += 1,
                // Frozen meanwhile: not decided, and repeated below.
                Ok(ReserveOutcome::SoldOut) | Err(Error::OfferFrozen(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(reserved <= 3, "{reserved}");
        let mut holders = 0;
        for buyer in &buyers {
            match world.reserve_decided(&key, buyer, "r1").await {
                ReserveOutcome::Reserved { .. } => holders += 1,
                ReserveOutcome::SoldOut | ReserveOutcome::Duplicate { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        world.healthy(&key).await;
        assert!(holders >= reserved, "a winner lost the reservation");
        world.assert_balanced(&key, holders).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_past_the_end_of_its_hold_does_not_say_reserved() {
    use crate::support::{
        databases::{self, Fresh},
        world::Ground,
    };
    let on = async |fresh: &Fresh| {
        let world = Ground::embedded(fresh).world().await;
        let hold = Some(Duration::from_secs(1));
        let key = world.open_sale(&Sale { total: 2, hold, ..Sale::default() }).await;
        let paid = world.win(&key, "u2", "r1").await;
        world.poll().await;
        world.confirm(&key, "u2", &paid.reservation_id).await.unwrap();
        let first = world.win(&key, "u1", "r1").await;
        assert!(matches!(
            world.reserve(&key, "u1", "r1").await.unwrap(),
            ReserveOutcome::Reserved { replayed: true, .. }
        ));
        eventually("the hold is over", async || {
            let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
            (outcome == ReserveOutcome::Released).then_some(())
        })
        .await;
        // No worker has been there.
        assert_eq!(world.row(&first.reservation_id).await.unwrap().state, OutboxState::Pending);
        assert_eq!(world.parts.reservations.expire_holds(10).await.unwrap(), 1);
        // One that was confirmed in time is for ever.
        match world.reserve(&key, "u2", "r1").await.unwrap() {
            ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                assert_eq!(reservation.state, ReservationState::Confirmed);
            }
            other => panic!("{other:?}"),
        }
        world.assert_balanced(&key, 1).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}
