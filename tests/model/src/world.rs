//! The state of the whole world, and what was told to clients.

use crate::{
    adjust::Adjustment,
    calls::Call,
    engine::{Data, Engine, Frozen},
    programs::{Program, Step},
    scope::{Faults, LATE, PROGRAMS, REQUESTS, SERVERS, Scope},
    sql::{Order, RowState, Sql},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    pub engine: Engine,
    pub sql: Sql,
    /// The epoch that each server calls under.
    pub known: [u8; SERVERS],
    pub programs: [Program; PROGRAMS],
    /// Calls whose caller waits no longer; in order, so that equal worlds are equal.
    pub late: [Option<Call>; LATE],
    pub left: Faults,
    pub told: Told,
}

/// What clients heard, as far as it limits what they may hear later; and what must never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Told {
    /// The order number with which a request heard RESERVED; 0 if it did not.
    pub won: [u8; REQUESTS],
    /// A release was answered RELEASED or ALREADY_RELEASED.
    pub gone: [bool; REQUESTS],
    /// A release was begun.
    pub asked: [bool; REQUESTS],
    /// RESERVED was answered without the row.
    pub unfounded: bool,
    /// An answer contradicts an earlier one.
    pub contradicted: bool,
    /// The engine gave back what SQL did not hold as over.
    pub guessed: bool,
    /// A rebuild found that the counter in SQL differs from the rows.
    pub miscounted: bool,
}

/// What a call of the API is answered, where it limits other answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Reserved {
        order: u8,
    },
    Duplicate,
    SoldOut,
    /// A Reserve whose reservation was released.
    Released,
    /// A Release that is done.
    GivenBack,
    NotReserved,
    Unavailable,
}

/// What a client had heard before it made its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Before {
    pub won: bool,
    pub gone: bool,
    /// Release: the epoch under which the engine held the reservation; 0 if it did not.
    pub held_under: u8,
}

impl World {
    #[must_use]
    pub fn new(scope: &Scope) -> Self {
        let data = Data::warm(scope.total);
        Self {
            engine: Engine { identity: 1, data, behind: Data::EMPTY },
            sql: Sql::new(scope.total),
            known: [1; SERVERS],
            programs: [Program::default(); PROGRAMS],
            late: [None; LATE],
            left: scope.faults,
            told: Told::default(),
        }
    }

    /// Notes an answer, and whether it fits what was heard before the call.
    pub fn answer(&mut self, scope: &Scope, request: usize, before: Before, answer: Answer) {
        let row = self.sql.rows[request];
        let told = &mut self.told;
        match answer {
            Answer::Reserved { order } => {
                let is_there = matches!(
                    row.state,
                    RowState::Pending | RowState::Done | RowState::Releasing | RowState::Released
                );
                told.unfounded |= !is_there || row.order != order;
                let is_another = told.won[request] != 0 && told.won[request] != order;
                told.contradicted |= before.gone || is_another;
                told.won[request] = order;
            }
            Answer::Duplicate | Answer::SoldOut => {
                told.contradicted |= before.won || before.gone;
            }
            Answer::Released => told.contradicted |= !told.asked[request],
            Answer::GivenBack => told.gone[request] = true,
            Answer::NotReserved => {
                // Under one epoch the engine forgets nothing, so it was there all the time.
                let is_there = before.held_under > 0
                    && self.engine.data.epoch == before.held_under
                    && self.engine.holds(scope, request);
                told.contradicted |= before.won || before.gone || is_there;
            }
            Answer::Unavailable => {}
        }
    }

    /// Keeps what a failover would bring back, if one may still happen.
    pub(crate) fn remember(&mut self, before: &World, scope: &Scope) {
        if scope.faults.failovers > 0 && self.engine.data != before.engine.data {
            self.engine.behind = before.engine.data;
        }
        if self.left.failovers == 0 {
            self.engine.behind = Data::EMPTY;
        }
    }

    /// Whether a server that looks at the offer now would have it rebuilt.
    #[must_use]
    pub fn is_in_trouble(&self, scope: &Scope) -> bool {
        !self.sql.settled && !self.is_on_sale(scope)
    }

    /// Whether the engine sells, and SQL takes what it sells.
    #[must_use]
    pub fn is_on_sale(&self, scope: &Scope) -> bool {
        self.engine.guard(scope, Some(self.sql.epoch)).is_ok()
    }

    /// Whether no program is in the middle of anything. A rebuilder that has only read may start
    /// anew at any time.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.programs.iter().all(|program| {
            matches!(
                program.step,
                Step::Idle | Step::Over | Step::Levels { .. } | Step::Raise { loaded: None, .. }
            )
        })
    }

    /// What contradicts what, once nothing is under way.
    #[must_use]
    pub fn contradiction(&self, scope: &Scope) -> Option<&'static str> {
        let Engine { data, .. } = &self.engine;
        let rows = self.sql.rows;
        let has_its_order = |request: usize| match rows[request].state {
            RowState::Done => self.sql.orders[request] == Order::Created,
            RowState::None | RowState::Refused | RowState::Released => {
                self.sql.orders[request] != Order::Created
            }
            RowState::Pending | RowState::Releasing => false,
        };
        let snapshot = self.sql.snapshot(scope);
        let checks = [
            ("a row waits, or has the wrong order", (0..REQUESTS).all(has_its_order)),
            ("SQL counts other units than its rows", self.sql.reserved == self.sql.units(scope)),
        ];
        let on_sale = [
            ("the engine does not sell", self.is_on_sale(scope) && data.frozen == Frozen::No),
            ("something is unacked", data.unacked.iter().all(|unacked| !unacked)),
            ("engine and SQL hold different reservations", data.held == snapshot.held),
            (
                "units are lost or doubled",
                data.stock.map(|stock| stock + self.sql.units(scope)) == Some(self.sql.total),
            ),
            ("the engine has another total", data.total == self.sql.total && data.aside == 0),
            ("an adjustment waits", !matches!(self.sql.adjustment, Adjustment::Pending { .. })),
            (
                "what is over has no mark",
                (0..REQUESTS).all(|request| data.marks[request] >= snapshot.marks[request]),
            ),
        ];
        let settled = [("a settled offer is on sale", !self.is_on_sale(scope))];
        let engine: &[_] = if self.sql.settled { &settled } else { &on_sale };
        checks.iter().chain(engine).find(|(_, holds)| !holds).map(|(what, _)| *what)
    }
}
