//! The activities in memory, refreshed all the time; settled ones until their retention is over.
//!
//! **Promise:** a look-up costs no I/O, but for an id that is not there: that costs one look into
//! SQL per second. The segments of an offer outlive every refresh: they hold its epoch and what
//! was seen.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use sea_orm::{ColumnTrait, DbErr, EntityTrait, QueryFilter, QueryOrder};
use tokio::sync::{MutexGuard, Semaphore};
use tokio_util::task::TaskTracker;

use crate::{
    database::Database,
    domain::{ActivityId, ActivityState, Clock, OfferKey, SkuId, TimeMs},
    engine::{
        Engine,
        batcher::{Segment, SegmentOptions},
        events::Event,
        keys,
        scripts::SegmentScripts,
        segments::Segments,
        verdict::Verdict,
    },
    entity::{activities, offers},
    error::Error,
    metrics::Depth,
    offer::Offer,
};

/// How long an unknown id is known to be unknown.
const UNKNOWN_FOR: Duration = Duration::from_secs(1);
/// How many ids that are not in memory are looked up at once; more are refused.
const LOOKUPS: usize = 16;
/// How many unknown ids are remembered; beyond that all are forgotten.
const UNKNOWN_MOST: usize = 10_000;

/// One sale as this process knows it.
#[derive(Debug)]
pub struct Activity {
    pub id: ActivityId,
    pub state: ActivityState,
    pub start_time: TimeMs,
    pub end_time: TimeMs,
    /// When the engine may forget its offers.
    pub keys_expire: TimeMs,
    pub version: i64,
    /// Whether somebody was told that it does not start for want of a warm-up.
    pub told_cold: AtomicBool,
    pub offers: BTreeMap<SkuId, Arc<Offer>>,
}

/// What an activity does with a Reserve at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    NotStarted,
    Open,
    Paused,
    Ended,
}

/// The counters of an offer in SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferFigures {
    pub sku_id: SkuId,
    pub total: u64,
    pub reserved: u64,
    pub epoch: u64,
}

impl Activity {
    /// State and window together: the clock decides, also before a worker has written it down.
    #[must_use]
    pub fn phase(&self, now: TimeMs) -> Phase {
        match self.state {
            ActivityState::PendingReview => Phase::NotStarted,
            ActivityState::Ended | ActivityState::Settled => Phase::Ended,
            ActivityState::Scheduled | ActivityState::Active | ActivityState::Paused
                if now >= self.end_time =>
            {
                Phase::Ended
            }
            ActivityState::Scheduled if now < self.start_time => Phase::NotStarted,
            ActivityState::Scheduled | ActivityState::Active => Phase::Open,
            ActivityState::Paused => Phase::Paused,
        }
    }

    /// # Errors
    /// The activity has no such offer.
    pub fn offer(&self, sku_id: &SkuId) -> Result<Arc<Offer>, Error> {
        self.offers.get(sku_id).cloned().ok_or_else(|| Error::UnknownOffer {
            activity_id: self.id.to_string(),
            sku_id: sku_id.to_string(),
        })
    }

    /// Whether every offer was warmed up.
    #[must_use]
    pub fn is_warm(&self) -> bool {
        self.offers.values().all(|offer| offer.is_warm())
    }
}

type Activities = HashMap<ActivityId, Arc<Activity>>;

/// All activities that are not settled, and those that were seen to be.
#[derive(Debug)]
pub struct Catalog {
    database: Database,
    engine: Arc<dyn Engine>,
    options: SegmentOptions,
    tasks: TaskTracker,
    activities: ArcSwap<Activities>,
    unknown: Mutex<HashMap<ActivityId, Instant>>,
    lookups: Semaphore,
    /// One refresh at a time, or an older one could undo a newer one.
    refreshing: tokio::sync::Mutex<()>,
}

impl Catalog {
    /// An empty catalog; the segments that it makes run their work in `tasks`.
    #[must_use]
    pub fn new(
        database: Database,
        engine: Arc<dyn Engine>,
        options: SegmentOptions,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            database,
            engine,
            options,
            tasks,
            activities: ArcSwap::default(),
            unknown: Mutex::default(),
            lookups: Semaphore::new(LOOKUPS),
            refreshing: tokio::sync::Mutex::default(),
        }
    }

    /// Every activity in memory.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Activity>> {
        self.activities.load().values().cloned().collect()
    }

    /// The requests for reservations that are in front of the engine, or in it.
    #[must_use]
    pub fn requests(&self) -> Depth {
        let activities = self.activities.load();
        let offers = activities.values().flat_map(|activity| activity.offers.values());
        let segments = offers.flat_map(|offer| offer.segments.all());
        segments.map(|segment| segment.requests()).sum()
    }

    /// The activity, from memory; `None` when it was never seen.
    ///
    /// # Errors
    /// `UnknownActivity`, when SQL did not know it a moment ago.
    pub fn known(&self, id: &ActivityId) -> Result<Option<Arc<Activity>>, Error> {
        if let Some(activity) = self.activities.load().get(id) {
            return Ok(Some(activity.clone()));
        }
        match self.unknown().get(id) {
            Some(since) if since.elapsed() < UNKNOWN_FOR => {
                Err(Error::UnknownActivity(id.to_string()))
            }
            Some(_) | None => Ok(None),
        }
    }

    /// The activity, from memory, or from SQL when it was never seen.
    ///
    /// # Errors
    /// `UnknownActivity`, or the database is away.
    pub async fn activity(&self, id: &ActivityId) -> Result<Arc<Activity>, Error> {
        if let Some(activity) = self.known(id)? {
            return Ok(activity);
        }
        let _lookup = self.lookups.try_acquire().map_err(|_| Error::Overloaded)?;
        let alone = self.refreshing.lock().await;
        // Another call may have looked meanwhile.
        if let Some(activity) = self.known(id)? {
            return Ok(activity);
        }
        self.read_again(id, alone).await?;
        if let Some(activity) = self.activities.load().get(id) {
            return Ok(activity.clone());
        }
        let mut ids = self.unknown();
        if ids.len() >= UNKNOWN_MOST {
            ids.clear();
        }
        ids.insert(id.clone(), Instant::now());
        Err(Error::UnknownActivity(id.to_string()))
    }

    /// The offer, as [`Catalog::activity`].
    ///
    /// # Errors
    /// `UnknownActivity`, `UnknownOffer`, or the database is away.
    pub async fn offer(&self, key: &OfferKey) -> Result<Arc<Offer>, Error> {
        self.activity(&key.activity_id).await?.offer(&key.sku_id)
    }

    /// Reads every activity again whose version is another.
    ///
    /// # Errors
    /// Those of the database; the catalog stays as it was.
    pub async fn refresh(&self) -> Result<(), DbErr> {
        let _alone = self.refreshing.lock().await;
        let known = self.activities.load_full();
        let rows = activities::Entity::find()
            .filter(activities::Column::State.ne(activities::ActivityState::Settled))
            .all(self.database.reader())
            .await?;
        let mut fresh = Activities::with_capacity(rows.len());
        for row in rows {
            let Ok(id) = ActivityId::new(&row.id) else {
                continue;
            };
            let activity = match known.get(&id) {
                Some(activity) if activity.version == row.version => activity.clone(),
                Some(_) | None => self.load(id.clone(), row, &known).await?,
            };
            fresh.insert(id, activity);
        }
        let mut kept = Vec::new();
        // Settled meanwhile, or before: whoever still asks for it gets its last state from memory.
        for (id, activity) in known.iter().filter(|(id, _)| !fresh.contains_key(*id)) {
            let last = if activity.state == ActivityState::Settled {
                Some(activity.clone())
            } else {
                let row = activities::Entity::find_by_id(id.as_str());
                match row.one(self.database.reader()).await? {
                    Some(row) => Some(self.load(id.clone(), row, &known).await?),
                    None => None,
                }
            };
            if let Some(last) = last
                && last.keys_expire > self.database.clock()
            {
                kept.push((id.clone(), last));
            }
        }
        fresh.extend(kept);
        self.activities.store(Arc::new(fresh));
        Ok(())
    }

    /// Reads one activity again.
    ///
    /// # Errors
    /// Those of the database; the catalog stays as it was.
    pub async fn refresh_one(&self, id: &ActivityId) -> Result<(), DbErr> {
        let alone = self.refreshing.lock().await;
        self.read_again(id, alone).await
    }

    /// Takes over what another server told.
    ///
    /// # Errors
    /// Those of the database; the catalog stays as it was.
    pub async fn hear(&self, event: Event) -> Result<(), DbErr> {
        match event {
            Event::ActivityChanged { id, version } => {
                let known = self.activities.load().get(&id).map(|activity| activity.version);
                if known.is_none_or(|known| known < version) {
                    self.refresh_one(&id).await?;
                }
            }
            Event::Reopened { offer, segment, stamp } => {
                let activities = self.activities.load();
                let activity = activities.get(&offer.activity_id);
                let offer = activity.and_then(|activity| activity.offers.get(&offer.sku_id));
                if let Some(segment) = offer.and_then(|offer| offer.segments.get(segment)) {
                    segment.hear(stamp);
                }
            }
        }
        Ok(())
    }

    /// Whoever calls is the only one who refreshes.
    async fn read_again(&self, id: &ActivityId, _alone: MutexGuard<'_, ()>) -> Result<(), DbErr> {
        let row = activities::Entity::find_by_id(id.as_str()).one(self.database.reader()).await?;
        let known = self.activities.load_full();
        if row.is_none() && !known.contains_key(id) {
            return Ok(());
        }
        let mut fresh = Activities::clone(&known);
        match row {
            Some(row) => {
                self.unknown().remove(id);
                fresh.insert(id.clone(), self.load(id.clone(), row, &known).await?);
            }
            None => {
                fresh.remove(id);
            }
        }
        self.activities.store(Arc::new(fresh));
        Ok(())
    }

    fn unknown(&self) -> std::sync::MutexGuard<'_, HashMap<ActivityId, Instant>> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What SQL has of each offer of an activity, by SKU.
    ///
    /// # Errors
    /// The database is away.
    pub async fn figures_in_sql(&self, id: &ActivityId) -> Result<Vec<OfferFigures>, DbErr> {
        let rows = offers::Entity::find()
            .filter(offers::Column::ActivityId.eq(id.as_str()))
            .order_by_asc(offers::Column::SkuId)
            .all(self.database.reader())
            .await?;
        let figure = |figure: i64| u64::try_from(figure).unwrap_or(0);
        let figures = rows.into_iter().filter_map(|row| {
            Some(OfferFigures {
                sku_id: SkuId::new(&row.sku_id).ok()?,
                total: figure(row.total),
                reserved: figure(row.reserved),
                epoch: figure(row.epoch),
            })
        });
        Ok(figures.collect())
    }

    async fn load(
        &self,
        id: ActivityId,
        row: activities::Model,
        known: &Activities,
    ) -> Result<Arc<Activity>, DbErr> {
        let before = known.get(&id);
        let rows = offers::Entity::find()
            .filter(offers::Column::ActivityId.eq(id.as_str()))
            .all(self.database.reader())
            .await?;
        let retention = Duration::from_secs(u64::try_from(row.retention_s).unwrap_or(0));
        let keys_expire = TimeMs(row.end_time).plus(retention);
        let settled = row.state == activities::ActivityState::Settled;
        let mut offers = BTreeMap::new();
        for row in rows {
            let Ok(sku_id) = SkuId::new(&row.sku_id) else {
                continue;
            };
            let segments = before
                .and_then(|activity| activity.offers.get(&sku_id))
                .map(|offer| offer.segments.clone());
            let key = OfferKey { activity_id: id.clone(), sku_id: sku_id.clone() };
            let offer = self.offer_from(key, row, keys_expire, settled, segments);
            offers.insert(sku_id, Arc::new(offer));
        }
        Ok(Arc::new(Activity {
            id,
            state: row.state.into(),
            start_time: TimeMs(row.start_time),
            end_time: TimeMs(row.end_time),
            keys_expire,
            version: row.version,
            told_cold: AtomicBool::new(false),
            offers,
        }))
    }

    fn offer_from(
        &self,
        key: OfferKey,
        row: offers::Model,
        keys_expire: TimeMs,
        settled: bool,
        segments: Option<Arc<Segments>>,
    ) -> Offer {
        // The schema keeps these figures positive and small.
        let max_orders = u32::try_from(row.max_orders_per_user).unwrap_or(1);
        let epoch = u64::try_from(row.epoch).unwrap_or(1);
        let hold = u64::try_from(row.hold_s).ok().filter(|&hold_s| hold_s > 0);
        let clock = self.database.shared_clock();
        // Of another number they have other homes, and none of the epochs before.
        let count = u32::try_from(row.segments).unwrap_or(1).max(1);
        let segments = segments
            .filter(|segments| segments.count() == count)
            .unwrap_or_else(|| Arc::new(self.segments_of(&key, count, max_orders, epoch, &clock)));
        segments.adopt(epoch);
        Offer {
            key,
            title: row.title,
            price_minor: row.price_minor,
            currency: row.currency,
            total: u64::try_from(row.total).unwrap_or(0),
            max_orders,
            max_quantity: u32::try_from(row.max_quantity_per_order).unwrap_or(1),
            hold: hold.map(Duration::from_secs),
            clock,
            keys_expire,
            settled,
            warm: AtomicBool::new(row.warm_time.is_some()),
            asked_cold: AtomicBool::new(false),
            segments,
        }
    }

    fn segments_of(
        &self,
        key: &OfferKey,
        count: u32,
        max_orders: u32,
        epoch: u64,
        clock: &Clock,
    ) -> Segments {
        let (options, epoch) = (self.options, Arc::new(AtomicU64::new(epoch)));
        let verdict = (count > 1).then(|| Arc::new(Verdict::new(count, options.believe_sold_out)));
        let segment = |number| {
            let keys = keys::segment(key, number);
            let scripts = SegmentScripts::new(self.engine.clone(), keys, max_orders)
                .among(count)
                .limited(options.attempts);
            let of_offer = (epoch.clone(), verdict.clone());
            let (clock, tasks) = (clock.clone(), self.tasks.clone());
            Segment::new(scripts, number, max_orders, of_offer, options, clock, tasks)
        };
        Segments::new(segment(0), (1..count).map(segment), epoch.clone(), verdict.clone())
    }
}
