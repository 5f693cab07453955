//! Whatever stands in a file or in the environment: settings are whole and valid, or refused with a
//! text that names what is wrong and shows no secret.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::{ffi::OsString, fs};

use proptest::{collection::vec, prelude::*};

use super::{Sources, sections};

const SECRET: &str = "hunter2-hunter2";

fn a_key() -> impl Strategy<Value = (String, String)> {
    let known: Vec<(String, String)> = sections()
        .into_iter()
        .flat_map(|(section, _, keys)| {
            keys.into_iter().map(move |key| (section.to_owned(), key.name.to_owned()))
        })
        .collect();
    prop_oneof![
        8 => prop::sample::select(known),
        1 => ("[a-z_]{1,12}", "[a-z_]{1,12}"),
        1 => (any::<String>(), any::<String>()),
    ]
}

fn a_value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => any::<i64>().prop_map(|number| number.to_string()),
        2 => (0..3_000_i64).prop_map(|number| number.to_string()),
        2 => any::<String>().prop_map(|text| toml::Value::String(text).to_string()),
        1 => any::<f64>().prop_map(|number| format!("{number:?}")),
        1 => prop::sample::select(vec![
            "true".to_owned(),
            "[]".to_owned(),
            "{}".to_owned(),
            "1979-05-27".to_owned(),
            "\"127.0.0.1:1\"".to_owned(),
            "\"10.0.0.0/8\"".to_owned(),
            format!("\"redis://user:{SECRET}@host:1/0\""),
            format!("\"redis:/user:{SECRET}@host\""),
            format!("\"postgres://user:{SECRET}@host:x/db\""),
            format!("\"{SECRET}\""),
        ]),
        1 => any::<String>(),
    ]
}

/// Loads, and holds the result against what is promised.
fn loads_or_refuses(sources: &Sources, secrets: bool) -> Result<(), TestCaseError> {
    match sources.load() {
        Ok(loaded) => {
            prop_assert!(loaded.settings.validate().is_ok());
            if secrets {
                prop_assert!(!loaded.to_toml().contains(SECRET));
                let shown = format!("{:?}", loaded.settings);
                prop_assert!(!shown.contains(SECRET));
            }
        }
        Err(error) => {
            prop_assert!(!error.problems.is_empty());
            prop_assert!(error.problems.iter().all(|problem| !problem.trim().is_empty()));
            if secrets {
                prop_assert!(!error.to_string().contains(SECRET), "{}", error);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn a_file_of_any_keys_and_values_is_valid_or_refused(
        lines in vec((a_key(), a_value()), 0..6)
    ) {
        let text: String = lines
            .iter()
            .map(|((section, key), value)| format!("[{section}]\n{key} = {value}\n"))
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seckill.toml");
        fs::write(&path, text).unwrap();
        loads_or_refuses(&Sources { file: Some(path), ..Sources::default() }, false)?;
    }

    #[test]
    fn a_file_of_any_bytes_is_valid_or_refused(bytes in vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seckill.toml");
        fs::write(&path, bytes).unwrap();
        loads_or_refuses(&Sources { file: Some(path), ..Sources::default() }, false)?;
    }

    #[test]
    fn an_environment_of_any_values_is_valid_or_refused(
        variables in vec((a_key(), a_value()), 0..6)
    ) {
        let env = variables
            .iter()
            .map(|((section, key), value)| {
                let name = format!("SECKILL__{}__{}", section.to_uppercase(), key.to_uppercase());
                (OsString::from(name), OsString::from(value.trim_matches('"')))
            })
            .collect();
        loads_or_refuses(&Sources { env, ..Sources::default() }, false)?;
    }

    #[test]
    fn a_url_with_a_password_never_shows_it(
        scheme in "[a-z]{0,9}(:|:/|://)?", host in "[ -~]{0,20}", engine in any::<bool>(),
    ) {
        let name = if engine { "SECKILL__ENGINE__URL" } else { "SECKILL__DATABASE__URL" };
        let url = format!("{scheme}user:{SECRET}@{host}");
        let env = vec![(OsString::from(name), OsString::from(url))];
        loads_or_refuses(&Sources { env, ..Sources::default() }, true)?;
    }
}
