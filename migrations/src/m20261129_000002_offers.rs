//! `offers`: one SKU inside an activity, and the figures that keep it from being oversold (I1).
//!
//! `reserved` counts the units of live outbox rows (`pending`, `done`, `dead`); `sold` counts
//! those that became orders. One UPDATE moves both where both change: the CHECKs hold after
//! every statement, not only at the end of the transaction. They are the last net; the
//! conditional update decides before them.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE offers (
                activity_id {name} NOT NULL,
                sku_id {name} NOT NULL,
                title {title} NOT NULL,
                price_minor BIGINT NOT NULL,
                currency {word} NOT NULL,
                total BIGINT NOT NULL,
                reserved BIGINT NOT NULL DEFAULT 0,
                sold BIGINT NOT NULL DEFAULT 0,
                max_orders_per_user INTEGER NOT NULL,
                max_quantity_per_order INTEGER NOT NULL,
                hold_s BIGINT NOT NULL,
                segments INTEGER NOT NULL,
                epoch BIGINT NOT NULL DEFAULT 1,
                warm_time BIGINT NULL,
                PRIMARY KEY (activity_id, sku_id),
                CONSTRAINT offers_activity FOREIGN KEY (activity_id) REFERENCES activities (id),
                CONSTRAINT offers_total CHECK (total BETWEEN 0 AND 9007199254740991),
                CONSTRAINT offers_reserved_within_total CHECK (reserved BETWEEN 0 AND total),
                CONSTRAINT offers_sold_within_reserved CHECK (sold BETWEEN 0 AND reserved),
                CONSTRAINT offers_price CHECK (price_minor >= 0),
                CONSTRAINT offers_max_orders CHECK (max_orders_per_user BETWEEN 1 AND 100),
                CONSTRAINT offers_max_quantity CHECK (max_quantity_per_order BETWEEN 1 AND 1000),
                CONSTRAINT offers_hold CHECK (hold_s >= 0),
                CONSTRAINT offers_segments CHECK (segments BETWEEN 1 AND 256),
                CONSTRAINT offers_epoch CHECK (epoch >= 1)
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE offers").await
    }
}
