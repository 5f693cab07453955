//! One rebuild of one offer, from the raised epoch to the end of the load.

use std::{num::TryFromIntError, sync::Arc};

use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, sea_query::Expr,
};

use super::{Attempt, Recovery};
use crate::{
    database::Transaction,
    engine::scripts::{Held, RebuildStep, Record},
    entity::{offers, outbox, outbox::OutboxState},
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    outbox::Row,
};

/// Rows per page in SQL and per chunk in the engine.
const CHUNK: u64 = 1_000;

impl Recovery {
    pub(super) async fn sql_epoch(&self, offer: &Offer) -> Result<u64, Error> {
        let row = offers::Entity::find_by_id((
            offer.key.activity_id.to_string(),
            offer.key.sku_id.to_string(),
        ))
        .one(self.database.reader())
        .await
        .map_err(|error| self.sql_failed(error))?
        .ok_or_else(|| Error::internal(format!("{} is not in SQL", offer.key)))?;
        u64::try_from(row.epoch).map_err(broken)
    }
}

/// Rebuilds the offer under an epoch above `sql`, which SQL was seen at, and above `engine`, the
/// engine's own. When SQL has moved on meanwhile, another rebuild is ahead, and this one is not
/// begun: two servers would otherwise undo each other's for ever.
///
/// The transaction that raises the epoch keeps the offer's row locked until everything is read
/// and loaded: an insert or a release either committed before and is in the snapshot, or it waits
/// and then meets the new epoch. Selling starts only after its commit.
pub(super) async fn rebuild(
    recovery: &Recovery,
    offer: &Arc<Offer>,
    sql: u64,
    engine: u64,
) -> Result<Attempt, Error> {
    let transaction =
        recovery.database.begin().await.map_err(|error| recovery.sql_failed(error))?;
    let loaded = match load(recovery, &transaction, offer, sql, engine).await {
        Ok(Some(loaded)) => loaded,
        Ok(None) => {
            transaction.rollback().await.map_err(|error| recovery.sql_failed(error))?;
            return Ok(Attempt::Overtaken);
        }
        Err(error) => {
            // The first error is the one that counts.
            let _ = transaction.rollback().await;
            return Err(error);
        }
    };
    failpoint!("before_rebuild_commit");
    transaction.commit().await.map_err(|error| recovery.sql_failed(error))?;
    failpoint!("after_rebuild_commit");
    let Loaded { epoch, chunks, stock } = loaded;
    let ended = offer.segment.scripts.rebuild_end(epoch, chunks, stock).await;
    failpoint!("after_rebuild_end");
    match ended {
        Ok(RebuildStep::Applied) => Ok(Attempt::Healthy { epoch }),
        Ok(RebuildStep::Refused { .. }) => Ok(Attempt::Overtaken),
        Err(error) => Err(recovery.engine_failed(error)),
    }
}

struct Loaded {
    epoch: u64,
    chunks: u64,
    stock: u64,
}

/// `None` when the engine refused a step: another rebuild is ahead.
async fn load(
    recovery: &Recovery,
    transaction: &Transaction,
    offer: &Offer,
    sql: u64,
    engine: u64,
) -> Result<Option<Loaded>, Error> {
    let scripts = &offer.segment.scripts;
    // Raised since we looked: that rebuild counts, and ours would only undo it.
    let Some(row) = raise_epoch(transaction, offer, sql, engine)
        .await
        .map_err(|error| recovery.sql_failed(error))?
    else {
        return Ok(None);
    };
    failpoint!("after_epoch_raised");
    let epoch = u64::try_from(row.epoch).map_err(broken)?;
    let total = u64::try_from(row.total).map_err(broken)?;

    let begun = scripts.rebuild_begin(epoch, total, offer.keys_expire).await;
    failpoint!("after_rebuild_begin");
    if begun.map_err(|error| recovery.engine_failed(error))? != RebuildStep::Applied {
        return Ok(None);
    }
    let (mut chunks, mut live_units, mut last_id) = (0, 0u64, 0);
    loop {
        let rows =
            page(transaction, offer, last_id).await.map_err(|error| recovery.sql_failed(error))?;
        let Some(last) = rows.last() else { break };
        last_id = last.id;
        let (mut held, mut marks) = (Vec::new(), Vec::new());
        for row in &rows {
            match row.state {
                OutboxState::Pending | OutboxState::Done | OutboxState::Dead => {
                    live_units += u64::from(row.units());
                    held.push(as_held(row)?);
                }
                // A tombstone of any kind: a repeat of the request must not win again.
                OutboxState::Releasing | OutboxState::Released | OutboxState::Refused => {
                    marks.push(row.reservation()?.reservation_id);
                }
            }
        }
        chunks += 1;
        let loaded = scripts.rebuild_load(epoch, chunks, &held, &marks).await;
        failpoint!("after_rebuild_load");
        if loaded.map_err(|error| recovery.engine_failed(error))? != RebuildStep::Applied {
            return Ok(None);
        }
    }
    if i64::try_from(live_units).map_err(broken)? != row.reserved {
        tracing::error!(
            offer = %offer.key,
            reserved = row.reserved,
            live_units,
            "the counter in SQL differs from the rows; the higher of the two counts"
        );
    }
    // SQL sells by its counter: what it would refuse is not put on sale, or each sale of it would
    // start another rebuild.
    let taken = live_units.max(u64::try_from(row.reserved).map_err(broken)?);
    Ok(Some(Loaded { epoch, chunks, stock: total.saturating_sub(taken) }))
}

/// Locks the offer's row and raises its epoch, unless SQL is at another one than `sql`.
async fn raise_epoch(
    transaction: &Transaction,
    offer: &Offer,
    sql: u64,
    engine: u64,
) -> Result<Option<offers::Model>, DbErr> {
    let key = (offer.key.activity_id.to_string(), offer.key.sku_id.to_string());
    let signed = |epoch: u64| i64::try_from(epoch).unwrap_or(i64::MAX - 1);
    // An engine that is ahead of SQL (a database from a backup) must be passed as well.
    let raised = offers::Entity::update_many()
        .col_expr(offers::Column::Epoch, Expr::value(signed(sql.max(engine)) + 1))
        .filter(offers::Column::ActivityId.eq(&*key.0))
        .filter(offers::Column::SkuId.eq(&*key.1))
        .filter(offers::Column::Epoch.eq(signed(sql)))
        .exec(transaction)
        .await?;
    if raised.rows_affected == 0 {
        return Ok(None);
    }
    let row = offers::Entity::find_by_id(key).one(transaction).await?;
    row.map(Some).ok_or_else(|| DbErr::RecordNotFound(format!("offer {}", offer.key)))
}

async fn page(transaction: &Transaction, offer: &Offer, after: i64) -> Result<Vec<Row>, DbErr> {
    outbox::Entity::find()
        .filter(outbox::Column::ActivityId.eq(offer.key.activity_id.as_str()))
        .filter(outbox::Column::SkuId.eq(offer.key.sku_id.as_str()))
        .filter(outbox::Column::Id.gt(after))
        .order_by_asc(outbox::Column::Id)
        .limit(CHUNK)
        .all(transaction)
        .await
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

fn broken(error: TryFromIntError) -> Error {
    Error::Internal(Box::new(error))
}
