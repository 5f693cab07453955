//! A wire to a store that a scenario cuts, holds, slows down, garbles, or cuts at a COMMIT.

use std::{
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinSet,
};

/// What the wire does with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Connections end, and new ones are refused.
    Cut,
    /// Bytes vanish and sockets stay, as behind a firewall that forgot the connection. Those who
    /// were connected, or connect meanwhile, never hear anything again.
    Hole,
    /// Every piece waits.
    Slow(Duration),
}

/// What happens to a connection that sends COMMIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtCommit {
    /// The connection ends before the database hears of it.
    LoseRequest,
    /// The database commits, and the connection ends before the answer.
    LoseReply,
    /// The database commits, and this one connection falls silent.
    SwallowReply,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToStore,
    FromStore,
}

/// Bytes that change on their way.
#[derive(Debug, Default)]
struct Noise {
    rng: fastrand::Rng,
    /// On average one byte of so many, each way; `None` for no more than those in `next`.
    one_in: Option<u64>,
    /// How many bytes still pass unharmed before the next one that changes, to the store and back.
    next: [Option<u64>; 2],
}

/// Passes bytes on to a store; its address stays the same.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) addr: SocketAddr,
    state: Arc<State>,
    _connections: JoinSet<()>,
}

#[derive(Debug)]
struct State {
    store: watch::Sender<SocketAddr>,
    mode: watch::Sender<Mode>,
    /// Counts up whenever all connections are to end.
    ends: watch::Sender<u64>,
    /// Counts COMMITs down to the one that the trap is for.
    trap: AtomicI64,
    trap_kind: Mutex<AtCommit>,
    trapped: AtomicU64,
    refused: AtomicU64,
    noise: Mutex<Noise>,
    garbled: AtomicU64,
}

impl Wire {
    pub(crate) async fn to(store: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State {
            store: watch::Sender::new(store),
            mode: watch::Sender::new(Mode::Pass),
            ends: watch::Sender::new(0),
            trap: AtomicI64::new(i64::MAX),
            trap_kind: Mutex::new(AtCommit::LoseRequest),
            trapped: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            noise: Mutex::default(),
            garbled: AtomicU64::new(0),
        });
        let mut connections = JoinSet::new();
        connections.spawn(accept(listener, state.clone()));
        Self { addr, state, _connections: connections }
    }

    pub(crate) fn cut(&self) {
        self.state.mode.send_replace(Mode::Cut);
        self.drop_connections();
    }

    /// Ends every connection; new ones are let in.
    pub(crate) fn drop_connections(&self) {
        self.state.ends.send_modify(|ends| *ends += 1);
    }

    pub(crate) fn open_hole(&self) {
        self.state.mode.send_replace(Mode::Hole);
    }

    pub(crate) fn slow(&self, delay: Duration) {
        self.state.mode.send_replace(Mode::Slow(delay));
    }

    /// From now on one byte of so many changes, on average, both ways.
    pub(crate) fn garble(&self, one_in: u64, seed: u64) {
        let mut noise = self.state.noise.lock().unwrap();
        *noise =
            Noise { rng: fastrand::Rng::with_seed(seed), one_in: Some(one_in), next: [None; 2] };
        noise.next = [Way::ToStore, Way::FromStore].map(|_| noise.pause());
    }

    /// One byte changes, when so many more went this way.
    pub(crate) fn garble_once(&self, way: Way, after: u64, seed: u64) {
        let mut noise = self.state.noise.lock().unwrap();
        *noise = Noise { rng: fastrand::Rng::with_seed(seed), ..Noise::default() };
        noise.next[way as usize] = Some(after);
    }

    /// How many bytes were changed.
    pub(crate) fn garbled(&self) -> u64 {
        self.state.garbled.load(Ordering::SeqCst)
    }

    /// Whoever connects from now on reaches the store, and no byte changes any more.
    pub(crate) fn mend(&self) {
        *self.state.noise.lock().unwrap() = Noise::default();
        self.state.mode.send_replace(Mode::Pass);
    }

    /// Leads to another store from now on, as an address that moved in a failover.
    pub(crate) fn lead_to(&self, store: SocketAddr) {
        self.state.store.send_replace(store);
        self.drop_connections();
    }

    /// The n-th COMMIT from now on, over all connections, meets this.
    pub(crate) fn trap(&self, at_commit: AtCommit, nth: i64) {
        *self.state.trap_kind.lock().unwrap() = at_commit;
        self.state.trap.store(nth, Ordering::SeqCst);
    }

    /// How many connections met a trap.
    pub(crate) fn trapped(&self) -> u64 {
        self.state.trapped.load(Ordering::SeqCst)
    }

    /// How many connections came while it was cut.
    pub(crate) fn refused(&self) -> u64 {
        self.state.refused.load(Ordering::SeqCst)
    }
}

impl State {
    fn meets_trap(&self, bytes: &[u8]) -> Option<AtCommit> {
        let commits = bytes.windows(6).filter(|word| *word == b"COMMIT").count();
        if commits == 0 || self.trap.load(Ordering::SeqCst) == i64::MAX {
            return None;
        }
        let before = self.trap.fetch_sub(1, Ordering::SeqCst);
        if before != 1 {
            return None;
        }
        self.trap.store(i64::MAX, Ordering::SeqCst);
        self.trapped.fetch_add(1, Ordering::SeqCst);
        Some(*self.trap_kind.lock().unwrap())
    }
}

impl Noise {
    fn pause(&mut self) -> Option<u64> {
        self.one_in.map(|one_in| self.rng.u64(0..2 * one_in))
    }

    /// Changes what is due; answers how many bytes.
    fn disturb(&mut self, way: Way, bytes: &mut [u8]) -> u64 {
        let (mut changed, mut from) = (0, 0);
        while let Some(after) = self.next[way as usize] {
            let left = bytes.len() - from;
            let Some(at) = usize::try_from(after).ok().filter(|after| *after < left) else {
                self.next[way as usize] = Some(after - left as u64);
                break;
            };
            bytes[from + at] ^= self.rng.u8(1..);
            changed += 1;
            from += at + 1;
            self.next[way as usize] = self.pause();
        }
        changed
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((from, _)) = listener.accept().await else {
            // Out of descriptors; others give theirs back.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        connections.spawn(carry(from, state.clone()));
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(from: TcpStream, state: Arc<State>) {
    let (mut mode, mut ends) = (state.mode.subscribe(), state.ends.subscribe());
    ends.mark_unchanged();
    let now = *mode.borrow_and_update();
    let ended = async move { drop(ends.changed().await) };
    let mut ended = pin!(ended);
    match now {
        Mode::Cut => {
            state.refused.fetch_add(1, Ordering::SeqCst);
            return;
        }
        // Accepted, and never served.
        Mode::Hole => return ended.await,
        Mode::Pass | Mode::Slow(_) => {}
    }
    let store = *state.store.borrow();
    let Ok(to) = TcpStream::connect(store).await else { return };
    // Small messages must not wait for each other.
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let (from_read, from_write) = from.into_split();
    let (to_read, to_write) = to.into_split();
    let mut hole = pin!(async move { drop(mode.wait_for(|mode| *mode == Mode::Hole).await) });
    let trapped = AtomicBool::new(false);
    let mut there = pin!(pump(from_read, to_write, &state, &trapped, Way::ToStore));
    let mut back = pin!(pump(to_read, from_write, &state, &trapped, Way::FromStore));
    tokio::select! {
        biased;
        () = &mut ended => {}
        // The sockets live on in the two pumps, which nobody polls any more.
        () = &mut hole => ended.await,
        () = &mut there => {}
        () = &mut back => {}
    }
}

/// Carries bytes one way until the connection ends.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    state: &State,
    trapped: &AtomicBool,
    way: Way,
) {
    let is_request = way == Way::ToStore;
    let mut buffer = vec![0; 64 * 1_024];
    loop {
        let Ok(read) = from.read(&mut buffer).await else { return };
        if read == 0 {
            return;
        }
        let mode = *state.mode.borrow();
        if let Mode::Slow(delay) = mode {
            tokio::time::sleep(delay).await;
        }
        if !is_request && trapped.load(Ordering::SeqCst) {
            // The database has committed and says so.
            let kind = *state.trap_kind.lock().unwrap();
            match kind {
                AtCommit::SwallowReply => std::future::pending().await,
                AtCommit::LoseReply | AtCommit::LoseRequest => return,
            }
        }
        if is_request && let Some(kind) = state.meets_trap(&buffer[..read]) {
            if kind == AtCommit::LoseRequest {
                return;
            }
            trapped.store(true, Ordering::SeqCst);
        }
        let changed = state.noise.lock().unwrap().disturb(way, &mut buffer[..read]);
        state.garbled.fetch_add(changed, Ordering::SeqCst);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
