//! Clients in other languages, with stubs of their own, against the server as a process.

use std::{collections::BTreeSet, process::Stdio, time::Duration};

use prost::Message as _;
use seckill::config::{Role, Settings, Token, digest};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::support::{
    certs::Authority,
    databases::{self, Fresh},
    process::Serve,
    world::{Ground, Sale},
};

/// The Python that has what scripts/requirements.txt names.
#[allow(clippy::disallowed_methods, reason = "a setting of the tests, not of the server")]
pub(crate) fn python() -> String {
    std::env::var("SECKILL_TEST_PYTHON").unwrap_or_else(|_| {
        panic!(
            "SECKILL_TEST_PYTHON is not set: run `make test`, or name a Python with what \
             scripts/requirements.txt lists"
        )
    })
}

/// Runs the sale of the Python client to its good end.
async fn run_python(address: &str, variables: &[(&str, &str)]) {
    const ROOT: &str = env!("CARGO_MANIFEST_DIR");
    let mut client = Command::new(python());
    client
        .arg(format!("{ROOT}/tests/clients/python/sale.py"))
        .arg(address)
        .arg(format!("{ROOT}/proto"))
        // It leaves nothing beside its source.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    let limit = Duration::from_secs(60);
    let output = timeout(limit, client.output()).await.expect("it ends").unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    assert_eq!(printed, "the sale went well\n", "{errors}");
}

#[tokio::test]
async fn a_python_client_runs_a_sale() {
    let serve = Serve::over(&Settings::default()).with("DATABASE__URL", "sqlite::memory:");
    let mut process = serve.start().await;
    run_python(&process.addr.to_string(), &[]).await;
    process.stop().await;
}

#[tokio::test]
async fn a_python_client_runs_a_sale_over_tls_with_a_token() {
    const TOKEN: &str = "a-token-of-the-tests";
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("servers");
    let (cert, key) = authority.for_server().write(folder.path());
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &authority.pem).unwrap();
    let token = Token { name: "py".into(), role: Role::Ops, digest: digest(TOKEN.as_bytes()) };
    let mut process = Serve::over(&Settings::default())
        .with("DATABASE__URL", "sqlite::memory:")
        .with("TLS__CERT_FILE", cert.display())
        .with("TLS__KEY_FILE", key.display())
        .with("AUTH__TOKENS", token.entry().unwrap())
        .start()
        .await;
    let address = format!("localhost:{}", process.addr.port());
    let ca = ca.display().to_string();
    run_python(&address, &[("SECKILL_CA_FILE", &ca), ("SECKILL_TOKEN", TOKEN)]).await;
    process.stop().await;
}

/// The lines that a client prints, as they come.
fn lines_of(client: &mut Child) -> Lines<BufReader<ChildStdout>> {
    BufReader::new(client.stdout.take().expect("its output is piped")).lines()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_repeats_by_itself_wins_once_through_an_outage() {
    const ROOT: &str = env!("CARGO_MANIFEST_DIR");
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let mut ground = Ground::redis(fresh).await;
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.parts.activities.move_by_clock().await.unwrap();
        let mut process = Serve::over(&ground.settings()).start().await;
        let redis = ground.redis.as_mut().unwrap();
        redis.kill();
        process.logged("refusing calls: the store is away").await;

        let mut client = Command::new(python())
            .arg(format!("{ROOT}/tests/clients/python/retries.py"))
            .arg(process.addr.to_string())
            .arg(format!("{ROOT}/proto"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = lines_of(&mut client);
        let next = async |lines: &mut Lines<_>| {
            let line = timeout(Duration::from_secs(30), lines.next_line()).await;
            line.expect("it goes on").unwrap().unwrap_or_default()
        };
        assert_eq!(next(&mut lines).await, "asking");
        // Its first attempts are refused.
        tokio::time::sleep(Duration::from_millis(400)).await;
        redis.start_again().await;
        let first = next(&mut lines).await;
        let words: Vec<&str> = first.split(' ').collect();
        assert_eq!(words[0], "RESERVE_OUTCOME_RESERVED", "{first}");
        let again = next(&mut lines).await;
        assert_eq!(again, format!("RESERVE_OUTCOME_RESERVED True {}", words[2]));
        assert!(client.wait().await.unwrap().success());
        process.stop().await;
        world.close_circuits().await;
        world.healthy(&key).await;
        world.assert_balanced(&key, 1).await;
    })
    .await;
}

#[test]
fn the_service_config_names_methods_that_exist_and_never_hedges() {
    let text = include_str!("../../proto/seckill/v1/seckill_grpc_service_config.json");
    let config: serde_json::Value = serde_json::from_str(text).unwrap();
    let files = prost_types::FileDescriptorSet::decode(seckill::api::FILE_DESCRIPTOR_SET).unwrap();
    let mut methods = BTreeSet::new();
    for file in &files.file {
        for service in &file.service {
            for method in &service.method {
                methods.insert((
                    format!("{}.{}", file.package(), service.name()),
                    method.name().to_owned(),
                ));
            }
        }
    }
    let mut named = BTreeSet::new();
    for method_config in config["methodConfig"].as_array().unwrap() {
        assert!(method_config.get("hedgingPolicy").is_none());
        let policy = &method_config["retryPolicy"];
        for code in policy["retryableStatusCodes"].as_array().unwrap() {
            assert!(["UNAVAILABLE", "RESOURCE_EXHAUSTED"].contains(&code.as_str().unwrap()));
        }
        // gRPC takes no more than 5.
        assert!(policy["maxAttempts"].as_u64().unwrap() <= 5);
        for name in method_config["name"].as_array().unwrap() {
            let text = |field: &str| name[field].as_str().unwrap().to_owned();
            let method = (text("service"), text("method"));
            assert!(methods.contains(&method), "{method:?}");
            assert!(named.insert(method.clone()), "{method:?} has two policies");
        }
    }
}
