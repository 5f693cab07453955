//! The behaviour of the whole, one file per behaviour; `support` starts what it needs.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by panicking, on whatever it did not expect"
)]

mod activities;
mod api_edge;
mod bench;
mod broadcasts;
mod cli;
mod cli_client;
mod clients;
mod crash;
mod database;
mod dead_letters;
mod demo;
mod demo_real;
mod engine_differential;
mod engine_redis;
mod faults;
mod flows;
mod histories;
mod holds;
mod http;
mod known_faults;
mod limits;
mod locks;
mod model;
mod operations;
mod outage;
mod pipeline;
mod rebuilds;
mod reconcile;
mod sale;
mod settle;
mod sold_out;
mod start;
mod storm;
mod support;
mod tidy;
mod traces;
mod watch;
mod watched;
