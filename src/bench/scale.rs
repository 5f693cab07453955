//! `scale`: ever more offers, reservations and watchers. What does each of them keep in memory, what
//! does a call cost among so many, and how long do a start, a rebuild and the oracle take?
//!
//! What a call costs is what the server used at one rate of calls, less what it uses in the same time
//! when nobody calls; that is a figure of its own, as it may grow too.

use std::collections::BTreeMap;

mod offers;
mod reservations;
mod step;
mod watchers;

use super::{
    Error, Plan,
    report::{Figure, Run},
};

const MIB: f64 = 1_048_576.0;

/// What there is more and more of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Along {
    Offers,
    Reservations,
    Watchers,
}

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("offer_server_bytes", "B", "Memory of the server per offer."),
    Figure::plain("offer_redis_bytes", "B", "Memory of Redis per offer."),
    Figure::plain("offers_refusal_us", "µs", "Server CPU of a refusal, most offers."),
    Figure::plain("offers_refusal_growth", "×", "The same, against the fewest."),
    Figure::plain("offers_win_us", "µs", "Server CPU of a win of one hot offer among most."),
    Figure::plain("offers_win_growth", "×", "The same, against the fewest."),
    Figure::plain("offers_replay_us", "µs", "Server CPU of a winner who asks again, most offers."),
    Figure::plain("offers_replay_growth", "×", "The same, against the fewest."),
    Figure::plain("offers_spread_refusal_growth", "×", "A refusal of half of all offers in turn."),
    Figure::plain("offers_spread_win_growth", "×", "A win of half of all offers in turn."),
    Figure::plain("offers_idle_cores", "cores", "CPU of the server without calls, most offers."),
    Figure::plain("offers_restart_s", "s", "From the start of a process until it sells."),
    Figure::plain("offers_second_s", "s", "The same for a second server beside it."),
    Figure::plain("offers_reconcile_s", "s", "A comparison of most offers, by the server."),
    Figure::plain("offers_oracle_s", "s", "The end of the server, and the oracle."),
    Figure::plain("reservation_server_bytes", "B", "Memory of the server per reservation."),
    Figure::plain("reservation_redis_bytes", "B", "Memory of Redis per reservation."),
    Figure::plain("reservations_refusal_us", "µs", "Server CPU of a refusal, most reservations."),
    Figure::plain("reservations_refusal_growth", "×", "The same, against the fewest."),
    Figure::plain("reservations_win_us", "µs", "Server CPU of a win, most reservations."),
    Figure::plain("reservations_win_growth", "×", "The same, against the fewest."),
    Figure::plain("reservations_replay_us", "µs", "Server CPU of a winner who asks again."),
    Figure::plain("reservations_replay_growth", "×", "The same, against the fewest."),
    Figure::plain("reservations_idle_cores", "cores", "CPU of the server without calls."),
    Figure::plain("reservations_restart_s", "s", "From the start of a process until it sells."),
    Figure::plain("reservations_second_s", "s", "The same for a second server beside it."),
    Figure::plain("rebuild_s", "s", "RebuildStock of the offer with most reservations."),
    Figure::plain("frozen_s", "s", "The longest time between two wins meanwhile."),
    Figure::plain("reservations_reconcile_s", "s", "A comparison of most reservations."),
    Figure::plain("reconcile_server_mib", "MiB", "By how much the server is larger after it."),
    Figure::plain("reservations_oracle_s", "s", "The end of the server, and the oracle."),
    Figure::plain("oracle_mib", "MiB", "The most memory that this process has used in the end."),
    Figure::plain("watcher_bytes", "B", "Memory of the server per idle stream, most streams."),
    Figure::plain("watchers_idle_cores", "cores", "CPU of the server, most idle streams."),
    Figure::plain("watchers_refusal_us", "µs", "Server CPU of a refusal beside most streams."),
    Figure::plain("watchers_refusal_growth", "×", "The same, against the fewest."),
    Figure::plain("watchers_replay_us", "µs", "Server CPU of a winner who asks again beside them."),
    Figure::plain("watchers_replay_growth", "×", "The same, against the fewest."),
    Figure::plain("watchers_update_us", "µs", "Server CPU per update, most streams."),
    Figure::plain("watchers_win_p99_ms", "ms", "The p99 of a win meanwhile, from its time."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let mut charts = Charts::default();
    for along in [Along::Offers, Along::Reservations, Along::Watchers] {
        if plan.only.is_some_and(|only| only != along) {
            continue;
        }
        match along {
            Along::Offers => Box::pin(offers::run(plan, run, &mut charts, tell)).await?,
            Along::Reservations => {
                Box::pin(reservations::run(plan, run, &mut charts, tell)).await?
            }
            Along::Watchers => Box::pin(watchers::run(plan, run, &mut charts, tell)).await?,
        }
    }
    run.detail("by_number", charts.0);
    Ok(())
}

/// What every step came to: by chart, line and number.
#[derive(Debug, Default)]
struct Charts(BTreeMap<&'static str, BTreeMap<&'static str, BTreeMap<usize, f64>>>);

impl Charts {
    fn note(&mut self, chart: &'static str, line: &'static str, number: usize, figure: f64) {
        self.0.entry(chart).or_default().entry(line).or_default().insert(number, figure);
    }

    /// The first and the last step of a line.
    fn ends(&self, chart: &str, line: &str) -> Option<[(usize, f64); 2]> {
        let line = self.0.get(chart)?.get(line)?;
        let ((first, low), (last, high)) = (line.first_key_value()?, line.last_key_value()?);
        Some([(*first, *low), (*last, *high)])
    }

    fn set_last(&self, run: &mut Run, name: &'static str, chart: &str, line: &str) {
        if let Some([_, (_, last)]) = self.ends(chart, line) {
            run.set(name, last);
        }
    }

    /// How many times the last step is the first.
    fn set_growth(&self, run: &mut Run, name: &'static str, chart: &str, line: &str) {
        if let Some([(_, first), (_, last)]) = self.ends(chart, line)
            && first > 0.0
        {
            run.set(name, last / first);
        }
    }

    /// What one more costs, in bytes of a line in MiB.
    fn set_each(&self, run: &mut Run, name: &'static str, chart: &str, line: &str) {
        if let Some([(first, low), (last, high)]) = self.ends(chart, line)
            && last > first
        {
            run.set(name, (high - low) * MIB / (last - first) as f64);
        }
    }
}
