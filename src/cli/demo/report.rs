//! What a demo came to.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use serde_json::{Value, json};

use super::super::output::{list_table, table_of};
use super::books::OfferBooks;

/// What callers were told and what the books say, and where the two differ.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct DemoReport {
    pub activity_id: String,
    pub units: u64,
    pub buyers: u64,
    pub offers: u64,
    pub concurrency: u64,

    // What the callers were told.
    /// The first answer to each buyer, by name; an error that stayed is under its code.
    pub outcomes: BTreeMap<String, u64>,
    /// Winners who sent their request again, by answer.
    pub replays: BTreeMap<String, u64>,
    /// Winners who tried for another unit, by answer.
    pub second_attempts: BTreeMap<String, u64>,
    /// Calls that were repeated because of an error.
    pub repeats: u64,
    /// Units that buyers hold at the end, as far as they were told.
    pub wins: u64,
    pub released: u64,
    /// Units that came back and found another buyer.
    pub resold: u64,

    // What the books say.
    pub orders: i64,
    pub remaining: i64,
    /// Units that were given away beyond the total.
    pub oversold: i64,
    /// Wins without an order, and units that are neither for sale nor reserved.
    pub lost: i64,
    /// Buyers with more orders than allowed.
    pub duplicates: i64,
    pub books: Vec<OfferBooks>,

    /// From the first call to books that are closed.
    pub seconds: f64,
    /// Of the first wave of buyers alone.
    pub sale_seconds: f64,
    pub reserves_per_second: f64,
    pub latency_ms: Latency,

    /// Every invariant that does not hold, one sentence each. Empty: all is well.
    pub broken: Vec<String>,
}

/// How long a Reserve of the first wave took, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl Latency {
    /// Of samples in microseconds, in any order.
    pub(super) fn of(mut samples_us: Vec<u32>) -> Self {
        samples_us.sort_unstable();
        let at = |per_mille: usize| {
            let last = samples_us.len().saturating_sub(1);
            samples_us.get(last * per_mille / 1_000).map_or(0.0, |us| f64::from(*us) / 1_000.0)
        };
        Self { p50: at(500), p99: at(990), max: at(1_000) }
    }
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waves = [
            ("first attempt", &self.outcomes),
            ("sent again", &self.replays),
            ("second attempt", &self.second_attempts),
        ];
        let rows: Vec<Value> = waves
            .into_iter()
            .flat_map(|(wave, counts)| counts.iter().map(move |count| (wave, count)))
            .map(|(wave, (outcome, count))| {
                json!({"wave": wave, "outcome": outcome, "buyers": count})
            })
            .collect();
        let books: Vec<Value> = self
            .books
            .iter()
            .map(|offer| {
                json!({
                    "sku_id": offer.sku_id,
                    "total": offer.total,
                    "remaining": offer.engine_remaining,
                    "engine": offer.engine_units_reserved,
                    "outbox": offer.live_rows_units,
                    "reserved": offer.sql_reserved,
                    "sold": offer.sql_sold,
                    "orders": offer.live_orders,
                })
            })
            .collect();
        let facts = json!({
            "buyers": self.buyers,
            "sale": format!(
                "{:.2} s, {:.0} calls/s, p50 {:.1} ms, p99 {:.1} ms",
                self.sale_seconds, self.reserves_per_second, self.latency_ms.p50, self.latency_ms.p99
            ),
            "given back": self.released,
            "sold again": self.resold,
            "wins": self.wins,
            "orders": self.orders,
            "remaining": self.remaining,
        });
        writeln!(f, "{}\n\n{}\n\n{}\n", list_table(&rows), list_table(&books), table_of(&facts))?;
        write!(
            f,
            "{} oversold, {} lost, {} duplicates in {:.2} s",
            self.oversold, self.lost, self.duplicates, self.seconds
        )?;
        for sentence in &self.broken {
            write!(f, "\nBROKEN: {sentence}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        assert_eq!(Latency::of(Vec::new()), Latency::default());
        let latency = Latency::of((1..=1_000).rev().map(|us| us * 1_000).collect());
        assert_eq!(latency, Latency { p50: 500.0, p99: 990.0, max: 1_000.0 });
    }
}
