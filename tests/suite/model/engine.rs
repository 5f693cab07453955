//! What befalls the engine, behind the back of the servers.

use std::{collections::BTreeMap, sync::Arc};

use seckill::engine::{
    Call, Engine, Script,
    embedded::{Dumped, DumpedContent, EmbeddedEngine},
    keys,
};

use super::{
    Loss,
    expected::State,
    real::{Lost, Real},
};
use crate::support::{arg, redis_server::RedisServer};

/// Runs any one command.
const COMMAND: Script = Script { name: "command", source: "return redis.call(unpack(ARGV, 2))" };
/// Ends the hold of every reservation that has one.
pub(super) const AGE: Script = Script {
    name: "age",
    source: "local page = redis.call('HSCAN', KEYS[3], '0', 'COUNT', '1000') \
             for i = 1, #page[2], 2 do \
               local record = string.gsub(page[2][i + 1], ' [1-9]%d*$', ' 1000') \
               redis.call('HSET', KEYS[3], page[2][i], record) \
             end \
             return {'ok'}",
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Embedded,
    Redis,
}

/// What all sequences share.
pub(super) struct Stage {
    pub(super) redis: Option<(RedisServer, Arc<dyn Engine>)>,
}

impl Stage {
    pub(super) async fn open(kind: Kind) -> Self {
        if kind == Kind::Embedded {
            return Self { redis: None };
        }
        let server = RedisServer::start().await;
        let engine: Arc<dyn Engine> = Arc::new(server.engine().await);
        Self { redis: Some((server, engine)) }
    }
}

pub(super) type Dump = BTreeMap<String, Dumped>;

impl Real<'_> {
    pub(super) async fn lose(&mut self, nth: usize, loss: Loss) {
        let mut only_seen = false;
        match loss {
            Loss::Everything => self.restore(&Dump::new()).await,
            Loss::Restart if self.embedded.is_some() => {
                let engine = Arc::new(EmbeddedEngine::new());
                self.embedded = Some(engine.clone());
                self.engine = engine;
                for server in 0..self.servers.len() {
                    self.servers[server] = self.base().beside().await;
                }
            }
            Loss::Restart => self.change_identity().await,
            Loss::GoesBack { steps, failed_over } => {
                let dump = self.dumps[&nth.saturating_sub(steps)].clone();
                let (now, then) = (meta(&self.dump().await), meta(&dump));
                // Of several segments each would have to have seen more.
                let same_server = now.2 == then.2 && self.segments == 1;
                if same_server && !failed_over && now == then {
                    return;
                }
                self.restore(&dump).await;
                // One more write, and the revision would have caught up.
                let far = |(epoch, revision): (u64, u64)| {
                    epoch > then.0 || epoch == then.0 && revision > then.1 + 1
                };
                only_seen = same_server && !failed_over;
                for (world, _) in &self.servers {
                    let seen = world.offer(&self.key).await.segments.first().seen();
                    only_seen &= far((seen.epoch, seen.revision));
                }
                if !only_seen {
                    self.change_identity().await;
                }
            }
        }
        let epoch = self.servers[0].0.sql_epoch(&self.key).await;
        self.lost = Some(Lost { epoch, only_seen });
        self.model.fates.retain(|_, fate| fate.state != State::Taken);
        if loss == Loss::Restart && self.embedded.is_some() {
            // Its start is a rebuild.
            self.servers[0].0.rebuild_lost(&self.key).await;
        }
    }

    /// Runs a script on the keys of each segment of the offer, past the servers.
    pub(super) async fn script(&self, script: Script, args: &[&[u8]]) {
        for number in 0..self.segments {
            let args = args.iter().map(|arg| arg.to_vec()).collect();
            let call = Call { script, keys: keys::segment(&self.key, number), args };
            self.engine.eval(call).await.unwrap();
        }
    }

    /// Runs one command, past the servers.
    async fn command(&self, words: &[&[u8]]) {
        let args = words.iter().map(|word| word.to_vec()).collect();
        let call = Call { script: COMMAND, keys: keys::segment(&self.key, 0), args };
        self.engine.eval(call).await.unwrap();
    }

    pub(super) async fn dump(&self) -> Dump {
        match (&self.stage.redis, &self.embedded) {
            (Some((server, _)), _) => server.dump().await,
            (None, Some(engine)) => engine.dump(),
            (None, None) => unreachable!("one of the two runs"),
        }
    }

    /// The engine holds this and nothing else.
    async fn restore(&self, dump: &Dump) {
        for number in 0..self.segments {
            for key in keys::segment(&self.key, number).iter() {
                self.command(&[b"DEL", key.as_bytes()]).await;
            }
        }
        for (key, value) in dump {
            let key = key.as_bytes();
            match &value.content {
                DumpedContent::Text(text) => self.command(&[b"SET", key, text]).await,
                DumpedContent::Hash(fields) => {
                    for (field, value) in fields {
                        self.command(&[b"HSET", key, field, value]).await;
                    }
                }
                DumpedContent::Set(members) => {
                    for member in members {
                        self.command(&[b"SADD", key, member]).await;
                    }
                }
                DumpedContent::SortedSet(members) => {
                    for (member, score) in members {
                        self.command(&[b"ZADD", key, score.as_bytes(), member]).await;
                    }
                }
            }
            if let Some(at) = value.expires_at {
                self.command(&[b"PEXPIREAT", key, &arg(at)]).await;
            }
        }
    }

    /// The engine is another server from here on, with the same data.
    pub(super) async fn change_identity(&mut self) {
        let dump = self.dump().await;
        for number in 0..self.segments {
            let meta_key = keys::segment(&self.key, number)[5].clone();
            if dump.contains_key(&meta_key) {
                self.command(&[b"HSET", meta_key.as_bytes(), b"server", b"another"]).await;
            }
        }
        if let Some(lost) = &mut self.lost {
            lost.only_seen = false;
        }
    }
}

/// Epoch, revision and server of the first segment that was dumped.
fn meta(dump: &Dump) -> (u64, u64, Vec<u8>) {
    let meta = dump.iter().find(|(key, _)| key.ends_with(":meta"));
    let Some((_, Dumped { content: DumpedContent::Hash(fields), .. })) = meta else {
        return (0, 0, Vec::new());
    };
    let number = |field: &[u8]| {
        let text = fields.get(field).map(|text| String::from_utf8_lossy(text).into_owned());
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    (number(b"epoch"), number(b"revision"), fields.get(&b"server"[..]).cloned().unwrap_or_default())
}
