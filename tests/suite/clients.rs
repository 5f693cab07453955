//! Clients in other languages, with stubs of their own, against the server as a process.

use std::time::Duration;

use seckill::config::{Role, Settings, Token, digest};
use tokio::{process::Command, time::timeout};

use crate::support::{certs::Authority, process::Serve};

/// The Python that has what scripts/requirements.txt names.
#[allow(clippy::disallowed_methods, reason = "a setting of the tests, not of the server")]
fn python() -> String {
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
