//! The protocol.
mod calls;
mod checks;
mod engine;
mod faults;
mod programs;
mod rest;
mod scope;
mod scopes;
mod sql;
mod world;

pub use checks::{Outcome, check, property};
pub use scope::{Broken, Faults, Role, Scope};
pub use scopes::*;
