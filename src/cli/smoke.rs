//! `seckill smoke`: walks one test buyer through a sale that is on, and gives the unit back.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{Context, Exit, client::Client, failure::Failure, json, output::Printer};
use crate::api::pb::{
    self, ActivityState, ReleaseOutcome, ReservationState, ReserveOutcome,
    get_reservation_request::By,
};

/// How long the order may take to appear.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);
/// How long an activity may take to say that it is ACTIVE.
const STARTING: Duration = Duration::from_secs(3);

/// Walks a test buyer through an ACTIVE activity; exits 1 when a step fails.
///
/// It reserves one unit, waits for the order, repeats the request, tries for a second one, and
/// gives the unit back.
#[derive(Debug, Args)]
pub struct Smoke {
    /// The activity.
    activity_id: String,
    /// The offer [without it: the first one].
    sku_id: Option<String>,
}

/// One test buyer on the way.
struct Walk<'a> {
    client: &'a Client,
    printer: Printer,
    activity_id: String,
    sku_id: String,
    user_id: String,
    steps: Vec<Value>,
    failed: bool,
}

impl Smoke {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let mut admin = client.admin();
        let deadline = Instant::now() + STARTING;
        let activity = loop {
            let request = pb::GetActivityRequest { activity_id: self.activity_id.clone() };
            let answer =
                client.call(request, async |request| admin.get_activity(request).await).await?;
            let activity = answer.activity.unwrap_or_default();
            // At its start_time it sells at once; its state follows a moment later.
            if activity.state() != ActivityState::Scheduled || Instant::now() >= deadline {
                break activity;
            }
            sleep(Duration::from_millis(200)).await;
        };
        let offer = activity
            .offers
            .iter()
            .find(|offer| self.sku_id.as_ref().is_none_or(|sku_id| *sku_id == offer.sku_id));
        let Some(offer) = offer else {
            let sku_id = self.sku_id.unwrap_or_default();
            return Err(Failure::Usage(format!("{} has no offer {sku_id}", self.activity_id)));
        };
        let mut walk = Walk {
            client: &client,
            printer: context.printer,
            activity_id: self.activity_id,
            sku_id: offer.sku_id.clone(),
            user_id: format!("smoke-{}", Uuid::now_v7().simple()),
            steps: Vec::new(),
            failed: false,
        };
        let state = json::activity_state(activity.state);
        if walk.step("activity", activity.state() == ActivityState::Active, &format!("is {state}"))
        {
            walk.reserve_to_release(offer.max_orders_per_user).await?;
        }
        Ok(walk.finish())
    }
}

impl Walk<'_> {
    /// Reserves, and gives back what was reserved whatever happens in between.
    async fn reserve_to_release(&mut self, max_orders: i32) -> Result<(), Failure> {
        let request_id = Uuid::now_v7().to_string();
        let answer = match self.reserve(&request_id).await {
            Ok(answer) => answer,
            Err(failure) => {
                // Nobody knows whether it won.
                self.give_back_attempt(&request_id).await;
                return Err(failure);
            }
        };
        let outcome = json::reserve_outcome(answer.outcome);
        let Some(reservation) = answer.reservation.filter(|_| outcome == "RESERVED") else {
            self.step("reserve", false, &format!("{outcome}: nothing to walk with"));
            return Ok(());
        };
        self.step("reserve", true, &reservation.reservation_id);
        let middle = self.order_and_refusals(&reservation, &request_id, max_orders).await;
        let released = self.release(&reservation.reservation_id).await;
        middle?;
        let outcome = released?;
        let name = json::release_outcome(outcome.into());
        self.step("release", outcome == ReleaseOutcome::Released, &name);
        let left = self.state_of(&reservation.reservation_id).await?;
        let name = json::reservation_state(left.into());
        self.step("nothing left", left == ReservationState::Released, &name);
        Ok(())
    }

    async fn order_and_refusals(
        &mut self,
        reservation: &pb::Reservation,
        request_id: &str,
        max_orders: i32,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        let mut state = self.state_of(&reservation.reservation_id).await?;
        while state != ReservationState::Ordered && started.elapsed() < ORDER_DEADLINE {
            sleep(POLL).await;
            state = self.state_of(&reservation.reservation_id).await?;
        }
        let text = format!(
            "{} {} after {} ms",
            reservation.order_no,
            json::reservation_state(state.into()),
            started.elapsed().as_millis()
        );
        self.step("order", state == ReservationState::Ordered, &text);

        let again = self.reserve(request_id).await?;
        let same = again.replayed
            && again.outcome() == ReserveOutcome::Reserved
            && again.reservation.is_some_and(|held| {
                held.reservation_id == reservation.reservation_id
                    && held.order_no == reservation.order_no
            });
        let text = if same { "the same reservation" } else { "another answer" };
        self.step("repeat", same, text);

        if max_orders > 1 {
            self.step("second order", true, &format!("not tried: {max_orders} are allowed"));
            return Ok(());
        }
        let second_id = Uuid::now_v7().to_string();
        let second = self.reserve(&second_id).await;
        if !matches!(&second, Ok(answer) if answer.outcome() == ReserveOutcome::Duplicate) {
            self.give_back_attempt(&second_id).await;
        }
        let second = second?;
        let outcome = json::reserve_outcome(second.outcome);
        self.step("second order", second.outcome() == ReserveOutcome::Duplicate, &outcome);
        Ok(())
    }

    fn step(&mut self, step: &str, ok: bool, text: &str) -> bool {
        if !self.printer.is_json() {
            let mark = if ok { "ok    " } else { "FAILED" };
            self.printer.data(&format!("{mark}  {step:<12}  {text}"));
        }
        self.steps.push(json!({"step": step, "ok": ok, "text": text}));
        self.failed |= !ok;
        ok
    }

    fn finish(self) -> Exit {
        if self.printer.is_json() {
            self.printer.answer(&json!({
                "activity_id": self.activity_id,
                "sku_id": self.sku_id,
                "user_id": self.user_id,
                "ok": !self.failed,
                "steps": self.steps,
            }));
        }
        Exit::of(!self.failed)
    }

    async fn reserve(&self, request_id: &str) -> Result<pb::ReserveResponse, Failure> {
        let request = pb::ReserveRequest {
            activity_id: self.activity_id.clone(),
            sku_id: self.sku_id.clone(),
            user_id: self.user_id.clone(),
            quantity: None,
            request_id: request_id.to_owned(),
        };
        let mut seckill = self.client.seckill();
        self.client.call(request, async |request| seckill.reserve(request).await).await
    }

    async fn release(&self, reservation_id: &str) -> Result<ReleaseOutcome, Failure> {
        let request = pb::ReleaseRequest {
            activity_id: self.activity_id.clone(),
            sku_id: self.sku_id.clone(),
            user_id: self.user_id.clone(),
            reservation_id: reservation_id.to_owned(),
            reason: "smoke test".to_owned(),
        };
        let mut seckill = self.client.seckill();
        let answer =
            self.client.call(request, async |request| seckill.release(request).await).await?;
        Ok(answer.outcome())
    }

    async fn state_of(&self, reservation_id: &str) -> Result<ReservationState, Failure> {
        let by = By::ReservationId(reservation_id.to_owned());
        Ok(self.look_up(by).await?.state())
    }

    async fn look_up(&self, by: By) -> Result<pb::Reservation, Failure> {
        let request = pb::GetReservationRequest { by: Some(by) };
        let mut seckill = self.client.seckill();
        let answer = self
            .client
            .call(request, async |request| seckill.get_reservation(request).await)
            .await?;
        Ok(answer.reservation.unwrap_or_default())
    }

    /// Gives back what an attempt may have won; what it did not win needs nothing.
    async fn give_back_attempt(&self, request_id: &str) {
        let key = By::Key(pb::ReservationKey {
            activity_id: self.activity_id.clone(),
            sku_id: self.sku_id.clone(),
            user_id: self.user_id.clone(),
            request_id: request_id.to_owned(),
        });
        if let Ok(held) = self.look_up(key).await
            && let Err(failure) = self.release(&held.reservation_id).await
        {
            self.printer.note(&format!(
                "{} of {} may be left behind: {}",
                held.reservation_id,
                self.user_id,
                failure.text()
            ));
        }
    }
}
