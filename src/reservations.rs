//! Stand-in until the branch with the real one is merged.
use std::sync::Arc;

use crate::{
    domain::{
        ConfirmOutcome, ConfirmRequest, RefusedBecause, ReleaseOutcome, ReleaseRequest,
        Reservation, ReservationQuery, ReserveOutcome, ReserveRequest,
    },
    engine::batcher::Caller,
    error::Error,
};

#[derive(Debug, Default)]
pub struct Reservations;

impl Reservations {
    pub async fn reserve(
        self: &Arc<Self>,
        _: ReserveRequest,
        _: Caller,
    ) -> Result<ReserveOutcome, Error> {
        Err(Error::Unimplemented("Reserve"))
    }

    pub async fn release(
        self: &Arc<Self>,
        _: ReleaseRequest,
    ) -> Result<(ReleaseOutcome, Option<u64>), Error> {
        Err(Error::Unimplemented("Release"))
    }

    pub async fn confirm(self: &Arc<Self>, _: ConfirmRequest) -> Result<ConfirmOutcome, Error> {
        Err(Error::Unimplemented("Confirm"))
    }

    pub async fn get(
        self: &Arc<Self>,
        _: ReservationQuery,
    ) -> Result<(Reservation, Option<RefusedBecause>), Error> {
        Err(Error::Unimplemented("GetReservation"))
    }
}
