//! Settle: the end of an activity. Its books are closed, and the engine forgets it.
//!
//! Only what is drained and reconciled is settled. The transaction raises the epoch of every offer,
//! so that no insert of a late call follows; what such a call took is removed with the rest.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, PaginatorTrait, QueryFilter,
    sea_query::{Expr, ExprTrait},
};
use serde_json::json;

use super::Activities;
use crate::{
    admission::catalog::Activity,
    audit,
    database::{Transaction, finish},
    domain::{ActivityId, ActivityState, ActivityView, ReconcileReport},
    engine::locks,
    entity::{
        activities, adjustments, adjustments::AdjustmentState, offers, outbox, outbox::OutboxState,
    },
    error::Error,
    failpoints::failpoint,
    reconcile,
};

/// Segments removed at the same time.
const AT_ONCE: usize = 32;
const NEEDED: &str = "only an activity that has ended can be settled";

/// What a settlement found in SQL.
enum InSql {
    Settled,
    WrongState,
    NotDrained(String),
}

impl Activities {
    /// `ENDED → SETTLED`: stores the report of a last comparison, and removes the activity from the
    /// engine.
    ///
    /// # Errors
    /// `WrongActivityState`; `NotDrained` says what is still to be done; `InProgress`; or a store is
    /// away.
    pub async fn settle(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
        reason: &str,
    ) -> Result<ActivityView, Error> {
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
        let activity = self.catalog.activity(id).await?;
        if activity.state != ActivityState::Ended {
            if activity.state == ActivityState::Settled {
                // A server may have died between the commit and this.
                self.purge(&activity).await?;
            }
            return Err(wrong_state(&activity));
        }
        let lock = self.locks.acquire(&format!("settle:{id}"), locks::WAIT).await;
        let lock = lock.map_err(|error| self.engine_failed(error))?;
        let _lock = lock.ok_or(Error::InProgress("the settlement of this activity"))?;

        let not_drained =
            |detail: String| Error::NotDrained { activity_id: id.to_string(), detail };
        let report = self.reconciler.compare(&activity).await?;
        if let Some(open) = open_work(&report) {
            return Err(not_drained(open));
        }
        match self.repeat(|| self.settle_transaction(&activity, &report, actor, reason)).await? {
            InSql::Settled => {}
            InSql::WrongState => {
                self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
                return Err(wrong_state(&*self.catalog.activity(id).await?));
            }
            InSql::NotDrained(detail) => return Err(not_drained(detail)),
        }
        failpoint!("after_settlement_commit");
        tracing::info!(activity = %id, actor, reason, "settled");
        self.changed(id).await?;
        self.purge(&*self.catalog.activity(id).await?).await?;
        self.get(id).await
    }

    /// Removes from the engine what a settlement left there when its server died. What is not found
    /// by anybody goes with the expiry of its keys.
    ///
    /// # Errors
    /// A store is away.
    pub async fn purge_settled(self: &Arc<Self>) -> Result<(), Error> {
        let settled = activities::Entity::find()
            .filter(activities::Column::State.eq(activities::ActivityState::Settled))
            .all(self.database.reader())
            .await?;
        let now = self.database.clock().0;
        for row in settled {
            let forgotten = row.end_time.saturating_add(row.retention_s.saturating_mul(1_000));
            if let Ok(id) = ActivityId::new(&row.id)
                && forgotten > now
            {
                self.catalog.refresh_one(&id).await?;
                self.purge(&*self.catalog.activity(&id).await?).await?;
            }
        }
        Ok(())
    }

    async fn purge(&self, activity: &Activity) -> Result<(), Error> {
        let segments = activity.offers.values().flat_map(|offer| {
            let epoch = offer.epoch();
            offer.segments.all().iter().map(move |segment| (segment.clone(), epoch))
        });
        let purged: Vec<bool> = stream::iter(segments.collect::<Vec<_>>())
            .map(|(segment, epoch)| async move { segment.scripts.purge(epoch).await })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
            .map_err(|error| self.engine_failed(error))?;
        if purged.contains(&false) {
            tracing::error!(activity = %activity.id, "the engine is ahead of a settled activity");
        }
        Ok(())
    }

    async fn settle_transaction(
        &self,
        activity: &Activity,
        report: &ReconcileReport,
        actor: &str,
        reason: &str,
    ) -> Result<InSql, DbErr> {
        let transaction = self.database.begin().await?;
        let settled = self.settle_in(&transaction, activity, report, actor, reason).await;
        failpoint!("before_settlement_commit");
        match settled {
            Ok(refused @ (InSql::WrongState | InSql::NotDrained(_))) => {
                transaction.rollback().await?;
                Ok(refused)
            }
            settled => finish(transaction, settled).await,
        }
    }

    async fn settle_in(
        &self,
        transaction: &Transaction,
        activity: &Activity,
        report: &ReconcileReport,
        actor: &str,
        reason: &str,
    ) -> Result<InSql, DbErr> {
        let id = activity.id.as_str();
        let now = self.database.clock();
        // Locks the offers: an insert or a release has committed before, or waits; then the insert
        // meets the new epoch and the release the new state.
        offers::Entity::update_many()
            .col_expr(offers::Column::Epoch, Expr::col(offers::Column::Epoch).add(1))
            .filter(offers::Column::ActivityId.eq(id))
            .exec(transaction)
            .await?;
        if let Some(open) = open_rows(transaction, id).await? {
            return Ok(InSql::NotDrained(open));
        }
        let moved = activities::Entity::update_many()
            .col_expr(activities::Column::State, Expr::value(activities::ActivityState::Settled))
            .col_expr(activities::Column::Version, Expr::col(activities::Column::Version).add(1))
            .col_expr(activities::Column::UpdateTime, Expr::value(now.0))
            .filter(activities::Column::Id.eq(id))
            .filter(activities::Column::State.eq(activities::ActivityState::Ended))
            .exec(transaction)
            .await?;
        if moved.rows_affected != 1 {
            return Ok(InSql::WrongState);
        }
        let detail = json!({
            "to": ActivityState::Settled.as_str(),
            "reason": reason,
            "report": reconcile::audited(report),
        });
        let entry = audit::Entry::of_activity(&activity.id, actor, "settle_activity", detail);
        audit::write(transaction, now, entry).await?;
        Ok(InSql::Settled)
    }
}

fn wrong_state(activity: &Activity) -> Error {
    Error::WrongActivityState {
        activity_id: activity.id.to_string(),
        current: activity.state,
        needed: NEEDED,
    }
}

/// What the comparison shows to be in flight or wrong, as a sentence.
fn open_work(report: &ReconcileReport) -> Option<String> {
    listed([
        (report.unacked, "reservations in flight to the outbox"),
        (report.pending, "outbox rows on their way to orders"),
        (report.releasing, "outbox rows on their way back to the engine"),
        (report.dead, "dead letters, to be retried or discarded"),
        (report.difference_count, "differences, which `seckill reconcile` shows"),
    ])
}

/// What SQL alone knows to be open, holds that are not over among it.
async fn open_rows(transaction: &Transaction, id: &str) -> Result<Option<String>, DbErr> {
    let rows = || outbox::Entity::find().filter(outbox::Column::ActivityId.eq(id));
    let in_state = |state| rows().filter(outbox::due(state)).count(transaction);
    let holds = rows().filter(outbox::expiring(OutboxState::Done));
    let adjusting = adjustments::Entity::find()
        .filter(adjustments::Column::ActivityId.eq(id))
        .filter(adjustments::Column::State.eq(AdjustmentState::Pending));
    Ok(listed([
        (in_state(OutboxState::Pending).await?, "outbox rows on their way to orders"),
        (in_state(OutboxState::Releasing).await?, "outbox rows on their way back to the engine"),
        (in_state(OutboxState::Dead).await?, "dead letters, to be retried or discarded"),
        (holds.count(transaction).await?, "holds that are neither confirmed nor over"),
        (adjusting.count(transaction).await?, "adjustments on their way to the engine"),
    ]))
}

fn listed<const N: usize>(counts: [(u64, &str); N]) -> Option<String> {
    let some: Vec<String> = counts
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    (!some.is_empty()).then(|| some.join(", "))
}
