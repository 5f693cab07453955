//! Stand-in until the branch with the real one is merged.
use std::sync::Arc;

use futures_util::{Stream, stream};

use crate::{
    domain::{StockUpdate, WatchRequest},
    error::Error,
};

#[derive(Debug, Default)]
pub struct StockFeed;

impl StockFeed {
    pub async fn watch(
        self: &Arc<Self>,
        _: WatchRequest,
    ) -> Result<impl Stream<Item = Result<StockUpdate, Error>> + Send + 'static, Error> {
        if false {
            return Ok(stream::empty());
        }
        Err(Error::Unimplemented("WatchStock"))
    }
}
