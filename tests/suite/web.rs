//! Browsers' way in: gRPC-Web on the HTTP port, spoken by hand. It opens nothing that is shut at the
//! gRPC port, and serves no page but its own.

use std::{net::SocketAddr, time::Duration};

use prost::Message as _;
use sea_orm::{EntityTrait as _, PaginatorTrait as _, QueryOrder as _};
use seckill::{
    api::{
        pb,
        web::{MOST_CALLS, SERVICES},
    },
    books,
    config::{OptionalAddr, Role, Settings, Token, Tokens, digest},
    entity::audit,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::Code;

use crate::support::{
    eventually,
    raw::{Edge, RESERVE, WATCH_STOCK, framed},
    scrape::{ask, get, metrics, send},
    world::{SKU, Sale, World},
};

const PAUSE: &str = "/seckill.v1.SeckillAdmin/PauseActivity";
const LIST: &str = "/seckill.v1.SeckillAdmin/ListActivities";
const OPS: &str = "ops-token-e3f0";
const VIEWER: &str = "viewer-token-9d1c";
const GRPC_WEB: (&str, &str) = ("content-type", "application/grpc-web+proto");

/// A server with an HTTP port, and a sale on it.
struct Port {
    edge: Edge,
    world: World,
    addr: SocketAddr,
}

/// An answer, or as much of it as was asked for.
#[derive(Debug)]
struct Answer {
    code: u16,
    head: String,
    messages: Vec<Vec<u8>>,
    /// What gRPC has as trailers: a last frame of text, or the head where there is nothing else.
    trailers: String,
}

impl Port {
    async fn open(change: impl FnOnce(&mut Settings)) -> Self {
        let edge = Edge::start_with(|settings| {
            settings.http.addr = OptionalAddr(Some(([127, 0, 0, 1], 0).into()));
            settings.watch.sample_ms = 5;
            change(settings);
        })
        .await;
        let world = World { parts: edge.server.parts.clone(), settings: Settings::default() };
        world.open_sale(&Sale { activity: "a-1", ..Sale::default() }).await;
        world.parts.activities.move_by_clock().await.unwrap();
        let addr = edge.server.http_addr().unwrap();
        Self { edge, world, addr }
    }

    /// All that a call could have changed, in the engine and in SQL.
    async fn everything(&self) -> String {
        let key = self.world.key("a-1");
        let levels = self.world.offer(&key).await.segments.levels().await.unwrap();
        let parts = &self.world.parts;
        let books = books::read(&parts.database, &parts.catalog, &key.activity_id).await.unwrap();
        let audited = audit::Entity::find().count(parts.database.reader()).await.unwrap();
        let state = parts.activities.get(&key.activity_id).await.unwrap().state;
        format!("{levels:?} {books:?} {audited} {state:?}")
    }

    /// Begins a call; HTTP/1.0, so that the answer is not cut into chunks.
    async fn begin(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(self.addr).await.unwrap();
        let mut head = format!("POST {path} HTTP/1.0\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            head.push_str(&format!("host: {}\r\n", self.addr));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        // Who is refused by his headers may be told before all of the body is there.
        let _ = socket.write_all(body).await;
        socket
    }

    /// A whole call.
    async fn call(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut socket = self.begin(path, &[headers, &[GRPC_WEB]].concat(), body).await;
        let mut answer = Vec::new();
        let read = timeout(Duration::from_secs(10), socket.read_to_end(&mut answer)).await;
        read.expect("an end").unwrap();
        parse(&answer)
    }
}

fn parse(answer: &[u8]) -> Answer {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_ascii_lowercase();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = &answer[end + 4..];
    let (mut messages, mut trailers) = (Vec::new(), head.clone());
    while head.contains("application/grpc-web+proto") && body.len() >= 5 {
        let length = u32::from_be_bytes(body[1..5].try_into().unwrap()) as usize;
        let Some(content) = body.get(5..5 + length) else { break };
        match body[0] {
            0 => messages.push(content.to_vec()),
            0x80 => trailers = String::from_utf8(content.to_vec()).unwrap(),
            flag => panic!("no such frame: {flag}"),
        }
        body = &body[5 + length..];
    }
    Answer { code, head, messages, trailers }
}

impl Answer {
    #[track_caller]
    fn expect(&self, code: Code) {
        assert_eq!(self.code, 200, "{self:?}");
        let status = format!("grpc-status:{}", i32::from(code));
        let trailers = self.trailers.replace(": ", ":");
        assert!(trailers.lines().any(|line| line.trim() == status), "{status} in {self:?}");
        assert!(self.head.contains("content-type: application/grpc-web+proto"), "{self:?}");
        self.no_other_page_reads_it();
    }

    #[track_caller]
    fn no_other_page_reads_it(&self) {
        assert!(!self.head.contains("access-control-"), "{self:?}");
    }
}

fn pause() -> Vec<u8> {
    let request = pb::PauseActivityRequest { activity_id: "a-1".into(), reason: "test".into() };
    framed(&request.encode_to_vec())
}

fn watch() -> Vec<u8> {
    let request = pb::WatchStockRequest { activity_id: "a-1".into(), ..Default::default() };
    framed(&request.encode_to_vec())
}

fn reserve(user: &str) -> Vec<u8> {
    let request = pb::ReserveRequest {
        activity_id: "a-1".into(),
        sku_id: SKU.into(),
        user_id: user.into(),
        quantity: None,
        request_id: "r-1".into(),
    };
    framed(&request.encode_to_vec())
}

fn with_tokens(settings: &mut Settings) {
    let entries = [(VIEWER, Role::Viewer), (OPS, Role::Ops)].map(|(token, role)| {
        let digest = digest(token.as_bytes());
        Token { name: role.as_str().into(), role, digest }.entry().unwrap()
    });
    settings.auth.tokens = Tokens::new(&entries.join(","));
}

#[tokio::test]
async fn a_call_is_answered_counted_and_audited_as_at_the_grpc_port() {
    let port = Port::open(|_| {}).await;
    let counted = |method: &str| {
        format!(
            "grpc_server_handled_total{{grpc_service=\"seckill.v1.{method}\",\
             grpc_type=\"unary\",grpc_code=\"OK\"}}"
        )
    };
    let counted = counted("SeckillAdmin\",grpc_method=\"PauseActivity");
    let before = metrics(port.addr).await[&counted];

    let answer = port.call(LIST, &[], &framed(&[])).await;
    answer.expect(Code::Ok);
    let list = pb::ListActivitiesResponse::decode(&*answer.messages[0]).unwrap();
    assert_eq!(list.activities[0].activity_id, "a-1");
    assert!(answer.head.contains("cache-control: no-store"), "{answer:?}");
    assert!(answer.head.contains("x-content-type-options: nosniff"), "{answer:?}");

    let answer = port.call(RESERVE, &[], &reserve("u-1")).await;
    answer.expect(Code::Ok);
    let won = pb::ReserveResponse::decode(&*answer.messages[0]).unwrap();
    assert_eq!(won.outcome(), pb::ReserveOutcome::Reserved);

    let answer = port.call(PAUSE, &[], &pause()).await;
    answer.expect(Code::Ok);
    let paused = pb::PauseActivityResponse::decode(&*answer.messages[0]).unwrap();
    assert_eq!(paused.activity.unwrap().state(), pb::ActivityState::Paused);
    let reader = port.world.parts.database.reader();
    let last = audit::Entity::find().order_by_desc(audit::Column::Id).one(reader).await;
    let last = last.unwrap().unwrap();
    assert_eq!(last.action, "pause_activity");
    assert!(last.detail.contains("paused"), "{last:?}");
    assert!(last.actor.starts_with("grpc 127.0.0.1"), "{}", last.actor);
    assert!(metrics(port.addr).await[&counted] > before, "it is counted");
    port.world.assert_balanced(&port.world.key("a-1"), 1).await;
}

#[tokio::test]
async fn a_stream_tells_what_changes_and_ends_with_the_server() {
    let port = Port::open(|_| {}).await;
    let mut socket = port.begin(WATCH_STOCK, &[GRPC_WEB], &watch()).await;
    let mut read = Vec::new();
    let mut told = async |messages: usize| {
        loop {
            if let Some(end) = read.windows(4).position(|bytes: &[u8]| bytes == b"\r\n\r\n")
                && read.len() > end + 4
            {
                let answer = parse(&read);
                if answer.messages.len() >= messages || answer.trailers.contains("grpc-status") {
                    return answer;
                }
            }
            let chunk = timeout(Duration::from_secs(10), socket.read_buf(&mut read)).await;
            assert_ne!(chunk.expect("it goes on").unwrap(), 0, "it ended: {read:?}");
        }
    };
    let first = told(1).await;
    assert_eq!(first.code, 200);
    let first = pb::WatchStockResponse::decode(&*first.messages[0]).unwrap();
    assert!(first.snapshot && first.remaining == 10, "{first:?}");

    port.call(RESERVE, &[], &reserve("u-1")).await.expect(Code::Ok);
    let mut seen = 1;
    let last = loop {
        seen += 1;
        let answer = told(seen).await;
        let last = pb::WatchStockResponse::decode(&**answer.messages.last().unwrap()).unwrap();
        if last.remaining == 9 {
            break last;
        }
    };
    assert_eq!((last.reserved, last.state()), (1, pb::ActivityState::Active));

    let stopping = port.edge.server.parts.shutdown.clone();
    stopping.cancel();
    let end = told(usize::MAX).await;
    assert!(end.trailers.contains("grpc-status:14"), "{end:?}");
}

#[tokio::test]
async fn a_caller_without_the_right_token_changes_nothing() {
    let port = Port::open(with_tokens).await;
    let before = port.everything().await;
    let own = format!("http://{}", port.addr);
    for (authorization, code) in [
        (None, Code::Unauthenticated),
        (Some("Bearer nonsense".to_owned()), Code::Unauthenticated),
        (Some(format!("Basic {OPS}")), Code::Unauthenticated),
        (Some(format!("Bearer {VIEWER}")), Code::PermissionDenied),
    ] {
        let mut headers = vec![("origin", own.as_str())];
        headers.extend(authorization.as_ref().map(|value| ("authorization", value.as_str())));
        for (path, body) in [(PAUSE, pause()), (RESERVE, reserve("u-1"))] {
            port.call(path, &headers, &body).await.expect(code);
        }
        assert_eq!(port.everything().await, before, "{authorization:?}");
    }
    for path in [LIST, WATCH_STOCK] {
        port.call(path, &[], &framed(&[])).await.expect(Code::Unauthenticated);
    }

    let viewer = format!("Bearer {VIEWER}");
    port.call(LIST, &[("authorization", &viewer)], &framed(&[])).await.expect(Code::Ok);
    let ops = format!("Bearer {OPS}");
    port.call(PAUSE, &[("authorization", &ops)], &pause()).await.expect(Code::Ok);
    let reader = port.world.parts.database.reader();
    let last = audit::Entity::find().order_by_desc(audit::Column::Id).one(reader).await;
    let last = last.unwrap().unwrap();
    assert_eq!((last.action.as_str(), last.actor.as_str()), ("pause_activity", "ops"));
}

#[tokio::test]
async fn what_is_no_call_is_not_taken_for_one() {
    let port = Port::open(|_| {}).await;
    let before = port.everything().await;
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"] {
        let answer = ask(port.addr, method, PAUSE).await;
        assert_eq!(answer.code, 405, "{method}");
        assert!(!answer.head.contains("access-control-"), "{method}: {answer:?}");
    }
    for kind in ["application/json", "application/grpc", "text/plain", "application/x-www-form"] {
        let mut socket = port.begin(PAUSE, &[("content-type", kind)], &pause()).await;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).await.unwrap();
        assert_eq!(parse(&answer).code, 400, "{kind}");
    }
    for path in ["/grpc.health.v1.Health/Check", "/seckill.v1.Other/Pause", "/seckill.v1.Seckill"] {
        assert_eq!(port.call(path, &[], &pause()).await.code, 404, "{path}");
    }
    let unknown = format!("/{}/Fly", SERVICES[0]);
    port.call(&unknown, &[], &pause()).await.expect(Code::Unimplemented);
    assert_eq!(port.everything().await, before);
}

#[tokio::test]
async fn a_page_of_another_origin_changes_nothing() {
    let port = Port::open(|_| {}).await;
    let before = port.everything().await;
    let own = format!("http://{}", port.addr);
    let nearly = format!("{own}0");
    let host = port.addr.to_string();
    let rebound: [(&str, &str); 2] = [("host", "evil.example"), ("origin", "http://evil.example")];
    let strangers: [&[(&str, &str)]; 8] = [
        &[("origin", "http://evil.example")],
        &[("origin", "null")],
        &[("origin", "")],
        &[("origin", &nearly)],
        &[("origin", &own), ("origin", "http://evil.example")],
        &[("origin", &own), ("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
        // A name that its owner has pointed at this machine.
        &rebound,
    ];
    for headers in strangers {
        let answer = port.call(PAUSE, headers, &pause()).await;
        assert_eq!(answer.code, 403, "{headers:?}: {answer:?}");
        answer.no_other_page_reads_it();
        assert_eq!(port.everything().await, before, "{headers:?}");
    }
    // It is not asked for, so it is not needed either.
    let over_tls = format!("https://{host}");
    let own_pages: [&[(&str, &str)]; 4] = [
        &[],
        &[("origin", &own), ("sec-fetch-site", "same-origin")],
        &[("origin", &over_tls)],
        &[("host", "localhost:9090"), ("origin", "http://localhost:9090")],
    ];
    for headers in own_pages {
        port.call(LIST, headers, &framed(&[])).await.expect(Code::Ok);
    }

    // Where tokens are asked for, a page under another name does not have one.
    let port = Port::open(with_tokens).await;
    let ops = format!("Bearer {OPS}");
    let named = [rebound[0], rebound[1], ("authorization", &ops)];
    port.call(LIST, &named, &framed(&[])).await.expect(Code::Ok);
    let foreign = [("origin", "http://evil.example"), ("authorization", &ops)];
    assert_eq!(port.call(PAUSE, &foreign, &pause()).await.code, 403);
}

#[tokio::test]
async fn the_limits_are_those_of_the_grpc_port() {
    let port = Port::open(|settings| settings.grpc.request_timeout_ms = 300).await;
    let before = port.everything().await;
    let large = framed(&vec![0; 64 * 1_024 + 1]);
    port.call(RESERVE, &[], &large).await.expect(Code::ResourceExhausted);
    // A message that never comes whole.
    let mut half = framed(&[0; 100]);
    half.truncate(50);
    let mut socket = TcpStream::connect(port.addr).await.unwrap();
    let head = format!(
        "POST {RESERVE} HTTP/1.0\r\nhost: {}\r\ncontent-type: {}\r\ncontent-length: 105\r\n\r\n",
        port.addr, GRPC_WEB.1
    );
    socket.write_all(&[head.as_bytes(), &half].concat()).await.unwrap();
    let mut answer = Vec::new();
    let read = timeout(Duration::from_secs(10), socket.read_to_end(&mut answer)).await;
    read.expect("it is not waited for").unwrap();
    parse(&answer).expect(Code::InvalidArgument);
    assert_eq!(port.everything().await, before);

    let denied = Port::open(|settings| {
        settings.limits.denied = "198.51.100.0/24".parse().unwrap();
        settings.limits.proxies = "127.0.0.0/8".parse().unwrap();
    })
    .await;
    let from = [("x-forwarded-for", "198.51.100.7")];
    denied.call(LIST, &from, &framed(&[])).await.expect(Code::PermissionDenied);
}

#[tokio::test]
async fn calls_leave_places_to_metrics_and_probes() {
    let port = Port::open(|_| {}).await;
    let mut streams = Vec::new();
    for _ in 0..MOST_CALLS {
        let mut socket = port.begin(WATCH_STOCK, &[GRPC_WEB], &watch()).await;
        assert_ne!(socket.read(&mut [0; 64]).await.unwrap(), 0);
        streams.push(socket);
    }
    port.call(LIST, &[], &framed(&[])).await.expect(Code::ResourceExhausted);
    assert_eq!(get(port.addr, "/livez").await.code, 200);
    assert_eq!(get(port.addr, "/readyz").await.code, 200);
    streams.pop();
    eventually("a place is free again", async || {
        let answer = port.call(LIST, &[], &framed(&[])).await;
        answer.trailers.contains("grpc-status:0").then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_page_comes_whole_from_the_binary_and_asks_nobody_else() {
    let port = Port::open(|_| {}).await;
    let mut sizes = 0;
    for (path, kind) in [
        ("/", "text/html"),
        ("/dashboard.js", "text/javascript"),
        ("/dashboard.css", "text/css"),
        ("/icon.svg", "image/svg+xml"),
    ] {
        let plain = get(port.addr, path).await;
        assert_eq!(plain.code, 200, "{path}");
        assert!(plain.head.contains(&format!("content-type: {kind}")), "{}", plain.head);
        assert!(plain.head.contains("x-content-type-options: nosniff"), "{}", plain.head);
        let policy =
            plain.head.lines().find_map(|line| line.strip_prefix("content-security-policy: "));
        let policy = policy.expect("a policy");
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        let from_elsewhere = ["https://", "http://"].iter().any(|scheme| {
            plain.body.split(scheme).skip(1).any(|rest| !rest.starts_with("www.w3.org/2000/svg"))
        });
        assert!(path == "/dashboard.js" || !from_elsewhere, "{path}");

        let tag = |head: &str| {
            head.lines().find_map(|line| line.strip_prefix("etag: ").map(str::to_owned)).unwrap()
        };
        let known = tag(&plain.head);
        let with = async |headers: &str| {
            let head = format!(
                "GET {path} HTTP/1.1\r\nhost: seckill\r\nconnection: close\r\n{headers}\r\n\r\n"
            );
            send(port.addr, &head).await
        };
        let again = with(&format!("if-none-match: \"x\", W/{known}")).await;
        assert_eq!((again.code, again.body.as_str()), (304, ""), "{path}");
        assert_eq!(tag(&again.head), known);
        let refused = with("accept-encoding: br, gzip;q=0").await;
        assert_eq!(refused.body, plain.body, "{path}");
        // The tag of the one says nothing of the other.
        let zipped = with(&format!("accept-encoding: gzip\r\nif-none-match: {known}")).await;
        assert_eq!(zipped.code, 200, "{path}");
        assert!(zipped.head.contains("content-encoding: gzip"), "{}", zipped.head);
        assert!(zipped.head.contains("vary: accept-encoding"), "{}", zipped.head);
        let tag = tag(&zipped.head);
        let again = with(&format!("accept-encoding: gzip\r\nif-none-match: {tag}")).await;
        assert_eq!((again.code, again.body.as_str()), (304, ""), "{path}");
        sizes += plain.body.len();
    }
    assert!(sizes < 256 * 1_024, "the page has grown: {sizes} bytes");
}

#[tokio::test]
async fn nothing_is_served_where_the_grpc_port_is_shut() {
    let port = Port::open(|settings| settings.http.dashboard = false).await;
    let before = port.everything().await;
    let page = get(port.addr, "/").await;
    assert_eq!(page.code, 404);
    assert!(page.body.contains("turned off by http.dashboard"), "{}", page.body);
    for path in ["/dashboard.js", "/dashboard.css", "/icon.svg"] {
        assert_eq!(get(port.addr, path).await.code, 404, "{path}");
    }
    assert_eq!(port.call(PAUSE, &[], &pause()).await.code, 404);
    assert_eq!(port.everything().await, before);
    assert_eq!(get(port.addr, "/livez").await.code, 200);
}

#[tokio::test]
async fn metrics_may_be_asked_for_by_name() {
    let port = Port::open(|_| {}).await;
    let all = metrics(port.addr).await;
    let path = "/metrics?name[]=seckill_engine_up&name%5B%5D=seckill_reserve_outcomes_total";
    let some = get(port.addr, path).await;
    let expected = all.keys().filter(|series| {
        *series == "seckill_engine_up" || series.starts_with("seckill_reserve_outcomes_total{")
    });
    let lines: Vec<_> = some.body.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines.len(), expected.count());
    assert!(
        some.body.contains("# TYPE seckill_engine_up gauge\nseckill_engine_up 1\n"),
        "{some:?}"
    );
    assert_eq!(get(port.addr, "/metrics?name[]=nothing").await.body, "");
}
