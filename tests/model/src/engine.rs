//! The engine: the data of one segment, and each script as one step. See `lua/`.

use crate::{
    adjust::Mark,
    rebuild::Chunk,
    scope::{BUYERS, Broken, REQUESTS, Scope},
};

/// Why the sale of a segment stands still, as `meta.frozen` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Frozen {
    No,
    Rebuilding,
    Yes,
}

/// A reservation: whose it is, and the order number that its first taker gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Held {
    pub request: u8,
    pub order: u8,
}

/// The keys of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Data {
    /// 0 when there is no `meta`.
    pub epoch: u8,
    /// The identity under which `meta` was written.
    pub server: u8,
    pub frozen: Frozen,
    pub chunk: u8,
    pub stock: Option<u8>,
    pub total: u8,
    pub aside: u8,
    /// What is known of the one adjustment.
    pub mark: Mark,
    /// By buyer: each has one slot.
    pub held: [Option<Held>; BUYERS],
    pub unacked: [bool; BUYERS],
    pub marks: [bool; REQUESTS],
}

/// The engine and what a failover would bring back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Engine {
    pub identity: u8,
    pub data: Data,
    /// The data before the last write, while a failover may still happen.
    pub behind: Data,
}

/// What `rebuild_end.lua` is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct End {
    pub epoch: u8,
    pub chunks: u8,
    pub stock: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NotWarmed,
    /// Another epoch than the caller's, which is this one.
    Epoch(u8),
    /// Frozen for another reason.
    Frozen {
        epoch: u8,
        rebuilding: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeReply {
    Refused(Refusal),
    Replayed { order: u8, unacked: bool },
    Released,
    Duplicate,
    SoldOut,
    Taken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenBack {
    Retry,
    NotReserved,
    Released,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Refused,
    Held { order: u8, unacked: bool },
    No,
}

impl Data {
    pub const EMPTY: Self = Self {
        epoch: 0,
        server: 0,
        frozen: Frozen::No,
        chunk: 0,
        stock: None,
        total: 0,
        aside: 0,
        mark: Mark::None,
        held: [None; BUYERS],
        unacked: [false; BUYERS],
        marks: [false; REQUESTS],
    };

    #[must_use]
    pub fn warm(total: u8) -> Self {
        Self { epoch: 1, server: 1, stock: Some(total), total, ..Self::EMPTY }
    }

    /// Units in reservations.
    #[must_use]
    pub fn units_held(&self, scope: &Scope) -> u8 {
        self.held.iter().flatten().map(|held| scope.units[usize::from(held.request)]).sum()
    }
}

impl Engine {
    /// `guard.lua`.
    pub fn guard(&self, scope: &Scope, epoch: Option<u8>) -> Result<u8, Refusal> {
        let Data { epoch: found, server, frozen, stock, .. } = self.data;
        if stock.is_none() && found == 0 {
            return Err(Refusal::NotWarmed);
        }
        let refusal = Refusal::Frozen {
            epoch: found,
            rebuilding: server == self.identity && frozen == Frozen::Rebuilding,
        };
        if server != self.identity && !scope.is(Broken::AnyServer) || frozen != Frozen::No {
            return Err(refusal);
        }
        let stock = stock.ok_or(refusal)?;
        if epoch.is_some_and(|epoch| epoch != found) {
            return Err(Refusal::Epoch(found));
        }
        Ok(stock)
    }

    /// `reserve.lua` for one request.
    pub fn reserve(&mut self, scope: &Scope, request: usize, order: u8, epoch: u8) -> TakeReply {
        let stock = match self.guard(scope, Some(epoch)) {
            Ok(stock) => stock,
            Err(refusal) => return TakeReply::Refused(refusal),
        };
        let buyer = scope.buyers[request];
        let held = self.data.held[buyer];
        match held {
            Some(held) if usize::from(held.request) == request => {
                TakeReply::Replayed { order: held.order, unacked: self.data.unacked[buyer] }
            }
            Some(_) | None if self.data.marks[request] => TakeReply::Released,
            Some(_) => TakeReply::Duplicate,
            None if stock < scope.units[request] => TakeReply::SoldOut,
            None => {
                self.data.held[buyer] = Some(Held { request: small(request), order });
                self.data.unacked[buyer] = true;
                self.data.stock = Some(stock - scope.units[request]);
                TakeReply::Taken
            }
        }
    }

    /// `acknowledge.lua`: the reservation with this order number is in SQL.
    pub fn acknowledge(&mut self, scope: &Scope, buyer: usize, order: u8, epoch: u8) {
        if self.guard(scope, Some(epoch)).is_ok()
            && self.data.held[buyer].is_some_and(|held| held.order == order)
        {
            self.data.unacked[buyer] = false;
        }
    }

    /// `release.lua`, with the epoch of the outbox row.
    pub fn release(&mut self, scope: &Scope, request: usize, row_epoch: u8) -> GivenBack {
        let runs_anyway =
            scope.is(Broken::ReleaseWhileRebuilding) && self.is_rebuilding(self.data.epoch);
        let stock = match self.guard(scope, None) {
            Ok(stock) => Some(stock),
            Err(_) if runs_anyway => self.data.stock,
            Err(_) => return GivenBack::Retry,
        };
        if self.data.epoch < row_epoch {
            return GivenBack::Retry;
        }
        let buyer = scope.buyers[request];
        self.data.marks[request] |= !scope.is(Broken::ReleaseWithoutMark);
        if !self.holds(scope, request) {
            return GivenBack::NotReserved;
        }
        self.data.held[buyer] = None;
        self.data.unacked[buyer] = false;
        self.data.stock = stock.map(|stock| stock + scope.units[request]);
        GivenBack::Released
    }

    /// `find.lua`.
    pub fn find(&self, scope: &Scope, request: usize) -> Found {
        let buyer = scope.buyers[request];
        match self.data.held[buyer] {
            _ if self.guard(scope, None).is_err() => Found::Refused,
            Some(held) if usize::from(held.request) == request => {
                Found::Held { order: held.order, unacked: self.data.unacked[buyer] }
            }
            Some(_) | None => Found::No,
        }
    }

    /// Whether the reservation of this request is there.
    #[must_use]
    pub fn holds(&self, scope: &Scope, request: usize) -> bool {
        self.data.held[scope.buyers[request]]
            .is_some_and(|held| usize::from(held.request) == request)
    }

    /// `freeze.lua`.
    pub fn freeze(&mut self, epoch: u8) {
        if self.data.epoch == epoch && self.data.epoch > 0 {
            self.data.frozen = Frozen::Yes;
        }
    }

    /// `rebuild_begin.lua`; false when it is refused.
    pub fn begin(&mut self, scope: &Scope, epoch: u8, total: u8) -> bool {
        if self.data.epoch >= epoch {
            return false;
        }
        let before = self.data;
        let server = self.identity;
        self.data = Data { epoch, server, frozen: Frozen::Rebuilding, total, ..Data::EMPTY };
        if scope.is(Broken::BeginKeepsUnacked) {
            for buyer in (0..BUYERS).filter(|&buyer| before.unacked[buyer]) {
                self.data.held[buyer] = before.held[buyer];
                self.data.unacked[buyer] = true;
            }
        }
        true
    }

    /// `rebuild_load.lua`; false when it is refused.
    pub fn load(&mut self, scope: &Scope, epoch: u8, chunk: Chunk) -> bool {
        let Chunk { number, row, is_live } = chunk;
        let has_numbers = !scope.is(Broken::ChunksWithoutNumbers);
        if !self.is_rebuilding(epoch) || has_numbers && number > self.data.chunk + 1 {
            return false;
        }
        if has_numbers && number <= self.data.chunk {
            return true;
        }
        let request = usize::from(row.request);
        self.data.chunk = number;
        if is_live {
            self.data.held[scope.buyers[request]] = Some(row);
        } else {
            self.data.marks[request] = !scope.is(Broken::SnapshotWithoutMarks);
        }
        true
    }

    /// `rebuild_end.lua`; false when it is refused.
    pub fn end(&mut self, scope: &Scope, end: End) -> bool {
        let End { epoch, chunks, stock } = end;
        let is_whole = self.data.chunk == chunks || scope.is(Broken::ChunksWithoutNumbers);
        let is_any = scope.is(Broken::EndOfAnyEpoch) && self.is_rebuilding(self.data.epoch);
        if !(self.is_rebuilding(epoch) && is_whole || is_any) {
            return false;
        }
        self.data.frozen = Frozen::No;
        self.data.chunk = 0;
        self.data.stock = Some(stock);
        true
    }

    fn is_rebuilding(&self, epoch: u8) -> bool {
        let Data { epoch: found, server, frozen, .. } = self.data;
        found == epoch && server == self.identity && frozen == Frozen::Rebuilding
    }
}

/// An index as it is kept in a state.
pub(crate) fn small(index: usize) -> u8 {
    u8::try_from(index).expect("indexes are single digits")
}
