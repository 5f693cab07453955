//! The outbox: the durable record of a reservation or a release that still has work to do.
//!
//! A reservation exists when its row exists. Every update of a row names the states that it may
//! leave, so states only move forward (I7):
//!
//! ```text
//! pending → done → releasing → released      pending → dead → pending | releasing
//! pending → releasing                        refused (final)
//! ```

use crate::{
    domain::{
        ActivityId, BuyerId, IdError, OfferKey, OrderNo, Reservation, ReservationId,
        ReservationState, SkuId, TimeMs,
    },
    entity::outbox::OutboxState,
    error::Error,
};

pub mod dead_letters;
mod pace;
pub mod poller;
pub mod sweeper;
pub mod writer;

pub use crate::entity::outbox::Model as Row;

/// Why a row is `refused`; the words are stored in `reason`.
pub mod reason {
    /// Another reservation of the same buyer holds the slot.
    pub const DUPLICATE: &str = "duplicate";
    /// SQL had fewer units left than the engine gave out.
    pub const SOLD_OUT: &str = "sold_out";
    /// A hold that nobody confirmed in time.
    pub const EXPIRED: &str = "expired";
}

impl Row {
    /// The offer that the row belongs to.
    ///
    /// # Errors
    /// [`Error::Internal`] when the row holds what we would never write.
    pub fn offer(&self) -> Result<OfferKey, Error> {
        let broken = |error: IdError| Error::internal(format!("outbox row {}: {error}", self.id));
        Ok(OfferKey {
            activity_id: ActivityId::new(&self.activity_id).map_err(broken)?,
            sku_id: SkuId::new(&self.sku_id).map_err(broken)?,
        })
    }

    /// The row as a reservation; whether an order is confirmed is in the order, not here.
    ///
    /// # Errors
    /// [`Error::Internal`] when the row holds what we would never write.
    pub fn reservation(&self) -> Result<Reservation, Error> {
        let broken = |error: IdError| Error::internal(format!("outbox row {}: {error}", self.id));
        Ok(Reservation {
            reservation_id: ReservationId::new(&self.reservation_id).map_err(broken)?,
            order_no: OrderNo::new(&self.order_no).map_err(broken)?,
            offer: self.offer()?,
            buyer: BuyerId::new(&self.user_id).map_err(broken)?,
            quantity: self.units(),
            state: match self.state {
                OutboxState::Pending => ReservationState::Queued,
                OutboxState::Done => ReservationState::Ordered,
                OutboxState::Releasing | OutboxState::Released => ReservationState::Released,
                OutboxState::Refused => ReservationState::Refused,
                OutboxState::Dead => ReservationState::Dead,
            },
            reserve_time: TimeMs(self.create_time),
            expire_time: self.expire_time.map(TimeMs),
        })
    }

    /// How many units the row is about; the schema keeps it positive.
    #[must_use]
    pub fn units(&self) -> u32 {
        u32::try_from(self.quantity).unwrap_or(0)
    }

    /// Whether the row was ever counted in `offers.reserved`: one that a release left for a late
    /// insert to meet, and one that was refused, never was.
    #[must_use]
    pub fn was_counted(&self) -> bool {
        self.state != OutboxState::Refused && !self.batch.is_empty()
    }

    /// The epoch that the row carries.
    #[must_use]
    pub fn row_epoch(&self) -> u64 {
        u64::try_from(self.epoch).unwrap_or(0)
    }
}
