//! `seckill adjust`: more or fewer units of an offer, also during the sale.

use clap::Args;
use serde_json::json;
use uuid::Uuid;

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// Adds units to an offer or takes unsold ones away, from its warm-up to its end; exits 1 unless it is
/// applied.
///
/// It is the whole number or nothing: where fewer units are left than are to be taken away, nothing
/// changes, and the answer says how many could be.
///
/// For example: seckill adjust double-11 phone-1 -20 --reason "two boxes are broken"
#[derive(Debug, Args)]
pub struct Adjust {
    /// The activity.
    activity_id: String,
    /// The offer.
    sku_id: String,
    /// How many units more, or with a minus fewer, as in 100 or -20.
    #[arg(allow_negative_numbers = true)]
    delta: i64,
    /// Names the adjustment; repeat it when the command is repeated [without it: a new UUID].
    #[arg(long)]
    request_id: Option<String>,
    /// Why, for the audit.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
}

impl Adjust {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let request_id = self.request_id.unwrap_or_else(|| Uuid::now_v7().to_string());
        let request = pb::AdjustStockRequest {
            activity_id: self.activity_id,
            sku_id: self.sku_id,
            delta: self.delta,
            request_id: request_id.clone(),
            reason: self.reason,
        };
        let mut admin = client.admin();
        let answer = client.call(request, async |request| admin.adjust_stock(request).await).await;
        if let Err(Failure::Rpc(rpc)) = &answer
            && rpc.is_passing()
        {
            context.printer.note(&format!(
                "it may still be applied; repeat it with --request-id {request_id}"
            ));
        }
        let answer = answer?;
        context.printer.answer(&json!({
            "request_id": request_id,
            "applied": answer.applied,
            "possible": answer.possible,
            "offer": json::offer(&answer.offer.unwrap_or_default()),
        }));
        Ok(Exit::of(answer.applied))
    }
}
