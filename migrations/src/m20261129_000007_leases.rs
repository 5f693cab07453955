//! `leases`: what only one process at a time may hold, such as a database under the embedded
//! engine. A row stays when it is given back, so that `token` rises for ever.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE leases (
                name {name} NOT NULL PRIMARY KEY,
                owner {token} NOT NULL,
                token BIGINT NOT NULL,
                expire_time BIGINT NOT NULL
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE leases").await
    }
}
