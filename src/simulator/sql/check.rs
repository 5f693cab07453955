//! What holds in SQL after every commit: I1, I7, and I4 by the schema.

use std::collections::BTreeMap;

use sea_orm::sqlx::{self, Row, sqlite::SqliteRow};

use super::{Store, block};

/// What must not change, or only forward, in a row of the outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    state: String,
    fixed: (String, String, i32, String),
}

impl Store {
    /// Looks at everything as it was committed.
    pub(super) fn check(&self) {
        const OFFERS: &str = "
            SELECT sku_id, total, reserved, sold,
                (SELECT COALESCE(SUM(quantity), 0) FROM outbox r WHERE r.sku_id = o.sku_id
                 AND state IN ('pending', 'done', 'dead')) AS live,
                (SELECT COALESCE(SUM(quantity), 0) FROM orders r WHERE r.sku_id = o.sku_id
                 AND state <> 'cancelled') AS ordered
            FROM offers o";
        const ROWS: &str = "
            SELECT reservation_id, state, sku_id, user_id, quantity, order_no FROM outbox";
        let mut connections = self.connections.lock().unwrap();
        let offers = block(sqlx::query(OFFERS).fetch_all(&mut connections.writer)).unwrap();
        let rows = block(sqlx::query(ROWS).fetch_all(&mut connections.writer)).unwrap();
        drop(connections);
        for offer in offers {
            let figure = |name: &str| offer.get::<i64, _>(name);
            let [total, reserved, sold, live, ordered] =
                ["total", "reserved", "sold", "live", "ordered"].map(figure);
            self.world.check(reserved <= total && live <= total && ordered <= total, || {
                format!("I1: {live} units live and {reserved} counted of {total}")
            });
            self.world.check(reserved == live && sold == ordered, || {
                format!("counters: {reserved} for {live} live units, {sold} for {ordered} ordered")
            });
        }
        let rows = rows.iter().map(|row: &SqliteRow| {
            let text = |name: &str| row.get::<String, _>(name);
            let fixed = (text("sku_id"), text("user_id"), row.get("quantity"), text("order_no"));
            (text("reservation_id"), Known { state: text("state"), fixed })
        });
        let rows: BTreeMap<String, Known> = rows.collect();
        let mut before = self.rows.lock().unwrap();
        for (id, row) in &rows {
            let earlier = before.get(id);
            let from = earlier.map_or("none", |row| row.state.as_str());
            self.world.check(may_follow(from, &row.state), || {
                format!("I7: the row of {id} went from {from} to {}", row.state)
            });
            self.world.check(earlier.is_none_or(|earlier| earlier.fixed == row.fixed), || {
                format!("the row of {id} changed: {row:?} after {earlier:?}")
            });
        }
        for id in before.keys().filter(|id| !rows.contains_key(*id)) {
            self.world.violation(format!("the row of {id} is gone"));
        }
        *before = rows;
    }
}

/// The states of a row; a tombstone begins as `releasing`.
fn may_follow(from: &str, to: &str) -> bool {
    from == to
        || match from {
            "none" => ["pending", "releasing", "refused"].contains(&to),
            "pending" => ["done", "releasing", "dead"].contains(&to),
            "done" => to == "releasing",
            "dead" => ["pending", "releasing"].contains(&to),
            "releasing" => to == "released",
            _ => false,
        }
}
