//! Reads settings: file, then environment, then flags; each key remembers where it came from.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use toml::{Table, Value, de::DeTable};

use super::{Settings, SettingsError, components::Key, otel, secret::masked, sections};

/// What every variable of ours begins with; two underscores go between levels.
const PREFIX: &str = "SECKILL__";
/// What a variable begins with that may be meant for us. There are others: those of the command, and
/// in Kubernetes those that name a Service `seckill`.
const NEAR_PREFIX: &str = "SECKILL_";
/// In so many letters a variable may differ from one of ours and still be meant for us.
const MOST_EDITS: usize = 2;
/// What is read when no file is named and it is there.
const DEFAULT_FILE: &str = "seckill.toml";

/// Where settings are read from.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// A file that must be there.
    pub file: Option<PathBuf>,
    /// A file that is read if it is there and no other is named.
    pub default_file: Option<PathBuf>,
    pub env: Vec<(OsString, OsString)>,
    /// In order; a later one wins.
    pub flags: Vec<Flag>,
}

/// A flag of the command line that stands for a setting.
#[derive(Debug, Clone)]
pub struct Flag {
    /// As people type it, such as `--grpc-addr`.
    pub name: &'static str,
    /// As in `grpc.addr`.
    pub key: &'static str,
    pub value: String,
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    File {
        path: PathBuf,
        line: usize,
    },
    Variable(String),
    /// A variable that is not ours alone.
    Standard(&'static str),
    /// The variable that names the file, and the file.
    SecretFile(String, PathBuf),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::SecretFile(name, path) => write!(f, "{} by {name}", path.display()),
            Self::Standard(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

/// Settings that are valid, and where they came from.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    pub settings: Settings,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// By key, as in `grpc.addr`; what is not here is a default.
    pub origins: BTreeMap<String, Origin>,
}

impl Sources {
    /// The sources of this process.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Vec<Flag>) -> Self {
        Self {
            file,
            default_file: Some(PathBuf::from(DEFAULT_FILE)),
            env: std::env::vars_os().collect(),
            flags,
        }
    }

    /// Reads, merges and checks everything.
    ///
    /// # Errors
    /// [`SettingsError`] names each key that is unknown or whose value is not allowed, and where
    /// it came from.
    pub fn load(&self) -> Result<Loaded, SettingsError> {
        let mut merge = Merge::new();
        let file = self.read_file(&mut merge);
        let (stated, problems) = otel::read(&self.env);
        for otel::Stated { key, value, variable } in stated {
            merge.set_text(key, &value, Origin::Standard(variable));
        }
        merge.problems.extend(problems);
        self.read_env(&mut merge);
        for flag in &self.flags {
            merge.set_text(flag.key, &flag.value, Origin::Flag(flag.name));
        }
        merge.finish(file)
    }

    fn read_file(&self, merge: &mut Merge) -> Option<PathBuf> {
        let (path, required) = match (&self.file, &self.default_file) {
            (Some(path), _) => (path, true),
            (None, Some(path)) => (path, false),
            (None, None) => return None,
        };
        match fs::read_to_string(path) {
            Ok(text) => {
                merge.add_file(path, &text);
                Some(path.clone())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && !required => None,
            Err(error) => {
                merge.problem(format!("{}: can't be read: {error}", path.display()));
                None
            }
        }
    }

    fn read_env(&self, merge: &mut Merge) {
        // Sorted, so that messages come in the same order each time.
        let mut variables: Vec<(String, &OsString)> = self
            .env
            .iter()
            .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value)))
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect();
        variables.sort();
        self.refuse_misspelled(merge);
        for (name, value) in variables {
            let key = name[PREFIX.len()..].to_ascii_lowercase().replace("__", ".");
            let Some(value) = value.to_str() else {
                merge.problem(format!("{name}: its value is not UTF-8"));
                continue;
            };
            let secret = key.strip_suffix("_file").filter(|stem| merge.key(stem).is_some());
            match secret {
                Some(stem) if merge.key(&key).is_none() => merge.add_secret(stem, &name, value),
                _ => merge.set_text(&key, value, Origin::Variable(name)),
            }
        }
    }

    /// Names the variables that would be a setting but for an underscore or a letter.
    fn refuse_misspelled(&self, merge: &mut Merge) {
        let names = self.env.iter().filter_map(|(name, _)| name.to_str());
        let mut near: Vec<(&str, String)> = names
            .filter(|name| name.starts_with(NEAR_PREFIX) && !name.starts_with(PREFIX))
            .filter_map(|name| Some((name, merge.meant(&name[NEAR_PREFIX.len()..])?)))
            .collect();
        near.sort();
        for (name, meant) in near {
            merge.problem(format!(
                "{name}: there is no such variable; did you mean {meant}? Two underscores go between \
                 levels"
            ));
        }
    }
}

/// The merged table while it grows, and what went wrong meanwhile.
struct Merge {
    known: Vec<Key>,
    table: Table,
    origins: BTreeMap<String, Origin>,
    problems: Vec<String>,
}

impl Merge {
    fn new() -> Self {
        let known = sections().into_iter().flat_map(|(_, _, keys)| keys).collect();
        Self { known, table: Table::new(), origins: BTreeMap::new(), problems: Vec::new() }
    }

    fn key(&self, path: &str) -> Option<&Key> {
        self.known.iter().find(|key| path.split_once('.') == Some((key.section, key.name)))
    }

    /// The variable that was most likely meant by what stands behind its prefix.
    fn meant(&self, rest: &str) -> Option<String> {
        let rest = rest.replace("__", "_");
        let variables = self.known.iter().flat_map(|key| {
            let (section, name) = (key.section.to_uppercase(), key.name.to_uppercase());
            ["", "_FILE"].map(|end| {
                (format!("{section}_{name}{end}"), format!("{PREFIX}{section}__{name}{end}"))
            })
        });
        variables
            .map(|(flat, variable)| (edits(&rest, &flat), variable))
            .filter(|(edits, _)| *edits <= MOST_EDITS)
            .min()
            .map(|(_, variable)| variable)
    }

    fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    fn add_file(&mut self, path: &Path, text: &str) {
        // The message of a parse error would quote the line, and the line may hold a password.
        let table = match DeTable::parse(text) {
            Ok(table) => table,
            Err(error) => {
                let line = error.span().map_or(1, |span| line_of(text, span.start));
                self.problem(format!("{}:{line}: {}", path.display(), error.message()));
                return;
            }
        };
        let values: Table = match toml::from_str(text) {
            Ok(values) => values,
            Err(error) => {
                self.problem(format!("{}: {}", path.display(), error.message()));
                return;
            }
        };
        for (section, body) in table.get_ref() {
            let origin = |offset: usize| Origin::File {
                path: path.to_path_buf(),
                line: line_of(text, offset),
            };
            let name: &str = section.get_ref();
            let (Some(body), Some(values)) =
                (body.get_ref().as_table(), values.get(name).and_then(Value::as_table))
            else {
                self.unknown(name, &origin(section.span().start));
                continue;
            };
            if !self.known.iter().any(|key| key.section == name) {
                self.unknown(name, &origin(section.span().start));
                continue;
            }
            for key in body.keys() {
                let origin = origin(key.span().start);
                let key: &str = key.get_ref();
                if let Some(value) = values.get(key) {
                    self.set(&format!("{name}.{key}"), value.clone(), origin);
                }
            }
        }
    }

    fn add_secret(&mut self, key: &str, variable: &str, file: &str) {
        if matches!(self.origins.get(key), Some(Origin::Variable(_))) {
            let other = variable.trim_end_matches("_FILE");
            self.problem(format!("{other} and {variable} are both set; unset one of them"));
            return;
        }
        match fs::read_to_string(file) {
            Ok(text) => {
                let origin = Origin::SecretFile(variable.to_owned(), PathBuf::from(file));
                self.set_text(key, text.trim(), origin);
            }
            Err(error) => self.problem(format!("{variable}: {file} can't be read: {error}")),
        }
    }

    /// Sets a value that came as text, in the type that the key has.
    fn set_text(&mut self, path: &str, text: &str, origin: Origin) {
        let value = match self.key(path).map(|key| &key.default) {
            Some(Value::Integer(_)) => text
                .trim()
                .replace('_', "")
                .parse()
                .map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
            Some(Value::Boolean(_)) => {
                text.trim().parse().map_or_else(|_| Value::String(text.to_owned()), Value::Boolean)
            }
            _ => Value::String(text.to_owned()),
        };
        self.set(path, value, origin);
    }

    fn set(&mut self, path: &str, value: Value, origin: Origin) {
        let Some(key) = self.key(path) else {
            self.unknown(path, &origin);
            return;
        };
        let (section, name) = (key.section, key.name);
        self.table
            .entry(section)
            .or_insert_with(|| Value::Table(Table::new()))
            .as_table_mut()
            .expect("only tables are put at the top")
            .insert(name.to_owned(), value);
        self.origins.insert(path.to_owned(), origin);
    }

    fn unknown(&mut self, path: &str, origin: &Origin) {
        let (section, name) = path.split_once('.').unwrap_or((path, ""));
        let sections: Vec<&str> = sections().iter().map(|(section, _, _)| *section).collect();
        let in_section: Vec<&str> =
            self.known.iter().filter(|key| key.section == section).map(|key| key.name).collect();
        let meant = match origin {
            Origin::Variable(variable) => {
                variable.strip_prefix(PREFIX).and_then(|rest| self.meant(rest))
            }
            Origin::File { .. }
            | Origin::Standard(_)
            | Origin::SecretFile(..)
            | Origin::Flag(_) => None,
        };
        let hint = if let Some(meant) = meant.filter(|_| name.is_empty()) {
            format!("did you mean {meant}?")
        } else if !in_section.is_empty() && name.is_empty() {
            format!("`{section}` is a section; write [{section}] and its keys below")
        } else if let Some(near) = nearest(name, &in_section) {
            format!("did you mean {section}.{near}?")
        } else if !in_section.is_empty() {
            format!("[{section}] has {}", in_section.join(", "))
        } else if let Some(near) = nearest(section, &sections) {
            let dot = if name.is_empty() { "" } else { "." };
            format!("did you mean {near}{dot}{name}?")
        } else {
            format!("the sections are {}", sections.join(", "))
        };
        self.problem(format!("{path} ({origin}): there is no such setting; {hint}"));
    }

    fn finish(mut self, file: Option<PathBuf>) -> Result<Loaded, SettingsError> {
        let settings = match serde_path_to_error::deserialize(Value::Table(self.table.clone())) {
            Ok(settings) => settings,
            Err(error) => {
                let problem = self.wrong_type(&error.path().to_string(), error.inner());
                self.problem(problem);
                Settings::default()
            }
        };
        if self.problems.is_empty() {
            for breach in settings.breaches() {
                let origin = self.origin_of(&breach.key);
                self.problem(format!("{} = {}{origin}: {}", breach.key, breach.value, breach.text));
            }
        }
        if self.problems.is_empty() {
            return Ok(Loaded { settings, file, origins: self.origins });
        }
        Err(SettingsError { problems: self.problems })
    }

    fn wrong_type(&self, path: &str, error: &toml::de::Error) -> String {
        // Of a list it may be one entry: `auth.tokens[0]`.
        let path = path.split('[').next().unwrap_or(path);
        let origin = self.origin_of(path);
        let Some(key) = self.key(path) else {
            return format!("{path}{origin}: {}", error.message());
        };
        if key.is_secret {
            return format!("{path} = (not shown){origin}: must be {}", key.allowed);
        }
        // An address without a host is no URL either, and has no place for a password.
        let is_addr = key.default.as_str().is_some_and(|text| text.parse::<SocketAddr>().is_ok());
        let value = match &self.table[key.section][key.name] {
            Value::String(text) if is_addr && !text.contains(['@', '?', '/']) => {
                format!("{text:?}")
            }
            Value::String(text) => format!("{:?}", masked(text)),
            other @ (Value::Integer(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_)) => other.to_string(),
        };
        format!("{path} = {value}{origin}: must be {}", key.allowed)
    }

    fn origin_of(&self, path: &str) -> String {
        self.origins.get(path).map(|origin| format!(" ({origin})")).unwrap_or_default()
    }
}

/// The line of a byte, from 1 on.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// The word that `text` was most likely meant to be.
fn nearest<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    words
        .iter()
        .map(|word| (edits(text, word), *word))
        .filter(|(edits, word)| *edits <= 1 + word.len() / 4)
        .min()
        .map(|(_, word)| word)
}

/// How many bytes must be added, removed or changed to make `b` of `a` (Levenshtein).
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("seckill.toml");
        fs::write(&path, text).expect("a file");
        (dir, path)
    }

    fn from_file(text: &str) -> Result<Loaded, String> {
        let (dir, path) = file(text);
        let sources = Sources { file: Some(path), ..Sources::default() };
        let shown = format!("{}/", dir.path().display());
        sources.load().map_err(|error| error.to_string().replace(&shown, ""))
    }

    fn from_env(variables: &[(&str, &str)]) -> Result<Loaded, String> {
        let env = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Sources { env, ..Sources::default() }.load().map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_set_is_the_default() {
        let loaded = Sources::default().load().expect("defaults");
        assert_eq!(loaded.settings, Settings::default());
        assert!(loaded.origins.is_empty());
    }

    #[test]
    fn the_environment_wins_over_the_file_and_a_flag_over_both() {
        let (_dir, path) = file("[outbox]\nbatch = 1\nmax_attempts = 1\npoll_interval_ms = 1\n");
        let sources = Sources {
            file: Some(path.clone()),
            env: vec![
                ("SECKILL__OUTBOX__BATCH".into(), "2".into()),
                ("SECKILL__OUTBOX__MAX_ATTEMPTS".into(), "2".into()),
                ("SECKILL_SERVER".into(), "not ours".into()),
            ],
            flags: vec![Flag { name: "--batch", key: "outbox.batch", value: "3".into() }],
            ..Sources::default()
        };
        let loaded = sources.load().expect("valid settings");
        let outbox = &loaded.settings.outbox;
        assert_eq!((outbox.batch, outbox.max_attempts, outbox.poll_interval_ms), (3, 2, 1));
        assert_eq!(loaded.origins["outbox.batch"], Origin::Flag("--batch"));
        assert_eq!(loaded.origins["outbox.poll_interval_ms"], Origin::File { path, line: 4 });
        assert!(loaded.to_toml().contains("max_attempts = 2 # SECKILL__OUTBOX__MAX_ATTEMPTS\n"));
    }

    #[test]
    fn a_standard_variable_counts_where_none_of_ours_is_set() {
        const OTEL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
        let (_dir, path) = file("[traces]\nendpoint = \"http://file:1\"\n");
        let load = |own: Option<&str>| {
            let own = own.map(|url| ("SECKILL__TRACES__ENDPOINT".into(), url.into()));
            let env = [(OTEL.into(), "http://otel:2".into())].into_iter().chain(own).collect();
            Sources { file: Some(path.clone()), env, ..Sources::default() }.load()
        };
        let loaded = load(None).unwrap();
        assert_eq!(loaded.settings.traces.endpoint.expose(), "http://otel:2");
        assert_eq!(loaded.origins["traces.endpoint"], Origin::Standard(OTEL));
        let loaded = load(Some("http://own:3")).unwrap();
        assert_eq!(loaded.settings.traces.endpoint.expose(), "http://own:3");
        let refused = from_env(&[(OTEL, "grpc.example:4317")]).unwrap_err();
        assert!(refused.contains("(OTEL_EXPORTER_OTLP_ENDPOINT): must be empty"), "{refused}");
        let refused = from_env(&[("OTEL_TRACES_SAMPLER", "often")]).unwrap_err();
        assert!(refused.starts_with("OTEL_TRACES_SAMPLER = \"often\": must be"), "{refused}");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_its_neighbour() {
        for (text, message) in [
            (
                "[grpc]\nmax_conections = 1\n",
                "grpc.max_conections (seckill.toml:2): there is no such setting; \
                 did you mean grpc.max_connections?",
            ),
            (
                "\n[outbx]\nbatch = 1\n",
                "outbx (seckill.toml:2): there is no such setting; did you mean outbox?",
            ),
            (
                "[log]\ncolour = true\n",
                "log.colour (seckill.toml:2): there is no such setting; [log] has level, format",
            ),
            (
                "engine = 'redis://:hunter2@host'\n",
                "engine (seckill.toml:1): there is no such setting; \
                 `engine` is a section; write [engine] and its keys below",
            ),
            (
                "verbose = true\n",
                "verbose (seckill.toml:1): there is no such setting; the sections are grpc, http, auth, tls, \
                 engine, database, reserve, limits, outbox, sweeper, segments, holds, catalog, watch, log, traces",
            ),
        ] {
            assert_eq!(from_file(text).expect_err(text), message);
        }
        assert_eq!(
            from_env(&[("SECKILL__ENGINE__URI", "x")]).expect_err("no such key"),
            "engine.uri (SECKILL__ENGINE__URI): there is no such setting; \
             did you mean engine.url?"
        );
    }

    #[test]
    fn a_variable_that_is_one_of_ours_but_for_an_underscore_or_a_letter_is_refused() {
        for (variable, meant) in [
            ("SECKILL_ENGINE_URL", "SECKILL__ENGINE__URL"),
            ("SECKILL_ENGINE__URL", "SECKILL__ENGINE__URL"),
            ("SECKILL_ENGINE_URI", "SECKILL__ENGINE__URL"),
            ("SECKILL_DATABASE_URL_FILE", "SECKILL__DATABASE__URL_FILE"),
            ("SECKILL_TLS_CERT_FILE", "SECKILL__TLS__CERT_FILE"),
            ("SECKILL_LIMITS_USER_ATTEMPTS", "SECKILL__LIMITS__USER_ATTEMPTS"),
        ] {
            assert_eq!(
                from_env(&[(variable, "hunter2")]).expect_err(variable),
                format!(
                    "{variable}: there is no such variable; did you mean {meant}? Two underscores \
                     go between levels"
                )
            );
        }
        assert_eq!(
            from_env(&[("SECKILL__ENGINE_URL", "x")]).expect_err("no such key"),
            "engine_url (SECKILL__ENGINE_URL): there is no such setting; \
             did you mean SECKILL__ENGINE__URL?"
        );
        // Those of the command, of the tests, and of a Service in Kubernetes, whatever its name.
        for variable in [
            "SECKILL_CONFIG",
            "SECKILL_SERVER",
            "SECKILL_TOKEN",
            "SECKILL_TOKEN_FILE",
            "SECKILL_CA_FILE",
            "SECKILL_CERT_FILE",
            "SECKILL_KEY_FILE",
            "SECKILL_FAILPOINTS",
            "SECKILL_GIVE_UP_S",
            "SECKILL_STUBS",
            "SECKILL_MODEL",
            "SECKILL_MODEL_STEPS",
            "SECKILL_SIM_FROM",
            "SECKILL_SIM_SEED",
            "SECKILL_SIM_SECONDS",
            "SECKILL_SIM_THREADS",
            "SECKILL_SALE_SECONDS",
            "SECKILL_WATCHERS",
            "SECKILL_REQUEST_LIMIT",
            "SECKILL_FAULTS_JSON",
            "SECKILL_TEST_REDIS_URL",
            "SECKILL_TEST_REDIS_SERVER",
            "SECKILL_TEST_POSTGRES_URL",
            "SECKILL_TEST_MYSQL_URL",
            "SECKILL_TEST_PYTHON",
            "SECKILL_TEST_SERVICES",
            "SECKILL_PORT",
            "SECKILL_PORT_50051_TCP_ADDR",
            "SECKILL_SERVICE_HOST",
            "SECKILL_SERVICE_PORT",
            "SECKILL_HTTP_PORT",
            "SECKILL_GRPC_PORT",
            "SECKILL_GRPC_SERVICE_HOST",
            "SECKILL_ENGINE_PORT",
            "SECKILL_DATABASE_PORT",
        ] {
            from_env(&[(variable, "x")]).expect(variable);
        }
    }

    #[test]
    fn a_wrong_value_is_shown_with_what_is_allowed() {
        for (text, message) in [
            (
                "[outbox]\n\nbatch = 'many'\n",
                "outbox.batch = \"many\" (seckill.toml:3): must be a whole number in 1..=10000",
            ),
            (
                "[outbox]\nbatch = -1\n",
                "outbox.batch = -1 (seckill.toml:2): must be a whole number in 1..=10000",
            ),
            (
                "[outbox]\nbatch = 10001\n",
                "outbox.batch = 10001 (seckill.toml:2): must be a whole number in 1..=10000",
            ),
            (
                "[log]\nlevel = 'loud'\n",
                "log.level = \"loud\" (seckill.toml:2): \
                 must be one of off, error, warn, info, debug, trace",
            ),
            (
                "[grpc]\naddr = 'localhost'\n",
                "grpc.addr = \"localhost\" (seckill.toml:2): \
                 must be an IP address and a port, such as 127.0.0.1:50051",
            ),
            (
                "[grpc]\naddr = ':50051'\n",
                "grpc.addr = \":50051\" (seckill.toml:2): \
                 must be an IP address and a port, such as 127.0.0.1:50051",
            ),
            (
                "[http]\naddr = 'u:hunter2@host:1'\n",
                "http.addr = \"u:***\" (seckill.toml:2): \
                 must be empty, or an IP address and a port, such as 127.0.0.1:9090",
            ),
            ("[database]\nurl = 7\n", "database.url = 7 (seckill.toml:2): must be a URL"),
        ] {
            assert_eq!(from_file(text).expect_err(text), message);
        }
        assert_eq!(
            from_env(&[("SECKILL__OUTBOX__BATCH", "")]).expect_err("not a number"),
            "outbox.batch = \"\" (SECKILL__OUTBOX__BATCH): must be a whole number in 1..=10000"
        );
    }

    #[test]
    fn a_file_that_is_no_toml_does_not_give_its_line_away() {
        let error = from_file("[database]\nurl = \"postgres://a:hunter2@host\n").expect_err("TOML");
        assert!(error.starts_with("seckill.toml:2: "), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn a_secret_is_read_from_the_file_that_a_variable_names() {
        let (_dir, path) = file("postgres://app:hunter2@host/db\n");
        let path = path.to_str().expect("UTF-8");
        let loaded = from_env(&[("SECKILL__DATABASE__URL_FILE", path)]).expect("a URL");
        assert_eq!(loaded.settings.database.url.expose(), "postgres://app:hunter2@host/db");
        assert!(!loaded.to_toml().contains("hunter2"));

        let both = [("SECKILL__DATABASE__URL", "x"), ("SECKILL__DATABASE__URL_FILE", path)];
        let error = from_env(&both).expect_err("both are set");
        assert!(error.contains("are both set"), "{error}");

        let missing = from_env(&[("SECKILL__DATABASE__URL_FILE", "/no/such/file")]);
        assert!(missing.expect_err("no file").contains("can't be read"));
    }

    #[test]
    fn tokens_come_from_every_source_and_are_never_shown() {
        let digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        let (_dir, path) = file(&format!("anna:ops:{digest}\nshop:order:3{}\n", &digest[1..]));
        let named = [("SECKILL__AUTH__TOKENS_FILE", path.to_str().expect("UTF-8"))];
        let text = format!("anna:ops:{digest}, shop:order:3{}", &digest[1..]);
        let listed = format!("[auth]\ntokens = [\"{}\"]\n", text.replace(", ", "\", \""));
        for loaded in [
            from_file(&listed),
            from_file(&format!("[auth]\ntokens = \"{text}\"\n")),
            from_env(&[("SECKILL__AUTH__TOKENS", &text)]),
            from_env(&named),
        ] {
            let loaded = loaded.expect("tokens");
            let tokens = loaded.settings.auth.tokens.read().expect("valid");
            let names: Vec<_> = tokens.iter().map(|token| &*token.name).collect();
            assert_eq!(names, ["anna", "shop"]);
            let shown = loaded.to_toml();
            assert!(
                shown.contains("tokens = [\"anna:ops:***\", \"shop:order:***\"] # "),
                "{shown}"
            );
            assert!(!shown.contains(&digest[1..]), "{shown}");
        }
    }

    #[test]
    fn a_token_in_the_wrong_place_is_not_repeated() {
        let digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        for value in ["hunter2", "anna:ops:hunter2", "anna:hunter2", "http://a:hunter2@b"] {
            let error = from_env(&[("SECKILL__AUTH__TOKENS", value)]).expect_err(value);
            assert!(
                error.starts_with("auth.tokens = (not shown) (SECKILL__AUTH__TOKENS): entry 1")
            );
            assert!(!error.contains("hunter2"), "{error}");
            for written in [
                format!("\"{value}\""),
                format!("[\"{value}\"]"),
                format!("[7, \"{value}\"]"),
                format!("{{anna = \"{value}\"}}"),
                format!("[[\"{value}\"]]"),
                format!("[\"anna:ops:{digest}\", \"{value}\"]"),
            ] {
                let error = from_file(&format!("[auth]\ntokens = {written}\n"));
                let error = error.expect_err(&written);
                assert!(
                    error.starts_with("auth.tokens = (not shown) (seckill.toml:2): "),
                    "{error}"
                );
                assert!(!error.contains("hunter2"), "{error}");
            }
        }
    }

    #[test]
    fn a_switch_is_true_or_false() {
        let loaded = from_env(&[("SECKILL__HTTP__OPEN", "true")]).expect("a switch");
        assert!(loaded.settings.http.open);
        assert_eq!(
            from_env(&[("SECKILL__HTTP__OPEN", "yes")]).expect_err("no switch"),
            "http.open = \"yes\" (SECKILL__HTTP__OPEN): must be true or false"
        );
    }

    #[test]
    fn a_file_that_was_named_must_be_there() {
        let sources = Sources { file: Some("/no/such/file".into()), ..Sources::default() };
        assert!(sources.load().expect_err("no file").to_string().contains("can't be read"));
        let sources = Sources { default_file: Some("/no/such/file".into()), ..Sources::default() };
        assert_eq!(sources.load().expect("defaults").file, None);
    }
}
