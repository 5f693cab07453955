//! Offers whose stock lies in several segments: each buyer has one home, units move to where they are
//! asked for, none is stranded, and nothing is said to be sold out while a unit is on sale.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{StreamExt as _, stream};
use seckill::{
    adjustments,
    domain::{
        AdjustRequest, BuyerId, OfferKey, ReleaseOutcome, RequestId, Reservation, ReserveOutcome,
        SkuId,
    },
    engine::{
        batcher::Segment,
        scripts::{Arrived, Followed, Levels, Refusal, SentOff, Transfer},
    },
    error::Error,
    offer::Offer,
    transfers,
};

use crate::support::{
    cluster::Cluster,
    databases::{self, Fresh},
    eventually,
    process::Serve,
    storm::{self, Storm},
    world::{Ground, SKU, Sale, World, on_every_ground, on_redis, won},
};

const AT_ONCE: usize = 32;

fn sale(total: u64, segments: u32) -> Sale {
    Sale { total, segments, ..Sale::default() }
}

/// The figures of every segment.
async fn levels(world: &World, key: &OfferKey) -> Vec<Levels> {
    world.offer(key).await.segments.levels_of_each().await.unwrap().unwrap()
}

async fn stocks(world: &World, key: &OfferKey) -> Vec<u64> {
    levels(world, key).await.iter().map(|levels| levels.stock).collect()
}

/// A buyer whose home is this segment.
async fn buyer_of(world: &World, key: &OfferKey, home: u32, nth: usize) -> String {
    let offer = world.offer(key).await;
    let mut buyers = (0..).map(|number| format!("b-{number}"));
    buyers.by_ref().filter(|name| offer.segments.home_of(name).number == home).nth(nth).unwrap()
}

async fn segment(world: &World, key: &OfferKey, number: u32) -> Arc<Segment> {
    world.offer(key).await.segments.get(number).unwrap().clone()
}

/// Sends units off, and no more.
async fn send_off(
    world: &World,
    key: &OfferKey,
    source: u32,
    target: u32,
    most: u64,
) -> (u64, u64) {
    let source = segment(world, key, source).await;
    let epoch = world.offer(key).await.epoch();
    match source.scripts.transfer_out(epoch, target, most).await.unwrap().unwrap() {
        SentOff::Out { sequence, units } => (sequence, units),
        SentOff::Nothing => panic!("nothing was sent"),
    }
}

/// Everybody asks at once; who won, and what the others heard.
async fn all_ask(
    world: &World,
    key: &OfferKey,
    buyers: impl IntoIterator<Item = (String, u32)>,
) -> (Vec<Reservation>, Vec<ReserveOutcome>) {
    let answers = stream::iter(buyers)
        .map(async |(buyer, quantity)| {
            world.decided(|| world.reserve_units(key, &buyer, "r1", quantity)).await
        })
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<ReserveOutcome>>()
        .await;
    let (won, lost): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| matches!(answer, ReserveOutcome::Reserved { .. }));
    (won.into_iter().map(|answer| crate::support::world::won(Ok(answer))).collect(), lost)
}

fn request_id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

async fn adjust(world: &World, key: &OfferKey, id: &str, delta: i64) -> Result<(bool, i64), Error> {
    let request = AdjustRequest {
        offer: key.clone(),
        delta,
        request_id: request_id(id),
        reason: "test".to_owned(),
    };
    world
        .parts
        .activities
        .adjust(&request, "test")
        .await
        .map(|adjusted| (adjusted.applied, adjusted.possible))
}

async fn assert_no_difference(world: &World, key: &OfferKey) {
    let report = world.parts.reconciler.reconcile(&key.activity_id, false, "test").await.unwrap();
    assert_eq!(report.difference_count, 0, "{report:?}");
}

on_every_ground! {
    async fn a_warm_up_spreads_the_units_evenly(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(10, 4)).await;
        assert_eq!(stocks(&world, &key).await, [3, 3, 2, 2]);
        let whole = world.levels(&key).await;
        assert_eq!((whole.stock, whole.total), (10, 10));
        // Again: nothing changes.
        world.parts.activities.warm_up(&key.activity_id, "test").await.unwrap();
        assert_eq!(stocks(&world, &key).await, [3, 3, 2, 2]);
        world.assert_balanced(&key, 0).await;
        assert_no_difference(&world, &key).await;
    }

    async fn a_warm_up_names_the_segment_that_does_not_match(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.plan_sale(&sale(10, 4)).await;
        let offer = world.offer(&key).await;
        segment(&world, &key, 2).await.scripts.warmup(1, 7, 7, offer.keys_expire).await.unwrap();
        let refused = world.parts.activities.warm_up(&key.activity_id, "test").await;
        let Err(Error::WarmupMismatch { detail, .. }) = &refused else { panic!("{refused:?}") };
        assert!(detail.starts_with("segment 2: total is 7 where 2 belongs"), "{detail}");
        assert!(!world.offer(&key).await.is_warm());
    }

    async fn a_buyer_holds_everything_at_home(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(30, 3)).await;
        let (second, _) = world.beside().await;
        for home in 0..3 {
            let buyer = buyer_of(&world, &key, home, 0).await;
            let held = world.win(&key, &buyer, "r1").await;
            assert_eq!(levels(&world, &key).await[home as usize].held, 1);
            let again = second.win(&key, &buyer, "r1").await;
            assert_eq!(again.reservation_id, held.reservation_id, "another server, the same home");
            let more = second.reserve(&key, &buyer, "r2").await.unwrap();
            assert!(matches!(more, ReserveOutcome::Duplicate { .. }), "{more:?}");
            let back = second.release(&key, &buyer, &held.reservation_id).await.unwrap();
            assert_eq!(back, ReleaseOutcome::Released);
            let gone = world.reserve(&key, &buyer, "r1").await.unwrap();
            assert_eq!(gone, ReserveOutcome::Released);
        }
        world.assert_balanced(&key, 0).await;
        assert_no_difference(&world, &key).await;
    }

    async fn one_home_sells_the_units_of_all_segments(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(20, 4)).await;
        let mut buyers = Vec::new();
        for nth in 0..21 {
            buyers.push(buyer_of(&world, &key, 1, nth).await);
        }
        for buyer in &buyers[..20] {
            world.win(&key, buyer, "r1").await;
        }
        let late = world.reserve(&key, &buyers[20], "r1").await.unwrap();
        assert_eq!(late, ReserveOutcome::SoldOut);
        assert_eq!(stocks(&world, &key).await, [0; 4]);
        world.assert_balanced(&key, 20).await;
        assert_no_difference(&world, &key).await;
    }

    async fn no_unit_of_a_thousand_in_sixteen_segments_is_stranded(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(1_000, 16)).await;
        let buyers = (0..1_100).map(|nth| (format!("buyer-{nth}"), 1));
        let (won, lost) = all_ask(&world, &key, buyers).await;
        assert_eq!(won.len(), 1_000, "all units are sold, the last one too");
        assert!(lost.iter().all(|answer| *answer == ReserveOutcome::SoldOut), "{lost:?}");
        assert_eq!(stocks(&world, &key).await, [0; 16]);
        world.assert_balanced(&key, 1_000).await;
        assert_no_difference(&world, &key).await;
    }

    async fn buyers_of_several_units_get_them_from_all_segments(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(100, 16)).await;
        // Nobody's home has as many as she asks for.
        let (won, lost) = all_ask(&world, &key, (0..20).map(|nth| (format!("b-{nth}"), 9))).await;
        assert_eq!(won.len(), 11);
        let only_one = |answer: &ReserveOutcome| {
            matches!(answer, ReserveOutcome::Insufficient { remaining: 1 })
        };
        assert!(lost.iter().all(only_one), "{lost:?}");
        world.win(&key, "the-last", "r1").await;
        let late = world.reserve_units(&key, "late", "r1", 3).await.unwrap();
        assert_eq!(late, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 100).await;
        assert_no_difference(&world, &key).await;
    }

    async fn fewer_units_than_asked_are_told_over_all_segments_and_stay_where_they_are(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(5, 3)).await;
        let before = stocks(&world, &key).await;
        let few = world.reserve_units(&key, "ann", "r1", 6).await.unwrap();
        assert_eq!(few, ReserveOutcome::Insufficient { remaining: 5 });
        assert_eq!(stocks(&world, &key).await, before);
        let all = won(world.reserve_units(&key, "ann", "r2", 5).await);
        assert_eq!(all.quantity, 5);
        world.assert_balanced(&key, 5).await;
    }

    async fn a_buyer_whose_home_gathers_has_tried_once(ground: &Ground<'_>) {
        let mut settings = ground.settings();
        (settings.limits.user_attempts, settings.limits.user_window_ms) = (1, 60_000);
        let world = ground.world_with(settings).await;
        let key = world.open_sale(&sale(4, 4)).await;
        for nth in 0..4 {
            let buyer = buyer_of(&world, &key, 0, nth).await;
            world.win(&key, &buyer, "r1").await;
        }
        let fifth = buyer_of(&world, &key, 0, 4).await;
        assert_eq!(world.reserve(&key, &fifth, "r1").await.unwrap(), ReserveOutcome::SoldOut);
        let again = world.reserve(&key, &fifth, "r2").await;
        assert!(matches!(again, Err(Error::RateLimited { .. })), "{again:?}");
        world.assert_balanced(&key, 4).await;
    }

    async fn what_is_given_back_is_sold_to_a_buyer_of_another_home(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(4, 4)).await;
        let at_2 = buyer_of(&world, &key, 2, 0).await;
        let all = won(world.reserve_units(&key, &at_2, "r1", 4).await);
        let at_0 = buyer_of(&world, &key, 0, 0).await;
        assert_eq!(world.reserve(&key, &at_0, "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.release(&key, &at_2, &all.reservation_id).await.unwrap();
        world.win(&key, &at_0, "r1").await;
        world.assert_balanced(&key, 1).await;
        assert_no_difference(&world, &key).await;
    }

    async fn a_transfer_that_broke_off_at_any_step_is_finished_by_the_sweeper(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(9, 3)).await;
        for steps in 1..=3 {
            let (sequence, units) = send_off(&world, &key, 0, 1, 1).await;
            let (source, target) =
                (segment(&world, &key, 0).await, segment(&world, &key, 1).await);
            if steps >= 2 {
                let arrived = target.scripts.transfer_in(1, 0, sequence, units).await.unwrap();
                assert!(matches!(arrived, Arrived::In { .. }), "{arrived:?}");
            }
            if steps == 3 {
                let done = source.scripts.transfer_done(1, 1, sequence).await.unwrap();
                assert_eq!(done, Followed::Done);
            }
            world.sweep().await;
            let all = levels(&world, &key).await;
            let out: Vec<u64> = all.iter().map(|levels| levels.out).collect();
            assert_eq!(out, [0; 3], "after {steps} steps");
            assert_eq!(all.iter().map(|levels| levels.stock).sum::<u64>(), 9);
            // Late calls of the one that died.
            let late = target.scripts.transfer_in(1, 0, sequence, units).await.unwrap();
            assert!(matches!(late, Arrived::In { .. }));
            let late = source.scripts.transfer_done(1, 1, sequence).await.unwrap();
            assert_eq!(late, Followed::Done);
            assert_eq!(world.levels(&key).await.stock, 9);
        }
        assert_eq!(stocks(&world, &key).await, [0, 6, 3]);
        world.assert_balanced(&key, 0).await;
        assert_no_difference(&world, &key).await;
    }

    async fn one_transfer_is_in_flight_for_each_pair(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(9, 3)).await;
        let first = send_off(&world, &key, 0, 1, 2).await;
        assert_eq!(first, (1, 2));
        assert_eq!(send_off(&world, &key, 0, 1, 1).await, first, "the one that is on its way");
        assert_eq!(send_off(&world, &key, 0, 2, 5).await, (1, 1));
        let source = segment(&world, &key, 0).await;
        assert_eq!(source.scripts.transfer_out(1, 1, 1).await.unwrap().unwrap(),
            SentOff::Out { sequence: 1, units: 2 });
        let on_their_way = source.scripts.transfers(1).await.unwrap().unwrap();
        assert_eq!(on_their_way, [
            Transfer { target: 1, sequence: 1, units: 2 },
            Transfer { target: 2, sequence: 1, units: 1 },
        ]);
        // Sales of nine units find all nine.
        let (won, _) = all_ask(&world, &key, (0..12).map(|nth| (format!("b-{nth}"), 1))).await;
        assert_eq!(won.len(), 9);
        world.assert_balanced(&key, 9).await;
    }

    async fn a_rebuild_counts_what_was_on_its_way(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(9, 3)).await;
        world.win(&key, "ann", "r1").await;
        send_off(&world, &key, 0, 1, 2).await;
        let (sequence, units) = send_off(&world, &key, 1, 2, 1).await;
        let target = segment(&world, &key, 2).await;
        target.scripts.transfer_in(1, 1, sequence, units).await.unwrap();
        world.rebuild(&key).await;
        let all = levels(&world, &key).await;
        assert_eq!(all.iter().map(|levels| levels.stock).collect::<Vec<_>>(), [3, 3, 2]);
        assert!(all.iter().all(|levels| (levels.out, levels.moved) == (0, 0)), "{all:?}");
        world.assert_balanced(&key, 1).await;
        assert_no_difference(&world, &key).await;
    }

    async fn one_lost_segment_rebuilds_the_offer(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(12, 3)).await;
        let mut held = Vec::new();
        for home in 0..3 {
            let buyer = buyer_of(&world, &key, home, 0).await;
            held.push((world.win(&key, &buyer, "r1").await, buyer));
        }
        let call = seckill::engine::Call {
            script: crate::support::stage::LOSE,
            keys: seckill::engine::keys::segment(&key, 1),
            args: vec![Vec::new()],
        };
        world.parts.engine.eval(call).await.unwrap();
        let buyer = buyer_of(&world, &key, 1, 1).await;
        world.reserve_decided(&key, &buyer, "r1").await;
        assert_eq!(world.sql_epoch(&key).await, 2);
        for (reservation, buyer) in held {
            let again = won(Ok(world.reserve_decided(&key, &buyer, "r1").await));
            assert_eq!(again.reservation_id, reservation.reservation_id);
        }
        world.assert_balanced(&key, 4).await;
        assert_no_difference(&world, &key).await;
    }

    async fn the_balancer_evens_out_and_leaves_few_units_alone(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(40, 4)).await;
        let offer = world.offer(&key).await;
        let at_3 = buyer_of(&world, &key, 3, 0).await;
        won(world.reserve_units(&key, &at_3, "r1", 10).await);
        assert_eq!(stocks(&world, &key).await, [10, 10, 10, 0]);
        let moved = transfers::balance(&world.parts.recovery, &offer).await.unwrap();
        assert_eq!(moved, 7);
        let stocks = stocks(&world, &key).await;
        assert!(stocks.iter().all(|&stock| stock >= 4), "{stocks:?}");
        assert_eq!(stocks.iter().sum::<u64>(), 30);
        assert_eq!(transfers::balance(&world.parts.recovery, &offer).await.unwrap(), 0);
        world.assert_balanced(&key, 10).await;
        assert_no_difference(&world, &key).await;
    }

    async fn more_units_go_on_sale_once_whichever_server_is_asked(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(4, 4)).await;
        let (second, _) = world.beside().await;
        assert_eq!(adjust(&world, &key, "more", 6).await.unwrap(), (true, 6));
        assert_eq!(adjust(&second, &key, "more", 6).await.unwrap(), (true, 6));
        let whole = world.levels(&key).await;
        assert_eq!((whole.stock, whole.total), (10, 10));
        let home = world.offer(&key).await.segments.home_of("more").number;
        assert_eq!(levels(&world, &key).await[home as usize].stock, 7);
        assert_no_difference(&world, &key).await;
        let (won, _) = all_ask(&world, &key, (0..15).map(|nth| (format!("b-{nth}"), 1))).await;
        assert_eq!(won.len(), 10);
        world.assert_balanced(&key, 10).await;
    }

    async fn fewer_units_are_gathered_before_they_are_taken_away(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(20, 4)).await;
        world.win(&key, "ann", "r1").await;
        assert_eq!(adjust(&world, &key, "fewer", -15).await.unwrap(), (true, -15));
        assert_eq!(adjust(&world, &key, "fewer", -15).await.unwrap(), (true, -15));
        let whole = world.levels(&key).await;
        assert_eq!((whole.stock, whole.total, whole.aside, whole.held), (4, 5, 0, 1));
        assert_no_difference(&world, &key).await;
        // More than are unsold: nothing changes, and the answer says how many could be.
        assert_eq!(adjust(&world, &key, "too-many", -5).await.unwrap(), (false, -4));
        assert_eq!(world.levels(&key).await.stock, 4);
        assert_eq!(adjust(&world, &key, "all", -4).await.unwrap(), (true, -4));
        assert_eq!(world.reserve(&key, "bob", "r1").await.unwrap(), ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 1).await;
        assert_no_difference(&world, &key).await;
    }

    async fn one_unit_stays_in_an_offer_of_several_segments(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(6, 3)).await;
        assert_eq!(adjust(&world, &key, "all", -6).await.unwrap(), (false, -5));
        let whole = world.levels(&key).await;
        assert_eq!((whole.stock, whole.total, whole.aside), (6, 6, 0));
        assert_no_difference(&world, &key).await;
    }

    async fn a_set_aside_that_broke_off_is_undone_in_its_segment(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(12, 3)).await;
        let offer: Arc<Offer> = world.offer(&key).await;
        let id = request_id("broke-off");
        let home = offer.segments.home_of("broke-off").clone();
        let now = seckill::domain::TimeMs(1);
        home.scripts.set_aside(1, &id, 3, now).await.unwrap().unwrap();
        assert_eq!(world.levels(&key).await.aside, 3);
        world.sweep().await;
        let whole = world.levels(&key).await;
        assert_eq!((whole.aside, whole.stock), (0, 12));
        let stored = adjustments::stored(&world.parts.database, &id).await.unwrap().unwrap();
        assert_eq!(stored.delta, -3);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_sale_goes_on_while_its_segments_become_more(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(300, 1)).await;
        let (second, _) = world.beside().await;
        // The second server does not hear of it but by what it is refused.
        let selling = async |world: &World, from: usize| {
            let buyers = (from..from + 250).map(|nth| (format!("buyer-{nth}"), 1));
            all_ask(world, &key, buyers).await
        };
        let raising = async {
            let mut answers = Vec::new();
            for segments in [4, 16] {
                eventually("some are sold", async || {
                    (world.offer_row(&key).await.reserved > i64::from(segments) * 5).then_some(())
                })
                .await;
                let activities = &world.parts.activities;
                let id = &key.activity_id;
                let rebuilt = activities.rebuild_stock(id, None, Some(segments), "ann", "").await;
                answers.push(rebuilt.unwrap());
            }
            answers
        };
        let ((first, first_lost), (others, second_lost), raised) =
            tokio::join!(selling(&world, 0), selling(&second, 1_000), raising);
        assert_eq!(raised.len(), 2);
        assert_eq!(first.len() + others.len(), 300, "all units are sold");
        let lost = first_lost.iter().chain(&second_lost);
        assert!(lost.clone().all(|answer| *answer == ReserveOutcome::SoldOut));
        assert_eq!(world.offer_row(&key).await.segments, 16);
        for world in [&world, &second] {
            assert_eq!(world.offer(&key).await.segments.count(), 16);
            for reservation in first.iter().chain(&others).take(20) {
                let again = world.win(&key, reservation.buyer.as_str(), "r1").await;
                assert_eq!(again.reservation_id, reservation.reservation_id);
            }
        }
        world.assert_balanced(&key, 300).await;
        assert_no_difference(&world, &key).await;
    }

    async fn a_server_of_the_old_number_sends_nobody_to_a_wrong_home(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { max_orders: 1, ..sale(40, 2) }).await;
        let (second, _) = world.beside().await;
        let old = second.offer(&key).await;
        let mover = (0..)
            .map(|number| format!("b-{number}"))
            .find(|name| old.segments.home_of(name).number == 0)
            .unwrap();
        let held = world.win(&key, &mover, "r1").await;
        world.poll().await;
        let id = &key.activity_id;
        world.parts.activities.rebuild_stock(id, None, Some(16), "ann", "").await.unwrap();
        // As it knows them, these segments answer nothing about anybody.
        let buyer = BuyerId::new(&mover).unwrap();
        for segment in old.segments.all() {
            let found = segment.scripts.find(&held.reservation_id, &buyer).await.unwrap();
            let Err(Refusal::Frozen { reason, segments, .. }) = found else { panic!("{found:?}") };
            assert_eq!((reason.as_str(), segments), ("segments", 16));
            let levels = segment.scripts.levels().await.unwrap();
            assert!(matches!(levels, Err(Refusal::Frozen { segments: 16, .. })), "{levels:?}");
        }
        let refusal = Refusal::Frozen {
            stamp: world.levels(&key).await.stamp,
            reason: "epoch".to_owned(),
            segments: 16,
        };
        let known = old.epoch();
        assert!(!old.segments.adopt_refused(&refusal));
        assert_eq!(old.epoch(), known);
        // And it follows.
        let again = won(Ok(second.reserve_decided(&key, &mover, "r1").await));
        assert_eq!(again.reservation_id, held.reservation_id);
        assert_eq!(second.offer(&key).await.segments.count(), 16);
        let more = second.reserve_decided(&key, &mover, "r2").await;
        assert!(matches!(more, ReserveOutcome::Duplicate { .. }), "{more:?}");
        world.assert_balanced(&key, 1).await;
        assert_no_difference(&world, &key).await;
    }

    async fn segments_become_fewer_for_nobody(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(40, 4)).await;
        let sku = SkuId::new(SKU).unwrap();
        let id = &key.activity_id;
        let rebuild = async |segments| {
            world.parts.activities.rebuild_stock(id, Some(&sku), segments, "ann", "").await
        };
        let refused = rebuild(Some(3)).await;
        let Err(Error::InvalidField(violations)) = &refused else { panic!("{refused:?}") };
        assert_eq!(violations[0].field, "segments");
        assert_eq!((world.sql_epoch(&key).await, world.offer_row(&key).await.segments), (1, 4));
        rebuild(Some(4)).await.unwrap();
        assert_eq!((world.sql_epoch(&key).await, world.offer_row(&key).await.segments), (2, 4));
        rebuild(None).await.unwrap();
        assert_eq!(stocks(&world, &key).await, [10; 4]);
        world.assert_balanced(&key, 0).await;
    }

    async fn a_number_that_was_raised_and_not_rebuilt_is_rebuilt_by_the_next_server(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&sale(40, 2)).await;
        let held = world.win(&key, "ann", "r1").await;
        // A server died between the commit and the rebuild.
        let raise = "UPDATE offers SET segments = 8, epoch = epoch + 1";
        let told = "UPDATE activities SET version = version + 1";
        for statement in [raise, told] {
            use sea_orm::ConnectionTrait as _;
            world.parts.database.writer().execute_unprepared(statement).await.unwrap();
        }
        let again = won(Ok(world.reserve_decided(&key, "ann", "r1").await));
        assert_eq!(again.reservation_id, held.reservation_id);
        // What is taken under the old epoch is not stored; who asks again is served by the new one.
        won(Ok(world.reserve_decided(&key, "bob", "r1").await));
        assert_eq!(stocks(&world, &key).await.len(), 8);
        world.assert_balanced(&key, 2).await;
        assert_no_difference(&world, &key).await;
    }

    async fn a_storm_over_sixteen_segments_sells_every_unit(ground: &Ground<'_>) {
        const UNITS: u64 = 400;
        let server = storm::serve(ground.settings()).await;
        let key = storm::sell_in(&server, "storm", UNITS, 16).await;
        let storm = Storm::new(&key, UNITS, 1_000);
        storm.rage(&server, std::future::ready(())).await;
        storm.settle(&server).await;
        let world = World { parts: server.parts.clone(), settings: ground.settings() };
        assert_no_difference(&world, &key).await;
        server.stop().await;
    }

    async fn a_storm_on_a_sold_out_offer_of_segments_does_not_reach_the_engine(ground: &Ground<'_>) {
        let mut settings = ground.settings();
        settings.reserve.believe_sold_out_ms = 200;
        let world = ground.world_with(settings).await;
        let key = world.open_sale(&sale(4, 4)).await;
        let mut wins = Vec::new();
        for nth in 0..4 {
            wins.push(world.win(&key, &format!("u{nth}"), "r1").await);
        }
        let refused_here = |buyer: &str| {
            let request = crate::support::world::request(&key, buyer, "r1", 1);
            let admit = world.parts.reservations.admit(&request).unwrap();
            matches!(admit, seckill::admission::Admit::No(ReserveOutcome::SoldOut))
        };
        // Each home is read once somebody asked there.
        eventually("all homes know", async || {
            let mut known = BTreeSet::new();
            for nth in 0..100 {
                let buyer = format!("asker-{nth}");
                let home = world.offer(&key).await.segments.home_of(&buyer).number;
                if refused_here(&buyer) {
                    known.insert(home);
                } else {
                    let answer = world.reserve(&key, &buyer, "r1").await.unwrap();
                    assert_eq!(answer, ReserveOutcome::SoldOut);
                }
            }
            (known.len() == 4).then_some(())
        })
        .await;
        let started = std::time::Instant::now();
        let mut asked = 0;
        for nth in 0..10_000 {
            let buyer = format!("loser-{nth}");
            if !refused_here(&buyer) {
                asked += 1;
                let answer = world.reserve(&key, &buyer, "r1").await.unwrap();
                assert_eq!(answer, ReserveOutcome::SoldOut);
            }
        }
        let most = 2 + started.elapsed().as_millis() / 50;
        assert!(asked <= most, "{asked} of 10,000 in {:?}", started.elapsed());
        // Winners are never refused from memory, and a unit that is back is sold to any home.
        for nth in 0..4 {
            assert!(!refused_here(&format!("u{nth}")));
        }
        world.release(&key, "u0", &wins[0].reservation_id).await.unwrap();
        for nth in 0..20 {
            assert!(!refused_here(&format!("next-{nth}")));
        }
        world.win(&key, "next", "r1").await;
        world.assert_balanced(&key, 4).await;
    }
}

/// A server that dies in the middle of transfers, at each step, while another one sells on.
async fn a_server_dies_while_units_move(ground: &Ground<'_>) {
    for (nth, failpoint) in
        ["after_transfer_out", "after_transfer_in", "after_transfer_done"].into_iter().enumerate()
    {
        let world = ground.world().await;
        let activity: &'static str = format!("sale-{nth}").leak();
        let key = world.open_sale(&Sale { activity, ..sale(60, 6) }).await;
        let serve = Serve::over(&ground.settings()).with("SEGMENTS__BALANCE_MS", 0);
        let mut dying = serve.clone().dying(failpoint, 3).start().await;
        // All of one home, so that units must move.
        let mut buyers = Vec::new();
        for nth in 0..60 {
            buyers.push(buyer_of(&world, &key, 2, nth).await);
        }
        let shop = crate::support::calls::Shop::new(&key, dying.channel().await);
        let mut told = Vec::new();
        for buyer in &buyers {
            match shop.reserve(buyer, "r1").await {
                Ok(answer) => told.push((buyer, crate::support::calls::win(&answer).unwrap())),
                Err(_) => break,
            }
        }
        assert!(told.len() < 60, "it did not die at {failpoint}");
        dying.crashed().await;
        for buyer in &buyers {
            world.win(&key, buyer, "r1").await;
        }
        for (buyer, win) in told {
            let again = world.win(&key, buyer, "r1").await;
            assert_eq!(again.reservation_id.as_str(), win.reservation_id, "{failpoint}");
        }
        let late = world.reserve(&key, "late", "r1").await.unwrap();
        assert_eq!(late, ReserveOutcome::SoldOut);
        world.assert_balanced(&key, 60).await;
        assert_no_difference(&world, &key).await;
        world.close().await;
    }
}

on_redis!(a_server_dies_while_units_move);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_segments_lie_on_all_masters_of_a_cluster_and_sell_every_unit() {
    let on = async |fresh: &Fresh| {
        const UNITS: u64 = 400;
        let ground = Ground::embedded(fresh);
        let mut cluster = Cluster::start().await;
        let mut settings = ground.settings();
        cluster.set(&mut settings);
        let server = storm::serve(settings.clone()).await;
        let key = storm::sell_in(&server, "storm", UNITS, 16).await;
        let mut owners = BTreeSet::new();
        for number in 0..16 {
            let stock = &seckill::engine::keys::segment(&key, number)[0];
            owners.insert(cluster.owner_of(stock).await);
        }
        assert_eq!(owners.len(), 3, "{owners:?}");
        let storm = Storm::new(&key, UNITS, 1_000);
        storm.let_in(400);
        let meddle = async {
            storm.answered(200).await;
            storm.let_in(1_000);
            cluster.servers[0].kill();
            cluster.replaced(0).await;
        };
        storm.rage(&server, meddle).await;
        assert!(server.parts.recovery.rebuilds() >= 1, "a third of the segments was lost");
        storm.settle(&server).await;
        let world = World { parts: server.parts.clone(), settings };
        assert_no_difference(&world, &key).await;
        server.stop().await;
    };
    databases::run(Fresh::postgres().await, on).await;
}
