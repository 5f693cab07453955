//! Naive Lua: one script takes the unit, one statement inserts the order, over pooled connections.
//!
//! A crash between the two leaves a unit taken that nobody has.

use tonic::Status;

use super::{Reserve, broken, refused, reserved, stock::Stock, tables};
use crate::{
    api::pb::{self, ReserveOutcome},
    database::Database,
    domain::{OfferKey, new_order_no},
};

#[derive(Debug)]
pub(super) struct NaiveLua {
    pub(super) database: Database,
    pub(super) stock: Stock,
    pub(super) offer: OfferKey,
}

impl Reserve for NaiveLua {
    async fn reserve(&self, request: pb::ReserveRequest) -> Result<pb::ReserveResponse, Status> {
        if request.sku_id != self.offer.sku_id.as_str() {
            return Err(Status::not_found("another offer"));
        }
        let left = {
            let mut connection = self.stock.connection().await.map_err(|error| broken(&error))?;
            let taken = self.stock.take(&mut connection, &request.user_id).await;
            taken.map_err(|error| broken(&error))?
        };
        match left {
            -2 => Ok(refused(ReserveOutcome::Duplicate)),
            -1 => Ok(refused(ReserveOutcome::SoldOut)),
            left => {
                let order_no = new_order_no().to_string();
                tables::insert(self.database.writer(), &order_no, &request)
                    .await
                    .map_err(|error| broken(&error))?;
                Ok(reserved(&request, order_no, left))
            }
        }
    }
}
