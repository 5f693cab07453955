//! The statements of the writer: what goes into a row, and how SQL judges it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use sea_orm::{
    ActiveEnum as _,
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, DbBackend, DbErr, EntityTrait, QueryFilter, Statement, Value,
    sea_query::{Expr, ExprTrait},
};

use super::{NewRow, Setback, WriteError, Written};
use crate::{
    database::{
        BYTES_PER_STATEMENT, ROWS_PER_STATEMENT, Transaction, column, insert_ignore, lock_rows,
    },
    domain::{BuyerId, OfferKey, RequestId, ReservationId, TimeMs},
    entity::{offers, outbox, outbox::OutboxState},
    outbox::{Row, reason},
};

/// One order of locks everywhere: activity, SKU, user, slot, reservation.
pub(super) fn sort_key(row: &NewRow) -> (&OfferKey, &BuyerId, u32, &ReservationId) {
    (&row.offer, &row.buyer, row.slot, &row.reservation_id)
}

/// A row of [`insert_columns`] without its strings, and the framing of those.
const ROW_BYTES: usize = 80;

/// What [`to_insert`] and `insert_ignore` do, as one statement whose text does not change with the
/// number of rows: it is prepared once, and what it costs the database to read it hardly grows.
const INSERT_COLUMNS: &str = "\
    INSERT INTO outbox (reservation_id, activity_id, sku_id, user_id, quantity, slot, order_no, \
        request_id, epoch, expire_time, create_time, batch, state, attempts, next_attempt_time) \
    SELECT reservation_id, activity_id, sku_id, user_id, quantity, slot, order_no, \
        NULLIF(request_id, ''), epoch, NULLIF(expire_time, 0), create_time, $12, $13, 0, $14 \
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::int[], $6::int[], $7::text[], \
        $8::text[], $9::bigint[], $10::bigint[], $11::bigint[]) \
        AS rows (reservation_id, activity_id, sku_id, user_id, quantity, slot, order_no, \
        request_id, epoch, expire_time, create_time) \
    ON CONFLICT DO NOTHING";

/// The beginning of a number that is none.
const NOT_KEPT: &str = "no COMMIT: some of the rows are not new or do not fit; new are ";

/// A whole group on PostgreSQL: the rows, and the units that they take of their offers. It is a
/// transaction of its own, so that nobody waits for the way between its steps, least of all with an
/// offer locked. Where a row is not new, or an offer has too few units or another epoch, its last line
/// reads a number where none is: it fails, and nothing is kept.
static INSERT_GROUP: LazyLock<String> = LazyLock::new(|| {
    format!(
        "WITH written AS ({INSERT_COLUMNS} RETURNING 1), \
        complete AS (SELECT count(*) AS rows FROM written), \
        raised AS (UPDATE offers SET reserved = offers.reserved + taken.units \
            FROM complete, unnest($15::text[], $16::text[], $17::bigint[], $18::bigint[]) \
                AS taken (activity_id, sku_id, epoch, units) \
            WHERE complete.rows = $19 \
                AND offers.activity_id = taken.activity_id AND offers.sku_id = taken.sku_id \
                AND offers.epoch = taken.epoch \
                AND offers.reserved + taken.units <= offers.total \
            RETURNING 1) \
        SELECT CASE WHEN (SELECT count(*) FROM raised) = $20 THEN 0 \
            ELSE CAST($21 || (SELECT rows FROM complete)::text AS bigint) END"
    )
});

/// The statement that writes all of these rows, or nothing; none when they are too many for one.
pub(super) fn insert_group(batch: &str, now: TimeMs, rows: &[NewRow]) -> Option<Statement> {
    if how_many_fit(rows) < rows.len() {
        return None;
    }
    let units = units_of(rows.iter());
    let of_offer =
        |of: fn(&OfferKey) -> &str| column(units.keys().map(|(offer, _)| of(offer).to_owned()));
    let mut values = columns(batch, now, rows);
    values.extend([
        of_offer(|offer| offer.activity_id.as_str()),
        of_offer(|offer| offer.sku_id.as_str()),
        column(units.keys().map(|(_, epoch)| to_epoch(*epoch))),
        column(units.values().map(|units| to_units(*units))),
        to_count(rows.len()).into(),
        to_count(units.len()).into(),
        NOT_KEPT.into(),
    ]);
    Some(Statement::from_sql_and_values(DbBackend::Postgres, INSERT_GROUP.as_str(), values))
}

/// Inserts the rows into PostgreSQL; answers how many it had not. One that conflicts is left out.
pub(super) async fn insert_columns(
    transaction: &Transaction,
    batch: &str,
    now: TimeMs,
    rows: &[NewRow],
) -> Result<u64, DbErr> {
    let mut inserted = 0;
    let mut rows = rows;
    while !rows.is_empty() {
        let (some, rest) = rows.split_at(how_many_fit(rows));
        let values = columns(batch, now, some);
        let statement = Statement::from_sql_and_values(DbBackend::Postgres, INSERT_COLUMNS, values);
        inserted += transaction.execute_raw(statement).await?.rows_affected();
        rows = rest;
    }
    Ok(inserted)
}

/// What [`INSERT_COLUMNS`] is given.
fn columns(batch: &str, now: TimeMs, rows: &[NewRow]) -> Vec<Value> {
    let text = |of: fn(&NewRow) -> &str| column(rows.iter().map(|row| of(row).to_owned()));
    let time = |of: &dyn Fn(&NewRow) -> i64| column(rows.iter().map(of));
    vec![
        text(|row| row.reservation_id.as_str()),
        text(|row| row.offer.activity_id.as_str()),
        text(|row| row.offer.sku_id.as_str()),
        text(|row| row.buyer.as_str()),
        column(rows.iter().map(|row| to_quantity(row.quantity))),
        column(rows.iter().map(|row| to_slot(row.slot))),
        text(|row| row.order_no.as_str()),
        // No request has an empty id, and no hold ends at 0.
        text(|row| row.request_id.as_ref().map_or("", RequestId::as_str)),
        time(&|row| to_epoch(row.epoch)),
        time(&|row| row.hold.map_or(0, |hold| now.plus(hold).0)),
        time(&|row| row.reserve_time.0),
        batch.into(),
        OutboxState::Pending.to_value().into(),
        now.0.into(),
    ]
}

/// The units that rows take, by offer and epoch.
pub(super) fn units_of<'a>(
    rows: impl Iterator<Item = &'a NewRow>,
) -> BTreeMap<(&'a OfferKey, u64), u64> {
    let mut units = BTreeMap::new();
    for row in rows {
        *units.entry((&row.offer, row.epoch)).or_default() += u64::from(row.quantity);
    }
    units
}

/// How many of the rows go into one statement: at least one.
fn how_many_fit(rows: &[NewRow]) -> usize {
    let mut bytes = 0;
    let fit = rows.iter().take_while(|row| {
        bytes += ROW_BYTES
            + row.reservation_id.as_str().len()
            + row.offer.activity_id.as_str().len()
            + row.offer.sku_id.as_str().len()
            + row.buyer.as_str().len()
            + row.order_no.as_str().len()
            + row.request_id.as_ref().map_or(0, |id| id.as_str().len());
        bytes <= BYTES_PER_STATEMENT
    });
    fit.count().max(1)
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

fn to_quantity(quantity: u32) -> i32 {
    i32::try_from(quantity).unwrap_or(i32::MAX)
}

fn to_slot(slot: u32) -> i32 {
    i32::try_from(slot).unwrap_or(i32::MAX)
}

fn to_count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn to_units(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

fn to_epoch(epoch: u64) -> i64 {
    i64::try_from(epoch).unwrap_or(i64::MAX)
}

pub(super) fn judge(row: Row) -> Result<Written, WriteError> {
    match row.state {
        OutboxState::Pending | OutboxState::Done | OutboxState::Dead => {
            let reservation = row.reservation();
            reservation.map(Written::Live).map_err(|error| WriteError::Data(error.to_string()))
        }
        OutboxState::Releasing | OutboxState::Released => Ok(Written::GivenBack(row)),
        OutboxState::Refused => Ok(Written::Refused(row)),
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
    let units = to_units(units);
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
                Some(stored) if !is_new(&stored) => judge(stored),
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
            Some(stored) => Ok(judge(stored)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ActivityId, OrderNo, SkuId};

    fn row(request_id: &str) -> NewRow {
        NewRow {
            offer: OfferKey {
                activity_id: ActivityId::new("act-1").unwrap(),
                sku_id: SkuId::new("sku-1").unwrap(),
            },
            epoch: 1,
            buyer: BuyerId::new("u1").unwrap(),
            slot: 1,
            reservation_id: ReservationId::new("r1").unwrap(),
            quantity: 1,
            order_no: OrderNo::new("o1").unwrap(),
            request_id: Some(RequestId::new(request_id).unwrap()),
            reserve_time: TimeMs(0),
            hold: None,
        }
    }

    #[test]
    fn a_statement_has_as_many_rows_as_one_packet_takes() {
        let short = vec![row("r"); 1_000];
        let long = vec![row(&"r".repeat(128)); 1_000];
        let (of_short, of_long) = (how_many_fit(&short), how_many_fit(&long));
        assert!((400..600).contains(&of_short), "{of_short}");
        assert!((200..300).contains(&of_long), "{of_long}");
        assert_eq!(how_many_fit(&short[..1]), 1);
    }
}
