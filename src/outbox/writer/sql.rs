//! The statements of the writer: what goes into a row, and how SQL judges it.

use std::collections::HashMap;

use sea_orm::{
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, ExprTrait},
};

use super::{NewRow, Setback, WriteError, Written};
use crate::{
    database::{ROWS_PER_STATEMENT, Transaction, insert_ignore, lock_rows},
    domain::{BuyerId, OfferKey, ReservationId, TimeMs},
    entity::{offers, outbox, outbox::OutboxState},
    outbox::{Row, reason},
};

/// One order of locks everywhere: activity, SKU, user, slot, reservation.
pub(super) fn sort_key(row: &NewRow) -> (&OfferKey, &BuyerId, u32, &ReservationId) {
    (&row.offer, &row.buyer, row.slot, &row.reservation_id)
}

pub(super) fn to_insert(row: &NewRow, batch: &str, now: TimeMs) -> outbox::ActiveModel {
    outbox::ActiveModel {
        id: NotSet,
        reservation_id: Set(row.reservation_id.to_string()),
        activity_id: Set(row.offer.activity_id.to_string()),
        sku_id: Set(row.offer.sku_id.to_string()),
        user_id: Set(row.buyer.to_string()),
        quantity: Set(to_quantity(row.quantity)),
        slot: Set(Some(to_slot(row.slot))),
        order_no: Set(row.order_no.to_string()),
        request_id: Set(row.request_id.as_ref().map(ToString::to_string)),
        epoch: Set(to_epoch(row.epoch)),
        batch: Set(batch.to_owned()),
        state: Set(OutboxState::Pending),
        reason: Set(None),
        attempts: Set(0),
        next_attempt_time: Set(now.0),
        last_error: Set(None),
        expire_time: Set(row.hold.map(|hold| now.plus(hold).0)),
        create_time: Set(row.reserve_time.0),
        settle_time: Set(None),
    }
}

/// What SQL holds after `to_insert`, but for the id, which nobody needs.
pub(super) fn as_stored(row: &NewRow, batch: &str, now: TimeMs) -> Row {
    Row {
        id: 0,
        reservation_id: row.reservation_id.to_string(),
        activity_id: row.offer.activity_id.to_string(),
        sku_id: row.offer.sku_id.to_string(),
        user_id: row.buyer.to_string(),
        quantity: to_quantity(row.quantity),
        slot: Some(to_slot(row.slot)),
        order_no: row.order_no.to_string(),
        request_id: row.request_id.as_ref().map(ToString::to_string),
        epoch: to_epoch(row.epoch),
        batch: batch.to_owned(),
        state: OutboxState::Pending,
        reason: None,
        attempts: 0,
        next_attempt_time: now.0,
        last_error: None,
        expire_time: row.hold.map(|hold| now.plus(hold).0),
        create_time: row.reserve_time.0,
        settle_time: None,
    }
}

fn to_quantity(quantity: u32) -> i32 {
    i32::try_from(quantity).unwrap_or(i32::MAX)
}

fn to_slot(slot: u32) -> i32 {
    i32::try_from(slot).unwrap_or(i32::MAX)
}

fn to_epoch(epoch: u64) -> i64 {
    i64::try_from(epoch).unwrap_or(i64::MAX)
}

pub(super) fn judge(row: Row) -> Written {
    match row.state {
        OutboxState::Pending | OutboxState::Done | OutboxState::Dead => Written::Live(row),
        OutboxState::Releasing | OutboxState::Released => Written::GivenBack(row),
        OutboxState::Refused => Written::Refused(row),
    }
}

pub(super) async fn read_rows(
    connection: &impl ConnectionTrait,
    ids: impl Iterator<Item = &ReservationId>,
) -> Result<HashMap<String, Row>, DbErr> {
    let ids: Vec<&str> = ids.map(ReservationId::as_str).collect();
    let mut found = HashMap::with_capacity(ids.len());
    for some in ids.chunks(ROWS_PER_STATEMENT) {
        let rows = outbox::Entity::find()
            .filter(outbox::Column::ReservationId.is_in(some.iter().copied()))
            .all(connection)
            .await?;
        found.extend(rows.into_iter().map(|row| (row.reservation_id.clone(), row)));
    }
    Ok(found)
}

/// Whether the units fit under the total, at this epoch; if so they are counted.
pub(super) async fn raise_reserved(
    transaction: &Transaction,
    offer: &OfferKey,
    epoch: u64,
    units: u64,
) -> Result<bool, DbErr> {
    let units = i64::try_from(units).unwrap_or(i64::MAX);
    let result = offers::Entity::update_many()
        .col_expr(offers::Column::Reserved, Expr::col(offers::Column::Reserved).add(units))
        .filter(offers::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(offers::Column::SkuId.eq(offer.sku_id.as_str()))
        .filter(offers::Column::Epoch.eq(to_epoch(epoch)))
        .filter(
            Expr::col(offers::Column::Reserved).add(units).lte(Expr::col(offers::Column::Total)),
        )
        .exec(transaction)
        .await?;
    Ok(result.rows_affected == 1)
}

/// Inserts what fits, stores refusals, and says whether to commit: when SQL is at another epoch
/// nothing is stored, not even a refusal.
pub(super) async fn insert_and_judge(
    transaction: &Transaction,
    batch: &str,
    now: TimeMs,
    rows: &[&NewRow],
) -> Result<(Vec<Result<Written, WriteError>>, bool), Setback> {
    let Some(first) = rows.first() else {
        return Ok((Vec::new(), false));
    };
    let ids = || rows.iter().map(|row| &row.reservation_id);
    let models = rows.iter().map(|row| to_insert(row, batch, now)).collect();
    insert_ignore(transaction, models).await?;
    let stored = read_rows(transaction, ids()).await?;
    for row in rows {
        if !stored.contains_key(row.reservation_id.as_str()) {
            refuse_duplicate(transaction, batch, now, row).await?;
        }
    }

    let query = offers::Entity::find_by_id((
        first.offer.activity_id.to_string(),
        first.offer.sku_id.to_string(),
    ));
    let Some(offer) = lock_rows(query).one(transaction).await? else {
        return Ok((rows.iter().map(|_| Err(WriteError::NoOffer)).collect(), false));
    };
    // Read again behind the lock: this is the state that counts.
    let mut stored = read_rows(transaction, ids()).await?;
    let is_new = |row: &Row| row.batch == batch;

    if offer.epoch != to_epoch(first.epoch) {
        let sql = u64::try_from(offer.epoch).unwrap_or(0);
        let answers = rows
            .iter()
            .map(|row| match stored.remove(row.reservation_id.as_str()) {
                Some(stored) if !is_new(&stored) => Ok(judge(stored)),
                Some(_) | None => Ok(Written::OtherEpoch { sql }),
            })
            .collect();
        return Ok((answers, false));
    }

    let mut left = offer.total - offer.reserved;
    let mut units = 0u64;
    let mut in_order_of_taking: Vec<&&NewRow> = rows.iter().collect();
    in_order_of_taking.sort_by_key(|row| row.reserve_time);
    for row in in_order_of_taking {
        let Some(stored) = stored.get_mut(row.reservation_id.as_str()) else {
            continue;
        };
        if !is_new(stored) || stored.state != OutboxState::Pending {
            continue;
        }
        if i64::from(row.quantity) <= left {
            left -= i64::from(row.quantity);
            units += u64::from(row.quantity);
        } else {
            refuse_sold_out(transaction, stored).await?;
        }
    }
    if units > 0 && !raise_reserved(transaction, &first.offer, first.epoch, units).await? {
        return Err(Setback::Sql(DbErr::Custom(
            "the offer changed although its row is locked".into(),
        )));
    }
    rows.iter()
        .map(|row| match stored.remove(row.reservation_id.as_str()) {
            Some(stored) => Ok(Ok(judge(stored))),
            None => Err(Setback::Irregular),
        })
        .collect::<Result<Vec<_>, _>>()
        .map(|answers| (answers, true))
}

/// The slot belongs to another reservation: stores the refusal. When the rival was released in
/// between, the row is inserted as it should be.
async fn refuse_duplicate(
    transaction: &Transaction,
    batch: &str,
    now: TimeMs,
    row: &NewRow,
) -> Result<(), Setback> {
    let query = outbox::Entity::find()
        .filter(outbox::Column::ActivityId.eq(row.offer.activity_id.as_str()))
        .filter(outbox::Column::SkuId.eq(row.offer.sku_id.as_str()))
        .filter(outbox::Column::UserId.eq(row.buyer.as_str()))
        .filter(outbox::Column::Slot.eq(to_slot(row.slot)));
    let mut model = to_insert(row, batch, now);
    if lock_rows(query).one(transaction).await?.is_some() {
        model.slot = Set(None);
        model.state = Set(OutboxState::Refused);
        model.reason = Set(Some(reason::DUPLICATE.into()));
        model.expire_time = Set(None);
        model.settle_time = Set(Some(now.0));
    }
    insert_ignore(transaction, vec![model]).await?;
    Ok(())
}

async fn refuse_sold_out(transaction: &Transaction, row: &mut Row) -> Result<(), DbErr> {
    outbox::Entity::update_many()
        .col_expr(outbox::Column::State, Expr::value(OutboxState::Refused))
        .col_expr(outbox::Column::Slot, Expr::value(Option::<i32>::None))
        .col_expr(outbox::Column::Reason, Expr::value(reason::SOLD_OUT))
        .col_expr(outbox::Column::ExpireTime, Expr::value(Option::<i64>::None))
        .filter(outbox::Column::ReservationId.eq(row.reservation_id.as_str()))
        .filter(outbox::Column::State.eq(OutboxState::Pending))
        .exec(transaction)
        .await?;
    row.state = OutboxState::Refused;
    row.slot = None;
    row.reason = Some(reason::SOLD_OUT.into());
    row.expire_time = None;
    Ok(())
}
