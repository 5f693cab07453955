//! Dead letters: listed, tried again, given up; each only while it holds its units.

use sea_orm::ConnectionTrait;
use seckill::{
    domain::{
        DeadLetterView, OfferKey, PageQuery, ReleaseOutcome, Reservation, ReservationId,
        ReservationState, ReserveOutcome,
    },
    error::Error,
};

use crate::support::{
    eventually,
    world::{Sale, World, on_every_ground},
};

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

async fn list(world: &World) -> Vec<DeadLetterView> {
    let query = PageQuery { page_size: 100, page_token: String::new(), activity_id: None };
    world.parts.dead_letters.list(&query).await.unwrap().0
}

async fn actions(world: &World) -> Vec<String> {
    let query = PageQuery { page_size: 100, page_token: String::new(), activity_id: None };
    let (entries, _) = seckill::audit::list(&world.parts.database, &query).await.unwrap();
    entries.into_iter().map(|entry| entry.action).collect()
}

/// A reservation that became a dead letter: the order of another stood in its way.
async fn a_dead_letter(world: &World, key: &OfferKey, buyer: &str) -> Reservation {
    let held = world.win(key, buyer, "r").await;
    sql(
        world,
        &format!(
            "UPDATE outbox SET state = 'dead', attempts = 9, last_error = 'in the way', \
             settle_time = 5000 WHERE user_id = '{buyer}'"
        ),
    )
    .await;
    held
}

on_every_ground! {
    async fn dead_letters_are_listed_in_pages_and_keep_their_units(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let mut expected = Vec::new();
        for buyer in ["u1", "u2", "u3"] {
            expected.push(a_dead_letter(&world, &key, buyer).await.reservation_id);
        }
        world.win(&key, "u4", "r").await;
        assert_eq!(world.parts.activities.outbox_depth().await.unwrap().dead, 3);
        let mut query = PageQuery {
            page_size: 2,
            page_token: String::new(),
            activity_id: Some(key.activity_id.clone()),
        };
        let (first, next) = world.parts.dead_letters.list(&query).await.unwrap();
        query.page_token = next;
        let (second, end) = world.parts.dead_letters.list(&query).await.unwrap();
        assert_eq!((first.len(), second.len(), end.as_str()), (2, 1, ""));
        let listed: Vec<_> = first.iter().chain(&second).collect();
        let ids: Vec<_> = listed.iter().map(|l| l.reservation.reservation_id.clone()).collect();
        assert_eq!(ids, expected);
        assert!(listed.iter().all(|letter| {
            (letter.attempts, letter.last_error.as_str(), letter.fail_time.0)
                == (9, "in the way", 5_000)
                && letter.reservation.state == ReservationState::Dead
        }));
        query.page_token = "00".to_owned();
        let refused = world.parts.dead_letters.list(&query).await;
        assert!(matches!(refused, Err(Error::InvalidField(_))), "{refused:?}");
        query.page_token = String::new();
        query.activity_id = Some(seckill::domain::ActivityId::new("other").unwrap());
        assert_eq!(world.parts.dead_letters.list(&query).await.unwrap().0, []);
        let books = world.read_books(&key).await.unwrap();
        assert_eq!((books.engine_remaining, books.live_rows_units), (6, 4));
    }

    async fn a_dead_letter_that_is_retried_becomes_an_order(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let held = a_dead_letter(&world, &key, "u1").await;
        let id = &held.reservation_id;
        let letters = &world.parts.dead_letters;
        let retried = letters.retry(id, "ann", "it was mended").await.unwrap();
        assert_eq!(retried.state, ReservationState::Queued);
        assert_eq!(list(&world).await, []);
        world.assert_balanced(&key, 1).await;
        // What is none any more stays as it is.
        let again = letters.retry(id, "ann", "").await.unwrap();
        assert_eq!(again.state, ReservationState::Ordered);
        let discarded = letters.discard(id, "ann", "").await.unwrap();
        assert_eq!(discarded.state, ReservationState::Ordered);
        world.assert_balanced(&key, 1).await;
        let actions = actions(&world).await;
        assert_eq!(actions.iter().filter(|action| *action == "retry_dead_letter").count(), 1);
        assert!(!actions.contains(&"discard_dead_letter".to_owned()), "{actions:?}");
    }

    async fn a_dead_letter_that_is_discarded_gives_its_units_back_once(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 1, ..Sale::default() }).await;
        let id = a_dead_letter(&world, &key, "u1").await.reservation_id;
        assert_eq!(world.reserve(&key, "u2", "r").await.unwrap(), ReserveOutcome::SoldOut);
        for _ in 0..2 {
            let discarded = world.parts.dead_letters.discard(&id, "ann", "no").await.unwrap();
            assert_eq!(discarded.state, ReservationState::Released);
        }
        world.assert_balanced(&key, 0).await;
        assert_eq!(world.reserve(&key, "u1", "r").await.unwrap(), ReserveOutcome::Released);
        world.win(&key, "u2", "r").await;
        // The unit is another's now: neither a retry nor a late release touches it.
        let late = world.parts.dead_letters.retry(&id, "ann", "").await.unwrap();
        assert_eq!(late.state, ReservationState::Released);
        let outcome = world.release(&key, "u1", &id).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        world.assert_balanced(&key, 1).await;
        let discards = actions(&world).await.into_iter().filter(|a| a == "discard_dead_letter");
        assert_eq!(discards.count(), 1);
    }

    async fn a_dead_letter_that_the_engine_does_not_hold_is_decided_after_a_rebuild(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        for (buyer, discard) in [("u1", false), ("u2", true)] {
            let id = a_dead_letter(&world, &key, buyer).await.reservation_id;
            let offer = world.offer(&key).await;
            let epoch = offer.epoch();
            // The engine gave it back, and SQL knows nothing of it.
            let buyer = seckill::domain::BuyerId::new(buyer).unwrap();
            offer.segments.first().scripts.release(epoch, &id, &buyer).await.unwrap();
            let letters = &world.parts.dead_letters;
            let refused = if discard {
                letters.discard(&id, "ann", "").await
            } else {
                letters.retry(&id, "ann", "").await
            };
            assert!(matches!(refused, Err(Error::OfferFrozen(_))), "{refused:?}");
            assert_eq!(list(&world).await.len(), 1, "nothing may have changed");
            let decided = eventually("it is decided after the rebuild", async || {
                let decided = if discard {
                    letters.discard(&id, "ann", "").await
                } else {
                    letters.retry(&id, "ann", "").await
                };
                match decided {
                    Ok(reservation) => Some(reservation),
                    Err(Error::OfferFrozen(_)) => None,
                    Err(error) => panic!("{error:?}"),
                }
            })
            .await;
            assert_ne!(decided.state, ReservationState::Dead);
        }
        world.assert_balanced(&key, 1).await;
    }

    async fn an_unknown_reservation_is_no_dead_letter(ground: &Ground<'_>) {
        let world = ground.world().await;
        let id = ReservationId::new("nobody").unwrap();
        for refused in [
            world.parts.dead_letters.retry(&id, "ann", "").await,
            world.parts.dead_letters.discard(&id, "ann", "").await,
        ] {
            assert!(matches!(refused, Err(Error::UnknownReservation)), "{refused:?}");
        }
    }

    async fn nothing_is_decided_while_a_store_is_away(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let id = a_dead_letter(&world, &key, "u1").await.reservation_id;
        world.parts.engine_circuit.trip("a test");
        let refused = world.parts.dead_letters.discard(&id, "ann", "").await;
        assert!(matches!(refused, Err(Error::EngineUnavailable)), "{refused:?}");
        world.parts.engine_circuit.close();
        world.parts.database_circuit.trip("a test");
        let refused = world.parts.dead_letters.retry(&id, "ann", "").await;
        assert!(matches!(refused, Err(Error::DatabaseUnavailable)), "{refused:?}");
        world.parts.database_circuit.close();
        assert_eq!(list(&world).await.len(), 1);
    }
}
