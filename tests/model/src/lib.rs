//! A model of Seckill's protocol: every order in which Reserve, Release, AdjustStock, the sweeper,
//! the poller, rebuilds and a settlement can take their steps, with faults at any point. It has none of the
//! server's code; it is the protocol, written down once more, small enough to be walked whole.
//!
//! Read on in this order:
//!
//! - [`Scope`]: who takes part in one bounded world, which faults may happen, what is [`Broken`];
//! - `engine`: the keys of a segment, and each script of `lua/` as one step;
//! - `sql`: offer, outbox and orders, and each transaction as one step;
//! - `programs`, `clients`, `keepers`, `rebuild`: what each role asks of the stores, and makes of the
//!   answers;
//! - `adjust`: more or fewer units of the offer;
//! - [`segments`]: how units move between the segments of an offer; a model beside the other;
//! - `calls`, `faults`: calls that arrive when nobody waits for them; crashes, losses, failovers;
//! - `world`, `rest`, `checks`: what was told to clients, and what must hold of it, always and at rest.
//!
//! **Why stateright.** The protocol spans processes and stores. What it must survive is a server
//! that dies, a COMMIT that nobody answers, a script that arrives a rebuild too late: messages and
//! stored state, not memory. shuttle and loom order the threads of one process and would have to
//! run the stores inside it. stateright walks plain states, breadth first, so what it finds is a
//! shortest way there.
//!
//! **What is left out**, and where it is tested instead: several slots and offers, batches,
//! Confirm and holds, dead letters, warm-up (`tests/suite/`). Isolation levels: a transaction is one
//! step at the moment of its commit, which is what the lock of the offer's row makes of it. The
//! revision: each failover changes the server's identity here as it does in Redis, so
//! comparing revisions is only the second net. A server that dies starts again at once. The lease of
//! a rebuild's lock in the engine: rebuilders wait for each other in one world and never in the
//! others, which includes whatever a lock that was lost would let happen. A freeze runs in sequence
//! with the call that asks for it, not in a task of its own. A connection that lives through the
//! demotion of its server and a promotion back, and so still has the identity from before.

mod adjust;
mod calls;
mod checks;
mod clients;
mod engine;
mod faults;
mod keepers;
mod programs;
mod rebuild;
mod rest;
mod scope;
pub mod scopes;
pub mod segments;
mod sql;
mod world;

pub use checks::{Outcome, check, property};
pub use scope::{Broken, Faults, Role, Scope};
