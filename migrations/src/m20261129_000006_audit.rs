//! `audit`: who changed what. Rows are only ever added; `detail` is JSON.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE audit (
                id {serial},
                at BIGINT NOT NULL,
                actor {token} NOT NULL,
                action {word} NOT NULL,
                activity_id {name} NULL,
                sku_id {name} NULL,
                detail TEXT NOT NULL,
                CONSTRAINT audit_activity UNIQUE (activity_id, id)
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE audit").await
    }
}
