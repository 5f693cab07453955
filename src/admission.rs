//! What can be refused without I/O, as early and as cheaply as possible.
//!
//! The order is that of the contract: the state of the sale, what this offer allows, whether the
//! stores are there, whether anything is left, how often the caller may ask, whether there is room.

use std::sync::{Arc, atomic::Ordering};

pub mod catalog;
pub mod limits;
pub mod room;

use crate::{
    domain::{ReserveOutcome, ReserveRequest, name_reservation},
    error::Error,
    metrics,
    offer::Offer,
    reservations::Reservations,
};
use catalog::{Activity, Phase};
use room::Place;

/// Whether a Reserve goes on to the engine.
#[derive(Debug)]
pub enum Admit {
    Yes(Admitted),
    No(ReserveOutcome),
    /// The activity was never seen: it must be looked up in SQL first. The place that the caller came
    /// with is given back.
    Unseen(Option<Place>),
}

/// A Reserve that may go on to the engine, with its share of what may be in flight.
#[derive(Debug)]
pub struct Admitted {
    pub(crate) offer: Arc<Offer>,
    pub(crate) _place: Place,
}

impl Reservations {
    /// Decides all that can be decided here and now.
    ///
    /// # Errors
    /// Unknown names, a store that is away, a limit, or too much in flight.
    pub fn admit(&self, request: &ReserveRequest) -> Result<Admit, Error> {
        self.admit_with(None, request)
    }

    /// As [`Reservations::admit`], for a caller who may have waited for a place.
    ///
    /// # Errors
    /// As there.
    pub fn admit_with(
        &self,
        place: Option<Place>,
        request: &ReserveRequest,
    ) -> Result<Admit, Error> {
        match self.catalog.known(&request.offer.activity_id)? {
            Some(activity) => self.admit_to(&activity, place, request),
            None => Ok(Admit::Unseen(place)),
        }
    }

    fn admit_to(
        &self,
        activity: &Activity,
        place: Option<Place>,
        request: &ReserveRequest,
    ) -> Result<Admit, Error> {
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
        if is_sold_out(&offer, request) {
            metrics::sold_out_from_memory();
            return Ok(Admit::No(ReserveOutcome::SoldOut));
        }
        self.limits.check(request)?;
        // What is taken now would be answered too late.
        if self.writer.longest_wait() > self.max_wait {
            return Err(Error::Overloaded);
        }
        let place = place.map_or_else(|| self.writer.room().enter(), Ok)?;
        Ok(Admit::Yes(Admitted { offer, _place: place }))
    }
}

/// Whether the engine would certainly say so. A call that is a repeat always asks it.
fn is_sold_out(offer: &Offer, request: &ReserveRequest) -> bool {
    let ReserveRequest { offer: key, buyer, request_id, is_repeat, .. } = request;
    let id = || name_reservation(key, buyer, request_id.as_ref());
    if *is_repeat {
        return false;
    }
    let home = offer.home(buyer);
    match offer.segments.verdict() {
        None => home.sold_out.refuses(buyer, id),
        Some(verdict) => verdict.refuses(home.number, &home.sold_out, buyer, id),
    }
}
