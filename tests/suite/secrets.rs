//! A server that was given secrets, and was spoken to in every wrong way, keeps them.

use std::time::Duration;

use prost::Message as _;
use seckill::{
    api::pb,
    config::{Role, Token, digest},
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};
use tonic::{Code, Request, transport::Channel};

use crate::support::{
    certs::{Authority, Wanted, tls_channel},
    databases::{self, Fresh},
    process::Serve,
    raw::{Answer, CREATE, RESERVE, framed, request},
    redis_server::RedisServer,
    world::Ground,
};

const OPS: &str = "skt-of-ops-5f1c09";
const ORDER: &str = "skt-of-order-77ab21";
const UNKNOWN: &str = "skt-that-nobody-knows-90d3";
const JUNK: &str = "junk-in-the-metadata-4c4c";
const REDIS: &str = "pw-of-redis-18e2";
const POSTGRES: &str = "pw-of-postgres-c77d";
const IN_A_BODY: &str = "secret-in-a-body-6b6b";

fn entry(name: &str, role: Role, token: &str) -> String {
    Token { name: name.into(), role, digest: digest(token.as_bytes()) }.entry().unwrap()
}

/// One call with these headers; the code that it was answered with.
async fn call(
    raw: &h2::client::SendRequest<tonic::codegen::Bytes>,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Code {
    let mut raw = raw.clone().ready().await.unwrap();
    let (response, mut send) = raw.send_request(request(path, headers), false).unwrap();
    // It may be answered, and closed, already.
    send.send_data(body.to_vec().into(), true).ok();
    Answer::read(response).await.status.code()
}

/// Runs a server with this log filter and says what it wrote, with the secrets that it had.
async fn what_is_logged(fresh: &Fresh, rust_log: &str, tls: bool) -> (String, Vec<String>) {
    let redis = RedisServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("servers");
    let issued = authority.for_server();
    let (cert, key) = issued.write(folder.path());
    let client_ca = folder.path().join("clients.pem");
    let clients = Authority::new("clients");
    std::fs::write(&client_ca, &clients.pem).unwrap();
    let mut database = url::Url::parse(&fresh.settings().url).unwrap();
    database.set_password(Some(POSTGRES)).unwrap();
    let tokens = [entry("anna", Role::Ops, OPS), entry("shop", Role::Order, ORDER)];
    let mut serve = Serve::over(&Ground::embedded(fresh).settings())
        .with_variable("RUST_LOG", rust_log)
        .with("DATABASE__URL", database)
        // A Redis without a password takes any of its default user.
        .with("ENGINE__URL", format!("redis://default:{REDIS}@127.0.0.1:{}", redis.port()))
        .with("AUTH__TOKENS", tokens.join(","));
    if tls {
        serve = serve
            .with("TLS__CERT_FILE", cert.display())
            .with("TLS__KEY_FILE", key.display())
            .with("TLS__CLIENT_CA_FILE", client_ca.display())
            .with("AUTH__SUBJECTS", "checkout.shop=order");
    }
    let mut server = serve.start().await;
    let spec = |title: &str| {
        let spec = pb::ActivitySpec { title: title.to_owned(), ..Default::default() };
        pb::CreateActivityRequest { spec: Some(spec) }
    };
    if tls {
        let port = server.addr.port();
        let own = clients.issue(&Wanted { dns: &["stranger.shop"], ..Wanted::default() });
        let foreign = authority.issue(&Wanted { dns: &["checkout.shop"], ..Wanted::default() });
        let mut channels: Vec<Channel> = Vec::new();
        for own in [None, Some(&own), Some(&foreign)] {
            channels.extend(tls_channel(port, &authority, own).await.ok());
        }
        for channel in channels {
            for token in [OPS, ORDER, UNKNOWN] {
                let mut admin = pb::seckill_admin_client::SeckillAdminClient::new(channel.clone());
                let mut request = Request::new(spec(IN_A_BODY));
                let value = format!("Bearer {token}").parse().unwrap();
                request.metadata_mut().insert("authorization", value);
                admin.create_activity(request).await.unwrap_err();
            }
        }
        let mut plain = TcpStream::connect(server.addr).await.unwrap();
        let text = format!("GET / HTTP/1.1\r\nauthorization: Bearer {OPS}\r\n\r\n");
        plain.write_all(text.as_bytes()).await.unwrap();
        // What can't be read is told without what is in it.
        std::fs::write(&key, IN_A_BODY).unwrap();
        server.signal("HUP");
        server.logged("the new certificates are not used").await;
    } else {
        let raw = crate::support::raw::connect(server.addr).await;
        let reserve = framed(
            &pb::ReserveRequest { user_id: IN_A_BODY.repeat(9), ..Default::default() }
                .encode_to_vec(),
        );
        let create = framed(&spec(IN_A_BODY).encode_to_vec());
        let mut codes = Vec::new();
        for token in [OPS, ORDER, UNKNOWN] {
            let value = format!("Bearer {token}");
            let twice = [("authorization", value.as_str()), ("authorization", value.as_str())];
            let basic = format!("Basic {token}");
            for headers in [
                &twice[..1],
                &twice[..],
                &[("authorization", basic.as_str())],
                &[twice[0], ("x-junk-bin", JUNK), ("grpc-timeout", JUNK), ("cookie", JUNK)],
                &[twice[0], ("grpc-encoding", JUNK)],
                &[twice[0], ("grpc-timeout", "1n")],
            ] {
                codes.push(call(&raw, RESERVE, headers, &reserve).await);
                codes.push(call(&raw, CREATE, headers, &create).await);
                codes.push(call(&raw, RESERVE, headers, IN_A_BODY.as_bytes()).await);
                codes.push(call(&raw, "/seckill.v1.Seckill/None", headers, &reserve).await);
            }
        }
        for code in [
            Code::Unauthenticated,
            Code::PermissionDenied,
            Code::InvalidArgument,
            Code::Unimplemented,
            Code::DeadlineExceeded,
        ] {
            assert!(codes.contains(&code), "{code:?} did not come up: {codes:?}");
        }
        assert!(!codes.contains(&Code::Internal), "{codes:?}");
    }
    server.stop().await;
    let log = server.log();
    let mut secrets: Vec<String> =
        [OPS, ORDER, UNKNOWN, JUNK, REDIS, POSTGRES, IN_A_BODY].map(str::to_owned).to_vec();
    secrets.extend(tokens.iter().map(|entry| entry.rsplit(':').next().unwrap().to_owned()));
    secrets.extend(issued.key.lines().filter(|line| !line.starts_with('-')).map(str::to_owned));
    (log, secrets)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_in_the_log_at_info_or_at_debug() {
    for tls in [false, true] {
        for (rust_log, must_say) in
            [("info", "serving"), ("debug", "serving"), ("debug,h2=debug,hyper=debug", "h2::")]
        {
            let fresh = Fresh::postgres().await;
            databases::run(fresh, async |fresh: &Fresh| {
                let run = what_is_logged(fresh, rust_log, tls);
                let (log, secrets) =
                    tokio::time::timeout(Duration::from_secs(60), run).await.unwrap();
                assert!(log.contains(must_say), "the log is not what this test looks at: {log}");
                for secret in secrets {
                    let line = log.lines().find(|line| line.contains(&secret));
                    assert_eq!(line, None, "{secret:?} is in the log, at {rust_log}");
                }
            })
            .await;
        }
    }
}
