//! Figures of many runs, what they should be, and whether they are.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::machine::Machine;

/// Something that a scenario measures.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    pub name: &'static str,
    pub unit: &'static str,
    /// What it is, in a sentence.
    pub what: &'static str,
    pub goal: Option<Goal>,
}

/// What a figure should be; `id` is empty where it has no number in the documentation.
#[derive(Debug, Clone, Copy)]
pub struct Goal {
    pub id: &'static str,
    pub bound: Bound,
}

/// On which side of a number a figure should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Figure {
    #[must_use]
    pub const fn plain(name: &'static str, unit: &'static str, what: &'static str) -> Self {
        Self { name, unit, what, goal: None }
    }

    #[must_use]
    pub const fn goal(self, id: &'static str, bound: Bound) -> Self {
        Self { goal: Some(Goal { id, bound }), ..self }
    }
}

impl Bound {
    fn is_met(self, figure: f64) -> bool {
        match self {
            Self::AtMost(most) => figure <= most,
            Self::AtLeast(least) => figure >= least,
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::AtLeast(least) => write!(f, ">= {least}"),
        }
    }
}

/// What one run came to.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Run {
    pub figures: BTreeMap<&'static str, f64>,
    /// What a figure is too small for: counts by reason, by script.
    pub details: Map<String, Value>,
    /// What a reader of the figures must know.
    pub notes: Vec<String>,
    /// What does not hold. The figures of such a run are void.
    #[serde(skip)]
    pub broken: Vec<String>,
}

impl Run {
    pub fn set(&mut self, name: &'static str, figure: f64) {
        self.figures.insert(name, figure);
    }

    pub fn detail(&mut self, name: &str, value: impl Serialize) {
        self.details.insert(name.to_owned(), json!(value));
    }

    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }
}

/// One figure over all runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub figure: &'static str,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub unit: &'static str,
    pub goal: Option<String>,
    /// Whether the median is as it should be.
    pub met: Option<bool>,
    pub what: &'static str,
}

/// Everything that a bench came to.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub scenario: &'static str,
    pub quick: bool,
    pub repeats: usize,
    pub seed: u64,
    pub begin_time: String,
    pub seconds: f64,
    pub machine: Machine,
    /// Settings that are not the defaults, and the command line's own.
    pub settings: Map<String, Value>,
    pub figures: Vec<Row>,
    pub notes: Vec<String>,
    pub runs: Vec<Run>,
    /// What does not hold, one sentence each. Then there are no figures.
    pub broken: Vec<String>,
}

impl Report {
    /// Puts the runs together; if anything does not hold in one of them, there are no figures.
    #[must_use]
    pub fn with(mut self, figures: &[Figure], runs: Vec<Run>) -> Self {
        for (nth, run) in runs.iter().enumerate() {
            let about = |text: &String| format!("run {}: {text}", nth + 1);
            self.broken.extend(run.broken.iter().map(about));
            self.notes.extend(run.notes.iter().map(about));
        }
        if self.broken.is_empty() {
            self.figures = figures.iter().filter_map(|figure| row(figure, &runs)).collect();
            self.runs = runs;
        }
        self
    }
}

/// The median and the ends; `None` where no run measured it.
fn row(figure: &Figure, runs: &[Run]) -> Option<Row> {
    let mut measured: Vec<f64> =
        runs.iter().filter_map(|run| run.figures.get(figure.name).copied()).collect();
    measured.sort_by(f64::total_cmp);
    let (min, max) = (*measured.first()?, *measured.last()?);
    let middle = measured.len() / 2;
    let median = if measured.len() % 2 == 1 {
        measured[middle]
    } else {
        f64::midpoint(measured[middle - 1], measured[middle])
    };
    let goal = figure.goal.map(|goal| format!("{} {}", goal.id, goal.bound).trim().to_owned());
    let met = figure.goal.map(|goal| goal.bound.is_met(median));
    let Figure { name, unit, what, .. } = *figure;
    Some(Row { figure: name, median, min, max, unit, goal, met, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Figure =
        Figure::plain("cost", "µs", "What it costs.").goal("G0", Bound::AtMost(2.0));

    fn empty() -> Report {
        Report {
            scenario: "none",
            quick: true,
            repeats: 0,
            seed: 1,
            begin_time: String::new(),
            seconds: 0.0,
            machine: Machine::default(),
            settings: Map::new(),
            figures: Vec::new(),
            notes: Vec::new(),
            runs: Vec::new(),
            broken: Vec::new(),
        }
    }

    fn runs(figures: &[f64]) -> Vec<Run> {
        let run =
            |figure: &f64| Run { figures: BTreeMap::from([("cost", *figure)]), ..Run::default() };
        figures.iter().map(run).collect()
    }

    #[test]
    fn the_median_decides_and_the_ends_are_shown() {
        let found = row(&COST, &runs(&[9.0, 1.0, 2.0])).expect("it was measured");
        assert_eq!((found.median, found.min, found.max), (2.0, 1.0, 9.0));
        assert_eq!((found.goal.as_deref(), found.met), (Some("G0 <= 2"), Some(true)));
        let found = row(&COST, &runs(&[1.0, 4.0])).expect("it was measured");
        assert_eq!((found.median, found.met), (2.5, Some(false)));
        assert!(Bound::AtLeast(0.9).is_met(0.9) && !Bound::AtLeast(0.9).is_met(0.89));
    }

    #[test]
    fn one_broken_run_voids_the_figures_of_all() {
        let report = |runs| empty().with(&[COST], runs);
        assert_eq!(report(runs(&[1.0, 2.0])).figures.len(), 1);
        let mut runs = runs(&[1.0, 2.0]);
        runs[1].broken.push("a unit is missing".to_owned());
        runs[1].note("it was windy");
        let report = report(runs);
        assert_eq!(report.broken, ["run 2: a unit is missing"]);
        assert_eq!(report.notes, ["run 2: it was windy"]);
        assert!(report.figures.is_empty() && report.runs.is_empty(), "{report:?}");
    }

    #[test]
    fn what_no_run_measured_is_not_shown() {
        assert_eq!(row(&COST, &[Run::default()]), None);
        assert_eq!(row(&COST, &[]), None);
    }
}
