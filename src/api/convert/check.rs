//! One check per kind of field; each notes a violation and goes on.

use std::{collections::HashMap, fmt, time::Duration};

use prost_types::{Duration as PbDuration, Timestamp};

use super::{DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, MAX_PAGE_TOKEN_LEN};
use crate::{
    api::{pb, status::LISTED_VIOLATIONS},
    domain::{ActivityId, IdError, OfferKey, SkuId, TimeMs},
    error::{Error, Violation},
};

/// The violations of one request, in the order in which they are found.
///
/// Only those that an answer lists are described. The others count, but stay without text: a
/// message of a few KiB can break thousands of rules.
#[derive(Debug, Default)]
pub(super) struct Check {
    violations: Vec<Violation>,
}

impl Check {
    pub(super) fn fail(&mut self, path: fmt::Arguments<'_>, rule: impl fmt::Display) {
        let violation = if self.violations.len() < LISTED_VIOLATIONS {
            Violation { field: path.to_string(), description: rule.to_string() }
        } else {
            Violation { field: String::new(), description: String::new() }
        };
        self.violations.push(violation);
    }

    /// The request, unless something was wrong; `build` must succeed when nothing was.
    pub(super) fn finish<T>(self, build: impl FnOnce() -> Option<T>) -> Result<T, Error> {
        if !self.violations.is_empty() {
            return Err(Error::InvalidField(self.violations));
        }
        build().ok_or_else(|| Error::internal("a field is missing, and no check has said so"))
    }

    pub(super) fn id<T>(
        &mut self,
        field: &str,
        text: &str,
        new: impl FnOnce(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        self.id_at(format_args!("{field}"), text, new)
    }

    pub(super) fn id_at<T>(
        &mut self,
        path: fmt::Arguments<'_>,
        text: &str,
        new: impl FnOnce(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        new(text).map_err(|broken| self.fail(path, broken)).ok()
    }

    pub(super) fn offer(
        &mut self,
        parent: &str,
        activity_id: &str,
        sku_id: &str,
    ) -> Option<OfferKey> {
        let activity_id =
            self.id_at(format_args!("{parent}activity_id"), activity_id, ActivityId::new);
        let sku_id = self.id_at(format_args!("{parent}sku_id"), sku_id, SkuId::new);
        Some(OfferKey { activity_id: activity_id?, sku_id: sku_id? })
    }

    pub(super) fn number(
        &mut self,
        field: &str,
        given: Option<i32>,
        min: u32,
        max: u32,
    ) -> Option<u32> {
        self.number_at(format_args!("{field}"), given, min, max)
    }

    /// An optional number; unset is 1.
    pub(super) fn number_at(
        &mut self,
        path: fmt::Arguments<'_>,
        given: Option<i32>,
        min: u32,
        max: u32,
    ) -> Option<u32> {
        let given = i64::from(given.unwrap_or(1));
        let number = self.range(path, given, min.into(), max.into())?;
        u32::try_from(number).ok()
    }

    /// The entries of a page; 0 stands for [`DEFAULT_PAGE_SIZE`].
    pub(super) fn page_size(&mut self, given: i32) -> Option<u32> {
        match given {
            0 => Some(DEFAULT_PAGE_SIZE),
            given => self.number("page_size", Some(given), 0, MAX_PAGE_SIZE),
        }
    }

    /// Whether a page token is one of ours, the list itself must say.
    pub(super) fn page_token(&mut self, token: &str) {
        if token.len() > MAX_PAGE_TOKEN_LEN {
            let rule =
                format_args!("must be 0 to {MAX_PAGE_TOKEN_LEN} bytes (it has {})", token.len());
            self.fail(format_args!("page_token"), rule);
        }
    }

    pub(super) fn range(
        &mut self,
        path: fmt::Arguments<'_>,
        given: i64,
        min: u64,
        max: u64,
    ) -> Option<u64> {
        let number = u64::try_from(given).ok().filter(|number| (min..=max).contains(number));
        if number.is_none() {
            self.fail(path, format_args!("must be {min} to {max} (it is {given})"));
        }
        number
    }

    pub(super) fn count(&mut self, field: &str, len: usize, min: usize, max: usize) -> bool {
        let allowed = (min..=max).contains(&len);
        if !allowed {
            let rule = format_args!("must have {min} to {max} items (it has {len})");
            self.fail(format_args!("{field}"), rule);
        }
        allowed
    }

    pub(super) fn text(&mut self, path: fmt::Arguments<'_>, text: &str, min: usize, max: usize) {
        let len = text.chars().count();
        if !(min..=max).contains(&len) {
            self.fail(path, format_args!("must be {min} to {max} characters (it has {len})"));
        } else if let Some(at) = text.chars().position(char::is_control) {
            let rule = format_args!("may not hold control characters (character {at} is one)");
            self.fail(path, rule);
        }
    }

    /// A required time, down to the millisecond that it lies in.
    pub(super) fn time(&mut self, field: &str, given: Option<&Timestamp>) -> Option<TimeMs> {
        let path = format_args!("{field}");
        let Some(given) = given else {
            self.fail(path, "must be set");
            return None;
        };
        // What google.protobuf.Timestamp allows: the years 1 to 9999.
        if !(-62_135_596_800..=253_402_300_799).contains(&given.seconds) {
            self.fail(path, "must be within the years 1 to 9999");
            return None;
        }
        if !(0..=999_999_999).contains(&given.nanos) {
            let rule = format_args!("must have nanos of 0 to 999999999 (they are {})", given.nanos);
            self.fail(path, rule);
            return None;
        }
        Some(TimeMs(given.seconds * 1_000 + i64::from(given.nanos / 1_000_000)))
    }

    pub(super) fn span(
        &mut self,
        path: fmt::Arguments<'_>,
        given: &PbDuration,
        min: Duration,
        max: Duration,
    ) -> Option<Duration> {
        // Seconds and nanos of one duration have the same sign, and nanos stay below a second.
        let (seconds, nanos) = (given.seconds, given.nanos);
        let proper = nanos.unsigned_abs() < 1_000_000_000
            && (seconds == 0 || nanos == 0 || (seconds < 0) == (nanos < 0));
        if !proper {
            let rule = "must have nanos below a second in size and of the sign of its seconds";
            self.fail(path, rule);
            return None;
        }
        let span = match (u64::try_from(seconds), u32::try_from(nanos)) {
            (Ok(seconds), Ok(nanos)) => Some(Duration::new(seconds, nanos)),
            _ => None,
        };
        let span = span.filter(|span| (min..=max).contains(span));
        if span.is_none() {
            let (min, max) = (min.as_secs(), max.as_secs());
            self.fail(path, format_args!("must be {min} to {max} seconds"));
        }
        span
    }

    pub(super) fn whole_seconds(
        &mut self,
        path: fmt::Arguments<'_>,
        given: &PbDuration,
        min: Duration,
        max: Duration,
    ) -> Option<Duration> {
        let span = self.span(path, given, min, max)?;
        if span.subsec_nanos() != 0 {
            self.fail(path, "must be whole seconds");
            return None;
        }
        Some(span)
    }

    pub(super) fn distinct_skus(&mut self, offers: &[pb::OfferSpec]) {
        let mut first_at = HashMap::with_capacity(offers.len());
        for (at, offer) in offers.iter().enumerate() {
            // An empty one is a violation by itself.
            if offer.sku_id.is_empty() {
                continue;
            }
            let first = *first_at.entry(offer.sku_id.as_str()).or_insert(at);
            if first != at {
                let rule = format_args!("must be distinct; spec.offers[{first}] has the same");
                self.fail(format_args!("spec.offers[{at}].sku_id"), rule);
            }
        }
    }
}
