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
    let goals = reached(&reports);
    let not_measured = not_measured(&goals);
    Goals { seconds: begun.elapsed().as_secs_f64(), goals, not_measured, reports, failures }
}

/// The rows that have a goal with a number, by that.
fn reached(reports: &[Report]) -> Vec<Reached> {
    let mut found = Vec::new();
    for report in reports {
        for row in &report.figures {
            let goal = row.goal.as_deref().and_then(|goal| goal.split(' ').next());
            if let Some(goal) = goal.filter(|goal| number(goal).is_some()) {
                let (number, scenario) = (goal.to_owned(), report.scenario);
                found.push(Reached { number, scenario, row: row.clone() });
            }
        }
    }
    found.sort_by_key(|reached| number(&reached.number));
    found
}

fn not_measured(goals: &[Reached]) -> Vec<String> {
    let names = (1..=LAST).map(|number| format!("G{number}"));
    names.filter(|name| goals.iter().all(|reached| reached.number != *name)).collect()
}

fn number(goal: &str) -> Option<u32> {
    goal.strip_prefix('G')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{report::Bound, scenario::ALL_SCENARIOS};

    #[test]
    fn every_goal_is_one_of_a_scenario_that_is_run_for_it() {
        let mut numbers: Vec<u32> = Vec::new();
        for scenario in ALL_SCENARIOS {
            for figure in scenario.figures() {
                let goal = figure.goal.and_then(|goal| number(goal.id));
                assert!(goal.is_none() || SCENARIOS.contains(&scenario), "{}", figure.name);
                numbers.extend(goal);
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, (1..=19).collect::<Vec<_>>());
    }

    #[test]
    fn a_goal_without_a_figure_is_named() {
        let row = |goal: &str| Row {
            figure: "f",
            median: 1.0,
            min: 1.0,
            max: 1.0,
            unit: "",
            goal: Some(format!("{goal} {}", Bound::AtMost(2.0))),
            met: Some(true),
            what: "",
        };
        let reached = |number: u32| Reached {
            number: format!("G{number}"),
            scenario: "s",
            row: row(&format!("G{number}")),
        };
        let goals: Vec<Reached> = (1..=19).filter(|number| *number != 7).map(reached).collect();
        assert_eq!(not_measured(&goals), ["G7"]);
    }
}
