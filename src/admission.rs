//! What can be refused without I/O, as early and as cheaply as possible.

use std::sync::{Arc, atomic::Ordering};

use tokio::sync::OwnedSemaphorePermit;

pub mod catalog;

use crate::{
    domain::{ReserveOutcome, ReserveRequest},
    error::Error,
    offer::Offer,
    reservations::Reservations,
};
use catalog::Phase;

/// Whether a Reserve goes on to the engine.
#[derive(Debug)]
pub enum Admit {
    /// With its share of what may be in flight.
    Yes(Arc<Offer>, OwnedSemaphorePermit),
    No(ReserveOutcome),
}

impl Reservations {
    /// Decides what needs no I/O; only an activity that was never seen costs one look into SQL.
    ///
    /// # Errors
    /// Unknown names, a store that is away, or too much in flight.
    pub async fn admit(&self, request: &ReserveRequest) -> Result<Admit, Error> {
        let activity = self.catalog.activity(&request.offer.activity_id).await?;
        let offer = activity.offer(&request.offer.sku_id)?;
        match activity.phase(self.database.clock()) {
            Phase::NotStarted => return Ok(Admit::No(ReserveOutcome::NotStarted)),
            Phase::Paused => return Ok(Admit::No(ReserveOutcome::Paused)),
            Phase::Ended => return Ok(Admit::No(ReserveOutcome::Ended)),
            Phase::Open => {}
        }
        if request.quantity > offer.max_quantity {
            return Ok(Admit::No(ReserveOutcome::QuantityLimit { max: offer.max_quantity }));
        }
        if !offer.is_warm() {
            if !offer.asked_cold.swap(true, Ordering::Relaxed) {
                tracing::error!(offer = %offer.key, "buyers ask for an offer that is not warmed up");
            }
            return Ok(Admit::No(ReserveOutcome::NotWarmed));
        }
        self.stores_are_there()?;
        match self.in_flight.clone().try_acquire_owned() {
            Ok(permit) => Ok(Admit::Yes(offer, permit)),
            Err(_) => Err(Error::Overloaded),
        }
    }
}
