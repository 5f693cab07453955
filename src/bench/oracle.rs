//! The oracle: what engine, outbox and orders say, held against what the buyers were told.

use sea_orm::{ColumnTrait as _, DbErr, EntityTrait as _, QueryFilter as _, QuerySelect as _};

use super::load::{RESERVED, Seen};
use crate::{
    books,
    database::Database,
    domain::{ActivityId, OfferKey},
    entity::{orders, orders::OrderState},
    server::Parts,
};

/// Above every epoch: whatever the offer is at, its keys may go.
const LAST_EPOCH: u64 = u64::MAX >> 12;

/// What the buyers were told in all.
#[derive(Debug, Clone, Copy, Default)]
pub struct Told {
    /// New reservations.
    pub wins: u64,
    /// Calls that may have won.
    pub unknown: u64,
    /// Reservations that were given back.
    pub released: u64,
    /// Releases that were not answered with an outcome.
    pub perhaps_released: u64,
}

impl std::ops::AddAssign for Told {
    fn add_assign(&mut self, other: Self) {
        self.wins += other.wins;
        self.unknown += other.unknown;
        self.released += other.released;
        self.perhaps_released += other.perhaps_released;
    }
}

impl Told {
    /// Adds what buyers were told here.
    pub fn note(&mut self, seen: &Seen) {
        self.wins += seen.count(RESERVED);
        self.unknown += seen.unknown();
    }
}

/// Reads all books: each sentence is something that does not hold.
pub(super) async fn read_books(
    parts: &Parts,
    offers: &[OfferKey],
    told: Told,
) -> Result<Vec<String>, crate::error::Error> {
    let mut broken = Vec::new();
    let Some(first) = offers.first() else { return Ok(broken) };
    let all = books::read(&parts.database, &parts.catalog, &first.activity_id).await?;
    for books in &all {
        broken.extend(books.contradictions());
        for (what, units) in [("oversold", books.oversold()), ("missing", books.missing())] {
            if units != 0 {
                broken.push(format!("{}: {units} units are {what}", books.sku_id));
            }
        }
    }
    broken.extend(contradiction(all.iter().map(|books| books.live_orders).sum(), told));
    if all.len() != offers.len() {
        let (sold, found) = (offers.len(), all.len());
        broken.push(format!("{sold} offer(s) were sold, and {found} are in the books"));
    }
    Ok(broken)
}

/// Takes the stock away: the rows stay, as those of every sale do, but an engine of others shall not
/// keep it.
pub(super) async fn purge(parts: &Parts, offers: &[OfferKey]) -> Result<(), crate::error::Error> {
    for offer in offers {
        let offer = parts.catalog.offer(offer).await?;
        for segment in offer.segments.all() {
            segment.scripts.purge(LAST_EPOCH).await?;
        }
    }
    Ok(())
}

/// Who has an order that is not cancelled, one entry for each order.
pub(super) async fn buyers_with_orders(
    database: &Database,
    activity_id: &ActivityId,
) -> Result<Vec<String>, DbErr> {
    orders::Entity::find()
        .select_only()
        .column(orders::Column::UserId)
        .filter(orders::Column::ActivityId.eq(activity_id.as_str()))
        .filter(orders::Column::State.ne(OrderState::Cancelled))
        .into_tuple()
        .all(database.reader())
        .await
}

/// What the number of live orders says against what the buyers were told.
fn contradiction(live_orders: i64, told: Told) -> Option<String> {
    let Told { wins, unknown, released, perhaps_released } = told;
    let sold = u64::try_from(live_orders).unwrap_or(0) + released;
    (sold + perhaps_released < wins || sold > wins + unknown).then(|| {
        format!(
            "{wins} buyers were told that they won and {unknown} don't know, {released} gave back \
             and {perhaps_released} don't know, and there are {live_orders} live orders"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wins_without_an_order_and_orders_without_a_win_are_found() {
        let told = Told { wins: 10, unknown: 2, released: 3, perhaps_released: 1 };
        for (live_orders, is_well) in [(5, false), (6, true), (9, true), (10, false)] {
            assert_eq!(contradiction(live_orders, told).is_none(), is_well, "{live_orders}");
        }
    }
}
