//! What became of requests, by offer.
//!
//! **Promises:** at most [`MOST_OFFERS`] offers have series of their own, and only those that somebody
//! created: a name that a caller invented has no outcome. What is decided of further ones counts as
//! [`OTHERS`], so none is left out. An offer that nobody asks for any more gives
//! its series up after [`KEPT`]; after [`KEPT_WHEN_FULL`] if others wait for the place.
//!
//! Nine of ten calls of a sale end in some microseconds, so counting is one look at a map that is
//! replaced as a whole, and one addition.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;

use super::{MOST_OFFERS, OUTCOMES, families::OFFER_OUTCOMES, head, line};
use crate::domain::OfferKey;

/// No id has brackets.
const OTHERS: &str = "(other)";
const KEPT: Duration = Duration::from_secs(3_600);
const KEPT_WHEN_FULL: Duration = Duration::from_secs(60);

/// In the order of [`OUTCOMES`].
type Counts = [AtomicU64; OUTCOMES.len()];
type ByOffer = HashMap<OfferKey, Arc<Counts>, foldhash::fast::RandomState>;

/// The outcomes of every offer that has series.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    by_offer: ArcSwap<ByOffer>,
    others: Counts,
    /// How much each offer had, and since when; locked by whoever replaces the map.
    seen: Mutex<HashMap<OfferKey, (u64, Instant)>>,
}

/// Those of this process.
pub(super) static OFFERS: LazyLock<Outcomes> = LazyLock::new(Outcomes::default);

impl Outcomes {
    /// One more of the outcome that has this place.
    pub(super) fn count(&self, offer: &OfferKey, place: usize) {
        let by_offer = self.by_offer.load();
        match by_offer.get(offer) {
            Some(counts) => add(counts, place),
            None if by_offer.len() >= MOST_OFFERS => add(&self.others, place),
            None => self.count_first(offer, place),
        }
    }

    #[cold]
    fn count_first(&self, offer: &OfferKey, place: usize) {
        let _changing = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let by_offer = self.by_offer.load_full();
        // Somebody else may have been here first.
        match by_offer.get(offer) {
            Some(counts) => return add(counts, place),
            None if by_offer.len() >= MOST_OFFERS => return add(&self.others, place),
            None => {}
        }
        let counts = Arc::<Counts>::default();
        add(&counts, place);
        let mut more = ByOffer::clone(&by_offer);
        more.insert(offer.clone(), counts);
        self.by_offer.store(Arc::new(more));
    }

    /// Gives up the series of offers that nobody has asked for in a while.
    pub(super) fn forget(&self, now: Instant) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let by_offer = self.by_offer.load_full();
        let kept = if by_offer.len() >= MOST_OFFERS { KEPT_WHEN_FULL } else { KEPT };
        let mut fewer = ByOffer::clone(&by_offer);
        fewer.retain(|offer, counts| {
            let sum = counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
            let (before, since) = seen.entry(offer.clone()).or_insert((sum, now));
            if *before != sum {
                (*before, *since) = (sum, now);
            }
            now.saturating_duration_since(*since) < kept
        });
        if fewer.len() < by_offer.len() {
            seen.retain(|offer, _| fewer.contains_key(offer));
            self.by_offer.store(Arc::new(fewer));
        }
    }

    /// Writes what has happened at least once.
    pub(super) fn write(&self, text: &mut String) {
        head(text, OFFER_OUTCOMES);
        let by_offer = self.by_offer.load();
        let mut sorted: Vec<_> = by_offer.iter().collect();
        sorted.sort_by_key(|(offer, _)| *offer);
        for (OfferKey { activity_id, sku_id }, counts) in sorted {
            // Ids have no character that would have to be escaped.
            let labels = format!("activity_id=\"{activity_id}\",sku_id=\"{sku_id}\"");
            write_counts(text, &labels, counts);
        }
        let labels = format!("activity_id=\"{OTHERS}\",sku_id=\"{OTHERS}\"");
        write_counts(text, &labels, &self.others);
    }
}

fn add(counts: &Counts, place: usize) {
    counts[place].fetch_add(1, Ordering::Relaxed);
}

fn write_counts(text: &mut String, labels: &str, counts: &Counts) {
    for (outcome, count) in OUTCOMES.iter().zip(counts) {
        let count = count.load(Ordering::Relaxed);
        if count > 0 {
            let labels = format!("{labels},outcome=\"{outcome}\"");
            line(text, OFFER_OUTCOMES.name, &labels, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ActivityId, SkuId};

    const SOLD_OUT: usize = 8;

    fn offer(nth: usize) -> OfferKey {
        OfferKey {
            activity_id: ActivityId::new("sale").expect("an id"),
            sku_id: SkuId::new(&format!("sku-{nth:04}")).expect("an id"),
        }
    }

    fn shown(outcomes: &Outcomes) -> Vec<String> {
        let mut text = String::new();
        outcomes.write(&mut text);
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    fn series(activity: &str, sku: &str, count: u64) -> String {
        format!(
            "seckill_offer_outcomes_total{{activity_id=\"{activity}\",sku_id=\"{sku}\",\
             outcome=\"sold_out\"}} {count}"
        )
    }

    #[test]
    fn more_offers_than_are_shown_count_together() {
        let outcomes = Outcomes::default();
        for nth in 0..MOST_OFFERS + 3 {
            outcomes.count(&offer(nth), SOLD_OUT);
        }
        outcomes.count(&offer(0), SOLD_OUT);
        let shown = shown(&outcomes);
        assert_eq!(shown.len(), MOST_OFFERS + 1, "no outcome that did not happen");
        assert_eq!(shown[0], series("sale", "sku-0000", 2));
        assert_eq!(shown[MOST_OFFERS], series(OTHERS, OTHERS, 3));
    }

    #[test]
    fn an_offer_that_is_asked_for_no_more_leaves_its_place_to_others() {
        let outcomes = Outcomes::default();
        let begun = Instant::now();
        for nth in 0..MOST_OFFERS {
            outcomes.count(&offer(nth), SOLD_OUT);
        }
        outcomes.forget(begun);
        outcomes.count(&offer(7), SOLD_OUT);
        outcomes.forget(begun + KEPT_WHEN_FULL - Duration::from_secs(1));
        assert_eq!(shown(&outcomes).len(), MOST_OFFERS, "not yet");
        outcomes.forget(begun + KEPT_WHEN_FULL);
        assert_eq!(shown(&outcomes), [series("sale", "sku-0007", 2)]);
        // There is room, so it may stay for longer.
        outcomes.forget(begun + 3 * KEPT_WHEN_FULL);
        assert_eq!(shown(&outcomes).len(), 1);
        outcomes.forget(begun + KEPT_WHEN_FULL + KEPT);
        assert!(shown(&outcomes).is_empty());
        outcomes.count(&offer(MOST_OFFERS), SOLD_OUT);
        assert_eq!(shown(&outcomes), [series("sale", "sku-0200", 1)]);
    }
}
