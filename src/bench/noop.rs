//! What a call costs that does nothing: the same port, layers, codec and limits, and a service that
//! answers Reserve with a constant.
//!
//! Everything that a real refusal costs above this is ours; everything else is that of tonic, hyper
//! and h2 on this machine.

use std::{future, net::SocketAddr};

use tonic::Status;

use super::{
    Error,
    only_reserve::{self, Reserve},
};
use crate::{
    api::pb::{self, ReserveOutcome},
    config::Settings,
};

/// The service that answers at once.
#[derive(Debug, Clone, Copy)]
struct Noop;

/// Serves until `stop`; `ready` hears of the address.
///
/// # Errors
/// The address can't be listened on, or the port ended.
pub async fn serve(
    settings: &Settings,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    only_reserve::serve(settings, Noop, None, ready, stop).await
}

impl Reserve for Noop {
    fn reserve(
        &self,
        _: pb::ReserveRequest,
    ) -> impl Future<Output = Result<pb::ReserveResponse, Status>> + Send {
        future::ready(Ok(pb::ReserveResponse {
            outcome: ReserveOutcome::SoldOut.into(),
            reservation: None,
            existing_reservation: None,
            remaining: Some(0),
            replayed: false,
        }))
    }
}
