//! One offer as a counter with a set of buyers: which answers are right in between two calls, and
//! what each call changes.

use std::{collections::HashMap, time::Duration};

use super::{Answer, Ask, Call, History};

impl Answer {
    /// Whether an answer like this may have changed something.
    pub(super) fn changes(&self) -> bool {
        matches!(self, Answer::Reserved { .. } | Answer::Released)
    }
}

/// One call with its place in time; `returned` is `None` when it need not take place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Op<'a> {
    pub(super) call: &'a Call,
    pub(super) invoked: Duration,
    pub(super) returned: Option<Duration>,
}

impl<'a> Op<'a> {
    pub(super) fn reservation(&self) -> &'a str {
        match &self.call.ask {
            Ask::Reserve { names, .. } => names,
            Ask::Release { reservation_id } => reservation_id,
        }
    }

    pub(super) fn is_reserve(&self) -> bool {
        matches!(self.call.ask, Ask::Reserve { .. })
    }

    /// Whether the answer says that this reservation was never made up to then, or not given back.
    fn denies(&self, reserve: bool) -> bool {
        if reserve {
            self.wants_few_free()
                || matches!(self.answer(), Some(Answer::Duplicate | Answer::NotReserved))
        } else {
            !self.is_reserve() && self.answer() == Some(&Answer::Released)
        }
    }

    /// Whether the answer says that this reservation was made before, or given back.
    pub(super) fn proves(&self, reserve: bool) -> bool {
        let given_back = matches!(self.answer(), Some(Answer::Released | Answer::AlreadyReleased));
        given_back || reserve && matches!(self.answer(), Some(Answer::Reserved { .. }))
    }

    pub(super) fn answer(&self) -> Option<&'a Answer> {
        self.returned.and(self.call.returned.as_ref()).map(|(_, answer)| answer)
    }

    /// Whether it was turned away for want of units.
    pub(super) fn wants_few_free(&self) -> bool {
        matches!(self.answer(), Some(Answer::SoldOut | Answer::Insufficient { .. }))
    }
}

/// The offer in between two calls.
#[derive(Debug, Default)]
pub(super) struct State<'a> {
    pub(super) free: u64,
    max_orders: u32,
    /// Units held by each reservation; 0 when it was given back.
    units: HashMap<&'a str, u64>,
    orders: HashMap<&'a str, u32>,
    /// Answers that have no place yet and deny that this reservation was made before them; or, with
    /// `false`, given back.
    denials: HashMap<(&'a str, bool), u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Nothing,
    Take(u64),
    GiveBack(u64),
}

impl<'a> State<'a> {
    /// Before the first call.
    pub(super) fn of(history: &History) -> Self {
        Self { free: history.total, max_orders: history.max_orders, ..Self::default() }
    }

    /// Notes what these calls deny, until they have their place.
    pub(super) fn expect_denials(&mut self, ops: &[Op<'a>]) {
        for op in ops {
            for reserve in [true, false].into_iter().filter(|reserve| op.denies(*reserve)) {
                *self.denials.entry((op.reservation(), reserve)).or_default() += 1;
            }
        }
    }

    /// What the call does here, if its answer is right here.
    pub(super) fn effect(&self, op: &Op<'a>) -> Option<Effect> {
        let units = self.units.get(op.reservation()).copied();
        let right = |is: bool| is.then_some(Effect::Nothing);
        match &op.call.ask {
            Ask::Reserve { quantity, .. } => {
                let orders = self.orders.get(&*op.call.buyer).copied().unwrap_or(0);
                let asks_anew = units.is_none() && orders < self.max_orders;
                let fits = asks_anew && !self.is_denied(op) && *quantity <= self.free;
                let take = fits.then_some(Effect::Take(*quantity));
                match op.answer() {
                    None => take,
                    Some(Answer::Reserved { .. }) if units.is_some_and(|units| units > 0) => {
                        Some(Effect::Nothing)
                    }
                    Some(Answer::Reserved { .. }) => take,
                    Some(Answer::Released) => right(units == Some(0)),
                    Some(Answer::Duplicate) => right(units.is_none() && orders >= self.max_orders),
                    Some(Answer::SoldOut) => right(asks_anew && self.free == 0),
                    Some(Answer::Insufficient { remaining }) => {
                        let few = (1..*quantity).contains(remaining);
                        right(asks_anew && few && self.free == *remaining)
                    }
                    Some(Answer::Refused) => right(true),
                    Some(Answer::AlreadyReleased | Answer::NotReserved) => None,
                }
            }
            Ask::Release { .. } => {
                let held = units.filter(|units| *units > 0);
                match op.answer() {
                    Some(Answer::Released) => held.map(Effect::GiveBack),
                    None => held.filter(|_| !self.is_denied(op)).map(Effect::GiveBack),
                    Some(Answer::AlreadyReleased) => right(units == Some(0)),
                    Some(Answer::NotReserved) => right(units.is_none()),
                    Some(Answer::Refused) => right(true),
                    Some(
                        Answer::Reserved { .. }
                        | Answer::Duplicate
                        | Answer::SoldOut
                        | Answer::Insufficient { .. },
                    ) => None,
                }
            }
        }
    }

    fn is_denied(&self, op: &Op<'a>) -> bool {
        let denials = self.denials.get(&(op.reservation(), op.is_reserve()));
        denials.is_some_and(|denials| *denials > 0)
    }

    pub(super) fn apply(&mut self, op: &Op<'a>, effect: Effect) {
        for reserve in [true, false].into_iter().filter(|reserve| op.denies(*reserve)) {
            *self.denials.entry((op.reservation(), reserve)).or_default() -= 1;
        }
        self.change(op, effect);
    }

    fn change(&mut self, op: &Op<'a>, effect: Effect) {
        let orders = self.orders.entry(&op.call.buyer).or_default();
        match effect {
            Effect::Nothing => {}
            Effect::Take(units) => {
                self.free -= units;
                *orders += 1;
                self.units.insert(op.reservation(), units);
            }
            Effect::GiveBack(units) => {
                self.free += units;
                *orders -= 1;
                self.units.insert(op.reservation(), 0);
            }
        }
    }

    pub(super) fn undo(&mut self, op: &Op<'a>, effect: Effect) {
        for reserve in [true, false].into_iter().filter(|reserve| op.denies(*reserve)) {
            *self.denials.entry((op.reservation(), reserve)).or_default() += 1;
        }
        let orders = self.orders.entry(&op.call.buyer).or_default();
        match effect {
            Effect::Nothing => {}
            Effect::Take(units) => {
                self.free += units;
                *orders -= 1;
                self.units.remove(op.reservation());
            }
            Effect::GiveBack(units) => {
                self.free -= units;
                *orders += 1;
                self.units.insert(op.reservation(), units);
            }
        }
    }

    /// Takes over a call that was over before the span began.
    pub(super) fn settle(&mut self, call: &'a Call) -> Result<(), String> {
        let op = Op { call, invoked: call.invoked, returned: Some(call.invoked) };
        let Some((_, answer)) = &call.returned else { return Ok(()) };
        let held = self.units.get(op.reservation()).copied();
        match (&call.ask, answer, held) {
            (Ask::Reserve { quantity, .. }, Answer::Reserved { .. }, None) => {
                if *quantity > self.free {
                    return Err(format!("oversold by a rebuild: {call:?}"));
                }
                self.change(&op, Effect::Take(*quantity));
            }
            (_, Answer::Released | Answer::AlreadyReleased, Some(units)) if units > 0 => {
                self.change(&op, Effect::GiveBack(units));
            }
            (_, Answer::Released | Answer::AlreadyReleased, None) => {
                self.units.insert(op.reservation(), 0);
            }
            _ => {}
        }
        Ok(())
    }
}
