//! The end of a transaction.

use sea_orm::DbErr;

use super::Transaction;

/// Commits what was done without an error, and rolls back otherwise; then the first error is the
/// one that counts.
///
/// # Errors
/// That of the work, or that of the COMMIT.
pub async fn finish<T, E: From<DbErr>>(
    transaction: Transaction,
    done: Result<T, E>,
) -> Result<T, E> {
    match done {
        Ok(value) => {
            transaction.commit().await?;
            Ok(value)
        }
        Err(error) => {
            let _ = transaction.rollback().await;
            Err(error)
        }
    }
}
