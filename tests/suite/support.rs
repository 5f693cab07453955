//! Servers, offers and waiting, for every test.

use std::{sync::Arc, time::Duration};

use seckill::{
    domain::{ActivityId, OfferKey, SkuId},
    engine::{Call, Engine, EngineError, Script, Value, keys, scripts},
};
use tokio::time::Instant;

pub(crate) mod alerts;
pub(crate) mod browser;
pub(crate) mod calls;
pub(crate) mod certs;
pub(crate) mod cluster;
pub(crate) mod databases;
pub(crate) mod frames;
pub(crate) mod history;
#[allow(dead_code, reason = "the fault suite needs more of it")]
pub(crate) mod process;
pub(crate) mod raw;
#[allow(dead_code, reason = "the fault suite needs more of it")]
pub(crate) mod redis_server;
pub(crate) mod scrape;
pub(crate) mod secured;
pub(crate) mod sentinels;
pub(crate) mod small_disk;
pub(crate) mod stage;
pub(crate) mod stand_in;
pub(crate) mod storm;
pub(crate) mod watched;
#[allow(dead_code, reason = "the fault suite needs more of it")]
pub(crate) mod wire;
pub(crate) mod world;

/// Polls until the check gives something; panics after ten seconds.
pub(crate) async fn eventually<T>(what: &str, check: impl AsyncFnMut() -> Option<T>) -> T {
    within(Duration::from_secs(10), what, check).await
}

/// Polls until the check gives something; panics when that takes longer.
pub(crate) async fn within<T>(
    limit: Duration,
    what: &str,
    mut check: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = check().await {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A word or a number as the scripts take them.
pub(crate) fn arg(value: impl ToString) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// A word in a reply.
pub(crate) fn word(value: impl ToString) -> Value {
    Value::Bulk(arg(value))
}

/// The first word of a reply.
pub(crate) fn status(reply: &Value) -> String {
    match reply {
        Value::Array(items) => match items.first() {
            Some(Value::Bulk(word)) => String::from_utf8_lossy(word).into_owned(),
            other => panic!("no status word: {other:?}"),
        },
        other => panic!("no array: {other:?}"),
    }
}

/// Far enough away for every test: 2100-01-01.
pub(crate) const EXPIRE_TIME: i64 = 4_102_444_800_000;

/// One segment of one offer, for tests that speak to an engine directly.
#[derive(Debug, Clone)]
pub(crate) struct Segment(pub(crate) Arc<[String]>);

impl Segment {
    pub(crate) fn of(activity: &str, sku: &str) -> Self {
        let activity_id = ActivityId::new(activity).unwrap();
        let sku_id = SkuId::new(sku).unwrap();
        Self(keys::segment(&OfferKey { activity_id, sku_id }, 0))
    }

    pub(crate) async fn eval(
        &self,
        engine: &dyn Engine,
        script: Script,
        args: Vec<Vec<u8>>,
    ) -> Result<Value, EngineError> {
        engine.eval(Call { script, keys: Arc::clone(&self.0), args }).await
    }

    pub(crate) async fn warm_up(&self, engine: &dyn Engine, units: u64) {
        let args = vec![arg(1), arg(units), arg(units), arg(EXPIRE_TIME)];
        let reply = self.eval(engine, scripts::WARMUP, args).await.unwrap();
        assert_eq!(status(&reply), "written", "{reply:?}");
    }

    /// One unit for a buyer who may have one order; the id is `r-` and the buyer.
    pub(crate) async fn reserve(
        &self,
        engine: &dyn Engine,
        buyer: &str,
    ) -> Result<Value, EngineError> {
        let id = format!("r-{buyer}");
        let mut args = vec![arg(1), arg(1), arg(1_000), arg(0), arg(0)];
        args.extend([arg(buyer), arg(id), arg(1), arg("order-1")]);
        self.eval(engine, scripts::RESERVE, args).await
    }

    pub(crate) async fn release(
        &self,
        engine: &dyn Engine,
        buyer: &str,
    ) -> Result<Value, EngineError> {
        let args = vec![arg(1), arg(format!("r-{buyer}")), arg(buyer), arg(1)];
        self.eval(engine, scripts::RELEASE, args).await
    }
}

/// The answer to the only request of a reserve: `taken`, `sold_out`, …
pub(crate) fn answer(reply: &Value) -> String {
    match reply {
        Value::Array(items) => status(items.get(4).unwrap_or_else(|| panic!("{reply:?}"))),
        other => panic!("no array: {other:?}"),
    }
}

/// Replies the identity that the engine gives to scripts.
pub(crate) const IDENTITY: Script = Script { name: "identity", source: "return ARGV[1]" };

pub(crate) async fn identity(engine: &dyn Engine) -> Result<String, EngineError> {
    let keys = Arc::from([String::from("sk:{identity}")]);
    match engine.eval(Call { script: IDENTITY, keys, args: Vec::new() }).await? {
        Value::Bulk(text) => Ok(String::from_utf8(text).unwrap()),
        other => panic!("no identity: {other:?}"),
    }
}
