//! Reports as tables, for people.

use serde_json::{Value, json};

use crate::{
    bench::{
        goals::Goals,
        report::{Report, Row},
    },
    cli::output::list_table,
};

/// The table, and below it what a reader must know.
pub(super) fn shown(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}: {} run(s) in {:.0} s, seed {}, {}\n{}, {} core(s), {} MiB, Linux {}, load average {}, \
         fsync {} µs\nseckill {} ({}, {}), engine {}, database {}\n\n",
        report.scenario,
        report.repeats,
        report.seconds,
        report.seed,
        report.begin_time,
        machine.processor,
        machine.cores,
        machine.memory_mib,
        machine.kernel,
        machine.load_average,
        machine.fsync_us,
        machine.seckill,
        machine.commit,
        machine.build,
        machine.engine,
        machine.database,
    );
    let rows: Vec<Value> = report.figures.iter().map(shown_row).collect();
    text.push_str(&list_table(&rows));
    text.push('\n');
    for note in &report.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    for sentence in &report.broken {
        text.push_str(&format!("\nBROKEN: {sentence}"));
    }
    text
}

fn shown_row(row: &Row) -> Value {
    json!({
        "figure": row.figure,
        "median": rounded(row.median),
        "min": rounded(row.min),
        "max": rounded(row.max),
        "unit": row.unit,
        "goal": row.goal.clone().unwrap_or_default(),
        "met": row.met.map(|met| if met { "met" } else { "MISSED" }).unwrap_or_default(),
    })
}

/// The goals, and what is missing among them.
pub(super) fn shown_goals(goals: &Goals) -> String {
    let rows: Vec<Value> = goals.goals.iter().map(|reached| shown_row(&reached.row)).collect();
    let met = goals.goals.iter().filter(|reached| reached.row.met == Some(true)).count();
    let mut text = list_table(&rows);
    text.push_str(&format!(
        "\n\n{met} of {} figures meet their goals, in {:.0} s",
        rows.len(),
        goals.seconds
    ));
    if !goals.not_measured.is_empty() {
        text.push_str(&format!("\nnot measured: {}", goals.not_measured.join(", ")));
    }
    for report in &goals.reports {
        for note in &report.notes {
            text.push_str(&format!("\nnote: {}: {note}", report.scenario));
        }
        for sentence in &report.broken {
            text.push_str(&format!("\nBROKEN: {}: {sentence}", report.scenario));
        }
    }
    for failure in &goals.failures {
        text.push_str(&format!("\nFAILED: {failure}"));
    }
    text
}

/// Four digits are more than any of this is exact to.
fn rounded(figure: f64) -> String {
    match figure.abs() {
        size if size >= 100.0 => format!("{figure:.0}"),
        size if size >= 10.0 => format!("{figure:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{figure:.2}"),
        size if size >= 0.01 => format!("{figure:.3}"),
        _ => format!("{figure:.5}"),
    }
}
