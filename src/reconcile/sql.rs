//! The outbox against the orders, and both against the counters.
//!
//! Whatever must agree is read in one statement, which shows one moment: a row and its order, a
//! row and its counter, are always committed together.

use std::collections::HashMap;

use sea_orm::{
    ColumnTrait, ConnectionTrait, DbBackend, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QueryOrder, QuerySelect, Statement, Value,
};

use super::{Compared, Reconciler};
use crate::{
    database::ROWS_PER_STATEMENT,
    domain::{Difference, DifferenceKind, OfferFigures, ReservationId},
    entity::{outbox, outbox::OutboxState},
    error::Error,
    offer::Offer,
    outbox::Row,
};

/// Rows that hold units.
pub(super) const LIVE: [OutboxState; 3] =
    [OutboxState::Pending, OutboxState::Done, OutboxState::Dead];

/// The counters of an offer, and what its rows and orders add up to at the same moment.
#[derive(Debug, Clone, Copy, FromQueryResult)]
pub(super) struct Sums {
    pub(super) total: i64,
    pub(super) reserved: i64,
    pub(super) sold: i64,
    pub(super) epoch: i64,
    pub(super) live: i64,
    pub(super) ordered: i64,
    pending: i64,
    pub(super) releasing: i64,
    dead: i64,
}

const SUMS: &str = "SELECT o.total, o.reserved, o.sold, o.epoch,
    CAST(COALESCE(r.live, 0) AS BIGINT) AS live,
    CAST(COALESCE(r.pending, 0) AS BIGINT) AS pending,
    CAST(COALESCE(r.releasing, 0) AS BIGINT) AS releasing,
    CAST(COALESCE(r.dead, 0) AS BIGINT) AS dead,
    (SELECT CAST(COALESCE(SUM(quantity), 0) AS BIGINT) FROM orders
        WHERE activity_id = o.activity_id AND sku_id = o.sku_id AND state <> 'cancelled') AS ordered
  FROM offers o CROSS JOIN (
    SELECT SUM(CASE WHEN state IN ('pending', 'done', 'dead') THEN quantity ELSE 0 END) AS live,
        SUM(CASE WHEN state = 'pending' THEN 1 ELSE 0 END) AS pending,
        SUM(CASE WHEN state = 'releasing' THEN 1 ELSE 0 END) AS releasing,
        SUM(CASE WHEN state = 'dead' THEN 1 ELSE 0 END) AS dead
    FROM outbox WHERE activity_id = ? AND sku_id = ?) r
  WHERE o.activity_id = ? AND o.sku_id = ?";

/// Live orders whose row is not done; {} is what to select.
const ORDERS_WITHOUT_ROW: &str = "SELECT {} FROM orders o
    LEFT JOIN outbox r ON r.reservation_id = o.reservation_id
  WHERE o.activity_id = ? AND o.sku_id = ? AND o.state <> 'cancelled'
    AND (r.state IS NULL OR r.state <> 'done' OR r.quantity <> o.quantity)";

/// Rows that are done and have no live order.
const ROWS_WITHOUT_ORDER: &str = "SELECT {} FROM outbox o
    LEFT JOIN orders r ON r.reservation_id = o.reservation_id
  WHERE o.activity_id = ? AND o.sku_id = ? AND o.state = 'done'
    AND (r.state IS NULL OR r.state = 'cancelled')";

#[derive(Debug, FromQueryResult)]
struct Behind {
    many: i64,
    units: i64,
}

#[derive(Debug, FromQueryResult)]
struct Named {
    reservation_id: String,
}

impl Reconciler {
    /// What SQL alone can tell of an offer.
    pub(super) async fn compare_in_sql(&self, offer: &Offer) -> Result<Compared, Error> {
        let reader = self.database.reader();
        let found = async {
            let sums = sums(reader, offer).await?;
            let mut differences = counters(offer, &sums);
            if sums.live > sums.total {
                differences.push(oversold(reader, offer, &sums).await?);
            }
            let kinds = [
                (
                    DifferenceKind::OrderWithoutRow,
                    ORDERS_WITHOUT_ROW,
                    "live orders whose outbox row is not done, not there, or of another quantity",
                ),
                (
                    DifferenceKind::RowWithoutOrder,
                    ROWS_WITHOUT_ORDER,
                    "outbox rows that are done and have no live order",
                ),
            ];
            for (kind, query, detail) in kinds {
                differences.extend(unpaired(reader, offer, kind, query, detail).await?);
            }
            Ok((sums, differences))
        };
        let (sums, differences) = found.await.map_err(|error| self.sql_failed(error))?;
        let count = |rows: i64| u64::try_from(rows).unwrap_or(0);
        Ok(Compared {
            figures: OfferFigures {
                sku_id: offer.key.sku_id.to_string(),
                total: sums.total,
                segments: Vec::new(),
                recorded: sums.live,
                ordered: sums.ordered,
                epoch: sums.epoch,
            },
            differences,
            unacked: 0,
            pending: count(sums.pending),
            releasing: count(sums.releasing),
            dead: count(sums.dead),
        })
    }

    /// The rows with these ids, by id.
    pub(super) async fn rows_by_id<'a>(
        &self,
        ids: impl Iterator<Item = &'a ReservationId>,
    ) -> Result<HashMap<String, Row>, Error> {
        let ids: Vec<&str> = ids.map(ReservationId::as_str).collect();
        let mut found = HashMap::with_capacity(ids.len());
        for some in ids.chunks(ROWS_PER_STATEMENT) {
            let rows = outbox::Entity::find()
                .filter(outbox::Column::ReservationId.is_in(some.iter().copied()))
                .all(self.database.reader())
                .await
                .map_err(|error| self.sql_failed(error))?;
            found.extend(rows.into_iter().map(|row| (row.reservation_id.clone(), row)));
        }
        Ok(found)
    }

    /// One page of rows, live or not, in the order of their ids. The states are left to the caller:
    /// with them in the query SQLite may take another index, and then sorts all rows for each page.
    pub(super) async fn rows_after(
        &self,
        offer: &Offer,
        after: i64,
        limit: usize,
    ) -> Result<Vec<Row>, Error> {
        rows_of(offer)
            .filter(outbox::Column::Id.gt(after))
            .order_by_asc(outbox::Column::Id)
            .limit(limit as u64)
            .all(self.database.reader())
            .await
            .map_err(|error| self.sql_failed(error))
    }
}

fn rows_of(offer: &Offer) -> sea_orm::Select<outbox::Entity> {
    outbox::Entity::find()
        .filter(outbox::Column::ActivityId.eq(offer.key.activity_id.as_str()))
        .filter(outbox::Column::SkuId.eq(offer.key.sku_id.as_str()))
}

/// The counters of an offer and what they should be, at one moment.
pub(super) async fn sums(db: &impl ConnectionTrait, offer: &Offer) -> Result<Sums, DbErr> {
    let sums = Sums::find_by_statement(statement(db, SUMS, offer)).one(db).await?;
    sums.ok_or_else(|| DbErr::RecordNotFound(format!("offer {}", offer.key)))
}

/// Each `?` pair is the offer; in the words of each database.
fn statement(db: &impl ConnectionTrait, sql: &str, offer: &Offer) -> Statement {
    let backend = db.get_database_backend();
    let mut sql = sql.to_owned();
    let places = sql.matches('?').count();
    if backend == DbBackend::Postgres {
        for place in 1..=places {
            sql = sql.replacen('?', &format!("${place}"), 1);
        }
    } else if backend == DbBackend::MySql {
        sql = sql.replace("AS BIGINT)", "AS SIGNED)");
    }
    let key = [offer.key.activity_id.as_str(), offer.key.sku_id.as_str()];
    let values = key.into_iter().cycle().take(places).map(Value::from);
    Statement::from_sql_and_values(backend, sql, values)
}

fn counters(offer: &Offer, sums: &Sums) -> Vec<Difference> {
    let pairs = [
        ("reserved", sums.live, sums.reserved, "the outbox rows that hold units"),
        ("sold", sums.ordered, sums.sold, "the live orders"),
    ];
    pairs
        .into_iter()
        .filter(|(_, expected, actual, _)| expected != actual)
        .map(|(counter, expected, actual, of)| Difference {
            kind: DifferenceKind::CounterDrift,
            sku_id: offer.key.sku_id.to_string(),
            reservation_ids: Vec::new(),
            reservation_count: 0,
            expected,
            actual,
            detail: format!("the counter `{counter}` is {actual}; {of} have {expected} units"),
            repaired: false,
        })
        .collect()
}

/// The newest reservations, as many as it takes to come down to the total.
async fn oversold(
    db: &impl ConnectionTrait,
    offer: &Offer,
    sums: &Sums,
) -> Result<Difference, DbErr> {
    let newest = rows_of(offer)
        .filter(outbox::Column::State.is_in(LIVE))
        .order_by_desc(outbox::Column::Id)
        .limit(Difference::MAX_NAMED as u64)
        .all(db)
        .await?;
    let mut excess = sums.live - sums.total;
    let mut names = Vec::new();
    for row in newest {
        if excess <= 0 {
            break;
        }
        excess -= i64::from(row.quantity);
        names.push(row.reservation_id);
    }
    Ok(Difference {
        kind: DifferenceKind::Oversold,
        sku_id: offer.key.sku_id.to_string(),
        reservation_count: names.len() as u64,
        reservation_ids: names,
        expected: sums.total,
        actual: sums.live,
        detail: format!(
            "live reservations have {} units, {} more than the total; the newest are named: \
             release those that you can't serve",
            sums.live,
            sums.live - sums.total
        ),
        repaired: false,
    })
}

async fn unpaired(
    db: &impl ConnectionTrait,
    offer: &Offer,
    kind: DifferenceKind,
    query: &str,
    detail: &str,
) -> Result<Option<Difference>, DbErr> {
    let count = "COUNT(*) AS many, CAST(COALESCE(SUM(o.quantity), 0) AS BIGINT) AS units";
    let counted = statement(db, &query.replace("{}", count), offer);
    let Some(Behind { many, units }) = Behind::find_by_statement(counted).one(db).await? else {
        return Ok(None);
    };
    if many == 0 {
        return Ok(None);
    }
    let limit = Difference::MAX_NAMED;
    let names = format!("{} ORDER BY o.reservation_id LIMIT {limit}", query);
    let names = statement(db, &names.replace("{}", "o.reservation_id"), offer);
    let names = Named::find_by_statement(names).all(db).await?;
    Ok(Some(Difference {
        kind,
        sku_id: offer.key.sku_id.to_string(),
        reservation_ids: names.into_iter().map(|row| row.reservation_id).collect(),
        reservation_count: u64::try_from(many).unwrap_or(0),
        expected: 0,
        actual: units,
        detail: format!("{many} {detail}"),
        repaired: false,
    }))
}
