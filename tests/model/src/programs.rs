//! The programs: what each role does, step by step, as `src/reservations.rs`,
//! `src/reservations/release.rs`, `src/outbox/` and `src/recovery/` do it.
//!
//! A step is one call of a store and what the program makes of the reply.

use crate::{
    calls::Call,
    engine::{Data, Found, GivenBack, Refusal, Taken, small},
    scope::{BUYERS, Broken, REQUESTS, Role, Scope},
    sql::{InSql, Lock, RowState, Snapshot, Written},
    world::{Answer, Before, World},
};

/// How often a Reserve takes anew (`ATTEMPTS`), and how often a Release looks again (`REPEATS`,
/// which is 5 in the server).
const ATTEMPTS: u8 = 2;

/// Units that the engine took and SQL is to hear of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Taking {
    pub request: u8,
    pub order: u8,
    pub epoch: u8,
}

/// What a program does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Not begun; keepers come back to it.
    Idle,
    /// The end of a client's call.
    Over,
    /// Reserve: `reserve.lua`.
    Take,
    /// Reserve, sweeper: the writer's transaction.
    Record(Taking),
    /// Only where it is wrong on purpose.
    EarlyAcknowledge(Taking),
    /// SQL is at another epoch: freeze this one, and take anew.
    Again {
        epoch: u8,
    },
    /// SQL said that it is over: `release.lua`. After a refusal the epoch of the taking is frozen.
    GiveBack {
        request: u8,
        row_epoch: u8,
        freeze: Option<u8>,
        answer: bool,
    },
    Freeze {
        epoch: u8,
    },
    /// The engine knows a mark: what does SQL hold?
    LookUp,
    Acknowledge {
        request: u8,
        order: u8,
    },
    /// Release: the transaction.
    Release,
    Find,
    Tombstone {
        order: u8,
    },
    /// Release: was the row there after all?
    LookAgain {
        contradiction: Option<u8>,
    },
    /// Release, poller: `release.lua` for a row that is releasing.
    Finish {
        request: u8,
        row_epoch: u8,
    },
    MarkReleased {
        request: u8,
    },
    /// Rebuilder: `levels.lua`, after SQL was seen at this epoch.
    Levels {
        sql: u8,
    },
    Raise {
        sql: u8,
        above: u8,
    },
    Begin {
        epoch: u8,
    },
    Load {
        epoch: u8,
    },
    Commit {
        epoch: u8,
        chunks: u8,
        stock: u8,
    },
    End {
        epoch: u8,
        chunks: u8,
        stock: u8,
    },
    /// Settler: is anything unacked?
    Settle,
    Purge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Program {
    pub step: Step,
    pub attempt: u8,
    pub before: Before,
}

impl Default for Program {
    fn default() -> Self {
        Self { step: Step::Idle, attempt: 0, before: Before::default() }
    }
}

impl World {
    /// What a keeper may begin with now, each as (what, the world after its first look).
    ///
    /// A keeper that would find nothing to do does not begin.
    pub fn begin(&self, scope: &Scope, program: usize, mut each: impl FnMut(usize, World)) {
        let mut next = *self;
        match scope.roles[program] {
            Role::Reserve { .. } | Role::Release { .. } => {}
            Role::Sweeper { server } => {
                if self.engine.guard(scope, None).is_err() {
                    return;
                }
                let data = &self.engine.data;
                next.adopt(server, data.epoch);
                for buyer in (0..BUYERS).filter(|&buyer| data.unacked[buyer]) {
                    if let Some(held) = data.held[buyer] {
                        let (request, order) = (held.request, held.order);
                        let taking = Taking { request, order, epoch: data.epoch };
                        next.programs[program].step = Step::Record(taking);
                        each(buyer, next);
                    }
                }
            }
            Role::Poller { .. } => {
                for request in 0..REQUESTS {
                    let row = self.sql.rows[request];
                    let mut next = *self;
                    if row.state == RowState::Pending && !self.sql.is_locked() {
                        next.sql.place(request);
                        each(request, next);
                    } else if row.state == RowState::Releasing {
                        let request = small(request);
                        next.programs[program].step =
                            Step::Finish { request, row_epoch: row.epoch };
                        each(request.into(), next);
                    }
                }
            }
            Role::Rebuilder { .. } => {
                if self.is_in_trouble(scope) {
                    next.programs[program].step = Step::Levels { sql: self.sql.epoch };
                    each(0, next);
                }
            }
            Role::Settler { .. } => {
                let drained = self.engine.guard(scope, None).is_ok()
                    && self.engine.data.unacked == [false; BUYERS];
                if !self.sql.settled && drained {
                    next.programs[program].step = Step::Settle;
                    each(0, next);
                } else if self.sql.settled && self.engine.data != Data::EMPTY {
                    next.programs[program].step = Step::Purge;
                    each(0, next);
                }
            }
        }
    }

    /// The change that the program asks a store for next; `None` when it only reads, or is idle.
    #[must_use]
    pub fn call_of(&self, scope: &Scope, program: usize) -> Option<Call> {
        let role = scope.roles[program];
        let known = self.known[role.server()];
        let take = |request| Call::Reserve {
            request: small(request),
            order: small(program) + 1,
            epoch: known,
        };
        let call = match (self.programs[program].step, role) {
            (Step::Idle | Step::Take, Role::Reserve { request, .. }) => take(request),
            (Step::Idle | Step::Release, Role::Release { request, .. }) => {
                Call::Release { request: small(request) }
            }
            (Step::Record(Taking { request, order, epoch }), _) => {
                Call::Insert { request, order, epoch }
            }
            (
                Step::EarlyAcknowledge(Taking { request, order, .. })
                | Step::Acknowledge { request, order },
                _,
            ) => {
                let buyer = small(scope.buyers[usize::from(request)]);
                Call::Acknowledge { buyer, order, epoch: known }
            }
            (Step::Again { epoch } | Step::Freeze { epoch }, _) => Call::Freeze { epoch },
            (
                Step::GiveBack { request, row_epoch, .. } | Step::Finish { request, row_epoch },
                _,
            ) => Call::GiveBack { request, epoch: row_epoch },
            (Step::Tombstone { order }, Role::Release { request, .. }) => {
                Call::Tombstone { request: small(request), order }
            }
            (Step::MarkReleased { request }, _) => Call::MarkReleased { request },
            (Step::Begin { epoch }, _) => Call::Begin { epoch },
            (Step::Load { epoch }, _) => Call::Load { epoch, snapshot: self.to_load(scope) },
            (Step::Commit { .. }, _) => Call::Commit,
            (Step::End { epoch, chunks, stock }, _) => Call::End { epoch, chunks, stock },
            (Step::Settle, _) => Call::Settle,
            (Step::Purge, _) => Call::Purge,
            (
                Step::Idle
                | Step::Over
                | Step::Take
                | Step::Release
                | Step::Tombstone { .. }
                | Step::LookUp
                | Step::Find
                | Step::LookAgain { .. }
                | Step::Levels { .. }
                | Step::Raise { .. },
                _,
            ) => return None,
        };
        Some(call)
    }

    /// Lets the program go one step; `None` when it can't now.
    #[must_use]
    pub fn step(&self, scope: &Scope, program: usize) -> Option<World> {
        if self.call_of(scope, program).is_some_and(|call| self.waits(call)) {
            return None;
        }
        let mut next = *self;
        match (self.programs[program].step, scope.roles[program]) {
            (Step::Idle, Role::Reserve { request, .. } | Role::Release { request, .. }) => {
                next.hear(scope, program, request);
                let first = match scope.roles[program] {
                    Role::Reserve { .. } => Step::Take,
                    _ if scope.is(Broken::EngineBeforeSql) => {
                        Step::Finish { request: small(request), row_epoch: 0 }
                    }
                    _ => Step::Release,
                };
                next.programs[program].step = first;
                return next.step(scope, program);
            }
            (Step::Idle | Step::Over, _) => return None,
            (Step::Take, role) => next.reserve(scope, program, role),
            (Step::Record(taking), _) => next.record(scope, program, taking),
            (Step::EarlyAcknowledge(taking), _) => {
                let Taking { request, order, epoch } = taking;
                next.engine.acknowledge(scope, scope.buyers[usize::from(request)], order, epoch);
                next.programs[program].step = Step::Record(taking);
            }
            (Step::Again { epoch }, _) => {
                next.engine.freeze(epoch);
                next.take_anew(scope, program);
            }
            (Step::GiveBack { request, row_epoch, freeze, answer }, _) => {
                next.give_back(scope, request.into(), row_epoch);
                if answer {
                    let answer = match freeze {
                        Some(_) => Answer::SoldOut,
                        None => Answer::Released,
                    };
                    next.tell(scope, program, answer);
                }
                next.close(scope, program);
                if let Some(epoch) = freeze {
                    next.programs[program].step = Step::Freeze { epoch };
                }
            }
            (Step::Freeze { epoch }, _) => {
                next.engine.freeze(epoch);
                next.close(scope, program);
            }
            (Step::LookUp, _) => {
                let request = next.request_of(scope, program);
                let row = next.sql.rows[request];
                let answer = match row.state {
                    RowState::Pending | RowState::Done => Answer::Reserved { order: row.order },
                    RowState::Refused => Answer::SoldOut,
                    RowState::None | RowState::Releasing | RowState::Released => Answer::Released,
                };
                next.tell(scope, program, answer);
                next.close(scope, program);
            }
            (Step::Acknowledge { request, order }, role) => {
                let epoch = next.known[role.server()];
                next.engine.acknowledge(scope, scope.buyers[usize::from(request)], order, epoch);
                next.close(scope, program);
            }
            (Step::Release, _) => next.release(scope, program),
            (Step::Find, _) => next.find(scope, program),
            (Step::Tombstone { order }, _) => {
                let request = next.request_of(scope, program);
                next.sql.tombstone(request, order);
                next.look_anew(scope, program);
            }
            (Step::LookAgain { contradiction }, _) => {
                let request = next.request_of(scope, program);
                if next.sql.rows[request].state != RowState::None {
                    next.look_anew(scope, program);
                } else if let Some(epoch) = contradiction {
                    next.tell(scope, program, Answer::Unavailable);
                    next.programs[program].step = Step::Freeze { epoch };
                } else {
                    next.tell(scope, program, Answer::NotReserved);
                    next.close(scope, program);
                }
            }
            (Step::Finish { request, row_epoch }, role) => {
                next.finish(scope, program, role, request, row_epoch);
            }
            (Step::MarkReleased { request }, role) => {
                next.sql.mark_released(request.into());
                if matches!(role, Role::Release { .. }) {
                    next.tell(scope, program, Answer::GivenBack);
                }
                next.close(scope, program);
            }
            (
                step @ (Step::Levels { .. }
                | Step::Raise { .. }
                | Step::Begin { .. }
                | Step::Load { .. }
                | Step::Commit { .. }
                | Step::End { .. }),
                role,
            ) => next.rebuild(scope, program, role, step)?,
            (Step::Settle, _) => {
                next.close(scope, program);
                if next.sql.settle(scope) {
                    next.programs[program].step = Step::Purge;
                }
            }
            (Step::Purge, _) => {
                next.purge();
                next.close(scope, program);
            }
        }
        next.remember(self, scope);
        Some(next)
    }

    /// What the program does when its call is not answered.
    pub fn unanswered(&mut self, scope: &Scope, program: usize) {
        if let (Step::Idle, Role::Reserve { request, .. } | Role::Release { request, .. }) =
            (self.programs[program].step, scope.roles[program])
        {
            self.hear(scope, program, request);
        }
        if let Lock::Rebuild { program: holder, .. } = self.sql.lock
            && usize::from(holder) == program
        {
            // Its error path rolls back; a COMMIT that was let go has changed the lock already.
            self.sql.lock = Lock::Free;
        }
        if let (Step::Record(taking), true) =
            (self.programs[program].step, scope.is(Broken::GiveBackOnUnknown))
        {
            let Taking { request, epoch, .. } = taking;
            self.programs[program].step =
                Step::GiveBack { request, row_epoch: epoch, freeze: None, answer: false };
            return;
        }
        self.close(scope, program);
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

    fn reserve(&mut self, scope: &Scope, program: usize, role: Role) {
        let (server, request) = (role.server(), self.request_of(scope, program));
        let (order, epoch) = (small(program) + 1, self.known[server]);
        let taking = |order| Taking { request: small(request), order, epoch };
        let answer = match self.engine.reserve(scope, request, order, epoch) {
            Taken::Taken => {
                self.programs[program].step = if scope.is(Broken::AcknowledgeBeforeCommit) {
                    Step::EarlyAcknowledge(taking(order))
                } else {
                    Step::Record(taking(order))
                };
                if scope.is(Broken::AnswerBeforeCommit) {
                    self.tell(scope, program, Answer::Reserved { order });
                }
                return;
            }
            Taken::Replayed { order, unacked: true } => {
                self.programs[program].step = Step::Record(taking(order));
                return;
            }
            Taken::Released => {
                self.programs[program].step = Step::LookUp;
                return;
            }
            Taken::Refused(Refusal::Epoch(found)) if found >= epoch => {
                self.adopt(server, found);
                return self.take_anew(scope, program);
            }
            Taken::Replayed { order, unacked: false } => Answer::Reserved { order },
            Taken::Duplicate => Answer::Duplicate,
            Taken::SoldOut => Answer::SoldOut,
            // A rebuild is asked for; any rebuilder sees the trouble by itself.
            Taken::Refused(_) => Answer::Unavailable,
        };
        self.tell(scope, program, answer);
        self.close(scope, program);
    }

    fn record(&mut self, scope: &Scope, program: usize, taking: Taking) {
        let Taking { request, order, epoch } = taking;
        let give_back =
            |row_epoch, freeze| Step::GiveBack { request, row_epoch, freeze, answer: true };
        self.programs[program].step = match self.sql.insert(scope, request.into(), order, epoch) {
            Written::Live { order } => {
                self.tell(scope, program, Answer::Reserved { order });
                Step::Acknowledge { request, order }
            }
            Written::Refused { epoch: row_epoch } => give_back(row_epoch, Some(epoch)),
            Written::GivenBack { epoch: row_epoch } => give_back(row_epoch, None),
            Written::OtherEpoch => Step::Again { epoch },
        };
    }

    fn release(&mut self, scope: &Scope, program: usize) {
        let request = self.request_of(scope, program);
        let answer = match self.sql.release(scope, request) {
            InSql::Releasing { epoch: row_epoch } => {
                let request = small(request);
                self.programs[program].step = if scope.is(Broken::EngineBeforeSql) {
                    Step::MarkReleased { request }
                } else {
                    Step::Finish { request, row_epoch }
                };
                return;
            }
            InSql::NoRow if !scope.is(Broken::ReleaseTrustsMissingRow) => {
                self.programs[program].step = Step::Find;
                return;
            }
            InSql::Released => Answer::GivenBack,
            InSql::Refused | InSql::NoRow => Answer::NotReserved,
        };
        self.tell(scope, program, answer);
        self.close(scope, program);
    }

    fn find(&mut self, scope: &Scope, program: usize) {
        let request = self.request_of(scope, program);
        self.programs[program].step = match self.engine.find(scope, request) {
            Found::Refused => {
                self.tell(scope, program, Answer::Unavailable);
                Step::Over
            }
            Found::Held { order, unacked: true } => Step::Tombstone { order },
            Found::Held { unacked: false, .. } => {
                Step::LookAgain { contradiction: Some(self.engine.data.epoch) }
            }
            Found::No => Step::LookAgain { contradiction: None },
        };
    }

    fn finish(&mut self, scope: &Scope, program: usize, role: Role, request: u8, row_epoch: u8) {
        // A settled offer needs no script.
        let done = self.sql.settled
            || self.give_back(scope, request.into(), row_epoch) != GivenBack::Retry;
        let is_release = matches!(role, Role::Release { .. });
        if is_release && scope.is(Broken::EngineBeforeSql) {
            self.programs[program].step = Step::Release;
        } else if done {
            self.programs[program].step = Step::MarkReleased { request };
        } else {
            if is_release && scope.is(Broken::AnswerBeforeEngine) {
                self.tell(scope, program, Answer::GivenBack);
            }
            self.close(scope, program);
        }
    }

    /// One step of a rebuild; `None` when it waits for the lock.
    fn rebuild(&mut self, scope: &Scope, program: usize, role: Role, step: Step) -> Option<()> {
        let known = self.known[role.server()];
        let next = match step {
            Step::Levels { sql } => {
                let found = match self.engine.guard(scope, None) {
                    Ok(_) if self.engine.data.epoch == sql && sql >= known => {
                        self.adopt(role.server(), sql);
                        Some(sql)
                    }
                    Ok(_) | Err(_) => None,
                };
                // Another's rebuild that is under way is waited for, but not for ever: a program
                // that never waits can do all that one that waits can.
                match found {
                    Some(_) => Step::Idle,
                    None => Step::Raise { sql, above: self.engine.data.epoch.max(known) },
                }
            }
            Step::Raise { .. } if self.sql.is_locked() => return None,
            Step::Raise { sql, above } => match self.sql.raise(scope, program, sql, above) {
                Some(epoch) => Step::Begin { epoch },
                None => Step::Idle,
            },
            Step::Begin { epoch } => {
                let begun = self.engine.begin(scope, epoch);
                match self.to_load(scope) == Snapshot::EMPTY {
                    true if begun => {
                        Step::Commit { epoch, chunks: 0, stock: self.left_to_sell(scope) }
                    }
                    false if begun => Step::Load { epoch },
                    true | false => self.overtaken(),
                }
            }
            Step::Load { epoch } => {
                let snapshot = self.to_load(scope);
                match self.engine.load(epoch, &snapshot) {
                    true => Step::Commit { epoch, chunks: 1, stock: self.left_to_sell(scope) },
                    false => self.overtaken(),
                }
            }
            Step::Commit { epoch, chunks, stock } => {
                self.sql.commit(epoch);
                Step::End { epoch, chunks, stock }
            }
            Step::End { epoch, chunks, stock } => {
                if self.engine.end(scope, epoch, chunks, stock) {
                    self.adopt(role.server(), epoch);
                }
                Step::Idle
            }
            _ => Step::Idle,
        };
        self.programs[program].step = next;
        Some(())
    }

    fn overtaken(&mut self) -> Step {
        self.sql.lock = Lock::Free;
        Step::Idle
    }

    fn to_load(&self, scope: &Scope) -> Snapshot {
        let snapshot = self.sql.snapshot(scope);
        match scope.is(Broken::SnapshotWithoutMarks) {
            true => Snapshot { marks: [false; REQUESTS], ..snapshot },
            false => snapshot,
        }
    }

    fn left_to_sell(&self, scope: &Scope) -> u8 {
        scope.total.saturating_sub(self.sql.units(scope).max(self.sql.reserved))
    }

    fn hear(&mut self, scope: &Scope, program: usize, request: usize) {
        self.programs[program].before =
            Before { won: self.told.won[request] != 0, gone: self.told.gone[request] };
        self.told.asked[request] |= matches!(scope.roles[program], Role::Release { .. });
    }

    fn take_anew(&mut self, scope: &Scope, program: usize) {
        self.programs[program].attempt += 1;
        match scope.roles[program] {
            Role::Reserve { .. } if self.programs[program].attempt < ATTEMPTS => {
                self.programs[program].step = Step::Take;
            }
            _ => {
                self.tell(scope, program, Answer::Unavailable);
                self.close(scope, program);
            }
        }
    }

    fn look_anew(&mut self, scope: &Scope, program: usize) {
        self.programs[program].attempt += 1;
        if self.programs[program].attempt <= ATTEMPTS {
            self.programs[program].step = Step::Release;
        } else {
            self.tell(scope, program, Answer::Unavailable);
            self.close(scope, program);
        }
    }

    fn request_of(&self, scope: &Scope, program: usize) -> usize {
        match scope.roles[program] {
            Role::Reserve { request, .. } | Role::Release { request, .. } => request,
            role => panic!("{role:?} is no call of a client"),
        }
    }

    /// Answers a client; keepers have nobody to answer.
    fn tell(&mut self, scope: &Scope, program: usize, answer: Answer) {
        if let Role::Reserve { request, .. } | Role::Release { request, .. } = scope.roles[program]
        {
            self.answer(request, self.programs[program].before, answer);
        }
    }

    pub(crate) fn close(&mut self, scope: &Scope, program: usize) {
        let is_client = matches!(scope.roles[program], Role::Reserve { .. } | Role::Release { .. });
        let step = if is_client { Step::Over } else { Step::Idle };
        self.programs[program] = Program { step, ..Program::default() };
    }

    fn adopt(&mut self, server: usize, epoch: u8) {
        self.known[server] = self.known[server].max(epoch);
    }
}
