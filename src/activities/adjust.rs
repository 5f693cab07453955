//! AdjustStock: more or fewer units of an offer, by request.

use std::sync::Arc;

use tokio::time::Instant;

use super::Activities;
use crate::{
    adjustments::{self, Adjustment, Proposal, Step, Verdict},
    domain::{ActivityState, AdjustRequest, Adjusted},
    engine::scripts::{Refusal, SetAside},
    entity::adjustments::AdjustmentState,
    error::Error,
    failpoints::failpoint,
    offer::Offer,
    transfers::{self, Gathered, Shortage},
};

/// How often an adjustment is begun anew after the offer was rebuilt in the middle, or its units were
/// sold while they were gathered.
const ATTEMPTS: u32 = 16;

const NEEDED: &str = "stock is adjusted from the warm-up to the end of the activity";

impl Activities {
    /// Changes the total of an offer: the whole delta, or nothing. The same request again has the
    /// same answer, also after the end of the activity.
    ///
    /// # Errors
    /// `UnknownActivity`, `UnknownOffer`, `RequestIdConflict`, `WrongActivityState`; or a store is
    /// away or the offer frozen: then it may still be applied, and a repeat tells.
    pub async fn adjust(
        self: &Arc<Self>,
        request: &AdjustRequest,
        actor: &str,
    ) -> Result<Adjusted, Error> {
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        let id = &request.offer.activity_id;
        let known = adjustments::stored(&self.database, &request.request_id).await;
        let known = known.map_err(|error| self.sql_failed(error))?;
        if let Some(row) = &known {
            is_same(request, row)?;
        }
        if known.is_none() {
            self.move_one_by_clock(id).await?;
        }
        let activity = self.catalog.activity(id).await?;
        let offer = activity.offer(&request.offer.sku_id)?;
        let row = match known {
            Some(row) => {
                self.follow(&offer, &row).await?;
                row
            }
            None if !is_open(activity.state) || !offer.is_in_engine() => {
                return Err(self.not_open(request).await);
            }
            None if self.engine_circuit.is_open() => return Err(Error::EngineUnavailable),
            None if request.delta > 0 => self.add(&offer, request, actor).await?,
            None => self.take_away(&offer, request, actor).await?,
        };
        let (applied, possible) = match row.state {
            AdjustmentState::Pending | AdjustmentState::Applied => (true, row.delta),
            AdjustmentState::Cancelled => (false, row.possible),
        };
        let offers = self.get(id).await?.offers;
        let offer = offers.into_iter().find(|offer| offer.sku_id == row.sku_id);
        let offer = offer.ok_or_else(|| Error::internal(format!("{} is gone", request.offer)))?;
        Ok(Adjusted { offer, possible, applied })
    }

    /// SQL first, engine second.
    async fn add(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        request: &AdjustRequest,
        actor: &str,
    ) -> Result<Adjustment, Error> {
        match self.decide(request, Step::Add, actor).await? {
            Verdict::Stored(row) => {
                is_same(request, &row)?;
                self.follow(offer, &row).await?;
                Ok(row)
            }
            Verdict::NotOpen => Err(self.not_open(request).await),
            Verdict::OtherEpoch { .. } | Verdict::UnknownOffer => Err(unknown(request)),
        }
    }

    /// Engine first: what is set aside can't be sold while SQL decides.
    async fn take_away(
        self: &Arc<Self>,
        offer: &Arc<Offer>,
        request: &AdjustRequest,
        actor: &str,
    ) -> Result<Adjustment, Error> {
        let (id, units) = (&request.request_id, request.delta.unsigned_abs());
        for _ in 0..ATTEMPTS {
            let (epoch, since) = (offer.epoch(), Instant::now());
            let now = self.database.clock();
            let home = offer.segments.home_of(id.as_str());
            let set_aside = home.scripts.set_aside(epoch, id, units, now).await;
            failpoint!("after_set_aside_script");
            let verdict = match set_aside.map_err(|error| self.engine_failed(error))? {
                Ok(SetAside::Done { units: found }) if found == units => {
                    self.decide(request, Step::TakeAway { epoch }, actor).await?
                }
                Ok(SetAside::Done { units: found }) => {
                    return Err(conflict("delta", format!("-{found}"), request.delta.to_string()));
                }
                Ok(SetAside::Insufficient { stamp, .. }) if offer.segments.count() > 1 => {
                    let shortage = Shortage { home, needed: units, seen: stamp, since };
                    match transfers::gather(&self.recovery, offer, shortage).await {
                        Ok(Gathered::Ask) => continue,
                        Ok(Gathered::Left(left)) => {
                            // One stays in the offer in any case.
                            let levels = offer.levels().await;
                            let levels = levels.map_err(|error| self.engine_failed(error))?;
                            let most = levels.map_or(left, |levels| {
                                left.min(levels.offered().saturating_sub(1))
                            });
                            let possible = -i64::try_from(most).unwrap_or(i64::MAX);
                            self.decide(request, Step::Cancel { epoch, possible }, actor).await?
                        }
                        Err(Error::OfferFrozen(_)) => {
                            self.recovery.rebuild_now(offer).await?;
                            continue;
                        }
                        Err(error) => return Err(error),
                    }
                }
                Ok(SetAside::Insufficient { possible, .. }) => {
                    let possible = -i64::try_from(possible).unwrap_or(i64::MAX);
                    self.decide(request, Step::Cancel { epoch, possible }, actor).await?
                }
                Ok(SetAside::Decided) => {
                    let row = adjustments::stored(&self.database, id).await;
                    let row = row.map_err(|error| self.sql_failed(error))?;
                    Verdict::Stored(row.ok_or_else(|| {
                        Error::internal(format!("the engine knows an end of {id}, SQL does not"))
                    })?)
                }
                Err(refusal) if offer.segments.adopt_refused(&refusal) => continue,
                Err(Refusal::NotWarmed | Refusal::Frozen { .. }) => {
                    self.recovery.rebuild_now(offer).await?;
                    continue;
                }
            };
            match verdict {
                Verdict::Stored(row) => {
                    let settled =
                        adjustments::settle_aside(&self.recovery, offer, epoch, id, &row).await;
                    is_same(request, &row)?;
                    match settled {
                        Ok(()) => {}
                        Err(Error::OfferFrozen(_)) => self.follow(offer, &row).await?,
                        // It is refused for certain; the sweeper puts back what is set aside.
                        Err(_) if row.state == AdjustmentState::Cancelled => {}
                        Err(error) => return Err(error),
                    }
                    return Ok(row);
                }
                // The rebuild that raised it drops what was set aside.
                Verdict::OtherEpoch { .. } => self.recovery.rebuild_now(offer).await?,
                Verdict::NotOpen | Verdict::UnknownOffer => return Err(unknown(request)),
            }
        }
        Err(Error::OfferFrozen(offer.key.clone()))
    }

    async fn decide(
        self: &Arc<Self>,
        request: &AdjustRequest,
        step: Step,
        actor: &str,
    ) -> Result<Verdict, Error> {
        let proposal = Proposal {
            offer: &request.offer,
            request_id: &request.request_id,
            delta: request.delta,
            step,
            actor,
            reason: &request.reason,
        };
        let verdict = adjustments::decide(&self.database, &proposal).await;
        let verdict = verdict.map_err(|error| self.sql_failed(error))?;
        if let Verdict::Stored(row) = &verdict
            && row.state == AdjustmentState::Pending
        {
            let (delta, id) = (row.delta, &row.request_id);
            tracing::info!(offer = %request.offer, delta, request_id = %id, actor, "adjusted");
            self.changed(&request.offer.activity_id).await?;
        }
        Ok(verdict)
    }

    /// Waits until the engine has followed; an offer that is frozen is rebuilt first.
    async fn follow(&self, offer: &Arc<Offer>, row: &Adjustment) -> Result<(), Error> {
        for _ in 1..ATTEMPTS {
            match adjustments::follow(&self.recovery, offer, row).await {
                Err(Error::OfferFrozen(_)) => self.recovery.rebuild_now(offer).await?,
                done => return done,
            }
        }
        adjustments::follow(&self.recovery, offer, row).await
    }

    async fn not_open(self: &Arc<Self>, request: &AdjustRequest) -> Error {
        match self.get(&request.offer.activity_id).await {
            Ok(activity) => Error::WrongActivityState {
                activity_id: activity.activity_id,
                current: activity.state,
                needed: NEEDED,
            },
            Err(error) => error,
        }
    }
}

fn is_open(state: ActivityState) -> bool {
    adjustments::OPEN.contains(&state.into())
}

/// Whether the call asks for what is stored under its id.
fn is_same(request: &AdjustRequest, row: &Adjustment) -> Result<(), Error> {
    let AdjustRequest { offer, delta, .. } = request;
    for (field, before, now) in [
        ("activity_id", &row.activity_id, offer.activity_id.to_string()),
        ("sku_id", &row.sku_id, offer.sku_id.to_string()),
        ("delta", &row.delta.to_string(), delta.to_string()),
    ] {
        if *before != now {
            return Err(conflict(field, before.clone(), now));
        }
    }
    Ok(())
}

fn conflict(field: &'static str, before: String, now: String) -> Error {
    Error::RequestIdConflict { field, before, now }
}

fn unknown(request: &AdjustRequest) -> Error {
    Error::UnknownOffer {
        activity_id: request.offer.activity_id.to_string(),
        sku_id: request.offer.sku_id.to_string(),
    }
}
