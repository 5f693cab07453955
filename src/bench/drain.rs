//! `drain`: the two ends of the outbox, each by itself: rows into it as groups are committed, and out
//! of it into orders by one poller, against the INSERTs that they are made of.
//!
//! The writer and the poller of a server run in this process, without the server around them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};

use super::{
    Error, Plan,
    bed::Bed,
    load::buyer,
    oracle::Told,
    raw::Raw,
    report::{Bound, Figure, Run},
    wins::UNITS,
};
use crate::{
    domain::{BuyerId, OfferKey, RequestId, TimeMs, name_reservation, new_order_no},
    outbox::writer::{NewRow, Written},
    server::Parts,
};

/// Rows that wait at once: enough for two full groups and the next two.
const WAITING: usize = 2_048;
/// Connections of the writer, and of the poller.
const WRITING: usize = 2;
const POLLING: usize = 1;
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("outbox_over_raw", "× INSERT", "Rows into the outbox, against raw INSERTs.")
        .goal("G6", Bound::AtLeast(0.8)),
    Figure::plain("drain_over_raw", "× INSERT", "Rows made orders by one poller, the same.")
        .goal("G7", Bound::AtLeast(0.5)),
    Figure::plain("outbox_rows_per_s", "1/s", "Rows into the outbox by the writer."),
    Figure::plain("raw_outbox_rows_per_s", "1/s", "By multi-row INSERTs, two connections."),
    Figure::plain("drained_per_s", "1/s", "Rows made orders by one poller."),
    Figure::plain("raw_orders_per_s", "1/s", "Orders by multi-row INSERTs, one connection."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let mut bed = Bed::open(plan, UNITS).await?;
    bed.stop_servers().await?;
    let parts = Parts::open(&bed.settings).boxed().await;
    let parts = parts.map_err(|error| Error::Unavailable(error.to_string()))?;
    let measured = measure(plan, &bed, &parts, run, tell).await;
    parts.close(tokio::time::Instant::now() + CLOSE_LIMIT).await;
    let wins = measured?;

    tell("raw INSERTs");
    let raw = Raw::open(plan).await?;
    let outbox = raw.outbox_rows_per_s(WRITING, plan.lasts).await?;
    let orders = raw.orders_per_s(POLLING, plan.lasts).await?;
    raw.close().await?;
    run.set("raw_outbox_rows_per_s", outbox);
    run.set("raw_orders_per_s", orders);
    let ratios = [
        ("outbox_over_raw", "outbox_rows_per_s", outbox),
        ("drain_over_raw", "drained_per_s", orders),
    ];
    for (name, measured, raw) in ratios {
        if let Some(measured) = run.figures.get(measured).copied() {
            run.set(name, measured / raw);
        }
    }

    tell("reading the books");
    bed.add_server(plan).await?;
    run.broken.extend(bed.close(Told { wins, ..Told::default() }).await?);
    Ok(())
}

/// Answers how many rows were written.
async fn measure(
    plan: &Plan,
    bed: &Bed,
    parts: &Parts,
    run: &mut Run,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<u64, Error> {
    let failed = |error: crate::error::Error| Error::Unavailable(format!("the outbox: {error}"));
    let offer = parts.catalog.offer(&bed.offer).await.map_err(failed)?;
    let epoch = offer.epoch();
    tell("rows into the outbox");
    let warm = write(parts, &bed.offer, epoch, "w", plan.warm_up()).await?;
    let begun = Instant::now();
    let rows = write(parts, &bed.offer, epoch, "r", plan.lasts).await?;
    run.set("outbox_rows_per_s", rows as f64 / begun.elapsed().as_secs_f64());

    tell("rows into orders");
    let poller = parts.poller(&bed.settings);
    let (mut ordered, begun) = (0, Instant::now());
    let mut took = Duration::ZERO;
    loop {
        let pass = poller.run_once().await.map_err(failed)?;
        if pass.ordered == 0 {
            break;
        }
        ordered += pass.ordered as u64;
        took = begun.elapsed();
    }
    run.set("drained_per_s", ordered as f64 / took.as_secs_f64().max(f64::EPSILON));
    if ordered != warm + rows {
        run.broken.push(format!("{} rows were written and {ordered} made orders", warm + rows));
    }
    // The engine has never heard of these rows; it learns of them as after any loss.
    let rebuilt = parts.recovery.rebuild_anyway(&offer, "operator").boxed().await;
    rebuilt.map_err(failed)?;
    Ok(warm + rows)
}

async fn write(
    parts: &Parts,
    offer: &OfferKey,
    epoch: u64,
    series: &str,
    lasts: Duration,
) -> Result<u64, Error> {
    let begun = Instant::now();
    let (mut nth, mut rows) = (0, 0);
    let mut waiting = FuturesUnordered::new();
    loop {
        while waiting.len() < WAITING && begun.elapsed() < lasts {
            let row = new_row(offer, epoch, series, nth)?;
            nth += 1;
            let writer = Arc::clone(&parts.reservations.writer);
            waiting.push(async move { writer.write(row).await });
        }
        match waiting.next().await {
            Some(Ok(Written::Live(_))) => rows += 1,
            Some(other) => return Err(Error::Unavailable(format!("a row came to {other:?}"))),
            None => return Ok(rows),
        }
    }
}

pub(super) fn new_row(
    offer: &OfferKey,
    epoch: u64,
    series: &str,
    nth: usize,
) -> Result<NewRow, Error> {
    let named = |_| Error::Internal("a name of the bench".to_owned());
    let buyer = BuyerId::new(&buyer(series, nth)).map_err(named)?;
    let request_id = RequestId::new("attempt-1").map_err(named)?;
    Ok(NewRow {
        offer: offer.clone(),
        epoch,
        reservation_id: name_reservation(offer, &buyer, Some(&request_id)),
        buyer,
        slot: 1,
        quantity: 1,
        order_no: new_order_no(),
        request_id: Some(request_id),
        reserve_time: TimeMs::now(),
        hold: None,
    })
}
