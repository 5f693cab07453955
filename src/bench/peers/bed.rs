//! A peer with an offer for sale, and what its order rows say afterwards.

use std::{collections::HashSet, time::Duration};

use serde::Serialize;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{close, load_and_kill, open_database, sql};
use crate::{
    bench::{
        Error, Plan, bed,
        load::{RESERVED, Seen, buyer},
        peer::{Kind, stock::Stock, tables},
        process::{Folder, Process},
    },
    config::SecretUrl,
    database::Database,
    domain::{ActivityId, OfferKey, SkuId},
    server::redis_settings,
};

const SETTLE_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);

/// What the order rows say against what the buyers were told.
#[derive(Debug, Default, Serialize)]
pub(super) struct Tally {
    orders: usize,
    /// Winners who have no order.
    pub(super) lost_orders: usize,
    /// Orders beyond the first of a buyer.
    doubled: usize,
    /// Orders beyond the units that there were.
    oversold: i64,
    /// Units that are neither for sale nor in an order.
    pub(super) lost_units: i64,
    /// Calls that nobody answered.
    unknown: u64,
}

impl Tally {
    /// Of buyers of this series.
    pub(super) fn of(seen: &Seen, series: &str, buyers: &[String]) -> Self {
        let have: HashSet<&str> = buyers.iter().map(String::as_str).collect();
        let winners = seen.who(RESERVED);
        let lost = |nth: &&usize| !have.contains(buyer(series, **nth).as_str());
        Self {
            orders: buyers.len(),
            lost_orders: winners.iter().filter(lost).count(),
            doubled: tables::doubled(buyers),
            unknown: seen.unknown(),
            ..Self::default()
        }
    }
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

    pub(super) async fn load_and_kill(self, plan: &Plan) -> Result<(Seen, Self), Error> {
        let Self { kind, server, offer, database, stock, url, folder } = self;
        let seen = load_and_kill(plan, server, &offer).await?;
        let server = start(plan, kind, &offer, &url, &folder).await?;
        Ok((seen, Self { kind, server, offer, database, stock, url, folder }))
    }

    /// Waits until no order is queued, and those in hand are written.
    pub(super) async fn settle(&self) -> Result<(), Error> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        let mut before = None;
        loop {
            let queued = match &self.stock {
                Some(stock) => stock.levels().await?.1,
                None => 0,
            };
            let orders = tables::count(&self.database, &self.offer).await.map_err(sql)?;
            // What a consumer holds in its hand shows in neither.
            if queued == 0 && before == Some(orders) {
                return Ok(());
            }
            before = Some(orders);
            if Instant::now() > deadline {
                return Err(Error::Unavailable(format!("{queued} orders are still queued")));
            }
            sleep(POLL).await;
        }
    }

    pub(super) async fn tally(
        &self,
        seen: &Seen,
        series: &str,
        total: u32,
    ) -> Result<Tally, Error> {
        let buyers = tables::buyers(&self.database, &self.offer).await.map_err(sql)?;
        let left = match &self.stock {
            Some(stock) => stock.levels().await?.0,
            None => tables::remaining(&self.database, &self.offer).await.map_err(sql)?,
        };
        let orders = i64::try_from(buyers.len()).unwrap_or(i64::MAX);
        let balance = i64::from(total) - left - orders;
        Ok(Tally {
            oversold: (orders - i64::from(total)).max(0),
            lost_units: balance.max(0),
            ..Tally::of(seen, series, &buyers)
        })
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
