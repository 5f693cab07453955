//! The JSON schema of the file of `activity create`, for editors that complete and check it.

use serde_json::{Value, json};

use crate::{
    api::convert::{
        CURRENCY_LEN, DEFAULT_RETENTION, MAX_HOLD, MAX_PRICE_MINOR, MAX_RETENTION, MAX_TITLE_CHARS,
        MIN_RETENTION,
    },
    domain::{
        MAX_NAME_LEN, MAX_OFFERS, MAX_ORDERS_PER_USER, MAX_QUANTITY, MAX_SEGMENTS, MAX_TOTAL,
    },
};

/// A moment: RFC 3339 with its offset, or one of these words.
const MOMENT: &str =
    r"^(now|\+[0-9]+(ms|s|m|h|d)|[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt].*([Zz]|[+-][0-9]{2}:[0-9]{2}))$";

/// The schema.
pub(super) fn schema() -> Value {
    let name = |of: &str| {
        json!({
            // An id of digits alone is read as text too.
            "type": ["string", "integer"],
            "pattern": format!("^[A-Za-z0-9._-]{{1,{MAX_NAME_LEN}}}$"),
            "description": of,
        })
    };
    let title = json!({
        "type": "string", "minLength": 1, "maxLength": MAX_TITLE_CHARS,
        "description": "What people call it.",
    });
    let number = |least: u64, most: u64, of: &str| json!({"type": "integer", "minimum": least, "maximum": most, "description": of});
    let moment = |of: &str| json!({"type": "string", "pattern": MOMENT, "description": of});
    let offer = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["sku_id", "title", "price_minor", "currency_code", "total"],
        "properties": {
            "sku_id": name("Names the offer inside its activity."),
            "title": title,
            "price_minor": number(
                0, MAX_PRICE_MINOR, "The price of one unit, in the minor unit of the currency."
            ),
            "currency_code": {
                "type": "string", "pattern": format!("^[A-Z]{{{CURRENCY_LEN}}}$"),
                "description": "ISO 4217, as in CNY.",
            },
            "total": number(1, MAX_TOTAL, "How many units are for sale."),
            "max_orders_per_user": number(
                1,
                MAX_ORDERS_PER_USER.into(),
                "How many live reservations one buyer may have. Unset: 1.",
            ),
            "max_quantity_per_order": number(
                1, MAX_QUANTITY.into(), "How many units one reservation may take. Unset: 1."
            ),
            "hold_s": number(
                0,
                MAX_HOLD.as_secs(),
                "After how many seconds what is not confirmed is given back. Unset or 0: never.",
            ),
            "segments": number(
                1,
                MAX_SEGMENTS.into(),
                "Into how many parts the engine splits the stock. Unset: 1.",
            ),
        },
    });
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A sale, for `seckill activity create -f`",
        "type": "object",
        "additionalProperties": false,
        "required": ["activity_id", "title", "start_time", "end_time", "offers"],
        "properties": {
            "activity_id": name("Names the activity; it can't be used again for another one."),
            "title": title,
            "start_time": moment("RFC 3339 with its offset, `now`, or `+10s` from now."),
            "end_time": moment("RFC 3339 with its offset, or `+1h` after start_time."),
            "retention_s": number(
                MIN_RETENTION.as_secs(),
                MAX_RETENTION.as_secs(),
                &format!(
                    "How many seconds after end_time the engine keeps its data. Unset: {}.",
                    DEFAULT_RETENTION.as_secs()
                ),
            ),
            "offers": {
                "type": "array", "minItems": 1, "maxItems": MAX_OFFERS, "items": offer,
                "description": "What is sold; no two have the same sku_id.",
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;

    /// The names that the reader of files knows, as its own refusal lists them.
    fn known(refusal: &str) -> BTreeSet<String> {
        let (_, list) = refusal.split_once("expected one of ").expect(refusal);
        list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    fn properties(schema: &Value) -> BTreeSet<String> {
        schema["properties"].as_object().expect("properties").keys().cloned().collect()
    }

    #[test]
    fn the_schema_has_the_fields_that_a_file_may_have() {
        let parse = |text: &str| {
            let now = "2026-11-11T00:00:00Z".parse().expect("a time");
            super::super::parse_spec(text, now).expect_err(text)
        };
        let schema = schema();
        assert_eq!(properties(&schema), known(&parse("nonsense: 1")));
        let offer = &schema["properties"]["offers"]["items"];
        assert_eq!(properties(offer), known(&parse("offers: [{nonsense: 1}]")));
        // What is required is what is missed, one after the other.
        for (required, wrap) in [(&schema["required"], false), (&offer["required"], true)] {
            for name in required.as_array().expect("a list") {
                let rest: serde_json::Map<String, Value> = required
                    .as_array()
                    .expect("a list")
                    .iter()
                    .filter(|other| *other != name)
                    .map(|other| (other.as_str().expect("a name").to_owned(), json!(1)))
                    .map(|(other, one)| match other.as_str() {
                        "offers" => (other, json!([])),
                        "price_minor" | "total" => (other, one),
                        _ => (other, json!("X")),
                    })
                    .collect();
                let file = if wrap { json!({"offers": [rest]}) } else { json!(rest) };
                let refusal = parse(&file.to_string());
                let name = name.as_str().expect("a name");
                assert!(refusal.contains(&format!("missing field `{name}`")), "{refusal}");
            }
        }
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a switch of this test, not a setting")]
    fn the_schema_in_the_examples_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/sale.schema.json");
        let current = format!("{:#}\n", schema());
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(path, &current).expect("the file is written");
        }
        let written = fs::read_to_string(path).expect("the file is there");
        assert_eq!(written, current, "UPDATE_EXPECT=1 writes it anew");
    }
}
