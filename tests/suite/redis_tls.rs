//! Redis over TLS, which wants a client certificate.

use std::{path::PathBuf, time::Duration};

use seckill::{
    config::SecretUrl,
    engine::{
        Engine,
        redis::{OpenError, RedisEngine, RedisSettings},
    },
};
use tempfile::TempDir;

use crate::support::{
    certs::{Authority, Issued, Wanted},
    databases::{self, Fresh},
    eventually, identity,
    redis_server::RedisServer,
    storm::{self, Storm},
    world::Ground,
};

/// A server with TLS on a port of its own; the other is for the test alone.
struct Secured {
    redis: RedisServer,
    port: u16,
    authority: Authority,
    folder: TempDir,
}

impl Secured {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new("the shop");
        std::fs::write(folder.path().join("ca.pem"), &authority.pem).unwrap();
        let served = folder.path().join("served");
        std::fs::create_dir(&served).unwrap();
        let (cert, key) = authority.for_server().write(&served);
        let port = RedisServer::free_port();
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let ca = path(folder.path().join("ca.pem"));
        let redis = RedisServer::start_with(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &path(cert),
            "--tls-key-file",
            &path(key),
            "--tls-ca-cert-file",
            &ca,
            "--tls-auth-clients",
            "yes",
            "--appendonly",
            "yes",
        ])
        .await;
        let set =
            ["ACL", "SETUSER", "sales", "on", ">pw", "~sk:*", "&sk:events", "+@all", "-@admin"];
        redis.command::<()>(&set).await;
        redis.command::<()>(&["ACL", "SETUSER", "sales", "+config|get"]).await;
        let secured = Self { redis, port, authority, folder };
        secured.show(&secured.client("sales"));
        secured
    }

    fn client(&self, name: &'static str) -> Issued {
        self.authority.issue(&Wanted { common_name: name, ..Wanted::default() })
    }

    /// Puts another certificate into the files.
    fn show(&self, issued: &Issued) {
        issued.write(self.folder.path());
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    fn settings(&self) -> RedisSettings {
        RedisSettings {
            ca_file: self.file("ca.pem"),
            cert_file: self.file("cert.pem"),
            key_file: self.file("key.pem"),
            ..RedisSettings::new(format!("rediss://sales:pw@localhost:{}", self.port))
        }
    }
}

async fn a_sale(fresh: &Fresh) {
    let secured = Secured::start().await;
    let redis = secured.settings();
    let mut settings = Ground::embedded(fresh).settings();
    settings.engine.url = SecretUrl::new(&redis.url);
    (settings.engine.ca_file, settings.engine.cert_file) = (redis.ca_file, redis.cert_file);
    settings.engine.key_file = redis.key_file;
    let server = storm::serve(settings).await;
    let key = storm::sell(&server, "secured", 100).await;
    let storm = Storm::new(&key, 100, 300);
    let meddle = async {
        storm.answered(50).await;
        secured.redis.drop_clients().await;
    };
    storm.rage(&server, meddle).await;
    assert_eq!(server.parts.recovery.rebuilds(), 0, "a lost connection loses nothing else");
    storm.settle(&server).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_over_tls_survives_the_loss_of_its_connections() {
    databases::run(Fresh::postgres().await, a_sale).await;
}

#[tokio::test]
async fn a_server_of_another_authority_is_refused_and_so_is_a_client_without_a_certificate() {
    let secured = Secured::start().await;
    let refused = async |change: &dyn Fn(&mut RedisSettings)| {
        let mut settings = secured.settings();
        change(&mut settings);
        let error = RedisEngine::connect(&settings).await.unwrap_err();
        assert!(!error.to_string().contains("pw@"), "{error}");
        error
    };
    let other = secured.file("other.pem");
    std::fs::write(&other, Authority::new("somebody").pem).unwrap();
    let error = refused(&|s| s.ca_file.clone_from(&other)).await;
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    // By the system's authorities.
    let error = refused(&|s| s.ca_file.clear()).await;
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    let error = refused(&|s| {
        s.cert_file.clear();
        s.key_file.clear();
    })
    .await;
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    // A name that the certificate does not have.
    let error = refused(&|s| s.url = s.url.replace("localhost", "127.0.0.2")).await;
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    let error = refused(&|s| s.ca_file = "/nowhere/ca.pem".to_owned()).await;
    assert!(matches!(error, OpenError::Certificate(_)), "{error}");
    assert!(error.to_string().starts_with("engine.ca_file = /nowhere/ca.pem: can't be read"));
    let error = refused(&|s| s.key_file.clone_from(&s.cert_file)).await;
    assert!(error.to_string().contains("holds no private key"), "{error}");
    // Without TLS nothing is said there, and nobody waits for it.
    let error = refused(&|s| {
        *s = RedisSettings::new(s.url.replace("rediss", "redis"));
    });
    let error = tokio::time::timeout(Duration::from_secs(5), error).await.unwrap();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn a_new_certificate_is_shown_by_new_connections() {
    let secured = Secured::start().await;
    let engine = RedisEngine::connect(&secured.settings()).await.unwrap();
    let before = identity(&engine).await.unwrap();
    // Files that are no use are noticed by whoever connects, and by nobody else.
    let good = secured.client("sales");
    let foreign = Authority::new("somebody").issue(&Wanted::default());
    secured.show(&foreign);
    engine.probe().await.unwrap();
    secured.redis.drop_clients().await;
    eventually("the connections are gone", async || engine.probe().await.err()).await;
    secured.show(&good);
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    assert_eq!(identity(&engine).await.unwrap(), before);
}
