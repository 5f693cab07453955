//! Buyers who come all the time, and a ledger of what each of them was told.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use seckill::{
    api::pb::{
        self, ConfirmOutcome, ReleaseOutcome, ReserveOutcome, seckill_client::SeckillClient,
    },
    domain::OfferKey,
};
use tokio::{task::JoinSet, time::Instant};
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;

use crate::support::calls::{Win, win};

const CLIENTS: usize = 12;
/// How long a buyer waits for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two calls of one client, so that the sale outlasts the fault.
const PAUSE: Duration = Duration::from_millis(8);
/// How long somebody repeats what was not decided, once the fault is over.
const INSISTENCE: Duration = Duration::from_secs(30);
/// Winners who ask again at the end.
const ASK_AGAIN: usize = 150;

/// What the buyers do besides reserving; of 100 calls each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mix {
    pub(crate) release: u32,
    pub(crate) confirm: u32,
    pub(crate) repeat: u32,
}

impl Mix {
    pub(crate) const USUAL: Self = Self { release: 15, confirm: 5, repeat: 10 };
}

/// What a buyer was told, and asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told {
    /// How many units were asked for.
    pub(crate) quantity: i32,
    pub(crate) win: Option<Win>,
    /// Some attempt had no answer.
    pub(crate) undecided: bool,
    /// It was asked for, whatever the answer.
    pub(crate) release_asked: bool,
    pub(crate) released: bool,
    /// A release was sent before anybody knew whether there is something to give back.
    pub(crate) gives_back: bool,
    pub(crate) confirmed: bool,
    /// It was asked to be confirmed, and nobody answered.
    pub(crate) confirm_asked: bool,
}

/// One call, as its caller saw it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) sent: Instant,
    pub(crate) answered: Instant,
    /// Of a call that was not decided.
    pub(crate) failure: Option<Failure>,
    pub(crate) won: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    pub(crate) has_retry_info: bool,
}

/// Everything that callers know.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) told: BTreeMap<String, Told>,
    pub(crate) calls: Vec<Call>,
    /// Answers that contradict earlier ones.
    pub(crate) broken_promises: Vec<String>,
}

/// The doors of the servers, and the buyers in front of them.
#[derive(Debug)]
pub(crate) struct Crowd {
    key: OfferKey,
    doors: Vec<Channel>,
    ledger: Mutex<Ledger>,
    next_buyer: AtomicU32,
    rng: Mutex<fastrand::Rng>,
    mix: Mix,
    /// Holds run out by themselves.
    expires: bool,
    over: AtomicBool,
}

impl Crowd {
    pub(crate) fn new(
        key: &OfferKey,
        doors: &[SocketAddr],
        mix: Mix,
        expires: bool,
        seed: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            key: key.clone(),
            doors: doors.iter().map(|addr| door(*addr)).collect(),
            ledger: Mutex::default(),
            next_buyer: AtomicU32::new(0),
            rng: Mutex::new(fastrand::Rng::with_seed(seed)),
            mix,
            expires,
            over: AtomicBool::new(false),
        })
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    /// Buyers come until [`Crowd::disperse`].
    pub(crate) fn gather(self: &Arc<Self>) -> JoinSet<()> {
        self.over.store(false, Ordering::SeqCst);
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let crowd = self.clone();
            clients.spawn(async move {
                while !crowd.over.load(Ordering::SeqCst) {
                    if !crowd.act().await {
                        // Who is refused at once would only fill the ledger.
                        tokio::time::sleep(PAUSE * 5).await;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
        clients
    }

    pub(crate) async fn disperse(&self, mut clients: JoinSet<()>) {
        self.over.store(true, Ordering::SeqCst);
        while let Some(ended) = clients.join_next().await {
            ended.unwrap();
        }
    }

    /// One call of one buyer; whether it was decided.
    async fn act(&self) -> bool {
        let (dice, pick) = {
            let mut rng = self.rng.lock().unwrap();
            (rng.u32(0..100), rng.f64())
        };
        let Mix { release, confirm, repeat } = self.mix;
        if dice < release + confirm + repeat
            && let Some((buyer, told)) = self.somebody(pick)
        {
            let held = told.win.filter(|_| !told.release_asked);
            match held {
                Some(win) if dice < release && !told.confirmed => {
                    return self.release(&buyer, &win).await.is_some();
                }
                Some(win) if dice < release + confirm => {
                    return self.confirm(&buyer, &win).await.is_some();
                }
                _ => return self.reserve(&buyer).await.is_some(),
            }
        }
        let nth = self.next_buyer.fetch_add(1, Ordering::SeqCst);
        self.reserve(&format!("buyer-{nth}")).await.is_some()
    }

    fn somebody(&self, pick: f64) -> Option<(String, Told)> {
        let known = self.next_buyer.load(Ordering::SeqCst);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0.0 to 1.0")]
        let nth = (f64::from(known) * pick) as u32;
        let buyer = format!("buyer-{nth}");
        let told = self.ledger().told.get(&buyer)?.clone();
        Some((buyer, told))
    }

    fn door(&self) -> SeckillClient<Channel> {
        let at = self.rng.lock().unwrap().usize(0..self.doors.len());
        SeckillClient::new(self.doors[at].clone())
    }

    pub(crate) fn door_of(&self, at: usize) -> SeckillClient<Channel> {
        SeckillClient::new(self.doors[at].clone())
    }

    /// One attempt for one unit. `None`: not decided.
    pub(crate) async fn reserve(&self, buyer: &str) -> Option<pb::ReserveResponse> {
        self.reserve_units(buyer, 1).await
    }

    async fn reserve_units(&self, buyer: &str, quantity: i32) -> Option<pb::ReserveResponse> {
        let before = {
            let mut ledger = self.ledger();
            let told = ledger.told.entry(buyer.to_owned()).or_default();
            told.quantity = quantity;
            told.clone()
        };
        let mut request = Request::new(pb::ReserveRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            quantity: Some(quantity),
            request_id: "first".to_owned(),
        });
        request.set_timeout(PATIENCE);
        let sent = Instant::now();
        let answer = self.door().reserve(request).await.map(tonic::Response::into_inner);
        let won = answer.as_ref().ok().and_then(win);
        let mut ledger = self.ledger();
        ledger.note(sent, answer.as_ref().err(), won.is_some());
        let told = ledger.told.get_mut(buyer).unwrap();
        let Ok(answer) = answer else {
            told.undecided = true;
            return None;
        };
        told.undecided = false;
        if let Some(won) = won {
            told.win = Some(won.clone());
            // What was true before the call was sent is true now.
            let broken = before.released || before.win.as_ref().is_some_and(|win| *win != won);
            if broken {
                ledger.broken_promises.push(format!("{buyer} heard {before:?}, now {answer:?}"));
            }
            return Some(answer);
        }
        let gone = answer.outcome() == ReserveOutcome::Released;
        let may_be_gone =
            told.release_asked || told.gives_back || (self.expires && !before.confirmed);
        if (before.win.is_some() && !gone) || (gone && !may_be_gone) {
            ledger.broken_promises.push(format!("{buyer} heard {before:?}, now {answer:?}"));
        }
        Some(answer)
    }

    pub(crate) async fn release(&self, buyer: &str, win: &Win) -> Option<ReleaseOutcome> {
        self.ledger().told.get_mut(buyer).unwrap().release_asked = true;
        let mut request = Request::new(pb::ReleaseRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            reservation_id: win.reservation_id.clone(),
            reason: "changed my mind".to_owned(),
        });
        request.set_timeout(PATIENCE);
        let sent = Instant::now();
        let answer = self.door().release(request).await;
        let mut ledger = self.ledger();
        ledger.note(sent, answer.as_ref().err(), false);
        let outcome = answer.ok()?.into_inner().outcome();
        let told = ledger.told.get_mut(buyer).unwrap();
        match outcome {
            ReleaseOutcome::Released | ReleaseOutcome::AlreadyReleased => told.released = true,
            // A confirm of another client was faster: the unit stays.
            ReleaseOutcome::Confirmed => {
                told.release_asked = false;
                told.confirmed = true;
            }
            other => {
                let line = format!("a release of {win:?} heard {other:?}");
                ledger.broken_promises.push(line);
            }
        }
        Some(outcome)
    }

    pub(crate) async fn confirm(&self, buyer: &str, win: &Win) -> Option<ConfirmOutcome> {
        self.ledger().told.get_mut(buyer).unwrap().confirm_asked = true;
        let mut request = Request::new(pb::ConfirmRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            reservation_id: win.reservation_id.clone(),
        });
        request.set_timeout(PATIENCE);
        let sent = Instant::now();
        let answer = self.door().confirm(request).await;
        let mut ledger = self.ledger();
        ledger.note(sent, answer.as_ref().err(), false);
        let outcome = answer.ok()?.into_inner().outcome();
        let told = ledger.told.get_mut(buyer).unwrap();
        told.confirm_asked = false;
        told.confirmed |= outcome == ConfirmOutcome::Confirmed;
        Some(outcome)
    }

    /// Everybody who was left without an answer asks until there is one, and some of the winners
    /// ask once more.
    pub(crate) async fn ask_again(&self) -> Result<(), String> {
        let told: Vec<(String, Told)> = {
            let ledger = self.ledger();
            ledger.told.iter().map(|(buyer, told)| (buyer.clone(), told.clone())).collect()
        };
        let mut sample = ASK_AGAIN;
        let asks = told.into_iter().filter(|(_, told)| {
            let unsure =
                told.undecided || told.confirm_asked || (told.release_asked && !told.released);
            sample = sample.saturating_sub(usize::from(!unsure && told.win.is_some()));
            unsure || (told.win.is_some() && sample > 0)
        });
        let asks = asks.collect::<Vec<_>>();
        let mut answers = stream::iter(asks)
            .map(async |(buyer, told)| {
                if let (Some(win), true) = (&told.win, told.release_asked && !told.released) {
                    insist(async || self.release(&buyer, win).await).await?;
                }
                if let (Some(win), true) = (&told.win, told.confirm_asked) {
                    // A server that is gone may have done it.
                    insist(async || self.confirm(&buyer, win).await).await?;
                }
                let again = async || self.reserve_units(&buyer, told.quantity.max(1)).await;
                insist(again).await.map(|_| ())
            })
            .buffer_unordered(CLIENTS);
        while let Some(answer) = answers.next().await {
            answer.map_err(|()| format!("nobody answers: {:?}", self.last_failure()))?;
        }
        Ok(())
    }

    /// One order of as many units as an order may be of, for another buyer each time.
    pub(crate) async fn buy_large(&self) -> Option<pb::ReserveResponse> {
        let nth = self.ledger().told.keys().filter(|buyer| buyer.starts_with("large-")).count();
        self.reserve_units(&format!("large-{nth}"), 1_000).await
    }

    /// Sells this many units, in large orders.
    pub(crate) async fn sell(&self, mut units: u64) -> Result<(), String> {
        let mut nth = 0;
        while units > 0 {
            let quantity = i32::try_from(units.min(1_000)).unwrap();
            let buyer = format!("rest-{nth}");
            let answer = insist(async || self.reserve_units(&buyer, quantity).await).await;
            let answer = answer.map_err(|()| format!("nobody sells: {:?}", self.last_failure()))?;
            if answer.outcome() != ReserveOutcome::Reserved {
                return Err(format!("{units} units are left, and {quantity} are {answer:?}"));
            }
            units -= u64::try_from(quantity).unwrap();
            nth += 1;
        }
        let answer = insist(async || self.reserve("too-late").await).await;
        match answer.map(|answer| answer.outcome()) {
            Ok(ReserveOutcome::SoldOut) => Ok(()),
            other => Err(format!("all units are sold, and one more is {other:?}")),
        }
    }

    /// What some buyer holds and has not asked to give back.
    pub(crate) fn held(&self) -> Option<Win> {
        let ledger = self.ledger();
        let held = |told: &&Told| !told.release_asked && !told.confirmed && !told.undecided;
        ledger.told.values().filter(held).find_map(|told| told.win.clone())
    }

    /// A second request of a buyer who may have one order: an answer, or none. A win stays
    /// unnoted, for it would be one too many.
    pub(crate) async fn ask_with_another_request(&self, buyer: &str) {
        let mut request = Request::new(pb::ReserveRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            quantity: None,
            request_id: "second".to_owned(),
        });
        request.set_timeout(PATIENCE);
        if let Ok(answer) = self.door().reserve(request).await {
            let answer = answer.into_inner();
            if answer.outcome() == ReserveOutcome::Reserved {
                let line = format!("{buyer} won twice: {answer:?}");
                self.ledger().broken_promises.push(line);
            }
        }
    }

    /// A release of what a buyer may or may not hold: whether it was decided. What the buyer has
    /// is told to nobody else until then.
    pub(crate) async fn give_back_if_held(&self, buyer: &str, reservation_id: &str) -> bool {
        let mut request = Request::new(pb::ReleaseRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            reservation_id: reservation_id.to_owned(),
            reason: "no answer".to_owned(),
        });
        request.set_timeout(PATIENCE);
        self.ledger().told.entry(buyer.to_owned()).or_default().gives_back = true;
        self.door().release(request).await.is_ok()
    }

    pub(crate) fn wins(&self) -> usize {
        self.ledger().calls.iter().filter(|call| call.won).count()
    }

    pub(crate) fn last_failure(&self) -> Option<Failure> {
        self.ledger().calls.iter().rev().find_map(|call| call.failure.clone())
    }

    /// When a reservation was first heard that was sent after this.
    pub(crate) fn first_win_after(&self, instant: Instant) -> Option<Instant> {
        let ledger = self.ledger();
        let late = ledger.calls.iter().filter(|call| call.won && call.sent >= instant);
        late.map(|call| call.answered).min()
    }
}

impl Ledger {
    fn note(&mut self, sent: Instant, failure: Option<&Status>, won: bool) {
        let failure = failure.map(|status| Failure {
            reason: status
                .get_details_error_info()
                .map_or_else(|| status.message().to_owned(), |info| info.reason),
            has_retry_info: status.get_details_retry_info().is_some(),
        });
        self.calls.push(Call { sent, answered: Instant::now(), failure, won });
    }
}

/// A way to a server that may not be there yet, or not any more.
pub(crate) fn door(addr: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    endpoint.connect_timeout(Duration::from_millis(500)).connect_lazy()
}

async fn insist<T>(call: impl AsyncFn() -> Option<T>) -> Result<T, ()> {
    let deadline = Instant::now() + INSISTENCE;
    loop {
        match call().await {
            Some(answer) => return Ok(answer),
            None if Instant::now() >= deadline => return Err(()),
            None => tokio::time::sleep(PAUSE * 2).await,
        }
    }
}
