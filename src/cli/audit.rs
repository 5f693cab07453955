//! `seckill audit`: who did what.

use clap::Args;
use serde_json::{Value, json};

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// The most entries of one page.
const PAGE_SIZE: i32 = 1_000;
/// The most characters of a detail in a table.
const DETAIL_CHARS: usize = 120;

/// Lists what operators and the server itself did, the newest first.
///
/// A long detail is cut in the table; `--output json` has it whole, the report of a settlement too.
#[derive(Debug, Args)]
pub struct Audit {
    /// Of one activity [without it: of all].
    activity_id: Option<String>,
    /// How many entries at most.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

impl Audit {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let limit = self.limit as usize;
        let mut admin = client.admin();
        let mut entries = Vec::new();
        let mut page_token = String::new();
        loop {
            let left = i32::try_from(limit - entries.len()).unwrap_or(PAGE_SIZE);
            let request = pb::ListAuditRequest {
                page_size: left.min(PAGE_SIZE),
                page_token,
                activity_id: self.activity_id.clone(),
            };
            let page =
                client.call(request, async |request| admin.list_audit(request).await).await?;
            entries.extend(page.entries.iter().map(|entry| line(entry, context)));
            page_token = page.next_page_token;
            if page_token.is_empty() || entries.len() >= limit {
                break;
            }
        }
        context.printer.answer(&json!({ "entries": entries }));
        Ok(Exit::Ok)
    }
}

/// A detail that fits on a line; `--output json` has all of it.
fn shortened(detail: &str) -> String {
    match detail.char_indices().nth(DETAIL_CHARS) {
        Some((end, _)) => format!("{}…", &detail[..end]),
        None => detail.to_owned(),
    }
}

fn line(entry: &pb::AuditEntry, context: &Context) -> Value {
    let detail = if context.printer.is_json() {
        serde_json::from_str(&entry.detail).unwrap_or_else(|_| json!(entry.detail))
    } else {
        json!(shortened(&entry.detail))
    };
    json!({
        "audit_id": entry.audit_id,
        "create_time": json::time(entry.create_time.as_ref()),
        "actor": entry.actor,
        "action": entry.action,
        "activity_id": entry.activity_id,
        "sku_id": entry.sku_id,
        "detail": detail,
    })
}
