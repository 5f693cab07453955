//! What tests start and stop.

pub(crate) mod databases;
