//! What the suite prints: a row per fault and database.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::oracle::Verdict;

/// Everything that was run.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
    pub(crate) seed: u64,
    pub(crate) took: Duration,
}

/// One fault on one database, over all its runs; times and units are the worst of them.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    fault: String,
    database: &'static str,
    runs: u64,
    oversold: i64,
    lost: i64,
    /// Seconds from the end of the fault to the next reservation.
    first_win_s: Option<f64>,
    /// Seconds from the end of the fault until nothing was left in the pipeline.
    drained_s: Option<f64>,
    /// Units that were neither sold nor for sale when the fault hit, until it was over.
    unsold_meanwhile: Option<i64>,
    calls: usize,
    problems: Vec<String>,
}

impl Row {
    pub(crate) fn new(fault: &str, database: &'static str) -> Self {
        Self {
            fault: fault.to_owned(),
            database,
            runs: 0,
            oversold: 0,
            lost: 0,
            first_win_s: None,
            drained_s: None,
            unsold_meanwhile: None,
            calls: 0,
            problems: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, verdict: &Verdict) {
        let worst = |so_far: Option<f64>, this: Option<Duration>| {
            let this = this.map(|this| (this.as_secs_f64() * 100.0).round() / 100.0);
            this.map_or(so_far, |this| Some(so_far.map_or(this, |so_far| so_far.max(this))))
        };
        self.runs += 1;
        self.oversold += verdict.oversold;
        self.lost += verdict.lost;
        self.first_win_s = worst(self.first_win_s, verdict.first_win);
        self.drained_s = worst(self.drained_s, verdict.drained);
        self.unsold_meanwhile = self.unsold_meanwhile.max(verdict.in_limbo);
        self.calls += verdict.calls;
        self.problems.extend(verdict.problems.iter().cloned());
    }

    fn is_clean(&self) -> bool {
        self.oversold == 0 && self.lost == 0 && self.problems.is_empty() && self.runs > 0
    }

    pub(crate) fn line(&self) -> String {
        let seconds = |seconds: Option<f64>| seconds.map_or("-".to_owned(), |s| format!("{s:.2}"));
        format!(
            "{:<44} {:<9} {:>4} {:>8} {:>4} {:>9} {:>9} {:>7} {:>7}  {}",
            self.fault,
            self.database,
            self.runs,
            self.oversold,
            self.lost,
            seconds(self.first_win_s),
            seconds(self.drained_s),
            self.unsold_meanwhile.map_or("-".to_owned(), |units| units.to_string()),
            self.calls,
            if self.is_clean() { "ok" } else { "FAILED" },
        )
    }
}

impl Table {
    /// Nothing oversold, nothing lost, and everything came back by itself.
    pub(crate) fn is_clean(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(Row::is_clean)
    }

    pub(crate) fn json(&self) -> String {
        let json = serde_json::json!({
            "seed": self.seed,
            "took_s": self.took.as_secs(),
            "rows": self.rows,
        });
        format!("{json:#}\n")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<44} {:<9} {:>4} {:>8} {:>4} {:>9} {:>9} {:>7} {:>7}",
            "fault", "database", "runs", "oversold", "lost", "win s", "empty s", "unsold", "calls"
        )?;
        for row in &self.rows {
            writeln!(f, "{}", row.line())?;
        }
        for row in self.rows.iter().filter(|row| !row.is_clean()) {
            writeln!(f, "\n{} on {}:", row.fault, row.database)?;
            for problem in &row.problems {
                writeln!(f, "  {problem}")?;
            }
        }
        writeln!(
            f,
            "\nwin s, empty s: from the end of the fault (of a crash: from the crash) to the next\n\
             reservation, and until nothing was left in the pipeline. unsold: units that were\n\
             neither sold nor for sale when the fault hit, until it was over.\n"
        )?;
        let (oversold, lost): (i64, i64) = self
            .rows
            .iter()
            .fold((0, 0), |(oversold, lost), row| (oversold + row.oversold, lost + row.lost));
        let failed = self.rows.iter().filter(|row| !row.is_clean()).count();
        let runs: u64 = self.rows.iter().map(|row| row.runs).sum();
        write!(
            f,
            "{runs} runs in {} s with seed {}: {oversold} oversold, {lost} lost, {failed} failed",
            self.took.as_secs(),
            self.seed
        )
    }
}
