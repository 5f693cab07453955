//! The model: what is held by whom, as far as the answers and the books must show it.

use std::collections::BTreeMap;

use super::{ReleaseFault, ReserveFault};

pub(super) const TOTAL: u64 = 5;
pub(super) const MAX_ORDERS: usize = 2;
pub(super) const MAX_QUANTITY: u32 = 2;

/// One request of one buyer, and the reservation that it may get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id {
    pub(super) buyer: u8,
    pub(super) request: u8,
}

/// What became of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The engine has it, SQL does not.
    Taken,
    Pending,
    Ordered,
    Confirmed,
    /// A dead letter.
    Dead,
    /// Given back in SQL; the engine may not know yet.
    Releasing,
    Released,
}

#[derive(Debug, Clone)]
pub(super) struct Fate {
    pub(super) quantity: u32,
    pub(super) state: State,
    /// Whether the engine holds its units.
    pub(super) in_engine: bool,
    /// Whether the engine knows that SQL has it.
    pub(super) acknowledged: bool,
    /// Whether its hold is over.
    pub(super) over: bool,
    /// Whether it was given back for that.
    pub(super) expired: bool,
}

impl Fate {
    pub(super) fn is_live(&self) -> bool {
        use State::{Confirmed, Dead, Ordered, Pending, Released, Releasing, Taken};
        match self.state {
            Pending | Ordered | Confirmed | Dead => true,
            Taken | Releasing | Released => false,
        }
    }

    pub(super) fn is_ordered(&self) -> bool {
        matches!(self.state, State::Ordered | State::Confirmed)
    }
}

/// What a caller hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Heard {
    Ended,
    QuantityLimit,
    Conflict,
    Reserved {
        replayed: bool,
    },
    Released,
    Duplicate,
    SoldOut,
    Insufficient(u64),
    AlreadyReleased,
    NotReserved,
    WrongOwner,
    Confirmed,
    Expired,
    NotOrderedYet,
    /// GetReservation: this state.
    Found(State),
    Unknown,
    /// An error after which a repeat tells.
    Undecided,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) fates: BTreeMap<Id, Fate>,
    pub(super) ended: bool,
}

impl Model {
    /// Units for sale in the engine.
    pub(super) fn stock(&self) -> u64 {
        TOTAL - self.units(|fate| fate.in_engine)
    }

    pub(super) fn units(&self, is: impl Fn(&Fate) -> bool) -> u64 {
        self.fates.values().filter(|fate| is(fate)).map(|fate| u64::from(fate.quantity)).sum()
    }

    pub(super) fn count(&self, is: impl Fn(&Fate) -> bool) -> u64 {
        self.fates.values().filter(|fate| is(fate)).count() as u64
    }

    /// What a Reserve hears before it comes to the engine.
    pub(super) fn refusal(&self, quantity: u32) -> Option<Heard> {
        if self.ended {
            Some(Heard::Ended)
        } else if quantity > MAX_QUANTITY {
            Some(Heard::QuantityLimit)
        } else {
            None
        }
    }

    /// Whether a Reserve of this request needs units.
    pub(super) fn asks_for_units(&self, id: Id, quantity: u32) -> bool {
        let held = self.fates.iter().filter(|(of, fate)| of.buyer == id.buyer && fate.in_engine);
        let is_new = !self.fates.contains_key(&id) && held.count() < MAX_ORDERS;
        is_new && self.refusal(quantity).is_none()
    }

    /// A Reserve on a healthy engine: what is heard, if the reply is not lost.
    pub(super) fn reserve(&mut self, id: Id, quantity: u32, fault: ReserveFault) -> Heard {
        if let Some(refusal) = self.refusal(quantity) {
            return refusal;
        }
        let reply_lost = fault == ReserveFault::ReplyLost;
        if let Some(fate) = self.fates.get_mut(&id) {
            if !fate.in_engine {
                return if reply_lost { Heard::Undecided } else { Heard::Released };
            }
            if reply_lost {
                return Heard::Undecided;
            }
            return fate.replay(quantity, fault);
        }
        let orders = self.fates.iter().filter(|(of, fate)| of.buyer == id.buyer && fate.in_engine);
        let stock = self.stock();
        let heard = if orders.count() >= MAX_ORDERS {
            Heard::Duplicate
        } else if stock == 0 {
            Heard::SoldOut
        } else if stock < u64::from(quantity) {
            Heard::Insufficient(stock)
        } else {
            self.fates.insert(
                id,
                Fate {
                    quantity,
                    state: if reply_lost { State::Taken } else { State::Pending },
                    in_engine: true,
                    acknowledged: fault == ReserveFault::None,
                    over: false,
                    expired: false,
                },
            );
            Heard::Reserved { replayed: false }
        };
        if reply_lost { Heard::Undecided } else { heard }
    }

    /// A Release on a healthy engine.
    pub(super) fn release(&mut self, buyer: u8, id: Id, fault: ReleaseFault) -> Heard {
        let Some(fate) = self.fates.get_mut(&id) else { return Heard::NotReserved };
        if buyer != id.buyer {
            // The engine looks under the buyer who asks.
            let unknown = fate.state == State::Taken;
            return if unknown { Heard::NotReserved } else { Heard::WrongOwner };
        }
        let heard = match fate.state {
            State::Confirmed => return Heard::Confirmed,
            State::Released => return Heard::AlreadyReleased,
            State::Releasing => Heard::AlreadyReleased,
            State::Taken | State::Pending | State::Ordered | State::Dead => {
                // Past its hold the owner may still be first to give it back.
                Heard::Released
            }
        };
        fate.state = State::Releasing;
        match fault {
            ReleaseFault::None => {
                (fate.state, fate.in_engine) = (State::Released, false);
                heard
            }
            ReleaseFault::NotRun => Heard::Undecided,
            ReleaseFault::ReplyLost => {
                fate.in_engine = false;
                Heard::Undecided
            }
        }
    }

    pub(super) fn confirm(&mut self, buyer: u8, id: Id) -> Heard {
        let Some(fate) = self.fates.get_mut(&id) else { return Heard::NotReserved };
        match fate.state {
            State::Taken if buyer != id.buyer => Heard::NotReserved,
            State::Taken => Heard::NotOrderedYet,
            _ if buyer != id.buyer => Heard::WrongOwner,
            State::Confirmed => Heard::Confirmed,
            State::Releasing | State::Released if fate.expired => Heard::Expired,
            State::Releasing | State::Released => Heard::Released,
            _ if fate.over => Heard::Expired,
            State::Pending | State::Dead => Heard::NotOrderedYet,
            State::Ordered => {
                fate.state = State::Confirmed;
                Heard::Confirmed
            }
        }
    }

    pub(super) fn get(&self, id: Id, by_request: bool) -> Heard {
        match self.fates.get(&id) {
            None => Heard::Unknown,
            Some(fate) if fate.state == State::Taken && !by_request => Heard::Unknown,
            Some(fate) if fate.state == State::Releasing => Heard::Found(State::Released),
            Some(fate) => Heard::Found(fate.state),
        }
    }

    /// What the poller does in SQL alone.
    pub(super) fn order(&mut self) {
        for fate in self.fates.values_mut().filter(|fate| fate.state == State::Pending) {
            fate.state = State::Ordered;
        }
    }

    /// The poller, on a healthy engine.
    pub(super) fn poll(&mut self) {
        self.order();
        for fate in self.fates.values_mut().filter(|fate| fate.state == State::Releasing) {
            (fate.state, fate.in_engine) = (State::Released, false);
        }
    }

    /// The sweeper, on a healthy engine.
    pub(super) fn sweep(&mut self) {
        for fate in self.fates.values_mut().filter(|fate| !fate.acknowledged && fate.in_engine) {
            match fate.state {
                State::Taken => fate.state = State::Pending,
                // The row that the entry meets is on its way out.
                State::Releasing => fate.in_engine = false,
                State::Pending | State::Ordered | State::Confirmed | State::Dead => {}
                State::Released => unreachable!("the engine does not have it"),
            }
            fate.acknowledged = fate.is_live();
        }
    }

    /// The expiry, with an engine that is healthy or not.
    pub(super) fn expire(&mut self, is_healthy: bool) {
        for fate in self.fates.values_mut().filter(|fate| fate.over) {
            if matches!(fate.state, State::Pending | State::Ordered) {
                fate.state = if is_healthy { State::Released } else { State::Releasing };
                fate.in_engine &= !is_healthy;
                fate.expired = true;
            }
        }
    }

    pub(super) fn holds_end(&mut self) {
        for fate in self.fates.values_mut() {
            // What is being given back is asked about by its hold too.
            fate.over |= match fate.state {
                State::Pending | State::Ordered | State::Dead | State::Releasing => true,
                State::Taken | State::Confirmed | State::Released => false,
            };
        }
    }

    /// The engine was rebuilt from SQL: what SQL does not have is gone, what it gave back too.
    pub(super) fn rebuilt(&mut self) {
        self.fates.retain(|_, fate| fate.state != State::Taken);
        for fate in self.fates.values_mut() {
            fate.in_engine = fate.is_live();
            fate.acknowledged = fate.is_live();
        }
    }
}

impl Fate {
    /// The request is made again while the engine holds it.
    fn replay(&mut self, quantity: u32, fault: ReserveFault) -> Heard {
        if quantity != self.quantity {
            return Heard::Conflict;
        }
        if !self.acknowledged {
            match self.state {
                State::Taken => self.state = State::Pending,
                State::Releasing => {
                    self.in_engine = false;
                    return Heard::Released;
                }
                State::Pending
                | State::Ordered
                | State::Confirmed
                | State::Dead
                | State::Released => {}
            }
            self.acknowledged = fault == ReserveFault::None;
        }
        if self.over { Heard::Released } else { Heard::Reserved { replayed: true } }
    }
}
