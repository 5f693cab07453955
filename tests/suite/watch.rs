//! Live stock: what a watcher sees, and what it can rely on.

use std::{pin::Pin, time::Duration};

use futures_util::{Stream, StreamExt};
use seckill::{
    domain::{ActivityId, ActivityState, OfferKey, OfferSpec, SkuId, StockUpdate, WatchRequest},
    error::Error,
    server::{Parts, Server},
};
use tokio::time::{Instant, timeout};
use tonic::transport::Endpoint;

use crate::support::{
    calls::{Recorder, Shop},
    databases::{self, Fresh},
    process::channel,
    watched::{CONVERGENCE, End, Message, Watched},
    world::{Ground, SKU, Sale, World, on_every_ground, spec_of},
};

/// A stream that keeps its guarantees for as long as it is read.
struct Updates {
    stream: Pin<Box<dyn Stream<Item = Result<StockUpdate, Error>> + Send>>,
    began: Instant,
    seen: Watched,
}

impl Updates {
    /// The next message, which must fit those before it.
    async fn next(&mut self) -> Option<StockUpdate> {
        let update = self.stream.next().await?.unwrap();
        let figure = |figure: u64| i64::try_from(figure).unwrap();
        self.seen.until = self.began.elapsed();
        self.seen.messages.push(Message {
            at: self.seen.until,
            sku: update.sku_id.to_string(),
            total: figure(update.total),
            remaining: figure(update.remaining),
            reserved: figure(update.reserved),
            state: update.state.as_str().to_uppercase(),
            epoch: figure(update.epoch),
            revision: figure(update.revision),
            snapshot: update.snapshot,
            heartbeat: update.heartbeat,
        });
        self.seen.check().unwrap();
        assert_eq!(update.reserved, update.total - update.remaining, "{update:?}");
        Some(update)
    }
}

fn units(total: u64) -> Sale {
    Sale { total, ..Sale::default() }
}

async fn world_with(ground: &Ground<'_>, sample_ms: u64, heartbeat_ms: u64) -> World {
    let mut settings = ground.settings();
    settings.watch.sample_ms = sample_ms;
    settings.watch.heartbeat_ms = heartbeat_ms;
    let parts = Parts::open(&settings).await.unwrap();
    World { parts, settings }
}

fn all_of(key: &OfferKey) -> WatchRequest {
    WatchRequest {
        activity_id: key.activity_id.clone(),
        sku_ids: Vec::new(),
        min_interval: Duration::ZERO,
    }
}

async fn watch(world: &World, request: WatchRequest) -> Updates {
    let activity = world.parts.catalog.activity(&request.activity_id).await.unwrap();
    let all = activity.offers.keys().map(ToString::to_string);
    let named: Vec<String> = request.sku_ids.iter().map(ToString::to_string).collect();
    let skus = if named.is_empty() { all.collect() } else { named };
    let stream = Box::pin(world.parts.feed.watch(request).await.unwrap());
    let seen = Watched { skus, ..Watched::default() };
    Updates { stream, began: Instant::now(), seen }
}

async fn next(updates: &mut Updates) -> StockUpdate {
    let update = timeout(Duration::from_secs(5), updates.next()).await;
    update.expect("a message in time").expect("the stream goes on")
}

/// Reads until the value is this.
async fn converge(updates: &mut Updates, mut last: StockUpdate, remaining: u64) -> StockUpdate {
    let deadline = Instant::now() + CONVERGENCE;
    while last.remaining != remaining {
        let update = tokio::time::timeout_at(deadline, updates.next()).await;
        last = update.unwrap_or_else(|_| panic!("still at {last:?}")).unwrap();
    }
    last
}

on_every_ground! {
    async fn the_last_state_is_sent_when_an_activity_is_settled_and_the_stream_ends(
        ground: &Ground<'_>
    ) {
        let world = world_with(ground, 10, 10_000).await;
        let key = world.open_sale(&units(3)).await;
        world.win(&key, "u1", "r1").await;
        world.assert_balanced(&key, 1).await;
        let mut updates = watch(&world, all_of(&key)).await;
        assert_eq!(next(&mut updates).await.remaining, 2);
        let activities = &world.parts.activities;
        activities.end(&key.activity_id, "test", "").await.unwrap();
        activities.settle(&key.activity_id, "test", "").await.unwrap();
        let mut last = next(&mut updates).await;
        while last.state != ActivityState::Settled {
            last = next(&mut updates).await;
        }
        assert_eq!((last.remaining, last.reserved), (2, 1));
        let end = timeout(Duration::from_secs(5), updates.stream.next()).await;
        assert!(end.expect("it ends").is_none(), "it ends in good order");
        updates.seen.end = Some(End::Ok);
        updates.seen.check().unwrap();
        // Who comes later hears the same, though the engine has nothing of it any more.
        let mut late = watch(&world, all_of(&key)).await;
        let only = next(&mut late).await;
        assert_eq!((only.remaining, only.reserved, only.total), (2, 1, 3));
        assert!(only.state == ActivityState::Settled && only.snapshot, "{only:?}");
        assert!(only.epoch > last.epoch, "it is behind what was said before");
        let end = timeout(Duration::from_secs(5), late.stream.next()).await;
        assert!(end.expect("it ends").is_none(), "it ends in good order");
    }

    async fn a_snapshot_of_every_offer_comes_first(ground: &Ground<'_>) {
        let world = world_with(ground, 10, 10_000).await;
        let mut spec = spec_of(&units(10));
        let first = spec.offers[0].clone();
        for (sku, total) in [("sku-2", 20), ("sku-3", 30)] {
            let sku_id = SkuId::new(sku).unwrap();
            spec.offers.push(OfferSpec { sku_id, total, ..first.clone() });
        }
        let activities = &world.parts.activities;
        let activity_id = spec.activity_id.clone();
        activities.create(spec, "test").await.unwrap();
        let key = OfferKey { activity_id, sku_id: SkuId::new(SKU).unwrap() };

        // Before the warm-up there is something to see as well: what will be on sale.
        let mut early = watch(&world, all_of(&key)).await;
        let update = next(&mut early).await;
        assert!(update.snapshot);
        assert_eq!((update.remaining, update.total), (10, 10));
        assert_eq!(update.state, ActivityState::PendingReview);

        activities.approve(&key.activity_id, "test", "").await.unwrap();
        activities.warm_up(&key.activity_id, "test").await.unwrap();
        world.win(&key, "u1", "r1").await;
        let mut updates = watch(&world, all_of(&key)).await;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let update = next(&mut updates).await;
            assert!(update.snapshot && !update.heartbeat, "{update:?}");
            assert_eq!(update.activity_id, key.activity_id);
            seen.push((update.sku_id.to_string(), update.total));
        }
        seen.sort();
        let expected = [("sku-1", 10), ("sku-2", 20), ("sku-3", 30)];
        assert_eq!(seen, expected.map(|(sku, total)| (sku.to_owned(), total)));
        // What changes follows; the sale of before and the new state may still be among it.
        let other = OfferKey { sku_id: SkuId::new("sku-2").unwrap(), ..key.clone() };
        world.win(&other, "u1", "r1").await;
        let mut last = next(&mut updates).await;
        while last.sku_id != other.sku_id || last.remaining == 20 {
            last = next(&mut updates).await;
        }
        assert_eq!(last.state, ActivityState::Scheduled);
        assert_eq!((last.remaining, last.reserved, last.snapshot), (19, 1, false));
    }

    async fn a_watcher_of_a_burst_never_goes_back_and_ends_at_the_true_value(
        ground: &Ground<'_>
    ) {
        let world = world_with(ground, 10, 10_000).await;
        let key = world.open_sale(&units(100)).await;
        let (other_server, _) = world.beside().await;
        let mut here = watch(&world, all_of(&key)).await;
        let mut there = watch(&other_server, all_of(&key)).await;
        let first = (next(&mut here).await, next(&mut there).await);
        assert_eq!((first.0.remaining, first.1.remaining), (100, 100));

        let buyers: Vec<String> = (0..80).map(|n| format!("u{n}")).collect();
        let burst = async {
            let mut won = Vec::new();
            for some in buyers.chunks(10) {
                let asked = some.iter().map(|buyer| world.win(&key, buyer, "r1"));
                won.extend(futures_util::future::join_all(asked).await);
            }
            for reservation in &won[..5] {
                let buyer = reservation.buyer.as_str();
                world.release(&key, buyer, &reservation.reservation_id).await.unwrap();
            }
        };
        let follow = async |updates: &mut Updates, mut last: StockUpdate| {
            loop {
                match timeout(Duration::from_millis(200), updates.next()).await {
                    Ok(update) => last = update.unwrap(),
                    Err(_) => return last,
                }
            }
        };
        let ((), here_last, there_last) = tokio::join!(
            burst,
            follow(&mut here, first.0),
            follow(&mut there, first.1)
        );
        let here_last = converge(&mut here, here_last, 25).await;
        let there_last = converge(&mut there, there_last, 25).await;
        assert_eq!(here_last.revision, there_last.revision);
        assert_eq!(here_last.reserved, 75);
        world.assert_balanced(&key, 75).await;
    }

    async fn a_watcher_sees_a_rebuild_as_a_higher_epoch_and_no_impossible_value(
        ground: &Ground<'_>
    ) {
        let world = world_with(ground, 10, 10_000).await;
        let key = world.open_sale(&units(10)).await;
        world.win(&key, "u1", "r1").await;
        let mut updates = watch(&world, all_of(&key)).await;
        let first = next(&mut updates).await;
        let first = converge(&mut updates, first, 9).await;
        ground.flush(&world, &key).await;
        // Nobody asks for the offer; the watcher's look finds it missing, and it is rebuilt.
        let mut last = first.clone();
        while last.epoch == first.epoch {
            last = next(&mut updates).await;
        }
        assert_eq!((last.remaining, last.total), (9, 10));
        world.healthy(&key).await;
        world.win(&key, "u2", "r1").await;
        converge(&mut updates, last, 8).await;
        world.assert_balanced(&key, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_shows_that_it_is_alive() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 10, 100).await;
        let key = world.open_sale(&units(10)).await;
        let mut updates = watch(&world, all_of(&key)).await;
        let first = next(&mut updates).await;
        assert!(first.snapshot && !first.heartbeat);
        for nth in 1..=3 {
            let update = next(&mut updates).await;
            assert!(update.heartbeat && !update.snapshot, "{update:?}");
            assert_eq!((update.revision, update.remaining), (first.revision, 10));
            // Who reads one late may read the next one soon after it, so all of them are timed.
            let silent = updates.began.elapsed();
            assert!(silent >= nth * Duration::from_millis(100), "heartbeat {nth} after {silent:?}");
        }
        // A change comes at once all the same, in the middle of a silence, which begins anew.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let changed = updates.began.elapsed();
        world.win(&key, "u1", "r1").await;
        converge(&mut updates, first, 9).await;
        assert!(next(&mut updates).await.heartbeat);
        let silent = updates.began.elapsed() - changed;
        assert!(silent >= Duration::from_millis(100), "a heartbeat {silent:?} after a change");
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_is_not_told_more_often_than_it_wants_and_ends_at_the_true_value() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 5, 10_000).await;
        let key = world.open_sale(&units(100)).await;
        let min_interval = Duration::from_millis(200);
        let mut updates = watch(&world, WatchRequest { min_interval, ..all_of(&key) }).await;
        let mut last = next(&mut updates).await;
        let sell = async {
            for n in 0..40 {
                world.win(&key, &format!("u{n}"), "r1").await;
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
        };
        let read = async {
            let mut told = 0;
            while last.remaining != 60 {
                let update = next(&mut updates).await;
                told += 1;
                // Who reads one late may read the next one soon after it, so all of them are timed.
                let since = updates.began.elapsed();
                assert!(since >= told * min_interval, "told {told} times in {since:?}");
                last = update;
            }
            told
        };
        let ((), told) = tokio::join!(sell, read);
        assert!(told >= 2, "{told}");
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stalled_reads_the_newest_value_next() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 5, 10_000).await;
        let key = world.open_sale(&units(50)).await;
        let mut stalled = watch(&world, all_of(&key)).await;
        let mut lively = watch(&world, all_of(&key)).await;
        assert_eq!(next(&mut stalled).await.remaining, 50);
        let mut last = next(&mut lively).await;
        for n in 0..30 {
            world.win(&key, &format!("u{n}"), "r1").await;
            last = converge(&mut lively, last, 49 - n).await;
        }
        let update = next(&mut stalled).await;
        assert_eq!((update.remaining, update.revision), (20, last.revision));
        let more = timeout(Duration::from_millis(100), stalled.next()).await;
        assert!(more.is_err(), "an old value follows: {more:?}");
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_there_can_not_be_watched() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 10, 10_000).await;
        let key = world.open_sale(&units(1)).await;
        let sku = |name: &str| SkuId::new(name).unwrap();
        let unknown = WatchRequest { sku_ids: vec![sku(SKU), sku("other")], ..all_of(&key) };
        match world.parts.feed.watch(unknown).await {
            Err(Error::UnknownOffer { sku_id, .. }) => assert_eq!(sku_id, "other"),
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("it is watched"),
        }
        let activity_id = ActivityId::new("other").unwrap();
        let unknown = WatchRequest { activity_id, ..all_of(&key) };
        let outcome = world.parts.feed.watch(unknown).await;
        assert!(matches!(outcome.err(), Some(Error::UnknownActivity(_))));
        // The one that is there, by its name.
        let known = WatchRequest { sku_ids: vec![sku(SKU)], ..all_of(&key) };
        assert_eq!(next(&mut watch(&world, known).await).await.remaining, 1);
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_sale_is_told_as_a_state() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 10, 10_000).await;
        let key = world.open_sale(&units(1)).await;
        let mut updates = watch(&world, all_of(&key)).await;
        assert_eq!(next(&mut updates).await.state, ActivityState::Scheduled);
        world.parts.activities.move_by_clock().await.unwrap();
        assert_eq!(next(&mut updates).await.state, ActivityState::Active);
        world.parts.activities.end(&key.activity_id, "test", "").await.unwrap();
        let last = next(&mut updates).await;
        assert_eq!((last.state, last.remaining), (ActivityState::Ended, 1));
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_read_for_a_stream_that_nobody_holds_any_more() {
    let on = async |fresh: &Fresh| {
        let world = world_with(&Ground::embedded(fresh), 5, 10_000).await;
        let key = world.open_sale(&units(1)).await;
        let (server, _) = world.beside().await;
        let mut updates = watch(&server, all_of(&key)).await;
        next(&mut updates).await;
        assert_eq!(server.parts.tasks.len(), 1, "one hub");
        let second = watch(&server, all_of(&key)).await;
        assert_eq!(server.parts.tasks.len(), 1, "one hub for both");
        drop((updates, second));
        crate::support::eventually("the hub ends", async || {
            server.parts.tasks.is_empty().then_some(())
        })
        .await;
        // And starts again for the next.
        assert_eq!(next(&mut watch(&server, all_of(&key)).await).await.remaining, 1);
    };
    databases::run(Fresh::sqlite().await, on).await;
}

/// A whole server that looks at the stock all the time.
async fn serve(fresh: &Fresh) -> (Server, World, OfferKey) {
    let ground = Ground::embedded(fresh);
    let mut settings = ground.settings();
    settings.watch.sample_ms = 5;
    let server = Server::start(&settings).await.unwrap();
    let world = World { parts: server.parts.clone(), settings };
    let key = world.open_sale(&units(500)).await;
    (server, world, key)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stalls_is_kept_no_values_and_holds_nobody_up() {
    const READ_AHEAD_BYTES: u32 = 1_024;
    let on = async |fresh: &Fresh| {
        let (server, _, key) = serve(fresh).await;
        let endpoint = Endpoint::from_shared(format!("http://{}", server.addr)).unwrap();
        let narrow = endpoint.initial_stream_window_size(READ_AHEAD_BYTES).connect().await.unwrap();
        let mut stalled = Recorder::start(narrow, &key).await;
        stalled.stall();
        let lively = Recorder::start(channel(server.addr).await, &key).await;
        // One after the other, so that every value is seen on its own.
        let shop = Shop::new(&key, channel(server.addr).await);
        for nth in 0..200 {
            let told = lively.seen().messages.len();
            shop.insist(&format!("u{nth}"), "r1").await;
            crate::support::eventually("the lively reader is told", async || {
                (lively.seen().messages.len() > told).then_some(())
            })
            .await;
        }
        let newest = lively.seen().messages.last().unwrap().clone();
        assert_eq!(newest.remaining, 300);
        let resumed = stalled.resume();
        let newest = (newest.epoch, newest.revision);
        crate::support::eventually("the stalled reader is told", async || {
            let last = stalled.seen().messages.last().map(|m| (m.epoch, m.revision));
            (last == Some(newest)).then_some(())
        })
        .await;
        // No message is shorter than this.
        let most = READ_AHEAD_BYTES as usize / 32 + 2;
        stalled.seen().newest_wins(resumed, newest, most).unwrap();
        lively.seen().check().unwrap();
        server.stop().await;
    };
    databases::run(Fresh::sqlite().await, on).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_watcher_of_a_busy_sale_converges_and_hears_of_the_shutdown() {
    let on = async |fresh: &Fresh| {
        let (server, _, key) = serve(fresh).await;
        let mut watchers = Vec::new();
        for _ in 0..8 {
            watchers.push(Recorder::start(channel(server.addr).await, &key).await);
        }
        let shop = Shop::new(&key, channel(server.addr).await);
        let shop = &shop;
        let sold = futures_util::stream::iter(0..120)
            .map(async |nth: u32| shop.insist(&format!("u{nth}"), "r1").await)
            .buffer_unordered(16)
            .count()
            .await;
        let changed: Vec<Duration> = watchers.iter().map(Recorder::now).collect();
        assert_eq!(sold, 120);
        tokio::time::sleep(CONVERGENCE).await;
        server.stop().await;
        for (watcher, changed) in watchers.into_iter().zip(changed) {
            let seen = watcher.ended().await;
            seen.check().unwrap();
            seen.convergence(SKU, changed, 380, CONVERGENCE).unwrap();
            assert_eq!(seen.end, Some(End::Unavailable));
        }
    };
    databases::run(Fresh::sqlite().await, on).await;
}
