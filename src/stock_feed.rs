//! Live stock: samples the offers that somebody watches; the newest value wins.
//!
//! One hub per watched activity reads its offers and publishes a board; every watcher takes the
//! newest board when it is its turn and it is ready for more, so a slow one skips values and costs no
//! memory.
//!
//! **Promises:** a snapshot of every offer first; then changes, whose (epoch, revision) never goes
//! back; never an impossible value; the last value before silence is the true one; a heartbeat;
//! the last state when the activity settles, and to those who come after that.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream};
use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

mod turns;
mod watcher;

use crate::{
    admission::catalog::{Activity, Catalog, OfferFigures},
    circuit::Circuit,
    domain::{ActivityId, ActivityState, SkuId, StockUpdate, TimeMs, WatchRequest},
    engine::{
        EngineError,
        scripts::{Refusal, Stamp},
        segments::OfferLevels,
    },
    error::Error,
    metrics::{self, Watching},
    offer::Offer,
    recovery::Recovery,
};
pub use turns::Turns;
use watcher::Watcher;

/// Offers read at the same time.
const AT_ONCE: usize = 64;
/// How long a new watcher waits for the first figures of its offers.
const FIRST_FIGURES: Duration = Duration::from_secs(5);
/// The most of its time that a hub spends reading: a pass is followed by this many times its
/// own length of rest.
const REST: u32 = 2;
/// Streams that are told of news at once: what a thread sends in a millisecond or two.
const GROUP: usize = 256;
/// In this time everybody is told, even where the threads have little left for that.
const ROUND: Duration = Duration::from_secs(1);

/// How the feed works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeedOptions {
    /// The least time between two looks at an offer.
    pub sample: Duration,
    /// The longest silence on a stream.
    pub heartbeat: Duration,
}

/// Feeds everybody who watches stock.
#[derive(Debug)]
pub struct StockFeed {
    catalog: Arc<Catalog>,
    recovery: Arc<Recovery>,
    engine_circuit: Arc<Circuit>,
    options: FeedOptions,
    turns: Arc<Turns>,
    hubs: Mutex<HashMap<ActivityId, Arc<Hub>>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

/// The newest figures of an activity, and who wants which.
#[derive(Debug)]
struct Hub {
    id: ActivityId,
    board: watch::Sender<Arc<Board>>,
    /// The watchers by turns: each group hears that there is news on the board.
    groups: Mutex<Vec<watch::Sender<()>>>,
    /// How many watchers each offer has.
    wanted: Mutex<HashMap<SkuId, usize>>,
}

#[derive(Debug, Clone, Default)]
struct Board {
    state: Option<ActivityState>,
    figures: HashMap<SkuId, Figures>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Figures {
    total: u64,
    remaining: u64,
    stamp: Stamp,
    observe_time: TimeMs,
}

/// What a look at the offers of a hub came to.
#[derive(Debug, Clone, Copy)]
struct Sampled {
    news: bool,
    /// It was the last.
    settled: bool,
}

impl Hub {
    /// Into a group that has room.
    fn join_group(&self) -> watch::Receiver<()> {
        let mut groups = locked(&self.groups);
        if let Some(group) = groups.iter().find(|group| group.receiver_count() < GROUP) {
            return group.subscribe();
        }
        let (group, news) = watch::channel(());
        groups.push(group);
        news
    }

    /// The groups that somebody is in.
    fn groups(&self) -> Vec<watch::Sender<()>> {
        let mut groups = locked(&self.groups);
        groups.retain(|group| group.receiver_count() > 0);
        groups.clone()
    }

    fn is_deserted(&self) -> bool {
        locked(&self.groups).iter().all(|group| group.receiver_count() == 0)
    }
}

impl StockFeed {
    /// A feed whose hubs run in `tasks` and end on `shutdown`.
    #[must_use]
    pub fn new(
        catalog: Arc<Catalog>,
        recovery: Arc<Recovery>,
        engine_circuit: Arc<Circuit>,
        options: FeedOptions,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            catalog,
            recovery,
            engine_circuit,
            options,
            turns: Arc::default(),
            hubs: Mutex::default(),
            tasks,
            shutdown,
        }
    }

    /// What the threads that serve streams take part in.
    #[must_use]
    pub fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// Watches offers of one activity, all of them when none is named.
    ///
    /// # Errors
    /// `UnknownActivity`, `UnknownOffer`; or the first figures can't be had.
    pub async fn watch(
        self: &Arc<Self>,
        request: WatchRequest,
    ) -> Result<impl Stream<Item = Result<StockUpdate, Error>> + Send + 'static, Error> {
        let activity = self.catalog.activity(&request.activity_id).await?;
        let sku_ids: Vec<SkuId> = if request.sku_ids.is_empty() {
            activity.offers.keys().cloned().collect()
        } else {
            for sku_id in &request.sku_ids {
                activity.offer(sku_id)?;
            }
            request.sku_ids.clone()
        };
        if activity.offers.values().all(|offer| offer.is_forgotten()) {
            let last = self.last_figures(&activity, &sku_ids).await?;
            return Ok(stream::iter(last.into_iter().map(Ok)).left_stream());
        }
        let (hub, news) = self.join(&activity, &sku_ids);
        let watching = metrics::watching();
        let mut boards = hub.board.subscribe();
        let interest = Interest { hub, sku_ids: sku_ids.clone(), _watching: watching };
        self.first_figures(&activity, &mut boards, &sku_ids).await?;
        let watcher = Watcher::new(interest, news, request.min_interval, self.options.heartbeat);
        Ok(stream::unfold(watcher, |mut watcher| async move {
            let update = watcher.next().await?;
            Some((Ok(update), watcher))
        })
        .right_stream())
    }

    /// What SQL has of offers that the engine has forgotten: all that is to be said of them.
    async fn last_figures(
        &self,
        activity: &Activity,
        sku_ids: &[SkuId],
    ) -> Result<Vec<StockUpdate>, Error> {
        let found = self.catalog.figures_in_sql(&activity.id).await?;
        let observe_time = TimeMs::now();
        let update = |figures: OfferFigures| StockUpdate {
            activity_id: activity.id.clone(),
            total: figures.total,
            remaining: figures.total.saturating_sub(figures.reserved),
            reserved: figures.reserved,
            sku_id: figures.sku_id,
            state: activity.state,
            epoch: figures.epoch,
            revision: 0,
            snapshot: true,
            heartbeat: false,
            observe_time,
        };
        let wanted = found.into_iter().filter(|figures| sku_ids.contains(&figures.sku_id));
        Ok(wanted.map(update).collect())
    }

    async fn first_figures(
        &self,
        activity: &Activity,
        boards: &mut watch::Receiver<Arc<Board>>,
        sku_ids: &[SkuId],
    ) -> Result<(), Error> {
        let all_there = boards
            .wait_for(|board| sku_ids.iter().all(|sku_id| board.figures.contains_key(sku_id)));
        if let Ok(Ok(_)) = tokio::time::timeout(FIRST_FIGURES, all_there).await {
            return Ok(());
        }
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        let missing = {
            let board = boards.borrow();
            sku_ids.iter().find(|sku_id| !board.figures.contains_key(*sku_id)).cloned()
        };
        match missing {
            Some(sku_id) => Err(Error::OfferFrozen(activity.offer(&sku_id)?.key.clone())),
            None => Ok(()),
        }
    }

    /// Adds a watcher to the activity's hub, which is started when there is none, and to a group.
    fn join(
        self: &Arc<Self>,
        activity: &Activity,
        sku_ids: &[SkuId],
    ) -> (Arc<Hub>, watch::Receiver<()>) {
        let mut hubs = locked(&self.hubs);
        let hub = hubs.entry(activity.id.clone()).or_insert_with(|| {
            let hub = Arc::new(Hub {
                id: activity.id.clone(),
                board: watch::Sender::default(),
                groups: Mutex::default(),
                wanted: Mutex::default(),
            });
            self.tasks.spawn(self.clone().run(hub.clone()));
            hub
        });
        let mut wanted = locked(&hub.wanted);
        for sku_id in sku_ids {
            *wanted.entry(sku_id.clone()).or_default() += 1;
        }
        drop(wanted);
        (hub.clone(), hub.join_group())
    }

    /// Samples until nobody watches any more.
    async fn run(self: Arc<Self>, hub: Arc<Hub>) {
        while !self.shutdown.is_cancelled() {
            let started = Instant::now();
            let sampled = self.sample(&hub).await;
            let read = Instant::now();
            let rest = self.options.sample.max((read - started) * REST);
            if sampled.news {
                self.tell(&hub).await;
            }
            tokio::select! {
                () = tokio::time::sleep_until(read + rest) => {}
                () = self.shutdown.cancelled() => {}
            }
            let mut hubs = locked(&self.hubs);
            if sampled.settled || hub.is_deserted() {
                hubs.remove(&hub.id);
                return;
            }
        }
    }

    /// Tells one group after the other that there is news.
    async fn tell(&self, hub: &Hub) {
        let groups = hub.groups();
        let Some((last, first)) = groups.split_last() else { return };
        for group in first {
            let most = ROUND / u32::try_from(groups.len()).unwrap_or(u32::MAX);
            self.turns.take(most, || group.send_replace(())).await;
            if self.shutdown.is_cancelled() {
                return;
            }
        }
        last.send_replace(());
    }

    /// Reads the wanted offers once and publishes what changed.
    async fn sample(&self, hub: &Hub) -> Sampled {
        // Keeps the last known state while the database is away.
        let Ok(activity) = self.catalog.activity(&hub.id).await else {
            return Sampled { news: false, settled: false };
        };
        let wanted: Vec<SkuId> = locked(&hub.wanted).keys().cloned().collect();
        let offers = wanted.iter().filter_map(|sku_id| activity.offers.get(sku_id).cloned());
        let found: Vec<(SkuId, Figures)> = stream::iter(offers.collect::<Vec<_>>())
            .map(|offer| async move {
                let figures = self.figures(&offer).await?;
                Some((offer.key.sku_id.clone(), figures))
            })
            .buffer_unordered(AT_ONCE)
            .filter_map(|found| async move { found })
            .collect()
            .await;
        let news = hub.board.send_if_modified(|board| publish(board, activity.state, found));
        Sampled { news, settled: activity.state == ActivityState::Settled }
    }

    /// The offer's figures, unless they are in doubt.
    async fn figures(&self, offer: &Arc<Offer>) -> Option<Figures> {
        if !offer.is_warm() {
            let stamp = Stamp { epoch: offer.epoch(), revision: 0 };
            let observe_time = offer.clock.now();
            return Some(Figures {
                total: offer.total,
                remaining: offer.total,
                stamp,
                observe_time,
            });
        }
        if self.engine_circuit.is_open() || offer.is_forgotten() {
            return None;
        }
        let segments = offer.segments.all();
        let before: Vec<Stamp> = segments.iter().map(|segment| segment.seen()).collect();
        match offer.segments.levels_of_each().await {
            Ok(Ok(all)) => {
                for ((segment, before), levels) in segments.iter().zip(before).zip(&all) {
                    if segment.observe(before, levels.stamp).is_err() {
                        self.recovery.freeze_and_rebuild(offer, levels.stamp.epoch, "went_back");
                        return None;
                    }
                }
                let Some(levels) = OfferLevels::of(&all) else {
                    // In the middle of a rebuild, or behind one.
                    self.recovery.rebuild(offer);
                    return None;
                };
                Some(Figures {
                    total: levels.offered(),
                    remaining: levels.stock,
                    stamp: levels.stamp,
                    observe_time: offer.clock.now(),
                })
            }
            Ok(Err(Refusal::NotWarmed | Refusal::Frozen { .. })) => {
                self.recovery.rebuild(offer);
                None
            }
            Err(EngineError::Script(text) | EngineError::Full(text)) => {
                tracing::warn!(offer = %offer.key, text, "the figures can't be read");
                None
            }
            Err(EngineError::PartAway(_)) => None,
            Err(EngineError::NotRun(why) | EngineError::Unknown(why)) => {
                self.engine_circuit.trip(&why);
                None
            }
        }
    }
}

/// Puts newer figures on the board; answers whether anything is new.
fn publish(board: &mut Arc<Board>, state: ActivityState, found: Vec<(SkuId, Figures)>) -> bool {
    let is_new = |(sku_id, figures): &(SkuId, Figures)| {
        board.figures.get(sku_id).is_none_or(|known| figures.stamp > known.stamp)
    };
    let news: Vec<(SkuId, Figures)> = found.into_iter().filter(is_new).collect();
    if news.is_empty() && board.state == Some(state) {
        return false;
    }
    let board = Arc::make_mut(board);
    board.state = Some(state);
    board.figures.extend(news);
    true
}

/// Counts a watcher in for as long as it lives.
#[derive(Debug)]
struct Interest {
    hub: Arc<Hub>,
    sku_ids: Vec<SkuId>,
    _watching: Watching,
}

impl Drop for Interest {
    fn drop(&mut self) {
        let mut wanted = locked(&self.hub.wanted);
        for sku_id in &self.sku_ids {
            if let Some(count) = wanted.get_mut(sku_id) {
                *count -= 1;
                if *count == 0 {
                    wanted.remove(sku_id);
                }
            }
        }
    }
}

/// A poisoned lock is taken all the same: what it guards is whole between two statements.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_hub() -> Hub {
        Hub {
            id: ActivityId::new("a-1").unwrap(),
            board: watch::Sender::default(),
            groups: Mutex::default(),
            wanted: Mutex::default(),
        }
    }

    fn sizes(hub: &Hub) -> Vec<usize> {
        hub.groups().iter().map(watch::Sender::receiver_count).collect()
    }

    #[test]
    fn watchers_come_in_groups_and_places_are_used_again() {
        let hub = a_hub();
        let mut watchers: Vec<_> = (0..GROUP * 2 + 10).map(|_| hub.join_group()).collect();
        assert_eq!(sizes(&hub), [GROUP, GROUP, 10]);
        watchers.drain(..20);
        watchers.extend((0..15).map(|_| hub.join_group()));
        assert_eq!(sizes(&hub), [GROUP - 5, GROUP, 10]);
        watchers.truncate(GROUP - 20);
        assert_eq!(sizes(&hub), [GROUP - 20], "a group that nobody is in is gone");
        assert!(!hub.is_deserted());
        watchers.clear();
        assert!(hub.is_deserted());
    }
}
