//! The search for an order of the calls that explains every answer.
//!
//! It walks through the calls and answers in time. A call must have its place in the order before
//! its answer; where it has none yet, the search chooses what takes place now, and comes back to
//! choose otherwise when it ends in a contradiction (Wing and Gong's search in Lowe's form). What
//! changes nothing takes place as soon as it is right, everything else as late as it can. Where
//! every call is about one unit it does not matter whose it is, so what must take place first
//! stands for all of its kind. Somebody who was turned away needs a moment at which nothing is
//! free; so before a unit comes back the search chooses whether all that is free is taken first, or
//! nothing of it, and hardly ever goes back.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::Duration,
};

use super::{
    Ask, History,
    counter::{Effect, Op, State},
};

/// Choices tried before the search gives up; a true history needs about one per call.
const MOST_CHOICES: usize = 100_000;

pub(super) fn check(history: &History) -> Result<(), String> {
    let mut rebuilds = history.rebuilds.clone();
    rebuilds.sort_unstable();
    let mut from = Duration::ZERO;
    for (lost, rebuilt) in rebuilds {
        check_span(history, from, lost)?;
        from = rebuilt;
    }
    check_span(history, from, Duration::MAX)
}

/// Checks the calls between two rebuilds. What reaches into it from before has its effect in it or
/// had it before; what reaches out of it may have an effect, also if it is taken back by the
/// rebuild and the answer is another one in the end.
fn check_span(history: &History, from: Duration, to: Duration) -> Result<(), String> {
    let mut state = State::of(history);
    let (mut ops, mut settled) = (Vec::new(), Vec::new());
    for call in &history.calls {
        let reaches_in = call.invoked < from;
        match &call.returned {
            _ if call.invoked >= to => {}
            Some((at, _)) if *at <= from => settled.push(call),
            Some((_, answer)) if reaches_in && !answer.changes() => {}
            returned => {
                let returned = returned.as_ref().map(|(at, _)| *at).filter(|at| *at <= to);
                ops.push(Op { call, invoked: call.invoked, returned });
            }
        }
    }
    // They stand in the order in which they were made: a win may be of a unit whose release comes
    // later among them.
    while !settled.is_empty() {
        let before = settled.len();
        settled.retain(|call| state.settle(call).is_err());
        if settled.len() == before {
            break;
        }
    }
    // Nor does the release have to be among them: it may have been answered in the span alone.
    ops.extend(settled.into_iter().map(|call| {
        let returned = call.returned.as_ref().map(|(at, _)| *at);
        Op { call, invoked: call.invoked, returned }
    }));
    Search::new(needed(ops), state).run()
}

/// Without the calls of unknown end that can do nothing which another one, made earlier for the same
/// reservation, could not do: nobody can tell them apart.
fn needed(mut ops: Vec<Op<'_>>) -> Vec<Op<'_>> {
    ops.sort_by_key(|op| op.invoked);
    let mut unknown = HashSet::new();
    ops.retain(|op| {
        op.returned.is_some() || unknown.insert((op.reservation().to_owned(), op.is_reserve()))
    });
    ops
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Invoked(usize),
    Returned(usize),
}

/// What takes place before an answer.
#[derive(Debug, Clone, Copy)]
enum Next {
    One(usize),
    /// Whatever takes a unit, until nothing is free.
    AllThatIsFree,
}

/// A place where the search chose, and what else it could have chosen.
#[derive(Debug)]
struct Choice {
    event: usize,
    trail: usize,
    waiting: u128,
    rest: Vec<Next>,
}

#[derive(Debug)]
struct Search<'a> {
    ops: Vec<Op<'a>>,
    /// By when each call takes place: at its answer, or at that of another call which proves it.
    /// `None` when it need not.
    deadlines: Vec<Option<Duration>>,
    /// Calls beside which the same buyer made no other.
    alone: Vec<bool>,
    one_unit_each: bool,
    events: Vec<Event>,
    state: State<'a>,
    /// Calls that were made, must take place and did not yet; and those that need not.
    due: BTreeSet<usize>,
    open: BTreeSet<usize>,
    /// A hash of both.
    waiting: u128,
    /// What was done so far: a call that was made, or one that took place.
    trail: Vec<(usize, Option<Effect>)>,
    choices: Vec<Choice>,
    /// From where nothing leads on: the event, and the hash of what waits there.
    dead_ends: HashSet<(usize, u128)>,
}

impl<'a> Search<'a> {
    fn new(ops: Vec<Op<'a>>, mut state: State<'a>) -> Self {
        state.expect_denials(&ops);
        let mut events: Vec<(Duration, Event)> = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            events.push((op.invoked, Event::Invoked(index)));
            events.extend(op.returned.map(|at| (at, Event::Returned(index))));
        }
        // At one instant calls go before answers: then they may be side by side.
        events.sort_by_key(|(at, event)| (*at, matches!(event, Event::Returned(_))));
        let one_unit_each = ops.iter().all(|op| match op.call.ask {
            Ask::Reserve { quantity, .. } => quantity == 1,
            Ask::Release { .. } => true,
        });
        let deadlines = deadlines(&ops);
        Self {
            alone: alone(&ops, &deadlines),
            deadlines,
            one_unit_each,
            events: events.into_iter().map(|(_, event)| event).collect(),
            ops,
            state,
            due: BTreeSet::new(),
            open: BTreeSet::new(),
            waiting: 0,
            trail: Vec::new(),
            choices: Vec::new(),
            dead_ends: HashSet::new(),
        }
    }

    fn run(mut self) -> Result<(), String> {
        let (mut at, mut furthest, mut tried) = (0, (0, String::new()), 0);
        loop {
            self.place_what_changes_nothing();
            match self.events.get(at) {
                None => return Ok(()),
                Some(&Event::Invoked(op)) => {
                    self.call(op);
                    at += 1;
                    continue;
                }
                Some(Event::Returned(op)) if !self.due.contains(op) => {
                    at += 1;
                    continue;
                }
                Some(&Event::Returned(op)) => {
                    let mut rest = if self.is_dead_end(at) { Vec::new() } else { self.options(op) };
                    rest.reverse();
                    if self.state.effect(&self.ops[op]).is_none() && at > furthest.0 {
                        let free = self.state.free;
                        let story = format!("with {free} units free: {:?}", self.ops[op].call);
                        furthest = (at, story);
                    }
                    let (trail, waiting) = (self.trail.len(), self.waiting);
                    self.choices.push(Choice { event: at, trail, waiting, rest });
                }
            }
            tried += 1;
            match self.choose() {
                Some(event) if tried < MOST_CHOICES => at = event,
                Some(_) => return Err(format!("no order was found in time, {}", furthest.1)),
                None => return Err(format!("no order explains, {}", furthest.1)),
            }
        }
    }

    /// Takes the next option of the last choice that has one.
    fn choose(&mut self) -> Option<usize> {
        while let Some(choice) = self.choices.last_mut() {
            let (event, trail, waiting) = (choice.event, choice.trail, choice.waiting);
            let next = choice.rest.pop();
            while self.trail.len() > trail {
                self.step_back();
            }
            match next {
                Some(Next::One(op)) => self.place(op),
                Some(Next::AllThatIsFree) => self.take_all_that_is_free(),
                None => {
                    self.choices.pop();
                    self.dead_ends.insert((event, waiting));
                    continue;
                }
            }
            return Some(event);
        }
        None
    }

    fn is_dead_end(&self, event: usize) -> bool {
        self.dead_ends.contains(&(event, self.waiting))
    }

    fn take_all_that_is_free(&mut self) {
        while self.state.free > 0
            && let Some(take) = self.takes().first()
        {
            self.place(*take);
        }
    }

    /// What may take a unit now, in the order of [`Search::options`].
    fn takes(&self) -> Vec<usize> {
        let waiting = self.due.iter().chain(&self.open).copied();
        let mut takes: Vec<usize> = waiting.filter(|op| self.is_take(*op)).collect();
        takes.sort_by_key(|&op| (self.deadlines[op].is_none(), self.deadlines[op]));
        takes
    }

    /// What may take place before this answer, the most promising first.
    fn options(&self, op: usize) -> Vec<Next> {
        let effect = self.state.effect(&self.ops[op]);
        if self.one_unit_each
            && let Some(effect) = effect
        {
            return self.options_of_right(op, effect);
        }
        let right = |other: &usize| self.state.effect(&self.ops[*other]).is_some();
        let mut others: Vec<usize> =
            self.due.iter().chain(&self.open).copied().filter(right).filter(|o| *o != op).collect();
        if self.one_unit_each {
            others.retain(|&other| {
                self.same_buyer(op, other) || self.is_take(other) == self.ops[op].wants_few_free()
            });
        }
        // Of the same buyer first; what need not take place comes last.
        others.sort_by_key(|&other| {
            let deadline = self.deadlines[other];
            (!self.same_buyer(op, other), deadline.is_none(), deadline)
        });
        if self.one_unit_each {
            // What must take place first is as good as any after it; and of what need not take place
            // one is as good as the other.
            let mut found = false;
            others.retain(|&other| {
                let needless = found && !self.same_buyer(op, other);
                found |= self.alone[other];
                !needless
            });
        }
        let right = effect.map(|_| op);
        right.into_iter().chain(others).map(Next::One).collect()
    }

    /// The same for an answer that is right as things are, where every call is about one unit.
    fn options_of_right(&self, op: usize, effect: Effect) -> Vec<Next> {
        let turned_away = || self.due.iter().any(|other| self.ops[*other].wants_few_free());
        // Units are about to come back: the last moment for who was turned away.
        if !matches!(effect, Effect::GiveBack(_)) || self.state.free == 0 || !turned_away() {
            return vec![Next::One(op)];
        }
        let takes = self.takes();
        if (takes.len() as u64) < self.state.free {
            return vec![Next::One(op)];
        }
        let mut options = vec![Next::AllThatIsFree, Next::One(op)];
        if takes.iter().any(|take| !self.alone[*take]) {
            // Then it may matter who takes it.
            options.extend(takes.into_iter().map(Next::One));
        }
        options
    }

    fn same_buyer(&self, one: usize, other: usize) -> bool {
        self.ops[one].call.buyer == self.ops[other].call.buyer
    }

    fn is_take(&self, op: usize) -> bool {
        matches!(self.state.effect(&self.ops[op]), Some(Effect::Take(_)))
    }

    fn place_what_changes_nothing(&mut self) {
        let right = |op: &&usize| self.state.effect(&self.ops[**op]) == Some(Effect::Nothing);
        let ops: Vec<usize> = self.due.iter().filter(right).copied().collect();
        for op in ops {
            self.place(op);
        }
    }

    fn call(&mut self, op: usize) {
        self.wait(op);
        self.trail.push((op, None));
    }

    fn place(&mut self, op: usize) {
        let effect = self.state.effect(&self.ops[op]).expect("only what is right is placed");
        self.state.apply(&self.ops[op], effect);
        self.wait_no_more(op);
        self.trail.push((op, Some(effect)));
    }

    fn step_back(&mut self) {
        let (op, effect) = self.trail.pop().expect("there is a step to take back");
        match effect {
            None => self.wait_no_more(op),
            Some(effect) => {
                self.state.undo(&self.ops[op], effect);
                self.wait(op);
            }
        }
    }

    fn wait(&mut self, op: usize) {
        self.waiting ^= spread(op);
        let is_due = self.ops[op].returned.is_some();
        if is_due { &mut self.due } else { &mut self.open }.insert(op);
    }

    fn wait_no_more(&mut self, op: usize) {
        self.waiting ^= spread(op);
        let is_due = self.ops[op].returned.is_some();
        if is_due { &mut self.due } else { &mut self.open }.remove(&op);
    }
}

/// A number that looks drawn by chance, so that sets of them differ in what `^` makes of them.
fn spread(op: usize) -> u128 {
    let half = |seed: u64| {
        let mixed = (op as u64 ^ seed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u128::from(mixed ^ (mixed >> 31))
    };
    (half(0x5851_f42d_4c95_7f2d) << 64) | half(0x1405_7b7e_f767_814f)
}

fn deadlines(ops: &[Op<'_>]) -> Vec<Option<Duration>> {
    let mut proofs = HashMap::<(&str, bool), Duration>::new();
    for op in ops {
        for reserve in [true, false].into_iter().filter(|reserve| op.proves(*reserve)) {
            let Some(at) = op.returned else { continue };
            let proof = proofs.entry((op.reservation(), reserve)).or_insert(at);
            *proof = at.min(*proof);
        }
    }
    let proof = |op: &Op<'_>| proofs.get(&(op.reservation(), op.is_reserve())).copied();
    ops.iter().map(|op| op.returned.or_else(|| proof(op))).collect()
}

/// Which calls were made while the same buyer had no other under way, but for attempts of the same
/// request.
fn alone(ops: &[Op<'_>], deadlines: &[Option<Duration>]) -> Vec<bool> {
    let mut of_buyer = HashMap::<&str, Vec<usize>>::new();
    for (index, op) in ops.iter().enumerate() {
        of_buyer.entry(&op.call.buyer).or_default().push(index);
    }
    let end = |op: usize| deadlines[op].unwrap_or(Duration::MAX);
    let beside = |op: usize, other: usize| {
        let (one, two) = (&ops[op], &ops[other]);
        let attempts = one.is_reserve() && two.is_reserve();
        op != other
            && one.invoked <= end(other)
            && two.invoked <= end(op)
            && !(attempts && one.reservation() == two.reservation())
    };
    let is_alone = |op: usize| !of_buyer[&*ops[op].call.buyer].iter().any(|o| beside(op, *o));
    (0..ops.len()).map(is_alone).collect()
}
