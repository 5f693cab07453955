//! What reservations become. Everything here runs inside the caller's transaction.

use std::collections::HashMap;

use sea_orm::{
    ActiveValue::Set,
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, ExprTrait, Order, Query},
};

use crate::{
    database::{Backend, Transaction, insert_ignore, is_among},
    domain::TimeMs,
    entity::{offers, orders, orders::OrderState, outbox},
    outbox::Row,
};

/// How many ids stand in one statement.
const IDS: usize = 500;

/// Places the orders of these rows where none of them has one yet: copied inside the database, which
/// is much cheaper than to read the rows and write them back. Answers how many were placed, one for
/// each row that has its offer.
///
/// # Errors
/// Those of the database; a fault of data when any order, or any order of that slot, is there already.
/// The transaction is then to be rolled back, and [`place`] looks at each row.
pub async fn place_new(transaction: &Transaction, ids: &[i64], now: TimeMs) -> Result<u64, DbErr> {
    use orders::Column as To;
    use outbox::Column as From;
    let columns = [
        (To::OrderNo, From::OrderNo),
        (To::ReservationId, From::ReservationId),
        (To::ActivityId, From::ActivityId),
        (To::SkuId, From::SkuId),
        (To::UserId, From::UserId),
        (To::Slot, From::Slot),
        (To::Quantity, From::Quantity),
    ];
    let of_offer =
        [(To::PriceMinor, offers::Column::PriceMinor), (To::Currency, offers::Column::Currency)];
    let mut placed = 0;
    for some in ids.chunks(IDS) {
        let mut rows = Query::select();
        rows.columns(columns.map(|(_, from)| (outbox::Entity, from)))
            .columns(of_offer.map(|(_, from)| (offers::Entity, from)))
            .expr(Expr::val(OrderState::Created))
            .expr(Expr::val(now.0))
            .from(outbox::Entity)
            // From the rows to their offers, which an inner join leaves to the database: PostgreSQL then
            // reads all rows of an offer to find these. Without its offer a row has no price, and fails.
            .left_join(
                offers::Entity,
                Expr::col((offers::Entity, offers::Column::ActivityId))
                    .equals((outbox::Entity, From::ActivityId))
                    .and(
                        Expr::col((offers::Entity, offers::Column::SkuId))
                            .equals((outbox::Entity, From::SkuId)),
                    ),
            )
            .and_where(is_among(Backend::of(transaction), From::Id, some));
        // One order of locks everywhere; see ARCHITECTURE.md.
        for column in [From::ActivityId, From::SkuId, From::UserId, From::Slot, From::ReservationId]
        {
            rows.order_by((outbox::Entity, column), Order::Asc);
        }
        let mut insert = Query::insert();
        insert.into_table(orders::Entity);
        let columns = columns
            .map(|(to, _)| to)
            .into_iter()
            .chain(of_offer.map(|(to, _)| to))
            .chain([To::State, To::CreateTime]);
        insert
            .columns(columns)
            .select_from(rows)
            .map_err(|error| DbErr::Custom(error.to_string()))?;
        placed += transaction.execute(&insert).await?.rows_affected();
    }
    Ok(placed)
}

/// Places the orders of these rows; an order that is there already is fine if it is the same.
///
/// Answers, for each row, whether it has its order now: not when another reservation of the same
/// buyer has an order in that slot, when the order number is another's, or without an offer.
///
/// # Errors
/// Those of the database; the transaction is then to be rolled back.
pub async fn place(
    transaction: &Transaction,
    rows: &[Row],
    offers: &HashMap<(String, String), offers::Model>,
    now: TimeMs,
) -> Result<Vec<bool>, DbErr> {
    let mut models = Vec::with_capacity(rows.len());
    for row in rows {
        let key = (row.activity_id.clone(), row.sku_id.clone());
        // A row without its offer gets no order; it fails alone.
        let Some(offer) = offers.get(&key) else { continue };
        models.push(orders::ActiveModel {
            order_no: Set(row.order_no.clone()),
            reservation_id: Set(row.reservation_id.clone()),
            activity_id: Set(row.activity_id.clone()),
            sku_id: Set(row.sku_id.clone()),
            user_id: Set(row.user_id.clone()),
            slot: Set(row.slot),
            quantity: Set(row.quantity),
            price_minor: Set(offer.price_minor),
            currency: Set(offer.currency.clone()),
            state: Set(OrderState::Created),
            create_time: Set(now.0),
            confirm_time: Set(None),
            cancel_time: Set(None),
            cancel_reason: Set(None),
        });
    }
    insert_ignore(transaction, models).await?;

    let mut stored = HashMap::with_capacity(rows.len());
    for some in rows.chunks(256) {
        let ids = some.iter().map(|row| row.reservation_id.as_str());
        let found = orders::Entity::find()
            .filter(orders::Column::ReservationId.is_in(ids))
            .all(transaction)
            .await?;
        stored.extend(found.into_iter().map(|order| (order.reservation_id.clone(), order)));
    }
    Ok(rows
        .iter()
        .map(|row| {
            stored.get(&row.reservation_id).is_some_and(|order| {
                order.order_no == row.order_no
                    && order.quantity == row.quantity
                    && order.user_id == row.user_id
                    && order.state != OrderState::Cancelled
            })
        })
        .collect())
}
