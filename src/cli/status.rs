//! `seckill status`: the work between reservations and orders.

use clap::Args;

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// Shows the pipeline: what is reserved, what waits, what has become orders.
#[derive(Debug, Args)]
pub struct Status {
    /// Of one activity, offer by offer [without it: of all].
    activity_id: Option<String>,
}

impl Status {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let named = self.activity_id.is_some();
        let request = pb::GetPipelineStatusRequest { activity_id: self.activity_id };
        let mut admin = client.admin();
        let answer =
            client.call(request, async |request| admin.get_pipeline_status(request).await).await?;
        let mut value = json::pipeline(&answer);
        if let Some(members) = value.as_object_mut()
            && !named
            && !context.printer.is_json()
        {
            members.shift_remove("offers");
        }
        context.printer.answer(&value);
        Ok(Exit::Ok)
    }
}
