//! The interleavings that broke earlier drafts of the protocol, each step by step.
//!
//! A server that dies is one that stops calling; a second server is `World::beside`; a call that
//! is under way stops in a `Gate`. The letters are those of the table in ARCHITECTURE.md.

use std::time::Duration;

use sea_orm::ConnectionTrait;
use seckill::{
    adjustments::{Step, Verdict},
    domain::{ReleaseOutcome, RequestId, ReserveOutcome, TimeMs},
    engine::scripts::{
        Arrived, Followed, Found, GivenBack, RebuildStep, Refusal, SentOff, Transfer, Unacked,
    },
    entity::{adjustments::AdjustmentState, outbox::OutboxState},
    error::Error,
    outbox::writer::Written,
};

use crate::support::{
    databases::{self, Fresh},
    eventually,
    redis_server::RedisServer,
    stage::{FORGET, REWIND, Rebuild, UNMARK},
    world::{Ground, Sale, World, on_every_ground},
};

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

/// The reservation that a reserve answers with, and whether it was a replay.
fn replay(outcome: &ReserveOutcome) -> (&str, bool) {
    match outcome {
        ReserveOutcome::Reserved { reservation, replayed, .. } => {
            (reservation.reservation_id.as_str(), *replayed)
        }
        other => panic!("not reserved: {other:?}"),
    }
}

/// Released by this call or by one before it that could not be answered.
#[track_caller]
fn assert_given_back(outcome: ReleaseOutcome) {
    assert!(
        matches!(outcome, ReleaseOutcome::Released | ReleaseOutcome::AlreadyReleased),
        "{outcome:?}"
    );
}

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

on_every_ground! {
    // V1
    async fn a_write_that_certainly_failed_gives_nothing_back_while_another_may_record_it(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let (second, _) = world.beside().await;
        sql(&world, "ALTER TABLE outbox RENAME TO outbox_away").await;
        let outcome = world.reserve(&key, "u1", "r1").await;
        assert!(outcome.is_err(), "{outcome:?}");
        // The sweeper of another server has read the entry, and a repeat is on its way there.
        let offer = second.offer(&key).await;
        let before = TimeMs::now().plus(Duration::from_secs(1));
        let Unacked { epoch, entries, .. } =
            offer.segments.first().scripts.unacked(before, 10).await.unwrap().unwrap();
        sql(&world, "ALTER TABLE outbox_away RENAME TO outbox").await;
        world.close_circuits().await;
        assert_eq!(world.levels(&key).await.stock, 1);

        let repeated = second.reserve(&key, "u1", "r1").await.unwrap();
        assert!(replay(&repeated).1);
        for entry in entries {
            second.parts.reservations.settle(&offer, epoch, entry).await.unwrap();
        }
        assert_eq!(world.levels(&key).await.stock, 1);
        world.assert_balanced(&key, 1).await;
    }

    // V2
    async fn a_take_of_a_reservation_that_sql_calls_released_is_given_back(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        world.meddle(&key, UNMARK, first.reservation_id.as_str()).await;

        let again = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(again, ReserveOutcome::Released);
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.reservations, levels.unacked), (1, 0, 0));
        assert_eq!(world.find(&key, "u1", &first.reservation_id).await, Found::Released);
        world.win(&key, "u1", "r2").await;
        world.assert_balanced(&key, 1).await;
    }

    // V3
    async fn a_repeat_of_a_released_request_hears_released_and_not_sold_out(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        world.win(&key, "u2", "r1").await;

        let again = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(again, ReserveOutcome::Released);
        let other = world.reserve(&key, "u1", "r2").await.unwrap();
        assert_eq!(other, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 1).await;
    }

    // V4
    async fn a_late_acknowledgement_does_not_hide_a_second_take_of_the_same_id(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let offer = world.offer(&key).await;
        let first = world.take(&key, "u1", "r1").await;
        let Ok(Written::Live(_)) = world.write(&first).await else { panic!("not written") };
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        world.meddle(&key, UNMARK, first.reservation_id.as_str()).await;
        let second = world.take(&key, "u1", "r1").await;
        assert_eq!(second.reservation_id, first.reservation_id);

        let late = [(&first.buyer, first.slot, &first.order_no, None)];
        offer.segments.first().scripts.acknowledge(first.epoch, late.into_iter()).await.unwrap().unwrap();
        assert_eq!(world.levels(&key).await.unacked, 1, "the sweeper can't see the second take");
        assert_eq!(world.sweep().await, 1);
        assert_eq!(world.levels(&key).await.stock, 1);
        world.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 1).await;
    }

    // V6
    async fn a_duplicate_that_only_sql_knows_does_not_lock_the_buyer_out(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let offer = world.offer(&key).await;
        let first = world.win(&key, "u1", "r1").await;
        world.meddle(&key, FORGET, "u1").await;

        // By hand, so that the state between release.lua and the rebuild shows.
        let wrong = world.take(&key, "u1", "r2").await;
        let Ok(Written::Refused(row)) = world.write(&wrong).await else { panic!("not refused") };
        assert_eq!((row.reason.as_deref(), row.slot), (Some("duplicate"), None));
        let given_back = offer
            .segments.first()
            .scripts
            .release(row.row_epoch(), &wrong.reservation_id, &wrong.buyer)
            .await
            .unwrap();
        assert!(matches!(given_back, GivenBack::Released { stock: 2, .. }), "{given_back:?}");
        let third = world.take(&key, "u1", "r3").await;
        assert_eq!(third.slot, 1, "the slot is still marked");

        // And as it happens: the engine is found out, frozen and rebuilt.
        match world.reserve(&key, "u1", "r3").await.unwrap() {
            ReserveOutcome::Duplicate { existing: Some(existing) } => {
                assert_eq!(existing.reservation_id, first.reservation_id);
            }
            other => panic!("{other:?}"),
        }
        world.rebuilt_since(&key, 0).await;
        let released = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        world.win(&key, "u1", "r4").await;
        world.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 2).await;
    }

    // V7
    async fn an_insert_from_before_a_rebuild_is_not_stored_behind_its_snapshot(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let old = world.take(&key, "u1", "r1").await;
        ground.flush(&world, &key).await;

        let rebuild = Rebuild::raise(&world, &key).await;
        assert_eq!(rebuild.begin(&world, &key).await, RebuildStep::Applied);
        assert_eq!(rebuild.held, []);
        let late = world.write(&old).await;
        assert_eq!(late, Ok(Written::OtherEpoch { sql: rebuild.epoch }));
        assert_eq!(world.row(&old.reservation_id).await, None);
        assert_eq!(rebuild.load(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(rebuild.end(&world, &key, 1).await, RebuildStep::Applied);

        world.win(&key, "u2", "r1").await;
        let late = world.write(&old).await;
        assert_eq!(late, Ok(Written::OtherEpoch { sql: rebuild.epoch }));
        world.assert_balanced(&key, 1).await;
    }

    // W10
    async fn units_that_a_rebuild_has_counted_are_not_added_again(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let offer = world.offer(&key).await;
        let id = RequestId::new("a1").unwrap();
        let first = world.decide(&key, "a1", 3, Step::Add).await;
        let Verdict::Stored(row) = first else { panic!("{first:?}") };
        assert_eq!((row.epoch, world.levels(&key).await.total), (1, 10));
        world.rebuild(&key).await;
        assert_eq!(world.levels(&key).await.stock, 13);
        // The server that added them goes on, and so does the sweeper.
        let late = offer.segments.first().scripts.add_units(1, &id, 3).await.unwrap();
        assert_eq!(late, Followed::Done);
        world.sweep().await;
        assert_eq!(world.levels(&key).await.stock, 13, "they were added twice");
        assert_eq!(world.adjustment_state("a1").await, Some(AdjustmentState::Applied));
        world.assert_balanced(&key, 0).await;
    }

    async fn units_that_a_rebuild_has_not_counted_are_added_once_behind_it(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let offer = world.offer(&key).await;
        let id = RequestId::new("a1").unwrap();
        let add = async |epoch| offer.segments.first().scripts.add_units(epoch, &id, 3).await.unwrap();
        let rebuild = Rebuild::raise(&world, &key).await;
        let behind = world.decide(&key, "a1", 3, Step::Add).await;
        assert!(matches!(behind, Verdict::Stored(row) if row.epoch == 2));
        let early = add(2).await;
        assert!(matches!(early, Followed::Retry { .. }), "{early:?}");
        assert_eq!(rebuild.begin(&world, &key).await, RebuildStep::Applied);
        let early = add(2).await;
        assert!(matches!(early, Followed::Retry { .. }), "{early:?}");
        assert_eq!(rebuild.load(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(rebuild.end(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(world.levels(&key).await.stock, 10);
        for _ in 0..2 {
            assert_eq!(add(2).await, Followed::Done);
            assert_eq!(world.levels(&key).await.stock, 13);
        }
        world.sweep().await;
        world.assert_balanced(&key, 0).await;
    }

    // W11
    async fn an_undo_that_came_first_is_met_by_the_late_commit(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let epoch = world.set_aside(&key, "a1", 4).await;
        let (second, _) = world.beside().await;
        second.sweep().await;
        assert_eq!(world.levels(&key).await.stock, 10);
        let late = world.decide(&key, "a1", -4, Step::TakeAway { epoch }).await;
        assert!(matches!(late, Verdict::Stored(row) if row.state == AdjustmentState::Cancelled));
        assert_eq!(world.offer_row(&key).await.total, 10, "taken away after it was put back");
        let again = world.adjust(&key, "a1", -4).await.unwrap();
        assert!(!again.applied);
        world.assert_balanced(&key, 0).await;
    }

    async fn an_undo_meets_the_commit_that_came_first(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let epoch = world.set_aside(&key, "a1", 4).await;
        let first = world.decide(&key, "a1", -4, Step::TakeAway { epoch }).await;
        assert!(matches!(first, Verdict::Stored(row) if row.state == AdjustmentState::Pending));
        let (second, _) = world.beside().await;
        second.sweep().await;
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.total, levels.aside), (6, 6, 0), "{levels:?}");
        assert!(world.adjust(&key, "a1", -4).await.unwrap().applied);
        world.assert_balanced(&key, 0).await;
    }

    async fn an_undo_and_the_commit_at_once_end_as_one_of_the_two(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(100)).await;
        let (second, _) = world.beside().await;
        let mut total = 100;
        for round in 0..12 {
            let id = format!("a{round}");
            let epoch = world.set_aside(&key, &id, 4).await;
            let step = Step::TakeAway { epoch };
            let (verdict, _) = tokio::join!(world.decide(&key, &id, -4, step), second.sweep());
            let Verdict::Stored(row) = verdict else { panic!("{verdict:?}") };
            total -= if row.state == AdjustmentState::Cancelled { 0 } else { 4 };
            world.sweep().await;
            assert_eq!(world.offer_row(&key).await.total, total);
            assert_eq!(i64::try_from(world.levels(&key).await.stock).unwrap(), total);
        }
        world.assert_balanced(&key, 0).await;
    }

    async fn an_insert_that_races_a_rebuild_is_in_its_snapshot_or_is_fenced(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let (rebuilder, gate) = world.beside().await;
        let old = world.take(&key, "u1", "r1").await;
        ground.flush(&world, &key).await;

        let mut stop = gate.stop_before("rebuild_begin");
        let offer = rebuilder.offer(&key).await;
        let (rebuilt, late) = tokio::join!(rebuilder.parts.recovery.rebuild_now(&offer), async {
            stop.reached().await;
            // The epoch is raised and the row of the offer locked: the insert waits for it.
            let (late, ()) = tokio::join!(world.write(&old), async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                stop.go();
            });
            late
        });
        rebuilt.unwrap();
        assert!(matches!(late, Ok(Written::OtherEpoch { .. })), "{late:?}");
        world.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 1).await;
    }

    async fn an_older_rebuilder_does_not_end_the_rebuild_of_a_newer_one(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        ground.flush(&world, &key).await;
        let older = Rebuild::raise(&world, &key).await;
        assert_eq!(older.begin(&world, &key).await, RebuildStep::Applied);
        // The only unit is sold in the meantime, as far as SQL can tell.
        let mut sold = row_of(&world, &key, "u1").await;
        sold.epoch = older.epoch;
        assert!(matches!(world.write(&sold).await, Ok(Written::Live(_))));
        let newer = Rebuild::raise(&world, &key).await;
        assert_eq!(newer.held.len(), 1);
        assert_eq!(newer.begin(&world, &key).await, RebuildStep::Applied);

        // The older one would put the unit on sale again.
        let refused = RebuildStep::Refused { epoch: newer.epoch };
        assert_eq!(older.load(&world, &key, 1).await, refused);
        assert_eq!(older.end(&world, &key, 0).await, refused);
        assert_eq!(older.begin(&world, &key).await, refused);
        assert_eq!(newer.begin(&world, &key).await, refused, "a repeated begin empties nothing");
        assert_eq!(newer.load(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(newer.end(&world, &key, 1).await, RebuildStep::Applied);

        let outcome = world.reserve_decided(&key, "u2", "r1").await;
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 1).await;
    }

    // V8
    async fn a_release_during_a_rebuild_is_not_undone_by_its_load(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let (rebuilder, gate) = world.beside().await;
        let offer = rebuilder.offer(&key).await;
        offer.segments.first().scripts.freeze(1, "test").await.unwrap();

        // Everything is loaded and SQL has committed; the engine is not on sale yet.
        let mut stop = gate.stop_before("rebuild_end");
        let (rebuilt, ()) = tokio::join!(rebuilder.parts.recovery.rebuild_now(&offer), async {
            stop.reached().await;
            let outcome = world.release(&key, "u1", &first.reservation_id).await;
            assert!(matches!(outcome, Err(Error::OfferFrozen(_))), "{outcome:?}");
            let row = world.row(&first.reservation_id).await.unwrap();
            assert_eq!(row.state, OutboxState::Releasing, "it is due until the engine has it");
            stop.go();
        });
        rebuilt.unwrap();
        let outcome = world.decided(|| world.release(&key, "u1", &first.reservation_id)).await;
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        assert_eq!(world.levels(&key).await.stock, 1);
        world.assert_balanced(&key, 0).await;
        world.win(&key, "u1", "r2").await;
    }

    async fn a_release_waits_for_the_snapshot_that_still_holds_its_reservation(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let (rebuilder, gate) = world.beside().await;
        let offer = rebuilder.offer(&key).await;
        offer.segments.first().scripts.freeze(1, "test").await.unwrap();

        // The snapshot is read with the reservation in it, and about to be loaded.
        let mut stop = gate.stop_before("rebuild_load");
        let id = &first.reservation_id;
        let (rebuilt, ()) = tokio::join!(rebuilder.parts.recovery.rebuild_now(&offer), async {
            stop.reached().await;
            let (outcome, ()) =
                tokio::join!(world.decided(|| world.release(&key, "u1", id)), async {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    stop.go();
                });
            assert_given_back(outcome);
        });
        rebuilt.unwrap();
        assert_eq!(world.levels(&key).await.stock, 1);
        world.assert_balanced(&key, 0).await;
        world.win(&key, "u1", "r2").await;
    }

    // V9, where the identity is no help
    async fn an_engine_that_shows_less_than_was_seen_is_rebuilt(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        world.win(&key, "u1", "r1").await;
        let before = world.win(&key, "u2", "r1").await;
        world.meddle(&key, FORGET, "u2").await;
        world.meddle(&key, REWIND, "1").await;

        let outcome = world.reserve(&key, "u3", "r1").await;
        assert!(matches!(outcome, Err(Error::OfferFrozen(_))), "{outcome:?}");
        let again = world.reserve_decided(&key, "u2", "r1").await;
        assert_eq!(replay(&again), (before.reservation_id.as_str(), true));
        assert_eq!(world.reserve_decided(&key, "u3", "r1").await, ReserveOutcome::SoldOut);
        assert!(world.sql_epoch(&key).await >= 2);
        world.assert_balanced(&key, 2).await;
    }

    // V10
    async fn a_release_whose_insert_commits_meanwhile_is_not_answered_not_reserved(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let (releaser, gate) = world.beside().await;
        let taken = world.take(&key, "u1", "r1").await;
        let id = &taken.reservation_id;
        let mut stop = gate.stop_before("find");
        let (outcome, ()) = tokio::join!(releaser.release(&key, "u1", id), async {
            stop.reached().await;
            assert!(matches!(world.write(&taken).await, Ok(Written::Live(_))));
            ground.flush(&world, &key).await;
            stop.go();
        });
        assert!(matches!(outcome, Err(Error::OfferFrozen(_))), "{outcome:?}");
        assert_given_back(releaser.decided(|| releaser.release(&key, "u1", id)).await);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_release_looks_into_sql_once_more_before_it_answers_not_reserved(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let (releaser, gate) = world.beside().await;
        let taken = world.take(&key, "u1", "r1").await;
        let id = &taken.reservation_id;
        let mut stop = gate.stop_before("find");
        let (outcome, ()) = tokio::join!(releaser.release(&key, "u1", id), async {
            stop.reached().await;
            assert!(matches!(world.write(&taken).await, Ok(Written::Live(_))));
            world.meddle(&key, FORGET, "u1").await;
            stop.go();
        });
        assert_eq!(outcome.unwrap(), ReleaseOutcome::Released);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_release_that_overtakes_the_insert_leaves_a_tombstone_for_it(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let taken = world.take(&key, "u1", "r1").await;
        let id = &taken.reservation_id;
        let outcome = world.release(&key, "u1", id).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::Released, "nobody has heard it before");
        assert_eq!(world.release(&key, "u1", id).await.unwrap(), ReleaseOutcome::AlreadyReleased);
        let late = world.write(&taken).await;
        assert!(matches!(late, Ok(Written::GivenBack(_))), "{late:?}");
        assert_eq!(world.offer_row(&key).await.reserved, 0);
        assert_eq!(world.reserve(&key, "u1", "r1").await.unwrap(), ReserveOutcome::Released);
        world.assert_balanced(&key, 0).await;
        world.win(&key, "u2", "r1").await;
    }

    // V11
    async fn a_rebuilder_that_dies_after_raising_the_epoch_fences_nobody_for_ever(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let dead = Rebuild::raise(&world, &key).await;
        assert_eq!(dead.epoch, 2);

        let outcome = world.reserve_decided(&key, "u2", "r1").await;
        assert!(!replay(&outcome).0.is_empty());
        // It is counted a moment after it sells again.
        eventually("somebody rebuilt it", async || {
            (world.parts.recovery.rebuilds() >= 1).then_some(())
        })
        .await;
        let again = world.reserve_decided(&key, "u1", "r1").await;
        assert_eq!(replay(&again), (first.reservation_id.as_str(), true));
        assert_eq!(world.reserve_decided(&key, "u3", "r1").await, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 2).await;
    }

    // W1
    async fn a_release_between_two_rebuilds_is_not_loaded_back_by_the_later_one(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let (releaser, gate) = world.beside().await;
        let earlier = Rebuild::raise(&world, &key).await;
        let later = Rebuild::raise(&world, &key).await;
        assert_eq!((earlier.held.len(), later.held.len()), (1, 1));

        let mut release = gate.stop_before("release");
        let mut mend = gate.stop_before("rebuild_begin");
        let (outcome, ()) = tokio::join!(
            releaser.release(&key, "u1", &first.reservation_id),
            async {
                release.reached().await;
                assert_eq!(earlier.begin(&world, &key).await, RebuildStep::Applied);
                assert_eq!(earlier.load(&world, &key, 1).await, RebuildStep::Applied);
                assert_eq!(earlier.end(&world, &key, 1).await, RebuildStep::Applied);
                release.go();
            }
        );
        assert!(
            matches!(outcome, Err(Error::OfferFrozen(_))),
            "the engine is behind the row, and the later rebuild undoes this: {outcome:?}"
        );
        mend.reached().await;
        assert_eq!(later.begin(&world, &key).await, RebuildStep::Applied);
        assert_eq!(later.load(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(later.end(&world, &key, 1).await, RebuildStep::Applied);
        mend.go();

        let id = &first.reservation_id;
        let outcome = releaser.decided(|| releaser.release(&key, "u1", id)).await;
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        releaser.healthy(&key).await;
        world.decided(|| world.reserve(&key, "u1", "r2")).await;
        world.assert_balanced(&key, 1).await;
    }

    // W2
    async fn a_load_that_arrives_after_the_end_of_its_rebuild_changes_nothing(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let rebuild = Rebuild::raise(&world, &key).await;
        assert_eq!(rebuild.begin(&world, &key).await, RebuildStep::Applied);
        assert_eq!(rebuild.load(&world, &key, 1).await, RebuildStep::Applied);
        assert_eq!(rebuild.load(&world, &key, 1).await, RebuildStep::Applied, "applied once");
        let refused = RebuildStep::Refused { epoch: rebuild.epoch };
        assert_eq!(rebuild.end(&world, &key, 2).await, refused, "a chunk is missing");
        assert_eq!(rebuild.end(&world, &key, 1).await, RebuildStep::Applied);
        world.offer(&key).await.adopt(rebuild.epoch);
        world.release(&key, "u1", &first.reservation_id).await.unwrap();
        let before = world.levels(&key).await;

        assert_eq!(rebuild.load(&world, &key, 1).await, refused);
        assert_eq!(rebuild.load(&world, &key, 2).await, refused);
        assert_eq!(rebuild.end(&world, &key, 1).await, refused);
        assert_eq!(world.levels(&key).await, before);
        world.win(&key, "u1", "r2").await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_freeze_during_a_rebuild_outlives_its_end(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let rebuild = Rebuild::raise(&world, &key).await;
        assert_eq!(rebuild.begin(&world, &key).await, RebuildStep::Applied);
        let offer = world.offer(&key).await;
        offer.segments.first().scripts.freeze(1, "of an old epoch").await.unwrap();
        let levels = offer.levels().await.unwrap();
        assert!(
            matches!(&levels, Err(Refusal::Frozen { reason, .. }) if reason == "rebuilding"),
            "{levels:?}"
        );
        offer.segments.first().scripts.freeze(rebuild.epoch, "contradiction").await.unwrap();
        let refused = RebuildStep::Refused { epoch: rebuild.epoch };
        assert_eq!(rebuild.end(&world, &key, 0).await, refused);
        world.reserve_decided(&key, "u1", "r1").await;
        world.assert_balanced(&key, 1).await;
    }

    // W3
    async fn a_release_is_not_answered_before_the_engine_has_it(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let id = &first.reservation_id;
        let (releaser, gate) = world.beside().await;
        for _ in 0..2 {
            gate.refuse("release");
            let outcome = releaser.release(&key, "u1", id).await;
            assert!(matches!(outcome, Err(Error::EngineUnavailable)), "{outcome:?}");
            releaser.close_circuits().await;
            let row = world.row(id).await.unwrap();
            assert_eq!(row.state, OutboxState::Releasing);
        }
        // Nobody has heard RELEASED so far, so the first reservation may still be the answer.
        assert_eq!(replay(&world.reserve(&key, "u1", "r1").await.unwrap()).0, id.as_str());

        let outcome = releaser.release(&key, "u1", id).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        assert_eq!(world.reserve(&key, "u1", "r1").await.unwrap(), ReserveOutcome::Released);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_release_whose_reply_from_the_engine_is_lost_is_told_by_a_repeat(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let first = world.win(&key, "u1", "r1").await;
        let id = &first.reservation_id;
        let (releaser, gate) = world.beside().await;
        gate.lose_reply("release");
        let outcome = releaser.release(&key, "u1", id).await;
        assert!(matches!(outcome, Err(Error::EngineUnavailable)), "{outcome:?}");
        assert_eq!(world.levels(&key).await.stock, 1);
        // The unit goes to another buyer before the release is repeated.
        let second = world.win(&key, "u2", "r1").await;
        let outcome = releaser.decided(|| releaser.release(&key, "u1", id)).await;
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        assert_eq!(world.levels(&key).await.stock, 0, "it was given back twice");
        assert!(matches!(
            world.find(&key, "u2", &second.reservation_id).await,
            Found::Held { .. }
        ));
        world.assert_balanced(&key, 1).await;
    }

    // W8
    async fn a_take_of_an_old_epoch_does_not_survive_a_rebuild(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let old = world.take(&key, "u1", "r1").await;
        assert_eq!(world.levels(&key).await.unacked, 1);
        world.rebuild(&key).await;
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.reservations, levels.unacked), (1, 0, 0));
        assert_eq!(world.sweep().await, 0);
        assert!(matches!(world.write(&old).await, Ok(Written::OtherEpoch { .. })));
        assert_eq!(world.row(&old.reservation_id).await, None);

        world.win(&key, "u2", "r1").await;
        assert_eq!(world.reserve(&key, "u1", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 1).await;
    }

    // W9
    async fn a_rebuild_keeps_the_marks_of_releases_that_are_under_way(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let first = world.win(&key, "u1", "r1").await;
        let other = world.win(&key, "u4", "r1").await;
        world.release(&key, "u4", &other.reservation_id).await.unwrap();
        let (releaser, gate) = world.beside().await;
        gate.refuse("release");
        let outcome = releaser.release(&key, "u1", &first.reservation_id).await;
        assert!(matches!(outcome, Err(Error::EngineUnavailable)), "{outcome:?}");
        ground.flush(&world, &key).await;
        world.rebuild_lost(&key).await;

        world.win(&key, "u2", "r1").await;
        world.win(&key, "u3", "r1").await;
        assert_eq!(world.reserve(&key, "u1", "r1").await.unwrap(), ReserveOutcome::Released);
        assert_eq!(world.reserve(&key, "u4", "r1").await.unwrap(), ReserveOutcome::Released);
        assert_eq!(world.reserve(&key, "u5", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 2).await;
    }

    async fn a_script_whose_reply_is_lost_is_told_by_a_repeat(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let (server, gate) = world.beside().await;
        gate.lose_reply("reserve");
        let outcome = server.reserve(&key, "u1", "r1").await;
        assert!(matches!(outcome, Err(Error::EngineUnavailable)), "{outcome:?}");
        assert_eq!(world.levels(&key).await.stock, 0);
        let repeated = server.reserve_decided(&key, "u1", "r1").await;
        assert!(replay(&repeated).1, "it took a second unit");
        world.assert_balanced(&key, 1).await;
    }
}

// V9
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_to_a_stale_replica_is_found_out_by_a_server_that_has_seen_nothing() {
    let on = async |fresh: &Fresh| {
        let mut ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let released = world.win(&key, "u0", "r1").await;
        let primary = ground.redis.as_mut().unwrap();
        let mut replica = RedisServer::start().await;
        replica.follow(primary).await;
        // From here on the replica misses every write: a release and the two last units.
        replica.promote().await;
        world.release(&key, "u0", &released.reservation_id).await.unwrap();
        let winner = world.win(&key, "u1", "r1").await;
        world.win(&key, "u2", "r1").await;
        let address = primary.port();
        primary.kill();
        replica.move_to(address).await;

        let fresh_world = ground.world().await;
        let outcome = fresh_world.reserve_decided(&key, "u0", "r1").await;
        assert_eq!(outcome, ReserveOutcome::Released, "a released reservation is back");
        for server in [&world, &fresh_world] {
            let again = server.reserve_decided(&key, "u1", "r1").await;
            assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
            let outcome = server.reserve_decided(&key, "u3", "r1").await;
            assert_eq!(outcome, ReserveOutcome::SoldOut);
        }
        assert_eq!(fresh_world.sql_epoch(&key).await, 2, "it was not rebuilt exactly once");
        fresh_world.assert_balanced(&key, 2).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_saw_the_lost_writes_finds_a_stale_failover_out() {
    let on = async |fresh: &Fresh| {
        let mut ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&units(1)).await;
        let primary = ground.redis.as_mut().unwrap();
        let mut replica = RedisServer::start().await;
        replica.follow(primary).await;
        replica.promote().await;
        let winner = world.win(&key, "u1", "r1").await;
        let address = primary.port();
        primary.kill();
        replica.move_to(address).await;

        assert_eq!(world.reserve_decided(&key, "u2", "r1").await, ReserveOutcome::SoldOut);
        let again = world.reserve_decided(&key, "u1", "r1").await;
        assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
        world.assert_balanced(&key, 1).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

// W4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_and_back_with_the_same_run_id_and_older_data_is_found_out() {
    let on = async |fresh: &Fresh| {
        let ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let released = world.win(&key, "u0", "r1").await;
        let primary = ground.redis.as_ref().unwrap();
        let run_id = |info: String| {
            let line = info.lines().find(|line| line.starts_with("run_id:")).map(str::to_owned);
            line.unwrap()
        };
        let before = run_id(primary.command(&["INFO", "server"]).await);
        let replica = RedisServer::start().await;
        replica.follow(primary).await;
        replica.promote().await;
        world.release(&key, "u0", &released.reservation_id).await.unwrap();
        let winner = world.win(&key, "u1", "r1").await;
        // The old primary follows the new one, loses what that one never had, and comes back.
        primary.follow(&replica).await;
        primary.promote().await;
        primary.drop_clients().await;
        assert_eq!(run_id(primary.command(&["INFO", "server"]).await), before);

        let fresh_world = ground.world().await;
        let outcome = fresh_world.reserve_decided(&key, "u0", "r1").await;
        assert_eq!(outcome, ReserveOutcome::Released, "a released reservation is back");
        for server in [&world, &fresh_world] {
            let again = server.reserve_decided(&key, "u1", "r1").await;
            assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
        }
        fresh_world.win(&key, "u2", "r1").await;
        fresh_world.assert_balanced(&key, 2).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_primary_that_comes_back_as_it_was_is_behind_the_epoch_in_sql() {
    let on = async |fresh: &Fresh| {
        let mut ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let released = world.win(&key, "u0", "r1").await;
        let mut replica = RedisServer::start().await;
        let primary = ground.redis.as_mut().unwrap();
        replica.follow(primary).await;
        replica.promote().await;
        // Nothing reaches the old primary any more; the other one is rebuilt and sells.
        let address = primary.port();
        let aside = RedisServer::free_port();
        primary.move_to(aside).await;
        primary.drop_clients().await;
        replica.move_to(address).await;
        let outcome = world.decided(|| world.release(&key, "u0", &released.reservation_id)).await;
        assert_given_back(outcome);
        let ReserveOutcome::Reserved { reservation: winner, .. } =
            world.reserve_decided(&key, "u1", "r1").await
        else {
            panic!("not reserved");
        };
        assert_eq!(world.sql_epoch(&key).await, 2);
        // Then the old one is back at its place, the same process with the same identity.
        replica.kill();
        ground.redis.as_mut().unwrap().move_to(address).await;

        let fresh_world = ground.world().await;
        let outcome = fresh_world.reserve_decided(&key, "u0", "r1").await;
        assert_eq!(outcome, ReserveOutcome::Released, "a released reservation is back");
        let again = fresh_world.reserve_decided(&key, "u1", "r1").await;
        assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
        fresh_world.assert_balanced(&key, 1).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_restarts_with_older_data_is_rebuilt() {
    let on = async |fresh: &Fresh| {
        let mut ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let winner = world.win(&key, "u1", "r1").await;
        // Its file has everything; what the new process serves was still another's to write.
        ground.redis.as_mut().unwrap().restart().await;
        world.close_circuits().await;
        let again = world.reserve_decided(&key, "u1", "r1").await;
        assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
        assert_eq!(world.sql_epoch(&key).await, 2, "a restarted server was trusted");
        world.win(&key, "u2", "r1").await;
        world.assert_balanced(&key, 2).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

// V11, in the engine: the rebuilder dies between its commit in SQL and its last step. Others give
// it three seconds, which pass at once here.
#[tokio::test]
async fn a_rebuilder_that_dies_before_its_last_step_is_replaced() {
    let on = async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        let winner = world.win(&key, "u1", "r1").await;
        let dead = Rebuild::raise(&world, &key).await;
        assert_eq!(dead.begin(&world, &key).await, RebuildStep::Applied);
        assert_eq!(dead.load(&world, &key, 1).await, RebuildStep::Applied);

        let first = world.reserve(&key, "u1", "r1").await;
        assert!(matches!(first, Err(Error::OfferFrozen(_))), "{first:?}");
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(4)).await;
        tokio::time::resume();
        let again = world.reserve_decided(&key, "u1", "r1").await;
        assert_eq!(replay(&again), (winner.reservation_id.as_str(), true));
        assert_eq!(world.sql_epoch(&key).await, 3);
        let late = dead.end(&world, &key, 1).await;
        assert_eq!(late, RebuildStep::Refused { epoch: 3 });
        world.assert_balanced(&key, 1).await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

/// A row for a reservation that the engine has never seen.
async fn row_of(
    world: &World,
    key: &seckill::domain::OfferKey,
    buyer: &str,
) -> seckill::outbox::writer::NewRow {
    let offer = world.offer(key).await;
    let buyer = seckill::domain::BuyerId::new(buyer).unwrap();
    let reservation_id = seckill::domain::name_reservation(key, &buyer, None);
    seckill::outbox::writer::NewRow {
        offer: key.clone(),
        epoch: offer.epoch(),
        buyer,
        slot: 1,
        reservation_id,
        quantity: 1,
        order_no: seckill::domain::new_order_no(),
        request_id: None,
        reserve_time: TimeMs::now(),
        hold: None,
    }
}

on_every_ground! {
    // W6
    async fn a_unit_that_moves_while_the_segments_are_read_is_not_sold_out(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { segments: 3, ..units(1) }).await;
        let (second, gate) = world.beside().await;
        let offer = world.offer(&key).await;
        // The one unit is in segment 0, and the buyer's home is segment 2.
        let buyer = (0..).map(|n| format!("b-{n}")).find(|b| offer.segments.home_of(b).number == 2);
        let buyer = buyer.unwrap();
        let mut of_0 = gate.stop_before("levels");
        let mut of_1 = gate.stop_after("levels");
        let asks = second;
        let asking = tokio::spawn({
            let (buyer, key) = (buyer.clone(), key.clone());
            async move { (asks.reserve(&key, &buyer, "r1").await, asks) }
        });
        // Segment 1 was read, and had nothing; segment 0 was not yet.
        of_0.reached().await;
        of_1.reached().await;
        let [from, to] = [0, 1].map(|number| offer.segments.get(number).unwrap().clone());
        let sent = from.scripts.transfer_out(1, 1, 1).await.unwrap().unwrap();
        assert_eq!(sent, SentOff::Out { sequence: 1, units: 1 });
        let arrived = to.scripts.transfer_in(1, 0, 1, 1).await.unwrap();
        assert!(matches!(arrived, Arrived::In { .. }), "{arrived:?}");
        assert_eq!(from.scripts.transfer_done(1, 1, 1).await.unwrap(), Followed::Done);
        of_0.go();
        of_1.go();
        let (answer, _second) = asking.await.unwrap();
        let won = crate::support::world::won(answer);
        assert_eq!(won.buyer.as_str(), buyer, "it was on sale all the time");
        world.assert_balanced(&key, 1).await;
    }

    // W7
    async fn units_that_are_refused_at_their_target_are_not_forgotten(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { segments: 2, ..units(4) }).await;
        let (second, gate) = world.beside().await;
        let offer = world.offer(&key).await;
        let at_1 = (0..).map(|n| format!("b-{n}")).filter(|b| offer.segments.home_of(b).number == 1);
        let buyers: Vec<String> = at_1.take(4).collect();
        for buyer in &buyers[..2] {
            world.win(&key, buyer, "r1").await;
        }
        let mut stop = gate.stop_before("transfer_in");
        let (asks, asked, asker) = (second, key.clone(), buyers[2].clone());
        let asking =
            tokio::spawn(async move { (asks.reserve(&asked, &asker, "r1").await, asks) });
        stop.reached().await;
        // Under the next epoch the same pair of segments has a transfer of the same sequence.
        world.rebuild(&key).await;
        let [from, to] = [0, 1].map(|number| offer.segments.get(number).unwrap().clone());
        let sent = from.scripts.transfer_out(2, 1, 1).await.unwrap().unwrap();
        assert_eq!(sent, SentOff::Out { sequence: 1, units: 1 });
        stop.go();
        let (answer, _second) = asking.await.unwrap();
        assert!(matches!(answer, Err(Error::OfferFrozen(_))), "{answer:?}");
        let late = to.scripts.transfer_in(1, 0, 1, 1).await.unwrap();
        assert!(matches!(late, Arrived::Retry { .. }), "{late:?}");
        let late = from.scripts.transfer_done(1, 1, 1).await.unwrap();
        assert!(matches!(late, Followed::Retry { .. }), "{late:?}");
        let left = from.scripts.transfers(2).await.unwrap().unwrap();
        assert_eq!(left, [Transfer { target: 1, sequence: 1, units: 1 }]);
        world.sweep().await;
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.out), (2, 0));
        for buyer in &buyers[2..] {
            world.win(&key, buyer, "r1").await;
        }
        world.assert_balanced(&key, 4).await;
    }
}
