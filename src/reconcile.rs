//! Reconcile: compares engine, outbox and orders of an activity, also while it sells.
//!
//! Three questions: was anything oversold, was anything lost, what is there to do? A difference is
//! reported only when it is certain: each suspicion is looked at again, in an order in which what
//! is merely on its way explains itself (see `reconcile/engine.rs`).
//!
//! It changes nothing unless it is asked to repair, and then only what SQL alone can decide: the
//! engine is rebuilt from the rows, and counters are added up anew. The rest needs a person. An
//! offer that is frozen is rebuilt in any case before it is compared, as by whoever meets it.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use serde_json::json;
use tokio::sync::Semaphore;

mod engine;
mod repair;
mod sql;

use crate::{
    admission::catalog::{Activity, Catalog},
    audit,
    circuit::Circuit,
    database::Database,
    domain::{ActivityId, Difference, OfferFigures, ReconcileReport},
    engine::{EngineError, locks, locks::Locks},
    error::Error,
    metrics,
    offer::Offer,
    recovery::Recovery,
};

/// Offers compared at the same time.
/// A comparison may take little of the pool that the outbox needs.
const AT_ONCE: usize = 2;
/// How often an offer is compared anew after it was rebuilt in the middle.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);
/// What is left of a report that is too large for the audit.
const AUDITED_DIFFERENCES: usize = 50;
const AUDITED_IDS: usize = 10;

/// Compares the books, and mends what SQL can decide.
#[derive(Debug)]
pub struct Reconciler {
    pub catalog: Arc<Catalog>,
    pub database: Database,
    pub recovery: Arc<Recovery>,
    pub locks: Locks,
    /// One comparison at a time.
    pub comparing: Semaphore,
    pub engine_circuit: Arc<Circuit>,
    pub database_circuit: Arc<Circuit>,
}

/// What the comparison of one offer came to.
#[derive(Debug, Default)]
struct Compared {
    figures: OfferFigures,
    differences: Vec<Difference>,
    unacked: u64,
    pending: u64,
    releasing: u64,
    dead: u64,
}

impl Reconciler {
    /// Compares, and with `repair` mends; the report is of before the repair. It is in the audit.
    ///
    /// # Errors
    /// `UnknownActivity`; `InProgress` while another call repairs the same activity; a store is
    /// away, or an offer is being rebuilt for too long.
    pub async fn reconcile(
        &self,
        id: &ActivityId,
        repair: bool,
        actor: &str,
    ) -> Result<ReconcileReport, Error> {
        self.stores_are_there()?;
        self.catalog.refresh_one(id).await.map_err(|error| self.sql_failed(error))?;
        let activity = self.catalog.activity(id).await?;
        let _lock = if repair {
            let lock = self.locks.acquire(&format!("reconcile:{id}"), locks::WAIT).await;
            let lock = lock.map_err(|error| self.engine_failed(error))?;
            Some(lock.ok_or(Error::InProgress("a repair of this activity"))?)
        } else {
            None
        };
        let mut report = self.compare(&activity).await?;
        if repair {
            self.repair(&activity, &mut report, actor).await?;
        }
        let action = if repair { "repair" } else { "reconcile" };
        let entry = audit::Entry::of_activity(id, actor, action, audited(&report));
        let now = self.database.clock();
        let written = audit::write(self.database.writer(), now, entry).await;
        written.map_err(|error| self.sql_failed(error))?;
        if report.difference_count > 0 {
            let differences = report.difference_count;
            tracing::error!(activity = %id, differences, repair, "engine, outbox and orders differ");
        }
        Ok(report)
    }

    /// Compares every offer of the activity.
    ///
    /// # Errors
    /// A store is away, or an offer is being rebuilt for too long.
    pub(crate) async fn compare(&self, activity: &Activity) -> Result<ReconcileReport, Error> {
        let turn = tokio::time::timeout(locks::WAIT, self.comparing.acquire()).await;
        let _turn = turn.map_err(|_| Error::InProgress("another comparison"))?;
        let compared: Vec<Compared> = stream::iter(activity.offers.values().cloned())
            .map(|offer| async move { self.compare_offer(&offer).await })
            .buffered(AT_ONCE)
            // All of them, since no SQL future may be dropped in the middle.
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect::<Result<_, _>>()?;
        let mut report = ReconcileReport {
            activity_id: activity.id.to_string(),
            observe_time: self.database.clock(),
            ..ReconcileReport::default()
        };
        for offer in compared {
            report.offers.push(offer.figures);
            report.difference_count += offer.differences.len() as u64;
            let room = ReconcileReport::MAX_LISTED - report.differences.len();
            report.differences.extend(offer.differences.into_iter().take(room));
            report.unacked += offer.unacked;
            report.pending += offer.pending;
            report.releasing += offer.releasing;
            report.dead += offer.dead;
        }
        metrics::compared(&activity.id, &report.differences);
        Ok(report)
    }

    async fn compare_offer(&self, offer: &Arc<Offer>) -> Result<Compared, Error> {
        for attempt in 0..ATTEMPTS {
            // Its segments may have become more since.
            let offer = match attempt {
                0 => offer.clone(),
                _ => self.catalog.offer(&offer.key).await?,
            };
            let offer = &offer;
            let mut compared = self.compare_in_sql(offer).await?;
            if !offer.is_in_engine() {
                return Ok(compared.sorted());
            }
            if self.compare_with_engine(offer, &mut compared).await? {
                return Ok(compared.sorted());
            }
            // Its epoch has moved, or it can't be read: it is whole again once it was rebuilt.
            self.recovery.rebuild_now(offer).await?;
            tokio::time::sleep(PAUSE).await;
        }
        Err(Error::OfferFrozen(offer.key.clone()))
    }

    fn stores_are_there(&self) -> Result<(), Error> {
        if self.database_circuit.is_open() {
            return Err(Error::DatabaseUnavailable);
        }
        if self.engine_circuit.is_open() {
            return Err(Error::EngineUnavailable);
        }
        Ok(())
    }

    fn engine_failed(&self, error: EngineError) -> Error {
        self.recovery.engine_failed(error)
    }

    fn sql_failed(&self, error: sea_orm::DbErr) -> Error {
        // A comparison of very much may take longer than a statement may; that is no outage, and
        // whether there is one, others find out.
        error.into()
    }
}

impl Compared {
    fn sorted(mut self) -> Self {
        self.differences.sort_by_key(|difference| difference.kind);
        self
    }
}

/// The report as the audit keeps it: whole, or what matters most of it.
pub(crate) fn audited(report: &ReconcileReport) -> serde_json::Value {
    let whole = json!(report);
    if whole.to_string().len() <= audit::DETAIL_MAX_BYTES {
        return whole;
    }
    let mut differences = report.differences.clone();
    differences.truncate(AUDITED_DIFFERENCES);
    for difference in &mut differences {
        difference.reservation_ids.truncate(AUDITED_IDS);
    }
    json!({
        "activity_id": report.activity_id,
        "offers_checked": report.offers.len(),
        "differences": differences,
        "difference_count": report.difference_count,
        "unacked": report.unacked,
        "pending": report.pending,
        "releasing": report.releasing,
        "dead": report.dead,
        "shortened": true,
    })
}
