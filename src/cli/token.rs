//! `seckill token`: tokens for callers.

use clap::{Args, Subcommand};
use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::json;

use super::{Context, Exit, failure::Failure};
use crate::config::{Role, Token, digest};

/// What every token begins with, so that people and scanners know one when they see it.
const PREFIX: &str = "skt_";
/// How many random bytes a token has.
const RANDOM_BYTES: usize = 32;

/// What to do with tokens.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    New(New),
}

/// Makes a random token, prints it once, and prints the entry for auth.tokens.
///
/// The server needs the entry, and the caller the token; nothing is stored here.
#[derive(Debug, Args)]
pub struct New {
    /// Who will call with it; the audit shows this name.
    name: String,
    /// What the caller may do: viewer, order or ops; each includes those before it.
    #[arg(long, value_parser = role)]
    role: Role,
}

impl TokenCommand {
    pub(super) fn run(self, context: &Context) -> Result<Exit, Failure> {
        match self {
            Self::New(new) => new.run(context),
        }
    }
}

impl New {
    fn run(self, context: &Context) -> Result<Exit, Failure> {
        let Self { name, role } = self;
        let token = random_token()?;
        let entry = Token { name: name.as_str().into(), role, digest: digest(token.as_bytes()) };
        let entry = entry.entry().map_err(|problem| {
            Failure::Usage(format!("{name:?} can't be the name of a token: the entry {problem}"))
        })?;
        context.printer.answer(&json!({
            "name": name,
            "role": role.as_str(),
            "token": token,
            "entry": entry,
        }));
        Ok(Exit::Ok)
    }
}

fn role(text: &str) -> Result<Role, String> {
    Role::named(text).ok_or_else(|| "must be viewer, order or ops".to_owned())
}

fn random_token() -> Result<String, Failure> {
    let mut bytes = [0; RANDOM_BYTES];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Failure::Unavailable("the system gives no random bytes".to_owned()))?;
    Ok(bytes.iter().fold(PREFIX.to_owned(), |text, byte| format!("{text}{byte:02x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_have_one_form() {
        let (one, other) = (random_token().expect("random"), random_token().expect("random"));
        assert_ne!(one, other);
        assert_eq!(one.len(), PREFIX.len() + 2 * RANDOM_BYTES);
        assert!(one.starts_with(PREFIX) && one.bytes().all(|b| b.is_ascii_graphic()), "{one}");
    }
}
