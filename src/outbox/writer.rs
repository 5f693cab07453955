//! Group commit: one transaction writes the rows of many reservations.
//!
//! Natural batching: whoever is free takes all that waits, up to a cap; one group fills while
//! another commits.
//!
//! **Invariant:** SQL alone keeps `reserved <= total` (I1) and one reservation per slot (I4), and
//! nothing taken under another epoch than `offers.epoch` is ever stored. An unknown result is
//! never guessed (I8): only what SQL itself reports as rolled back is tried again.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sea_orm::{
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
    sea_query::{Expr, ExprTrait},
};
use tokio::sync::{Notify, oneshot};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{Row, reason};
use crate::{
    circuit::Circuit,
    database::{Backend, Database, SqlFault, classify, insert_ignore, is_outage, lock_rows},
    domain::{BuyerId, OfferKey, OrderNo, RequestId, ReservationId, TimeMs},
    entity::{offers, outbox, outbox::OutboxState},
    failpoints::failpoint,
};

/// The most rows in one transaction.
const GROUP: usize = 512;
/// Transactions in flight.
const WORKERS: usize = 2;
/// How often a transaction is repeated that SQL reports as rolled back.
const REPEATS: u32 = 8;

/// A reservation as the engine took it, to be recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow {
    pub offer: OfferKey,
    /// The epoch under which the units were taken.
    pub epoch: u64,
    pub buyer: BuyerId,
    pub slot: u32,
    pub reservation_id: ReservationId,
    pub quantity: u32,
    pub order_no: OrderNo,
    /// Known when the request is at hand, not when the sweeper records it.
    pub request_id: Option<RequestId>,
    pub reserve_time: TimeMs,
    /// How long the hold lasts from the commit on; `None` when it does not expire.
    pub hold: Option<Duration>,
}

/// What SQL says of a reservation.
#[derive(Debug, Clone, PartialEq)]
pub enum Written {
    /// The row is there and live: written now, or before.
    Live(Row),
    /// SQL refused it, now or before; `reason` tells why.
    Refused(Row),
    /// It was released.
    GivenBack(Row),
    /// SQL is at another epoch; nothing was stored.
    OtherEpoch { sql: u64 },
}

/// Why it is not known what SQL says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The row may or may not be stored; the sweeper settles it.
    #[error("it is unknown whether the reservation was stored: {0}")]
    Unknown(String),
    /// SQL refuses this row for its own data; it stays in the engine until somebody looks.
    #[error("the database refuses the row: {0}")]
    Data(String),
    /// There is no such offer in SQL.
    #[error("the offer is not in the database")]
    NoOffer,
}

/// Writes reservations to the outbox, many at a time.
#[derive(Debug)]
pub struct Writer {
    database: Database,
    circuit: Arc<Circuit>,
    queue: Mutex<Queue>,
    tasks: TaskTracker,
    /// Told after each commit that made rows due.
    due: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    workers: usize,
}

#[derive(Debug)]
struct Waiting {
    row: NewRow,
    reply: oneshot::Sender<Result<Written, WriteError>>,
}

/// Why a group was not written as one.
enum Setback {
    /// A slot is held by another, units are short, or the epoch differs: offer by offer, then.
    Irregular,
    Sql(DbErr),
}

/// Makes room for another worker when this one panics.
struct AtWork<'a>(&'a Writer);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.locked().workers -= 1;
        }
    }
}

impl From<DbErr> for Setback {
    fn from(error: DbErr) -> Self {
        Setback::Sql(error)
    }
}

impl Writer {
    /// A writer whose workers run in `tasks`, and which tells `due` about new rows.
    #[must_use]
    pub fn new(
        database: Database,
        circuit: Arc<Circuit>,
        tasks: TaskTracker,
        due: Arc<Notify>,
    ) -> Self {
        Self { database, circuit, queue: Mutex::default(), tasks, due }
    }

    /// Records one reservation, together with whoever else waits.
    ///
    /// # Errors
    /// [`WriteError`]; after `Unknown` the row may be stored.
    pub async fn write(self: &Arc<Self>, row: NewRow) -> Result<Written, WriteError> {
        let (reply, answer) = oneshot::channel();
        {
            let mut queue = self.locked();
            queue.waiting.push_back(Waiting { row, reply });
            if queue.workers < WORKERS {
                queue.workers += 1;
                self.tasks.spawn(self.clone().work());
            }
        }
        answer.await.unwrap_or_else(|_| Err(WriteError::Unknown("the writer died".into())))
    }

    /// How many reservations wait to be written.
    pub fn waiting(&self) -> usize {
        self.locked().waiting.len()
    }

    fn locked(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn work(self: Arc<Self>) {
        let _at_work = AtWork(&self);
        while let Some(mut group) = self.next_group() {
            group.sort_by(|a, b| sort_key(&a.row).cmp(&sort_key(&b.row)));
            let (rows, replies): (Vec<NewRow>, Vec<_>) =
                group.into_iter().map(|waiting| (waiting.row, waiting.reply)).unzip();
            let answers = self.write_group(&rows).await;
            for (reply, answer) in replies.into_iter().zip(answers) {
                // The task that waits may have been aborted with the runtime.
                let _ = reply.send(answer);
            }
        }
    }

    /// What this worker writes next; `None` when it may go home. A reservation is in a group at
    /// most once: a repeat of it waits for the next one and then finds the row.
    fn next_group(&self) -> Option<Vec<Waiting>> {
        let mut queue = self.locked();
        if queue.waiting.is_empty() {
            queue.workers -= 1;
            return None;
        }
        let mut group: Vec<Waiting> = Vec::with_capacity(GROUP.min(queue.waiting.len()));
        let mut inside = HashSet::new();
        let mut later = Vec::new();
        while group.len() < GROUP
            && let Some(waiting) = queue.waiting.pop_front()
        {
            if inside.insert(waiting.row.reservation_id.clone()) {
                group.push(waiting);
            } else {
                later.push(waiting);
            }
        }
        for waiting in later.into_iter().rev() {
            queue.waiting.push_front(waiting);
        }
        Some(group)
    }

    /// Writes rows that are sorted and distinct; one answer for each, in order.
    async fn write_group(&self, rows: &[NewRow]) -> Vec<Result<Written, WriteError>> {
        match self.repeat(|| self.write_together(rows)).await {
            Ok(written) => written.into_iter().map(Ok).collect(),
            Err(Setback::Irregular) => self.write_offer_by_offer(rows).await,
            Err(Setback::Sql(error)) => match classify(&error) {
                // One bad row fails alone.
                SqlFault::Data if rows.len() > 1 => self.write_offer_by_offer(rows).await,
                SqlFault::Data | SqlFault::RolledBack | SqlFault::Away | SqlFault::Unknown => {
                    let error = self.unknown(&error);
                    rows.iter().map(|_| Err(error.clone())).collect()
                }
            },
        }
    }

    /// The usual case: all rows are new and fit.
    async fn write_together(&self, rows: &[NewRow]) -> Result<Vec<Written>, Setback> {
        let batch = Uuid::now_v7().simple().to_string();
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let outcome = self.insert_and_count(&transaction, &batch, now, rows).await;
        match outcome {
            Ok(written) => {
                failpoint!("before_outbox_commit");
                transaction.commit().await?;
                failpoint!("after_outbox_commit");
                self.due.notify_one();
                Ok(written)
            }
            Err(setback) => {
                // The first error is the one that counts; a failed rollback ends the connection.
                let _ = transaction.rollback().await;
                Err(setback)
            }
        }
    }

    async fn insert_and_count(
        &self,
        transaction: &DatabaseTransaction,
        batch: &str,
        now: TimeMs,
        rows: &[NewRow],
    ) -> Result<Vec<Written>, Setback> {
        let models = rows.iter().map(|row| to_insert(row, batch, now)).collect();
        let inserted = insert_ignore(transaction, models).await?;
        // MySQL counts an ignored row like an inserted one, so there it is always read back.
        let all_new = inserted == rows.len() as u64 && self.database.backend() != Backend::MySql;
        let stored = if all_new {
            HashMap::new()
        } else {
            read_rows(transaction, rows.iter().map(|row| &row.reservation_id)).await?
        };

        let mut written = Vec::with_capacity(rows.len());
        let mut new_units: BTreeMap<(&OfferKey, u64), u64> = BTreeMap::new();
        for row in rows {
            let stored = match stored.get(row.reservation_id.as_str()) {
                Some(stored) => stored.clone(),
                None if all_new => as_stored(row, batch, now),
                None => return Err(Setback::Irregular),
            };
            if stored.batch == batch {
                *new_units.entry((&row.offer, row.epoch)).or_default() += u64::from(row.quantity);
            }
            written.push(judge(stored));
        }
        for ((offer, epoch), units) in new_units {
            if !raise_reserved(transaction, offer, epoch, units).await? {
                return Err(Setback::Irregular);
            }
        }
        Ok(written)
    }

    async fn write_offer_by_offer(&self, rows: &[NewRow]) -> Vec<Result<Written, WriteError>> {
        let mut answers: Vec<Option<Result<Written, WriteError>>> = vec![None; rows.len()];
        let mut groups: BTreeMap<(&OfferKey, u64), Vec<usize>> = BTreeMap::new();
        for (index, row) in rows.iter().enumerate() {
            groups.entry((&row.offer, row.epoch)).or_default().push(index);
        }
        for indexes in groups.into_values() {
            let group: Vec<&NewRow> = indexes.iter().map(|&index| &rows[index]).collect();
            let failed = match self.judge_offer(&group).await {
                Ok(written) => {
                    for (index, written) in indexes.into_iter().zip(written) {
                        answers[index] = Some(written);
                    }
                    continue;
                }
                Err(failed) => failed,
            };
            let alone = matches!(failed, WriteError::Data(_)) && group.len() > 1;
            for index in indexes {
                answers[index] = Some(if alone {
                    match self.judge_offer(&[&rows[index]]).await {
                        Ok(mut written) => written.remove(0),
                        Err(failed) => Err(failed),
                    }
                } else {
                    Err(failed.clone())
                });
            }
        }
        answers
            .into_iter()
            .map(|answer| answer.expect("every row is in the group of its offer and epoch"))
            .collect()
    }

    async fn judge_offer(
        &self,
        rows: &[&NewRow],
    ) -> Result<Vec<Result<Written, WriteError>>, WriteError> {
        for _ in 0..REPEATS {
            match self.repeat(|| self.write_one_offer(rows)).await {
                Ok(written) => return Ok(written),
                // The rival was released in between: insert again.
                Err(Setback::Irregular) => {}
                Err(Setback::Sql(error)) => return Err(self.unknown(&error)),
            }
        }
        // Nothing was stored; the sweeper comes back to it.
        Err(WriteError::Unknown("the slot was never free and never held".into()))
    }

    /// The careful case: rows of one offer and epoch, each judged for itself.
    async fn write_one_offer(
        &self,
        rows: &[&NewRow],
    ) -> Result<Vec<Result<Written, WriteError>>, Setback> {
        let batch = Uuid::now_v7().simple().to_string();
        let now = self.database.clock();
        let transaction = self.database.begin().await?;
        let outcome = insert_and_judge(&transaction, &batch, now, rows).await;
        match outcome {
            Ok((answers, true)) => {
                transaction.commit().await?;
                self.due.notify_one();
                Ok(answers)
            }
            Ok((answers, false)) => {
                transaction.rollback().await?;
                Ok(answers)
            }
            Err(setback) => {
                let _ = transaction.rollback().await;
                Err(setback)
            }
        }
    }

    /// Repeats a transaction for as long as SQL itself says that nothing of it was kept.
    async fn repeat<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, Setback>
    where
        F: Future<Output = Result<T, Setback>>,
    {
        let mut repeats = 0;
        loop {
            match attempt().await {
                Err(Setback::Sql(error))
                    if matches!(classify(&error), SqlFault::RolledBack) && repeats < REPEATS =>
                {
                    repeats += 1;
                    let most = 2u64 << repeats;
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=most))).await;
                }
                other => return other,
            }
        }
    }

    fn unknown(&self, error: &DbErr) -> WriteError {
        if is_outage(error) {
            self.circuit.trip(&error.to_string());
        }
        match classify(error) {
            SqlFault::Data => WriteError::Data(error.to_string()),
            SqlFault::RolledBack | SqlFault::Away | SqlFault::Unknown => {
                WriteError::Unknown(error.to_string())
            }
        }
    }
}

/// One order of locks everywhere: activity, SKU, user, slot, reservation.
fn sort_key(row: &NewRow) -> (&OfferKey, &BuyerId, u32, &ReservationId) {
    (&row.offer, &row.buyer, row.slot, &row.reservation_id)
}

fn to_insert(row: &NewRow, batch: &str, now: TimeMs) -> outbox::ActiveModel {
    outbox::ActiveModel {
        id: NotSet,
        reservation_id: Set(row.reservation_id.to_string()),
        activity_id: Set(row.offer.activity_id.to_string()),
        sku_id: Set(row.offer.sku_id.to_string()),
        user_id: Set(row.buyer.to_string()),
        quantity: Set(to_quantity(row.quantity)),
        slot: Set(Some(to_slot(row.slot))),
        order_no: Set(row.order_no.to_string()),
        request_id: Set(row.request_id.as_ref().map(ToString::to_string)),
        epoch: Set(to_epoch(row.epoch)),
        batch: Set(batch.to_owned()),
        state: Set(OutboxState::Pending),
        reason: Set(None),
        attempts: Set(0),
        next_attempt_time: Set(now.0),
        last_error: Set(None),
        expire_time: Set(row.hold.map(|hold| now.plus(hold).0)),
        create_time: Set(row.reserve_time.0),
        settle_time: Set(None),
    }
}

/// What SQL holds after `to_insert`, but for the id, which nobody needs.
fn as_stored(row: &NewRow, batch: &str, now: TimeMs) -> Row {
    Row {
        id: 0,
        reservation_id: row.reservation_id.to_string(),
        activity_id: row.offer.activity_id.to_string(),
        sku_id: row.offer.sku_id.to_string(),
        user_id: row.buyer.to_string(),
        quantity: to_quantity(row.quantity),
        slot: Some(to_slot(row.slot)),
        order_no: row.order_no.to_string(),
        request_id: row.request_id.as_ref().map(ToString::to_string),
        epoch: to_epoch(row.epoch),
        batch: batch.to_owned(),
        state: OutboxState::Pending,
        reason: None,
        attempts: 0,
        next_attempt_time: now.0,
        last_error: None,
        expire_time: row.hold.map(|hold| now.plus(hold).0),
        create_time: row.reserve_time.0,
        settle_time: None,
    }
}

fn to_quantity(quantity: u32) -> i32 {
    i32::try_from(quantity).unwrap_or(i32::MAX)
}

fn to_slot(slot: u32) -> i32 {
    i32::try_from(slot).unwrap_or(i32::MAX)
}

fn to_epoch(epoch: u64) -> i64 {
    i64::try_from(epoch).unwrap_or(i64::MAX)
}

fn judge(row: Row) -> Written {
    match row.state {
        OutboxState::Pending | OutboxState::Done | OutboxState::Dead => Written::Live(row),
        OutboxState::Releasing | OutboxState::Released => Written::GivenBack(row),
        OutboxState::Refused => Written::Refused(row),
    }
}

async fn read_rows(
    connection: &impl ConnectionTrait,
    ids: impl Iterator<Item = &ReservationId>,
) -> Result<HashMap<String, Row>, DbErr> {
    let ids: Vec<&str> = ids.map(ReservationId::as_str).collect();
    let mut found = HashMap::with_capacity(ids.len());
    for some in ids.chunks(256) {
        let rows = outbox::Entity::find()
            .filter(outbox::Column::ReservationId.is_in(some.iter().copied()))
            .all(connection)
            .await?;
        found.extend(rows.into_iter().map(|row| (row.reservation_id.clone(), row)));
    }
    Ok(found)
}

/// Whether the units fit under the total, at this epoch; if so they are counted.
async fn raise_reserved(
    transaction: &DatabaseTransaction,
    offer: &OfferKey,
    epoch: u64,
    units: u64,
) -> Result<bool, DbErr> {
    let units = i64::try_from(units).unwrap_or(i64::MAX);
    let result = offers::Entity::update_many()
        .col_expr(offers::Column::Reserved, Expr::col(offers::Column::Reserved).add(units))
        .filter(offers::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(offers::Column::SkuId.eq(offer.sku_id.as_str()))
        .filter(offers::Column::Epoch.eq(to_epoch(epoch)))
        .filter(
            Expr::col(offers::Column::Reserved).add(units).lte(Expr::col(offers::Column::Total)),
        )
        .exec(transaction)
        .await?;
    Ok(result.rows_affected == 1)
}

/// Inserts what fits, stores refusals, and says whether to commit: when SQL is at another epoch
/// nothing is stored, not even a refusal.
async fn insert_and_judge(
    transaction: &DatabaseTransaction,
    batch: &str,
    now: TimeMs,
    rows: &[&NewRow],
) -> Result<(Vec<Result<Written, WriteError>>, bool), Setback> {
    let Some(first) = rows.first() else {
        return Ok((Vec::new(), false));
    };
    let ids = || rows.iter().map(|row| &row.reservation_id);
    let models = rows.iter().map(|row| to_insert(row, batch, now)).collect();
    insert_ignore(transaction, models).await?;
    let stored = read_rows(transaction, ids()).await?;
    for row in rows {
        if !stored.contains_key(row.reservation_id.as_str()) {
            refuse_duplicate(transaction, batch, now, row).await?;
        }
    }

    let query = offers::Entity::find_by_id((
        first.offer.activity_id.to_string(),
        first.offer.sku_id.to_string(),
    ));
    let Some(offer) = lock_rows(query).one(transaction).await? else {
        return Ok((rows.iter().map(|_| Err(WriteError::NoOffer)).collect(), false));
    };
    // Read again behind the lock: this is the state that counts.
    let mut stored = read_rows(transaction, ids()).await?;
    let is_new = |row: &Row| row.batch == batch;

    if offer.epoch != to_epoch(first.epoch) {
        let sql = u64::try_from(offer.epoch).unwrap_or(0);
        let answers = rows
            .iter()
            .map(|row| match stored.remove(row.reservation_id.as_str()) {
                Some(stored) if !is_new(&stored) => Ok(judge(stored)),
                Some(_) | None => Ok(Written::OtherEpoch { sql }),
            })
            .collect();
        return Ok((answers, false));
    }

    let mut left = offer.total - offer.reserved;
    let mut units = 0u64;
    let mut in_order_of_taking: Vec<&&NewRow> = rows.iter().collect();
    in_order_of_taking.sort_by_key(|row| row.reserve_time);
    for row in in_order_of_taking {
        let Some(stored) = stored.get_mut(row.reservation_id.as_str()) else {
            continue;
        };
        if !is_new(stored) || stored.state != OutboxState::Pending {
            continue;
        }
        if i64::from(row.quantity) <= left {
            left -= i64::from(row.quantity);
            units += u64::from(row.quantity);
        } else {
            refuse_sold_out(transaction, stored).await?;
        }
    }
    if units > 0 && !raise_reserved(transaction, &first.offer, first.epoch, units).await? {
        return Err(Setback::Sql(DbErr::Custom(
            "the offer changed although its row is locked".into(),
        )));
    }
    rows.iter()
        .map(|row| match stored.remove(row.reservation_id.as_str()) {
            Some(stored) => Ok(Ok(judge(stored))),
            None => Err(Setback::Irregular),
        })
        .collect::<Result<Vec<_>, _>>()
        .map(|answers| (answers, true))
}

/// The slot belongs to another reservation: stores the refusal. When the rival was released in
/// between, the row is inserted as it should be.
async fn refuse_duplicate(
    transaction: &DatabaseTransaction,
    batch: &str,
    now: TimeMs,
    row: &NewRow,
) -> Result<(), Setback> {
    let query = outbox::Entity::find()
        .filter(outbox::Column::ActivityId.eq(row.offer.activity_id.as_str()))
        .filter(outbox::Column::SkuId.eq(row.offer.sku_id.as_str()))
        .filter(outbox::Column::UserId.eq(row.buyer.as_str()))
        .filter(outbox::Column::Slot.eq(to_slot(row.slot)));
    let mut model = to_insert(row, batch, now);
    if lock_rows(query).one(transaction).await?.is_some() {
        model.slot = Set(None);
        model.state = Set(OutboxState::Refused);
        model.reason = Set(Some(reason::DUPLICATE.into()));
        model.expire_time = Set(None);
        model.settle_time = Set(Some(now.0));
    }
    insert_ignore(transaction, vec![model]).await?;
    Ok(())
}

async fn refuse_sold_out(transaction: &DatabaseTransaction, row: &mut Row) -> Result<(), DbErr> {
    outbox::Entity::update_many()
        .col_expr(outbox::Column::State, Expr::value(OutboxState::Refused))
        .col_expr(outbox::Column::Slot, Expr::value(Option::<i32>::None))
        .col_expr(outbox::Column::Reason, Expr::value(reason::SOLD_OUT))
        .col_expr(outbox::Column::ExpireTime, Expr::value(Option::<i64>::None))
        .filter(outbox::Column::ReservationId.eq(row.reservation_id.as_str()))
        .filter(outbox::Column::State.eq(OutboxState::Pending))
        .exec(transaction)
        .await?;
    row.state = OutboxState::Refused;
    row.slot = None;
    row.reason = Some(reason::SOLD_OUT.into());
    row.expire_time = None;
    Ok(())
}
