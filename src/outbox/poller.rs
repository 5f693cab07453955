//! Turns due rows into orders, and finishes releases.
//!
//! A row is claimed by its state, never by "the last id seen": a lower id can commit later. Claim,
//! work and settlement are one transaction, so a poller that dies leaves nothing behind, and twenty
//! of them never make an order twice.
//!
//! **Promise:** one poisoned row stops nobody: it fails alone, backs off, and is a dead letter
//! after `max_attempts`. A store that is away costs no attempt.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sea_orm::{
    ActiveEnum as _, ColumnTrait, Condition, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QueryOrder, QuerySelect,
    sea_query::{Expr, ExprTrait},
};
use tokio::time::Instant;

use super::{Row, pace::Pace};
use crate::{
    database::{Database, SqlFault, Transaction, classify, is_among, lock_free_rows},
    domain::TimeMs,
    entity::{
        offers, outbox,
        outbox::{LAST_ERROR_MAX_CHARS, OutboxState},
    },
    error::Error,
    failpoints::failpoint,
    metrics, orders,
    reservations::Reservations,
};

/// How the poller works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollerOptions {
    /// The most rows per transaction; how many there are is measured.
    pub batch: u64,
    pub max_attempts: i32,
    /// The first pause after a failed attempt; each next one is twice as long.
    pub backoff: Duration,
    pub max_backoff: Duration,
}

/// What one pass did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    pub ordered: usize,
    pub released: usize,
    /// Rows that failed on their own account.
    pub failed: usize,
    /// Releases that the engine can't take now.
    pub waiting: usize,
}

impl Pass {
    /// Rows that the pass did something about; while there are any, another pass should follow.
    #[must_use]
    pub fn settled(&self) -> usize {
        self.ordered + self.released + self.failed
    }
}

/// One poller; any number may run on one database.
#[derive(Debug)]
pub struct Poller {
    reservations: Arc<Reservations>,
    database: Database,
    options: PollerOptions,
    pace: Mutex<Pace>,
}

impl Poller {
    #[must_use]
    pub fn new(reservations: Arc<Reservations>, options: PollerOptions) -> Self {
        let database = reservations.database.clone();
        let pace = Mutex::new(Pace::new(usize::try_from(options.batch).unwrap_or(usize::MAX)));
        Self { reservations, database, options, pace }
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One pass over what is due.
    ///
    /// # Errors
    /// A store is away; everything not done is still due, and no attempt was used up.
    pub async fn run_once(&self) -> Result<Pass, Error> {
        let mut pass = Pass::default();
        self.order_due(&mut pass).await?;
        self.release_due(&mut pass).await?;
        Ok(pass)
    }

    async fn order_due(&self, pass: &mut Pass) -> Result<(), Error> {
        for claim in [Claim::New, Claim::Any] {
            match self.order_batch(claim).await {
                Ok(ordered) => {
                    pass.ordered += ordered;
                    return Ok(());
                }
                Err(Setback::Sql(error)) if classify(&error) == SqlFault::RolledBack => {
                    return Ok(());
                }
                Err(Setback::Sql(error)) if classify(&error) != SqlFault::Data => {
                    return Err(error.into());
                }
                // Some row has an order already, or is poisoned.
                Err(Setback::Sql(_) | Setback::Rows) => {}
            }
        }
        // Each for itself, so that the poisoned one fails alone.
        let due = self.due(OutboxState::Pending).await?;
        for row in due {
            match self.order_batch(Claim::One(row.id)).await {
                Ok(ordered) => pass.ordered += ordered,
                Err(Setback::Rows) => {
                    self.count_attempt(&row, "the order of another reservation is in the way")
                        .await?;
                    pass.failed += 1;
                }
                Err(Setback::Sql(error)) => match classify(&error) {
                    SqlFault::Data => {
                        self.count_attempt(&row, &error.to_string()).await?;
                        pass.failed += 1;
                    }
                    SqlFault::RolledBack => {}
                    SqlFault::Away | SqlFault::Unknown => return Err(error.into()),
                },
            }
        }
        Ok(())
    }

    /// Orders what is due and claimed, in one transaction; answers how many.
    async fn order_batch(&self, claim: Claim) -> Result<usize, Setback> {
        let now = self.database.clock();
        let most = match claim {
            Claim::New | Claim::Any => self.pace().take(usize::MAX),
            Claim::One(_) => 1,
        };
        let transaction = self.database.begin_group().await?;
        let begun = Instant::now();
        match self.order_claimed(&transaction, claim, most, now).await {
            Ok(0) => {
                transaction.rollback().await?;
                Ok(0)
            }
            Ok(ordered) => {
                failpoint!("before_order_commit");
                transaction.commit().await?;
                failpoint!("after_order_commit");
                metrics::batch_ordered(ordered, begun.elapsed());
                self.pace().note(ordered, begun.elapsed());
                Ok(ordered)
            }
            Err(setback) => {
                // The first error is the one that counts.
                let _ = transaction.rollback().await;
                Err(setback)
            }
        }
    }

    async fn order_claimed(
        &self,
        transaction: &Transaction,
        claim: Claim,
        most: usize,
        now: TimeMs,
    ) -> Result<usize, Setback> {
        let mut query = outbox::Entity::find()
            .filter(outbox::due(OutboxState::Pending))
            .filter(outbox::Column::NextAttemptTime.lte(now.0));
        if let Claim::One(id) = claim {
            query = query.filter(outbox::Column::Id.eq(id));
        }
        let query = query
            .order_by_asc(outbox::Column::NextAttemptTime)
            .order_by_asc(outbox::Column::Id)
            .limit(most as u64);
        let claimed: Vec<Claimed> = match claim {
            Claim::New => {
                let query = query.select_only().columns(Claimed::COLUMNS);
                let claimed: Vec<Claimed> =
                    lock_free_rows(query).into_model().all(transaction).await?;
                let ids: Vec<i64> = claimed.iter().map(|row| row.id).collect();
                if !ids.is_empty()
                    && orders::place_new(transaction, &ids, now).await? != ids.len() as u64
                {
                    return Err(Setback::Rows);
                }
                claimed
            }
            Claim::Any | Claim::One(_) => {
                let mut rows = lock_free_rows(query).all(transaction).await?;
                rows.sort_by(|a, b| sort_key(a).cmp(&sort_key(b)));
                let offers = self.offers_of(transaction, &rows).await?;
                if orders::place(transaction, &rows, &offers, now).await?.contains(&false) {
                    return Err(Setback::Rows);
                }
                rows.into_iter().map(Claimed::from).collect()
            }
        };
        if claimed.is_empty() {
            return Ok(0);
        }
        failpoint!("after_orders_inserted");
        let ids: Vec<i64> = claimed.iter().map(|row| row.id).collect();
        for some in ids.chunks(500) {
            // A plain comparison with the state would make PostgreSQL walk all of its index of pending
            // rows for each of these.
            let state = Expr::col(outbox::Column::State).if_null("");
            outbox::Entity::update_many()
                .col_expr(outbox::Column::State, Expr::value(OutboxState::Done))
                .col_expr(outbox::Column::SettleTime, Expr::value(now.0))
                .filter(is_among(self.database.backend(), outbox::Column::Id, some))
                .filter(state.eq(OutboxState::Pending.to_value()))
                .exec(transaction)
                .await?;
        }
        let mut units: BTreeMap<(&str, &str), i64> = BTreeMap::new();
        for row in &claimed {
            *units.entry((&row.activity_id, &row.sku_id)).or_default() += i64::from(row.quantity);
        }
        for ((activity_id, sku_id), units) in units {
            offers::Entity::update_many()
                .col_expr(offers::Column::Sold, Expr::col(offers::Column::Sold).add(units))
                .filter(offers::Column::ActivityId.eq(activity_id))
                .filter(offers::Column::SkuId.eq(sku_id))
                .exec(transaction)
                .await?;
        }
        Ok(claimed.len())
    }

    /// The price of an offer never changes, so it is read without a lock.
    async fn offers_of(
        &self,
        transaction: &Transaction,
        rows: &[Row],
    ) -> Result<HashMap<(String, String), offers::Model>, DbErr> {
        let keys: BTreeSet<(&str, &str)> =
            rows.iter().map(|row| (&*row.activity_id, &*row.sku_id)).collect();
        let mut found = HashMap::with_capacity(keys.len());
        let keys: Vec<(&str, &str)> = keys.into_iter().collect();
        for some in keys.chunks(100) {
            let any = some.iter().fold(Condition::any(), |any, (activity_id, sku_id)| {
                any.add(
                    offers::Column::ActivityId
                        .eq(*activity_id)
                        .and(offers::Column::SkuId.eq(*sku_id)),
                )
            });
            for offer in offers::Entity::find().filter(any).all(transaction).await? {
                found.insert((offer.activity_id.clone(), offer.sku_id.clone()), offer);
            }
        }
        Ok(found)
    }

    async fn due(&self, state: OutboxState) -> Result<Vec<Row>, Error> {
        Ok(outbox::Entity::find()
            .filter(outbox::due(state))
            .filter(outbox::Column::NextAttemptTime.lte(self.database.clock().0))
            .order_by_asc(outbox::Column::NextAttemptTime)
            .order_by_asc(outbox::Column::Id)
            .limit(self.options.batch)
            .all(self.database.reader())
            .await?)
    }

    /// The row failed on its own account: later, or never again without an operator.
    async fn count_attempt(&self, row: &Row, why: &str) -> Result<(), Error> {
        let attempts = row.attempts + 1;
        let dead = attempts >= self.options.max_attempts;
        let state = if dead { OutboxState::Dead } else { OutboxState::Pending };
        let now = self.database.clock();
        let next = now.plus(self.pause_after(attempts));
        let settle_time = dead.then_some(now.0);
        let last_error: String = why.chars().take(LAST_ERROR_MAX_CHARS).collect();
        outbox::Entity::update_many()
            .col_expr(outbox::Column::State, Expr::value(state))
            .col_expr(outbox::Column::Attempts, Expr::value(attempts))
            .col_expr(outbox::Column::NextAttemptTime, Expr::value(next.0))
            .col_expr(outbox::Column::SettleTime, Expr::value(settle_time))
            .col_expr(outbox::Column::LastError, Expr::value(last_error))
            .filter(outbox::Column::Id.eq(row.id))
            .filter(outbox::Column::State.eq(OutboxState::Pending))
            .exec(self.database.writer())
            .await?;
        if dead {
            tracing::error!(
                reservation_id = row.reservation_id,
                attempts,
                why,
                "a reservation became a dead letter: an operator must retry or discard it"
            );
        }
        Ok(())
    }

    /// Exponential, with jitter.
    fn pause_after(&self, attempts: i32) -> Duration {
        let doublings = Ord::min(u32::try_from(attempts - 1).unwrap_or(0), 20);
        let pause = self.options.backoff * 2u32.pow(doublings);
        pause.min(self.options.max_backoff).mul_f64(0.75 + fastrand::f64() / 2.0)
    }

    /// Finishes releases that a crash or an engine outage left behind.
    async fn release_due(&self, pass: &mut Pass) -> Result<(), Error> {
        for row in self.due(OutboxState::Releasing).await? {
            if self.reservations.engine_circuit.is_open() {
                // All of them stay due; none is tried against an engine that is away.
                return Ok(());
            }
            match self.finish_release(&row).await {
                Ok(true) => pass.released += 1,
                Ok(false) => {
                    pass.waiting += 1;
                    self.postpone(&row).await?;
                }
                Err(Error::DatabaseUnavailable) => return Err(Error::DatabaseUnavailable),
                // This row or this offer, not everybody.
                Err(error) => {
                    tracing::warn!(row = row.id, ?error, "a release can't be finished yet");
                    pass.waiting += 1;
                    self.postpone(&row).await?;
                }
            }
        }
        Ok(())
    }

    async fn finish_release(&self, row: &Row) -> Result<bool, Error> {
        let offer = self.reservations.catalog.offer(&row.offer()?).await?;
        Ok(self.reservations.finish_release(&offer, row).await?.is_some())
    }

    async fn postpone(&self, row: &Row) -> Result<(), Error> {
        let next = self.database.clock().plus(self.options.backoff);
        outbox::Entity::update_many()
            .col_expr(outbox::Column::NextAttemptTime, Expr::value(next.0))
            .filter(outbox::Column::Id.eq(row.id))
            .filter(outbox::Column::State.eq(OutboxState::Releasing))
            .exec(self.database.writer())
            .await?;
        Ok(())
    }
}

/// What a transaction works on.
#[derive(Debug, Clone, Copy)]
enum Claim {
    /// All that is due, none of which has an order: nearly always.
    New,
    /// All that is due, looked at row by row.
    Any,
    /// The row with this id.
    One(i64),
}

/// What the poller itself needs to know of a row.
#[derive(Debug, FromQueryResult)]
struct Claimed {
    id: i64,
    activity_id: String,
    sku_id: String,
    quantity: i32,
}

impl Claimed {
    const COLUMNS: [outbox::Column; 4] = [
        outbox::Column::Id,
        outbox::Column::ActivityId,
        outbox::Column::SkuId,
        outbox::Column::Quantity,
    ];
}

impl From<Row> for Claimed {
    fn from(row: Row) -> Self {
        let Row { id, activity_id, sku_id, quantity, .. } = row;
        Self { id, activity_id, sku_id, quantity }
    }
}

/// Why a batch was not ordered as one.
enum Setback {
    Sql(DbErr),
    /// A row could not get its order.
    Rows,
}

impl From<DbErr> for Setback {
    fn from(error: DbErr) -> Self {
        Setback::Sql(error)
    }
}

/// One order of locks everywhere; see ARCHITECTURE.md.
fn sort_key(row: &Row) -> (&str, &str, &str, Option<i32>, &str) {
    (&row.activity_id, &row.sku_id, &row.user_id, row.slot, &row.reservation_id)
}
