//! Reserve and Release, as `src/reservations.rs` and `src/reservations/release.rs` have them. The
//! sweeper walks the second half of Reserve, and the poller that of Release.

use crate::{
    engine::{Found, GivenBack, Refusal, TakeReply, small},
    programs::{Step, Taking},
    scope::{Broken, Role, Scope},
    sql::{InSql, RowState, Written},
    world::{Answer, Before, World},
};

/// How often a Reserve takes anew, and a Release looks again; the server looks five times.
const ATTEMPTS: u8 = 2;

impl World {
    /// A call begins: notes what its client may have heard by now.
    pub(crate) fn hear(&mut self, scope: &Scope, program: usize) {
        let role = scope.roles[program];
        let Some(request) = role.request() else { return };
        let is_release = matches!(role, Role::Release { .. });
        let is_held = is_release && self.is_on_sale(scope) && self.engine.holds(scope, request);
        self.programs[program].before = Before {
            won: self.told.won[request] != 0,
            gone: self.told.gone[request],
            held_under: if is_held { self.engine.data.epoch } else { 0 },
        };
        self.told.asked[request] |= is_release;
    }

    /// `reserve.lua`.
    pub(crate) fn take(&mut self, scope: &Scope, program: usize) {
        let (server, request) = (scope.roles[program].server(), request_of(scope, program));
        let (order, epoch) = (small(program) + 1, self.known[server]);
        let taking = |order| Taking { request: small(request), order, epoch };
        let answer = match self.engine.reserve(scope, request, order, epoch) {
            TakeReply::Taken => {
                if scope.is(Broken::AnswerBeforeCommit) {
                    self.tell(scope, program, Answer::Reserved { order });
                }
                self.programs[program].step = match scope.is(Broken::AcknowledgeBeforeCommit) {
                    true => Step::EarlyAcknowledge(taking(order)),
                    false => Step::Record(taking(order)),
                };
                return;
            }
            TakeReply::Replayed { order, unacked: true } => {
                self.programs[program].step = Step::Record(taking(order));
                return;
            }
            TakeReply::Released => {
                self.programs[program].step = Step::LookUp;
                return;
            }
            TakeReply::Refused(Refusal::Epoch(found)) if found >= epoch => {
                self.adopt(server, found);
                return self.take_anew(scope, program);
            }
            TakeReply::Replayed { order, unacked: false } => Answer::Reserved { order },
            TakeReply::Duplicate => Answer::Duplicate,
            TakeReply::SoldOut => Answer::SoldOut,
            // A rebuild is asked for; any rebuilder sees the trouble by itself.
            TakeReply::Refused(_) => Answer::Unavailable,
        };
        self.end(scope, program, answer);
    }

    /// The writer's transaction.
    pub(crate) fn record(&mut self, scope: &Scope, program: usize, taking: Taking) {
        let Taking { request, order, epoch } = taking;
        self.programs[program].step = match self.sql.insert(scope, request.into(), order, epoch) {
            Written::Live { order } => {
                self.tell(scope, program, Answer::Reserved { order });
                Step::Acknowledge { request, order }
            }
            Written::Refused { epoch: row_epoch } => {
                Step::GiveBack { request, row_epoch, freeze: Some(epoch) }
            }
            Written::GivenBack { epoch: row_epoch } => {
                Step::GiveBack { request, row_epoch, freeze: None }
            }
            Written::OtherEpoch => Step::Again { epoch },
        };
    }

    /// Only where it is wrong on purpose.
    pub(crate) fn acknowledge_early(&mut self, scope: &Scope, program: usize, taking: Taking) {
        let Taking { request, order, epoch } = taking;
        self.engine.acknowledge(scope, scope.buyers[usize::from(request)], order, epoch);
        self.programs[program].step = Step::Record(taking);
    }

    pub(crate) fn acknowledge(&mut self, scope: &Scope, program: usize, request: u8, order: u8) {
        let epoch = self.known[scope.roles[program].server()];
        self.engine.acknowledge(scope, scope.buyers[usize::from(request)], order, epoch);
        self.close(scope, program);
    }

    /// `release.lua` for what SQL said is over; after a refusal, the freeze comes next.
    pub(crate) fn undo(&mut self, scope: &Scope, program: usize, freeze: Option<u8>) {
        match freeze {
            Some(epoch) => {
                self.tell(scope, program, Answer::SoldOut);
                self.programs[program].step = Step::Freeze { epoch };
            }
            None => self.end(scope, program, Answer::Released),
        }
    }

    /// The engine knows a mark; SQL tells which kind.
    pub(crate) fn look_up(&mut self, scope: &Scope, program: usize) {
        let row = self.sql.rows[request_of(scope, program)];
        let answer = match row.state {
            RowState::Pending | RowState::Done => Answer::Reserved { order: row.order },
            RowState::Refused => Answer::SoldOut,
            RowState::None | RowState::Releasing | RowState::Released => Answer::Released,
        };
        self.end(scope, program, answer);
    }

    pub(crate) fn take_anew(&mut self, scope: &Scope, program: usize) {
        self.programs[program].attempt += 1;
        let is_reserve = matches!(scope.roles[program], Role::Reserve { .. });
        if is_reserve && self.programs[program].attempt < ATTEMPTS {
            self.programs[program].step = Step::Take;
        } else {
            self.end(scope, program, Answer::Unavailable);
        }
    }

    /// The transaction of a Release.
    pub(crate) fn release(&mut self, scope: &Scope, program: usize) {
        let request = request_of(scope, program);
        let answer = match self.sql.release(scope, request) {
            InSql::Releasing { epoch: row_epoch } => {
                let request = small(request);
                self.programs[program].step = match scope.is(Broken::EngineBeforeSql) {
                    true => Step::MarkReleased { request },
                    false => Step::Finish { request, row_epoch },
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
        self.end(scope, program, answer);
    }

    /// `find.lua`, for a Release that found no row.
    pub(crate) fn find(&mut self, scope: &Scope, program: usize) {
        let epoch = self.engine.data.epoch;
        self.programs[program].step = match self.engine.find(scope, request_of(scope, program)) {
            Found::Refused => return self.end(scope, program, Answer::Unavailable),
            Found::Held { order, unacked: true } => Step::Tombstone { order },
            Found::Held { unacked: false, .. } => Step::LookAgain { contradiction: Some(epoch) },
            Found::No => Step::LookAgain { contradiction: None },
        };
    }

    pub(crate) fn leave_tombstone(&mut self, scope: &Scope, program: usize, order: u8) {
        self.sql.tombstone(request_of(scope, program), order);
        self.look_anew(scope, program);
    }

    /// The commit may have arrived between the two looks.
    pub(crate) fn look_again(&mut self, scope: &Scope, program: usize, contradiction: Option<u8>) {
        if self.sql.rows[request_of(scope, program)].state != RowState::None {
            self.look_anew(scope, program);
        } else if let Some(epoch) = contradiction {
            self.tell(scope, program, Answer::Unavailable);
            self.programs[program].step = Step::Freeze { epoch };
        } else {
            self.end(scope, program, Answer::NotReserved);
        }
    }

    /// `release.lua` for a row that is releasing.
    pub(crate) fn finish(&mut self, scope: &Scope, program: usize, request: u8, row_epoch: u8) {
        // A settled offer needs no script.
        let is_done = self.sql.settled
            || self.give_back(scope, request.into(), row_epoch) != GivenBack::Retry;
        let is_release = matches!(scope.roles[program], Role::Release { .. });
        if is_release && scope.is(Broken::EngineBeforeSql) {
            self.programs[program].step = Step::Release;
        } else if is_done {
            self.programs[program].step = Step::MarkReleased { request };
        } else if scope.is(Broken::AnswerBeforeEngine) {
            self.end(scope, program, Answer::GivenBack);
        } else {
            self.end(scope, program, Answer::Unavailable);
        }
    }

    fn look_anew(&mut self, scope: &Scope, program: usize) {
        self.programs[program].attempt += 1;
        if self.programs[program].attempt <= ATTEMPTS {
            self.programs[program].step = Step::Release;
        } else {
            self.end(scope, program, Answer::Unavailable);
        }
    }

    pub(crate) fn end(&mut self, scope: &Scope, program: usize, answer: Answer) {
        self.tell(scope, program, answer);
        self.close(scope, program);
    }

    /// Answers a client; keepers have nobody to answer.
    fn tell(&mut self, scope: &Scope, program: usize, answer: Answer) {
        if let Some(request) = scope.roles[program].request() {
            self.answer(scope, request, self.programs[program].before, answer);
        }
    }
}

fn request_of(scope: &Scope, program: usize) -> usize {
    scope.roles[program].request().expect("only a client's call comes here")
}
