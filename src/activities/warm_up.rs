//! Warm-up: puts an activity's offers into the engine, reads them back, and only then says so.
//!
//! **Invariant (I10):** a sale under way is never touched. A key that exists is never changed; a
//! lost engine is rebuilt from SQL, never refilled with the total.

use std::sync::Arc;

use futures_util::{StreamExt, future::join_all, stream};
use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, ExprTrait},
};

use super::Activities;
use crate::{
    admission::catalog::Activity,
    audit,
    database::finish,
    domain::{ActivityId, ActivityState, StockView, WarmUpReport},
    engine::{
        EngineError, locks,
        scripts::{Refusal, WarmedUp},
        segments::{OfferLevels, share},
    },
    entity::{activities, offers},
    error::Error,
    failpoints::failpoint,
    offer::Offer,
};

/// Offers warmed up at the same time.
const AT_ONCE: usize = 32;

const NEEDED: &str = "only a scheduled activity can be warmed up";

impl Activities {
    /// Warms up every offer of a scheduled activity. Repeating it changes nothing.
    ///
    /// # Errors
    /// `WrongActivityState`; `WarmupMismatch` names the offer and what differs; or a store is away.
    pub async fn warm_up(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
    ) -> Result<WarmUpReport, Error> {
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
        let activity = self.catalog.activity(id).await?;
        let already_warm = activity.is_warm();
        match activity.state {
            ActivityState::Scheduled => {}
            ActivityState::Active | ActivityState::Paused if already_warm => {}
            current @ (ActivityState::PendingReview
            | ActivityState::Active
            | ActivityState::Paused
            | ActivityState::Ended
            | ActivityState::Settled) => {
                return Err(Error::WrongActivityState {
                    activity_id: id.to_string(),
                    current,
                    needed: NEEDED,
                });
            }
        }
        let lock = self.locks.acquire(&format!("warm_up:{id}"), locks::WAIT).await;
        let lock = lock.map_err(|error| self.engine_failed(error))?;
        let _lock = lock.ok_or(Error::InProgress("the warm-up of this activity"))?;
        let stocks: Vec<StockView> = stream::iter(activity.offers.values().cloned())
            .map(|offer| async move { self.warm_up_offer(&offer).await })
            .buffered(AT_ONCE)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect::<Result<_, _>>()?;
        if !already_warm {
            let warmed = self.repeat(|| self.set_warm(&activity, actor)).await?;
            failpoint!("after_warm_commit");
            self.changed(id).await?;
            let current = self.catalog.activity(id).await?;
            // Another call may have been first, and the sale begun; or it was ended meanwhile.
            if !warmed && !current.is_warm() {
                return Err(Error::WrongActivityState {
                    activity_id: id.to_string(),
                    current: current.state,
                    needed: NEEDED,
                });
            }
            tracing::info!(activity = %id, offers = stocks.len(), actor, "warmed up");
        }
        Ok(WarmUpReport { activity: self.get(id).await?, stocks, already_warm })
    }

    async fn warm_up_offer(&self, offer: &Arc<Offer>) -> Result<StockView, Error> {
        let mismatch = |detail: String| Error::WarmupMismatch { offer: offer.key.clone(), detail };
        let count = offer.segments.count();
        // Which one does not match, where there are several.
        let of = |number: u32| match count {
            1 => String::new(),
            _ => format!("segment {number}: "),
        };
        if !offer.is_warm() {
            let epoch = offer.epoch();
            let warmed = join_all(offer.segments.all().iter().map(|segment| {
                let units = share(offer.total, count, segment.number);
                segment.scripts.warmup(epoch, units, units, offer.keys_expire)
            }));
            let warmed = warmed.await;
            failpoint!("after_warmup_script");
            let mut is_left_over = false;
            for (number, warmed) in (0..count).zip(warmed) {
                match warmed.map_err(|error| self.engine_failed(error))? {
                    WarmedUp::Written | WarmedUp::Already => {}
                    WarmedUp::Mismatch { what, found, .. } if left_over(&what, &found, epoch) => {
                        is_left_over = true;
                    }
                    WarmedUp::Mismatch { what, found, asked } => {
                        let of = of(number);
                        return Err(mismatch(format!(
                            "{of}{what} is {found} where {asked} belongs"
                        )));
                    }
                }
            }
            if is_left_over {
                // The same way back as for any offer.
                self.recovery.rebuild_now(offer).await?;
            }
        }
        // Read back what was written, whoever wrote it.
        let read = offer.segments.levels_of_each().await;
        let all = match read.map_err(|error| self.engine_failed(error))? {
            Ok(all) => all,
            Err(Refusal::NotWarmed | Refusal::Frozen { .. }) if offer.is_warm() => {
                self.recovery.rebuild(offer);
                return Err(Error::OfferFrozen(offer.key.clone()));
            }
            Err(refusal) => return Err(mismatch(format!("it reads back as {refusal:?}"))),
        };
        // A warm offer may be in the middle of an adjustment, and its units move.
        for (number, levels) in (0..count).zip(&all).filter(|_| !offer.is_warm()) {
            let (of, units) = (of(number), share(offer.total, count, number));
            if u64::try_from(levels.total) != Ok(units) {
                let total = levels.total;
                return Err(mismatch(format!("{of}total is {total} where {units} belongs")));
            }
            if levels.stock != units || levels.reservations != 0 {
                return Err(mismatch(format!(
                    "{of}stock is {} where {units} belongs, with {} reservations",
                    levels.stock, levels.reservations
                )));
            }
        }
        match OfferLevels::of(&all) {
            Some(levels) => Ok(stock_view(offer, &levels)),
            None => {
                self.recovery.rebuild(offer);
                Err(Error::OfferFrozen(offer.key.clone()))
            }
        }
    }

    /// The whole activity is warm, or nothing of it: false when it was ended meanwhile.
    async fn set_warm(&self, activity: &Activity, actor: &str) -> Result<bool, DbErr> {
        let id = activity.id.as_str();
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let written = async {
            offers::Entity::update_many()
                .col_expr(offers::Column::WarmTime, Expr::value(now.0))
                .filter(offers::Column::ActivityId.eq(id))
                .filter(offers::Column::WarmTime.is_null())
                .exec(&transaction)
                .await?;
            let moved = activities::Entity::update_many()
                .col_expr(
                    activities::Column::Version,
                    Expr::col(activities::Column::Version).add(1),
                )
                .col_expr(activities::Column::UpdateTime, Expr::value(now.0))
                .filter(activities::Column::Id.eq(id))
                .filter(activities::Column::State.eq(activities::ActivityState::Scheduled))
                .exec(&transaction)
                .await?;
            if moved.rows_affected == 0 {
                return Ok(false);
            }
            let detail = serde_json::json!({ "offers": activity.offers.len() });
            let entry = audit::Entry::of_activity(&activity.id, actor, "warm_up", detail);
            audit::write(&transaction, now, entry).await?;
            Ok(true)
        }
        .await;
        failpoint!("before_warm_commit");
        if matches!(written, Ok(false)) {
            transaction.rollback().await?;
            return Ok(false);
        }
        finish(transaction, written).await
    }

    pub(super) fn engine_failed(&self, error: EngineError) -> Error {
        match &error {
            EngineError::NotRun(why) | EngineError::Unknown(why) => self.engine_circuit.trip(why),
            EngineError::Full(_) | EngineError::PartAway(_) | EngineError::Script(_) => {}
        }
        error.into()
    }
}

/// Whether the keys are those of an earlier warm-up: from before the engine restarted, or from
/// before a rebuild that it lost.
fn left_over(what: &str, found: &str, epoch: u64) -> bool {
    match what {
        "server" | "frozen" => true,
        "epoch" => found.parse().is_ok_and(|found: u64| found < epoch),
        _ => false,
    }
}

/// The engine's figures of an offer that sells.
pub(super) fn stock_view(offer: &Offer, levels: &OfferLevels) -> StockView {
    StockView {
        sku_id: offer.key.sku_id.to_string(),
        total: levels.offered(),
        remaining: levels.stock,
        reserved: levels.offered().saturating_sub(levels.stock),
        unacked: levels.unacked,
        epoch: levels.stamp.epoch,
        revision: levels.stamp.revision,
        frozen: None,
    }
}
