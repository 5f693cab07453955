//! What the alerts of `deploy/prometheus/rules.yml` read, and whether it moves.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use super::scrape::Series;

/// What others are compared with: it is shown, and stays.
const LIMITS: &[&str] = &["process_max_fds", "seckill_offer_total_units"];

/// Series that an expression of PromQL reads: a name and what its labels are to be.
#[derive(Debug)]
struct Selector {
    name: String,
    /// By label: one of these words.
    labels: BTreeMap<String, Vec<String>>,
}

/// Every alert of the rules, with its expression.
pub(crate) fn alerts() -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus/rules.yml");
    let rules: Value = serde_yaml_ng::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let groups = rules["groups"].as_array().unwrap();
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
    let alerts = rules.filter_map(|rule| {
        Some((rule["alert"].as_str()?.to_owned(), rule["expr"].as_str().unwrap().to_owned()))
    });
    alerts.collect()
}

/// Whether the alert reads anything that a server shows, and not only what Prometheus itself adds.
pub(crate) fn reads_metrics(expression: &str) -> bool {
    !selectors(expression).is_empty()
}

/// Each of these alerts reads series that a server shows, and all of them moved between the two
/// readings, or were not there before.
pub(crate) fn assert_seen_by(names: &[&str], before: &Series, after: &Series) {
    let alerts = alerts();
    for name in names {
        let expression = alerts.get(*name).unwrap_or_else(|| panic!("there is no alert {name}"));
        let selectors = selectors(expression);
        assert!(!selectors.is_empty(), "{name} reads nothing of a server: {expression}");
        for selector in selectors {
            let read = after.iter().filter(|(series, _)| selector.takes(series));
            let read: Vec<_> = read.map(|(series, value)| (series, *value)).collect();
            assert!(!read.is_empty(), "{name}: nobody shows {selector:?}");
            let moved = read.iter().any(|(series, value)| before.get(*series) != Some(value));
            let is_limit = LIMITS.contains(&selector.name.as_str());
            assert!(moved || is_limit, "{name}: {selector:?} did not move from {read:?}");
        }
    }
}

fn selectors(expression: &str) -> Vec<Selector> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let (mut found, mut rest) = (Vec::new(), expression);
    while let Some(start) = rest.find(is_of_name) {
        rest = &rest[start..];
        let end = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        let name = &rest[..end];
        rest = &rest[end..];
        let of_server = ["seckill_", "grpc_server_", "process_"];
        if !of_server.iter().any(|first| name.starts_with(first)) {
            continue;
        }
        let mut labels = BTreeMap::new();
        if let Some(inside) = rest.strip_prefix('{') {
            let (inside, behind) = inside.split_once('}').unwrap();
            rest = behind;
            labels = inside.split(',').filter_map(read_matcher).collect();
        }
        found.push(Selector { name: name.to_owned(), labels });
    }
    found
}

/// As in `code=~"Unknown|Internal"`; the job is a label that Prometheus adds.
fn read_matcher(matcher: &str) -> Option<(String, Vec<String>)> {
    let (label, value) = matcher.split_once('=').unwrap();
    let words = value.trim_start_matches('~').trim_matches('"').split('|').map(str::to_owned);
    let words: Vec<String> = words.collect();
    let is_plain =
        |word: &String| word.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
    assert!(!label.ends_with('!') && words.iter().all(is_plain), "{matcher} is not read here");
    (label != "job").then(|| (label.to_owned(), words))
}

impl Selector {
    fn takes(&self, series: &str) -> bool {
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels: BTreeMap<&str, &str> = labels
            .trim_end_matches('}')
            .split(',')
            .filter_map(|label| label.split_once('='))
            .map(|(label, value)| (label, value.trim_matches('"')))
            .collect();
        let agrees = |(label, words): (&String, &Vec<String>)| {
            labels.get(label.as_str()).is_some_and(|value| words.iter().any(|word| word == value))
        };
        name == self.name && self.labels.iter().all(agrees)
    }
}
