//! Very many watchers of one offer, of whom some never read: nobody is held up by them, neither
//! those who read nor those who buy, and they cost next to no memory.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future, stream};
use seckill::{
    api::pb::{self, seckill_client::SeckillClient},
    domain::OfferKey,
};
use tokio::{task::JoinSet, time::Instant};
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use crate::support::{
    calls::{Shop, drained, win},
    databases::{self, Fresh},
    process::{Process, Serve, channel},
    within,
    world::{Ground, Sale},
};

/// How many watch; `SECKILL_WATCHERS` says otherwise.
const WATCHERS: usize = 4_000;
/// One of so many never reads.
const STALLED_ONE_OF: usize = 100;
/// Streams that share a connection.
const SHARE: usize = 100;
/// What the network takes from the server for one who never reads.
const READ_AHEAD_BYTES: u32 = 128;
/// No message is shorter than this.
const SHORTEST: usize = 32;
const BUYERS_AT_ONCE: usize = 8;
const CHANGES_FOR: Duration = Duration::from_secs(3);
/// Values that everybody is told, one after the other; many more than the network takes.
const VALUES: u32 = 15;

/// Bounds that hold on a machine that is busy with others, in a build that is not optimized.
const STREAM_BYTES: u64 = 32 * 1_024;
const CONVERGED_WITHIN: Duration = Duration::from_secs(10);
const RESERVE_P99: Duration = Duration::from_secs(3);

type Updates = Streaming<pb::WatchStockResponse>;

/// Opens streams, [`SHARE`] on each connection.
async fn watch(
    process: &Process,
    key: &OfferKey,
    count: usize,
    window: Option<u32>,
) -> Vec<Updates> {
    let mut endpoint = Endpoint::from_shared(format!("http://{}", process.addr)).unwrap();
    if let Some(bytes) = window {
        endpoint = endpoint.initial_stream_window_size(bytes);
    }
    let mut channels: Vec<Channel> = Vec::new();
    for _ in 0..count.div_ceil(SHARE) {
        channels.push(endpoint.connect().await.unwrap());
    }
    let request =
        pb::WatchStockRequest { activity_id: key.activity_id.to_string(), ..Default::default() };
    let opened = stream::iter(0..count).map(|nth| {
        let mut client = SeckillClient::new(channels[nth / SHARE].clone());
        let request = request.clone();
        async move { client.watch_stock(request).await.unwrap().into_inner() }
    });
    opened.buffer_unordered(64).collect().await
}

/// What one who reads knows.
#[derive(Debug)]
struct Reader {
    remaining: AtomicI64,
    messages: AtomicU64,
}

async fn read(mut updates: Updates, reader: Arc<Reader>) {
    let mut last = (0, 0);
    while let Ok(Some(update)) = updates.message().await {
        let stamp = (update.epoch, update.revision);
        assert!(stamp >= last, "{update:?} after {last:?}");
        last = stamp;
        reader.remaining.store(update.remaining, Ordering::Relaxed);
        reader.messages.fetch_add(1, Ordering::Relaxed);
    }
}

/// Buyers take unit after unit; how long each waited. They have a runtime of their own, or they
/// would wait for those who read here, and not for the server.
async fn sell(process: &Process, key: &OfferKey, span: Duration) -> Vec<Duration> {
    let (addr, key) = (process.addr, key.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let buyers = tokio::task::spawn_blocking(move || {
        runtime.block_on(async {
            let shop = Shop::new(&key, channel(addr).await);
            buy(&shop, span).await
        })
    });
    buyers.await.unwrap()
}

async fn buy(shop: &Shop, span: Duration) -> Vec<Duration> {
    let over = AtomicBool::new(false);
    let sales = stream::iter((0..).take_while(|_| !over.load(Ordering::Relaxed)))
        .map(async |nth: usize| {
            let sent = Instant::now();
            let answer = shop.reserve(&format!("buyer-{nth}"), "first").await.unwrap();
            assert!(win(&answer).is_some(), "{answer:?}");
            sent.elapsed()
        })
        .buffer_unordered(BUYERS_AT_ONCE)
        .collect::<Vec<Duration>>();
    let clock = async {
        tokio::time::sleep(span).await;
        over.store(true, Ordering::Relaxed);
    };
    let (mut waits, ()) = future::join(sales, clock).await;
    waits.sort();
    waits
}

async fn many_watchers(fresh: &Fresh) {
    let watchers = std::env::var("SECKILL_WATCHERS").ok();
    let watchers = watchers.map_or(WATCHERS, |count| count.parse().unwrap());
    let ground = Ground::embedded(fresh);
    let total = 1_000_000;
    let world = ground.world().await;
    let key = world.open_sale(&Sale { total, ..Sale::default() }).await;
    world.close().await;
    let mut process = Serve::over(&ground.settings()).start().await;
    let shop = Shop::new(&key, process.channel().await);
    shop.insist("early", "first").await;
    let alone = process.memory();

    let began = Instant::now();
    let stalled = watch(&process, &key, watchers / STALLED_ONE_OF, Some(READ_AHEAD_BYTES)).await;
    let mut tasks = JoinSet::new();
    let mut readers = Vec::new();
    for updates in watch(&process, &key, watchers - stalled.len(), None).await {
        let reader =
            Arc::new(Reader { remaining: AtomicI64::new(-1), messages: AtomicU64::new(0) });
        tasks.spawn(read(updates, reader.clone()));
        readers.push(reader);
    }
    let know = async |remaining: i64| {
        within(CONVERGED_WITHIN, "every reader knows it", async || {
            let knows =
                |reader: &Arc<Reader>| reader.remaining.load(Ordering::Relaxed) == remaining;
            readers.iter().all(knows).then_some(())
        })
        .await;
    };
    let left = |sold: usize| i64::try_from(total).unwrap() - 1 - i64::try_from(sold).unwrap();
    know(left(0)).await;
    let (opened, watched) = (began.elapsed(), process.memory());

    let waits = sell(&process, &key, CHANGES_FOR).await;
    let sold = Instant::now();
    know(left(waits.len())).await;
    let converged = sold.elapsed();
    let began = Instant::now();
    let mut sold = waits.len();
    for _ in 0..VALUES {
        shop.insist(&format!("late-{sold}"), "first").await;
        sold += 1;
        know(left(sold)).await;
    }
    let (round, memory) = (began.elapsed() / VALUES, process.memory());

    let told: u64 = readers.iter().map(|reader| reader.messages.load(Ordering::Relaxed)).sum();
    let p99 = waits[waits.len() * 99 / 100];
    #[allow(clippy::print_stdout, reason = "the figures are what it is for")]
    {
        println!(
            "{watchers} watchers, {} of whom never read: open after {opened:?}; {} sold, p99 {p99:?}; \
         {told} messages, all told {converged:?} after the last; a value reaches all in {round:?}; \
         {} KiB a stream at first and {} after all of it",
            stalled.len(),
            waits.len(),
            watched.saturating_sub(alone) / watchers as u64 / 1_024,
            memory.saturating_sub(alone) / watchers as u64 / 1_024,
        );
    }
    assert!(p99 < RESERVE_P99, "{p99:?}");
    let most = STREAM_BYTES * watchers as u64;
    assert!(memory < alone + most, "{alone} bytes without them, {memory} with them");

    // Those who begin to read find what was on the wire, and then the newest.
    for mut updates in stalled {
        let mut old = VecDeque::new();
        loop {
            let next = tokio::time::timeout(CONVERGED_WITHIN, updates.message()).await;
            let update = next.expect("a message in time").unwrap().expect("the stream goes on");
            if update.remaining == left(sold) {
                break;
            }
            old.push_back(update.remaining);
        }
        let most = READ_AHEAD_BYTES as usize / SHORTEST + 2;
        assert!(old.len() <= most, "{} old values were kept for one who does not read", old.len());
    }
    drained(process.channel().await, &key).await;
    process.stop().await;
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let world = ground.world().await;
    world.assert_balanced(&key, i64::try_from(sold + 1).unwrap()).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_who_never_read_hold_nobody_up_and_cost_no_memory() {
    databases::run(Fresh::sqlite().await, many_watchers).await;
}
