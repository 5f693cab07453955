//! `orders`: what reservations become.
//!
//! The unique indexes decide I4 once more: twenty pollers never make an order twice. `slot` is
//! NULL once the order is cancelled.

use crate::{DbErr, DeriveMigrationName, MigrationTrait, SchemaManager, async_trait, run};

#[derive(DeriveMigrationName)]
pub(crate) struct Migration;

#[async_trait::async_trait]
impl MigrationTrait for Migration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(
            manager,
            "CREATE TABLE orders (
                order_no {name} NOT NULL PRIMARY KEY,
                reservation_id {name} NOT NULL,
                activity_id {name} NOT NULL,
                sku_id {name} NOT NULL,
                user_id {token} NOT NULL,
                slot INTEGER NULL,
                quantity INTEGER NOT NULL,
                price_minor BIGINT NOT NULL,
                currency {word} NOT NULL,
                state {word} NOT NULL,
                create_time BIGINT NOT NULL,
                confirm_time BIGINT NULL,
                cancel_time BIGINT NULL,
                cancel_reason {reason} NULL,
                CONSTRAINT orders_reservation UNIQUE (reservation_id),
                CONSTRAINT orders_slot UNIQUE (activity_id, sku_id, user_id, slot),
                CONSTRAINT orders_quantity CHECK (quantity BETWEEN 1 AND 1000),
                CONSTRAINT orders_price CHECK (price_minor >= 0),
                CONSTRAINT orders_state_and_slot CHECK (
                    (state IN ('created', 'confirmed') AND slot IS NOT NULL AND slot >= 1)
                    OR (state = 'cancelled' AND slot IS NULL))
            ) {table}",
        )
        .await
    }

    async fn down(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        run(manager, "DROP TABLE orders").await
    }
}
