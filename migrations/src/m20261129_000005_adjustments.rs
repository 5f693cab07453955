//! `adjustments`: each AdjustStock by its request, so that it acts once.
//!
//! `pending`: SQL has it, the engine's step is still due; `applied`: both have it; `cancelled`:
//! the undo of a set-aside was stored first, so the adjustment can never be applied.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE adjustments (
                request_id {token} NOT NULL PRIMARY KEY,
                activity_id {name} NOT NULL,
                sku_id {name} NOT NULL,
                delta BIGINT NOT NULL,
                epoch BIGINT NOT NULL,
                state {word} NOT NULL,
                create_time BIGINT NOT NULL,
                CONSTRAINT adjustments_delta CHECK (delta <> 0),
                CONSTRAINT adjustments_state CHECK (
                    state IN ('pending', 'applied', 'cancelled'))
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE adjustments").await
    }
}
