//! The engine against the outbox, reservation by reservation, while both move.
//!
//! The two are never read at one moment, so a suspicion is not yet a difference. It becomes one
//! when a second look, in the right order, leaves no honest explanation:
//!
//! - The engine holds an **acknowledged** reservation, and SQL, read after that, has no row: it was
//!   acknowledged after its commit, and rows are never deleted.
//! - SQL says `released` or `refused`, which is final, and the engine, read after that, still holds
//!   it: `released` is written after the engine gave it back. While it is unacknowledged, a
//!   `refused` one is on its way back.
//! - SQL has a live row, read before the engine **and** again after it, and the engine does not hold
//!   it: units are taken before the row is written, and given back after it ceased to be live.
//!
//! All of it holds within one epoch, so an offer whose epoch moved is compared anew.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use sea_orm::{ColumnTrait, EntityTrait, PaginatorTrait, QueryFilter};

use super::{
    Compared, Reconciler,
    sql::{Sums, sums},
};
use crate::{
    domain::{BuyerId, Difference, DifferenceKind, OfferKey, ReservationId, SegmentFigures},
    engine::{
        EngineError,
        batcher::Segment,
        scripts::{Held, Levels, PAGE, Refusal, Seen, Stamp},
        segments::OfferLevels,
    },
    entity::{adjustments, adjustments::AdjustmentState, offers, outbox::OutboxState},
    error::Error,
    offer::Offer,
    outbox::Row,
};

/// Reservations behind one kind of difference.
#[derive(Debug, Default)]
struct Suspects {
    names: Vec<String>,
    count: u64,
    /// Units by the outbox, and by the engine.
    recorded: i64,
    held: i64,
}

impl Suspects {
    fn add(&mut self, id: &str, recorded: u32, held: u32) {
        // The engine may show a reservation twice.
        if self.names.iter().any(|name| name == id) {
            return;
        }
        if self.names.len() < Difference::MAX_NAMED {
            self.names.push(id.to_owned());
        }
        self.count += 1;
        self.recorded += i64::from(recorded);
        self.held += i64::from(held);
    }

    fn report(self, kind: DifferenceKind, offer: &Offer, detail: &str) -> Option<Difference> {
        (self.count > 0).then(|| Difference {
            kind,
            sku_id: offer.key.sku_id.to_string(),
            reservation_ids: self.names,
            reservation_count: self.count,
            expected: self.recorded,
            actual: self.held,
            detail: format!("{} {detail}", self.count),
            repaired: false,
        })
    }
}

/// What the walks found.
#[derive(Debug, Default)]
struct Found {
    taken_not_recorded: Suspects,
    recorded_not_taken: Suspects,
    released_still_held: Suspects,
}

impl Found {
    fn is_nothing(&self) -> bool {
        [&self.taken_not_recorded, &self.recorded_not_taken, &self.released_still_held]
            .into_iter()
            .all(|suspects| suspects.count == 0)
    }
}

/// The engine can't be compared now: it is to be rebuilt first, or was in the middle.
struct Moved;

enum Stop {
    Moved,
    /// A record that no server of ours writes.
    Unreadable(String),
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

impl From<Moved> for Stop {
    fn from(_: Moved) -> Self {
        Stop::Moved
    }
}

impl Reconciler {
    /// Adds what only the engine can tell; false when the offer must be rebuilt first, or was
    /// rebuilt in the middle.
    pub(super) async fn compare_with_engine(
        &self,
        offer: &Offer,
        compared: &mut Compared,
    ) -> Result<bool, Error> {
        match self.try_compare(offer, compared).await {
            Ok(()) => Ok(true),
            Err(Stop::Moved) => Ok(false),
            Err(Stop::Unreadable(text)) => {
                compared.differences.push(unreadable(offer, text));
                Ok(true)
            }
            Err(Stop::Error(error)) => Err(error),
        }
    }

    async fn try_compare(&self, offer: &Offer, compared: &mut Compared) -> Result<(), Stop> {
        let epoch = u64::try_from(compared.figures.epoch).unwrap_or(0);
        if let Some(corrupt) = self.corrupt(offer).await? {
            compared.differences.push(corrupt);
            return Ok(());
        }
        let at_first = self.levels(offer, epoch).await?;
        let mut found = Found::default();
        self.walk_engine(offer, epoch, &mut found).await?;
        self.walk_outbox(offer, epoch, &mut found).await?;
        let before = self.total_at_rest(offer).await?;
        let sums = sums(self.database.reader(), offer).await;
        let sums = sums.map_err(|error| self.sql_failed(error))?;
        let all = self.levels(offer, epoch).await?;
        let levels = OfferLevels::of(&all).ok_or(Moved)?;
        let total = before.filter(|_| levels.aside == 0);
        let total = match total {
            Some(total) => self.total_at_rest(offer).await?.filter(|after| *after == total),
            None => None,
        };
        compared.unacked = levels.unacked;
        let figures = |(segment, levels): (&Arc<Segment>, &Levels)| SegmentFigures {
            segment: segment.number,
            remaining: levels.stock,
            in_transfer: levels.aside + levels.out,
            held: levels.held,
        };
        compared.figures.segments = offer.segments.all().iter().zip(&all).map(figures).collect();
        let total = total.map_or(levels.total, |(total, _)| total);
        compared.differences.extend(units(offer, &all, total));
        compared.differences.extend(lost_on_the_way(offer, &at_first, &all));
        if found.is_nothing() {
            compared.differences.extend(counted(offer, &at_first, &sums, &all));
        }
        let kinds = [
            found.taken_not_recorded.report(
                DifferenceKind::TakenNotRecorded,
                offer,
                "acknowledged reservations in the engine have no outbox row",
            ),
            found.recorded_not_taken.report(
                DifferenceKind::RecordedNotTaken,
                offer,
                "live outbox rows are not in the engine, or with another quantity",
            ),
            found.released_still_held.report(
                DifferenceKind::ReleasedStillHeld,
                offer,
                "reservations are over in the outbox and still held in the engine",
            ),
        ];
        compared.differences.extend(kinds.into_iter().flatten());
        Ok(())
    }

    /// The figures of every segment, if all of them are at this epoch.
    async fn levels(&self, offer: &Offer, epoch: u64) -> Result<Vec<Levels>, Stop> {
        let all = offer.segments.levels_of_each().await;
        match all.map_err(|error| self.engine_failed(error))? {
            Ok(all) if all.iter().all(|levels| levels.stamp.epoch == epoch) => Ok(all),
            Ok(_) | Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => Err(Moved.into()),
        }
    }

    /// Figures that are none. Whoever meets them freezes the offer, and it is rebuilt.
    async fn corrupt(&self, offer: &Offer) -> Result<Option<Difference>, Error> {
        for segment in offer.segments.all() {
            let detail = match segment.scripts.levels().await {
                Ok(Err(Refusal::Frozen { reason, .. })) if reason == "corrupt" => {
                    "the stock, or the units in reservations, are no whole number of at least 0"
                        .to_owned()
                }
                Err(EngineError::Script(text)) => format!("the segment can't be read: {text}"),
                Err(error) => return Err(self.engine_failed(error)),
                Ok(Ok(_) | Err(Refusal::NotWarmed | Refusal::Frozen { .. })) => continue,
            };
            let detail = match offer.segments.count() {
                1 => detail,
                _ => format!("segment {}: {detail}", segment.number),
            };
            return Ok(Some(unreadable(offer, detail)));
        }
        Ok(None)
    }

    fn stopped(&self, error: EngineError) -> Stop {
        match error {
            EngineError::Script(text) => {
                Stop::Unreadable(format!("the reservations can't be read: {text}"))
            }
            error @ (EngineError::Full(_)
            | EngineError::NotRun(_)
            | EngineError::PartAway(_)
            | EngineError::Unknown(_)) => Stop::Error(self.engine_failed(error)),
        }
    }

    /// Every reservation of the engine has its row.
    async fn walk_engine(&self, offer: &Offer, epoch: u64, found: &mut Found) -> Result<(), Stop> {
        for segment in offer.segments.all() {
            let mut cursor = "0".to_owned();
            loop {
                self.goes_on()?;
                let page = segment.scripts.holdings_page(&cursor).await;
                let page = page.map_err(|error| self.stopped(error))?;
                let (_, next, held) = in_epoch(page, epoch, |(stamp, ..)| *stamp)?;
                for some in held.chunks(PAGE) {
                    self.check_held(segment, epoch, some, found).await?;
                }
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(())
    }

    async fn check_held(
        &self,
        segment: &Segment,
        epoch: u64,
        held: &[Held],
        found: &mut Found,
    ) -> Result<(), Stop> {
        let id = |held: &Held| held.record.reservation_id.clone();
        let rows = self.rows_by_id(held.iter().map(|held| &held.record.reservation_id)).await?;
        let suspects: Vec<&Held> = held
            .iter()
            .filter(|held| match rows.get(id(held).as_str()) {
                None => true,
                Some(row) => matches!(row.state, OutboxState::Released | OutboxState::Refused),
            })
            .collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let slots = suspects.iter().map(|held| (&held.buyer, held.slot));
        let seen = self.look_up(segment, epoch, slots).await?;
        let still: Vec<(&Held, Seen)> = suspects
            .into_iter()
            .zip(seen)
            .filter_map(|(held, seen)| Some((held, seen?)))
            .filter(|(held, seen)| seen.record.reservation_id == id(held) && !seen.unacked)
            .collect();
        let ids = still.iter().map(|(held, _)| &held.record.reservation_id);
        let rows_again = self.rows_by_id(ids).await?;
        for (held, seen) in still {
            let id = id(held);
            match (rows.get(id.as_str()), rows_again.get(id.as_str())) {
                (Some(row), _) => {
                    // Final when it was read, and held after that.
                    debug_assert!(matches!(
                        row.state,
                        OutboxState::Released | OutboxState::Refused
                    ));
                    found.released_still_held.add(id.as_str(), 0, seen.record.quantity);
                }
                (None, None) => {
                    found.taken_not_recorded.add(id.as_str(), 0, seen.record.quantity);
                }
                // Its commit arrived between the two looks.
                (None, Some(_)) => {}
            }
        }
        Ok(())
    }

    /// Every live row has its reservation in the engine.
    async fn walk_outbox(&self, offer: &Offer, epoch: u64, found: &mut Found) -> Result<(), Stop> {
        let mut last_id = 0;
        loop {
            self.goes_on()?;
            let mut rows = self.rows_after(offer, last_id, PAGE).await?;
            let Some(last) = rows.last() else { return Ok(()) };
            last_id = last.id;
            rows.retain(|row| super::sql::LIVE.contains(&row.state));
            if !rows.is_empty() {
                self.check_live(offer, epoch, &rows, found).await?;
            }
        }
    }

    async fn check_live(
        &self,
        offer: &Offer,
        epoch: u64,
        rows: &[Row],
        found: &mut Found,
    ) -> Result<(), Stop> {
        let slots: Vec<(BuyerId, u32, ReservationId)> = rows
            .iter()
            .map(|row| {
                let reservation = row.reservation()?;
                let slot = row.slot.and_then(|slot| u32::try_from(slot).ok()).unwrap_or(0);
                Ok((reservation.buyer, slot, reservation.reservation_id))
            })
            .collect::<Result<_, Error>>()?;
        // Each in the home of its buyer.
        let mut homes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, (buyer, ..)) in slots.iter().enumerate() {
            homes.entry(offer.home(buyer).number).or_default().push(at);
        }
        let mut seen: Vec<Option<Seen>> = slots.iter().map(|_| None).collect();
        for (home, places) in homes {
            let Some(home) = offer.segments.get(home) else { continue };
            let asked: Vec<(&BuyerId, u32)> = places
                .iter()
                .filter_map(|&at| slots.get(at))
                .map(|(buyer, slot, _)| (buyer, *slot))
                .collect();
            let found = self.look_up(home, epoch, asked.into_iter()).await?;
            for (at, found) in places.into_iter().zip(found) {
                if let Some(seen) = seen.get_mut(at) {
                    *seen = found;
                }
            }
        }
        let suspects: HashMap<&ReservationId, u32> = rows
            .iter()
            .zip(&slots)
            .zip(&seen)
            .filter_map(|((row, (.., id)), seen)| {
                let held = seen.as_ref().filter(|seen| seen.record.reservation_id == *id);
                let held = held.map_or(0, |seen| seen.record.quantity);
                (held != row.units()).then_some((id, held))
            })
            .collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let again = self.rows_by_id(suspects.keys().copied()).await?;
        for (id, held) in suspects {
            match again.get(id.as_str()) {
                Some(row) if super::sql::LIVE.contains(&row.state) => {
                    found.recorded_not_taken.add(id.as_str(), row.units(), held);
                }
                // Given back between the two looks.
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// The total in SQL and how many adjustments made it, unless the engine has yet to follow one.
    /// Read before and after the engine, it is the engine's total too.
    async fn total_at_rest(&self, offer: &Offer) -> Result<Option<(u64, u64)>, Error> {
        let OfferKey { activity_id, sku_id } = &offer.key;
        let reader = self.database.reader();
        let found = async {
            let of_offer = || {
                adjustments::Entity::find()
                    .filter(adjustments::Column::ActivityId.eq(activity_id.as_str()))
                    .filter(adjustments::Column::SkuId.eq(sku_id.as_str()))
                    .filter(adjustments::Column::State.ne(AdjustmentState::Cancelled))
            };
            let made = of_offer().count(reader).await?;
            let pending = of_offer()
                .filter(adjustments::Column::State.eq(AdjustmentState::Pending))
                .count(reader)
                .await?;
            let key = (activity_id.to_string(), sku_id.to_string());
            let row = offers::Entity::find_by_id(key).one(reader).await?;
            let total = row.and_then(|row| u64::try_from(row.total).ok());
            Ok(total.filter(|_| pending == 0).map(|total| (total, made)))
        };
        found.await.map_err(|error| self.sql_failed(error))
    }

    fn goes_on(&self) -> Result<(), Error> {
        if self.recovery.shutdown.is_cancelled() { Err(Error::ShuttingDown) } else { Ok(()) }
    }

    async fn look_up(
        &self,
        segment: &Segment,
        epoch: u64,
        slots: impl ExactSizeIterator<Item = (&BuyerId, u32)>,
    ) -> Result<Vec<Option<Seen>>, Stop> {
        let answer = segment.scripts.lookup(slots).await;
        let answer = answer.map_err(|error| self.stopped(error))?;
        Ok(in_epoch(answer, epoch, |(stamp, _)| *stamp).map(|(_, seen)| seen)?)
    }
}

/// What the engine answered, if it sells under this epoch.
fn in_epoch<T>(
    answer: Result<T, Refusal>,
    epoch: u64,
    stamp: impl Fn(&T) -> Stamp,
) -> Result<T, Moved> {
    match answer {
        Ok(found) if stamp(&found).epoch == epoch => Ok(found),
        Ok(_) | Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => Err(Moved),
    }
}

/// What the engine holds is no figure, or no record.
fn unreadable(offer: &Offer, detail: String) -> Difference {
    Difference {
        kind: DifferenceKind::NegativeStock,
        sku_id: offer.key.sku_id.to_string(),
        reservation_ids: Vec::new(),
        reservation_count: 0,
        expected: 0,
        actual: 0,
        detail,
        repaired: false,
    }
}

/// The units that the engine counts as held, which are those of its reservations. Each of these has its
/// live row and each row its reservation, so while nothing moves and nothing is on its way SQL knows
/// how many units that are. Fewer: a reservation went without its units.
fn counted(offer: &Offer, before: &[Levels], sums: &Sums, after: &[Levels]) -> Option<Difference> {
    let unacked = |all: &[Levels]| all.iter().map(|levels| levels.unacked).sum::<u64>();
    let at_rest =
        is_same(before, after) && (unacked(before), unacked(after), sums.releasing) == (0, 0, 0);
    let held = after.iter().map(|levels| levels.held).sum::<u64>();
    let held = i64::try_from(held).unwrap_or(i64::MAX);
    let kind = match held.cmp(&sums.live) {
        _ if !at_rest => return None,
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => DifferenceKind::UnitsMissing,
        std::cmp::Ordering::Less => DifferenceKind::UnitsExcess,
    };
    Some(Difference {
        kind,
        sku_id: offer.key.sku_id.to_string(),
        reservation_ids: Vec::new(),
        reservation_count: 0,
        expected: sums.live,
        actual: held,
        detail: format!("{held} units count as held, and reservations have {}", sums.live),
        repaired: false,
    })
}

/// Whether every segment was at the same state in both passes, the second of which began after the
/// first: then all of them were there together.
fn is_same(before: &[Levels], after: &[Levels]) -> bool {
    before.len() == after.len() && before.iter().zip(after).all(|(a, b)| a.stamp == b.stamp)
}

/// While nothing is on its way, what came from other segments is what went there.
fn lost_on_the_way(offer: &Offer, before: &[Levels], after: &[Levels]) -> Option<Difference> {
    let moved: i64 = after.iter().map(|levels| levels.moved).sum();
    if moved == 0 || !is_same(before, after) || after.iter().any(|levels| levels.out > 0) {
        return None;
    }
    let kind = if moved < 0 { DifferenceKind::UnitsMissing } else { DifferenceKind::UnitsExcess };
    Some(Difference {
        kind,
        sku_id: offer.key.sku_id.to_string(),
        reservation_ids: Vec::new(),
        reservation_count: 0,
        expected: 0,
        actual: moved,
        detail: format!("segments got {moved} units more than others gave them"),
        repaired: false,
    })
}

/// The units that are left, in reservations and set aside, which change together, are the total. Of
/// one segment that is certain; and the sum, since no step of a transfer changes its terms.
fn units(offer: &Offer, all: &[Levels], total: u64) -> Option<Difference> {
    let signed = |units: u64| i64::try_from(units).unwrap_or(i64::MAX);
    let levels = OfferLevels::of(all)?;
    let wrong: Vec<String> = offer
        .segments
        .all()
        .iter()
        .zip(all)
        .filter(|(_, levels)| levels.accounted() != levels.total)
        .map(|(segment, _)| segment.number.to_string())
        .collect();
    let sum = all.iter().map(Levels::accounted).sum::<i64>();
    let kind = match sum.cmp(&signed(total)) {
        std::cmp::Ordering::Less => DifferenceKind::UnitsMissing,
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => DifferenceKind::UnitsExcess,
    };
    let wrong = match (offer.segments.count(), wrong.is_empty()) {
        (1, _) | (_, true) => String::new(),
        _ => format!("; segment {} has not what it was given", wrong.join(", ")),
    };
    Some(Difference {
        kind,
        sku_id: offer.key.sku_id.to_string(),
        reservation_ids: Vec::new(),
        reservation_count: 0,
        expected: signed(total),
        actual: sum,
        detail: format!(
            "{} units are left, {} in reservations and {} set aside, of {total} in all{wrong}",
            levels.stock, levels.held, levels.aside
        ),
        repaired: false,
    })
}
