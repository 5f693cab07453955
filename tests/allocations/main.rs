//! How often memory is allocated per call, and that it does not become more often.
//!
//! A fifth of what a win costs is the allocator. So the calls of a server are counted here with an
//! allocator that counts: over HTTP/2, from a client in this process whose own share is known from
//! calls of the noop. The embedded engine's Lua counts, too.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may fail by panicking"
)]

use std::{
    alloc::System,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use seckill::{
    api::pb::{
        self, ActivityState, seckill_admin_client::SeckillAdminClient,
        seckill_client::SeckillClient,
    },
    bench::{
        load::{self, Arrivals, Load, RESERVED, Requests, SOLD_OUT, Seen},
        noop,
    },
    config::{OptionalAddr, SecretUrl, Settings},
    domain::{ActivityId, OfferKey, SkuId},
    server::Server,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::{sync::oneshot, time::sleep};

/// Allocations of a refusal by "sold out" above those of the noop.
const REFUSAL: f64 = 8.0;
/// Allocations of a win above those of the noop, from the call to the order.
const WIN: f64 = 330.0;
const CALLS: usize = 20_000;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocations() -> u64 {
    let stats = ALLOCATOR.stats();
    (stats.allocations + stats.reallocations) as u64
}

fn offer(total: u32) -> OfferKey {
    OfferKey {
        activity_id: ActivityId::new(&format!("sale-of-{total}")).unwrap(),
        sku_id: SkuId::new("sku-1").unwrap(),
    }
}

/// Lets so many new buyers ask, and answers the allocations of this process per call.
async fn per_call(addr: SocketAddr, offer: &OfferKey, series: &str, label: &str) -> f64 {
    let warm = ask(addr, offer, &format!("{series}w"), CALLS / 10).await;
    assert_eq!(warm.count(label), warm.samples.len() as u64, "{:?}", warm.counts());
    let before = allocations();
    let seen = ask(addr, offer, series, CALLS).await;
    let after = allocations();
    assert_eq!(seen.count(label), CALLS as u64, "{:?}", seen.counts());
    (after - before) as f64 / CALLS as f64
}

async fn ask(addr: SocketAddr, offer: &OfferKey, series: &str, calls: usize) -> Seen {
    let requests = Requests::reserve(offer, series, calls);
    // It ends when there are no requests left.
    let arrivals = Arrivals::Closed { in_flight: 64, lasts: Duration::from_secs(60) };
    load::run(Load::new(addr, requests, arrivals)).await.unwrap()
}

async fn sell(addr: SocketAddr, offer: &OfferKey, total: u32) {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{addr}")).unwrap();
    let channel = channel.connect().await.unwrap();
    let (mut admin, mut seckill) =
        (SeckillAdminClient::new(channel.clone()), SeckillClient::new(channel));
    let activity_id = offer.activity_id.to_string();
    let now = SystemTime::now();
    let spec = pb::ActivitySpec {
        activity_id: activity_id.clone(),
        title: "Counted".to_owned(),
        start_time: Some((now - Duration::from_secs(1)).into()),
        end_time: Some((now + Duration::from_secs(3_600)).into()),
        retention: None,
        offers: vec![pb::OfferSpec {
            sku_id: offer.sku_id.to_string(),
            title: "A thing".to_owned(),
            price_minor: 9_900,
            currency_code: "CNY".to_owned(),
            total: total.into(),
            max_orders_per_user: Some(1),
            max_quantity_per_order: Some(1),
            hold: None,
            segments: None,
        }],
    };
    admin.create_activity(pb::CreateActivityRequest { spec: Some(spec) }).await.unwrap();
    let reason = "counted".to_owned();
    let approve = pb::ApproveActivityRequest { activity_id: activity_id.clone(), reason };
    admin.approve_activity(approve).await.unwrap();
    seckill.warmup(pb::WarmupRequest { activity_id: activity_id.clone() }).await.unwrap();
    loop {
        let request = pb::GetActivityRequest { activity_id: activity_id.clone() };
        let answer = admin.get_activity(request).await.unwrap().into_inner();
        if answer.activity.unwrap().state() == ActivityState::Active {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_allocates_no_more_than_it_used_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
    settings.http.addr = OptionalAddr(None);
    let file = folder.path().join("seckill.db");
    settings.database.url = SecretUrl::new(format!("sqlite://{}", file.display()));
    // It is sold out for the whole test.
    settings.reserve.believe_sold_out_ms = 10_000;

    let ((ready, addr), (end, ended)) = (oneshot::channel(), oneshot::channel::<()>());
    let serving = tokio::spawn({
        let settings = settings.clone();
        async move {
            let stop = async move { drop(ended.await) };
            noop::serve(&settings, |addr| ready.send(addr).unwrap(), stop).await.unwrap();
        }
    });
    let nothing = per_call(addr.await.unwrap(), &offer(0), "noop", SOLD_OUT).await;
    end.send(()).unwrap();
    serving.await.unwrap();

    let server = Server::start(&settings).await.unwrap();
    let (few, many) = (offer(1), offer(1_000_000));
    sell(server.addr, &few, 1).await;
    sell(server.addr, &many, 1_000_000).await;
    assert_eq!(ask(server.addr, &few, "first", 1).await.count(RESERVED), 1);
    let refusal = per_call(server.addr, &few, "late", SOLD_OUT).await - nothing;
    let win = per_call(server.addr, &many, "wins", RESERVED).await - nothing;
    server.stop().await;

    println!(
        "allocations: noop with its client {nothing:.1}, a refusal {refusal:.1} more, a win {win:.1}"
    );
    assert!(refusal < REFUSAL, "{refusal} allocations of a refusal above the noop's {nothing}");
    assert!(win < WIN, "{win} allocations of a win above the noop's {nothing}");
}
