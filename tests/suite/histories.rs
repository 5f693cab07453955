//! The check of histories refuses what can't be true, and nothing else.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    time::{Duration, Instant},
};

use crate::support::history::{Answer, Ask, AtRest, Call, History, Order};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const GRACE: Duration = Duration::from_millis(250);

/// A history of an offer of so many units, one order for each buyer.
fn of(total: u64, calls: Vec<Call>) -> History {
    History { total, max_orders: 1, calls, rebuilds: Vec::new() }
}

/// A Reserve of `buyer/request` for so many units, between these two milliseconds.
fn reserve(who: &str, units: u64, from: u64, to: u64, answer: Answer) -> Call {
    let (buyer, request_id) = who.split_once('/').unwrap();
    Call {
        buyer: buyer.to_owned(),
        ask: Ask::Reserve {
            request_id: request_id.to_owned(),
            quantity: units,
            names: who.to_owned(),
        },
        invoked: ms(from),
        returned: Some((ms(to), answer)),
    }
}

fn wins(who: &str, from: u64, to: u64) -> Call {
    reserve(who, 1, from, to, told(who))
}

fn told(who: &str) -> Answer {
    Answer::Reserved { reservation_id: who.to_owned(), order_no: format!("order of {who}") }
}

fn release(who: &str, from: u64, to: u64, answer: Answer) -> Call {
    Call {
        buyer: who.split_once('/').unwrap().0.to_owned(),
        ask: Ask::Release { reservation_id: who.to_owned() },
        invoked: ms(from),
        returned: Some((ms(to), answer)),
    }
}

/// The same call, to which no answer came.
fn unknown(call: Call) -> Call {
    Call { returned: None, ..call }
}

fn order(who: &str) -> Order {
    Order {
        reservation_id: who.to_owned(),
        order_no: format!("order of {who}"),
        buyer: who.split_once('/').unwrap().0.to_owned(),
        units: 1,
        is_live: true,
    }
}

/// The books of an offer of which exactly these orders are live.
fn rest(total: u64, orders: Vec<Order>) -> AtRest {
    let live = orders.iter().filter(|order| order.is_live).map(|order| order.units).sum();
    AtRest { engine_remaining: total - live, engine_reserved: live, sql_reserved: live, orders }
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
fn more_wins_than_units_are_oversold_from_the_moment_they_are_told() {
    let both = vec![wins("ann/1", 0, 10), wins("bob/1", 0, 20)];
    refused(of(1, both.clone()).never_oversold(), "oversold: 2 of 1 units at 20ms");
    accepted(of(2, both).never_oversold());
    // The release was sent before the second win was told, and not a moment later.
    let sold_on = |sent| {
        let given_back = release("ann/1", sent, 40, Answer::Released);
        of(1, vec![wins("ann/1", 0, 10), given_back, wins("bob/1", 0, 20)])
    };
    accepted(sold_on(20).never_oversold());
    refused(sold_on(21).never_oversold(), "oversold");
}

#[test]
fn a_release_that_did_nothing_frees_nothing_and_one_of_unknown_end_may() {
    let with = |release: Call| of(1, vec![wins("ann/1", 0, 10), release, wins("bob/1", 15, 20)]);
    let refusal = release("ann/1", 11, 12, Answer::Refused);
    refused(with(refusal.clone()).never_oversold(), "oversold");
    accepted(with(unknown(refusal)).never_oversold());
}

#[test]
fn a_win_that_is_told_twice_counts_once() {
    accepted(of(1, vec![wins("ann/1", 0, 10), wins("ann/1", 20, 30)]).never_oversold());
}

#[test]
fn a_buyer_with_more_orders_than_allowed_is_found() {
    let calls = vec![wins("ann/1", 0, 10), wins("ann/2", 0, 20)];
    refused(of(9, calls.clone()).never_oversold(), "ann holds 2 orders");
    accepted(History { max_orders: 2, ..of(9, calls) }.never_oversold());
}

#[test]
fn sold_out_before_the_last_unit_was_asked_for_is_not_linearizable() {
    let sold_out = |from, to| reserve("bob/1", 1, from, to, Answer::SoldOut);
    let with = |sold_out| of(1, vec![sold_out, wins("ann/1", 10, 20)]);
    refused(with(sold_out(0, 9)).is_linearizable(), "with 1 units free");
    // Side by side, either may have been first.
    accepted(with(sold_out(0, 10)).is_linearizable());
    accepted(with(sold_out(21, 22)).is_linearizable());
}

#[test]
fn sold_out_after_a_release_was_answered_is_not_linearizable() {
    let with = |from, to| {
        of(
            1,
            vec![
                wins("ann/1", 0, 10),
                release("ann/1", 20, 30, Answer::Released),
                reserve("bob/1", 1, from, to, Answer::SoldOut),
            ],
        )
    };
    refused(with(31, 40).is_linearizable(), "no order explains");
    accepted(with(30, 40).is_linearizable());
    accepted(with(11, 19).is_linearizable());
}

#[test]
fn a_win_needs_a_unit_at_some_moment_of_its_call() {
    let with = |from, to| {
        of(
            1,
            vec![
                wins("ann/1", 0, 10),
                release("ann/1", 20, 30, Answer::Released),
                wins("bob/1", from, to),
            ],
        )
    };
    refused(with(11, 19).is_linearizable(), "with 0 units free");
    accepted(with(11, 20).is_linearizable());
}

#[test]
fn a_unit_that_went_to_an_unknown_call_may_be_gone_or_not_but_not_both() {
    let lost = || unknown(wins("ann/1", 0, 0));
    let sold_out = reserve("bob/1", 1, 10, 20, Answer::SoldOut);
    accepted(of(1, vec![lost(), sold_out.clone()]).is_linearizable());
    accepted(of(1, vec![lost(), wins("bob/1", 10, 20)]).is_linearizable());
    let again = wins("cid/1", 30, 40);
    refused(of(1, vec![lost(), sold_out.clone(), again.clone()]).is_linearizable(), "cid");
    // An unknown release may have made room for it.
    let back = unknown(release("ann/1", 5, 0, Answer::Released));
    accepted(of(1, vec![lost(), back, sold_out.clone(), again]).is_linearizable());
    // Before it was made, an unknown call does nothing.
    let late = unknown(wins("ann/1", 21, 0));
    refused(of(1, vec![late, sold_out]).is_linearizable(), "bob");
}

#[test]
fn what_a_buyer_hears_of_own_requests_must_fit_together() {
    let with = |call| of(5, vec![wins("ann/1", 0, 10), call]).is_linearizable();
    accepted(with(reserve("ann/2", 1, 20, 30, Answer::Duplicate)));
    refused(with(reserve("bob/1", 1, 20, 30, Answer::Duplicate)), "bob");
    accepted(with(wins("ann/1", 20, 30)));
    refused(with(wins("ann/2", 20, 30)), "ann");
    refused(with(reserve("ann/1", 1, 20, 30, Answer::Released)), "ann");
    refused(with(release("ann/1", 20, 30, Answer::AlreadyReleased)), "ann");
    refused(with(release("ann/1", 20, 30, Answer::NotReserved)), "ann");
    accepted(with(release("ann/1", 20, 30, Answer::Released)));
    // A request that was given back never wins again.
    let calls = vec![
        wins("ann/1", 0, 10),
        release("ann/1", 11, 12, Answer::Released),
        wins("ann/1", 20, 30),
    ];
    refused(of(5, calls).is_linearizable(), "ann");
}

#[test]
fn quantities_are_added_up() {
    let with = |units, answer| {
        let mut calls = vec![reserve("ann/1", 3, 0, 10, told("ann/1"))];
        calls.push(reserve("bob/1", units, 20, 30, answer));
        of(5, calls).is_linearizable()
    };
    accepted(with(2, told("bob/1")));
    refused(with(3, told("bob/1")), "with 2 units free");
    accepted(with(3, Answer::Insufficient { remaining: 2 }));
    refused(with(3, Answer::Insufficient { remaining: 1 }), "bob");
    refused(with(2, Answer::Insufficient { remaining: 2 }), "bob");
    refused(with(3, Answer::SoldOut), "bob");
}

#[test]
fn the_order_that_is_there_is_found_among_many_calls_at_once() {
    // Thirty units change hands while all calls overlap, and somebody is turned away meanwhile.
    let mut calls = vec![reserve("zoe/1", 1, 500, 510, Answer::SoldOut)];
    for nth in 0..30 {
        let (old, new) = (format!("old-{nth}/1"), format!("new-{nth}/1"));
        calls.push(wins(&old, 0, 50));
        calls.push(release(&old, 100, 930 - nth, Answer::Released));
        calls.push(wins(&new, 100 + nth, 800 + 5 * nth));
    }
    calls.push(reserve("amy/1", 1, 2_000, 2_010, Answer::SoldOut));
    accepted(of(30, calls.clone()).is_linearizable());
    refused(of(31, calls.clone()).is_linearizable(), "amy");
    // One winner too many, although all of them are side by side.
    calls.push(wins("eve/1", 100, 1_000));
    refused(of(30, calls).is_linearizable(), "with 0 units free");
}

#[test]
fn a_rebuild_forgets_what_no_client_was_told_and_nothing_else() {
    let across = |calls| History { rebuilds: vec![(ms(100), ms(200))], ..of(1, calls) };
    let sold_out = reserve("bob/1", 1, 20, 30, Answer::SoldOut);
    // The unit was with somebody whose call was lost, and is for sale again.
    let lost = unknown(wins("ann/1", 0, 0));
    accepted(across(vec![lost, sold_out.clone(), wins("cid/1", 210, 220)]).is_linearizable());
    // What was told survives.
    let kept = vec![wins("ann/1", 0, 10), sold_out, wins("cid/1", 210, 220)];
    refused(across(kept).is_linearizable(), "cid");
    // What is under way meanwhile may come out either way.
    accepted(across(vec![wins("ann/1", 90, 210)]).is_linearizable());
    let odd = vec![wins("ann/1", 0, 10), reserve("ann/2", 1, 90, 110, Answer::SoldOut)];
    accepted(across(odd).is_linearizable());
    // Sold on before it, to somebody who had asked before the unit came back.
    let given_back = release("ann/1", 30, 50, Answer::Released);
    let late = reserve("cid/1", 1, 210, 220, Answer::SoldOut);
    let sold_on = vec![wins("ann/1", 0, 10), wins("bob/1", 20, 60), given_back, late];
    accepted(across(sold_on).is_linearizable());
}

#[test]
fn every_win_has_its_one_order_and_every_order_its_request() {
    let won = of(5, vec![wins("ann/1", 0, 10), unknown(wins("bob/1", 0, 0))]);
    accepted(won.orders_match(&[order("ann/1")]));
    accepted(won.orders_match(&[order("ann/1"), order("bob/1")]));
    refused(won.orders_match(&[]), "ann was told ann/1 and has no order");
    let cancelled = Order { is_live: false, ..order("ann/1") };
    refused(won.orders_match(&[cancelled]), "has no order");
    let second = Order { order_no: "another".to_owned(), ..order("bob/1") };
    refused(won.orders_match(&[order("ann/1"), order("bob/1"), second.clone()]), "a second order");
    accepted(won.orders_match(&[order("ann/1"), second]));
    refused(won.orders_match(&[order("ann/1"), order("cid/1")]), "nobody asked");
    let other_number = Order { order_no: "another".to_owned(), ..order("ann/1") };
    refused(won.orders_match(&[other_number]), "was told under");
    let more = Order { units: 2, ..order("ann/1") };
    refused(won.orders_match(&[more]), "is not what ann asked for");
    let lost = of(5, vec![reserve("ann/1", 1, 0, 10, Answer::SoldOut)]);
    refused(lost.orders_match(&[order("ann/1")]), "refused");
    accepted(lost.orders_match(&[]));
}

#[test]
fn what_was_given_back_has_no_order_and_what_may_have_been_may() {
    let given_back = release("ann/1", 20, 30, Answer::Released);
    let done = of(5, vec![wins("ann/1", 0, 10), given_back.clone()]);
    refused(done.orders_match(&[order("ann/1")]), "was given back and has an order");
    accepted(done.orders_match(&[Order { is_live: false, ..order("ann/1") }]));
    accepted(done.orders_match(&[]));
    let perhaps = of(5, vec![wins("ann/1", 0, 10), unknown(given_back)]);
    accepted(perhaps.orders_match(&[order("ann/1")]));
    accepted(perhaps.orders_match(&[]));
}

#[test]
fn nobody_hears_sold_out_while_units_are_free_for_certain() {
    let sold_out = |from, to| reserve("bob/1", 1, from, to, Answer::SoldOut);
    let gives_back = || {
        vec![wins("ann/1", 0, 10), release("ann/1", 100, 110, Answer::Released), sold_out(350, 360)]
    };
    // A server may remember for a moment that nothing was left.
    accepted(of(1, gives_back()).no_false_sold_out(GRACE));
    let late = [gives_back(), vec![sold_out(361, 370)]].concat();
    refused(of(1, late).no_false_sold_out(GRACE), "at most 0 of 1 units were held");
    // Somebody asks in time, so the unit may be theirs; or asks too late.
    let asks = |from| {
        let calls = [gives_back(), vec![unknown(wins("cid/1", from, 0)), sold_out(361, 370)]];
        of(1, calls.concat()).no_false_sold_out(GRACE)
    };
    accepted(asks(369));
    refused(asks(371), "at most 0");
    // For two units one that is free is not enough.
    let two = reserve("bob/1", 2, 1_000, 1_010, Answer::Insufficient { remaining: 1 });
    accepted(of(2, vec![wins("ann/1", 0, 10), two.clone()]).no_false_sold_out(GRACE));
    refused(of(3, vec![wins("ann/1", 0, 10), two]).no_false_sold_out(GRACE), "at most 1 of 3");
}

#[test]
fn a_request_is_told_one_reservation_for_ever() {
    let again = |reservation_id: &str, order_no: &str| {
        let (reservation_id, order_no) = (reservation_id.to_owned(), order_no.to_owned());
        let answer = Answer::Reserved { reservation_id, order_no };
        let calls = vec![wins("ann/1", 0, 10), reserve("ann/1", 1, 20, 30, answer)];
        of(5, calls).same_request_same_reservation()
    };
    accepted(again("ann/1", "order of ann/1"));
    refused(again("ann/2", "order of ann/1"), "was told");
    refused(again("ann/1", "another order"), "was told");
    let stolen = vec![wins("ann/1", 0, 10), reserve("bob/1", 1, 20, 30, told("ann/1"))];
    refused(of(5, stolen).same_request_same_reservation(), "was told to");
}

#[test]
fn at_rest_engine_database_and_clients_agree_to_the_unit() {
    let history = of(5, vec![wins("ann/1", 0, 10), unknown(wins("bob/1", 0, 0))]);
    let one = rest(5, vec![order("ann/1")]);
    accepted(history.balances(&one));
    accepted(history.balances(&rest(5, vec![order("ann/1"), order("bob/1")])));
    refused(history.balances(&rest(5, vec![])), "not what the clients were told");
    let three = vec![order("ann/1"), order("bob/1"), order("cid/1")];
    refused(history.balances(&rest(5, three)), "not what the clients were told");
    for remaining in [3, 5] {
        let wrong = AtRest { engine_remaining: remaining, ..one.clone() };
        refused(history.balances(&wrong), "the engine lost or made units");
    }
    let both = AtRest { engine_remaining: 3, engine_reserved: 2, ..one.clone() };
    refused(history.balances(&both), "engine, counter and orders differ");
    refused(history.balances(&AtRest { sql_reserved: 2, ..one }), "differ");
}

#[test]
fn one_bad_answer_fails_the_whole_check() {
    let good = vec![
        wins("ann/1", 0, 10),
        release("ann/1", 20, 30, Answer::Released),
        wins("bob/1", 25, 40),
        reserve("cid/1", 1, 41, 50, Answer::SoldOut),
        wins("bob/1", 60, 70),
    ];
    let at_rest = rest(1, vec![order("bob/1")]);
    accepted(of(1, good.clone()).check(GRACE, &at_rest));
    let mut bad = good;
    bad[3] = wins("cid/1", 41, 50);
    refused(of(1, bad).check(GRACE, &at_rest), "oversold");
}

/// An offer that is right, one order for each buyer.
struct Counter {
    free: u64,
    /// 0 for what was given back.
    held: HashMap<String, u64>,
}

impl Counter {
    fn answer(&mut self, ask: &Ask) -> Answer {
        let free = self.free;
        match ask {
            Ask::Reserve { quantity, names, .. } => match self.held.get(names) {
                Some(0) => Answer::Released,
                Some(_) => told(names),
                None if free == 0 => Answer::SoldOut,
                None if free < *quantity => Answer::Insufficient { remaining: free },
                None => {
                    self.free -= quantity;
                    self.held.insert(names.clone(), *quantity);
                    told(names)
                }
            },
            Ask::Release { reservation_id } => match self.held.get_mut(reservation_id) {
                None => Answer::NotReserved,
                Some(0) => Answer::AlreadyReleased,
                Some(units) => {
                    self.free += std::mem::take(units);
                    Answer::Released
                }
            },
        }
    }
}

/// Calls on a counter that is right: each has its effect at a moment between call and answer, and
/// of some the answer is lost, or the call.
fn simulated(random: &mut fastrand::Rng, total: u64, most_units: u64) -> Vec<Call> {
    // Moments of effect with the calls, in time; buyers repeat what was lost.
    let mut calls: Vec<(u64, Call)> = Vec::new();
    for nth in 0..random.usize(20..60) {
        let who = format!("buyer-{nth}/1");
        let units = random.u64(1..=most_units);
        let mut at = random.u64(0..400);
        let gives_back = random.bool();
        let mut ask = |call: Call, at: &mut u64| {
            loop {
                let effect = *at + random.u64(1..60);
                let end = effect + random.u64(0..60);
                let lost = random.u8(0..4) == 0;
                let returned = (!lost).then_some((ms(end), Answer::Refused));
                let never = lost && random.bool();
                let effect = if never { u64::MAX } else { effect };
                calls.push((effect, Call { invoked: ms(*at), returned, ..call.clone() }));
                *at = end;
                if !lost {
                    return;
                }
            }
        };
        ask(reserve(&who, units, 0, 0, Answer::Refused), &mut at);
        if gives_back {
            ask(release(&who, 0, 0, Answer::Refused), &mut at);
        }
    }
    calls.sort_by_key(|(effect, _)| *effect);
    let mut counter = Counter { free: total, held: HashMap::new() };
    for (effect, call) in &mut calls {
        if *effect == u64::MAX {
            continue;
        }
        let answer = counter.answer(&call.ask);
        if let Some((_, told)) = &mut call.returned {
            *told = answer;
        }
    }
    calls.into_iter().map(|(_, call)| call).collect()
}

#[test]
fn whatever_a_right_counter_answers_is_accepted() {
    for seed in 0..400 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (total, most_units) = (random.u64(1..15), if seed % 4 == 0 { 3 } else { 1 });
        let history = of(total, simulated(&mut random, total, most_units));
        let outcome = history
            .is_linearizable()
            .and_then(|()| history.never_oversold())
            .and_then(|()| history.no_false_sold_out(Duration::ZERO))
            .and_then(|()| history.same_request_same_reservation());
        if let Err(wrong) = outcome {
            panic!("seed {seed}: {wrong}");
        }
    }
}

#[test]
fn a_counter_that_has_one_unit_more_is_found_out() {
    let mut found = 0;
    for seed in 0..100 {
        let mut random = fastrand::Rng::with_seed(seed);
        let history = of(5, simulated(&mut random, 6, 1));
        found += usize::from(history.is_linearizable().is_err());
    }
    assert!(found > 80, "{found} of 100");
}

/// Far more buyers than units, from 64 clients who each ask the next thing when they are answered;
/// some answers take a hundred times as long as others. When `early` buyers have come, the counter
/// is away for a while: no call is answered, each is repeated, and a few of them count all the same.
fn stormy(seed: u64, early: u64) -> History {
    const UNITS: u64 = 400;
    const AWAY: std::ops::Range<u64> = 800..2_800;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut counter = Counter { free: UNITS, held: HashMap::new() };
    let mut calls: Vec<Call> = Vec::new();
    let mut buyers = 0..1_400;
    // What each client asks next, the last first; and when it asks, or a call has its effect.
    let mut plans: Vec<Vec<Call>> = vec![Vec::new(); 64];
    let mut moments: BinaryHeap<Reverse<(u64, usize, Option<usize>)>> =
        (0..plans.len()).map(|client| Reverse((random.u64(0..5), client, None))).collect();
    while let Some(Reverse((at, client, effect))) = moments.pop() {
        let slowest = [6, 15, 60, 450][random.usize(0..4)];
        let Some(nth) = effect else {
            if at < AWAY.start && buyers.start >= early {
                moments.push(Reverse((AWAY.start, client, None)));
                continue;
            }
            let first = |buyer| reserve(&format!("buyer-{buyer}/1"), 1, 0, 0, Answer::Refused);
            if let Some(call) = plans[client].pop().or_else(|| buyers.next().map(first)) {
                calls.push(Call { invoked: ms(at), returned: None, ..call });
                let effect = at + random.u64(0..slowest);
                moments.push(Reverse((effect, client, Some(calls.len() - 1))));
            }
            continue;
        };
        let call = calls[nth].clone();
        if AWAY.contains(&at) {
            if random.u8(0..10) == 0 {
                counter.answer(&call.ask);
            }
            plans[client].push(call);
            moments.push(Reverse((at + random.u64(5..50), client, None)));
            continue;
        }
        let answer = counter.answer(&call.ask);
        let end = at + random.u64(0..slowest);
        if let (Answer::Reserved { reservation_id, .. }, true) = (&answer, plans[client].is_empty())
        {
            // One of twenty gives it back, two ask once more.
            match random.u8(0..20) {
                0 | 1 => plans[client].push(call.clone()),
                2 => plans[client].push(release(reservation_id, 0, 0, Answer::Refused)),
                _ => {}
            }
        }
        calls[nth].returned = Some((ms(end), answer));
        moments.push(Reverse((end + 1, client, None)));
    }
    History { rebuilds: vec![(ms(AWAY.start - 3), ms(AWAY.end + 1))], ..of(UNITS, calls) }
}

#[test]
fn an_order_of_a_storm_around_an_outage_is_found_in_no_time() {
    for seed in 20..30 {
        let history = stormy(seed, 400);
        let begun = Instant::now();
        if let Err(wrong) = history.is_linearizable() {
            panic!("seed {seed}, {} calls: {wrong}", history.calls.len());
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "seed {seed}: {:?}", begun.elapsed());
    }
}

#[test]
fn a_wrong_answer_in_a_storm_around_an_outage_is_found() {
    for seed in 0..5 {
        let history = stormy(seed, 200);
        accepted(history.is_linearizable());
        // One winner too many.
        refused(History { total: 399, ..history.clone() }.is_linearizable(), "no order explains");
        // Turned away while half of it was left.
        let mut calls = history.calls.clone();
        calls.push(reserve("eve/1", 1, 2_802, 2_804, Answer::SoldOut));
        refused(History { calls, ..history }.is_linearizable(), "eve");
    }
}
