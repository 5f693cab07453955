//! `seckill dead-letters`: reservations that could not become orders.

use clap::{ArgGroup, Args, Subcommand};
use serde_json::{Value, json};

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// The entries of one page of a list.
const PAGE_SIZE: i32 = 200;

#[derive(Debug, Subcommand)]
pub enum DeadLetters {
    /// Lists dead letters, the oldest first; exits 1 when there are any.
    List {
        /// Only those of this activity.
        #[arg(long)]
        activity_id: Option<String>,
    },
    /// Sends dead letters back to the queue, with all their attempts.
    Retry(Which),
    /// Gives up dead letters and gives their units back.
    Discard(Which),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("letters").required(true).args(["reservation_ids", "all"]))]
pub struct Which {
    /// The reservations.
    reservation_ids: Vec<String>,
    /// All that there are, or all of --activity-id.
    #[arg(long)]
    all: bool,
    /// The activity that --all is limited to.
    #[arg(long, requires = "all", conflicts_with = "reservation_ids")]
    activity_id: Option<String>,
    /// Why, for the audit.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
}

/// What to do with each.
#[derive(Debug, Clone, Copy)]
enum Decision {
    Retry,
    Discard,
}

impl DeadLetters {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        match self {
            Self::List { activity_id } => {
                let letters = list(&client, activity_id).await?;
                let shown: Value = letters.iter().map(line).collect();
                context.printer.answer(&json!({ "dead_letters": shown }));
                Ok(Exit::of(letters.is_empty()))
            }
            Self::Retry(which) => decide(&client, context, which, Decision::Retry).await,
            Self::Discard(which) => decide(&client, context, which, Decision::Discard).await,
        }
    }
}

async fn list(
    client: &Client,
    activity_id: Option<String>,
) -> Result<Vec<pb::DeadLetter>, Failure> {
    let mut admin = client.admin();
    let mut letters = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = pb::ListDeadLettersRequest {
            page_size: PAGE_SIZE,
            page_token,
            activity_id: activity_id.clone(),
        };
        let page =
            client.call(request, async |request| admin.list_dead_letters(request).await).await?;
        letters.extend(page.dead_letters);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(letters);
        }
    }
}

/// Decides about one after the other; what was done before a failure is shown all the same.
async fn decide(
    client: &Client,
    context: &Context,
    which: Which,
    decision: Decision,
) -> Result<Exit, Failure> {
    let ids = if which.all {
        let letters = list(client, which.activity_id).await?;
        letters.into_iter().filter_map(|letter| Some(letter.reservation?.reservation_id)).collect()
    } else {
        which.reservation_ids
    };
    let mut decided = Vec::with_capacity(ids.len());
    let mut failed = None;
    for id in ids {
        match decide_one(client, id, which.reason.clone(), decision).await {
            Ok(reservation) => decided.push(json::reservation(&reservation)),
            Err(failure) => {
                failed = Some(failure);
                break;
            }
        }
    }
    if !decided.is_empty() || failed.is_none() {
        context.printer.answer(&json!({ "reservations": decided }));
    }
    failed.map_or(Ok(Exit::Ok), Err)
}

async fn decide_one(
    client: &Client,
    reservation_id: String,
    reason: String,
    decision: Decision,
) -> Result<pb::Reservation, Failure> {
    let mut admin = client.admin();
    let reservation = match decision {
        Decision::Retry => {
            let request = pb::RetryDeadLetterRequest { reservation_id, reason };
            let rpc = async |request| admin.retry_dead_letter(request).await;
            client.call(request, rpc).await?.reservation
        }
        Decision::Discard => {
            let request = pb::DiscardDeadLetterRequest { reservation_id, reason };
            let rpc = async |request| admin.discard_dead_letter(request).await;
            client.call(request, rpc).await?.reservation
        }
    };
    Ok(reservation.unwrap_or_default())
}

fn line(letter: &pb::DeadLetter) -> Value {
    let reservation = letter.reservation.clone().unwrap_or_default();
    json!({
        "reservation_id": reservation.reservation_id,
        "activity_id": reservation.activity_id,
        "sku_id": reservation.sku_id,
        "user_id": reservation.user_id,
        "quantity": reservation.quantity,
        "attempts": letter.attempts,
        "create_time": json::time(letter.create_time.as_ref()),
        "fail_time": json::time(letter.fail_time.as_ref()),
        "last_error": letter.last_error,
    })
}
