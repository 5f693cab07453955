//! The one test binary: one module per behaviour, and `support` to start things with.
#![allow(
    clippy::unwrap_used,
    reason = "a test that fails may say so by a panic"
)]

mod support;

mod database;
