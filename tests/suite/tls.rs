//! TLS of the gRPC port: who is let in by his certificate, what each kind of stranger sees, and
//! certificates that change while clients are connected.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use sea_orm::{EntityTrait as _, PaginatorTrait as _, QueryOrder as _};
use seckill::{
    api::pb::{self, seckill_admin_client::SeckillAdminClient},
    config::{
        ClientCerts, OptionalAddr, Role, SecretUrl, Settings, Subjects, Token, Tokens, digest,
    },
    entity::audit,
    server::Server,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout},
};
use tonic::{Code, Request, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_types::StatusExt as _;

use crate::support::{
    certs::{Authority, DAY, Issued, Wanted, tls_channel},
    process::{Process, Serve},
    world::{Sale, World, spec_of},
};

const OPS: &str = "ops-token-e3f0";
const LIMIT: Duration = Duration::from_secs(10);

/// A server with TLS, in this process.
struct Secured {
    server: Server,
    servers_ca: Authority,
    clients_ca: Authority,
    _folder: TempDir,
}

impl Secured {
    /// With a client CA, three certificates that it knows, and a token.
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let folder = TempDir::new().unwrap();
        let (servers_ca, clients_ca) = (Authority::new("servers"), Authority::new("clients"));
        let mut settings = Settings::default();
        settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
        settings.http.addr = OptionalAddr(None);
        let database = folder.path().join("seckill.db");
        settings.database.url = SecretUrl::new(format!("sqlite://{}", database.display()));
        let (cert, key) = servers_ca.for_server().write(folder.path());
        let client_ca = folder.path().join("clients.pem");
        std::fs::write(&client_ca, &clients_ca.pem).unwrap();
        settings.tls.cert_file = cert.display().to_string();
        settings.tls.key_file = key.display().to_string();
        settings.tls.client_ca_file = client_ca.display().to_string();
        settings.auth.subjects =
            Subjects::new("checkout.shop=order,spiffe://shop/ops=ops,Eve B=viewer");
        settings.auth.tokens = Tokens::new(&token("anna", Role::Ops, OPS));
        change(&mut settings);
        settings.validate().unwrap();
        let server = Server::start(&settings).await.unwrap();
        Self { server, servers_ca, clients_ca, _folder: folder }
    }

    async fn connect(&self, own: Option<&Issued>) -> Result<Channel, String> {
        let channel = tls_channel(self.server.addr.port(), &self.servers_ca, own).await;
        channel.map_err(|error| format!("{error:?}"))
    }

    fn known(&self) -> Issued {
        self.clients_ca.issue(&Wanted { dns: &["checkout.shop"], ..Wanted::default() })
    }
}

fn token(name: &str, role: Role, token: &str) -> String {
    Token { name: name.into(), role, digest: digest(token.as_bytes()) }.entry().unwrap()
}

/// Ends an activity that is not there, or says why it may not: the reason of the error.
async fn end(channel: Channel) -> String {
    let mut admin = SeckillAdminClient::new(channel);
    let request = pb::EndActivityRequest { activity_id: "a-1".into(), reason: "test".into() };
    let status = admin.end_activity(request).await.expect_err("there is no such activity");
    match status.get_details_error_info() {
        Some(info) => info.reason,
        None => format!("{status:?}"),
    }
}

async fn list(channel: Channel) -> Result<(), String> {
    let mut admin = SeckillAdminClient::new(channel);
    let listed = admin.list_activities(pb::ListActivitiesRequest::default()).await;
    listed.map(drop).map_err(|status| match status.get_details_error_info() {
        Some(info) => info.reason,
        None => format!("{status:?}"),
    })
}

async fn is_healthy(channel: Channel) -> Result<(), String> {
    let mut health = HealthClient::new(channel);
    let answer = health.check(HealthCheckRequest::default()).await;
    answer.map(drop).map_err(|status| format!("{status:?}"))
}

#[tokio::test]
async fn a_certificate_gives_the_role_of_its_name() {
    let secured = Secured::start(|_| {}).await;
    let checkout = secured.known();
    let ops = secured.clients_ca.issue(&Wanted {
        common_name: "Eve B",
        uri: Some("spiffe://shop/ops"),
        ..Wanted::default()
    });
    let eve = secured.clients_ca.issue(&Wanted { common_name: "Eve B", ..Wanted::default() });
    for (own, reason) in
        [(&checkout, "WRONG_ROLE"), (&ops, "UNKNOWN_ACTIVITY"), (&eve, "WRONG_ROLE")]
    {
        let channel = secured.connect(Some(own)).await.unwrap();
        assert_eq!(end(channel.clone()).await, reason);
        assert_eq!(list(channel).await, Ok(()));
    }
    secured.server.stop().await;
}

#[tokio::test]
async fn the_audit_has_the_name_of_the_certificate() {
    let secured = Secured::start(|_| {}).await;
    let parts = secured.server.parts.clone();
    let sale = Sale { activity: "a-1", ..Sale::default() };
    parts.activities.create(spec_of(&sale), "test").await.unwrap();
    let ops = Wanted { uri: Some("spiffe://shop/ops"), ..Wanted::default() };
    let channel = secured.connect(Some(&secured.clients_ca.issue(&ops))).await.unwrap();
    let mut admin = SeckillAdminClient::new(channel);
    let request = pb::ApproveActivityRequest { activity_id: "a-1".into(), reason: "ok".into() };
    admin.approve_activity(request).await.unwrap();
    let last = audit::Entity::find().order_by_desc(audit::Column::Id);
    let last = last.one(parts.database.reader()).await.unwrap().unwrap();
    assert_eq!(last.actor, "spiffe://shop/ops");
}

#[tokio::test]
async fn a_stranger_with_a_good_certificate_is_nobody_and_changes_nothing() {
    let secured = Secured::start(|_| {}).await;
    let world = World { parts: secured.server.parts.clone(), settings: Settings::default() };
    world.open_sale(&Sale { activity: "a-1", ..Sale::default() }).await;
    let database = &secured.server.parts.database;
    let before = audit::Entity::find().count(database.reader()).await.unwrap();
    for wanted in [
        Wanted { dns: &["stranger.shop"], ..Wanted::default() },
        // A common name counts only where there is no better one: anybody may ask for it.
        Wanted { common_name: "Eve B", dns: &["stranger.shop"], ..Wanted::default() },
        Wanted { common_name: "checkout", ..Wanted::default() },
        Wanted { uri: Some("spiffe://shop/ops/x"), ..Wanted::default() },
    ] {
        let own = secured.clients_ca.issue(&wanted);
        let channel = secured.connect(Some(&own)).await.unwrap();
        assert_eq!(end(channel.clone()).await, "MISSING_TOKEN", "{wanted:?}");
        assert_eq!(list(channel).await, Err("MISSING_TOKEN".to_owned()), "{wanted:?}");
    }
    assert_eq!(end(secured.connect(None).await.unwrap()).await, "MISSING_TOKEN");
    assert_eq!(audit::Entity::find().count(database.reader()).await.unwrap(), before);
}

#[tokio::test]
async fn a_bad_certificate_does_not_get_through_the_handshake() {
    let secured = Secured::start(|_| {}).await;
    let now = SystemTime::now();
    let dns: &[&str] = &["checkout.shop"];
    let expired = Wanted { dns, validity: Some((now - 3 * DAY, now - DAY)), ..Wanted::default() };
    let early = Wanted { dns, validity: Some((now + DAY, now + 2 * DAY)), ..Wanted::default() };
    let other = Authority::new("clients").issue(&Wanted { dns, ..Wanted::default() });
    for own in [secured.clients_ca.issue(&expired), secured.clients_ca.issue(&early), other] {
        // In TLS 1.3 the client hears of it with its first call.
        let refused = match secured.connect(Some(&own)).await {
            Ok(channel) => is_healthy(channel).await,
            Err(error) => Err(error),
        };
        let error = refused.expect_err("health is open, but not to this one");
        assert!(!error.contains("ErrorInfo"), "{error}");
        assert!(is_healthy(secured.connect(None).await.unwrap()).await.is_ok());
    }
}

#[tokio::test]
async fn a_token_works_over_tls_without_a_certificate_and_beside_one() {
    let secured = Secured::start(|_| {}).await;
    for own in [None, Some(secured.known())] {
        let channel = secured.connect(own.as_ref()).await.unwrap();
        let mut admin = SeckillAdminClient::new(channel);
        let end = pb::EndActivityRequest { activity_id: "a-1".into(), reason: "test".into() };
        let mut request = Request::new(end.clone());
        request.metadata_mut().insert("authorization", format!("Bearer {OPS}").parse().unwrap());
        let status = admin.end_activity(request).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound, "{status:?}");
        let mut request = Request::new(end);
        request.metadata_mut().insert("authorization", "Bearer nonsense".parse().unwrap());
        let status = admin.end_activity(request).await.unwrap_err();
        assert_eq!(status.get_details_error_info().unwrap().reason, "BAD_TOKEN");
    }
}

#[tokio::test]
async fn where_certificates_are_required_nobody_connects_without_one() {
    let secured = Secured::start(|settings| {
        settings.tls.client_certs = ClientCerts::Required;
        settings.auth.subjects = Subjects::default();
    });
    let secured = secured.await;
    let refused = match secured.connect(None).await {
        Ok(channel) => is_healthy(channel).await,
        Err(error) => Err(error),
    };
    refused.expect_err("no certificate");
    let channel = secured.connect(Some(&secured.known())).await.unwrap();
    is_healthy(channel.clone()).await.unwrap();
    assert_eq!(list(channel).await, Err("MISSING_TOKEN".to_owned()), "it is nobody by its name");
}

#[tokio::test]
async fn a_client_that_trusts_another_authority_does_not_connect() {
    let secured = Secured::start(|_| {}).await;
    let other = Authority::new("servers");
    let error = tls_channel(secured.server.addr.port(), &other, None).await.unwrap_err();
    assert!(format!("{error:?}").contains("InvalidCertificate"), "{error:?}");
}

#[tokio::test]
async fn http2_without_tls_is_told_what_is_wrong() {
    let secured = Secured::start(|_| {}).await;
    let socket = TcpStream::connect(secured.server.addr).await.unwrap();
    let (client, connection) = h2::client::handshake(socket).await.unwrap();
    let ended = timeout(LIMIT, connection).await.expect("it ends").expect_err("no TLS");
    assert!(ended.is_go_away() && ended.is_remote(), "{ended:?}");
    assert_eq!(ended.reason(), Some(h2::Reason::INADEQUATE_SECURITY));
    assert!(ended.to_string().contains("this port speaks TLS"), "{ended}");
    drop(client);
    // Whoever begins in another way hears nothing and is gone at once.
    for begin in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI", b"\0\0\0", b"P"] {
        let mut socket = TcpStream::connect(secured.server.addr).await.unwrap();
        socket.write_all(begin).await.unwrap();
        let mut answer = Vec::new();
        let begun = Instant::now();
        // It may see a reset: what it sent was not read.
        timeout(LIMIT, socket.read_to_end(&mut answer)).await.expect("it ends").ok();
        assert_eq!(answer, b"", "{begin:?}");
        assert!(begun.elapsed() < Duration::from_secs(4), "it waited for its limit: {begin:?}");
    }
    is_healthy(secured.connect(None).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn tls_at_a_port_without_it_ends_at_once() {
    let mut server = Serve::over(&Settings::default())
        .with("DATABASE__URL", "sqlite::memory:")
        .with("GRPC__FIRST_BYTE_TIMEOUT_MS", 60_000)
        .start()
        .await;
    let begun = Instant::now();
    let any = Authority::new("any");
    let refused = timeout(LIMIT, tls_channel(server.addr.port(), &any, None)).await;
    refused.expect("it ends").expect_err("there is no TLS");
    assert!(begun.elapsed() < Duration::from_secs(4));
    server.stop().await;
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_ended_and_holds_up_nobody() {
    // Nothing; a record's head; the head of a hello that never comes; and one byte now and then.
    let begins: [&[u8]; 4] =
        [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x16\x03"];
    let fall_silent = async |secured: &Secured| {
        let mut silent = Vec::new();
        for begin in begins.repeat(25) {
            let mut socket = TcpStream::connect(secured.server.addr).await.unwrap();
            socket.write_all(begin).await.unwrap();
            silent.push(socket);
        }
        silent
    };
    // For as long as it lasts others are served.
    let secured = Secured::start(|settings| settings.grpc.first_byte_timeout_ms = 60_000).await;
    let silent = fall_silent(&secured).await;
    let healthy = timeout(LIMIT, async { is_healthy(secured.connect(None).await.unwrap()).await });
    healthy.await.expect("others had to wait").unwrap();
    drop((silent, secured));

    let secured = Secured::start(|settings| settings.grpc.first_byte_timeout_ms = 1_000).await;
    let begun = Instant::now();
    for mut socket in fall_silent(&secured).await {
        let mut rest = [0; 64];
        while timeout(LIMIT, socket.read(&mut rest)).await.expect("it is ended").unwrap_or(0) > 0 {}
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "they lasted {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_handshake_counts_as_a_connection() {
    let secured = Secured::start(|settings| {
        settings.grpc.max_connections = 2;
        settings.grpc.first_byte_timeout_ms = 1_500;
    });
    let secured = secured.await;
    let begun = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(TcpStream::connect(secured.server.addr).await.unwrap());
    }
    // Both places are taken until the handshakes are given up.
    is_healthy(secured.connect(None).await.unwrap()).await.unwrap();
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(1_400), "it did not wait: {waited:?}");
}

/// A server process whose certificate is in `folder`.
async fn serve_from(folder: &Path, issued: &Issued, reload_s: u64) -> Process {
    let (cert, key) = issued.write(folder);
    let serve = Serve::over(&Settings::default())
        .with("DATABASE__URL", "sqlite::memory:")
        .with("TLS__CERT_FILE", cert.display())
        .with("TLS__KEY_FILE", key.display())
        .with("TLS__RELOAD_S", reload_s);
    serve.start().await
}

#[tokio::test]
async fn a_new_certificate_is_taken_into_use_while_clients_stay() {
    let folder = TempDir::new().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut server = serve_from(folder.path(), &old.for_server(), 86_400).await;
    let port = server.addr.port();
    let before = tls_channel(port, &old, None).await.unwrap();
    is_healthy(before.clone()).await.unwrap();

    // Half of the way: the key is another's. Nothing changes but the log.
    let issued = new.for_server();
    std::fs::write(folder.path().join("cert.pem"), &issued.cert).unwrap();
    server.signal("HUP");
    server.logged("the new certificates are not used").await;
    server.logged("is not the key of the certificate").await;
    is_healthy(tls_channel(port, &old, None).await.unwrap()).await.unwrap();

    issued.write(folder.path());
    server.signal("HUP");
    server.logged("the certificates were read again").await;
    tls_channel(port, &old, None).await.expect_err("the old one is gone");
    is_healthy(tls_channel(port, &new, None).await.unwrap()).await.unwrap();
    // Who was connected before is still.
    is_healthy(before).await.unwrap();

    for (name, contents) in [("cert.pem", "garbage"), ("key.pem", "")] {
        issued.write(folder.path());
        std::fs::write(folder.path().join(name), contents).unwrap();
        server.signal("HUP");
    }
    std::fs::remove_file(folder.path().join("cert.pem")).unwrap();
    server.signal("HUP");
    server.logged("can't be read").await;
    is_healthy(tls_channel(port, &new, None).await.unwrap()).await.unwrap();
    assert_eq!(server.has_ended(), None);
    server.stop().await;
}

#[tokio::test]
async fn new_files_are_found_without_a_signal() {
    let folder = TempDir::new().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut server = serve_from(folder.path(), &old.for_server(), 1).await;
    new.for_server().write(folder.path());
    server.logged("the certificates were read again").await;
    is_healthy(tls_channel(server.addr.port(), &new, None).await.unwrap()).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn the_end_of_a_certificate_is_told_two_weeks_before() {
    let authority = Authority::new("servers");
    let now = SystemTime::now();
    for (days, warns) in [(13, true), (16, false)] {
        let folder = TempDir::new().unwrap();
        let wanted = Wanted {
            dns: &["localhost"],
            validity: Some((now - DAY, now + days * DAY)),
            ..Wanted::default()
        };
        let mut server = serve_from(folder.path(), &authority.issue(&wanted), 1).await;
        let warning = "the certificate expires soon";
        if warns {
            server.logged(warning).await;
        } else {
            // A second reading has been made by now.
            let again = authority.issue(&wanted);
            again.write(folder.path());
            server.logged("the certificates were read again").await;
        }
        assert_eq!(server.log().contains(warning), warns, "{days}");
        server.stop().await;
    }
}

#[tokio::test]
async fn the_server_stops_beside_an_unfinished_handshake() {
    let folder = TempDir::new().unwrap();
    let issued = Authority::new("servers").for_server();
    let mut server = serve_from(folder.path(), &issued, 60).await;
    let mut socket = TcpStream::connect(server.addr).await.unwrap();
    socket.write_all(b"\x16\x03\x01").await.unwrap();
    // It is accepted once another one, which came later, is answered.
    let mut plain = TcpStream::connect(server.addr).await.unwrap();
    plain.write_all(b"xxxx").await.unwrap();
    timeout(LIMIT, plain.read(&mut [0; 1])).await.expect("it ends").ok();
    let begun = Instant::now();
    server.stop().await;
    assert!(begun.elapsed() < Duration::from_secs(4), "it waited for the handshake");
    drop(socket);
}
