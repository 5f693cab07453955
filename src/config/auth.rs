//! Who may call: lists of tokens and of client certificates' names, as they are written.
//!
//! **Invariant:** neither `Debug` nor serde shows a digest, and no message repeats an entry: what
//! stands in the wrong place may be a token.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The bytes of a SHA-256.
pub const DIGEST_BYTES: usize = 32;
/// The most bytes of a name; the audit keeps 128 characters.
const NAME_MAX_BYTES: usize = 128;
/// Who acts in the audit when nobody called; no caller may have these names.
const OURS: [&str; 2] = ["system", "clock"];
/// What `printf "" | sha256sum` says: the sign of a variable that was not set.
const DIGEST_OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// What a caller may do; each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Looks.
    Viewer,
    /// Reserves, releases and confirms.
    Order,
    /// Runs the sale.
    Ops,
}

impl Role {
    /// The word in the settings and in errors.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Order => "order",
            Self::Ops => "ops",
        }
    }

    /// The role of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Viewer, Self::Order, Self::Ops].into_iter().find(|role| role.as_str() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One token that is let in.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub name: Arc<str>,
    pub role: Role,
    /// The SHA-256 of the token.
    pub digest: [u8; DIGEST_BYTES],
}

/// The SHA-256 of a token.
#[must_use]
pub fn digest(token: &[u8]) -> [u8; DIGEST_BYTES] {
    let digest = ring::digest::digest(&ring::digest::SHA256, token);
    digest.as_ref().try_into().expect("a SHA-256 has 32 bytes")
}

impl Token {
    /// The entry as it stands in the settings.
    ///
    /// # Errors
    /// What is wrong with the name.
    pub fn entry(&self) -> Result<String, String> {
        let digest: String = self.digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let entry = format!("{}:{}:{digest}", self.name, self.role);
        token(&entry)?;
        Ok(entry)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:***", self.name, self.role)
    }
}

/// One client certificate's name that is let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub name: Arc<str>,
    pub role: Role,
}

/// A list of texts: in the file a list, in a variable separated by commas or line ends.
#[derive(Clone, PartialEq, Eq, Default)]
struct Entries(Vec<String>);

impl Entries {
    fn split(text: &str) -> Self {
        let entries = text.split([',', '\n']).map(str::trim);
        Self(entries.filter(|entry| !entry.is_empty()).map(str::to_owned).collect())
    }

    /// Reads every entry; what is wrong is told by its place.
    fn read<T>(
        &self,
        mut read: impl FnMut(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, Vec<String>> {
        let (mut read_ones, mut problems) = (Vec::new(), Vec::new());
        for (index, entry) in self.0.iter().enumerate() {
            match read(entry) {
                Ok(one) => read_ones.push(one),
                Err(problem) => {
                    problems.push(format!("entry {} of {} {problem}", index + 1, self.0.len()));
                }
            }
        }
        if problems.is_empty() { Ok(read_ones) } else { Err(problems) }
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            List(Vec<String>),
        }
        Ok(match Written::deserialize(deserializer)? {
            Written::Text(text) => Self::split(&text),
            Written::List(entries) => Self(entries),
        })
    }
}

/// `name:role:sha256` of every token that is let in.
#[derive(Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(transparent)]
pub struct Tokens(Entries);

impl Tokens {
    /// From a text with commas or line ends between the entries.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Entries::split(text))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }

    /// The entries, read.
    ///
    /// # Errors
    /// What is wrong with each that can't be read, without repeating it.
    pub fn read(&self) -> Result<Vec<Token>, Vec<String>> {
        let mut seen: Vec<Token> = Vec::new();
        self.0.read(|entry| {
            let token = token(entry)?;
            if seen.iter().any(|other| other.digest == token.digest) {
                return Err("has the digest of an entry before it".into());
            }
            if seen.iter().any(|other| other.name == token.name && other.role != token.role) {
                return Err("has the name of an entry before it and another role".into());
            }
            seen.push(token.clone());
            Ok(token)
        })
    }

    /// Every entry with its digest masked.
    fn shown(&self) -> Vec<String> {
        let shown = |entry: &String| match token(entry) {
            Ok(token) => format!("{token:?}"),
            Err(_) => "***".to_owned(),
        };
        self.0.0.iter().map(shown).collect()
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.shown()).finish()
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.shown())
    }
}

fn token(entry: &str) -> Result<Token, String> {
    let mut parts = entry.split(':').map(str::trim);
    let (Some(name), Some(role), Some(digest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err("is not name:role:sha256".into());
    };
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if name.is_empty() || name.len() > NAME_MAX_BYTES || !name.bytes().all(is_word) {
        return Err(format!("has a name that is not 1 to {NAME_MAX_BYTES} of A-Z a-z 0-9 . _ -"));
    }
    check_name(name)?;
    let role = read_role(role)?;
    let digest = read_digest(digest)?;
    Ok(Token { name: name.into(), role, digest })
}

fn check_name(name: &str) -> Result<(), String> {
    if OURS.contains(&name) {
        return Err(format!("has the name {name:?}, which is the server's own in the audit"));
    }
    Ok(())
}

fn read_role(role: &str) -> Result<Role, String> {
    Role::named(role).ok_or_else(|| "has a role that is not viewer, order or ops".to_owned())
}

fn read_digest(text: &str) -> Result<[u8; DIGEST_BYTES], String> {
    let wrong = "has no SHA-256 at its end, which is 64 hexadecimal digits; `seckill token new` \
                 prints a token with its entry";
    let text = text.to_ascii_lowercase();
    if text == DIGEST_OF_NOTHING {
        return Err("has the SHA-256 of an empty text".into());
    }
    let mut digest = [0; DIGEST_BYTES];
    if text.len() != 2 * DIGEST_BYTES || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(wrong.into());
    }
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).expect("hexadecimal digits");
        *byte = u8::from_str_radix(pair, 16).expect("hexadecimal digits");
    }
    Ok(digest)
}

/// `name=role` of every client certificate that is let in.
#[derive(Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Subjects(Entries);

impl fmt::Debug for Subjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0.0).finish()
    }
}

impl Subjects {
    /// From a text with commas or line ends between the entries.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Entries::split(text))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }

    /// The entries, read.
    ///
    /// # Errors
    /// What is wrong with each that can't be read.
    pub fn read(&self) -> Result<Vec<Subject>, Vec<String>> {
        let mut seen: Vec<Arc<str>> = Vec::new();
        self.0.read(|entry| {
            // The name of a URI may have `=` in it.
            let (name, role) = entry.rsplit_once('=').ok_or("is not name=role")?;
            let (name, role) = (name.trim(), read_role(role.trim())?);
            if name.is_empty() || name.len() > NAME_MAX_BYTES || name.contains(char::is_control) {
                return Err(format!("has a name that is not 1 to {NAME_MAX_BYTES} bytes of text"));
            }
            check_name(name)?;
            let name: Arc<str> = name.into();
            if seen.contains(&name) {
                return Err("has the name of an entry before it".into());
            }
            seen.push(name.clone());
            Ok(Subject { name, role })
        })
    }
}

impl Serialize for Entries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    const OTHER: &str = "3bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn tokens_are_read_from_a_text_and_from_a_list() {
        let text = format!(" checkout:order:{DIGEST},\nanna:ops:{OTHER}\n");
        let tokens = Tokens::new(&text).read().unwrap();
        let shown: Vec<_> = tokens.iter().map(|token| format!("{token:?}")).collect();
        assert_eq!(shown, ["checkout:order:***", "anna:ops:***"]);
        assert_eq!((tokens[0].digest[0], tokens[0].digest[31]), (0x2b, 0x5b));

        #[derive(Deserialize)]
        struct File {
            tokens: Tokens,
        }
        let list = format!("tokens = ['checkout:order:{DIGEST}', 'anna:ops:{OTHER}']");
        assert_eq!(toml::from_str::<File>(&list).unwrap().tokens, Tokens::new(&text));
    }

    #[test]
    fn a_token_may_have_a_successor_under_its_name() {
        let text = format!("a:order:{DIGEST},a:order:{OTHER}");
        assert_eq!(Tokens::new(&text).read().unwrap().len(), 2);
    }

    #[test]
    fn a_bad_entry_is_told_by_its_place_and_not_repeated() {
        for (entry, problem) in [
            ("hunter2".to_owned(), "entry 1 of 1 is not name:role:sha256"),
            (format!("a:ops:{DIGEST}:hunter2"), "entry 1 of 1 is not name:role:sha256"),
            (format!("a b:ops:{DIGEST}"), "has a name that is not"),
            (format!(":ops:{DIGEST}"), "has a name that is not"),
            (format!("{}:ops:{DIGEST}", "x".repeat(129)), "has a name that is not"),
            (format!("system:ops:{DIGEST}"), "the server's own in the audit"),
            (format!("a:hunter2:{DIGEST}"), "has a role that is not viewer, order or ops"),
            (format!("a:OPS:{DIGEST}"), "has a role that is not viewer, order or ops"),
            ("a:ops:hunter2".to_owned(), "has no SHA-256 at its end"),
            (format!("a:ops:{}", &DIGEST[1..]), "has no SHA-256 at its end"),
            (format!("a:ops:+{}", &DIGEST[1..]), "has no SHA-256 at its end"),
            (format!("a:ops:{DIGEST_OF_NOTHING}"), "has the SHA-256 of an empty text"),
            (format!("a:ops:{DIGEST},b:ops:{DIGEST}"), "entry 2 of 2 has the digest of an entry"),
            (format!("a:ops:{DIGEST},a:order:{OTHER}"), "entry 2 of 2 has the name of an entry"),
        ] {
            let tokens = Tokens::new(&entry);
            let problems = tokens.read().expect_err(&entry);
            assert!(problems[0].contains(problem), "{problems:?}");
            let shown = format!("{problems:?}{tokens:?}{}", serde_json::json!(tokens));
            assert!(!shown.contains("hunter2") && !shown.contains(&DIGEST[..16]), "{shown}");
        }
    }

    #[test]
    fn subjects_are_names_with_a_role() {
        let text = "spiffe://shop/ns=a/checkout=order,ops.example.com = ops, Anna B=viewer";
        let subjects = Subjects::new(text).read().unwrap();
        let read: Vec<_> = subjects.iter().map(|subject| (&*subject.name, subject.role)).collect();
        assert_eq!(
            read,
            [
                ("spiffe://shop/ns=a/checkout", Role::Order),
                ("ops.example.com", Role::Ops),
                ("Anna B", Role::Viewer)
            ]
        );
        for (text, problem) in [
            ("a", "is not name=role"),
            ("a=root", "has a role"),
            ("=ops", "has a name"),
            ("system=ops", "the server's own"),
            ("a=ops,a=order", "entry 2 of 2 has the name"),
        ] {
            let problems = Subjects::new(text).read().expect_err(text);
            assert!(problems[0].contains(problem), "{problems:?}");
        }
    }

    #[test]
    fn each_role_includes_those_before_it() {
        assert!(Role::Viewer < Role::Order && Role::Order < Role::Ops);
        for role in [Role::Viewer, Role::Order, Role::Ops] {
            assert_eq!(Role::named(role.as_str()), Some(role));
        }
    }
}
