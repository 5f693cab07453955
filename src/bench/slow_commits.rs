//! `slow-commits`: each commit of PostgreSQL takes 2 ms longer, as it does on the disks of a cloud. How
//! much is won all the same?
//!
//! PostgreSQL does that by itself (`commit_delay`), for the connections of this server alone, and only
//! for a superuser.

use url::Url;

use super::{
    Error, Plan,
    bed::Sale,
    far_redis::{Names, measure},
    report::{Figure, Run},
    wins::UNITS,
};

/// How much longer a commit takes, in ms.
const DELAY_MS: u32 = 2;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("slow_over_fast", "× fast", "Wins a second with commits that take 2 ms longer."),
    Figure::plain("fast_wins_per_s", "1/s", "Wins a second with commits as they are."),
    Figure::plain("slow_wins_per_s", "1/s", "Wins a second with slow commits."),
    Figure::plain("fast_idle_p50_ms", "ms", "The p50 of a lone win with commits as they are."),
    Figure::plain("slow_idle_p50_ms", "ms", "The p50 of a lone win with slow commits."),
];

const FAST: Names =
    Names { name: "fast", per_s: "fast_wins_per_s", idle_p50_ms: "fast_idle_p50_ms" };
const SLOW: Names =
    Names { name: "slow", per_s: "slow_wins_per_s", idle_p50_ms: "slow_idle_p50_ms" };

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    slow_url(plan)?;
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let slow = Sale::of(UNITS).with("SECKILL__DATABASE__URL", slow_url(plan)?);
    let fast = measure(plan, Sale::of(UNITS), run, FAST, tell).await?;
    let slow = measure(plan, slow, run, SLOW, tell).await?;
    if run.figures.get(SLOW.idle_p50_ms).is_none_or(|p50| *p50 < f64::from(DELAY_MS)) {
        // Without an fsync there is nothing that could take longer.
        return Err(Error::Unavailable("commits took no longer: is fsync off?".to_owned()));
    }
    run.set("slow_over_fast", slow / fast);
    Ok(())
}

/// The database by connections whose commits take their time.
fn slow_url(plan: &Plan) -> Result<Url, Error> {
    let unreadable = |_| Error::Usage("database.url can't be read".to_owned());
    let mut url = Url::parse(plan.settings.database.url.expose()).map_err(unreadable)?;
    if !url.scheme().starts_with("postgres") {
        let text = "slow-commits needs a PostgreSQL: name one by --database-url";
        return Err(Error::Usage(text.to_owned()));
    }
    let delay_us = (DELAY_MS * 1_000).to_string();
    url.query_pairs_mut()
        .append_pair("options[commit_delay]", &delay_us)
        // Also when nobody else commits.
        .append_pair("options[commit_siblings]", "0");
    Ok(url)
}
