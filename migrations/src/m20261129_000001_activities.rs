//! `activities`: one row per sale.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE activities (
                id {name} NOT NULL PRIMARY KEY,
                title {title} NOT NULL,
                state {word} NOT NULL,
                start_time BIGINT NOT NULL,
                end_time BIGINT NOT NULL,
                retention_s BIGINT NOT NULL,
                version BIGINT NOT NULL DEFAULT 1,
                create_time BIGINT NOT NULL,
                update_time BIGINT NOT NULL,
                CONSTRAINT activities_state CHECK (state IN (
                    'pending_review', 'scheduled', 'active', 'paused', 'ended', 'settled')),
                CONSTRAINT activities_window CHECK (start_time < end_time),
                CONSTRAINT activities_retention CHECK (retention_s >= 0)
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE activities").await
    }
}
