//! An offer as this process knows it: what is sold, and the segment that sells it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    domain::{Clock, OfferKey, TimeMs},
    engine::batcher::Segment,
};

/// One SKU on sale.
#[derive(Debug)]
pub struct Offer {
    pub key: OfferKey,
    pub title: String,
    pub price_minor: i64,
    pub currency: String,
    pub total: u64,
    pub max_orders: u32,
    pub max_quantity: u32,
    /// How long a reservation waits for Confirm; `None` when it does not expire.
    pub hold: Option<Duration>,
    /// The database's.
    pub clock: Clock,
    /// When the engine may forget the offer: end of the activity plus retention.
    pub keys_expire: TimeMs,
    /// Whether its activity is settled: the engine has nothing of it any more.
    pub settled: bool,
    /// Whether it was ever warmed up; later a missing key means that the engine forgot.
    pub warm: AtomicBool,
    /// Whether a buyer asked for it before it was warmed up, and somebody was told.
    pub asked_cold: AtomicBool,
    pub segment: Arc<Segment>,
}

impl Offer {
    /// Whether the engine has dropped its keys, or may have, for good: it is settled, or the
    /// retention is over.
    pub fn is_forgotten(&self) -> bool {
        self.settled || self.keys_expire <= self.clock.now()
    }

    /// Whether the engine has it, or must have: otherwise SQL alone is asked.
    pub fn is_in_engine(&self) -> bool {
        self.is_warm() && !self.is_forgotten()
    }

    /// Whether it was ever warmed up.
    pub fn is_warm(&self) -> bool {
        self.warm.load(Ordering::Acquire)
    }
}
