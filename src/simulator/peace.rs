//! What must be true when nothing goes wrong any more.

use std::time::Duration;

use sea_orm::EntityTrait;
use tokio::time::Instant;

use super::{
    history::Wish,
    run::{Server, Stage},
    sql,
};
use crate::{
    books,
    domain::{BuyerId, RequestId, ReserveOutcome},
    entity::{offers, outbox::OutboxState},
};

/// How long everything may take to come to rest once nothing goes wrong any more.
const REST_WITHIN: Duration = Duration::from_secs(60);
/// So often, five times a second, nothing must be left to do: what was slow is over by then.
const CALM_LOOKS: u32 = 6;

impl Stage {
    /// Whether the sale was ever on; one that ended before its warm-up was not.
    pub(super) async fn was_warm(&self) -> bool {
        let offers = offers::Entity::find().all(self.aside().reader()).await.unwrap();
        offers.iter().all(|offer| offer.warm_time.is_some())
    }

    /// Whether nothing is left to do, within the time that it may take (I3).
    pub(super) async fn comes_to_rest(&self) -> bool {
        let begin = Instant::now();
        let (mut restless, mut calm_looks) = (String::new(), 0);
        while begin.elapsed() < REST_WITHIN {
            match self.unrest().await {
                None if calm_looks == CALM_LOOKS => return true,
                None => calm_looks += 1,
                Some(why) => (restless, calm_looks) = (why, 0),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.world.violation(format!("I3: it does not come to rest: {restless}"));
        false
    }

    /// What is still to be done; a hold that will be over is, too.
    async fn unrest(&self) -> Option<String> {
        if !self.world.all_arrived() {
            return Some("a late call is still on its way".to_owned());
        }
        for row in sql::rows(&self.aside()).await {
            match row.state {
                OutboxState::Pending | OutboxState::Releasing | OutboxState::Dead => {
                    return Some(format!("{row:?}"));
                }
                OutboxState::Done if row.expire_time.is_some() => return Some(format!("{row:?}")),
                OutboxState::Done | OutboxState::Released | OutboxState::Refused => {}
            }
        }
        let server = self.some_server().await;
        for key in self.offers() {
            let Ok(offer) = server.parts.catalog.offer(&key).await else {
                return Some(format!("{key} is unknown"));
            };
            match offer.levels().await {
                Ok(Ok(levels)) if levels.unacked == 0 => {}
                other => return Some(format!("{key}: {other:?}")),
            }
        }
        None
    }

    pub(super) async fn check_books(&self, when: &str) {
        let server = self.some_server().await;
        let id = &self.world.plan.activity.activity_id;
        match books::read(&self.aside(), &server.parts.catalog, id).await {
            Ok(books) => {
                for offer in books {
                    let contradictions = offer.contradictions();
                    self.world.check(contradictions.is_empty() && offer.oversold() == 0, || {
                        format!("I3, {when}: {contradictions:?} in {offer:?}")
                    });
                }
            }
            Err(error) => self.world.violation(format!("{when}, no books: {error:?}")),
        }
    }

    /// In peace every request is answered as it was, and what is left can be bought.
    pub(super) async fn ask_again(&self) {
        for (_, account) in self.history.accounts() {
            let server = self.some_server().await;
            if account.wish.request_id.is_some() {
                self.decided(&server, account.wish).await;
            }
        }
        for offer in self.offers() {
            let server = self.some_server().await;
            let Ok(found) = server.parts.catalog.offer(&offer).await else { continue };
            let Ok(Ok(levels)) = found.levels().await else { continue };
            // Whoever has a free slot gets a unit as long as there is one.
            let (mut left, expires) = (levels.stock, found.hold.is_some());
            for number in 0..self.world.plan.buyers {
                let buyer = BuyerId::new(&format!("buyer-{number}")).unwrap();
                let rows = sql::rows(&self.aside()).await;
                let held = rows
                    .iter()
                    .filter(|row| row.user_id == buyer.as_str() && row.slot.is_some())
                    .filter(|row| row.sku_id == offer.sku_id.as_str());
                let has_room = held.count() < found.max_orders as usize;
                let request_id = Some(RequestId::new("at-last").unwrap());
                let wish = Wish { offer: offer.clone(), buyer, request_id, quantity: 1 };
                let outcome = self.decided(&server, wish.clone()).await;
                let won = matches!(outcome, Some(ReserveOutcome::Reserved { .. }));
                // What is held for a moment only may be free again by now.
                let any = expires || self.has_ended();
                self.world.check(any || won == (has_room && left > 0), || {
                    format!("{wish:?} hears {outcome:?} with {left} left; room: {has_room}")
                });
                left -= u64::from(won && left > 0);
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.aside().clock() >= self.world.plan.activity.end_time
    }

    /// In peace there is a decision; it may take some tries.
    async fn decided(&self, server: &Server, wish: Wish) -> Option<ReserveOutcome> {
        for _ in 0..20 {
            if let Some(outcome) = self.reserve(server, wish.clone()).await {
                return Some(outcome);
            }
            if self.has_ended() {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        self.world.violation(format!("{wish:?} is not decided"));
        None
    }
}
