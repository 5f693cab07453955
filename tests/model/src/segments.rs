//! Offers of several segments: how units move between them, and when nothing is left. A model of its
//! own, for the other one has one segment; see `src/transfers.rs` and `lua/transfer_*.lua`.
//!
//! Buyers reserve at their homes through two servers, one of whom may die at any point: the call that
//! it had sent arrives later, or never. A buyer gives back, a sweeper finishes what broke off, and a
//! rebuild raises the epoch, empties each segment and fills each, one at a time.

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::checks::Outcome;

/// The most segments, and programs, that a state has room for.
const SEGMENTS: usize = 3;
const PROGRAMS: usize = 5;
/// How often a gathering looks at all segments.
const PASSES: u8 = 3;
/// How often a reserve gathers before it gives up: two homes may take one unit from each other.
const GATHERINGS: u8 = 2;

/// A step that is wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// SOLD_OUT after one pass (W6).
    OnePass,
    /// The source forgets after `retry`, and whatever the epoch is (W7). Either alone is safe, for a
    /// refusal is followed by a rebuild.
    ForgetsAfterRetry,
    ForgetsAtAnyEpoch,
    /// `transfer_in` compares no sequence.
    InWithoutSequence,
    /// `transfer_in` compares no epoch.
    InOfAnyEpoch,
    /// A repeated `transfer_out` sends off more under the same sequence.
    OutInFlight,
}

/// The names of what must hold.
pub mod property {
    pub const NOTHING_MADE: &str = "no unit is made by moving it";
    pub const NOTHING_LOST: &str = "no unit is lost on its way";
    pub const TRULY_SOLD_OUT: &str = "SOLD_OUT is told of a moment at which nothing was on sale";
    pub const ALL_SOLD: &str = "a buyer can be told that all is sold";
    pub const MOVED: &str = "a unit of another segment can be sold";
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// One unit, for the buyers of this home.
    Reserve {
        home: usize,
    },
    /// Gives back the unit that another program won.
    Release {
        of: usize,
    },
    Sweeper,
    Rebuilder,
}

/// One bounded world.
#[derive(Debug, Clone)]
pub struct Scope {
    pub name: &'static str,
    segments: usize,
    stocks: [u8; SEGMENTS],
    roles: Vec<Role>,
    crashes: u8,
    broken: Vec<Broken>,
    /// Whether what can happen must be seen to.
    reaches: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Frozen {
    No,
    Rebuilding,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Segment {
    epoch: u8,
    revision: u8,
    frozen: Frozen,
    stock: u8,
    /// Which programs hold a unit here.
    held: Set,
    /// On their way, by target: sequence and units, 0 when nothing is.
    out: [(u8, u8); SEGMENTS],
    /// The last sequence in, by source.
    last_in: [u8; SEGMENTS],
}

/// A set of programs, each with its one unit.
type Set = u8;

type Stamps = [(u8, u8); SEGMENTS];

/// What a program does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Ask,
    Commit {
        epoch: u8,
    },
    /// Reads segment `at` of a pass.
    Read {
        pass: u8,
        at: usize,
        stamps: Stamps,
        before: Option<Stamps>,
        stocks: [u8; SEGMENTS],
        out: bool,
    },
    Out {
        source: usize,
        target: usize,
        epoch: u8,
    },
    In {
        source: usize,
        target: usize,
        epoch: u8,
        sequence: u8,
        units: u8,
    },
    Done {
        source: usize,
        target: usize,
        epoch: u8,
        sequence: u8,
    },
    /// The engine's half of a release, whose row has this epoch.
    GiveBack {
        of: usize,
        epoch: u8,
    },
    Begin {
        at: usize,
        epoch: u8,
    },
    /// `live` is what SQL showed.
    End {
        at: usize,
        epoch: u8,
        live: Set,
    },
    Idle,
    Won,
    SoldOut,
    Over,
}

/// A program, and what is remembered of it for the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Program {
    step: Step,
    /// The epoch that its server knows.
    known: u8,
    /// Whether nothing was on sale at any moment since it began to look.
    saw_nothing: bool,
    gatherings: u8,
}

/// All that there is at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    segments: [Segment; SEGMENTS],
    epoch: u8,
    live: Set,
    programs: [Program; PROGRAMS],
    /// Calls of servers that died.
    late: Vec<Step>,
    crashes: u8,
    rebuilds: u8,
    moved: bool,
}

/// What happens next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    Runs(usize),
    /// The server of this program dies; the call that it had sent may still arrive.
    Dies(usize),
    Arrives(usize),
    GetsLost(usize),
}

/// What a call of the engine came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer<T> {
    Ok(T),
    Refused,
    /// Another epoch, this one.
    Epoch(u8),
}

impl Scope {
    /// `stocks` are the units of each segment.
    #[must_use]
    pub fn new(name: &'static str, stocks: &[u8], roles: &[Role], crashes: u8) -> Self {
        let mut all = [0; SEGMENTS];
        all[..stocks.len()].copy_from_slice(stocks);
        let (segments, roles) = (stocks.len(), roles.to_vec());
        Self { name, segments, stocks: all, roles, crashes, broken: Vec::new(), reaches: false }
    }

    #[must_use]
    pub fn broken(mut self, broken: &[Broken]) -> Self {
        self.broken.extend(broken);
        self
    }

    /// The same, in which all that can happen must be seen.
    #[must_use]
    pub fn reaching(self) -> Self {
        Self { reaches: true, ..self }
    }

    fn is(&self, broken: Broken) -> bool {
        self.broken.contains(&broken)
    }

    fn home_of(&self, program: usize) -> usize {
        match self.roles[program] {
            Role::Reserve { home } => home,
            Role::Release { .. } | Role::Sweeper | Role::Rebuilder => 0,
        }
    }

    /// The programs whose home this is.
    fn of_home(&self, home: usize) -> Set {
        let programs = self.roles.iter().enumerate();
        programs.filter(|(_, role)| **role == Role::Reserve { home }).map(|(at, _)| 1 << at).sum()
    }

    fn total(&self) -> u8 {
        self.stocks.iter().sum()
    }
}

impl State {
    fn new(scope: &Scope) -> Self {
        let segment = |at: usize| Segment {
            epoch: 1,
            revision: 1,
            frozen: Frozen::No,
            stock: scope.stocks[at],
            held: 0,
            out: [(0, 0); SEGMENTS],
            last_in: [0; SEGMENTS],
        };
        let program = |at: usize| Program {
            step: match scope.roles.get(at) {
                Some(Role::Reserve { .. }) => Step::Ask,
                Some(Role::Release { .. } | Role::Sweeper | Role::Rebuilder) => Step::Idle,
                None => Step::Over,
            },
            known: 1,
            saw_nothing: false,
            gatherings: 0,
        };
        Self {
            segments: [0, 1, 2].map(segment),
            epoch: 1,
            live: 0,
            programs: [0, 1, 2, 3, 4].map(program),
            late: Vec::new(),
            crashes: scope.crashes,
            rebuilds: 1,
            moved: false,
        }
    }

    /// Whether no rebuild is in the middle.
    fn is_whole(&self, scope: &Scope) -> bool {
        let [first, ..] = self.segments;
        let all = &self.segments[..scope.segments];
        all.iter().all(|segment| segment.epoch == first.epoch && segment.frozen == Frozen::No)
    }

    /// Units on their way that are not in yet.
    fn on_the_way(&self, scope: &Scope) -> u8 {
        let mut units = 0;
        for source in 0..scope.segments {
            for target in 0..scope.segments {
                let (sequence, sent) = self.segments[source].out[target];
                if sent > 0 && self.segments[target].last_in[source] < sequence {
                    units += sent;
                }
            }
        }
        units
    }

    /// Units that somebody could get.
    fn on_sale(&self, scope: &Scope) -> u8 {
        if !self.is_whole(scope) {
            // In the middle of a rebuild, what SQL would have it be.
            return scope.total() - units_of(self.live);
        }
        let stock = self.segments[..scope.segments].iter().map(|segment| segment.stock).sum::<u8>();
        stock + self.on_the_way(scope)
    }

    /// Units on sale, held and on their way; `None` in the middle of a rebuild.
    fn accounted(&self, scope: &Scope) -> Option<u8> {
        let all = self.segments[..scope.segments].iter();
        let held = all.map(|segment| units_of(segment.held)).sum::<u8>();
        self.is_whole(scope).then(|| self.on_sale(scope) + held)
    }

    fn guard(&mut self, at: usize, epoch: u8) -> Answer<&mut Segment> {
        let segment = &mut self.segments[at];
        match segment.frozen {
            Frozen::Rebuilding => Answer::Refused,
            Frozen::No if segment.epoch != epoch => Answer::Epoch(segment.epoch),
            Frozen::No => Answer::Ok(segment),
        }
    }

    /// `reserve.lua` for one unit; whether it was taken.
    fn take(&mut self, at: usize, epoch: u8, who: usize) -> Answer<bool> {
        match self.guard(at, epoch) {
            Answer::Ok(segment) if segment.stock > 0 => {
                segment.stock -= 1;
                segment.held |= 1 << who;
                segment.revision += 1;
                Answer::Ok(true)
            }
            Answer::Ok(_) => Answer::Ok(false),
            Answer::Refused => Answer::Refused,
            Answer::Epoch(epoch) => Answer::Epoch(epoch),
        }
    }

    /// `transfer_out.lua`, for all that is there but at most one more than half.
    fn out(&mut self, scope: &Scope, source: usize, target: usize, epoch: u8) -> Option<(u8, u8)> {
        let in_flight = scope.is(Broken::OutInFlight);
        let Answer::Ok(segment) = self.guard(source, epoch) else { return None };
        let (sequence, units) = segment.out[target];
        if units > 0 && !in_flight {
            return Some((sequence, units));
        }
        let sent = segment.stock.div_ceil(2);
        if sent == 0 {
            return (units > 0).then_some((sequence, units));
        }
        segment.stock -= sent;
        segment.out[target] = if units > 0 { (sequence, sent) } else { (sequence + 1, sent) };
        segment.revision += 1;
        Some(segment.out[target])
    }

    /// `transfer_in.lua`; whether the source may forget.
    fn arrive(&mut self, scope: &Scope, call: Step) -> bool {
        let Step::In { source, target, epoch, sequence, units } = call else { return false };
        let any_epoch =
            scope.is(Broken::InOfAnyEpoch) && self.segments[target].frozen == Frozen::No;
        let segment = match self.guard(target, epoch) {
            Answer::Ok(segment) => segment,
            Answer::Epoch(_) if any_epoch => &mut self.segments[target],
            Answer::Refused | Answer::Epoch(_) => return false,
        };
        if sequence <= segment.last_in[source] && !scope.is(Broken::InWithoutSequence) {
            return true;
        }
        segment.last_in[source] = sequence.max(segment.last_in[source]);
        segment.stock += units;
        segment.revision += 1;
        true
    }

    /// `transfer_done.lua`.
    fn forget(&mut self, scope: &Scope, call: Step) {
        let Step::Done { source, target, epoch, sequence } = call else { return };
        let any_epoch = scope.is(Broken::ForgetsAtAnyEpoch);
        let any_epoch = any_epoch && self.segments[source].frozen == Frozen::No;
        let segment = match self.guard(source, epoch) {
            Answer::Ok(segment) => segment,
            Answer::Epoch(_) if any_epoch => &mut self.segments[source],
            Answer::Refused | Answer::Epoch(_) => return,
        };
        if segment.out[target].0 == sequence && segment.out[target].1 > 0 {
            segment.out[target].1 = 0;
            segment.revision += 1;
        }
    }

    /// `release.lua`; false when it must come again.
    fn give_back(&mut self, home: usize, row: u8, who: usize) -> bool {
        let segment = &mut self.segments[home];
        if segment.frozen == Frozen::Rebuilding || segment.epoch < row {
            return false;
        }
        if segment.held & (1 << who) != 0 {
            segment.held &= !(1 << who);
            segment.stock += 1;
        }
        segment.revision += 1;
        true
    }

    /// `rebuild_begin.lua`; whether it was the first of this epoch.
    fn begin(&mut self, at: usize, epoch: u8) -> bool {
        if self.segments[at].epoch >= epoch {
            return false;
        }
        self.segments[at] = Segment {
            epoch,
            revision: 0,
            frozen: Frozen::Rebuilding,
            stock: 0,
            held: 0,
            out: [(0, 0); SEGMENTS],
            last_in: [0; SEGMENTS],
        };
        true
    }

    /// `rebuild_load.lua` and `rebuild_end.lua` in one; whether it was taken.
    fn end(&mut self, scope: &Scope, at: usize, epoch: u8, live: Set) -> bool {
        let stock = part(scope.total() - units_of(live), scope.segments, at);
        let held = scope.of_home(at) & live;
        let segment = &mut self.segments[at];
        if segment.epoch != epoch || segment.frozen != Frozen::Rebuilding {
            return false;
        }
        *segment = Segment { revision: 1, frozen: Frozen::No, stock, held, ..*segment };
        true
    }

    /// What a call does at the stores when nobody waits for it.
    fn arrives(&mut self, scope: &Scope, call: Step) {
        match call {
            Step::In { .. } => {
                self.arrive(scope, call);
            }
            Step::Done { .. } => self.forget(scope, call),
            Step::Out { source, target, epoch } => {
                self.out(scope, source, target, epoch);
            }
            Step::GiveBack { of, epoch } => {
                self.give_back(scope.home_of(of), epoch, of);
            }
            Step::Begin { at, epoch } => {
                self.begin(at, epoch);
            }
            Step::End { at, epoch, live } => {
                self.end(scope, at, epoch, live);
            }
            Step::Ask
            | Step::Commit { .. }
            | Step::Read { .. }
            | Step::Idle
            | Step::Won
            | Step::SoldOut
            | Step::Over => {}
        }
    }

    fn runs(&mut self, scope: &Scope, at: usize) {
        let program = self.programs[at];
        let next = match (scope.roles[at], program.step) {
            (Role::Reserve { home }, step) => self.reserves(scope, at, home, step),
            (Role::Release { of }, Step::Idle) => self.releases(of),
            (Role::Release { .. }, Step::GiveBack { of, epoch }) => {
                match self.give_back(scope.home_of(of), epoch, of) {
                    true => Step::Over,
                    false => program.step,
                }
            }
            (Role::Sweeper, Step::Idle) => self.sweeps(scope),
            (Role::Sweeper, step) => self.moves(scope, step, Step::Idle),
            (Role::Rebuilder, step) => self.rebuilds(scope, step),
            (Role::Release { .. }, _) => Step::Over,
        };
        self.programs[at].step = next;
    }

    fn reserves(&mut self, scope: &Scope, at: usize, home: usize, step: Step) -> Step {
        let known = self.programs[at].known;
        match step {
            Step::Ask => match self.take(home, known, at) {
                Answer::Ok(true) => Step::Commit { epoch: known },
                Answer::Ok(false) if self.programs[at].gatherings == GATHERINGS => Step::Over,
                Answer::Ok(false) => {
                    self.programs[at].saw_nothing = false;
                    self.programs[at].gatherings += 1;
                    first_read(1, None)
                }
                Answer::Epoch(found) if found > known => {
                    self.programs[at].known = found;
                    Step::Ask
                }
                Answer::Refused | Answer::Epoch(_) => Step::Over,
            },
            Step::Commit { epoch } if epoch == self.epoch => {
                self.live |= 1 << at;
                Step::Won
            }
            // Fenced; another call of the buyer is another program.
            Step::Commit { .. } => Step::Over,
            Step::Read { pass, at: segment, mut stamps, before, mut stocks, mut out } => {
                let Answer::Ok(found) = self.guard(segment, known) else { return Step::Over };
                stamps[segment] = (found.epoch, found.revision);
                stocks[segment] = found.stock;
                out |= found.out.iter().any(|(_, units)| *units > 0);
                if segment + 1 < scope.segments {
                    return Step::Read { pass, at: segment + 1, stamps, before, stocks, out };
                }
                self.judges(scope, home, known, (pass, stamps, before, stocks, out))
            }
            Step::Out { .. }
            | Step::In { .. }
            | Step::Done { .. }
            | Step::GiveBack { .. }
            | Step::Begin { .. }
            | Step::End { .. }
            | Step::Idle
            | Step::Won
            | Step::SoldOut
            | Step::Over => self.moves(scope, step, Step::Ask),
        }
    }

    /// What a whole pass means.
    fn judges(
        &self,
        scope: &Scope,
        home: usize,
        epoch: u8,
        (pass, stamps, before, stocks, out): (u8, Stamps, Option<Stamps>, [u8; SEGMENTS], bool),
    ) -> Step {
        if out {
            return match self.find_out(scope) {
                Some(step) => step,
                None if pass < PASSES => first_read(pass + 1, None),
                None => Step::Over,
            };
        }
        let richest = (0..scope.segments).filter(|at| *at != home).max_by_key(|at| stocks[*at]);
        match richest {
            Some(source) if stocks[source] > 0 => Step::Out { source, target: home, epoch },
            _ if stocks[home] > 0 => Step::Ask,
            _ if before == Some(stamps) || scope.is(Broken::OnePass) => Step::SoldOut,
            _ if pass < PASSES => first_read(pass + 1, Some(stamps)),
            _ => Step::Over,
        }
    }

    fn find_out(&self, scope: &Scope) -> Option<Step> {
        for source in 0..scope.segments {
            let Segment { epoch, frozen, out, .. } = self.segments[source];
            for (target, (sequence, units)) in out.into_iter().enumerate() {
                if units > 0 && frozen == Frozen::No {
                    return Some(Step::In { source, target, epoch, sequence, units });
                }
            }
        }
        None
    }

    /// The steps of a transfer; `then` comes after the last.
    fn moves(&mut self, scope: &Scope, step: Step, then: Step) -> Step {
        match step {
            Step::Out { source, target, epoch } => match self.out(scope, source, target, epoch) {
                Some((sequence, units)) => Step::In { source, target, epoch, sequence, units },
                None => then,
            },
            Step::In { source, target, epoch, sequence, .. } => {
                let done = Step::Done { source, target, epoch, sequence };
                match self.arrive(scope, step) || scope.is(Broken::ForgetsAfterRetry) {
                    true => done,
                    false => Step::Over,
                }
            }
            Step::Done { .. } => {
                self.moved = true;
                self.forget(scope, step);
                then
            }
            Step::Ask
            | Step::Commit { .. }
            | Step::Read { .. }
            | Step::GiveBack { .. }
            | Step::Begin { .. }
            | Step::End { .. }
            | Step::Idle
            | Step::Won
            | Step::SoldOut
            | Step::Over => Step::Over,
        }
    }

    fn sweeps(&self, scope: &Scope) -> Step {
        self.find_out(scope).unwrap_or(Step::Idle)
    }

    fn releases(&mut self, of: usize) -> Step {
        self.live &= !(1 << of);
        Step::GiveBack { of, epoch: self.epoch }
    }

    fn rebuilds(&mut self, scope: &Scope, step: Step) -> Step {
        match step {
            Step::Idle => {
                self.rebuilds -= 1;
                self.epoch += 1;
                Step::Begin { at: 0, epoch: self.epoch }
            }
            Step::Begin { at, epoch } => {
                if !self.begin(at, epoch) {
                    return Step::Over;
                }
                if at + 1 < scope.segments {
                    return Step::Begin { at: at + 1, epoch };
                }
                // A release that comes later carries this epoch, and gives its unit back after the end.
                Step::End { at: 0, epoch, live: self.live }
            }
            Step::End { at, epoch, live } => {
                if self.end(scope, at, epoch, live) && at + 1 < scope.segments {
                    Step::End { at: at + 1, epoch, live }
                } else {
                    Step::Over
                }
            }
            Step::Ask
            | Step::Commit { .. }
            | Step::Read { .. }
            | Step::Out { .. }
            | Step::In { .. }
            | Step::Done { .. }
            | Step::GiveBack { .. }
            | Step::Won
            | Step::SoldOut
            | Step::Over => Step::Over,
        }
    }

    fn look(&mut self, scope: &Scope) {
        let nothing = self.on_sale(scope) == 0;
        for program in &mut self.programs {
            match program.step {
                Step::SoldOut => {}
                Step::Read { .. } => program.saw_nothing |= nothing,
                Step::Won | Step::Over => {
                    *program = Program { known: 0, saw_nothing: false, gatherings: 0, ..*program }
                }
                Step::Ask
                | Step::Commit { .. }
                | Step::Out { .. }
                | Step::In { .. }
                | Step::Done { .. }
                | Step::GiveBack { .. }
                | Step::Begin { .. }
                | Step::End { .. }
                | Step::Idle => program.saw_nothing = false,
            }
        }
    }
}

/// The first read of a pass.
fn first_read(pass: u8, before: Option<Stamps>) -> Step {
    let stamps = [(0, 0); SEGMENTS];
    Step::Read { pass, at: 0, stamps, before, stocks: [0; SEGMENTS], out: false }
}

fn units_of(set: Set) -> u8 {
    u8::try_from(set.count_ones()).unwrap_or(u8::MAX)
}

/// As `share` of the server.
fn part(units: u8, count: usize, at: usize) -> u8 {
    let count = u8::try_from(count).unwrap_or(1);
    units / count + u8::from(at < usize::from(units % count))
}

impl Model for Scope {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (at, role) in self.roles.iter().enumerate() {
            let step = state.programs[at].step;
            let can_run = match (role, step) {
                (_, Step::Won | Step::SoldOut | Step::Over) => false,
                (Role::Release { of }, Step::Idle) => state.programs[*of].step == Step::Won,
                (Role::Sweeper, Step::Idle) => state.find_out(self).is_some(),
                (Role::Rebuilder, Step::Idle) => state.rebuilds > 0,
                _ => true,
            };
            if can_run {
                actions.push(Action::Runs(at));
                if state.crashes > 0 && step != Step::Idle && step != Step::Ask {
                    actions.push(Action::Dies(at));
                }
            }
        }
        for at in 0..state.late.len() {
            actions.extend([Action::Arrives(at), Action::GetsLost(at)]);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Runs(at) => next.runs(self, at),
            Action::Dies(at) => {
                next.crashes -= 1;
                next.late.push(next.programs[at].step);
                next.programs[at].step = match self.roles[at] {
                    Role::Sweeper => Step::Idle,
                    // The poller has the row.
                    Role::Release { .. } => next.programs[at].step,
                    Role::Reserve { .. } => Step::Over,
                    Role::Rebuilder => {
                        next.rebuilds += 1;
                        Step::Idle
                    }
                };
            }
            Action::Arrives(at) => {
                let call = next.late.remove(at);
                next.arrives(self, call);
            }
            Action::GetsLost(at) => {
                next.late.remove(at);
            }
        }
        next.look(self);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(property::NOTHING_MADE, |scope: &Self, state: &State| {
                state.accounted(scope).is_none_or(|units| units <= scope.total())
            }),
            Property::always(property::NOTHING_LOST, |scope: &Self, state: &State| {
                state.accounted(scope).is_none_or(|units| units >= scope.total())
            }),
            Property::always(property::TRULY_SOLD_OUT, |_: &Self, state: &State| {
                state
                    .programs
                    .iter()
                    .all(|program| program.step != Step::SoldOut || program.saw_nothing)
            }),
            Property::sometimes(property::ALL_SOLD, |_: &Self, state: &State| {
                state.programs.iter().any(|program| program.step == Step::SoldOut)
            }),
            Property::sometimes(property::MOVED, |_: &Self, state: &State| {
                state.moved && state.programs.iter().any(|program| program.step == Step::Won)
            }),
        ]
    }
}

/// Walks all worlds of the scope, or until `wanted` is violated; without it, until anything is.
#[must_use]
pub fn check(scope: Scope, threads: usize, wanted: Option<&'static str>) -> Outcome {
    let started = Instant::now();
    let (name, reaches) = (scope.name, scope.reaches && wanted.is_none());
    let finish = match wanted {
        Some(wanted) => HasDiscoveries::AnyOf([wanted].into()),
        None => HasDiscoveries::AnyFailures,
    };
    let checker = scope.checker().threads(threads).finish_when(finish).spawn_bfs().join();
    let found = checker.discoveries();
    let examples = [property::ALL_SOLD, property::MOVED];
    let mut violated: Vec<(&'static str, String)> = found
        .into_iter()
        .filter(|(name, _)| wanted.map_or(!examples.contains(name), |wanted| wanted == *name))
        .map(|(name, path)| (name, described(checker.model(), path.into_vec())))
        .collect();
    if reaches {
        let missing = examples.into_iter().filter(|name| checker.discovery(name).is_none());
        violated.extend(missing.map(|name| (name, "it never happens".to_owned())));
    }
    violated.sort_unstable();
    Outcome {
        scope: name,
        worlds: checker.unique_state_count(),
        steps: checker.state_count(),
        depth: checker.max_depth(),
        seconds: started.elapsed().as_secs_f64(),
        complete: violated.is_empty() && checker.is_done(),
        violated,
    }
}

/// One line a step, then where it ended.
fn described(scope: &Scope, path: Vec<(State, Option<Action>)>) -> String {
    let line = |(state, action): (State, Option<Action>)| match action {
        Some(Action::Runs(at)) => format!("  {:?}: {:?}", scope.roles[at], state.programs[at].step),
        Some(action) => format!("  {action:?}, late {:?}", state.late),
        None => format!("  then {:?}", &state.segments[..scope.segments]),
    };
    path.into_iter().map(line).collect::<Vec<_>>().join("\n")
}
