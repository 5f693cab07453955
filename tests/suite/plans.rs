//! The plan for a million requests a second, as its simulation judges it, and as it stands in
//! `docs/scaling.md`; `UPDATE_EXPECT=1` writes that anew.

use std::{fs, process::Command};

use crate::clients::python;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A short form of the simulation: whether the plan holds, and what it prints.
fn simulate(arguments: &[&str]) -> (bool, String) {
    plan(&[&["--short"], arguments].concat())
}

/// Whether the script ends with 0, and what it prints.
fn plan(arguments: &[&str]) -> (bool, String) {
    let script = format!("{ROOT}/scripts/plan-1m.py");
    let output = Command::new(python()).arg(script).args(arguments).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let holds = match output.status.code() {
        Some(0) => true,
        Some(1) => false,
        code => panic!("{code:?}: {printed}"),
    };
    (holds, printed)
}

#[test]
fn the_plan_holds_and_the_simulation_repeats_itself() {
    let (holds, printed) = simulate(&[]);
    assert!(holds && printed.ends_with("\nthe plan holds\n"), "{printed}");
    assert!(printed.contains("      10,000  RESERVED\n"), "{printed}");
    assert_eq!(simulate(&[]), (holds, printed));
}

#[test]
fn a_plan_that_is_too_small_is_told_so_and_where() {
    for (arguments, missed) in [
        (["--servers", "6"], "busiest server, p99 of a refusal from memory"),
        (
            ["--store-per-s", "2000"],
            "units are sold within, p99 of a win, p99 of a refusal by the engine",
        ),
    ] {
        let (holds, printed) = simulate(&arguments);
        assert!(!holds, "{printed}");
        assert!(printed.ends_with(&format!("\nthe plan does not hold: {missed}\n")), "{printed}");
    }
}

#[test]
fn the_document_says_what_the_simulation_says_of_what_was_measured() {
    const BEGIN: &str = "<!-- Made by scripts/plan-1m.py --tables; UPDATE_EXPECT=1 \
        cargo test --test suite -- plans writes it anew. -->\n\n";
    let (told, tables) = plan(&["--tables"]);
    assert!(told, "{tables}");
    let path = format!("{ROOT}/docs/scaling.md");
    let document = fs::read_to_string(&path).unwrap();
    let (before, rest) = document.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once("\n<!-- Until here. -->\n").unwrap();
    let current = format!("{before}{BEGIN}{tables}\n<!-- Until here. -->\n{after}");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&path, &current).unwrap();
    }
    assert!(
        fs::read_to_string(&path).unwrap() == current,
        "docs/scaling.md is behind: UPDATE_EXPECT=1 cargo test --test suite -- plans"
    );
}
