//! Traces as a collector receives them, and what else shows a trace.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value,
    trace::v1::Span,
};
use seckill::api::pb;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Code, Request, Response, Status,
    metadata::MetadataMap,
    transport::{Certificate, Identity, ServerTlsConfig},
};

use crate::support::{
    calls::Shop,
    certs::{Authority, Issued, Wanted},
    databases::{self, Fresh},
    eventually,
    process::{Process, Serve},
    world::{Ground, Sale},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A collector, with all that was sent to it.
#[derive(Debug, Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (collector, addr) = (Self::default(), listener.local_addr().unwrap());
        let service = TraceServiceServer::new(collector.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, addr)
    }

    /// With this certificate, for those alone who have one of that authority.
    async fn start_with_tls(own: &Issued, callers: &Authority) -> (Self, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (collector, port) = (Self::default(), listener.local_addr().unwrap().port());
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(&own.cert, &own.key))
            .client_ca_root(Certificate::from_pem(&callers.pem));
        let mut serving = tonic::transport::Server::builder().tls_config(tls).unwrap();
        let serving = serving.add_service(TraceServiceServer::new(collector.clone()));
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, port)
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        let resources = requests.iter().flat_map(|request| &request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    fn service(&self) -> Option<String> {
        let requests = self.0.lock().unwrap();
        let resource = requests.first()?.resource_spans.first()?.resource.clone()?;
        text(&resource.attributes, "service.name")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_go_to_a_collector_with_a_certificate_of_a_private_ca() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.close().await;
        let (authority, callers) = (Authority::new("collectors"), Authority::new("senders"));
        let (folder, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ca = folder.path().join("ca.pem");
        std::fs::write(&ca, &authority.pem).unwrap();
        let (cert, key_file) = callers.issue(&Wanted::default()).write(own.path());
        let (collector, port) = Collector::start_with_tls(&authority.for_server(), &callers).await;
        let serve = Serve::over(&ground.settings())
            .with("TRACES__ENDPOINT", format!("https://localhost:{port}"))
            .with("TRACES__SAMPLED_PER_THOUSAND", 1_000)
            .with_variable("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", cert.display())
            .with_variable("OTEL_EXPORTER_OTLP_CLIENT_KEY", key_file.display())
            .with_variable("OTEL_BSP_SCHEDULE_DELAY", "100");

        // Nobody here knows its CA: it hears nothing.
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);
        shop.insist("u1", "r").await;
        process.stop().await;
        assert!(collector.spans().is_empty());
        assert!(process.log().contains("BatchSpanProcessor.ExportError"), "{}", process.log());

        let serve = serve.with_variable("OTEL_EXPORTER_OTLP_CERTIFICATE", ca.display());
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);
        shop.insist("u2", "r").await;
        eventually("the span arrives", async || {
            let spans = collector.spans();
            spans.iter().any(|span| span.name == "seckill.v1.Seckill/Reserve").then_some(())
        })
        .await;
        process.stop().await;

        // A file that is no use is told at once, by its variable.
        std::fs::write(&ca, "no certificate").unwrap();
        let mut process = serve.spawn();
        let status = process.ended(Duration::from_secs(10)).await;
        assert_eq!(status.code(), Some(64));
        let log = process.log();
        let words = ["OTEL_EXPORTER_OTLP_CERTIFICATE", ca.to_str().unwrap(), "holds no"];
        assert!(words.iter().all(|word| log.contains(word)), "{log}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_fails_is_one_line_with_its_trace_where_somebody_wants_it() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.close().await;
        let serve = Serve::over(&ground.settings());
        for (wanted, filter) in [(true, "info,seckill::calls=debug"), (false, "info")] {
            let mut process = serve.clone().with_variable("RUST_LOG", filter).start().await;
            let shop = Shop::new(&key, process.channel().await);
            shop.insist("u1", "r").await;
            let mut client = shop.client.clone();
            let nothing = with_parent(reserve(&shop, "u1", "nothing"), "00");
            assert_eq!(client.reserve(nothing).await.unwrap_err().code(), Code::NotFound);
            let watch = pb::WatchStockRequest {
                activity_id: shop.key.activity_id.to_string(),
                sku_ids: vec!["nothing".to_owned()],
                ..Default::default()
            };
            let refused = match client.watch_stock(watch).await {
                Ok(stream) => stream.into_inner().message().await.unwrap_err(),
                Err(status) => status,
            };
            assert_eq!(refused.code(), Code::NotFound);
            process.stop().await;
            let log = process.log();
            let lines: Vec<&str> =
                log.lines().filter(|line| line.contains("a call failed")).collect();
            if !wanted {
                assert!(lines.is_empty(), "{log}");
                continue;
            }
            assert_eq!(lines.len(), 2, "{log}");
            let words = ["Reserve", "NotFound", "UNKNOWN_OFFER", TRACE, "took_us"];
            assert!(words.iter().all(|word| lines[0].contains(word)), "{log}");
            assert!(lines[1].contains("WatchStock") && !lines[1].contains(TRACE), "{log}");
        }
    })
    .await;
}

fn text(
    attributes: &[opentelemetry_proto::tonic::common::v1::KeyValue],
    key: &str,
) -> Option<String> {
    let value = attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value?;
    match value {
        any_value::Value::StringValue(text) => Some(text),
        any_value::Value::IntValue(number) => Some(number.to_string()),
        _ => None,
    }
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn reserve(shop: &Shop, buyer: &str, sku_id: &str) -> pb::ReserveRequest {
    pb::ReserveRequest {
        activity_id: shop.key.activity_id.to_string(),
        sku_id: sku_id.to_owned(),
        user_id: buyer.to_owned(),
        quantity: None,
        request_id: "r".to_owned(),
    }
}

fn with_parent<T>(message: T, flags: &str) -> Request<T> {
    let mut request = Request::new(message);
    let parent = format!("00-{TRACE}-{PARENT}-{flags}");
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    request
}

fn traceresponse(metadata: &MetadataMap) -> Option<String> {
    Some(metadata.get("traceresponse")?.to_str().unwrap().to_owned())
}

/// A server that sends so many of a thousand traces to a collector.
async fn traced(per_thousand: u32, run: impl AsyncFnOnce(&mut Process, Shop, Collector)) {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.plan_sale(&Sale { activity: "cold", ..Sale::default() }).await;
        world.close().await;
        let (collector, addr) = Collector::start().await;
        let serve = Serve::over(&ground.settings())
            .with("TRACES__ENDPOINT", format!("http://{addr}"))
            .with("TRACES__SAMPLED_PER_THOUSAND", per_thousand)
            .with_variable("OTEL_BSP_SCHEDULE_DELAY", "100");
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);
        run(&mut process, shop, collector).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reserve_is_a_span_with_its_steps_below_the_callers() {
    traced(1_000, async |process, shop, collector| {
        let mut client = shop.client.clone();
        let request = with_parent(reserve(&shop, "u1", shop.key.sku_id.as_str()), "01");
        let answer = client.reserve(request).await.unwrap();
        let told = traceresponse(answer.metadata()).expect("the caller is told the span");
        let (spans, call) = eventually("the spans arrive", async || {
            let spans = collector.spans();
            let call = spans.iter().find(|span| hex(&span.trace_id) == TRACE);
            let call = call.filter(|_| spans.iter().any(|span| span.name == "poller batch"));
            let root = spans.iter().find(|span| hex(&span.parent_span_id) == PARENT).cloned();
            call.and(root).map(|root| (spans.clone(), root))
        })
        .await;
        assert_eq!(call.name, "seckill.v1.Seckill/Reserve");
        assert_eq!(hex(&call.trace_id), TRACE);
        assert_eq!(told, format!("00-{TRACE}-{}-01", hex(&call.span_id)));
        assert_eq!(text(&call.attributes, "rpc.grpc.status_code").as_deref(), Some("0"));
        let steps: BTreeMap<&str, &Span> = spans
            .iter()
            .filter(|span| span.parent_span_id == call.span_id)
            .map(|span| (span.name.as_str(), span))
            .collect();
        assert_eq!(steps.keys().copied().collect::<Vec<_>>(), ["admission", "commit", "script"]);
        for step in steps.values() {
            assert_eq!(hex(&step.trace_id), TRACE);
            assert!(call.start_time_unix_nano <= step.start_time_unix_nano);
            assert!(step.end_time_unix_nano <= call.end_time_unix_nano);
        }
        assert!(steps["script"].end_time_unix_nano <= steps["commit"].start_time_unix_nano);
        let batch = spans.iter().find(|span| span.name == "poller batch").unwrap();
        assert_eq!(text(&batch.attributes, "ordered").as_deref(), Some("1"));
        assert!(batch.parent_span_id.is_empty(), "it is nobody's in particular");
        assert_eq!(collector.service().as_deref(), Some("seckill"));
        let all = format!("{spans:?}");
        assert!(!all.contains("u1\""), "no buyer is in a span");

        // A line of the log that belongs to a call shows its trace.
        let cold =
            pb::ReserveRequest { activity_id: "cold".into(), ..reserve(&shop, "u1", "sku-1") };
        let cold = client.reserve(with_parent(cold, "01")).await.unwrap().into_inner();
        assert_eq!(cold.outcome(), pb::ReserveOutcome::NotWarmed);
        let line = "buyers ask for an offer that is not warmed up";
        process.logged(line).await;
        let log = process.log();
        let line = log.lines().find(|found| found.contains(line)).unwrap();
        assert!(line.contains(&format!("\"trace_id\":\"{TRACE}\"")), "{line}");

        // A refusal has its code.
        let unknown = client.reserve(with_parent(reserve(&shop, "u2", "none"), "01")).await;
        let unknown = unknown.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound);
        assert!(traceresponse(unknown.metadata()).is_some_and(|told| told.contains(TRACE)));
        // What is left is sent at the stop.
        process.stop().await;
        let refused = collector
            .spans()
            .into_iter()
            .find(|span| text(&span.attributes, "rpc.grpc.status_code").as_deref() == Some("5"));
        assert_eq!(hex(&refused.expect("it was sent").parent_span_id), PARENT);
    })
    .await;
}

/// Sends these on one stream, and waits for all answers.
async fn stream(shop: &Shop, parent: bool, requests: Vec<pb::ReserveRequest>) {
    let sent = requests.len();
    let messages = requests.into_iter().map(|request| {
        let request = pb::ReserveRequest { request_id: request.user_id.clone(), ..request };
        pb::ReserveStreamRequest { request: Some(request) }
    });
    let messages = tokio_stream::iter(messages.collect::<Vec<_>>());
    let messages = if parent { with_parent(messages, "01") } else { Request::new(messages) };
    let mut answers = shop.client.clone().reserve_stream(messages).await.unwrap().into_inner();
    let mut count = 0;
    while answers.message().await.unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, sent);
}

const REQUEST: &str = "seckill.v1.Seckill/ReserveStream request";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_of_a_stream_is_a_span_below_that_of_the_streams_metadata() {
    // The settings sample nothing, so the caller's word alone counts.
    traced(0, async |process, shop, collector| {
        let sku_id = shop.key.sku_id.as_str();
        stream(&shop, false, vec![reserve(&shop, "u0", sku_id)]).await;
        let requests = [("u1", sku_id), ("u2", sku_id), ("u3", "none")];
        let requests = requests.map(|(buyer, sku_id)| reserve(&shop, buyer, sku_id));
        stream(&shop, true, requests.into()).await;
        process.stop().await;
        let spans = collector.spans();
        assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE), "{spans:#?}");
        let below = |parent: &str| -> Vec<&Span> {
            spans.iter().filter(|span| hex(&span.parent_span_id) == parent).collect()
        };
        let mut found = BTreeMap::new();
        for request in below(PARENT) {
            let code = text(&request.attributes, "rpc.grpc.status_code").unwrap();
            let mut steps: Vec<_> =
                below(&hex(&request.span_id)).iter().map(|step| step.name.clone()).collect();
            steps.sort();
            *found.entry((request.name.as_str(), code, steps.join(" "))).or_insert(0) += 1;
        }
        let won = (REQUEST, "0".to_owned(), "admission commit script".to_owned());
        let refused = (REQUEST, "5".to_owned(), "admission".to_owned());
        let whole = ("seckill.v1.Seckill/ReserveStream", "0".to_owned(), String::new());
        assert_eq!(found, BTreeMap::from([(won, 2), (refused, 1), (whole, 1)]));
        assert!(!format!("{spans:?}").contains("u1\""), "no buyer is in a span");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_stream_that_names_no_span_are_traces_of_their_own() {
    traced(1_000, async |process, shop, collector| {
        let sku_id = shop.key.sku_id.as_str();
        let requests = ["u1", "u2", "u3"].map(|buyer| reserve(&shop, buyer, sku_id));
        stream(&shop, false, requests.into()).await;
        process.stop().await;
        let spans = collector.spans();
        let requests: Vec<_> = spans.iter().filter(|span| span.name == REQUEST).collect();
        assert_eq!(requests.len(), 3, "{spans:#?}");
        assert!(requests.iter().all(|span| span.parent_span_id.is_empty()));
        let traces: BTreeSet<_> = requests.iter().map(|span| hex(&span.trace_id)).collect();
        assert_eq!(traces.len(), 3);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_caller_says_whether_he_is_traced_and_otherwise_the_settings_do() {
    traced(0, async |process, shop, collector| {
        let mut client = shop.client.clone();
        let sku_id = shop.key.sku_id.as_str();
        let silent = client.reserve(reserve(&shop, "u1", sku_id)).await.unwrap();
        let quiet = client.reserve(with_parent(reserve(&shop, "u2", sku_id), "00")).await.unwrap();
        assert_eq!(traceresponse(silent.metadata()), None);
        assert_eq!(traceresponse(quiet.metadata()), None);
        let loud = client.reserve(with_parent(reserve(&shop, "u3", sku_id), "01")).await.unwrap();
        assert!(traceresponse(loud.metadata()).is_some());
        process.stop().await;
        let spans = collector.spans();
        assert_eq!(spans.len(), 4, "one call and its steps: {spans:#?}");
        assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_holds_up_nobody() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let ground = Ground::embedded(fresh);
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.close().await;
        // Takes connections and never says a word.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let serve = Serve::over(&ground.settings())
            .with("TRACES__ENDPOINT", format!("http://{}", silent.local_addr().unwrap()))
            .with("TRACES__SAMPLED_PER_THOUSAND", 1_000);
        let mut process = serve.start().await;
        let shop = Shop::new(&key, process.channel().await);
        for buyer in ["u1", "u2", "u3"] {
            assert_eq!(shop.insist(buyer, "r").await.outcome(), pb::ReserveOutcome::Reserved);
        }
        process.stop().await;
        process.logged("the last spans were not sent").await;
    })
    .await;
}
