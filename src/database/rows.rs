//! Writing and locking rows in the way of each database.

use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DbErr, EntityTrait, Iterable, QuerySelect,
    QueryTrait, Select, Value,
    sea_query::{
        ArrayType, Expr, ExprTrait, LockBehavior, LockType, OnConflict, SimpleExpr, ValueType,
        extension::postgres::PgFunc,
    },
};

use super::Backend;

/// The most rows of one INSERT, and the most ids of one IN list. sqlx 0.9.0 sets no TCP_NODELAY
/// (sqlx#4335): a larger statement goes out in pieces, and the last waits some 40 ms for a delayed
/// acknowledgement.
pub const ROWS_PER_STATEMENT: usize = 64;

/// The most bytes of values in one statement, for the same reason.
pub const BYTES_PER_STATEMENT: usize = 48 * 1_024;

/// One value per row, as the array of a column; PostgreSQL only.
#[must_use]
pub fn column<T: ValueType + Into<Value>>(values: impl Iterator<Item = T>) -> Value {
    array(T::array_type(), values.map(Into::into).collect())
}

fn array(of: ArrayType, values: Vec<Value>) -> Value {
    Value::Array(of, Some(Box::new(values)))
}

/// Whether the column has one of these values. On PostgreSQL the text is the same for any number of
/// them, so that the statement is prepared once; elsewhere it is an IN list.
pub fn is_among<C, T>(backend: Backend, column: C, values: &[T]) -> SimpleExpr
where
    C: ColumnTrait,
    T: ValueType + Into<Value> + Clone,
{
    let of = (column.entity_name(), column);
    match backend {
        Backend::Postgres => {
            let values = values.iter().cloned().map(Into::into).collect();
            Expr::col(of).eq(PgFunc::any(array(T::array_type(), values)))
        }
        Backend::Sqlite | Backend::MySql => Expr::col(of).is_in(values.iter().cloned()),
    }
}

/// Inserts the rows; one that conflicts with a unique key, any of them, is left out without an
/// error. Another fault of a row fails the statement: INSERT IGNORE would hide it.
///
/// Returns the number of rows that the database says it inserted. **On MySQL and MariaDB that
/// tells nothing**: sqlx connects with FOUND_ROWS, and a row that was there counts as well.
/// There, read the rows back and compare.
///
/// # Errors
/// Those of any statement. The rows come in statements of [`ROWS_PER_STATEMENT`], so belong into
/// one transaction.
pub async fn insert_ignore<A, C>(tx: &C, rows: Vec<A>) -> Result<u64, DbErr>
where
    A: ActiveModelTrait,
    C: ConnectionTrait,
{
    let mut inserted = 0;
    let mut rows = rows.into_iter().peekable();
    while rows.peek().is_some() {
        let part = rows.by_ref().take(ROWS_PER_STATEMENT);
        // Without a target: a table may have several unique keys. MySQL has no "do nothing",
        // so it sets the key to itself.
        let mut conflicts = OnConflict::new();
        conflicts.do_nothing_on(<A::Entity as EntityTrait>::PrimaryKey::iter());
        let insert = A::Entity::insert_many(part).on_conflict(conflicts).into_query();
        inserted += tx.execute(&insert).await?.rows_affected();
    }
    Ok(inserted)
}

/// `FOR UPDATE`: waits for rows that others have locked. SQLite locks nothing here: its one
/// writer already has the whole database.
#[must_use]
pub fn lock_rows<E: EntityTrait>(select: Select<E>) -> Select<E> {
    select.lock(LockType::Update)
}

/// `FOR UPDATE SKIP LOCKED`: leaves out rows that others have locked; as [`lock_rows`] on SQLite.
#[must_use]
pub fn lock_free_rows<E: EntityTrait>(select: Select<E>) -> Select<E> {
    select.lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
}
