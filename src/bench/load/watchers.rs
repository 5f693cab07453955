//! Many readers of WatchStock over a few connections; some of them stop reading.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use http::{Request, Version};
use prost::{
    Message as _,
    bytes::{BufMut as _, Bytes, BytesMut},
};
use tokio::{net::TcpStream, sync::oneshot, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Error, Frames, on_a_thread, thread_cpu};
use crate::{api::pb, domain::OfferKey};

/// As many as a server allows on one connection unless told otherwise.
const STREAMS_PER_CONNECTION: usize = 100;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 28;
/// What a reader who stopped is owed before the server has to hold its messages back.
const WINDOW_BYTES: u32 = 65_535;
const OPEN_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// Who watches what.
#[derive(Debug, Clone)]
pub struct Watch {
    pub addr: SocketAddr,
    pub offer: OfferKey,
    pub streams: usize,
    /// How many of them read their first message and then nothing more.
    pub stalled: usize,
}

/// What all of them have seen so far.
#[derive(Debug, Default)]
struct Tally {
    /// Streams that have their snapshot.
    open: AtomicUsize,
    messages: AtomicU64,
    failures: Mutex<Vec<String>>,
    /// The newest message of each that reads on, when it ended.
    last: Mutex<Vec<Bytes>>,
}

/// Readers who read until they are told to stop.
#[derive(Debug)]
pub struct Watchers {
    tally: Arc<Tally>,
    stop: CancellationToken,
    done: oneshot::Receiver<Result<Duration, Error>>,
    running: JoinSet<()>,
}

impl Watchers {
    /// Opens all streams and waits until each has its snapshot.
    ///
    /// # Errors
    /// One of them was refused, or they take too long.
    pub async fn open(watch: Watch) -> Result<Self, Error> {
        let (tally, stop) = (Arc::new(Tally::default()), CancellationToken::new());
        let (tell, done) = oneshot::channel();
        let mut running = JoinSet::new();
        let (streams, shared, ends) = (watch.streams, tally.clone(), stop.clone());
        running.spawn(async move {
            // Nobody waits any more when the bench was interrupted.
            let _ = tell.send(on_a_thread(move || drive(watch, shared, ends)).await);
        });
        let deadline = Instant::now() + OPEN_LIMIT;
        while tally.open.load(Ordering::Relaxed) < streams {
            let failure = tally.failures.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if let Some(failure) = failure {
                return Err(Error::Unavailable(format!("a watcher: {failure}")));
            }
            if Instant::now() > deadline {
                let open = tally.open.load(Ordering::Relaxed);
                return Err(Error::Unavailable(format!("{open} of {streams} watchers are open")));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Self { tally, stop, done, running })
    }

    /// Messages that were read so far.
    #[must_use]
    pub fn messages(&self) -> u64 {
        self.tally.messages.load(Ordering::Relaxed)
    }

    /// Ends all streams. Answers the newest message of everybody who read on, and the CPU time of
    /// all of them.
    ///
    /// # Errors
    /// A stream ended by itself.
    pub async fn close(mut self) -> Result<(Vec<pb::WatchStockResponse>, Duration), Error> {
        self.stop.cancel();
        let done = (&mut self.done).await;
        let cpu = done.unwrap_or_else(|_| Err(Error::Internal("the watchers panicked".into())))?;
        while self.running.join_next().await.is_some() {}
        let failures = std::mem::take(
            &mut *self.tally.failures.lock().unwrap_or_else(PoisonError::into_inner),
        );
        if let Some(failure) = failures.first() {
            return Err(Error::Unavailable(format!(
                "{} watchers, the first one: {failure}",
                failures.len()
            )));
        }
        let last =
            std::mem::take(&mut *self.tally.last.lock().unwrap_or_else(PoisonError::into_inner));
        let decoded: Result<Vec<_>, _> =
            last.into_iter().map(pb::WatchStockResponse::decode).collect();
        let decoded = decoded.map_err(|error| Error::Internal(format!("a message: {error}")))?;
        Ok((decoded, cpu))
    }
}

impl Drop for Watchers {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn drive(
    watch: Watch,
    tally: Arc<Tally>,
    stop: CancellationToken,
) -> Result<Duration, Error> {
    let cpu = thread_cpu();
    let reading = watch.streams - watch.stalled;
    // Those who stop have connections of their own: what nobody reads fills their window.
    let shares = [(reading, false), (watch.stalled, true)].into_iter().flat_map(|(all, stall)| {
        (0..all.div_ceil(STREAMS_PER_CONNECTION)).map(move |nth| {
            let left = all - nth * STREAMS_PER_CONNECTION;
            (left.min(STREAMS_PER_CONNECTION), stall)
        })
    });
    let connections = shares.map(|(streams, stall)| {
        let (watch, tally, stop) = (&watch, &tally, &stop);
        async move {
            if let Err(error) = connection(watch, streams, stall, tally, stop).await {
                tally.failures.lock().unwrap_or_else(PoisonError::into_inner).push(error);
            }
        }
    });
    join_all(connections).await;
    Ok(thread_cpu().saturating_sub(cpu))
}

async fn connection(
    watch: &Watch,
    streams: usize,
    stall: bool,
    tally: &Arc<Tally>,
    stop: &CancellationToken,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let socket = TcpStream::connect(watch.addr).await.map_err(|error| text(&error))?;
    socket.set_nodelay(true).map_err(|error| text(&error))?;
    let (sender, carried) = h2::client::Builder::new()
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .handshake::<_, Bytes>(socket)
        .await
        .map_err(|error| text(&error))?;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        if let Err(error) = carried.await {
            tracing::debug!(%error, "a connection of the watchers broke");
        }
    });
    let message = pb::WatchStockRequest {
        activity_id: watch.offer.activity_id.to_string(),
        sku_ids: vec![watch.offer.sku_id.to_string()],
        min_interval: None,
    };
    let mut body = BytesMut::new();
    body.put_u8(0);
    body.put_u32(u32::try_from(message.encoded_len()).expect("names are short"));
    message.encode(&mut body).expect("the buffer grows");
    let body = body.freeze();
    let mut reading = JoinSet::new();
    let mut sender = sender;
    for _ in 0..streams {
        sender = sender.ready().await.map_err(|error| text(&error))?;
        let head = Request::post(format!("http://{}/seckill.v1.Seckill/WatchStock", watch.addr))
            .version(Version::HTTP_2)
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .body(())
            .map_err(|error| text(&error))?;
        let (response, mut request) =
            sender.send_request(head, false).map_err(|error| text(&error))?;
        request.send_data(body.clone(), true).map_err(|error| text(&error))?;
        reading.spawn(read(response, stall, tally.clone(), stop.clone()));
    }
    while let Some(read) = reading.join_next().await {
        read.map_err(|error| text(&error))??;
    }
    Ok(())
}

/// Reads one stream until it is told to stop.
async fn read(
    response: h2::client::ResponseFuture,
    stall: bool,
    tally: Arc<Tally>,
    stop: CancellationToken,
) -> Result<(), String> {
    let text = |error: h2::Error| error.to_string();
    let mut body = response.await.map_err(text)?.into_body();
    let (mut frames, mut last) = (Frames::default(), None);
    loop {
        let chunk = tokio::select! {
            chunk = body.data() => chunk,
            () = stop.cancelled() => break,
        };
        let Some(chunk) = chunk else {
            return Err("the stream ended".to_owned());
        };
        let chunk = chunk.map_err(text)?;
        body.flow_control().release_capacity(chunk.len()).map_err(text)?;
        let (is_first, mut count) = (last.is_none(), 0);
        frames.push(chunk, |message| {
            count += 1;
            last = Some(message);
        });
        tally.messages.fetch_add(count, Ordering::Relaxed);
        if is_first && last.is_some() {
            tally.open.fetch_add(1, Ordering::Relaxed);
        }
        if stall && last.is_some() {
            stop.cancelled().await;
            return Ok(());
        }
    }
    if let Some(last) = last {
        tally.last.lock().unwrap_or_else(PoisonError::into_inner).push(last);
    }
    Ok(())
}
