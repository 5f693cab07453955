//! The books of a sale: what the engine, the outbox and the orders say, each counted for itself.
//!
//! At rest they must agree to the unit; this is the oracle of every test that sells, and of
//! `seckill demo`.

use std::{collections::HashMap, time::Duration};

use sea_orm::{ColumnTrait, EntityTrait, QueryFilter, QueryOrder, QuerySelect};
use serde::Serialize;

use crate::{
    admission::catalog::Catalog,
    database::Database,
    domain::{ActivityId, SkuId},
    engine::scripts::{Answer, Levels},
    entity::{offers, orders, orders::OrderState, outbox, outbox::OutboxState},
    error::Error,
    offer::Offer,
};

/// How often segments that move are looked at anew, and how long apart.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// The books of one offer. Every figure is counted, also where it should equal another.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct OfferBooks {
    pub sku_id: String,
    /// Units for sale, by the offer's row.
    pub total: i64,
    /// Units left in the engine, over all segments.
    pub engine_remaining: i64,
    /// Units that are on their way between segments, or not yet forgotten where they came from.
    pub engine_in_transfer: i64,
    /// The sum of the quantities of the engine's reservations.
    pub engine_units_reserved: i64,
    /// Reservations that the engine does not know to be durable.
    pub engine_unacked: i64,
    /// The counters of the offer's row.
    pub sql_reserved: i64,
    pub sql_sold: i64,
    /// The sum of the quantities of the outbox rows that hold units.
    pub live_rows_units: i64,
    /// Outbox rows that still have work to do.
    pub unfinished_rows: i64,
    /// Outbox rows that are dead letters.
    pub dead_rows: i64,
    /// Orders that are not cancelled, and the sum of their quantities.
    pub live_orders: i64,
    pub orders_units: i64,
    /// Buyers with more live orders or live rows than the offer allows.
    pub buyers_with_more_than_allowed: i64,
    /// Reservations that are in the engine and live in SQL under different ids or quantities, or
    /// in one of the two only.
    pub unmatched: i64,
}

impl OfferBooks {
    /// Units that were given away beyond the total, by whichever book shows most.
    #[must_use]
    pub fn oversold(&self) -> i64 {
        let given = [
            self.engine_units_reserved,
            self.sql_reserved,
            self.live_rows_units,
            self.orders_units,
        ];
        given.into_iter().map(|units| units - self.total).max().unwrap_or(0).max(0)
    }

    /// Units that are neither for sale nor reserved.
    #[must_use]
    pub fn missing(&self) -> i64 {
        (self.total - self.engine_remaining - self.engine_units_reserved).max(0)
    }

    /// What contradicts what, once nothing is in flight.
    #[must_use]
    pub fn contradictions(&self) -> Vec<String> {
        let engine_sum = self.engine_remaining + self.engine_units_reserved;
        let orders = self.orders_units;
        let equal = [
            ("units left and reserved in the engine", engine_sum, "total", self.total),
            ("units of orders", orders, "units reserved in the engine", self.engine_units_reserved),
            ("units of orders", orders, "units of live rows", self.live_rows_units),
            ("units of orders", orders, "the counter `reserved`", self.sql_reserved),
            ("units of orders", orders, "the counter `sold`", self.sql_sold),
        ];
        let zero = [
            ("unacked reservations", self.engine_unacked),
            ("units on their way between segments", self.engine_in_transfer),
            ("unfinished rows", self.unfinished_rows),
            ("dead letters", self.dead_rows),
            ("buyers with more than allowed", self.buyers_with_more_than_allowed),
            ("reservations that only one of engine and SQL has", self.unmatched),
        ];
        let equal = equal
            .into_iter()
            .filter(|(_, a, _, b)| a != b)
            .map(|(what, a, other, b)| format!("{}: {what} are {a}, and {other} {b}", self.sku_id));
        let zero = zero
            .into_iter()
            .filter(|(_, count)| *count != 0)
            .map(|(what, count)| format!("{}: {what}: {count}", self.sku_id));
        equal.chain(zero).collect()
    }
}

/// Reads the books of every offer of an activity, by `sku_id`.
///
/// # Errors
/// A store is away, or an offer is frozen.
pub async fn read(
    database: &Database,
    catalog: &Catalog,
    id: &ActivityId,
) -> Result<Vec<OfferBooks>, Error> {
    let rows = offers::Entity::find()
        .filter(offers::Column::ActivityId.eq(id.as_str()))
        .order_by_asc(offers::Column::SkuId)
        .all(database.reader())
        .await?;
    let mut books = Vec::with_capacity(rows.len());
    for row in rows {
        books.push(read_offer(database, catalog, id, row).await?);
    }
    Ok(books)
}

async fn read_offer(
    database: &Database,
    catalog: &Catalog,
    id: &ActivityId,
    row: offers::Model,
) -> Result<OfferBooks, Error> {
    let sku_id = SkuId::new(&row.sku_id)
        .map_err(|error| Error::internal(format!("offer {id}/{}: {error}", row.sku_id)))?;
    let offer = catalog.activity(id).await?.offer(&sku_id)?;
    let frozen = |_| Error::OfferFrozen(offer.key.clone());
    let levels = levels_at_rest(&offer).await?.map_err(frozen)?;
    let sum = |figure: fn(&Levels) -> u64| {
        i64::try_from(levels.iter().map(figure).sum::<u64>()).unwrap_or(i64::MAX)
    };
    let mut held: HashMap<String, i64> = HashMap::new();
    for segment in offer.segments.all() {
        let mut cursor = "0".to_owned();
        loop {
            let page = segment.scripts.holdings_page(&cursor).await?;
            let (_, next, entries) = page.map_err(frozen)?;
            for entry in entries {
                let units = i64::from(entry.record.quantity);
                // A second one of the same id, in a segment that is not its home, must show.
                *held.entry(entry.record.reservation_id.to_string()).or_default() += units;
            }
            cursor = next;
            if cursor == "0" {
                break;
            }
        }
    }

    let mut books = OfferBooks {
        total: row.total,
        engine_remaining: sum(|levels| levels.stock),
        engine_in_transfer: sum(|levels| levels.out),
        engine_units_reserved: held.values().sum(),
        engine_unacked: sum(|levels| levels.unacked),
        sql_reserved: row.reserved,
        sql_sold: row.sold,
        sku_id: row.sku_id,
        ..OfferBooks::default()
    };
    let allowed = i64::from(row.max_orders_per_user);
    let mut rows_of_buyer: HashMap<String, i64> = HashMap::new();
    let mut last_id = 0;
    loop {
        let page = outbox::Entity::find()
            .filter(outbox::Column::ActivityId.eq(id.as_str()))
            .filter(outbox::Column::SkuId.eq(sku_id.as_str()))
            .filter(outbox::Column::Id.gt(last_id))
            .order_by_asc(outbox::Column::Id)
            .limit(1_000)
            .all(database.reader())
            .await?;
        let Some(last) = page.last() else { break };
        last_id = last.id;
        for row in page {
            match row.state {
                OutboxState::Pending | OutboxState::Done | OutboxState::Dead => {
                    books.live_rows_units += i64::from(row.quantity);
                    *rows_of_buyer.entry(row.user_id).or_default() += 1;
                    if held.remove(&row.reservation_id) != Some(i64::from(row.quantity)) {
                        books.unmatched += 1;
                    }
                }
                OutboxState::Releasing | OutboxState::Released | OutboxState::Refused => {}
            }
            match row.state {
                OutboxState::Pending | OutboxState::Releasing => books.unfinished_rows += 1,
                OutboxState::Dead => books.dead_rows += 1,
                OutboxState::Done | OutboxState::Released | OutboxState::Refused => {}
            }
        }
    }
    books.unmatched += i64::try_from(held.len()).unwrap_or(i64::MAX);

    let mut orders_of_buyer: HashMap<String, i64> = HashMap::new();
    // No more than is counted: of a million orders the rest would be gigabytes.
    let live = orders::Entity::find()
        .select_only()
        .columns([orders::Column::UserId, orders::Column::Quantity])
        .filter(orders::Column::ActivityId.eq(id.as_str()))
        .filter(orders::Column::SkuId.eq(sku_id.as_str()))
        .filter(orders::Column::State.ne(OrderState::Cancelled))
        .into_tuple::<(String, i32)>()
        .all(database.reader())
        .await?;
    for (user_id, quantity) in live {
        books.live_orders += 1;
        books.orders_units += i64::from(quantity);
        *orders_of_buyer.entry(user_id).or_default() += 1;
    }
    let too_many =
        |of_buyer: HashMap<String, i64>| of_buyer.into_values().filter(|&n| n > allowed).count();
    let too_many = too_many(rows_of_buyer).max(too_many(orders_of_buyer));
    books.buyers_with_more_than_allowed = i64::try_from(too_many).unwrap_or(i64::MAX);
    Ok(books)
}

/// The figures of every segment. Of several they are read until nothing is on its way and two passes
/// are alike: the balancer moves units also while nobody buys. What never rests is shown as it is.
async fn levels_at_rest(offer: &Offer) -> Result<Answer<Vec<Levels>>, Error> {
    let mut before = offer.segments.levels_of_each().await?;
    if offer.segments.count() == 1 {
        return Ok(before);
    }
    for _ in 0..LOOKS {
        let after = offer.segments.levels_of_each().await?;
        let Ok(all) = &after else { return Ok(after) };
        if all.iter().all(|levels| levels.out == 0) && before == after {
            return Ok(after);
        }
        before = after;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sold_out() -> OfferBooks {
        OfferBooks {
            sku_id: "s".to_owned(),
            total: 10,
            engine_remaining: 0,
            engine_units_reserved: 10,
            sql_reserved: 10,
            sql_sold: 10,
            live_rows_units: 10,
            live_orders: 10,
            orders_units: 10,
            ..OfferBooks::default()
        }
    }

    #[test]
    fn books_that_agree_have_no_contradiction() {
        assert_eq!(sold_out().contradictions(), Vec::<String>::new());
        assert_eq!((sold_out().oversold(), sold_out().missing()), (0, 0));
    }

    #[test]
    fn each_book_alone_can_show_what_is_wrong() {
        let oversold = OfferBooks { orders_units: 12, ..sold_out() };
        assert_eq!(oversold.oversold(), 2);
        assert!(!oversold.contradictions().is_empty());
        let missing = OfferBooks { engine_units_reserved: 9, ..sold_out() };
        assert_eq!((missing.oversold(), missing.missing()), (0, 1));
        let dead = OfferBooks { dead_rows: 1, ..sold_out() };
        assert_eq!(dead.contradictions(), ["s: dead letters: 1"]);
    }
}
