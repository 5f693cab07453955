//! `seckill activity`: the life of a sale, from a file.

mod schema;

use std::{
    fs,
    io::{self, Read as _},
    path::PathBuf,
};

use clap::{Args, Subcommand};
use prost_types::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Context, Exit, client::Client, failure::Failure, json, span};
use crate::api::pb;

/// The entries of one page of a list.
const PAGE_SIZE: i32 = 200;

#[derive(Debug, Subcommand)]
pub enum Activity {
    /// Makes an activity of a YAML or JSON file, as in examples/sale.yaml.
    ///
    /// It is in review then: `seckill activity approve` is next.
    ///
    /// For example: seckill activity create -f examples/sale.yaml
    Create {
        /// The file; `-` reads stdin.
        #[arg(short, long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Prints the JSON schema of the file that `create` reads, for editors.
    Schema,
    /// Lists activities, the latest start first.
    List {
        /// Only those that are pending_review, scheduled, active, paused, ended or settled.
        #[arg(long, value_parser = parse_state)]
        state: Option<pb::ActivityState>,
    },
    /// Shows an activity with its offers.
    Show {
        /// The activity.
        activity_id: String,
    },
    /// Moves an activity from PENDING_REVIEW to SCHEDULED.
    Approve(Move),
    /// Moves an activity from ACTIVE to PAUSED.
    Pause(Move),
    /// Moves an activity from PAUSED to ACTIVE.
    Resume(Move),
    /// Ends an activity before its time.
    End(Move),
    /// Closes the books of an ENDED activity.
    Settle(Move),
}

#[derive(Debug, Args)]
pub struct Move {
    /// The activity.
    activity_id: String,
    /// Why, for the audit.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
}

/// Calls one of the rpcs that move an activity; they differ in name only.
macro_rules! move_activity {
    ($client:expr, $to:expr, $rpc:ident, $request:ident) => {{
        let Move { activity_id, reason } = $to;
        let request = pb::$request { activity_id, reason };
        let mut admin = $client.admin();
        $client.call(request, async |request| admin.$rpc(request).await).await?.activity
    }};
}

impl Activity {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        if matches!(self, Self::Schema) {
            context.printer.data(&format!("{:#}", schema::schema()));
            return Ok(Exit::Ok);
        }
        // A file that is wrong is told before a server that is away.
        let spec = if let Self::Create { file } = &self { Some(read_spec(file)?) } else { None };
        let client = match &self {
            Self::Settle(_) => Client::connect_for_long(&context.global).await?,
            Self::Create { .. }
            | Self::Schema
            | Self::List { .. }
            | Self::Show { .. }
            | Self::Approve(_)
            | Self::Pause(_)
            | Self::Resume(_)
            | Self::End(_) => Client::connect(&context.global).await?,
        };
        let mut admin = client.admin();
        let activity = match self {
            Self::Create { .. } => {
                let request = pb::CreateActivityRequest { spec };
                client
                    .call(request, async |request| admin.create_activity(request).await)
                    .await?
                    .activity
            }
            Self::Show { activity_id } => {
                let request = pb::GetActivityRequest { activity_id };
                client
                    .call(request, async |request| admin.get_activity(request).await)
                    .await?
                    .activity
            }
            // Answered above.
            Self::Schema => return Ok(Exit::Ok),
            Self::List { state } => {
                context.printer.answer(&json!({"activities": list(&client, state).await?}));
                return Ok(Exit::Ok);
            }
            Self::Approve(to) => {
                move_activity!(client, to, approve_activity, ApproveActivityRequest)
            }
            Self::Pause(to) => move_activity!(client, to, pause_activity, PauseActivityRequest),
            Self::Resume(to) => move_activity!(client, to, resume_activity, ResumeActivityRequest),
            Self::End(to) => move_activity!(client, to, end_activity, EndActivityRequest),
            Self::Settle(to) => {
                let working = context.printer.spinner("closing the books");
                let settled = async {
                    Ok(move_activity!(client, to, settle_activity, SettleActivityRequest))
                };
                let settled: Result<_, Failure> = settled.await;
                working.finish_and_clear();
                settled?
            }
        };
        context.printer.answer(&json::activity(&activity.unwrap_or_default()));
        Ok(Exit::Ok)
    }
}

async fn list(client: &Client, state: Option<pb::ActivityState>) -> Result<Value, Failure> {
    let mut admin = client.admin();
    let mut activities = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = pb::ListActivitiesRequest {
            page_size: PAGE_SIZE,
            page_token,
            state: state.unwrap_or(pb::ActivityState::Unspecified).into(),
        };
        let page =
            client.call(request, async |request| admin.list_activities(request).await).await?;
        activities.extend(page.activities.iter().map(json::activity_line));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(Value::Array(activities));
        }
    }
}

fn parse_state(text: &str) -> Result<pb::ActivityState, String> {
    let name = format!("ACTIVITY_STATE_{}", text.to_ascii_uppercase());
    pb::ActivityState::from_str_name(&name).ok_or_else(|| {
        "must be pending_review, scheduled, active, paused, ended or settled".to_owned()
    })
}

/// The file of `activity create`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an activity, as in examples/sale.yaml")]
struct SaleFile {
    activity_id: String,
    title: String,
    /// RFC 3339, `now`, or `+10s` from now.
    start_time: String,
    /// RFC 3339, or `+1h` after `start_time`.
    end_time: String,
    retention_s: Option<u32>,
    offers: Vec<OfferFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an offer, as in examples/sale.yaml")]
struct OfferFile {
    sku_id: String,
    title: String,
    price_minor: i64,
    currency_code: String,
    total: i64,
    max_orders_per_user: Option<i32>,
    max_quantity_per_order: Option<i32>,
    hold_s: Option<u32>,
    segments: Option<i32>,
}

fn read_spec(file: &PathBuf) -> Result<pb::ActivitySpec, Failure> {
    let shown = file.display();
    let text = if file.as_os_str() == "-" {
        let mut text = String::new();
        io::stdin().lock().read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(file)
    };
    let text = text.map_err(|error| Failure::Usage(format!("{shown} can't be read: {error}")))?;
    parse_spec(&text, span::now()).map_err(|error| Failure::Usage(format!("{shown}: {error}")))
}

/// Reads YAML; JSON is YAML too.
fn parse_spec(text: &str, now: Timestamp) -> Result<pb::ActivitySpec, String> {
    let sale: SaleFile = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
    let moment = |field: &str, text: &str, base| {
        span::parse_moment(text, base).map_err(|error| format!("{field} = {text:?}: {error}"))
    };
    let start_time = moment("start_time", &sale.start_time, now)?;
    let end_time = moment("end_time", &sale.end_time, start_time)?;
    Ok(pb::ActivitySpec {
        activity_id: sale.activity_id,
        title: sale.title,
        start_time: Some(start_time),
        end_time: Some(end_time),
        retention: seconds(sale.retention_s),
        offers: sale
            .offers
            .into_iter()
            .map(|offer| pb::OfferSpec {
                sku_id: offer.sku_id,
                title: offer.title,
                price_minor: offer.price_minor,
                currency_code: offer.currency_code,
                total: offer.total,
                max_orders_per_user: offer.max_orders_per_user,
                max_quantity_per_order: offer.max_quantity_per_order,
                hold: seconds(offer.hold_s),
                segments: offer.segments,
            })
            .collect(),
    })
}

fn seconds(seconds: Option<u32>) -> Option<prost_types::Duration> {
    seconds.map(|seconds| prost_types::Duration { seconds: seconds.into(), nanos: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../examples/sale.yaml");

    fn parse(text: &str) -> Result<pb::ActivitySpec, String> {
        parse_spec(text, "2026-11-11T00:00:00Z".parse().expect("a time"))
    }

    #[test]
    fn the_example_is_valid() {
        let spec = parse(EXAMPLE).expect("a sale");
        assert_eq!(spec.activity_id, "double-11");
        let (start, end) = (spec.start_time.expect("set"), spec.end_time.expect("set"));
        assert_eq!(end.seconds - start.seconds, 3_600);
        assert_eq!(spec.offers.len(), 2);
        assert_eq!(spec.offers[0].hold.expect("set").seconds, 900);
        assert_eq!(spec.offers[1].max_orders_per_user, Some(2));
    }

    #[test]
    fn json_is_read_too() {
        let spec = parse(
            r#"{"activity_id": "a", "title": "A", "start_time": "+10s", "end_time": "+1h",
                "offers": [{"sku_id": "007", "title": "S", "price_minor": 1,
                            "currency_code": "CNY", "total": 5}]}"#,
        )
        .expect("a sale");
        assert_eq!(spec.start_time.expect("set").to_string(), "2026-11-11T00:00:10Z");
        assert_eq!(spec.end_time.expect("set").to_string(), "2026-11-11T01:00:10Z");
        assert_eq!(spec.offers[0].sku_id, "007");
        assert_eq!(spec.retention, None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (from, to, message) in [
            ("total:", "totl:", "offers[0]: unknown field `totl`"),
            ("title:", "titel:", "unknown field `titel`"),
            (
                "minor: 199900",
                "minor: 19.99",
                "offers[0].price_minor: invalid type: floating point",
            ),
            ("start_time: now", "start_time: soon", "start_time = \"soon\": must be RFC 3339"),
            ("end_time: +1h", "end_time: later", "end_time = \"later\": must be RFC 3339"),
            ("activity_id: double-11\n", "", "missing field `activity_id`"),
        ] {
            let error = parse(&EXAMPLE.replacen(from, to, 1)).expect_err(message);
            assert!(error.starts_with(message), "{error:?} should start with {message:?}");
        }
    }

    #[test]
    fn a_file_of_something_else_is_told_in_our_words() {
        let error = parse("double-11").expect_err("no activity");
        assert!(error.ends_with("expected an activity, as in examples/sale.yaml"), "{error}");
        let error = parse("[]").expect_err("no activity");
        assert!(error.contains("an activity, as in examples/sale.yaml"), "{error}");
    }

    #[test]
    fn an_id_of_digits_stays_text() {
        let spec = parse(&EXAMPLE.replacen("phone-1", "9007199254740993", 1)).expect("a sale");
        assert_eq!(spec.offers[0].sku_id, "9007199254740993");
        let spec = parse(&EXAMPLE.replacen("phone-1", "007", 1)).expect("a sale");
        assert_eq!(spec.offers[0].sku_id, "007");
    }

    #[test]
    fn a_state_is_named_in_any_case() {
        assert_eq!(parse_state("pending_review"), Ok(pb::ActivityState::PendingReview));
        assert_eq!(parse_state("ACTIVE"), Ok(pb::ActivityState::Active));
        assert!(parse_state("open").is_err());
    }
}
