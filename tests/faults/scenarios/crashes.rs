//! A server dies at each failpoint, and another is started in its place.

use std::time::Duration;

use futures_util::FutureExt as _;
use seckill::{
    api::pb,
    domain::{BuyerId, RequestId, name_reservation},
    failpoints,
};
use tokio::time::Instant;

use super::{Scenario, Struck, scenario};
use crate::{
    arena::{Arena, Setup},
    crowd::Mix,
    stores::Sql,
    support::within,
};

/// What brings a server to a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Start,
    WarmUp,
    /// Buyers come, and it is passed for the n-th time.
    Sale(u32),
    Hold,
    /// The engine forgot a buyer, and SQL refuses what it gives out.
    Contradiction,
    /// A release of what another server took and never recorded.
    Tombstone,
    /// Something that another server took and never recorded.
    Forgotten,
    /// The engine forgot everything.
    Flush,
    /// Another sale is over, and is settled while this one goes on.
    Settle,
    /// An operator adjusts the stock while buyers come.
    Adjust(i64),
    /// What a server that died has set aside is put back.
    Undo,
    /// Somebody asks for more units than a segment has.
    Transfer,
    /// An operator splits the stock into more segments.
    Split,
}

/// So many that none has as many units as one order may be of.
const SEGMENTS: u32 = 64;
/// Units that are set aside where a server is to undo it.
const ASIDE: i64 = 7;

fn way_to(failpoint: &str) -> Way {
    match failpoint {
        "after_stores_opened" | "after_catalog_read" | "before_serving" => Way::Start,
        "after_warmup_script" | "before_warm_commit" | "after_warm_commit" => Way::WarmUp,
        "after_reserve_script" => Way::Sale(90),
        "before_outbox_commit" | "after_outbox_commit" => Way::Sale(30),
        "before_acknowledge_script" | "after_acknowledge_script" => Way::Sale(20),
        "after_orders_inserted" | "before_order_commit" | "after_order_commit" => Way::Sale(5),
        "before_release_commit" | "after_release_commit" => Way::Sale(8),
        "after_release_script" | "after_release_settled" => Way::Sale(8),
        "before_confirm_commit" | "after_confirm_commit" => Way::Sale(3),
        "after_expiry_commit" => Way::Hold,
        "before_judged_commit" | "after_judged_commit" => Way::Contradiction,
        "before_tombstone_commit" | "after_tombstone_commit" => Way::Tombstone,
        "before_settle" | "after_settle" => Way::Forgotten,
        "before_epoch_commit"
        | "after_epoch_raised"
        | "after_rebuild_begin"
        | "after_rebuild_load"
        | "before_rebuild_end"
        | "after_rebuild_end" => Way::Flush,
        "before_settlement_commit" | "after_settlement_commit" => Way::Settle,
        "after_set_aside_script" | "before_adjustment_commit" => Way::Adjust(-ASIDE),
        "after_adjustment_commit" | "after_adjustment_applied" => Way::Adjust(ASIDE),
        "after_adjustment_script" => Way::Adjust(-ASIDE),
        "before_undo_commit" | "after_undo_commit" | "after_put_back_script" => Way::Undo,
        "after_transfer_out" | "after_transfer_in" | "after_transfer_done" => Way::Transfer,
        "before_segments_commit" | "after_segments_commit" => Way::Split,
        other => panic!("no scenario reaches the failpoint {other}"),
    }
}

pub(super) fn all(usual: &dyn Fn() -> Setup) -> Vec<Scenario> {
    let at_failpoint = |failpoint: &&'static str| {
        let (failpoint, way) = (*failpoint, way_to(failpoint));
        let mut setup = usual();
        let mut sqls = &Sql::ALL[..];
        match way {
            Way::Start | Way::Sale(_) | Way::Flush | Way::Settle | Way::Adjust(_) => {}
            Way::Transfer => setup.segments = SEGMENTS,
            Way::Split => setup.segments = 2,
            Way::WarmUp => setup.is_warm = false,
            Way::Hold => {
                setup.hold = Some(Duration::from_secs(2));
                setup.mix = Mix { confirm: 20, ..Mix::USUAL };
            }
            // The embedded engine forgets only with its process, and is rebuilt by the next start.
            Way::Contradiction => {
                sqls = &Sql::SERVERS;
                // Whose reservation was taken out by hand hears so until the sweeper has been there.
                setup.mix = Mix { repeat: 0, ..Mix::USUAL };
            }
            // What is set aside in the embedded engine goes with its process.
            Way::Tombstone | Way::Forgotten | Way::Undo => sqls = &Sql::SERVERS,
        }
        scenario(format!("crash {failpoint}"), sqls, setup, move |arena| {
            die_at(arena, failpoint, way).boxed_local()
        })
    };
    failpoints::ALL.iter().map(at_failpoint).collect()
}

async fn die_at(arena: &mut Arena, failpoint: &str, way: Way) -> Struck {
    match way {
        Way::Start => {
            sell_and_die(arena, "after_reserve_script", 60).await;
            arena.serve_dying(0, failpoint, 1);
        }
        Way::WarmUp => {
            arena.serve_dying(0, failpoint, 1);
            arena.serves(0).await;
            let activity_id = arena.key.activity_id.to_string();
            let warm_up = pb::WarmupRequest { activity_id };
            let answer = arena.crowd.door_of(0).warmup(warm_up).await;
            assert!(answer.is_err(), "{answer:?}");
        }
        Way::Sale(nth) => {
            arena.serve_dying(0, failpoint, nth);
            arena.load();
        }
        Way::Hold => {
            arena.serve_dying(0, failpoint, 10);
            arena.load();
        }
        Way::Contradiction => {
            arena.serve_dying(0, failpoint, 1);
            arena.serves(0).await;
            arena.warm_load().await;
            // Or the buyer may give the unit back meanwhile, and is right to ask for another.
            arena.unload().await;
            contradict(arena).await;
        }
        Way::Tombstone => {
            sell_and_die(arena, "before_outbox_commit", 30).await;
            // The sweeper must not be first, however slow this machine is.
            let usual = arena.servers[0].serve.clone();
            arena.servers[0].serve = usual.clone().with("SWEEPER__GRACE_MS", 60_000);
            arena.serve_dying(0, failpoint, 1);
            arena.servers[0].serve = usual;
            arena.serves(0).await;
            release_what_is_in_flight(arena).await;
        }
        Way::Forgotten => {
            sell_and_die(arena, "before_outbox_commit", 30).await;
            arena.serve_dying(0, failpoint, 1);
        }
        Way::Settle => {}
        Way::Transfer => {
            arena.serve_dying(0, failpoint, 2);
            arena.serves(0).await;
            arena.warm_load().await;
            while arena.crowd.buy_large().await.is_some() {}
        }
        Way::Split => {
            arena.serve_dying(0, failpoint, 1);
            arena.serves(0).await;
            arena.warm_load().await;
            let answer = arena.try_to_split(8).await;
            assert!(answer.is_err(), "{answer:?}");
        }
        Way::Adjust(delta) => adjust_and_die(arena, failpoint, delta).await,
        Way::Undo => {
            adjust_and_die(arena, "after_set_aside_script", -ASIDE).await;
            arena.crashed(0).await;
            arena.unload().await;
            arena.serve_dying(0, failpoint, 1);
        }
        Way::Flush if arena.redis.is_none() => {
            sell_and_die(arena, "after_outbox_commit", 30).await;
            arena.serve_dying(0, failpoint, 1);
        }
        Way::Flush => {
            arena.serve_dying(0, failpoint, 1);
            arena.serves(0).await;
            arena.warm_load().await;
            arena.redis().command::<String>(&["FLUSHALL"]).await;
        }
    }
    if way == Way::Settle {
        arena.end_another_sale().await;
        arena.serve_dying(0, failpoint, 1);
        arena.serves(0).await;
        arena.warm_load().await;
        assert!(arena.settle_the_other().await.is_err());
    }
    arena.crashed(0).await;
    let died = Instant::now();
    let in_limbo = arena.in_limbo().await;
    arena.serve(0).await;
    if way == Way::WarmUp {
        // The lock of the one that died runs out by itself.
        within(Duration::from_secs(20), "it is warmed up", async || {
            let activity_id = arena.key.activity_id.to_string();
            arena.crowd.door_of(0).warmup(pb::WarmupRequest { activity_id }).await.ok()
        })
        .await;
    }
    if way == Way::Settle {
        if failpoint == "before_settlement_commit" {
            arena.serves(0).await;
            // The lock of the dead server runs out first.
            within(Duration::from_secs(10), "the other sale is settled", async || {
                arena.settle_the_other().await.ok()
            })
            .await;
        }
        arena.the_other_is_forgotten().await;
    }
    if matches!(way, Way::Adjust(_) | Way::Undo) {
        arena.serves(0).await;
        let delta = if let Way::Adjust(delta) = way { delta } else { -ASIDE };
        // The sale ends with as many units as it began with.
        if arena.adjust("strike", delta).await {
            assert!(arena.adjust("counter", -delta).await, "it can't be taken back");
        }
    }
    if !arena.is_loaded() {
        arena.load();
    }
    Struck::at(died, in_limbo)
}

/// An adjustment in the middle of the sale, whose server dies.
async fn adjust_and_die(arena: &mut Arena, failpoint: &str, delta: i64) {
    arena.serve_dying(0, failpoint, 1);
    arena.serves(0).await;
    arena.warm_load().await;
    let answer = arena.try_to_adjust("strike", delta).await;
    assert!(answer.is_err(), "{answer:?}");
}

/// A sale whose server dies, so that there is something to find.
async fn sell_and_die(arena: &mut Arena, failpoint: &str, nth: u32) {
    arena.serve_dying(0, failpoint, nth);
    arena.load();
    arena.crashed(0).await;
    arena.unload().await;
}

/// Makes the engine forget one winner, who then asks with another request.
async fn contradict(arena: &mut Arena) {
    let win = arena.crowd.held().expect("somebody holds a unit");
    let key =
        |part: &str| format!("sk:{{{}:{}:0}}:{part}", arena.key.activity_id, arena.key.sku_id);
    let (buyers, reservations, stock) = (key("buyers"), key("reservations"), key("stock"));
    let redis = arena.redis.as_ref().unwrap();
    within(Duration::from_secs(10), "the reservation is acknowledged", async || {
        let score: Option<f64> = redis.command(&["ZSCORE", &key("unacked"), &win.buyer]).await;
        score.is_none().then_some(())
    })
    .await;
    redis.command::<i64>(&["SREM", &buyers, &win.buyer]).await;
    redis.command::<i64>(&["HDEL", &reservations, &win.buyer]).await;
    redis.command::<i64>(&["INCR", &stock]).await;
    arena.crowd.ask_with_another_request(&win.buyer).await;
}

/// Buyers whose reservation nobody recorded give it back.
async fn release_what_is_in_flight(arena: &mut Arena) {
    let unsure: Vec<String> = {
        let ledger = arena.crowd.ledger();
        let unsure = ledger.told.iter().filter(|(_, told)| told.undecided && told.win.is_none());
        unsure.map(|(buyer, _)| buyer.clone()).collect()
    };
    assert!(!unsure.is_empty(), "nobody was left without an answer");
    for buyer in unsure {
        let request_id = RequestId::new("first").unwrap();
        let id = name_reservation(&arena.key, &BuyerId::new(&buyer).unwrap(), Some(&request_id));
        arena.crowd.give_back_if_held(&buyer, id.as_str()).await;
    }
}
