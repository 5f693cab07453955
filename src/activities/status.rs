//! How much work is on its way between the engine and the orders.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use sea_orm::{
    ColumnTrait, DbErr, EntityTrait, FromQueryResult, PaginatorTrait, QueryFilter, QueryOrder,
    QuerySelect,
};

use super::Activities;
use crate::{
    admission::catalog::Phase,
    database::Backend,
    domain::{ActivityId, OfferPipeline, PipelineStatus, TimeMs},
    engine::{scripts::Refusal, segments::OfferLevels},
    entity::{offers, orders, orders::OrderState, outbox, outbox::OutboxState},
    error::Error,
    metrics::{EngineDepth, MOST_OFFERS, OfferDepth, OutboxDepth},
    offer::Offer,
};

/// Offers asked at the same time.
const AT_ONCE: usize = 32;

#[derive(Debug, FromQueryResult)]
struct Count {
    sku_id: String,
    state: OutboxState,
    rows: i64,
}

#[derive(Debug, FromQueryResult)]
struct OrderCount {
    sku_id: String,
    rows: i64,
}

fn unacked(levels: &HashMap<String, Option<OfferLevels>>) -> u64 {
    levels.values().flatten().map(|levels| levels.unacked).sum()
}

impl Activities {
    /// The pipeline as a whole or of one activity. A store that is away leaves its figures out.
    ///
    /// # Errors
    /// `UnknownActivity`.
    pub async fn pipeline_status(
        self: &Arc<Self>,
        id: Option<&ActivityId>,
    ) -> Result<PipelineStatus, Error> {
        let mut status = PipelineStatus {
            engine_kind: self.engine.kind(),
            database_kind: match self.database.backend() {
                Backend::Sqlite => "sqlite",
                Backend::Postgres => "postgresql",
                Backend::MySql => "mysql",
            },
            ..PipelineStatus::default()
        };
        let offers: Vec<Arc<Offer>> = match id {
            Some(id) => self.catalog.activity(id).await?.offers.values().cloned().collect(),
            None => self
                .catalog
                .all()
                .iter()
                .flat_map(|activity| activity.offers.values().cloned().collect::<Vec<_>>())
                .collect(),
        };
        let levels = self.levels_of(&offers).await;
        status.engine_healthy = levels.is_some();
        status.unacked = levels.as_ref().map(unacked);
        match self.sql_figures(id, &mut status).await {
            Ok(()) => status.database_healthy = true,
            Err(error) => tracing::warn!(%error, "the database did not tell the pipeline's state"),
        }
        if let (Some(id), true) = (id, status.database_healthy) {
            let levels = levels.unwrap_or_default();
            match self.offer_figures(id, &levels).await {
                Ok(offers) => status.offers = offers,
                Err(error) => {
                    tracing::warn!(%error, "the database did not tell the offers' state");
                    status.database_healthy = false;
                }
            }
        }
        Ok(status)
    }

    /// What the engine has not heard to be in SQL, and what is left of the offers on sale: for the
    /// metrics. `None` while the engine is away.
    pub async fn engine_depth(self: &Arc<Self>) -> Option<EngineDepth> {
        if self.engine_circuit.is_open() {
            return None;
        }
        let all = self.catalog.all();
        let offers: Vec<Arc<Offer>> =
            all.iter().flat_map(|activity| activity.offers.values().cloned()).collect();
        let levels = self.levels_of(&offers).await?;
        let now = self.database.clock();
        let mut on_sale: Vec<OfferDepth> = Vec::new();
        let open = all.iter().filter(|activity| activity.phase(now) == Phase::Open);
        for offer in open.flat_map(|activity| activity.offers.values()) {
            if let Some(Some(OfferLevels { total, stock, .. })) = levels.get(&offer.key.to_string())
            {
                let offer = offer.key.clone();
                on_sale.push(OfferDepth { offer, total: *total, remaining: *stock });
            }
        }
        on_sale.sort_by(|a, b| a.offer.cmp(&b.offer));
        on_sale.truncate(MOST_OFFERS);
        let oldest = levels.values().flatten().filter_map(|levels| levels.oldest_unacked).min();
        Some(EngineDepth {
            unacked: unacked(&levels),
            unacked_age: oldest.map(|taken| now.since(taken)).unwrap_or_default(),
            offers: on_sale,
        })
    }

    /// What lies between the outbox and the orders: for the metrics.
    ///
    /// # Errors
    /// The database is away.
    pub async fn outbox_depth(&self) -> Result<OutboxDepth, Error> {
        let figures = self.unfinished(self.database.clock()).await;
        figures.map_err(|error| self.sql_failed(error))
    }

    async fn unfinished(&self, now: TimeMs) -> Result<OutboxDepth, DbErr> {
        let reader = self.database.reader();
        let rows = |state| outbox::Entity::find().filter(outbox::due(state));
        let mut depth = OutboxDepth {
            pending: rows(OutboxState::Pending).count(reader).await?,
            releasing: rows(OutboxState::Releasing).count(reader).await?,
            dead: rows(OutboxState::Dead).count(reader).await?,
            lag: Duration::ZERO,
        };
        for state in [OutboxState::Pending, OutboxState::Releasing] {
            let first = rows(state)
                .filter(outbox::Column::NextAttemptTime.lte(now.0))
                .order_by_asc(outbox::Column::NextAttemptTime)
                .order_by_asc(outbox::Column::Id)
                .one(reader)
                .await?;
            let lag = first.map(|row| now.since(TimeMs(row.next_attempt_time)));
            depth.lag = depth.lag.max(lag.unwrap_or_default());
        }
        Ok(depth)
    }

    /// By offer key; an offer that is frozen has no levels. `None` while the engine is away.
    async fn levels_of(
        &self,
        offers: &[Arc<Offer>],
    ) -> Option<HashMap<String, Option<OfferLevels>>> {
        let warm: Vec<Arc<Offer>> =
            offers.iter().filter(|offer| offer.is_in_engine()).cloned().collect();
        let mut answers = stream::iter(warm)
            .map(|offer| async move { (offer.key.to_string(), offer.levels().await) })
            .buffer_unordered(AT_ONCE);
        let mut levels = HashMap::new();
        while let Some((key, answer)) = answers.next().await {
            match answer {
                Ok(Ok(found)) => levels.insert(key, Some(found)),
                Ok(Err(Refusal::NotWarmed | Refusal::Frozen { .. })) => levels.insert(key, None),
                Err(error) => {
                    tracing::warn!(%error, "the engine did not tell its levels");
                    return None;
                }
            };
        }
        if levels.is_empty() && self.engine.probe().await.is_err() {
            return None;
        }
        Some(levels)
    }

    async fn sql_figures(
        &self,
        id: Option<&ActivityId>,
        status: &mut PipelineStatus,
    ) -> Result<(), DbErr> {
        let reader = self.database.reader();
        let rows = |state: OutboxState| {
            let query = outbox::Entity::find().filter(outbox::Column::State.eq(state));
            match id {
                Some(id) => query.filter(outbox::Column::ActivityId.eq(id.as_str())),
                None => query,
            }
        };
        let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let now = self.database.clock();
        let pending = rows(OutboxState::Pending).count(reader).await?;
        let releasing = rows(OutboxState::Releasing).count(reader).await?;
        let mut due = 0;
        for state in [OutboxState::Pending, OutboxState::Releasing] {
            due += rows(state)
                .filter(outbox::Column::NextAttemptTime.lte(now.0))
                .count(reader)
                .await?;
        }
        let dead = rows(OutboxState::Dead).count(reader).await?;
        let mut live =
            orders::Entity::find().filter(orders::Column::State.ne(OrderState::Cancelled));
        if let Some(id) = id {
            live = live.filter(orders::Column::ActivityId.eq(id.as_str()));
        }
        let oldest =
            rows(OutboxState::Pending).order_by_asc(outbox::Column::CreateTime).one(reader).await?;
        status.orders = Some(signed(live.count(reader).await?));
        status.outbox_pending = Some(signed(pending));
        status.outbox_releasing = Some(signed(releasing));
        status.outbox_due = Some(signed(due));
        status.outbox_dead = Some(signed(dead));
        status.oldest_pending_age =
            oldest.map(|row| now.since(TimeMs(row.create_time))).or(Some(Duration::ZERO));
        Ok(())
    }

    async fn offer_figures(
        &self,
        id: &ActivityId,
        levels: &HashMap<String, Option<OfferLevels>>,
    ) -> Result<Vec<OfferPipeline>, DbErr> {
        let reader = self.database.reader();
        let rows = offers::Entity::find()
            .filter(offers::Column::ActivityId.eq(id.as_str()))
            .order_by_asc(offers::Column::SkuId)
            .all(reader)
            .await?;
        let counts = outbox::Entity::find()
            .select_only()
            .column(outbox::Column::SkuId)
            .column(outbox::Column::State)
            .column_as(outbox::Column::Id.count(), "rows")
            .filter(outbox::Column::ActivityId.eq(id.as_str()))
            .group_by(outbox::Column::SkuId)
            .group_by(outbox::Column::State)
            .into_model::<Count>()
            .all(reader)
            .await?;
        let live = orders::Entity::find()
            .select_only()
            .column(orders::Column::SkuId)
            .column_as(orders::Column::OrderNo.count(), "rows")
            .filter(orders::Column::ActivityId.eq(id.as_str()))
            .filter(orders::Column::State.ne(OrderState::Cancelled))
            .group_by(orders::Column::SkuId)
            .into_model::<OrderCount>()
            .all(reader)
            .await?;
        let counts: HashMap<(String, OutboxState), i64> =
            counts.into_iter().map(|count| ((count.sku_id, count.state), count.rows)).collect();
        let live: HashMap<String, i64> =
            live.into_iter().map(|count| (count.sku_id, count.rows)).collect();
        let count = |sku_id: &str, state: OutboxState| {
            counts.get(&(sku_id.to_owned(), state)).copied().unwrap_or(0)
        };
        Ok(rows
            .into_iter()
            .map(|offer| {
                let levels = levels.get(&format!("{id}/{}", offer.sku_id));
                let seen = levels.copied().flatten();
                OfferPipeline {
                    total: offer.total,
                    remaining: seen.map(|levels| levels.stock),
                    reserved_sql: offer.reserved,
                    sold: offer.sold,
                    unacked: seen.map(|levels| levels.unacked),
                    pending: count(&offer.sku_id, OutboxState::Pending),
                    releasing: count(&offer.sku_id, OutboxState::Releasing),
                    dead: count(&offer.sku_id, OutboxState::Dead),
                    orders_live: live.get(&offer.sku_id).copied().unwrap_or(0),
                    epoch: offer.epoch,
                    frozen: matches!(levels, Some(None)),
                    sku_id: offer.sku_id,
                }
            })
            .collect())
    }
}
