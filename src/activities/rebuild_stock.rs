//! RebuildStock: an operator has the engine filled anew from SQL.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use serde_json::json;

use super::{Activities, warm_up::stock_view};
use crate::{
    audit,
    domain::{ActivityId, ActivityState, SkuId, StockView},
    error::Error,
    offer::Offer,
};

/// Offers rebuilt at the same time.
const AT_ONCE: usize = 4;

impl Activities {
    /// Rebuilds one offer or all of an activity; answers with the engine's figures afterwards.
    ///
    /// # Errors
    /// `UnknownActivity`, `UnknownOffer`; `WrongActivityState` where the engine holds nothing:
    /// before the warm-up and after the settlement; or a store is away.
    pub async fn rebuild_stock(
        self: &Arc<Self>,
        id: &ActivityId,
        sku_id: Option<&SkuId>,
        actor: &str,
        reason: &str,
    ) -> Result<Vec<StockView>, Error> {
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
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
                needed: "only what was warmed up, and is not settled or past its retention, can \
                         be rebuilt",
            });
        }
        let detail = json!({ "reason": reason, "sku_id": sku_id.map(SkuId::as_str) });
        let entry = audit::Entry::of_activity(id, actor, "rebuild_stock", detail);
        let written = audit::write(self.database.writer(), self.database.clock(), entry).await;
        written.map_err(|error| self.sql_failed(error))?;
        stream::iter(offers)
            .map(|offer| async move { self.rebuild_offer(&offer).await })
            .buffered(AT_ONCE)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect()
    }

    async fn rebuild_offer(&self, offer: &Arc<Offer>) -> Result<StockView, Error> {
        self.recovery.rebuild_anyway(offer, "operator").await?;
        let levels = offer.segment.scripts.levels().await;
        let levels = levels.map_err(|error| self.engine_failed(error))?;
        let frozen = |_| Error::OfferFrozen(offer.key.clone());
        Ok(stock_view(offer, &levels.map_err(frozen)?))
    }
}
