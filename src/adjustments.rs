//! More or fewer units of an offer while it sells: the order of engine and SQL.
//!
//! More: SQL raises the total, then the engine puts the units on sale. Fewer: the engine sets them
//! aside, SQL lowers the total, then the engine forgets them. So what is on sale in the engine is
//! never more than SQL has. What breaks off in between is finished by the sweeper: an adjustment
//! that SQL has decided is followed, a set-aside that it has not is undone.
//!
//! **Invariant:** SQL decides about a request once, under its id. The engine acts on it once, and only
//! at the epoch of that transaction: at a lower one it can't be right yet, and a rebuild to a higher
//! one has counted it. An undo is stored as `cancelled` before anything is put back, so that a late
//! commit finds it there.

use std::{sync::Arc, time::Duration};

use sea_orm::{
    ActiveValue::Set,
    ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect,
    sea_query::{Expr, ExprTrait},
};
use serde_json::json;

use crate::{
    admission::catalog::Catalog,
    audit,
    database::{self, Database, SqlFault, Transaction, classify, finish, lock_rows},
    domain::{ActivityId, MAX_TOTAL, OfferKey, RequestId, SkuId},
    engine::{
        EngineError,
        batcher::Segment,
        scripts::{Aside, Followed},
    },
    entity::{activities, adjustments, adjustments::AdjustmentState, offers},
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    recovery::Recovery,
};

pub use crate::entity::adjustments::Model as Adjustment;

/// Adjustments finished in one pass of the sweeper.
const AT_ONCE: u64 = 100;

/// The states of an activity whose stock may be adjusted.
pub const OPEN: [activities::ActivityState; 3] = [
    activities::ActivityState::Scheduled,
    activities::ActivityState::Active,
    activities::ActivityState::Paused,
];

/// What SQL is asked to decide.
#[derive(Debug)]
pub struct Proposal<'a> {
    pub offer: &'a OfferKey,
    pub request_id: &'a RequestId,
    pub delta: i64,
    pub step: Step,
    pub actor: &'a str,
    pub reason: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// More units, which are not on sale yet.
    Add,
    /// Fewer: they were set aside under this epoch.
    TakeAway { epoch: u64 },
    /// Never; so much was possible when the engine was at this epoch.
    Cancel { epoch: u64, possible: i64 },
}

/// What SQL decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// This is stored, by this call or by an earlier one under the same id.
    Stored(Adjustment),
    /// SQL is at another epoch than the set-aside; nothing is stored.
    OtherEpoch {
        sql: u64,
    },
    /// The activity is in another state, or the offer is cold; nothing is stored.
    NotOpen,
    UnknownOffer,
}

/// What is stored under this id.
///
/// # Errors
/// Those of any read.
pub async fn stored(
    database: &Database,
    request_id: &RequestId,
) -> Result<Option<Adjustment>, DbErr> {
    adjustments::Entity::find_by_id(request_id.as_str()).one(database.reader()).await
}

/// Has SQL decide, in one transaction. What was decided before stays, whatever is asked now.
///
/// # Errors
/// Those of any transaction; after an unknown one it may be decided.
pub async fn decide(database: &Database, proposal: &Proposal<'_>) -> Result<Verdict, DbErr> {
    database::repeat(|| decide_once(database, proposal)).await
}

async fn decide_once(database: &Database, proposal: &Proposal<'_>) -> Result<Verdict, DbErr> {
    let transaction = database.begin().await?;
    let decided = decide_in(&transaction, database, proposal).await;
    reach_commit(proposal.step);
    let verdict: Result<Verdict, DbErr> = match decided {
        Ok((verdict, true)) => finish(transaction, Ok(verdict)).await,
        Ok((verdict, false)) => {
            transaction.rollback().await?;
            return Ok(verdict);
        }
        // The id was stored in between, for another offer.
        Err(error) if classify(&error) == SqlFault::Data => {
            let _ = transaction.rollback().await;
            return match stored(database, proposal.request_id).await? {
                Some(row) => Ok(Verdict::Stored(row)),
                None => Err(error),
            };
        }
        Err(error) => finish(transaction, Err(error)).await,
    };
    if verdict.is_ok() {
        leave_commit(proposal.step);
    }
    verdict
}

fn reach_commit(step: Step) {
    match step {
        Step::Add | Step::TakeAway { .. } => {
            failpoint!("before_adjustment_commit");
        }
        Step::Cancel { .. } => {
            failpoint!("before_undo_commit");
        }
    }
}

fn leave_commit(step: Step) {
    match step {
        Step::Add | Step::TakeAway { .. } => {
            failpoint!("after_adjustment_commit");
        }
        Step::Cancel { .. } => {
            failpoint!("after_undo_commit");
        }
    }
}

/// The verdict, and whether there is anything to commit. The lock on the offer lets one call at a
/// time decide about it, and a rebuild's snapshot wait.
async fn decide_in(
    transaction: &Transaction,
    database: &Database,
    proposal: &Proposal<'_>,
) -> Result<(Verdict, bool), DbErr> {
    let OfferKey { activity_id, sku_id } = proposal.offer;
    let query = offers::Entity::find_by_id((activity_id.to_string(), sku_id.to_string()));
    let Some(offer) = lock_rows(query).one(transaction).await? else {
        return Ok((Verdict::UnknownOffer, false));
    };
    let request_id = proposal.request_id.as_str();
    if let Some(row) = adjustments::Entity::find_by_id(request_id).one(transaction).await? {
        return Ok((Verdict::Stored(row), false));
    }
    let now = database.clock();
    let mut row = Adjustment {
        request_id: request_id.to_owned(),
        activity_id: activity_id.to_string(),
        sku_id: sku_id.to_string(),
        delta: proposal.delta,
        epoch: offer.epoch,
        state: AdjustmentState::Cancelled,
        create_time: now.0,
        possible: 0,
    };
    match proposal.step {
        Step::Add => {
            if !is_open(transaction, &offer, now.0).await? {
                return Ok((Verdict::NotOpen, false));
            }
            row.possible = Ord::min(proposal.delta, to_signed(MAX_TOTAL) - offer.total);
        }
        Step::TakeAway { epoch } if to_signed(epoch) != offer.epoch => {
            let sql = u64::try_from(offer.epoch).unwrap_or(0);
            return Ok((Verdict::OtherEpoch { sql }, false));
        }
        Step::TakeAway { .. } => {
            // Units are set aside for it already, so a refusal is stored before they are put back.
            if is_open(transaction, &offer, now.0).await? {
                let fewest = Ord::max(offer.reserved, 1);
                row.possible = Ord::max(proposal.delta, Ord::min(fewest - offer.total, 0));
            }
        }
        Step::Cancel { epoch, possible } => {
            row.epoch = to_signed(epoch);
            row.possible = possible;
        }
    }
    let applies = row.possible == proposal.delta && !matches!(proposal.step, Step::Cancel { .. });
    if applies {
        row.state = AdjustmentState::Pending;
        offers::Entity::update_many()
            .col_expr(offers::Column::Total, Expr::col(offers::Column::Total).add(proposal.delta))
            .filter(offers::Column::ActivityId.eq(activity_id.as_str()))
            .filter(offers::Column::SkuId.eq(sku_id.as_str()))
            .exec(transaction)
            .await?;
    }
    adjustments::Entity::insert(to_insert(&row)).exec_without_returning(transaction).await?;
    let detail = json!({
        "request_id": row.request_id,
        "delta": row.delta,
        "applied": applies,
        "possible": row.possible,
        "total": offer.total + if applies { row.delta } else { 0 },
        "epoch": row.epoch,
        "reason": proposal.reason,
    });
    let entry = audit::Entry::of_offer(proposal.offer, proposal.actor, "adjust_stock", detail);
    audit::write(transaction, now, entry).await?;
    Ok((Verdict::Stored(row), true))
}

/// Whether the offer is warm and its activity not over. The activity goes to another version, by
/// which every server sees that the total is another.
async fn is_open(
    transaction: &Transaction,
    offer: &offers::Model,
    now_ms: i64,
) -> Result<bool, DbErr> {
    if offer.warm_time.is_none() {
        return Ok(false);
    }
    let told = activities::Entity::update_many()
        .col_expr(activities::Column::Version, Expr::col(activities::Column::Version).add(1))
        .col_expr(activities::Column::UpdateTime, Expr::value(now_ms))
        .filter(activities::Column::Id.eq(offer.activity_id.as_str()))
        .filter(activities::Column::State.is_in(OPEN))
        .exec(transaction)
        .await?;
    Ok(told.rows_affected == 1)
}

fn to_insert(row: &Adjustment) -> adjustments::ActiveModel {
    adjustments::ActiveModel {
        request_id: Set(row.request_id.clone()),
        activity_id: Set(row.activity_id.clone()),
        sku_id: Set(row.sku_id.clone()),
        delta: Set(row.delta),
        epoch: Set(row.epoch),
        state: Set(row.state),
        create_time: Set(row.create_time),
        possible: Set(row.possible),
    }
}

/// Has the engine follow what SQL decided, and writes down that it did. Harmless when repeated, by
/// whomever.
///
/// # Errors
/// `OfferFrozen` until the offer was rebuilt; or a store is away.
pub async fn follow(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    row: &Adjustment,
) -> Result<(), Error> {
    let request_id = request_of(row)?;
    let epoch = u64::try_from(row.epoch).unwrap_or(0);
    match row.state {
        AdjustmentState::Pending => {}
        AdjustmentState::Applied | AdjustmentState::Cancelled => return Ok(()),
    }
    if !offer.is_forgotten() {
        // Its home is that of the request, under the epoch of the row or any other.
        let scripts = &offer.segments.home_of(&row.request_id).scripts;
        let followed = if row.delta > 0 {
            scripts.add_units(epoch, &request_id, row.delta.unsigned_abs()).await
        } else {
            scripts.forget_aside(epoch, &request_id).await
        };
        failpoint!("after_adjustment_script");
        must_follow(recovery, offer, followed)?;
    }
    let applied = adjustments::Entity::update_many()
        .col_expr(adjustments::Column::State, Expr::value(AdjustmentState::Applied))
        .filter(adjustments::Column::RequestId.eq(row.request_id.as_str()))
        .filter(adjustments::Column::State.eq(AdjustmentState::Pending))
        .exec(recovery.database.writer())
        .await;
    applied.map_err(|error| recovery.sql_failed(error))?;
    failpoint!("after_adjustment_applied");
    Ok(())
}

/// Settles what was set aside under `epoch`, now that SQL holds `row` under its id.
///
/// # Errors
/// As [`follow`].
pub async fn settle_aside(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    epoch: u64,
    request_id: &RequestId,
    row: &Adjustment,
) -> Result<(), Error> {
    let home = offer.segments.home_of(request_id.as_str());
    let is_its_own = row.activity_id == offer.key.activity_id.as_str()
        && row.sku_id == offer.key.sku_id.as_str()
        && row.state != AdjustmentState::Cancelled;
    if is_its_own && row.epoch == to_signed(epoch) {
        return follow(recovery, offer, row).await;
    }
    // A late second set-aside; a rebuild has counted what SQL holds.
    let back = home.scripts.put_back(epoch, request_id).await;
    failpoint!("after_put_back_script");
    must_follow(recovery, offer, back)?;
    if is_its_own { follow(recovery, offer, row).await } else { Ok(()) }
}

fn must_follow(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    followed: Result<Followed, EngineError>,
) -> Result<(), Error> {
    match followed.map_err(|error| recovery.engine_failed(error))? {
        Followed::Done => Ok(()),
        Followed::Retry { reason } => {
            tracing::debug!(offer = %offer.key, reason, "the engine can't follow an adjustment now");
            recovery.rebuild(offer);
            Err(Error::OfferFrozen(offer.key.clone()))
        }
        Followed::Contradiction { stamp } => {
            recovery.freeze_and_rebuild(offer, stamp.epoch, "adjustment");
            Err(Error::OfferFrozen(offer.key.clone()))
        }
    }
}

/// Has the engine follow adjustments that broke off behind their commit; answers how many.
///
/// # Errors
/// A store is away; what was not finished is due again.
pub async fn finish_pending(recovery: &Arc<Recovery>, catalog: &Catalog) -> Result<usize, Error> {
    let rows = adjustments::Entity::find()
        .filter(adjustments::Column::State.eq(AdjustmentState::Pending))
        .order_by_asc(adjustments::Column::CreateTime)
        .limit(AT_ONCE)
        .all(recovery.database.reader())
        .await
        .map_err(|error| recovery.sql_failed(error))?;
    let (mut finished, mut failed) = (0, None);
    for row in rows {
        let done = async {
            let offer = catalog.offer(&offer_of(&row)?).await?;
            follow(recovery, &offer, &row).await
        };
        match done.await {
            Ok(()) => finished += 1,
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(finished), Err)
}

/// Settles what was set aside in this segment before `grace`: what SQL does not know is undone. The
/// grace only saves a slow call from being cancelled.
///
/// # Errors
/// As [`follow`].
pub async fn sweep_asides(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    segment: &Segment,
    grace: Duration,
) -> Result<usize, Error> {
    let asides = segment.scripts.asides().await;
    let Ok((epoch, asides)) = asides.map_err(|error| recovery.engine_failed(error))? else {
        // A rebuild drops all that is set aside.
        return Ok(0);
    };
    let before = recovery.database.clock().minus(grace);
    let mut settled = 0;
    for Aside { request_id, units, time } in asides {
        if time >= before {
            continue;
        }
        let delta = -to_signed(units);
        let undo = Proposal {
            offer: &offer.key,
            request_id: &request_id,
            delta,
            step: Step::Cancel { epoch, possible: delta },
            actor: audit::SYSTEM,
            reason: "it broke off before it was recorded",
        };
        let verdict = decide(&recovery.database, &undo).await;
        match verdict.map_err(|error| recovery.sql_failed(error))? {
            Verdict::Stored(row) => {
                settle_aside(recovery, offer, epoch, &request_id, &row).await?;
                settled += 1;
            }
            Verdict::OtherEpoch { .. } | Verdict::NotOpen | Verdict::UnknownOffer => {}
        }
    }
    Ok(settled)
}

fn request_of(row: &Adjustment) -> Result<RequestId, Error> {
    RequestId::new(&row.request_id)
        .map_err(|error| Error::internal(format!("adjustment {}: {error}", row.request_id)))
}

fn offer_of(row: &Adjustment) -> Result<OfferKey, Error> {
    let broken = |error| Error::internal(format!("adjustment {}: {error}", row.request_id));
    Ok(OfferKey {
        activity_id: ActivityId::new(&row.activity_id).map_err(broken)?,
        sku_id: SkuId::new(&row.sku_id).map_err(broken)?,
    })
}

fn to_signed(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}
