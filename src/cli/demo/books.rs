//! What the engine and the database hold after a sale.

use futures_util::future::BoxFuture;

use serde::Serialize;

/// Reads the books of a sale directly, past the server that kept them.
pub trait Books: Send + Sync {
    /// Everything that is recorded of an activity, or why it can't be read.
    fn read<'a>(&'a self, activity_id: &'a str) -> BoxFuture<'a, Result<BooksView, String>>;
}

/// The books of one activity.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct BooksView {
    /// By `sku_id`.
    pub offers: Vec<OfferBooks>,
}

/// The books of one offer. Every figure is counted, also where it should equal another.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct OfferBooks {
    pub sku_id: String,
    /// Units for sale, by the offer's row.
    pub total: i64,
    /// Units left in the engine, over all segments.
    pub engine_remaining: i64,
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
    /// Buyers with more live orders than the offer allows.
    pub buyers_with_more_than_allowed: i64,
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
        let equal = [
            (
                "units left and reserved in the engine",
                self.engine_remaining + self.engine_units_reserved,
                "total",
                self.total,
            ),
            (
                "units of orders",
                self.orders_units,
                "units reserved in the engine",
                self.engine_units_reserved,
            ),
            ("units of orders", self.orders_units, "units of live rows", self.live_rows_units),
            ("units of orders", self.orders_units, "the counter `reserved`", self.sql_reserved),
            ("units of orders", self.orders_units, "the counter `sold`", self.sql_sold),
        ];
        let zero = [
            ("unacked reservations", self.engine_unacked),
            ("unfinished rows", self.unfinished_rows),
            ("dead letters", self.dead_rows),
            ("buyers with more than allowed", self.buyers_with_more_than_allowed),
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
