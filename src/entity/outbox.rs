//! The durable record of a reservation, and of the work that it still has.

use sea_orm::entity::prelude::*;

/// The most characters of `reason`.
pub const REASON_MAX_CHARS: usize = 200;
/// The most characters of `last_error`.
pub const LAST_ERROR_MAX_CHARS: usize = 1_000;

/// `pending → done → releasing → released`, `pending → releasing`,
/// `pending → dead → pending | releasing`, and `refused`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(
    rs_type = "String",
    db_type = "String(StringLen::N(32))",
    rename_all = "snake_case"
)]
pub enum OutboxState {
    Pending,
    Done,
    Releasing,
    Released,
    Refused,
    Dead,
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
    pub settle_time: Option<i64>,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
