//! `seckill status`: the work between reservations and orders.

use clap::Args;

use serde_json::{Map, Value};

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
            && !context.printer.is_json()
        {
            if !named {
                members.shift_remove("offers");
            }
            mark_unknown(members);
        }
        context.printer.answer(&value);
        Ok(Exit::Ok)
    }
}

/// What a store that is away would know is shown as unknown, where a table leaves out what is unset.
/// An age is unset where there is none.
fn mark_unknown(members: &mut Map<String, Value>) {
    for (name, value) in members {
        match value {
            Value::Null if name != "oldest_pending_age" => *value = "-".into(),
            Value::Array(offers) => {
                offers.iter_mut().filter_map(Value::as_object_mut).for_each(mark_unknown);
            }
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Object(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::output::table_of;

    #[test]
    fn a_figure_that_nobody_can_tell_is_shown_as_unknown() {
        let mut value = json::pipeline(&pb::GetPipelineStatusResponse {
            outbox_due: Some(3),
            offers: vec![pb::OfferPipeline { sku_id: "s".to_owned(), ..Default::default() }],
            ..Default::default()
        });
        mark_unknown(value.as_object_mut().expect("an object"));
        let shown = table_of(&value);
        let lines: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["unacked", "-"]), "{shown}");
        assert!(lines.contains(&vec!["outbox_due", "3"]), "{shown}");
        assert!(!shown.contains("oldest_pending_age"), "{shown}");
        assert!(shown.contains("REMAINING") && shown.contains("UNACKED"), "{shown}");
    }
}
