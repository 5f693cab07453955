//! A server under test, a fresh sale on it, and the books afterwards.

use std::{path::Path, time::Duration};

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep};
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

use super::{
    Error, Plan,
    load::RESERVED,
    oracle::{Told, purge, read_books},
    process::{Folder, Process, cpu_of, program_of},
    wins::{Best, Target},
};
use crate::{
    api::pb::{
        self, ActivityState, seckill_admin_client::SeckillAdminClient,
        seckill_client::SeckillClient,
    },
    config::{SecretUrl, Settings},
    domain::{ActivityId, OfferKey, SkuId},
    engine::redis::RedisEngine,
    server::{Parts, redis_settings},
};

/// The first offer of a bed; others are as long.
pub(super) const SKU: &str = "sku-000001";
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// A sale of thousands of offers takes a moment to be put up.
const SALE_LIMIT: Duration = Duration::from_secs(60);
/// A comparison goes through every reservation.
const RECONCILE_LIMIT: Duration = Duration::from_secs(300);
const START_LIMIT: Duration = Duration::from_secs(15);
const DRAIN_LIMIT: Duration = Duration::from_secs(300);
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// What is put on sale, and by what kind of server.
#[derive(Debug, Clone)]
pub struct Sale {
    /// Units of each offer.
    pub total: u32,
    pub offers: usize,
    /// Units of every second offer, where those have another number.
    pub scarce: Option<u32>,
    /// Of each offer.
    pub segments: u32,
    /// Settings of the servers beside the plan's, as environment variables.
    pub variables: Vec<(&'static str, String)>,
}

impl Sale {
    /// One offer, and servers as the plan has them.
    #[must_use]
    pub fn of(total: u32) -> Self {
        Self { total, offers: 1, scarce: None, segments: 1, variables: Vec::new() }
    }

    /// The same with the stock of each offer in so many segments.
    #[must_use]
    pub fn in_segments(self, segments: u32) -> Self {
        Self { segments, ..self }
    }

    /// The same with one more setting.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.variables.push((name, value.into()));
        self
    }
}

/// What becomes of a sale whose books were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Afterwards {
    /// It goes on in SQL alone.
    Stays,
    /// It is over, and no later server reads it.
    Settled,
}

/// One or two servers over the same stores, with a sale on them.
#[derive(Debug)]
pub struct Bed {
    pub settings: Settings,
    pub servers: Vec<Process>,
    /// The first offer.
    pub offer: OfferKey,
    pub offers: Vec<OfferKey>,
    variables: Vec<(&'static str, String)>,
    /// The engine's process, if it is a Redis on this machine.
    engine_id: Option<u32>,
    folder: Folder,
}

impl Bed {
    /// Starts a server and puts `total` units on sale.
    ///
    /// # Errors
    /// The server does not start, or the sale does not.
    pub async fn open(plan: &Plan, total: u32) -> Result<Self, Error> {
        Self::of(plan, Sale::of(total)).await
    }

    /// Starts a server and puts this on sale.
    ///
    /// # Errors
    /// The server does not start, or the sale does not.
    pub async fn of(plan: &Plan, sale: Sale) -> Result<Self, Error> {
        let folder = Folder::inside(&plan.folder)?;
        let mut settings = plan.settings.clone();
        if plan.own_database {
            let file = folder.path().join("seckill.db");
            settings.database.url = SecretUrl::new(format!("sqlite://{}", file.display()));
        }
        let id = format!("bench-{}", Uuid::now_v7().simple());
        let named = |error| Error::Internal(format!("a name: {error:?}"));
        let mut offers = Vec::with_capacity(sale.offers);
        for nth in 1..=sale.offers {
            let sku_id = SkuId::new(&format!("sku-{nth:06}"));
            offers.push(OfferKey {
                activity_id: ActivityId::new(&id).map_err(|error| named(error.to_string()))?,
                sku_id: sku_id.map_err(|error| named(error.to_string()))?,
            });
        }
        let offer = offers.first().cloned();
        let offer = offer.ok_or_else(|| Error::Usage("a sale of nothing".to_owned()))?;
        let engine_id = engine_id(&settings).await;
        let Sale { total, scarce, segments, variables, .. } = sale;
        let servers = Vec::new();
        let mut bed = Self { settings, servers, offer, offers, variables, engine_id, folder };
        bed.start_server(plan).await?;
        let channel = bed.channel(0).await?;
        bed.sell(channel, [total, scarce.unwrap_or(total)], segments).await?;
        Ok(bed)
    }

    /// Starts a server over what is on sale already.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_server(&mut self, plan: &Plan) -> Result<(), Error> {
        let server = self.start(plan).await?;
        self.servers.push(server);
        Ok(())
    }

    /// Ends the servers in order; the stores stay.
    ///
    /// # Errors
    /// One of them did not end in order.
    pub async fn stop_servers(&mut self) -> Result<(), Error> {
        for server in std::mem::take(&mut self.servers) {
            server.stop().await?;
        }
        Ok(())
    }

    /// Whose rows this sale's are, in all tables.
    #[must_use]
    pub fn activity_id(&self) -> &ActivityId {
        &self.offer.activity_id
    }

    async fn start(&self, plan: &Plan) -> Result<Process, Error> {
        let mut variables = vec![
            ("SECKILL__GRPC__ADDR", "127.0.0.1:0"),
            ("SECKILL__HTTP__ADDR", "127.0.0.1:0"),
            ("SECKILL__ENGINE__URL", self.settings.engine.url.expose()),
            ("SECKILL__DATABASE__URL", self.settings.database.url.expose()),
        ];
        // The last one counts.
        variables.extend(self.variables.iter().map(|(name, value)| (*name, value.as_str())));
        let config = plan.config.as_deref().map(Path::to_string_lossy);
        let mut args = vec!["serve"];
        if let Some(config) = &config {
            args.extend(["--config", config.as_ref()]);
        }
        Process::start(&args, &variables, self.folder.path()).await
    }

    /// A connection of its own to one of the servers.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn channel(&self, server: usize) -> Result<Channel, Error> {
        let addr = self.servers[server].grpc;
        let endpoint = Endpoint::from_shared(format!("http://{addr}"));
        let endpoint = endpoint.map_err(|error| Error::Internal(format!("{addr}: {error}")))?;
        let connected = endpoint.tcp_nodelay(true).connect_timeout(CALL_LIMIT).connect().await;
        connected.map_err(|error| Error::Unavailable(format!("{addr} does not answer: {error}")))
    }

    /// The first offer, to be asked for at one of the servers.
    #[must_use]
    pub(super) fn target(&self, server: usize) -> Target<'_> {
        let engine_id = self.engine_id;
        Target { server: &self.servers[server], engine_id, offer: &self.offer }
    }

    /// The most wins a second with one of these numbers of calls in flight.
    pub(super) async fn best(
        &self,
        series: &str,
        in_flight: &[usize],
        lasts: Duration,
    ) -> Result<Best, Error> {
        self.target(0).best(RESERVED, series, in_flight, lasts, async || self.drain().await).await
    }

    /// CPU time of the engine, where it is a process of this machine.
    #[must_use]
    pub fn engine_cpu(&self) -> Option<Duration> {
        cpu_of(self.engine_id?).ok()
    }

    /// Memory that the engine uses by its own count, where it is a single Redis.
    ///
    /// # Errors
    /// It does not say.
    pub(super) async fn engine_memory(&self) -> Result<Option<u64>, Error> {
        let Some(redis) = redis_settings(&self.settings.engine) else { return Ok(None) };
        let used = RedisEngine::used_memory(&redis).await;
        used.map_err(|error| Error::Unavailable(error.to_string()))
    }

    /// Creates, approves and warms up the activity, and waits until it sells. The offers take turns
    /// with these totals.
    async fn sell(&self, channel: Channel, totals: [u32; 2], segments: u32) -> Result<(), Error> {
        let activity_id = self.offer.activity_id.to_string();
        let now = std::time::SystemTime::now();
        let spec = pb::ActivitySpec {
            activity_id: activity_id.clone(),
            title: "Bench".to_owned(),
            start_time: Some((now - Duration::from_secs(1)).into()),
            end_time: Some((now + Duration::from_secs(24 * 3_600)).into()),
            retention: None,
            offers: self
                .offers
                .iter()
                .zip(totals.into_iter().cycle())
                .map(|(offer, total)| offer_spec(offer, total, segments))
                .collect(),
        };
        let mut admin =
            SeckillAdminClient::new(channel.clone()).max_decoding_message_size(16 << 20);
        let mut seckill = SeckillClient::new(channel).max_decoding_message_size(16 << 20);
        let request = pb::CreateActivityRequest { spec: Some(spec) };
        call(SALE_LIMIT, admin.create_activity(request)).await?;
        let reason = "bench".to_owned();
        let request = pb::ApproveActivityRequest { activity_id: activity_id.clone(), reason };
        call(SALE_LIMIT, admin.approve_activity(request)).await?;
        let request = pb::WarmupRequest { activity_id: activity_id.clone() };
        call(SALE_LIMIT, seckill.warmup(request)).await?;
        self.sells(0).await
    }

    /// Waits until this server sells; each reads activities on its own.
    pub(super) async fn sells(&self, server: usize) -> Result<(), Error> {
        let activity_id = self.offer.activity_id.to_string();
        let admin = SeckillAdminClient::new(self.channel(server).await?);
        let mut admin = admin.max_decoding_message_size(16 << 20);
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let request = pb::GetActivityRequest { activity_id: activity_id.clone() };
            let answer = call(CALL_LIMIT, admin.get_activity(request)).await?;
            if answer.activity.unwrap_or_default().state() == ActivityState::Active {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::Unavailable(format!("{activity_id} does not start")));
            }
            sleep(POLL).await;
        }
    }

    /// Whether the engine and the database of this bed can be shared.
    #[must_use]
    pub fn may_have_more_servers(&self) -> bool {
        !self.settings.engine.url.expose().is_empty()
    }

    /// Starts one more server over the same stores.
    ///
    /// # Errors
    /// It does not start, or does not sell.
    pub async fn add_server(&mut self, plan: &Plan) -> Result<(), Error> {
        self.start_server(plan).await?;
        self.sells(self.servers.len() - 1).await
    }

    /// Waits until every reservation has become an order.
    ///
    /// # Errors
    /// It takes too long, or the server does not say.
    pub async fn drain(&self) -> Result<(), Error> {
        let mut admin = SeckillAdminClient::new(self.channel(0).await?);
        let activity_id = Some(self.offer.activity_id.to_string());
        let deadline = Instant::now() + DRAIN_LIMIT;
        loop {
            let request = pb::GetPipelineStatusRequest { activity_id: activity_id.clone() };
            let status = call(CALL_LIMIT, admin.get_pipeline_status(request)).await?;
            let left = [status.unacked, status.outbox_pending, status.outbox_releasing];
            if left.iter().all(|figure| *figure == Some(0)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::Unavailable(format!(
                    "{left:?} are still under way (unacked, pending, releasing)"
                )));
            }
            sleep(POLL).await;
        }
    }

    /// Units that no reservation holds, of all offers, by SQL.
    ///
    /// # Errors
    /// The server does not say.
    pub async fn remaining(&self) -> Result<i64, Error> {
        let mut admin = SeckillAdminClient::new(self.channel(0).await?);
        let activity_id = self.offer.activity_id.to_string();
        let request = pb::GetActivityRequest { activity_id };
        let answer = call(CALL_LIMIT, admin.get_activity(request)).await?;
        let offers = answer.activity.unwrap_or_default().offers;
        Ok(offers.iter().map(|offer| offer.total - offer.reserved).sum())
    }

    /// Puts so many more units of the first offer on sale, or takes them away again.
    ///
    /// # Errors
    /// The server does not do it.
    pub(super) async fn adjust(&self, delta: i64) -> Result<(), Error> {
        let mut admin = SeckillAdminClient::new(self.channel(0).await?);
        let request = pb::AdjustStockRequest {
            activity_id: self.offer.activity_id.to_string(),
            sku_id: self.offer.sku_id.to_string(),
            delta,
            request_id: Uuid::now_v7().to_string(),
            reason: "bench".to_owned(),
        };
        call(CALL_LIMIT, admin.adjust_stock(request)).await.map(|_| ())
    }

    /// Has the first offer rebuilt from SQL, and waits until it sells again.
    ///
    /// # Errors
    /// The server does not do it.
    pub(super) async fn rebuild(&self) -> Result<(), Error> {
        let mut admin = SeckillAdminClient::new(self.channel(0).await?);
        let request = pb::RebuildStockRequest {
            activity_id: self.offer.activity_id.to_string(),
            sku_id: self.offer.sku_id.to_string(),
            reason: "bench".to_owned(),
            segments: 0,
        };
        call(RECONCILE_LIMIT, admin.rebuild_stock(request)).await.map(|_| ())
    }

    /// Ends the servers in order, reads every book, and compares them with each other and with what
    /// the buyers were told. Each sentence is something that does not hold.
    ///
    /// # Errors
    /// The books can't be read.
    pub async fn close(self, told: Told) -> Result<Vec<String>, Error> {
        let mut broken = self.compare().await?;
        broken.extend(self.end(told, Afterwards::Stays).await?);
        Ok(broken)
    }

    /// Waits until nothing is under way and has the server compare engine, outbox and orders.
    ///
    /// # Errors
    /// It does not answer.
    pub(super) async fn compare(&self) -> Result<Vec<String>, Error> {
        self.drain().await?;
        let mut broken = Vec::new();
        // The server's own comparison is the only one that sees an embedded engine as it was.
        let mut admin =
            SeckillAdminClient::new(self.channel(0).await?).max_decoding_message_size(16 << 20);
        let activity_id = self.offer.activity_id.to_string();
        let request = pb::ReconcileRequest { activity_id, repair: false };
        let report = call(RECONCILE_LIMIT, admin.reconcile(request)).await?.report;
        let report = report.unwrap_or_default();
        for difference in report.differences.iter().take(10) {
            broken.push(format!("reconcile: {difference:?}"));
        }
        Ok(broken)
    }

    /// Ends the servers in order, and reads every book from the stores.
    ///
    /// # Errors
    /// The books can't be read.
    pub(super) async fn end(
        mut self,
        told: Told,
        afterwards: Afterwards,
    ) -> Result<Vec<String>, Error> {
        self.stop_servers().await?;
        let unreadable =
            |error: &dyn std::error::Error| Error::Unavailable(format!("the books: {error}"));
        let parts = Parts::open(&self.settings).await.map_err(|error| unreadable(&error))?;
        let id = self.activity_id();
        let read = async {
            let broken = read_books(&parts, &self.offers, told).await?;
            match afterwards {
                Afterwards::Stays => purge(&parts, &self.offers).await?,
                Afterwards::Settled => {
                    parts.activities.end(id, "bench", "").await?;
                    parts.activities.settle(id, "bench", "").await?;
                }
            }
            Ok(broken)
        };
        let read: Result<Vec<String>, crate::error::Error> = read.boxed().await;
        parts.close(Instant::now() + CLOSE_LIMIT).await;
        read.map_err(|error| unreadable(&error))
    }
}

fn offer_spec(offer: &OfferKey, total: u32, segments: u32) -> pb::OfferSpec {
    pb::OfferSpec {
        sku_id: offer.sku_id.to_string(),
        title: "A thing".to_owned(),
        price_minor: 9_900,
        currency_code: "CNY".to_owned(),
        total: total.into(),
        max_orders_per_user: Some(1),
        max_quantity_per_order: Some(1),
        hold: None,
        segments: i32::try_from(segments).ok(),
    }
}

/// The process of a Redis that runs on this machine.
pub(super) async fn engine_id(settings: &Settings) -> Option<u32> {
    let redis = redis_settings(&settings.engine)?;
    let url = url::Url::parse(&redis.url).ok()?;
    let id = RedisEngine::process_id(&redis).await.ok().flatten()?;
    is_here(url.host_str()?, id).then_some(id)
}

/// Whether a Redis on this host, which has that process id there, is a process of this machine.
pub(super) fn is_here(host: &str, id: u32) -> bool {
    let is_redis = |name: String| name.contains("redis") || name.contains("valkey");
    // In a container it has another id than here.
    matches!(host, "localhost" | "127.0.0.1" | "[::1]" | "::1")
        && program_of(id).is_some_and(is_redis)
}

/// One call with a limit.
///
/// # Errors
/// The server's error, or no answer in time.
pub async fn call<T>(
    limit: Duration,
    rpc: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Error> {
    match tokio::time::timeout(limit, rpc).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => {
            Err(Error::Unavailable(format!("{:?}: {}", status.code(), status.message())))
        }
        Err(_) => Err(Error::Unavailable(format!("no answer within {limit:?}"))),
    }
}

/// A Release of what this buyer holds.
#[must_use]
pub fn release(offer: &OfferKey, series: &str, nth: usize) -> Request<pb::ReleaseRequest> {
    Request::new(pb::ReleaseRequest {
        activity_id: offer.activity_id.to_string(),
        sku_id: offer.sku_id.to_string(),
        user_id: super::load::buyer(series, nth),
        reservation_id: super::load::reservation(offer, series, nth).to_string(),
        reason: "bench".to_owned(),
    })
}
