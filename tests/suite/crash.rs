//! A server that dies in the middle of a sale, and one that is asked to stop.

use std::{cell::Cell, collections::BTreeMap, pin::pin, time::Duration};

use futures_util::{StreamExt as _, future, stream};
use seckill::{
    api::pb::{self, ReleaseOutcome, ReserveOutcome, seckill_admin_client::SeckillAdminClient},
    domain::OfferKey,
};
use tokio::{io::AsyncReadExt as _, net::TcpStream, time::Instant};
use tonic::{Code, Status};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_types::StatusExt as _;

use crate::support::{
    calls::{Shop, Win, assert_books, drained, lost_connection, win},
    eventually,
    process::{Process, Serve},
    world::{Ground, Sale, on_every_ground, on_every_redis},
};

const UNITS: u64 = 20;
const BUYERS: usize = 60;
const AT_ONCE: usize = 16;
const SALE: Sale = Sale {
    activity: "sale",
    total: UNITS,
    max_orders: 1,
    max_quantity: 1,
    hold: None,
    segments: 1,
};

/// What a buyer was told before the server died.
#[derive(Debug, Default)]
struct Told {
    win: Option<Win>,
    /// The buyer asked for its release; the answer may be lost.
    releases: bool,
    released: bool,
}

/// Opens a sale on this ground, with no server left behind.
async fn open_sale(ground: &Ground<'_>, sale: &Sale) -> OfferKey {
    let world = ground.world().await;
    let key = world.open_sale(sale).await;
    world.close().await;
    key
}

fn buyer(nth: usize) -> String {
    format!("buyer-{nth}")
}

/// Kills a server at this place under load, starts another, and lets everybody ask again: the same
/// answers, one order each, nothing lost, nothing sold twice.
async fn survives(ground: &Ground<'_>, failpoint: &str, nth: u32) {
    let key = open_sale(ground, &SALE).await;
    let serve = Serve::over(&ground.settings());
    let mut dying = serve.clone().dying(failpoint, nth).start().await;
    let told = sell(&dying, &key, failpoint.contains("release")).await;
    dying.crashed().await;
    goes_on(ground, &key, &told).await;
}

/// Starts another server, and lets everybody ask again.
async fn goes_on(ground: &Ground<'_>, key: &OfferKey, told: &BTreeMap<usize, Told>) {
    let serve = Serve::over(&ground.settings());
    let mut process = serve.start().await;
    let shop = Shop::new(key, process.channel().await);
    // Half of them ask before the sweeper and the poller have been there, half of them after.
    let (early, late) = told.iter().partition(|(nth, _)| *nth % 4 < 2);
    ask_again(&shop, early).await;
    drained(process.channel().await, key).await;
    ask_again(&shop, late).await;
    // Units that were given back find somebody now.
    let wins = first_answers(&shop).await;
    assert_eq!(wins.len() as u64, UNITS, "{wins:?}");
    drained(process.channel().await, key).await;
    process.stop().await;
    assert_books(ground, key, &wins).await;
}

/// Everybody tries once, and every other winner gives the unit back if `releasing`.
async fn sell(process: &Process, key: &OfferKey, releasing: bool) -> BTreeMap<usize, Told> {
    let shop = Shop::new(key, process.channel().await);
    stream::iter(0..BUYERS)
        .map(|nth| {
            let shop = &shop;
            async move {
                let mut told = Told::default();
                if let Ok(answer) = shop.reserve(&buyer(nth), "first").await {
                    told.win = win(&answer);
                }
                if let Some(win) = told.win.as_ref().filter(|_| releasing && nth % 2 == 0) {
                    told.releases = true;
                    told.released = matches!(shop.release(win).await, Ok(ReleaseOutcome::Released));
                }
                (nth, told)
            }
        })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await
}

/// These buyers repeat what they did: the answers are the same.
async fn ask_again(shop: &Shop, mut told: Vec<(&usize, &Told)>) {
    // Those who were promised something come last, when all the rest is sold.
    told.sort_by_key(|(_, told)| told.win.is_some());
    for (&nth, told) in told {
        let Some(first) = &told.win else {
            shop.insist(&buyer(nth), "first").await;
            continue;
        };
        if told.releases {
            let outcome = shop.insist_on_release(first).await;
            let allowed = [ReleaseOutcome::Released, ReleaseOutcome::AlreadyReleased];
            assert!(allowed[usize::from(told.released)..].contains(&outcome), "{outcome:?}");
        }
        let answer = shop.insist(&buyer(nth), "first").await;
        if told.releases {
            assert_eq!(answer.outcome(), ReserveOutcome::Released, "{answer:?}");
        } else {
            assert_eq!(win(&answer).as_ref(), Some(first), "{answer:?}");
            assert!(answer.replayed, "{answer:?}");
        }
    }
}

/// What everybody's first request comes to now.
async fn first_answers(shop: &Shop) -> Vec<Win> {
    let answers = stream::iter(0..BUYERS).map(async |nth| shop.insist(&buyer(nth), "first").await);
    answers.buffer_unordered(AT_ONCE).filter_map(async |answer| win(&answer)).collect().await
}

on_every_ground! {
    async fn a_crash_after_units_were_taken_loses_nothing(ground: &Ground<'_>) {
        survives(ground, "after_reserve_script", 9).await;
    }

    async fn a_crash_before_the_outbox_commit_loses_nothing(ground: &Ground<'_>) {
        survives(ground, "before_outbox_commit", 2).await;
    }

    async fn a_crash_after_the_outbox_commit_loses_nothing(ground: &Ground<'_>) {
        survives(ground, "after_outbox_commit", 2).await;
    }

    async fn a_crash_with_orders_in_a_transaction_loses_nothing(ground: &Ground<'_>) {
        survives(ground, "after_orders_inserted", 1).await;
    }

    async fn a_crash_before_the_order_commit_loses_nothing(ground: &Ground<'_>) {
        survives(ground, "before_order_commit", 1).await;
    }

    async fn a_crash_after_the_release_commit_gives_back_once(ground: &Ground<'_>) {
        survives(ground, "after_release_commit", 3).await;
    }

    async fn a_crash_after_the_release_script_gives_back_once(ground: &Ground<'_>) {
        survives(ground, "after_release_script", 3).await;
    }

    async fn a_crash_while_units_are_added_is_finished_by_the_next_server(ground: &Ground<'_>) {
        for failpoint in [
            "before_adjustment_commit",
            "after_adjustment_commit",
            "after_adjustment_script",
            "after_adjustment_applied",
        ] {
            let stored = failpoint != "before_adjustment_commit";
            adjusts_and_dies(ground, failpoint, 4, stored, true).await;
        }
    }

    async fn a_crash_while_units_are_taken_away_is_finished_by_the_next_server(
        ground: &Ground<'_>
    ) {
        for (failpoint, applies) in [
            ("after_set_aside_script", false),
            ("before_adjustment_commit", false),
            ("after_adjustment_commit", true),
            ("after_adjustment_script", true),
            ("after_adjustment_applied", true),
        ] {
            adjusts_and_dies(ground, failpoint, -4, applies, applies).await;
        }
    }

    async fn a_kill_from_outside_loses_nothing(ground: &Ground<'_>) {
        let key = open_sale(ground, &SALE).await;
        let mut killed = Serve::over(&ground.settings()).start().await;
        let shop = Shop::new(&key, killed.channel().await);
        let mut told = BTreeMap::new();
        let (promised, mut wait) = tokio::sync::watch::channel(0);
        let buyers = stream::iter(0..BUYERS)
            .map(async |nth| (nth, shop.reserve(&buyer(nth), "first").await))
            .buffer_unordered(AT_ONCE)
            .for_each(|(nth, answer)| {
                let win = answer.ok().as_ref().and_then(win);
                promised.send_modify(|promised| *promised += usize::from(win.is_some()));
                told.insert(nth, Told { win, ..Told::default() });
                future::ready(())
            });
        let kill = async {
            wait.wait_for(|promised| *promised >= 3).await.unwrap();
            killed.kill();
        };
        future::join(buyers, kill).await;
        goes_on(ground, &key, &told).await;
    }

    async fn a_stop_under_load_answers_every_call_that_it_accepted(ground: &Ground<'_>) {
        const PLENTY: u64 = 100_000;
        let key = open_sale(ground, &Sale { total: PLENTY, ..SALE }).await;
        let grace = Duration::from_secs(10);
        let serve = Serve::over(&ground.settings()).with("GRPC__SHUTDOWN_GRACE_MS", 10_000);
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);

        // Calls go on until the server takes no more.
        let refused = Cell::new(false);
        let calls = stream::iter((0..).take_while(|_| !refused.get()))
            .map(async |nth: usize| shop.reserve(&buyer(nth), "first").await)
            .buffer_unordered(AT_ONCE);
        let mut calls = pin!(calls);
        let mut answers = Vec::new();
        let mut stopped = None;
        while let Some(answer) = calls.next().await {
            refused.set(refused.get() || answer.is_err());
            answers.push(answer);
            if answers.len() == 50 {
                process.terminate();
                stopped = Some(Instant::now());
            }
        }
        let status = process.ended(grace).await;
        assert!(status.success(), "{status}");
        assert!(stopped.unwrap().elapsed() < grace);

        // Whoever was not told RESERVED holds nothing: no call was begun and left alone.
        let wins: Vec<Win> = answers.iter().flatten().filter_map(win).collect();
        assert!(wins.len() >= 50, "{}", wins.len());
        for status in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            assert!(lost_connection(status) || is_shutting_down(status), "{status:?}");
        }
        let world = ground.world().await;
        let left = world.read_books(&key).await.unwrap();
        assert_eq!(left.engine_unacked, 0, "{left:?}");
        assert_eq!(left.live_rows_units, i64::try_from(wins.len()).unwrap(), "{left:?}");
        world.assert_balanced(&key, left.live_rows_units).await;
        world.close().await;
    }

    async fn a_stop_does_not_wait_for_streams_and_silent_sockets(ground: &Ground<'_>) {
        let key = open_sale(ground, &SALE).await;
        let grace = Duration::from_millis(1_500);
        let serve = Serve::over(&ground.settings())
            .with("GRPC__SHUTDOWN_GRACE_MS", grace.as_millis());
        let mut process = serve.start().await;
        let _health = watch_health(&process).await;
        let mut stock = watch_stock(&process, &key).await;
        let mut silent = TcpStream::connect(process.addr).await.unwrap();

        let stopped = Instant::now();
        process.terminate();
        let ended = eventually("the watch ends", async || match stock.message().await {
            Ok(Some(_)) => None,
            Ok(None) => panic!("it ended as if the activity were settled"),
            Err(status) => Some(status),
        });
        let ended = ended.await;
        assert!(is_shutting_down(&ended), "{ended:?}");
        let status = process.ended(grace + Duration::from_secs(1)).await;
        assert!(status.success(), "{status}");
        assert!(stopped.elapsed() < grace + Duration::from_secs(1), "{:?}", stopped.elapsed());
        // Closed or reset; either way it is gone.
        let mut settings = Vec::new();
        let closed = silent.read_to_end(&mut settings);
        tokio::time::timeout(Duration::from_secs(1), closed).await.unwrap().ok();
    }
}

on_every_redis! {
    async fn a_crash_while_a_set_aside_is_undone_is_finished_by_the_next_server(
        ground: &Ground<'_>, _redis: &RedisServer
    ) {
        for failpoint in ["before_undo_commit", "after_undo_commit", "after_put_back_script"] {
            let key = adjusted_sale(ground).await;
            let world = ground.world().await;
            world.set_aside(&key, &format!("{}-a1", key.activity_id), 4).await;
            world.close().await;
            let serve = Serve::over(&ground.settings()).with("SWEEPER__GRACE_MS", 500);
            serve.clone().dying(failpoint, 1).spawn().crashed().await;
            let mut process = serve.start().await;
            settled(&process, &key, SALE.total).await;
            let answer = adjust(&process, &key, "a1", -4).await.unwrap();
            assert!(!answer.applied, "{failpoint}: {answer:?}");
            process.stop().await;
            assert_adjusted(ground, &key, SALE.total).await;
        }
    }
}

/// A sale of its own, which the adjustments of one crash are about.
async fn adjusted_sale(ground: &Ground<'_>) -> OfferKey {
    static NTH: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let nth = NTH.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let activity: &'static str = format!("sale-{nth}").leak();
    open_sale(ground, &Sale { activity, ..SALE }).await
}

async fn adjust(
    process: &Process,
    key: &OfferKey,
    request_id: &str,
    delta: i64,
) -> Result<pb::AdjustStockResponse, Status> {
    let request = pb::AdjustStockRequest {
        activity_id: key.activity_id.to_string(),
        sku_id: key.sku_id.to_string(),
        delta,
        // One id names one adjustment of all activities.
        request_id: format!("{}-{request_id}", key.activity_id),
        reason: "test".to_owned(),
    };
    let mut admin = SeckillAdminClient::new(process.channel().await);
    admin.adjust_stock(request).await.map(tonic::Response::into_inner)
}

/// Kills a server at this place of an adjustment; the next one finishes it by itself, and a repeat
/// hears what became of it.
async fn adjusts_and_dies(
    ground: &Ground<'_>,
    failpoint: &str,
    delta: i64,
    applies_alone: bool,
    applies: bool,
) {
    let key = adjusted_sale(ground).await;
    let serve = Serve::over(&ground.settings()).with("SWEEPER__GRACE_MS", 500);
    let mut dying = serve.clone().dying(failpoint, 1).start().await;
    let answer = adjust(&dying, &key, "a1", delta).await;
    assert!(answer.is_err(), "{failpoint}: {answer:?}");
    dying.crashed().await;
    let mut process = serve.start().await;
    let total = |applied| if applied { SALE.total.strict_add_signed(delta) } else { SALE.total };
    settled(&process, &key, total(applies_alone)).await;
    let answer = adjust(&process, &key, "a1", delta).await.unwrap();
    // A set-aside that a rebuild dropped before anybody undid it is simply made again.
    let again = ground.redis.is_none() && !applies_alone;
    assert_eq!(answer.applied, applies || again, "{failpoint}: {answer:?}");
    process.stop().await;
    assert_adjusted(ground, &key, total(answer.applied)).await;
}

/// Waits until the engine sells as many units as this, with nothing set aside.
async fn settled(process: &Process, key: &OfferKey, total: u64) {
    let request = pb::ReconcileRequest { activity_id: key.activity_id.to_string(), repair: false };
    let admin = SeckillAdminClient::new(process.channel().await);
    eventually("the adjustment is finished", async || {
        let report = admin.clone().reconcile(request.clone()).await.ok()?.into_inner().report?;
        let segment = report.offers[0].segments.first()?;
        let total = i64::try_from(total).unwrap();
        let done = (segment.remaining, segment.in_transfer) == (total, 0);
        (done && report.difference_count == 0).then_some(())
    })
    .await;
}

async fn assert_adjusted(ground: &Ground<'_>, key: &OfferKey, total: u64) {
    let world = ground.world().await;
    world.assert_balanced(key, 0).await;
    let levels = world.levels(key).await;
    assert_eq!((levels.total, levels.stock, levels.aside), (total, total, 0));
    assert_eq!(world.offer_row(key).await.total, i64::try_from(total).unwrap());
    world.close().await;
}

#[tokio::test]
async fn a_second_signal_ends_the_server_at_once() {
    let settings = seckill::config::Settings::default();
    let serve = Serve::over(&settings)
        .with("DATABASE__URL", "sqlite::memory:")
        .with("GRPC__SHUTDOWN_GRACE_MS", 60_000);
    let mut process = serve.start().await;
    let _health = watch_health(&process).await;
    process.terminate();
    process.logged("stopping: a second signal ends it at once").await;
    process.terminate();
    let status = process.ended(Duration::from_secs(20)).await;
    assert_eq!(status.code(), Some(69), "{}", process.log());
    assert!(process.log().contains("ended by a second signal"), "{}", process.log());
}

fn is_shutting_down(status: &Status) -> bool {
    let reason = status.get_details_error_info().map(|info| info.reason);
    status.code() == Code::Unavailable && reason.as_deref() == Some("SHUTTING_DOWN")
}

/// A health watch that has said SERVING and stays open.
async fn watch_health(
    process: &Process,
) -> tonic::Streaming<tonic_health::pb::HealthCheckResponse> {
    let request = HealthCheckRequest { service: String::new() };
    let mut client = HealthClient::new(process.channel().await);
    let mut health = client.watch(request).await.unwrap().into_inner();
    assert!(health.message().await.unwrap().is_some());
    health
}

/// A stock watch that has sent its snapshot and stays open.
async fn watch_stock(
    process: &Process,
    key: &OfferKey,
) -> tonic::Streaming<pb::WatchStockResponse> {
    let activity_id = key.activity_id.to_string();
    let request = pb::WatchStockRequest { activity_id, ..Default::default() };
    let mut stock = process.seckill().await.watch_stock(request).await.unwrap().into_inner();
    assert!(stock.message().await.unwrap().unwrap().snapshot);
    stock
}
