//! Both engines do the same, reply by reply and key by key.
//!
//! Random sequences of every script, with hostile values in between, run through the embedded
//! engine and through Redis. What differs by right, the two servers' identities, is replaced.

use std::{collections::BTreeMap, sync::Arc};

use fastrand::Rng;
use seckill::engine::{
    Call, Engine, EngineError, Script, Value,
    embedded::{Dumped, DumpedContent, EmbeddedEngine},
    keys,
    redis::RedisEngine,
    scripts,
};

use crate::support::{EXPIRE_TIME, Segment, arg, identity, redis_server::RedisServer};

/// Runs any one command: what someone with a console might do to our keys.
const VANDAL: Script = Script { name: "vandal", source: "return redis.call(unpack(ARGV, 2))" };

const SEEDS: u64 = 80;
const STEPS: usize = 150;

#[tokio::test]
async fn both_engines_give_the_same_replies_and_hold_the_same_keys() {
    let server = RedisServer::start().await;
    let redis = server.engine().await;
    let mut statuses = BTreeMap::<String, usize>::new();
    for seed in 0..SEEDS {
        let () = server.command(&["FLUSHALL"]).await;
        let pair = Pair::new(EmbeddedEngine::new(), &redis).await;
        let mut random = Rng::with_seed(seed);
        let segments = ["a", "b", "c"].map(|sku| Segment::of("1111", sku));
        let mut history = Vec::new();
        for _ in 0..STEPS {
            let call = random_call(&mut random, &segments);
            history.push(call.clone());
            let reply = pair.eval(call).await.unwrap_or_else(|difference| {
                panic!("seed {seed}, after {}\n{difference}", tail(&history))
            });
            *statuses.entry(reply).or_default() += 1;
        }
        // Its lease counts from each engine's own now.
        let lock = keys::lock("only");
        let unlock = vec![arg("DEL"), arg(&lock[0])];
        pair.eval(Call { script: VANDAL, keys: lock, args: unlock }).await.unwrap();
        let (embedded, redis) = pair.dumps(&server).await;
        assert_eq!(embedded, redis, "seed {seed}: the keys differ");
    }
    // The walk is of use only while it gets everywhere.
    for status in [
        "written",
        "already",
        "mismatch",
        "ok",
        "frozen",
        "not_warmed",
        "retry",
        "not_reserved",
        "released",
        "held",
        "added",
        "contained",
        "ignored",
        "begun",
        "refused",
        "loaded",
        "ended",
        "purged",
        "nothing",
        "acquired",
        "extended",
        "lost",
        "error",
    ] {
        assert!(statuses.contains_key(status), "no reply was {status}: {statuses:?}");
    }
}

#[tokio::test]
async fn both_engines_adjust_alike() {
    let server = RedisServer::start().await;
    let redis = server.engine().await;
    let mut statuses = BTreeMap::<String, usize>::new();
    for seed in 0..20 {
        let () = server.command(&["FLUSHALL"]).await;
        let pair = Pair::new(EmbeddedEngine::new(), &redis).await;
        let mut random = Rng::with_seed(seed);
        let segment = Segment::of("1111", "a");
        let call = |script, args| Call { script, keys: Arc::clone(&segment.0), args };
        let warm_up = vec![arg(1), arg(9), arg(9), arg(EXPIRE_TIME)];
        pair.eval(call(scripts::WARMUP, warm_up)).await.unwrap();
        let mut history = Vec::new();
        for step in 0..60 {
            let epoch = if random.u32(..12) == 0 { 2 } else { 1 };
            let (script, args) = adjust_call(&mut random, epoch);
            let call = if step % 20 == 19 {
                let figures = [scripts::LEVELS, scripts::UNACKED];
                let script = figures[random.usize(..2)];
                let args = if script == scripts::LEVELS { vec![] } else { vec![arg(1), arg(1)] };
                call(script, args)
            } else {
                call(script, args)
            };
            history.push(call.clone());
            let reply = pair.eval(call).await.unwrap_or_else(|difference| {
                panic!("seed {seed}, after {}\n{difference}", tail(&history))
            });
            *statuses.entry(reply).or_default() += 1;
        }
        let (embedded, redis) = pair.dumps(&server).await;
        assert_eq!(embedded, redis, "seed {seed}: the keys differ");
    }
    for status in
        ["added", "already", "contradiction", "put_back", "taken_away", "ok", "retry", "error"]
    {
        assert!(statuses.contains_key(status), "no reply was {status}: {statuses:?}");
    }
}

#[tokio::test]
async fn both_engines_transfer_alike() {
    let server = RedisServer::start().await;
    let redis = server.engine().await;
    let mut statuses = BTreeMap::<String, usize>::new();
    for seed in 0..20 {
        let () = server.command(&["FLUSHALL"]).await;
        let pair = Pair::new(EmbeddedEngine::new(), &redis).await;
        let mut random = Rng::with_seed(seed);
        let segment = Segment::of("1111", "a");
        let call = |script, args| Call { script, keys: Arc::clone(&segment.0), args };
        let warm_up = vec![arg(1), arg(9), arg(9), arg(EXPIRE_TIME), arg(3)];
        pair.eval(call(scripts::WARMUP, warm_up)).await.unwrap();
        let mut history = Vec::new();
        for step in 0..60 {
            let epoch = if random.u32(..12) == 0 { 2 } else { 1 };
            let (script, args) = match step % 10 {
                9 => (scripts::LEVELS, vec![arg(random.u32(2..4))]),
                8 => adjust_call(&mut random, epoch),
                _ => transfer_call(&mut random, epoch),
            };
            let call = call(script, args);
            history.push(call.clone());
            let reply = pair.eval(call).await.unwrap_or_else(|difference| {
                panic!("seed {seed}, after {}\n{difference}", tail(&history))
            });
            *statuses.entry(reply).or_default() += 1;
        }
        let (embedded, redis) = pair.dumps(&server).await;
        assert_eq!(embedded, redis, "seed {seed}: the keys differ");
        assert_accounted(&embedded);
    }
    for status in ["in", "already_in", "forgotten", "already", "ok", "retry", "frozen", "error"] {
        assert!(statuses.contains_key(status), "no reply was {status}: {statuses:?}");
    }
}

/// stock + held + aside + out = total + moved, whatever was asked in whatever order.
fn assert_accounted(keys: &BTreeMap<String, Dumped>) {
    let number = |text: &[u8]| std::str::from_utf8(text).unwrap().parse::<i128>().unwrap();
    let (mut stock, mut meta) = (None, None);
    for (name, dumped) in keys {
        match &dumped.content {
            DumpedContent::Text(text) if name.ends_with(":stock") => stock = Some(number(text)),
            DumpedContent::Hash(fields) if name.ends_with(":meta") => meta = Some(fields),
            _ => {}
        }
    }
    let (stock, meta) = (stock.unwrap(), meta.unwrap());
    let figure = |name: &str| meta.get(name.as_bytes()).map_or(0, |text| number(text));
    let sum = stock + figure("held") + figure("aside") + figure("out");
    assert_eq!(sum, figure("total") + figure("moved"), "{meta:?}");
}

#[tokio::test]
async fn both_engines_convert_values_alike() {
    let server = RedisServer::start().await;
    let redis = server.engine().await;
    let pair = Pair::new(EmbeddedEngine::new(), &redis).await;
    let sources = [
        // Replies.
        "return nil",
        "return false",
        "return true",
        "return 3.99",
        "return -3.99",
        "return 9007199254740991",
        "return {1, 2, nil, 4}",
        "return {}",
        "return {false, true, 'x', {1, {2}}}",
        "return {ok = 'FINE'}",
        "return {err = 'SORRY no'}",
        "return {'a', {err = 'SORRY inside'}}",
        "return {a = 1, b = 2}",
        "return function() end",
        "return redis.status_reply('FINE')",
        "return redis.error_reply('ERR one two')",
        "return redis.error_reply('-CODE text')",
        "return redis.error_reply('oneword')",
        "return redis.error_reply('CODE text\\r\\n')",
        "return redis.error_reply(1)",
        // Arguments.
        "return redis.call('SET', KEYS[1], 1e15) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], 123456789012345678) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], 0.1) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], -0) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], 1/0) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], '1e15') and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], '') and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], '\\0\\255') and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], '201605131024011014') and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], nil)",
        "return redis.call('SADD', KEYS[1], 'x', nil)",
        "return redis.call('HMGET', KEYS[1], 'a', nil, 'b')",
        "return redis.call('HMGET', KEYS[1], '1', '2', '3', '4', '5', '6', '7', '8', nil)",
        "return redis.call('SET', KEYS[1], true)",
        "return redis.call('SET', KEYS[1], {})",
        "return redis.call()",
        "return redis.call('GET')",
        "return redis.call('HSET', KEYS[1], 'a')",
        "return redis.call('HSET', KEYS[1], 'a', 1, 'b')",
        // Text that is a number, and is not.
        "redis.call('SET', KEYS[1], '007') return redis.call('INCRBY', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], '-0') return redis.call('INCRBY', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], '9223372036854775807') return redis.call('INCRBY', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], '5') return redis.call('DECRBY', KEYS[1], '-9223372036854775808')",
        "redis.call('SET', KEYS[1], '5') return redis.call('INCRBY', KEYS[1], 1.5)",
        "redis.call('SET', KEYS[1], '5') return redis.call('DECRBY', KEYS[1], 7)",
        "redis.call('HSET', KEYS[1], 'f', 'x') return redis.call('HINCRBY', KEYS[1], 'f', 1)",
        "redis.call('HSET', KEYS[1], 'f', ' 1') return redis.call('HINCRBY', KEYS[1], 'f', 1)",
        "return redis.call('HINCRBY', KEYS[1], 'f', 'x')",
        // Commands of one type on another.
        "redis.call('SADD', KEYS[1], 'm') return redis.call('GET', KEYS[1])",
        "redis.call('SADD', KEYS[1], 'm') return redis.call('HGET', KEYS[1], 'm')",
        "redis.call('SADD', KEYS[1], 'm') return redis.call('ZADD', KEYS[1], 1, 'm')",
        "redis.call('SADD', KEYS[1], 'm') return redis.call('INCRBY', KEYS[1], 1)",
        "redis.call('SADD', KEYS[1], 'm') return redis.call('SET', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.call('SREM', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.call('HDEL', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.call('ZREM', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.call('SMISMEMBER', KEYS[1], 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 1)",
        "redis.call('SET', KEYS[1], 'm') return redis.pcall('HGET', KEYS[1], 'x')['err']",
        // Collections that become empty are gone, with their expiry.
        "redis.call('SADD', KEYS[1], 'm') redis.call('PEXPIREAT', KEYS[1], 4102444800000) \
         redis.call('SREM', KEYS[1], 'm') redis.call('SADD', KEYS[1], 'n') return redis.call('TYPE', KEYS[1])",
        "redis.call('HSET', KEYS[1], 'f', 1) redis.call('HDEL', KEYS[1], 'f') return redis.call('EXISTS', KEYS[1], KEYS[1])",
        "redis.call('ZADD', KEYS[1], 1, 'm') redis.call('ZREM', KEYS[1], 'm') return redis.call('TYPE', KEYS[1])",
        // Time.
        "redis.call('SET', KEYS[1], 1, 'PXAT', 1) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1, 'PXAT', 0) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1, 'PXAT', 'x') return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1, 'PXAT') return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1) return {redis.call('PEXPIREAT', KEYS[1], 1), redis.call('GET', KEYS[1])}",
        "redis.call('SET', KEYS[1], 1) return {redis.call('PEXPIREAT', KEYS[1], -1), redis.call('GET', KEYS[1])}",
        "return redis.call('PEXPIREAT', KEYS[1], 4102444800000)",
        "return redis.call('PEXPIREAT', KEYS[1], 'x')",
        "redis.call('SET', KEYS[1], 1, 'PXAT', 4102444800000) redis.call('SET', KEYS[1], 2) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1, 'PXAT', 4102444800000) return redis.call('INCRBY', KEYS[1], 2)",
        // Sorted sets.
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'c', 1, 'a', '-inf', 'z', 2.5, 'd') \
         return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf')",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a') return redis.call('ZRANGEBYSCORE', KEYS[1], '(1', 2)",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a') return redis.call('ZRANGEBYSCORE', KEYS[1], 1, '(2')",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a', 3, 'c') return redis.call('ZRANGEBYSCORE', KEYS[1], 1, 3, 'LIMIT', 1, 1)",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a') return redis.call('ZRANGEBYSCORE', KEYS[1], 1, 3, 'LIMIT', 0, -1)",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a') return redis.call('ZRANGEBYSCORE', KEYS[1], 1, 3, 'LIMIT', -1, 5)",
        "redis.call('ZADD', KEYS[1], 2, 'b', 1, 'a') return redis.call('ZRANGEBYSCORE', KEYS[1], 3, 1)",
        "return redis.call('ZRANGEBYSCORE', KEYS[1], 'x', 1)",
        "return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 1, 'LIMIT', 0, 'x')",
        "return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 1, 'LIMIT', 0)",
        "return redis.call('ZADD', KEYS[1], 'x', 'm')",
        "return redis.call('ZADD', KEYS[1], 1, 'm', 'nan', 'n')",
        "return redis.call('ZADD', KEYS[1], 1, 'm', 2)",
        "return {redis.call('ZADD', KEYS[1], 1, 'm'), redis.call('ZADD', KEYS[1], 2, 'm', 2, 'm', 1, 'n'), redis.call('ZSCORE', KEYS[1], 'm')}",
        "redis.call('ZADD', KEYS[1], 0.1, 'm') return redis.call('ZSCORE', KEYS[1], 'm')",
        "redis.call('ZADD', KEYS[1], 1760000000000, 'm') return redis.call('ZSCORE', KEYS[1], 'm')",
        "return {redis.call('ZSCORE', KEYS[1], 'm'), redis.call('ZCARD', KEYS[1])}",
        // Counting.
        "return {redis.call('SADD', KEYS[1], 'a', 'b', 'a'), redis.call('SADD', KEYS[1], 'b', 'c'), redis.call('SCARD', KEYS[1])}",
        "return {redis.call('HSET', KEYS[1], 'a', 1, 'b', 2, 'a', 3), redis.call('HLEN', KEYS[1]), redis.call('HGET', KEYS[1], 'a')}",
        "redis.call('SADD', KEYS[1], 'a') return redis.call('SMISMEMBER', KEYS[1], 'a', 'b', 'a')",
        "redis.call('SET', KEYS[1], 1) return {redis.call('UNLINK', KEYS[1], KEYS[1]), redis.call('DEL', KEYS[1])}",
        // Errors of the script itself.
        "error('stop')",
        "error({err = 'STOP here'})",
        "local x = nil; return x.y",
        "return 'a' + 1",
        "return tonumber('abc') < 1",
        "return undeclared",
        "undeclared = 1",
        "redis = nil",
        "string.format = nil",
    ];
    let mut differences = Vec::new();
    for source in sources {
        let script = Script { name: "snippet", source };
        let keys = Arc::from([String::from("sk:{snippet}:key")]);
        let call = Call { script, keys: Arc::clone(&keys), args: Vec::new() };
        if let Err(difference) = pair.eval(call).await {
            differences.push(format!("{source}\n{difference}"));
        }
        let (embedded, redis) = pair.dumps(&server).await;
        if embedded != redis {
            differences.push(format!("{source}\n{embedded:?}\n{redis:?}"));
        }
        let clean = Script { name: "clean", source: "return redis.call('DEL', KEYS[1])" };
        pair.eval(Call { script: clean, keys, args: Vec::new() }).await.unwrap();
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

/// The two engines, and what they call themselves.
struct Pair<'a> {
    embedded: EmbeddedEngine,
    redis: &'a RedisEngine,
    identities: [String; 2],
}

impl<'a> Pair<'a> {
    async fn new(embedded: EmbeddedEngine, redis: &'a RedisEngine) -> Self {
        let identities = [identity(&embedded).await.unwrap(), identity(redis).await.unwrap()];
        Self { embedded, redis, identities }
    }

    /// The status word of the common reply, or how the two differ.
    async fn eval(&self, call: Call) -> Result<String, String> {
        let embedded = self.embedded.eval(call.clone()).await;
        let redis = self.redis.eval(call.clone()).await;
        let (embedded, redis) = (self.comparable(embedded), self.comparable(redis));
        if embedded != redis {
            return Err(format!("{}\nembedded: {embedded}\nredis:    {redis}", show(&call)));
        }
        let status = embedded.split(['"', ' ']).nth(1).unwrap_or_default();
        Ok(if embedded.starts_with("error") { "error" } else { status }.to_owned())
    }

    /// A reply as text; an error without the place in the script that Redis adds.
    fn comparable(&self, reply: Result<Value, EngineError>) -> String {
        let text = match reply {
            Ok(value) => show_value(&value),
            Err(EngineError::Script(text)) => {
                format!("error {}", text.split(" script: ").next().unwrap_or_default())
            }
            Err(other) => panic!("{other}"),
        };
        self.identities.iter().fold(text, |text, identity| text.replace(identity, "SERVER"))
    }

    async fn dumps(
        &self,
        server: &RedisServer,
    ) -> (BTreeMap<String, Dumped>, BTreeMap<String, Dumped>) {
        let mut dumps = [self.embedded.dump(), server.dump().await];
        for dumped in dumps.iter_mut().flat_map(BTreeMap::values_mut) {
            if let DumpedContent::Hash(fields) = &mut dumped.content
                && let Some(server) = fields.get_mut(b"server".as_slice())
                && self.identities.iter().any(|identity| identity.as_bytes() == server)
            {
                *server = b"SERVER".to_vec();
            }
        }
        let [embedded, redis] = dumps;
        (embedded, redis)
    }
}

fn random_call(random: &mut Rng, segments: &[Segment]) -> Call {
    let segment = &segments[random.usize(..segments.len())];
    let epoch = |random: &mut Rng| arg(random.u32(1..4));
    let max_orders = |random: &mut Rng| arg(*random.choice(&[1, 1, 1, 2, 3]).unwrap());
    let (script, args) = match random.u32(..113) {
        0..10 => {
            let total = random.choice(&["20", "20", "20", "5", "9007199254740991", "0"]).unwrap();
            let expire = if random.u32(..40) == 0 { 1 } else { EXPIRE_TIME };
            let mut args = vec![epoch(random), arg(total), arg(total), arg(expire)];
            if random.u32(..8) == 0 {
                args.push(arg(random.u32(1..4)));
            }
            (scripts::WARMUP, args)
        }
        10..45 => {
            let mut args = vec![epoch(random), max_orders(random), arg(random.u32(1_000..1_010))];
            // No limit: its windows count from each engine's own now.
            args.extend([arg(0), arg(0)]);
            for _ in 0..random.u32(1..6) {
                args.push(buyer(random));
                args.push(reservation_id(random));
                let quantities = ["1", "1", "1", "2", "3", "30", "0", "-1", "1.5", "x"];
                let rare = random.u32(..20) == 0;
                let quantity = quantities[random.usize(..if rare { 10 } else { 6 })];
                args.push(arg(quantity));
                args.push(order_no(random));
            }
            (scripts::RESERVE, args)
        }
        45..60 => {
            let mut args =
                vec![epoch(random), reservation_id(random), buyer(random), max_orders(random)];
            args.extend(known_segments(random));
            (scripts::RELEASE, args)
        }
        60..66 => {
            let mut args = vec![epoch(random)];
            for _ in 0..random.u32(0..4) {
                args.push(member(random));
                args.push(order_no(random));
                args.push(arg(random.choice(&["0", "1760000000000"]).unwrap()));
            }
            (scripts::ACKNOWLEDGE, args)
        }
        66..70 => {
            let mut args = vec![arg(random.u32(1_000..1_012)), arg(random.u32(..6))];
            args.extend(known_segments(random));
            (scripts::UNACKED, args)
        }
        70..76 => {
            let mut args = vec![reservation_id(random), buyer(random), max_orders(random)];
            args.extend(known_segments(random));
            (scripts::FIND, args)
        }
        76..79 => (scripts::LEVELS, known_segments(random).into_iter().collect()),
        79..81 => (scripts::FREEZE, vec![epoch(random), arg("contradiction")]),
        81..85 => {
            let expire = if random.u32(..20) == 0 { 1 } else { EXPIRE_TIME };
            let mut args = vec![epoch(random), arg(20), arg(expire)];
            args.extend((random.u32(..4) == 0).then(|| arg(random.u32(1..4))));
            (scripts::REBUILD_BEGIN, args)
        }
        85..89 => {
            let count = random.u32(..3);
            let mut args = vec![epoch(random), arg(random.u32(1..4)), arg(count)];
            for _ in 0..count {
                args.push(member(random));
                let (id, order_no) = (reservation_id(random), order_no(random));
                args.push([&id[..], b" 2 ", &order_no, b" 1000 0"].concat());
            }
            args.extend((0..random.u32(..3)).map(|_| reservation_id(random)));
            (scripts::REBUILD_LOAD, args)
        }
        89..93 => {
            let mut args = vec![epoch(random), arg(random.u32(..3)), arg(14)];
            args.extend((random.u32(..2) == 0).then(|| arg(random.u32(14..20))));
            (scripts::REBUILD_END, args)
        }
        93 => {
            let members = (0..random.u32(..4)).map(|_| member(random)).collect();
            (scripts::LOOKUP, members)
        }
        94 => (scripts::PURGE, vec![epoch(random)]),
        95 | 103 => return lock_call(random),
        96 => (scripts::PING, vec![]),
        97..103 => {
            let epoch = random.u32(1..4);
            adjust_call(random, epoch)
        }
        107.. => {
            let epoch = random.u32(1..4);
            transfer_call(random, epoch)
        }
        _ => (VANDAL, vandalism(random, segment)),
    };
    Call { script, keys: Arc::clone(&segment.0), args }
}

/// How many segments a caller knows of, where she says so.
fn known_segments(random: &mut Rng) -> Option<Vec<u8>> {
    (random.u32(..4) == 0).then(|| arg(random.u32(1..4)))
}

/// A step of a transfer; few segments and sequences, so that they meet.
fn transfer_call(random: &mut Rng, epoch: u32) -> (Script, Vec<Vec<u8>>) {
    let rare = random.u32(..12) == 0;
    let units = ["1", "2", "5", "9007199254740991", "0", "-1", "1.5", "x"];
    let units = arg(units[random.usize(..if rare { 8 } else { 3 })]);
    let other = arg(random.choice(if rare { &["", "-1", "a"] } else { &["1", "1", "2"] }).unwrap());
    let sequence = arg(random.u32(u32::from(!rare)..4));
    let epoch = arg(epoch);
    match random.u32(..8) {
        0..3 => (scripts::TRANSFER_OUT, vec![epoch, other, units]),
        3 | 4 => (scripts::TRANSFER_IN, vec![epoch, other, sequence, units]),
        5 | 6 => (scripts::TRANSFER_DONE, vec![epoch, other, sequence]),
        _ => (scripts::TRANSFERS, vec![epoch, arg(random.choice(&["1", "3", "256"]).unwrap())]),
    }
}

/// A step of an adjustment; few ids, so that they meet.
fn adjust_call(random: &mut Rng, epoch: u32) -> (Script, Vec<Vec<u8>>) {
    let units = ["1", "2", "3", "30", "9007199254740991", "0", "-1", "1.5", "x", "1e3"];
    let rare = random.u32(..10) == 0;
    let units = arg(units[random.usize(..if rare { 10 } else { 4 })]);
    let id = arg(random.choice(&["a1", "a2", "a3", "9007199254740993"]).unwrap());
    let epoch = arg(epoch);
    match random.u32(..8) {
        0..3 => (scripts::SET_ASIDE, vec![epoch, id, units, arg(random.u32(1_000..1_010))]),
        3 | 4 => (scripts::ADD_UNITS, vec![epoch, id, units]),
        5 => (scripts::FORGET_ASIDE, vec![epoch, id]),
        6 => (scripts::PUT_BACK, vec![epoch, id]),
        // All on one page: the order of a hash is each engine's own.
        _ => (scripts::ASIDES, vec![arg(0), arg(1_000)]),
    }
}

/// Two owners and one lock, whose lease is longer than the test.
fn lock_call(random: &mut Rng) -> Call {
    let owner = arg(random.choice(&["me", "you"]).unwrap());
    let lease = arg(random.choice(&["3600000", "3600000", "0", "x"]).unwrap());
    let (script, args) = match random.u32(..6) {
        0..3 => (scripts::LOCK_ACQUIRE, vec![owner, lease, arg(EXPIRE_TIME)]),
        3 | 4 => (scripts::LOCK_EXTEND, vec![owner, lease]),
        _ => (scripts::LOCK_RELEASE, vec![owner]),
    };
    Call { script, keys: keys::lock("only"), args }
}

/// A command that leaves keys as no script of ours would.
fn vandalism(random: &mut Rng, segment: &Segment) -> Vec<Vec<u8>> {
    let key = |at: usize| segment.0[at].as_bytes().to_vec();
    let (stock, buyers, reservations, released, unacked, meta) =
        (key(0), key(1), key(2), key(3), key(4), key(5));
    let any = key(random.usize(..7));
    let words = |words: &[&[u8]]| words.iter().map(|word| word.to_vec()).collect();
    match random.u32(..14) {
        0..3 => {
            let values: [&[u8]; 6] = [b"abc", b"-3", b"1.5", b"", b"9007199254740993", b"7"];
            words(&[b"SET", &stock, values[random.usize(..6)]])
        }
        3 | 4 => words(&[b"DEL", &any]),
        5 => words(&[b"SADD", &buyers, &member(random)]),
        6 => words(&[b"HSET", &reservations, &member(random), b"rubbish"]),
        7 => words(&[b"ZADD", &unacked, b"1001", &member(random)]),
        8 => words(&[b"SREM", &released, &reservation_id(random)]),
        9 => {
            let fields: [&[u8]; 6] =
                [b"revision", b"epoch", b"total", b"expire_time", b"held", b"aside"];
            words(&[b"HSET", &meta, fields[random.usize(..6)], b"x"])
        }
        10 => words(&[b"HSET", &meta, b"server", b"another"]),
        11 => words(&[b"HDEL", &meta, b"frozen"]),
        // Of another type than it should be, where it is not there yet.
        12 => words(&[b"HSET", &any, b"x", b"1"]),
        _ => words(&[b"SET", &any, b"1"]),
    }
}

fn buyer(random: &mut Rng) -> Vec<u8> {
    let buyers = ["ann", "bob", "eve:1", "a#2", "a", "201605131024011014", "1e5", "inf", "0.5"];
    arg(buyers[random.usize(..buyers.len())])
}

fn member(random: &mut Rng) -> Vec<u8> {
    let buyer = buyer(random);
    match random.u32(..3) {
        0 => [&buyer[..], b"#", &arg(random.u32(1..4))].concat(),
        _ => buyer,
    }
}

fn reservation_id(random: &mut Rng) -> Vec<u8> {
    arg(random.choice(&["r1", "r2", "r3", "r4", "201605131024011015", "r#1", "1e3"]).unwrap())
}

fn order_no(random: &mut Rng) -> Vec<u8> {
    arg(random.choice(&["o1", "o2", "201605131024011016"]).unwrap())
}

fn show(call: &Call) -> String {
    let args: Vec<_> = call.args.iter().map(|arg| String::from_utf8_lossy(arg)).collect();
    format!("{} {} {}", call.script.name, call.keys[0], args.join(" "))
}

fn tail(history: &[Call]) -> String {
    history.iter().rev().take(8).rev().map(|call| format!("\n  {}", show(call))).collect()
}

fn show_value(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Bulk(bytes) => format!("\"{}\"", bytes.escape_ascii()),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(show_value).collect();
            format!("{{{}}}", items.join(" "))
        }
    }
}
