//! Spans and moments as people write them.

use std::time::Duration;

use prost_types::Timestamp;

/// Reads `500ms`, `5s`, `1m`, `2h` or `7d`.
///
/// # Errors
/// A sentence with what is allowed.
pub(super) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => 0,
    };
    match number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_ms)) {
        Some(ms) if unit_ms > 0 => Ok(Duration::from_millis(ms)),
        _ => Err("must be a number with a unit, as in 500ms, 5s, 1m, 2h or 7d".to_owned()),
    }
}

/// As [`parse`] reads it, in seconds where it has whole ones.
pub(super) fn written(span: Duration) -> String {
    if span.subsec_millis() == 0 {
        format!("{}s", span.as_secs())
    } else {
        format!("{}ms", span.as_millis())
    }
}

/// Reads a moment: `now`, `+10s` after `base`, or RFC 3339 with its offset from UTC.
///
/// # Errors
/// A sentence with what is allowed.
pub(super) fn parse_moment(text: &str, base: Timestamp) -> Result<Timestamp, String> {
    if text == "now" {
        return Ok(now());
    }
    if let Some(span) = text.strip_prefix('+') {
        return Ok(plus(base, parse(span)?));
    }
    // Without an offset it would be some place's local time, and nobody knows which place's.
    let offset = text.get(text.len().saturating_sub(6)..).unwrap_or_default();
    let has_offset = text.ends_with(['Z', 'z']) || offset.starts_with(['+', '-']);
    text.parse().ok().filter(|_| has_offset && text.contains(['T', 't'])).ok_or_else(|| {
        "must be RFC 3339, as in 2026-11-11T00:00:00+08:00, `now` or `+10s`".to_owned()
    })
}

/// This machine's clock, in the whole milliseconds that the server keeps.
pub(super) fn now() -> Timestamp {
    let now = Timestamp::from(std::time::SystemTime::now());
    Timestamp { nanos: now.nanos / 1_000_000 * 1_000_000, ..now }
}

/// `time`, later by `span`.
pub(super) fn plus(time: Timestamp, span: Duration) -> Timestamp {
    let mut later = Timestamp {
        seconds: time.seconds.saturating_add(i64::try_from(span.as_secs()).unwrap_or(i64::MAX)),
        nanos: time.nanos.saturating_add(i32::try_from(span.subsec_nanos()).unwrap_or(0)),
    };
    later.normalize();
    later
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_a_number_and_a_unit() {
        assert_eq!(parse("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(parse("2h"), Ok(Duration::from_secs(7_200)));
        for text in ["", "5", "s", "-5s", "5 s", "1.5s", "5sec", "99999999999999999999s", "٣s"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_moment_is_absolute_or_after_another() {
        let base: Timestamp = "2026-11-11T00:00:00Z".parse().expect("a time");
        let moment = |text: &str| parse_moment(text, base).map(|time| time.to_string());
        assert_eq!(moment("+90s"), Ok("2026-11-11T00:01:30Z".to_owned()));
        assert_eq!(moment("2026-11-11T08:00:00+08:00"), Ok("2026-11-11T00:00:00Z".to_owned()));
        assert_eq!(moment("2026-11-11T00:00:00.250Z"), Ok("2026-11-11T00:00:00.250Z".to_owned()));
        assert!(moment("now").is_ok());
        for text in
            ["", "tomorrow", "2026-11-11", "2026-11-11T00:00:00", "+1", "2026-13-01T00:00:00Z"]
        {
            assert!(moment(text).is_err(), "{text}");
        }
    }
}
