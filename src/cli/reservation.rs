//! `seckill reserve`, `release`, `confirm` and `reservation`: one buyer's way through a sale.

use clap::Args;
use serde_json::json;
use uuid::Uuid;

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb::{self, get_reservation_request::By};

/// Takes units for one buyer; exits 1 unless they are RESERVED.
///
/// For example: seckill reserve double-11 phone-1 user-1
#[derive(Debug, Args)]
pub struct Reserve {
    /// The activity.
    activity_id: String,
    /// The offer.
    sku_id: String,
    /// The buyer.
    user_id: String,
    /// How many units [without it: 1].
    #[arg(long)]
    quantity: Option<i32>,
    /// Names the attempt; repeat it when the attempt is repeated [without it: a new UUID].
    #[arg(long)]
    request_id: Option<String>,
}

impl Reserve {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let request_id = self.request_id.unwrap_or_else(|| Uuid::now_v7().to_string());
        let request = pb::ReserveRequest {
            activity_id: self.activity_id,
            sku_id: self.sku_id,
            user_id: self.user_id,
            quantity: self.quantity,
            request_id: request_id.clone(),
        };
        let mut seckill = client.seckill();
        let answer = client.call(request, async |request| seckill.reserve(request).await).await;
        if let Err(Failure::Rpc(rpc)) = &answer
            && rpc.is_passing()
        {
            context.printer.note(&format!(
                "it may still be reserved; repeat it with --request-id {request_id}"
            ));
        }
        let answer = answer?;
        context.printer.answer(&json!({
            "request_id": request_id,
            "outcome": json::reserve_outcome(answer.outcome),
            "reservation": answer.reservation.as_ref().map(json::reservation),
            "existing_reservation": answer.existing_reservation.as_ref().map(json::reservation),
            "remaining": answer.remaining,
            "replayed": answer.replayed,
        }));
        Ok(Exit::of(answer.outcome() == pb::ReserveOutcome::Reserved))
    }
}

/// Gives a reservation back; exits 1 unless it is released, now or before.
///
/// For example: seckill release double-11 phone-1 user-1 RESERVATION_ID, as `reserve` printed it
#[derive(Debug, Args)]
pub struct Release {
    /// The activity.
    activity_id: String,
    /// The offer.
    sku_id: String,
    /// The buyer.
    user_id: String,
    /// The reservation.
    reservation_id: String,
    /// Why, for the records.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
}

impl Release {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let request = pb::ReleaseRequest {
            activity_id: self.activity_id,
            sku_id: self.sku_id,
            user_id: self.user_id,
            reservation_id: self.reservation_id,
            reason: self.reason,
        };
        let mut seckill = client.seckill();
        let answer = client.call(request, async |request| seckill.release(request).await).await?;
        context.printer.answer(&json!({
            "outcome": json::release_outcome(answer.outcome),
            "remaining": answer.remaining,
        }));
        let released = [pb::ReleaseOutcome::Released, pb::ReleaseOutcome::AlreadyReleased];
        Ok(Exit::of(released.contains(&answer.outcome())))
    }
}

/// Makes a reservation final; exits 1 unless it is CONFIRMED.
///
/// For example: seckill confirm double-11 phone-1 user-1 RESERVATION_ID, as `reserve` printed it
#[derive(Debug, Args)]
pub struct Confirm {
    /// The activity.
    activity_id: String,
    /// The offer.
    sku_id: String,
    /// The buyer.
    user_id: String,
    /// The reservation.
    reservation_id: String,
}

impl Confirm {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let request = pb::ConfirmRequest {
            activity_id: self.activity_id,
            sku_id: self.sku_id,
            user_id: self.user_id,
            reservation_id: self.reservation_id,
        };
        let mut seckill = client.seckill();
        let answer = client.call(request, async |request| seckill.confirm(request).await).await?;
        context.printer.answer(&json!({
            "outcome": json::confirm_outcome(answer.outcome),
            "reservation": answer.reservation.as_ref().map(json::reservation),
        }));
        Ok(Exit::of(answer.outcome() == pb::ConfirmOutcome::Confirmed))
    }
}

/// Shows what became of a reservation, or of an attempt to get one.
///
/// Name it by its id, or by activity, SKU, buyer and --request-id.
///
/// For example: seckill reservation --key double-11 phone-1 user-1 --request-id REQUEST_ID
#[derive(Debug, Args)]
#[command(override_usage = "seckill reservation [OPTIONS] <RESERVATION_ID>\n       \
    seckill reservation [OPTIONS] --key <ACTIVITY_ID> <SKU_ID> <USER_ID> --request-id <REQUEST_ID>")]
pub struct Get {
    /// The reservation.
    #[arg(
        required_unless_present_any = ["request_id", "key"],
        conflicts_with_all = ["request_id", "key"]
    )]
    reservation_id: Option<String>,
    /// The attempt's request_id.
    #[arg(long, requires = "key")]
    request_id: Option<String>,
    /// The attempt's activity, SKU and buyer.
    #[arg(
        long,
        num_args = 3,
        value_names = ["ACTIVITY_ID", "SKU_ID", "USER_ID"],
        requires = "request_id"
    )]
    key: Option<Vec<String>>,
}

impl Get {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let by = match (self.reservation_id, self.key.as_deref(), self.request_id) {
            (Some(id), _, _) => By::ReservationId(id),
            (None, Some([activity_id, sku_id, user_id]), Some(request_id)) => {
                By::Key(pb::ReservationKey {
                    activity_id: activity_id.clone(),
                    sku_id: sku_id.clone(),
                    user_id: user_id.clone(),
                    request_id,
                })
            }
            (None, _, _) => {
                return Err(Failure::Usage("name the reservation or the attempt".to_owned()));
            }
        };
        let client = Client::connect(&context.global).await?;
        let request = pb::GetReservationRequest { by: Some(by) };
        let mut seckill = client.seckill();
        let answer =
            client.call(request, async |request| seckill.get_reservation(request).await).await?;
        let refusal = (answer.refusal() != pb::ReserveOutcome::Unspecified)
            .then(|| json::reserve_outcome(answer.refusal));
        context.printer.answer(&json!({
            "reservation": answer.reservation.as_ref().map(json::reservation),
            "refusal": refusal,
        }));
        Ok(Exit::Ok)
    }
}
