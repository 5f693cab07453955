//! `seckill warmup`: puts an activity's stock into the engine.

use clap::Args;
use serde_json::{Value, json};

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// Puts the offers of an activity into the engine and shows what is there.
#[derive(Debug, Args)]
pub struct Warmup {
    /// The activity.
    activity_id: String,
}

impl Warmup {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let request = pb::WarmupRequest { activity_id: self.activity_id };
        let mut seckill = client.seckill();
        let working = context.printer.spinner("putting the stock into the engine");
        let answer = client.call(request, async |request| seckill.warmup(request).await).await;
        working.finish_and_clear();
        let answer = answer?;
        let activity = answer.activity.unwrap_or_default();
        context.printer.answer(&if context.printer.is_json() {
            json!({
                "activity": json::activity(&activity),
                "offers": answer.offers.iter().map(json::offer_stock).collect::<Value>(),
                "already_warm": answer.already_warm,
            })
        } else {
            json!({
                "activity_id": activity.activity_id,
                "state": json::activity_state(activity.state),
                "already_warm": answer.already_warm,
                "offers": answer.offers.iter().map(json::offer_stock).collect::<Value>(),
            })
        });
        Ok(Exit::Ok)
    }
}
