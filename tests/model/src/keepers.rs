//! What comes back for ever: sweeper, poller and rebuilder, as `src/outbox/` and `src/recovery/` have
//! them, and the settler of the design.

use crate::{
    engine::{Data, End, Refusal, small},
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

    /// `levels.lua`, after SQL was seen at this epoch.
    pub(crate) fn look_at_levels(&mut self, scope: &Scope, program: usize, sql: u8) {
        let server = scope.roles[program].server();
        let (known, epoch) = (self.known[server], self.engine.data.epoch);
        let found = self.engine.guard(scope, None);
        let others = Err(Refusal::Frozen { epoch, rebuilding: true });
        if found.is_ok() && epoch == sql && sql >= known {
            self.adopt(server, sql);
            self.close(scope, program);
        } else if scope.patient && found == others && epoch >= sql {
            self.close(scope, program);
        } else {
            // Without patience: who never waits can do all that one who waits can.
            self.programs[program].step = Step::Raise { sql, above: epoch.max(known) };
        }
    }

    /// Begins the transaction; `None` while another one has the lock.
    pub(crate) fn raise(
        &mut self,
        scope: &Scope,
        program: usize,
        sql: u8,
        above: u8,
    ) -> Option<()> {
        if self.sql.is_locked() {
            return None;
        }
        if scope.names_rebuilds {
            self.begun += 1;
            self.programs[program].rebuild = self.begun;
        }
        self.programs[program].step = match self.sql.raise(scope, program, sql, above) {
            Some(epoch) if scope.is(Broken::LoadAfterCommit) => {
                let read = Some(self.what_to_load(scope));
                self.sql.commit(epoch);
                Step::Begin { epoch, read }
            }
            Some(epoch) => Step::Begin { epoch, read: None },
            None => Step::Idle,
        };
        Some(())
    }

    pub(crate) fn begin_rebuild(
        &mut self,
        scope: &Scope,
        program: usize,
        epoch: u8,
        read: Option<Snapshot>,
    ) {
        let rebuild = self.programs[program].rebuild;
        let begun = self.engine.begin(scope, epoch, rebuild);
        let is_empty = read.unwrap_or_else(|| self.what_to_load(scope)) == Snapshot::EMPTY;
        if !begun {
            self.overtaken(scope, program);
        } else if is_empty {
            self.programs[program].step = self.loaded(scope, program, epoch, read);
        } else {
            self.programs[program].step = Step::Load { epoch, read };
        }
    }

    pub(crate) fn load(
        &mut self,
        scope: &Scope,
        program: usize,
        epoch: u8,
        read: Option<Snapshot>,
    ) {
        let snapshot = read.unwrap_or_else(|| self.what_to_load(scope));
        let rebuild = self.programs[program].rebuild;
        if self.engine.load(epoch, rebuild, &snapshot) {
            self.programs[program].step = self.loaded(scope, program, epoch, read);
        } else {
            self.overtaken(scope, program);
        }
    }

    pub(crate) fn end_rebuild(&mut self, scope: &Scope, program: usize, end: End) {
        if self.engine.end(scope, end) {
            self.adopt(scope.roles[program].server(), end.epoch);
        }
        self.close(scope, program);
    }

    /// All is loaded: what is left to sell, by the rows or by the counter, whichever is more.
    fn loaded(&self, scope: &Scope, program: usize, epoch: u8, read: Option<Snapshot>) -> Step {
        let end = |taken: u8| End {
            epoch,
            rebuild: self.programs[program].rebuild,
            chunks: u8::from(self.what_to_load(scope) != Snapshot::EMPTY),
            stock: scope.total.saturating_sub(taken),
        };
        match read {
            Some(snapshot) => {
                let held = snapshot.held.iter().flatten();
                let live: u8 = held.map(|held| scope.units[usize::from(held.request)]).sum();
                Step::End(End { chunks: (snapshot != Snapshot::EMPTY).into(), ..end(live) })
            }
            None => Step::Commit(end(self.sql.units(scope).max(self.sql.reserved))),
        }
    }

    /// The engine refused a step, since another rebuild is ahead: rolls back.
    fn overtaken(&mut self, scope: &Scope, program: usize) {
        self.sql.lock = Lock::Free;
        self.close(scope, program);
    }

    pub(crate) fn what_to_load(&self, scope: &Scope) -> Snapshot {
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
