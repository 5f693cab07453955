//! `seckill watch`: the stock of an activity as it changes.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Streaming};

use super::{
    Context, Exit,
    client::Client,
    failure::{Failure, RpcFailure},
    json,
    output::{Printer, list_table},
    span,
};
use crate::api::pb;

/// The server says something at least every 15 seconds; after this it is gone.
const SILENCE: Duration = Duration::from_secs(20);
/// How often the table is drawn at most.
const REDRAW: Duration = Duration::from_millis(100);
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// The lines of the screen that are no offers: the head, the hint at more, and the cursor's.
const OTHER_LINES: usize = 3;

/// Shows the stock of an activity as it changes, until the activity is settled.
///
/// A table that is drawn over itself on a terminal, a line per change elsewhere.
///
/// For example: seckill watch double-11 --sku phone-1
#[derive(Debug, Args)]
pub struct Watch {
    /// The activity.
    activity_id: String,
    /// Only this offer; repeat it for more [without it: all].
    #[arg(long = "sku", value_name = "SKU_ID")]
    skus: Vec<String>,
    /// The least time between two messages about one offer, as in 1s [without it: none].
    #[arg(long, value_name = "SPAN", value_parser = span::parse)]
    min_interval: Option<Duration>,
}

/// How a stream ended.
enum End {
    /// There will be nothing more.
    Settled,
    /// Call again.
    Broken(RpcFailure),
}

impl Watch {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let request = pb::WatchStockRequest {
            activity_id: self.activity_id,
            sku_ids: self.skus,
            min_interval: self.min_interval.and_then(|span| span.try_into().ok()),
        };
        let mut view = View::new(context.printer);
        let mut backoff = FIRST_BACKOFF;
        let mut client = Some(Client::connect(&context.global).await?);
        loop {
            let connected = match client.take() {
                Some(client) => Ok(client),
                None => Client::connect(&context.global).await,
            };
            let before = view.messages;
            let lost = match connected {
                Ok(client) => match watch_once(&client, request.clone(), &mut view).await? {
                    End::Settled => return Ok(Exit::Ok),
                    End::Broken(rpc) => rpc.message,
                },
                Err(Failure::NoServer { cause, .. }) => cause,
                Err(failure) => return Err(failure),
            };
            if view.messages > before {
                backoff = FIRST_BACKOFF;
            }
            // Watchers of a server that stopped must not come back all at once.
            let wait = backoff.mul_f64(0.5 + fastrand::f64() / 2.0);
            view.note(&format!(
                "lost the server ({lost}); trying again in {} ms",
                wait.as_millis()
            ));
            sleep(wait).await;
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }
}

/// One stream from its snapshot to its end.
async fn watch_once(
    client: &Client,
    request: pb::WatchStockRequest,
    view: &mut View,
) -> Result<End, Failure> {
    let mut seckill = client.seckill();
    // No deadline goes along, since it would end the stream; the head alone must come in time.
    let request = client.request(request);
    let opened = timeout(client.timeout(), seckill.watch_stock(request)).await;
    let stream = match opened.map_err(|_| RpcFailure::deadline()) {
        Ok(Ok(answer)) => answer.into_inner(),
        Ok(Err(status)) => return ended(RpcFailure::from(&status)),
        Err(deadline) => return ended(deadline),
    };
    follow(stream, view).await
}

async fn follow(
    mut stream: Streaming<pb::WatchStockResponse>,
    view: &mut View,
) -> Result<End, Failure> {
    loop {
        let next = {
            let mut message = pin!(timeout(SILENCE, stream.message()));
            loop {
                tokio::select! {
                    next = &mut message => break next,
                    () = view.redraw_due() => view.draw(),
                }
            }
        };
        match next {
            Ok(Ok(Some(update))) => view.add(&update),
            Ok(Ok(None)) => {
                view.draw();
                return Ok(End::Settled);
            }
            Ok(Err(status)) => return ended(RpcFailure::from(&status)),
            Err(_) => {
                return Ok(End::Broken(RpcFailure {
                    message: format!("nothing came for {} s", SILENCE.as_secs()),
                    ..RpcFailure::deadline()
                }));
            }
        }
    }
}

/// Whether a stream that failed is worth calling again.
fn ended(rpc: RpcFailure) -> Result<End, Failure> {
    // A connection that breaks under a stream is UNKNOWN or CANCELLED in tonic.
    let broken = matches!(rpc.code, Code::Unknown | Code::Cancelled) && rpc.reason.is_none();
    if rpc.is_passing() || broken { Ok(End::Broken(rpc)) } else { Err(Failure::Rpc(Box::new(rpc))) }
}

/// What is on the screen.
struct View {
    printer: Printer,
    rows: BTreeMap<String, pb::WatchStockResponse>,
    messages: u64,
    /// Lines that the last table has, to go back over.
    drawn: usize,
    /// Since when something waits to be drawn.
    dirty_since: Option<Instant>,
}

impl View {
    fn new(printer: Printer) -> Self {
        Self { printer, rows: BTreeMap::new(), messages: 0, drawn: 0, dirty_since: None }
    }

    fn add(&mut self, update: &pb::WatchStockResponse) {
        self.messages += 1;
        if self.printer.is_json() {
            self.printer.answer(&json::stock_update(update));
        } else if self.printer.is_live() {
            self.rows.insert(update.sku_id.clone(), update.clone());
            self.dirty_since.get_or_insert_with(Instant::now);
        } else if !update.heartbeat {
            self.printer.data(&line(update));
        }
    }

    async fn redraw_due(&self) {
        match self.dirty_since {
            Some(since) => tokio::time::sleep_until(since + REDRAW).await,
            None => std::future::pending().await,
        }
    }

    fn draw(&mut self) {
        self.dirty_since = None;
        if !self.printer.is_live() || self.rows.is_empty() {
            return;
        }
        // The size may change at any time. What is higher or wider than the screen can't be drawn
        // over itself.
        let (lines, columns) = self.printer.terminal_size();
        let table = table(&self.rows, lines.saturating_sub(OTHER_LINES).max(1), columns);
        let back = match self.drawn {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        };
        self.drawn = table.lines().count();
        self.printer.data(&format!("{back}{table}"));
    }

    /// A line below the table, which starts anew after it.
    fn note(&mut self, text: &str) {
        self.draw();
        self.drawn = 0;
        self.printer.note(text);
    }
}

fn line(update: &pb::WatchStockResponse) -> String {
    let time = update.observe_time.as_ref().map(ToString::to_string).unwrap_or_default();
    format!(
        "{time} {} {} remaining={} reserved={} total={}",
        update.sku_id,
        json::activity_state(update.state),
        update.remaining,
        update.reserved,
        update.total,
    )
}

/// The table with so many offers at most, cut at so many columns.
fn table(
    rows: &BTreeMap<String, pb::WatchStockResponse>,
    max_rows: usize,
    columns: usize,
) -> String {
    let shown: Vec<Value> = rows
        .values()
        .take(max_rows)
        .map(|row| {
            json!({
                "sku_id": row.sku_id,
                "state": json::activity_state(row.state),
                "remaining": row.remaining,
                "reserved": row.reserved,
                "total": row.total,
                "left": left_bar(row.remaining, row.total),
            })
        })
        .collect();
    let table = list_table(&shown);
    let text = match rows.len().saturating_sub(max_rows) {
        0 => table,
        more => format!("{table}\nand {more} more offers; name some with --sku"),
    };
    let cut: Vec<String> = text.lines().map(|line| line.chars().take(columns).collect()).collect();
    cut.join("\n")
}

/// What is left, as a bar of twenty characters and a percentage.
fn left_bar(remaining: i64, total: i64) -> String {
    const WIDTH: i128 = 20;
    let (remaining, total) = (i128::from(remaining), i128::from(total.max(1)));
    // Rounded up: a bar that is empty means that nothing is left.
    let filled = ((remaining * WIDTH + total - 1) / total).clamp(0, WIDTH);
    let filled = usize::try_from(filled).unwrap_or(0);
    let percent = remaining * 100 / total;
    format!("{}{} {percent:>3} %", "#".repeat(filled), ".".repeat(20 - filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_empty_only_when_nothing_is_left() {
        assert_eq!(left_bar(0, 1_000), format!("{}   0 %", ".".repeat(20)));
        assert_eq!(left_bar(1, 1_000), format!("#{}   0 %", ".".repeat(19)));
        assert_eq!(left_bar(1_000, 1_000), format!("{} 100 %", "#".repeat(20)));
        assert_eq!(left_bar(i64::MAX, i64::MAX), format!("{} 100 %", "#".repeat(20)));
    }

    #[test]
    fn a_table_fits_into_the_screen() {
        let offer = |nth: usize| {
            let sku_id = format!("a-rather-long-name-{nth:02}");
            (sku_id.clone(), pb::WatchStockResponse { sku_id, ..Default::default() })
        };
        let rows: BTreeMap<_, _> = (0..12).map(offer).collect();
        let drawn = table(&rows, 4, 30);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines.len(), 6, "{drawn}");
        assert!(lines.iter().all(|line| line.chars().count() <= 30), "{drawn}");
        assert!(lines[5].starts_with("and 8 more offers"), "{drawn}");
        assert_eq!(table(&rows, 12, 100).lines().count(), 13);
    }

    #[test]
    fn a_stream_that_broke_is_called_again_and_a_refusal_is_not() {
        let end = |code| ended(RpcFailure { code, ..RpcFailure::deadline() });
        assert!(matches!(end(Code::Unavailable), Ok(End::Broken(_))));
        assert!(matches!(end(Code::Unknown), Ok(End::Broken(_))));
        assert!(end(Code::NotFound).is_err());
        assert!(end(Code::Unimplemented).is_err());
    }
}
