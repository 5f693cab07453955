//! What comes back for ever: sweeper, poller and rebuilder, as `src/outbox/` and `src/recovery/` have
//! them, and the settler of the design.

use crate::{
    engine::{Data, Refusal, small},
    programs::{Step, Taking},
    scope::{BUYERS, Broken, REQUESTS, Role, Scope},
    sql::{Lock, RowState, Snapshot},
    world::World,
};

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

    /// One step of a rebuild; `None` when it waits for the lock.
    pub(crate) fn rebuild(&mut self, scope: &Scope, program: usize, step: Step) -> Option<()> {
        let server = scope.roles[program].server();
        let known = self.known[server];
        let next = match step {
            Step::Levels { sql } => {
                let found = self.engine.guard(scope, None);
                let epoch = self.engine.data.epoch;
                if found.is_ok() && epoch == sql && sql >= known {
                    self.adopt(server, sql);
                    Step::Idle
                } else if scope.patient
                    && found == Err(Refusal::Frozen { epoch, rebuilding: true })
                    && epoch >= sql
                {
                    Step::Idle
                } else {
                    // Without patience: who never waits can do all that one who waits can.
                    Step::Raise { sql, above: epoch.max(known) }
                }
            }
            Step::Raise { .. } if self.sql.is_locked() => return None,
            Step::Raise { sql, above } => match self.sql.raise(scope, program, sql, above) {
                Some(epoch) if scope.is(Broken::LoadAfterCommit) => {
                    let read = Some(self.to_load(scope));
                    self.sql.commit(epoch);
                    Step::Begin { epoch, read }
                }
                Some(epoch) => Step::Begin { epoch, read: None },
                None => Step::Idle,
            },
            Step::Begin { epoch, read } => {
                let begun = self.engine.begin(scope, epoch);
                let is_empty = read.unwrap_or_else(|| self.to_load(scope)) == Snapshot::EMPTY;
                match is_empty {
                    _ if !begun => self.overtaken(),
                    false => Step::Load { epoch, read },
                    true => self.loaded(scope, epoch, read),
                }
            }
            Step::Load { epoch, read } => {
                let snapshot = read.unwrap_or_else(|| self.to_load(scope));
                match self.engine.load(epoch, &snapshot) {
                    true => self.loaded(scope, epoch, read),
                    false => self.overtaken(),
                }
            }
            Step::Commit { epoch, chunks, stock } => {
                self.sql.commit(epoch);
                Step::End { epoch, chunks, stock }
            }
            Step::End { epoch, chunks, stock } => {
                if self.engine.end(scope, epoch, chunks, stock) {
                    self.adopt(server, epoch);
                }
                Step::Idle
            }
            other => panic!("{other:?} is no step of a rebuild"),
        };
        self.programs[program].step = next;
        Some(())
    }

    /// All is loaded: what is left to sell, by the rows or by the counter, whichever is more.
    pub(crate) fn loaded(&self, scope: &Scope, epoch: u8, read: Option<Snapshot>) -> Step {
        let chunks = self.engine.data.chunk;
        match read {
            Some(snapshot) => {
                let held = snapshot.held.iter().flatten();
                let live: u8 = held.map(|held| scope.units[usize::from(held.request)]).sum();
                Step::End { epoch, chunks, stock: scope.total.saturating_sub(live) }
            }
            None => {
                let taken = self.sql.units(scope).max(self.sql.reserved);
                Step::Commit { epoch, chunks, stock: scope.total.saturating_sub(taken) }
            }
        }
    }

    pub(crate) fn overtaken(&mut self) -> Step {
        self.sql.lock = Lock::Free;
        Step::Idle
    }

    pub(crate) fn to_load(&self, scope: &Scope) -> Snapshot {
        let snapshot = self.sql.snapshot(scope);
        match scope.is(Broken::SnapshotWithoutMarks) {
            true => Snapshot { marks: [false; REQUESTS], ..snapshot },
            false => snapshot,
        }
    }

    pub(crate) fn adopt(&mut self, server: usize, epoch: u8) {
        self.known[server] = self.known[server].max(epoch);
    }
}
