//! One circuit per store: open while the store is away, so that calls are refused at once.
//!
//! Whoever sees the store fail trips it; the one probe in `server` closes it again.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

/// Whether a store is there.
#[derive(Debug)]
pub struct Circuit {
    store: &'static str,
    open: AtomicBool,
    why: Mutex<String>,
    /// Told when the circuit opens, so that the probe does not wait for its next turn.
    pub tripped: Notify,
    opened: Notify,
}

impl Circuit {
    /// A closed circuit in front of `store`.
    #[must_use]
    pub fn new(store: &'static str) -> Self {
        Self {
            store,
            open: AtomicBool::new(false),
            why: Mutex::default(),
            tripped: Notify::new(),
            opened: Notify::new(),
        }
    }

    /// Whether calls are to be refused.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// The store failed: refuse calls until a probe succeeds.
    pub fn trip(&self, why: &str) {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why.to_owned();
        if !self.open.swap(true, Ordering::AcqRel) {
            tracing::error!(store = self.store, why, "refusing calls: the store is away");
            self.tripped.notify_one();
            self.opened.notify_waiters();
        }
    }

    /// Waits until the store is away, and has been for this long.
    pub async fn stays_open(&self, span: Duration) {
        loop {
            let opened = self.opened.notified();
            if !self.is_open() {
                opened.await;
            }
            tokio::time::sleep(span).await;
            if self.is_open() {
                return;
            }
        }
    }

    /// A probe succeeded.
    pub fn close(&self) {
        if self.open.swap(false, Ordering::AcqRel) {
            tracing::info!(store = self.store, "serving again: the store is back");
        }
    }

    /// What the store answered last when it failed.
    pub fn why(&self) -> String {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
