//! A report that is one file: tables, and charts as SVG. It works offline, in the light and the dark.
//!
//! It is made of the JSON that a bench wrote, of this run or of an earlier one.

use serde_json::Value;

mod charts;
mod style;

use charts::{bars, by_number, mark, percentiles};

/// A page over these reports; what `bench goals` wrote counts as all of its own.
#[must_use]
pub fn page(reports: &[Value]) -> String {
    let mut body = String::from("<h1>seckill bench</h1>\n");
    let mut all: Vec<&Value> = Vec::new();
    for report in reports {
        if let Some(goals) = report["goals"].as_array() {
            body.push_str(&goals_table(report, goals));
            all.extend(report["reports"].as_array().into_iter().flatten());
        } else {
            all.push(report);
        }
    }
    if let Some(first) = all.first() {
        body.push_str(&machine(&first["machine"]));
    }
    for report in all {
        body.push_str(&section(report));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>seckill bench</title>\n\
         <style>{}</style>\n<main>\n{body}</main>\n</html>\n",
        style::CSS
    )
}

/// Every goal in a line, with its place left or right of its bound.
fn goals_table(report: &Value, goals: &[Value]) -> String {
    let met = goals.iter().filter(|goal| goal["met"] == true).count();
    let mut text = format!(
        "<p class=\"lead\">{met} of {} figures meet their goals. Measured in {:.0} s.</p>\n",
        goals.len(),
        number(&report["seconds"])
    );
    text.push_str(
        "<p>The line in the middle is the goal; right of it is better, and each grid line is twice as \
         good or half as good. The bar goes from the worst to the best run.</p>\n",
    );
    text.push_str(&table(goals, true));
    for (title, key) in [("Not measured", "not_measured"), ("Did not run to the end", "failures")] {
        let list: Vec<String> = report[key].as_array().into_iter().flatten().map(escaped).collect();
        if !list.is_empty() {
            text.push_str(&format!("<p><b>{title}:</b> {}</p>\n", list.join("; ")));
        }
    }
    text
}

fn machine(machine: &Value) -> String {
    let of = |name: &str| escaped(&machine[name]);
    format!(
        "<p class=\"machine\">{}, {} cores, {} MiB, Linux {}, fsync {} µs, load average {} before the \
         first run. seckill {} ({}, {}), engine {}, database {}.</p>\n",
        of("processor"),
        of("cores"),
        of("memory_mib"),
        of("kernel"),
        of("fsync_us"),
        of("load_average"),
        of("seckill"),
        of("commit"),
        of("build"),
        of("engine"),
        of("database"),
    )
}

/// One scenario: what was measured, in tables and charts, and what has to be known of it.
fn section(report: &Value) -> String {
    let mut text = format!(
        "<section>\n<h2>{}</h2>\n<p>{} run(s) in {:.0} s, seed {}, {}.</p>\n",
        escaped(&report["scenario"]),
        escaped(&report["repeats"]),
        number(&report["seconds"]),
        escaped(&report["seed"]),
        escaped(&report["begin_time"]),
    );
    for sentence in report["broken"].as_array().into_iter().flatten() {
        text.push_str(&format!("<p class=\"broken\">BROKEN: {}</p>\n", escaped(sentence)));
    }
    let figures = report["figures"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rates: Vec<&Value> = figures.iter().filter(|row| row["unit"] == "1/s").collect();
    if rates.len() > 1 {
        text.push_str(&bars("A second", &rates));
    }
    let runs = report["runs"].as_array().map(Vec::as_slice).unwrap_or_default();
    text.push_str(&percentiles("Latency by percentile, ms", runs));
    text.push_str(&by_number(runs));
    text.push_str(&table(figures, false));
    let notes: Vec<String> = report["notes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|note| format!("<li>{}</li>", escaped(note)))
        .collect();
    if !notes.is_empty() {
        text.push_str(&format!(
            "<details><summary>Notes</summary><ul>{}</ul></details>\n",
            notes.concat()
        ));
    }
    text.push_str("</section>\n");
    text
}

fn table(rows: &[Value], marks: bool) -> String {
    let mut text = String::from("<table>\n<tr><th>goal</th><th>figure</th><th>median</th>");
    text.push_str("<th>min–max</th><th></th><th></th><th>what it is</th></tr>\n");
    for row in rows {
        let goal = row["goal"].as_str().unwrap_or_default();
        let met = match row["met"].as_bool() {
            Some(true) => "<span class=\"met\">met</span>",
            Some(false) => "<span class=\"missed\">missed</span>",
            None => "",
        };
        let drawn = if marks { mark(row) } else { String::new() };
        text.push_str(&format!(
            "<tr><td>{}</td><td><code>{}</code></td><td class=\"n\">{} {}</td>\
             <td class=\"n\">{}–{}</td><td>{met}</td><td>{drawn}</td><td>{}</td></tr>\n",
            escape(goal),
            escaped(&row["figure"]),
            shown(number(&row["median"])),
            escaped(&row["unit"]),
            shown(number(&row["min"])),
            shown(number(&row["max"])),
            escaped(&row["what"]),
        ));
    }
    text.push_str("</table>\n");
    text
}

/// Three digits; more are not exact.
fn shown(figure: f64) -> String {
    match figure.abs() {
        size if size >= 100.0 => format!("{figure:.0}"),
        size if size >= 10.0 => format!("{figure:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{figure:.2}"),
        size if size >= 0.01 => format!("{figure:.3}"),
        _ => format!("{figure:.5}"),
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

/// A text or a number, harmless inside of HTML.
fn escaped(value: &Value) -> String {
    match value {
        Value::String(text) => escape(text),
        Value::Null => String::new(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            escape(&value.to_string())
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> Value {
        let row = |figure: &str, median: f64, goal: Value, met: Value| {
            json!({
                "figure": figure, "median": median, "min": median / 2.0, "max": median * 2.0,
                "unit": "1/s", "goal": goal, "met": met, "what": "a <b> & c",
            })
        };
        json!({
            "scenario": "steady", "repeats": 2, "seconds": 3.0, "seed": 1, "begin_time": "now",
            "machine": {"processor": "a <fast> one"}, "broken": [], "notes": ["x < y"],
            "figures": [
                row("wins_over_noop", 0.5, json!("G3 >= 0.35"), json!(true)),
                row("win_cpu_ratio", 3.0, json!("G4 <= 2"), json!(false)),
                row("wins_per_s", 5_000.0, Value::Null, Value::Null),
            ],
            "runs": [{"details": {
                "percentiles_ms": {"wins": {"50": 1.0, "99": 8.0, "100": 90.0}},
                "by_number": {"offers <b>": {"a win": {"100": 9.0, "1000": 10.0, "10000": 80.0}}},
            }}],
        })
    }

    #[test]
    fn a_page_is_whole_and_asks_nobody() {
        let page = page(&[report()]);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        for word in ["http://", "https://", "<script", "src=", "NaN", "<fast>"] {
            let found = page.replace("http://www.w3.org/2000/svg", "").contains(word);
            assert!(!found, "{word}");
        }
        assert!(page.contains("a &lt;fast&gt; one") && page.contains("prefers-color-scheme: dark"));
        assert!(page.contains(">met<") && page.contains(">missed<"));
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        assert_eq!(page.matches("<svg").count(), 3, "bars, and lines by percentile and by number");
        assert!(page.contains("offers &lt;b&gt;"));
        let (few, many) = (page.find(">1000<"), page.find(">10000<"));
        assert!(few.is_some() && few < many, "by the number, not by its first digit");
    }

    #[test]
    fn goals_are_drawn_beside_their_bounds() {
        let first = report()["figures"][0].clone();
        let goals = json!({
            "seconds": 9.0, "goals": [first], "not_measured": ["G5"], "failures": [],
            "reports": [report()],
        });
        let page = page(&[goals]);
        assert!(page.contains("1 of 1 figures meet") && page.contains("Not measured:</b> G5"));
        assert_eq!(page.matches("<svg").count(), 4);
    }
}
