//! The demo tells a server that keeps its promises from one that does not.

use std::time::Duration;

use seckill::cli::demo::{Demo, DemoReport, Options, Progress};
use tonic::transport::Endpoint;

use crate::support::stand_in::{Fault, StandIn};

async fn demo(fault: Fault) -> DemoReport {
    let (stand_in, addr, _server) = StandIn::start(fault).await;
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).expect("a URL");
    let channel = endpoint.connect().await.expect("a connection");
    let options = Options {
        units: 103,
        buyers: 500,
        concurrency: 16,
        segments: 1,
        offers: 3,
        engine_url: None,
        database_url: None,
    };
    Demo::new(vec![channel], options, Duration::from_secs(5), Progress::silent())
        .run(&stand_in)
        .await
        .expect("a sale")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_server_passes() {
    let report = demo(Fault::None).await;
    assert_eq!(report.broken, Vec::<String>::new());
    assert_eq!((report.wins, report.orders, report.remaining), (103, 103, 0));
    assert_eq!((report.oversold, report.lost, report.duplicates), (0, 0, 0));
    assert_eq!((report.outcomes["RESERVED"], report.outcomes["SOLD_OUT"]), (103, 397));
    assert_eq!((report.released, report.resold), (6, 6));
    assert!(report.replays["RESERVED"] > 0);
    assert!(report.second_attempts["DUPLICATE"] > 0);
    assert!(report.to_string().contains("0 oversold, 0 lost, 0 duplicates in"), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_are_asked_for_again_and_break_nothing() {
    let report = demo(Fault::Falters).await;
    assert_eq!(report.broken, Vec::<String>::new());
    assert!(report.repeats > 0);
    assert_eq!(report.wins, 103);
}

#[tokio::test(flavor = "multi_thread")]
async fn units_that_were_sold_twice_are_found() {
    let report = demo(Fault::Oversells).await;
    assert!(report.oversold > 0, "{report}");
    assert!(!report.broken.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_win_without_an_order_is_found() {
    let report = demo(Fault::LosesOrders).await;
    assert!(report.lost > 0, "{report}");
    assert!(!report.broken.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_buyer_with_two_orders_is_found() {
    let report = demo(Fault::AllowsTwo).await;
    assert!(report.duplicates > 0, "{report}");
    assert!(!report.broken.is_empty());
}
