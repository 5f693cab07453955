//! What the engine and the database hold after a sale.

use futures_util::future::BoxFuture;
use serde::Serialize;

pub use crate::books::OfferBooks;
use crate::{books, domain::ActivityId, server::Parts};

/// Reads the books of a sale directly, past the server that kept them.
pub trait Books: Send + Sync {
    /// Everything that is recorded of an activity, or why it can't be read.
    fn read<'a>(&'a self, activity_id: &'a str) -> BoxFuture<'a, Result<BooksView, String>>;
}

/// The books of one activity.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct BooksView {
    /// By `sku_id`.
    pub offers: Vec<OfferBooks>,
}

impl Books for Parts {
    fn read<'a>(&'a self, activity_id: &'a str) -> BoxFuture<'a, Result<BooksView, String>> {
        Box::pin(async move {
            let id = ActivityId::new(activity_id).map_err(|error| error.to_string())?;
            let offers = books::read(&self.database, &self.catalog, &id).await;
            Ok(BooksView { offers: offers.map_err(|error| error.to_string())? })
        })
    }
}
