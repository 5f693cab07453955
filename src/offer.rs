//! An offer as this process knows it: what is sold, and the segments that sell it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    domain::{BuyerId, Clock, OfferKey, TimeMs},
    engine::{
        EngineError,
        batcher::Segment,
        scripts::Answer,
        segments::{OfferLevels, Segments},
    },
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
    pub segments: Arc<Segments>,
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

    /// The one segment that sells to this buyer and holds what she reserves.
    pub fn home(&self, buyer: &BuyerId) -> &Arc<Segment> {
        self.segments.home(buyer)
    }

    /// The epoch that calls are made under.
    pub fn epoch(&self) -> u64 {
        self.segments.epoch()
    }

    /// Takes over a higher epoch, of this number of segments.
    pub fn adopt(&self, epoch: u64) {
        self.segments.adopt(epoch);
    }

    /// Reads the figures, over all segments.
    ///
    /// # Errors
    /// As [`Segments::levels`].
    pub async fn levels(&self) -> Result<Answer<OfferLevels>, EngineError> {
        self.segments.levels().await
    }

    /// Whether it was ever warmed up.
    pub fn is_warm(&self) -> bool {
        self.warm.load(Ordering::Acquire)
    }
}
