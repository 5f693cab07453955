//! Callers who are asked who they are: what each may do, and that a refusal changes nothing.

use prost::Message as _;
use sea_orm::{EntityTrait as _, PaginatorTrait as _, QueryOrder as _};
use seckill::{
    api::{access::TOKEN_MAX_BYTES, pb},
    books,
    config::{Role, Settings, Token, Tokens, digest},
    entity::{audit, outbox},
};
use tonic::{Code, Request, transport::Channel};

use crate::support::{
    raw::{Edge, RESERVE, framed},
    world::{Sale, World},
};

const VIEWER: &str = "viewer-token-9d1c";
const ORDER: &str = "order-token-71aa";
const OPS: &str = "ops-token-e3f0";

const SETTLE: &str = "/seckill.v1.SeckillAdmin/SettleActivity";
const END: &str = "/seckill.v1.SeckillAdmin/EndActivity";
const GET_ACTIVITY: &str = "/seckill.v1.SeckillAdmin/GetActivity";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// A token per role, named like it.
fn with_tokens(settings: &mut Settings) {
    let roles = [(VIEWER, Role::Viewer), (ORDER, Role::Order), (OPS, Role::Ops)];
    let entries = roles.map(|(token, role)| {
        let digest = digest(token.as_bytes());
        Token { name: role.as_str().into(), role, digest }.entry().unwrap()
    });
    settings.auth.tokens = Tokens::new(&entries.join(","));
}

/// A server that asks callers, with a sale on it.
async fn a_sale() -> (Edge, World) {
    let edge = Edge::start_with(with_tokens).await;
    let world = World { parts: edge.server.parts.clone(), settings: Settings::default() };
    let sale = Sale { activity: "a-1", ..Sale::default() };
    world.open_sale(&sale).await;
    (edge, world)
}

fn reserve() -> Vec<u8> {
    framed(
        &pb::ReserveRequest {
            activity_id: "a-1".into(),
            sku_id: crate::support::world::SKU.into(),
            user_id: "u-1".into(),
            quantity: None,
            request_id: "r-1".into(),
        }
        .encode_to_vec(),
    )
}

fn end() -> Vec<u8> {
    let request = pb::EndActivityRequest { activity_id: "a-1".into(), reason: "test".into() };
    framed(&request.encode_to_vec())
}

/// All that a call could have changed, in the engine and in SQL.
async fn everything(world: &World) -> String {
    let key = world.key("a-1");
    let levels = world.offer(&key).await.levels().await.unwrap();
    let database = &world.parts.database;
    let books = books::read(database, &world.parts.catalog, &key.activity_id).await.unwrap();
    let audited = audit::Entity::find().count(database.reader()).await.unwrap();
    let rows = outbox::Entity::find().count(database.reader()).await.unwrap();
    let state = world.parts.activities.get(&key.activity_id).await.unwrap().state;
    format!("{levels:?} {books:?} {audited} {rows} {state:?}")
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

#[tokio::test]
async fn a_caller_without_a_good_token_changes_nothing() {
    let (edge, world) = a_sale().await;
    let before = everything(&world).await;
    let too_long = bearer(&"x".repeat(TOKEN_MAX_BYTES + 1));
    let nearly = bearer(&ORDER[1..]);
    let basic = format!("Basic {OPS}");
    let refused: [(&[&str], &str); 8] = [
        (&[], "MISSING_TOKEN"),
        (&["Bearer nonsense"], "BAD_TOKEN"),
        (&[""], "BAD_TOKEN"),
        (&[&nearly], "BAD_TOKEN"),
        (&[&basic], "BAD_TOKEN"),
        (&[&too_long], "BAD_TOKEN"),
        (&[&bearer(OPS), &bearer(OPS)], "BAD_TOKEN"),
        (&[&bearer(OPS), "Bearer nonsense"], "BAD_TOKEN"),
    ];
    for (values, reason) in refused {
        let headers: Vec<_> = values.iter().map(|value| ("authorization", *value)).collect();
        for (path, body) in [(RESERVE, reserve()), (END, end())] {
            let answer = edge.raw(path, &headers, &body).await;
            answer.expect(Code::Unauthenticated, reason);
            assert!(!format!("{answer:?}").contains(OPS), "{answer:?}");
        }
        assert_eq!(everything(&world).await, before, "{values:?}");
    }
}

#[tokio::test]
async fn a_caller_of_a_lower_role_changes_nothing() {
    let (edge, world) = a_sale().await;
    let before = everything(&world).await;
    for (token, path, body, needed) in [
        (VIEWER, RESERVE, reserve(), "order"),
        (VIEWER, END, end(), "ops"),
        (ORDER, END, end(), "ops"),
        (ORDER, SETTLE, end(), "ops"),
    ] {
        let answer = edge.raw(path, &[("authorization", &bearer(token))], &body).await;
        answer.expect(Code::PermissionDenied, "WRONG_ROLE");
        assert!(
            answer.status.message().contains(&format!("needs the role {needed}")),
            "{answer:?}"
        );
        assert_eq!(everything(&world).await, before, "{path} with {token}");
    }
}

#[tokio::test]
async fn a_refused_caller_is_answered_before_his_message_is_there() {
    let (edge, _world) = a_sale().await;
    // Neither the message, which never comes, nor what it declares is waited for.
    let (response, mut send) = edge.open(RESERVE, &[]).await;
    // It may be answered, and closed, already.
    send.send_data((&b"\0\xff\xff\xff\xff"[..]).into(), false).ok();
    crate::support::raw::Answer::read(response)
        .await
        .expect(Code::Unauthenticated, "MISSING_TOKEN");
    // Nor is it decoded: this would be MALFORMED_MESSAGE.
    let answer = edge.raw(RESERVE, &[], b"garbage").await;
    answer.expect(Code::Unauthenticated, "MISSING_TOKEN");
    let answer = edge.raw(RESERVE, &[("authorization", &bearer(ORDER))], b"garbage").await;
    answer.expect(Code::InvalidArgument, "MALFORMED_MESSAGE");
}

#[tokio::test]
async fn each_role_does_its_work_and_the_audit_has_its_name() {
    let (edge, world) = a_sale().await;
    let call = async |path, token: &str, body: Vec<u8>| {
        edge.raw(path, &[("authorization", &bearer(token))], &body).await.status.code()
    };
    let get = framed(&pb::GetActivityRequest { activity_id: "a-1".into() }.encode_to_vec());
    for token in [VIEWER, ORDER, OPS] {
        assert_eq!(call(GET_ACTIVITY, token, get.clone()).await, Code::Ok);
    }
    for token in [ORDER, OPS] {
        assert_eq!(call(RESERVE, token, reserve()).await, Code::Ok);
    }
    assert_eq!(call(END, OPS, end()).await, Code::Ok);
    let last = audit::Entity::find().order_by_desc(audit::Column::Id);
    let last = last.one(world.parts.database.reader()).await.unwrap().unwrap();
    assert_eq!((last.actor.as_str(), last.action.as_str()), ("ops", "end_activity"));
}

#[tokio::test]
async fn where_nobody_is_asked_the_audit_has_the_address() {
    let edge = Edge::start().await;
    let mut admin = pb::seckill_admin_client::SeckillAdminClient::new(edge.channel.clone());
    let world = World { parts: edge.server.parts.clone(), settings: Settings::default() };
    world.open_sale(&Sale { activity: "a-1", ..Sale::default() }).await;
    let request = pb::EndActivityRequest { activity_id: "a-1".into(), reason: "test".into() };
    admin.end_activity(request).await.unwrap();
    let last = audit::Entity::find().order_by_desc(audit::Column::Id);
    let last = last.one(world.parts.database.reader()).await.unwrap().unwrap();
    assert!(last.actor.starts_with("grpc 127.0.0.1:"), "{}", last.actor);
}

#[tokio::test]
async fn health_is_open_and_reflection_needs_a_viewer() {
    let edge = Edge::start_with(with_tokens).await;
    assert_eq!(edge.raw(HEALTH, &[], &framed(b"")).await.status.code(), Code::Ok);
    let answer = edge.raw(REFLECTION, &[], &framed(b"")).await;
    answer.expect(Code::Unauthenticated, "MISSING_TOKEN");
    let seen = edge.raw(REFLECTION, &[("authorization", &bearer(VIEWER))], &framed(b"")).await;
    assert_ne!(seen.status.code(), Code::Unauthenticated, "{seen:?}");

    let closed = Edge::start_with(|settings| {
        with_tokens(settings);
        settings.auth.open_health = false;
        settings.auth.open_reflection = true;
    });
    let closed = closed.await;
    let answer = closed.raw(HEALTH, &[], &framed(b"")).await;
    answer.expect(Code::Unauthenticated, "MISSING_TOKEN");
    let seen = closed.raw(REFLECTION, &[], &framed(b"")).await;
    assert_ne!(seen.status.code(), Code::Unauthenticated, "{seen:?}");
}

/// A client in general use sends its token as metadata.
#[tokio::test]
async fn a_generated_client_calls_with_its_token() {
    let (edge, _world) = a_sale().await;
    let mut client = pb::seckill_client::SeckillClient::<Channel>::new(edge.channel.clone());
    let request = pb::ReserveRequest {
        activity_id: "a-1".into(),
        sku_id: crate::support::world::SKU.into(),
        user_id: "u-1".into(),
        ..Default::default()
    };
    let status = client.reserve(request.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    let mut with_token = Request::new(request);
    with_token.metadata_mut().insert("authorization", bearer(ORDER).parse().unwrap());
    let answer = client.reserve(with_token).await.unwrap().into_inner();
    assert_eq!(answer.outcome(), pb::ReserveOutcome::Reserved);
}
