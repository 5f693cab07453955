//! A peer with an offer for sale, and what its order rows say afterwards.

use std::{collections::HashMap, time::Duration};

use serde::Serialize;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{Sent, close, load_and_kill, open_database, sql};
use crate::{
    bench::{
        Error, Plan, bed,
        peer::{
            Kind,
            stock::{Levels, Stock},
            tables,
        },
        process::{Folder, Process},
    },
    config::SecretUrl,
    database::Database,
    domain::{ActivityId, OfferKey, SkuId},
    server::redis_settings,
};

const SETTLE_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);
/// How often nothing may change before an order that has a number and is nowhere counts as lost.
const LOOKS: u32 = 20;

/// What the order rows say against what the buyers were told.
#[derive(Debug, Default, Serialize)]
pub(super) struct Tally {
    orders: usize,
    /// Wins without an order.
    pub(super) lost_orders: usize,
    /// Orders beyond the first of a buyer.
    pub(super) doubled: usize,
    /// Orders beyond the units that there were.
    pub(super) oversold: usize,
    /// Units that are neither for sale nor in an order.
    pub(super) lost_units: i64,
    /// Calls that nobody answered.
    unknown: u64,
}

impl Tally {
    /// Of the buyers who have an order, one entry for each.
    pub(super) fn of(sent: &Sent, orders: &[String], total: u32) -> Self {
        Self {
            orders: orders.len(),
            lost_orders: lost(sent.winners(), orders),
            doubled: tables::doubled(orders),
            oversold: orders.len().saturating_sub(total as usize),
            lost_units: 0,
            unknown: sent.seen.unknown(),
        }
    }
}

/// How many of these wins have no order. Who was told twice that he won needs two.
fn lost(winners: impl Iterator<Item = String>, orders: &[String]) -> usize {
    let mut have: HashMap<&str, usize> = HashMap::new();
    for buyer in orders {
        *have.entry(buyer).or_default() += 1;
    }
    let mut lost = 0;
    for winner in winners {
        match have.get_mut(winner.as_str()) {
            Some(left @ 1..) => *left -= 1,
            Some(0) | None => lost += 1,
        }
    }
    lost
}

/// A peer with an offer for sale.
pub(super) struct PeerBed {
    kind: Kind,
    pub(super) server: Process,
    pub(super) offer: OfferKey,
    database: Database,
    stock: Option<Stock>,
    url: SecretUrl,
    folder: Folder,
}

impl PeerBed {
    pub(super) async fn open(plan: &Plan, kind: Kind, total: u32) -> Result<Self, Error> {
        let folder = Folder::inside(&plan.folder)?;
        let mut settings = plan.settings.database.clone();
        if plan.own_database {
            let file = folder.path().join("peer.db");
            settings.url = SecretUrl::new(format!("sqlite://{}", file.display()));
        }
        let url = settings.url.clone();
        let named = |_| Error::Internal("a name of the bench".to_owned());
        let id = format!("bench-{}", Uuid::now_v7().simple());
        let offer = OfferKey {
            activity_id: ActivityId::new(&id).map_err(named)?,
            sku_id: SkuId::new(bed::SKU).map_err(named)?,
        };
        let database = open_database(&settings).await?;
        tables::open(&database, &offer, total).await.map_err(sql)?;
        let stock = match redis_settings(&plan.settings.engine).filter(|_| kind.needs_redis()) {
            Some(redis) => {
                let stock = Stock::open(&redis.url, &offer, 2).await?;
                stock.fill(total).await?;
                Some(stock)
            }
            None => None,
        };
        let server = start(plan, kind, &offer, &url, &folder).await?;
        Ok(Self { kind, server, offer, database, stock, url, folder })
    }

    pub(super) async fn load_and_kill(self, plan: &Plan) -> Result<(Sent, Self), Error> {
        let Self { kind, server, offer, database, stock, url, folder } = self;
        let sent = load_and_kill(plan, server, &offer).await?;
        let server = start(plan, kind, &offer, &url, &folder).await?;
        Ok((sent, Self { kind, server, offer, database, stock, url, folder }))
    }

    /// Waits until no order is queued, and those in hand are written.
    pub(super) async fn settle(&self) -> Result<(), Error> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        let (mut before, mut looks) = (None, 0);
        loop {
            let Levels { queued, numbered, .. } = match &self.stock {
                Some(stock) => stock.levels().await?,
                None => Levels::default(),
            };
            let orders = tables::count(&self.database, &self.offer).await.map_err(sql)?;
            looks = if before == Some(orders) { looks + 1 } else { 0 };
            // What a consumer holds in its hand shows in neither, until it is lost for good.
            if queued == 0 && looks >= if orders < numbered { LOOKS } else { 1 } {
                return Ok(());
            }
            before = Some(orders);
            if Instant::now() > deadline {
                return Err(Error::Unavailable(format!("{queued} orders are still queued")));
            }
            sleep(POLL).await;
        }
    }

    pub(super) async fn tally(&self, sent: &Sent, total: u32) -> Result<Tally, Error> {
        let orders = tables::buyers(&self.database, &self.offer).await.map_err(sql)?;
        let left = match &self.stock {
            Some(stock) => stock.levels().await?.left,
            None => tables::remaining(&self.database, &self.offer).await.map_err(sql)?,
        };
        let had = i64::try_from(orders.len()).unwrap_or(i64::MAX);
        let lost_units = (i64::from(total) - left - had).max(0);
        Ok(Tally { lost_units, ..Tally::of(sent, &orders, total) })
    }

    pub(super) async fn close(self) -> Result<(), Error> {
        self.server.stop().await?;
        if let Some(stock) = &self.stock {
            stock.remove().await?;
        }
        tables::drop_all(&self.database).await.map_err(sql)?;
        close(&self.database).await
    }
}

async fn start(
    plan: &Plan,
    kind: Kind,
    offer: &OfferKey,
    database: &SecretUrl,
    folder: &Folder,
) -> Result<Process, Error> {
    let variables = [
        ("SECKILL__GRPC__ADDR", "127.0.0.1:0"),
        ("SECKILL__ENGINE__URL", plan.settings.engine.url.expose()),
        ("SECKILL__DATABASE__URL", database.expose()),
    ];
    let config = plan.config.as_deref().map(|path| path.to_string_lossy().into_owned());
    let mut args = vec!["bench", "peer", kind.name()];
    args.extend([offer.activity_id.as_str(), offer.sku_id.as_str()]);
    if let Some(config) = &config {
        args.extend(["--config", config]);
    }
    Process::start(&args, &variables, folder.path()).await
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_win_is_lost_when_its_buyer_has_no_order_for_it() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let lost = |winners: &[&str], orders: &[&str]| {
            let (winners, orders): (Vec<String>, Vec<String>) = (names(winners), names(orders));
            super::lost(winners.into_iter(), &orders)
        };
        assert_eq!(lost(&["a", "b"], &["b", "a", "c"]), 0);
        assert_eq!(lost(&["a", "b"], &["c", "b"]), 1);
        assert_eq!(lost(&["a", "a"], &["a"]), 1);
        assert_eq!(lost(&["a", "a"], &["a", "a"]), 0);
        assert_eq!(lost(&[], &["a"]), 0);
    }
}
