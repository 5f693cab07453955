//! The distributed lock: SET NX PX, a script takes the unit, INCR numbers the order, LPUSH queues it,
//! a script unlocks; consumers BRPOP the orders and insert them one by one.
//!
//! The winner is told before his order is in SQL. What a consumer holds when it dies is lost.

use std::time::Duration;

use redis::{RedisError, Script};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use uuid::Uuid;

use super::{Error, Reserve, broken, refused, reserved, stock::Stock, tables};
use crate::{
    api::pb::{self, ReserveOutcome},
    database::Database,
    domain::OfferKey,
    error,
};

/// How long the lock is held when its holder dies.
const LEASE_MS: u64 = 3_000;
/// How long a caller who waits for the lock sleeps between two attempts.
const PAUSE: Duration = Duration::from_millis(2);
/// Each has a connection of its own, beside those of the callers.
pub(super) const CONSUMERS: u32 = 4;
/// A consumer that finds nothing looks whether it is to stop; below the client's own limit.
const BLOCK_S: f64 = 0.2;

/// Deletes the lock if it is still this holder's.
const UNLOCK: &str = "
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
";

#[derive(Debug)]
pub(super) struct DistributedLock {
    pub(super) stock: Stock,
    /// How long a caller waits for the lock.
    pub(super) wait: Duration,
}

impl Reserve for DistributedLock {
    async fn reserve(&self, request: pb::ReserveRequest) -> Result<pb::ReserveResponse, Status> {
        let token = Uuid::now_v7().simple().to_string();
        let deadline = Instant::now() + self.wait;
        while !self.lock(&token).await.map_err(|error| broken(&error))? {
            if Instant::now() >= deadline {
                return Err(error::Error::Overloaded.into());
            }
            tokio::time::sleep(PAUSE).await;
        }
        let sold = self.sell(&request).await;
        let unlocked = self.unlock(&token).await;
        let answer = sold.map_err(|error| broken(&error))?;
        unlocked.map_err(|error| broken(&error))?;
        Ok(answer)
    }
}

impl DistributedLock {
    async fn lock(&self, token: &str) -> Result<bool, RedisError> {
        let mut connection = self.stock.connection().await.map_err(no_connection)?;
        let mut set = redis::cmd("SET");
        set.arg(&self.stock.lock).arg(token).arg("NX").arg("PX").arg(LEASE_MS);
        let held: Option<String> = set.query_async(&mut *connection).await?;
        Ok(held.is_some())
    }

    async fn sell(&self, request: &pb::ReserveRequest) -> Result<pb::ReserveResponse, RedisError> {
        let mut connection = self.stock.connection().await.map_err(no_connection)?;
        let left = match self.stock.take(&mut connection, &request.user_id).await? {
            -2 => return Ok(refused(ReserveOutcome::Duplicate)),
            -1 => return Ok(refused(ReserveOutcome::SoldOut)),
            left => left,
        };
        let mut next = redis::cmd("INCR");
        next.arg(&self.stock.sequence);
        let number: u64 = next.query_async(&mut *connection).await?;
        let order_no = format!("{}-{number}", request.activity_id);
        let mut push = redis::cmd("LPUSH");
        push.arg(&self.stock.queue)
            .arg(format!("{order_no} {} {}", request.user_id, request.request_id));
        push.exec_async(&mut *connection).await?;
        Ok(reserved(request, order_no, left))
    }

    async fn unlock(&self, token: &str) -> Result<(), RedisError> {
        let mut connection = self.stock.connection().await.map_err(no_connection)?;
        let unlock = Script::new(UNLOCK);
        let mut call = unlock.key(&self.stock.lock);
        call.arg(token);
        call.invoke_async::<i64>(&mut *connection).await.map(drop)
    }
}

fn no_connection(error: bb8_redis::bb8::RunError<RedisError>) -> RedisError {
    match error {
        bb8_redis::bb8::RunError::User(error) => error,
        bb8_redis::bb8::RunError::TimedOut => {
            RedisError::from((redis::ErrorKind::Io, "no connection of the pool in time"))
        }
    }
}

/// Those who make orders of what is queued.
#[derive(Debug)]
pub(super) struct Consumers {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Consumers {
    pub(super) async fn start(
        stock: &Stock,
        database: &Database,
        offer: &OfferKey,
    ) -> Result<Self, Error> {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for _ in 0..CONSUMERS {
            tasks.spawn(consume(stock.clone(), database.clone(), offer.clone(), stop.clone()));
        }
        Ok(Self { stop, tasks })
    }

    /// Waits until nothing is queued.
    pub(super) async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn consume(stock: Stock, database: Database, offer: OfferKey, stop: CancellationToken) {
    let Ok(mut connection) = stock.connection().await else { return };
    loop {
        let mut pop = redis::cmd("BRPOP");
        pop.arg(&stock.queue).arg(BLOCK_S);
        let popped: Result<Option<(String, String)>, _> = pop.query_async(&mut *connection).await;
        let entry = match popped {
            Ok(Some((_, entry))) => entry,
            Ok(None) if stop.is_cancelled() => return,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(%error, "a consumer lost its Redis");
                return;
            }
        };
        let mut parts = entry.splitn(3, ' ').map(str::to_owned);
        let (Some(order_no), Some(user_id), Some(request_id)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let request = pb::ReserveRequest {
            activity_id: offer.activity_id.to_string(),
            sku_id: offer.sku_id.to_string(),
            user_id,
            quantity: None,
            request_id,
        };
        if let Err(error) = tables::insert(database.writer(), &order_no, &request).await {
            tracing::warn!(%error, "an order is lost");
        }
    }
}
