//! Dead letters: reservations that could not become orders and wait for an operator.
//!
//! A dead letter keeps its units. It is tried again or given up only after the engine was seen to
//! hold it still: otherwise the two contradict each other, and a rebuild comes first.

use std::sync::Arc;

use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, sea_query::Expr,
};
use serde_json::json;

use crate::{
    audit,
    database::{Transaction, finish, lock_rows, repeat},
    domain::{DeadLetterView, PageQuery, Reservation, ReservationId, ReservationQuery, TimeMs},
    engine::scripts::Found,
    entity::{outbox, outbox::OutboxState},
    error::Error,
    offer::Offer,
    outbox::Row,
    reservations::Reservations,
};

/// Lists dead letters, tries them again, gives them up.
#[derive(Debug)]
pub struct DeadLetters {
    pub reservations: Arc<Reservations>,
}

impl DeadLetters {
    /// One page, the oldest first, and the token of the next page, empty at the end.
    ///
    /// # Errors
    /// A token that is not of this list, or the database is away.
    pub async fn list(&self, query: &PageQuery) -> Result<(Vec<DeadLetterView>, String), Error> {
        let mut select = outbox::Entity::find().filter(outbox::due(OutboxState::Dead));
        if let Some(id) = &query.activity_id {
            select = select.filter(outbox::Column::ActivityId.eq(id.as_str()));
        }
        if let Some(after) = query.position()? {
            select = select.filter(outbox::Column::Id.gt(after));
        }
        let rows = select
            .order_by_asc(outbox::Column::Id)
            .limit(u64::from(query.page_size) + 1)
            .all(self.reservations.database.reader())
            .await?;
        let (views, next) = query.page(rows, |row| row.id, |row| view(&row));
        Ok((views.into_iter().collect::<Result<_, _>>()?, next))
    }

    /// Sends a dead letter back to the queue, with all its attempts; what is none any more stays as
    /// it is. Answers with the reservation as it is then.
    ///
    /// # Errors
    /// `UnknownReservation`; a store is away; or the engine does not hold the reservation, and the
    /// offer is rebuilt first. Nothing has changed.
    pub async fn retry(
        &self,
        id: &ReservationId,
        actor: &str,
        reason: &str,
    ) -> Result<Reservation, Error> {
        if let Some((row, _)) = self.held_dead_letter(id).await? {
            let retried = repeat(|| self.retry_transaction(&row, actor, reason)).await;
            retried.map_err(|error| self.reservations.sql_failed(error))?;
            self.reservations.due.notify_one();
        }
        self.as_it_is(id).await
    }

    /// Gives up a dead letter and gives its units back; what is none any more stays as it is.
    /// Answers with the reservation as it is then.
    ///
    /// # Errors
    /// As [`DeadLetters::retry`]. SQL may hold the release already; a repeat tells.
    pub async fn discard(
        &self,
        id: &ReservationId,
        actor: &str,
        reason: &str,
    ) -> Result<Reservation, Error> {
        if let Some((row, offer)) = self.held_dead_letter(id).await? {
            self.reservations.discard(&offer, &row, actor, reason).await?;
        }
        self.as_it_is(id).await
    }

    /// The row, if it is a dead letter and the engine holds it.
    async fn held_dead_letter(
        &self,
        id: &ReservationId,
    ) -> Result<Option<(Row, Arc<Offer>)>, Error> {
        let reservations = &self.reservations;
        reservations.stores_are_there()?;
        let row = reservations.row(id).await?.ok_or(Error::UnknownReservation)?;
        if row.state != OutboxState::Dead {
            return Ok(None);
        }
        let offer = reservations.catalog.offer(&row.offer()?).await?;
        if !offer.is_in_engine() {
            return Ok(Some((row, offer)));
        }
        let buyer = row.reservation()?.buyer;
        match offer.home(&buyer).scripts.find(id, &buyer).await? {
            Ok((_, Found::Held { .. })) => Ok(Some((row, offer))),
            Ok((stamp, Found::Released | Found::NotReserved)) => {
                // Given up by another call between the two looks?
                match reservations.row(id).await? {
                    Some(row) if row.state == OutboxState::Dead => {
                        let epoch = stamp.epoch;
                        reservations.recovery.freeze_and_rebuild(&offer, epoch, "not_held");
                        Err(Error::OfferFrozen(offer.key.clone()))
                    }
                    Some(_) | None => Ok(None),
                }
            }
            Err(_) => {
                reservations.recovery.rebuild(&offer);
                Err(Error::OfferFrozen(offer.key.clone()))
            }
        }
    }

    async fn retry_transaction(&self, row: &Row, actor: &str, reason: &str) -> Result<(), DbErr> {
        let transaction = self.reservations.database.begin().await?;
        let now = self.reservations.database.clock();
        let retried = retry_in(&transaction, row.id, now, actor, reason).await;
        finish(transaction, retried).await
    }

    async fn as_it_is(&self, id: &ReservationId) -> Result<Reservation, Error> {
        let query = ReservationQuery::ById(id.clone());
        self.reservations.get(query).await.map(|(reservation, _)| reservation)
    }
}

async fn retry_in(
    transaction: &Transaction,
    row_id: i64,
    now: TimeMs,
    actor: &str,
    reason: &str,
) -> Result<(), DbErr> {
    let query =
        outbox::Entity::find_by_id(row_id).filter(outbox::Column::State.eq(OutboxState::Dead));
    // Retried or given up by another call meanwhile.
    let Some(row) = lock_rows(query).one(transaction).await? else { return Ok(()) };
    outbox::Entity::update_many()
        .col_expr(outbox::Column::State, Expr::value(OutboxState::Pending))
        .col_expr(outbox::Column::Attempts, Expr::value(0))
        .col_expr(outbox::Column::NextAttemptTime, Expr::value(now.0))
        .col_expr(outbox::Column::SettleTime, Expr::value(Option::<i64>::None))
        .filter(outbox::Column::Id.eq(row.id))
        .filter(outbox::Column::State.eq(OutboxState::Dead))
        .exec(transaction)
        .await?;
    let detail = json!({
        "reservation_id": row.reservation_id,
        "reason": reason,
        "attempts": row.attempts,
        "last_error": row.last_error,
    });
    let entry = audit::Entry {
        actor,
        action: "retry_dead_letter",
        activity_id: &row.activity_id,
        sku_id: Some(&row.sku_id),
        detail,
    };
    audit::write(transaction, now, entry).await
}

fn view(row: &Row) -> Result<DeadLetterView, Error> {
    Ok(DeadLetterView {
        reservation: row.reservation()?,
        attempts: row.attempts,
        last_error: row.last_error.clone().unwrap_or_default(),
        create_time: TimeMs(row.create_time),
        fail_time: TimeMs(row.settle_time.unwrap_or(row.next_attempt_time)),
    })
}
