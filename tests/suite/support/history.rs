//! What the clients of one offer asked and were told, and whether all of it can be true.
//!
//! Each client logs when it called and what came back; what it was not told is unknown, and may
//! have happened or not. The checks need nothing but that, and for the last ones what the stores
//! hold once nothing moves any more. Plain data, so that any test program can use it.
//!
//! Offers with holds are out of reach: a reservation that expires is given back without a call.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

#[path = "history/counter.rs"]
mod counter;
#[path = "history/linear.rs"]
mod linear;

/// One call of one client. Times are since the beginning of the log, by a monotonic clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) buyer: String,
    pub(crate) ask: Ask,
    pub(crate) invoked: Duration,
    /// When the decision was told; `None` when it was not, by an error or by silence.
    pub(crate) returned: Option<(Duration, Answer)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ask {
    /// `names` is the reservation that this request can get, and no other.
    Reserve {
        request_id: String,
        quantity: u64,
        names: String,
    },
    Release {
        reservation_id: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Reserved {
        reservation_id: String,
        order_no: String,
    },
    /// To a Reserve: given back since. To a Release: given back by this call.
    Released,
    Duplicate,
    SoldOut,
    Insufficient {
        remaining: u64,
    },
    AlreadyReleased,
    NotReserved,
    /// Refused whatever the stock is: the owner, the state of the activity, a limit.
    Refused,
}

/// An order as the database has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) reservation_id: String,
    pub(crate) order_no: String,
    pub(crate) buyer: String,
    pub(crate) units: u64,
    pub(crate) is_live: bool,
}

/// What the stores hold once nothing is in flight, each counted for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AtRest {
    pub(crate) engine_remaining: u64,
    pub(crate) engine_reserved: u64,
    pub(crate) sql_reserved: u64,
    pub(crate) orders: Vec<Order>,
}

/// All calls on one offer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct History {
    pub(crate) total: u64,
    pub(crate) max_orders: u32,
    pub(crate) calls: Vec<Call>,
    /// Spans in which the engine lost something and was rebuilt: from before the loss to after the
    /// rebuild. What was in flight then may come out either way.
    pub(crate) rebuilds: Vec<(Duration, Duration)>,
}

/// Where clients write down what they do; a clone is the same one.
#[derive(Debug, Clone)]
pub(crate) struct Log {
    began: Instant,
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug, Default)]
struct Entries {
    calls: Vec<Call>,
    /// When the engine was last seen whole, and under which epoch.
    whole: Option<(u64, Duration)>,
    rebuilds: Vec<(Duration, Duration)>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), entries: Arc::default() }
    }

    /// The time in this log.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Notes that a client calls now; the answer goes to [`Log::returned`] under this number.
    pub(crate) fn invoked(&self, buyer: &str, ask: Ask) -> usize {
        let mut entries = self.entries.lock().unwrap();
        let invoked = self.now();
        entries.calls.push(Call { buyer: buyer.to_owned(), ask, invoked, returned: None });
        entries.calls.len() - 1
    }

    /// Notes the decision that a client was told just now.
    pub(crate) fn returned(&self, call: usize, answer: Answer) {
        let mut entries = self.entries.lock().unwrap();
        entries.calls[call].returned = Some((self.now(), answer));
    }

    /// Notes that the engine, asked at `asked`, sells under this epoch. Under another one than
    /// before it was rebuilt between the last time that it was asked and now.
    pub(crate) fn whole(&self, epoch: u64, asked: Duration) {
        let mut entries = self.entries.lock().unwrap();
        let now = self.now();
        if let Some((before, since)) = entries.whole
            && before != epoch
        {
            entries.rebuilds.push((since, now));
        }
        entries.whole = Some((epoch, asked));
    }

    pub(crate) fn history(&self, total: u64, max_orders: u32) -> History {
        let entries = self.entries.lock().unwrap();
        let (calls, rebuilds) = (entries.calls.clone(), entries.rebuilds.clone());
        History { total, max_orders, calls, rebuilds }
    }
}

/// What the calls together tell of one reservation.
#[derive(Debug, Default)]
struct Fate<'a> {
    buyer: &'a str,
    units: u64,
    /// When it was first asked for.
    asked: Duration,
    /// When a client was first told that it is reserved, and under which order number.
    told: Option<(Duration, &'a str)>,
    /// From when on it may be given back: when a release was sent that may have done it.
    may_end: Option<Duration>,
    /// When a client was first told that it is given back.
    ended: Option<Duration>,
    /// Whether some attempt has no answer, so that it may be there although nobody was told.
    unknown: bool,
}

impl Fate<'_> {
    /// Whether it must hold its units when all is over.
    fn is_certain(&self) -> bool {
        self.told.is_some() && self.may_end.is_none()
    }

    /// Whether it may hold its units when all is over.
    fn is_possible(&self) -> bool {
        (self.told.is_some() || self.unknown) && self.ended.is_none()
    }
}

fn earliest(slot: &mut Option<Duration>, at: Duration) {
    *slot = Some(slot.map_or(at, |known| known.min(at)));
}

impl History {
    /// All checks. SOLD_OUT counts as false only when units were free for `grace` before, too.
    pub(crate) fn check(&self, grace: Duration, at_rest: &AtRest) -> Result<(), String> {
        self.never_oversold()?;
        self.is_linearizable()?;
        self.check_in_any_order(grace, at_rest)
    }

    /// All of them but that of the order, which needs to know exactly when rebuilds were.
    pub(crate) fn check_in_any_order(
        &self,
        grace: Duration,
        at_rest: &AtRest,
    ) -> Result<(), String> {
        self.never_oversold()?;
        self.orders_match(&at_rest.orders)?;
        self.no_false_sold_out(grace)?;
        self.same_request_same_reservation()?;
        self.balances(at_rest)
    }

    /// Reservations that clients were told, less those whose release was sent, never exceed the
    /// total, nor what one buyer may have.
    pub(crate) fn never_oversold(&self) -> Result<(), String> {
        let fates = self.fates();
        let mut changes = Vec::new();
        for (id, fate) in &fates {
            let Some((told, _)) = fate.told else { continue };
            if fate.may_end.is_none_or(|end| told < end) {
                changes.push((told, true, *id, fate));
                changes.extend(fate.may_end.map(|end| (end, false, *id, fate)));
            }
        }
        // At one instant what ends goes first: then it counts for less.
        changes.sort_by_key(|(at, begins, ..)| (*at, *begins));
        let (mut held, mut of_buyer) = (0, HashMap::<&str, u32>::new());
        for (at, begins, id, fate) in changes {
            let orders = of_buyer.entry(fate.buyer).or_default();
            if !begins {
                held -= fate.units;
                *orders -= 1;
                continue;
            }
            held += fate.units;
            *orders += 1;
            if held > self.total {
                return Err(format!("oversold: {held} of {} units at {at:?}, by {id}", self.total));
            }
            if *orders > self.max_orders {
                return Err(format!("{} holds {orders} orders at {at:?}, by {id}", fate.buyer));
            }
        }
        Ok(())
    }

    /// There is an order of the calls, each between its call and its answer, in which a counter
    /// with a set of buyers gives these answers. What is unknown may be in it or not; it starts
    /// anew behind each rebuild, from what clients were told.
    pub(crate) fn is_linearizable(&self) -> Result<(), String> {
        linear::check(self)
    }

    /// Every reservation that a client was told, and nobody may have given back, has exactly one
    /// live order, the one that was told; what was given back has none; every order was asked for.
    pub(crate) fn orders_match(&self, orders: &[Order]) -> Result<(), String> {
        let fates = self.fates();
        let mut of_reservation = BTreeMap::<&str, &Order>::new();
        let mut numbers = BTreeSet::new();
        for order in orders {
            let Some(fate) = fates.get(&*order.reservation_id) else {
                return Err(format!("nobody asked for {order:?}"));
            };
            if fate.told.is_none() && !fate.unknown && order.is_live {
                return Err(format!("everybody who asked was refused {order:?}"));
            }
            if (fate.buyer, fate.units) != (&*order.buyer, order.units) {
                return Err(format!("{order:?} is not what {} asked for", fate.buyer));
            }
            if fate.told.is_some_and(|(_, told)| told != order.order_no) {
                return Err(format!("{order:?} was told under {:?}", fate.told));
            }
            if !numbers.insert(&order.order_no)
                || of_reservation.insert(&order.reservation_id, order).is_some()
            {
                return Err(format!("a second order: {order:?}"));
            }
        }
        for (id, fate) in &fates {
            let is_live = of_reservation.get(id).is_some_and(|order| order.is_live);
            if fate.is_certain() && !is_live {
                return Err(format!("{} was told {id} and has no order", fate.buyer));
            }
            if fate.ended.is_some() && is_live {
                return Err(format!("{id} was given back and has an order"));
            }
        }
        Ok(())
    }

    /// Nobody is turned away while enough units are free for certain, all the time from `grace`
    /// before the call to its answer.
    pub(crate) fn no_false_sold_out(&self, grace: Duration) -> Result<(), String> {
        // When the units that may be held change; at one instant what begins counts first.
        let mut changes: Vec<(Duration, bool, u64)> = Vec::new();
        for fate in self.fates().values().filter(|fate| fate.told.is_some() || fate.unknown) {
            changes.push((fate.asked, false, fate.units));
            changes.extend(fate.ended.map(|end| (end, true, fate.units)));
        }
        changes.sort_unstable();
        let mut held = 0;
        let mut levels = vec![(Duration::ZERO, 0)];
        for (at, ends, units) in changes {
            held = if ends { held - units } else { held + units };
            levels.push((at, held));
        }
        for call in &self.calls {
            let Ask::Reserve { quantity, .. } = &call.ask else { continue };
            let Some((returned, Answer::SoldOut | Answer::Insufficient { .. })) = call.returned
            else {
                continue;
            };
            let from = call.invoked.saturating_sub(grace);
            let before = levels.partition_point(|(at, _)| *at <= from).saturating_sub(1);
            let during = levels[before..].iter().take_while(|(at, _)| *at <= returned);
            let most = during.map(|(_, held)| *held).max().unwrap_or(0);
            if most + quantity <= self.total {
                return Err(format!(
                    "at most {most} of {} units were held during {call:?}",
                    self.total
                ));
            }
        }
        Ok(())
    }

    /// A request is told one reservation, for ever, and no other request is told the same.
    pub(crate) fn same_request_same_reservation(&self) -> Result<(), String> {
        let mut of_request = HashMap::new();
        let mut request_of = HashMap::new();
        for call in &self.calls {
            let Ask::Reserve { request_id, .. } = &call.ask else { continue };
            let Some((_, Answer::Reserved { reservation_id, order_no })) = &call.returned else {
                continue;
            };
            let request = (&call.buyer, request_id);
            let told = (reservation_id, order_no);
            let before = *of_request.entry(request).or_insert(told);
            if before != told {
                return Err(format!("{request:?} was told {before:?}, then {told:?}"));
            }
            let first = *request_of.entry(reservation_id).or_insert(request);
            if first != request {
                return Err(format!("{reservation_id} was told to {first:?} and {request:?}"));
            }
        }
        Ok(())
    }

    /// At rest no unit is lost, by three books that know nothing of each other: the engine, the
    /// database, and what the clients were told.
    pub(crate) fn balances(&self, at_rest: &AtRest) -> Result<(), String> {
        let AtRest { engine_remaining, engine_reserved, sql_reserved, orders } = at_rest;
        let ordered: u64 = orders.iter().filter(|o| o.is_live).map(|o| o.units).sum();
        let (mut certain, mut possible) = (0, 0);
        for fate in self.fates().values() {
            certain += if fate.is_certain() { fate.units } else { 0 };
            possible += if fate.is_possible() { fate.units } else { 0 };
        }
        let wrong = if engine_remaining + engine_reserved != self.total {
            "the engine lost or made units"
        } else if engine_reserved != sql_reserved || *sql_reserved != ordered {
            "engine, counter and orders differ"
        } else if !(certain..=possible).contains(&ordered) {
            "the orders are not what the clients were told"
        } else {
            return Ok(());
        };
        Err(format!(
            "{wrong}: total {}, engine {engine_remaining} + {engine_reserved}, sql {sql_reserved}, \
             orders {ordered}, clients {certain} to {possible}",
            self.total
        ))
    }

    /// What the calls tell of each reservation, by its id.
    fn fates(&self) -> BTreeMap<&str, Fate<'_>> {
        let mut fates = BTreeMap::<&str, Fate<'_>>::new();
        for call in &self.calls {
            let Ask::Reserve { quantity, names, .. } = &call.ask else { continue };
            let fate = fates.entry(names).or_insert_with(|| Fate {
                buyer: &call.buyer,
                units: *quantity,
                asked: call.invoked,
                ..Fate::default()
            });
            fate.asked = fate.asked.min(call.invoked);
            match &call.returned {
                None => fate.unknown = true,
                Some((at, Answer::Reserved { order_no, .. })) => {
                    fate.units = *quantity;
                    if fate.told.is_none_or(|(told, _)| *at < told) {
                        fate.told = Some((*at, order_no));
                    }
                }
                Some((at, Answer::Released)) => earliest(&mut fate.ended, *at),
                Some(_) => {}
            }
        }
        for call in &self.calls {
            let Ask::Release { reservation_id } = &call.ask else { continue };
            let Some(fate) = fates.get_mut(&**reservation_id) else { continue };
            match &call.returned {
                None => earliest(&mut fate.may_end, call.invoked),
                Some((at, Answer::Released | Answer::AlreadyReleased)) => {
                    earliest(&mut fate.may_end, call.invoked);
                    earliest(&mut fate.ended, *at);
                }
                Some(_) => {}
            }
        }
        fates
    }
}
