//! The buyers: what they ask for, again and again, and whom.

use std::sync::Arc;

use super::{
    history::{Account, Wish},
    run::{CALL_WITHIN, Server, Stage},
};
use crate::{
    domain::{
        BuyerId, ConfirmRequest, ReleaseRequest, RequestId, ReservationId, ReservationQuery,
        ReserveOutcome, ReserveRequest, name_reservation,
    },
    engine::batcher::Caller,
    error::Error,
};

impl Stage {
    pub(super) async fn buyer(self: Arc<Self>, number: u32) {
        let buyer = BuyerId::new(&format!("buyer-{number}")).unwrap();
        for _ in 0..self.world.plan.calls_per_buyer {
            tokio::time::sleep(self.world.span(self.world.plan.pause_ms)).await;
            let server = self.some_server().await;
            match self.world.dice(|dice| dice.u32(0..100)) {
                0..60 => {
                    let wish = self.wish(&buyer);
                    self.reserve(&server, wish).await;
                }
                60..78 => self.release(&server, &buyer).await,
                78..90 => self.confirm(&server, &buyer).await,
                _ => self.look_up(&server, &buyer).await,
            }
        }
    }

    /// One of the few purchases that the buyer tries; the quantity belongs to its name.
    fn wish(&self, buyer: &BuyerId) -> Wish {
        let offers = self.offers();
        let (offer, name, quantity, named) = self.world.dice(|dice| {
            let offer = dice.usize(..offers.len());
            let most = self.world.plan.activity.offers[offer].max_quantity;
            let name = dice.u32(0..self.world.plan.wishes);
            (offer, name, dice.u32(1..=most), dice.u32(0..12) > 0)
        });
        let most = self.world.plan.activity.offers[offer].max_quantity;
        let number = buyer.as_str().bytes().map(u32::from).sum::<u32>();
        let quantity = if named { 1 + (number + 3 * name) % most } else { quantity };
        Wish {
            offer: offers[offer].clone(),
            buyer: buyer.clone(),
            request_id: named.then(|| RequestId::new(&format!("wish-{name}")).unwrap()),
            quantity,
        }
    }

    pub(super) async fn reserve(&self, server: &Server, wish: Wish) -> Option<ReserveOutcome> {
        let id = wish
            .request_id
            .as_ref()
            .map(|request_id| name_reservation(&wish.offer, &wish.buyer, Some(request_id)));
        let since = self.history.asks(&wish, id.as_ref());
        let request = ReserveRequest {
            offer: wish.offer.clone(),
            buyer: wish.buyer.clone(),
            quantity: wish.quantity,
            request_id: wish.request_id.clone(),
            is_repeat: false,
            address: None,
        };
        let reservations = server.parts.reservations.clone();
        // A buyer who goes away hangs up.
        let connection = Arc::new(());
        let caller = Caller::new(&connection, None);
        let asked = async move { reservations.reserve(request, caller).await };
        let answer = self.ask(server, asked).await;
        drop(connection);
        self.world.note(|| format!("{} answers {wish:?} ({id:?}): {answer:?}", server.life.id));
        match answer? {
            // So says the state of the sale as this server knows it; it reads it now and then.
            Ok(ReserveOutcome::NotWarmed | ReserveOutcome::Ended) => None,
            Ok(outcome) => {
                let aside = self.aside();
                self.history.reserved(since, &wish, id.as_ref(), &outcome, &aside).await;
                Some(outcome)
            }
            Err(error) => {
                self.history.failed("reserve", &error);
                None
            }
        }
    }

    /// One of the reservations that were asked for, mostly of this buyer.
    fn some_account(&self, buyer: &BuyerId) -> Option<(ReservationId, Account)> {
        let mut accounts: Vec<_> = self.history.accounts().into_iter().collect();
        if self.world.dice(|dice| dice.u32(0..12)) > 0 {
            accounts.retain(|(_, account)| account.wish.buyer == *buyer);
        }
        if accounts.is_empty() {
            return None;
        }
        Some(accounts.swap_remove(self.world.dice(|dice| dice.usize(..accounts.len()))))
    }

    async fn release(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        let by_owner = account.wish.buyer == *buyer;
        let since = match by_owner {
            true => self.history.asks_release(&id),
            false => self.history.step(),
        };
        let request = ReleaseRequest {
            offer: account.wish.offer,
            buyer: buyer.clone(),
            reservation_id: id.clone(),
            reason: String::new(),
        };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.release(request).await }).await;
        self.world
            .note(|| format!("{} answers {buyer} releasing {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok((outcome, _))) => self.history.gave_back(since, &id, by_owner, outcome),
            Some(Err(error)) => self.history.failed("release", &error),
            None => {}
        }
    }

    async fn confirm(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        if account.wish.buyer != *buyer {
            return;
        }
        let since = self.history.asks_confirm(&id);
        let request = ConfirmRequest {
            offer: account.wish.offer,
            buyer: buyer.clone(),
            reservation_id: id.clone(),
        };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.confirm(request).await }).await;
        self.world.note(|| format!("{} answers confirming {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok(outcome)) => self.history.confirmed(since, &id, &outcome),
            Some(Err(error)) => self.history.failed("confirm", &error),
            None => {}
        }
    }

    async fn look_up(&self, server: &Server, buyer: &BuyerId) {
        let Some((id, account)) = self.some_account(buyer) else { return };
        let Wish { offer, buyer, request_id, .. } = account.wish;
        let Some(request_id) = request_id else { return };
        let since = self.history.step();
        let query = ReservationQuery::ByRequest { offer, buyer, request_id };
        let reservations = server.parts.reservations.clone();
        let answer = self.ask(server, async move { reservations.get(query).await }).await;
        self.world.note(|| format!("{} answers looking up {id}: {answer:?}", server.life.id));
        match answer {
            Some(Ok((found, _))) => self.history.looked_up(since, &id, Some(found.state)),
            Some(Err(Error::UnknownReservation)) => self.history.looked_up(since, &id, None),
            Some(Err(error)) => self.history.failed("look-up", &error),
            None => {}
        }
    }

    /// Asks a server as the API does: in a task of its own, which goes on without the caller.
    /// `None` when the server died, or the caller did not wait.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        server: &Server,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let patience = match self.world.strikes(0.05) {
            true => self.world.span(100),
            false => CALL_WITHIN,
        };
        let work = server.parts.tasks.spawn(work);
        tokio::select! {
            biased;
            () = server.life.end.cancelled() => None,
            answer = work => match answer {
                Ok(answer) => Some(answer),
                Err(error) => {
                    self.world.violation(format!("a call panicked: {error}"));
                    None
                }
            },
            () = tokio::time::sleep(patience) => {
                self.world.check(patience < CALL_WITHIN, || "a call waits for ever".to_owned());
                None
            }
        }
    }
}
