//! Settles reservations that nobody acknowledged, and finishes adjustments and transfers that broke
//! off: a crash, a lost commit, a lost reply.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};

use crate::{
    adjustments::{finish_pending, sweep_asides},
    engine::{
        EngineError,
        batcher::Segment,
        scripts::{Refusal, Unacked},
    },
    error::Error,
    failpoints::failpoint,
    metrics,
    offer::Offer,
    reservations::Reservations,
    transfers,
};

/// Entries read from one segment at a time; the most that the script gives. Few in the simulator.
const PAGE: u32 = if cfg!(test) { 2 } else { 500 };
/// Offers looked at at the same time.
const OFFERS_AT_ONCE: usize = 32;

/// Walks all warmed offers once, and settles what is older than `grace`; answers how many.
///
/// The grace only saves work: to settle a reservation that its own request still works on is
/// harmless, since both write the same row.
///
/// # Errors
/// A store is away; what was not settled stays in `unacked`.
pub async fn sweep(reservations: &Arc<Reservations>, grace: Duration) -> Result<usize, Error> {
    let offers: Vec<Arc<Offer>> = reservations
        .catalog
        .all()
        .iter()
        .flat_map(|activity| activity.offers.values().cloned().collect::<Vec<_>>())
        .filter(|offer| offer.is_in_engine())
        .collect();
    let mut sweeps = stream::iter(offers)
        .map(|offer| async move { sweep_offer(reservations, &offer, grace).await })
        .buffer_unordered(OFFERS_AT_ONCE);
    let (mut settled, mut failed) = (0, None);
    while let Some(swept) = sweeps.next().await {
        match swept {
            Ok(some) => settled += some,
            Err(error) => failed = Some(error),
        }
    }
    // What is set aside and recorded is finished above, or here.
    if let Err(error) = finish_pending(&reservations.recovery, &reservations.catalog).await {
        failed = Some(error);
    }
    failed.map_or(Ok(settled), Err)
}

async fn sweep_offer(
    reservations: &Arc<Reservations>,
    offer: &Arc<Offer>,
    grace: Duration,
) -> Result<usize, Error> {
    let mut settled = 0;
    for segment in offer.segments.all() {
        settled += sweep_segment(reservations, offer, segment, grace).await?;
    }
    Ok(settled)
}

async fn sweep_segment(
    reservations: &Arc<Reservations>,
    offer: &Arc<Offer>,
    segment: &Arc<Segment>,
    grace: Duration,
) -> Result<usize, Error> {
    let before = reservations.database.clock().minus(grace);
    let mut settled = 0;
    loop {
        let unacked = segment.scripts.unacked(before, PAGE).await;
        let Unacked { epoch, aside, out, entries } = match unacked {
            Ok(Ok(unacked)) => unacked,
            Ok(Err(Refusal::NotWarmed | Refusal::Frozen { .. })) => {
                // Nobody may be asking for this offer now; it is to be whole when they do.
                reservations.recovery.rebuild(offer);
                return Ok(settled);
            }
            Err(EngineError::Script(text)) => {
                tracing::error!(offer = %offer.key, text, "the unacknowledged can't be read");
                let epoch = offer.epoch();
                reservations.recovery.freeze_and_rebuild(offer, epoch, "unreadable");
                return Ok(settled);
            }
            Err(error) => return Err(error.into()),
        };
        // A server that sells nothing learns of a rebuild here; else its acknowledgements are refused.
        offer.adopt(epoch);
        if aside > 0 {
            sweep_asides(&reservations.recovery, offer, segment, grace).await?;
        }
        if out > 0 {
            // To finish what its own server is at is harmless.
            transfers::finish_from(&reservations.recovery, offer, segment).await?;
        }
        let full = entries.len() == PAGE as usize;
        // Together, so that the writer makes groups of them.
        let results: Vec<Result<(), Error>> = stream::iter(entries)
            .map(|entry| async move {
                let reservation_id = entry.record.reservation_id.clone();
                failpoint!("before_settle");
                let result = reservations.settle(offer, epoch, entry).await;
                failpoint!("after_settle");
                if let Err(Error::Internal(cause)) = &result {
                    // SQL refuses the row for its own data, every time: somebody must look.
                    tracing::error!(offer = %offer.key, %reservation_id, %cause, "can't be recorded");
                }
                result
            })
            .buffer_unordered(PAGE as usize)
            .collect()
            .await;
        let (mut progress, mut failed) = (0, None);
        for result in results {
            match result {
                Ok(()) => progress += 1,
                Err(Error::Internal(_)) => {}
                Err(error) => failed = Some(error),
            }
        }
        settled += progress;
        // Here, since the rest may fail.
        metrics::settled(progress);
        match failed {
            Some(error) => return Err(error),
            // The acknowledgements are on their way; what they don't reach is read again.
            None if full && progress > 0 => {}
            None => return Ok(settled),
        }
    }
}
