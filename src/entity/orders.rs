//! What reservations become.

use sea_orm::entity::prelude::*;

/// `created → confirmed`, `created → cancelled`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "String(StringLen::N(32))", rename_all = "snake_case")]
pub enum OrderState {
    Created,
    Confirmed,
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "orders")]
pub struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub order_no: String,
    pub reservation_id: String,
    pub activity_id: String,
    pub sku_id: String,
    pub user_id: String,
    /// None once the order is cancelled.
    pub slot: Option<i32>,
    pub quantity: i32,
    pub price_minor: i64,
    pub currency: String,
    pub state: OrderState,
    pub create_time: i64,
    pub confirm_time: Option<i64>,
    pub cancel_time: Option<i64>,
    pub cancel_reason: Option<String>,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
