//! `outbox`: a reservation exists when its row is here.
//!
//! `slot` is set exactly while the row is live (`pending`, `done`, `dead`), so the unique index
//! over it lets a buyer have one live reservation per slot (I4): NULLs differ from each other.
//! `expire_time` is NULL for what never expires and once the order is confirmed, so the index
//! over it holds nothing but holds. `batch` has no index: look rows up by `reservation_id`.

use crate::{
    DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, has_partial_indexes,
    run,
};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        // MySQL commits after each statement: its indexes are made with the table, so that the
        // step is there or not.
        // An index per state of due rows: a queue of pending ones must not be walked to find that
        // nothing is releasing.
        let (indexes, separate): (&str, &[&str]) = if has_partial_indexes(manager) {
            (
                "",
                &[
                    "CREATE INDEX outbox_pending ON outbox (next_attempt_time, id)
                     WHERE state = 'pending'",
                    "CREATE INDEX outbox_releasing ON outbox (next_attempt_time, id)
                     WHERE state = 'releasing'",
                    "CREATE INDEX outbox_dead ON outbox (id) WHERE state = 'dead'",
                    "CREATE INDEX outbox_expiring ON outbox (expire_time, id)
                     WHERE expire_time IS NOT NULL AND state IN ('pending', 'done')",
                    "CREATE INDEX outbox_offer ON outbox (activity_id, sku_id, id)",
                ],
            )
        } else {
            (
                ", INDEX outbox_due (state, next_attempt_time, id)
                 , INDEX outbox_expiring (state, expire_time, id)
                 , INDEX outbox_offer (activity_id, sku_id, id)",
                &[],
            )
        };
        let table = "CREATE TABLE outbox (
                id {serial},
                reservation_id {name} NOT NULL,
                activity_id {name} NOT NULL,
                sku_id {name} NOT NULL,
                user_id {token} NOT NULL,
                quantity INTEGER NOT NULL,
                slot INTEGER NULL,
                order_no {name} NOT NULL,
                request_id {token} NULL,
                epoch BIGINT NOT NULL,
                batch {uuid} NOT NULL,
                state {word} NOT NULL,
                reason {reason} NULL,
                attempts INTEGER NOT NULL DEFAULT 0,
                next_attempt_time BIGINT NOT NULL,
                last_error {error} NULL,
                expire_time BIGINT NULL,
                create_time BIGINT NOT NULL,
                settle_time BIGINT NULL,
                CONSTRAINT outbox_reservation UNIQUE (reservation_id),
                CONSTRAINT outbox_slot UNIQUE (activity_id, sku_id, user_id, slot),
                CONSTRAINT outbox_quantity CHECK (quantity BETWEEN 1 AND 1000),
                CONSTRAINT outbox_state_and_slot CHECK (
                    (state IN ('pending', 'done', 'dead') AND slot IS NOT NULL AND slot >= 1)
                    OR (state IN ('releasing', 'released', 'refused') AND slot IS NULL))
                {indexes}
            ) {table}";
        run(manager, &table.replace("{indexes}", indexes)).await?;
        for index in separate {
            run(manager, index).await?;
        }
        Ok(())
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE outbox").await
    }
}
