//! Reserve, release, confirm: the order of engine and SQL. This is the heart.
//!
//! The way of a reservation:
//!
//! 1. `admit`: everything that can be refused without I/O.
//! 2. `engine`: `reserve.lua` takes the units, together with other requests (`batcher`).
//! 3. `outbox`: the row is committed, together with other rows (`writer`).
//! 4. The reply goes out; only now is it RESERVED (I2). In the background the engine is told
//!    (`acknowledge.lua`), and the poller makes the order.
//!
//! **Invariant:** there is no rollback on a guess. The engine gives units back only after SQL holds
//! the reservation's row as releasing, released or refused; a result that is unknown stays in
//! `unacked`, and the sweeper settles it by walking the same steps 3 and 4 again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sea_orm::{ColumnTrait, EntityTrait, QueryFilter};
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::Instant,
};
use tracing::Instrument as _;

mod confirm;
mod find;
mod release;

use crate::{
    admission::{Admit, Admitted, catalog::Catalog, limits::Limits},
    circuit::Circuit,
    database::Database,
    domain::{
        BuyerId, Reservation, ReservationId, ReservationState, ReserveOutcome, ReserveRequest,
        name_reservation, new_order_no,
    },
    engine::{
        EngineError,
        batcher::{Caller, TakeError, TakeReply},
        scripts::{GivenBack, Held, Record, Refusal, Take, Taken},
    },
    entity::outbox,
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    outbox::{
        Row, reason,
        writer::{NewRow, WriteError, Writer, Written},
    },
    recovery::Recovery,
    telemetry::spans,
    transfers::{self, Gathered, Shortage},
};

/// The most calls of Release, Confirm and GetReservation that wait for SQL.
const LOOKUPS_WAITING: usize = 2_000;
/// How often a request is taken anew after the engine or SQL turned out to be at another epoch.
const ATTEMPTS: u32 = 2;
/// How often a home is asked anew after it was short of units.
const GATHERINGS: u32 = 16;

/// The flows of reservations, shared by the API, the sweeper, the poller and the expiry worker.
#[derive(Debug)]
pub struct Reservations {
    pub catalog: Arc<Catalog>,
    pub database: Database,
    pub writer: Arc<Writer>,
    pub recovery: Arc<Recovery>,
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
    pub limits: Limits,
    /// How long a reservation may wait for the engine, and may see others wait for the outbox.
    pub max_wait: Duration,
    /// Bounds Release, Confirm and GetReservation in SQL, so that the pool keeps connections for the
    /// outbox and the workers.
    pub lookups: Semaphore,
    /// How many of those wait for their turn.
    pub lookups_waiting: AtomicUsize,
    /// Tells the poller about rows that became due.
    pub due: Arc<Notify>,
}

/// How taking and recording one request ended, when another attempt may help.
enum Step {
    Done(ReserveOutcome),
    /// An epoch changed in between; what was taken, if anything, is gone with the old epoch.
    Again,
}

impl Reservations {
    /// Takes units for one buyer; `Reserved` means that SQL holds the reservation.
    ///
    /// Run it in a tracked task: it must not be dropped (I9).
    ///
    /// # Errors
    /// The call was not decided. After `EngineUnavailable`, `DatabaseUnavailable` and
    /// `OfferFrozen` it may still win; repeating it with the same `request_id` tells.
    pub async fn reserve(
        self: &Arc<Self>,
        request: ReserveRequest,
        caller: Caller,
    ) -> Result<ReserveOutcome, Error> {
        let admit = self.admit(&request)?;
        self.reserve_after(admit, request, caller).await
    }

    /// The part of [`Reservations::reserve`] that comes after the first look.
    ///
    /// # Errors
    /// As there.
    pub async fn reserve_after(
        self: &Arc<Self>,
        mut admit: Admit,
        request: ReserveRequest,
        caller: Caller,
    ) -> Result<ReserveOutcome, Error> {
        if let Admit::Unseen(place) = admit {
            self.catalog.activity(&request.offer.activity_id).await?;
            admit = self.admit_with(place, &request)?;
        }
        match admit {
            Admit::Yes(admitted) => self.reserve_admitted(admitted, request, caller).await,
            Admit::No(outcome) => Ok(outcome),
            Admit::Unseen(_) => Err(Error::UnknownActivity(request.offer.activity_id.to_string())),
        }
    }

    async fn reserve_admitted(
        self: &Arc<Self>,
        admitted: Admitted,
        request: ReserveRequest,
        caller: Caller,
    ) -> Result<ReserveOutcome, Error> {
        let Admitted { offer, _place } = admitted;
        let take = Take {
            reservation_id: name_reservation(
                &offer.key,
                &request.buyer,
                request.request_id.as_ref(),
            ),
            order_no: new_order_no(),
            buyer: request.buyer.clone(),
            quantity: request.quantity,
            again: false,
        };
        for _ in 0..ATTEMPTS {
            let taking = async {
                match offer.segments.count() {
                    1 => Ok(offer.home(&take.buyer).take(take.clone(), caller.clone()).await),
                    // Apart, so that a reservation of one segment is as small as ever.
                    _ => Box::pin(self.take_anywhere(&offer, &take, &caller)).await,
                }
            };
            let reply = match taking.instrument(spans::step("script")).await? {
                Ok(reply) => reply,
                Err(error) => match self.after_failed_take(&offer, error).await? {
                    Step::Done(outcome) => return Ok(outcome),
                    Step::Again => continue,
                },
            };
            failpoint!("after_reserve_script");
            match self.after_take(&offer, &request, &take, reply).await? {
                Step::Done(outcome) => return Ok(outcome),
                Step::Again => {}
            }
        }
        Err(Error::OfferFrozen(offer.key.clone()))
    }

    /// Takes units at home, after others were brought there if it has too few. That nothing is left
    /// is the answer only when no segment has any, and the home still stood where it said so.
    async fn take_anywhere(
        &self,
        offer: &Arc<Offer>,
        take: &Take,
        caller: &Caller,
    ) -> Result<Result<TakeReply, TakeError>, Error> {
        let (home, since) = (offer.home(&take.buyer), Instant::now());
        let mut take = take.clone();
        for _ in 0..GATHERINGS {
            let mut reply = match home.take(take.clone(), caller.clone()).await {
                Ok(reply) => reply,
                Err(error) => return Ok(Err(error)),
            };
            match reply.taken {
                Taken::SoldOut | Taken::Insufficient { .. } => {}
                Taken::Taken { .. }
                | Taken::Replayed { .. }
                | Taken::Released
                | Taken::Duplicate { .. }
                | Taken::RateLimited { .. } => return Ok(Ok(reply)),
            }
            let needed = u64::from(take.quantity);
            let shortage = Shortage { home, needed, seen: reply.stamp, since };
            if let Gathered::Left(left) = transfers::gather(&self.recovery, offer, shortage).await?
            {
                reply.taken =
                    if left == 0 { Taken::SoldOut } else { Taken::Insufficient { stock: left } };
                return Ok(Ok(reply));
            }
            // It was counted.
            take.again = true;
        }
        Err(Error::OfferFrozen(offer.key.clone()))
    }

    async fn after_failed_take(&self, offer: &Arc<Offer>, error: TakeError) -> Result<Step, Error> {
        let frozen = || Err(Error::OfferFrozen(offer.key.clone()));
        match error {
            // Somebody else's rebuild may have ended in between; then another try is enough.
            TakeError::Refused(refusal) if offer.segments.adopt_refused(&refusal) => {
                Ok(Step::Again)
            }
            TakeError::Refused(Refusal::Frozen { stamp, reason, .. }) => {
                if reason == "corrupt" {
                    // Not everything that reserve.lua sees shows in levels.lua: frozen first, it is
                    // rebuilt in any case.
                    self.recovery.freeze_and_rebuild(offer, stamp.epoch, "unreadable");
                } else {
                    self.recovery.rebuild(offer);
                }
                frozen()
            }
            TakeError::Refused(Refusal::NotWarmed) => {
                // Admission saw a warm offer, so the engine forgot it.
                self.recovery.rebuild(offer);
                frozen()
            }
            TakeError::WentBack { found, .. } => {
                self.recovery.freeze_and_rebuild(offer, found.epoch, "went_back");
                frozen()
            }
            TakeError::Engine(EngineError::Script(text)) => {
                tracing::error!(offer = %offer.key, text, "a script failed on this offer's keys");
                self.recovery.freeze_and_rebuild(offer, offer.epoch(), "unreadable");
                frozen()
            }
            TakeError::Engine(EngineError::Full(text)) => {
                // The circuit stays closed: releases must get through, and they make room.
                tracing::error!(text, "the engine takes nothing new");
                Err(Error::EngineUnavailable)
            }
            // Other offers sell on; the engine itself refuses what it can't send, and has said so.
            TakeError::Engine(EngineError::PartAway(_)) => Err(Error::EngineUnavailable),
            TakeError::Engine(error) => {
                self.engine_circuit.trip(&error.to_string());
                Err(Error::EngineUnavailable)
            }
            TakeError::Overloaded => Err(Error::Overloaded),
            TakeError::CallerLeft => Err(Error::DeadlineExceeded),
        }
    }

    async fn after_take(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        request: &ReserveRequest,
        take: &Take,
        reply: TakeReply,
    ) -> Result<Step, Error> {
        let outcome = match reply.taken {
            Taken::Taken { slot } => {
                let record = Record {
                    reservation_id: take.reservation_id.clone(),
                    quantity: take.quantity,
                    order_no: take.order_no.clone(),
                    reserve_time: reply.time,
                    expire_time: None,
                };
                let row = new_row(offer, reply.stamp.epoch, &take.buyer, slot, record, request);
                return self.record(offer, row, false, Some(reply.stock)).await;
            }
            Taken::Replayed { slot, record, unacked } => {
                if record.quantity != request.quantity {
                    return Err(Error::RequestIdConflict {
                        field: "quantity",
                        before: record.quantity.to_string(),
                        now: request.quantity.to_string(),
                    });
                }
                if unacked {
                    let row = new_row(offer, reply.stamp.epoch, &take.buyer, slot, record, request);
                    return self.record(offer, row, true, Some(reply.stock)).await;
                }
                if record.expire_time.is_some_and(|time| time <= self.database.clock()) {
                    // The hold may be over although the engine still has it.
                    return Ok(Step::Done(self.stored_answer(&record.reservation_id).await?));
                }
                ReserveOutcome::Reserved {
                    reservation: held(offer, &take.buyer, record, ReservationState::Queued),
                    replayed: true,
                    remaining: Some(reply.stock),
                }
            }
            Taken::RateLimited { wait } => {
                return Err(Error::RateLimited { scope: "user", wait });
            }
            Taken::Released => self.stored_answer(&take.reservation_id).await?,
            Taken::Duplicate { record, unacked, .. } => ReserveOutcome::Duplicate {
                existing: Some(held(offer, &take.buyer, record, state_of(unacked))),
            },
            Taken::SoldOut => ReserveOutcome::SoldOut,
            Taken::Insufficient { stock } => ReserveOutcome::Insufficient { remaining: stock },
        };
        Ok(Step::Done(outcome))
    }

    /// Writes what the engine took to SQL, and does what SQL says.
    async fn record(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        row: NewRow,
        replayed: bool,
        remaining: Option<u64>,
    ) -> Result<Step, Error> {
        let (slot, epoch) = (row.slot, row.epoch);
        match self.writer.write(row).instrument(spans::step("commit")).await {
            Ok(Written::Live(reservation)) => {
                offer.home(&reservation.buyer).acknowledge(
                    reservation.buyer.clone(),
                    slot,
                    reservation.order_no.clone(),
                    reservation.expire_time,
                );
                let is_over =
                    reservation.expire_time.is_some_and(|time| time <= self.database.clock());
                if replayed && is_over {
                    // Nobody confirmed it in time; the expiry worker is on its way.
                    return Ok(Step::Done(ReserveOutcome::Released));
                }
                Ok(Step::Done(ReserveOutcome::Reserved { reservation, replayed, remaining }))
            }
            Ok(Written::Refused(row)) => {
                self.undo_refused(offer, &row, epoch).await;
                Ok(Step::Done(self.refusal(&row).await?))
            }
            Ok(Written::GivenBack(row)) => {
                self.give_back(offer, &row).await;
                Ok(Step::Done(ReserveOutcome::Released))
            }
            Ok(Written::OtherEpoch { .. }) => {
                // The freeze is ignored by an engine that has moved on already.
                self.recovery.freeze_and_rebuild(offer, epoch, "fenced");
                Ok(Step::Again)
            }
            Err(WriteError::Unknown(why)) => {
                tracing::warn!(offer = %offer.key, why, "a reservation stays unacknowledged");
                Err(Error::DatabaseUnavailable)
            }
            Err(WriteError::Data(why)) => Err(Error::internal(format!(
                "SQL refuses a reservation of {} for its own data: {why}",
                offer.key
            ))),
            Err(WriteError::NoOffer) => {
                Err(Error::internal(format!("{} is sold but not in SQL", offer.key)))
            }
        }
    }

    /// Settles a reservation that nobody acknowledged; the sweeper's half of `reserve`.
    ///
    /// # Errors
    /// It is still not settled.
    pub async fn settle(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        epoch: u64,
        entry: Held,
    ) -> Result<(), Error> {
        let row = NewRow {
            offer: offer.key.clone(),
            epoch,
            buyer: entry.buyer,
            slot: entry.slot,
            reservation_id: entry.record.reservation_id,
            quantity: entry.record.quantity,
            order_no: entry.record.order_no,
            request_id: None,
            reserve_time: entry.record.reserve_time,
            hold: offer.hold,
        };
        self.record(offer, row, true, None).await.map(|_| ())
    }

    /// SQL refused what the engine took: the engine was wrong.
    async fn undo_refused(&self, offer: &Arc<Offer>, row: &Row, epoch: u64) {
        self.give_back(offer, row).await;
        self.recovery.freeze_and_rebuild(offer, epoch, "refused");
    }

    /// Runs release.lua for a row that SQL holds as releasing, released or refused. When the
    /// engine can't say now, a rebuild or the poller does the rest.
    async fn give_back(&self, offer: &Arc<Offer>, row: &Row) -> Option<GivenBack> {
        let (Ok(id), Ok(buyer)) =
            (ReservationId::new(&row.reservation_id), BuyerId::new(&row.user_id))
        else {
            tracing::error!(row = row.id, "an outbox row holds ids that we would never write");
            return None;
        };
        let home = offer.home(&buyer);
        let before = home.seen();
        match home.scripts.release(row.row_epoch(), &id, &buyer).await {
            Ok(given_back) => {
                if let GivenBack::NotReserved { stamp, .. } | GivenBack::Released { stamp, .. } =
                    &given_back
                    && home.observe(before, *stamp).is_err()
                {
                    self.recovery.freeze_and_rebuild(offer, stamp.epoch, "went_back");
                }
                Some(given_back)
            }
            Err(EngineError::Script(text)) => {
                tracing::error!(offer = %offer.key, text, "release.lua failed on these keys");
                self.recovery.freeze_and_rebuild(offer, offer.epoch(), "unreadable");
                None
            }
            Err(EngineError::Full(text)) => {
                tracing::error!(text, "the engine takes nothing new");
                None
            }
            Err(EngineError::PartAway(_)) => None,
            Err(error) => {
                self.engine_circuit.trip(&error.to_string());
                None
            }
        }
    }

    /// What SQL holds of a reservation that the engine calls given back, or that may be over.
    async fn stored_answer(&self, id: &ReservationId) -> Result<ReserveOutcome, Error> {
        let Some(row) = self.row(id).await? else {
            // Rows are never deleted, so only a mark from nowhere leads here.
            tracing::error!(%id, "the engine marks a reservation that SQL does not know");
            return Ok(ReserveOutcome::Released);
        };
        match row.state {
            outbox::OutboxState::Refused => self.refusal(&row).await,
            outbox::OutboxState::Releasing | outbox::OutboxState::Released => {
                Ok(ReserveOutcome::Released)
            }
            outbox::OutboxState::Pending
            | outbox::OutboxState::Done
            | outbox::OutboxState::Dead => {
                let reservation = row.reservation()?;
                if reservation.expire_time.is_some_and(|time| time <= self.database.clock()) {
                    // Nobody confirmed it in time; the expiry worker is on its way.
                    return Ok(ReserveOutcome::Released);
                }
                let reservation = self.with_order_state(reservation).await?;
                Ok(ReserveOutcome::Reserved { reservation, replayed: true, remaining: None })
            }
        }
    }

    /// The stored answer of a refused row.
    async fn refusal(&self, row: &Row) -> Result<ReserveOutcome, Error> {
        if row.reason.as_deref() != Some(reason::DUPLICATE) {
            return Ok(ReserveOutcome::SoldOut);
        }
        let rival = outbox::Entity::find()
            .filter(outbox::Column::ActivityId.eq(row.activity_id.as_str()))
            .filter(outbox::Column::SkuId.eq(row.sku_id.as_str()))
            .filter(outbox::Column::UserId.eq(row.user_id.as_str()))
            .filter(outbox::Column::Slot.is_not_null())
            .one(self.database.reader())
            .await?;
        let existing = rival.map(|rival| rival.reservation()).transpose()?;
        Ok(ReserveOutcome::Duplicate { existing })
    }

    /// A turn in SQL for a call that is no Reserve.
    async fn lookup_permit(&self) -> Result<SemaphorePermit<'_>, Error> {
        if self.lookups_waiting.fetch_add(1, Ordering::Relaxed) >= LOOKUPS_WAITING {
            self.lookups_waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::Overloaded);
        }
        let permit = self.lookups.acquire().await;
        self.lookups_waiting.fetch_sub(1, Ordering::Relaxed);
        permit.map_err(|_| Error::ShuttingDown)
    }

    pub(crate) async fn row(&self, id: &ReservationId) -> Result<Option<Row>, Error> {
        Ok(outbox::Entity::find()
            .filter(outbox::Column::ReservationId.eq(id.as_str()))
            .one(self.database.reader())
            .await?)
    }
}

fn state_of(unacked: bool) -> ReservationState {
    if unacked { ReservationState::Held } else { ReservationState::Queued }
}

fn new_row(
    offer: &Offer,
    epoch: u64,
    buyer: &BuyerId,
    slot: u32,
    record: Record,
    request: &ReserveRequest,
) -> NewRow {
    NewRow {
        offer: offer.key.clone(),
        epoch,
        buyer: buyer.clone(),
        slot,
        reservation_id: record.reservation_id,
        quantity: record.quantity,
        order_no: record.order_no,
        request_id: request.request_id.clone(),
        reserve_time: record.reserve_time,
        hold: offer.hold,
    }
}

fn held(offer: &Offer, buyer: &BuyerId, record: Record, state: ReservationState) -> Reservation {
    Reservation {
        reservation_id: record.reservation_id,
        order_no: record.order_no,
        offer: offer.key.clone(),
        buyer: buyer.clone(),
        quantity: record.quantity,
        state,
        reserve_time: record.reserve_time,
        expire_time: record.expire_time,
    }
}
