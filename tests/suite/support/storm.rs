//! A whole sale at once: far more buyers than units, winners who change their minds, requests that
//! are sent twice, over gRPC to a whole server.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future, stream};
use seckill::{
    api::pb::{self, ReleaseOutcome, ReserveOutcome},
    config::Settings,
    domain::OfferKey,
    engine::redis::OpenError,
    server::{Server, StartError},
};
use tokio::{sync::watch, task::JoinSet, time::Instant};

use super::{
    calls::{
        Recorder, Shop, Win, assert_history, assert_history_in_any_order, drained, follow_epochs,
        win,
    },
    eventually,
    history::Log,
    process::channel,
    world::{Sale, World},
};

const CLIENTS: usize = 64;
/// Clients that share a connection.
const SHARE: usize = 16;
/// One of so many winners gives the unit back.
const RELEASES_ONE_OF: u32 = 20;
/// One of so many buyers asks for another unit, and one of so many sends the request again.
const AGAIN_ONE_OF: u32 = 10;

/// A sale on a whole server, and what its buyers were told.
pub(crate) struct Storm {
    pub(crate) key: OfferKey,
    total: i64,
    buyers: u32,
    next_buyer: AtomicU32,
    /// How many buyers may come yet.
    door: watch::Sender<u32>,
    /// Units that buyers hold for certain: counted after the answer, and no longer from before
    /// the release is sent. So this is never more than there are, at any time.
    held: AtomicI64,
    answered: AtomicUsize,
    /// Answers that were no decision, by reason.
    pub(crate) undecided: AtomicUsize,
    wins: Mutex<Vec<Win>>,
    log: Log,
}

/// A server with these settings, quick to settle what is left behind.
pub(crate) async fn serve(mut settings: Settings) -> Server {
    settings.sweeper.interval_ms = 100;
    // Whoever waits is answered, however slow this machine is.
    settings.reserve.max_wait_ms = 60_000;
    settings.outbox.poll_interval_ms = 50;
    // Nor has a Sentinel half a second for its answer there.
    eventually("the server starts", async || match Server::start(&settings).await {
        Err(StartError::Engine(OpenError::Unreachable { .. })) => None,
        started => Some(started.unwrap()),
    })
    .await
}

/// Puts an activity of this name on sale.
pub(crate) async fn sell(server: &Server, activity: &'static str, total: u64) -> OfferKey {
    sell_in(server, activity, total, 1).await
}

/// The same, in so many segments.
pub(crate) async fn sell_in(
    server: &Server,
    activity: &'static str,
    total: u64,
    segments: u32,
) -> OfferKey {
    let world = World { parts: server.parts.clone(), settings: Settings::default() };
    let sale = Sale { activity, total, segments, max_quantity: 1, ..Sale::default() };
    world.open_sale(&sale).await
}

impl Storm {
    pub(crate) fn new(key: &OfferKey, total: u64, buyers: u32) -> Arc<Self> {
        Arc::new(Self {
            key: key.clone(),
            total: i64::try_from(total).unwrap(),
            buyers,
            next_buyer: AtomicU32::new(0),
            door: watch::Sender::new(u32::MAX),
            held: AtomicI64::new(0),
            answered: AtomicUsize::new(0),
            undecided: AtomicUsize::new(0),
            wins: Mutex::default(),
            log: Log::new(),
        })
    }

    /// All buyers, from [`CLIENTS`] at once, while a watch looks on; `meddle` runs in the middle.
    pub(crate) async fn rage(self: &Arc<Self>, server: &Server, meddle: impl Future<Output = ()>) {
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS / SHARE {
            let shop = Shop::new(&self.key, channel(server.addr).await).with_log(&self.log);
            for _ in 0..SHARE {
                clients.spawn(self.clone().buy(shop.clone()));
            }
        }
        let watcher = Recorder::start(channel(server.addr).await, &self.key).await;
        let all = async {
            while let Some(ended) = clients.join_next().await {
                ended.unwrap();
            }
        };
        let world = World { parts: server.parts.clone(), settings: Settings::default() };
        let sale = pin!(future::join(all, meddle));
        let epochs = pin!(follow_epochs(&self.log, &world, &self.key));
        future::select(sale, epochs).await;
        let seen = watcher.seen();
        assert_eq!(seen.end, None, "the watch ended");
        seen.check().unwrap();
    }

    /// Lets so many buyers come; those behind them wait.
    pub(crate) fn let_in(&self, buyers: u32) {
        self.door.send_replace(buyers);
    }

    async fn buy(self: Arc<Self>, shop: Shop) {
        loop {
            let nth = self.next_buyer.fetch_add(1, Ordering::Relaxed);
            if nth >= self.buyers {
                return;
            }
            self.door.subscribe().wait_for(|open| nth < *open).await.unwrap();
            self.buy_one(&shop, nth).await;
        }
    }

    async fn buy_one(&self, shop: &Shop, nth: u32) {
        let buyer = format!("buyer-{nth}");
        let answer = self.attempt(shop, &buyer, "first").await;
        self.answered.fetch_add(1, Ordering::Relaxed);
        let Some(won) = win(&answer) else {
            let refused = [ReserveOutcome::SoldOut, ReserveOutcome::Insufficient];
            assert!(refused.contains(&answer.outcome()), "{answer:?}");
            return;
        };
        let held = self.held.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(held <= self.total, "{held} units are held");
        if nth.is_multiple_of(AGAIN_ONE_OF) {
            let again = self.attempt(shop, &buyer, "first").await;
            assert_eq!(win(&again).as_ref(), Some(&won), "{again:?}");
            assert!(again.replayed);
        }
        if nth % AGAIN_ONE_OF == 1 {
            let second = self.attempt(shop, &buyer, "second").await;
            assert_eq!(second.outcome(), ReserveOutcome::Duplicate, "{second:?}");
            let existing = second.existing_reservation.unwrap();
            assert_eq!(existing.reservation_id, won.reservation_id);
        }
        if nth.is_multiple_of(RELEASES_ONE_OF) {
            self.held.fetch_sub(1, Ordering::SeqCst);
            // A release that was not decided may have been done.
            let released = shop.insist_on_release(&won).await;
            let done = [ReleaseOutcome::Released, ReleaseOutcome::AlreadyReleased];
            assert!(done.contains(&released), "{released:?}");
            let after = self.attempt(shop, &buyer, "first").await;
            assert_eq!(after.outcome(), ReserveOutcome::Released, "{after:?}");
        } else {
            self.wins.lock().unwrap().push(won);
        }
    }

    /// Repeats an attempt until it is decided, and counts what was not.
    async fn attempt(&self, shop: &Shop, buyer: &str, request_id: &str) -> pb::ReserveResponse {
        match shop.reserve(buyer, request_id).await {
            Ok(answer) => answer,
            Err(_) => {
                self.undecided.fetch_add(1, Ordering::Relaxed);
                shop.insist(buyer, request_id).await
            }
        }
    }

    /// How many buyers have their answer.
    pub(crate) fn answered_now(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until so many buyers have their answer.
    pub(crate) async fn answered(&self, buyers: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.answered_now() < buyers {
            assert!(Instant::now() < deadline, "the sale does not go on");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Sells what came back late, and compares what was told with the books, to the unit.
    pub(crate) async fn settle(&self, server: &Server) {
        let world = self.finish(server).await;
        assert_history(&self.log, &world, &self.key, 1).await;
    }

    /// The same after a slot has moved: whoever looks when it sells again is held up, too.
    pub(crate) async fn settle_in_any_order(&self, server: &Server) {
        let world = self.finish(server).await;
        assert_history_in_any_order(&self.log, &world, &self.key).await;
    }

    async fn finish(&self, server: &Server) -> World {
        let shop = Shop::new(&self.key, channel(server.addr).await).with_log(&self.log);
        let mut wins = std::mem::take(&mut *self.wins.lock().unwrap());
        assert!(wins.len() as i64 <= self.total);
        for nth in 0.. {
            match win(&shop.insist(&format!("late-{nth}"), "first").await) {
                Some(won) => wins.push(won),
                None => break,
            }
        }
        assert_eq!(wins.len() as i64, self.total, "all was sold in the end");
        // Whoever won still does.
        let again = stream::iter(&wins)
            .map(async |won| (won, shop.insist(&won.buyer, "first").await))
            .buffer_unordered(CLIENTS);
        let again: Vec<_> = again.collect().await;
        for (won, answer) in again {
            assert_eq!(win(&answer).as_ref(), Some(won), "{answer:?}");
        }
        drained(channel(server.addr).await, &self.key).await;
        let world = World { parts: server.parts.clone(), settings: Settings::default() };
        assert_told(&world, &self.key, &wins).await;
        world
    }
}

/// The books balance as they are, and every winner has the one order that the answer named.
async fn assert_told(world: &World, key: &OfferKey, wins: &[Win]) {
    let books = world.read_books(key).await.unwrap();
    assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
    assert_eq!((books.oversold(), books.missing()), (0, 0), "{books:?}");
    let orders = world.live_orders(key).await;
    assert_eq!(orders.len(), wins.len());
    for won in wins {
        assert_eq!(orders.get(&won.reservation_id), Some(&won.order_no), "{won:?}");
    }
}
