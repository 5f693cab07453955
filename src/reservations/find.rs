//! What became of a reservation, or of an attempt to get one.

use std::sync::Arc;

use sea_orm::{ColumnTrait, EntityTrait, QueryFilter};

use super::{Reservations, held, state_of};
use crate::{
    domain::{
        BuyerId, OfferKey, RefusedBecause, Reservation, ReservationId, ReservationQuery,
        ReservationState, name_reservation,
    },
    engine::scripts::{Found, Refusal},
    entity::{orders, orders::OrderState, outbox::OutboxState},
    error::Error,
    outbox::{Row, reason},
};

impl Reservations {
    /// Looks into SQL, and for an attempt that SQL does not know into the engine.
    ///
    /// # Errors
    /// `UnknownReservation` when neither knows it; by `reservation_id` alone the engine can't
    /// be asked, so one that is still in flight is unknown there.
    pub async fn get(
        self: &Arc<Self>,
        query: ReservationQuery,
    ) -> Result<(Reservation, Option<RefusedBecause>), Error> {
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        let _permit = self.lookup_permit().await?;
        match query {
            ReservationQuery::ById(id) => match self.row(&id).await? {
                Some(row) => self.describe(row).await,
                None => Err(Error::UnknownReservation),
            },
            ReservationQuery::ByRequest { offer, buyer, request_id } => {
                let id = name_reservation(&offer, &buyer, Some(&request_id));
                if let Some(row) = self.row(&id).await? {
                    return self.describe(row).await;
                }
                if let Some(reservation) = self.in_flight(&offer, &buyer, &id).await? {
                    return Ok((reservation, None));
                }
                // The commit may have arrived between the two looks.
                match self.row(&id).await? {
                    Some(row) => self.describe(row).await,
                    None => Err(Error::UnknownReservation),
                }
            }
        }
    }

    async fn in_flight(
        self: &Arc<Self>,
        key: &OfferKey,
        buyer: &BuyerId,
        id: &ReservationId,
    ) -> Result<Option<Reservation>, Error> {
        let offer = self.catalog.offer(key).await?;
        match offer.home(buyer).scripts.find(id, buyer).await? {
            Ok((_, Found::Held { record, unacked, .. })) => {
                Ok(Some(held(&offer, buyer, record, state_of(unacked))))
            }
            Ok((_, Found::Released | Found::NotReserved)) => Ok(None),
            Err(Refusal::NotWarmed) if !offer.is_in_engine() => Ok(None),
            Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => {
                self.recovery.rebuild(&offer);
                Err(Error::OfferFrozen(offer.key.clone()))
            }
        }
    }

    async fn describe(&self, row: Row) -> Result<(Reservation, Option<RefusedBecause>), Error> {
        let refused = match row.state {
            OutboxState::Refused if row.reason.as_deref() == Some(reason::DUPLICATE) => {
                Some(RefusedBecause::Duplicate)
            }
            OutboxState::Refused => Some(RefusedBecause::SoldOut),
            OutboxState::Pending
            | OutboxState::Done
            | OutboxState::Dead
            | OutboxState::Releasing
            | OutboxState::Released => None,
        };
        Ok((self.with_order_state(row.reservation()?).await?, refused))
    }

    /// An ordered reservation may be confirmed, which only its order knows.
    pub(super) async fn with_order_state(
        &self,
        mut reservation: Reservation,
    ) -> Result<Reservation, Error> {
        if reservation.state == ReservationState::Ordered {
            let order = orders::Entity::find()
                .filter(orders::Column::ReservationId.eq(reservation.reservation_id.as_str()))
                .one(self.database.reader())
                .await?;
            if order.is_some_and(|order| order.state == OrderState::Confirmed) {
                reservation.state = ReservationState::Confirmed;
            }
        }
        Ok(reservation)
    }
}
