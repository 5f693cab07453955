//! Rest: nothing is under way, and the keepers find nothing more to do.

use crate::{
    programs::Step,
    scope::{Role, Scope},
    world::World,
};

/// Far more rounds than any world needs.
const ROUNDS: usize = 64;

impl World {
    /// What is wrong once the keepers have done all there is to do, without faults.
    ///
    /// It is asked of quiet worlds only. That is enough: from any other, the programs reach one by
    /// steps that the checker takes as well.
    #[must_use]
    pub fn trouble_at_rest(&self, scope: &Scope) -> Option<&'static str> {
        let mut world = *self;
        for program in &mut world.programs {
            if matches!(program.step, Step::Levels { .. } | Step::Raise { .. }) {
                program.step = Step::Idle;
            }
        }
        let trouble = world.come_to_rest(scope);
        if trouble.is_some() || world.late[0].is_none() {
            return trouble;
        }
        // Whatever was on its way arrives after all.
        while let Some(call) = world.take_late(0) {
            world.arrive(scope, call);
        }
        world.come_to_rest(scope)
    }

    fn come_to_rest(&mut self, scope: &Scope) -> Option<&'static str> {
        for _ in 0..ROUNDS {
            if !self.keep(scope) {
                return self.contradiction(scope);
            }
        }
        Some("the keepers never come to rest")
    }

    /// Lets one keeper do one thing; false when there is none to do.
    fn keep(&mut self, scope: &Scope) -> bool {
        let rank = |role: &Role| match role {
            Role::Rebuilder { .. } | Role::Settler { .. } => 0,
            Role::Sweeper { .. } => 1,
            Role::Poller { .. } => 2,
            Role::Reserve { .. } | Role::Release { .. } | Role::Adjuster { .. } => 3,
        };
        for wanted in 0..3 {
            for (program, role) in scope.roles.iter().enumerate() {
                let unwanted = matches!(role, Role::Settler { .. }) && !self.sql.settled;
                if rank(role) != wanted || unwanted {
                    continue;
                }
                let mut begun = None;
                self.begin(scope, program, |_, world| {
                    begun.get_or_insert(world);
                });
                if let Some(world) = begun {
                    *self = world;
                    while let Some(next) = self.step(scope, program) {
                        *self = next;
                    }
                    return true;
                }
            }
        }
        false
    }
}
