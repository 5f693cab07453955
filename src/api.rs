//! The gRPC edge: bytes to domain types, domain types to bytes, errors to statuses.
//!
//! A handler parses, acts and answers; it decides nothing about a sale. The modules, in the order
//! of a call:
//!
//! - [`address`]: where a call comes from.
//! - [`stack`]: what every call passes before it reaches a service: deadlines, panics, and the
//!   statuses that tonic makes by itself.
//! - [`access`]: who may call what.
//! - [`web`]: the way in for browsers, on the HTTP port; it leads to the same stack.
//! - [`seckill`] and [`admin`]: the handlers; `reserve_stream` is one of them.
//! - [`convert`]: all validation, with every limit that the proto files name.
//! - [`status`]: the one place where an [`Error`] becomes a status.
//!
//! **Invariant:** the work of a call runs in [`Services::tasks`], on the runtime of the stores. tonic drops a handler when its
//! caller leaves or its time is up; what was begun in a store is finished all the same (I9).

pub mod access;
pub mod address;
pub mod admin;
pub mod codec;
pub mod convert;
mod reserve_stream;
pub mod seckill;
pub mod stack;
pub mod status;
pub mod web;

/// The messages and services of `proto/seckill/v1`, generated.
#[allow(
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::wildcard_enum_match_arm,
    reason = "generated code keeps its own style"
)]
pub mod pb {
    tonic::include_proto!("seckill.v1");
}

use std::{sync::Arc, time::Duration};

use tokio::runtime::Handle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic_reflection::server::{Builder, v1, v1alpha};
use tracing::Instrument as _;

use crate::{
    activities::Activities, error::Error, outbox::dead_letters::DeadLetters, reconcile::Reconciler,
    reservations::Reservations, stock_feed::StockFeed,
};

/// The contract and all that it imports, as a serialised `google.protobuf.FileDescriptorSet`.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/seckill.v1.bin"));

/// What the handlers of both services work with.
#[derive(Debug, Clone)]
pub struct Services {
    pub reservations: Arc<Reservations>,
    pub activities: Arc<Activities>,
    pub reconciler: Arc<Reconciler>,
    pub dead_letters: Arc<DeadLetters>,
    pub feed: Arc<StockFeed>,
    /// The work of calls; wait for it before the stores are closed.
    pub tasks: TaskTracker,
    /// Where it runs, beside the stores.
    pub stores: Handle,
    /// Once cancelled, new calls are refused and streams end.
    pub shutdown: CancellationToken,
    /// How long a WatchStock stream may live, ±10 %, so that connections can end.
    pub max_stream_age: Duration,
}

impl Services {
    /// Runs `work` to its end, also when the caller does not wait for it.
    ///
    /// # Errors
    /// What `work` answers; `ShuttingDown` instead of starting it; `Internal` when it panics.
    async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        run(&self.tasks, &self.stores, &self.shutdown, work).await
    }
}

async fn run<T: Send + 'static>(
    tasks: &TaskTracker,
    stores: &Handle,
    shutdown: &CancellationToken,
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    if shutdown.is_cancelled() {
        return Err(Error::ShuttingDown);
    }
    let work = tasks.spawn_on(work.in_current_span(), stores);
    work.await.unwrap_or_else(|panicked| Err(Error::Internal(Box::new(panicked))))
}

/// The reflection services of both versions; older tools know only `v1alpha`.
#[must_use]
pub fn reflection() -> (
    v1::ServerReflectionServer<impl v1::ServerReflection>,
    v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>,
) {
    let builder = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let built = "both sets come from a compiler";
    (builder().build_v1().expect(built), builder().build_v1alpha().expect(built))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[tokio::test]
    async fn work_is_finished_when_its_caller_has_left() {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let stores = Handle::current();
        let finished = Arc::new(AtomicBool::new(false));
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (go, may_go) = tokio::sync::oneshot::channel::<()>();
        let seen = finished.clone();
        let call = run(&tasks, &stores, &shutdown, async move {
            begun.send(()).unwrap();
            may_go.await.unwrap();
            seen.store(true, Ordering::SeqCst);
            Ok(())
        });
        tokio::select! {
            biased;
            _ = call => panic!("the work waits for us"),
            begun = has_begun => begun.unwrap(),
        }
        go.send(()).unwrap();
        tasks.close();
        tasks.wait().await;
        assert!(finished.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_an_internal_error() {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let stores = Handle::current();
        let result = run::<()>(&tasks, &stores, &shutdown, async { panic!("secret") }).await;
        assert!(matches!(result, Err(Error::Internal(_))), "{result:?}");
    }

    #[tokio::test]
    async fn nothing_is_begun_after_the_shutdown() {
        let (tasks, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let stores = Handle::current();
        shutdown.cancel();
        let begun = Arc::new(AtomicBool::new(false));
        let seen = begun.clone();
        let work = async move {
            seen.store(true, Ordering::SeqCst);
            Ok(())
        };
        let result = run(&tasks, &stores, &shutdown, work).await;
        assert!(matches!(result, Err(Error::ShuttingDown)), "{result:?}");
        tasks.close();
        tasks.wait().await;
        assert!(!begun.load(Ordering::SeqCst));
    }
}
