//! `many-offers`: thousands of offers, and most buyers want a few of them (Zipf). What does it cost
//! that the batches of an offer are small?

use serde_json::json;

use super::{
    Error, Plan,
    bed::{Bed, Sale},
    load::{self, Arrivals, Load, Method, RESERVED, Requests, Seen},
    oracle::Told,
    per_call_us, quantile_us,
    report::{Figure, Run},
    schedule::{Schedule, Stretch},
    wins::{CONNECTIONS, percentiles_ms},
};

const OFFERS: usize = 10_000;
const QUICK_OFFERS: usize = 200;
const UNITS: u32 = 1_000_000;
const IN_FLIGHT: [usize; 2] = [256, 1_024];
const MOST_PER_S: f64 = 50_000.0;

pub(super) const FIGURES: &[Figure] = &[
    Figure::plain("many_over_one", "× one offer", "Wins a second, against those of one hot offer."),
    Figure::plain("wins_per_s", "1/s", "Wins a second over all offers."),
    Figure::plain("one_offer_per_s", "1/s", "Wins a second of one hot offer among them."),
    Figure::plain("win_cpu_us", "µs", "Server CPU per win over all offers."),
    Figure::plain("half_p50_ms", "ms", "The median of a win at half of that, from its time."),
    Figure::plain("half_p99_ms", "ms", "The 99th percentile of the same."),
    Figure::plain("offers_sold", "", "Offers of which something was won."),
];

pub(super) async fn run(plan: &Plan, tell: &(dyn Fn(&str) + Sync)) -> Result<Vec<Run>, Error> {
    super::repeated(plan, tell, one).await
}

async fn one(plan: &Plan, run: &mut Run, tell: &(dyn Fn(&str) + Sync)) -> Result<(), Error> {
    let offers = if plan.quick { QUICK_OFFERS } else { OFFERS };
    tell(&format!("putting {offers} offers up"));
    let bed = Bed::of(plan, Sale { offers, ..Sale::of(UNITS) }).await?;
    let mut told = Told::default();
    told.note(&bed.target(0).closed("w", 256, plan.warm_up()).await?);

    tell("one hot offer");
    let single = bed.best("a", plan.levels(&IN_FLIGHT), plan.lasts / 2).await?;
    told += single.told;
    run.set("one_offer_per_s", single.per_s);

    let zipf = Zipf::over(offers);
    let (mut best, mut found, mut sold) = (0.0, serde_json::Map::new(), vec![false; offers]);
    for &in_flight in plan.levels(&IN_FLIGHT) {
        bed.drain().await?;
        tell(&format!("all of them, {in_flight} calls in flight"));
        let series = format!("c{in_flight:05}");
        let most = super::count(MOST_PER_S * plan.lasts.as_secs_f64());
        let picks = zipf.picks(most, plan.seed);
        let arrivals = Arrivals::Closed { in_flight, lasts: plan.lasts };
        let cpu = bed.servers[0].cpu()?;
        let seen = send(&bed, &series, &picks, arrivals).await?;
        let cpu = bed.servers[0].cpu()?.saturating_sub(cpu);
        told.note(&seen);
        for nth in seen.who(RESERVED) {
            sold[picks[nth]] = true;
        }
        let per_s = seen.rate(RESERVED);
        found.insert(in_flight.to_string(), json!({"per_s": per_s, "told": seen.counts()}));
        if per_s > best {
            best = per_s;
            run.set("win_cpu_us", per_call_us(cpu, seen.count(RESERVED)));
        }
    }
    run.set("wins_per_s", best);
    run.set("many_over_one", best / single.per_s);
    run.detail("by_calls_in_flight", found);
    bed.drain().await?;

    tell(&format!("half of it, {:.0} calls/s", best / 2.0));
    let schedule = Schedule::draw(plan.pace, &[Stretch::new(best / 2.0, plan.lasts)], plan.seed);
    let picks = zipf.picks(schedule.len(), plan.seed + 1);
    let seen = send(&bed, "o", &picks, Arrivals::Open(schedule)).await?;
    told.note(&seen);
    run.check_generator("half of saturation", &seen);
    let latencies = load::latencies(seen.of(RESERVED));
    run.set("half_p50_ms", quantile_us(&latencies, 0.5) / 1_000.0);
    run.set("half_p99_ms", quantile_us(&latencies, 0.99) / 1_000.0);
    run.set("offers_sold", sold.iter().filter(|sold| **sold).count() as f64);
    run.detail("told_at_half", seen.counts());
    run.detail("percentiles_ms", json!({"wins": percentiles_ms(&seen, RESERVED)}));

    tell("reading the books");
    run.broken.extend(bed.close(told).await?);
    Ok(())
}

async fn send(bed: &Bed, series: &str, picks: &[usize], arrivals: Arrivals) -> Result<Seen, Error> {
    let requests = Requests::each(Method::Reserve, picks.len(), |nth| {
        load::attempt(&bed.offers[picks[nth]], series, nth, 1)
    });
    let load = Load::new(bed.servers[0].grpc, requests, arrivals);
    load::run(Load { connections: CONNECTIONS, ..load }).await
}

/// The nth of many is wanted 1/n as often as the first.
struct Zipf {
    /// Sums of the weights up to each.
    sums: Vec<f64>,
}

impl Zipf {
    fn over(count: usize) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|nth| {
            sum += 1.0 / nth as f64;
            sum
        });
        Self { sums: sums.collect() }
    }

    fn picks(&self, count: usize, seed: u64) -> Vec<usize> {
        let mut random = fastrand::Rng::with_seed(seed);
        let all = self.sums.last().copied().unwrap_or_default();
        let pick = |_| {
            let at = random.f64() * all;
            self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1)
        };
        (0..count).map(pick).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_wanted_twice_as_often_as_the_second() {
        let picks = Zipf::over(100).picks(100_000, 1);
        let count = |nth: usize| picks.iter().filter(|pick| **pick == nth).count() as f64;
        assert!((1.8..2.2).contains(&(count(0) / count(1))), "{} {}", count(0), count(1));
        assert!((8.0..12.0).contains(&(count(0) / count(9))), "{} {}", count(0), count(9));
        assert_eq!(picks, Zipf::over(100).picks(100_000, 1));
    }
}
