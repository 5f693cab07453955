//! The life of a sale: created, approved, warmed up, on sale, ended.
//!
//! `PENDING_REVIEW → SCHEDULED → ACTIVE ⇄ PAUSED → ENDED → SETTLED`
//!
//! Every move names the states that it may leave, is one transaction with its audit row, and raises
//! the activity's version, by which every instance sees that something changed.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use sea_orm::{
    ActiveValue::Set,
    ColumnTrait, Condition, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect,
    sea_query::{Expr, ExprTrait},
};

mod adjust;
mod rebuild_stock;
mod settle;
mod status;
mod warm_up;

use crate::{
    admission::catalog::{Activity, Catalog},
    audit,
    circuit::Circuit,
    database::{self, Database, SqlFault, classify, finish, insert_ignore, is_outage, lock_rows},
    domain::{
        ActivityId, ActivityListQuery, ActivitySpec, ActivityState, ActivityView, InvalidToken,
        OfferView, TimeMs, open_token, seal_token,
    },
    engine::{Engine, events::Event, locks::Locks},
    entity::{activities, adjustments, adjustments::AdjustmentState, offers},
    error::Error,
    metrics,
    reconcile::Reconciler,
    recovery::Recovery,
};

/// How long before its start an activity should be warmed up.
const WARM_BEFORE: Duration = Duration::from_secs(15 * 60);

/// Creates activities and moves them through their life.
#[derive(Debug)]
pub struct Activities {
    pub catalog: Arc<Catalog>,
    pub database: Database,
    pub engine: Arc<dyn Engine>,
    pub recovery: Arc<Recovery>,
    pub reconciler: Arc<Reconciler>,
    pub locks: Locks,
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
}

/// What moved by the clock in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    pub started: u64,
    pub ended: u64,
    /// Past their start, and not started: nobody warmed them up.
    pub cold: u64,
}

impl Activities {
    /// Creates an activity for review; the same content again is fine.
    ///
    /// # Errors
    /// `ActivityExists` with other content, or the database is away.
    pub async fn create(
        self: &Arc<Self>,
        spec: ActivitySpec,
        actor: &str,
    ) -> Result<ActivityView, Error> {
        let id = spec.activity_id.clone();
        self.repeat(|| self.create_transaction(&spec, actor)).await?;
        let view = self.get(&id).await?;
        let adjusted = self.adjusted_by(&id).await.map_err(|error| self.sql_failed(error))?;
        if !is_same(&spec, &view, &adjusted) {
            return Err(Error::ActivityExists(id.to_string()));
        }
        self.changed(&id).await?;
        Ok(view)
    }

    /// By how many units each offer was adjusted since its creation.
    async fn adjusted_by(&self, id: &ActivityId) -> Result<HashMap<String, i64>, DbErr> {
        let rows = adjustments::Entity::find()
            .filter(adjustments::Column::ActivityId.eq(id.as_str()))
            .filter(adjustments::Column::State.ne(AdjustmentState::Cancelled))
            .all(self.database.reader())
            .await?;
        let mut adjusted = HashMap::new();
        for row in rows {
            *adjusted.entry(row.sku_id).or_default() += row.delta;
        }
        Ok(adjusted)
    }

    async fn create_transaction(&self, spec: &ActivitySpec, actor: &str) -> Result<(), DbErr> {
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let id = spec.activity_id.as_str();
        let query = lock_rows(activities::Entity::find_by_id(id));
        let written = async {
            if query.one(&transaction).await?.is_some() {
                return Ok(());
            }
            activities::Entity::insert(new_activity(spec, now))
                .exec_without_returning(&transaction)
                .await?;
            insert_ignore(&transaction, spec.offers.iter().map(|o| new_offer(id, o)).collect())
                .await?;
            let detail = serde_json::json!({ "title": spec.title, "offers": spec.offers.len() });
            let entry =
                audit::Entry::of_activity(&spec.activity_id, actor, "create_activity", detail);
            audit::write(&transaction, now, entry).await
        }
        .await;
        match written {
            Ok(()) => transaction.commit().await,
            // Another call created it in between: then it is read and compared.
            Err(error) if classify(&error) == SqlFault::Data => {
                let _ = transaction.rollback().await;
                match activities::Entity::find_by_id(id).one(self.database.reader()).await? {
                    Some(_) => Ok(()),
                    None => Err(error),
                }
            }
            Err(error) => {
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    }

    /// # Errors
    /// `UnknownActivity`, or the database is away.
    pub async fn get(self: &Arc<Self>, id: &ActivityId) -> Result<ActivityView, Error> {
        let row = activities::Entity::find_by_id(id.as_str())
            .one(self.database.reader())
            .await
            .map_err(|error| self.sql_failed(error))?
            .ok_or_else(|| Error::UnknownActivity(id.to_string()))?;
        let offers = offers::Entity::find()
            .filter(offers::Column::ActivityId.eq(id.as_str()))
            .order_by_asc(offers::Column::SkuId)
            .all(self.database.reader())
            .await
            .map_err(|error| self.sql_failed(error))?;
        Ok(view(row, offers))
    }

    /// One page of activities, newest start first, and the token of the next page, empty at the
    /// end. Offers are left out.
    ///
    /// # Errors
    /// A token that is not of this query, or the database is away.
    pub async fn list(
        self: &Arc<Self>,
        query: ActivityListQuery,
    ) -> Result<(Vec<ActivityView>, String), Error> {
        let mut select = activities::Entity::find();
        if let Some(state) = query.state {
            select =
                select.filter(activities::Column::State.eq(activities::ActivityState::from(state)));
        }
        if !query.page_token.is_empty() {
            let (start_time, id) = read_token(&query).ok_or(InvalidToken)?;
            select = select.filter(
                Condition::any().add(activities::Column::StartTime.lt(start_time)).add(
                    activities::Column::StartTime.eq(start_time).and(activities::Column::Id.gt(id)),
                ),
            );
        }
        let page_size = u64::from(query.page_size);
        let mut rows = select
            .order_by_desc(activities::Column::StartTime)
            .order_by_asc(activities::Column::Id)
            .limit(page_size + 1)
            .all(self.database.reader())
            .await
            .map_err(|error| self.sql_failed(error))?;
        let more = rows.len() as u64 > page_size;
        rows.truncate(query.page_size as usize);
        let next = match rows.last() {
            Some(last) if more => write_token(query.state, last),
            Some(_) | None => String::new(),
        };
        Ok((rows.into_iter().map(|row| view(row, Vec::new())).collect(), next))
    }

    /// `PENDING_REVIEW → SCHEDULED`.
    ///
    /// # Errors
    /// `WrongActivityState`, `UnknownActivity`, or the database is away.
    pub async fn approve(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
        reason: &str,
    ) -> Result<ActivityView, Error> {
        let from = [ActivityState::PendingReview];
        let needed = "only an activity in pending_review can be approved";
        self.change_state(id, &from, ActivityState::Scheduled, actor, reason, needed).await
    }

    /// Ends a sale by hand: from `SCHEDULED`, `ACTIVE` or `PAUSED`.
    ///
    /// # Errors
    /// `WrongActivityState`, `UnknownActivity`, or the database is away.
    pub async fn end(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
        reason: &str,
    ) -> Result<ActivityView, Error> {
        let from = [ActivityState::Scheduled, ActivityState::Active, ActivityState::Paused];
        let needed = "only an activity that is scheduled, active or paused can be ended";
        self.change_state(id, &from, ActivityState::Ended, actor, reason, needed).await
    }

    /// Closes the entrance of a sale: from `ACTIVE`.
    ///
    /// # Errors
    /// `WrongActivityState`, `UnknownActivity`, or the database is away.
    pub async fn pause(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
        reason: &str,
    ) -> Result<ActivityView, Error> {
        let from = [ActivityState::Active];
        let needed = "only an activity that is active can be paused";
        self.move_one_by_clock(id).await?;
        self.change_state(id, &from, ActivityState::Paused, actor, reason, needed).await
    }

    /// Opens it again: from `PAUSED`.
    ///
    /// # Errors
    /// `WrongActivityState`, `UnknownActivity`, or the database is away.
    pub async fn resume(
        self: &Arc<Self>,
        id: &ActivityId,
        actor: &str,
        reason: &str,
    ) -> Result<ActivityView, Error> {
        let from = [ActivityState::Paused];
        let needed = "only an activity that is paused can be resumed";
        self.move_one_by_clock(id).await?;
        self.change_state(id, &from, ActivityState::Active, actor, reason, needed).await
    }

    /// Writes down what the clock has done already: buyers see it by the second, SQL a moment later.
    async fn move_one_by_clock(self: &Arc<Self>, id: &ActivityId) -> Result<(), Error> {
        let read = self.catalog.refresh_one(id).await;
        read.map_err(|error| self.sql_failed(error))?;
        if let Some(activity) = self.catalog.known(id)? {
            self.follow_clock(&activity, &mut Moved::default()).await?;
        }
        Ok(())
    }

    /// Starts and ends activities by the database's clock; any instance may do it.
    ///
    /// # Errors
    /// The database is away; the next pass does what was left.
    pub async fn move_by_clock(self: &Arc<Self>) -> Result<Moved, Error> {
        let mut moved = Moved::default();
        for activity in self.catalog.all() {
            self.follow_clock(&activity, &mut moved).await?;
        }
        metrics::count_cold_activities(moved.cold);
        let now = self.database.clock();
        let starts_cold = |activity: &&Arc<Activity>| {
            let soon = now < activity.start_time && activity.start_time <= now.plus(WARM_BEFORE);
            soon && activity.state == ActivityState::Scheduled && !activity.is_warm()
        };
        metrics::count_starting_cold(self.catalog.all().iter().filter(starts_cold).count());
        Ok(moved)
    }

    async fn follow_clock(
        self: &Arc<Self>,
        activity: &Activity,
        moved: &mut Moved,
    ) -> Result<(), Error> {
        let now = self.database.clock();
        let over = now >= activity.end_time;
        let (to, why) = match activity.state {
            ActivityState::Scheduled | ActivityState::Active | ActivityState::Paused if over => {
                (ActivityState::Ended, "end_time")
            }
            ActivityState::Scheduled if now >= activity.start_time => {
                if !activity.is_warm() {
                    moved.cold += 1;
                    if !activity.told_cold.swap(true, Ordering::Relaxed) {
                        tracing::error!(
                            activity = %activity.id,
                            "it is past its start_time and does not start: not warmed up"
                        );
                    }
                    return Ok(());
                }
                (ActivityState::Active, "start_time")
            }
            ActivityState::Scheduled
            | ActivityState::Active
            | ActivityState::Paused
            | ActivityState::PendingReview
            | ActivityState::Ended
            | ActivityState::Settled => return Ok(()),
        };
        match self.change_state(&activity.id, &[activity.state], to, "clock", why, "").await {
            Ok(_) if to == ActivityState::Active => moved.started += 1,
            Ok(_) => moved.ended += 1,
            // Another instance, or an operator, was there first.
            Err(Error::WrongActivityState { .. }) => {
                self.catalog.refresh_one(&activity.id).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn change_state(
        self: &Arc<Self>,
        id: &ActivityId,
        from: &[ActivityState],
        to: ActivityState,
        actor: &str,
        reason: &str,
        needed: &'static str,
    ) -> Result<ActivityView, Error> {
        let changed =
            self.repeat(|| self.change_state_transaction(id, from, to, actor, reason)).await?;
        if !changed {
            let current = self.get(id).await?.state;
            return Err(Error::WrongActivityState { activity_id: id.to_string(), current, needed });
        }
        tracing::info!(activity = %id, state = to.as_str(), actor, reason, "the activity moved");
        self.changed(id).await?;
        self.get(id).await
    }

    /// Reads an activity again that this server changed, and tells the others.
    async fn changed(&self, id: &ActivityId) -> Result<(), Error> {
        let read = self.catalog.refresh_one(id).await;
        read.map_err(|error| self.sql_failed(error))?;
        if let Ok(Some(activity)) = self.catalog.known(id)
            && !self.engine_circuit.is_open()
        {
            let event = Event::ActivityChanged { id: id.clone(), version: activity.version };
            if let Err(error) = event.tell(&*self.engine).await {
                tracing::warn!(activity = %id, %error, "the other servers were not told; they read it again soon");
            }
        }
        Ok(())
    }

    async fn change_state_transaction(
        &self,
        id: &ActivityId,
        from: &[ActivityState],
        to: ActivityState,
        actor: &str,
        reason: &str,
    ) -> Result<bool, DbErr> {
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let written = async {
            let allowed = from.iter().map(|&state| activities::ActivityState::from(state));
            let result = activities::Entity::update_many()
                .col_expr(
                    activities::Column::State,
                    Expr::value(activities::ActivityState::from(to)),
                )
                .col_expr(
                    activities::Column::Version,
                    Expr::col(activities::Column::Version).add(1),
                )
                .col_expr(activities::Column::UpdateTime, Expr::value(now.0))
                .filter(activities::Column::Id.eq(id.as_str()))
                .filter(activities::Column::State.is_in(allowed))
                .exec(&transaction)
                .await?;
            if result.rows_affected != 1 {
                return Ok(false);
            }
            let detail = serde_json::json!({ "to": to.as_str(), "reason": reason });
            let entry = audit::Entry::of_activity(id, actor, action(from, to), detail);
            audit::write(&transaction, now, entry).await?;
            Ok(true)
        }
        .await;
        finish(transaction, written).await
    }

    /// Repeats a transaction for as long as SQL itself says that nothing of it was kept.
    async fn repeat<T, F>(&self, attempt: impl FnMut() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, DbErr>>,
    {
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        database::repeat(attempt).await.map_err(|error| self.sql_failed(error))
    }

    fn sql_failed(&self, error: DbErr) -> Error {
        if is_outage(&error) {
            self.database_circuit.trip(&error.to_string());
        }
        error.into()
    }
}

fn new_activity(spec: &ActivitySpec, now: TimeMs) -> activities::ActiveModel {
    activities::ActiveModel {
        id: Set(spec.activity_id.to_string()),
        title: Set(spec.title.clone()),
        state: Set(activities::ActivityState::PendingReview),
        start_time: Set(spec.start_time.0),
        end_time: Set(spec.end_time.0),
        retention_s: Set(seconds(spec.retention)),
        version: Set(1),
        create_time: Set(now.0),
        update_time: Set(now.0),
    }
}

fn new_offer(activity_id: &str, spec: &crate::domain::OfferSpec) -> offers::ActiveModel {
    let small = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
    offers::ActiveModel {
        activity_id: Set(activity_id.to_owned()),
        sku_id: Set(spec.sku_id.to_string()),
        title: Set(spec.title.clone()),
        price_minor: Set(spec.price_minor),
        currency: Set(spec.currency.clone()),
        total: Set(i64::try_from(spec.total).unwrap_or(i64::MAX)),
        reserved: Set(0),
        sold: Set(0),
        max_orders_per_user: Set(small(spec.max_orders)),
        max_quantity_per_order: Set(small(spec.max_quantity)),
        hold_s: Set(spec.hold.map_or(0, seconds)),
        segments: Set(small(spec.segments)),
        epoch: Set(1),
        warm_time: Set(None),
    }
}

fn seconds(span: Duration) -> i64 {
    i64::try_from(span.as_secs()).unwrap_or(i64::MAX)
}

/// Whether an activity is what this specification makes, apart from what happened to it since.
fn is_same(spec: &ActivitySpec, view: &ActivityView, adjusted: &HashMap<String, i64>) -> bool {
    let same_offer = |(spec, view): (&crate::domain::OfferSpec, &OfferView)| {
        spec.sku_id.as_str() == view.sku_id
            && spec.title == view.title
            && spec.price_minor == view.price_minor
            && spec.currency == view.currency
            && i64::try_from(spec.total)
                == Ok(view.total - adjusted.get(&view.sku_id).copied().unwrap_or(0))
            && i64::from(spec.max_orders) == i64::from(view.max_orders)
            && i64::from(spec.max_quantity) == i64::from(view.max_quantity)
            && spec.hold == view.hold
            && i64::from(spec.segments) == i64::from(view.segments)
    };
    let mut specs: Vec<_> = spec.offers.iter().collect();
    specs.sort_by(|a, b| a.sku_id.cmp(&b.sku_id));
    let mut views: Vec<_> = view.offers.iter().collect();
    views.sort_by(|a, b| a.sku_id.cmp(&b.sku_id));
    spec.title == view.title
        && spec.start_time == view.start_time
        && spec.end_time == view.end_time
        && spec.retention == view.retention
        && specs.len() == views.len()
        && specs.into_iter().zip(views).all(same_offer)
}

fn view(row: activities::Model, offers: Vec<offers::Model>) -> ActivityView {
    let span = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    ActivityView {
        activity_id: row.id,
        title: row.title,
        state: row.state.into(),
        start_time: TimeMs(row.start_time),
        end_time: TimeMs(row.end_time),
        retention: span(row.retention_s),
        version: row.version,
        create_time: TimeMs(row.create_time),
        update_time: TimeMs(row.update_time),
        offers: offers
            .into_iter()
            .map(|offer| OfferView {
                sku_id: offer.sku_id,
                title: offer.title,
                price_minor: offer.price_minor,
                currency: offer.currency,
                total: offer.total,
                reserved: offer.reserved,
                sold: offer.sold,
                max_orders: offer.max_orders_per_user,
                max_quantity: offer.max_quantity_per_order,
                hold: (offer.hold_s > 0).then(|| span(offer.hold_s)),
                segments: offer.segments,
                epoch: offer.epoch,
                warm_time: offer.warm_time.map(TimeMs),
            })
            .collect(),
    }
}

/// The last row of a page, and the filter that the token is good for.
fn write_token(state: Option<ActivityState>, last: &activities::Model) -> String {
    let filter = state.map_or("all", ActivityState::as_str);
    seal_token(&format!("{filter}:{}:{}", last.start_time, last.id))
}

fn read_token(query: &ActivityListQuery) -> Option<(i64, String)> {
    let text = open_token(&query.page_token)?;
    let (filter, rest) = text.split_once(':')?;
    if filter != query.state.map_or("all", ActivityState::as_str) {
        return None;
    }
    let (start_time, id) = rest.split_once(':')?;
    Some((start_time.parse().ok()?, id.to_owned()))
}

/// What the audit calls a change of state.
fn action(from: &[ActivityState], to: ActivityState) -> &'static str {
    match to {
        ActivityState::PendingReview => "create_activity",
        ActivityState::Scheduled => "approve_activity",
        ActivityState::Active if from == [ActivityState::Paused] => "resume_activity",
        ActivityState::Active => "start_activity",
        ActivityState::Paused => "pause_activity",
        ActivityState::Ended => "end_activity",
        ActivityState::Settled => "settle_activity",
    }
}
