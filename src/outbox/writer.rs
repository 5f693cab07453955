//! Group commit: one transaction writes the rows of many reservations.
//!
//! Natural batching: whoever is free takes all that waits, up to a size that `pace` measures; one group fills while
//! another commits.
//!
//! **Invariant:** SQL alone keeps `reserved <= total` (I1) and one reservation per slot (I4), and
//! nothing taken under another epoch than `offers.epoch` is ever stored. An unknown result is
//! never guessed (I8): only what SQL itself reports as rolled back is tried again.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sea_orm::{ConnectionTrait as _, DbErr};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};
use tokio_util::task::TaskTracker;

mod sql;

use super::{Row, pace::Pace};
use crate::{
    admission::room::Room,
    circuit::Circuit,
    database::{Backend, Database, SqlFault, Transaction, classify, insert_ignore, is_outage},
    domain::{
        BuyerId, OfferKey, OrderNo, RequestId, Reservation, ReservationId, ReservationState,
        TimeMs, new_uuid,
    },
    failpoints::failpoint,
    metrics::{self, Depth, UnderWay},
};
use sql::{
    insert_and_judge, insert_columns, insert_group, judge, raise_reserved, read_rows, sort_key,
    to_insert, units_of,
};

/// The most rows in one transaction; few in the simulator.
const GROUP: usize = if cfg!(test) { 3 } else { 512 };
/// Reservations under way, in groups: those in a transaction, those that wait for the next one, and
/// those that are in the engine or on their way back.
const GROUPS_UNDER_WAY: usize = 4;
/// Transactions in flight.
const WORKERS: usize = 2;
/// The most reservations that wait for a worker; more are left to the sweeper.
const QUEUE: usize = 20_000;
/// How long an answer is waited for once the database counts as away.
const LAST_CALL: Duration = Duration::from_millis(50);
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
    Live(Reservation),
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
    writing: UnderWay,
    /// For what is on its way to here.
    room: Arc<Room>,
    tasks: TaskTracker,
    /// Told after each commit that made rows due.
    due: Arc<Notify>,
}

#[derive(Debug)]
struct Queue {
    waiting: VecDeque<Waiting>,
    workers: usize,
    pace: Pace,
}

#[derive(Debug)]
struct Waiting {
    row: NewRow,
    since: Instant,
    reply: oneshot::Sender<Result<Written, WriteError>>,
}

/// Why a group was not written as one.
enum Setback {
    /// A slot is held by another, units are short, or the epoch differs: offer by offer, then.
    Irregular,
    Sql(DbErr),
}

/// How a group was written as one.
enum Together {
    /// All rows are new; their holds began then.
    New { since: TimeMs },
    /// Not all of them: one answer for each.
    Judged(Vec<Result<Written, WriteError>>),
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
    /// A writer whose workers run in `tasks`, and which tells `due` about new rows. It makes room for
    /// at most `max_in_flight`.
    #[must_use]
    pub fn new(
        database: Database,
        circuit: Arc<Circuit>,
        tasks: TaskTracker,
        due: Arc<Notify>,
        max_in_flight: usize,
    ) -> Self {
        let pace = Pace::new(GROUP);
        let room = Room::new(pace.cap() * GROUPS_UNDER_WAY, max_in_flight);
        let queue = Mutex::new(Queue { waiting: VecDeque::new(), workers: 0, pace });
        Self { database, circuit, queue, writing: UnderWay::default(), room, tasks, due }
    }

    /// For reservations that are under way to here.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Records one reservation, together with whoever else waits.
    ///
    /// # Errors
    /// [`WriteError`]; after `Unknown` the row may be stored.
    pub async fn write(self: &Arc<Self>, row: NewRow) -> Result<Written, WriteError> {
        let (reply, answer) = oneshot::channel();
        {
            let mut queue = self.locked();
            if queue.waiting.len() >= QUEUE {
                return Err(WriteError::Unknown("too many wait for the database".into()));
            }
            queue.waiting.push_back(Waiting { row, since: Instant::now(), reply });
            if queue.workers < WORKERS {
                queue.workers += 1;
                self.tasks.spawn(self.clone().work());
            }
        }
        tokio::select! {
            biased;
            answer = answer => {
                answer.unwrap_or_else(|_| Err(WriteError::Unknown("the writer died".into())))
            }
            // It is in `unacked`, where the sweeper finds it when the database is back.
            () = self.circuit.stays_open(LAST_CALL) => {
                Err(WriteError::Unknown("the database is away".into()))
            }
        }
    }

    /// How long the reservation has waited that has waited longest.
    pub fn longest_wait(&self) -> Duration {
        self.locked().waiting.front().map_or(Duration::ZERO, |oldest| oldest.since.elapsed())
    }

    /// The reservations that wait for a worker, and those that one has in a transaction.
    pub fn rows(&self) -> Depth {
        Depth { waiting: self.locked().waiting.len(), under_way: self.writing.count() }
    }

    fn note_group(&self, rows: usize, took: Duration) {
        metrics::group_written(rows, took);
        let mut queue = self.locked();
        let before = queue.pace.cap();
        queue.pace.note(rows, took);
        let now = queue.pace.cap();
        if now != before {
            self.room.resize(now * GROUPS_UNDER_WAY);
        }
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
            let writing = self.writing.begin(rows.len());
            let answers = self.write_group(rows).await;
            drop(writing);
            for (reply, answer) in replies.into_iter().zip(answers) {
                // The task that waits may have been aborted with the runtime.
                let _ = reply.send(answer);
            }
        }
    }

    /// What this worker writes next; `None` when it may go home. What nobody waits for any more is
    /// left out: the sweeper has it. A reservation is in a group at most once: a repeat of it waits
    /// for the next one and then finds the row.
    fn next_group(&self) -> Option<Vec<Waiting>> {
        let mut queue = self.locked();
        queue.waiting.retain(|waiting| !waiting.reply.is_closed());
        if queue.waiting.is_empty() {
            queue.workers -= 1;
            return None;
        }
        let waiting = queue.waiting.len();
        let most = queue.pace.take(waiting);
        let mut group: Vec<Waiting> = Vec::with_capacity(most);
        let mut inside = HashSet::new();
        let mut later = Vec::new();
        while group.len() < most
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
    async fn write_group(&self, rows: Vec<NewRow>) -> Vec<Result<Written, WriteError>> {
        match self.repeat(|| self.write_together(&rows)).await {
            Ok(Together::New { since }) => {
                rows.into_iter().map(|row| Ok(Written::Live(row.into_reservation(since)))).collect()
            }
            Ok(Together::Judged(answers)) => answers,
            Err(Setback::Irregular) => self.write_offer_by_offer(&rows).await,
            Err(Setback::Sql(error)) => match classify(&error) {
                // One bad row fails alone.
                SqlFault::Data if rows.len() > 1 => self.write_offer_by_offer(&rows).await,
                SqlFault::Data | SqlFault::RolledBack | SqlFault::Away | SqlFault::Unknown => {
                    let error = self.unknown(&error);
                    rows.iter().map(|_| Err(error.clone())).collect()
                }
            },
        }
    }

    /// The usual case: all rows are new and fit.
    async fn write_together(&self, rows: &[NewRow]) -> Result<Together, Setback> {
        let batch = new_uuid().simple().to_string();
        let now = self.database.clock();
        if self.database.backend() == Backend::Postgres
            && let Some(statement) = insert_group(&batch, now, rows)
        {
            failpoint!("before_outbox_commit");
            let begun = Instant::now();
            match self.database.writer().execute_raw(statement).await {
                Ok(_) => return Ok(self.kept(rows.len(), begun, Together::New { since: now })),
                // Nothing was kept; the next lines find out which of them are new and fit.
                Err(error) if classify(&error) == SqlFault::Data => {}
                Err(error) => return Err(error.into()),
            }
        }
        let transaction = self.database.begin_group().await?;
        let begun = Instant::now();
        let outcome = self.insert_and_count(&transaction, &batch, now, rows).await;
        match outcome {
            Ok(written) => {
                failpoint!("before_outbox_commit");
                transaction.commit().await?;
                Ok(self.kept(rows.len(), begun, written))
            }
            Err(setback) => {
                // The first error is the one that counts; a failed rollback ends the connection.
                let _ = transaction.rollback().await;
                Err(setback)
            }
        }
    }

    /// A group is committed.
    fn kept(&self, rows: usize, begun: Instant, written: Together) -> Together {
        self.note_group(rows, begun.elapsed());
        failpoint!("after_outbox_commit");
        self.due.notify_one();
        written
    }

    async fn insert_and_count(
        &self,
        transaction: &Transaction,
        batch: &str,
        now: TimeMs,
        rows: &[NewRow],
    ) -> Result<Together, Setback> {
        let inserted = match self.database.backend() {
            Backend::Postgres => insert_columns(transaction, batch, now, rows).await?,
            Backend::Sqlite | Backend::MySql => {
                let models = rows.iter().map(|row| to_insert(row, batch, now)).collect();
                insert_ignore(transaction, models).await?
            }
        };
        // MySQL counts an ignored row like an inserted one, so there it is always read back.
        if inserted == rows.len() as u64 && self.database.backend() != Backend::MySql {
            count(transaction, rows.iter()).await?;
            return Ok(Together::New { since: now });
        }
        let ids = rows.iter().map(|row| &row.reservation_id);
        let mut stored = read_rows(transaction, ids).await?;
        let is_new = |row: &&NewRow| {
            stored.get(row.reservation_id.as_str()).is_some_and(|stored| stored.batch == batch)
        };
        count(transaction, rows.iter().filter(is_new)).await?;
        let answers = rows.iter().map(|row| stored.remove(row.reservation_id.as_str()).map(judge));
        answers.collect::<Option<_>>().map(Together::Judged).ok_or(Setback::Irregular)
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
        let batch = new_uuid().simple().to_string();
        let now = self.database.clock();
        let transaction = self.database.begin_group().await?;
        let outcome = insert_and_judge(&transaction, &batch, now, rows).await;
        match outcome {
            Ok((answers, true)) => {
                failpoint!("before_judged_commit");
                transaction.commit().await?;
                failpoint!("after_judged_commit");
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

/// Counts the units of new rows, offer by offer.
async fn count(
    transaction: &Transaction,
    rows: impl Iterator<Item = &NewRow>,
) -> Result<(), Setback> {
    for ((offer, epoch), units) in units_of(rows) {
        if !raise_reserved(transaction, offer, epoch, units).await? {
            return Err(Setback::Irregular);
        }
    }
    Ok(())
}

impl NewRow {
    /// The reservation that the row stands for, once it is committed; its hold began then.
    fn into_reservation(self, since: TimeMs) -> Reservation {
        Reservation {
            reservation_id: self.reservation_id,
            order_no: self.order_no,
            offer: self.offer,
            buyer: self.buyer,
            quantity: self.quantity,
            state: ReservationState::Queued,
            reserve_time: self.reserve_time,
            expire_time: self.hold.map(|hold| since.plus(hold)),
        }
    }
}
