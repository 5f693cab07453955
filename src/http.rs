//! The HTTP port: metrics, probes and the dashboard, for those who watch the server.
//!
//! `/metrics` is the text format of Prometheus, with `?name[]=` of these families alone; `/livez`
//! answers while the process runs; `/readyz` follows engine and database both ways, as health of
//! gRPC does, and `?verbose` names each check. `/` is the dashboard, whose calls are gRPC-Web.
//!
//! **Promises:** nothing here asks a store but a call; connections and what they may send are
//! bounded, and calls never take the places of metrics and probes; no request is logged.

mod dashboard;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, Uri, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::{get, post},
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
use tower::ServiceExt as _;

use crate::{
    accept::Port,
    api::web::{self, Caller, Web},
    circuit::Circuit,
    engine::Engine,
    metrics::{self, Shown},
    recovery::Recovery,
    reservations::Reservations,
};

/// Connections at the same time; more wait until one ends. So many are left to metrics and probes
/// when every call is open.
const MAX_CONNECTIONS: usize = 64 + web::MOST_CALLS;
/// What the head of a request may take, in bytes. Bodies are read of calls alone.
const MAX_HEAD: usize = 16 * 1_024;
/// How long the head of the next request may take, also that of an idle connection.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// How long a connection may last, so that none keeps its place by not reading; one with an open
/// call lasts on until its stream has to end.
const MAX_AGE: Duration = Duration::from_secs(300);
/// How long an answer that is under way may take at the end of a connection.
const LAST_ANSWER: Duration = Duration::from_millis(500);
/// Version 0.0.4 of the text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What the port shows.
#[derive(Debug, Clone)]
pub struct View {
    pub engine: Arc<dyn Engine>,
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
    pub recovery: Arc<Recovery>,
    pub reservations: Arc<Reservations>,
    pub shutdown: CancellationToken,
    /// The calls of the dashboard, or why it is not served.
    pub web: Result<Web, &'static str>,
    /// How long a call may be open.
    pub longest_call: Duration,
}

/// Serves until `stop`, and ends the connections then.
pub async fn serve(listener: TcpListener, view: View, stop: CancellationToken) {
    let longest_call = view.longest_call;
    let router = router(view);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    let mut port = Port::new(listener, "HTTP");
    while let Some((socket, place)) = stop.run_until_cancelled(accept(&mut port, &places)).await {
        connections.spawn(converse(socket, router.clone(), longest_call, stop.clone(), place));
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
    router: Router,
    longest_call: Duration,
    stop: CancellationToken,
    _place: OwnedSemaphorePermit,
) {
    let caller = Caller::new(&socket);
    let named = caller.clone();
    let service = router.map_request(move |mut request: hyper::Request<_>| {
        request.extensions_mut().insert(named.clone());
        request
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let rest = tokio::select! {
        // How it ended concerns the client alone.
        _ = connection.as_mut() => return,
        () = stop.cancelled() => LAST_ANSWER,
        () = sleep(MAX_AGE) => if caller.is_calling() { longest_call } else { LAST_ANSWER },
    };
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection.as_mut() => return,
        () = sleep(rest) => return,
        () = stop.cancelled() => {}
    }
    let _ = timeout(LAST_ANSWER, connection).await;
}

fn router(view: View) -> Router {
    let mut router = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/livez", get("ok\n"))
        .route("/readyz", get(show_readiness));
    match &view.web {
        Ok(web) => {
            for service in web::SERVICES {
                let web = web.clone();
                let call = post(|request: Request| async move { web.call(request).await });
                router = router.route(&format!("/{service}/{{method}}"), call);
            }
            router = dashboard::add_to(router);
        }
        Err(why) => router = router.route("/", get(not_served(why))),
    }
    router.with_state(view)
}

fn not_served(why: &'static str) -> impl IntoResponse + Clone {
    (StatusCode::NOT_FOUND, format!("the dashboard is not served: {why}\n"))
}

async fn show_metrics(State(view): State<View>, uri: Uri) -> impl IntoResponse {
    let reservations = &view.reservations;
    let (room, room_taken) = reservations.writer.room().figures();
    let text = metrics::text(Shown {
        engine_up: !view.engine_circuit.is_open(),
        database_up: !view.database_circuit.is_open(),
        frozen_offers: view.recovery.frozen_offers(),
        room,
        room_taken,
        masters_away: view.engine.parts_away(),
        engine_requests: reservations.catalog.requests(),
        writer_rows: reservations.writer.rows(),
        writer_wait: reservations.writer.longest_wait(),
        lookups_waiting: reservations.lookups_waiting.load(Ordering::Relaxed),
    });
    ([(CONTENT_TYPE, PROMETHEUS)], only_named(text, uri.query().unwrap_or_default()))
}

/// The families that `name[]=` names, as other exporters understand it; all, if it names none.
fn only_named(text: String, query: &str) -> String {
    let names: Vec<&str> = query
        .split('&')
        .filter_map(|word| word.strip_prefix("name[]=").or(word.strip_prefix("name%5B%5D=")))
        .collect();
    if names.is_empty() {
        return text;
    }
    let is_named = |line: &&str| {
        let series = line.strip_prefix("# HELP ").or(line.strip_prefix("# TYPE ")).unwrap_or(line);
        let family = series.split(['{', ' ']).next().unwrap_or(series);
        names.contains(&family)
    };
    text.lines().filter(is_named).flat_map(|line| [line, "\n"]).collect()
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
    #![allow(clippy::disallowed_methods, reason = "a task of a test ends with it")]

    use axum::{Extension, body::Body};
    use futures_util::{StreamExt as _, stream};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        time::Instant,
    };

    use super::*;

    /// Begins with a word and never ends.
    fn endless() -> Body {
        let word = stream::once(async { Ok::<_, std::convert::Infallible>("word") });
        Body::from_stream(word.chain(stream::pending()))
    }

    #[tokio::test]
    async fn a_connection_with_an_open_call_lasts_as_long_as_its_stream_may() {
        const LONGEST_CALL: Duration = Duration::from_secs(4_000);
        for (path, end) in [("/plain", MAX_AGE + LAST_ANSWER), ("/call", MAX_AGE + LONGEST_CALL)] {
            let router = Router::new().route("/plain", get(|| async { endless() })).route(
                "/call",
                get(|Extension(caller): Extension<Caller>| async move {
                    caller.begin_call();
                    endless()
                }),
            );
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let (client, accepted) = tokio::join!(TcpStream::connect(addr), listener.accept());
            let (mut client, (socket, _)) = (client.unwrap(), accepted.unwrap());
            let place = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
            let stop = CancellationToken::new();
            tokio::spawn(converse(socket, router, LONGEST_CALL, stop, place));
            let request = format!("GET {path} HTTP/1.1\r\nhost: seckill\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            let mut read = Vec::new();
            while !read.ends_with(b"word\r\n") {
                client.read_buf(&mut read).await.unwrap();
            }
            tokio::time::pause();
            let begun = Instant::now();
            assert_eq!(client.read_buf(&mut read).await.unwrap(), 0, "it ends");
            let lasted = begun.elapsed();
            assert!(lasted.abs_diff(end) < Duration::from_secs(1), "{path}: {lasted:?}");
            tokio::time::resume();
        }
    }
}
