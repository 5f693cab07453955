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

/// Counts the attempts of one buyer at this segment; `segment` are its keys.
pub(super) fn attempts(segment: &[String], buyer: &str) -> String {
    let stock = segment.first().map_or("", String::as_str);
    let prefix = stock.strip_suffix("stock").unwrap_or(stock);
    format!("{prefix}attempts:{buyer}")
}

/// Which segment a stock key is of.
pub(super) fn read(stock_key: &str) -> Option<(OfferKey, u32)> {
    let tag = stock_key.strip_prefix("sk:{")?.strip_suffix("}:stock")?;
    let mut parts = tag.split(':');
    let activity_id = ActivityId::new(parts.next()?).ok()?;
    let sku_id = SkuId::new(parts.next()?).ok()?;
    let segment = parts.next()?.parse().ok()?;
    parts.next().is_none().then_some((OfferKey { activity_id, sku_id }, segment))
}

/// The keys of a lock: who holds it, and the tokens that were given out.
#[must_use]
pub fn lock(name: &str) -> Arc<[String]> {
    [format!("sk:lock:{{{name}}}"), format!("sk:fence:{{{name}}}")].into()
}

fn name(activity_id: &ActivityId, sku_id: &SkuId, segment: u32, part: &str) -> String {
    format!("sk:{{{activity_id}:{sku_id}:{segment}}}:{part}")
}
