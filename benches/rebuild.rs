//! How long an offer is frozen by a rebuild, by size, and how another offer sells meanwhile; and how
//! long a comparison of the books takes.
//!
//! ```text
//! cargo bench --bench rebuild                        # 1,000 to 1,000,000 reservations
//! cargo bench --bench rebuild -- 5000                # another size
//! SECKILL__ENGINE__URL=redis://… SECKILL__DATABASE__URL=postgres://… cargo bench --bench rebuild
//! ```
//!
//! Without settings: the embedded engine over SQLite in a temporary folder. A database that is
//! named gets activities `bench-rebuild-…` and keeps them; a Redis drops its keys in the end.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that prints a table")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use sea_orm::{
    ActiveValue::{NotSet, Set},
    ConnectionTrait as _,
};
use seckill::{
    config::{SecretUrl, Settings, Sources},
    database::insert_ignore,
    domain::{
        ActivityId, ActivitySpec, BuyerId, OfferKey, OfferSpec, RequestId, ReserveOutcome,
        ReserveRequest, SkuId, TimeMs,
    },
    engine::batcher::Caller,
    entity::{outbox, outbox::OutboxState},
    server::Parts,
};

const SIZES: [u64; 4] = [1_000, 10_000, 100_000, 1_000_000];
/// Rows per transaction while the table is filled.
const FILL: u64 = 5_000;

#[tokio::main]
async fn main() {
    let sizes: Vec<u64> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let sizes = if sizes.is_empty() { SIZES.to_vec() } else { sizes };
    let mut settings = Sources::of_process(None, Vec::new()).load().unwrap().settings;
    let folder = tempfile::tempdir().unwrap();
    if settings.database.url.expose() == Settings::default().database.url.expose() {
        let file = folder.path().join("bench.db");
        settings.database.url = SecretUrl::new(format!("sqlite://{}", file.display()));
    }
    let parts = Parts::open(&settings).await.unwrap();
    println!(
        "{} engine, {:?}, {} core(s)\n",
        parts.engine.kind(),
        parts.database.backend(),
        std::thread::available_parallelism().unwrap()
    );
    println!(
        "{:>12}  {:>10}  {:>14}  {:>12}  {:>12}  {:>10}  {:>12}",
        "reservations",
        "frozen ms",
        "reservations/s",
        "other p50 µs",
        "other max ms",
        "RSS +MiB",
        "reconcile ms"
    );
    for size in sizes {
        measure(&parts, size).await;
    }
    parts.close(tokio::time::Instant::now() + Duration::from_secs(5)).await;
}

async fn measure(parts: &Parts, size: u64) {
    let id = ActivityId::new(&format!("bench-rebuild-{}", TimeMs::now().0)).unwrap();
    let spec = spec(&id, size);
    parts.activities.create(spec, "bench").await.unwrap();
    parts.activities.approve(&id, "bench", "").await.unwrap();
    parts.activities.warm_up(&id, "bench").await.unwrap();
    fill(parts, &id, size).await;
    let [big, other] = ["big", "other"]
        .map(|sku| OfferKey { activity_id: id.clone(), sku_id: SkuId::new(sku).unwrap() });
    let offer = parts.catalog.offer(&big).await.unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let buyers = parts.tasks.spawn(sell(parts.clone(), other, stop.clone()));
    let resident = resident_mib();
    let started = Instant::now();
    parts.recovery.rebuild_anyway(&offer, "bench").await.unwrap();
    let frozen = started.elapsed();
    let grown = resident_mib().saturating_sub(resident);
    stop.store(true, Ordering::Relaxed);
    let mut waits = buyers.await.unwrap();
    waits.sort_unstable();

    let levels = offer.levels().await.unwrap().unwrap();
    assert_eq!((levels.reservations, levels.held, levels.stock), (size, size, 100));
    let (median, longest) = match waits.as_slice() {
        [] => (Duration::ZERO, Duration::ZERO),
        [.., last] => (waits[waits.len() / 2], *last),
    };
    let started = Instant::now();
    let report = parts.reconciler.reconcile(&id, false, "bench").await.unwrap();
    assert_eq!(report.difference_count, 0, "{:?}", report.differences);
    let reconciled = started.elapsed();
    println!(
        "{size:>12}  {:>10}  {:>14.0}  {:>12}  {:>12.1}  {grown:>10}  {:>12}",
        frozen.as_millis(),
        size as f64 / frozen.as_secs_f64(),
        median.as_micros(),
        longest.as_secs_f64() * 1_000.0,
        reconciled.as_millis(),
    );
    for offer in parts.catalog.activity(&id).await.unwrap().offers.values() {
        offer.segments.first().scripts.purge(u64::MAX >> 12).await.unwrap();
    }
}

/// One buyer after the other, each with a reservation that is durable when the next one asks.
async fn sell(parts: Parts, key: OfferKey, stop: Arc<AtomicBool>) -> Vec<Duration> {
    let mut waits = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let request = ReserveRequest {
            offer: key.clone(),
            buyer: BuyerId::new(&format!("other-{}", waits.len())).unwrap(),
            quantity: 1,
            request_id: Some(RequestId::new("r").unwrap()),
            is_repeat: false,
            address: None,
        };
        let asked = Instant::now();
        let outcome = parts.reservations.reserve(request, Caller::default()).await.unwrap();
        assert!(matches!(outcome, ReserveOutcome::Reserved { .. }), "{outcome:?}");
        waits.push(asked.elapsed());
    }
    waits
}

/// Rows as the writer leaves them.
async fn fill(parts: &Parts, id: &ActivityId, size: u64) {
    let mut from = 0;
    while from < size {
        let until = (from + FILL).min(size);
        let rows = (from..until).map(|nth| row(id, nth)).collect();
        let transaction = parts.database.begin().await.unwrap();
        insert_ignore(&transaction, rows).await.unwrap();
        transaction.commit().await.unwrap();
        from = until;
    }
    let sql = format!(
        "UPDATE offers SET reserved = {size} WHERE sku_id = 'big' AND activity_id = '{id}'"
    );
    parts.database.writer().execute_unprepared(&sql).await.unwrap();
}

fn row(id: &ActivityId, nth: u64) -> outbox::ActiveModel {
    outbox::ActiveModel {
        id: NotSet,
        reservation_id: Set(format!("{id}-{nth:07}")),
        activity_id: Set(id.to_string()),
        sku_id: Set("big".to_owned()),
        user_id: Set(format!("user-{nth:07}")),
        quantity: Set(1),
        slot: Set(Some(1)),
        order_no: Set(format!("order-{nth:07}")),
        request_id: Set(None),
        epoch: Set(1),
        batch: Set("bench".to_owned()),
        state: Set(OutboxState::Pending),
        reason: Set(None),
        attempts: Set(0),
        next_attempt_time: Set(0),
        last_error: Set(None),
        expire_time: Set(None),
        create_time: Set(1_000),
        settle_time: Set(None),
    }
}

fn spec(id: &ActivityId, size: u64) -> ActivitySpec {
    let now = TimeMs::now();
    let offer = |sku: &str, total: u64| OfferSpec {
        sku_id: SkuId::new(sku).unwrap(),
        title: "A thing".to_owned(),
        price_minor: 1,
        currency: "CNY".to_owned(),
        total,
        max_orders: 1,
        max_quantity: 1,
        hold: None,
        segments: 1,
    };
    ActivitySpec {
        activity_id: id.clone(),
        title: "A rebuild".to_owned(),
        start_time: now.minus(Duration::from_secs(60)),
        end_time: now.plus(Duration::from_secs(3_600)),
        retention: Duration::from_secs(3_600),
        offers: vec![offer("big", size + 100), offer("other", 10_000_000)],
    }
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) / 1_024
}
