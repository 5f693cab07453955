//! Who owns which slot of a Redis Cluster.

use ::redis::{Value, aio::MultiplexedConnection};

use super::{info::fields, reply::plain_text, target::Host};

/// How many slots a cluster has.
pub(super) const SLOTS: usize = 16_384;

/// The cluster as one of its members sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct View {
    pub(super) ranges: Vec<Range>,
}

/// Some slots in a row, and who serves them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) master: Host,
    pub(super) replicas: Vec<Host>,
}

impl View {
    /// Asks one member, over any connection to it.
    ///
    /// # Errors
    /// It does not answer, or the cluster is down as far as it knows: then it may be cut off from
    /// the others, and what it says of them is old.
    pub(super) async fn ask(
        connection: &mut MultiplexedConnection,
        asked: &Host,
    ) -> Result<Self, String> {
        let mut pipe = ::redis::pipe();
        pipe.cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("SLOTS");
        let answer: Result<(String, Value), _> = pipe.query_async(connection).await;
        let (info, slots) = answer.map_err(|error| format!("{asked}: {}", plain_text(&error)))?;
        match fields(std::iter::once(info.as_str())).get("cluster_state").map(String::as_str) {
            Some("ok") => {}
            state => {
                let state = state.unwrap_or("unknown");
                return Err(format!("{asked}: the state of the cluster is {state}"));
            }
        }
        Self::read(slots, asked).ok_or_else(|| format!("{asked}: CLUSTER SLOTS is not understood"))
    }

    /// Reads what CLUSTER SLOTS answers: `[[first, last, master, replica…]…]`, each server as
    /// `[name, port, id…]`; no name stands for the server that was asked.
    fn read(reply: Value, asked: &Host) -> Option<Self> {
        let Value::Array(ranges) = reply else { return None };
        let ranges = ranges.into_iter().map(|range| {
            let Value::Array(parts) = range else { return None };
            let mut parts = parts.into_iter();
            let (first, last) = (number(&parts.next()?)?, number(&parts.next()?)?);
            let mut servers = parts.map(|server| server_of(&server, asked));
            let master = servers.next()??;
            let replicas = servers.collect::<Option<_>>()?;
            let valid = first <= last && usize::from(last) < SLOTS;
            valid.then_some(Range { first, last, master, replicas })
        });
        Some(Self { ranges: ranges.collect::<Option<_>>()? })
    }

    /// Every master that has slots, once, in order.
    pub(super) fn masters(&self) -> Vec<Host> {
        let mut masters: Vec<_> = self.ranges.iter().map(|range| range.master.clone()).collect();
        masters.sort();
        masters.dedup();
        masters
    }

    /// Every replica of those, once, in order.
    pub(super) fn replicas(&self) -> Vec<Host> {
        let mut replicas: Vec<_> =
            self.ranges.iter().flat_map(|range| range.replicas.iter().cloned()).collect();
        replicas.sort();
        replicas.dedup();
        replicas
    }

    /// Who serves the slot of this key.
    pub(super) fn master_of(&self, key: &str) -> Option<&Host> {
        let slot = slot_of(key);
        let range = self.ranges.iter().find(|range| (range.first..=range.last).contains(&slot));
        range.map(|range| &range.master)
    }

    /// How many slots nobody serves.
    pub(super) fn uncovered(&self) -> usize {
        let covered = self.ranges.iter().map(|range| usize::from(range.last - range.first) + 1);
        SLOTS.saturating_sub(covered.sum())
    }
}

fn number(value: &Value) -> Option<u16> {
    let Value::Int(number) = value else { return None };
    u16::try_from(*number).ok()
}

#[allow(clippy::wildcard_enum_match_arm, reason = "redis-rs may add kinds; a name has few")]
fn server_of(value: &Value, asked: &Host) -> Option<Host> {
    let Value::Array(parts) = value else { return None };
    let name = match parts.first()? {
        Value::BulkString(name) => std::str::from_utf8(name).ok()?,
        Value::SimpleString(name) => name,
        Value::Nil => "",
        _ => return None,
    };
    Some(Host::named(name, number(parts.get(1)?)?, asked))
}

/// The slot of a key: CRC16 of what stands in the first braces, or of all of it.
pub(super) fn slot_of(key: &str) -> u16 {
    let tag = key.find('{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.find('}')?;
        (close > 0).then(|| &rest[..close])
    });
    let crc = tag
        .unwrap_or(key)
        .bytes()
        .fold(0_u16, |crc, byte| (crc << 8) ^ CRC16[usize::from((crc >> 8) ^ u16::from(byte))]);
    crc % 16_384
}

/// CRC-16/XMODEM, byte by byte.
const CRC16: [u16; 256] = {
    let mut table = [0; 256];
    let mut at = 0;
    while at < 256 {
        #[allow(clippy::cast_possible_truncation, reason = "it is below 256")]
        let mut crc = (at as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    fn host(text: &str) -> Host {
        let nobody = Host { name: "asked".to_owned(), port: 1 };
        Host::redirected(text, &nobody).unwrap()
    }

    fn server(name: Value, port: i64) -> Value {
        Value::Array(vec![name, Value::Int(port), Value::BulkString(b"id".to_vec())])
    }

    #[test]
    fn a_key_has_the_slot_that_redis_gives_it() {
        // As CLUSTER KEYSLOT answers.
        assert_eq!(slot_of("123456789"), 12_739);
        assert_eq!(slot_of(""), 0);
        assert_eq!(slot_of("foo"), 12_182);
        assert_eq!(slot_of("{user1000}.following"), slot_of("user1000"));
        assert_eq!(slot_of("foo{}{bar}"), 8_363);
        assert_eq!(slot_of("foo{{bar}}zap"), slot_of("{bar"));
        assert_eq!(slot_of("sk:{a:s:0}:stock"), slot_of("sk:{a:s:0}:meta"));
    }

    #[test]
    fn the_answer_of_a_member_is_read() {
        let named = |name: &str| Value::BulkString(name.as_bytes().to_vec());
        let reply = Value::Array(vec![
            Value::Array(vec![
                Value::Int(0),
                Value::Int(8_191),
                server(named("10.0.0.1"), 7_001),
                server(named("10.0.0.4"), 7_004),
            ]),
            Value::Array(vec![Value::Int(8_192), Value::Int(16_382), server(Value::Nil, 7_002)]),
        ]);
        let view = View::read(reply, &host("me:7002")).unwrap();
        assert_eq!(view.masters(), [host("10.0.0.1:7001"), host("me:7002")]);
        assert_eq!(view.replicas(), [host("10.0.0.4:7004")]);
        assert_eq!(view.uncovered(), 1);
    }

    #[test]
    fn an_answer_that_is_no_map_is_refused() {
        let range = |first, last| {
            let server = server(Value::BulkString(b"h".to_vec()), 1);
            Value::Array(vec![Value::Array(vec![Value::Int(first), Value::Int(last), server])])
        };
        let me = host("me:1");
        assert!(View::read(range(0, 16_383), &me).is_some());
        for wrong in [range(5, 4), range(0, 16_384), range(-1, 4), Value::Nil] {
            assert_eq!(View::read(wrong, &me), None);
        }
        let nobody = Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(1)])]);
        assert_eq!(View::read(nobody, &me), None);
    }
}
