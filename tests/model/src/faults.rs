//! What may happen next: a step of a program, a call that arrives late, or a fault.

use crate::{
    adjust::Adjustment,
    calls::Call,
    engine::{Data, End},
    programs::Step,
    scope::{LATE, Role, SERVERS, Scope},
    world::World,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    Step {
        program: usize,
    },
    /// A keeper looks what there is to do, and begins with this buyer or request.
    Begin {
        program: usize,
        with: usize,
    },
    /// A rebuild reads its next page while the chunk before is on its way.
    ReadAhead {
        program: usize,
    },
    /// The program's call is not answered; it runs later, or never.
    Lose {
        program: usize,
    },
    Arrive {
        late: usize,
    },
    Crash {
        server: usize,
    },
    Flush,
    Failover {
        loses_a_write: bool,
    },
}

impl World {
    pub(crate) fn possible(&self, scope: &Scope, actions: &mut Vec<Action>) {
        for program in 0..scope.roles.len() {
            if self.exceeds(scope, program) {
                continue;
            }
            if self.step(scope, program).is_some() {
                actions.push(Action::Step { program });
            }
            if self.programs[program].step == Step::Idle && self.may_begin(scope, program) {
                self.begin(scope, program, |with, _| actions.push(Action::Begin { program, with }));
            }
            if self.read_ahead(scope, program).is_some() {
                actions.push(Action::ReadAhead { program });
            }
            if self.left.losses > 0
                && self.call_of(scope, program).is_some()
                && self.late.iter().any(Option::is_none)
            {
                actions.push(Action::Lose { program });
            }
        }
        for (late, call) in self.late.iter().enumerate() {
            if call.is_some() {
                actions.push(Action::Arrive { late });
            }
        }
        if self.left.crashes > 0 {
            let busy = |&server: &usize| {
                (0..scope.roles.len()).any(|program| self.dies(scope, program, server))
            };
            actions.extend((0..SERVERS).filter(busy).map(|server| Action::Crash { server }));
        }
        if self.left.flushes > 0 && self.engine.data != Data::EMPTY {
            actions.push(Action::Flush);
        }
        if self.left.failovers > 0 {
            actions.push(Action::Failover { loses_a_write: false });
            if self.engine.behind != Data::EMPTY {
                actions.push(Action::Failover { loses_a_write: true });
            }
        }
    }

    /// The world after the action; `None` when it can't happen.
    #[must_use]
    pub fn after(&self, scope: &Scope, action: Action) -> Option<World> {
        let mut next = *self;
        match action {
            Action::Step { program } => next = self.step(scope, program)?,
            Action::Begin { program, with } => {
                let mut begun = None;
                self.begin(scope, program, |found, world| {
                    if found == with {
                        begun = Some(world);
                    }
                });
                next = begun?;
            }
            Action::ReadAhead { program } => next = self.read_ahead(scope, program)?,
            Action::Lose { program } => {
                next.left.losses -= 1;
                let call = self.call_of(scope, program)?;
                next.let_go(call);
                next.unanswered(scope, program);
            }
            Action::Arrive { late } => {
                let call = next.take_late(late)?;
                next.arrive(scope, call);
            }
            Action::Crash { server } => next.crash(scope, server),
            Action::Flush => {
                next.left.flushes -= 1;
                next.engine.data = Data::EMPTY;
            }
            Action::Failover { loses_a_write } => {
                next.left.failovers -= 1;
                if loses_a_write {
                    next.engine.data = self.engine.behind;
                }
                next.engine.behind = Data::EMPTY;
                next.engine.identity += 1;
                next.lose_scripts();
            }
        }
        if !matches!(action, Action::Failover { .. }) {
            next.remember(self, scope);
        }
        next.forget_dead_calls(scope);
        Some(next)
    }

    /// The server dies and starts again: its programs are gone, what they asked for may arrive.
    fn crash(&mut self, scope: &Scope, server: usize) {
        self.left.crashes -= 1;
        for program in 0..scope.roles.len() {
            if !self.dies(scope, program, server) {
                continue;
            }
            if let Some(call) = self.call_of(scope, program) {
                self.let_go(call);
            }
            self.give_up(scope, program);
        }
        self.known[server] = self.sql.epoch;
    }

    fn dies(&self, scope: &Scope, program: usize, server: usize) -> bool {
        scope.roles[program].server() == server
            && !matches!(self.programs[program].step, Step::Idle | Step::Over)
    }

    /// Rebuilds are bounded by the highest epoch.
    fn may_begin(&self, scope: &Scope, program: usize) -> bool {
        !matches!(scope.roles[program], Role::Rebuilder { .. }) || self.sql.epoch < scope.epochs
    }

    fn exceeds(&self, scope: &Scope, program: usize) -> bool {
        matches!(self.programs[program].step, Step::Raise { sql, above, .. }
            if sql == self.sql.epoch && sql.max(above) >= scope.epochs)
    }

    /// Drops calls that can never change anything any more, so that fewer worlds differ.
    fn forget_dead_calls(&mut self, scope: &Scope) {
        if !scope.broken.is_empty() || self.late[0].is_none() {
            return;
        }
        let settles = scope.roles.iter().any(|role| matches!(role, Role::Settler { .. }));
        let engine_only_rises = self.left.flushes + self.left.failovers == 0 && !settles;
        let (engine, sql) = (self.engine.data.epoch, self.sql);
        let row = |request: u8| sql.rows[usize::from(request)].state;
        let is_dead = |call: Call| match call {
            Call::Reserve { epoch, .. }
            | Call::Acknowledge { epoch, .. }
            | Call::Freeze { epoch }
            | Call::Load { epoch, .. }
            | Call::SetAside { epoch }
            | Call::AddUnits { epoch }
            | Call::ForgetAside { epoch }
            | Call::PutBack { epoch }
            | Call::End(End { epoch, .. }) => engine_only_rises && engine > epoch,
            Call::Begin { epoch, .. } => engine_only_rises && engine >= epoch,
            Call::Raise { seen, .. } => sql.epoch > seen,
            Call::Insert { request, epoch, .. } => {
                row(request) != crate::sql::RowState::None || sql.epoch > epoch
            }
            Call::Tombstone { request, .. } => row(request) != crate::sql::RowState::None,
            Call::Release { request } | Call::MarkReleased { request } => {
                row(request) == crate::sql::RowState::Released
            }
            Call::Decide(_) => sql.adjustment != Adjustment::None,
            Call::MarkApplied => !matches!(sql.adjustment, Adjustment::Pending { .. }),
            Call::GiveBack { .. } | Call::Purge { .. } | Call::Settle => false,
        };
        let before = self.late;
        for late in &mut self.late {
            *late = late.filter(|call| !is_dead(*call));
        }
        if self.late != before {
            self.late = [None; LATE];
            before
                .into_iter()
                .flatten()
                .filter(|call| !is_dead(*call))
                .for_each(|call| self.let_go(call));
        }
    }
}
