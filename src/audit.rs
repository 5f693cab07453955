//! The audit: who changed what. Rows are only ever added, in the transaction of the change where
//! there is one.

use sea_orm::{
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect,
};

use crate::{
    database::Database,
    domain::{ActivityId, AuditView, OfferKey, PageQuery, TimeMs},
    entity::audit,
    error::Error,
};

/// Who does what the server does on its own account.
pub const SYSTEM: &str = "system";

/// The most characters of an actor.
const ACTOR_MAX_CHARS: usize = 128;
/// The most bytes of a detail; MySQL's TEXT has 65,535.
pub const DETAIL_MAX_BYTES: usize = 60_000;

/// One thing that was done.
#[derive(Debug)]
pub struct Entry<'a> {
    pub actor: &'a str,
    /// One word, or a few joined by `_`.
    pub action: &'a str,
    pub activity_id: &'a str,
    /// `None`: it concerned the whole activity.
    pub sku_id: Option<&'a str>,
    /// What belongs to the action; see [`DETAIL_MAX_BYTES`].
    pub detail: serde_json::Value,
}

impl<'a> Entry<'a> {
    /// About a whole activity.
    #[must_use]
    pub fn of_activity(
        id: &'a ActivityId,
        actor: &'a str,
        action: &'a str,
        detail: serde_json::Value,
    ) -> Self {
        Self { actor, action, activity_id: id.as_str(), sku_id: None, detail }
    }

    /// About one offer.
    #[must_use]
    pub fn of_offer(
        key: &'a OfferKey,
        actor: &'a str,
        action: &'a str,
        detail: serde_json::Value,
    ) -> Self {
        let sku_id = Some(key.sku_id.as_str());
        Self { actor, action, activity_id: key.activity_id.as_str(), sku_id, detail }
    }
}

/// Adds one row.
///
/// # Errors
/// Those of any statement.
pub async fn write(db: &impl ConnectionTrait, now: TimeMs, entry: Entry<'_>) -> Result<(), DbErr> {
    let row = audit::ActiveModel {
        id: NotSet,
        at: Set(now.0),
        actor: Set(entry.actor.chars().take(ACTOR_MAX_CHARS).collect()),
        action: Set(entry.action.to_owned()),
        activity_id: Set(Some(entry.activity_id.to_owned())),
        sku_id: Set(entry.sku_id.map(str::to_owned)),
        detail: Set(entry.detail.to_string()),
    };
    audit::Entity::insert(row).exec_without_returning(db).await.map(|_| ())
}

/// One page of the audit, the newest first, and the token of the next page, empty at the end.
///
/// # Errors
/// A token that is not of this list, or the database is away.
pub async fn list(
    database: &Database,
    query: &PageQuery,
) -> Result<(Vec<AuditView>, String), Error> {
    let mut select = audit::Entity::find();
    if let Some(id) = &query.activity_id {
        select = select.filter(audit::Column::ActivityId.eq(id.as_str()));
    }
    if let Some(before) = query.position()? {
        select = select.filter(audit::Column::Id.lt(before));
    }
    let rows = select
        .order_by_desc(audit::Column::Id)
        .limit(u64::from(query.page_size) + 1)
        .all(database.reader())
        .await?;
    Ok(query.page(rows, |row| row.id, AuditView::from))
}

impl From<audit::Model> for AuditView {
    fn from(row: audit::Model) -> Self {
        Self {
            audit_id: row.id,
            create_time: TimeMs(row.at),
            actor: row.actor,
            action: row.action,
            activity_id: row.activity_id.unwrap_or_default(),
            sku_id: row.sku_id.unwrap_or_default(),
            detail: row.detail,
        }
    }
}
