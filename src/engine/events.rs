//! What servers tell each other through the engine: that an activity changed, or that a segment may
//! have units again.
//!
//! **Invariant:** nothing depends on a message. Each may get lost, come late or twice; the catalog is
//! read again now and then, and what is known to be sold out is confirmed all the time.

use std::{fmt, sync::Arc};

use futures_util::stream::BoxStream;

use super::{
    Engine, EngineError, keys,
    meter::run,
    scripts::{Id, Stamp},
};
use crate::domain::{ActivityId, OfferKey};

/// Where messages are published; as in `lua/guard.lua`.
pub const CHANNEL: &str = "sk:events";

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The activity is at this version in SQL.
    ActivityChanged { id: ActivityId, version: i64 },
    /// A segment that was sold out, or frozen, may have units: it went to this state.
    Reopened { offer: OfferKey, segment: u32, stamp: Stamp },
}

/// What comes in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    Message(Vec<u8>),
    /// Messages may have been missed.
    Gap,
}

/// All that is heard from now on; it begins with a gap, and never ends.
pub type Hearing = BoxStream<'static, Heard>;

impl Event {
    /// Reads a message; what no server of ours says is `None`.
    #[must_use]
    pub fn read(message: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(message).ok()?.split(' ');
        let mut word = || words.next();
        let event = match word()? {
            "activity" => {
                let id = ActivityId::new(word()?).ok()?;
                Self::ActivityChanged { id, version: word()?.parse().ok()? }
            }
            "reopened" => {
                let (offer, segment) = keys::read(word()?)?;
                let (epoch, revision) = (word()?.parse().ok()?, word()?.parse().ok()?);
                Self::Reopened { offer, segment, stamp: Stamp { epoch, revision } }
            }
            _ => return None,
        };
        words.next().is_none().then_some(event)
    }

    /// Tells every server, this one too.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn tell(&self, engine: &dyn Engine) -> Result<(), EngineError> {
        let message = self.to_string().into_bytes();
        run(engine, Id::TELL, Arc::from([]), vec![message]).await.map(|_| ())
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ActivityChanged { id, version } => write!(f, "activity {id} {version}"),
            Self::Reopened { offer, segment, stamp } => {
                let key = &keys::segment(offer, *segment)[0];
                write!(f, "reopened {key} {} {}", stamp.epoch, stamp.revision)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;
    use crate::domain::SkuId;

    #[test]
    fn an_event_is_read_as_it_was_told() {
        let activity_id = ActivityId::new("a-1").unwrap();
        let sku_id = SkuId::new("s.1").unwrap();
        let stamp = Stamp { epoch: 3, revision: 41 };
        let offer = OfferKey { activity_id: activity_id.clone(), sku_id };
        for event in [
            Event::ActivityChanged { id: activity_id, version: 7 },
            Event::Reopened { offer, segment: 2, stamp },
        ] {
            assert_eq!(Event::read(event.to_string().as_bytes()), Some(event));
        }
    }

    #[test]
    fn what_is_no_message_of_ours_is_nothing() {
        for text in [
            "",
            "activity",
            "activity a-1",
            "activity a-1 x",
            "activity a 1 1",
            "activity a-1 1 1",
            "activity é 1",
            "reopened sk:{a:s:0}:stock 1",
            "reopened sk:{a:s:0}:meta 1 1",
            "reopened sk:{a:s}:stock 1 1",
            "reopened sk:{a:s:-1}:stock 1 1",
            "reopened xk:{a:s:0}:stock 1 1",
            "paused a-1 1",
        ] {
            assert_eq!(Event::read(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Event::read(&[0xff]), None);
    }
}
