//! A wire to a store that a test can cut.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

/// Passes bytes on to a store until it is cut; its address stays the same.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) addr: SocketAddr,
    whole: Arc<watch::Sender<bool>>,
    _connections: JoinSet<()>,
}

impl Proxy {
    pub(crate) async fn to(store: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let whole = Arc::new(watch::Sender::new(true));
        let mut connections = JoinSet::new();
        connections.spawn(accept(listener, store, whole.subscribe()));
        Self { addr, whole, _connections: connections }
    }

    /// Closes every connection and refuses new ones, until it is mended.
    pub(crate) fn cut(&self) {
        self.whole.send_replace(false);
    }

    pub(crate) fn mend(&self) {
        self.whole.send_replace(true);
    }
}

async fn accept(listener: TcpListener, store: SocketAddr, whole: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((mut from, _)) = listener.accept().await else {
            // Out of descriptors; others give theirs back.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let mut whole = whole.clone();
        connections.spawn(async move {
            if !*whole.borrow() {
                return;
            }
            let Ok(mut to) = TcpStream::connect(store).await else { return };
            // Small messages must not wait for each other.
            let _ = (from.set_nodelay(true), to.set_nodelay(true));
            tokio::select! {
                _ = copy_bidirectional(&mut from, &mut to) => {}
                _ = whole.wait_for(|whole| !whole) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}
