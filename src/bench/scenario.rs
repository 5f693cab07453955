//! What can be measured, by name.

use super::{
    Error, Plan, ablations, burst, drain, duplicates, far_redis, many_offers, overload, peers,
    releases,
    report::{Figure, Run},
    scale, segments, slow_commits, soak, sold_out, steady, streams, watch,
};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    SoldOut,
    Overload,
    Peers,
    Steady,
    Streams,
    Drain,
    Watch,
    FarRedis,
    SlowCommits,
    Burst,
    Duplicates,
    Releases,
    ManyOffers,
    Segments,
    Soak,
    Ablations,
    Scale,
}

#[cfg(test)]
pub(super) const ALL_SCENARIOS: [Scenario; 17] = [
    Scenario::SoldOut,
    Scenario::Overload,
    Scenario::Peers,
    Scenario::Steady,
    Scenario::Streams,
    Scenario::Drain,
    Scenario::Watch,
    Scenario::FarRedis,
    Scenario::SlowCommits,
    Scenario::Burst,
    Scenario::Duplicates,
    Scenario::Releases,
    Scenario::ManyOffers,
    Scenario::Segments,
    Scenario::Soak,
    Scenario::Ablations,
    Scenario::Scale,
];

impl Scenario {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SoldOut => "sold-out",
            Self::Overload => "overload",
            Self::Peers => "peers",
            Self::Steady => "steady",
            Self::Streams => "streams",
            Self::Drain => "drain",
            Self::Watch => "watch",
            Self::FarRedis => "far-redis",
            Self::SlowCommits => "slow-commits",
            Self::Burst => "burst",
            Self::Duplicates => "duplicates",
            Self::Releases => "releases",
            Self::ManyOffers => "many-offers",
            Self::Segments => "segments",
            Self::Soak => "soak",
            Self::Ablations => "ablations",
            Self::Scale => "scale",
        }
    }

    pub(super) fn figures(self) -> &'static [Figure] {
        match self {
            Self::SoldOut => sold_out::FIGURES,
            Self::Overload => overload::FIGURES,
            Self::Peers => peers::FIGURES,
            Self::Steady => steady::FIGURES,
            Self::Streams => streams::FIGURES,
            Self::Drain => drain::FIGURES,
            Self::Watch => watch::FIGURES,
            Self::FarRedis => far_redis::FIGURES,
            Self::SlowCommits => slow_commits::FIGURES,
            Self::Burst => burst::FIGURES,
            Self::Duplicates => duplicates::FIGURES,
            Self::Releases => releases::FIGURES,
            Self::ManyOffers => many_offers::FIGURES,
            Self::Segments => segments::FIGURES,
            Self::Soak => soak::FIGURES,
            Self::Ablations => ablations::FIGURES,
            Self::Scale => scale::FIGURES,
        }
    }

    pub(super) async fn run(
        self,
        plan: &Plan,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<Vec<Run>, Error> {
        match self {
            Self::SoldOut => Box::pin(sold_out::run(plan, tell)).await,
            Self::Overload => Box::pin(overload::run(plan, tell)).await,
            Self::Peers => Box::pin(peers::run(plan, tell)).await,
            Self::Steady => Box::pin(steady::run(plan, tell)).await,
            Self::Streams => Box::pin(streams::run(plan, tell)).await,
            Self::Drain => Box::pin(drain::run(plan, tell)).await,
            Self::Watch => Box::pin(watch::run(plan, tell)).await,
            Self::FarRedis => Box::pin(far_redis::run(plan, tell)).await,
            Self::SlowCommits => Box::pin(slow_commits::run(plan, tell)).await,
            Self::Burst => Box::pin(burst::run(plan, tell)).await,
            Self::Duplicates => Box::pin(duplicates::run(plan, tell)).await,
            Self::Releases => Box::pin(releases::run(plan, tell)).await,
            Self::ManyOffers => Box::pin(many_offers::run(plan, tell)).await,
            Self::Segments => Box::pin(segments::run(plan, tell)).await,
            Self::Soak => Box::pin(soak::run(plan, tell)).await,
            Self::Ablations => Box::pin(ablations::run(plan, tell)).await,
            Self::Scale => Box::pin(scale::run(plan, tell)).await,
        }
    }
}
