//! Reading what a script replied.

use std::collections::VecDeque;

use super::{Answer, Followed, RebuildStep, Record, Refusal, Stamp};
use crate::engine::{EngineError, Script, Value};

/// Reads a reply from front to back; whatever does not fit is a fault of ours.
pub(in crate::engine) struct Reply {
    script: Script,
    values: VecDeque<Value>,
}

impl Reply {
    pub(in crate::engine) fn new(script: Script, value: Value) -> Result<Self, EngineError> {
        match value {
            Value::Array(values) => Ok(Self { script, values: values.into() }),
            Value::Nil | Value::Int(_) | Value::Bulk(_) => Err(EngineError::Script(format!(
                "{}.lua replied {value:?} where an array belongs",
                script.name
            ))),
        }
    }

    pub(in crate::engine) fn unexpected(&self, what: &str) -> EngineError {
        EngineError::Script(format!("{}.lua replied an unexpected {what}", self.script.name))
    }

    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(in crate::engine) fn word(&mut self) -> Result<String, EngineError> {
        match self.values.pop_front() {
            Some(Value::Bulk(bytes)) => {
                String::from_utf8(bytes).map_err(|_| self.unexpected("text that is not UTF-8"))
            }
            Some(Value::Int(number)) => Ok(number.to_string()),
            Some(Value::Nil | Value::Array(_)) | None => {
                Err(self.unexpected("end or nested array"))
            }
        }
    }

    pub(in crate::engine) fn number<T: std::str::FromStr>(&mut self) -> Result<T, EngineError> {
        let word = self.word()?;
        word.parse().map_err(|_| self.unexpected(&format!("number {word}")))
    }

    pub(in crate::engine) fn record(&mut self) -> Result<Record, EngineError> {
        let word = self.word()?;
        word.parse().map_err(|()| self.unexpected(&format!("record {word}")))
    }

    /// `None` at the end, `Some(None)` for an empty text.
    pub(in crate::engine) fn optional_record(
        &mut self,
    ) -> Result<Option<Option<Record>>, EngineError> {
        match self.values.front() {
            None => Ok(None),
            Some(Value::Bulk(text)) if text.is_empty() => {
                self.values.pop_front();
                Ok(Some(None))
            }
            Some(Value::Bulk(_) | Value::Nil | Value::Int(_) | Value::Array(_)) => {
                self.record().map(|record| Some(Some(record)))
            }
        }
    }

    pub(in crate::engine) fn nested(&mut self) -> Result<Option<Reply>, EngineError> {
        match self.values.pop_front() {
            None => Ok(None),
            Some(value) => Reply::new(self.script, value).map(Some),
        }
    }

    pub(in crate::engine) fn stamp(&mut self) -> Result<Stamp, EngineError> {
        Ok(Stamp { epoch: self.number()?, revision: self.number()? })
    }

    /// A refusal of guard.lua, if that is what it is; otherwise nothing is read.
    pub(in crate::engine) fn refusal(&mut self) -> Result<Option<Refusal>, EngineError> {
        match self.values.front() {
            Some(Value::Bulk(word)) if word == b"not_warmed" => Ok(Some(Refusal::NotWarmed)),
            Some(Value::Bulk(word)) if word == b"frozen" => {
                self.word()?;
                let stamp = self.stamp()?;
                let reason = self.word()?;
                let segments = if self.is_empty() { 1 } else { self.number()? };
                Ok(Some(Refusal::Frozen { stamp, reason, segments }))
            }
            Some(Value::Bulk(_) | Value::Nil | Value::Int(_) | Value::Array(_)) | None => Ok(None),
        }
    }

    /// A refusal of guard.lua, or `ok` and the stamp.
    pub(in crate::engine) fn head(&mut self) -> Result<Answer<Stamp>, EngineError> {
        if let Some(refusal) = self.refusal()? {
            return Ok(Err(refusal));
        }
        match self.word()?.as_str() {
            "ok" => Ok(Ok(self.stamp()?)),
            other => Err(self.unexpected(other)),
        }
    }

    pub(in crate::engine) fn step(&mut self, applied: &str) -> Result<RebuildStep, EngineError> {
        match self.word()?.as_str() {
            "refused" => Ok(RebuildStep::Refused { epoch: self.number()? }),
            "already" => Ok(RebuildStep::Applied),
            word if word == applied => Ok(RebuildStep::Applied),
            other => Err(self.unexpected(other)),
        }
    }

    /// How the engine follows SQL in an adjustment.
    pub(in crate::engine) fn followed(&mut self, done: &str) -> Result<Followed, EngineError> {
        let status = self.word()?;
        let stamp = self.stamp()?;
        match status.as_str() {
            "retry" => Ok(Followed::Retry { reason: self.word()? }),
            "contradiction" => Ok(Followed::Contradiction { stamp }),
            "contained" | "already" => Ok(Followed::Done),
            word if word == done => Ok(Followed::Done),
            other => Err(self.unexpected(other)),
        }
    }
}
