//! Those who buy in a demo: what they ask for, and what they were told.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep};
use tonic::{Request, Response, Status, transport::Channel};
use uuid::Uuid;

use super::{
    super::{
        client::{self, with_deadline},
        failure::{Failure, RpcFailure, code_name},
        json,
    },
    Options, Progress,
};
use crate::api::pb::{self, ReserveOutcome, seckill_client::SeckillClient};

/// How often one call is repeated before its error counts.
const MAX_ATTEMPTS: u32 = 20;
/// One of so many winners sends the request again, and as many try for a second unit.
const REPEAT_ONE_OF: u32 = 5;
/// How many sentences of one kind the report holds.
const MAX_SENTENCES: usize = 10;

/// A unit that a buyer holds, as far as the buyer was told.
#[derive(Debug, Clone)]
pub(super) struct Win {
    pub(super) offer: u32,
    pub(super) user_id: String,
    pub(super) request_id: String,
    pub(super) reservation_id: String,
    pub(super) order_no: String,
}

/// Somebody who was told SOLD_OUT.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) offer: u32,
    pub(super) user_id: String,
}

/// What one task of the first wave has seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) outcomes: BTreeMap<String, u64>,
    pub(super) replays: BTreeMap<String, u64>,
    pub(super) second_attempts: BTreeMap<String, u64>,
    pub(super) wins: Vec<Win>,
    pub(super) waiting: Vec<Waiting>,
    /// Attempts that ended in an error and may have won.
    pub(super) unknown: Vec<(Waiting, String)>,
    pub(super) latencies_us: Vec<u32>,
    pub(super) broken: Vec<String>,
}

/// What the tasks of a wave share.
#[derive(Debug)]
pub(super) struct Wave {
    pub(super) activity_id: String,
    pub(super) options: Options,
    pub(super) timeout: Duration,
    pub(super) progress: Progress,
    pub(super) next_buyer: AtomicU32,
    pub(super) won: AtomicU64,
    pub(super) repeats: AtomicU64,
}

/// One task of the first wave: takes buyers one by one until there are no more.
pub(super) async fn buy(wave: Arc<Wave>, seckill: SeckillClient<Channel>) -> Seen {
    let mut seen = Seen::default();
    loop {
        let buyer = wave.next_buyer.fetch_add(1, Ordering::Relaxed);
        if buyer >= wave.options.buyers {
            return seen;
        }
        let offer = buyer % wave.options.offers;
        let user_id = format!("buyer-{buyer}");
        let request_id = Uuid::now_v7().to_string();
        let started = Instant::now();
        let answer = wave.reserve(&seckill, offer, &user_id, &request_id).await;
        let took_us = started.elapsed().as_micros();
        seen.latencies_us.push(u32::try_from(took_us).unwrap_or(u32::MAX));
        *seen.outcomes.entry(outcome_name(&answer)).or_default() += 1;
        match answer {
            Err(_) => seen.unknown.push((Waiting { offer, user_id }, request_id)),
            Ok(answer) => match win(&answer, offer, &user_id, &request_id) {
                Some(win) => {
                    wave.won.fetch_add(1, Ordering::Relaxed);
                    insist(&wave, &seckill, &win, buyer, &mut seen).await;
                    seen.wins.push(win);
                }
                None => seen.waiting.push(Waiting { offer, user_id }),
            },
        }
        wave.progress.step();
        if buyer.is_multiple_of(64) {
            wave.progress.tell(format!("{} won", wave.won.load(Ordering::Relaxed)));
        }
    }
}

/// Some winners send their request again, and some want a second unit; neither gets one.
async fn insist(
    wave: &Wave,
    seckill: &SeckillClient<Channel>,
    win: &Win,
    buyer: u32,
    seen: &mut Seen,
) {
    if buyer.is_multiple_of(REPEAT_ONE_OF) {
        let again = wave.reserve(seckill, win.offer, &win.user_id, &win.request_id).await;
        *seen.replays.entry(outcome_name(&again)).or_default() += 1;
        let same = again.as_ref().is_ok_and(|answer| {
            answer.replayed
                && answer.reservation.as_ref().is_some_and(|held| {
                    (&held.reservation_id, &held.order_no) == (&win.reservation_id, &win.order_no)
                })
        });
        // An error that stayed was not decided, which breaks nothing.
        if again.is_ok() && !same {
            let name = outcome_name(&again);
            push(&mut seen.broken, format!("{}: sent again, it was {name}", win.reservation_id));
        }
    } else if buyer % REPEAT_ONE_OF == 1 {
        let request_id = Uuid::now_v7().to_string();
        let second = wave.reserve(seckill, win.offer, &win.user_id, &request_id).await;
        *seen.second_attempts.entry(outcome_name(&second)).or_default() += 1;
        match second {
            Ok(answer) if answer.outcome() == ReserveOutcome::Duplicate => {}
            Ok(answer) => {
                let name = json::reserve_outcome(answer.outcome);
                push(&mut seen.broken, format!("{}: a second attempt was {name}", win.user_id));
            }
            Err(_) => {
                let waiting = Waiting { offer: win.offer, user_id: win.user_id.clone() };
                seen.unknown.push((waiting, request_id));
            }
        }
    }
}

impl Wave {
    /// One attempt, repeated under the same request_id while its errors pass.
    pub(super) async fn reserve(
        &self,
        seckill: &SeckillClient<Channel>,
        offer: u32,
        user_id: &str,
        request_id: &str,
    ) -> Result<pb::ReserveResponse, RpcFailure> {
        let request = pb::ReserveRequest {
            activity_id: self.activity_id.clone(),
            sku_id: sku_id(offer),
            user_id: user_id.to_owned(),
            quantity: None,
            request_id: request_id.to_owned(),
        };
        self.persist(&request, |request| {
            let mut seckill = seckill.clone();
            async move { seckill.reserve(request).await }
        })
        .await
    }

    /// Repeats a call that may be repeated until it is decided.
    pub(super) async fn persist<Q: Clone, A, F>(
        &self,
        request: &Q,
        attempt: impl Fn(Request<Q>) -> F,
    ) -> Result<A, RpcFailure>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let mut attempts = 1;
        loop {
            let request = with_deadline(self.timeout, request.clone());
            let rpc = match client::answer(self.timeout, attempt(request)).await {
                Ok(answer) => return Ok(answer),
                Err(Failure::Rpc(rpc)) => *rpc,
                Err(other) => RpcFailure { message: other.text(), ..RpcFailure::deadline() },
            };
            if !rpc.is_passing() || attempts == MAX_ATTEMPTS {
                return Err(rpc);
            }
            attempts += 1;
            self.repeats.fetch_add(1, Ordering::Relaxed);
            let wait = rpc.retry_after.unwrap_or(Duration::from_millis(100));
            sleep(wait.mul_f64(0.8 + 0.4 * fastrand::f64())).await;
        }
    }
}

impl Seen {
    pub(super) fn add(&mut self, other: Seen) {
        let counts = [
            (&mut self.outcomes, other.outcomes),
            (&mut self.replays, other.replays),
            (&mut self.second_attempts, other.second_attempts),
        ];
        for (all, counts) in counts {
            for (name, count) in counts {
                *all.entry(name).or_default() += count;
            }
        }
        self.wins.extend(other.wins);
        self.waiting.extend(other.waiting);
        self.unknown.extend(other.unknown);
        self.latencies_us.extend(other.latencies_us);
        for sentence in other.broken {
            push(&mut self.broken, sentence);
        }
    }
}

/// The win in an answer, if it is one.
pub(super) fn win(
    answer: &pb::ReserveResponse,
    offer: u32,
    user_id: &str,
    request_id: &str,
) -> Option<Win> {
    let held = answer.reservation.as_ref()?;
    (answer.outcome() == ReserveOutcome::Reserved).then(|| Win {
        offer,
        user_id: user_id.to_owned(),
        request_id: request_id.to_owned(),
        reservation_id: held.reservation_id.clone(),
        order_no: held.order_no.clone(),
    })
}

pub(super) fn outcome_name(answer: &Result<pb::ReserveResponse, RpcFailure>) -> String {
    match answer {
        Ok(answer) => json::reserve_outcome(answer.outcome),
        Err(rpc) => rpc.reason.clone().unwrap_or_else(|| code_name(rpc.code).to_owned()),
    }
}

pub(super) fn sku_id(offer: u32) -> String {
    format!("sku-{}", offer + 1)
}

/// Keeps the first sentences; a thousand of them help nobody.
pub(super) fn push(sentences: &mut Vec<String>, sentence: String) {
    if sentences.len() < MAX_SENTENCES {
        sentences.push(sentence);
    }
}
