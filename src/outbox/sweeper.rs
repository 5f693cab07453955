//! Settles reservations that nobody acknowledged: a crash, a lost commit, a lost reply.

use std::{sync::Arc, time::Duration};

use crate::{
    domain::TimeMs, engine::scripts::Refusal, error::Error, offer::Offer,
    reservations::Reservations,
};

/// Entries read from one segment at a time.
const PAGE: u32 = 200;

/// Walks all warmed offers once, and settles what is older than `grace`; answers how many.
///
/// The grace only saves work: to settle a reservation that its own request still works on is
/// harmless, since both write the same row.
///
/// # Errors
/// A store is away; what was not settled stays in `unacked`.
pub async fn sweep(reservations: &Arc<Reservations>, grace: Duration) -> Result<usize, Error> {
    let mut settled = 0;
    for activity in reservations.catalog.all() {
        for offer in activity.offers.values() {
            if offer.is_warm() && offer.keys_expire > TimeMs::now() {
                settled += sweep_offer(reservations, offer, grace).await?;
            }
        }
    }
    Ok(settled)
}

async fn sweep_offer(
    reservations: &Arc<Reservations>,
    offer: &Arc<Offer>,
    grace: Duration,
) -> Result<usize, Error> {
    let before = TimeMs::now().minus(grace);
    let (epoch, entries) = match offer.segment.scripts.unacked(before, PAGE).await? {
        Ok(entries) => entries,
        Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => {
            // Nobody may be asking for this offer now; it is to be whole when they do.
            reservations.recovery.rebuild(offer);
            return Ok(0);
        }
    };
    // A server that sells nothing learns of a rebuild here, or its acknowledgements are refused.
    offer.segment.adopt(epoch);
    let mut settled = 0;
    for entry in entries {
        let reservation_id = entry.record.reservation_id.clone();
        match reservations.settle(offer, epoch, entry).await {
            Ok(()) => settled += 1,
            Err(Error::Internal(cause)) => {
                // SQL refuses the row for its own data, every time: somebody must look.
                tracing::error!(offer = %offer.key, %reservation_id, %cause, "can't be recorded");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(settled)
}
