//! What reservations become. Everything here runs inside the caller's transaction.

use std::collections::HashMap;

use sea_orm::{ActiveValue::Set, ColumnTrait, DbErr, EntityTrait, QueryFilter};

use crate::{
    database::{Transaction, insert_ignore},
    domain::TimeMs,
    entity::{offers, orders, orders::OrderState},
    outbox::Row,
};

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
