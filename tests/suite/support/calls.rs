//! Calls over gRPC as an order service makes them.

use std::{collections::BTreeSet, time::Duration};

use seckill::{
    api::pb::{
        self, ReleaseOutcome, ReserveOutcome, seckill_admin_client::SeckillAdminClient,
        seckill_client::SeckillClient,
    },
    domain::OfferKey,
};
use tokio::time::Instant;
use tonic::{Code, Request, Status, transport::Channel};
use tonic_types::StatusExt as _;

use super::{eventually, world::Ground};

/// How long a caller repeats what was not decided.
const PATIENCE: Duration = Duration::from_secs(20);

/// A unit that a buyer holds, as far as the buyer was told.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Win {
    pub(crate) buyer: String,
    pub(crate) reservation_id: String,
    pub(crate) order_no: String,
}

/// An order service that sells one offer.
#[derive(Debug, Clone)]
pub(crate) struct Shop {
    pub(crate) key: OfferKey,
    pub(crate) client: SeckillClient<Channel>,
}

impl Shop {
    pub(crate) fn new(key: &OfferKey, channel: Channel) -> Self {
        Self { key: key.clone(), client: SeckillClient::new(channel) }
    }

    /// One attempt, with a deadline.
    pub(crate) async fn reserve(
        &self,
        buyer: &str,
        request_id: &str,
    ) -> Result<pb::ReserveResponse, Status> {
        let mut request = Request::new(pb::ReserveRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: buyer.to_owned(),
            quantity: None,
            request_id: request_id.to_owned(),
        });
        request.set_timeout(Duration::from_secs(10));
        self.client.clone().reserve(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn release(&self, win: &Win) -> Result<ReleaseOutcome, Status> {
        let mut request = Request::new(pb::ReleaseRequest {
            activity_id: self.key.activity_id.to_string(),
            sku_id: self.key.sku_id.to_string(),
            user_id: win.buyer.clone(),
            reservation_id: win.reservation_id.clone(),
            reason: "test".to_owned(),
        });
        request.set_timeout(Duration::from_secs(10));
        self.client.clone().release(request).await.map(|answer| answer.into_inner().outcome())
    }

    /// Repeats an attempt until it is decided.
    pub(crate) async fn insist(&self, buyer: &str, request_id: &str) -> pb::ReserveResponse {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.reserve(buyer, request_id).await {
                Ok(answer) => return answer,
                Err(status) => wait_to_repeat(&status, deadline).await,
            }
        }
    }

    /// Repeats a release until it is decided.
    pub(crate) async fn insist_on_release(&self, win: &Win) -> ReleaseOutcome {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.release(win).await {
                Ok(outcome) => return outcome,
                Err(status) => wait_to_repeat(&status, deadline).await,
            }
        }
    }
}

async fn wait_to_repeat(status: &Status, deadline: Instant) {
    assert!(may_pass(status), "{status:?}");
    assert!(Instant::now() < deadline, "still not decided: {status:?}");
    let pause = status.get_details_retry_info().and_then(|info| info.retry_delay);
    // Who is told to wait a long time may come back a little earlier.
    let pause = pause.unwrap_or_default().min(Duration::from_millis(50));
    tokio::time::sleep(pause.max(Duration::from_millis(5))).await;
}

/// Whether a repeat may be decided.
pub(crate) fn may_pass(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled
    ) || lost_connection(status)
}

/// Whether the connection ended before the answer came.
pub(crate) fn lost_connection(status: &Status) -> bool {
    status.get_details_error_info().is_none() && status.code() != Code::InvalidArgument
}

/// The reservation of an answer that says RESERVED.
pub(crate) fn win(answer: &pb::ReserveResponse) -> Option<Win> {
    if answer.outcome() != ReserveOutcome::Reserved {
        assert_eq!(answer.reservation, None, "a refusal holds nothing: {answer:?}");
        return None;
    }
    let reservation = answer.reservation.as_ref().expect("RESERVED comes with its reservation");
    Some(Win {
        buyer: reservation.user_id.clone(),
        reservation_id: reservation.reservation_id.clone(),
        order_no: reservation.order_no.clone(),
    })
}

/// Waits until the server itself has settled and ordered everything.
pub(crate) async fn drained(channel: Channel, key: &OfferKey) -> pb::GetPipelineStatusResponse {
    let client = SeckillAdminClient::new(channel);
    eventually("the pipeline is empty", async || {
        let activity_id = Some(key.activity_id.to_string());
        let request = pb::GetPipelineStatusRequest { activity_id };
        let status = client.clone().get_pipeline_status(request).await.ok()?.into_inner();
        let left = [status.unacked, status.outbox_pending, status.outbox_releasing];
        (left == [Some(0); 3]).then_some(status)
    })
    .await
}

/// The books, read by another server's parts that settle nothing: they balance as they are, and
/// the units that are held are those of these buyers.
pub(crate) async fn assert_books(ground: &Ground<'_>, key: &OfferKey, wins: &[Win]) {
    let world = ground.world().await;
    let books = world.read_books(key).await.unwrap();
    assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
    assert_eq!((books.oversold(), books.missing()), (0, 0), "{books:?}");
    let told: BTreeSet<&Win> = wins.iter().collect();
    assert_eq!(told.len(), wins.len(), "a reservation was told to two buyers");
    let held = i64::try_from(wins.len()).unwrap();
    assert_eq!(books.orders_units, held, "{books:?}");
    let orders = world.live_orders(key).await;
    for win in wins {
        assert_eq!(orders.get(&win.reservation_id), Some(&win.order_no), "{win:?}");
    }
    world.close().await;
}
