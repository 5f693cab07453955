//! The programs: what each role does, step by step, as `src/reservations.rs`,
//! `src/reservations/release.rs`, `src/outbox/` and `src/recovery/` do it.
//!
//! A step is one call of a store and what the program makes of the reply.

use crate::{
    adjust::{Adjustment, Decision},
    calls::Call,
    engine::{End, small},
    rebuild::{Ahead, Chunk, Loading},
    scope::{Broken, Role, Scope},
    world::{Answer, Before, World},
};

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
    /// All is loaded before only where it is wrong on purpose.
    Raise {
        sql: u8,
        above: u8,
        loaded: Option<Loading>,
    },
    Begin(Loading),
    /// The next page.
    Read(Loading),
    Load {
        loading: Loading,
        chunk: Chunk,
        ahead: Ahead,
    },
    End(End),
    /// Settler: nothing was unacked.
    Settle,
    Purge {
        epoch: u8,
    },
    /// Adjuster: `set_aside.lua`.
    SetAside,
    /// Adjuster, sweeper: the transaction of an adjustment.
    Decide(Decision),
    /// `add_units.lua` or `forget_aside.lua`, for what SQL decided under this epoch.
    Follow {
        epoch: u8,
    },
    PutBack {
        epoch: u8,
    },
    MarkApplied,
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
            (Step::Raise { sql, above, .. }, _) => Call::Raise { seen: sql, above },
            (Step::Begin(Loading { epoch, total, .. }), _) => Call::Begin { epoch, total },
            (Step::Load { loading: Loading { epoch, .. }, chunk, .. }, _) => {
                Call::Load { epoch, chunk }
            }
            (Step::End(end), _) => Call::End(end),
            (Step::Settle, _) => Call::Settle,
            (Step::Purge { epoch }, _) => Call::Purge { epoch },
            (Step::Idle, Role::Adjuster { .. }) => match self.sql.adjustment {
                Adjustment::None if scope.delta > 0 => Call::Decide(Decision::Add),
                Adjustment::None => Call::SetAside { epoch: known },
                Adjustment::Pending { .. } | Adjustment::Applied { .. } | Adjustment::Cancelled => {
                    return None;
                }
            },
            (Step::SetAside, _) => Call::SetAside { epoch: known },
            (Step::Decide(decision), _) => Call::Decide(decision),
            (Step::Follow { epoch }, _) if scope.delta > 0 => Call::AddUnits { epoch },
            (Step::Follow { epoch }, _) => Call::ForgetAside { epoch },
            (Step::PutBack { epoch }, _) => Call::PutBack { epoch },
            (Step::MarkApplied, _) => Call::MarkApplied,
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
                | Step::Read(_),
                _,
            ) => return None,
        };
        Some(call)
    }

    /// Lets the program go one step; `None` when it has none to take.
    #[must_use]
    pub fn step(&self, scope: &Scope, program: usize) -> Option<World> {
        let mut next = *self;
        let role = scope.roles[program];
        let step = match (self.programs[program].step, role) {
            (Step::Idle, Role::Reserve { .. } | Role::Release { .. }) => {
                next.hear(scope, program);
                first_step(scope, role)
            }
            (Step::Idle, Role::Adjuster { .. }) => self.first_of_adjustment(scope),
            (step, _) => step,
        };
        next.programs[program].step = step;
        match step {
            Step::Over if self.programs[program].step == Step::Idle => {}
            Step::Idle | Step::Over => return None,
            Step::Take => next.take(scope, program),
            Step::Record(taking) => next.record(scope, program, taking),
            Step::EarlyAcknowledge(taking) => next.acknowledge_early(scope, program, taking),
            Step::Again { epoch } => {
                next.engine.freeze(epoch);
                next.take_anew(scope, program);
            }
            Step::GiveBack { request, row_epoch, freeze } => {
                next.give_back(scope, request.into(), row_epoch);
                next.undo(scope, program, freeze);
            }
            Step::Freeze { epoch } => {
                next.engine.freeze(epoch);
                next.close(scope, program);
            }
            Step::LookUp => next.look_up(scope, program),
            Step::Acknowledge { request, order } => {
                next.acknowledge(scope, program, request, order);
            }
            Step::Release => next.release(scope, program),
            Step::Find => next.find(scope, program),
            Step::Tombstone { order } => next.leave_tombstone(scope, program, order),
            Step::LookAgain { contradiction } => next.look_again(scope, program, contradiction),
            Step::Finish { request, row_epoch } => next.finish(scope, program, request, row_epoch),
            Step::MarkReleased { request } => {
                next.sql.mark_released(request.into());
                next.end(scope, program, Answer::GivenBack);
            }
            Step::Levels { sql } => next.look_at_levels(scope, program, sql),
            Step::Raise { sql, above, loaded } => next.raise(scope, program, sql, above, loaded),
            Step::Begin(loading) => next.begin_rebuild(scope, program, loading),
            Step::Read(loading) => next.read(scope, program, loading),
            Step::Load { loading, chunk, ahead } => {
                next.load(scope, program, loading, chunk, ahead);
            }
            Step::End(end) => next.end_rebuild(scope, program, end),
            Step::Settle => {
                next.close(scope, program);
                if next.sql.settle(scope) {
                    next.programs[program].step = Step::Purge { epoch: next.sql.epoch };
                }
            }
            Step::Purge { epoch } => {
                next.purge(epoch);
                next.close(scope, program);
            }
            Step::SetAside => next.set_aside(scope, program),
            Step::Decide(decision) => next.decide(scope, program, decision),
            Step::Follow { epoch } => next.follow(scope, program, epoch),
            Step::PutBack { epoch } => next.put_back(scope, program, epoch),
            Step::MarkApplied => {
                next.sql.mark_applied();
                next.close(scope, program);
            }
        }
        Some(next)
    }

    /// What the program does when its call is not answered.
    pub fn unanswered(&mut self, scope: &Scope, program: usize) {
        if self.programs[program].step == Step::Idle {
            self.hear(scope, program);
        }
        if let Step::Record(Taking { request, epoch, .. }) = self.programs[program].step
            && scope.is(Broken::GiveBackOnUnknown)
        {
            self.give_back(scope, request.into(), epoch);
        }
        if let Step::Load { loading, ahead, .. } = self.programs[program].step
            && scope.is(Broken::GoesOnUnanswered)
        {
            return self.after_chunk(scope, program, loading, ahead);
        }
        self.give_up(scope, program);
    }

    /// The end of a client's call, or of a keeper's turn.
    pub(crate) fn close(&mut self, scope: &Scope, program: usize) {
        let is_client = scope.roles[program].is_client();
        let step = if is_client { Step::Over } else { Step::Idle };
        self.programs[program] = Program { step, ..Program::default() };
    }
}

fn first_step(scope: &Scope, role: Role) -> Step {
    match role {
        Role::Release { request, .. } if scope.is(Broken::EngineBeforeSql) => {
            Step::Finish { request: small(request), row_epoch: 0 }
        }
        Role::Release { .. } => Step::Release,
        Role::Reserve { .. } => Step::Take,
        Role::Sweeper { .. }
        | Role::Poller { .. }
        | Role::Rebuilder { .. }
        | Role::Settler { .. }
        | Role::Adjuster { .. } => Step::Idle,
    }
}
