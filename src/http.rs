//! The HTTP port: metrics and probes, for those who watch the server.
//!
//! `/metrics` is the text format of Prometheus; `/livez` answers while the process runs; `/readyz`
//! follows engine and database both ways, as health of gRPC does, and `?verbose` names each check.
//!
//! **Promises:** nothing here asks a store; connections and what they may send are bounded; no
//! request is logged.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, Uri, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    accept::Port,
    circuit::Circuit,
    metrics::{self, Shown},
    recovery::Recovery,
    reservations::Reservations,
};

/// Connections at the same time; more wait until one ends.
const MAX_CONNECTIONS: usize = 64;
/// What the head of a request may take, in bytes. Bodies are not read.
const MAX_HEAD: usize = 16 * 1_024;
/// How long the head of the next request may take, also that of an idle connection.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// How long a connection may last, so that none keeps its place by not reading.
const MAX_AGE: Duration = Duration::from_secs(300);
/// How long an answer that is under way may take at the end of a connection.
const LAST_ANSWER: Duration = Duration::from_millis(500);
/// Version 0.0.4 of the text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What the port shows.
#[derive(Debug, Clone)]
pub struct View {
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
    pub recovery: Arc<Recovery>,
    pub reservations: Arc<Reservations>,
    pub shutdown: CancellationToken,
}

/// Serves until `stop`, and ends the connections then.
pub async fn serve(listener: TcpListener, view: View, stop: CancellationToken) {
    let service = TowerToHyperService::new(router(view));
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    let mut port = Port::new(listener, "HTTP");
    while let Some((socket, place)) = stop.run_until_cancelled(accept(&mut port, &places)).await {
        connections.spawn(converse(socket, service.clone(), stop.clone(), place));
    }
    drop(port);
    connections.close();
    connections.wait().await;
}

async fn accept(port: &mut Port, places: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let place = places.clone().acquire_owned().await.expect("nobody closes it");
    (port.accept().await, place)
}

async fn converse(
    socket: TcpStream,
    service: TowerToHyperService<Router>,
    stop: CancellationToken,
    _place: OwnedSemaphorePermit,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // How it ended concerns the client alone.
        _ = connection.as_mut() => return,
        () = stop.cancelled() => {}
        () = sleep(MAX_AGE) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(LAST_ANSWER, connection).await;
}

fn router(view: View) -> Router {
    Router::new()
        .route("/metrics", get(show_metrics))
        .route("/livez", get("ok\n"))
        .route("/readyz", get(show_readiness))
        .with_state(view)
}

async fn show_metrics(State(view): State<View>) -> impl IntoResponse {
    let reservations = &view.reservations;
    let (room, room_taken) = reservations.writer.room().figures();
    let text = metrics::text(Shown {
        engine_up: !view.engine_circuit.is_open(),
        database_up: !view.database_circuit.is_open(),
        frozen_offers: view.recovery.frozen_offers(),
        room,
        room_taken,
        writer_wait: reservations.writer.longest_wait(),
        lookups_waiting: reservations.lookups_waiting.load(Ordering::Relaxed),
    });
    ([(CONTENT_TYPE, PROMETHEUS)], text)
}

async fn show_readiness(State(view): State<View>, uri: Uri) -> impl IntoResponse {
    let checks = [
        ("engine", view.engine_circuit.is_open(), ["there", "away"]),
        ("database", view.database_circuit.is_open(), ["there", "away"]),
        ("shutting down", view.shutdown.is_cancelled(), ["no", "yes"]),
    ];
    let ready = checks.iter().all(|(_, failed, _)| !failed);
    let mut text = String::new();
    if uri.query().is_some_and(|query| query.split('&').any(|word| word == "verbose")) {
        for (check, failed, words) in checks {
            text.push_str(&format!("{check}: {}\n", words[usize::from(failed)]));
        }
    }
    text.push_str(if ready { "ready\n" } else { "not ready\n" });
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
}
