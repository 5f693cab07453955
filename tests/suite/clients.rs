//! Clients in other languages, with stubs of their own, against the server as a process.

use std::time::Duration;

use seckill::config::Settings;
use tokio::{process::Command, time::timeout};

use crate::support::process::Serve;

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

#[tokio::test]
async fn a_python_client_runs_a_sale() {
    const ROOT: &str = env!("CARGO_MANIFEST_DIR");
    let serve = Serve::over(&Settings::default()).with("DATABASE__URL", "sqlite::memory:");
    let mut process = serve.start().await;
    let mut client = Command::new(python());
    client
        .arg(format!("{ROOT}/tests/clients/python/sale.py"))
        .arg(process.addr.to_string())
        .arg(format!("{ROOT}/proto"))
        // It leaves nothing beside its source.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .kill_on_drop(true);
    let limit = Duration::from_secs(60);
    let output = timeout(limit, client.output()).await.expect("it ends").unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}\n{errors}");
    assert_eq!(printed, "the sale went well\n", "{errors}");
    process.stop().await;
}
