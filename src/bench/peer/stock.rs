//! The stock of a peer in Redis: a number, the set of its buyers, and whatever else it needs, all
//! behind a pool of connections.

use bb8_redis::{
    RedisConnectionManager,
    bb8::{Pool, PooledConnection, RunError},
};
use redis::{RedisError, Script};

use super::{Error, away};
use crate::domain::OfferKey;

/// Takes one unit for a buyer: what is left, -1 when nothing was, -2 when he has one.
const TAKE: &str = "
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then
  return -2
end
local left = tonumber(redis.call('GET', KEYS[1]))
if not left or left < 1 then
  return -1
end
redis.call('SADD', KEYS[2], ARGV[1])
return redis.call('DECR', KEYS[1])
";

pub(super) type Connection<'a> = PooledConnection<'a, RedisConnectionManager>;

/// Units and orders of an offer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Levels {
    pub left: i64,
    /// Orders that wait to be written.
    pub queued: u64,
    /// Orders that were given a number, where they get one.
    pub numbered: u64,
}

/// The keys of one offer, and connections to them.
#[derive(Debug, Clone)]
pub struct Stock {
    pool: Pool<RedisConnectionManager>,
    pub(super) left: String,
    buyers: String,
    pub(super) lock: String,
    pub(super) sequence: String,
    pub(super) queue: String,
    take: Script,
}

impl Stock {
    /// Opens so many connections.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn open(url: &str, offer: &OfferKey, connections: u32) -> Result<Self, Error> {
        let manager = RedisConnectionManager::new(url).map_err(|error| away(&error))?;
        let pool = Pool::builder()
            .max_size(connections)
            .min_idle(connections)
            // A PING before each call would be one round trip more.
            .test_on_check_out(false)
            .build(manager)
            .await
            .map_err(|error| away(&error))?;
        let key =
            |part: &str| format!("bench-peer:{{{}:{}}}:{part}", offer.activity_id, offer.sku_id);
        Ok(Self {
            pool,
            left: key("left"),
            buyers: key("buyers"),
            lock: key("lock"),
            sequence: key("sequence"),
            queue: key("queue"),
            take: Script::new(TAKE),
        })
    }

    pub(super) async fn connection(&self) -> Result<Connection<'_>, RunError<RedisError>> {
        self.pool.get().await
    }

    pub(super) async fn take(
        &self,
        connection: &mut Connection<'_>,
        buyer: &str,
    ) -> Result<i64, RedisError> {
        let mut call = self.take.key(&self.left);
        call.key(&self.buyers).arg(buyer);
        call.invoke_async(&mut **connection).await
    }

    /// Puts units on sale.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn fill(&self, total: u32) -> Result<(), Error> {
        let mut connection = self.connection().await.map_err(|error| away(&error))?;
        let mut set = redis::cmd("SET");
        set.arg(&self.left).arg(total);
        set.exec_async(&mut *connection).await.map_err(|error| away(&error))
    }

    /// What this says of units and orders.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn levels(&self) -> Result<Levels, Error> {
        let mut connection = self.connection().await.map_err(|error| away(&error))?;
        let (mut get, mut length) = (redis::cmd("GET"), redis::cmd("LLEN"));
        get.arg(&self.left);
        length.arg(&self.queue);
        let left = get.query_async(&mut *connection).await.map_err(|error| away(&error))?;
        let queued = length.query_async(&mut *connection).await.map_err(|error| away(&error))?;
        let mut get = redis::cmd("GET");
        get.arg(&self.sequence);
        let numbered: Option<u64> =
            get.query_async(&mut *connection).await.map_err(|error| away(&error))?;
        Ok(Levels { left, queued, numbered: numbered.unwrap_or_default() })
    }

    /// Removes every key.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn remove(&self) -> Result<(), Error> {
        let mut connection = self.connection().await.map_err(|error| away(&error))?;
        let mut delete = redis::cmd("DEL");
        delete.arg(&[&self.left, &self.buyers, &self.lock, &self.sequence, &self.queue]);
        delete.exec_async(&mut *connection).await.map_err(|error| away(&error))
    }
}
