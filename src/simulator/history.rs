//! What the buyers heard. Every answer is held against the answers before it, and at the end
//! against SQL.

use std::{collections::BTreeMap, sync::Mutex};

use sea_orm::EntityTrait;

use super::{Shared, sql};
use crate::{
    database::Database,
    domain::{
        BuyerId, ConfirmOutcome, OfferKey, ReleaseOutcome, RequestId, Reservation, ReservationId,
        ReservationState, ReserveOutcome,
    },
    entity::{orders, orders::OrderState, outbox, outbox::OutboxState},
    error::Error,
};

/// One purchase that a buyer tries, again and again under one name if it has one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Wish {
    pub(super) offer: OfferKey,
    pub(super) buyer: BuyerId,
    pub(super) request_id: Option<RequestId>,
    pub(super) quantity: u32,
}

/// What is known of one reservation from the answers alone.
#[derive(Debug, Clone)]
pub(super) struct Account {
    pub(super) wish: Wish,
    /// Steps of the history, from 1: when an answer said so first.
    pub(super) reserved: Option<u64>,
    pub(super) order_no: Option<String>,
    pub(super) released: Option<u64>,
    /// A Reserve heard RELEASED. Where holds expire, the buyer's slot may be free only later.
    pub(super) over: Option<u64>,
    pub(super) confirmed: Option<u64>,
    /// Somebody asked for it, whatever was answered.
    pub(super) release_asked: bool,
    pub(super) confirm_asked: bool,
    /// How often RELEASED was answered, which only the one that did it hears.
    pub(super) released_by: u32,
}

pub(super) struct History {
    world: Shared,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    step: u64,
    accounts: BTreeMap<ReservationId, Account>,
    /// Reserve calls without a request id that may hold something: by buyer and offer.
    nameless: BTreeMap<(BuyerId, OfferKey), u32>,
}

impl History {
    pub(super) fn new(world: Shared) -> Self {
        Self { world, inner: Mutex::default() }
    }

    /// A step that begins; what was heard before it counts for its answer.
    pub(super) fn step(&self) -> u64 {
        let mut inner = self.inner.lock().unwrap();
        inner.step += 1;
        inner.step
    }

    pub(super) fn accounts(&self) -> BTreeMap<ReservationId, Account> {
        self.inner.lock().unwrap().accounts.clone()
    }

    fn expires(&self, offer: &OfferKey) -> bool {
        let offers = &self.world.plan.activity.offers;
        offers.iter().any(|spec| spec.sku_id == offer.sku_id && spec.hold.is_some())
    }

    fn max_orders(&self, offer: &OfferKey) -> usize {
        let offers = &self.world.plan.activity.offers;
        let spec = offers.iter().find(|spec| spec.sku_id == offer.sku_id);
        spec.map_or(1, |spec| spec.max_orders as usize)
    }

    /// A buyer asks for units under this name, or under none.
    pub(super) fn asks(&self, wish: &Wish, id: Option<&ReservationId>) -> u64 {
        let step = self.step();
        let mut inner = self.inner.lock().unwrap();
        match id {
            Some(id) => {
                inner.accounts.entry(id.clone()).or_insert_with(|| Account::of(wish));
            }
            None => {
                let key = (wish.buyer.clone(), wish.offer.clone());
                *inner.nameless.entry(key).or_default() += 1;
            }
        }
        step
    }

    pub(super) fn asks_release(&self, id: &ReservationId) -> u64 {
        let step = self.step();
        if let Some(account) = self.inner.lock().unwrap().accounts.get_mut(id) {
            account.release_asked = true;
        }
        step
    }

    pub(super) fn asks_confirm(&self, id: &ReservationId) -> u64 {
        let step = self.step();
        if let Some(account) = self.inner.lock().unwrap().accounts.get_mut(id) {
            account.confirm_asked = true;
        }
        step
    }

    /// An error is no decision, but may not be a fault of ours.
    pub(super) fn failed(&self, what: &str, error: &Error) {
        match error {
            // What a failing script is answered with.
            Error::Internal(cause) if cause.to_string().contains("simulated") => {}
            Error::Internal(cause) => self.world.violation(format!("{what}: internal: {cause}")),
            Error::Overloaded
            | Error::InProgress(_)
            | Error::NotDrained { .. }
            | Error::EngineUnavailable
            | Error::DatabaseUnavailable
            | Error::OfferFrozen(_)
            | Error::UnknownReservation => {}
            other @ (Error::InvalidField(_)
            | Error::RequestIdConflict { .. }
            | Error::UnknownActivity(_)
            | Error::UnknownOffer { .. }
            | Error::ActivityExists(_)
            | Error::RateLimited { .. }
            | Error::AddressDenied
            | Error::WrongActivityState { .. }
            | Error::WarmupMismatch { .. }
            | Error::ShuttingDown
            | Error::DeadlineExceeded
            | Error::Unimplemented(_)) => {
                self.world.violation(format!("{what}: answered {other:?}"));
            }
        }
    }

    /// An answer to a Reserve that began at `since`.
    pub(super) async fn reserved(
        &self,
        since: u64,
        wish: &Wish,
        id: Option<&ReservationId>,
        outcome: &ReserveOutcome,
        aside: &Database,
    ) {
        let now = self.step();
        if let ReserveOutcome::Reserved { reservation, .. } = outcome {
            self.won(now, since, wish, id, reservation);
            self.is_durable(reservation, aside).await;
            return;
        }
        let mut inner = self.inner.lock().unwrap();
        if id.is_none() {
            // Decided, and not won; nothing is held.
            let key = (wish.buyer.clone(), wish.offer.clone());
            if let Some(count) = inner.nameless.get_mut(&key) {
                *count -= 1;
            }
        }
        if let ReserveOutcome::Duplicate { .. } = outcome {
            let others = inner.accounts.iter().filter(|(other, account)| {
                Some(*other) != id
                    && account.wish.buyer == wish.buyer
                    && account.wish.offer == wish.offer
                    && account.released.is_none_or(|released| released > since)
            });
            let key = (wish.buyer.clone(), wish.offer.clone());
            let nameless = inner.nameless.get(&key).copied().unwrap_or(0) as usize;
            let others = others.count() + nameless;
            self.world.check(others >= self.max_orders(&wish.offer), || {
                format!("I4: {wish:?} is a duplicate of {others} others")
            });
        }
        let Some(account) = id.and_then(|id| inner.accounts.get_mut(id)) else { return };
        let may_be_over = account.release_asked
            || (self.expires(&wish.offer) && account.confirmed.is_none_or(|at| at > since));
        self.world.check(account.reserved.is_none_or(|at| at > since) || may_be_over, || {
            format!("I6: {wish:?} had won and hears {outcome:?}")
        });
        if *outcome == ReserveOutcome::Released {
            self.world.check(may_be_over, || format!("{wish:?} is released, and by nobody"));
            account.over.get_or_insert(now);
        }
    }

    fn won(
        &self,
        now: u64,
        since: u64,
        wish: &Wish,
        id: Option<&ReservationId>,
        reservation: &Reservation,
    ) {
        let found = &reservation.reservation_id;
        let mut inner = self.inner.lock().unwrap();
        if let Some(id) = id {
            self.world.check(id == found, || format!("I6: {wish:?} is {id} and hears {found}"));
        } else {
            let key = (wish.buyer.clone(), wish.offer.clone());
            if let Some(count) = inner.nameless.get_mut(&key) {
                *count -= 1;
            }
        }
        let account = inner.accounts.entry(found.clone()).or_insert_with(|| Account::of(wish));
        account.reserved.get_or_insert(now);
        let over = [account.released, account.over].into_iter().flatten().min();
        self.world.check(over.is_none_or(|over| over > since), || {
            format!("V3: {found} was released before the call and hears RESERVED")
        });
        self.world.check(
            reservation.quantity == wish.quantity && reservation.buyer == wish.buyer,
            || format!("{wish:?} hears of another's: {reservation:?}"),
        );
        let order_no = reservation.order_no.to_string();
        let before = account.order_no.get_or_insert_with(|| order_no.clone());
        self.world.check(*before == order_no, || {
            format!("I6: {found} has the order numbers {before} and {order_no}")
        });
    }

    /// I2: what was answered with RESERVED is in SQL at that moment.
    async fn is_durable(&self, reservation: &Reservation, aside: &Database) {
        let id = &reservation.reservation_id;
        let rows = sql::rows(aside).await;
        let row = rows.iter().find(|row| row.reservation_id == id.as_str());
        let kept = row.is_some_and(|row| {
            row.state != OutboxState::Refused && row.order_no == reservation.order_no.as_str()
        });
        self.world.check(kept, || format!("I2: {id} hears RESERVED, and SQL holds {row:?}"));
    }

    /// An answer to a Release, by the buyer or by somebody else.
    pub(super) fn gave_back(
        &self,
        since: u64,
        id: &ReservationId,
        by_owner: bool,
        outcome: ReleaseOutcome,
    ) {
        let now = self.step();
        let mut inner = self.inner.lock().unwrap();
        let Some(account) = inner.accounts.get_mut(id) else { return };
        let said = || format!("I5: {id} hears {outcome:?} of a release; {account:?}");
        let before = |at: Option<u64>| at.is_some_and(|at| at < since);
        let allowed = match outcome {
            ReleaseOutcome::Released | ReleaseOutcome::AlreadyReleased => {
                by_owner && !before(account.confirmed)
            }
            ReleaseOutcome::NotReserved => !before(account.reserved),
            ReleaseOutcome::WrongOwner => !by_owner,
            ReleaseOutcome::Confirmed => account.confirm_asked && !before(account.released),
        };
        self.world.check(allowed, said);
        match outcome {
            ReleaseOutcome::Released => {
                account.released_by += 1;
                let twice = account.released_by > 1;
                self.world.check(!twice, || format!("I5: {id} was released twice"));
                account.released.get_or_insert(now);
            }
            ReleaseOutcome::AlreadyReleased => {
                account.released.get_or_insert(now);
            }
            ReleaseOutcome::NotReserved
            | ReleaseOutcome::WrongOwner
            | ReleaseOutcome::Confirmed => {}
        }
    }

    /// An answer to a Confirm by the buyer.
    pub(super) fn confirmed(&self, since: u64, id: &ReservationId, outcome: &ConfirmOutcome) {
        let now = self.step();
        let mut inner = self.inner.lock().unwrap();
        let Some(account) = inner.accounts.get_mut(id) else { return };
        let before = |at: Option<u64>| at.is_some_and(|at| at < since);
        let confirmed = before(account.confirmed);
        let allowed = match outcome {
            ConfirmOutcome::Confirmed(_) => !before(account.released) && !before(account.over),
            ConfirmOutcome::Expired => self.expires(&account.wish.offer) && !confirmed,
            ConfirmOutcome::Released => account.release_asked && !confirmed,
            ConfirmOutcome::NotReserved => !before(account.reserved),
            ConfirmOutcome::WrongOwner => false,
            ConfirmOutcome::NotOrderedYet => !confirmed,
        };
        self.world.check(allowed, || format!("{id} hears {outcome:?} of a confirm; {account:?}"));
        if let ConfirmOutcome::Confirmed(_) = outcome {
            account.confirmed.get_or_insert(now);
        }
    }

    /// An answer to a GetReservation; an error means that there is none.
    pub(super) fn looked_up(
        &self,
        since: u64,
        id: &ReservationId,
        state: Option<ReservationState>,
    ) {
        self.step();
        let inner = self.inner.lock().unwrap();
        let Some(account) = inner.accounts.get(id) else { return };
        let before = |at: Option<u64>| at.is_some_and(|at| at < since);
        let allowed = match state {
            None | Some(ReservationState::Refused) => !before(account.reserved),
            // Refused by the engine's word alone: it may be taken anew, and never was ours.
            Some(ReservationState::Held) => !before(account.reserved) && !before(account.released),
            Some(ReservationState::Queued | ReservationState::Ordered) => {
                !before(account.released) && !before(account.confirmed)
            }
            Some(ReservationState::Confirmed) => account.confirm_asked && !before(account.released),
            Some(ReservationState::Released) => {
                account.release_asked || self.expires(&account.wish.offer)
            }
            Some(ReservationState::Dead) => false,
        };
        self.world.check(allowed, || format!("{id} is looked up as {state:?}; {account:?}"));
    }

    /// At rest: what was heard is what SQL holds.
    pub(super) async fn settle(&self, aside: &Database) {
        let rows = sql::rows(aside).await;
        let orders = orders::Entity::find().all(aside.reader()).await.unwrap();
        for (id, account) in self.accounts() {
            let row = rows.iter().find(|row| row.reservation_id == id.as_str());
            let orders: Vec<_> =
                orders.iter().filter(|order| order.reservation_id == id.as_str()).collect();
            let live = orders.iter().filter(|order| order.state != OrderState::Cancelled).count();
            self.world.check(account.is_kept(self, row, &orders, live), || {
                format!("at rest: {account:?}, and SQL holds {row:?} and {orders:?}")
            });
        }
    }
}

impl Account {
    fn of(wish: &Wish) -> Self {
        Self {
            wish: wish.clone(),
            reserved: None,
            order_no: None,
            released: None,
            over: None,
            confirmed: None,
            release_asked: false,
            confirm_asked: false,
            released_by: 0,
        }
    }

    fn is_kept(
        &self,
        history: &History,
        row: Option<&outbox::Model>,
        orders: &[&orders::Model],
        live: usize,
    ) -> bool {
        let state = row.map(|row| row.state);
        let is_same = orders.iter().all(|order| {
            row.is_some_and(|row| row.order_no == order.order_no && row.quantity == order.quantity)
                && self.order_no.as_ref().is_none_or(|known| *known == order.order_no)
        });
        if !is_same || orders.len() > 1 {
            return false;
        }
        if self.released.is_some() || self.over.is_some() {
            return live == 0 && matches!(state, Some(OutboxState::Released));
        }
        if self.confirmed.is_some() {
            let confirmed = orders.iter().any(|order| order.state == OrderState::Confirmed);
            return confirmed && state == Some(OutboxState::Done);
        }
        let may_be_over = self.release_asked || history.expires(&self.wish.offer);
        match (self.reserved.is_some(), state) {
            (_, Some(OutboxState::Done)) => live == 1,
            (_, Some(OutboxState::Released)) => live == 0 && may_be_over,
            (false, None | Some(OutboxState::Refused)) => orders.is_empty(),
            (true, None | Some(OutboxState::Refused))
            | (_, Some(OutboxState::Pending | OutboxState::Releasing | OutboxState::Dead)) => false,
        }
    }
}
