#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::collections::BTreeMap;

use http::{HeaderMap, Response};
use prost::bytes::Bytes;
use tokio::{net::TcpListener, task::JoinSet};

use super::*;
use crate::{
    bench::{
        nowhere,
        schedule::{Pace, Stretch},
    },
    domain::OfferKey,
};

/// `SOLD_OUT`, as it stands on the wire.
const ANSWER: &[u8] = &[0, 0, 0, 0, 4, 8, 9, 32, 0];

/// A server that serves one call at a time, and begins by doing nothing for a while.
async fn stalling(stall: Duration) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let (socket, _) = listener.accept().await.unwrap();
        let mut builder = h2::server::Builder::new();
        builder.max_concurrent_streams(1);
        let mut connection = builder.handshake::<_, Bytes>(socket).await.unwrap();
        let mut nth = 0;
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            // The first is the one that opens the connection.
            if nth == 1 {
                tokio::time::sleep(stall).await;
            }
            nth += 1;
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            // Whoever gave up meanwhile has reset the stream.
            if let Ok(mut stream) = respond.send_response(Response::new(()), false) {
                let _ = stream.send_data(Bytes::from_static(ANSWER), false);
                let _ = stream.send_trailers(trailers);
            }
        }
    });
    (addr, serving)
}

fn load(addr: SocketAddr, offer: &OfferKey, per_s: f64, lasts: Duration) -> Load {
    let schedule = Schedule::draw(Pace::Fixed, &[Stretch::new(per_s, lasts)], 1);
    let requests = Requests::reserve(offer, "t", schedule.len());
    Load { connections: 1, ..Load::new(addr, requests, Arrivals::Open(schedule)) }
}

#[tokio::test]
async fn a_server_that_stalls_has_to_answer_for_everybody_who_came_meanwhile() {
    // It is to be the server's fault, and not the generator's: where that was late itself, as it may
    // be beside other tests, the load is made again.
    let mut lags = Vec::new();
    let seen = loop {
        let (addr, _serving) = stalling(Duration::from_millis(600)).await;
        let seen = run(load(addr, &nowhere(), 100.0, Duration::from_secs(1))).await.unwrap();
        lags.push(seen.lag());
        if seen.lag() < Duration::from_millis(200) {
            break seen;
        }
        assert!(lags.len() < 10, "{lags:?}");
    };
    assert_eq!(seen.counts(), BTreeMap::from([(SOLD_OUT.to_owned(), 100)]));
    let latencies = latencies(seen.of(SOLD_OUT));
    // Sent and answered in a moment, most of them; but 60 of 100 were due in the stall. Counted from
    // their sending, one call would be slow and the median would show nothing.
    let at = |quantile| latencies.value_at_quantile(quantile) / 1_000;
    assert!((40..=400).contains(&at(0.5)), "{} ms", at(0.5));
    assert!(at(0.9) >= 400, "{} ms", at(0.9));
    assert!(at(1.0) >= 590, "{} ms", at(1.0));
    assert!(seen.held_back > 40, "{}", seen.held_back);
}

#[tokio::test]
async fn a_generator_whose_own_thread_stalls_has_to_answer_for_that_itself() {
    let (addr, _serving) = stalling(Duration::ZERO).await;
    let load = load(addr, &nowhere(), 1_000.0, Duration::from_millis(200));
    let (seen, ()) = tokio::join!(drive(load), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        #[expect(clippy::disallowed_methods, reason = "the thread of the generator is to stall")]
        std::thread::sleep(Duration::from_millis(50));
    });
    let seen = seen.unwrap();
    assert_eq!(seen.count(SOLD_OUT), 200);
    assert!(seen.lag() >= Duration::from_millis(20), "{:?}", seen.lag());
    assert!(seen.limit().is_some_and(|limit| limit.starts_with("the generator ")));
}

#[tokio::test]
async fn at_its_deadline_a_call_is_given_up_whether_it_was_sent_or_not() {
    let (addr, _serving) = stalling(Duration::from_millis(600)).await;
    let load = Load {
        deadline: Some(Duration::from_millis(100)),
        ..load(addr, &nowhere(), 100_000.0, Duration::from_micros(300))
    };
    let seen = run(load).await.unwrap();
    assert_eq!(seen.samples.len(), 30, "{:?}", seen.counts());
    assert!(seen.count(TOO_LATE) == 1 && seen.count(NOT_SENT) == 29, "{:?}", seen.counts());
    // Only what was sent may have come to something.
    assert_eq!(seen.unknown(), seen.count(TOO_LATE));
    assert!(seen.samples.iter().all(|sample| sample.latency_us >= 100_000));
}

#[tokio::test]
async fn a_closed_loop_waits_for_answers() {
    let (addr, _serving) = stalling(Duration::ZERO).await;
    let requests = Requests::reserve(&nowhere(), "t", 500);
    let arrivals = Arrivals::Closed { in_flight: 4, lasts: Duration::from_secs(60) };
    let load = Load { connections: 1, ..Load::new(addr, requests, arrivals) };
    let seen = run(load).await.unwrap();
    assert_eq!(seen.count(SOLD_OUT), 500);
    assert!(seen.rate(SOLD_OUT) > 0.0);
}

#[tokio::test]
async fn a_load_ends_when_it_is_told_to() {
    let (addr, _serving) = stalling(Duration::ZERO).await;
    let load = load(addr, &nowhere(), 1_000.0, Duration::from_secs(60));
    let stop = load.stop.clone();
    let (seen, ()) = tokio::join!(run(load), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        stop.cancel();
    });
    let count = seen.unwrap().count(SOLD_OUT);
    assert!((1..5_000).contains(&count), "{count}");
}

#[tokio::test]
async fn nothing_listens_and_that_is_said() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let failed = run(load(addr, &nowhere(), 10.0, Duration::from_secs(1))).await.unwrap_err();
    assert!(matches!(failed, Error::Unavailable(_)), "{failed}");
}
