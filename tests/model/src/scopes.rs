//! The worlds that are walked.

use crate::scope::{Faults, Role, Scope};

const fn reserve(request: usize, server: usize) -> Role {
    Role::Reserve { request, server }
}
const fn release(request: usize, server: usize) -> Role {
    Role::Release { request, server }
}
const SWEEPER: Role = Role::Sweeper { server: 0 };
const POLLER: Role = Role::Poller { server: 1 };
const REBUILDER: Role = Role::Rebuilder { server: 0 };
const SECOND_REBUILDER: Role = Role::Rebuilder { server: 1 };
const SETTLER: Role = Role::Settler { server: 1 };

/// No fault: two buyers want one unit, one of them repeats and gives back, then wants it again.
#[must_use]
pub fn calm() -> Scope {
    let roles = [
        reserve(0, 0),
        reserve(0, 1),
        release(0, 1),
        reserve(1, 1),
        reserve(2, 0),
        SWEEPER,
        POLLER,
        REBUILDER,
    ];
    Scope::new("calm", 1, &roles, Faults::default(), 2)
}

#[must_use]
pub fn crash() -> Scope {
    let roles =
        [reserve(0, 0), reserve(0, 1), release(0, 1), reserve(1, 1), SWEEPER, POLLER, REBUILDER];
    let faults = Faults { crashes: 1, losses: 1, ..Faults::default() };
    Scope::new("crash", 1, &roles, faults, 2)
}

#[must_use]
pub fn flush() -> Scope {
    let roles =
        [reserve(0, 0), release(0, 1), reserve(1, 1), SWEEPER, POLLER, REBUILDER, SECOND_REBUILDER];
    let faults = Faults { flushes: 1, ..Faults::default() };
    Scope::new("flush", 1, &roles, faults, 3)
}

#[must_use]
pub fn failover() -> Scope {
    let roles = [reserve(0, 0), reserve(0, 1), release(0, 1), SWEEPER, POLLER, REBUILDER];
    let faults = Faults { failovers: 1, ..Faults::default() };
    Scope::new("failover", 1, &roles, faults, 3)
}

#[must_use]
pub fn settle() -> Scope {
    let roles = [reserve(0, 0), release(0, 1), reserve(1, 1), SWEEPER, POLLER, REBUILDER, SETTLER];
    let faults = Faults { losses: 1, ..Faults::default() };
    Scope::new("settle", 1, &roles, faults, 3)
}
