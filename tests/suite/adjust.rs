//! More and fewer units of an offer during the sale: what is applied, what is refused and leaves
//! everything as it was, and what is finished after a step was lost.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future, stream};
use sea_orm::{ConnectionTrait, EntityTrait, PaginatorTrait};
use seckill::{
    adjustments::{self, Proposal, Step, Verdict},
    admission::Admit,
    domain::{
        ActivityId, AdjustRequest, Adjusted, DifferenceKind, MAX_TOTAL, OfferKey, PageQuery,
        RequestId, ReserveOutcome, SkuId,
    },
    engine::{Script, scripts::SetAside, segments::OfferLevels},
    entity::{adjustments as rows, adjustments::AdjustmentState},
    error::Error,
    outbox::sweeper::sweep,
    server::Server,
};
use tokio::time::Instant;

use crate::support::{
    calls::Recorder,
    eventually,
    process::channel,
    stage::Gate,
    storm,
    world::{Sale, World, on_every_ground, request},
};

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

pub(crate) fn adjustment(key: &OfferKey, request_id: &str, delta: i64) -> AdjustRequest {
    AdjustRequest {
        offer: key.clone(),
        delta,
        request_id: RequestId::new(request_id).unwrap(),
        reason: "test".to_owned(),
    }
}

impl World {
    pub(crate) async fn adjust(
        &self,
        key: &OfferKey,
        request_id: &str,
        delta: i64,
    ) -> Result<Adjusted, Error> {
        self.parts.activities.adjust(&adjustment(key, request_id, delta), "test").await
    }

    /// The state of an adjustment in SQL.
    pub(crate) async fn adjustment_state(&self, request_id: &str) -> Option<AdjustmentState> {
        let id = RequestId::new(request_id).unwrap();
        let row = adjustments::stored(&self.parts.database, &id).await.unwrap();
        row.map(|row| row.state)
    }

    /// Sets units aside and does no more, like a server that dies after the script.
    pub(crate) async fn set_aside(&self, key: &OfferKey, request_id: &str, units: u64) -> u64 {
        let offer = self.offer(key).await;
        let (epoch, now) = (offer.epoch(), self.parts.database.clock());
        let id = RequestId::new(request_id).unwrap();
        let set_aside = offer.segments.first().scripts.set_aside(epoch, &id, units, now).await;
        assert_eq!(set_aside.unwrap().unwrap(), SetAside::Done { units });
        epoch
    }

    /// What SQL decides about an adjustment, and no more.
    pub(crate) async fn decide(
        &self,
        key: &OfferKey,
        request_id: &str,
        delta: i64,
        step: Step,
    ) -> Verdict {
        let request_id = RequestId::new(request_id).unwrap();
        let proposal = Proposal {
            offer: key,
            request_id: &request_id,
            delta,
            step,
            actor: "test",
            reason: "",
        };
        adjustments::decide(&self.parts.database, &proposal).await.unwrap()
    }
}

#[track_caller]
fn assert_applied(adjusted: Result<Adjusted, Error>, delta: i64, total: i64) {
    let adjusted = adjusted.unwrap();
    assert_eq!((adjusted.applied, adjusted.possible), (true, delta), "{adjusted:?}");
    assert_eq!(adjusted.offer.total, total, "{adjusted:?}");
}

#[track_caller]
fn assert_refused(adjusted: Result<Adjusted, Error>, possible: i64, total: i64) {
    let adjusted = adjusted.unwrap();
    assert_eq!((adjusted.applied, adjusted.possible), (false, possible), "{adjusted:?}");
    assert_eq!(adjusted.offer.total, total, "{adjusted:?}");
}

/// The figures that no refusal may change; those of the engine without its revision.
async fn figures(world: &World, key: &OfferKey) -> (i64, i64, i64, [u64; 4]) {
    let row = world.offer_row(key).await;
    let levels = world.levels(key).await;
    let OfferLevels { stock, total, held, aside, .. } = levels;
    (row.total, row.reserved, row.epoch, [stock, total, held, aside])
}

/// Nothing is left to do: the engine's total is SQL's, and nothing is set aside or pending.
async fn assert_at_rest(world: &World, key: &OfferKey, total: u64, held: i64) {
    world.sweep().await;
    world.assert_balanced(key, held).await;
    let levels = world.levels(key).await;
    assert_eq!((levels.total, levels.aside), (total, 0), "{levels:?}");
    assert_eq!(world.offer_row(key).await.total, i64::try_from(total).unwrap());
    let pending = rows::Entity::find().all(world.parts.database.reader()).await.unwrap();
    assert!(pending.iter().all(|row| row.state != AdjustmentState::Pending), "{pending:?}");
    let report = world.parts.reconciler.reconcile(&key.activity_id, false, "test").await.unwrap();
    assert_eq!(report.difference_count, 0, "{report:?}");
}

/// Runs one adjustment while the gate does something to one of its scripts, then lets the sweeper of
/// another server finish it; answers what a repeat hears.
async fn broken_off(
    world: &World,
    key: &OfferKey,
    delta: i64,
    strike: impl FnOnce(&Gate),
) -> Adjusted {
    let (dying, gate) = world.beside().await;
    strike(&gate);
    let first = dying.adjust(key, "a1", delta).await;
    assert!(matches!(first, Err(Error::EngineUnavailable)), "{first:?}");
    world.sweep().await;
    world.adjust(key, "a1", delta).await.unwrap()
}

on_every_ground! {
    async fn units_are_added_and_taken_away_during_the_sale(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(2)).await;
        for buyer in ["u1", "u2"] {
            world.win(&key, buyer, "r").await;
        }
        assert_eq!(world.reserve(&key, "u3", "r").await.unwrap(), ReserveOutcome::SoldOut);
        assert_applied(world.adjust(&key, "a1", 5).await, 5, 7);
        world.win(&key, "u3", "r").await;
        assert_applied(world.adjust(&key, "a2", -3).await, -3, 4);
        world.win(&key, "u4", "r").await;
        assert_eq!(world.reserve(&key, "u5", "r").await.unwrap(), ReserveOutcome::SoldOut);
        let levels = world.levels(&key).await;
        assert_eq!((levels.stock, levels.total, levels.aside), (0, 4, 0), "{levels:?}");

        let query = PageQuery { page_size: 10, page_token: String::new(), activity_id: None };
        let (audit, _) = seckill::audit::list(&world.parts.database, &query).await.unwrap();
        let told: Vec<_> =
            audit.iter().filter(|entry| entry.action == "adjust_stock").collect();
        assert_eq!(told.len(), 2);
        assert!(told[0].detail.contains("\"delta\":-3"), "{}", told[0].detail);
        assert!(told[0].detail.contains("\"total\":4"), "{}", told[0].detail);
        assert_eq!((told[0].actor.as_str(), told[0].sku_id.as_str()), ("test", key.sku_id.as_str()));
        // The same content again is still the same activity.
        let mut spec = crate::support::world::spec_of(&units(2));
        let view = world.parts.activities.get(&key.activity_id).await.unwrap();
        (spec.start_time, spec.end_time) = (view.start_time, view.end_time);
        world.parts.activities.create(spec, "test").await.unwrap();
        assert_at_rest(&world, &key, 4, 4).await;
    }

    async fn more_than_is_unsold_is_not_taken_away_and_nothing_changed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        for buyer in 0..6 {
            world.win(&key, &format!("u{buyer}"), "r").await;
        }
        let before = figures(&world, &key).await;
        assert_refused(world.adjust(&key, "a1", -5).await, -4, 10);
        assert_refused(world.adjust(&key, "a2", -1_000_000).await, -4, 10);
        assert_eq!(figures(&world, &key).await, before);
        assert_eq!(world.adjustment_state("a1").await, Some(AdjustmentState::Cancelled));
        // A refusal stays one, also when it could be done now.
        let gone = world.win(&key, "u0", "r").await;
        world.release(&key, "u0", &gone.reservation_id).await.unwrap();
        assert_refused(world.adjust(&key, "a1", -5).await, -4, 10);
        assert_applied(world.adjust(&key, "a3", -5).await, -5, 5);
        assert_refused(world.adjust(&key, "a4", -1).await, 0, 5);
        assert_at_rest(&world, &key, 5, 5).await;
    }

    async fn the_total_stays_within_its_limits_and_nothing_changed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let max = i64::try_from(MAX_TOTAL).unwrap();
        let before = figures(&world, &key).await;
        assert_refused(world.adjust(&key, "a1", -10).await, -9, 10);
        assert_refused(world.adjust(&key, "a2", max).await, max - 10, 10);
        assert_eq!(figures(&world, &key).await, before);
        assert_applied(world.adjust(&key, "a3", max - 10).await, max - 10, max);
        assert_refused(world.adjust(&key, "a4", 1).await, 0, max);
        assert_eq!(world.levels(&key).await.stock, MAX_TOTAL);
        assert_applied(world.adjust(&key, "a5", 1 - max).await, 1 - max, 1);
        world.win(&key, "u1", "r").await;
        assert_at_rest(&world, &key, 1, 1).await;
    }

    async fn a_request_id_with_other_figures_is_a_conflict_and_nothing_changed(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let other = world.open_sale(&Sale { activity: "other", ..units(10) }).await;
        assert_applied(world.adjust(&key, "a1", 3).await, 3, 13);
        assert_refused(world.adjust(&key, "a2", -20).await, -12, 13);
        let before = (figures(&world, &key).await, figures(&world, &other).await);
        for (key, id, delta, differs) in [
            (&key, "a1", 4, "delta"),
            (&key, "a1", -3, "delta"),
            (&key, "a2", -2, "delta"),
            (&other, "a1", 3, "activity_id"),
            (&other, "a2", -20, "activity_id"),
        ] {
            match world.adjust(key, id, delta).await {
                Err(Error::RequestIdConflict { field, .. }) => assert_eq!(field, differs),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((figures(&world, &key).await, figures(&world, &other).await), before);
        // Another server is about to take away another number under the same id.
        world.set_aside(&key, "a3", 2).await;
        let conflict = world.adjust(&key, "a3", -4).await;
        assert!(matches!(conflict, Err(Error::RequestIdConflict { field: "delta", .. })));
        // Or one from another offer: what was set aside here is put back.
        let epoch = world.set_aside(&other, "a1", 3).await;
        let verdict = world.decide(&other, "a1", -3, Step::TakeAway { epoch }).await;
        assert!(matches!(&verdict, Verdict::Stored(row) if row.delta == 3), "{verdict:?}");
        assert_at_rest(&world, &other, 10, 0).await;
        assert_at_rest(&world, &key, 13, 0).await;
    }

    async fn only_what_is_warm_and_not_over_is_adjusted_and_nothing_changed(ground: &Ground<'_>) {
        let world = ground.world().await;
        let (activities, database) = (&world.parts.activities, &world.parts.database);
        let key = world.plan_sale(&units(5)).await;
        let id = &key.activity_id;
        let refused = async |request_id: &str, delta| {
            let total = world.offer_row(&key).await.total;
            let answer = world.adjust(&key, request_id, delta).await;
            assert!(matches!(answer, Err(Error::WrongActivityState { .. })), "{answer:?}");
            assert_eq!(world.offer_row(&key).await.total, total);
            assert_eq!(world.adjustment_state(request_id).await, None);
        };
        refused("cold-1", 1).await;
        refused("cold-2", -1).await;
        activities.warm_up(id, "test").await.unwrap();
        assert_applied(world.adjust(&key, "cold-1", 1).await, 1, 6);
        activities.pause(id, "test", "").await.unwrap();
        assert_applied(world.adjust(&key, "paused", -1).await, -1, 5);
        activities.resume(id, "test", "").await.unwrap();
        activities.end(id, "test", "").await.unwrap();
        refused("ended-1", 1).await;
        refused("ended-2", -1).await;
        // A state that changed behind the look at it: what was set aside is put back.
        let epoch = world.set_aside(&key, "late", 2).await;
        let late = world.decide(&key, "late", -2, Step::TakeAway { epoch }).await;
        assert!(matches!(late, Verdict::Stored(row) if row.state == AdjustmentState::Cancelled));
        assert_eq!(world.decide(&key, "later", 2, Step::Add).await, Verdict::NotOpen);
        assert_eq!(world.adjustment_state("later").await, None);
        assert_at_rest(&world, &key, 5, 0).await;
        activities.settle(id, "test", "").await.unwrap();
        refused("settled-1", 1).await;
        refused("settled-2", -1).await;
        // What was decided is still told.
        assert_applied(world.adjust(&key, "paused", -1).await, -1, 5);

        let nobody = OfferKey { activity_id: ActivityId::new("none").unwrap(), ..key.clone() };
        let answer = world.adjust(&nobody, "n", 1).await;
        assert!(matches!(answer, Err(Error::UnknownActivity(_))), "{answer:?}");
        let nothing = OfferKey { sku_id: SkuId::new("none").unwrap(), ..key.clone() };
        let answer = world.adjust(&nothing, "n", 1).await;
        assert!(matches!(answer, Err(Error::UnknownOffer { .. })), "{answer:?}");
        let stored = rows::Entity::find().count(database.reader()).await.unwrap();
        assert_eq!(stored, 3);
    }

    async fn two_servers_do_the_same_request_once(ground: &Ground<'_>) {
        let first = ground.world().await;
        let key = first.open_sale(&units(100)).await;
        let (second, _) = first.beside().await;
        let mut total = 100;
        for round in 0..12 {
            let delta = if round % 2 == 0 { -7 } else { 4 };
            total += delta;
            let id = format!("a{round}");
            let (one, other) =
                tokio::join!(first.adjust(&key, &id, delta), second.adjust(&key, &id, delta));
            assert_applied(one, delta, total);
            assert_applied(other, delta, total);
        }
        assert_at_rest(&first, &key, u64::try_from(total).unwrap(), 0).await;
    }

    async fn an_adjustment_whose_step_is_lost_is_finished_by_another_server(ground: &Ground<'_>) {
        let world = ground.world().await;
        for (nth, (activity, delta, applied, strike)) in [
            ("add-lost", 3, true, (|gate: &Gate| gate.lose_reply("add_units")) as fn(&Gate)),
            ("add-refused", 3, true, |gate| gate.refuse("add_units")),
            ("aside-lost", -3, false, |gate| gate.lose_reply("set_aside")),
            ("forget-lost", -3, true, |gate| gate.lose_reply("forget_aside")),
            ("forget-refused", -3, true, |gate| gate.refuse("forget_aside")),
        ]
        .into_iter()
        .enumerate()
        {
            // Each has a sale of its own, and so a request id of its own in SQL.
            let key = world.open_sale(&Sale { activity, ..units(10) }).await;
            let adjusted = broken_off(&world, &key, delta, strike).await;
            assert_eq!((adjusted.applied, adjusted.possible), (applied, delta), "{activity}");
            let total = if applied { 10 + delta } else { 10 };
            assert_at_rest(&world, &key, u64::try_from(total).unwrap(), 0).await;
            let renamed = format!("UPDATE adjustments SET request_id = 'done-{nth}' WHERE request_id = 'a1'");
            world.parts.database.writer().execute_unprepared(&renamed).await.unwrap();
        }
    }

    async fn a_late_set_aside_of_a_request_that_is_over_takes_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let offer = world.offer(&key).await;
        let again = async |id: &str, units| {
            let id = RequestId::new(id).unwrap();
            let (epoch, now) = (offer.epoch(), world.parts.database.clock());
            offer.segments.first().scripts.set_aside(epoch, &id, units, now).await.unwrap().unwrap()
        };
        assert_applied(world.adjust(&key, "a1", -2).await, -2, 8);
        assert_eq!(again("a1", 2).await, SetAside::Decided);
        world.set_aside(&key, "a2", 3).await;
        world.sweep().await;
        assert_eq!(world.adjustment_state("a2").await, Some(AdjustmentState::Cancelled));
        assert_eq!(again("a2", 3).await, SetAside::Decided);
        assert_at_rest(&world, &key, 8, 0).await;
        // A rebuild forgets what was done; the row in SQL is of another epoch then.
        world.rebuild(&key).await;
        assert_eq!(again("a1", 2).await, SetAside::Done { units: 2 });
        assert_eq!(again("a2", 3).await, SetAside::Done { units: 3 });
        assert_eq!(world.levels(&key).await.stock, 3);
        assert_at_rest(&world, &key, 8, 0).await;
        assert_eq!(world.levels(&key).await.stock, 8);
    }

    async fn a_rebuild_drops_what_is_set_aside(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(10)).await;
        let epoch = world.set_aside(&key, "a1", 4).await;
        assert_eq!(world.levels(&key).await.stock, 6);
        let report =
            world.parts.reconciler.reconcile(&key.activity_id, false, "test").await.unwrap();
        assert_eq!(report.difference_count, 0, "{report:?}");
        let segment = report.offers[0].segments[0];
        assert_eq!((segment.remaining, segment.in_transfer, segment.held), (6, 4, 0));

        world.rebuild(&key).await;
        assert_eq!(figures(&world, &key).await.3, [10, 10, 0, 0]);
        let late = world.decide(&key, "a1", -4, Step::TakeAway { epoch }).await;
        assert_eq!(late, Verdict::OtherEpoch { sql: epoch + 1 });
        assert_eq!(world.adjustment_state("a1").await, None);
        // And as a whole: the call begins anew.
        let (other, gate) = world.beside().await;
        let mut stop = gate.stop_before("set_aside");
        let (adjusted, ()) = tokio::join!(other.adjust(&key, "a1", -4), async {
            stop.reached().await;
            world.rebuild(&key).await;
            stop.go();
        });
        assert_applied(adjusted, -4, 6);
        assert_at_rest(&world, &key, 6, 0).await;
    }

    async fn a_lost_engine_is_rebuilt_with_the_adjusted_total(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        world.win(&key, "u1", "r").await;
        assert_applied(world.adjust(&key, "a1", 4).await, 4, 9);
        ground.flush(&world, &key).await;
        assert_applied(world.adjust(&key, "a2", -6).await, -6, 3);
        ground.flush(&world, &key).await;
        assert_applied(world.adjust(&key, "a3", 1).await, 1, 4);
        assert_at_rest(&world, &key, 4, 1).await;
    }

    async fn a_total_that_differs_is_found_and_mended(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        assert_applied(world.adjust(&key, "a1", 4).await, 4, 9);
        world.meddle(&key, SHRINK, "4").await;
        let reconcile = async |repair| {
            let reconciler = &world.parts.reconciler;
            reconciler.reconcile(&key.activity_id, repair, "test").await.unwrap()
        };
        let report = reconcile(false).await;
        assert_eq!(report.differences.len(), 1, "{report:?}");
        let difference = &report.differences[0];
        assert_eq!(difference.kind, DifferenceKind::UnitsMissing, "{report:?}");
        assert_eq!((difference.expected, difference.actual), (9, 5), "{report:?}");
        // What the engine has yet to follow is none.
        let verdict = world.decide(&key, "a2", 2, Step::Add).await;
        assert!(matches!(verdict, Verdict::Stored(_)));
        assert_eq!(reconcile(false).await.difference_count, 0);
        world.sweep().await;
        assert_eq!(reconcile(true).await.difference_count, 1);
        assert_at_rest(&world, &key, 11, 0).await;
    }

    async fn an_adjustment_on_its_way_keeps_an_activity_from_being_settled(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&units(5)).await;
        let verdict = world.decide(&key, "a1", 2, Step::Add).await;
        assert!(matches!(verdict, Verdict::Stored(_)));
        let activities = &world.parts.activities;
        activities.end(&key.activity_id, "test", "").await.unwrap();
        match activities.settle(&key.activity_id, "test", "").await {
            Err(Error::NotDrained { detail, .. }) => {
                assert_eq!(detail, "1 adjustments on their way to the engine");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.adjustment_state("a1").await, Some(AdjustmentState::Pending));
        assert_at_rest(&world, &key, 7, 0).await;
        activities.settle(&key.activity_id, "test", "").await.unwrap();
    }

    async fn a_sold_out_offer_opens_on_every_server_when_units_come(ground: &Ground<'_>) {
        let mut settings = ground.settings();
        settings.reserve.believe_sold_out_ms = 60_000;
        let server = storm::serve(settings).await;
        let key = storm::sell(&server, "sale", 2).await;
        let here = World { parts: server.parts.clone(), settings: ground.settings() };
        for buyer in ["u1", "u2"] {
            here.win(&key, buyer, "r").await;
        }
        let knows = |request_id: &str| {
            let request = request(&key, "asker", request_id, 1);
            let admit = server.parts.reservations.admit(&request).unwrap();
            matches!(admit, Admit::No(ReserveOutcome::SoldOut))
        };
        eventually("it is known to be sold out", async || {
            let _asked = here.reserve(&key, "asker", "r1").await;
            knows("r1").then_some(())
        })
        .await;
        let opens = async || {
            let began = Instant::now();
            while knows("r2") {
                assert!(began.elapsed() < Duration::from_millis(2_500), "nobody was told");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // Another server adds, and undoes what a third one set aside.
        let (other, _) = here.beside().await;
        assert_applied(other.adjust(&key, "a1", 1).await, 1, 3);
        opens().await;
        other.set_aside(&key, "a2", 1).await;
        eventually("it is known to be sold out", async || {
            let _asked = here.reserve(&key, "asker", "r1").await;
            knows("r1").then_some(())
        })
        .await;
        other.sweep().await;
        opens().await;
        here.win(&key, "u3", "r").await;
        server.stop().await;
    }

    async fn watchers_are_told_of_the_total(ground: &Ground<'_>) {
        let server = Server::start(&ground.settings()).await.unwrap();
        let world = World { parts: server.parts.clone(), settings: ground.settings() };
        let key = world.open_sale(&units(10)).await;
        world.win(&key, "u1", "r").await;
        let watcher = Recorder::start(channel(server.addr).await, &key).await;
        for (nth, (delta, total)) in [(5, 15), (-8, 7), (-6, 1), (4, 5)].into_iter().enumerate() {
            assert_applied(world.adjust(&key, &format!("a{nth}"), delta).await, delta, total);
            eventually("the watcher is told", async || {
                let last = watcher.seen().messages.last()?.clone();
                let told = (last.total, last.remaining, last.reserved);
                (told == (total, total - 1, 1)).then_some(())
            })
            .await;
        }
        let seen = watcher.seen();
        seen.check().unwrap();
        for message in &seen.messages {
            assert_eq!(message.reserved, 1, "{message:?}");
        }
        let view = world.parts.activities.get(&key.activity_id).await.unwrap();
        assert_eq!(view.offers[0].total, 5);
        server.stop().await;
    }

    async fn adjustments_in_a_storm_of_buyers_leave_the_books_balanced(ground: &Ground<'_>) {
        let first = Arc::new(ground.world().await);
        let key = first.open_sale(&units(60)).await;
        let worlds = [first.clone(), Arc::new(first.beside().await.0)];
        let buy = async |nth: usize| {
            let (world, buyer) = (&worlds[nth % 2], format!("u{nth}"));
            let outcome = world.reserve_decided(&key, &buyer, "r").await;
            let ReserveOutcome::Reserved { reservation, .. } = outcome else { return 0 };
            if nth.is_multiple_of(3) {
                world.decided(|| world.release(&key, &buyer, &reservation.reservation_id)).await;
                return 0;
            }
            1
        };
        let operate = async |nth: usize| {
            let world = &worlds[nth];
            let mut sum = 0;
            for round in 0..15 {
                let delta = if round % 2 == nth % 2 { 9 } else { -7 };
                let id = format!("a{nth}-{round}");
                let adjusted = world.decided(|| world.adjust(&key, &id, delta)).await;
                sum += if adjusted.applied { delta } else { 0 };
                if round % 5 == 4 {
                    let offer = world.offer(&key).await;
                    let _late = offer.segments.first().scripts.freeze(offer.epoch(), "test").await;
                    world.parts.recovery.rebuild(&offer);
                }
                if round % 3 == 0 {
                    let _busy = sweep(&world.parts.reservations, Duration::ZERO).await;
                }
            }
            sum
        };
        let buyers = stream::iter(0..240).map(buy).buffer_unordered(24).collect::<Vec<i64>>();
        let operators = future::join_all((0..2).map(operate));
        let (held, sums) = future::join(buyers, operators).await;
        let (held, sum): (i64, i64) = (held.into_iter().sum(), sums.into_iter().sum());
        first.healthy(&key).await;
        assert_at_rest(&first, &key, u64::try_from(60 + sum).unwrap(), held).await;
    }
}

/// Takes units out of stock and total, as no server does.
const SHRINK: Script = Script {
    name: "shrink",
    source: "redis.call('DECRBY', KEYS[1], ARGV[2]) \
             redis.call('HINCRBY', KEYS[6], 'total', '-' .. ARGV[2]) return {'ok'}",
};
