//! The SQL row lock: `UPDATE … WHERE remaining > 0` and the INSERT of the order in one transaction.
//!
//! It never oversells and never loses an order; every winner waits for the commit of the one before
//! him.

use tonic::Status;

use super::{Reserve, broken, refused, reserved, tables};
use crate::{
    api::pb::{self, ReserveOutcome},
    database::{Database, SqlFault, classify},
    domain::{OfferKey, new_order_no},
};

/// How often a transaction is repeated that SQL itself rolled back.
const REPEATS: u32 = 8;

#[derive(Debug)]
pub(super) struct RowLock {
    pub(super) database: Database,
    pub(super) offer: OfferKey,
}

impl Reserve for RowLock {
    async fn reserve(&self, request: pb::ReserveRequest) -> Result<pb::ReserveResponse, Status> {
        let order_no = new_order_no().to_string();
        for _ in 0..REPEATS {
            let transaction = self.database.begin().await.map_err(|error| broken(&error))?;
            let taken = async {
                if !tables::take_one(&transaction, &self.offer).await? {
                    return Ok(false);
                }
                tables::insert(&transaction, &order_no, &request).await?;
                Ok(true)
            };
            let taken: Result<bool, sea_orm::DbErr> = taken.await;
            match taken {
                Ok(true) => {
                    transaction.commit().await.map_err(|error| broken(&error))?;
                    return Ok(reserved(&request, order_no, 0));
                }
                Ok(false) => {
                    transaction.rollback().await.map_err(|error| broken(&error))?;
                    return Ok(refused(ReserveOutcome::SoldOut));
                }
                Err(error) => {
                    transaction.rollback().await.map_err(|error| broken(&error))?;
                    match classify(&error) {
                        // The index over buyers.
                        SqlFault::Data => return Ok(refused(ReserveOutcome::Duplicate)),
                        SqlFault::RolledBack => {}
                        SqlFault::Away | SqlFault::Unknown => return Err(broken(&error)),
                    }
                }
            }
        }
        Err(broken(&"rolled back too often"))
    }
}
