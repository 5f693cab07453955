//! The durable record of a reservation, and of the work that it still has.

use sea_orm::{entity::prelude::*, sea_query::SimpleExpr};

/// The most characters of `reason`.
pub const REASON_MAX_CHARS: usize = 200;
/// The most characters of `last_error`.
pub const LAST_ERROR_MAX_CHARS: usize = 1_000;

/// `pending → done → releasing → released`, `pending → releasing`,
/// `pending → dead → pending | releasing`, and `refused`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "String(StringLen::N(32))", rename_all = "snake_case")]
pub enum OutboxState {
    Pending,
    Done,
    Releasing,
    Released,
    Refused,
    Dead,
}

/// Rows in `state` with work to do: `Pending` or `Releasing`, or `Dead` for a person.
///
/// The words stand in the SQL: with bound values SQLite leaves the partial index aside, and so
/// may PostgreSQL. One state at a time: over two, MySQL sorts, and a locking read then locks
/// every due row and not only those of its LIMIT. Add `next_attempt_time <= now`, ordered by
/// (`next_attempt_time`, `id`).
#[must_use]
pub fn due(state: OutboxState) -> SimpleExpr {
    Expr::cust(format!("state = '{}'", state.to_value()))
}

/// Rows in `state` with a hold that ends: `Pending` or `Done`; as [`due`], one state at a time.
/// Add `expire_time <= now`, ordered by (`expire_time`, `id`).
#[must_use]
pub fn expiring(state: OutboxState) -> SimpleExpr {
    Expr::cust(format!(
        "expire_time IS NOT NULL AND state IN ('pending', 'done') AND state = '{}'",
        state.to_value()
    ))
}

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "outbox")]
pub struct Model {
    #[sea_orm(primary_key)]
    pub id: i64,
    pub reservation_id: String,
    pub activity_id: String,
    pub sku_id: String,
    pub user_id: String,
    pub quantity: i32,
    /// Set exactly while the row is live: `Pending`, `Done`, `Dead`.
    pub slot: Option<i32>,
    pub order_no: String,
    pub request_id: Option<String>,
    pub epoch: i64,
    /// Which attempt inserted the row. It has no index: look rows up by `reservation_id`.
    pub batch: String,
    pub state: OutboxState,
    pub reason: Option<String>,
    pub attempts: i32,
    pub next_attempt_time: i64,
    pub last_error: Option<String>,
    /// When the hold ends; none when it never does, and once the order is confirmed.
    pub expire_time: Option<i64>,
    pub create_time: i64,
    /// When the row became what it is now: an order, released, refused, or a dead letter.
    pub settle_time: Option<i64>,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
