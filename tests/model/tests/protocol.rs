use seckill_model::*;
use std::io::{Write, stderr};

fn holds(scope: Scope) {
    let outcome = check(scope, 2, None);
    writeln!(stderr(), "{outcome}").unwrap();
    assert!(outcome.complete, "{outcome}");
}
#[test]
fn calm_holds() {
    holds(calm());
}
#[test]
fn crash_holds() {
    holds(crash());
}
#[test]
fn flush_holds() {
    holds(flush());
}
#[test]
fn failover_holds() {
    holds(failover());
}
#[test]
fn settle_holds() {
    holds(settle());
}
