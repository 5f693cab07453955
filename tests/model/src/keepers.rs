//! What comes back for ever: sweeper, poller and settler, as `src/outbox/` and
//! `src/activities/settle.rs` have them, and how a rebuilder begins.

use crate::{
    engine::small,
    programs::{Step, Taking},
    scope::{BUYERS, REQUESTS, Role, Scope},
    sql::RowState,
    world::World,
};

impl World {
    /// What a keeper may begin with now, each as (what, the world after its first look).
    ///
    /// A keeper that would find nothing to do does not begin.
    pub fn begin(&self, scope: &Scope, program: usize, mut each: impl FnMut(usize, World)) {
        let mut next = *self;
        match scope.roles[program] {
            Role::Reserve { .. } | Role::Release { .. } | Role::Adjuster { .. } => {}
            Role::Sweeper { server } => {
                if self.engine.guard(scope, None).is_err() {
                    return;
                }
                if let Some(step) = self.finish_adjustment(scope) {
                    let mut next = next;
                    next.programs[program].step = step;
                    each(BUYERS, next);
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
                    if row.state == RowState::Pending {
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
                } else if self.sql.settled && (1..self.sql.epoch).contains(&self.engine.data.epoch)
                {
                    next.programs[program].step = Step::Purge { epoch: self.sql.epoch };
                    each(0, next);
                }
            }
        }
    }

    pub(crate) fn adopt(&mut self, server: usize, epoch: u8) {
        self.known[server] = self.known[server].max(epoch);
    }
}
