//! What a seed decides before its run begins: the sale, the settings, how much goes wrong.
//!
//! Each kind of fault is in about half of the runs: what hides one fault is often another.

use std::time::Duration;

use crate::{
    config::Settings,
    domain::{ActivityId, ActivitySpec, OfferSpec, SkuId},
};

/// Probabilities, per call or step.
#[derive(Debug, Clone, Default)]
pub(super) struct Rates {
    pub(super) slow: f64,
    /// A server dies on the way to a store or back.
    pub(super) crash: f64,
    /// Another engine takes over right after units were taken.
    pub(super) failover: f64,
    pub(super) flush: f64,
    pub(super) sql_begin: f64,
    pub(super) sql_statement: f64,
    pub(super) sql_deadlock: f64,
    pub(super) commit_lost_before: f64,
    pub(super) commit_lost_after: f64,
    pub(super) commit_refused: f64,
    pub(super) commit_late: f64,
    pub(super) engine_not_run: f64,
    pub(super) engine_lost_before: f64,
    pub(super) engine_lost_after: f64,
    pub(super) engine_late: f64,
    pub(super) engine_full: f64,
    pub(super) engine_script: f64,
}

/// What happens to stores and servers as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disaster {
    Crash,
    CrashAll,
    /// Another engine takes over that lacks the last so many writes.
    Failover(usize),
    Flush,
    EngineAway(Duration),
    SqlAway(Duration),
}

#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) settings: Settings,
    pub(super) servers: u32,
    /// Beside the one that every server has.
    pub(super) pollers: u32,
    pub(super) activity: ActivitySpec,
    pub(super) buyers: u32,
    /// Different purchases that a buyer may try, per offer.
    pub(super) wishes: u32,
    pub(super) calls_per_buyer: u32,
    pub(super) pause_ms: u64,
    pub(super) delay_ms: u64,
    pub(super) rates: Rates,
    /// When, after the start, in order.
    pub(super) disasters: Vec<(Duration, Disaster)>,
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut dice = fastrand::Rng::with_seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let dice = &mut dice;
        let calls_per_buyer = dice.u32(4..=24);
        let pause_ms = pick(dice, &[5, 50, 300, 1_000]);
        let buyers = dice.u32(1..=7);
        let length_ms = u64::from(calls_per_buyer) * (pause_ms / 2 + 30);
        // With dice of their own, so that a seed from before means what it meant.
        let of_segments = &mut fastrand::Rng::with_seed(!seed);
        Self {
            seed,
            settings: settings(dice, of_segments),
            servers: dice.u32(1..=3),
            pollers: dice.u32(0..=2),
            activity: activity(dice, of_segments, length_ms),
            buyers,
            wishes: dice.u32(1..=6),
            calls_per_buyer,
            pause_ms,
            delay_ms: pick(dice, &[0, 1, 5, 40]),
            rates: rates(dice),
            disasters: disasters(dice, length_ms),
        }
    }
}

fn pick<T: Copy>(dice: &mut fastrand::Rng, some: &[T]) -> T {
    some[dice.usize(..some.len())]
}

fn settings(dice: &mut fastrand::Rng, of_segments: &mut fastrand::Rng) -> Settings {
    let mut settings = Settings::default();
    settings.segments.balance_ms = pick(of_segments, &[0, 50, 1_000]);
    settings.outbox.poll_interval_ms = dice.u64(100..=2_000);
    settings.outbox.batch = pick(dice, &[1, 1, 2, 5, 500]);
    settings.outbox.max_attempts = pick(dice, &[1, 2, 12]);
    settings.outbox.backoff_ms = dice.u64(1..=300);
    settings.outbox.max_backoff_ms = settings.outbox.backoff_ms + dice.u64(0..=700);
    settings.sweeper.interval_ms = dice.u64(50..=1_000);
    settings.sweeper.grace_ms = pick(dice, &[0, 0, 10, 500, 3_000]);
    settings.holds.interval_ms = dice.u64(50..=800);
    settings.catalog.refresh_ms = dice.u64(200..=1_000);
    settings.reserve.max_in_flight = pick(dice, &[1, 3, 10_000]);
    settings
}

fn activity(
    dice: &mut fastrand::Rng,
    of_segments: &mut fastrand::Rng,
    length_ms: u64,
) -> ActivitySpec {
    let offers = (0..pick(dice, &[1, 1, 2])).map(|n| OfferSpec {
        sku_id: SkuId::new(&format!("sku-{n}")).unwrap(),
        title: "a simulated unit".to_owned(),
        price_minor: 100,
        currency: "CNY".to_owned(),
        total: pick(dice, &[1, 2, 3, 5, 8, 20, 20]),
        max_orders: pick(dice, &[1, 1, 2, 3]),
        max_quantity: dice.u32(1..=4),
        hold: pick(dice, &[None, None, None, Some(1), Some(4)]).map(Duration::from_secs),
        segments: pick(of_segments, &[1, 1, 2, 3]),
    });
    let offers = offers.collect();
    let day = Duration::from_secs(86_400);
    // Some sales end in the middle of it all; releases go on.
    let window = if dice.u32(0..8) == 0 { Duration::from_millis(length_ms) } else { day };
    ActivitySpec {
        activity_id: ActivityId::new("sale").unwrap(),
        title: "a simulated sale".to_owned(),
        start_time: super::BEGIN,
        end_time: super::BEGIN.plus(window),
        retention: day,
        offers,
    }
}

fn rates(dice: &mut fastrand::Rng) -> Rates {
    let mut rate = || if dice.bool() { 0.0 } else { pick(dice, &[0.01, 0.03, 0.1]) };
    Rates {
        slow: rate() / 2.0,
        crash: rate() / 10.0,
        failover: rate() * 2.0,
        flush: rate() / 2.0,
        sql_begin: rate(),
        sql_statement: rate() / 2.0,
        sql_deadlock: rate(),
        commit_lost_before: rate(),
        commit_lost_after: rate(),
        commit_refused: rate(),
        commit_late: rate(),
        engine_not_run: rate(),
        engine_lost_before: rate(),
        engine_lost_after: rate(),
        engine_late: rate(),
        engine_full: rate(),
        engine_script: rate() / 4.0,
    }
}

fn disasters(dice: &mut fastrand::Rng, length_ms: u64) -> Vec<(Duration, Disaster)> {
    let mut all: Vec<(Duration, Disaster)> = (0..pick(dice, &[0, 1, 2, 4, 8]))
        .map(|_| {
            let at = Duration::from_millis(dice.u64(0..=length_ms.max(200)));
            let away = Duration::from_millis(dice.u64(10..=1_500));
            let disaster = match dice.u32(0..10) {
                0..=2 => Disaster::Crash,
                3 => Disaster::CrashAll,
                4..=6 => Disaster::Failover(pick(dice, &[0, 1, 1, 1, 2, 3, 5, 20])),
                7 => Disaster::Flush,
                8 => Disaster::EngineAway(away),
                _ => Disaster::SqlAway(away),
            };
            (at, disaster)
        })
        .collect();
    all.sort_by_key(|(at, _)| *at);
    all
}
