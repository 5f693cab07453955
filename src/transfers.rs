//! Units on their way from one segment of an offer to another: gathered where a buyer needs them,
//! spread where they are few, finished when somebody died half-way.
//!
//! A transfer has three steps, each a script that may be repeated by anybody: the units go out of
//! the source, into the target, and are forgotten at the source. The last step follows only an
//! answer of the target that has them, of the same epoch; a rebuild drops what is on its way and
//! counts the units by SQL.
//!
//! **Invariant:** that nothing is left is said only of a moment: two passes over all segments, one
//! wholly after the other, found each of them at the same epoch and revision, and nothing on its way.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio::time::Instant;

use crate::{
    admission::catalog::{Catalog, Phase},
    engine::{
        EngineError,
        batcher::Segment,
        scripts::{Arrived, Followed, Levels, Refusal, SentOff, Stamp, Transfer},
        verdict::Verdict,
    },
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    recovery::Recovery,
};

/// How often one gathering looks at all segments.
const PASSES: u32 = 16;

/// What a home that is short of units is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gathered {
    /// It may have enough now, or somebody else saw to it: ask it again.
    Ask,
    /// All segments together had so many at one moment, and the home was as the caller saw it.
    Left(u64),
}

/// A segment that was asked for units and had too few.
#[derive(Debug, Clone, Copy)]
pub struct Shortage<'a> {
    pub home: &'a Arc<Segment>,
    pub needed: u64,
    /// What the segment showed when it had too few.
    pub seen: Stamp,
    /// When the caller came; nothing that was found before is an answer.
    pub since: Instant,
}

/// Brings units to a segment that has too few, from those that have most; or finds that all of them
/// together have too few. One call at a time does that per segment, and others wait for it.
///
/// # Errors
/// `OfferFrozen` when the offer must be rebuilt, or moves too much to say; or the engine is away.
pub async fn gather(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    shortage: Shortage<'_>,
) -> Result<Gathered, Error> {
    let Some(verdict) = offer.segments.verdict() else {
        return Err(Error::internal(format!("{} has no other segment", offer.key)));
    };
    let answer = |verdict: &Verdict| {
        let Shortage { home, needed, seen, since } = shortage;
        verdict.left_since(since, home.number, seen).filter(|&left| left < needed)
    };
    let Ok(_turn) = shortage.home.gathering.try_lock() else {
        drop(shortage.home.gathering.lock().await);
        return Ok(answer(verdict).map_or(Gathered::Ask, Gathered::Left));
    };
    if let Some(left) = answer(verdict) {
        return Ok(Gathered::Left(left));
    }
    let mut earlier: Option<Arc<[Stamp]>> = None;
    for _ in 0..PASSES {
        // What was found before this pass begins counts as a pass before it.
        let before = earlier.take().or_else(|| verdict.stamps());
        let begun = Instant::now();
        let all = look(recovery, offer).await?;
        if all.iter().any(|levels| levels.out > 0) {
            finish_all(recovery, offer, &all).await?;
            continue;
        }
        let left: u64 = all.iter().map(|levels| levels.stock).sum();
        if left >= shortage.needed {
            bring(recovery, offer, shortage.home, shortage.needed, &all).await?;
            return Ok(Gathered::Ask);
        }
        let stamps: Arc<[Stamp]> = all.iter().map(|levels| levels.stamp).collect();
        if before.is_some_and(|before| before == stamps) {
            verdict.found(stamps.clone(), left, begun);
            let as_seen = stamps.get(shortage.home.number as usize) == Some(&shortage.seen);
            return Ok(if as_seen { Gathered::Left(left) } else { Gathered::Ask });
        }
        earlier = Some(stamps);
    }
    tracing::debug!(offer = %offer.key, "the segments moved in every pass");
    Err(Error::OfferFrozen(offer.key.clone()))
}

/// Reads all segments once, under the epoch of the offer.
async fn look(recovery: &Arc<Recovery>, offer: &Arc<Offer>) -> Result<Vec<Levels>, Error> {
    let segments = &offer.segments;
    let epoch = segments.epoch();
    let before: Vec<Stamp> = segments.all().iter().map(|segment| segment.seen()).collect();
    let all = segments.levels_of_each().await;
    let all = match all.map_err(|error| failed(recovery, offer, error))? {
        Ok(all) => all,
        Err(refusal) => return Err(refused(recovery, offer, &refusal)),
    };
    for ((segment, before), levels) in segments.all().iter().zip(before).zip(&all) {
        if segment.observe(before, levels.stamp).is_err() {
            recovery.freeze_and_rebuild(offer, levels.stamp.epoch, "went_back");
            return Err(Error::OfferFrozen(offer.key.clone()));
        }
    }
    if all.iter().any(|levels| levels.stamp.epoch != epoch) {
        // In the middle of a rebuild, or behind one; whoever examines it adopts the epoch.
        recovery.rebuild(offer);
        return Err(Error::OfferFrozen(offer.key.clone()));
    }
    Ok(all)
}

/// Has the home get what it lacks, from the richest first: half of what they have, or what is
/// needed if that is more, so that the next shortage is far.
async fn bring(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    home: &Arc<Segment>,
    needed: u64,
    all: &[Levels],
) -> Result<(), Error> {
    let mut richest: Vec<(u64, &Arc<Segment>)> = Vec::with_capacity(all.len());
    let mut missing = needed;
    for (segment, levels) in offer.segments.all().iter().zip(all) {
        if segment.number == home.number {
            missing = needed.saturating_sub(levels.stock);
        } else if levels.stock > 0 {
            richest.push((levels.stock, segment));
        }
    }
    // Of equals another one first at each home, so that homes do not all ask the same.
    let far = |segment: &Segment| segment.number.wrapping_sub(home.number);
    richest.sort_unstable_by_key(|(stock, segment)| (std::cmp::Reverse(*stock), far(segment)));
    for (stock, source) in richest {
        if missing == 0 {
            return Ok(());
        }
        let moved = transfer(recovery, offer, source, home, missing.max(stock / 2)).await?;
        missing = missing.saturating_sub(moved);
    }
    Ok(())
}

/// Moves up to `most` units, or those that are on that way since before; answers how many.
async fn transfer(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    source: &Arc<Segment>,
    target: &Arc<Segment>,
    most: u64,
) -> Result<u64, Error> {
    let epoch = offer.epoch();
    let sent = source.scripts.transfer_out(epoch, target.number, most).await;
    failpoint!("after_transfer_out");
    match sent.map_err(|error| failed(recovery, offer, error))? {
        Ok(SentOff::Out { sequence, units }) => {
            let transfer = Transfer { target: target.number, sequence, units };
            finish(recovery, offer, epoch, source, &transfer).await?;
            Ok(units)
        }
        Ok(SentOff::Nothing) => Ok(0),
        Err(refusal) => Err(refused(recovery, offer, &refusal)),
    }
}

/// The last two steps of a transfer of this epoch, whoever began it.
async fn finish(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    epoch: u64,
    source: &Arc<Segment>,
    transfer: &Transfer,
) -> Result<(), Error> {
    let Transfer { target, sequence, units } = *transfer;
    let Some(target) = offer.segments.get(target) else {
        return Err(Error::internal(format!("{} has no segment {target}", offer.key)));
    };
    let arrived = target.scripts.transfer_in(epoch, source.number, sequence, units).await;
    failpoint!("after_transfer_in");
    match arrived.map_err(|error| failed(recovery, offer, error))? {
        Arrived::In { stamp } => target.hear(stamp),
        Arrived::Retry { reason } => {
            tracing::debug!(offer = %offer.key, reason, "units can't arrive now");
            recovery.rebuild(offer);
            return Err(Error::OfferFrozen(offer.key.clone()));
        }
    }
    let forgotten = source.scripts.transfer_done(epoch, target.number, sequence).await;
    failpoint!("after_transfer_done");
    match forgotten.map_err(|error| failed(recovery, offer, error))? {
        Followed::Done => Ok(()),
        // A rebuild drops what is on its way.
        Followed::Retry { .. } | Followed::Contradiction { .. } => {
            recovery.rebuild(offer);
            Err(Error::OfferFrozen(offer.key.clone()))
        }
    }
}

/// Finishes all that is on its way, as these figures show it.
async fn finish_all(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    all: &[Levels],
) -> Result<(), Error> {
    let sources = offer.segments.all().iter().zip(all).filter(|(_, levels)| levels.out > 0);
    let finished = sources.map(|(source, _)| finish_from(recovery, offer, source));
    try_join_all(finished).await.map(|_| ())
}

/// Finishes what is on its way out of this segment: somebody else is at it, or died.
///
/// # Errors
/// As [`gather`]; what was not finished stays on its way.
pub async fn finish_from(
    recovery: &Arc<Recovery>,
    offer: &Arc<Offer>,
    source: &Arc<Segment>,
) -> Result<(), Error> {
    let epoch = offer.epoch();
    let transfers = source.scripts.transfers(epoch).await;
    let transfers = match transfers.map_err(|error| failed(recovery, offer, error))? {
        Ok(transfers) => transfers,
        Err(refusal) => return Err(refused(recovery, offer, &refusal)),
    };
    for transfer in transfers {
        finish(recovery, offer, epoch, source, &transfer).await?;
    }
    Ok(())
}

/// Evens out the segments of an offer: where fewer are left than half of what each should have, units
/// come from those that have more. Answers how many were moved.
///
/// With few units left it does nothing: then each home gathers what its buyers ask for.
///
/// # Errors
/// As [`gather`]; nothing is lost.
pub async fn balance(recovery: &Arc<Recovery>, offer: &Arc<Offer>) -> Result<u64, Error> {
    if offer.segments.count() == 1 {
        return Ok(0);
    }
    let all = look(recovery, offer).await?;
    let mut moved = 0;
    for step in plan(&all.iter().map(|levels| levels.stock).collect::<Vec<_>>()) {
        if let (Some(source), Some(target)) =
            (offer.segments.get(step.source), offer.segments.get(step.target))
        {
            moved += transfer(recovery, offer, source, target, step.units).await?;
        }
    }
    Ok(moved)
}

/// Evens out every offer of several segments that is on sale.
///
/// # Errors
/// The last one that an offer met; it is due again.
pub async fn balance_all(recovery: &Arc<Recovery>, catalog: &Catalog) -> Result<(), Error> {
    let now = recovery.database.clock();
    let mut failed = None;
    for activity in catalog.all() {
        if activity.phase(now) != Phase::Open {
            continue;
        }
        for offer in activity.offers.values().filter(|offer| offer.is_in_engine()) {
            match balance(recovery, offer).await {
                Ok(0) => {}
                Ok(moved) => tracing::debug!(offer = %offer.key, moved, "evened out"),
                Err(error) => failed = Some(error),
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// One move of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Move {
    source: u32,
    target: u32,
    units: u64,
}

/// What evens these stocks out.
fn plan(stocks: &[u64]) -> Vec<Move> {
    let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
    let even = stocks.iter().sum::<u64>() / stocks.len().max(1) as u64;
    let mut rich: Vec<(u64, u32)> = Vec::new();
    let mut poor: Vec<(u64, u32)> = Vec::new();
    for (at, &stock) in stocks.iter().enumerate() {
        if stock < even / 2 {
            poor.push((even - stock, number(at)));
        } else if stock > even {
            rich.push((stock - even, number(at)));
        }
    }
    rich.sort_unstable();
    poor.sort_unstable_by_key(|(lacks, _)| std::cmp::Reverse(*lacks));
    let mut moves = Vec::new();
    for (mut lacks, target) in poor {
        while lacks > 0
            && let Some((spare, source)) = rich.pop()
        {
            let units = spare.min(lacks);
            moves.push(Move { source, target, units });
            lacks -= units;
            if spare > units {
                rich.push((spare - units, source));
            }
        }
    }
    moves
}

/// A script failed, or did not run.
fn failed(recovery: &Arc<Recovery>, offer: &Arc<Offer>, error: EngineError) -> Error {
    if let EngineError::Script(text) = error {
        tracing::error!(offer = %offer.key, text, "a script failed on this offer's keys");
        recovery.freeze_and_rebuild(offer, offer.epoch(), "unreadable");
        return Error::OfferFrozen(offer.key.clone());
    }
    recovery.engine_failed(error)
}

/// A segment did not do its part for the reason that it told.
fn refused(recovery: &Arc<Recovery>, offer: &Arc<Offer>, refusal: &Refusal) -> Error {
    // An epoch that is known to be of these segments is all that is missing; a repeat has it.
    if !offer.segments.adopt_refused(refusal) {
        recovery.rebuild(offer);
    }
    Error::OfferFrozen(offer.key.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stocks after the moves of their plan.
    fn evened(stocks: &[u64]) -> Vec<u64> {
        let mut stocks = stocks.to_vec();
        for Move { source, target, units } in plan(&stocks) {
            stocks[source as usize] -= units;
            stocks[target as usize] += units;
        }
        stocks
    }

    #[test]
    fn who_has_too_few_gets_what_others_have_too_many() {
        assert_eq!(evened(&[100, 0, 0, 0]), [25, 25, 25, 25]);
        assert_eq!(evened(&[40, 30, 3, 7]), [20, 20, 20, 20]);
        assert_eq!(evened(&[0, 1_000]), [500, 500]);
    }

    #[test]
    fn nothing_moves_while_nobody_has_too_few() {
        for stocks in [vec![10, 12, 8, 30], vec![1, 0, 0, 0], vec![0; 4], vec![7], vec![]] {
            assert_eq!(plan(&stocks), [], "{stocks:?}");
        }
    }
}
