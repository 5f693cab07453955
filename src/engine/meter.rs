//! Runs scripts by their place, and counts and times what they come to.

use std::{
    sync::{Arc, LazyLock},
    time::Instant,
};

use super::{
    Call, Engine, EngineError,
    scripts::{ALL, Id, Reply},
};
use crate::metrics::{self, CallResult, ScriptMeter};

/// In the order of [`ALL`], so that a call looks nothing up.
static METERS: LazyLock<Vec<ScriptMeter>> =
    LazyLock::new(|| ALL.iter().map(|script| metrics::script(script.name)).collect());

/// Shows every script in the metrics, at 0 until it is called.
pub fn register() {
    LazyLock::force(&METERS);
}

/// Runs one script; a call that is dropped before its reply is not counted.
pub(super) async fn run(
    engine: &dyn Engine,
    id: Id,
    keys: Arc<[String]>,
    args: Vec<Vec<u8>>,
) -> Result<Reply, EngineError> {
    let script = ALL[id as usize];
    let begun = Instant::now();
    let value = engine.eval(Call { script, keys, args }).await;
    let result = match &value {
        Ok(_) => CallResult::Ok,
        Err(EngineError::Full(_)) => CallResult::Full,
        Err(EngineError::NotRun(_)) => CallResult::NotRun,
        Err(EngineError::PartAway(_)) => CallResult::PartAway,
        Err(EngineError::Unknown(_)) => CallResult::Unknown,
        Err(EngineError::Script(_)) => CallResult::Script,
    };
    METERS[id as usize].note(result, begun.elapsed());
    Reply::new(script, value?)
}
