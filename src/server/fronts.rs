//! The threads that speak gRPC.
//!
//! Each has a runtime of one thread and its share of the connections, so a call that is refused from
//! memory never leaves its core: no task is stolen, no other thread is woken. All that touches a
//! store runs on the runtime that started the server. A rush fills these threads with refusals, and
//! the outbox, releases and probes still get their turn, from the system's scheduler.
//!
//! One accept loop deals connections out, each to the thread that has the fewest: with SO_REUSEPORT
//! the kernel would deal by hash, and a gateway has few connections.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    net::TcpListener,
    runtime,
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;
use tower::layer::util::{Identity, Stack};

use super::{
    listener::{self, Accepted, Door},
    tls::Tls,
};
use crate::{admission::room::Room, api::stack, config::Settings, metrics, stock_feed::Turns};

/// How often a thread looks how late it is.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// At how many different ages the connections of a thread go: those that came together, as they do
/// after a restart, are not to leave together.
const AGES: usize = 8;

/// The gRPC port, with its services, for connections of one age.
pub(crate) type Grpc = Router<Stack<stack::Layers, Identity>>;

/// The threads, and the loop that gives them connections.
#[derive(Debug)]
pub(crate) struct Fronts {
    /// Ends when the last connection is gone.
    serving: JoinHandle<()>,
    stop: CancellationToken,
    abort: CancellationToken,
}

/// One thread.
#[derive(Debug)]
struct Front {
    /// One for each age.
    ways: Vec<mpsc::UnboundedSender<Accepted>>,
    connections: Arc<AtomicUsize>,
    ended: oneshot::Receiver<()>,
}

impl Fronts {
    /// Serves what `grpc` makes, several times for each thread. `room` hears how late each of them
    /// is, and streams take `turns` on them.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(
        settings: &Settings,
        listener: TcpListener,
        tls: Option<&Arc<Tls>>,
        room: Option<&Arc<Room>>,
        turns: &Arc<Turns>,
        grpc: impl Fn() -> Grpc,
    ) -> io::Result<Self> {
        let (stop, abort) = (CancellationToken::new(), CancellationToken::new());
        let threads = match settings.grpc.threads {
            0 => thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let mut fronts = Vec::with_capacity(threads);
        for nth in 0..threads {
            let (ways, doors): (Vec<_>, Vec<_>) = (0..AGES)
                .map(|_| {
                    let (way, door) = Door::new(&settings.grpc, tls.cloned());
                    (way, (grpc(), door))
                })
                .unzip();
            let told = (room.cloned(), turns.clone());
            let ended = serve(nth, doors, told, stop.clone(), abort.clone())?;
            fronts.push(Front { ways, connections: Arc::default(), ended });
        }
        let (denied, most) = (settings.limits.denied.clone(), settings.grpc.max_connections);
        let stopped = stop.clone();
        #[allow(clippy::disallowed_methods, reason = "`ended` waits for it")]
        let serving = tokio::spawn(async move {
            let accepting = listener::accept_all(listener, denied, most, |new| deal(&fronts, new));
            stopped.run_until_cancelled(accepting).await;
            join_all(fronts.into_iter().map(|front| front.ended)).await;
        });
        Ok(Self { serving, stop, abort })
    }

    /// No new connections, and no new calls on those that are there.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until the last connection is gone.
    pub(crate) async fn ended(&mut self) {
        // It can only have panicked, and then nobody is served either.
        let _ = (&mut self.serving).await;
    }

    /// Ends the connections that are left, whatever they are at.
    pub(crate) async fn abort(mut self) {
        self.abort.cancel();
        self.ended().await;
    }
}

/// To the thread that has the fewest.
fn deal(fronts: &[Front], accepted: Accepted) {
    let fewest = fronts.iter().min_by_key(|front| front.connections.load(Ordering::Relaxed));
    if let Some(front) = fewest
        && let Some(way) = fastrand::choice(&front.ways)
    {
        // A thread that is gone has said why.
        let _ = way.send(accepted.counted(&front.connections));
    }
}

/// Starts a thread; it tells when it has ended.
fn serve(
    nth: usize,
    doors: Vec<(Grpc, Door)>,
    (room, turns): (Option<Arc<Room>>, Arc<Turns>),
    stop: CancellationToken,
    abort: CancellationToken,
) -> io::Result<oneshot::Receiver<()>> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    // A task, so that it has its turn behind those that were there before.
    runtime.spawn(async move { turns.keep().await });
    let (end, ended) = oneshot::channel();
    thread::Builder::new().name(format!("grpc-{nth}")).spawn(move || {
        let served = runtime.block_on(async move {
            let serving = join_all(doors.into_iter().map(|(grpc, door)| {
                let stopped = stop.clone().cancelled_owned();
                grpc.serve_with_incoming_shutdown(door.incoming(), stopped)
            }));
            tokio::select! {
                served = abort.run_until_cancelled(serving) => served,
                () = tell_lag(|lag| {
                    metrics::thread_lag(lag);
                    room.iter().for_each(|room| room.note_lag(lag));
                }) => None,
            }
        });
        for error in served.into_iter().flatten().filter_map(Result::err) {
            tracing::error!(%error, "a part of the gRPC port ended");
        }
        // With it go the connections that were not awaited.
        drop(runtime);
        let _ = end.send(());
    })?;
    Ok(ended)
}

/// Tells, again and again, how late this thread comes to what is due: everything else that it has to
/// do comes first, and whatever else the cores are busy with.
async fn tell_lag(tell: impl Fn(Duration)) {
    loop {
        let due = Instant::now() + LOOK_EVERY;
        sleep_until(due).await;
        tell(due.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "blocking a thread is what this is about")]
    fn a_thread_that_is_kept_busy_says_so() {
        let lags = Arc::new(Mutex::new(Vec::new()));
        let heard = lags.clone();
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            tokio::select! {
                () = tell_lag(|lag| heard.lock().unwrap().push(lag)) => {}
                () = async {
                    tokio::task::yield_now().await;
                    thread::sleep(Duration::from_millis(300));
                    tokio::time::sleep(Duration::from_millis(200)).await;
                } => {}
            }
        });
        let longest = lags.lock().unwrap().iter().max().copied().unwrap();
        assert!(longest >= Duration::from_millis(250), "{longest:?}");
    }
}
