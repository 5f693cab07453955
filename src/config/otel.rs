//! The variables of OpenTelemetry that stand for settings: a machine that has them for all its
//! services need not say it once more for this one.

use std::ffi::OsString;

/// Where spans go: those of traces alone come first.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";

/// A setting that a variable stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stated {
    pub key: &'static str,
    pub value: String,
    pub variable: &'static str,
}

/// What the variables of this environment stand for; below our own variables, above the file.
///
/// # Errors
/// One sentence for each variable that has no meaning here.
pub(super) fn read(env: &[(OsString, OsString)]) -> (Vec<Stated>, Vec<String>) {
    let read = |name: &'static str| {
        let (_, value) = env.iter().find(|(known, _)| known == name)?;
        value.to_str().map(str::trim).filter(|value| !value.is_empty())
    };
    let is =
        |name, wanted: &str| read(name).is_some_and(|value| value.eq_ignore_ascii_case(wanted));
    let (mut stated, mut problems) = (Vec::new(), Vec::new());
    let mut state = |key, value: &str, variable| {
        stated.push(Stated { key, value: value.to_owned(), variable });
    };
    for (variable, off) in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
        if is(variable, off) {
            state("traces.endpoint", "", variable);
            return (stated, problems);
        }
    }
    let endpoint = ENDPOINTS.into_iter().find_map(|name| Some((name, read(name)?)));
    if let Some((variable, url)) = endpoint {
        state("traces.endpoint", url, variable);
    }
    if let Some(sampler) = read(SAMPLER) {
        match per_thousand(sampler, read(SAMPLER_ARG).unwrap_or("1")) {
            Ok(per_thousand) => {
                state("traces.sampled_per_thousand", &per_thousand.to_string(), SAMPLER);
            }
            Err(problem) => problems.push(problem),
        }
    }
    (stated, problems)
}

fn per_thousand(sampler: &str, arg: &str) -> Result<u32, String> {
    // A caller's word counts here in any case.
    match sampler.strip_prefix("parentbased_").unwrap_or(sampler) {
        "always_on" => Ok(1_000),
        "always_off" => Ok(0),
        "traceidratio" => match arg.parse::<f64>() {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1000")]
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok((ratio * 1e3).round() as u32),
            Ok(_) | Err(_) => Err(format!("{SAMPLER_ARG} = {arg:?}: must be a number from 0 to 1")),
        },
        _ => Err(format!(
            "{SAMPLER} = {sampler:?}: must be always_on, always_off or traceidratio, each also with \
             parentbased_ before it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stated(variables: &[(&str, &str)]) -> Result<Vec<(&'static str, String)>, String> {
        let env: Vec<(OsString, OsString)> =
            variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let (stated, problems) = read(&env);
        match problems.first() {
            Some(problem) => Err(problem.clone()),
            None => Ok(stated.into_iter().map(|stated| (stated.key, stated.value)).collect()),
        }
    }

    #[test]
    fn where_spans_go_is_said_by_the_variable_of_traces_or_the_one_of_everything() {
        let both = [(ENDPOINTS[1], "http://all:4317"), (ENDPOINTS[0], "http://traces:4317")];
        let endpoint = |url: &str| Ok(vec![("traces.endpoint", url.to_owned())]);
        assert_eq!(stated(&both), endpoint("http://traces:4317"));
        assert_eq!(stated(&both[..1]), endpoint("http://all:4317"));
        assert_eq!(stated(&[both[0], (ENDPOINTS[0], " ")]), endpoint("http://all:4317"));
        assert_eq!(stated(&[]), Ok(Vec::new()));
        for off in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(stated(&[both[0], off]), endpoint(""));
        }
    }

    #[test]
    fn a_sampler_says_how_many_of_a_thousand() {
        for (sampler, arg, expected) in [
            ("always_on", "", 1_000),
            ("parentbased_always_off", "0.5", 0),
            ("traceidratio", "0.25", 250),
            ("parentbased_traceidratio", "", 1_000),
        ] {
            let found = stated(&[(SAMPLER, sampler), (SAMPLER_ARG, arg)]);
            assert_eq!(found, Ok(vec![("traces.sampled_per_thousand", expected.to_string())]));
        }
        for (sampler, arg, named) in
            [("traceidratio", "2", SAMPLER_ARG), ("jaeger_remote", "", "must be always_on")]
        {
            let problem = stated(&[(SAMPLER, sampler), (SAMPLER_ARG, arg)]).unwrap_err();
            assert!(problem.contains(named), "{problem}");
        }
    }
}
