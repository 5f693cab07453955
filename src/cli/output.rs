//! Printing, all of it: data on stdout, everything else on stderr.

use std::{
    io::{self, IsTerminal as _, Write as _},
    panic::PanicHookInfo,
    time::Duration,
};

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::ProgressBar;
use serde_json::Value;

use super::{Exit, Output, failure::Failure};
use crate::config;

/// Prints what a command has to say, in the way that was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Printer {
    output: Output,
    /// Whether stderr may be coloured.
    color: bool,
}

impl Printer {
    pub(super) fn new(output: Output) -> Self {
        Self { output, color: io::stderr().is_terminal() && !config::no_color() }
    }

    pub(super) fn is_json(self) -> bool {
        self.output == Output::Json
    }

    /// Whether a table may be drawn over itself.
    pub(super) fn is_live(self) -> bool {
        self.output == Output::Table && io::stdout().is_terminal()
    }

    /// The lines and columns of the terminal that data goes to.
    pub(super) fn terminal_size(self) -> (usize, usize) {
        match rustix::termios::tcgetwinsize(io::stdout()) {
            // Some terminals do not tell.
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
                (size.ws_row.into(), size.ws_col.into())
            }
            Ok(_) | Err(_) => (24, 80),
        }
    }

    /// One answer: a line of JSON, or its members one below the other and its lists as tables.
    pub(super) fn answer(self, answer: &Value) {
        match self.output {
            Output::Json => self.data(&answer.to_string()),
            Output::Table => self.data(&table_of(answer)),
        }
    }

    /// Shows that work is under way, where somebody watches.
    pub(super) fn spinner(self, text: &'static str) -> ProgressBar {
        if !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let spinner = ProgressBar::new_spinner().with_message(text);
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner
    }

    /// Lines of data.
    pub(super) fn data(self, text: &str) {
        let text = text.trim_end_matches('\n');
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Ok(()) => {}
            // Whoever read has enough, as `head` does.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                std::process::exit(Exit::Ok.code().into());
            }
            Err(error) => {
                note_line(&format!("seckill: stdout can't be written: {error}"));
                std::process::exit(Exit::Internal.code().into());
            }
        }
    }

    /// Something for the one who watches, not for the one who reads the data.
    pub(super) fn note(self, text: &str) {
        note_line(text);
    }

    /// What went wrong: text on stderr, or an object on stdout for machines.
    pub(super) fn failure(self, failure: &Failure) -> Exit {
        if self.is_json() {
            self.data(&failure.json().to_string());
        } else if self.color {
            note_line(&format!("\x1b[1;31merror:\x1b[0m {}", failure.text()));
        } else {
            note_line(&format!("error: {}", failure.text()));
        }
        failure.exit()
    }
}

/// The hook of panics: one line, since the exit code says the rest.
pub(super) fn panicked(info: &PanicHookInfo<'_>) {
    let text = info.payload_as_str().unwrap_or("no message").replace('\n', " ");
    let place = info.location().map(|place| format!(" at {place}")).unwrap_or_default();
    tracing::error!(place, text, "panic");
    note_line(&format!("seckill: a fault of ours{place}: {text}"));
}

fn note_line(text: &str) {
    // Where stderr is closed, nobody is there to be told.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// An answer as text: its plain members in two columns, then each list of objects as a table.
pub(super) fn table_of(answer: &Value) -> String {
    let mut facts = Vec::new();
    let mut lists = Vec::new();
    collect("", answer, &mut facts, &mut lists);
    let mut parts = Vec::new();
    if !facts.is_empty() {
        let mut table = plain_table();
        for (name, value) in facts {
            table.add_row([name, value]);
        }
        parts.push(trimmed(&table));
    }
    for (name, rows) in lists {
        parts.push(if rows.is_empty() {
            format!("no {}", name.replace('_', " "))
        } else {
            list_table(rows)
        });
    }
    parts.join("\n\n")
}

/// Objects as rows, one column per member of the first; a column that is empty throughout is left
/// out.
pub(super) fn list_table(rows: &[Value]) -> String {
    let Some(Value::Object(first)) = rows.first() else {
        return String::new();
    };
    let columns: Vec<&String> = first
        .keys()
        .filter(|column| rows.iter().any(|row| is_plain(&row[column.as_str()])))
        .collect();
    let mut table = plain_table();
    table.set_header(columns.iter().map(|column| column.to_uppercase()));
    for row in rows {
        table.add_row(columns.iter().map(|column| shown(&row[column.as_str()])));
    }
    trimmed(&table)
}

fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

/// The table without the blanks that fill its right side.
fn trimmed(table: &Table) -> String {
    let lines: Vec<String> = table
        .lines()
        .map(|line| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned())
        .collect();
    lines.join("\n")
}

fn collect<'a>(
    prefix: &str,
    value: &'a Value,
    facts: &mut Vec<(String, String)>,
    lists: &mut Vec<(String, &'a Vec<Value>)>,
) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            Value::Null => {}
            Value::String(text) if text.is_empty() => {}
            Value::Object(_) => collect(&name, value, facts, lists),
            Value::Array(rows) if rows.iter().all(Value::is_object) => lists.push((name, rows)),
            Value::Array(_) | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
                facts.push((name, shown(value)));
            }
        }
    }
}

fn is_plain(value: &Value) -> bool {
    match value {
        Value::Bool(_) | Value::Number(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Array(values) => values.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_facts_and_tables() {
        let answer = json!({
            "outcome": "RESERVED",
            "reservation": {"reservation_id": "r-1", "expire_time": null},
            "offers": [
                {"sku_id": "s", "remaining": 7, "frozen": false, "warm_time": null},
                {"sku_id": "longer", "remaining": null, "frozen": true, "warm_time": null},
            ],
        });
        assert_eq!(
            table_of(&answer),
            "outcome                     RESERVED\n\
             reservation.reservation_id  r-1\n\n\
             SKU_ID  REMAINING  FROZEN\n\
             s       7          no\n\
             longer  -          yes"
        );
        assert_eq!(table_of(&json!({"activities": []})), "no activities");
    }
}
