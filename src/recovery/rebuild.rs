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

use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, sea_query::Expr,
};

use super::Recovery;
use crate::{
    database::{Transaction, finish},
    domain::ReservationId,
    engine::scripts::{Held, RebuildStep, Record},
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
    chunks: u64,
}

/// The epoch that SQL has; `None` once the activity is settled, and never sells again.
///
/// Settling raises the epoch, so an epoch that was read before it can't be raised any more.
pub(super) async fn epoch_to_sell_under(
    recovery: &Recovery,
    offer: &Offer,
) -> Result<Option<u64>, Error> {
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
    u64::try_from(row.epoch).map(Some).map_err(broken)
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
    let scripts = &offer.segment.scripts;
    let begun = scripts.rebuild_begin(epoch, total, offer.keys_expire).await;
    if begun.map_err(|error| recovery.engine_failed(error))? != RebuildStep::Applied {
        return Ok(None);
    }
    failpoint!("after_rebuild_begin");
    let Some(rebuilt) = load(recovery, offer, &row, epoch).await? else {
        return Ok(None);
    };
    failpoint!("before_rebuild_end");
    let ended = scripts.rebuild_end(epoch, rebuilt.chunks, rebuilt.stock).await;
    failpoint!("after_rebuild_end");
    match ended.map_err(|error| recovery.engine_failed(error))? {
        RebuildStep::Applied => {
            // Settled while this was paused, and purged before it began: it was filled in vain.
            if epoch_to_sell_under(recovery, offer).await?.is_none() {
                let purged = scripts.purge(epoch + 1).await;
                purged.map_err(|error| recovery.engine_failed(error))?;
            }
            Ok(Some(rebuilt))
        }
        RebuildStep::Refused { .. } => Ok(None),
    }
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

/// Loads every row of the offer; `None` when the engine refused a chunk. Reading the next page and
/// loading the last one go on at the same time.
async fn load(
    recovery: &Recovery,
    offer: &Offer,
    row: &offers::Model,
    epoch: u64,
) -> Result<Option<Rebuilt>, Error> {
    let scripts = &offer.segment.scripts;
    let mut figures = Figures::default();
    let mut chunks = 0;
    let mut rows = page(recovery, offer, 0).await?;
    while let Some(last) = rows.last() {
        if recovery.shutdown.is_cancelled() {
            // The next server begins anew, higher.
            return Ok(None);
        }
        let last_id = last.id;
        let chunk = Chunk::of(&rows, row.epoch, &mut figures)?;
        chunks += 1;
        let loading = scripts.rebuild_load(epoch, chunks, &chunk.held, &chunk.marks);
        let (loaded, next) = tokio::join!(loading, page(recovery, offer, last_id));
        if loaded.map_err(|error| recovery.engine_failed(error))? != RebuildStep::Applied {
            return Ok(None);
        }
        failpoint!("after_rebuild_load");
        if chunks.is_multiple_of(TELL_EVERY) {
            let loaded = figures.reservations;
            tracing::info!(offer = %offer.key, epoch, loaded, "rebuilding");
        }
        rows = next?;
    }
    Ok(Some(Rebuilt {
        epoch,
        stock: figures.stock(offer, row)?,
        reservations: figures.reservations,
        chunks,
    }))
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

/// What one page of rows is in the engine.
struct Chunk {
    held: Vec<Held>,
    marks: Vec<ReservationId>,
}

impl Chunk {
    fn of(rows: &[Row], epoch: i64, figures: &mut Figures) -> Result<Self, Error> {
        let mut chunk = Self { held: Vec::with_capacity(rows.len()), marks: Vec::new() };
        for row in rows {
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
        Ok(chunk)
    }
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
