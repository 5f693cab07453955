//! Beside the load: what must be answered all the same.

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    api::pb::{
        self, ReleaseOutcome, seckill_admin_client::SeckillAdminClient,
        seckill_client::SeckillClient,
    },
    bench::{
        Error,
        bed::{self, Bed, call},
    },
};

/// How often somebody releases, asks for health, and makes an operator's call, each.
const BESIDE_EVERY: Duration = Duration::from_millis(100);
const BESIDE_LIMIT: Duration = Duration::from_secs(5);

/// Winners who may give something back, each once.
pub(super) struct Holders {
    pub(super) series: &'static str,
    pub(super) left: Vec<usize>,
}

/// How long those took who called beside the load, from the time that they were due, in ms.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Beside {
    pub(super) release_ms: Latencies,
    pub(super) health_ms: Latencies,
    pub(super) admin_ms: Latencies,
    failures: Vec<String>,
    pub(super) released: u64,
    pub(super) perhaps_released: u64,
}

#[derive(Debug, Default, Clone, Copy, serde::Serialize)]
pub(super) struct Latencies {
    pub(super) count: usize,
    pub(super) p50: f64,
    pub(super) max: f64,
}

#[derive(Default)]
pub(super) struct Slowest {
    pub(super) release: f64,
    pub(super) health: f64,
    pub(super) admin: f64,
}

impl Slowest {
    pub(super) fn add(&mut self, beside: &Beside) {
        self.release = self.release.max(beside.release_ms.max);
        self.health = self.health.max(beside.health_ms.max);
        self.admin = self.admin.max(beside.admin_ms.max);
    }
}

pub(super) async fn beside(
    bed: &Bed,
    holders: &mut Holders,
    lasts: Duration,
) -> Result<Beside, Error> {
    let channels = (bed.channel(0).await?, bed.channel(0).await?, bed.channel(0).await?);
    let (seckill, health, admin) = (
        SeckillClient::new(channels.0),
        HealthClient::new(channels.1),
        SeckillAdminClient::new(channels.2),
    );
    let most = lasts.as_millis() / BESIDE_EVERY.as_millis() + 1;
    let keep = holders.left.len().saturating_sub(usize::try_from(most).unwrap_or(usize::MAX));
    let mut giving = holders.left.split_off(keep).into_iter();
    let series = holders.series;
    let releases = every(lasts, || {
        let nth = giving.next();
        let mut seckill = seckill.clone();
        async move {
            let Some(nth) = nth else { return Err("nobody holds anything any more".to_owned()) };
            let answer = call(BESIDE_LIMIT, seckill.release(bed::release(&bed.offer, series, nth)));
            let answer = answer.await.map_err(|error| format!("Release: {error}"))?;
            let outcome = answer.outcome();
            if outcome == ReleaseOutcome::Released {
                return Ok(());
            }
            Err(format!("Release: {}", outcome.as_str_name()))
        }
    });
    let checks = every(lasts, || {
        let mut health = health.clone();
        async move {
            let answer = call(BESIDE_LIMIT, health.check(HealthCheckRequest::default())).await;
            answer.map(drop).map_err(|error| format!("health: {error}"))
        }
    });
    let gets = every(lasts, || {
        let mut admin = admin.clone();
        let activity_id = bed.offer.activity_id.to_string();
        async move {
            let request = pb::GetActivityRequest { activity_id };
            let answer = call(BESIDE_LIMIT, admin.get_activity(request)).await;
            answer.map(drop).map_err(|error| format!("GetActivity: {error}"))
        }
    });
    let (released, checked, got) = tokio::join!(releases, checks, gets);
    let mut beside = Beside {
        release_ms: released.latencies(),
        health_ms: checked.latencies(),
        admin_ms: got.latencies(),
        released: (released.times_ms.len() - released.failures.len()) as u64,
        perhaps_released: released.failures.len() as u64,
        failures: released.failures,
    };
    beside.failures.extend(checked.failures.into_iter().chain(got.failures));
    Ok(beside)
}

/// What came of one call after the other.
struct Every {
    times_ms: Vec<f64>,
    failures: Vec<String>,
}

impl Every {
    fn latencies(&self) -> Latencies {
        let mut sorted = self.times_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let p50 = sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or_default();
        Latencies { count: sorted.len(), p50, max: sorted.last().copied().unwrap_or_default() }
    }
}

/// Makes a call at equal distances, whether the last one was answered or not.
async fn every<W: Future<Output = Result<(), String>>>(
    lasts: Duration,
    mut one: impl FnMut() -> W,
) -> Every {
    let begun = tokio::time::Instant::now();
    let mut times = Vec::new();
    let mut at = Duration::ZERO;
    while at < lasts {
        times.push(begun + at);
        at += BESIDE_EVERY;
    }
    let count = times.len().max(1);
    let calls = stream::iter(times).map(|due| {
        let call = one();
        async move {
            tokio::time::sleep_until(due).await;
            let answer = call.await;
            (due.elapsed().as_secs_f64() * 1_000.0, answer)
        }
    });
    let answers: Vec<_> = calls.buffer_unordered(count).collect().await;
    let failures = answers.iter().filter_map(|(_, answer)| answer.clone().err()).collect();
    Every { times_ms: answers.into_iter().map(|(ms, _)| ms).collect(), failures }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_calls_beside_is_counted_from_when_it_was_due() {
        let mut first = true;
        let every = every(Duration::from_millis(300), || {
            let slow = std::mem::replace(&mut first, false);
            async move {
                tokio::time::sleep(Duration::from_millis(if slow { 250 } else { 1 })).await;
                if slow { Err("slow".to_owned()) } else { Ok(()) }
            }
        })
        .await;
        let Latencies { count, p50, max } = every.latencies();
        assert_eq!((count, every.failures.len()), (3, 1));
        assert!((250.0..260.0).contains(&max) && p50 < 10.0, "{p50} {max}");
    }
}
