//! Mending what SQL alone can decide.

use std::collections::BTreeSet;

use sea_orm::{ColumnTrait, DbErr, EntityTrait, QueryFilter, sea_query::Expr};
use serde_json::json;

use super::{Reconciler, sql};
use crate::{
    admission::catalog::Activity,
    audit,
    database::{Transaction, finish, lock_rows, repeat},
    domain::{DifferenceKind, ReconcileReport},
    entity::offers,
    error::Error,
    offer::Offer,
};

impl Reconciler {
    /// Mends, compares again, and marks in `report` what is gone.
    pub(super) async fn repair(
        &self,
        activity: &Activity,
        report: &mut ReconcileReport,
        actor: &str,
    ) -> Result<(), Error> {
        let sick: BTreeSet<&str> = report
            .differences
            .iter()
            .filter(|difference| difference.kind.is_repairable())
            .map(|difference| difference.sku_id.as_str())
            .collect();
        for offer in activity.offers.values() {
            if !sick.contains(offer.key.sku_id.as_str()) {
                continue;
            }
            // The counters first: a rebuild sells no more than they allow.
            let counted = repeat(|| self.count_anew(offer, actor)).await;
            counted.map_err(|error| self.sql_failed(error))?;
            if offer.is_in_engine() {
                self.recovery.rebuild_anyway(offer, "reconcile").await?;
            }
        }
        if sick.is_empty() {
            return Ok(());
        }
        let after = self.compare(activity).await?;
        let left: BTreeSet<(DifferenceKind, &str)> = after
            .differences
            .iter()
            .map(|difference| (difference.kind, difference.sku_id.as_str()))
            .collect();
        for difference in &mut report.differences {
            difference.repaired = difference.kind.is_repairable()
                && !left.contains(&(difference.kind, difference.sku_id.as_str()));
        }
        Ok(())
    }

    /// Sets the counters of an offer to what its rows and orders add up to.
    async fn count_anew(&self, offer: &Offer, actor: &str) -> Result<(), DbErr> {
        let transaction = self.database.begin().await?;
        let counted = self.count_anew_in(&transaction, offer, actor).await;
        finish(transaction, counted).await
    }

    async fn count_anew_in(
        &self,
        transaction: &Transaction,
        offer: &Offer,
        actor: &str,
    ) -> Result<(), DbErr> {
        let key = (offer.key.activity_id.to_string(), offer.key.sku_id.to_string());
        // Whoever writes a row counts it under this lock, in the same transaction.
        lock_rows(offers::Entity::find_by_id(key)).one(transaction).await?;
        let sums = sql::sums(transaction, offer).await?;
        let right = sums.live == sums.reserved && sums.ordered == sums.sold;
        // More than the total can't be written down; it is for a person, as `oversold`.
        if right || sums.live > sums.total || sums.ordered > sums.live {
            return Ok(());
        }
        offers::Entity::update_many()
            .col_expr(offers::Column::Reserved, Expr::value(sums.live))
            .col_expr(offers::Column::Sold, Expr::value(sums.ordered))
            .filter(offers::Column::ActivityId.eq(offer.key.activity_id.as_str()))
            .filter(offers::Column::SkuId.eq(offer.key.sku_id.as_str()))
            .exec(transaction)
            .await?;
        let detail = json!({
            "reserved": { "before": sums.reserved, "after": sums.live },
            "sold": { "before": sums.sold, "after": sums.ordered },
        });
        let entry = audit::Entry::of_offer(&offer.key, actor, "count_anew", detail);
        audit::write(transaction, self.database.clock(), entry).await
    }
}
