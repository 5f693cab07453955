//! Each guarantee of `WatchStock` has a validator that refuses a stream which breaks it.

use std::time::Duration;

use crate::support::watched::{CONVERGENCE, End, Message, Watched};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Ten units, of which so many are left.
fn message(at: u64, remaining: i64, epoch: i64, revision: i64) -> Message {
    Message {
        at: ms(at),
        sku: "a".to_owned(),
        total: 10,
        remaining,
        reserved: 10 - remaining,
        state: "ACTIVE".to_owned(),
        epoch,
        revision,
        snapshot: false,
        heartbeat: false,
    }
}

fn snapshot(sku: &str) -> Message {
    Message { sku: sku.to_owned(), snapshot: true, ..message(1, 10, 1, 1) }
}

fn heartbeat(message: Message) -> Message {
    Message { heartbeat: true, ..message }
}

/// A stream about `a`, from its snapshot on.
fn of(messages: Vec<Message>) -> Watched {
    let messages = [vec![snapshot("a")], messages].concat();
    let until = messages.last().unwrap().at;
    Watched { skus: vec!["a".to_owned()], messages, until, ..Watched::default() }
}

#[track_caller]
fn accepted(outcome: Result<(), String>) {
    outcome.unwrap();
}

#[track_caller]
fn refused(outcome: Result<(), String>, why: &str) {
    let wrong = outcome.expect_err("it was accepted");
    assert!(wrong.contains(why), "{wrong}");
}

#[test]
fn a_stream_as_it_should_be_is_accepted() {
    let mut settled = message(40, 8, 2, 7);
    settled.state = "SETTLED".to_owned();
    let messages =
        vec![message(10, 9, 1, 2), heartbeat(message(20, 9, 1, 2)), message(30, 8, 2, 7), settled];
    accepted(Watched { end: Some(End::Ok), ..of(messages) }.check());
}

#[test]
fn snapshot_first() {
    let with = |messages: Vec<Message>| Watched {
        skus: vec!["a".to_owned(), "b".to_owned()],
        messages,
        ..Watched::default()
    };
    let change = || message(5, 9, 1, 2);
    accepted(with(vec![snapshot("b"), snapshot("a"), change()]).snapshot_first());
    refused(with(vec![change()]).snapshot_first(), "no snapshot comes first");
    refused(with(vec![heartbeat(snapshot("a"))]).snapshot_first(), "no snapshot comes first");
    let early = with(vec![snapshot("a"), change(), snapshot("b")]);
    refused(early.snapshot_first(), "before the snapshot of [\"b\"]");
    refused(with(vec![snapshot("a"), snapshot("a")]).snapshot_first(), "a second snapshot");
    refused(with(vec![snapshot("c")]).snapshot_first(), "nobody asked");
}

#[test]
fn order() {
    accepted(of(vec![message(10, 9, 1, 2), message(20, 10, 2, 0)]).order());
    refused(of(vec![message(10, 9, 1, 3), message(20, 8, 1, 2)]).order(), "goes back");
    refused(of(vec![message(10, 9, 2, 1), message(20, 8, 1, 5)]).order(), "goes back");
    let late = vec![message(10, 9, 1, 3), heartbeat(message(20, 8, 1, 2))];
    refused(of(late).order(), "goes back");
    refused(of(vec![message(10, 9, 1, 3), message(20, 8, 1, 3)]).order(), "has the revision of");
    refused(of(vec![message(10, 9, 1, 3), message(20, 9, 1, 3)]).order(), "told twice");
    accepted(of(vec![message(10, 9, 1, 3), heartbeat(message(20, 9, 1, 3))]).order());
    // Another state with the same figures is news.
    let paused = Message { state: "PAUSED".to_owned(), ..message(20, 9, 1, 3) };
    accepted(of(vec![message(10, 9, 1, 3), paused]).order());
    // Each offer has revisions of its own.
    let other = Message { sku: "b".to_owned(), ..message(20, 8, 1, 2) };
    accepted(of(vec![message(10, 9, 1, 3), other]).order());
}

#[test]
fn sanity() {
    accepted(of(vec![message(10, 0, 1, 2), message(20, 10, 1, 3)]).sanity());
    for (remaining, reserved) in [(-1, 11), (11, -1), (10, 1), (0, 11)] {
        let wrong = Message { remaining, reserved, ..message(10, 0, 1, 2) };
        refused(of(vec![wrong]).sanity(), "impossible");
    }
    // Units on their way between two parts of the stock are neither left nor reserved.
    accepted(of(vec![Message { reserved: 3, ..message(10, 5, 1, 2) }]).sanity());
}

#[test]
fn convergence() {
    let seen = |at, remaining| Watched {
        until: ms(9_000),
        ..of(vec![message(500, 9, 1, 2), message(at, remaining, 1, 3)])
    };
    let check = |watched: Watched| watched.convergence("a", ms(1_000), 8, CONVERGENCE);
    accepted(check(seen(3_000, 8)));
    refused(check(seen(3_001, 8)), "8 are left");
    refused(check(seen(2_000, 7)), "8 are left");
    refused(check(Watched { until: ms(2_999), ..seen(2_000, 8) }), "read until");
    let mut moved = seen(2_000, 8);
    moved.messages.push(message(4_000, 7, 1, 4));
    refused(check(moved), "which is right, came");
}

#[test]
fn newest_wins() {
    let old = |count| (0..count).map(|nth| message(1_000 + nth, 9, 1, 2 + nth as i64));
    let after = |count, next| {
        let messages: Vec<_> = old(count).chain(next).collect();
        of(messages).newest_wins(ms(1_000), (1, 90), 5)
    };
    accepted(after(0, Some(message(1_500, 5, 1, 90))));
    accepted(after(5, Some(message(1_500, 5, 1, 90))));
    refused(after(6, Some(message(1_500, 5, 1, 90))), "6 old values were kept");
    refused(after(2, None), "is the newest");
    refused(after(2, Some(message(1_500, 5, 1, 91))), "is the newest");
}

#[test]
fn life() {
    let silent_until = |at| of(vec![heartbeat(message(at, 10, 1, 1))]).life();
    accepted(silent_until(16_000));
    refused(silent_until(16_002), "nothing was sent");
    refused(Watched { until: ms(16_002), ..of(Vec::new()) }.life(), "nothing was sent");
    let over = Watched { until: ms(16_002), end: Some(End::Unavailable), ..of(Vec::new()) };
    accepted(over.life());
    let never = Watched { until: ms(16_001), ..Watched::default() };
    refused(never.life(), "nothing was sent");
}

#[test]
fn end() {
    let with = |state: &str, end| {
        let last = Message { state: state.to_owned(), ..message(10, 9, 1, 2) };
        Watched { end, ..of(vec![last]) }
    };
    accepted(with("SETTLED", Some(End::Ok)).ends_rightly());
    refused(with("ENDED", Some(End::Ok)).ends_rightly(), "without the last state of a");
    accepted(with("ACTIVE", Some(End::Unavailable)).ends_rightly());
    refused(with("SETTLED", Some(End::Other)).ends_rightly(), "another status");
    let mut reopened = with("SETTLED", None);
    reopened.messages.push(message(20, 9, 1, 2));
    refused(reopened.ends_rightly(), "after the last state");
    // Of two offers both must have been told.
    let mut one = with("SETTLED", Some(End::Ok));
    one.skus.push("b".to_owned());
    refused(one.ends_rightly(), "without the last state of b");
}
