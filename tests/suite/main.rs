//! The behaviour of the whole, one file per behaviour; `support` starts what it needs.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test may fail by panicking, on whatever it did not expect"
)]

mod access;
mod activities;
mod adjust;
mod alerts;
mod api_edge;
mod api_reference;
mod bench;
mod broadcasts;
mod cli;
mod cli_callers;
mod cli_client;
mod clients;
mod cluster;
mod crash;
mod dashboard;
mod database;
mod dead_letters;
mod demo;
mod demo_real;
mod descriptors;
mod doctor;
mod engine_differential;
mod engine_redis;
mod examples;
mod faults;
mod flows;
mod full_disk;
mod garbled;
mod histories;
mod holds;
mod hostile;
mod http;
mod known_faults;
mod limits;
mod links;
mod locks;
mod model;
mod observed;
mod operations;
mod outage;
mod packaging;
mod pipeline;
mod plans;
mod readme;
mod rebuilds;
mod reconcile;
mod redis_tls;
mod reserve_stream;
mod sale;
mod secrets;
mod segments;
mod sentinel;
mod servers;
mod settle;
mod sold_out;
mod spans;
mod start;
mod storm;
mod support;
mod terminal;
mod tidy;
mod tls;
mod traces;
mod watch;
mod watched;
mod watchers;
mod web;
