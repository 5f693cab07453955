//! Sentinels tell of a failover when it is done, so that nobody has to run into the old master first.
//!
//! Nothing depends on it: who is master is asked every second as well. What a Sentinel tells is only a
//! reason to ask all of them, since one alone may be cut off from the others.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{
    dialer::Dialer,
    hearing::{FIRST_PAUSE, LONGEST_PAUSE, Line},
    router::Router,
    target::Kind,
};

/// The channel of Sentinels: `name old-host old-port new-host new-port`.
const CHANNEL: &str = "+switch-master";

/// Listens to every Sentinel, for as long as what is returned lives.
pub(super) fn follow(router: &Arc<Router>) -> JoinSet<()> {
    let mut listeners = JoinSet::new();
    if let Kind::Sentinel(master) = &router.target.kind {
        for dialer in router.dialers_to_sentinels() {
            listeners.spawn(listen(router.clone(), dialer, master.clone()));
        }
    }
    listeners
}

async fn listen(router: Arc<Router>, sentinel: Dialer, master: String) {
    let (mut pause, mut told) = (FIRST_PAUSE, false);
    loop {
        match Line::open(&sentinel, CHANNEL).await {
            Ok(mut line) => {
                (pause, told) = (FIRST_PAUSE, false);
                while let Some(message) = line.message().await {
                    if names(&message, &master) {
                        look(&router).await;
                    }
                }
            }
            // It may be away for long; that it may not be listened to is for somebody to mend.
            Err(cause) if cause.contains("NOPERM") && !told => {
                told = true;
                let sentinel = &sentinel.host;
                tracing::warn!(%sentinel, cause, "a failover is noticed only when it is asked for");
            }
            Err(cause) => {
                tracing::debug!(sentinel = %sentinel.host, cause, "it can't be listened to");
            }
        }
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether the message is about this master.
fn names(message: &[u8], master: &str) -> bool {
    message.split(|byte| *byte == b' ').next() == Some(master.as_bytes())
}

async fn look(router: &Router) {
    match router.look().await {
        Ok(()) => router.stir.notify_one(),
        Err(why) => tracing::debug!(why, "a failover was told, and no Sentinel can be believed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_told_of_this_master_counts() {
        assert!(names(b"shop 10.0.0.1 6379 10.0.0.2 6379", "shop"));
        assert!(!names(b"shoppers 10.0.0.1 6379 10.0.0.2 6379", "shop"));
        assert!(!names(b"", "shop"));
    }
}
