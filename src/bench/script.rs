//! What the reserve script costs by itself: one request a call, with nothing around it.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use uuid::Uuid;

use super::{Error, Plan, bed, per_call_us, process::cpu_of, wins::UNITS};
use crate::{
    domain::{ActivityId, BuyerId, OfferKey, SkuId, TimeMs, name_reservation, new_order_no},
    engine::{
        Engine, EngineError,
        embedded::EmbeddedEngine,
        keys,
        redis::RedisEngine,
        scripts::{self, SegmentScripts, Take, Taken, WarmedUp},
    },
    server::redis_settings,
};

const EPOCH: u64 = 1;
/// Above every epoch.
const LAST_EPOCH: u64 = u64::MAX >> 12;
/// Clients of `redis-benchmark`, each with one call at a time.
const CLIENTS: usize = 50;
/// About what Redis answers a second.
const CALLS_PER_S: f64 = 40_000.0;

/// An offer that is in the engine alone.
#[derive(Debug)]
pub(super) struct Alone {
    offer: OfferKey,
    keys: Arc<[String]>,
    scripts: SegmentScripts,
    /// Of the Redis, if it is one.
    url: Option<String>,
    engine_id: Option<u32>,
}

/// What `redis-benchmark` found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Benchmarked {
    pub(super) per_s: f64,
    pub(super) cpu_us: f64,
}

impl Alone {
    pub(super) async fn open(plan: &Plan) -> Result<Self, Error> {
        let named = |_| Error::Internal("a name of the bench".to_owned());
        let id = format!("bench-{}", Uuid::now_v7().simple());
        let offer = OfferKey {
            activity_id: ActivityId::new(&id).map_err(named)?,
            sku_id: SkuId::new(bed::SKU).map_err(named)?,
        };
        let redis = redis_settings(&plan.settings.engine);
        let engine: Arc<dyn Engine> = match &redis {
            Some(redis) => {
                let engine = RedisEngine::connect(redis).await;
                Arc::new(engine.map_err(|error| Error::Unavailable(error.to_string()))?)
            }
            None => Arc::new(EmbeddedEngine::new()),
        };
        let keys = keys::segment(&offer, 0);
        let scripts = SegmentScripts::new(engine, keys.clone(), 1);
        let units = UNITS.into();
        let expire_time = TimeMs::now().plus(Duration::from_secs(3_600));
        match scripts.warmup(EPOCH, units, units, expire_time).await.map_err(away)? {
            WarmedUp::Written | WarmedUp::Already => {}
            WarmedUp::Mismatch { .. } => {
                return Err(Error::Internal("a new offer was warmed up before".to_owned()));
            }
        }
        let engine_id = bed::engine_id(&plan.settings).await;
        Ok(Self { offer, keys, scripts, url: redis.map(|redis| redis.url), engine_id })
    }

    /// How long one call takes, at this many a second.
    pub(super) async fn call_us(&self, per_s: f64, lasts: Duration) -> Result<Vec<f64>, Error> {
        super::paced(per_s, lasts, async |nth| self.take(nth).await).await
    }

    async fn take(&self, nth: usize) -> Result<(), Error> {
        let named = |_| Error::Internal("a name of the bench".to_owned());
        let buyer = BuyerId::new(&super::load::buyer("raw", nth)).map_err(named)?;
        let take = Take {
            reservation_id: name_reservation(&self.offer, &buyer, None),
            buyer,
            quantity: 1,
            order_no: new_order_no(),
            again: false,
        };
        let taken = self.scripts.reserve(EPOCH, TimeMs::now(), [take].iter()).await;
        match taken.map_err(away)? {
            Ok(reserved) if matches!(reserved.answers.first(), Some(Taken::Taken { .. })) => Ok(()),
            other => Err(Error::Internal(format!("the script by itself came to {other:?}"))),
        }
    }

    /// The same script by `redis-benchmark`, one request a call, unpipelined; `None` without the
    /// program, or where the Redis is not a process of this machine.
    pub(super) async fn benchmark(&self, lasts: Duration) -> Result<Option<Benchmarked>, Error> {
        let (Some(url), Some(engine_id)) = (&self.url, self.engine_id) else { return Ok(None) };
        // Once, so that the server knows the script by its hash.
        self.take(usize::MAX >> 40).await?;
        let server = self.server(url).await?;
        let calls = super::count(CALLS_PER_S * lasts.as_secs_f64());
        let hash = redis::Script::new(scripts::RESERVE.source).get_hash().to_owned();
        let mut command = Command::new("redis-benchmark");
        command.args(["-u", url, "-q", "--csv"]);
        command.args(["-c", &CLIENTS.to_string(), "-n", &calls.to_string()]);
        command.args(["-r", "1000000000", "EVALSHA", &hash, &self.keys.len().to_string()]);
        command.args(self.keys.iter());
        command.args([&server, "1", "1", &TimeMs::now().0.to_string(), "0", "1000"]);
        command.args(["raw-__rand_int__", "raw-__rand_int__-__rand_int__", "1"]);
        command.arg(new_order_no().to_string());
        let (cpu, begun) = (cpu_of(engine_id)?, Instant::now());
        let output = tokio::task::spawn_blocking(move || command.output()).await;
        let took = begun.elapsed();
        let cpu = cpu_of(engine_id)?.saturating_sub(cpu);
        let output = match output.map_err(|error| Error::Internal(error.to_string()))? {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::Internal(format!("redis-benchmark: {error}"))),
        };
        let taken = self.scripts.levels().await.map_err(away)?;
        let taken = taken.map_or(0, |levels| levels.reservations);
        let expected = calls as u64 * 9 / 10;
        if !output.status.success() || taken < expected {
            return Err(Error::Unavailable(format!(
                "redis-benchmark ended with {}, and {taken} of {calls} took a unit: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            )));
        }
        let per_s = calls as f64 / took.as_secs_f64();
        Ok(Some(Benchmarked { per_s, cpu_us: per_call_us(cpu, calls as u64) }))
    }

    /// Under which identity the segment was written: what each script is told first.
    async fn server(&self, url: &str) -> Result<String, Error> {
        let unreadable = |error: redis::RedisError| Error::Unavailable(error.to_string());
        let client = redis::Client::open(url).map_err(unreadable)?;
        let mut connection = client.get_multiplexed_async_connection().await.map_err(unreadable)?;
        let mut get = redis::cmd("HGET");
        get.arg(self.keys.get(5)).arg("server");
        get.query_async(&mut connection).await.map_err(unreadable)
    }

    pub(super) async fn close(self) -> Result<(), Error> {
        self.scripts.purge(LAST_EPOCH).await.map(drop).map_err(away)
    }
}

fn away(error: EngineError) -> Error {
    Error::Unavailable(format!("the engine: {error}"))
}
