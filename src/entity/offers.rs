//! One SKU inside an activity.

use sea_orm::entity::prelude::*;

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "offers")]
pub struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub activity_id: String,
    #[sea_orm(primary_key, auto_increment = false)]
    pub sku_id: String,
    pub title: String,
    pub price_minor: i64,
    pub currency: String,
    pub total: i64,
    /// Units of live outbox rows.
    pub reserved: i64,
    /// Units of live orders.
    pub sold: i64,
    pub max_orders_per_user: i32,
    pub max_quantity_per_order: i32,
    /// How long an unconfirmed order is held; 0 is for ever.
    pub hold_s: i64,
    pub segments: i32,
    pub epoch: i64,
    pub warm_time: Option<i64>,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
