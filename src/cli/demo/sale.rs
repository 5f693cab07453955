//! The sale of a demo, from its creation to the comparison of the books, all over gRPC.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tonic::transport::Channel;
use uuid::Uuid;

use super::{
    super::{
        client::call,
        failure::{Failure, RpcFailure},
        json, span,
    },
    Options, Progress,
    books::Books,
    buyers::{Seen, Waiting, Wave, Win, buy, outcome_name, push, sku_id, win},
    report::{DemoReport, Latency},
};
use crate::api::pb::{
    self, ActivityState, ReleaseOutcome, ReservationState, get_reservation_request::By,
    seckill_admin_client::SeckillAdminClient, seckill_client::SeckillClient,
};

/// How long the server may take to start the sale, to sell again what came back, and to make
/// orders of the last reservations.
const START_DEADLINE: Duration = Duration::from_secs(15);
const RESALE_DEADLINE: Duration = Duration::from_secs(10);
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// One of so many wins is given back.
const RELEASE_ONE_OF: usize = 20;

/// A sale that is about to happen.
#[derive(Debug)]
pub struct Demo {
    channels: Vec<Channel>,
    options: Options,
    timeout: Duration,
    progress: Progress,
    activity_id: String,
}

impl Demo {
    /// Nothing is called yet; there must be at least one channel.
    #[must_use]
    pub fn new(
        channels: Vec<Channel>,
        options: Options,
        timeout: Duration,
        progress: Progress,
    ) -> Self {
        let activity_id = format!("demo-{}", Uuid::now_v7().simple());
        Self { channels, options, timeout, progress, activity_id }
    }

    /// Runs the sale and compares what the callers were told with the books.
    ///
    /// # Errors
    /// [`Failure`] when the sale can't be set up or the books can't be read. A broken invariant
    /// is no error; it is in the report.
    pub async fn run(self, books: &dyn Books) -> Result<DemoReport, Failure> {
        let started = Instant::now();
        self.open().await?;

        self.progress.begin("selling", self.options.buyers.into());
        let wave = Arc::new(Wave {
            activity_id: self.activity_id.clone(),
            options: self.options.clone(),
            timeout: self.timeout,
            progress: self.progress.clone(),
            next_buyer: AtomicU32::new(0),
            won: AtomicU64::new(0),
            repeats: AtomicU64::new(0),
        });
        let sale_started = Instant::now();
        let mut seen = self.first_wave(&wave).await?;
        let sale_seconds = sale_started.elapsed().as_secs_f64();

        let mut report = DemoReport {
            activity_id: self.activity_id.clone(),
            units: self.options.units.into(),
            buyers: self.options.buyers.into(),
            offers: self.options.offers.into(),
            concurrency: self.options.concurrency.into(),
            outcomes: std::mem::take(&mut seen.outcomes),
            replays: std::mem::take(&mut seen.replays),
            second_attempts: std::mem::take(&mut seen.second_attempts),
            sale_seconds,
            reserves_per_second: seen.latencies_us.len() as f64 / sale_seconds.max(f64::EPSILON),
            latency_ms: Latency::of(std::mem::take(&mut seen.latencies_us)),
            broken: std::mem::take(&mut seen.broken),
            ..DemoReport::default()
        };

        let released = self.give_back(&wave, &mut seen.wins, &mut report).await;
        self.sell_again(&wave, &released, &mut seen, &mut report).await;
        self.drain(&mut report).await?;
        self.settle_unknown(&mut seen).await;
        let unordered = self.check_wins(&seen.wins, &released, &mut report).await;

        report.wins = seen.wins.len() as u64;
        report.repeats = wave.repeats.load(Ordering::Relaxed);
        self.compare(books, unordered, &mut report).await?;
        report.seconds = started.elapsed().as_secs_f64();
        self.progress.end();
        Ok(report)
    }

    fn seckill(&self, nth: usize) -> SeckillClient<Channel> {
        SeckillClient::new(self.channels[nth % self.channels.len()].clone())
    }

    fn admin(&self) -> SeckillAdminClient<Channel> {
        SeckillAdminClient::new(self.channels[0].clone())
    }

    /// Creates, approves, warms up, and waits for the clock to start the sale.
    async fn open(&self) -> Result<(), Failure> {
        self.progress.begin("opening", 4);
        let mut admin = self.admin();
        let request = pb::CreateActivityRequest { spec: Some(self.spec()) };
        call(self.timeout, request, async |request| admin.create_activity(request).await).await?;
        self.progress.step();

        let activity_id = self.activity_id.clone();
        let request = pb::ApproveActivityRequest {
            activity_id: activity_id.clone(),
            reason: "demo".to_owned(),
        };
        call(self.timeout, request, async |request| admin.approve_activity(request).await).await?;
        self.progress.step();

        let mut seckill = self.seckill(0);
        let request = pb::WarmupRequest { activity_id: activity_id.clone() };
        call(self.timeout, request, async |request| seckill.warmup(request).await).await?;
        self.progress.step();

        let deadline = Instant::now() + START_DEADLINE;
        loop {
            let request = pb::GetActivityRequest { activity_id: activity_id.clone() };
            let answer =
                call(self.timeout, request, async |request| admin.get_activity(request).await)
                    .await?;
            let state = answer.activity.unwrap_or_default().state();
            if state == ActivityState::Active {
                self.progress.step();
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Failure::Unavailable(format!(
                    "{activity_id} is still {} {} s after its warm-up",
                    json::activity_state(state.into()),
                    START_DEADLINE.as_secs()
                )));
            }
            sleep(POLL).await;
        }
    }

    fn spec(&self) -> pb::ActivitySpec {
        let Options { units, offers, segments, .. } = self.options;
        let segments = i32::try_from(segments).ok();
        let now = span::now();
        pb::ActivitySpec {
            activity_id: self.activity_id.clone(),
            title: "Demo".to_owned(),
            start_time: Some(now),
            end_time: Some(span::plus(now, Duration::from_secs(3_600))),
            retention: None,
            offers: (0..offers)
                .map(|offer| pb::OfferSpec {
                    sku_id: sku_id(offer),
                    title: format!("Offer {}", offer + 1),
                    price_minor: 9_900,
                    currency_code: "CNY".to_owned(),
                    // The first offers have what can't be divided.
                    total: (units / offers + u32::from(offer < units % offers)).into(),
                    max_orders_per_user: Some(1),
                    max_quantity_per_order: Some(1),
                    hold: None,
                    segments,
                })
                .collect(),
        }
    }

    /// Every buyer once, and some of the winners again.
    async fn first_wave(&self, wave: &Arc<Wave>) -> Result<Seen, Failure> {
        let mut tasks = JoinSet::new();
        for nth in 0..self.options.concurrency as usize {
            tasks.spawn(buy(wave.clone(), self.seckill(nth)));
        }
        let mut all = Seen::default();
        while let Some(seen) = tasks.join_next().await {
            let seen = seen.map_err(|error| Failure::Internal(format!("a buyer: {error}")))?;
            all.add(seen);
        }
        Ok(all)
    }

    /// Gives some of the wins back; returns those, and leaves the others in `wins`.
    async fn give_back(
        &self,
        wave: &Wave,
        wins: &mut Vec<Win>,
        report: &mut DemoReport,
    ) -> Vec<Win> {
        let count = wins.len().div_ceil(RELEASE_ONE_OF);
        self.progress.begin("giving back", count as u64);
        let mut back: Vec<Win> = wins.iter().step_by(RELEASE_ONE_OF).cloned().collect();
        let mut nth = 0;
        wins.retain(|_| {
            nth += 1;
            (nth - 1) % RELEASE_ONE_OF != 0
        });
        let mut released = Vec::new();
        let seckill = self.seckill(0);
        for win in back.drain(..) {
            let outcome = self.release(wave, &seckill, &win).await;
            self.progress.step();
            match outcome {
                Ok(ReleaseOutcome::Released) => released.push(win),
                // A release whose answer was lost and that was sent again.
                Ok(ReleaseOutcome::AlreadyReleased) if wave.repeats.load(Ordering::Relaxed) > 0 => {
                    released.push(win);
                }
                Ok(outcome) => {
                    let outcome = json::release_outcome(outcome.into());
                    push(&mut report.broken, format!("a release of a live unit came to {outcome}"));
                    wins.push(win);
                }
                Err(rpc) => {
                    push(&mut report.broken, format!("a release was not decided: {}", rpc.message));
                    wins.push(win);
                }
            }
        }
        for win in &released {
            let again = wave.reserve(&seckill, win.offer, &win.user_id, &win.request_id).await;
            let name = outcome_name(&again);
            if name != "RELEASED" {
                let text =
                    format!("a request whose unit was given back came to {name}, sent again");
                push(&mut report.broken, text);
            }
        }
        report.released = released.len() as u64;
        released
    }

    async fn release(
        &self,
        wave: &Wave,
        seckill: &SeckillClient<Channel>,
        win: &Win,
    ) -> Result<ReleaseOutcome, RpcFailure> {
        let request = pb::ReleaseRequest {
            activity_id: self.activity_id.clone(),
            sku_id: sku_id(win.offer),
            user_id: win.user_id.clone(),
            reservation_id: win.reservation_id.clone(),
            reason: "demo".to_owned(),
        };
        let answer = wave
            .persist(&request, |request| {
                let mut seckill = seckill.clone();
                async move { seckill.release(request).await }
            })
            .await?;
        Ok(answer.outcome())
    }

    /// Lets those who came too late try for what came back.
    async fn sell_again(
        &self,
        wave: &Wave,
        released: &[Win],
        seen: &mut Seen,
        report: &mut DemoReport,
    ) {
        self.progress.begin("selling again", released.len() as u64);
        let seckill = self.seckill(0);
        for offer in 0..self.options.offers {
            let back = released.iter().filter(|win| win.offer == offer).count();
            let mut waiting: Vec<Waiting> =
                seen.waiting.iter().filter(|buyer| buyer.offer == offer).cloned().collect();
            let deadline = Instant::now() + RESALE_DEADLINE;
            let mut resold = 0;
            while resold < back && Instant::now() < deadline {
                let Some(buyer) = waiting.pop() else { break };
                let request_id = Uuid::now_v7().to_string();
                let answer = wave.reserve(&seckill, offer, &buyer.user_id, &request_id).await;
                match answer {
                    Ok(answer) => match win(&answer, offer, &buyer.user_id, &request_id) {
                        Some(win) => {
                            resold += 1;
                            self.progress.step();
                            seen.wins.push(win);
                        }
                        // This instance may remember for a moment that nothing was left.
                        None => {
                            waiting.insert(0, buyer);
                            sleep(POLL).await;
                        }
                    },
                    Err(_) => seen.unknown.push((buyer, request_id)),
                }
            }
            report.resold += resold as u64;
        }
    }

    /// Waits until nothing is in flight between the reservations and their orders.
    async fn drain(&self, report: &mut DemoReport) -> Result<(), Failure> {
        self.progress.begin("making orders", 0);
        let deadline = Instant::now() + DRAIN_DEADLINE;
        loop {
            let status = self.pipeline().await?;
            let in_flight = [status.unacked, status.outbox_pending, status.outbox_releasing];
            let left: i64 = in_flight.iter().flatten().sum();
            if in_flight.iter().all(|figure| *figure == Some(0)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                report.broken.push(format!(
                    "{left} reservations are still in flight after {} s",
                    DRAIN_DEADLINE.as_secs()
                ));
                return Ok(());
            }
            self.progress.tell(format!("{left} to go"));
            sleep(POLL).await;
        }
    }

    async fn pipeline(&self) -> Result<pb::GetPipelineStatusResponse, Failure> {
        let mut admin = self.admin();
        let request = pb::GetPipelineStatusRequest { activity_id: Some(self.activity_id.clone()) };
        call(self.timeout, request, async |request| admin.get_pipeline_status(request).await).await
    }

    /// Asks what became of the attempts that ended in an error; those that won are wins.
    async fn settle_unknown(&self, seen: &mut Seen) {
        for (buyer, request_id) in std::mem::take(&mut seen.unknown) {
            let key = By::Key(pb::ReservationKey {
                activity_id: self.activity_id.clone(),
                sku_id: sku_id(buyer.offer),
                user_id: buyer.user_id.clone(),
                request_id: request_id.clone(),
            });
            if let Ok(held) = self.look_up(0, key).await
                && is_live(held.state())
            {
                seen.wins.push(Win {
                    offer: buyer.offer,
                    user_id: buyer.user_id,
                    request_id,
                    reservation_id: held.reservation_id,
                    order_no: held.order_no,
                });
            }
        }
    }

    /// Looks up the order of every win and the end of every release; counts wins without order.
    async fn check_wins(&self, wins: &[Win], released: &[Win], report: &mut DemoReport) -> i64 {
        let looked_up = (wins.len() + released.len()) as u64;
        self.progress.begin("looking up orders", looked_up);
        let all = wins.iter().map(|win| (win, true)).chain(released.iter().map(|win| (win, false)));
        let mut answers = stream::iter(all.enumerate())
            .map(|(nth, (win, kept))| async move {
                let by = By::ReservationId(win.reservation_id.clone());
                (win, kept, self.look_up(nth, by).await)
            })
            .buffer_unordered(self.options.concurrency as usize);
        let mut unordered = 0;
        while let Some((win, kept, answer)) = answers.next().await {
            self.progress.step();
            let id = &win.reservation_id;
            let state = match answer {
                Ok(held) if held.order_no == win.order_no => held.state(),
                Ok(held) => {
                    let text = format!("{id} was order {} and is {}", win.order_no, held.order_no);
                    push(&mut report.broken, text);
                    held.state()
                }
                Err(failure) => {
                    push(&mut report.broken, format!("{id}: {}", failure.text()));
                    ReservationState::Unspecified
                }
            };
            let name = json::reservation_state(state.into());
            if kept && state != ReservationState::Ordered {
                unordered += 1;
                push(&mut report.broken, format!("{id} was won and is {name}"));
            } else if !kept && state != ReservationState::Released {
                push(&mut report.broken, format!("{id} was given back and is {name}"));
            }
        }
        unordered
    }

    async fn look_up(&self, nth: usize, by: By) -> Result<pb::Reservation, Failure> {
        let mut seckill = self.seckill(nth);
        let request = pb::GetReservationRequest { by: Some(by) };
        let answer =
            call(self.timeout, request, async |request| seckill.get_reservation(request).await)
                .await?;
        Ok(answer.reservation.unwrap_or_default())
    }

    /// Reads the books, here and through the server, and compares them with the callers' side.
    async fn compare(
        &self,
        books: &dyn Books,
        unordered: i64,
        report: &mut DemoReport,
    ) -> Result<(), Failure> {
        self.progress.begin("reading the books", 0);
        let view = books
            .read(&self.activity_id)
            .await
            .map_err(|error| Failure::Unavailable(format!("the books can't be read: {error}")))?;
        for offer in &view.offers {
            report.orders += offer.live_orders;
            report.remaining += offer.engine_remaining;
            report.oversold += offer.oversold();
            report.lost += offer.missing();
            report.duplicates += offer.buyers_with_more_than_allowed;
            report.broken.extend(offer.contradictions());
        }
        report.lost += unordered;
        report.books = view.offers;

        let total: i64 = report.books.iter().map(|offer| offer.total).sum();
        if total != i64::from(self.options.units) {
            report.broken.push(format!(
                "{} units were for sale; the books have {total}",
                self.options.units
            ));
        }
        if i64::try_from(report.wins) != Ok(report.orders) {
            report.broken.push(format!(
                "buyers were told of {} wins, and there are {} orders",
                report.wins, report.orders
            ));
        }
        for (name, count) in [
            ("units oversold", report.oversold),
            ("units or orders lost", report.lost),
            ("buyers with more than allowed", report.duplicates),
        ] {
            if count > 0 {
                report.broken.push(format!("{name}: {count}"));
            }
        }
        let status = self.pipeline().await?;
        for offer in &status.offers {
            let here = report.books.iter().find(|books| books.sku_id == offer.sku_id);
            let told = (offer.remaining, offer.reserved_sql, offer.sold, offer.orders_live);
            let read = here.map(|books| {
                (
                    Some(books.engine_remaining),
                    books.sql_reserved,
                    books.sql_sold,
                    books.live_orders,
                )
            });
            if read != Some(told) {
                report.broken.push(format!(
                    "{}: GetPipelineStatus says {told:?}, and the books {read:?} \
                     (remaining, reserved, sold, orders)",
                    offer.sku_id
                ));
            }
        }
        Ok(())
    }
}

/// Whether a reservation in this state holds its units.
fn is_live(state: ReservationState) -> bool {
    match state {
        ReservationState::Held
        | ReservationState::Queued
        | ReservationState::Ordered
        | ReservationState::Confirmed
        | ReservationState::Dead => true,
        ReservationState::Unspecified | ReservationState::Released | ReservationState::Refused => {
            false
        }
    }
}
