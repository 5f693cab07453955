//! Holds under stress: expiry, Confirm and Release of one reservation at the instant at which its
//! hold ends, on two servers whose clocks are an hour apart.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::{join, join_all};
use sea_orm::{ColumnTrait, ConnectionTrait, EntityTrait, QueryFilter};
use seckill::{
    domain::{ConfirmOutcome, OfferKey, ReleaseOutcome, Reservation, ReserveOutcome, TimeMs},
    entity::{orders, orders::OrderState},
    error::Error,
    outbox::reason,
    server::Parts,
};

use crate::support::world::{Ground, Sale, World, on_every_ground};

const RACES: usize = 1_000;
/// Races at the same time.
const AT_ONCE: usize = 50;
/// How long before the end of its hold the first calls for a reservation are made, and how long
/// after it the last ones.
const AROUND_THE_END_MS: u64 = 30;
/// How long before the end of the holds it is settled when that will be.
const LEAD_MS: i64 = 120;
/// How far the second server believes the database's clock to be ahead.
const APART_MS: i64 = 3_600_000;

/// How the calls of one race ended.
struct Race {
    first: Reservation,
    confirmed: Vec<ConfirmOutcome>,
    released: Option<ReleaseOutcome>,
}

/// How many races were won by what.
#[derive(Debug, Default)]
struct Tally {
    confirmed: usize,
    released: usize,
    expired: usize,
}

/// Another server over the same engine, whose clock is wrong.
async fn apart(ground: &Ground<'_>, world: &World) -> World {
    let database = ground.database.again().await;
    database.shared_clock().set_ahead(APART_MS);
    let parts = Parts::over(&world.settings, database, world.parts.engine.clone());
    parts.catalog.refresh().await.unwrap();
    World { parts, settings: world.settings.clone() }
}

/// Reserves for these buyers and makes orders, whose holds then end at one instant soon.
async fn about_to_end(world: &World, key: &OfferKey, buyers: &[String]) -> (Vec<Reservation>, i64) {
    let firsts = join_all(buyers.iter().map(|buyer| world.win(key, buyer, "first"))).await;
    world.poll().await;
    let end = world.parts.database.now().await.unwrap().0 + LEAD_MS;
    let statement = format!(
        "UPDATE outbox SET expire_time = {end} \
         WHERE request_id = 'first' AND state = 'done' AND expire_time IS NOT NULL"
    );
    world.parts.database.writer().execute_unprepared(&statement).await.unwrap();
    (firsts, end)
}

/// Sleeps until some moment around the end, by the database's clock.
async fn around(end: i64, now: TimeMs) {
    let early = u64::try_from(end - now.0).unwrap_or(0).saturating_sub(AROUND_THE_END_MS);
    let some = fastrand::u64(0..2 * AROUND_THE_END_MS);
    tokio::time::sleep(Duration::from_millis(early + some)).await;
}

/// Both servers confirm, one of them releases now and then; the expiry runs beside it.
async fn race(servers: [&World; 2], key: &OfferKey, first: Reservation, end: i64) -> Race {
    let (buyer, id) = (first.buyer.as_str(), &first.reservation_id);
    let now = servers[0].parts.database.now().await.unwrap();
    let confirm = async |server: &World| {
        around(end, now).await;
        server.decided(|| server.confirm(key, buyer, id)).await
    };
    let release = async {
        if fastrand::bool() {
            return None;
        }
        around(end, now).await;
        let server = servers[fastrand::usize(0..2)];
        Some(server.decided(|| server.release(key, buyer, id)).await)
    };
    let confirms = join_all(servers.map(confirm));
    let (confirmed, released) = join(confirms, release).await;
    Race { first, confirmed, released }
}

/// Expires on both servers from before the end until everything has ended.
async fn expire(servers: [&World; 2], end: i64) {
    let last = end + 2 * AROUND_THE_END_MS as i64;
    let expire = async |server: &World| {
        loop {
            let is_over = server.parts.database.now().await.unwrap().0 >= last;
            match server.parts.reservations.expire_holds(20).await {
                Ok(0) if is_over => return,
                Ok(_) | Err(Error::DatabaseUnavailable | Error::EngineUnavailable) => {}
                Err(error) => panic!("{error:?}"),
            }
            server.close_circuits().await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..5))).await;
        }
    };
    join_all(servers.map(expire)).await;
}

/// The race has one end, and all who took part were told what fits it.
fn judge(race: &Race, order: &orders::Model, end: i64, tally: &mut Tally) {
    let told_confirmed =
        race.confirmed.iter().filter(|told| matches!(told, ConfirmOutcome::Confirmed(_))).count();
    let context = || format!("{order:?}: {:?}, {:?}", race.confirmed, race.released);
    match order.state {
        OrderState::Confirmed => {
            tally.confirmed += 1;
            // Who asked first, or again; the other may have asked after the end.
            assert!(told_confirmed >= 1, "{}", context());
            assert!(order.confirm_time.unwrap() < end, "a late payment won: {}", context());
            let released = race.released.is_none_or(|told| told == ReleaseOutcome::Confirmed);
            assert!(released, "{}", context());
        }
        OrderState::Cancelled => {
            assert_eq!(told_confirmed, 0, "{}", context());
            if order.cancel_reason.as_deref() == Some(reason::EXPIRED) {
                tally.expired += 1;
                assert_ne!(race.released, Some(ReleaseOutcome::Released), "{}", context());
                let expired = race.confirmed.iter().all(|told| *told == ConfirmOutcome::Expired);
                assert!(expired, "{}", context());
            } else {
                tally.released += 1;
                assert!(race.released.is_some(), "{}", context());
            }
        }
        OrderState::Created => panic!("it has not ended: {}", context()),
    }
}

/// The buyer has another reservation now, which no late call for the first one touches.
async fn leave_the_newer_alone(servers: [&World; 2], key: &OfferKey, race: &Race) {
    let (buyer, id) = (race.first.buyer.as_str(), &race.first.reservation_id);
    let newer = servers[0].decided(|| servers[0].reserve(key, buyer, "second")).await;
    let ReserveOutcome::Reserved { reservation: newer, .. } = newer else {
        panic!("the buyer of {race_id} is locked out: {newer:?}", race_id = id);
    };
    for server in servers {
        let late = server.decided(|| server.confirm(key, buyer, id)).await;
        assert!(matches!(late, ConfirmOutcome::Expired | ConfirmOutcome::Released), "{late:?}");
        let late = server.decided(|| server.release(key, buyer, id)).await;
        assert_eq!(late, ReleaseOutcome::AlreadyReleased);
        let again = server.decided(|| server.reserve(key, buyer, "first")).await;
        assert_eq!(again, ReserveOutcome::Released);
    }
    let again = servers[0].decided(|| servers[0].reserve(key, buyer, "second")).await;
    match again {
        ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
            assert_eq!(reservation.order_no, newer.order_no);
        }
        other => panic!("the newer reservation is gone: {other:?}"),
    }
}

async fn orders_of(world: &World, key: &OfferKey) -> BTreeMap<String, orders::Model> {
    let orders = orders::Entity::find()
        .filter(orders::Column::ActivityId.eq(key.activity_id.as_str()))
        .all(world.parts.database.reader());
    let orders = orders.await.unwrap();
    orders.into_iter().map(|order| (order.reservation_id.clone(), order)).collect()
}

on_every_ground! {
    async fn at_the_end_of_a_hold_one_of_confirm_release_and_expiry_wins(ground: &Ground<'_>) {
        let world = ground.world().await;
        let sale = Sale { total: RACES as u64, hold: Some(Duration::from_secs(600)), ..Sale::default() };
        let key = world.open_sale(&sale).await;
        let apart = apart(ground, &world).await;
        let servers = [&world, &apart];
        let mut tally = Tally::default();
        let buyers: Vec<String> = (0..RACES).map(|nth| format!("u{nth}")).collect();
        for some in buyers.chunks(AT_ONCE) {
            let (firsts, end) = about_to_end(&world, &key, some).await;
            let races = join_all(firsts.into_iter().map(|first| race(servers, &key, first, end)));
            let (races, ()) = join(races, expire(servers, end)).await;
            let orders = orders_of(&world, &key).await;
            let mut lost = Vec::new();
            for race in &races {
                let order = &orders[race.first.reservation_id.as_str()];
                judge(race, order, end, &mut tally);
                if order.state == OrderState::Cancelled {
                    lost.push(leave_the_newer_alone(servers, &key, race));
                }
            }
            join_all(lost).await;
        }
        // A race that always ends the same way is none.
        let least = RACES / 100;
        assert!(tally.confirmed.min(tally.released).min(tally.expired) >= least, "{tally:?}");
        // Confirmed, or reserved anew: every buyer holds one unit.
        world.assert_balanced(&key, RACES as i64).await;
        apart.close().await;
    }
}
