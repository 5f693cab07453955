//! What hostile, late and curious callers hear from the edge, over a real connection.
//!
//! Most calls go through a bare HTTP/2 client.

use std::time::Duration;

use prost::Message as _;
use seckill::api::pb;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tonic::{Code, codegen::Bytes};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::{v1, v1alpha};
use tonic_types::StatusExt as _;

use crate::support::raw::{Answer, CREATE, Edge, RESERVE, WATCH_STOCK, framed};

/// A message of exactly `len` bytes that holds nothing but one long text.
fn reserve_of(len: usize) -> Vec<u8> {
    let text_len = len - 4;
    let request = pb::ReserveRequest { activity_id: "x".repeat(text_len), ..Default::default() };
    let bytes = request.encode_to_vec();
    assert_eq!(bytes.len(), len);
    framed(&bytes)
}

#[tokio::test]
async fn a_body_that_is_no_message_is_the_callers_fault() {
    let edge = Edge::start().await;
    let not_utf8 = framed(b"\x0a\x02\xff\xfe");
    let cut_in_the_message = &framed(&pb::ReserveRequest::default().encode_to_vec())[..3];
    let bodies: [(&str, &[u8]); 8] = [
        ("nothing", b""),
        ("garbage", b"\xde\xad\xbe\xef\xde\xad\xbe\xef\xde\xad\xbe\xef"),
        ("an undecodable message", &framed(b"\xff\xff\xff\xff")),
        ("a text that is not UTF-8", &not_utf8),
        ("half a header", cut_in_the_message),
        ("less than it declares", b"\0\0\0\0\x10abc"),
        ("a compressed message without an encoding", b"\x01\0\0\0\x01a"),
        ("an unknown flag", b"\x07\0\0\0\x01a"),
    ];
    for path in [RESERVE, WATCH_STOCK, CREATE] {
        for (name, body) in bodies {
            let answer = edge.raw(path, &[], body).await;
            assert_eq!(answer.status.code(), Code::InvalidArgument, "{path} with {name}");
            assert_eq!(answer.reason(), "MALFORMED_MESSAGE", "{path} with {name}");
        }
    }
}

#[tokio::test]
async fn messages_have_a_limit_per_service() {
    let edge = Edge::start().await;
    let at_the_limit = edge.raw(RESERVE, &[], &reserve_of(64 * 1_024)).await;
    at_the_limit.expect(Code::InvalidArgument, "INVALID_FIELD");
    let beyond = edge.raw(RESERVE, &[], &reserve_of(64 * 1_024 + 1)).await;
    beyond.expect(Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    assert!(!beyond.headers.contains_key("retry-after"), "a repeat does not help");

    let create = |len: usize| {
        let title = "x".repeat(len);
        let spec = Some(pb::ActivitySpec { title, ..Default::default() });
        framed(&pb::CreateActivityRequest { spec }.encode_to_vec())
    };
    let fine = edge.raw(CREATE, &[], &create(4 * 1_024 * 1_024 - 10)).await;
    fine.expect(Code::InvalidArgument, "INVALID_FIELD");
    let beyond = edge.raw(CREATE, &[], &create(4 * 1_024 * 1_024)).await;
    beyond.expect(Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
}

#[tokio::test]
async fn a_header_that_declares_four_gigabytes_is_refused_before_they_come() {
    let edge = Edge::start().await;
    for path in [RESERVE, CREATE] {
        let (response, mut send) = edge.open(path, &[]).await;
        let header = Bytes::from_static(b"\0\xff\xff\xff\xff");
        // It may be answered, and closed, already.
        send.send_data(header, false).ok();
        let answer = Answer::read(response).await;
        answer.expect(Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    }
}

#[tokio::test]
async fn an_expired_deadline_is_deadline_exceeded() {
    let edge = Edge::start().await;
    let body = framed(&pb::ReserveRequest::default().encode_to_vec());
    for text in ["0m", "0n"] {
        let answer = edge.raw(RESERVE, &[("grpc-timeout", text)], &body).await;
        answer.expect(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
    }
    // What breaks the rule of the header is no deadline.
    let answer = edge.raw(RESERVE, &[("grpc-timeout", "soon")], &body).await;
    answer.expect(Code::InvalidArgument, "INVALID_FIELD");
}

#[tokio::test]
async fn tonics_own_timer_never_wins() {
    let edge = Edge::start().await;
    // As many at once as one connection may have, four times.
    for _ in 0..4 {
        let mut calls = Vec::new();
        for number in 0..100 {
            // The body never comes, so only a timer can answer.
            let timeout = format!("{}m", 1 + number % 20);
            let (response, send) = edge.open(RESERVE, &[("grpc-timeout", &timeout)]).await;
            calls.push((Answer::read(response), send));
        }
        for (answer, _send) in calls {
            answer.await.expect(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
        }
    }
}

#[tokio::test]
async fn a_stream_ends_at_its_deadline() {
    let edge = Edge::start().await;
    let begun = Instant::now();
    let body = framed(&HealthCheckRequest::default().encode_to_vec());
    let watch = edge.raw("/grpc.health.v1.Health/Watch", &[("grpc-timeout", "200m")], &body);
    let answer = tokio::time::timeout(Duration::from_secs(5), watch).await.unwrap();
    answer.expect(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
    assert!(begun.elapsed() >= Duration::from_millis(200));
}

/// A WatchStockRequest for an activity that is there.
async fn watch_of_an_activity(edge: &Edge) -> Vec<u8> {
    let mut admin = pb::seckill_admin_client::SeckillAdminClient::new(edge.channel.clone());
    let time = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    let offer = pb::OfferSpec {
        sku_id: "s-1".into(),
        title: "A phone".into(),
        currency_code: "CNY".into(),
        total: 10,
        ..Default::default()
    };
    let spec = Some(pb::ActivitySpec {
        activity_id: "a-1".into(),
        title: "双十一".into(),
        start_time: time(4_000_000_000),
        end_time: time(4_000_003_600),
        retention: None,
        offers: vec![offer],
    });
    admin.create_activity(pb::CreateActivityRequest { spec }).await.unwrap();
    let request = pb::WatchStockRequest { activity_id: "a-1".into(), ..Default::default() };
    framed(&request.encode_to_vec())
}

#[tokio::test]
async fn a_watch_ends_at_its_deadline() {
    let edge = Edge::start().await;
    let body = watch_of_an_activity(&edge).await;
    let begun = Instant::now();
    let answer = edge.raw(WATCH_STOCK, &[("grpc-timeout", "300m")], &body).await;
    answer.expect(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert!(answer.bytes > 0, "the snapshot came first");
}

#[tokio::test]
async fn a_watch_ends_with_shutting_down_when_the_server_does() {
    let edge = Edge::start().await;
    let body = watch_of_an_activity(&edge).await;
    let (response, mut send) = edge.open(WATCH_STOCK, &[]).await;
    // It may be answered, and closed, already.
    send.send_data(body.into(), true).ok();
    let response = response.await.unwrap();
    edge.server.parts.shutdown.cancel();
    let answer = Answer::of(response).await;
    answer.expect(Code::Unavailable, "SHUTTING_DOWN");
    assert_eq!(answer.headers["grpc-retry-pushback-ms"], "50");
}

#[tokio::test]
async fn unknown_methods_services_and_encodings_are_unimplemented() {
    let edge = Edge::start().await;
    let body = framed(b"");
    for path in ["/seckill.v1.Seckill/Steal", "/seckill.v2.Seckill/Reserve", "/", "/x"] {
        let answer = edge.raw(path, &[], &body).await;
        answer.expect(Code::Unimplemented, "UNIMPLEMENTED");
    }
    let answer = edge.raw(RESERVE, &[("grpc-encoding", "br")], &body).await;
    answer.expect(Code::Unimplemented, "UNIMPLEMENTED");
    assert!(answer.status.message().contains("br"), "{answer:?}");
}

#[tokio::test]
async fn a_message_full_of_violations_is_answered_within_the_header_limit() {
    let edge = Edge::start().await;
    let mut client = pb::seckill_client::SeckillClient::new(edge.channel.clone());
    let request = pb::WatchStockRequest {
        activity_id: "a-1".into(),
        sku_ids: vec!["?".into(); 10_000],
        min_interval: None,
    };
    let status = client.watch_stock(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let listed = status.get_details_bad_request().unwrap().field_violations;
    assert_eq!(listed.len(), 21);
    assert_eq!(listed[0].field, "sku_ids[0]");
    assert_eq!(listed[20].description, "9980 more violations are not listed");
    assert!(status.details().len() < 4_096);
}

#[tokio::test]
async fn after_the_shutdown_signal_calls_are_sent_elsewhere() {
    let edge = Edge::start().await;
    edge.server.parts.shutdown.cancel();
    let request = pb::ReserveRequest {
        activity_id: "a-1".into(),
        sku_id: "s-1".into(),
        user_id: "u-1".into(),
        ..Default::default()
    };
    let answer = edge.raw(RESERVE, &[], &framed(&request.encode_to_vec())).await;
    answer.expect(Code::Unavailable, "SHUTTING_DOWN");
    assert_eq!(answer.headers["grpc-retry-pushback-ms"], "50");
    assert_eq!(answer.headers["retry-after"], "1");
    assert!(answer.status.get_details_retry_info().is_some());
}

#[tokio::test]
async fn health_answers_stay_as_the_protocol_has_them() {
    let edge = Edge::start().await;
    let mut client = HealthClient::new(edge.channel.clone());
    client.check(HealthCheckRequest::default()).await.unwrap();
    let unknown = HealthCheckRequest { service: "nobody".into() };
    let status = client.check(unknown).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

/// What both versions must list.
const SERVICES: [&str; 3] =
    ["seckill.v1.Seckill", "seckill.v1.SeckillAdmin", "grpc.health.v1.Health"];

/// Asks one version of reflection; the two have the same messages under two names.
macro_rules! reflected {
    ($version:ident, $channel:expr, $question:ident($argument:expr)) => {{
        use $version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::$question($argument.into())),
        };
        let mut client = ServerReflectionClient::new($channel.clone());
        let requests = tokio_stream::once(request);
        let mut answers = client.server_reflection_info(requests).await.unwrap().into_inner();
        match answers.next().await.unwrap().unwrap().message_response.unwrap() {
            MessageResponse::ListServicesResponse(list) => {
                list.service.into_iter().map(|service| service.name).collect::<Vec<_>>()
            }
            MessageResponse::FileDescriptorResponse(files) => files
                .file_descriptor_proto
                .iter()
                .map(|file| prost_types::FileDescriptorProto::decode(&file[..]).unwrap())
                .map(|file| file.name().to_owned())
                .collect(),
            MessageResponse::AllExtensionNumbersResponse(_) | MessageResponse::ErrorResponse(_) => {
                panic!("another answer")
            }
        }
    }};
}

#[tokio::test]
async fn both_versions_of_reflection_list_every_service() {
    let edge = Edge::start().await;
    let listed = reflected!(v1, edge.channel, ListServices(""));
    let listed_alpha = reflected!(v1alpha, edge.channel, ListServices(""));
    for service in SERVICES {
        assert!(listed.iter().any(|name| name == service), "{listed:?}");
        assert!(listed_alpha.iter().any(|name| name == service), "{listed_alpha:?}");
    }
}

#[tokio::test]
async fn both_versions_of_reflection_know_imported_types() {
    let edge = Edge::start().await;
    let symbols = [
        ("seckill.v1.Seckill", "seckill/v1/seckill.proto"),
        ("seckill.v1.ErrorReason", "seckill/v1/error_reason.proto"),
        ("seckill.v1.Reservation.expire_time", "seckill/v1/types.proto"),
        ("google.protobuf.Timestamp", "google/protobuf/timestamp.proto"),
        ("google.protobuf.Timestamp.nanos", "google/protobuf/timestamp.proto"),
        ("google.protobuf.Duration.seconds", "google/protobuf/duration.proto"),
    ];
    for (symbol, file) in symbols {
        let channel = &edge.channel;
        assert_eq!(reflected!(v1, channel, FileContainingSymbol(symbol)), [file]);
        assert_eq!(reflected!(v1alpha, channel, FileContainingSymbol(symbol)), [file]);
    }
}
