//! What the database does by itself: the rows of a reservation and of an order, inserted with nothing
//! around them.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use sea_orm::{
    ActiveModelTrait,
    ActiveValue::{NotSet, Set},
    ColumnTrait as _, DbErr, EntityTrait, IntoActiveModel, QueryFilter as _,
};
use uuid::Uuid;

use super::{Error, Plan, process::Folder};
use crate::{
    config::SecretUrl,
    database::{Backend, Database},
    domain::{new_order_no, new_uuid},
    entity::{
        orders::{self, OrderState},
        outbox::{self, OutboxState},
    },
    server::sql_settings,
};

/// As many as a group of the outbox.
const ROWS_PER_TRANSACTION: usize = 512;
/// The shapes that are tried; the better one counts.
const ROWS_PER_STATEMENT: [usize; 2] = [64, 512];
/// No poller comes for these rows.
const NEVER: i64 = i64::MAX / 2;

/// A database with the tables of a server.
#[derive(Debug)]
pub(super) struct Raw {
    database: Database,
    activity_id: String,
    chunks: std::sync::atomic::AtomicU64,
    _folder: Folder,
}

impl Raw {
    pub(super) async fn open(plan: &Plan) -> Result<Self, Error> {
        let folder = Folder::inside(&plan.folder)?;
        let mut settings = plan.settings.database.clone();
        if plan.own_database {
            let file = folder.path().join("raw.db");
            settings.url = SecretUrl::new(format!("sqlite://{}", file.display()));
        }
        let database = Database::open(&sql_settings(&settings)).await;
        let database = database.map_err(|error| Error::Unavailable(error.to_string()))?;
        if database.backend() == Backend::Sqlite {
            database.migrate_up(None).await.map_err(away)?;
        }
        let activity_id = format!("bench-{}", Uuid::now_v7().simple());
        Ok(Self { database, activity_id, chunks: Default::default(), _folder: folder })
    }

    /// Rows of the outbox a second, over so many connections.
    pub(super) async fn outbox_rows_per_s(
        &self,
        connections: usize,
        lasts: Duration,
    ) -> Result<f64, Error> {
        self.best(connections, lasts, |sku_id, nth| self.outbox_row(sku_id, nth)).await
    }

    /// Orders a second, over so many connections.
    pub(super) async fn orders_per_s(
        &self,
        connections: usize,
        lasts: Duration,
    ) -> Result<f64, Error> {
        self.best(connections, lasts, |sku_id, nth| self.order(sku_id, nth)).await
    }

    async fn best<A>(
        &self,
        connections: usize,
        lasts: Duration,
        row: impl Fn(&str, usize) -> A + Copy,
    ) -> Result<f64, Error>
    where
        A: ActiveModelTrait + Send,
        <A::Entity as EntityTrait>::Model: IntoActiveModel<A>,
    {
        let mut best: f64 = 0.0;
        for per_statement in ROWS_PER_STATEMENT {
            let begun = Instant::now();
            let each = (0..connections).map(|_| async {
                let mut rows = 0;
                while begun.elapsed() < lasts {
                    self.transaction(per_statement, row).await?;
                    rows += ROWS_PER_TRANSACTION;
                }
                Ok::<usize, DbErr>(rows)
            });
            let rows: usize = try_join_all(each).await.map_err(away)?.into_iter().sum();
            best = best.max(rows as f64 / begun.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    async fn transaction<A>(
        &self,
        per_statement: usize,
        row: impl Fn(&str, usize) -> A,
    ) -> Result<(), DbErr>
    where
        A: ActiveModelTrait + Send,
        <A::Entity as EntityTrait>::Model: IntoActiveModel<A>,
    {
        let sku_id = self.next_sku();
        let transaction = self.database.begin().await?;
        for from in (0..ROWS_PER_TRANSACTION).step_by(per_statement) {
            let rows = (from..from + per_statement).map(|nth| row(&sku_id, nth));
            A::Entity::insert_many(rows).exec_without_returning(&transaction).await?;
        }
        transaction.commit().await
    }

    /// How long one row of the outbox takes, alone, with its commit: at this many a second.
    pub(super) async fn insert_us(&self, per_s: f64, lasts: Duration) -> Result<Vec<f64>, Error> {
        let sku_id = self.next_sku();
        super::paced(per_s, lasts, async |nth| {
            let row = self.outbox_row(&sku_id, nth);
            let insert = outbox::Entity::insert(row);
            insert.exec_without_returning(self.database.writer()).await.map(drop).map_err(away)
        })
        .await
    }

    /// Takes every row away again.
    pub(super) async fn close(self) -> Result<(), Error> {
        let chunks = self.chunks.load(std::sync::atomic::Ordering::Relaxed);
        for nth in 0..chunks {
            let sku_id = sku(nth);
            let rows = outbox::Entity::delete_many()
                .filter(outbox::Column::ActivityId.eq(&self.activity_id))
                .filter(outbox::Column::SkuId.eq(&sku_id));
            rows.exec(self.database.writer()).await.map_err(away)?;
            let rows = orders::Entity::delete_many()
                .filter(orders::Column::ActivityId.eq(&self.activity_id))
                .filter(orders::Column::SkuId.eq(&sku_id));
            rows.exec(self.database.writer()).await.map_err(away)?;
        }
        self.database.close().await.map_err(away)
    }

    /// The rows of a transaction have one, by which they are deleted.
    fn next_sku(&self) -> String {
        sku(self.chunks.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }

    fn outbox_row(&self, sku_id: &str, nth: usize) -> outbox::ActiveModel {
        outbox::ActiveModel {
            id: NotSet,
            reservation_id: Set(new_uuid().to_string()),
            activity_id: Set(self.activity_id.clone()),
            sku_id: Set(sku_id.to_owned()),
            user_id: Set(super::load::buyer("raw", nth)),
            quantity: Set(1),
            slot: Set(Some(1)),
            order_no: Set(new_order_no().to_string()),
            request_id: Set(Some("attempt-1".to_owned())),
            epoch: Set(1),
            batch: Set(new_uuid().simple().to_string()),
            state: Set(OutboxState::Pending),
            reason: Set(None),
            attempts: Set(0),
            next_attempt_time: Set(NEVER),
            last_error: Set(None),
            expire_time: Set(None),
            create_time: Set(self.database.clock().0),
            settle_time: Set(None),
        }
    }

    fn order(&self, sku_id: &str, nth: usize) -> orders::ActiveModel {
        orders::ActiveModel {
            order_no: Set(new_order_no().to_string()),
            reservation_id: Set(new_uuid().to_string()),
            activity_id: Set(self.activity_id.clone()),
            sku_id: Set(sku_id.to_owned()),
            user_id: Set(super::load::buyer("raw", nth)),
            slot: Set(Some(1)),
            quantity: Set(1),
            price_minor: Set(9_900),
            currency: Set("CNY".to_owned()),
            state: Set(OrderState::Created),
            create_time: Set(self.database.clock().0),
            confirm_time: Set(None),
            cancel_time: Set(None),
            cancel_reason: Set(None),
        }
    }
}

fn sku(nth: u64) -> String {
    format!("raw-{nth:06}")
}

fn away(error: DbErr) -> Error {
    Error::Unavailable(format!("the database: {error}"))
}
