//! `seckill reconcile` and `rebuild`: whether the books agree, and the one repair.

use clap::Args;
use serde_json::{Value, json};

use super::{Context, Exit, client::Client, failure::Failure, json};
use crate::api::pb;

/// Compares engine, outbox and orders of an activity, also while it sells; exits 1 when they differ.
///
/// Says whether anything was oversold, whether anything was lost, and what is there to do. Without
/// --repair it mends nothing; an offer that is frozen is rebuilt first, as by any call that meets it.
/// What is merely on its way is no difference.
#[derive(Debug, Args)]
pub struct Reconcile {
    /// The activity.
    activity_id: String,
    /// Rebuilds the offers that differ, and adds up their counters anew; lists what needs a person.
    #[arg(long)]
    repair: bool,
}

impl Reconcile {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect_for_long(&context.global).await?;
        let request = pb::ReconcileRequest { activity_id: self.activity_id, repair: self.repair };
        let mut admin = client.admin();
        let working = context.printer.spinner("comparing engine, outbox and orders");
        let answer = client.call(request, async |request| admin.reconcile(request).await).await;
        working.finish_and_clear();
        let report = answer?.report.unwrap_or_default();
        let verdict = Verdict::of(&report);
        context.printer.answer(&shown(&report, &verdict, context.printer.is_json()));
        Ok(Exit::of(verdict.left == 0))
    }
}

/// What an operator wants to know.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    /// Units beyond the total.
    oversold: i64,
    /// Reservations without their record or their order.
    lost: i64,
    /// Differences that are still there.
    left: i64,
    to_do: &'static str,
}

impl Verdict {
    fn of(report: &pb::ReconcileReport) -> Self {
        use pb::DifferenceKind as Kind;

        let oversold = report
            .offers
            .iter()
            .map(|offer| offer.recorded.max(offer.ordered) - offer.total)
            .filter(|excess| *excess > 0)
            .sum();
        let open = || report.differences.iter().filter(|difference| !difference.repaired);
        let lost = open()
            .filter(|difference| {
                matches!(difference.kind(), Kind::TakenNotRecorded | Kind::RowWithoutOrder)
            })
            .map(|difference| difference.reservation_count)
            .sum();
        let repaired = report.differences.iter().filter(|difference| difference.repaired).count();
        let left = report.difference_count - i64::try_from(repaired).unwrap_or(0);
        let for_a_person =
            |kind| matches!(kind, Kind::Oversold | Kind::OrderWithoutRow | Kind::RowWithoutOrder);
        let to_do = if left == 0 && report.dead > 0 {
            "decide about the dead letters: `seckill dead-letters list`"
        } else if left == 0 {
            "nothing"
        } else if open().any(|difference| for_a_person(difference.kind())) {
            "look at the reservations named below; no repair touches them"
        } else {
            "run it again with --repair"
        };
        Self { oversold, lost, left, to_do }
    }
}

fn shown(report: &pb::ReconcileReport, verdict: &Verdict, whole: bool) -> Value {
    let mut value = json!({
        "activity_id": report.activity_id,
        "observe_time": json::time(report.observe_time.as_ref()),
        "oversold": verdict.oversold,
        "lost": verdict.lost,
        "to_do": verdict.to_do,
        "offers_checked": report.offers_checked,
        "unacked": report.unacked,
        "pending": report.pending,
        "releasing": report.releasing,
        "dead": report.dead,
        "difference_count": report.difference_count,
        "offers": report.offers.iter().map(|offer| figures(offer, whole)).collect::<Value>(),
        "differences": report
            .differences
            .iter()
            .map(|difference| difference_line(difference, whole))
            .collect::<Value>(),
    });
    if !whole {
        let named: Value = report.differences.iter().flat_map(named).collect();
        if named.as_array().is_some_and(|named| !named.is_empty()) {
            value["reservations"] = named;
        }
    }
    value
}

/// One offer; `whole` with its segments, else with their sums.
fn figures(offer: &pb::OfferFigures, whole: bool) -> Value {
    let sum = |figure: fn(&pb::SegmentFigures) -> i64| {
        (!offer.segments.is_empty()).then(|| offer.segments.iter().map(figure).sum::<i64>())
    };
    let mut value = json!({
        "sku_id": offer.sku_id,
        "total": offer.total,
        "remaining": sum(|segment| segment.remaining),
        "in_transfer": sum(|segment| segment.in_transfer),
        "held": sum(|segment| segment.held),
        "recorded": offer.recorded,
        "ordered": offer.ordered,
        "epoch": offer.epoch,
    });
    if whole {
        let segment = |segment: &pb::SegmentFigures| {
            json!({
                "segment": segment.segment,
                "remaining": segment.remaining,
                "in_transfer": segment.in_transfer,
                "held": segment.held,
            })
        };
        value["segments"] = offer.segments.iter().map(segment).collect();
    }
    value
}

fn difference_line(difference: &pb::Difference, whole: bool) -> Value {
    let mut value = json!({
        "kind": json::difference_kind(difference.kind),
        "sku_id": difference.sku_id,
        "reservation_count": difference.reservation_count,
        "expected": difference.expected,
        "actual": difference.actual,
        "repaired": difference.repaired,
        "detail": difference.detail,
    });
    if whole {
        value["reservation_ids"] = json!(difference.reservation_ids);
    }
    value
}

fn named(difference: &pb::Difference) -> impl Iterator<Item = Value> {
    difference.reservation_ids.iter().map(|id| {
        json!({
            "kind": json::difference_kind(difference.kind),
            "sku_id": difference.sku_id,
            "reservation_id": id,
        })
    })
}

/// Fills the engine anew from the database; the offers sell nothing meanwhile.
#[derive(Debug, Args)]
pub struct Rebuild {
    /// The activity.
    activity_id: String,
    /// The offer [without it: all of the activity].
    sku_id: Option<String>,
    /// Splits the stock into so many segments from now on, at least as many as before.
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=256))]
    segments: Option<i32>,
    /// Why, for the audit.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
}

impl Rebuild {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect_for_long(&context.global).await?;
        let request = pb::RebuildStockRequest {
            activity_id: self.activity_id,
            sku_id: self.sku_id.unwrap_or_default(),
            reason: self.reason,
            segments: self.segments.unwrap_or(0),
        };
        let mut admin = client.admin();
        let working = context.printer.spinner("rebuilding the engine from the database");
        let answer = client.call(request, async |request| admin.rebuild_stock(request).await).await;
        working.finish_and_clear();
        let offers: Value = answer?.offers.iter().map(json::offer_stock).collect();
        context.printer.answer(&json!({ "offers": offers }));
        Ok(Exit::Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(kinds: &[(pb::DifferenceKind, bool)]) -> pb::ReconcileReport {
        let difference = |&(kind, repaired): &(pb::DifferenceKind, bool)| pb::Difference {
            kind: kind.into(),
            reservation_count: 2,
            repaired,
            ..pb::Difference::default()
        };
        pb::ReconcileReport {
            difference_count: i64::try_from(kinds.len()).expect("few"),
            differences: kinds.iter().map(difference).collect(),
            offers: vec![pb::OfferFigures {
                total: 5,
                recorded: 5,
                ordered: 7,
                ..Default::default()
            }],
            ..pb::ReconcileReport::default()
        }
    }

    #[test]
    fn the_verdict_says_what_is_there_to_do() {
        use pb::DifferenceKind as Kind;

        let fine = Verdict::of(&report(&[]));
        assert_eq!(fine, Verdict { oversold: 2, lost: 0, left: 0, to_do: "nothing" });
        let drift = Verdict::of(&report(&[(Kind::CounterDrift, false)]));
        assert_eq!((drift.left, drift.to_do), (1, "run it again with --repair"));
        let mended = Verdict::of(&report(&[(Kind::TakenNotRecorded, true)]));
        assert_eq!((mended.left, mended.lost, mended.to_do), (0, 0, "nothing"));
        let person = Verdict::of(&report(&[(Kind::RowWithoutOrder, false)]));
        assert_eq!((person.left, person.lost), (1, 2));
        assert!(person.to_do.contains("no repair"), "{person:?}");
    }
}
