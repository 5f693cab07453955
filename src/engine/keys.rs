//! The names of an offer's keys, built here and nowhere else.
//!
//! The braces hold a hash tag, so that all keys of one segment share a slot of a cluster.
//! Ids can't hold `:`, `{` or `}` (see `domain`), so two offers never share a key.

use std::sync::Arc;

use crate::domain::{ActivityId, OfferKey, SkuId};

/// What each script gets as KEYS, in this order.
pub const SEGMENT_KEYS: [&str; 7] =
    ["stock", "buyers", "reservations", "released", "unacked", "meta", "transfers"];

/// The keys of one segment, in the order of [`SEGMENT_KEYS`].
#[must_use]
pub fn segment(offer: &OfferKey, segment: u32) -> Arc<[String]> {
    let OfferKey { activity_id, sku_id } = offer;
    SEGMENT_KEYS.iter().map(|part| name(activity_id, sku_id, segment, part)).collect()
}

/// The keys of a lock: who holds it, and the tokens that were given out.
#[must_use]
pub fn lock(name: &str) -> Arc<[String]> {
    [format!("sk:lock:{{{name}}}"), format!("sk:fence:{{{name}}}")].into()
}

fn name(activity_id: &ActivityId, sku_id: &SkuId, segment: u32, part: &str) -> String {
    format!("sk:{{{activity_id}:{sku_id}:{segment}}}:{part}")
}
