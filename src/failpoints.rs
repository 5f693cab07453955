//! Places where a test may kill the process; nothing of this is in a release build.
//!
//! `SECKILL_FAILPOINTS=after_reserve_script=3` aborts the process when that place is reached for
//! the third time. Several are separated by commas.

/// Aborts the process here if a test asked for it.
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(debug_assertions)]
        crate::failpoints::reach($name);
    };
}
pub(crate) use failpoint;

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
