//! `goals`: every goal of the documentation, measured in one go.

use std::time::Instant;

use serde::Serialize;

use super::{
    Error, Plan, Scenario,
    report::{Report, Row},
    run as run_scenario,
};

/// What has goals, in the order in which it is measured.
const SCENARIOS: [Scenario; 8] = [
    Scenario::SoldOut,
    Scenario::Steady,
    Scenario::Drain,
    Scenario::Streams,
    Scenario::Peers,
    Scenario::FarRedis,
    Scenario::Overload,
    Scenario::Watch,
];
/// G1 to this.
const LAST: usize = 19;

/// One goal, and what it came to.
#[derive(Debug, Clone, Serialize)]
pub struct Reached {
    /// As in `G7`.
    pub number: String,
    pub scenario: &'static str,
    #[serde(flatten)]
    pub row: Row,
}

/// Everything that was measured for the goals.
#[derive(Debug, Clone, Serialize)]
pub struct Goals {
    pub seconds: f64,
    /// By their number; one may be measured in two ways.
    pub goals: Vec<Reached>,
    /// Those without a figure.
    pub not_measured: Vec<String>,
    pub reports: Vec<Report>,
    /// Scenarios that did not run to their end, and why.
    pub failures: Vec<String>,
}

impl Goals {
    /// Whether everything ran, and all books agree; a goal that is missed is a figure like any other.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.failures.is_empty() && self.reports.iter().all(|report| report.broken.is_empty())
    }
}

/// Runs what has goals, one after the other. What fails is told, and the others run.
pub async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Goals {
    let begun = Instant::now();
    let (mut reports, mut failures) = (Vec::new(), Vec::new());
    for scenario in SCENARIOS {
        let name = scenario.name();
        let plan = Plan { scenario, ..plan.clone() };
        match run_scenario(&plan, &|what| tell(&format!("{name}: {what}"))).await {
            Ok(report) => reports.push(report),
            // It says what it needs, and this machine does not have it.
            Err(Error::Usage(why)) => tell(&format!("{name}: left out: {why}")),
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    let mut goals = reached(&reports);
    goals.sort_by_key(|reached| number(&reached.number));
    let not_measured = (1..=LAST)
        .filter(|number| goals.iter().all(|reached| reached.number != format!("G{number}")))
        .map(|number| format!("G{number}"))
        .collect();
    Goals { seconds: begun.elapsed().as_secs_f64(), goals, not_measured, reports, failures }
}

/// The rows that have a goal with a number.
fn reached(reports: &[Report]) -> Vec<Reached> {
    let rows = reports.iter().flat_map(|report| {
        report.figures.iter().filter_map(|row| {
            let goal = row.goal.as_deref()?.split(' ').next()?;
            number(goal)?;
            Some(Reached { number: goal.to_owned(), scenario: report.scenario, row: row.clone() })
        })
    });
    rows.collect()
}

fn number(goal: &str) -> Option<u32> {
    goal.strip_prefix('G')?.parse().ok()
}
