//! Redis over TLS, which wants a client certificate.

use std::time::Duration;

use seckill::{
    config::{SecretUrl, Settings},
    engine::{
        Engine,
        redis::{OpenError, RedisEngine, RedisSettings},
    },
};

use crate::support::{
    certs::{Authority, Wanted},
    cluster::Cluster,
    databases::{self, Fresh},
    eventually, identity,
    redis_server::RedisServer,
    secured::Secured,
    sentinels::Guarded,
    storm::{self, Storm},
    world::Ground,
};

/// A server with TLS on a port of its own; the other is for the test alone.
struct Server {
    redis: RedisServer,
    port: u16,
    secured: Secured,
}

impl Server {
    async fn start() -> Self {
        let secured = Secured::new();
        let port = RedisServer::free_port();
        let options = secured.options(port);
        let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
        options.extend(["--appendonly", "yes"]);
        let redis = RedisServer::start_with(&options).await;
        let set =
            ["ACL", "SETUSER", "sales", "on", ">pw", "~sk:*", "&sk:events", "+@all", "-@admin"];
        redis.command::<()>(&set).await;
        redis.command::<()>(&["ACL", "SETUSER", "sales", "+config|get"]).await;
        Self { redis, port, secured }
    }

    fn settings(&self) -> RedisSettings {
        let mut settings = RedisSettings::new(format!("rediss://sales:pw@localhost:{}", self.port));
        self.secured.set(&mut settings);
        settings
    }
}

async fn a_sale(fresh: &Fresh) {
    let secured = Server::start().await;
    let mut settings = Ground::embedded(fresh).settings();
    settings.engine.url = SecretUrl::new(secured.settings().url);
    secured.secured.set_all(&mut settings);
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

/// A sale over TLS, in the middle of which another master takes over.
async fn a_sale_and_a_failover(
    fresh: &Fresh,
    set: impl FnOnce(&mut Settings),
    fail_over: impl Future<Output = ()>,
) {
    let mut settings = Ground::embedded(fresh).settings();
    set(&mut settings);
    let server = storm::serve(settings).await;
    let key = storm::sell(&server, "secured", 100).await;
    let storm = Storm::new(&key, 100, 300);
    storm.let_in(50);
    let meddle = async {
        storm.answered(50).await;
        fail_over.await;
        eventually("the server has found the new master", async || {
            let offer = server.parts.catalog.offer(&key).await.ok()?;
            let levels = offer.segments.levels().await.ok()?.ok()?;
            (levels.stamp.epoch > 1).then_some(())
        })
        .await;
        storm.let_in(300);
    };
    storm.rage(&server, meddle).await;
    assert!(server.parts.recovery.rebuilds() >= 1);
    storm.settle(&server).await;
    server.stop().await;
}

async fn over_a_cluster(fresh: &Fresh) {
    let cluster = Cluster::start_secured().await;
    let set = |settings: &mut Settings| cluster.set(settings);
    let activity = seckill::domain::OfferKey {
        activity_id: seckill::domain::ActivityId::new("secured").unwrap(),
        sku_id: seckill::domain::SkuId::new(crate::support::world::SKU).unwrap(),
    };
    let stock = seckill::engine::keys::segment(&activity, 0)[0].clone();
    let fail_over = async {
        let owner = cluster.owner_of(&stock).await;
        cluster.fail_over(owner).await;
    };
    a_sale_and_a_failover(fresh, set, fail_over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_over_tls_goes_on_when_a_master_of_a_cluster_changes() {
    databases::run(Fresh::postgres().await, over_a_cluster).await;
}

async fn over_sentinels(fresh: &Fresh) {
    let guarded = Guarded::start_secured().await;
    let set = |settings: &mut Settings| guarded.set(settings);
    let fail_over = async {
        guarded.fail_over().await;
        guarded.leads(1).await;
    };
    a_sale_and_a_failover(fresh, set, fail_over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_over_tls_goes_on_when_sentinels_name_another_master() {
    databases::run(Fresh::mysql().await, over_sentinels).await;
}

#[tokio::test]
async fn a_server_of_another_authority_is_refused_and_so_is_a_client_without_a_certificate() {
    let secured = Server::start().await;
    let refused = async |change: &dyn Fn(&mut RedisSettings)| {
        let mut settings = secured.settings();
        change(&mut settings);
        let error = RedisEngine::connect(&settings).await.unwrap_err();
        assert!(!error.to_string().contains("pw@"), "{error}");
        error
    };
    let other = secured.secured.file("other.pem");
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
    let secured = Server::start().await;
    let engine = RedisEngine::connect(&secured.settings()).await.unwrap();
    let before = identity(&engine).await.unwrap();
    // Files that are no use are noticed by whoever connects, and by nobody else.
    let good = secured.secured.client("sales");
    let foreign = Authority::new("somebody").issue(&Wanted::default());
    secured.secured.show(&foreign);
    engine.probe().await.unwrap();
    secured.redis.drop_clients().await;
    eventually("the connections are gone", async || engine.probe().await.err()).await;
    secured.secured.show(&good);
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    assert_eq!(identity(&engine).await.unwrap(), before);
}
