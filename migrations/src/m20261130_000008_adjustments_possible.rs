//! What was possible in place of an adjustment that was refused, and the indexes that find
//! adjustments by state and by offer.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "ALTER TABLE adjustments ADD COLUMN possible BIGINT NOT NULL DEFAULT 0")
            .await?;
        run(manager, "CREATE INDEX adjustments_state ON adjustments (state)").await?;
        run(manager, "CREATE INDEX adjustments_offer ON adjustments (activity_id, sku_id)").await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        for index in ["adjustments_offer", "adjustments_state"] {
            let drop = if manager.get_database_backend() == crate::DbBackend::MySql {
                format!("DROP INDEX {index} ON adjustments")
            } else {
                format!("DROP INDEX {index}")
            };
            run(manager, &drop).await?;
        }
        run(manager, "ALTER TABLE adjustments DROP COLUMN possible").await
    }
}
