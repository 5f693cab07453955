//! What must be true when a fault is over, whatever the fault was.

use std::time::Duration;

use tokio::time::Instant;

use crate::{arena::Arena, scenarios::Struck, support::world::World};

/// A system that needs longer does not come back by itself.
const RECOVERY_LIMIT: Duration = Duration::from_secs(40);
/// While a store is away, nobody waits longer than this for a refusal. The server's own limit is
/// 300 ms; the rest is for a machine that is busy with others.
const AT_ONCE: Duration = Duration::from_millis(600);

/// What became of one run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Verdict {
    pub(crate) oversold: i64,
    pub(crate) lost: i64,
    /// From the end of the fault to the next reservation.
    pub(crate) first_win: Option<Duration>,
    /// From there to the empty pipeline.
    pub(crate) drained: Option<Duration>,
    pub(crate) in_limbo: Option<i64>,
    pub(crate) calls: usize,
    pub(crate) problems: Vec<String>,
}

/// Waits for the system to come back, then looks at everything.
pub(crate) async fn judge(arena: &mut Arena, struck: &Struck) -> Verdict {
    let mut verdict = Verdict { in_limbo: struck.in_limbo, ..Verdict::default() };
    if let Err(problem) = recover(arena, struck, &mut verdict).await {
        verdict.problems.push(problem);
    } else if let Err(problem) = compare(arena, &mut verdict).await {
        verdict.problems.push(problem);
    }
    arena.unload().await;
    let ledger = arena.crowd.ledger();
    verdict.calls = ledger.calls.len();
    verdict.problems.extend(ledger.broken_promises.iter().take(5).cloned());
    verdict.lost += i64::try_from(ledger.broken_promises.len()).unwrap();
    if let Some((from, to)) = struck.away {
        let meanwhile = ledger.calls.iter().filter(|call| call.sent >= from && call.sent < to);
        let (mut calls, mut late, mut without_info) = (0, 0, 0);
        for call in meanwhile {
            calls += 1;
            late += usize::from(call.answered.min(to) - call.sent > AT_ONCE);
            without_info += usize::from(call.failure.as_ref().is_some_and(|f| !f.has_retry_info));
        }
        if calls == 0 || late + without_info > 0 {
            verdict.problems.push(format!(
                "of {calls} calls while a store was away {late} waited longer than {AT_ONCE:?}, and \
                 {without_info} were refused without RetryInfo"
            ));
        }
    }
    verdict
}

async fn recover(arena: &mut Arena, struck: &Struck, verdict: &mut Verdict) -> Result<(), String> {
    let deadline = struck.lifted + RECOVERY_LIMIT;
    let first_win = loop {
        if let Some(win) = arena.crowd.first_win_after(struck.lifted) {
            break win;
        }
        if Instant::now() >= deadline {
            let failure = arena.crowd.last_failure();
            return Err(format!("nobody wins {RECOVERY_LIMIT:?} later: {failure:?}"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    verdict.first_win = Some(first_win - struck.lifted);
    // The sale goes on for a moment, as it would.
    arena.wins(20).await;
    let calm = Instant::now();
    arena.unload().await;
    let drained = arena.all_drained(RECOVERY_LIMIT).await?;
    // What the load itself left in the pipeline takes a moment, too; only the rest is recovery.
    verdict.drained = Some((first_win - struck.lifted) + (drained - calm));
    Ok(())
}

async fn compare(arena: &mut Arena, verdict: &mut Verdict) -> Result<(), String> {
    arena.crowd.ask_again().await?;
    if arena.setup.hold.is_some() {
        // Every hold that nobody confirmed runs out, and then nothing moves any more.
        arena.holds_are_over().await?;
    }
    arena.all_drained(RECOVERY_LIMIT).await?;
    arena.nothing_is_aside(RECOVERY_LIMIT).await;
    let remaining = arena.drained(0).await.and_then(|offer| offer.remaining).unwrap_or(0);
    let mut all_sold = None;
    if arena.redis.is_some() {
        // Before a unit is sold that was stranded, everything must be in its place.
        let world = arena.world().await?;
        compare_books(arena, &world, verdict).await?;
        world.close().await;
    }
    if arena.setup.hold.is_none() {
        arena.crowd.sell(u64::try_from(remaining).unwrap_or(0)).await?;
        arena.all_drained(RECOVERY_LIMIT).await?;
        all_sold = Some(i64::try_from(arena.setup.total).unwrap());
    }
    if arena.redis.is_none() {
        // Its figures, before its memory goes.
        let offer = arena.drained(0).await.ok_or("it does not answer any more")?;
        let sum = offer.remaining.unwrap_or(0) + offer.reserved_sql;
        if sum != offer.total {
            verdict.lost += (offer.total - sum).max(0);
            verdict.problems.push(format!("the engine and SQL do not add up: {offer:?}"));
        }
        arena.process(0).stop().await;
    }
    let world = arena.world().await?;
    let units = compare_books(arena, &world, verdict).await?;
    world.close().await;
    if let Some(total) = all_sold
        && units != total
    {
        verdict.lost += (total - units).max(0);
        verdict.problems.push(format!("sold out at {units} units of {total}"));
    }
    Ok(())
}

/// Books against books, and books against what callers heard. Answers the units of live orders.
async fn compare_books(arena: &Arena, world: &World, verdict: &mut Verdict) -> Result<i64, String> {
    let books = world.read_books(&arena.key).await.map_err(|error| error.to_string())?;
    let contradictions = books.contradictions();
    if !contradictions.is_empty() {
        verdict.problems.push(format!("{contradictions:?}"));
    }
    verdict.oversold = verdict.oversold.max(books.oversold());
    verdict.lost += books.missing();
    let orders = world.live_orders(&arena.key).await;
    let ledger = arena.crowd.ledger();
    let mut held = 0;
    for (buyer, told) in &ledger.told {
        let Some(win) = &told.win else { continue };
        let order = orders.get(&win.reservation_id);
        if told.released {
            if order.is_some() {
                verdict.problems.push(format!("{buyer} gave back {win:?}, and the order lives"));
            }
            continue;
        }
        held += 1;
        if arena.setup.hold.is_some() && !told.confirmed {
            continue;
        }
        if order != Some(&win.order_no) {
            verdict.lost += 1;
            verdict.problems.push(format!("{buyer} heard {win:?}, and the order is {order:?}"));
        }
    }
    if held < orders.len() {
        verdict.problems.push(format!("{held} buyers hold {} orders", orders.len()));
    }
    Ok(books.orders_units)
}
