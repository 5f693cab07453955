use std::{convert::Infallible, sync::Mutex};

use prost::Message as _;
use tonic::Status;
use tonic_types::StatusExt as _;
use tower::service_fn;

use super::*;
use crate::{
    api::{FILE_DESCRIPTOR_SET, reflection},
    config::Tokens,
};

const RESERVE: &str = "/seckill.v1.Seckill/Reserve";
const SETTLE: &str = "/seckill.v1.SeckillAdmin/SettleActivity";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

fn entry(name: &str, role: Role, token: &str) -> String {
    Token { name: name.into(), role, digest: digest(token.as_bytes()) }.entry().unwrap()
}

/// A server with a token per role.
fn settings() -> Settings {
    let entries = [
        entry("eve", Role::Viewer, "t-viewer"),
        entry("shop", Role::Order, "t-order"),
        entry("anna", Role::Ops, "t-ops"),
    ];
    let mut settings = Settings::default();
    settings.auth.tokens = Tokens::new(&entries.join(","));
    settings.validate().unwrap();
    settings
}

fn request(path: &str, authorization: &[&[u8]]) -> Request<Body> {
    let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
    for value in authorization {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append(AUTHORIZATION, value);
    }
    request
}

fn with_certificate(path: &str, role: Role) -> Request<Body> {
    let mut request = request(path, &[]);
    let tcp = TcpConnectInfo { local_addr: None, remote_addr: None };
    let subject = Some(Subject { name: "cert".into(), role });
    request.extensions_mut().insert(Peer { tcp, subject });
    request
}

/// What came of a call: who it was from, or why it was refused. What is refused is not passed on.
async fn outcome(settings: &Settings, request: Request<Body>) -> Result<Option<Identity>, Status> {
    let passed = Mutex::new(Vec::new());
    let inner = service_fn(|request: Request<Body>| {
        assert!(!request.headers().contains_key(AUTHORIZATION), "the token is passed on");
        passed.lock().unwrap().push(request.extensions().get::<Identity>().cloned());
        future::ready(Ok::<_, Infallible>(Response::new(Body::empty())))
    });
    let guard = Guard(Arc::new(Access::new(settings)));
    let response = guard.layer(inner).call(request).await.unwrap();
    let mut passed = passed.into_inner().unwrap();
    match Status::from_header_map(response.headers()) {
        Some(status) => {
            assert_eq!(passed, [], "a refused call was passed on");
            Err(status)
        }
        None => Ok(passed.pop().expect("a call that is not refused is passed on")),
    }
}

async fn name(settings: &Settings, request: Request<Body>) -> String {
    let identity = outcome(settings, request).await.unwrap();
    identity.map_or_else(|| "nobody".to_owned(), |identity| identity.name.to_string())
}

async fn refusal(settings: &Settings, request: Request<Body>) -> (Code, String) {
    let status = outcome(settings, request).await.expect_err("it was let in");
    let info = status.get_details_error_info().expect("an ErrorInfo");
    assert_eq!(info.domain, "inventory.seckill");
    (status.code(), info.reason)
}

fn bad() -> (Code, String) {
    (Code::Unauthenticated, "BAD_TOKEN".to_owned())
}

fn missing() -> (Code, String) {
    (Code::Unauthenticated, "MISSING_TOKEN".to_owned())
}

#[test]
fn every_method_of_the_contract_has_a_rule_in_its_order() {
    let set = prost_types::FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    // `seckill.proto` before `admin.proto`, as people read them.
    let mut files: Vec<_> = set.file.iter().filter(|file| file.package() == "seckill.v1").collect();
    files.sort_by_key(|file| file.name() != "seckill/v1/seckill.proto");
    let mut expected = Vec::new();
    for file in files {
        for service in &file.service {
            for method in &service.method {
                expected.push(format!("seckill.v1.{}/{}", service.name(), method.name()));
            }
        }
    }
    assert!(expected.len() > 20, "{expected:?}");
    let ours: Vec<_> =
        TABLE.iter().map(|(rpc, _)| *rpc).filter(|rpc| rpc.starts_with("seckill.")).collect();
    assert_eq!(ours, expected);
    let _services_beside_them = reflection();
}

/// `Role: order.` stands in the comment of each method that `SeckillAdmin` does not keep for ops.
#[test]
fn the_proto_files_name_the_same_roles() {
    for (file, text) in [
        ("Seckill", include_str!("../../../proto/seckill/v1/seckill.proto")),
        ("SeckillAdmin", include_str!("../../../proto/seckill/v1/admin.proto")),
    ] {
        let mut comment = String::new();
        let mut seen = 0;
        for line in text.lines().map(str::trim) {
            if let Some(words) = line.strip_prefix("//") {
                comment.push_str(words);
            } else if let Some((name, _)) =
                line.strip_prefix("rpc ").and_then(|rest| rest.split_once('('))
            {
                let role = comment.split("Role: ").nth(1).map(|role| role.trim_end_matches('.'));
                let role = if file == "SeckillAdmin" { role.or(Some("ops")) } else { role };
                let rule = Need::Role(Role::named(role.expect(name)).expect(name));
                let rpc = format!("seckill.v1.{file}/{name}");
                let found = TABLE.iter().find(|(path, _)| *path == rpc).map(|(_, need)| *need);
                assert_eq!(found, Some(rule), "{rpc}");
                comment.clear();
                seen += 1;
            } else {
                comment.clear();
            }
        }
        assert!(seen > 5, "{file}");
    }
}

#[tokio::test]
async fn a_role_may_do_what_those_before_it_may() {
    let settings = settings();
    let tokens = [("t-viewer", Role::Viewer), ("t-order", Role::Order), ("t-ops", Role::Ops)];
    for (rpc, need) in TABLE {
        let Need::Role(needed) = need else { continue };
        for (token, role) in tokens {
            let call = request(&format!("/{rpc}"), &[format!("Bearer {token}").as_bytes()]);
            match outcome(&settings, call).await {
                Ok(identity) => {
                    assert!(role >= *needed, "{role} may call {rpc}");
                    assert_eq!(identity.expect("it was asked").role, role);
                }
                Err(status) => {
                    assert!(role < *needed, "{role} may not call {rpc}");
                    assert_eq!(status.code(), Code::PermissionDenied);
                    let info = status.get_details_error_info().unwrap();
                    assert_eq!(info.reason, "WRONG_ROLE");
                    assert_eq!(info.metadata["needed_role"], needed.as_str());
                    assert_eq!(info.metadata["role"], role.as_str());
                    assert!(status.message().contains(needed.as_str()), "{status:?}");
                }
            }
        }
        assert_eq!(refusal(&settings, request(&format!("/{rpc}"), &[])).await, missing());
    }
}

#[tokio::test]
async fn the_name_of_the_token_is_who_calls() {
    let settings = settings();
    for authorization in ["Bearer t-ops", "bearer t-ops", "BEARER t-ops"] {
        assert_eq!(name(&settings, request(SETTLE, &[authorization.as_bytes()])).await, "anna");
    }
    assert_eq!(name(&settings, request(RESERVE, &[b"Bearer t-order"])).await, "shop");
}

#[tokio::test]
async fn what_is_no_known_token_is_bad() {
    let long = format!("Bearer {}", "x".repeat(TOKEN_MAX_BYTES + 1));
    let settings = settings();
    let values: [&[&[u8]]; 19] = [
        &[b"Bearer t-opsx"],
        &[b"Bearer t-op"],
        &[b"Bearer T-OPS"],
        &[b"Bearer "],
        &[b"Bearer"],
        &[b""],
        &[b"t-ops"],
        &[b"Basic t-ops"],
        &[b"Bearert-ops"],
        &[b"Bearer  t-ops"],
        &[b"Bearer t-ops "],
        &[b"Bearer\tt-ops"],
        &[b"Bearer t-ops,t-ops"],
        &[b"Bearer t-ops\xc3\xa4"],
        &[b"Bearer \xff\xfe"],
        &[long.as_bytes()],
        &[b"Bearer t-ops", b"Bearer t-ops"],
        &[b"Bearer t-ops", b"Bearer t-viewer"],
        &[b"Basic x", b"Bearer t-ops"],
    ];
    for value in values {
        assert_eq!(refusal(&settings, request(RESERVE, value)).await, bad(), "{value:?}");
    }
    // The digest is no token, and neither is what a refusal says.
    let hex = entry("x", Role::Ops, "t-ops").split(':').nth(2).unwrap().to_owned();
    let call = request(RESERVE, &[format!("Bearer {hex}").as_bytes()]);
    let status = outcome(&settings, call).await.unwrap_err();
    assert_eq!(status.message(), "the bearer token is not known");
}

#[tokio::test]
async fn a_token_of_the_greatest_length_is_looked_at() {
    let token = "x".repeat(TOKEN_MAX_BYTES);
    let mut settings = Settings::default();
    settings.auth.tokens = Tokens::new(&entry("long", Role::Order, &token));
    let call = request(RESERVE, &[format!("Bearer {token}").as_bytes()]);
    assert_eq!(name(&settings, call).await, "long");
}

#[tokio::test]
async fn a_certificate_is_who_calls_unless_a_token_is_sent() {
    let mut settings = settings();
    settings.tls.client_ca_file = "ca.pem".into();
    assert_eq!(name(&settings, with_certificate(RESERVE, Role::Order)).await, "cert");
    let call = with_certificate(SETTLE, Role::Order);
    assert_eq!(refusal(&settings, call).await.1, "WRONG_ROLE");
    assert_eq!(refusal(&settings, request(RESERVE, &[])).await, missing());

    let mut both = with_certificate(SETTLE, Role::Order);
    both.headers_mut().insert(AUTHORIZATION, HeaderValue::from_static("Bearer t-ops"));
    assert_eq!(name(&settings, both).await, "anna");
    let mut both = with_certificate(RESERVE, Role::Ops);
    both.headers_mut().insert(AUTHORIZATION, HeaderValue::from_static("Bearer nonsense"));
    assert_eq!(refusal(&settings, both).await, bad());
}

#[tokio::test]
async fn a_server_with_a_client_ca_and_no_tokens_lets_no_token_in() {
    let mut settings = Settings::default();
    settings.tls.client_ca_file = "ca.pem".into();
    assert_eq!(refusal(&settings, request(RESERVE, &[])).await, missing());
    assert_eq!(refusal(&settings, request(RESERVE, &[b"Bearer x"])).await, bad());
    assert_eq!(name(&settings, with_certificate(RESERVE, Role::Order)).await, "cert");
}

#[tokio::test]
async fn without_tokens_nobody_is_asked() {
    let settings = Settings::default();
    for (rpc, _) in TABLE {
        assert_eq!(name(&settings, request(&format!("/{rpc}"), &[])).await, "nobody", "{rpc}");
    }
    assert_eq!(name(&settings, request(SETTLE, &[b"Bearer whatever"])).await, "nobody");
}

#[tokio::test]
async fn health_is_open_and_reflection_is_not_unless_set_otherwise() {
    let mut settings = settings();
    assert_eq!(name(&settings, request(HEALTH, &[])).await, "nobody");
    assert_eq!(name(&settings, request(HEALTH, &[b"Bearer nonsense"])).await, "nobody");
    assert_eq!(refusal(&settings, request(REFLECTION, &[])).await, missing());
    assert_eq!(name(&settings, request(REFLECTION, &[b"Bearer t-viewer"])).await, "eve");

    (settings.auth.open_health, settings.auth.open_reflection) = (false, true);
    assert_eq!(refusal(&settings, request(HEALTH, &[])).await, missing());
    assert_eq!(name(&settings, request(HEALTH, &[b"Bearer t-viewer"])).await, "eve");
    assert_eq!(name(&settings, request(REFLECTION, &[])).await, "nobody");
}

#[tokio::test]
async fn what_is_not_in_the_table_is_not_served() {
    for settings in [settings(), Settings::default()] {
        for path in ["/", "/x", "/seckill.v1.Seckill/Steal", "/seckill.v1.Seckill/Reserve/"] {
            for authorization in [&[][..], &[&b"Bearer t-ops"[..]]] {
                let (code, reason) = refusal(&settings, request(path, authorization)).await;
                assert_eq!((code, reason.as_str()), (Code::Unimplemented, "UNIMPLEMENTED"));
            }
        }
    }
}

#[tokio::test]
async fn entries_that_can_not_be_read_let_nobody_in() {
    let mut settings = Settings::default();
    settings.auth.tokens = Tokens::new("nonsense");
    assert_eq!(refusal(&settings, request(RESERVE, &[b"Bearer nonsense"])).await, bad());
    assert_eq!(refusal(&settings, request(RESERVE, &[])).await, missing());
}
