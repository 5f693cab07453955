//! The keys of the embedded engine, and the Redis commands that our scripts use on them.
//!
//! Each command does what Redis 7 does, down to the text of its errors; any other command, and
//! any option that our scripts do not use, is refused by name.
//!
//! **Invariant:** a command that replies an error changed nothing, and no key holds an empty
//! collection.

use std::{
    borrow::{Borrow, Cow},
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry as Slot},
    ops::Bound,
    sync::Arc,
};

use foldhash::fast::RandomState;
use indexmap::{IndexMap, IndexSet};

/// What a command replies, before it becomes a Lua value.
#[derive(Debug)]
pub(super) enum Reply<'a> {
    Nil,
    Int(i64),
    Bulk(Cow<'a, [u8]>),
    Status(&'static str),
    Array(Vec<Reply<'a>>),
}

/// The text of an error reply, code first.
pub(super) type Refusal = Cow<'static, str>;

type Result<T> = std::result::Result<T, Refusal>;

const WRONG_TYPE: Refusal =
    Cow::Borrowed("WRONGTYPE Operation against a key holding the wrong kind of value");
const NOT_AN_INTEGER: Refusal = Cow::Borrowed("ERR value is not an integer or out of range");
const OVERFLOW: Refusal = Cow::Borrowed("ERR increment or decrement would overflow");
const SYNTAX: Refusal = Cow::Borrowed("ERR syntax error");
const WRONG_ARITY: Refusal =
    Cow::Borrowed("ERR Wrong number of args calling Redis command from script");

type Bytes = Box<[u8]>;
/// In an order that pages can be read in; see `hscan`.
type Hash = IndexMap<Bytes, Bytes, RandomState>;
/// As [`Hash`].
type Set = IndexSet<Bytes, RandomState>;

/// A sorted set; members are shared between its two halves.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct SortedSet {
    scores: HashMap<Arc<[u8]>, Score, RandomState>,
    order: BTreeSet<(Score, Arc<[u8]>)>,
}

/// A score in the total order of Redis; never NaN.
#[derive(Debug, Clone, Copy)]
struct Score(f64);

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Score {}
impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // -0 and 0 are one score.
        (self.0 + 0.0).total_cmp(&(other.0 + 0.0))
    }
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Content {
    Text(Bytes),
    Hash(Hash),
    Set(Set),
    SortedSet(SortedSet),
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Entry {
    content: Content,
    /// Milliseconds since 1970; the key is gone after it.
    expires_at: Option<i64>,
}

/// What a removed key held; dropped by whoever called, outside the engine's lock.
#[derive(Debug, Default)]
pub(super) struct Trash {
    _contents: Vec<Entry>,
}

/// One key as a test sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dumped {
    pub content: DumpedContent,
    /// Milliseconds since 1970.
    pub expires_at: Option<i64>,
}

/// A key's type and value, sorted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DumpedContent {
    Text(Vec<u8>),
    Hash(BTreeMap<Vec<u8>, Vec<u8>>),
    Set(BTreeSet<Vec<u8>>),
    /// Member and score as Redis writes it, in order.
    SortedSet(Vec<(Vec<u8>, String)>),
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Keyspace {
    entries: HashMap<Bytes, Entry, RandomState>,
    /// Every key that has an expiry, soonest first.
    expiries: BTreeSet<(i64, Bytes)>,
    now_ms: i64,
    trash: Vec<Entry>,
    published: Vec<Bytes>,
}

impl Keyspace {
    /// Sets the time of the script that comes, and drops every key whose time is over.
    ///
    /// Time stands still while a script runs, as it does in Redis, so no command needs to look.
    pub(super) fn start(&mut self, now_ms: i64) {
        self.now_ms = now_ms;
        while let Some((at, _)) = self.expiries.first()
            && *at < now_ms
            && let Some((_, key)) = self.expiries.pop_first()
        {
            self.trash.extend(self.entries.remove(&key));
        }
    }

    /// Hands over what was removed.
    pub(super) fn take_trash(&mut self) -> Trash {
        Trash { _contents: std::mem::take(&mut self.trash) }
    }

    /// Hands over the messages that were published, on whatever channel.
    pub(super) fn take_published(&mut self) -> Vec<Bytes> {
        std::mem::take(&mut self.published)
    }

    /// Runs one command; `args` begins with its name.
    pub(super) fn run<T: AsRef<[u8]>>(&mut self, args: &[T]) -> Result<Reply<'_>> {
        let Some((name, args)) = args.split_first() else {
            return Err("ERR Please specify at least one argument for this redis lib call".into());
        };
        let name = name.as_ref();
        let mut upper = [0; 16];
        let Some(upper) = upper.get_mut(..name.len()) else {
            return Err(unknown(name));
        };
        upper.copy_from_slice(name);
        upper.make_ascii_uppercase();
        let args = Args(args);
        match &*upper {
            b"GET" => self.get(args.exactly(1)?),
            b"SET" => self.set(args.at_least(2)?),
            b"INCRBY" => self.add(args.exactly(2)?, 1),
            b"DECRBY" => self.add(args.exactly(2)?, -1),
            b"EXISTS" => self.exists(args.at_least(1)?),
            b"TYPE" => self.kind(args.exactly(1)?),
            b"UNLINK" | b"DEL" => self.unlink(args.at_least(1)?),
            b"PEXPIREAT" => self.expire_at(args.at_least(2)?),
            b"PTTL" => self.remaining_ms(args.exactly(1)?),
            b"HGET" => self.hget(args.exactly(2)?),
            b"HMGET" => self.hmget(args.at_least(2)?),
            b"HSET" => self.hset(args.at_least(3)?),
            b"HDEL" => self.hdel(args.at_least(2)?),
            b"HLEN" => self.hlen(args.exactly(1)?),
            b"HSCAN" => self.hscan(args.at_least(2)?),
            b"HINCRBY" => self.hincrby(args.exactly(3)?),
            b"SSCAN" => self.sscan(args.at_least(2)?),
            b"PUBLISH" => self.publish(args.exactly(2)?),
            b"SADD" => self.sadd(args.at_least(2)?),
            b"SREM" => self.srem(args.at_least(2)?),
            b"SISMEMBER" => self.sismember(args.exactly(2)?),
            b"SMISMEMBER" => self.smismember(args.at_least(2)?),
            b"SCARD" => self.scard(args.exactly(1)?),
            b"ZADD" => self.zadd(args.at_least(3)?),
            b"ZREM" => self.zrem(args.at_least(2)?),
            b"ZSCORE" => self.zscore(args.exactly(2)?),
            b"ZCARD" => self.zcard(args.exactly(1)?),
            b"ZRANGEBYSCORE" => self.zrangebyscore(args.at_least(3)?),
            _ => Err(unknown(name)),
        }
    }

    /// Everything there is, sorted, for tests to compare.
    pub(super) fn dump(&self) -> BTreeMap<String, Dumped> {
        let owned = |bytes: &[u8]| bytes.to_vec();
        let content = |content: &Content| match content {
            Content::Text(text) => DumpedContent::Text(owned(text)),
            Content::Hash(hash) => {
                DumpedContent::Hash(hash.iter().map(|(k, v)| (owned(k), owned(v))).collect())
            }
            Content::Set(set) => DumpedContent::Set(set.iter().map(|m| owned(m)).collect()),
            Content::SortedSet(set) => DumpedContent::SortedSet(
                set.order.iter().map(|(score, m)| (owned(m), number_text(score.0))).collect(),
            ),
        };
        self.entries
            .iter()
            .map(|(key, entry)| {
                let dumped =
                    Dumped { content: content(&entry.content), expires_at: entry.expires_at };
                (String::from_utf8_lossy(key).into_owned(), dumped)
            })
            .collect()
    }

    fn publish<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        self.published.push(args.get(1).into());
        Ok(Reply::Int(1))
    }

    // Keys of any type.

    fn exists<T: AsRef<[u8]>>(&self, keys: Args<'_, T>) -> Result<Reply<'_>> {
        count(keys.iter().filter(|key| self.entries.contains_key(*key)).count())
    }

    fn kind<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        Ok(Reply::Status(match self.entries.get(args.get(0)).map(|entry| &entry.content) {
            None => "none",
            Some(Content::Text(_)) => "string",
            Some(Content::Hash(_)) => "hash",
            Some(Content::Set(_)) => "set",
            Some(Content::SortedSet(_)) => "zset",
        }))
    }

    fn unlink<T: AsRef<[u8]>>(&mut self, keys: Args<'_, T>) -> Result<Reply<'_>> {
        count(keys.iter().filter(|key| self.remove(key)).count())
    }

    fn expire_at<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let at = integer(args.get(1)).ok_or(NOT_AN_INTEGER)?;
        if args.len() > 2 {
            return Err(refused_option("PEXPIREAT", args.get(2)));
        }
        let key = args.get(0);
        let Some(entry) = self.entries.get(key) else {
            return Ok(Reply::Int(0));
        };
        if at <= self.now_ms {
            self.remove(key);
        } else if entry.expires_at != Some(at) {
            self.set_expiry(key, Some(at));
        }
        Ok(Reply::Int(1))
    }

    fn remaining_ms<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        Ok(Reply::Int(match self.entries.get(args.get(0)) {
            None => -2,
            Some(entry) => entry.expires_at.map_or(-1, |at| (at - self.now_ms).max(0)),
        }))
    }

    // Strings.

    fn get<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        Ok(self.text(args.get(0))?.map_or(Reply::Nil, |text| Reply::Bulk(Cow::Borrowed(text))))
    }

    fn set<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let expires_at = match args.len() {
            2 => None,
            len => {
                let from = match &*args.get(2).to_ascii_uppercase() {
                    b"PXAT" => 0,
                    b"PX" => self.now_ms,
                    _ => return Err(refused_option("SET", args.get(2))),
                };
                if len != 4 {
                    return Err(SYNTAX);
                }
                let span = integer(args.get(3)).ok_or(NOT_AN_INTEGER)?;
                match span.checked_add(from) {
                    Some(at) if span > 0 => Some(at),
                    Some(_) | None => {
                        return Err("ERR invalid expire time in 'set' command".into());
                    }
                }
            }
        };
        let key = args.get(0);
        self.remove(key);
        // In the past: stored and gone at once.
        if expires_at.is_none_or(|at| at > self.now_ms) {
            let content = Content::Text(args.get(1).into());
            self.entries.insert(key.into(), Entry { content, expires_at: None });
            self.set_expiry(key, expires_at);
        }
        Ok(Reply::Status("OK"))
    }

    fn add<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>, sign: i64) -> Result<Reply<'_>> {
        let by = integer(args.get(1)).ok_or(NOT_AN_INTEGER)?;
        let by = by.checked_mul(sign).ok_or("ERR decrement would overflow")?;
        let key = args.get(0);
        let old = self.text(key)?.map_or(Some(0), integer).ok_or(NOT_AN_INTEGER)?;
        let new = old.checked_add(by).ok_or(OVERFLOW)?;
        let content = Content::Text(integer_text(new));
        match self.entries.get_mut(key) {
            Some(entry) => entry.content = content,
            None => {
                self.entries.insert(key.into(), Entry { content, expires_at: None });
            }
        }
        Ok(Reply::Int(new))
    }

    // Hashes.

    fn hget<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let hash = self.hash(args.get(0))?;
        Ok(field(hash, args.get(1)))
    }

    fn hmget<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let hash = self.hash(args.get(0))?;
        Ok(Reply::Array(args.from(1).iter().map(|name| field(hash, name)).collect()))
    }

    fn hset<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        if args.len().is_multiple_of(2) {
            return Err("ERR wrong number of arguments for 'hset' command".into());
        }
        let hash = self.hash_mut(args.get(0))?;
        let mut added = 0;
        for pair in args.from(1).0.chunks_exact(2) {
            let (name, value) = (pair[0].as_ref(), Bytes::from(pair[1].as_ref()));
            match hash.get_mut(name) {
                Some(old) => *old = value,
                None => {
                    hash.insert(name.into(), value);
                    added += 1;
                }
            }
        }
        count(added)
    }

    fn hdel<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let key = args.get(0);
        let Some(entry) = self.entries.get_mut(key) else {
            return Ok(Reply::Int(0));
        };
        let Content::Hash(hash) = &mut entry.content else {
            return Err(WRONG_TYPE);
        };
        let removed = args.from(1).iter().filter(|name| hash.swap_remove(*name).is_some()).count();
        if hash.is_empty() {
            self.remove(key);
        }
        count(removed)
    }

    fn hscan<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let hash = self.hash(args.get(0))?;
        let (start, end) = page(&args, "HSCAN", hash.map_or(0, Hash::len))?;
        let fields = hash.and_then(|hash| hash.get_range(start..end)).into_iter().flatten();
        let fields = fields.flat_map(|(name, value)| {
            [Reply::Bulk(Cow::Borrowed(name)), Reply::Bulk(Cow::Borrowed(value))]
        });
        Ok(Reply::Array(vec![cursor(start), Reply::Array(fields.collect())]))
    }

    fn hlen<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        count(self.hash(args.get(0))?.map_or(0, Hash::len))
    }

    fn hincrby<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let by = integer(args.get(2)).ok_or(NOT_AN_INTEGER)?;
        let (key, name) = (args.get(0), args.get(1));
        let old = match self.hash(key)?.and_then(|hash| hash.get(name)) {
            None => 0,
            Some(old) => integer(old).ok_or("ERR hash value is not an integer")?,
        };
        let new = old.checked_add(by).ok_or(OVERFLOW)?;
        let hash = self.hash_mut(key)?;
        match hash.get_mut(name) {
            Some(old) => *old = integer_text(new),
            None => {
                hash.insert(name.into(), integer_text(new));
            }
        }
        Ok(Reply::Int(new))
    }

    // Sets.

    fn sadd<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let set = self.set_mut(args.get(0))?;
        let mut added = 0;
        for member in args.from(1).iter() {
            if !set.contains(member) {
                set.insert(member.into());
                added += 1;
            }
        }
        count(added)
    }

    fn sscan<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let set = self.members(args.get(0))?;
        let (start, end) = page(&args, "SSCAN", set.map_or(0, Set::len))?;
        let members = set.and_then(|set| set.get_range(start..end)).into_iter().flatten();
        let members = members.map(|member| Reply::Bulk(Cow::Borrowed(member)));
        Ok(Reply::Array(vec![cursor(start), Reply::Array(members.collect())]))
    }

    fn srem<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let key = args.get(0);
        let Some(entry) = self.entries.get_mut(key) else {
            return Ok(Reply::Int(0));
        };
        let Content::Set(set) = &mut entry.content else {
            return Err(WRONG_TYPE);
        };
        let removed = args.from(1).iter().filter(|member| set.swap_remove(*member)).count();
        if set.is_empty() {
            self.remove(key);
        }
        count(removed)
    }

    fn sismember<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let set = self.members(args.get(0))?;
        Ok(Reply::Int(i64::from(set.is_some_and(|set| set.contains(args.get(1))))))
    }

    fn smismember<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let set = self.members(args.get(0))?;
        let is_member = |member| i64::from(set.is_some_and(|set| set.contains(member)));
        Ok(Reply::Array(args.from(1).iter().map(|member| Reply::Int(is_member(member))).collect()))
    }

    fn scard<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        count(self.members(args.get(0))?.map_or(0, Set::len))
    }

    // Sorted sets.

    fn zadd<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        const FLAGS: [&[u8]; 6] = [b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR"];
        if FLAGS.iter().any(|flag| args.get(1).eq_ignore_ascii_case(flag)) {
            return Err(refused_option("ZADD", args.get(1)));
        }
        if args.len().is_multiple_of(2) {
            return Err(SYNTAX);
        }
        let pairs = args.from(1).0.chunks_exact(2);
        let scores = pairs.clone().map(|pair| score(pair[0].as_ref()));
        let scores = scores.collect::<Option<Vec<_>>>();
        let scores = scores.ok_or("ERR value is not a valid float")?;
        let set = self.sorted_set_mut(args.get(0))?;
        let added =
            pairs.zip(scores).filter(|(pair, score)| set.insert(pair[1].as_ref(), *score)).count();
        count(added)
    }

    fn zrem<T: AsRef<[u8]>>(&mut self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let key = args.get(0);
        let Some(entry) = self.entries.get_mut(key) else {
            return Ok(Reply::Int(0));
        };
        let Content::SortedSet(set) = &mut entry.content else {
            return Err(WRONG_TYPE);
        };
        let removed = args.from(1).iter().filter(|member| set.remove(member)).count();
        if set.order.is_empty() {
            self.remove(key);
        }
        count(removed)
    }

    fn zscore<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let set = self.sorted_set(args.get(0))?;
        let score = set.and_then(|set| set.scores.get(args.get(1)));
        Ok(score.map_or(Reply::Nil, |s| Reply::Bulk(number_text(s.0).into_bytes().into())))
    }

    fn zcard<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        count(self.sorted_set(args.get(0))?.map_or(0, |set| set.order.len()))
    }

    fn zrangebyscore<T: AsRef<[u8]>>(&self, args: Args<'_, T>) -> Result<Reply<'_>> {
        let bound = |text| score_bound(text).ok_or("ERR min or max is not a float");
        let (min, max) = (bound(args.get(1))?, bound(args.get(2))?);
        let (skip, take) = match args.len() {
            3 => (0, -1),
            _ if !args.get(3).eq_ignore_ascii_case(b"LIMIT") => {
                return Err(refused_option("ZRANGEBYSCORE", args.get(3)));
            }
            6 => (
                integer(args.get(4)).ok_or(NOT_AN_INTEGER)?,
                integer(args.get(5)).ok_or(NOT_AN_INTEGER)?,
            ),
            _ => return Err(SYNTAX),
        };
        let set = self.sorted_set(args.get(0))?;
        // A negative offset finds nothing, a negative count everything.
        let (Some(set), Ok(skip)) = (set, usize::try_from(skip)) else {
            return Ok(Reply::Array(Vec::new()));
        };
        let take = usize::try_from(take).unwrap_or(usize::MAX);
        let from = match min {
            Bound::Included(score) | Bound::Excluded(score) => {
                Bound::Included((score, Arc::from(&[][..])))
            }
            Bound::Unbounded => Bound::Unbounded,
        };
        let above = |score: &Score| match min {
            Bound::Excluded(min) => *score > min,
            Bound::Included(_) | Bound::Unbounded => true,
        };
        let below = |score: &Score| match max {
            Bound::Included(max) => *score <= max,
            Bound::Excluded(max) => *score < max,
            Bound::Unbounded => true,
        };
        let members = set
            .order
            .range((from, Bound::Unbounded))
            .skip_while(|(score, _)| !above(score))
            .take_while(|(score, _)| below(score))
            .skip(skip)
            .take(take)
            .map(|(_, member)| Reply::Bulk(Cow::Borrowed(&**member)));
        Ok(Reply::Array(members.collect()))
    }

    // How a key is found: an error when it holds something else, made when it is missing.

    fn text(&self, key: &[u8]) -> Result<Option<&[u8]>> {
        match self.entries.get(key).map(|entry| &entry.content) {
            None => Ok(None),
            Some(Content::Text(text)) => Ok(Some(text)),
            Some(Content::Hash(_) | Content::Set(_) | Content::SortedSet(_)) => Err(WRONG_TYPE),
        }
    }

    fn hash(&self, key: &[u8]) -> Result<Option<&Hash>> {
        match self.entries.get(key).map(|entry| &entry.content) {
            None => Ok(None),
            Some(Content::Hash(hash)) => Ok(Some(hash)),
            Some(Content::Text(_) | Content::Set(_) | Content::SortedSet(_)) => Err(WRONG_TYPE),
        }
    }

    fn members(&self, key: &[u8]) -> Result<Option<&Set>> {
        match self.entries.get(key).map(|entry| &entry.content) {
            None => Ok(None),
            Some(Content::Set(set)) => Ok(Some(set)),
            Some(Content::Text(_) | Content::Hash(_) | Content::SortedSet(_)) => Err(WRONG_TYPE),
        }
    }

    fn sorted_set(&self, key: &[u8]) -> Result<Option<&SortedSet>> {
        match self.entries.get(key).map(|entry| &entry.content) {
            None => Ok(None),
            Some(Content::SortedSet(set)) => Ok(Some(set)),
            Some(Content::Text(_) | Content::Hash(_) | Content::Set(_)) => Err(WRONG_TYPE),
        }
    }

    fn hash_mut(&mut self, key: &[u8]) -> Result<&mut Hash> {
        match self.content_mut(key, || Content::Hash(Hash::default())) {
            Content::Hash(hash) => Ok(hash),
            Content::Text(_) | Content::Set(_) | Content::SortedSet(_) => Err(WRONG_TYPE),
        }
    }

    fn set_mut(&mut self, key: &[u8]) -> Result<&mut Set> {
        match self.content_mut(key, || Content::Set(Set::default())) {
            Content::Set(set) => Ok(set),
            Content::Text(_) | Content::Hash(_) | Content::SortedSet(_) => Err(WRONG_TYPE),
        }
    }

    fn sorted_set_mut(&mut self, key: &[u8]) -> Result<&mut SortedSet> {
        match self.content_mut(key, || Content::SortedSet(SortedSet::default())) {
            Content::SortedSet(set) => Ok(set),
            Content::Text(_) | Content::Hash(_) | Content::Set(_) => Err(WRONG_TYPE),
        }
    }

    fn content_mut(&mut self, key: &[u8], make: fn() -> Content) -> &mut Content {
        if !self.entries.contains_key(key) {
            self.entries.insert(key.into(), Entry { content: make(), expires_at: None });
        }
        &mut self.entries.get_mut(key).expect("a key that was just made is there").content
    }

    fn remove(&mut self, key: &[u8]) -> bool {
        let Some((key, entry)) = self.entries.remove_entry(key) else {
            return false;
        };
        if let Some(at) = entry.expires_at {
            self.expiries.remove(&(at, key));
        }
        self.trash.push(entry);
        true
    }

    fn set_expiry(&mut self, key: &[u8], at: Option<i64>) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        if let Some(old) = std::mem::replace(&mut entry.expires_at, at) {
            self.expiries.remove(&(old, key.into()));
        }
        if let Some(at) = at {
            self.expiries.insert((at, key.into()));
        }
    }
}

impl SortedSet {
    /// Whether the member is new.
    fn insert(&mut self, member: &[u8], score: Score) -> bool {
        match self.scores.entry(Arc::from(member)) {
            Slot::Vacant(slot) => {
                self.order.insert((score, Arc::clone(slot.key())));
                slot.insert(score);
                true
            }
            Slot::Occupied(mut slot) => {
                let old = std::mem::replace(slot.get_mut(), score);
                if old != score {
                    self.order.remove(&(old, Arc::clone(slot.key())));
                    self.order.insert((score, Arc::clone(slot.key())));
                }
                false
            }
        }
    }

    fn remove(&mut self, member: &[u8]) -> bool {
        match self.scores.remove_entry(member) {
            Some((member, score)) => self.order.remove(&(score, member)),
            None => false,
        }
    }
}

/// What follows the name of a command.
struct Args<'a, T>(&'a [T]);

impl<'a, T: AsRef<[u8]>> Args<'a, T> {
    fn exactly(self, len: usize) -> Result<Self> {
        if self.0.len() == len { Ok(self) } else { Err(WRONG_ARITY) }
    }

    fn at_least(self, len: usize) -> Result<Self> {
        if self.0.len() >= len { Ok(self) } else { Err(WRONG_ARITY) }
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, at: usize) -> &'a [u8] {
        self.0[at].as_ref()
    }

    fn from(&self, at: usize) -> Self {
        Self(&self.0[at..])
    }

    fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a, T> {
        self.0.iter().map(AsRef::as_ref)
    }
}

fn field<'a>(hash: Option<&'a Hash>, name: &[u8]) -> Reply<'a> {
    match hash.and_then(|hash| hash.get(name)) {
        Some(value) => Reply::Bulk(Cow::Borrowed(Borrow::<[u8]>::borrow(value))),
        None => Reply::Nil,
    }
}

/// Which entries the next page of a scan has. It reads from the end to the beginning; the cursor
/// counts what is still to be read. What is removed leaves its place to the last, which was read
/// before; what is added comes last. So whatever is there all the time is read at least once.
fn page<T: AsRef<[u8]>>(args: &Args<'_, T>, command: &str, len: usize) -> Result<(usize, usize)> {
    let cursor = integer(args.get(1)).ok_or("ERR invalid cursor")?;
    let count = match args.len() {
        2 => 10,
        4 if args.get(2).eq_ignore_ascii_case(b"COUNT") => {
            integer(args.get(3)).ok_or(NOT_AN_INTEGER)?
        }
        _ => return Err(refused_option(command, args.get(2))),
    };
    let count = usize::try_from(count).ok().filter(|&count| count > 0).ok_or(SYNTAX)?;
    let end = match usize::try_from(cursor) {
        Ok(left) if left > 0 => left.min(len),
        Ok(_) | Err(_) => len,
    };
    Ok((end.saturating_sub(count), end))
}

/// Where the next page ends, as a cursor: 0 when there is none.
fn cursor<'a>(start: usize) -> Reply<'a> {
    Reply::Bulk(Cow::Owned(start.to_string().into_bytes()))
}

fn count<'a>(n: usize) -> Result<Reply<'a>> {
    Ok(Reply::Int(i64::try_from(n).unwrap_or(i64::MAX)))
}

fn unknown(name: &[u8]) -> Refusal {
    let name = String::from_utf8_lossy(name);
    format!("ERR the embedded engine does not have the command '{name}'").into()
}

fn refused_option(command: &str, option: &[u8]) -> Refusal {
    let option = String::from_utf8_lossy(option);
    format!("ERR the embedded engine does not have {command} with '{option}'").into()
}

/// A whole number as Redis reads it: no sign but one minus, no leading zeros, no spaces.
fn integer(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let canonical = match digits {
        [] => false,
        [b'0'] => digits.len() == text.len(),
        [first, rest @ ..] => matches!(first, b'1'..=b'9') && rest.iter().all(u8::is_ascii_digit),
    };
    canonical.then(|| std::str::from_utf8(text).ok()?.parse().ok()).flatten()
}

fn integer_text(number: i64) -> Bytes {
    number.to_string().into_bytes().into()
}

fn score(text: &[u8]) -> Option<Score> {
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (!number.is_nan()).then_some(Score(number))
}

fn score_bound(text: &[u8]) -> Option<Bound<Score>> {
    match text {
        b"-inf" | b"+inf" => Some(Bound::Unbounded),
        [b'(', text @ ..] => score(text).map(Bound::Excluded),
        _ => score(text).map(Bound::Included),
    }
}

/// A number as C's `%.17g` writes it, which is what Redis 7 sends for Lua numbers and scores.
pub(super) fn number_text(number: f64) -> String {
    const DIGITS: i32 = 17;
    if number.is_nan() {
        return if number.is_sign_negative() { "-nan" } else { "nan" }.to_owned();
    }
    if number.is_infinite() {
        return if number < 0.0 { "-inf" } else { "inf" }.to_owned();
    }
    let scientific = format!("{number:.16e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("{:e} writes an exponent");
    let exponent: i32 = exponent.parse().expect("{:e} writes a whole exponent");
    let trim = |text: &str| -> String {
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text.to_owned(),
        }
    };
    if (-4..DIGITS).contains(&exponent) {
        let decimals = usize::try_from(DIGITS - 1 - exponent).unwrap_or(0);
        trim(&format!("{number:.decimals$}"))
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", trim(mantissa), exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[test]
    fn numbers_are_written_as_c_writes_them() {
        for (number, text) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.0, "1"),
            (-3.0, "-3"),
            (0.1, "0.10000000000000001"),
            (2.5, "2.5"),
            (9_007_199_254_740_991.0, "9007199254740991"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (1.5e300, "1.5000000000000001e+300"),
            (0.0001, "0.0001"),
            (0.000_01, "1.0000000000000001e-05"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(number_text(number), text);
        }
    }

    #[test]
    fn integers_are_read_as_redis_reads_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("12", Some(12)),
            ("-3", Some(-3)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("-0", None),
            ("007", None),
            ("+1", None),
            (" 1", None),
            ("1.0", None),
            ("abc", None),
            ("", None),
            ("-", None),
        ] {
            assert_eq!(integer(text.as_bytes()), number, "{text:?}");
        }
    }

    #[test]
    fn a_removed_key_takes_its_expiry_with_it() {
        let mut keys = Keyspace::default();
        keys.start(1_000);
        keys.run(&["SET", "a", "1", "PXAT", "5000"]).unwrap();
        keys.run(&["DEL", "a"]).unwrap();
        keys.run(&["SET", "a", "2"]).unwrap();
        keys.start(10_000);
        assert_eq!(keys.dump()["a"].content, DumpedContent::Text(b"2".to_vec()));
        assert!(keys.expiries.is_empty());
    }

    #[test]
    fn a_scan_misses_nothing_that_stays_while_others_come_and_go() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let mut keys = Keyspace::default();
            keys.start(1_000);
            for field in 0..100 {
                keys.run(&["HSET", "h", &field.to_string(), "v"]).unwrap();
            }
            // Every third goes away in the middle of the scan, and others come.
            let mut seen = std::collections::HashSet::new();
            let mut cursor = "0".to_owned();
            loop {
                let reply = keys.run(&["HSCAN", "h", &cursor, "COUNT", "7"]).unwrap();
                let Reply::Array(parts) = reply else { panic!("{reply:?}") };
                let [Reply::Bulk(next), Reply::Array(fields)] = &parts[..] else { panic!() };
                assert!(fields.len() <= 14);
                for field in fields.iter().step_by(2) {
                    let Reply::Bulk(field) = field else { panic!("{field:?}") };
                    seen.insert(String::from_utf8(field.to_vec()).unwrap());
                }
                cursor = String::from_utf8(next.to_vec()).unwrap();
                if cursor == "0" {
                    break;
                }
                for _ in 0..4 {
                    let gone = 3 * random.u32(..34);
                    keys.run(&["HDEL", "h", &gone.to_string()]).unwrap();
                    keys.run(&["HSET", "h", &random.u32(100..).to_string(), "v"]).unwrap();
                }
            }
            for stays in (0..100).filter(|field| field % 3 != 0) {
                assert!(seen.contains(&stays.to_string()), "{stays} was missed");
            }
        }
    }

    #[test]
    fn a_key_that_is_set_again_lives_on() {
        let mut keys = Keyspace::default();
        keys.start(1_000);
        keys.run(&["SET", "a", "1", "PXAT", "5000"]).unwrap();
        keys.run(&["SET", "a", "2"]).unwrap();
        keys.start(10_000);
        assert_eq!(keys.dump()["a"].expires_at, None);
    }
}
