//! Each AdjustStock by its request.

use sea_orm::entity::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "String(StringLen::N(32))", rename_all = "snake_case")]
pub enum AdjustmentState {
    /// SQL has it; the engine's step is due.
    Pending,
    Applied,
    /// It can never be applied any more.
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "adjustments")]
pub struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub request_id: String,
    pub activity_id: String,
    pub sku_id: String,
    pub delta: i64,
    pub epoch: i64,
    pub state: AdjustmentState,
    pub create_time: i64,
    /// Of a cancelled one: the delta nearest to it that could have been applied.
    pub possible: i64,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
