//! A server's parts over a chosen engine and database, with a sale on them, step by step: no
//! worker runs unless a test asks for it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sea_orm::{ColumnTrait, EntityTrait, QueryFilter};
use seckill::{
    books::{self, OfferBooks},
    config::{OptionalAddr, SecretUrl, Settings},
    domain::{
        ActivityId, ActivitySpec, BuyerId, ConfirmOutcome, ConfirmRequest, OfferKey, OfferSpec,
        ReleaseOutcome, ReleaseRequest, RequestId, Reservation, ReservationId, ReserveOutcome,
        ReserveRequest, SkuId, TimeMs,
    },
    engine::batcher::Caller,
    entity::orders,
    error::Error,
    offer::Offer,
    outbox::{poller::Pass, sweeper::sweep},
    server::Parts,
};

use tokio::time::Instant;

use super::{databases::Fresh, eventually, redis_server::RedisServer};

/// What a world is built on; drop it last.
pub(crate) struct Ground<'a> {
    pub(crate) database: &'a Fresh,
    pub(crate) redis: Option<RedisServer>,
}

/// The parts of one server. Several may stand on the same ground, but for the embedded engine.
pub(crate) struct World {
    pub(crate) parts: Parts,
    pub(crate) settings: Settings,
}

/// What is sold, unless a test says otherwise.
#[derive(Debug, Clone)]
pub(crate) struct Sale {
    pub(crate) activity: &'static str,
    pub(crate) total: u64,
    pub(crate) max_orders: u32,
    pub(crate) max_quantity: u32,
    pub(crate) hold: Option<Duration>,
    pub(crate) segments: u32,
}

impl Default for Sale {
    fn default() -> Self {
        Self {
            activity: "sale",
            total: 10,
            max_orders: 1,
            max_quantity: 10,
            hold: None,
            segments: 1,
        }
    }
}

pub(crate) const SKU: &str = "sku-1";

impl<'a> Ground<'a> {
    /// The embedded engine over this database.
    pub(crate) fn embedded(database: &'a Fresh) -> Self {
        Self { database, redis: None }
    }

    /// A Redis of its own over this database.
    pub(crate) async fn redis(database: &'a Fresh) -> Self {
        Self { database, redis: Some(RedisServer::start_with_aof().await) }
    }

    pub(crate) fn settings(&self) -> Settings {
        let mut settings = Settings::default();
        settings.grpc.addr = "127.0.0.1:0".parse().unwrap();
        settings.http.addr = OptionalAddr(None);
        settings.database.url = SecretUrl::new(self.database.settings().url);
        settings.database.max_connections = 5;
        // A test says what happens next, and by whose hand.
        settings.reserve.believe_sold_out_ms = 0;
        // A debug build among many tests stands still for longer than a server should.
        settings.reserve.max_wait_ms = 1_000;
        if let Some(redis) = &self.redis {
            settings.engine.url = SecretUrl::new(redis.url());
        }
        settings
    }

    /// Another server's parts on the same ground.
    pub(crate) async fn world(&self) -> World {
        self.world_with(self.settings()).await
    }

    /// The same, with other settings.
    pub(crate) async fn world_with(&self, settings: Settings) -> World {
        let parts = Parts::open(&settings).await.unwrap();
        World { parts, settings }
    }
}

impl World {
    /// Creates, approves and warms up an activity that is on sale.
    pub(crate) async fn open_sale(&self, sale: &Sale) -> OfferKey {
        let key = self.plan_sale(sale).await;
        self.parts.activities.warm_up(&key.activity_id, "test").await.unwrap();
        key
    }

    /// Creates and approves an activity that is not warmed up.
    pub(crate) async fn plan_sale(&self, sale: &Sale) -> OfferKey {
        let spec = spec_of(sale);
        let activity_id = spec.activity_id.clone();
        let activities = &self.parts.activities;
        activities.create(spec, "test").await.unwrap();
        activities.approve(&activity_id, "test", "").await.unwrap();
        OfferKey { activity_id, sku_id: SkuId::new(SKU).unwrap() }
    }

    /// The one offer of this activity.
    pub(crate) fn key(&self, activity: &str) -> OfferKey {
        let activity_id = ActivityId::new(activity).unwrap();
        OfferKey { activity_id, sku_id: SkuId::new(SKU).unwrap() }
    }

    /// The offer as this server has it.
    pub(crate) async fn offer(&self, key: &OfferKey) -> Arc<Offer> {
        self.parts.catalog.offer(key).await.unwrap()
    }

    /// One unit for a buyer.
    pub(crate) async fn reserve(
        &self,
        key: &OfferKey,
        buyer: &str,
        request_id: &str,
    ) -> Result<ReserveOutcome, Error> {
        self.reserve_units(key, buyer, request_id, 1).await
    }

    pub(crate) async fn reserve_units(
        &self,
        key: &OfferKey,
        buyer: &str,
        request_id: &str,
        quantity: u32,
    ) -> Result<ReserveOutcome, Error> {
        let request = request(key, buyer, request_id, quantity);
        self.parts.reservations.reserve(request, Caller::default()).await
    }

    /// One unit for a buyer who must win, and who comes back while there is no room.
    pub(crate) async fn win(&self, key: &OfferKey, buyer: &str, request_id: &str) -> Reservation {
        for _ in 0..500 {
            match self.reserve(key, buyer, request_id).await {
                Err(Error::Overloaded) => tokio::time::sleep(Duration::from_millis(20)).await,
                outcome => return won(outcome),
            }
        }
        panic!("there was no room for {buyer} for 10 s");
    }

    pub(crate) async fn release(
        &self,
        key: &OfferKey,
        buyer: &str,
        id: &ReservationId,
    ) -> Result<ReleaseOutcome, Error> {
        let request = ReleaseRequest {
            offer: key.clone(),
            buyer: BuyerId::new(buyer).unwrap(),
            reservation_id: id.clone(),
            reason: "test".to_owned(),
        };
        self.parts.reservations.release(request).await.map(|(outcome, _)| outcome)
    }

    pub(crate) async fn confirm(
        &self,
        key: &OfferKey,
        buyer: &str,
        id: &ReservationId,
    ) -> Result<ConfirmOutcome, Error> {
        let request = ConfirmRequest {
            offer: key.clone(),
            buyer: BuyerId::new(buyer).unwrap(),
            reservation_id: id.clone(),
        };
        self.parts.reservations.confirm(request).await
    }

    /// One pass of a poller; panics when a store is away.
    pub(crate) async fn poll(&self) -> Pass {
        self.parts.poller(&self.settings).run_once().await.unwrap()
    }

    /// One pass of the sweeper, without grace.
    pub(crate) async fn sweep(&self) -> usize {
        // Not a single millisecond of grace: what was taken in this one counts too.
        let before = Duration::ZERO;
        tokio::time::sleep(Duration::from_millis(2)).await;
        sweep(&self.parts.reservations, before).await.unwrap()
    }

    /// Waits until the offer sells: a rebuild runs in the background, here or on another server.
    pub(crate) async fn healthy(&self, key: &OfferKey) {
        let offer = self.offer(key).await;
        eventually("the offer sells again", async || {
            let levels = offer.levels().await.ok()?.ok()?;
            (levels.stamp.epoch == self.sql_epoch(key).await).then_some(())
        })
        .await;
    }

    /// Settles and orders all that is left, then reads the books.
    pub(crate) async fn books(&self, key: &OfferKey) -> OfferBooks {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let found = self.finish_and_read(key).await;
            match found {
                Ok(books) if books.engine_unacked == 0 && books.unfinished_rows == 0 => {
                    return books;
                }
                found => assert!(Instant::now() < deadline, "the pipeline is not empty: {found:?}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn finish_and_read(&self, key: &OfferKey) -> Result<OfferBooks, Error> {
        sweep(&self.parts.reservations, Duration::ZERO).await?;
        self.parts.poller(&self.settings).run_once().await?;
        self.read_books(key).await
    }

    /// The books as they are, also in the middle of something.
    pub(crate) async fn read_books(&self, key: &OfferKey) -> Result<OfferBooks, Error> {
        let books =
            books::read(&self.parts.database, &self.parts.catalog, &key.activity_id).await?;
        Ok(books.into_iter().find(|books| books.sku_id == key.sku_id.as_str()).unwrap())
    }

    /// The live orders of an offer: `order_no` by `reservation_id`.
    pub(crate) async fn live_orders(&self, key: &OfferKey) -> BTreeMap<String, String> {
        let orders = orders::Entity::find()
            .filter(orders::Column::ActivityId.eq(key.activity_id.as_str()))
            .filter(orders::Column::SkuId.eq(key.sku_id.as_str()))
            .filter(orders::Column::State.ne(orders::OrderState::Cancelled))
            .all(self.parts.database.reader());
        let orders = orders.await.unwrap();
        orders.into_iter().map(|order| (order.reservation_id, order.order_no)).collect()
    }

    /// The oracle: at rest everything agrees to the unit, and this many units are held.
    pub(crate) async fn assert_balanced(&self, key: &OfferKey, held: i64) {
        let books = self.books(key).await;
        assert_eq!(books.contradictions(), Vec::<String>::new(), "{books:?}");
        assert_eq!((books.oversold(), books.missing()), (0, 0), "{books:?}");
        assert_eq!(books.orders_units, held, "{books:?}");
    }

    /// Ends this server in good order.
    pub(crate) async fn close(self) {
        self.parts.close(Instant::now() + Duration::from_secs(5)).await;
    }
}

/// An activity that sells this, from a minute ago for an hour.
pub(crate) fn spec_of(sale: &Sale) -> ActivitySpec {
    let now = TimeMs::now();
    ActivitySpec {
        activity_id: ActivityId::new(sale.activity).unwrap(),
        title: "A sale".to_owned(),
        start_time: now.minus(Duration::from_secs(60)),
        end_time: now.plus(Duration::from_secs(3_600)),
        retention: Duration::from_secs(3_600),
        offers: vec![OfferSpec {
            sku_id: SkuId::new(SKU).unwrap(),
            title: "A thing".to_owned(),
            price_minor: 1_999,
            currency: "CNY".to_owned(),
            total: sale.total,
            max_orders: sale.max_orders,
            max_quantity: sale.max_quantity,
            hold: sale.hold,
            segments: sale.segments,
        }],
    }
}

pub(crate) fn request(
    key: &OfferKey,
    buyer: &str,
    request_id: &str,
    quantity: u32,
) -> ReserveRequest {
    ReserveRequest {
        offer: key.clone(),
        buyer: BuyerId::new(buyer).unwrap(),
        quantity,
        request_id: Some(RequestId::new(request_id).unwrap()),
        is_repeat: false,
        address: None,
    }
}

/// The reservation of a request that must have won.
pub(crate) fn won(outcome: Result<ReserveOutcome, Error>) -> Reservation {
    match outcome {
        Ok(ReserveOutcome::Reserved { reservation, .. }) => reservation,
        other => panic!("not reserved: {other:?}"),
    }
}

/// Makes a test per engine and database of each: `name::embedded_sqlite`, `name::redis_postgres`,
/// `name::redis_mysql`.
macro_rules! on_every_ground {
    ($($(#[$attribute:meta])* async fn $name:ident($ground:ident: &Ground<'_>) $body:block)*) => {$(
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports, reason = "not every test needs all of it")]
            use super::*;
            use $crate::support::world::{Ground, on_embedded, on_redis};

            async fn test($ground: &Ground<'_>) $body

            on_embedded!(test);
            on_redis!(test);
        }
    )*};
}

/// Like [`on_every_ground`], for what only happens to a Redis.
macro_rules! on_every_redis {
    ($($(#[$attribute:meta])* async fn $name:ident(
        $ground:ident: &Ground<'_>, $redis:ident: &RedisServer
    ) $body:block)*) => {$(
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports, reason = "not every test needs all of it")]
            use super::*;
            use $crate::support::{redis_server::RedisServer, world::{Ground, on_redis}};

            async fn test($ground: &Ground<'_>) {
                body($ground, $ground.redis.as_ref().expect("this ground has a Redis")).await;
            }

            async fn body($ground: &Ground<'_>, $redis: &RedisServer) $body

            on_redis!(test);
        }
    )*};
}

macro_rules! on_embedded {
    ($test:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn embedded_sqlite() {
            use $crate::support::databases::{self, Fresh};
            let on = async |fresh: &Fresh| $test(&Ground::embedded(fresh)).await;
            databases::run(Fresh::sqlite().await, on).await;
        }
    };
}

macro_rules! on_redis {
    ($test:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn redis_postgres() {
            use $crate::support::databases::{self, Fresh};
            let on = async |fresh: &Fresh| $test(&Ground::redis(fresh).await).await;
            databases::run(Fresh::postgres().await, on).await;
        }

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn redis_mysql() {
            use $crate::support::databases::{self, Fresh};
            let on = async |fresh: &Fresh| $test(&Ground::redis(fresh).await).await;
            databases::run(Fresh::mysql().await, on).await;
        }
    };
}

pub(crate) use {on_embedded, on_every_ground, on_every_redis, on_redis};
