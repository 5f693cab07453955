//! Leases: what one process at a time may hold, by the database's clock.
//!
//! A lease only keeps others out in good order. A holder that was paused for longer than its
//! lease finds out by its token, which each new holder raises.

use std::time::Duration;

use sea_orm::{ActiveValue::Set, ColumnTrait, DbErr, EntityTrait, QueryFilter, sea_query::Expr};

use super::{Database, Transaction, insert_ignore, lock_rows, now_on};
use crate::entity::leases;

/// A lease that was granted; it may have run out since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub name: String,
    pub owner: String,
    /// Higher than that of every earlier holder.
    pub token: i64,
}

/// What an attempt to take a lease comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    Granted(Lease),
    /// Another owner has it, for this long unless it renews.
    Held {
        owner: String,
        remaining: Duration,
    },
}

impl Database {
    /// Takes the lease unless another owner's is running. The same owner is granted it anew,
    /// with a higher token, so a repeat after an unknown result is safe.
    ///
    /// # Errors
    /// Those of any transaction.
    pub async fn acquire_lease(
        &self,
        name: &str,
        owner: &str,
        ttl: Duration,
    ) -> Result<Acquired, DbErr> {
        acquire(self.begin().await?, name, owner, ttl).await
    }

    /// Lets the lease run for another `ttl` from now. False: it is another's, or was given back.
    ///
    /// # Errors
    /// Those of any transaction.
    pub async fn renew_lease(&self, lease: &Lease, ttl: Duration) -> Result<bool, DbErr> {
        let tx = self.begin().await?;
        let until = now_on(&tx).await?.plus(ttl);
        let renewed = leases::Entity::update_many()
            .col_expr(leases::Column::ExpireTime, Expr::val(until.0))
            .filter(leases::Column::Name.eq(&lease.name))
            .filter(leases::Column::Owner.eq(&lease.owner))
            .filter(leases::Column::Token.eq(lease.token))
            .exec(&tx)
            .await?;
        tx.commit().await?;
        Ok(renewed.rows_affected == 1)
    }

    /// Gives the lease back. False: it was another's already.
    ///
    /// # Errors
    /// Those of any transaction.
    pub async fn release_lease(&self, lease: &Lease) -> Result<bool, DbErr> {
        let tx = self.begin().await?;
        let released = leases::Entity::update_many()
            .col_expr(leases::Column::Owner, Expr::val(""))
            .col_expr(leases::Column::ExpireTime, Expr::val(0_i64))
            .filter(leases::Column::Name.eq(&lease.name))
            .filter(leases::Column::Owner.eq(&lease.owner))
            .filter(leases::Column::Token.eq(lease.token))
            .exec(&tx)
            .await?;
        tx.commit().await?;
        Ok(released.rows_affected == 1)
    }
}

/// Takes the lease in this transaction, and ends it.
pub(super) async fn acquire(
    tx: Transaction,
    name: &str,
    owner: &str,
    ttl: Duration,
) -> Result<Acquired, DbErr> {
    let never_held = leases::ActiveModel {
        name: Set(name.to_owned()),
        owner: Set(String::new()),
        token: Set(0),
        expire_time: Set(0),
    };
    insert_ignore(&tx, vec![never_held]).await?;
    let row = lock_rows(leases::Entity::find_by_id(name)).one(&tx).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound(format!("lease {name}")))?;
    let now = now_on(&tx).await?;
    if row.expire_time > now.0 && row.owner != owner {
        tx.rollback().await?;
        let remaining = crate::domain::TimeMs(row.expire_time).since(now);
        return Ok(Acquired::Held { owner: row.owner, remaining });
    }
    let token = row.token + 1;
    leases::Entity::update_many()
        .col_expr(leases::Column::Owner, Expr::val(owner))
        .col_expr(leases::Column::Token, Expr::val(token))
        .col_expr(leases::Column::ExpireTime, Expr::val(now.plus(ttl).0))
        .filter(leases::Column::Name.eq(name))
        .exec(&tx)
        .await?;
    tx.commit().await?;
    Ok(Acquired::Granted(Lease { name: name.to_owned(), owner: owner.to_owned(), token }))
}
