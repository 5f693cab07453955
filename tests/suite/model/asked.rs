//! The calls, and what is heard of them next to what the model says.

use std::time::Duration;

use seckill::{
    domain::{
        BuyerId, ConfirmOutcome, ReleaseOutcome, RequestId, ReservationQuery, ReservationState,
        ReserveOutcome,
    },
    engine::scripts::{Arrived, SentOff},
    error::Error,
    outbox::sweeper::sweep,
    transfers,
};

use super::{
    ReleaseFault, ReserveFault,
    expected::{Fate, Heard, Id, State},
    real::{Real, buyer, must, request},
};

impl Real<'_> {
    pub(super) async fn reserve(
        &mut self,
        server: usize,
        id: Id,
        quantity: u32,
        fault: ReserveFault,
    ) -> Result<(), String> {
        let gate = self.servers[server].1.clone();
        match fault {
            ReserveFault::None => {}
            ReserveFault::ReplyLost => gate.lose_reply("reserve"),
            ReserveFault::NotAcknowledged => gate.refuse("acknowledge"),
        }
        let was_lost = self.lost.is_some() && self.model.refusal(quantity).is_none();
        let offer = self.servers[server].0.offer(&self.key).await;
        // The one reply that is lost is the home's, which may have too few and gets them later.
        let home_is_short = self.segments > 1 && self.lost.is_none() && {
            let home = offer.segments.home_of(&buyer(id.buyer)).number as usize;
            let all = offer.segments.levels_of_each().await.unwrap();
            all.is_ok_and(|all| all[home].stock < u64::from(quantity))
        };
        let is_behind = offer.epoch() < self.servers[server].0.sql_epoch(&self.key).await;
        let mut heard = self.ask_reserve(server, id, quantity).await?;
        self.rest().await;
        if was_lost {
            must("a reserve of an engine that lost something", heard, Heard::Undecided)?;
            if fault == ReserveFault::ReplyLost {
                // What it took may be recorded before anybody notices; and it has caught up.
                self.ghosts.insert(id);
                gate.open();
                self.change_identity().await;
                return Ok(());
            }
            must("whether it is rebuilt", self.lost.is_none(), true)?;
            heard = self.ask_reserve(server, id, quantity).await?;
        }
        if is_behind && fault == ReserveFault::ReplyLost && heard == Heard::Undecided {
            // It called under an old epoch, so what it did not hear was a refusal.
            return Ok(());
        }
        let takes_later = home_is_short && self.model.asks_for_units(id, quantity);
        if takes_later && fault == ReserveFault::ReplyLost {
            gate.open();
            return must("a reserve whose refusal is lost", heard, Heard::Undecided);
        }
        let expected = self.model.reserve(id, quantity, fault);
        if self.model.fates.get(&id).is_some_and(|fate| fate.state == State::Taken) {
            self.ghosts.insert(id);
        }
        must("a reserve", heard, expected)?;
        self.rest().await;
        gate.open();
        Ok(())
    }

    async fn ask_reserve(&mut self, server: usize, id: Id, units: u32) -> Result<Heard, String> {
        let world = &self.servers[server].0;
        let outcome = world.reserve_units(&self.key, &buyer(id.buyer), &request(id), units).await;
        Ok(match outcome {
            Ok(ReserveOutcome::Ended) => Heard::Ended,
            Ok(ReserveOutcome::QuantityLimit { .. }) => Heard::QuantityLimit,
            Ok(ReserveOutcome::Reserved { reservation, replayed, .. }) => {
                let told =
                    (reservation.reservation_id.to_string(), reservation.order_no.to_string());
                must("its buyer", reservation.buyer.to_string(), buyer(id.buyer))?;
                must("its units", reservation.quantity, units)?;
                let first = self.told.entry(id).or_insert_with(|| told.clone()).clone();
                must("what a request is told again", told, first)?;
                Heard::Reserved { replayed }
            }
            Ok(ReserveOutcome::Released) => Heard::Released,
            Ok(ReserveOutcome::Duplicate { existing }) => {
                let existing = existing.map(|existing| existing.buyer.to_string());
                must("whose it is", existing, Some(buyer(id.buyer)))?;
                Heard::Duplicate
            }
            Ok(ReserveOutcome::SoldOut) => Heard::SoldOut,
            Ok(ReserveOutcome::Insufficient { remaining }) => Heard::Insufficient(remaining),
            Err(Error::RequestIdConflict { .. }) => Heard::Conflict,
            other => undecided(other)?,
        })
    }

    pub(super) async fn release(
        &mut self,
        server: usize,
        buyer: u8,
        id: Id,
        fault: ReleaseFault,
    ) -> Result<(), String> {
        let gate = self.servers[server].1.clone();
        match fault {
            ReleaseFault::None => {}
            ReleaseFault::NotRun => gate.refuse("release"),
            ReleaseFault::ReplyLost => gate.lose_reply("release"),
        }
        let was_lost = self.lost.is_some();
        let is_ghost = self.is_ghost(id);
        // SQL comes first, whatever the engine is like.
        let expected =
            if is_ghost { Heard::Undecided } else { self.model.release(buyer, id, fault) };
        let mut heard = self.ask_release(server, buyer, id).await?;
        self.rest().await;
        gate.open();
        if fault == ReleaseFault::ReplyLost && self.lost.as_ref().is_some_and(|l| l.only_seen) {
            self.change_identity().await;
        }
        if is_ghost {
            // SQL tells what it came to, in `rest`.
            return Ok(());
        }
        for _ in 0..3 {
            if was_lost && heard == Heard::Undecided && expected != Heard::Undecided {
                heard = self.ask_release(server, buyer, id).await?;
                self.rest().await;
                if expected == Heard::Released && heard == Heard::AlreadyReleased {
                    // By the attempt before.
                    heard = Heard::Released;
                }
            }
        }
        must("a release", heard, expected)
    }

    async fn ask_release(&self, server: usize, by: u8, id: Id) -> Result<Heard, String> {
        let world = &self.servers[server].0;
        match world.release(&self.key, &buyer(by), &self.reservation_id(id)).await {
            Ok(ReleaseOutcome::Released) => Ok(Heard::Released),
            Ok(ReleaseOutcome::AlreadyReleased) => Ok(Heard::AlreadyReleased),
            Ok(ReleaseOutcome::NotReserved) => Ok(Heard::NotReserved),
            Ok(ReleaseOutcome::WrongOwner) => Ok(Heard::WrongOwner),
            Ok(ReleaseOutcome::Confirmed) => Ok(Heard::Confirmed),
            other => undecided(other),
        }
    }

    pub(super) async fn confirm(&mut self, server: usize, by: u8, id: Id) -> Result<(), String> {
        let expected = self.model.confirm(by, id);
        self.look(id, "a confirm", expected, async |real| {
            let world = &real.servers[server].0;
            match world.confirm(&real.key, &buyer(by), &real.reservation_id(id)).await {
                Ok(ConfirmOutcome::Confirmed(_)) => Ok(Heard::Confirmed),
                Ok(ConfirmOutcome::Expired) => Ok(Heard::Expired),
                Ok(ConfirmOutcome::Released) => Ok(Heard::Released),
                Ok(ConfirmOutcome::NotReserved) => Ok(Heard::NotReserved),
                Ok(ConfirmOutcome::WrongOwner) => Ok(Heard::WrongOwner),
                Ok(ConfirmOutcome::NotOrderedYet) => Ok(Heard::NotOrderedYet),
                other => undecided(other),
            }
        })
        .await
    }

    pub(super) async fn get(
        &mut self,
        server: usize,
        id: Id,
        by_request: bool,
    ) -> Result<(), String> {
        let expected = self.model.get(id, by_request);
        self.look(id, "a look", expected, async |real| {
            let query = if by_request {
                ReservationQuery::ByRequest {
                    offer: real.key.clone(),
                    buyer: BuyerId::new(&buyer(id.buyer)).unwrap(),
                    request_id: RequestId::new(&request(id)).unwrap(),
                }
            } else {
                ReservationQuery::ById(real.reservation_id(id))
            };
            match real.servers[server].0.parts.reservations.get(query).await {
                Ok((reservation, None)) => Ok(Heard::Found(match reservation.state {
                    ReservationState::Held => State::Taken,
                    ReservationState::Queued => State::Pending,
                    ReservationState::Ordered => State::Ordered,
                    ReservationState::Confirmed => State::Confirmed,
                    ReservationState::Released => State::Released,
                    ReservationState::Dead => State::Dead,
                    ReservationState::Refused => return Err(format!("refused: {reservation:?}")),
                })),
                Err(Error::UnknownReservation) => Ok(Heard::Unknown),
                other => undecided(other),
            }
        })
        .await
    }

    /// A call that takes nothing from the engine: while that has lost something, it may have to
    /// be repeated.
    async fn look(
        &mut self,
        id: Id,
        what: &str,
        expected: Heard,
        ask: impl AsyncFn(&Self) -> Result<Heard, String>,
    ) -> Result<(), String> {
        let (was_lost, is_ghost) = (self.lost.is_some(), self.is_ghost(id));
        let mut heard = ask(self).await?;
        self.rest().await;
        if is_ghost {
            return Ok(());
        }
        if was_lost && heard == Heard::Undecided {
            heard = ask(self).await?;
        }
        must(what, heard, expected)
    }

    pub(super) async fn warm_up(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        match activities.warm_up(&self.key.activity_id, "test").await {
            Ok(report) if !self.model.ended => {
                must("whether it was warm", report.already_warm, true)?;
                if self.lost.is_none() {
                    must("what is left", report.stocks[0].remaining, self.model.stock())?;
                }
                Ok(())
            }
            Err(Error::WrongActivityState { .. }) if self.model.ended => Ok(()),
            Err(Error::OfferFrozen(_)) if self.lost.is_some() => Ok(()),
            other => Err(format!("a warm-up: {other:?}")),
        }
    }

    pub(super) async fn status(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        let status = activities.pipeline_status(Some(&self.key.activity_id)).await;
        let status = status.map_err(|error| format!("a status: {error:?}"))?;
        let offer = &status.offers[0];
        let model = &self.model;
        let figure = |count: u64| i64::try_from(count).unwrap();
        let count = |state| figure(model.count(|fate| fate.state == state));
        let found = [offer.pending, offer.releasing, offer.dead, offer.orders_live];
        let orders = figure(model.count(Fate::is_ordered));
        let expected = [State::Pending, State::Releasing, State::Dead].map(count);
        let expected = [expected[0], expected[1], expected[2], orders];
        must("pending, releasing, dead and ordered", found, expected)?;
        if self.lost.is_none() {
            let unacked = model.count(|fate| fate.in_engine && !fate.acknowledged);
            let expected = (Some(model.stock()), Some(unacked), false);
            must("what is left", (offer.remaining, offer.unacked, offer.frozen), expected)?;
        }
        Ok(())
    }

    pub(super) async fn poll(&mut self, server: usize) -> Result<(), String> {
        // As much later as any pause was.
        self.sql("UPDATE outbox SET next_attempt_time = 0").await;
        let world = &self.servers[server].0;
        let passed = world.parts.poller(&world.settings).run_once().await;
        if self.lost.is_none() {
            passed.map_err(|error| format!("a pass of the poller: {error:?}"))?;
            self.model.poll();
        } else {
            self.model.order();
        }
        Ok(())
    }

    pub(super) async fn sweep(&mut self, server: usize) -> Result<(), String> {
        // Not a single millisecond of grace: what was taken in this one counts too.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let reservations = &self.servers[server].0.parts.reservations;
        let swept = sweep(reservations, Duration::ZERO).await;
        if self.lost.is_none() {
            let unacked = self.model.count(|fate| fate.in_engine && !fate.acknowledged);
            let swept = swept.map_err(|error| format!("a sweep: {error:?}"))?;
            must("what was settled", swept as u64, unacked)?;
            self.model.sweep();
        }
        Ok(())
    }

    pub(super) async fn expire(&mut self, server: usize) -> Result<(), String> {
        let is_due =
            |fate: &Fate| fate.over && matches!(fate.state, State::Pending | State::Ordered);
        let due = self.model.count(is_due);
        self.model.expire(self.lost.is_none());
        let expired = self.servers[server].0.parts.reservations.expire_holds(100).await;
        if self.lost.is_none() {
            let expired = expired.map_err(|error| format!("an expiry: {error:?}"))?;
            must("holds that were over", expired as u64, due)?;
        }
        Ok(())
    }

    /// The first so many scripts of a transfer, and nobody is there for the others.
    pub(super) async fn transfer(
        &mut self,
        server: usize,
        source: u32,
        target: u32,
        scripts: u8,
    ) -> Result<(), String> {
        let offer = self.servers[server].0.offer(&self.key).await;
        let epoch = offer.epoch();
        let failed = |error| format!("a transfer: {error:?}");
        let segments = (offer.segments.get(source), offer.segments.get(target));
        let (Some(from), Some(to)) = segments else { return Ok(()) };
        let sent = from.scripts.transfer_out(epoch, target, 1).await.map_err(failed)?;
        let Ok(SentOff::Out { sequence, units }) = sent else { return Ok(()) };
        if scripts >= 2 {
            let arrived = to.scripts.transfer_in(epoch, source, sequence, units).await;
            if let Arrived::Retry { .. } = arrived.map_err(failed)? {
                return Ok(());
            }
        }
        if scripts >= 3 {
            from.scripts.transfer_done(epoch, target, sequence).await.map_err(failed)?;
        }
        Ok(())
    }

    pub(super) async fn balance(&mut self, server: usize) -> Result<(), String> {
        let world = &self.servers[server].0;
        let offer = world.offer(&self.key).await;
        match transfers::balance(&world.parts.recovery, &offer).await {
            // Units may be on their way already.
            Ok(_) => Ok(()),
            other => undecided(other.map(|_| ())).map(|_| ()),
        }
    }

    pub(super) async fn end(&mut self, server: usize) -> Result<(), String> {
        let activities = &self.servers[server].0.parts.activities;
        let ended = activities.end(&self.key.activity_id, "test", "").await;
        ended.map_err(|error| format!("the end: {error:?}"))?;
        for (world, _) in &self.servers {
            world.parts.catalog.refresh().await.unwrap();
        }
        self.model.ended = true;
        Ok(())
    }
}

/// What an error means to the caller; anything else is a fault.
fn undecided<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Result<Heard, String> {
    match outcome {
        Err(Error::OfferFrozen(_) | Error::EngineUnavailable | Error::DatabaseUnavailable) => {
            Ok(Heard::Undecided)
        }
        other => Err(format!("{other:?}")),
    }
}
