//! The tables of the peers, in the database of the plan; they go when the bench ends.

use std::collections::HashSet;

use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait as _, DbErr, EntityTrait, QueryFilter,
    QuerySelect, entity::prelude::*, sea_query::ExprTrait,
};

use crate::{
    api::pb,
    database::Database,
    domain::{OfferKey, TimeMs},
};

/// What is left of an offer; the row lock's stock.
pub mod offers {
    use sea_orm::entity::prelude::*;

    #[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "bench_peer_offers")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub activity_id: String,
        #[sea_orm(primary_key, auto_increment = false)]
        pub sku_id: String,
        pub remaining: i64,
    }

    #[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

/// Orders: one for a buyer and offer.
pub mod orders {
    use sea_orm::entity::prelude::*;

    #[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "bench_peer_orders")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub order_no: String,
        pub activity_id: String,
        pub sku_id: String,
        pub user_id: String,
        pub request_id: String,
        pub quantity: i32,
        pub price_minor: i64,
        pub currency: String,
        pub state: String,
        pub create_time: i64,
    }

    #[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

const TABLES: [&str; 2] = [
    "CREATE TABLE IF NOT EXISTS bench_peer_offers (
        activity_id VARCHAR(64) NOT NULL,
        sku_id VARCHAR(64) NOT NULL,
        remaining BIGINT NOT NULL,
        PRIMARY KEY (activity_id, sku_id),
        CHECK (remaining >= 0))",
    "CREATE TABLE IF NOT EXISTS bench_peer_orders (
        order_no VARCHAR(64) NOT NULL PRIMARY KEY,
        activity_id VARCHAR(64) NOT NULL,
        sku_id VARCHAR(64) NOT NULL,
        user_id VARCHAR(128) NOT NULL,
        request_id VARCHAR(128) NOT NULL,
        quantity INTEGER NOT NULL,
        price_minor BIGINT NOT NULL,
        currency VARCHAR(32) NOT NULL,
        state VARCHAR(32) NOT NULL,
        create_time BIGINT NOT NULL,
        UNIQUE (activity_id, sku_id, user_id))",
];

/// Makes the tables and puts an offer into them.
///
/// # Errors
/// Those of any statement.
pub async fn open(database: &Database, offer: &OfferKey, total: u32) -> Result<(), DbErr> {
    for table in TABLES {
        database.writer().execute_unprepared(table).await?;
    }
    let row = offers::ActiveModel {
        activity_id: Set(offer.activity_id.to_string()),
        sku_id: Set(offer.sku_id.to_string()),
        remaining: Set(total.into()),
    };
    offers::Entity::insert(row).exec_without_returning(database.writer()).await?;
    Ok(())
}

/// Takes the tables away.
///
/// # Errors
/// Those of any statement.
pub async fn drop_all(database: &Database) -> Result<(), DbErr> {
    for table in ["bench_peer_orders", "bench_peer_offers"] {
        database.writer().execute_unprepared(&format!("DROP TABLE IF EXISTS {table}")).await?;
    }
    Ok(())
}

/// Who has orders, one entry for each order.
///
/// # Errors
/// Those of any read.
pub async fn buyers(database: &Database, offer: &OfferKey) -> Result<Vec<String>, DbErr> {
    orders::Entity::find()
        .select_only()
        .column(orders::Column::UserId)
        .filter(orders::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(orders::Column::SkuId.eq(offer.sku_id.as_str()))
        .into_tuple()
        .all(database.reader())
        .await
}

/// How many orders there are.
///
/// # Errors
/// Those of any read.
pub async fn count(database: &Database, offer: &OfferKey) -> Result<u64, DbErr> {
    orders::Entity::find()
        .filter(orders::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(orders::Column::SkuId.eq(offer.sku_id.as_str()))
        .count(database.reader())
        .await
}

/// Orders beyond the first of each buyer.
#[must_use]
pub fn doubled(buyers: &[String]) -> usize {
    buyers.len() - buyers.iter().collect::<HashSet<_>>().len()
}

/// What is left by SQL.
///
/// # Errors
/// Those of any read.
pub async fn remaining(database: &Database, offer: &OfferKey) -> Result<i64, DbErr> {
    let row = offers::Entity::find_by_id((offer.activity_id.to_string(), offer.sku_id.to_string()));
    Ok(row.one(database.reader()).await?.map_or(0, |row| row.remaining))
}

/// Takes one unit, if one is left; the row is locked until the transaction ends.
pub(super) async fn take_one(
    transaction: &crate::database::Transaction,
    offer: &OfferKey,
) -> Result<bool, DbErr> {
    let taken = offers::Entity::update_many()
        .col_expr(offers::Column::Remaining, Expr::col(offers::Column::Remaining).sub(1))
        .filter(offers::Column::ActivityId.eq(offer.activity_id.as_str()))
        .filter(offers::Column::SkuId.eq(offer.sku_id.as_str()))
        .filter(offers::Column::Remaining.gt(0))
        .exec(transaction)
        .await?;
    Ok(taken.rows_affected == 1)
}

/// Inserts one order.
pub(super) async fn insert(
    connection: &impl sea_orm::ConnectionTrait,
    order_no: &str,
    request: &pb::ReserveRequest,
) -> Result<(), DbErr> {
    let row = orders::ActiveModel {
        order_no: Set(order_no.to_owned()),
        activity_id: Set(request.activity_id.clone()),
        sku_id: Set(request.sku_id.clone()),
        user_id: Set(request.user_id.clone()),
        request_id: Set(request.request_id.clone()),
        quantity: Set(1),
        price_minor: Set(9_900),
        currency: Set("CNY".to_owned()),
        state: Set("created".to_owned()),
        create_time: Set(TimeMs::now().0),
    };
    orders::Entity::insert(row).exec_without_returning(connection).await?;
    Ok(())
}
