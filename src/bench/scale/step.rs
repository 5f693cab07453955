//! One number of something: what it keeps in memory, and what calls cost among so many.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::{
    super::{
        Error, Plan,
        bed::Bed,
        load::{self, Arrivals, Load, Method, REPLAYED, RESERVED, Requests, SOLD_OUT, Seen},
        oracle::Told,
        report::Run,
        schedule::{Schedule, Stretch},
        sold_out::expect_all,
        wins::CONNECTIONS,
    },
    Charts, MIB,
};
use crate::domain::OfferKey;

/// Calls a second: as many at each step, and few enough that nobody has to wait.
const REFUSALS_PER_S: f64 = 20_000.0;
pub(super) const WINS_PER_S: f64 = 4_000.0;
const QUICK_PER_S: f64 = 200.0;

/// The charts of one thing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Titles {
    pub(super) cpu: &'static str,
    pub(super) engine_cpu: &'static str,
    pub(super) memory: &'static str,
    pub(super) seconds: &'static str,
    pub(super) idle: &'static str,
}

/// CPU time so far, and when.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    server: Duration,
    engine: Option<Duration>,
    pub(super) at: Instant,
}

impl Used {
    pub(super) fn by(bed: &Bed) -> Result<Self, Error> {
        let server = bed.servers[0].cpu()?;
        Ok(Self { server, engine: bed.engine_cpu(), at: Instant::now() })
    }

    /// Cores of the server, and of the engine, since then.
    pub(super) fn since(self, then: Self) -> [Option<f64>; 2] {
        let cores = |now: Duration, before: Duration| {
            let lasted = self.at.saturating_duration_since(then.at).as_secs_f64();
            now.saturating_sub(before).as_secs_f64() / lasted.max(f64::EPSILON)
        };
        let engine = self.engine.zip(then.engine).map(|(now, before)| cores(now, before));
        [Some(cores(self.server, then.server)), engine]
    }
}

/// One number of something, measured.
pub(super) struct Step<'a> {
    pub(super) plan: &'a Plan,
    pub(super) run: &'a mut Run,
    pub(super) charts: &'a mut Charts,
    pub(super) titles: Titles,
    pub(super) number: usize,
    /// Cores of server and engine while nobody calls.
    pub(super) idle: [Option<f64>; 2],
}

impl Step<'_> {
    pub(super) fn note(&mut self, chart: &'static str, line: &'static str, figure: f64) {
        self.charts.note(chart, line, self.number, figure);
    }

    /// What server and engine have in memory.
    pub(super) async fn memory(&mut self, bed: &Bed) -> Result<(), Error> {
        sleep(self.plan.warm_up()).await;
        self.note(self.titles.memory, "server", bed.servers[0].memory()? as f64 / MIB);
        if let Some(bytes) = bed.engine_memory().await? {
            self.note(self.titles.memory, "Redis", bytes as f64 / MIB);
        }
        Ok(())
    }

    /// What is used while nobody calls.
    pub(super) async fn idle(&mut self, bed: &Bed) -> Result<(), Error> {
        let before = Used::by(bed)?;
        sleep(self.plan.lasts).await;
        self.idle = Used::by(bed)?.since(before);
        for (line, cores) in [("server", self.idle[0]), ("Redis", self.idle[1])] {
            if let Some(cores) = cores {
                self.note(self.titles.idle, line, cores);
            }
        }
        Ok(())
    }

    pub(super) fn per_s(&self, usually: f64) -> f64 {
        if self.plan.quick { QUICK_PER_S.min(usually) } else { usually }
    }

    /// The times of so many calls a second.
    pub(super) fn schedule(&self, per_s: f64) -> Schedule {
        let stretch = Stretch::new(self.per_s(per_s), self.plan.lasts);
        Schedule::draw(self.plan.pace, &[stretch], self.plan.seed)
    }

    /// Refusals of these offers in turn, by new buyers.
    pub(super) async fn refusals(
        &mut self,
        bed: &Bed,
        line: &'static str,
        offers: &[&OfferKey],
        series: &str,
    ) -> Result<(), Error> {
        // First of all the server has to learn that there is nothing.
        let learning = Requests::each(Method::Reserve, offers.len(), |nth| {
            load::attempt(offers[nth], &format!("{series}0"), nth, 1)
        });
        let lasts = Duration::from_secs(60);
        let arrivals = Arrivals::Closed { in_flight: 64, lasts };
        let learned = send(bed, learning, arrivals).await?;
        expect_all(self.run, line, &learned, SOLD_OUT);
        sleep(self.plan.warm_up()).await;
        let schedule = self.schedule(REFUSALS_PER_S);
        let requests = Requests::each(Method::Reserve, schedule.len(), |nth| {
            load::attempt(offers[nth % offers.len()], &format!("{series}1"), nth, 1)
        });
        let seen = self.cost(bed, line, requests, schedule, SOLD_OUT).await?;
        expect_all(self.run, line, &seen, SOLD_OUT);
        Ok(())
    }

    /// Wins of these offers in turn, by new buyers; and those calls again.
    pub(super) async fn wins(
        &mut self,
        bed: &Bed,
        [line, again]: [&'static str; 2],
        offers: &[&OfferKey],
        series: &str,
        told: &mut Told,
    ) -> Result<(), Error> {
        let schedule = self.schedule(WINS_PER_S);
        let requests = Requests::each(Method::Reserve, schedule.len(), |nth| {
            load::attempt(offers[nth % offers.len()], series, nth, 1)
        });
        for (line, label) in [(line, RESERVED), (again, REPLAYED)] {
            let seen = self.cost(bed, line, requests.clone(), schedule.clone(), label).await?;
            told.note(&seen);
            bed.drain().await?;
        }
        Ok(())
    }

    /// Sends these, and notes what each that came to `label` cost above idleness.
    pub(super) async fn cost(
        &mut self,
        bed: &Bed,
        line: &'static str,
        requests: Requests,
        schedule: Schedule,
        label: &str,
    ) -> Result<Seen, Error> {
        let before = Used::by(bed)?;
        let seen = send(bed, requests, Arrivals::Open(schedule)).await?;
        let after = Used::by(bed)?;
        let (calls, lasted) = (seen.count(label), (after.at - before.at).as_secs_f64());
        if calls == 0 {
            return Err(Error::Unavailable(format!("{line}: nobody hears {label}: {seen:?}")));
        }
        let titles = self.titles;
        let charts = [titles.cpu, titles.engine_cpu];
        for ((chart, cores), idle) in charts.into_iter().zip(after.since(before)).zip(self.idle) {
            if let (Some(cores), Some(idle)) = (cores, idle) {
                self.note(chart, line, (cores - idle).max(0.0) * lasted * 1e6 / calls as f64);
            }
        }
        if calls != seen.samples.len() as u64 {
            self.run.note(format!("{line}, {} of them: {:?}", self.number, seen.counts()));
        }
        self.run.check_generator(&format!("{line}, {} of them", self.number), &seen);
        Ok(seen)
    }

    /// How long a second server takes until it sells, where there can be one.
    pub(super) async fn second(&mut self, bed: &mut Bed) -> Result<(), Error> {
        if !bed.may_have_more_servers() {
            return Ok(());
        }
        let begun = Instant::now();
        bed.add_server(self.plan).await?;
        self.note(self.titles.seconds, "a second server", begun.elapsed().as_secs_f64());
        if let Some(second) = bed.servers.pop() {
            second.stop().await?;
        }
        Ok(())
    }

    /// How long a server takes until it sells when it is started again.
    pub(super) async fn restart(&mut self, bed: &mut Bed) -> Result<(), Error> {
        bed.stop_servers().await?;
        let begun = Instant::now();
        bed.add_server(self.plan).await?;
        self.note(self.titles.seconds, "a restart", begun.elapsed().as_secs_f64());
        Ok(())
    }
}

async fn send(bed: &Bed, requests: Requests, arrivals: Arrivals) -> Result<Seen, Error> {
    let load = Load::new(bed.servers[0].grpc, requests, arrivals);
    load::run(Load { connections: CONNECTIONS, ..load }).await
}
