//! The protocol holds in every world, and the model catches each step that is wrong on purpose.
//!
//! `SECKILL_MODEL=large` walks larger worlds, which may take an hour or more.

#![expect(
    clippy::print_stdout,
    reason = "traces are for who asks with --nocapture; how much was walked is for everybody"
)]

use std::io::{Write, stderr};

use seckill_model::{
    Broken::{self, *},
    Scope, check,
    property::*,
    scopes,
};

/// Walks the whole scope and says how large it was, past the capture of the test's output.
fn holds(scope: fn(bool) -> Scope) {
    #[expect(clippy::disallowed_methods, reason = "it chooses how long to test")]
    let large = std::env::var("SECKILL_MODEL").is_ok_and(|size| size == "large");
    let outcome = check(scope(large), 2, None);
    writeln!(stderr(), "model of {outcome}").expect("stderr is open");
    assert!(outcome.complete, "{outcome}");
}

/// Takes the shortest way to the violation.
fn is_caught(broken: &'static [Broken], scope: fn(bool) -> Scope, property: &'static str) {
    let outcome = check(scope(false).broken(broken), 1, Some(property));
    println!("{broken:?} in {outcome}");
    assert!(!outcome.violated.is_empty(), "{broken:?} goes unnoticed: {property}, {outcome}");
}

#[test]
fn the_protocol_holds_without_faults() {
    holds(scopes::calm);
}

#[test]
fn the_protocol_holds_when_a_server_dies_and_an_answer_is_lost() {
    holds(scopes::crash);
}

#[test]
fn the_protocol_holds_when_the_engine_is_flushed() {
    holds(scopes::flush);
}

#[test]
fn the_protocol_holds_when_a_rebuild_turns_pages() {
    holds(scopes::pages);
}

#[test]
fn the_protocol_holds_when_the_engine_fails_over() {
    holds(scopes::failover);
}

#[test]
fn the_protocol_holds_when_a_rebuild_dies_or_is_not_answered() {
    holds(scopes::rebuild);
}

#[test]
fn the_protocol_holds_through_one_trouble_after_another() {
    holds(scopes::mixed);
}

#[test]
fn the_protocol_holds_for_quantities_and_two_requests_of_a_buyer() {
    holds(scopes::units);
}

#[test]
fn one_loss_costs_one_rebuild() {
    holds(scopes::patience);
}

#[test]
fn the_protocol_holds_while_the_offer_is_settled() {
    holds(scopes::settle);
}

#[test]
fn the_protocol_holds_while_units_are_added() {
    holds(scopes::more);
}

#[test]
fn the_protocol_holds_while_units_are_taken_away() {
    holds(scopes::fewer);
}

#[test]
fn an_acknowledgement_before_the_commit_is_caught() {
    is_caught(&[AcknowledgeBeforeCommit], scopes::crash, NOTHING_LOST);
}

#[test]
fn an_answer_before_the_commit_is_caught() {
    is_caught(&[AnswerBeforeCommit], scopes::calm, DURABLE);
}

#[test]
fn a_release_in_the_engine_before_sql_is_caught() {
    is_caught(&[EngineBeforeSql], scopes::calm, NEVER_OFFERED_TWICE);
}

#[test]
fn giving_back_on_an_unknown_commit_is_caught() {
    is_caught(&[GiveBackOnUnknown], scopes::crash, NO_GUESS);
    is_caught(&[GiveBackOnUnknown], scopes::crash, NEVER_OFFERED_TWICE);
}

#[test]
fn an_insert_without_the_fence_of_the_epoch_is_caught() {
    is_caught(&[InsertOfAnyEpoch], scopes::flush, NEVER_OFFERED_TWICE);
}

#[test]
fn a_rebuild_that_reads_before_its_raise_is_committed_is_caught() {
    is_caught(&[ReadBeforeRaise], scopes::flush, NOTHING_LOST);
}

/// The model found this in an earlier scheme: SQL rolls a rebuild back, the engine is flushed, the
/// next rebuild has the same epoch, and a late chunk of the first lands in it.
#[test]
fn a_raise_that_is_rolled_back_is_caught() {
    is_caught(&[RaiseRolledBack], scopes::mixed, GIVEN_BACK_ONCE);
}

#[test]
fn a_counter_that_is_not_corrected_by_later_releases_is_caught() {
    is_caught(&[CounterAtRaise], scopes::flush, NOTHING_LOST);
    is_caught(&[CounterAtRaise], scopes::flush, COUNTED);
}

#[test]
fn a_counter_that_is_corrected_by_what_it_never_counted_is_caught() {
    is_caught(&[CountsTombstones], scopes::pages, COUNTED);
}

/// A rebuild that is not answered gives up, so it takes two wrong steps.
#[test]
fn chunks_without_numbers_are_caught() {
    is_caught(&[ChunksWithoutNumbers, GoesOnUnanswered], scopes::rebuild, NOTHING_LOST);
}

#[test]
fn a_release_while_a_rebuild_loads_is_caught() {
    is_caught(&[ReleaseWhileRebuilding], scopes::flush, NOTHING_LOST);
}

#[test]
fn a_rebuild_that_ends_another_one_is_caught() {
    is_caught(&[EndOfAnyEpoch], scopes::flush, GIVEN_BACK_ONCE);
}

#[test]
fn a_rebuild_that_keeps_what_is_unacked_is_caught() {
    is_caught(&[BeginKeepsUnacked], scopes::failover, NEVER_OFFERED_TWICE);
}

#[test]
fn a_rebuild_that_loads_no_marks_is_caught() {
    is_caught(&[SnapshotWithoutMarks], scopes::flush, NOTHING_LOST);
}

#[test]
fn a_released_row_with_the_epoch_of_its_insert_is_caught() {
    is_caught(&[ReleaseKeepsEpoch], scopes::flush, NOTHING_LOST);
}

#[test]
fn a_raise_from_any_epoch_is_caught() {
    is_caught(&[RaiseFromAnyEpoch], scopes::patience, ONE_REBUILD);
}

#[test]
fn a_release_that_is_answered_before_the_engine_is_caught() {
    is_caught(&[AnswerBeforeEngine], scopes::failover, SAME_ANSWER);
}

#[test]
fn a_release_without_a_mark_is_caught() {
    is_caught(&[ReleaseWithoutMark], scopes::calm, SAME_ANSWER);
}

#[test]
fn a_release_that_trusts_a_missing_row_is_caught() {
    is_caught(&[ReleaseTrustsMissingRow], scopes::calm, SAME_ANSWER);
}

#[test]
fn an_engine_that_does_not_compare_servers_is_caught() {
    is_caught(&[AnyServer], scopes::failover, NEVER_OFFERED_TWICE);
}

#[test]
fn a_settlement_that_raises_no_epoch_is_caught() {
    is_caught(&[SettleWithoutRaise], scopes::settle, SETTLED);
}

#[test]
fn a_rebuilder_that_reads_the_epoch_last_is_caught() {
    is_caught(&[LooksBeforeEpoch], scopes::settle, SETTLED);
}

#[test]
fn units_that_are_added_although_a_rebuild_has_counted_them_are_caught() {
    is_caught(&[AddsAtAnyEpoch], scopes::more, NEVER_OFFERED_TWICE);
}

#[test]
fn an_undo_before_sql_knows_of_it_is_caught() {
    is_caught(&[PutsBackBeforeSql], scopes::fewer, NEVER_OFFERED_TWICE);
}

#[test]
fn a_total_that_is_lowered_for_units_of_another_epoch_is_caught() {
    is_caught(&[TakesAwayAtAnyEpoch], scopes::fewer, NEVER_OFFERED_TWICE);
}

#[test]
fn an_engine_that_forgets_what_it_has_adjusted_is_caught() {
    is_caught(&[AdjustsWithoutMarks], scopes::more, NEVER_OFFERED_TWICE);
}
