//! The Lua VM of the embedded engine: compiles our scripts once, runs them, and carries values
//! between Lua and the keyspace with the conversions of Redis 7.
//!
//! **Invariant:** a script can neither leave anything behind in the VM nor run for ever.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use bstr::{BString, ByteSlice};
use mlua::{Either, Function, HookTriggers, Lua, LuaOptions, MultiValue, StdLib, Table, VmState};

use super::keyspace::{Keyspace, Refusal, Reply, number_text};
use crate::engine::{Script, Value};

/// How often the hook looks, in VM instructions.
const HOOK_INTERVAL: u32 = 100_000;
/// After so many looks a script is stopped: 50 million instructions, under a second. The longest
/// of ours, loading a full chunk, needs under a hundred thousand.
const MAX_HOOKS: u32 = 500;
/// How deep a reply may be nested.
const MAX_DEPTH: u32 = 32;

const NOT_TEXT: &str = "ERR Lua redis lib command arguments must be strings or integers";
/// Tells the prelude to call again with the arguments as they are.
const EXACTLY: &str = "exactly";

pub(super) struct Vm {
    lua: Lua,
    environment: Table,
    enter: Function,
    scripts: HashMap<&'static str, (Script, Function)>,
    ok: mlua::LuaString,
    err: mlua::LuaString,
    hooks: Arc<AtomicU32>,
}

impl Vm {
    pub(super) fn new(keys: &Arc<Mutex<Keyspace>>) -> mlua::Result<Self> {
        let lua =
            Lua::new_with(StdLib::TABLE | StdLib::STRING | StdLib::MATH, LuaOptions::default())?;
        let hooks = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&hooks);
        let triggers = HookTriggers::new().every_nth_instruction(HOOK_INTERVAL);
        lua.set_hook(triggers, move |_, _| {
            if seen.fetch_add(1, Ordering::Relaxed) < MAX_HOOKS {
                Ok(VmState::Continue)
            } else {
                Err(mlua::Error::runtime("the script ran for too long"))
            }
        })?;
        let (run, run_many, run_exactly) = commands(&lua, keys)?;
        let (environment, enter) = lua
            .load(include_str!("prelude.lua"))
            .set_name("@prelude")
            .call((run, run_many, run_exactly))?;
        let (ok, err) = (lua.create_string("ok")?, lua.create_string("err")?);
        Ok(Self { lua, environment, enter, scripts: HashMap::new(), ok, err, hooks })
    }

    /// Runs a script; an error is the text that Redis would reply, code first.
    pub(super) fn run(
        &mut self,
        script: Script,
        keys: &[String],
        server: &str,
        args: &[Vec<u8>],
    ) -> Result<Value, String> {
        self.hooks.store(0, Ordering::Relaxed);
        match self.call(script, keys, server, args) {
            Ok((reply, None)) => self.reply(&reply, 0),
            Ok((_, Some(refusal))) => Err(refusal.to_string()),
            Err(error) => Err(format!("ERR {error}")),
        }
    }

    fn call(
        &mut self,
        script: Script,
        keys: &[String],
        server: &str,
        args: &[Vec<u8>],
    ) -> mlua::Result<(mlua::Value, Option<BString>)> {
        let keys = self.lua.create_sequence_from(keys.iter().map(String::as_str))?;
        let args = args.iter().map(|arg| text(arg));
        let args =
            self.lua.create_sequence_from(std::iter::once(Either::Left(server)).chain(args))?;
        let function = match self.scripts.get(script.name) {
            Some((known, function)) if *known == script => function.clone(),
            _ => self.compile(script)?,
        };
        self.enter.call((function, keys, args))
    }

    fn compile(&mut self, script: Script) -> mlua::Result<Function> {
        // On the first line, so that errors name the lines of the script. Locals are faster than
        // globals, and an assignment to them lasts no longer than the script.
        let source = format!("local KEYS, ARGV = ...; {}", script.source);
        let function = self
            .lua
            .load(source)
            .set_name("@user_script")
            .set_environment(self.environment.clone())
            .into_function()?;
        self.scripts.insert(script.name, (script, function.clone()));
        Ok(function)
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "Redis replies nil for any other value")]
    /// Redis's conversion: a number loses its fraction, true is 1, false is nil, a table is an
    /// error, a status, or an array up to its first nil.
    fn reply(&self, value: &mlua::Value, depth: u32) -> Result<Value, String> {
        match value {
            mlua::Value::String(text) => Ok(Value::Bulk(text.as_bytes().to_vec())),
            mlua::Value::Integer(number) => Ok(Value::Int(*number)),
            #[allow(clippy::cast_possible_truncation, reason = "what Redis does, but defined")]
            mlua::Value::Number(number) => Ok(Value::Int(*number as i64)),
            mlua::Value::Boolean(true) => Ok(Value::Int(1)),
            mlua::Value::Table(table) => self.table_reply(table, depth),
            _ => Ok(Value::Nil),
        }
    }

    fn table_reply(&self, table: &Table, depth: u32) -> Result<Value, String> {
        if depth == MAX_DEPTH {
            return Err("ERR reached lua stack limit".to_owned());
        }
        let internal = |error: mlua::Error| format!("ERR {error}");
        if let mlua::Value::String(text) = table.raw_get(&self.err).map_err(internal)? {
            return Err(text.as_bytes().as_bstr().to_string());
        }
        if let mlua::Value::String(text) = table.raw_get(&self.ok).map_err(internal)? {
            return Ok(Value::Bulk(text.as_bytes().to_vec()));
        }
        let mut items = Vec::with_capacity(table.raw_len());
        for at in 1.. {
            let item: mlua::Value = table.raw_get(at).map_err(internal)?;
            if item.is_nil() {
                break;
            }
            items.push(self.reply(&item, depth + 1)?);
        }
        Ok(Value::Array(items))
    }
}

/// A value on its way into Lua. Text, numbers and booleans are pushed as they are; only tables,
/// and text that is not UTF-8, take the longer way through a reference.
type Pushed = Either<Either<bool, f64>, Either<String, mlua::Value>>;

/// What a command gives back to the prelude: a reply, or false and why not.
type Answer = (Pushed, Option<Refusal>);

fn refused(why: impl Into<Refusal>) -> Answer {
    (Either::Left(Either::Left(false)), Some(why.into()))
}

/// The three ways into the keyspace, from quick to exact.
///
/// Reading an argument from the stack as text is quick, but a number comes out as `%.14g`, where
/// Redis writes `%.17g`. The two agree on whole numbers of up to 14 digits, so only a text that
/// could be another number makes the prelude call again, the slow and exact way, before
/// anything happened.
fn commands(
    lua: &Lua,
    keys: &Arc<Mutex<Keyspace>>,
) -> mlua::Result<(Function, Function, Function)> {
    type Arg = Option<Either<BString, mlua::Value>>;
    type Few = (usize, Arg, Arg, Arg, Arg, Arg, Arg, Arg, Arg);

    let keyspace = Arc::clone(keys);
    let run = lua.create_function(move |lua, (count, a, b, c, d, e, f, g, h): Few| {
        // What is not text becomes empty, and empty is looked at again.
        let args = [a, b, c, d, e, f, g, h].map(|arg| match arg {
            Some(Either::Left(text)) => text,
            Some(Either::Right(_)) | None => BString::default(),
        });
        quickly(lua, &keyspace, &args[..count.min(8)])
    })?;

    let keyspace = Arc::clone(keys);
    let run_many = lua.create_function(move |lua, (count, table): (usize, Table)| {
        let mut args = Vec::with_capacity(count);
        let all = table.for_each_value(|arg: BString| {
            args.push(arg);
            Ok(())
        });
        if all.is_err() || args.len() != count {
            return Ok(refused(EXACTLY));
        }
        quickly(lua, &keyspace, &args)
    })?;

    let keyspace = Arc::clone(keys);
    let run_exactly = lua.create_function(move |lua, args: MultiValue| {
        let args: Option<Vec<BString>> = args.iter().map(exact_text).collect();
        match args {
            Some(args) => run_command(lua, &keyspace, &args),
            None => Ok(refused(NOT_TEXT)),
        }
    })?;
    Ok((run, run_many, run_exactly))
}

fn quickly(lua: &Lua, keys: &Mutex<Keyspace>, args: &[BString]) -> mlua::Result<Answer> {
    if args.iter().any(|arg| arg.is_empty() || may_be_a_number(arg)) {
        return Ok(refused(EXACTLY));
    }
    run_command(lua, keys, args)
}

fn run_command(lua: &Lua, keys: &Mutex<Keyspace>, args: &[BString]) -> mlua::Result<Answer> {
    // Only the engine's own lock is ever contended; a panic under it ends the engine.
    let mut keys = keys.lock().unwrap_or_else(PoisonError::into_inner);
    match keys.run(args) {
        Ok(reply) => Ok((pushed(lua, reply)?, None)),
        Err(refusal) => Ok(refused(refusal)),
    }
}

fn pushed(lua: &Lua, reply: Reply<'_>) -> mlua::Result<Pushed> {
    Ok(match reply {
        Reply::Nil => Either::Left(Either::Left(false)),
        // As in Redis, a whole number above 2^53 is rounded.
        #[allow(clippy::cast_precision_loss, reason = "Lua 5.1 has no integers")]
        Reply::Int(number) => Either::Left(Either::Right(number as f64)),
        Reply::Bulk(bytes) => Either::Right(match std::str::from_utf8(&bytes) {
            Ok(text) => Either::Left(text.to_owned()),
            Err(_) => Either::Right(mlua::Value::String(lua.create_string(bytes)?)),
        }),
        Reply::Status(word) => {
            let table = lua.create_table_with_capacity(0, 1)?;
            table.raw_set("ok", word)?;
            Either::Right(Either::Right(mlua::Value::Table(table)))
        }
        Reply::Array(items) if items.iter().any(|item| matches!(item, Reply::Array(_))) => {
            let table = lua.create_table_with_capacity(items.len(), 0)?;
            for item in items {
                table.raw_push(pushed(lua, item)?)?;
            }
            Either::Right(Either::Right(mlua::Value::Table(table)))
        }
        Reply::Array(items) => {
            let items = items.into_iter().map(|item| match item {
                Reply::Bulk(Cow::Borrowed(bytes)) => Ok(Either::Right(text(bytes))),
                Reply::Int(number) => Ok(Either::Left(Either::Right(number))),
                Reply::Nil => Ok(Either::Left(Either::Left(false))),
                other @ (Reply::Bulk(Cow::Owned(_)) | Reply::Status(_) | Reply::Array(_)) => {
                    Err(other)
                }
            });
            let items: Vec<_> = items
                .collect::<Result<_, _>>()
                .map_err(|item| mlua::Error::runtime(format!("no array holds a {item:?}")))?;
            Either::Right(Either::Right(mlua::Value::Table(lua.create_sequence_from(items)?)))
        }
    })
}

/// Bytes on their way into Lua; the left one is quicker.
fn text(bytes: &[u8]) -> Either<&str, &bstr::BStr> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Either::Left(text),
        Err(_) => Either::Right(bytes.as_bstr()),
    }
}

#[allow(clippy::wildcard_enum_match_arm, reason = "Redis takes nothing else")]
fn exact_text(value: &mlua::Value) -> Option<BString> {
    match value {
        mlua::Value::String(text) => Some(text.as_bytes().to_vec().into()),
        #[allow(clippy::cast_precision_loss, reason = "it was a Lua number, so it is one of them")]
        mlua::Value::Integer(number) => Some(number_text(*number as f64).into()),
        mlua::Value::Number(number) => Some(number_text(*number).into()),
        _ => None,
    }
}

/// Whether `%.14g` of a number could be this text, and `%.17g` another.
fn may_be_a_number(text: &[u8]) -> bool {
    let Some(first) = text.first() else {
        return false;
    };
    matches!(first, b'0'..=b'9' | b'-' | b'i' | b'n')
        && text.len() <= 24
        && text.iter().all(|b| {
            matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'i' | b'n' | b'f' | b'a')
        })
        && text.iter().any(|b| !b.is_ascii_digit())
}
