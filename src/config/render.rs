//! Settings as TOML text: the example file, and what a server runs with.

use std::fmt::Write as _;

use super::{Key, Loaded, sections};

/// The contents of `config.example.toml`: every key with its documentation and its default.
#[must_use]
pub fn example() -> String {
    let mut text = String::from(
        "\
# Settings of `seckill serve`. Every value below is the default.
#
# They come from this file (`--config`, or SECKILL_CONFIG, or ./seckill.toml), then from environment
# variables, then from flags; the later wins. The variable of `engine.url` is SECKILL__ENGINE__URL:
# two underscores between levels. SECKILL__ENGINE__URL_FILE reads the value from a file.
#
# This file is generated: UPDATE_EXPECT=1 cargo test --lib config
",
    );
    for (section, about, keys) in sections() {
        text.push('\n');
        push_comment(&mut text, about);
        push_line(&mut text, format_args!("[{section}]"));
        for key in keys {
            push_key(&mut text, &key);
        }
    }
    text
}

impl Loaded {
    /// What is in force, as TOML; what is not a default says where it comes from. Secrets are
    /// masked.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let values = toml::Table::try_from(&self.settings).expect("every setting has a TOML value");
        let mut text = String::new();
        for (section, _, keys) in sections() {
            if !text.is_empty() {
                text.push('\n');
            }
            push_line(&mut text, format_args!("[{section}]"));
            for key in keys {
                let value = &values[section][key.name];
                match self.origins.get(&key.path()) {
                    None => push_line(&mut text, format_args!("{} = {value}", key.name)),
                    Some(origin) => {
                        push_line(&mut text, format_args!("{} = {value} # {origin}", key.name));
                    }
                }
            }
        }
        text
    }
}

fn push_key(text: &mut String, key: &Key) {
    text.push('\n');
    push_comment(text, key.docs);
    if let Some((_, range)) = key.allowed.split_once(" in ") {
        push_line(text, format_args!("# Allowed: {range}"));
    }
    push_line(text, format_args!("{} = {}", key.name, key.default));
}

fn push_comment(text: &mut String, lines: &[&str]) {
    for line in lines {
        push_line(text, format_args!("#{line}"));
    }
}

fn push_line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes every text");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn the_example_file_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config.example.toml");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(path, example()).expect("the example file can be written");
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == example(),
            "config.example.toml is stale; write it anew with: \
             UPDATE_EXPECT=1 cargo test --lib config"
        );
    }

    #[test]
    fn the_example_file_holds_the_defaults() {
        let read: Settings = toml::from_str(&example()).expect("the example is valid");
        assert_eq!(read, Settings::default());
    }

    #[test]
    fn every_key_is_documented() {
        for (section, about, keys) in sections() {
            assert!(!about.is_empty(), "{section} has no documentation");
            for key in keys {
                assert!(!key.docs.is_empty(), "{} has no documentation", key.path());
            }
        }
    }
}
