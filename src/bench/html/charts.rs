//! Charts, as SVG that we write ourselves; every colour is a class of the page.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{escape, escaped, number, shown};

const SVG: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\"";
/// How many times better or worse than its goal a mark may be, as a power of two.
const OCTAVES: f64 = 3.0;
/// Colours of lines.
const COLOURS: usize = 4;

/// Where a figure lies beside its goal, from its worst to its best run: right is better.
pub(super) fn mark(row: &Value) -> String {
    let Some((at_least, bound)) = bound_of(row) else { return String::new() };
    const WIDTH: f64 = 180.0;
    let place = |figure: f64| {
        let better = if at_least { figure / bound } else { bound / figure };
        let octaves = better.max(f64::MIN_POSITIVE).log2().clamp(-OCTAVES, OCTAVES);
        (octaves / OCTAVES + 1.0) / 2.0 * WIDTH
    };
    let class = if row["met"] == true { "good" } else { "bad" };
    let (min, max) = (place(number(&row["min"])), place(number(&row["max"])));
    let (from, to) = (min.min(max), min.max(max));
    let at = place(number(&row["median"]));
    let mut text = format!("{SVG} width=\"{WIDTH}\" height=\"18\" viewBox=\"0 0 {WIDTH} 18\">");
    for step in 0..=6 {
        let x = f64::from(step) / 6.0 * WIDTH;
        let class = if step == 3 { "goal" } else { "grid" };
        text.push_str(&format!("<path class=\"{class}\" d=\"M{x:.1} 0V18\"/>"));
    }
    text.push_str(&format!(
        "<path class=\"{class}\" stroke-width=\"3\" d=\"M{from:.1} 9H{to:.1}\"/>\
         <circle class=\"{class}\" cx=\"{at:.1}\" cy=\"9\" r=\"4\"/></svg>"
    ));
    text
}

/// `G3 >= 0.35`: whether more is better, and the bound.
fn bound_of(row: &Value) -> Option<(bool, f64)> {
    let text = row["goal"].as_str()?;
    let mut words = text.rsplit(' ');
    let bound: f64 = words.next()?.parse().ok()?;
    let at_least = words.next()? == ">=";
    (bound > 0.0).then_some((at_least, bound))
}

/// One bar for each figure, with the ends of its runs.
pub(super) fn bars(title: &str, rows: &[&Value]) -> String {
    const LEFT: f64 = 240.0;
    const WIDTH: f64 = 560.0;
    const STEP: f64 = 24.0;
    let most = rows.iter().map(|row| number(&row["max"])).fold(f64::MIN_POSITIVE, f64::max);
    let height = 26.0 + STEP * rows.len() as f64;
    let all = LEFT + WIDTH + 80.0;
    let mut text = format!(
        "{SVG} width=\"{all}\" height=\"{height}\" viewBox=\"0 0 {all} {height}\">\
         <text class=\"faint\" x=\"0\" y=\"14\">{}</text>",
        escape(title)
    );
    for (nth, row) in rows.iter().enumerate() {
        let y = 24.0 + STEP * nth as f64;
        let length = |name: &str| number(&row[name]) / most * WIDTH;
        let (median, min, max) = (length("median"), length("min"), length("max"));
        text.push_str(&format!(
            "<text x=\"0\" y=\"{:.1}\">{}</text>\
             <rect class=\"bar\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{median:.1}\" height=\"14\"/>\
             <path class=\"range\" d=\"M{:.1} {:.1}H{:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            y + 12.0,
            escaped(&row["figure"]),
            LEFT + min,
            y + 7.0,
            LEFT + max,
            LEFT + median.max(max) + 8.0,
            y + 12.0,
            shown(number(&row["median"])),
        ));
    }
    text.push_str("</svg>\n");
    text
}

/// Some lines by their names; each has figures by what is written below them.
type Lines = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

/// The percentiles of some latencies: the median over the runs, on a logarithmic scale.
pub(super) fn percentiles(title: &str, runs: &[Value]) -> String {
    let mut found = Lines::new();
    for run in runs {
        gather(&mut found, &run["details"]["percentiles_ms"]);
    }
    lines(title, found, |percent| match percent {
        most if most >= 100.0 => "max".to_owned(),
        percent => format!("p{percent}"),
    })
}

/// A chart for each title: what something came to by how many there were, both logarithmic.
pub(super) fn by_number(runs: &[Value]) -> String {
    let mut charts: BTreeMap<&str, Lines> = BTreeMap::new();
    for run in runs {
        for (title, found) in run["details"]["by_number"].as_object().into_iter().flatten() {
            gather(charts.entry(title).or_default(), found);
        }
    }
    charts
        .into_iter()
        .map(|(title, found)| lines(title, found, |number| number.to_string()))
        .collect()
}

fn gather(lines: &mut Lines, found: &Value) {
    for (name, points) in found.as_object().into_iter().flatten() {
        for (below, figure) in points.as_object().into_iter().flatten() {
            let line = lines.entry(name.clone()).or_default();
            line.entry(below.clone()).or_default().push(number(figure));
        }
    }
}

fn lines(title: &str, series: Lines, below: impl Fn(f64) -> String) -> String {
    const LEFT: f64 = 60.0;
    const TOP: f64 = 30.0;
    const WIDTH: f64 = 560.0;
    const HEIGHT: f64 = 200.0;
    let mut drawn: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let mut percents: Vec<f64> = Vec::new();
    for (name, points) in series {
        let mut line: Vec<(f64, f64)> = points
            .into_iter()
            .filter_map(|(percent, ms)| Some((percent.parse().ok()?, super::super::median(ms))))
            .filter(|(_, ms)| *ms > 0.0)
            .collect();
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        percents.extend(line.iter().map(|point| point.0));
        if !line.is_empty() {
            drawn.push((name, line));
        }
    }
    percents.sort_by(f64::total_cmp);
    percents.dedup();
    let all = || drawn.iter().flat_map(|(_, line)| line.iter().map(|point| point.1));
    let low = all().fold(f64::INFINITY, f64::min).log10().floor();
    let high = all().fold(f64::MIN_POSITIVE, f64::max).log10().ceil().max(low + 1.0);
    if drawn.is_empty() || !low.is_finite() {
        return String::new();
    }
    let x = |percent: f64| {
        let nth = percents.iter().position(|known| *known == percent).unwrap_or(0);
        LEFT + nth as f64 / (percents.len().max(2) - 1) as f64 * WIDTH
    };
    let y = |ms: f64| TOP + HEIGHT - (ms.log10() - low) / (high - low) * HEIGHT;
    let (wide, tall) = (LEFT + WIDTH + 240.0, TOP + HEIGHT + 30.0);
    let mut text = format!(
        "{SVG} width=\"{wide}\" height=\"{tall}\" viewBox=\"0 0 {wide} {tall}\">\
         <text class=\"faint\" x=\"0\" y=\"14\">{}</text>",
        escape(title)
    );
    let mut decade = low;
    while decade <= high {
        let (ms, at) = (10f64.powf(decade), y(10f64.powf(decade)));
        text.push_str(&format!(
            "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{:.1}\"/>\
             <text class=\"faint\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>",
            LEFT + WIDTH,
            LEFT - 8.0,
            at + 4.0
        ));
        decade += 1.0;
    }
    for percent in &percents {
        let name = below(*percent);
        text.push_str(&format!(
            "<text class=\"faint\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
            x(*percent),
            TOP + HEIGHT + 20.0
        ));
    }
    for (nth, (name, line)) in drawn.iter().enumerate() {
        let path: Vec<String> =
            line.iter().map(|(percent, ms)| format!("{:.1} {:.1}", x(*percent), y(*ms))).collect();
        let dots: String = path
            .iter()
            .map(|at| {
                let (x, y) = at.split_once(' ').unwrap_or_default();
                format!("<circle class=\"dot\" cx=\"{x}\" cy=\"{y}\" r=\"3\"/>")
            })
            .collect();
        let at = TOP + 14.0 + 20.0 * nth as f64;
        let beside = LEFT + WIDTH + 24.0;
        text.push_str(&format!(
            "<g class=\"s{}\"><path class=\"line\" d=\"M{}\"/>{dots}\
             <rect class=\"dot\" x=\"{beside}\" y=\"{:.1}\" width=\"12\" height=\"12\"/></g>\
             <text x=\"{:.1}\" y=\"{at:.1}\">{}</text>",
            nth % COLOURS,
            path.join("L"),
            at - 11.0,
            beside + 20.0,
            escape(name)
        ));
    }
    text.push_str("</svg>\n");
    text
}
