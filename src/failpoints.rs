//! Places where a test may kill the process; nothing of this is in a release build.
//!
//! `SECKILL_FAILPOINTS=after_reserve_script=3` aborts the process when that place is reached for
//! the third time. Several are separated by commas.

/// Every failpoint, in the order of the flows. The fault suite kills a server at each of them.
pub const ALL: &[&str] = &[
    // start
    "after_stores_opened",
    "after_catalog_read",
    "before_serving",
    // warm-up
    "after_warmup_script",
    "before_warm_commit",
    "after_warm_commit",
    // reserve
    "after_reserve_script",
    "before_outbox_commit",
    "after_outbox_commit",
    "before_judged_commit",
    "after_judged_commit",
    "before_acknowledge_script",
    "after_acknowledge_script",
    // poller
    "after_orders_inserted",
    "before_order_commit",
    "after_order_commit",
    // release
    "before_release_commit",
    "after_release_commit",
    "before_tombstone_commit",
    "after_tombstone_commit",
    "after_release_script",
    "after_release_settled",
    // confirm and expiry
    "before_confirm_commit",
    "after_confirm_commit",
    "after_expiry_commit",
    // sweeper
    "before_settle",
    "after_settle",
    // adjustments
    "after_set_aside_script",
    "before_adjustment_commit",
    "after_adjustment_commit",
    "after_adjustment_script",
    "after_adjustment_applied",
    "before_undo_commit",
    "after_undo_commit",
    "after_put_back_script",
    // segments
    "after_transfer_out",
    "after_transfer_in",
    "after_transfer_done",
    "before_segments_commit",
    "after_segments_commit",
    // rebuild
    "before_epoch_commit",
    "after_epoch_raised",
    "after_rebuild_begin",
    "after_rebuild_load",
    "before_rebuild_end",
    "after_rebuild_end",
    // settle
    "before_settlement_commit",
    "after_settlement_commit",
];

/// Aborts the process here if a test asked for it. The name must stand in [`ALL`].
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(debug_assertions)]
        {
            const { assert!(crate::failpoints::is_listed($name), "name it in failpoints::ALL") };
            crate::failpoints::reach($name);
        }
    };
}
pub(crate) use failpoint;

#[cfg(debug_assertions)]
pub(crate) const fn is_listed(name: &str) -> bool {
    let mut at = 0;
    while at < ALL.len() {
        if is_same(ALL[at].as_bytes(), name.as_bytes()) {
            return true;
        }
        at += 1;
    }
    false
}

#[cfg(debug_assertions)]
const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

#[cfg(debug_assertions)]
pub(crate) fn reach(name: &str) {
    use std::{
        collections::HashMap,
        sync::{
            OnceLock,
            atomic::{AtomicI64, Ordering},
        },
    };
    static ARMED: OnceLock<HashMap<String, AtomicI64>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| {
        // Not a setting: it must not be found in a file or in `--print-config`.
        #[allow(clippy::disallowed_methods, reason = "a failpoint is not a setting")]
        let list = std::env::var("SECKILL_FAILPOINTS").unwrap_or_default();
        list.split(',')
            .filter_map(|entry| entry.split_once('='))
            .filter_map(|(name, nth)| Some((name.to_owned(), AtomicI64::new(nth.parse().ok()?))))
            .collect()
    });
    if let Some(left) = armed.get(name)
        && left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        std::process::abort();
    }
}
