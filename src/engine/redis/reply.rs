//! Calls as commands, replies as values, and what an error of a server means.

use ::redis::{Cmd, RedisError, ServerError};

use super::target::Host;
use crate::engine::{Call, EngineError, Value};

/// Why a server has no reply to a call.
#[derive(Debug)]
pub(super) enum Refused {
    /// What the caller hears.
    Error(EngineError),
    /// The script did not run, and this server may not be the master any more.
    Unfit(EngineError),
    /// The script did not run: the slot is another server's.
    Moved(String),
    /// The script did not run: the slot moves there, and these keys have gone already.
    Ask(Host),
    /// The script did not run: the slot moves, and some of these keys have gone already.
    TryAgain(String),
}

impl Refused {
    /// What an error of the server `host` means.
    pub(super) fn by(host: &Host, error: &ServerError) -> Self {
        let text = error_text(error);
        match error.code() {
            "MOVED" => Self::Moved(text),
            "ASK" => match error.details().and_then(|details| details.split(' ').nth(1)) {
                Some(target) => match Host::redirected(target, host) {
                    Some(target) => Self::Ask(target),
                    None => Self::Error(EngineError::NotRun(text)),
                },
                None => Self::Error(EngineError::NotRun(text)),
            },
            "TRYAGAIN" => Self::TryAgain(text),
            // The server is well, and so are its other slots.
            "CLUSTERDOWN" if text.contains("not served") => {
                Self::Unfit(EngineError::PartAway(text))
            }
            "READONLY" | "CLUSTERDOWN" | "MASTERDOWN" | "LOADING" => {
                Self::Unfit(EngineError::NotRun(text))
            }
            "OOM" | "MISCONF" => Self::Error(EngineError::Full(text)),
            code if means_not_run(code) => Self::Error(EngineError::NotRun(text)),
            _ => Self::Error(EngineError::Script(text)),
        }
    }
}

/// Codes with which a server refuses a script before its first write, beside those above. Inside
/// a script Redis checks for READONLY only until something is written.
fn means_not_run(code: &str) -> bool {
    matches!(code, "NOSCRIPT" | "BUSY" | "NOAUTH" | "WRONGPASS" | "NOREPLICAS" | "CROSSSLOT")
}

pub(super) fn command(name: &str, script: &str, call: &Call, server: &str) -> Cmd {
    let mut command = ::redis::cmd(name);
    command.arg(script).arg(call.keys.len());
    for key in call.keys.iter() {
        command.arg(key);
    }
    command.arg(server);
    for arg in &call.args {
        command.arg(arg.as_slice());
    }
    command
}

/// Whether a reply says that the keys were written under another identity; see `lua/guard.lua`.
pub(super) fn is_of_another_server(reply: &Value) -> bool {
    let Value::Array(items) = reply else {
        return false;
    };
    let is = |at: usize, word: &[u8]| matches!(items.get(at), Some(Value::Bulk(b)) if b == word);
    (is(0, b"frozen") || is(0, b"retry")) && is(3, b"server")
}

fn error_text(error: &ServerError) -> String {
    match error.details() {
        Some(details) => format!("{} {details}", error.code()),
        None => error.code().to_owned(),
    }
}

/// A connect error as one would say it.
pub(super) fn plain_text(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ if error.is_timeout() => "no answer in time".to_owned(),
        _ => error.to_string(),
    }
}

pub(super) fn value(reply: ::redis::Value) -> Result<Value, EngineError> {
    convert(reply).map_err(|error| EngineError::Script(error_text(&error)))
}

#[allow(clippy::wildcard_enum_match_arm, reason = "redis-rs may add kinds; our scripts have few")]
fn convert(reply: ::redis::Value) -> Result<Value, ServerError> {
    use ::redis::Value as Reply;
    Ok(match reply {
        Reply::Int(number) => Value::Int(number),
        Reply::BulkString(bytes) => Value::Bulk(bytes),
        Reply::SimpleString(text) | Reply::VerbatimString { text, .. } => {
            Value::Bulk(text.into_bytes())
        }
        Reply::Okay => Value::Bulk(b"OK".to_vec()),
        Reply::Boolean(true) => Value::Int(1),
        Reply::Array(items) | Reply::Set(items) => {
            Value::Array(items.into_iter().map(convert).collect::<Result<_, _>>()?)
        }
        Reply::ServerError(error) => return Err(error),
        _ => Value::Nil,
    })
}
