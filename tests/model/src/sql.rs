//! SQL: the offer, its outbox rows and orders, and each transaction as one step.
//!
//! Transactions that write take the lock of the offer's row last, and commit: nobody sees them
//! before, so each is one step at that moment. Nobody holds the lock while it talks to the engine.

use crate::{
    adjust::Adjustment,
    engine::{Held, small},
    scope::{BUYERS, Broken, REQUESTS, Scope},
};

/// The state of an outbox row. Dead letters are live rows that wait for an operator, and left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowState {
    None,
    Pending,
    Done,
    Releasing,
    Released,
    Refused,
}

impl RowState {
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, RowState::Pending | RowState::Done)
    }

    /// Whether SQL allows the engine to give the units back.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, RowState::Releasing | RowState::Released | RowState::Refused)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    pub state: RowState,
    pub order: u8,
    pub epoch: u8,
    /// Whether its units were ever in the counter; those of a tombstone and of a refusal were not.
    pub counted: bool,
}

impl Row {
    const NONE: Self = Self { state: RowState::None, order: 0, epoch: 0, counted: false };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    None,
    Created,
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sql {
    pub epoch: u8,
    pub total: u8,
    pub adjustment: Adjustment,
    pub reserved: u8,
    pub settled: bool,
    pub rows: [Row; REQUESTS],
    pub orders: [Order; REQUESTS],
    /// A state of a row went backwards, or an order was there before its row was.
    pub went_back: bool,
    /// A row came to life after the offer was settled.
    pub late_insert: bool,
}

/// What SQL says of a reservation; see `outbox::writer::Written`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Live { order: u8 },
    Refused { epoch: u8 },
    GivenBack { epoch: u8 },
    OtherEpoch,
}

/// What the transaction of a release found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InSql {
    Releasing { epoch: u8 },
    Released,
    Refused,
    NoRow,
}

/// What the engine is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    pub held: [Option<Held>; BUYERS],
    pub marks: [bool; REQUESTS],
}

impl Snapshot {
    pub const EMPTY: Self = Self { held: [None; BUYERS], marks: [false; REQUESTS] };
}

impl Sql {
    #[must_use]
    pub fn new(total: u8) -> Self {
        Self {
            epoch: 1,
            total,
            adjustment: Adjustment::None,
            reserved: 0,
            settled: false,
            rows: [Row::NONE; REQUESTS],
            orders: [Order::None; REQUESTS],
            went_back: false,
            late_insert: false,
        }
    }

    /// Units in live rows.
    #[must_use]
    pub fn units(&self, scope: &Scope) -> u8 {
        let live = (0..REQUESTS).filter(|&request| self.rows[request].state.is_live());
        live.map(|request| scope.units[request]).sum()
    }

    /// The writer's transaction for one reservation.
    pub fn insert(&mut self, scope: &Scope, request: usize, order: u8, epoch: u8) -> Written {
        let row = self.rows[request];
        match row.state {
            RowState::Pending | RowState::Done => return Written::Live { order: row.order },
            RowState::Releasing | RowState::Released => {
                return Written::GivenBack { epoch: row.epoch };
            }
            RowState::Refused => return Written::Refused { epoch: row.epoch },
            RowState::None => {}
        }
        if self.epoch != epoch && !scope.is(Broken::InsertOfAnyEpoch) {
            return Written::OtherEpoch;
        }
        let buyer = scope.buyers[request];
        let has_rival = (0..REQUESTS)
            .any(|rival| scope.buyers[rival] == buyer && self.rows[rival].state.is_live());
        let is_short = self.reserved + scope.units[request] > self.total;
        self.rows[request].order = order;
        self.rows[request].epoch = epoch;
        if has_rival || is_short {
            self.walk(request, RowState::Refused);
            return Written::Refused { epoch };
        }
        self.walk(request, RowState::Pending);
        self.rows[request].counted = true;
        self.reserved += scope.units[request];
        self.late_insert |= self.settled;
        Written::Live { order }
    }

    /// The poller's transaction for one row.
    pub fn place(&mut self, request: usize) {
        if self.rows[request].state == RowState::Pending {
            self.walk(request, RowState::Done);
            self.went_back |= self.orders[request] != Order::None;
            self.orders[request] = Order::Created;
        }
    }

    /// The transaction of a release.
    pub fn release(&mut self, scope: &Scope, request: usize) -> InSql {
        match self.rows[request].state {
            RowState::None => return InSql::NoRow,
            RowState::Released => return InSql::Released,
            RowState::Refused => return InSql::Refused,
            RowState::Releasing => {
                return InSql::Releasing { epoch: self.rows[request].epoch };
            }
            RowState::Pending | RowState::Done => {}
        }
        self.walk(request, RowState::Releasing);
        if self.orders[request] == Order::Created {
            self.orders[request] = Order::Cancelled;
        }
        self.reserved -= scope.units[request];
        if !scope.is(Broken::ReleaseKeepsEpoch) {
            self.rows[request].epoch = self.epoch;
        }
        InSql::Releasing { epoch: self.rows[request].epoch }
    }

    /// A row that the late insert of a reservation in flight meets.
    pub fn tombstone(&mut self, request: usize, order: u8) {
        if self.rows[request].state == RowState::None {
            self.walk(request, RowState::Releasing);
            self.rows[request].order = order;
            self.rows[request].epoch = self.epoch;
        }
    }

    /// The engine has given back: the last word.
    pub fn mark_released(&mut self, request: usize) {
        if self.rows[request].state == RowState::Releasing {
            self.walk(request, RowState::Released);
        }
    }

    /// A rebuild's transaction: raises the epoch from the one that was seen; answers the new one.
    pub fn raise(&mut self, scope: &Scope, seen: u8, above: u8) -> Option<u8> {
        if self.epoch != seen && !scope.is(Broken::RaiseFromAnyEpoch) {
            return None;
        }
        self.epoch = self.epoch.max(above) + 1;
        Some(self.epoch)
    }

    /// Live rows as reservations, all others as marks.
    #[must_use]
    pub fn snapshot(&self, scope: &Scope) -> Snapshot {
        let mut snapshot = Snapshot::EMPTY;
        for (request, row) in self.rows.iter().enumerate() {
            if row.state.is_live() {
                snapshot.held[scope.buyers[request]] =
                    Some(Held { request: small(request), order: row.order });
            }
            snapshot.marks[request] = row.state.is_over();
        }
        snapshot
    }

    /// Settles the offer if nothing waits; answers whether it is settled.
    pub fn settle(&mut self, scope: &Scope) -> bool {
        let waits = |row: &Row| matches!(row.state, RowState::Pending | RowState::Releasing);
        let adjusts = matches!(self.adjustment, Adjustment::Pending { .. });
        if !self.settled && !adjusts && !self.rows.iter().any(waits) {
            self.settled = true;
            self.epoch += u8::from(!scope.is(Broken::SettleWithoutRaise));
        }
        self.settled
    }

    /// Moves a row on, and notes if that is no way it may go.
    fn walk(&mut self, request: usize, to: RowState) {
        let may_leave: &[RowState] = match to {
            RowState::None => &[],
            RowState::Pending | RowState::Refused => &[RowState::None],
            RowState::Done => &[RowState::Pending],
            RowState::Releasing => &[RowState::None, RowState::Pending, RowState::Done],
            RowState::Released => &[RowState::Releasing],
        };
        self.went_back |= !may_leave.contains(&self.rows[request].state);
        self.rows[request].state = to;
    }
}
