//! What others do in place of this: the same proto, port, layers, codec and limits, the same stores,
//! and another algorithm behind Reserve.
//!
//! Each is written as well as its idea allows: pools that are warm, scripts by their hash, an index
//! that holds a buyer to one order. None of them checks its input, which they need not for the
//! requests of the bench.

use std::{net::SocketAddr, time::Duration};

use tonic::Status;

pub mod distributed_lock;
pub mod naive_lua;
pub mod row_lock;
pub mod stock;
pub mod tables;

use super::{
    Error,
    only_reserve::{self, Reserve},
};
use tokio::runtime::Handle;

use crate::{
    api::pb::{self, ReservationState, ReserveOutcome},
    config::Settings,
    database::Database,
    domain::OfferKey,
    server::{redis_settings, sql_settings},
};
use distributed_lock::DistributedLock;
use naive_lua::NaiveLua;
use row_lock::RowLock;
use stock::Stock;

/// Connections to each of the stores.
const CONNECTIONS: u32 = 16;

/// Which algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    RowLock,
    DistributedLock,
    /// The same, but a caller who does not get the lock at once is sent away.
    DistributedLockFailFast,
    NaiveLua,
}

/// How long a caller waits for the lock.
const LOCK_WAIT: Duration = Duration::from_millis(200);

impl Kind {
    pub const ALL: [Self; 4] =
        [Self::RowLock, Self::DistributedLock, Self::DistributedLockFailFast, Self::NaiveLua];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RowLock => "row-lock",
            Self::DistributedLock => "distributed-lock",
            Self::DistributedLockFailFast => "distributed-lock-fail-fast",
            Self::NaiveLua => "naive-lua",
        }
    }

    #[must_use]
    pub fn needs_redis(self) -> bool {
        match self {
            Self::RowLock => false,
            Self::DistributedLock | Self::DistributedLockFailFast | Self::NaiveLua => true,
        }
    }
}

/// Serves one offer, which is in the stores already, until `stop`; `ready` hears of the address.
///
/// # Errors
/// A store does not answer, or the address can't be listened on.
pub async fn serve(
    settings: &Settings,
    kind: Kind,
    offer: OfferKey,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let mut sql = sql_settings(&settings.database);
    sql.max_connections = CONNECTIONS;
    let database = Database::open(&sql).await.map_err(|error| away(&error))?;
    let wait = match kind {
        Kind::RowLock => {
            let peer = RowLock { database, offer };
            return only_reserve::serve(settings, peer, Some(Handle::current()), ready, stop).await;
        }
        Kind::NaiveLua => {
            let stock = open_stock(settings, &offer, CONNECTIONS).await?;
            let peer = NaiveLua { database, stock, offer };
            return only_reserve::serve(settings, peer, Some(Handle::current()), ready, stop).await;
        }
        Kind::DistributedLock => LOCK_WAIT,
        Kind::DistributedLockFailFast => Duration::ZERO,
    };
    let connections = CONNECTIONS + distributed_lock::CONSUMERS;
    let stock = open_stock(settings, &offer, connections).await?;
    let consumers = distributed_lock::Consumers::start(&stock, &database, &offer).await?;
    let peer = DistributedLock { stock, wait };
    only_reserve::serve(settings, peer, Some(Handle::current()), ready, stop).await?;
    consumers.stop().await;
    Ok(())
}

async fn open_stock(
    settings: &Settings,
    offer: &OfferKey,
    connections: u32,
) -> Result<Stock, Error> {
    let redis = redis_settings(&settings.engine)
        .ok_or_else(|| Error::Usage("this peer needs a Redis: name one by --engine-url".into()))?;
    Stock::open(&redis.url, offer, connections).await
}

fn away(error: &dyn std::fmt::Display) -> Error {
    Error::Unavailable(error.to_string())
}

/// A call that broke on a store: nobody knows what it came to.
fn broken(error: &dyn std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

/// An answer that holds nothing.
fn refused(outcome: ReserveOutcome) -> pb::ReserveResponse {
    pb::ReserveResponse {
        outcome: outcome.into(),
        reservation: None,
        existing_reservation: None,
        remaining: None,
        replayed: false,
    }
}

/// The answer to a winner.
fn reserved(request: &pb::ReserveRequest, order_no: String, remaining: i64) -> pb::ReserveResponse {
    let reservation = pb::Reservation {
        reservation_id: order_no.clone(),
        activity_id: request.activity_id.clone(),
        sku_id: request.sku_id.clone(),
        user_id: request.user_id.clone(),
        quantity: 1,
        order_no,
        state: ReservationState::Queued.into(),
        ..pb::Reservation::default()
    };
    pb::ReserveResponse {
        outcome: ReserveOutcome::Reserved.into(),
        reservation: Some(reservation),
        existing_reservation: None,
        remaining: Some(remaining),
        replayed: false,
    }
}
