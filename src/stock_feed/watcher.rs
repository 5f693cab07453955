//! One stream of stock: the newest value wins, and a slow reader costs no memory.

use std::{collections::VecDeque, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, Sleep, sleep_until},
};

use super::{Board, Figures, Interest};
use crate::{
    domain::{ActivityId, ActivityState, SkuId, StockUpdate},
    engine::scripts::Stamp,
};

/// One stream: what it has sent, and what it has to send from the newest board.
#[derive(Debug)]
pub(super) struct Watcher {
    activity_id: ActivityId,
    /// Changes when the board does, in its turn.
    news: watch::Receiver<()>,
    sku_ids: Vec<SkuId>,
    /// What was sent last of each.
    sent: Vec<Option<Sent>>,
    /// Offers, by their place in `sku_ids`, whose newest value was not sent when the board was last
    /// looked through.
    pending: VecDeque<usize>,
    min_interval: Duration,
    heartbeat: Duration,
    last_message: Instant,
    /// Ends when something may be due. It is set anew only when it has ended or is too late: most
    /// messages come with news, and would set it for nothing.
    timer: Pin<Box<Sleep>>,
    heartbeat_turn: usize,
    /// The last state was sent; nothing follows.
    over: bool,
    interest: Interest,
}

#[derive(Debug, Clone, Copy)]
struct Sent {
    stamp: Stamp,
    state: ActivityState,
    at: Instant,
}

impl Watcher {
    /// A stream over the offers of this interest that has sent nothing yet.
    pub(super) fn new(
        interest: Interest,
        news: watch::Receiver<()>,
        min_interval: Duration,
        heartbeat: Duration,
    ) -> Self {
        let sku_ids = interest.sku_ids.clone();
        let now = Instant::now();
        Self {
            activity_id: interest.hub.id.clone(),
            news,
            pending: (0..sku_ids.len()).collect(),
            sent: vec![None; sku_ids.len()],
            sku_ids,
            min_interval,
            heartbeat,
            last_message: now,
            timer: Box::pin(sleep_until(now + heartbeat)),
            heartbeat_turn: 0,
            over: false,
            interest,
        }
    }

    /// The next message; `None` when the activity is settled and everything was said.
    pub(super) async fn next(&mut self) -> Option<StockUpdate> {
        loop {
            if let Some(update) = self.next_pending() {
                return Some(update);
            }
            if self.over {
                return None;
            }
            let heartbeat_due = self.last_message + self.heartbeat;
            let paused_until =
                self.look_through().map_or(heartbeat_due, |at| at.min(heartbeat_due));
            if !self.pending.is_empty() {
                continue;
            }
            if self.timer.is_elapsed() || self.timer.deadline() > paused_until {
                self.timer.as_mut().reset(paused_until);
            }
            tokio::select! {
                changed = self.news.changed() => if changed.is_err() {
                    // The hub is gone: the activity is settled, or the server stops.
                    self.look_through();
                    self.over = true;
                },
                () = &mut self.timer => {
                    if Instant::now() >= heartbeat_due {
                        return self.heartbeat();
                    }
                }
            }
        }
    }

    fn board(&self) -> Arc<Board> {
        self.interest.hub.board.borrow().clone()
    }

    /// Collects what differs from what was sent. Answers when an offer that changed may be sent
    /// again, if one has to wait for that.
    fn look_through(&mut self) -> Option<Instant> {
        self.news.mark_unchanged();
        let board = self.board();
        let state = board.state?;
        let now = Instant::now();
        let mut paused_until: Option<Instant> = None;
        for (place, (sku_id, sent)) in self.sku_ids.iter().zip(&self.sent).enumerate() {
            let Some(figures) = board.figures.get(sku_id) else {
                continue;
            };
            let Some(sent) = sent else {
                self.pending.push_back(place);
                continue;
            };
            if figures.stamp == sent.stamp && state == sent.state {
                continue;
            }
            let free_at = sent.at + self.min_interval;
            if free_at <= now || state == ActivityState::Settled {
                self.pending.push_back(place);
            } else {
                paused_until = Some(paused_until.map_or(free_at, |at| at.min(free_at)));
            }
        }
        if state == ActivityState::Settled {
            self.over = true;
        }
        paused_until
    }

    /// The newest value of the next offer that has one to send.
    fn next_pending(&mut self) -> Option<StockUpdate> {
        while let Some(place) = self.pending.pop_front() {
            let board = self.board();
            let sku_id = &self.sku_ids[place];
            let (Some(state), Some(figures)) = (board.state, board.figures.get(sku_id)) else {
                continue;
            };
            let now = Instant::now();
            let sent = Sent { stamp: figures.stamp, state, at: now };
            let snapshot = self.sent[place].replace(sent).is_none();
            self.last_message = now;
            return Some(self.update(sku_id.clone(), *figures, state, snapshot, false));
        }
        None
    }

    /// Repeats the newest figures of one offer, each in its turn.
    fn heartbeat(&mut self) -> Option<StockUpdate> {
        let board = self.board();
        self.heartbeat_turn += 1;
        self.last_message = Instant::now();
        let sku_id = self.sku_ids.get(self.heartbeat_turn % self.sku_ids.len().max(1))?.clone();
        let figures = *board.figures.get(&sku_id)?;
        Some(self.update(sku_id, figures, board.state?, false, true))
    }

    fn update(
        &self,
        sku_id: SkuId,
        figures: Figures,
        state: ActivityState,
        snapshot: bool,
        heartbeat: bool,
    ) -> StockUpdate {
        StockUpdate {
            activity_id: self.activity_id.clone(),
            sku_id,
            total: figures.total,
            remaining: figures.remaining,
            reserved: figures.total.saturating_sub(figures.remaining),
            state,
            epoch: figures.stamp.epoch,
            revision: figures.stamp.revision,
            snapshot,
            heartbeat,
            observe_time: figures.observe_time,
        }
    }
}
