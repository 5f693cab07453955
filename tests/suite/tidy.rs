//! Keeps house: who may name what, and in which direction modules look.

use std::{
    fs,
    path::{Path, PathBuf},
};

use seckill::{
    api::access::{Need, TABLE},
    metrics::FAMILIES,
};

/// A word of a library, and the only places in `src` that may name it.
const NAMES: &[(&str, &[&str])] = &[
    ("redis::aio", &["engine/redis.rs", "engine/redis/"]),
    ("mlua", &["engine/embedded/", "engine/embedded.rs"]),
    (
        "sea_orm",
        &[
            "database.rs",
            "database/",
            "entity/",
            "error.rs",
            "outbox/",
            "orders.rs",
            "books.rs",
            "reservations.rs",
            "reservations/",
            "activities.rs",
            "activities/",
            "adjustments.rs",
            "admission/catalog.rs",
            "audit.rs",
            "reconcile.rs",
            "reconcile/",
            "recovery.rs",
            "recovery/",
            "server.rs",
            "server/tenure.rs",
            "cli/migrate.rs",
            "telemetry.rs",
            "bench/",
            "simulator/",
        ],
    ),
    (
        "tonic",
        &[
            "api.rs",
            "api/",
            "server.rs",
            "server/",
            "cli.rs",
            "cli/",
            "config/",
            "telemetry.rs",
            "telemetry/",
            "bench.rs",
            "bench/",
        ],
    ),
    ("clap", &["cli.rs", "cli/"]),
    ("axum", &["http.rs", "http/"]),
    ("rustls", &["server/tls.rs", "server/listener.rs", "cli/credentials.rs", "cli/failure.rs"]),
    ("x509_parser", &["server/tls.rs"]),
    ("subtle", &["api/access.rs"]),
    ("metrics_exporter_prometheus", &["metrics.rs"]),
    ("opentelemetry", &["telemetry.rs", "telemetry/"]),
];

/// From bottom to top: a module may use those below it and its own, never those above.
const LAYERS: &[(&str, &[&str])] = &[
    ("domain", &[]),
    ("failpoints", &[]),
    ("circuit", &[]),
    ("config", &["domain"]),
    ("telemetry", &["config"]),
    ("entity", &["domain"]),
    ("metrics", &["domain"]),
    ("engine", &["domain", "failpoints", "metrics"]),
    ("database", &["domain", "entity", "metrics"]),
    ("error", &["database", "domain", "engine"]),
    ("offer", &["domain", "engine"]),
    ("orders", &["database", "domain", "entity", "outbox"]),
    ("audit", &["database", "domain", "entity", "error"]),
    (
        "recovery",
        &[
            "audit",
            "circuit",
            "database",
            "domain",
            "engine",
            "entity",
            "error",
            "failpoints",
            "metrics",
            "offer",
            "outbox",
        ],
    ),
    ("accept", &[]),
    ("http", &["accept", "api", "circuit", "engine", "metrics", "recovery"]),
];

fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    walk(&root, &mut found);
    found.sort();
    assert!(found.len() > 30, "the sources are not where this test looks");
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).unwrap())
    };
    found.into_iter().map(read).collect()
}

/// Code without comments.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.split("//").next().unwrap_or("")))
}

#[test]
fn a_library_is_named_in_its_own_places_only() {
    let mut found = Vec::new();
    for (name, text) in sources() {
        for (word, places) in NAMES {
            if places.iter().any(|place| name.starts_with(place)) {
                continue;
            }
            for (number, line) in code(&text) {
                if line.contains(word) {
                    found.push(format!("src/{name}:{number}: names {word}: {}", line.trim()));
                }
            }
        }
    }
    assert_eq!(found, Vec::<String>::new(), "{}", found.join("\n"));
}

#[test]
fn nothing_points_up() {
    let mut found = Vec::new();
    for (name, text) in sources() {
        let module = name.split(['/', '.']).next().unwrap();
        let Some((_, below)) = LAYERS.iter().find(|(layer, _)| *layer == module) else { continue };
        // Tests inside of a module may use whatever they need; the simulator is one of them.
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
        for (number, line) in code(text) {
            for used in line.split("crate::").skip(1) {
                let used = used.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
                if !used.is_empty()
                    && ![module, "simulator"].contains(&used)
                    && !below.contains(&used)
                {
                    found.push(format!("src/{name}:{number}: {module} uses {used}"));
                }
            }
        }
    }
    assert_eq!(found, Vec::<String>::new(), "{}", found.join("\n"));
}

#[test]
fn no_sentence_is_left_for_later() {
    let mut found = Vec::new();
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            if ["TODO", "FIXME", "XXX", "unimplemented!"].iter().any(|w| line.contains(w)) {
                found.push(format!("src/{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert_eq!(found, Vec::<String>::new(), "{}", found.join("\n"));
}

#[test]
fn the_metrics_in_the_readme_are_those_of_the_server() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let first = ["| `seckill_", "| `grpc_server_", "| `process_"];
    let is_row = |line: &&str| first.iter().any(|first| line.starts_with(first));
    assert_eq!(readme.lines().filter(is_row).count(), FAMILIES.len());
    for family in FAMILIES {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let (kind, labels) = (family.kind.as_str(), labels.join(" "));
        let row = format!("| `{}` | {kind} | {labels} | {} |", family.name, family.help);
        assert!(readme.contains(&row), "README.md has no row {row}");
    }
    // Whoever counts under a name of his own would be in no table.
    for (name, text) in sources() {
        let is_its_place = name == "metrics.rs" || name.starts_with("metrics/");
        assert!(is_its_place || !text.contains("\"seckill_"), "src/{name} names a metric");
    }
}

#[test]
fn the_settings_in_the_readme_are_those_of_the_example_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let example = fs::read_to_string(root.join("config.example.toml")).unwrap();
    let mut section = String::new();
    let mut settings = 0;
    for line in example.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if let Some((key, value)) = line.split_once(" = ")
            && !line.starts_with('#')
        {
            let row = format!("| `{section}.{key}` | `{value}` |");
            assert!(readme.contains(&row), "README.md has no row {row}");
            settings += 1;
        }
    }
    assert!(settings > 20, "the example file is not what this test reads");
}

#[test]
fn the_security_document_has_the_roles_and_the_defaults_of_the_server() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let written: Vec<_> = document.lines().filter(|line| line.contains("/")).collect();
    let written: Vec<_> = written
        .into_iter()
        .filter(|line| TABLE.iter().any(|(rpc, _)| line.contains(rpc)))
        .collect();
    let expected: Vec<_> = TABLE
        .iter()
        .map(|(rpc, need)| {
            let needs = match need {
                Need::Role(role) => role.as_str(),
                Need::Health => "nothing; viewer with `auth.open_health = false`",
                Need::Reflection => "viewer; nothing with `auth.open_reflection = true`",
            };
            format!("| `{rpc}` | {needs} |")
        })
        .collect();
    assert_eq!(written, expected);

    let example = fs::read_to_string(root.join("config.example.toml")).unwrap();
    let mut section = "";
    let mut defaults = Vec::new();
    for line in example.lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
        } else if line.contains(" = ") {
            defaults.push(format!("{section}.{line}"));
        }
    }
    // A figure is a default; a word is what somebody sets.
    let named = document.split('`').filter(|text| {
        text.split_once(" = ").is_some_and(|(_, value)| value.bytes().all(|b| b.is_ascii_digit()))
    });
    let mut seen = 0;
    for setting in named {
        assert!(defaults.iter().any(|default| default == setting), "{setting} is no default");
        seen += 1;
    }
    assert!(seen > 5, "the document is not what this test reads");
}
