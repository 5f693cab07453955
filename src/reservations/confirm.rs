//! Confirm: makes a reservation final, unless its hold is over.

use std::sync::Arc;

use sea_orm::{ColumnTrait, DbErr, EntityTrait, QueryFilter, sea_query::Expr};

use super::Reservations;
use crate::{
    database::{Transaction, lock_rows, now_on, repeat},
    domain::{ConfirmOutcome, ConfirmRequest, ReservationState},
    engine::scripts::{Found, Refusal},
    entity::{orders, orders::OrderState, outbox, outbox::OutboxState},
    error::Error,
    failpoints::failpoint,
    outbox::{Row, reason},
};

/// What the transaction found; a row that is confirmed comes along.
enum InSql {
    Confirmed { row: Box<Row>, now: bool },
    Settled(ConfirmOutcome),
    NoRow,
}

impl Reservations {
    /// Makes a reservation final. Whether its hold is over is decided in the transaction, by the
    /// database's clock; against Release and expiry exactly one wins.
    ///
    /// # Errors
    /// The call was not decided; a repeat is safe.
    pub async fn confirm(
        self: &Arc<Self>,
        request: ConfirmRequest,
    ) -> Result<ConfirmOutcome, Error> {
        let offer = self.catalog.offer(&request.offer).await?;
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        let _permit = self.lookup_permit().await?;
        match self.confirm_in_sql(&request).await? {
            InSql::Settled(outcome) => Ok(outcome),
            InSql::Confirmed { row, .. } => {
                let mut reservation = row.reservation()?;
                reservation.state = ReservationState::Confirmed;
                reservation.expire_time = None;
                Ok(ConfirmOutcome::Confirmed(reservation))
            }
            InSql::NoRow => {
                let scripts = &offer.home(&request.buyer).scripts;
                match scripts.find(&request.reservation_id, &request.buyer).await? {
                    Ok((_, Found::Held { .. })) => Ok(ConfirmOutcome::NotOrderedYet),
                    Ok((_, Found::Released | Found::NotReserved)) => {
                        // A commit may have arrived while we looked; then there is an order soon.
                        match self.row(&request.reservation_id).await? {
                            Some(_) => Ok(ConfirmOutcome::NotOrderedYet),
                            None => Ok(ConfirmOutcome::NotReserved),
                        }
                    }
                    Err(Refusal::NotWarmed) if !offer.is_in_engine() => {
                        Ok(ConfirmOutcome::NotReserved)
                    }
                    Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => {
                        self.recovery.rebuild(&offer);
                        Err(Error::OfferFrozen(offer.key.clone()))
                    }
                }
            }
        }
    }

    async fn confirm_in_sql(&self, request: &ConfirmRequest) -> Result<InSql, Error> {
        let result = repeat(|| self.confirm_transaction(request)).await;
        result.map_err(|error| self.sql_failed(error))
    }

    async fn confirm_transaction(&self, request: &ConfirmRequest) -> Result<InSql, DbErr> {
        let transaction = self.database.begin().await?;
        match confirm_row(&transaction, request).await {
            Ok(in_sql @ InSql::Confirmed { now: true, .. }) => {
                failpoint!("before_confirm_commit");
                transaction.commit().await?;
                failpoint!("after_confirm_commit");
                Ok(in_sql)
            }
            Ok(in_sql) => {
                transaction.rollback().await?;
                Ok(in_sql)
            }
            Err(error) => {
                // The first error is the one that counts.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    }
}

async fn confirm_row(transaction: &Transaction, request: &ConfirmRequest) -> Result<InSql, DbErr> {
    let settled = |outcome| Ok(InSql::Settled(outcome));
    let query = outbox::Entity::find()
        .filter(outbox::Column::ReservationId.eq(request.reservation_id.as_str()));
    let Some(row) = lock_rows(query).one(transaction).await? else {
        return Ok(InSql::NoRow);
    };
    if row.activity_id != request.offer.activity_id.as_str()
        || row.sku_id != request.offer.sku_id.as_str()
    {
        return settled(ConfirmOutcome::NotReserved);
    }
    if row.user_id != request.buyer.as_str() {
        return settled(ConfirmOutcome::WrongOwner);
    }
    match row.state {
        OutboxState::Refused => return settled(ConfirmOutcome::NotReserved),
        OutboxState::Releasing | OutboxState::Released => {
            let expired = row.reason.as_deref() == Some(reason::EXPIRED);
            let outcome = if expired { ConfirmOutcome::Expired } else { ConfirmOutcome::Released };
            return settled(outcome);
        }
        OutboxState::Pending | OutboxState::Dead | OutboxState::Done => {}
    }
    // Behind the lock: an instant read before it could be long past by now.
    let now = now_on(transaction).await?;
    let expired = row.expire_time.is_some_and(|time| time <= now.0);
    if row.state != OutboxState::Done {
        let outcome = if expired { ConfirmOutcome::Expired } else { ConfirmOutcome::NotOrderedYet };
        return settled(outcome);
    }
    let query =
        orders::Entity::find().filter(orders::Column::ReservationId.eq(&*row.reservation_id));
    let Some(order) = lock_rows(query).one(transaction).await? else {
        return settled(ConfirmOutcome::NotOrderedYet);
    };
    match order.state {
        OrderState::Confirmed => Ok(InSql::Confirmed { row: Box::new(row), now: false }),
        OrderState::Cancelled => settled(ConfirmOutcome::Released),
        OrderState::Created if expired => settled(ConfirmOutcome::Expired),
        OrderState::Created => {
            // The hold ends here, so the expiry worker has nothing to look at.
            outbox::Entity::update_many()
                .col_expr(outbox::Column::ExpireTime, Expr::value(Option::<i64>::None))
                .filter(outbox::Column::Id.eq(row.id))
                .exec(transaction)
                .await?;
            orders::Entity::update_many()
                .col_expr(orders::Column::State, Expr::value(OrderState::Confirmed))
                .col_expr(orders::Column::ConfirmTime, Expr::value(now.0))
                .filter(orders::Column::OrderNo.eq(&*order.order_no))
                .filter(orders::Column::State.eq(OrderState::Created))
                .exec(transaction)
                .await?;
            Ok(InSql::Confirmed { row: Box::new(row), now: true })
        }
    }
}
