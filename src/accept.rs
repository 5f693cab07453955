//! Accepting connections, also while the process has no descriptor left for them.
//!
//! **Promise:** an accept that fails is waited out. It does not end the port, takes no processor,
//! and does not fill the log.

use std::time::Duration;

use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};

/// How long to wait after a failed accept, such as without a free descriptor.
const PAUSE: Duration = Duration::from_millis(50);
/// How often a port says that it does not accept, at most.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// A port that is listened on.
#[derive(Debug)]
pub(crate) struct Port {
    listener: TcpListener,
    name: &'static str,
    told: Option<Instant>,
}

impl Port {
    /// A port that the log calls by this name.
    pub(crate) fn new(listener: TcpListener, name: &'static str) -> Self {
        Self { listener, name, told: None }
    }

    /// The next connection, however long it takes.
    pub(crate) async fn accept(&mut self) -> TcpStream {
        loop {
            match self.listener.accept().await {
                Ok((socket, _)) => return socket,
                Err(error) => {
                    if self.told.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
                        self.told = Some(Instant::now());
                        tracing::warn!(port = self.name, %error, "connections are not accepted");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}
