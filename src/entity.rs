//! The tables as SeaORM entities: nothing but columns. What they mean stands in `migrations/`.
//!
//! States are words, checked by the database too. Times are milliseconds since 1970 UTC
//! (`domain::TimeMs`).

pub mod activities;
pub mod adjustments;
pub mod audit;
pub mod leases;
pub mod offers;
pub mod orders;
pub mod outbox;
