//! Release: SQL first, engine second.
//!
//! A crash in between leaves units unsold for a moment, never sold twice: the row stays
//! `releasing`, and the poller finishes it.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use sea_orm::{
    ActiveValue::{NotSet, Set},
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect,
    sea_query::{Expr, ExprTrait},
};

use serde_json::json;

use super::Reservations;
use crate::{
    audit,
    database::{Transaction, finish, insert_ignore, is_outage, lock_rows, repeat},
    domain::{ActivityState, OfferKey, ReleaseOutcome, ReleaseRequest, TimeMs},
    engine::scripts::{Found, GivenBack, Record, Refusal},
    entity::{activities, offers, orders, orders::OrderState, outbox, outbox::OutboxState},
    error::Error,
    failpoints::failpoint,
    metrics,
    offer::Offer,
    outbox::{Row, reason},
};

/// How often a release looks again after something moved between engine and SQL.
const REPEATS: u32 = 5;
/// Holds released at the same time.
const EXPIRIES_AT_ONCE: usize = 4;

/// Under which condition a row is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why<'a> {
    /// The caller asked.
    Asked { reason: &'a str },
    /// The hold is over, by the database's clock.
    Expired { now: TimeMs },
    /// An operator gave up a dead letter; anything else stays as it is.
    Discarded { actor: &'a str, reason: &'a str },
}

/// What the transaction found and did.
enum InSql {
    /// The row is `releasing`, since now or before: the engine comes next.
    Releasing {
        row: Box<Row>,
        now: bool,
    },
    Settled(ReleaseOutcome),
    /// The books of the activity are closed; nothing changes any more.
    Closed,
    NoRow,
}

/// What the engine knew of a reservation that SQL had no row of.
enum NoRow {
    Settled(ReleaseOutcome),
    /// It is in flight, and this call left the row that its insert will meet.
    Tombstone,
    /// Something moved in between.
    Again,
}

impl Reservations {
    /// Gives a reservation back: exactly what it took, once.
    ///
    /// # Errors
    /// The call was not decided. SQL may hold the release already; a repeat tells.
    pub async fn release(
        self: &Arc<Self>,
        request: ReleaseRequest,
    ) -> Result<(ReleaseOutcome, Option<u64>), Error> {
        let offer = self.catalog.offer(&request.offer).await?;
        self.stores_are_there()?;
        let why = Why::Asked { reason: &request.reason };
        let _permit = self.lookup_permit().await?;
        let mut by_this_call = false;
        for _ in 0..REPEATS {
            let in_sql = self.release_in_sql(&request, why).await?;
            failpoint!("after_release_commit");
            match in_sql {
                InSql::Settled(outcome) => return Ok((outcome, None)),
                InSql::Closed => {
                    return Err(Error::WrongActivityState {
                        activity_id: offer.key.activity_id.to_string(),
                        current: ActivityState::Settled,
                        needed: "nothing is given back once it is settled",
                    });
                }
                InSql::Releasing { row, now } => {
                    let Some(stock) = self.finish_release(&offer, &row).await? else {
                        return Err(Error::OfferFrozen(offer.key.clone()));
                    };
                    let outcome = if now || by_this_call {
                        ReleaseOutcome::Released
                    } else {
                        ReleaseOutcome::AlreadyReleased
                    };
                    return Ok((outcome, stock));
                }
                InSql::NoRow => match self.release_without_row(&offer, &request).await? {
                    NoRow::Settled(outcome) => return Ok((outcome, None)),
                    NoRow::Tombstone => by_this_call = true,
                    NoRow::Again => {}
                },
            }
        }
        Err(Error::DatabaseUnavailable)
    }

    /// Releases reservations whose hold is over; answers how many.
    ///
    /// # Errors
    /// A store is away; what was not released is still due.
    pub async fn expire_holds(self: &Arc<Self>, limit: u64) -> Result<usize, Error> {
        let now = self.database.now().await?;
        let mut due = Vec::new();
        // A dead letter keeps its units until an operator decides.
        for state in [OutboxState::Done, OutboxState::Pending] {
            let rows = outbox::Entity::find()
                .filter(outbox::expiring(state))
                .filter(outbox::Column::ExpireTime.lte(now.0))
                .order_by_asc(outbox::Column::ExpireTime)
                .order_by_asc(outbox::Column::Id)
                .limit(limit)
                .all(self.database.reader())
                .await?;
            due.extend(rows);
        }
        let mut expiries = stream::iter(due)
            .map(|row| async move { (row.id, self.expire(row, now).await) })
            .buffer_unordered(EXPIRIES_AT_ONCE);
        let (mut released, mut failed) = (0, None);
        while let Some((row, expired)) = expiries.next().await {
            match expired {
                Ok(true) => released += 1,
                Ok(false) => {}
                // This row, not everybody's; it is due again.
                Err(error @ Error::Internal(_)) => {
                    tracing::error!(row, ?error, "a hold can't be released");
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(released), Err)
    }

    async fn expire(self: &Arc<Self>, row: Row, now: TimeMs) -> Result<bool, Error> {
        let reservation = row.reservation()?;
        let request = ReleaseRequest {
            offer: reservation.offer,
            buyer: reservation.buyer,
            reservation_id: reservation.reservation_id,
            reason: reason::EXPIRED.into(),
        };
        let InSql::Releasing { row, now: is_ours } =
            self.release_in_sql(&request, Why::Expired { now }).await?
        else {
            return Ok(false);
        };
        failpoint!("after_expiry_commit");
        if is_ours {
            // Here, since the engine may be away, and other holds of the pass in the way.
            metrics::holds_expired(1);
        }
        let offer = self.catalog.offer(&request.offer).await?;
        // What the engine can't do now, the poller does.
        self.finish_release(&offer, &row).await?;
        Ok(true)
    }

    /// Gives up a dead letter, as a release; what is no dead letter any more stays as it is.
    ///
    /// # Errors
    /// As [`Reservations::release`].
    pub(crate) async fn discard(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        dead: &Row,
        actor: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let reservation = dead.reservation()?;
        let request = ReleaseRequest {
            offer: reservation.offer,
            buyer: reservation.buyer,
            reservation_id: reservation.reservation_id,
            reason: reason.to_owned(),
        };
        let why = Why::Discarded { actor, reason };
        if let InSql::Releasing { row, .. } = self.release_in_sql(&request, why).await?
            && self.finish_release(offer, &row).await?.is_none()
        {
            return Err(Error::OfferFrozen(offer.key.clone()));
        }
        Ok(())
    }

    /// The engine's half and the last word in SQL, for a row that is `releasing`. `None` when
    /// the engine can't say now; `Some(None)` when it has forgotten the offer for good.
    pub(crate) async fn finish_release(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        row: &Row,
    ) -> Result<Option<Option<u64>>, Error> {
        let stock = if offer.is_forgotten() {
            None
        } else {
            match self.give_back(offer, row).await {
                None => return Err(Error::EngineUnavailable),
                Some(GivenBack::Retry { reason }) => {
                    tracing::debug!(offer = %offer.key, reason, "a release waits for the engine");
                    self.recovery.rebuild(offer);
                    return Ok(None);
                }
                Some(GivenBack::NotReserved { stock, .. } | GivenBack::Released { stock, .. }) => {
                    Some(stock)
                }
            }
        };
        failpoint!("after_release_script");
        outbox::Entity::update_many()
            .col_expr(outbox::Column::State, Expr::value(OutboxState::Released))
            .col_expr(outbox::Column::SettleTime, Expr::value(self.database.clock().0))
            .filter(outbox::Column::ReservationId.eq(row.reservation_id.as_str()))
            .filter(outbox::Column::State.eq(OutboxState::Releasing))
            .exec(self.database.writer())
            .await?;
        failpoint!("after_release_settled");
        Ok(Some(stock))
    }

    async fn release_in_sql(&self, request: &ReleaseRequest, why: Why<'_>) -> Result<InSql, Error> {
        let result = repeat(|| self.release_transaction(request, why)).await;
        result.map_err(|error| self.sql_failed(error))
    }

    async fn release_transaction(
        &self,
        request: &ReleaseRequest,
        why: Why<'_>,
    ) -> Result<InSql, DbErr> {
        let transaction = self.database.begin().await?;
        let now = self.database.clock();
        match release_row(&transaction, request, why, now).await {
            Ok(in_sql @ InSql::Releasing { now: true, .. }) => {
                failpoint!("before_release_commit");
                transaction.commit().await?;
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

    async fn release_without_row(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        request: &ReleaseRequest,
    ) -> Result<NoRow, Error> {
        let scripts = &offer.home(&request.buyer).scripts;
        let (stamp, found) = match scripts.find(&request.reservation_id, &request.buyer).await? {
            Ok(found) => found,
            Err(Refusal::NotWarmed) if !offer.is_in_engine() => {
                return Ok(NoRow::Settled(ReleaseOutcome::NotReserved));
            }
            Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => {
                self.recovery.rebuild(offer);
                return Err(Error::OfferFrozen(offer.key.clone()));
            }
        };
        if let Found::Held { record, unacked: true, .. } = &found {
            let ours = self.write_tombstone(request, record).await?;
            return Ok(if ours { NoRow::Tombstone } else { NoRow::Again });
        }
        // The commit may have arrived between the two looks.
        if self.row(&request.reservation_id).await?.is_some() {
            return Ok(NoRow::Again);
        }
        match found {
            Found::Released | Found::NotReserved => Ok(NoRow::Settled(ReleaseOutcome::NotReserved)),
            Found::Held { .. } => {
                // Acknowledged, so SQL had it: a contradiction.
                self.recovery.freeze_and_rebuild(offer, stamp.epoch, "no_row");
                Err(Error::OfferFrozen(offer.key.clone()))
            }
        }
    }

    /// Leaves a row that the late insert meets; answers whether it is this call's.
    async fn write_tombstone(
        &self,
        request: &ReleaseRequest,
        record: &Record,
    ) -> Result<bool, Error> {
        let result = repeat(|| self.tombstone_transaction(request, record)).await;
        result.map_err(|error| self.sql_failed(error))
    }

    async fn tombstone_transaction(
        &self,
        request: &ReleaseRequest,
        record: &Record,
    ) -> Result<bool, DbErr> {
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let tombstone = outbox::ActiveModel {
            id: NotSet,
            reservation_id: Set(request.reservation_id.to_string()),
            activity_id: Set(request.offer.activity_id.to_string()),
            sku_id: Set(request.offer.sku_id.to_string()),
            user_id: Set(request.buyer.to_string()),
            quantity: Set(i32::try_from(record.quantity).unwrap_or(i32::MAX)),
            slot: Set(None),
            order_no: Set(record.order_no.to_string()),
            request_id: Set(None),
            epoch: Set(0),
            batch: Set(String::new()),
            state: Set(OutboxState::Releasing),
            reason: Set(Some(request.reason.clone())),
            attempts: Set(0),
            next_attempt_time: Set(now.0),
            last_error: Set(None),
            expire_time: Set(None),
            create_time: Set(record.reserve_time.0),
            settle_time: Set(None),
        };
        let written = async {
            insert_ignore(&transaction, vec![tombstone]).await?;
            let epoch = lock_epoch(&transaction, &request.offer).await?;
            // Epoch 0 is the mark of the row just made; any other row keeps its own.
            outbox::Entity::update_many()
                .col_expr(outbox::Column::Epoch, Expr::value(epoch))
                .filter(outbox::Column::ReservationId.eq(request.reservation_id.as_str()))
                .filter(outbox::Column::Epoch.eq(0))
                .exec(&transaction)
                .await
        }
        .await;
        failpoint!("before_tombstone_commit");
        let updated = finish(transaction, written).await?;
        failpoint!("after_tombstone_commit");
        Ok(updated.rows_affected == 1)
    }

    pub(crate) fn sql_failed(&self, error: DbErr) -> Error {
        if is_outage(&error) {
            self.database_circuit.trip(&error.to_string());
        }
        Error::from(error)
    }

    pub(crate) fn stores_are_there(&self) -> Result<(), Error> {
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        Ok(())
    }
}

/// Locks the row and moves it to `releasing` where that is its way.
async fn release_row(
    transaction: &Transaction,
    request: &ReleaseRequest,
    why: Why<'_>,
    now: TimeMs,
) -> Result<InSql, DbErr> {
    let query = outbox::Entity::find()
        .filter(outbox::Column::ReservationId.eq(request.reservation_id.as_str()));
    let Some(mut row) = lock_rows(query).one(transaction).await? else {
        return Ok(InSql::NoRow);
    };
    if row.activity_id != request.offer.activity_id.as_str()
        || row.sku_id != request.offer.sku_id.as_str()
    {
        return Ok(InSql::Settled(ReleaseOutcome::NotReserved));
    }
    if row.user_id != request.buyer.as_str() {
        return Ok(InSql::Settled(ReleaseOutcome::WrongOwner));
    }
    let discards = matches!(why, Why::Discarded { .. });
    let was_ordered = match row.state {
        OutboxState::Pending | OutboxState::Done if discards => {
            return Ok(InSql::Settled(ReleaseOutcome::NotReserved));
        }
        OutboxState::Pending | OutboxState::Dead => false,
        OutboxState::Done => true,
        OutboxState::Releasing => {
            return Ok(InSql::Releasing { row: Box::new(row), now: false });
        }
        OutboxState::Released => return Ok(InSql::Settled(ReleaseOutcome::AlreadyReleased)),
        OutboxState::Refused => return Ok(InSql::Settled(ReleaseOutcome::NotReserved)),
    };
    let cancel_reason = match why {
        Why::Asked { reason } => reason,
        Why::Expired { now } if row.expire_time.is_some_and(|time| time <= now.0) => {
            reason::EXPIRED
        }
        Why::Expired { .. } => return Ok(InSql::Settled(ReleaseOutcome::Confirmed)),
        Why::Discarded { reason, .. } => reason,
    };

    outbox::Entity::update_many()
        .col_expr(outbox::Column::State, Expr::value(OutboxState::Releasing))
        .col_expr(outbox::Column::Slot, Expr::value(Option::<i32>::None))
        .col_expr(outbox::Column::Reason, Expr::value(cancel_reason))
        .col_expr(outbox::Column::NextAttemptTime, Expr::value(now.0))
        .filter(outbox::Column::Id.eq(row.id))
        .filter(outbox::Column::State.eq(row.state))
        .exec(transaction)
        .await?;
    if was_ordered {
        let query =
            orders::Entity::find().filter(orders::Column::ReservationId.eq(&*row.reservation_id));
        let order = lock_rows(query).one(transaction).await?;
        if order.is_some_and(|order| order.state == OrderState::Confirmed) {
            return Ok(InSql::Settled(ReleaseOutcome::Confirmed));
        }
        orders::Entity::update_many()
            .col_expr(orders::Column::State, Expr::value(OrderState::Cancelled))
            .col_expr(orders::Column::Slot, Expr::value(Option::<i32>::None))
            .col_expr(orders::Column::CancelTime, Expr::value(now.0))
            .col_expr(orders::Column::CancelReason, Expr::value(cancel_reason))
            .filter(orders::Column::ReservationId.eq(&*row.reservation_id))
            .filter(orders::Column::State.eq(OrderState::Created))
            .exec(transaction)
            .await?;
    }
    let reserved = i64::from(row.quantity);
    let sold = if was_ordered { reserved } else { 0 };
    lower_counters(transaction, &request.offer, reserved, sold).await?;
    // Read behind the update of `offers`: that is the lock at which a rebuild raises the epoch, and
    // behind which the activity is settled.
    row.epoch = lock_epoch(transaction, &request.offer).await?;
    if is_settled(transaction, &request.offer).await? {
        return Ok(InSql::Closed);
    }
    outbox::Entity::update_many()
        .col_expr(outbox::Column::Epoch, Expr::value(row.epoch))
        .filter(outbox::Column::Id.eq(row.id))
        .exec(transaction)
        .await?;
    if let Why::Discarded { actor, reason } = why {
        let detail = json!({
            "reservation_id": row.reservation_id,
            "reason": reason,
            "last_error": row.last_error,
        });
        let entry = audit::Entry::of_offer(&request.offer, actor, "discard_dead_letter", detail);
        audit::write(transaction, now, entry).await?;
    }
    row.state = OutboxState::Releasing;
    row.slot = None;
    Ok(InSql::Releasing { row: Box::new(row), now: true })
}

async fn lower_counters(
    transaction: &Transaction,
    offer: &OfferKey,
    reserved: i64,
    sold: i64,
) -> Result<(), DbErr> {
    offers::Entity::update_many()
        .col_expr(offers::Column::Reserved, Expr::col(offers::Column::Reserved).sub(reserved))
        .col_expr(offers::Column::Sold, Expr::col(offers::Column::Sold).sub(sold))
        .filter(offers::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(offers::Column::SkuId.eq(offer.sku_id.as_str()))
        .exec(transaction)
        .await
        .map(|_| ())
}

async fn is_settled(transaction: &Transaction, offer: &OfferKey) -> Result<bool, DbErr> {
    let activity = activities::Entity::find_by_id(offer.activity_id.as_str());
    let activity = activity.one(transaction).await?;
    Ok(activity.is_some_and(|activity| activity.state == activities::ActivityState::Settled))
}

/// Locks the offer's row and reads its epoch.
async fn lock_epoch(transaction: &Transaction, offer: &OfferKey) -> Result<i64, DbErr> {
    let query =
        offers::Entity::find_by_id((offer.activity_id.to_string(), offer.sku_id.to_string()));
    lock_rows(query)
        .one(transaction)
        .await?
        .map(|offer| offer.epoch)
        .ok_or_else(|| DbErr::RecordNotFound(format!("offer {offer}")))
}
