//! The faults, each with a name.

use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::{
    arena::{Arena, Setup},
    stores::Sql,
};

mod chaos;
mod crashes;
mod redis;
mod servers;
mod sql;

/// One way in which things break.
pub(crate) struct Scenario {
    pub(crate) name: String,
    /// What it runs on in full.
    pub(crate) sqls: &'static [Sql],
    pub(crate) setup: Setup,
    pub(crate) strike: Strike,
}

/// Starts the servers, lets buyers come, breaks something and mends it. The buyers go on.
pub(crate) type Strike = Box<dyn for<'a> Fn(&'a mut Arena) -> LocalBoxFuture<'a, Struck>>;

/// What was done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Struck {
    /// The end of the fault; of a crash, its moment.
    pub(crate) lifted: Instant,
    /// While a store was away for certain, and everybody had had time to see it.
    pub(crate) away: Option<(Instant, Instant)>,
    /// Units that were neither for sale nor in a live row when the fault hit.
    pub(crate) in_limbo: Option<i64>,
}

impl Struck {
    fn at(lifted: Instant, in_limbo: Option<i64>) -> Self {
        Self { lifted, away: None, in_limbo }
    }
}

/// How long the suite takes, and from which seed the dice roll.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) is_short: bool,
    pub(crate) chaos_s: u64,
    pub(crate) seed: u64,
}

pub(crate) fn all(scale: Scale) -> Vec<Scenario> {
    let usual = || Setup::usual(scale.seed);
    let mut all = crashes::all(&usual);
    all.extend(redis::all(&usual));
    all.extend(sql::all(&usual));
    all.extend(servers::all(&usual));
    all.extend(chaos::all(&usual, scale));
    all
}

fn scenario(
    name: impl Into<String>,
    sqls: &'static [Sql],
    setup: Setup,
    strike: impl for<'a> Fn(&'a mut Arena) -> LocalBoxFuture<'a, Struck> + 'static,
) -> Scenario {
    Scenario { name: name.into(), sqls, setup, strike: Box::new(strike) }
}
