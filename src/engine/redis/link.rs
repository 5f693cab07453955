//! One connection, and the identity of the server behind it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use ::redis::{Cmd, ServerError, Value, aio::MultiplexedConnection};
use arc_swap::ArcSwap;

use super::info::Info;

/// A connection that let so many calls in a row wait too long is given up.
const MAX_TIMEOUTS: u32 = 3;

pub(super) struct Link {
    connection: MultiplexedConnection,
    /// `run_id/replid`: a restart changes the first, a promotion the second.
    pub(super) server: ArcSwap<String>,
    broken: Arc<AtomicBool>,
    timeouts: AtomicU32,
}

/// Why a request has no reply.
pub(super) enum Failure {
    /// It was sent, or may have been.
    Lost(String),
    Server(ServerError),
}

impl Link {
    pub(super) fn new(
        connection: MultiplexedConnection,
        server: String,
        broken: Arc<AtomicBool>,
    ) -> Self {
        let server = ArcSwap::from_pointee(server);
        Self { connection, server, broken, timeouts: AtomicU32::new(0) }
    }

    pub(super) async fn request(&self, command: &Cmd) -> Result<Value, Failure> {
        self.note(self.connection.clone().send_packed_command(command).await)
    }

    /// The same for keys of a slot that moves to this server. Both commands are written together,
    /// so no other call comes between them.
    pub(super) async fn request_asking(&self, command: Cmd) -> Result<Value, Failure> {
        let mut pipe = ::redis::pipe();
        pipe.cmd("ASKING").add_command(command);
        let replies = self.connection.clone().send_packed_commands(&pipe, 1, 1).await;
        self.note(replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil)))
    }

    fn note(&self, reply: ::redis::RedisResult<Value>) -> Result<Value, Failure> {
        match reply {
            Ok(Value::ServerError(error)) => {
                self.timeouts.store(0, Ordering::Relaxed);
                Err(Failure::Server(error))
            }
            Ok(reply) => {
                self.timeouts.store(0, Ordering::Relaxed);
                Ok(reply)
            }
            Err(error) => {
                let late = error.is_timeout();
                if !late || self.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_TIMEOUTS {
                    self.give_up();
                }
                match late {
                    true => Err(Failure::Lost("no answer in time".to_owned())),
                    false => Err(Failure::Lost(error.to_string())),
                }
            }
        }
    }

    /// The connection itself, for what is no script.
    pub(super) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    /// No new call goes to this connection; those under way may still be answered.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Asks who the server is; a replica gives the connection up.
    pub(super) async fn read_identity(&self) -> Result<String, String> {
        let found = Info::ask(&mut self.connection.clone()).await;
        let found = found.map_err(|error| error.to_string()).and_then(|info| info.identity());
        if found.is_err() {
            self.give_up();
        }
        found
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("server", &self.server.load())
            .field("broken", &self.is_broken())
            .finish_non_exhaustive()
    }
}
