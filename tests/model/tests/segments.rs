//! Units that move between segments are neither lost nor made, SOLD_OUT is true of some moment, and the
//! model catches each step that is wrong on purpose.

#![expect(
    clippy::print_stdout,
    reason = "traces are for who asks with --nocapture; how much was walked is for everybody"
)]

use std::io::{Write, stderr};

use seckill_model::segments::{
    Broken::{self, *},
    Role::{self, *},
    Scope, check,
    property::*,
};

fn holds(scope: Scope) {
    let outcome = check(scope, 2, None);
    writeln!(stderr(), "model of {outcome}").expect("stderr is open");
    assert!(outcome.complete, "{outcome}");
}

fn is_caught(broken: &[Broken], scope: Scope, property: &'static str) {
    let outcome = check(scope.broken(broken), 1, Some(property));
    println!("{broken:?} in {outcome}");
    assert!(!outcome.violated.is_empty(), "{broken:?} goes unnoticed: {property}, {outcome}");
}

const AT_0: Role = Reserve { home: 0 };
const AT_1: Role = Reserve { home: 1 };
const AT_2: Role = Reserve { home: 2 };

/// Three segments, one unit, and a buyer of each home, one of whom gives back.
fn moving() -> Scope {
    Scope::new("moving", &[1, 0, 0], &[AT_1, AT_2, AT_0, Release { of: 0 }], 0).reaching()
}

/// Units of one segment are asked for in two others, and a server dies.
fn crash() -> Scope {
    Scope::new("crash", &[2, 0, 0], &[AT_1, AT_2, Sweeper], 1)
}

/// The offer is rebuilt in the middle.
fn rebuild() -> Scope {
    Scope::new("rebuild", &[1, 0], &[AT_1, AT_1, Rebuilder], 0)
}

/// And a server dies as well.
fn both() -> Scope {
    Scope::new("rebuild and crash", &[1, 0], &[AT_1, AT_1, Rebuilder, Sweeper], 1)
}

#[test]
fn units_move_while_buyers_ask_and_give_back() {
    holds(moving());
}

#[test]
fn units_move_although_a_server_dies() {
    holds(crash());
}

#[test]
fn units_move_while_the_offer_is_rebuilt() {
    holds(rebuild());
}

#[test]
fn units_move_while_the_offer_is_rebuilt_and_a_server_dies() {
    holds(both());
}

/// W6
#[test]
fn one_pass_over_the_segments_is_caught() {
    is_caught(&[OnePass], moving(), TRULY_SOLD_OUT);
}

/// W7: it takes two wrong steps, since a target that refuses is followed by a rebuild.
#[test]
fn a_source_that_forgets_what_was_refused_is_caught() {
    is_caught(&[ForgetsAfterRetry, ForgetsAtAnyEpoch], rebuild(), NOTHING_LOST);
}

#[test]
fn an_arrival_without_its_sequence_is_caught() {
    is_caught(&[InWithoutSequence], crash(), NOTHING_MADE);
}

#[test]
fn an_arrival_of_another_epoch_is_caught() {
    is_caught(&[InOfAnyEpoch], rebuild(), NOTHING_MADE);
}

#[test]
fn a_second_transfer_under_one_sequence_is_caught() {
    let one_pair = Scope::new("one pair", &[2, 0], &[AT_1, AT_1, Sweeper], 1);
    is_caught(&[OutInFlight], one_pair, NOTHING_LOST);
}
