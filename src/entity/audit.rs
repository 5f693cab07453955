//! Who changed what; rows are only ever added.

use sea_orm::entity::prelude::*;

#[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "audit")]
pub struct Model {
    #[sea_orm(primary_key)]
    pub id: i64,
    pub at: i64,
    pub actor: String,
    pub action: String,
    pub activity_id: Option<String>,
    pub sku_id: Option<String>,
    /// JSON.
    #[sea_orm(column_type = "Text")]
    pub detail: String,
}

#[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
pub enum Relation {}

impl ActiveModelBehavior for ActiveModel {}
