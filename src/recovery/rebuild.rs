//! One rebuild of one offer, from the raised epoch to the end of the load.
//!
//! The epoch is raised in a transaction of its own, and the rows are read after its commit, a page
//! at a time, while nobody waits for a lock. That is as good as one snapshot:
//!
//! - What was committed before is there to be read; an insert that comes later is refused for its
//!   epoch, and nothing is taken under the new one before the end.
//! - A release that commits in between carries the new epoch, so its `release.lua` is told to come
//!   again until the rebuild has ended. Whether the page showed its row as live or as given back,
//!   the units are counted once: they are given back then, or were never loaded.

use std::{num::TryFromIntError, sync::Arc};

use futures_util::future::try_join_all;
use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, sea_query::Expr,
};

use super::Recovery;
use crate::{
    database::{Transaction, finish},
    domain::ReservationId,
    engine::{
        EngineError,
        scripts::{Held, RebuildStep, Record},
        segments::share,
    },
    entity::{activities, activities::ActivityState, offers, outbox, outbox::OutboxState},
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    outbox::Row,
};

/// Rows per page in SQL and per chunk in the engine; few in the simulator, which so turns pages.
const CHUNK: u64 = if cfg!(test) { 3 } else { 1_000 };
/// After how many chunks a long rebuild says how far it is.
const TELL_EVERY: u64 = 100;

/// What a rebuild came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rebuilt {
    pub(super) epoch: u64,
    /// Units left to sell.
    pub(super) stock: u64,
    /// Reservations that hold units.
    pub(super) reservations: u64,
    /// Their units.
    live: u64,
}

/// What was loaded into one segment.
#[derive(Debug, Clone, Copy, Default)]
struct Loaded {
    chunks: u64,
    /// Units of the reservations.
    units: u64,
}

/// What SQL says about an offer that may sell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SqlRow {
    pub(super) epoch: u64,
    pub(super) segments: u32,
}

/// The epoch that SQL has, and of how many segments it is; `None` once the activity is settled, and never sells again.
///
/// Settling raises the epoch, so an epoch that was read before it can't be raised any more.
pub(super) async fn row_to_sell_under(
    recovery: &Recovery,
    offer: &Offer,
) -> Result<Option<SqlRow>, Error> {
    let reader = recovery.database.reader();
    let row = offers::Entity::find_by_id(sql_key(offer)).one(reader).await;
    let row = row
        .map_err(|error| recovery.sql_failed(error))?
        .ok_or_else(|| Error::internal(format!("{} is not in SQL", offer.key)))?;
    let activity = activities::Entity::find_by_id(offer.key.activity_id.as_str()).one(reader).await;
    let activity = activity.map_err(|error| recovery.sql_failed(error))?;
    if activity.is_some_and(|activity| activity.state == ActivityState::Settled) {
        return Ok(None);
    }
    let epoch = u64::try_from(row.epoch).map_err(broken)?;
    let segments = u32::try_from(row.segments).map_err(broken)?;
    Ok(Some(SqlRow { epoch, segments }))
}

/// Rebuilds the offer under an epoch above `sql`, which SQL was seen at, and above `engine`, the
/// engine's own. `None`: SQL has moved on meanwhile or the engine refused a step, so another
/// rebuild is ahead, and two servers would undo each other's for ever.
pub(super) async fn rebuild(
    recovery: &Recovery,
    offer: &Arc<Offer>,
    sql: u64,
    engine: u64,
) -> Result<Option<Rebuilt>, Error> {
    let raised = raise_epoch(recovery, offer, sql, engine).await;
    let Some(row) = raised.map_err(|error| recovery.sql_failed(error))? else {
        return Ok(None);
    };
    failpoint!("after_epoch_raised");
    let epoch = u64::try_from(row.epoch).map_err(broken)?;
    let total = u64::try_from(row.total).map_err(broken)?;
    let count = offer.segments.count();
    if u32::try_from(row.segments) != Ok(count) {
        // The number goes with the epoch, and this epoch is of another one.
        return Ok(None);
    }
    let segments = offer.segments.all();
    let begun = segments.iter().map(|segment| {
        // Of a cold offer that is what the end gives it, and what a warm-up looks for.
        let units = share(total, count, segment.number);
        segment.scripts.rebuild_begin(epoch, units, offer.keys_expire)
    });
    if !applied(recovery, try_join_all(begun).await)? {
        return Ok(None);
    }
    failpoint!("after_rebuild_begin");
    let Some((rebuilt, loaded)) = load(recovery, offer, &row, epoch).await? else {
        return Ok(None);
    };
    failpoint!("before_rebuild_end");
    // What is neither on sale nor in a reservation, for the counter's sake, is missing in the first.
    let missing = total.saturating_sub(rebuilt.stock).saturating_sub(rebuilt.live);
    let ended = segments.iter().zip(&loaded).map(|(segment, Loaded { chunks, units })| {
        let stock = share(rebuilt.stock, count, segment.number);
        let given = stock + units + if segment.number == 0 { missing } else { 0 };
        segment.scripts.rebuild_end(epoch, *chunks, stock, given)
    });
    let ended = try_join_all(ended).await;
    failpoint!("after_rebuild_end");
    if !applied(recovery, ended)? {
        return Ok(None);
    }
    // Settled while this was paused, and purged before it began: it was filled in vain.
    if row_to_sell_under(recovery, offer).await?.is_none() {
        for segment in offer.segments.all() {
            let purged = segment.scripts.purge(epoch + 1).await;
            purged.map_err(|error| recovery.engine_failed(error))?;
        }
    }
    Ok(Some(rebuilt))
}

/// Whether all segments took a step.
fn applied(
    recovery: &Recovery,
    steps: Result<Vec<RebuildStep>, EngineError>,
) -> Result<bool, Error> {
    let steps = steps.map_err(|error| recovery.engine_failed(error))?;
    Ok(steps.into_iter().all(|step| step == RebuildStep::Applied))
}

/// Raises the epoch of the offer's row, unless SQL is at another one than `sql`; the row as it is
/// then. An insert or a release has either committed before, or waits and meets the new epoch.
async fn raise_epoch(
    recovery: &Recovery,
    offer: &Offer,
    sql: u64,
    engine: u64,
) -> Result<Option<offers::Model>, DbErr> {
    let transaction = recovery.database.begin().await?;
    let raised = raise_epoch_in(&transaction, offer, sql, engine).await;
    failpoint!("before_epoch_commit");
    finish(transaction, raised).await
}

async fn raise_epoch_in(
    transaction: &Transaction,
    offer: &Offer,
    sql: u64,
    engine: u64,
) -> Result<Option<offers::Model>, DbErr> {
    let signed = |epoch: u64| i64::try_from(epoch).unwrap_or(i64::MAX - 1);
    // An engine that is ahead of SQL (a database from a backup) must be passed as well.
    let raised = offers::Entity::update_many()
        .col_expr(offers::Column::Epoch, Expr::value(signed(sql.max(engine)) + 1))
        .filter(offers::Column::ActivityId.eq(offer.key.activity_id.as_str()))
        .filter(offers::Column::SkuId.eq(offer.key.sku_id.as_str()))
        .filter(offers::Column::Epoch.eq(signed(sql)))
        .exec(transaction)
        .await?;
    if raised.rows_affected == 0 {
        return Ok(None);
    }
    let row = offers::Entity::find_by_id(sql_key(offer)).one(transaction).await?;
    row.map(Some).ok_or_else(|| DbErr::RecordNotFound(format!("offer {}", offer.key)))
}

/// Loads every row of the offer into the home of its buyer; `None` when the engine refused a chunk.
/// Reading the next page and loading the last one go on at the same time.
async fn load(
    recovery: &Recovery,
    offer: &Offer,
    row: &offers::Model,
    epoch: u64,
) -> Result<Option<(Rebuilt, Vec<Loaded>)>, Error> {
    let segments = offer.segments.all();
    let mut figures = Figures::default();
    let mut loaded = vec![Loaded::default(); segments.len()];
    let mut pages: u64 = 0;
    let mut rows = page(recovery, offer, 0).await?;
    while let Some(last) = rows.last() {
        if recovery.shutdown.is_cancelled() {
            // The next server begins anew, higher.
            return Ok(None);
        }
        let last_id = last.id;
        let chunks = chunks_of(offer, &rows, row.epoch, &mut figures)?;
        let mut steps = Vec::new();
        for ((segment, chunk), loaded) in segments.iter().zip(chunks).zip(&mut loaded) {
            if !chunk.is_empty() {
                loaded.chunks += 1;
                loaded.units += chunk.units();
                steps.push((segment, loaded.chunks, chunk));
            }
        }
        let loading = try_join_all(steps.iter().map(|(segment, number, chunk)| {
            segment.scripts.rebuild_load(epoch, *number, &chunk.held, &chunk.marks)
        }));
        let (steps, next) = tokio::join!(loading, page(recovery, offer, last_id));
        if !applied(recovery, steps)? {
            return Ok(None);
        }
        failpoint!("after_rebuild_load");
        pages += 1;
        if pages.is_multiple_of(TELL_EVERY) {
            let loaded = figures.reservations;
            tracing::info!(offer = %offer.key, epoch, loaded, "rebuilding");
        }
        rows = next?;
    }
    let rebuilt = Rebuilt {
        epoch,
        stock: figures.stock(offer, row)?,
        reservations: figures.reservations,
        live: figures.live,
    };
    Ok(Some((rebuilt, loaded)))
}

async fn page(recovery: &Recovery, offer: &Offer, after: i64) -> Result<Vec<Row>, Error> {
    let rows = outbox::Entity::find()
        .filter(outbox::Column::ActivityId.eq(offer.key.activity_id.as_str()))
        .filter(outbox::Column::SkuId.eq(offer.key.sku_id.as_str()))
        .filter(outbox::Column::Id.gt(after))
        .order_by_asc(outbox::Column::Id)
        .limit(CHUNK)
        .all(recovery.database.reader())
        .await;
    rows.map_err(|error| recovery.sql_failed(error))
}

/// What the rows that were read so far add up to.
#[derive(Debug, Default)]
struct Figures {
    reservations: u64,
    /// Units of rows that were read as live.
    live: u64,
    /// Units of rows that were released since the epoch was raised, before they were read.
    released_since: u64,
}

impl Figures {
    /// Units left to sell: SQL sells by its counter, so what it would refuse is not put on sale, or
    /// each sale of it would start another rebuild.
    fn stock(&self, offer: &Offer, row: &offers::Model) -> Result<u64, Error> {
        let total = u64::try_from(row.total).map_err(broken)?;
        // The counter was read when the epoch was raised.
        let counted = u64::try_from(row.reserved).map_err(broken)?;
        let counted = counted.saturating_sub(self.released_since);
        if counted != self.live {
            tracing::error!(
                offer = %offer.key,
                counted,
                live_units = self.live,
                "the counter in SQL differs from the rows; the higher of the two counts, until \
                 `reconcile --repair` adds it up anew"
            );
        }
        Ok(total.saturating_sub(self.live.max(counted)))
    }
}

/// What one page of rows is in one segment.
#[derive(Default)]
struct Chunk {
    held: Vec<Held>,
    marks: Vec<ReservationId>,
}

impl Chunk {
    fn is_empty(&self) -> bool {
        self.held.is_empty() && self.marks.is_empty()
    }

    fn units(&self) -> u64 {
        self.held.iter().map(|held| u64::from(held.record.quantity)).sum()
    }
}

/// The chunk of every segment, in their order, each row in that of its buyer.
fn chunks_of(
    offer: &Offer,
    rows: &[Row],
    epoch: i64,
    figures: &mut Figures,
) -> Result<Vec<Chunk>, Error> {
    let mut chunks: Vec<Chunk> = offer.segments.all().iter().map(|_| Chunk::default()).collect();
    for row in rows {
        let home = offer.segments.home_of(&row.user_id).number as usize;
        let Some(chunk) = chunks.get_mut(home) else { continue };
        match row.state {
            OutboxState::Pending | OutboxState::Done | OutboxState::Dead => {
                figures.reservations += 1;
                figures.live += u64::from(row.units());
                chunk.held.push(as_held(row)?);
            }
            // Given back or refused: a repeat of the request must not win again.
            OutboxState::Releasing | OutboxState::Released | OutboxState::Refused => {
                if row.epoch >= epoch && row.was_counted() {
                    figures.released_since += u64::from(row.units());
                }
                chunk.marks.push(row.reservation()?.reservation_id);
            }
        }
    }
    Ok(chunks)
}

fn as_held(row: &Row) -> Result<Held, Error> {
    let reservation = row.reservation()?;
    let slot = row
        .slot
        .and_then(|slot| u32::try_from(slot).ok())
        .ok_or_else(|| Error::internal(format!("live outbox row {} has no slot", row.id)))?;
    let record = Record {
        reservation_id: reservation.reservation_id,
        quantity: reservation.quantity,
        order_no: reservation.order_no,
        reserve_time: reservation.reserve_time,
        expire_time: reservation.expire_time,
    };
    Ok(Held { buyer: reservation.buyer, slot, record })
}

fn sql_key(offer: &Offer) -> (String, String) {
    (offer.key.activity_id.to_string(), offer.key.sku_id.to_string())
}

fn broken(error: TryFromIntError) -> Error {
    Error::Internal(Box::new(error))
}
