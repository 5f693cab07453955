//! The worlds that are walked. Each is about one kind of trouble; together they have all of it.
//! The large ones have more of it at once.

use crate::scope::{Faults, Role, Scope};

const SWEEPER: Role = Role::Sweeper { server: 0 };
const POLLER: Role = Role::Poller { server: 1 };
const REBUILDER: Role = Role::Rebuilder { server: 0 };
const SECOND_REBUILDER: Role = Role::Rebuilder { server: 1 };
const SETTLER: Role = Role::Settler { server: 1 };
const KEEPERS: [Role; 3] = [SWEEPER, POLLER, REBUILDER];
const NONE: Faults = Faults { crashes: 0, losses: 0, flushes: 0, failovers: 0 };

/// A call through the server; requests 0 and 2 are of one buyer, 1 is of another.
fn reserve(request: usize, server: usize) -> Role {
    Role::Reserve { request, server }
}

fn release(request: usize, server: usize) -> Role {
    Role::Release { request, server }
}

/// No fault: two buyers want one unit; one of them repeats, gives back, and asks anew.
#[must_use]
pub fn calm(large: bool) -> Scope {
    let clients = [reserve(0, 0), reserve(0, 1), release(0, 1), reserve(1, 1), reserve(2, 0)];
    let more = [release(1, 0)];
    Scope::new("calm", 1, &[&clients, &KEEPERS, when(large, &more)], NONE, 2)
}

/// One server dies, and one call is not answered.
#[must_use]
pub fn crash(large: bool) -> Scope {
    let clients = [reserve(0, 0), reserve(0, 1), release(0, 1)];
    let more = [reserve(1, 1)];
    let faults = Faults { crashes: 1, losses: 1, ..NONE };
    Scope::new("crash", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 2)
}

/// The engine forgets everything, and two servers rebuild it.
#[must_use]
pub fn flush(large: bool) -> Scope {
    let clients = [reserve(0, 0), release(0, 1), SECOND_REBUILDER];
    let more = [reserve(1, 1)];
    let faults = Faults { flushes: 1, ..NONE };
    Scope::new("flush", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 3)
}

/// The engine forgets everything, and there is more than one page to load.
#[must_use]
pub fn pages(large: bool) -> Scope {
    let clients = [reserve(0, 0), reserve(1, 0), release(1, 1)];
    let more = [release(0, 1)];
    let faults = Faults { flushes: 1, ..NONE };
    Scope::new("pages", 2, &[&clients, &KEEPERS, when(large, &more)], faults, 2)
}

/// Another server takes over as engine, with all the data or without the last write.
#[must_use]
pub fn failover(large: bool) -> Scope {
    let clients = [reserve(0, 0), reserve(0, 1), release(0, 1)];
    let more = [reserve(1, 1)];
    let faults = Faults { failovers: 1, crashes: large.into(), ..NONE };
    Scope::new("failover", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 3)
}

/// The engine forgets everything, and a rebuild loses its server, or the answer to a call.
#[must_use]
pub fn rebuild(large: bool) -> Scope {
    let clients = [reserve(0, 0), SECOND_REBUILDER];
    let more = [release(0, 1)];
    let faults = Faults { crashes: 1, losses: 1, flushes: 1, ..NONE };
    Scope::new("rebuild", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 3)
}

/// A flush, a failover and a lost answer, in any order.
#[must_use]
pub fn mixed(large: bool) -> Scope {
    let clients = [reserve(0, 0), release(0, 1)];
    let more = [reserve(0, 1)];
    let faults = Faults { losses: 1, flushes: 1, failovers: 1, ..NONE };
    Scope::new("mixed", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 4)
}

/// One buyer asks for both units, then for one, while another asks for one; a call is not answered.
#[must_use]
pub fn units(large: bool) -> Scope {
    let clients = [reserve(0, 0), release(0, 1), reserve(1, 1), reserve(2, 0)];
    let faults = Faults { losses: 1, crashes: large.into(), ..NONE };
    let scope = Scope::new("units", 2, &[&clients, &KEEPERS], faults, 2);
    Scope { units: [2, 1, 1], ..scope }
}

/// One loss that two servers meet, who wait for each other as long as neither dies.
#[must_use]
pub fn patience(large: bool) -> Scope {
    let clients = [reserve(0, 0), reserve(1, 1), SECOND_REBUILDER];
    let more = [release(0, 1)];
    let faults = Faults { flushes: 1, ..NONE };
    let scope = Scope::new("patience", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 4);
    Scope { patient: true, ..scope }
}

/// The offer is settled while calls still come and go, one of them without an answer, and while the
/// engine forgets everything.
#[must_use]
pub fn settle(large: bool) -> Scope {
    let clients = [reserve(0, 0), release(0, 1), SETTLER];
    let more = [reserve(1, 1)];
    let faults = Faults { losses: 1, flushes: 1, ..NONE };
    Scope::new("settle", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 3)
}

/// An operator asks twice for one more unit, through two servers, while a buyer wants one; an answer
/// is lost, and the engine forgets everything.
#[must_use]
pub fn more(large: bool) -> Scope {
    let clients = [reserve(0, 0), adjust(0), adjust(1)];
    let more = [reserve(1, 1), SECOND_REBUILDER];
    let faults = Faults { losses: 1, flushes: 1, crashes: large.into(), ..NONE };
    let scope = Scope::new("more", 1, &[&clients, &KEEPERS, when(large, &more)], faults, 3);
    Scope { delta: 1, ..scope }
}

/// An operator asks twice for one unit fewer, likewise.
#[must_use]
pub fn fewer(large: bool) -> Scope {
    let clients = [reserve(0, 0), adjust(0), adjust(1)];
    let more = [reserve(1, 1), release(0, 1)];
    let faults = Faults { losses: 1, flushes: 1, crashes: large.into(), ..NONE };
    let scope = Scope::new("fewer", 2, &[&clients, &KEEPERS, when(large, &more)], faults, 3);
    Scope { delta: -1, ..scope }
}

fn adjust(server: usize) -> Role {
    Role::Adjuster { server }
}

fn when(large: bool, more: &[Role]) -> &[Role] {
    if large { more } else { &[] }
}
