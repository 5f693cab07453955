//! RebuildStock: an operator has the engine filled anew from SQL, and may split the stock further.
//!
//! The number of segments is raised in the transaction that raises the epoch, so an epoch is of one
//! number: what was taken under the homes of the number before is refused by SQL as of an old epoch.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, ExprTrait},
};
use serde_json::json;

use super::{Activities, warm_up::stock_view};
use crate::{
    audit,
    database::{Transaction, finish, lock_rows},
    domain::{ActivityId, ActivityState, OfferKey, SkuId, StockView},
    entity::{activities, offers},
    error::Error,
    failpoints::failpoint,
    offer::Offer,
};

/// Offers rebuilt at the same time.
const AT_ONCE: usize = 4;

const NEEDED: &str =
    "only what was warmed up, and is not settled or past its retention, can be rebuilt";

/// What became of the number of segments.
enum Raised {
    Done,
    AsItWas,
    /// The offer has more already.
    Fewer {
        now: i32,
    },
    /// The activity is settled.
    Closed,
}

impl Activities {
    /// Rebuilds one offer or all of an activity, with `segments` segments if that is given; answers
    /// with the engine's figures afterwards.
    ///
    /// # Errors
    /// `UnknownActivity`, `UnknownOffer`; `WrongActivityState` where the engine holds nothing:
    /// before the warm-up and after the settlement; `InvalidField` for fewer segments than there
    /// are; or a store is away.
    pub async fn rebuild_stock(
        self: &Arc<Self>,
        id: &ActivityId,
        sku_id: Option<&SkuId>,
        segments: Option<u32>,
        actor: &str,
        reason: &str,
    ) -> Result<Vec<StockView>, Error> {
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
        let offers = self.to_rebuild(id, sku_id).await?;
        if let Some(segments) = segments {
            let most = offers.iter().map(|offer| offer.segments.count()).max().unwrap_or(1);
            if segments < most {
                return Err(fewer(segments, most));
            }
        }
        let detail =
            json!({ "reason": reason, "sku_id": sku_id.map(SkuId::as_str), "segments": segments });
        let entry = audit::Entry::of_activity(id, actor, "rebuild_stock", detail);
        let written = audit::write(self.database.writer(), self.database.clock(), entry).await;
        written.map_err(|error| self.sql_failed(error))?;
        if let Some(segments) = segments {
            for offer in &offers {
                self.raise_segments(&offer.key, segments, actor, reason).await?;
            }
            self.changed(id).await?;
        }
        stream::iter(self.to_rebuild(id, sku_id).await?)
            .map(|offer| async move { self.rebuild_offer(&offer).await })
            .buffered(AT_ONCE)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect()
    }

    async fn to_rebuild(
        &self,
        id: &ActivityId,
        sku_id: Option<&SkuId>,
    ) -> Result<Vec<Arc<Offer>>, Error> {
        let activity = self.catalog.activity(id).await?;
        let offers: Vec<Arc<Offer>> = match sku_id {
            Some(sku_id) => vec![activity.offer(sku_id)?],
            None => activity.offers.values().cloned().collect(),
        };
        let in_engine = offers.iter().all(|offer| offer.is_in_engine());
        if activity.state == ActivityState::Settled || !in_engine {
            return Err(Error::WrongActivityState {
                activity_id: id.to_string(),
                current: activity.state,
                needed: NEEDED,
            });
        }
        Ok(offers)
    }

    async fn raise_segments(
        &self,
        key: &OfferKey,
        segments: u32,
        actor: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let raised = self.repeat(|| self.raise_transaction(key, segments, actor, reason)).await?;
        failpoint!("after_segments_commit");
        match raised {
            Raised::Done => {
                tracing::info!(offer = %key, segments, actor, reason, "split into more segments");
                Ok(())
            }
            Raised::AsItWas => Ok(()),
            Raised::Fewer { now } => Err(fewer(segments, u32::try_from(now).unwrap_or(u32::MAX))),
            Raised::Closed => Err(Error::WrongActivityState {
                activity_id: key.activity_id.to_string(),
                current: ActivityState::Settled,
                needed: NEEDED,
            }),
        }
    }

    async fn raise_transaction(
        &self,
        key: &OfferKey,
        segments: u32,
        actor: &str,
        reason: &str,
    ) -> Result<Raised, DbErr> {
        let transaction = self.database.begin().await?;
        let raised = self.raise_in(&transaction, key, segments, actor, reason).await;
        failpoint!("before_segments_commit");
        match raised {
            Ok(nothing @ (Raised::AsItWas | Raised::Fewer { .. } | Raised::Closed)) => {
                transaction.rollback().await?;
                Ok(nothing)
            }
            raised => finish(transaction, raised).await,
        }
    }

    async fn raise_in(
        &self,
        transaction: &Transaction,
        key: &OfferKey,
        segments: u32,
        actor: &str,
        reason: &str,
    ) -> Result<Raised, DbErr> {
        let OfferKey { activity_id, sku_id } = key;
        let query = offers::Entity::find_by_id((activity_id.to_string(), sku_id.to_string()));
        let Some(offer) = lock_rows(query).one(transaction).await? else {
            return Err(DbErr::RecordNotFound(format!("offer {key}")));
        };
        let (asked, now) = (i32::try_from(segments).unwrap_or(i32::MAX), self.database.clock());
        if offer.segments >= asked {
            return Ok(match offer.segments == asked {
                true => Raised::AsItWas,
                false => Raised::Fewer { now: offer.segments },
            });
        }
        offers::Entity::update_many()
            .col_expr(offers::Column::Segments, Expr::value(asked))
            .col_expr(offers::Column::Epoch, Expr::col(offers::Column::Epoch).add(1))
            .filter(offers::Column::ActivityId.eq(activity_id.as_str()))
            .filter(offers::Column::SkuId.eq(sku_id.as_str()))
            .exec(transaction)
            .await?;
        let told = activities::Entity::update_many()
            .col_expr(activities::Column::Version, Expr::col(activities::Column::Version).add(1))
            .col_expr(activities::Column::UpdateTime, Expr::value(now.0))
            .filter(activities::Column::Id.eq(activity_id.as_str()))
            .filter(activities::Column::State.ne(activities::ActivityState::Settled))
            .exec(transaction)
            .await?;
        if told.rows_affected == 0 {
            return Ok(Raised::Closed);
        }
        let detail = json!({
            "before": offer.segments,
            "segments": asked,
            "epoch": offer.epoch + 1,
            "reason": reason,
        });
        let entry = audit::Entry::of_offer(key, actor, "raise_segments", detail);
        audit::write(transaction, now, entry).await?;
        Ok(Raised::Done)
    }

    async fn rebuild_offer(&self, offer: &Arc<Offer>) -> Result<StockView, Error> {
        self.recovery.rebuild_anyway(offer, "operator").await?;
        let levels = offer.levels().await;
        let levels = levels.map_err(|error| self.engine_failed(error))?;
        let frozen = |_| Error::OfferFrozen(offer.key.clone());
        Ok(stock_view(offer, &levels.map_err(frozen)?))
    }
}

fn fewer(asked: u32, now: u32) -> Error {
    Error::invalid(
        "segments",
        format!("must be at least {now}, as many as there are (it is {asked})"),
    )
}
