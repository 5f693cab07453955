//! The plan for a million requests a second, as its simulation judges it.

use std::process::Command;

use crate::clients::python;

/// A short form of the simulation: whether the plan holds, and what it prints.
fn simulate(arguments: &[&str]) -> (bool, String) {
    const ROOT: &str = env!("CARGO_MANIFEST_DIR");
    let script = format!("{ROOT}/scripts/plan-1m.py");
    let output = Command::new(python()).arg(script).arg("--short").args(arguments).output();
    let output = output.unwrap();
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
