//! The life of a sale: created, reviewed, warmed up, on sale, ended; and what each state refuses.

use std::{sync::atomic::Ordering, time::Duration};

use sea_orm::ConnectionTrait;
use seckill::{
    activities::Moved,
    domain::{
        ActivityId, ActivityListQuery, ActivityState, OfferKey, ReleaseOutcome, ReserveOutcome,
        SkuId, TimeMs,
    },
    engine::scripts::{RebuildStep, Refusal, WarmedUp},
    error::Error,
};

use crate::support::{
    stage::Rebuild,
    world::{SKU, Sale, World, on_every_ground, spec_of},
};

const MINUTE: Duration = Duration::from_secs(60);

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

fn key_of(activity: &str) -> OfferKey {
    OfferKey { activity_id: ActivityId::new(activity).unwrap(), sku_id: SkuId::new(SKU).unwrap() }
}

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

/// Moves the window of the sale; every server reads it again when the version is another.
async fn set_window(world: &World, start: TimeMs, end: TimeMs) {
    let (start, end) = (start.0, end.0);
    sql(
        world,
        &format!(
            "UPDATE activities SET start_time = {start}, end_time = {end}, version = version + 1"
        ),
    )
    .await;
    world.parts.catalog.refresh().await.unwrap();
}

#[track_caller]
fn assert_wrong_state<T: std::fmt::Debug>(outcome: Result<T, Error>, expected: ActivityState) {
    match outcome {
        Err(Error::WrongActivityState { current, .. }) => assert_eq!(current, expected),
        other => panic!("{other:?}"),
    }
}

on_every_ground! {
    async fn a_move_from_a_wrong_state_is_refused_and_changes_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        let id = ActivityId::new("sale").unwrap();
        let missing = activities.approve(&id, "test", "").await;
        assert!(matches!(missing, Err(Error::UnknownActivity(_))), "{missing:?}");
        let missing = activities.warm_up(&id, "test").await;
        assert!(matches!(missing, Err(Error::UnknownActivity(_))), "{missing:?}");

        let spec = spec_of(&units(1));
        let created = activities.create(spec, "test").await.unwrap();
        assert_eq!(created.state, ActivityState::PendingReview);
        assert_wrong_state(activities.end(&id, "test", "").await, ActivityState::PendingReview);
        assert_wrong_state(activities.warm_up(&id, "test").await, ActivityState::PendingReview);
        assert_eq!(activities.get(&id).await.unwrap(), created);
        let offer = world.offer(&key_of("sale")).await;
        assert_eq!(offer.levels().await.unwrap(), Err(Refusal::NotWarmed));

        let approved = activities.approve(&id, "test", "").await.unwrap();
        assert_eq!(approved.state, ActivityState::Scheduled);
        assert_wrong_state(activities.approve(&id, "test", "").await, ActivityState::Scheduled);
        assert_eq!(activities.get(&id).await.unwrap(), approved);

        let ended = activities.end(&id, "test", "enough").await.unwrap();
        assert_eq!(ended.state, ActivityState::Ended);
        assert_wrong_state(activities.end(&id, "test", "").await, ActivityState::Ended);
        assert_wrong_state(activities.approve(&id, "test", "").await, ActivityState::Ended);
        assert_wrong_state(activities.warm_up(&id, "test").await, ActivityState::Ended);
        assert_eq!(activities.get(&id).await.unwrap(), ended);
    }

    async fn an_activity_created_again_is_the_same_or_a_conflict(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        let spec = spec_of(&units(5));
        let first = activities.create(spec.clone(), "test").await.unwrap();
        let again = activities.create(spec.clone(), "somebody else").await.unwrap();
        assert_eq!(again, first);

        let mut other_total = spec.clone();
        other_total.offers[0].total = 6;
        let mut other_price = spec.clone();
        other_price.offers[0].price_minor += 1;
        let mut other_title = spec.clone();
        other_title.title.push('!');
        let mut one_more = spec.clone();
        one_more.offers.push(seckill::domain::OfferSpec {
            sku_id: SkuId::new("sku-2").unwrap(),
            ..spec.offers[0].clone()
        });
        for other in [other_total, other_price, other_title, one_more] {
            let outcome = activities.create(other, "test").await;
            assert!(matches!(outcome, Err(Error::ActivityExists(_))), "{outcome:?}");
        }
        assert_eq!(activities.get(&spec.activity_id).await.unwrap(), first);
        // At once, too.
        let fresh = seckill::domain::ActivitySpec {
            activity_id: ActivityId::new("at-once").unwrap(),
            ..spec
        };
        let (one, two) = tokio::join!(
            activities.create(fresh.clone(), "one"),
            activities.create(fresh.clone(), "two")
        );
        assert_eq!(one.unwrap(), two.unwrap());
    }

    async fn lists_come_in_pages_newest_first_without_gaps(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        let now = TimeMs::now();
        for n in 0..7u32 {
            let mut spec = spec_of(&units(1));
            spec.activity_id = ActivityId::new(&format!("sale-{n}")).unwrap();
            // Two share each start.
            spec.start_time = now.plus(MINUTE * (n / 2));
            activities.create(spec, "test").await.unwrap();
        }
        let id = |n: u32| format!("sale-{n}");
        activities.approve(&ActivityId::new(&id(3)).unwrap(), "test", "").await.unwrap();
        let mut query =
            ActivityListQuery { page_size: 3, page_token: String::new(), state: None };
        let (mut found, mut pages) = (Vec::new(), 0);
        loop {
            let (page, next) = activities.list(query.clone()).await.unwrap();
            assert!(page.len() <= 3);
            found.extend(page.into_iter().map(|view| view.activity_id));
            pages += 1;
            if next.is_empty() {
                break;
            }
            query.page_token = next;
        }
        let expected: Vec<String> = [6, 4, 5, 2, 3, 0, 1].into_iter().map(id).collect();
        assert_eq!((found, pages), (expected, 3));

        let scheduled = ActivityListQuery {
            page_size: 3,
            page_token: String::new(),
            state: Some(ActivityState::Scheduled),
        };
        let (page, next) = activities.list(scheduled.clone()).await.unwrap();
        assert_eq!((page.len(), page[0].activity_id.as_str(), &*next), (1, "sale-3", ""));
        // A token of another list, and one that is none.
        for page_token in [query.page_token, "zz".to_owned(), "00ff".to_owned()] {
            let outcome =
                activities.list(ActivityListQuery { page_token, ..scheduled.clone() }).await;
            assert!(matches!(outcome, Err(Error::InvalidField(_))), "{outcome:?}");
        }
    }

    async fn the_clock_starts_and_ends_a_sale(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        let key = world.open_sale(&units(3)).await;
        let id = &key.activity_id;
        let state = async || activities.get(id).await.unwrap().state;
        let now = world.parts.database.clock();
        set_window(&world, now.plus(MINUTE), now.plus(MINUTE * 2)).await;
        assert_eq!(activities.move_by_clock().await.unwrap(), Default::default());
        let early = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(early, ReserveOutcome::NotStarted);

        set_window(&world, now.minus(MINUTE), now.plus(MINUTE)).await;
        // On sale by the clock, also before a worker has written it down.
        let first = world.win(&key, "u1", "r1").await;
        let (other_server, _) = world.beside().await;
        let moved = activities.move_by_clock().await.unwrap();
        assert_eq!((moved.started, moved.ended), (1, 0));
        assert_eq!(state().await, ActivityState::Active);
        // Another server comes too late to do the same.
        let moved = other_server.parts.activities.move_by_clock().await.unwrap();
        assert_eq!((moved.started, moved.ended), (0, 0));
        world.win(&key, "u2", "r1").await;

        set_window(&world, now.minus(MINUTE * 2), now.minus(MINUTE)).await;
        for (buyer, request_id) in [("u3", "r1"), ("u1", "r1"), ("u1", "r2")] {
            let late = world.reserve(&key, buyer, request_id).await.unwrap();
            assert_eq!(late, ReserveOutcome::Ended);
        }
        let moved = activities.move_by_clock().await.unwrap();
        assert_eq!((moved.started, moved.ended), (0, 1));
        assert_eq!(state().await, ActivityState::Ended);
        assert_eq!(activities.move_by_clock().await.unwrap(), Default::default());
        // What was won can still be given back.
        let released = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        world.assert_balanced(&key, 1).await;
    }

    async fn a_sale_by_hand_ends_at_once_on_the_server_that_was_asked(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(3)).await;
        let (other_server, _) = world.beside().await;
        world.win(&key, "u1", "r1").await;
        world.parts.activities.end(&key.activity_id, "test", "").await.unwrap();
        assert_eq!(world.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::Ended);
        other_server.parts.catalog.refresh().await.unwrap();
        assert_eq!(other_server.reserve(&key, "u2", "r1").await.unwrap(), ReserveOutcome::Ended);
        world.assert_balanced(&key, 1).await;
    }

    async fn an_activity_under_review_has_not_started_whatever_the_clock_says(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        world.parts.activities.create(spec_of(&units(3)), "test").await.unwrap();
        let key = key_of("sale");
        let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::NotStarted);
        let other = OfferKey { sku_id: SkuId::new("other").unwrap(), ..key.clone() };
        let outcome = world.reserve(&other, "u1", "r1").await;
        assert!(matches!(outcome, Err(Error::UnknownOffer { .. })), "{outcome:?}");
        let outcome = world.reserve(&key_of("other"), "u1", "r1").await;
        assert!(matches!(outcome, Err(Error::UnknownActivity(_))), "{outcome:?}");
        assert_eq!(world.parts.activities.move_by_clock().await.unwrap(), Default::default());
    }

    async fn an_offer_that_was_never_warmed_up_says_so_and_does_not_start(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        activities.create(spec_of(&units(3)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        let told = || async { world.offer(&key).await.asked_cold.load(Ordering::Relaxed) };
        assert!(!told().await);
        for _ in 0..3 {
            let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
            assert_eq!(outcome, ReserveOutcome::NotWarmed);
            assert!(told().await);
        }
        assert_eq!(activities.move_by_clock().await.unwrap(), Moved { cold: 1, ..Moved::default() });
        assert_eq!(
            activities.get(&key.activity_id).await.unwrap().state,
            ActivityState::Scheduled
        );
        let offer = world.offer(&key).await;
        assert_eq!(offer.levels().await.unwrap(), Err(Refusal::NotWarmed));
        assert_eq!(world.offer_row(&key).await.reserved, 0);
    }

    async fn a_key_that_is_missing_after_the_warm_up_is_frozen_and_never_refilled(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        world.win(&key, "u1", "r1").await;
        ground.flush(&world, &key).await;
        let outcome = world.reserve(&key, "u2", "r1").await;
        assert!(matches!(outcome, Err(Error::OfferFrozen(_))), "{outcome:?}");
        // A warm-up is no way to get the units back.
        let warmed = world.parts.activities.warm_up(&key.activity_id, "test").await;
        assert!(
            matches!(&warmed, Err(Error::OfferFrozen(_)))
                || matches!(&warmed, Ok(report) if report.stocks[0].remaining == 1),
            "{warmed:?}"
        );
        world.reserve_decided(&key, "u2", "r1").await;
        let outcome = world.reserve_decided(&key, "u3", "r1").await;
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 2).await;
    }

    async fn a_warm_up_repeated_before_or_during_the_sale_changes_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        let key = world.open_sale(&units(3)).await;
        let (other_server, _) = world.beside().await;
        let before = world.levels(&key).await;
        let report = activities.warm_up(&key.activity_id, "test").await.unwrap();
        assert!(report.already_warm);
        assert_eq!(world.levels(&key).await, before);

        world.win(&key, "u1", "r1").await;
        world.sweep().await;
        let before = world.levels(&key).await;
        let warm_time = world.offer_row(&key).await.warm_time;
        for state in [ActivityState::Scheduled, ActivityState::Active] {
            assert_eq!(activities.get(&key.activity_id).await.unwrap().state, state);
            for server in [&world, &other_server] {
                let report =
                    server.parts.activities.warm_up(&key.activity_id, "test").await.unwrap();
                assert!(report.already_warm);
                assert_eq!((report.stocks[0].total, report.stocks[0].remaining), (3, 2));
            }
            assert_eq!(world.levels(&key).await, before);
            assert_eq!(world.offer_row(&key).await.warm_time, warm_time);
            activities.move_by_clock().await.unwrap();
        }
        world.assert_balanced(&key, 1).await;
    }

    async fn a_warm_up_over_other_figures_is_refused_and_changes_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        activities.create(spec_of(&units(10)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        let offer = world.offer(&key).await;
        let warmed = offer.segments.first().scripts.warmup(1, 7, 7, offer.keys_expire).await.unwrap();
        assert_eq!(warmed, WarmedUp::Written);
        let before = world.levels(&key).await;
        let outcome = activities.warm_up(&key.activity_id, "test").await;
        match outcome {
            Err(Error::WarmupMismatch { offer, detail }) => {
                assert_eq!(offer, key);
                assert!(detail.contains('7') && detail.contains("10"), "{detail}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.levels(&key).await, before);
        assert_eq!(world.offer_row(&key).await.warm_time, None);
        let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::NotWarmed);
        assert_eq!(activities.move_by_clock().await.unwrap(), Moved { cold: 1, ..Moved::default() });
    }

    async fn a_warm_up_whose_reply_was_lost_is_repeated(ground: &Ground<'_>) {
        let world = ground.world().await;
        let (server, gate) = world.beside().await;
        let activities = &server.parts.activities;
        activities.create(spec_of(&units(10)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        gate.lose_reply("warmup");
        let outcome = activities.warm_up(&key.activity_id, "test").await;
        assert!(matches!(outcome, Err(Error::EngineUnavailable)), "{outcome:?}");
        assert_eq!(server.offer_row(&key).await.warm_time, None);
        server.close_circuits().await;
        let report = activities.warm_up(&key.activity_id, "test").await.unwrap();
        assert!(!report.already_warm);
        assert_eq!(report.stocks[0].remaining, 10);
        server.win(&key, "u1", "r1").await;
        server.assert_balanced(&key, 1).await;
    }

    async fn a_warm_up_gets_past_a_rebuild_that_was_left_half_done(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        activities.create(spec_of(&units(10)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        // The keys are there and of no use, as after a restart in the middle of a warm-up. Their
        // rebuild begins in the engine, and its server dies before SQL has the epoch.
        let offer = world.offer(&key).await;
        offer.segments.first().scripts.warmup(1, 10, 10, offer.keys_expire).await.unwrap();
        let begun = offer.segments.first().scripts.rebuild_begin(2, 10, offer.keys_expire).await;
        assert_eq!(begun, Ok(RebuildStep::Applied));
        assert_eq!(world.sql_epoch(&key).await, 1);

        let report = activities.warm_up(&key.activity_id, "test").await.unwrap();
        assert_eq!(report.stocks[0].remaining, 10);
        world.win(&key, "u1", "r1").await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_warm_up_gets_past_an_engine_that_lost_its_rebuild(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        activities.create(spec_of(&units(10)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        // A warm-up that was not finished wrote the keys, and another rebuilt them, which a
        // failover lost: SQL is at the higher epoch, the engine at the first.
        let offer = world.offer(&key).await;
        offer.segments.first().scripts.warmup(1, 10, 10, offer.keys_expire).await.unwrap();
        assert_eq!(Rebuild::raise(&world, &key).await.epoch, 2);

        let report = activities.warm_up(&key.activity_id, "test").await.unwrap();
        assert_eq!((report.stocks[0].remaining, report.stocks[0].epoch), (10, 3));
        world.win(&key, "u1", "r1").await;
        world.assert_balanced(&key, 1).await;
    }

    async fn two_warm_ups_at_once_are_one(ground: &Ground<'_>) {
        let world = ground.world().await;
        let activities = &world.parts.activities;
        activities.create(spec_of(&units(10)), "test").await.unwrap();
        let key = key_of("sale");
        activities.approve(&key.activity_id, "test", "").await.unwrap();
        let (other_server, _) = world.beside().await;
        let (one, two) = tokio::join!(
            activities.warm_up(&key.activity_id, "one"),
            other_server.parts.activities.warm_up(&key.activity_id, "two")
        );
        for report in [one.unwrap(), two.unwrap()] {
            assert_eq!(report.stocks[0].remaining, 10);
        }
        world.win(&key, "u1", "r1").await;
        other_server.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 2).await;
    }
}
