//! The search for an order of the calls that explains every answer.
//!
//! It walks through the calls and answers in time. A call must have its place in the order before
//! its answer; where it has none yet, the search chooses what takes place now, and comes back to
//! choose otherwise when it ends in a contradiction (Wing and Gong's search in Lowe's form). What
//! changes nothing takes place as soon as it is right, everything else as late as it can. Where
//! every call is about one unit it does not matter whose it is, so what must take place first
//! stands for all of its kind, and the search hardly ever goes back.

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
    Search::new(ops, state).run()
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Invoked(usize),
    Returned(usize),
}

/// A place where the search chose, and what else it could have chosen.
#[derive(Debug)]
struct Choice {
    event: usize,
    trail: usize,
    rest: Vec<usize>,
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
    /// What was done so far: a call that was made, or one that took place.
    trail: Vec<(usize, Option<Effect>)>,
    choices: Vec<Choice>,
    /// From where nothing leads on: the event, and what took place early.
    dead_ends: HashSet<(usize, BTreeSet<usize>, BTreeSet<usize>)>,
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
                    self.choices.push(Choice { event: at, trail: self.trail.len(), rest });
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
            let (event, trail) = (choice.event, choice.trail);
            let next = choice.rest.pop();
            while self.trail.len() > trail {
                self.step_back();
            }
            if let Some(op) = next {
                self.place(op);
                return Some(event);
            }
            self.choices.pop();
            self.dead_ends.insert((event, self.due.clone(), self.open.clone()));
        }
        None
    }

    fn is_dead_end(&self, event: usize) -> bool {
        !self.dead_ends.is_empty()
            && self.dead_ends.contains(&(event, self.due.clone(), self.open.clone()))
    }

    /// What may take place before this answer, the most promising first.
    fn options(&self, op: usize) -> Vec<usize> {
        let effect = self.state.effect(&self.ops[op]);
        let right = |other: &usize| self.state.effect(&self.ops[*other]).is_some();
        let mut others: Vec<usize> =
            self.due.iter().chain(&self.open).copied().filter(right).filter(|o| *o != op).collect();
        // Units are about to come back: the last moment for who was turned away.
        let is_last_moment = matches!(effect, Some(Effect::GiveBack(_)))
            && self.due.iter().any(|other| self.ops[*other].wants_few_free());
        if self.one_unit_each {
            let takes = others.iter().filter(|other| self.is_take(**other)).count() as u64;
            others.retain(|&other| match effect {
                Some(_) => is_last_moment && self.is_take(other) && takes >= self.state.free,
                None => {
                    self.same_buyer(op, other)
                        || self.is_take(other) == self.ops[op].wants_few_free()
                }
            });
        }
        // Of the same buyer first; what need not take place comes last.
        others.sort_by_key(|&other| {
            let deadline = self.deadlines[other];
            (!self.same_buyer(op, other), deadline.is_none(), deadline)
        });
        if self.one_unit_each {
            // What must take place first is as good as any after it.
            let mut found = false;
            others.retain(|&other| {
                let needless = found && !self.same_buyer(op, other);
                found |= self.alone[other] && self.deadlines[other].is_some();
                !needless
            });
        }
        if effect.is_some() {
            let place = if is_last_moment { others.len() } else { 0 };
            others.insert(place, op);
        }
        others
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
        self.waiting(op).insert(op);
        self.trail.push((op, None));
    }

    fn place(&mut self, op: usize) {
        let effect = self.state.effect(&self.ops[op]).expect("only what is right is placed");
        self.state.apply(&self.ops[op], effect);
        self.waiting(op).remove(&op);
        self.trail.push((op, Some(effect)));
    }

    fn step_back(&mut self) {
        let (op, effect) = self.trail.pop().expect("there is a step to take back");
        match effect {
            None => self.waiting(op).remove(&op),
            Some(effect) => {
                self.state.undo(&self.ops[op], effect);
                self.waiting(op).insert(op)
            }
        };
    }

    fn waiting(&mut self, op: usize) -> &mut BTreeSet<usize> {
        if self.ops[op].returned.is_some() { &mut self.due } else { &mut self.open }
    }
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
