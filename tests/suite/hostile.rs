//! Clients that keep no rule: what they send is bounded in memory and time, others are served
//! meanwhile, and nothing changes in engine or SQL.

use std::time::Duration;

use prost::Message as _;
use sea_orm::{EntityTrait as _, PaginatorTrait as _};
use seckill::{
    api::pb::{self, ReserveOutcome, seckill_client::SeckillClient},
    books,
    config::Settings,
    domain::OfferKey,
    entity::{audit, outbox},
};
use tokio::{
    io::AsyncWriteExt as _,
    task::JoinSet,
    time::{Instant, timeout},
};
use tonic::{Code, transport::Channel};

use crate::support::{
    databases::Fresh,
    eventually,
    frames::{self, Flood, Raw, frame, stream},
    process::{Process, Serve},
    raw::{Answer, CREATE, Edge, RESERVE, connect, framed, request},
    within,
    world::{Ground, SKU, Sale, World},
};

const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
const MIB: u64 = 1_024 * 1_024;
/// How much a server may grow under an attack, beside what its allocator keeps of normal calls.
const ROOM: u64 = 96 * MIB;
/// How long others may wait for their answer while somebody attacks.
const OTHERS_LIMIT: Duration = Duration::from_secs(5);
/// How long a flood waits for room in a socket before it counts as stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a client hears that does too much of something: the connection is closed.
const CALM_DOWN: (Flood, Option<h2::Reason>) = (Flood::Closed, Some(h2::Reason::ENHANCE_YOUR_CALM));

/// A server process with a sale, and a customer who goes on buying.
struct Victim {
    process: Process,
    database: Fresh,
    key: OfferKey,
    customer: SeckillClient<Channel>,
    bought: u32,
    memory_before: u64,
}

impl Victim {
    async fn start() -> Self {
        Self::start_with(|serve| serve).await
    }

    async fn start_with(change: impl FnOnce(Serve) -> Serve) -> Self {
        let database = Fresh::sqlite().await;
        let settings;
        let key;
        {
            let ground = Ground::embedded(&database);
            settings = ground.settings();
            let world = ground.world().await;
            key = world.open_sale(&Sale { total: 10_000, ..Sale::default() }).await;
            world.close().await;
        }
        let process = change(Serve::over(&settings)).start().await;
        let customer = process.seckill().await;
        let mut victim = Self { process, database, key, customer, bought: 0, memory_before: 0 };
        // What is allocated once is there before it is measured.
        for _ in 0..200 {
            victim.buy().await;
        }
        victim.memory_before = victim.process.memory();
        victim
    }

    /// Another buyer gets a unit, on a connection of his own that was open before.
    async fn buy(&mut self) {
        self.bought += 1;
        let request = pb::ReserveRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: format!("customer-{}", self.bought),
            quantity: None,
            request_id: "r-1".into(),
        };
        let answer = timeout(OTHERS_LIMIT, self.customer.reserve(request)).await;
        let answer = answer.expect("others are served").expect("others are served").into_inner();
        assert_eq!(answer.outcome(), ReserveOutcome::Reserved);
    }

    /// Attacks, while a customer buys; answers with what became of the attack.
    async fn while_buying<T>(&mut self, attack: impl Future<Output = T> + Send + 'static) -> T
    where
        T: Send + 'static,
    {
        let mut attacks = JoinSet::new();
        attacks.spawn(attack);
        loop {
            self.buy().await;
            self.assert_small();
            if let Some(ended) = attacks.try_join_next() {
                self.buy().await;
                return ended.unwrap();
            }
        }
    }

    fn assert_small(&self) {
        let grown = self.process.memory().saturating_sub(self.memory_before);
        assert!(grown < ROOM, "it grew by {} MiB", grown / MIB);
    }

    /// At rest again: the processor, and the books to the unit; nobody else bought anything, the
    /// log has no fault.
    async fn assert_unharmed(mut self) {
        within(Duration::from_secs(10), "its processor is at rest", async || {
            let before = self.process.cpu_time();
            tokio::time::sleep(Duration::from_millis(500)).await;
            (self.process.cpu_time() - before <= Duration::from_millis(100)).then_some(())
        })
        .await;
        let mut fresh = SeckillClient::new(self.process.channel().await);
        std::mem::swap(&mut fresh, &mut self.customer);
        self.buy().await;
        self.assert_small();
        self.process.stop().await;
        let log = self.process.log();
        for word in ["panic", "ERROR", "internal error"] {
            assert!(!log.contains(word), "{log}");
        }
        let world = Ground::embedded(&self.database).world().await;
        world.assert_balanced(&self.key, i64::from(self.bought)).await;
        world.close().await;
    }

    fn reserve(&self) -> Vec<u8> {
        framed(
            &pb::ReserveRequest {
                activity_id: self.key.activity_id.to_string(),
                sku_id: self.key.sku_id.to_string(),
                // A body that is decoded and refused, so that the books show every mistake.
                user_id: "has a space".into(),
                ..Default::default()
            }
            .encode_to_vec(),
        )
    }
}

fn headers(nth: u32, path: &str, flags: u8) -> Vec<u8> {
    frame(frames::HEADERS, frames::END_HEADERS | flags, stream(nth), &frames::call(path, &[]))
}

fn reset(nth: u32) -> Vec<u8> {
    frame(frames::RST_STREAM, 0, stream(nth), &8_u32.to_be_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_that_are_opened_and_cancelled_harm_nobody() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let body = victim.reserve();
    for with_body in [false, true] {
        let body = body.clone();
        let flood = async move {
            let calls = (0..10_000).map(move |nth| {
                let mut bytes = headers(nth, RESERVE, 0);
                if with_body {
                    bytes.extend(frame(frames::DATA, frames::END_STREAM, stream(nth), &body));
                }
                bytes.extend(reset(nth));
                bytes
            });
            Raw::connect(addr).await.flood_and_read(calls, PATIENCE).await
        };
        // It may keep up with them; then the client may go on.
        let ended = victim.while_buying(flood).await;
        assert!([CALM_DOWN, (Flood::Sent, None)].contains(&ended), "{ended:?}");
    }
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_thousand_calls_that_meet_one_deadline_keep_their_connections() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let body = victim.reserve();
    let burst = async move {
        let mut connections = JoinSet::new();
        for _ in 0..5 {
            let body = body.clone();
            connections.spawn(async move {
                let raw = connect(addr).await;
                let headers = request(RESERVE, &[("grpc-timeout", "20m")]);
                let mut calls = Vec::new();
                for _ in 0..1_000 {
                    let mut raw = raw.clone().ready().await.unwrap();
                    // The body never comes, so only the deadline ends the call.
                    calls.push(raw.send_request(headers.clone(), false).unwrap());
                }
                // A client ends its calls at the same moment as the server does.
                tokio::time::sleep(Duration::from_millis(20)).await;
                let mut answered = 0;
                for (response, mut send) in calls {
                    send.send_reset(h2::Reason::CANCEL);
                    answered += u32::from(response.await.is_ok());
                }
                // The connection is as good as before. For a moment the calls of the burst may
                // still have their places.
                let begun = Instant::now();
                loop {
                    let mut raw = raw.clone().ready().await.expect("it survived the burst");
                    let (response, mut send) =
                        raw.send_request(request(RESERVE, &[]), false).unwrap();
                    send.send_data(body.clone().into(), true).ok();
                    match response.await {
                        Ok(response) => {
                            let answer = Answer::of(response).await;
                            break answer.expect(Code::InvalidArgument, "INVALID_FIELD");
                        }
                        Err(error) => {
                            let reason = error.reason();
                            assert_eq!(reason, Some(h2::Reason::REFUSED_STREAM), "{error}");
                            assert!(begun.elapsed() < OTHERS_LIMIT, "it is refused for ever");
                        }
                    }
                }
                answered
            });
        }
        connections.join_all().await
    };
    victim.while_buying(burst).await;
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_without_an_end_are_not_kept() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let filler = {
        let mut block = vec![0];
        frames::string(&mut block, b"x-filler");
        frames::string(&mut block, &[b'x'; 1_000]);
        block
    };
    for payload in [filler, Vec::new()] {
        let flood = async move {
            let begin = frame(frames::HEADERS, 0, 1, &frames::call(RESERVE, &[]));
            let more = std::iter::repeat_n(frame(frames::CONTINUATION, 0, 1, &payload), 200_000);
            Raw::connect(addr).await.flood_and_read([begin].into_iter().chain(more), PATIENCE).await
        };
        assert_eq!(victim.while_buying(flood).await, CALM_DOWN);
    }
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_grow_when_they_are_unpacked_are_refused() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let flood = async move {
        let mut raw = Raw::connect(addr).await;
        // One large entry goes into the table, and each later byte stands for all of it.
        let mut first = frames::call(RESERVE, &[]);
        first.push(0x40);
        frames::string(&mut first, b"x-bomb");
        frames::string(&mut first, &[b'x'; 3_900]);
        let bomb = |nth| {
            let mut block = frames::call(RESERVE, &[]);
            block.extend(std::iter::repeat_n(0x80 | 62, 16_000));
            frame(frames::HEADERS, frames::END_HEADERS | frames::END_STREAM, stream(nth), &block)
        };
        let first = frame(frames::HEADERS, frames::END_HEADERS | frames::END_STREAM, 1, &first);
        let bombs = (1..500).map(bomb);
        raw.flood_and_read([first].into_iter().chain(bombs), PATIENCE).await
    };
    assert_eq!(victim.while_buying(flood).await, CALM_DOWN);
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_frames_that_cost_an_answer_stop_when_the_answers_are_not_read() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let floods: [(&str, Vec<u8>); 3] = [
        ("SETTINGS", frame(frames::SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100])),
        ("empty SETTINGS", frame(frames::SETTINGS, 0, 0, &[])),
        ("PING", frame(frames::PING, 0, 0, b"pingping")),
    ];
    for (name, piece) in floods {
        // In pieces that fill a packet.
        let pieces = std::iter::repeat_n(piece.repeat(100), 20_000);
        let unread = pieces.clone();
        let ended = victim
            .while_buying(async move { Raw::connect(addr).await.flood(unread, PATIENCE).await })
            .await;
        assert_ne!(ended, Flood::Sent, "{name}: two million answers are kept somewhere");
        let read = pieces.take(5_000);
        victim
            .while_buying(
                async move { Raw::connect(addr).await.flood_and_read(read, PATIENCE).await },
            )
            .await;
    }
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_mean_nothing_are_dropped() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    for piece in [
        frame(frames::PRIORITY, 0, 3, &[0, 0, 0, 1, 1]),
        frame(frames::WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes()),
        frame(frames::WINDOW_UPDATE, 0, 0, &0_u32.to_be_bytes()),
        frame(0xfa, 0, 0, b"unknown"),
        frame(frames::RST_STREAM, 0, 99, &8_u32.to_be_bytes()),
        frame(frames::DATA, 0, 99, b"nobody asked"),
        frame(frames::HEADERS, frames::END_HEADERS, 2, b"\x82"),
    ] {
        let pieces = std::iter::repeat_n(piece.repeat(100), 2_000);
        victim
            .while_buying(
                async move { Raw::connect(addr).await.flood_and_read(pieces, PATIENCE).await },
            )
            .await;
    }
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_empty_data_is_not_kept() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    for path in [RESERVE, REFLECTION, HEALTH_WATCH, "/seckill.v1.Seckill/None"] {
        let begin = headers(0, path, 0);
        // Reflection answers each message; without a window it waits, and reads no further.
        let message = frame(frames::DATA, 0, 1, &framed(b"\x3a\0"));
        let empty = std::iter::repeat_n(frame(frames::DATA, 0, 1, b"").repeat(1_000), 2_000);
        let pieces = [begin, message.repeat(20)].into_iter().chain(empty);
        let flood =
            async move { Raw::without_window(addr).await.flood_and_read(pieces, PATIENCE).await };
        assert_eq!(victim.while_buying(flood).await, CALM_DOWN, "{path}");
    }
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_without_a_window_take_little_and_go_with_their_connection() {
    let mut victim = Victim::start().await;
    let addr = victim.process.addr;
    let body = victim.reserve();
    let calls = async move {
        let mut connections = Vec::new();
        for _ in 0..10 {
            let body = body.clone();
            let mut raw = Raw::without_window(addr).await;
            let calls = (0..1_000).map(|nth| {
                let mut bytes = headers(nth, RESERVE, 0);
                bytes.extend(frame(frames::DATA, frames::END_STREAM, stream(nth), &body));
                bytes
            });
            raw.flood(calls, PATIENCE).await;
            connections.push(raw);
        }
        connections
    };
    let open = victim.process.sockets();
    let connections = victim.while_buying(calls).await;
    drop(connections);
    eventually("their sockets are gone", async || (victim.process.sockets() <= open).then_some(()))
        .await;
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_read_nothing_lose_their_connections() {
    let victim = Victim::start_with(|serve| serve.with("GRPC__KEEPALIVE_S", 1));
    let mut victim = victim.await;
    let addr = victim.process.addr;
    let open = victim.process.sockets();
    let body = victim.reserve();
    let attack = async move {
        let mut connections = Vec::new();
        // Idle ones, that answer no ping; and some that ask and never read.
        for nth in 0..500 {
            let mut raw = Raw::connect(addr).await;
            if nth % 10 == 0 {
                let calls = (0..300).map(|nth| {
                    let mut bytes = headers(nth, RESERVE, 0);
                    bytes.extend(frame(frames::DATA, frames::END_STREAM, stream(nth), &body));
                    bytes
                });
                raw.flood(calls, PATIENCE).await;
            }
            connections.push(raw);
        }
        connections
    };
    let connections = victim.while_buying(attack).await;
    // A ping after one second, and ten seconds for its answer.
    within(Duration::from_secs(30), "they are closed", async || {
        (victim.process.sockets() <= open).then_some(())
    })
    .await;
    drop(connections);
    victim.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_preface_and_half_a_call_end_in_time() {
    let victim = Victim::start_with(|serve| {
        serve.with("GRPC__FIRST_BYTE_TIMEOUT_MS", 500).with("GRPC__REQUEST_TIMEOUT_MS", 1_000)
    });
    let mut victim = victim.await;
    let addr = victim.process.addr;
    for begin in [&b""[..], b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"] {
        let mut raw = tokio::net::TcpStream::connect(addr).await.unwrap();
        raw.write_all(begin).await.unwrap();
        assert!(Raw { socket: raw }.is_closed_within(Duration::from_secs(5)).await, "{begin:?}");
    }
    // A message that never comes, or only in part, is not waited for.
    let raw = connect(addr).await;
    for begin in [&b""[..], b"\0\0", b"\0\0\0\0\x40abc"] {
        for path in [RESERVE, CREATE, HEALTH_WATCH] {
            let mut raw = raw.clone().ready().await.unwrap();
            let (response, mut send) = raw.send_request(request(path, &[]), false).unwrap();
            // It may be answered, and closed, already.
            send.send_data(begin.to_vec().into(), false).ok();
            let answer = timeout(OTHERS_LIMIT, Answer::read(response)).await.expect("in time");
            answer.expect(Code::InvalidArgument, "MALFORMED_MESSAGE");
        }
    }
    victim.buy().await;
    victim.assert_unharmed().await;
}

/// All that a call could have changed.
async fn everything(world: &World) -> String {
    let key = world.key("sale");
    let levels = world.offer(&key).await.levels().await.unwrap();
    let database = &world.parts.database;
    let books = books::read(database, &world.parts.catalog, &key.activity_id).await.unwrap();
    let audited = audit::Entity::find().count(database.reader()).await.unwrap();
    let rows = outbox::Entity::find().count(database.reader()).await.unwrap();
    format!("{levels:?} {books:?} {audited} {rows}")
}

async fn edge_with_a_sale() -> (Edge, World) {
    let edge = Edge::start().await;
    let world = World { parts: edge.server.parts.clone(), settings: Settings::default() };
    world.open_sale(&Sale::default()).await;
    (edge, world)
}

fn reserve_of(change: impl FnOnce(&mut pb::ReserveRequest)) -> Vec<u8> {
    let mut request = pb::ReserveRequest {
        activity_id: "sale".into(),
        sku_id: SKU.into(),
        user_id: "u-1".into(),
        quantity: None,
        request_id: "r-1".into(),
    };
    change(&mut request);
    request.encode_to_vec()
}

#[tokio::test]
async fn messages_of_every_wrong_kind_are_refused_and_change_nothing() {
    let (edge, world) = edge_with_a_sale().await;
    let before = everything(&world).await;
    let good = reserve_of(|_| {});
    let with = |more: &[u8]| [&good, more].concat();
    // Groups in groups, past the limit of the decoder; and lengths in lengths.
    let groups = with(&[0xa3, 0x06].repeat(10_000));
    let nested = with(&(0..500).fold(Vec::new(), |inner: Vec<u8>, _| {
        let mut outer = vec![0xa3, 0x06];
        outer.extend(inner);
        outer.extend([0xa4, 0x06]);
        outer
    }));
    for (name, message) in [
        ("open groups", groups),
        ("nested groups", nested),
        ("a field that is cut short", with(b"\x0a\xff\xff\xff\xff\x0f")),
        ("a number of eleven bytes", with(b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")),
        ("a wire type that is none", with(b"\x27")),
        ("field number 0", with(b"\x00\x01")),
        ("a text of another type", with(b"\x08\x01")),
        ("a text that is not UTF-8", with(b"\x1a\x02\xc3\x28")),
    ] {
        let answer = edge.raw(RESERVE, &[], &framed(&message)).await;
        assert_eq!(answer.reason(), "MALFORMED_MESSAGE", "{name}: {answer:?}");
        assert_eq!(answer.status.code(), Code::InvalidArgument);
    }
    let nines = "9".repeat(60_000);
    for (name, message) in [
        ("NUL", reserve_of(|r| r.user_id = "u\0".into())),
        ("a line end", reserve_of(|r| r.user_id = "u\n".into())),
        ("a line end in the request_id", reserve_of(|r| r.request_id = "r\r\n".into())),
        ("a NUL in the activity", reserve_of(|r| r.activity_id = "sale\0".into())),
        ("letters of other scripts", reserve_of(|r| r.user_id = "买家".into())),
        ("many nines", reserve_of(|r| r.user_id = nines.clone())),
        ("a path", reserve_of(|r| r.sku_id = "../sku-1".into())),
        ("a brace", reserve_of(|r| r.sku_id = "{sku-1}".into())),
        ("no unit", reserve_of(|r| r.quantity = Some(0))),
        ("too many units", reserve_of(|r| r.quantity = Some(i32::MAX as u32 as _))),
        ("fewer than none", with(b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")),
    ] {
        let answer = edge.raw(RESERVE, &[], &framed(&message)).await;
        assert_eq!(answer.reason(), "INVALID_FIELD", "{name}: {answer:?}");
        assert!(!format!("{answer:?}").contains("99999"), "{name}: it is repeated");
    }
    let million = reserve_of(|r| r.user_id = "9".repeat(1_000_000));
    let answer = edge.raw(RESERVE, &[], &framed(&million)).await;
    answer.expect(Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    // A compressed message, which might be a bomb, is not unpacked.
    let mut packed = framed(b"\x1f\x8b\x08\0\0\0\0\0\0\x03");
    packed[0] = 1;
    for encoding in ["gzip", "deflate", "zstd"] {
        let answer = edge.raw(RESERVE, &[("grpc-encoding", encoding)], &packed).await;
        answer.expect(Code::Unimplemented, "UNIMPLEMENTED");
    }
    assert_eq!(everything(&world).await, before);

    // Fields of a later version are no fault.
    let later = with(b"\xfa\x7f\x03new\xf8\x7f\x01");
    let answer = edge.raw(RESERVE, &[], &framed(&later)).await;
    assert_eq!(answer.status.code(), Code::Ok, "{answer:?}");
    assert_ne!(everything(&world).await, before);
}

#[tokio::test]
async fn metadata_of_every_wrong_kind_is_refused_or_ignored() {
    let (edge, world) = edge_with_a_sale().await;
    let message = framed(&reserve_of(|r| r.user_id = "has a space".into()));
    let names: Vec<_> = (0..100).map(|nth| format!("x-header-{nth}")).collect();
    let hundred: Vec<_> = names.iter().map(|name| (name.as_str(), "value")).collect();
    let before = everything(&world).await;
    for headers in [
        &hundred[..],
        &[("authorization", "Bearer x"), ("authorization", "Bearer y")],
        &[("x-junk-bin", "!!! this is no base64 !!!")],
        &[("x-junk-bin", "/////w==")],
        &[("grpc-tags-bin", "%%%")],
        &[("grpc-timeout", "99999999H")],
        &[("grpc-timeout", "999999999H")],
        &[("grpc-timeout", "-1S")],
        &[("grpc-timeout", "")],
        &[("grpc-timeout", "1 S")],
        &[("grpc-timeout", "1S"), ("grpc-timeout", "99999999H")],
        &[("grpc-previous-rpc-attempts", "99999999999999999999")],
        &[("grpc-accept-encoding", "\t,,,gzip;q=9")],
    ] {
        let answer = edge.raw(RESERVE, headers, &message).await;
        answer.expect(Code::InvalidArgument, "INVALID_FIELD");
    }
    // Longer than the header list may be: the call is refused, and the connection goes on.
    let long = "x".repeat(64 * 1_024);
    let mut raw = edge.raw.clone().ready().await.unwrap();
    let head = request(RESERVE, &[("authorization", &long)]);
    let begun = Instant::now();
    let refused = match raw.send_request(head, true) {
        Ok((response, _)) => match response.await {
            Ok(response) => format!("{}", response.status()),
            Err(error) => error.to_string(),
        },
        // The server said before what it takes.
        Err(error) => error.to_string(),
    };
    assert!(!refused.contains("200"), "{refused}");
    assert!(begun.elapsed() < OTHERS_LIMIT);
    let again = connect(edge.server.addr).await;
    let (response, mut send) =
        again.ready().await.unwrap().send_request(request(RESERVE, &[]), false).unwrap();
    // It may be answered, and closed, already.
    send.send_data(message.into(), true).ok();
    Answer::read(response).await.expect(Code::InvalidArgument, "INVALID_FIELD");
    assert_eq!(everything(&world).await, before);
}
