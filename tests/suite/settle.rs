//! Settle: only what is drained and reconciled, and then nothing is left in the engine.

use std::time::Duration;

use sea_orm::ConnectionTrait;
use seckill::{
    api::pb::{self, seckill_admin_client::SeckillAdminClient},
    domain::{
        ActivityState, ConfirmOutcome, OfferKey, PageQuery, ReleaseOutcome, ReservationQuery,
        ReservationState, ReserveOutcome,
    },
    engine::{Call, Script, Value, keys, scripts::Unacked},
    error::Error,
};

use tonic::Code;

use crate::support::{
    eventually,
    process::Serve,
    world::{Sale, World, on_every_ground, request},
};

async fn sql(world: &World, statement: &str) {
    world.parts.database.writer().execute_unprepared(statement).await.unwrap();
}

async fn settle(world: &World, key: &OfferKey) -> Result<ActivityState, Error> {
    let settled = world.parts.activities.settle(&key.activity_id, "ann", "done").await;
    settled.map(|activity| activity.state)
}

async fn end(world: &World, key: &OfferKey) {
    world.parts.activities.end(&key.activity_id, "ann", "enough").await.unwrap();
}

/// How many keys of the offer the engine has.
async fn keys_left(world: &World, key: &OfferKey) -> i64 {
    let exists = Script { name: "exists", source: "return redis.call('EXISTS', unpack(KEYS))" };
    let call = Call { script: exists, keys: keys::segment(key, 0), args: Vec::new() };
    match world.parts.engine.eval(call).await.unwrap() {
        Value::Int(count) => count,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_not_drained(outcome: Result<ActivityState, Error>, why: &str) {
    match outcome {
        Err(Error::NotDrained { detail, .. }) => assert!(detail.contains(why), "{detail}"),
        other => panic!("settled, or refused for another reason than {why}: {other:?}"),
    }
}

on_every_ground! {
    async fn an_activity_is_settled_when_it_is_drained_and_reconciled(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let held = world.win(&key, "u1", "r").await;
        world.win(&key, "u2", "r").await;
        let given_back = world.win(&key, "u9", "r").await;
        world.release(&key, "u9", &given_back.reservation_id).await.unwrap();
        world.assert_balanced(&key, 2).await;
        let epoch = world.sql_epoch(&key).await;
        end(&world, &key).await;
        assert_eq!(settle(&world, &key).await.unwrap(), ActivityState::Settled);
        assert_eq!(keys_left(&world, &key).await, 0);
        assert_eq!(world.sql_epoch(&key).await, epoch + 1);

        let query = PageQuery { page_size: 1, page_token: String::new(), activity_id: None };
        let (audit, _) = seckill::audit::list(&world.parts.database, &query).await.unwrap();
        assert_eq!((audit[0].action.as_str(), audit[0].actor.as_str()), ("settle_activity", "ann"));
        for part in ["\"to\":\"settled\"", "\"reason\":\"done\"", "\"recorded\":2"] {
            assert!(audit[0].detail.contains(part), "{} has no {part}", audit[0].detail);
        }
        // Its orders are there for ever; it sells and gives back nothing.
        let outcome = world.reserve(&key, "u3", "r").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::Ended);
        let refused = world.release(&key, "u1", &held.reservation_id).await;
        assert!(
            matches!(
                refused,
                Err(Error::WrongActivityState { current: ActivityState::Settled, .. })
            ),
            "{refused:?}"
        );
        // What was given back before is still answered as it was.
        let outcome = world.release(&key, "u9", &given_back.reservation_id).await.unwrap();
        assert_eq!(outcome, ReleaseOutcome::AlreadyReleased);
        let query = ReservationQuery::ById(held.reservation_id.clone());
        let (found, _) = world.parts.reservations.get(query).await.unwrap();
        assert_eq!(found.state, ReservationState::Ordered);
        let confirmed = world.confirm(&key, "u1", &held.reservation_id).await.unwrap();
        assert!(matches!(confirmed, ConfirmOutcome::Confirmed(_)), "{confirmed:?}");
        // Its books can still be compared, in SQL.
        let report = world.parts.reconciler.reconcile(&key.activity_id, false, "t").await.unwrap();
        assert_eq!((report.difference_count, report.offers[0].ordered), (0, 2));
    }

    async fn only_what_has_ended_is_settled_and_only_once(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let early = settle(&world, &key).await;
        assert!(
            matches!(
                early,
                Err(Error::WrongActivityState { current: ActivityState::Scheduled, .. })
            ),
            "{early:?}"
        );
        assert_eq!(keys_left(&world, &key).await, 2);
        end(&world, &key).await;
        settle(&world, &key).await.unwrap();
        let again = settle(&world, &key).await;
        assert!(
            matches!(
                again,
                Err(Error::WrongActivityState { current: ActivityState::Settled, .. })
            ),
            "{again:?}"
        );
    }

    async fn what_is_still_to_be_done_is_named_and_nothing_changes(ground: &Ground<'_>) {
        let world = ground.world().await;
        let sale = Sale { hold: Some(Duration::from_secs(3_600)), ..Sale::default() };
        let key = world.open_sale(&sale).await;
        let held = world.win(&key, "u1", "r").await;
        end(&world, &key).await;
        let epoch = world.sql_epoch(&key).await;
        assert_not_drained(settle(&world, &key).await, "1 outbox rows on their way to orders");
        world.poll().await;
        assert_not_drained(settle(&world, &key).await, "1 holds that are neither confirmed");
        world.confirm(&key, "u1", &held.reservation_id).await.unwrap();
        sql(&world, "UPDATE offers SET reserved = reserved + 1").await;
        assert_not_drained(settle(&world, &key).await, "1 differences");
        sql(&world, "UPDATE offers SET reserved = reserved - 1").await;
        sql(&world, "UPDATE outbox SET state = 'dead'").await;
        assert_not_drained(settle(&world, &key).await, "1 dead letters");
        sql(&world, "UPDATE outbox SET state = 'done'").await;
        assert_eq!(world.sql_epoch(&key).await, epoch);
        assert!(keys_left(&world, &key).await > 0);
        settle(&world, &key).await.unwrap();
        assert_eq!(keys_left(&world, &key).await, 0);
    }

    async fn a_late_take_is_not_recorded_after_the_settlement(ground: &Ground<'_>) {
        let world = ground.world().await;
        let other = ground.redis.is_some().then_some(ground.world());
        let Some(other) = other else { return };
        let other = other.await;
        let key = world.open_sale(&Sale::default()).await;
        other.parts.catalog.refresh().await.unwrap();
        // The other server took units; its insert waits while the activity is settled.
        let offer = other.offer(&key).await;
        end(&world, &key).await;
        // Behind the comparison, before the purge: as if the script came late.
        let epoch = offer.epoch();
        sql(&world, "UPDATE activities SET state = 'settled', version = version + 1").await;
        sql(&world, "UPDATE offers SET epoch = epoch + 1").await;
        other.take(&key, "u1", "r").await;
        let entries = offer.segments.first().scripts.unacked(seckill::domain::TimeMs(i64::MAX), 10).await;
        let Unacked { epoch: seen, mut entries, .. } = entries.unwrap().unwrap();
        assert_eq!((seen, entries.len()), (epoch, 1));
        let settled = other.parts.reservations.settle(&offer, epoch, entries.remove(0)).await;
        assert!(settled.is_ok() || matches!(settled, Err(Error::OfferFrozen(_))), "{settled:?}");
        world.parts.activities.purge_settled().await.unwrap();
        assert_eq!(keys_left(&world, &key).await, 0);
        // Nobody fills it again, whatever they believe the state to be.
        other.parts.recovery.rebuild_now(&offer).await.unwrap();
        assert_eq!(keys_left(&world, &key).await, 0);
        assert_eq!(world.live_orders(&key).await.len(), 0);
        let refused = other.release(&key, "u1", &asked_id(&key)).await;
        assert!(!matches!(refused, Ok(ReleaseOutcome::Released)), "{refused:?}");
    }

    async fn a_server_that_has_not_heard_of_the_settlement_gives_nothing_back(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        let held = world.win(&key, "u1", "r").await;
        world.assert_balanced(&key, 1).await;
        end(&world, &key).await;
        // Behind the back of the catalog.
        sql(&world, "UPDATE activities SET state = 'settled', version = version + 1").await;
        sql(&world, "UPDATE offers SET epoch = epoch + 1").await;
        let refused = world.release(&key, "u1", &held.reservation_id).await;
        assert!(matches!(refused, Err(Error::WrongActivityState { .. })), "{refused:?}");
        assert_eq!(world.live_orders(&key).await.len(), 1);
    }

    async fn what_a_crash_left_in_the_engine_is_removed_at_the_next_start(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.win(&key, "u1", "r").await;
        world.assert_balanced(&key, 1).await;
        end(&world, &key).await;
        sql(&world, "UPDATE activities SET state = 'settled', version = version + 1").await;
        sql(&world, "UPDATE offers SET epoch = epoch + 1").await;
        assert!(keys_left(&world, &key).await > 0);
        world.parts.catalog.refresh().await.unwrap();
        world.parts.activities.purge_settled().await.unwrap();
        assert_eq!(keys_left(&world, &key).await, 0);
    }

    async fn a_server_that_dies_while_it_settles_leaves_nothing_behind(ground: &Ground<'_>) {
        for (activity, failpoint) in
            [("early", "before_settlement_commit"), ("late", "after_settlement_commit")]
        {
            let world = ground.world().await;
            let key = world.open_sale(&Sale { activity, ..Sale::default() }).await;
            world.win(&key, "u1", "r").await;
            world.assert_balanced(&key, 1).await;
            end(&world, &key).await;
            world.close().await;
            let serve = Serve::over(&ground.settings());
            let settle = pb::SettleActivityRequest {
                activity_id: activity.to_owned(),
                reason: String::new(),
            };

            let mut dying = serve.clone().dying(failpoint, 1).start().await;
            let mut admin = SeckillAdminClient::new(dying.channel().await);
            let lost = admin.settle_activity(settle.clone()).await;
            assert!(lost.is_err(), "{lost:?}");
            dying.crashed().await;

            let mut server = serve.start().await;
            let mut admin = SeckillAdminClient::new(server.channel().await);
            // The dead server's lock runs out first.
            let answer = eventually("nobody else settles it", async || {
                let answer = admin.settle_activity(settle.clone()).await;
                let waits = answer.as_ref().is_err_and(|error| error.code() == Code::Aborted);
                (!waits).then_some(answer)
            })
            .await;
            match failpoint {
                "before_settlement_commit" => drop(answer.unwrap()),
                _ => assert_eq!(answer.unwrap_err().code(), Code::FailedPrecondition),
            }
            server.stop().await;
            let world = ground.world().await;
            assert_eq!(keys_left(&world, &key).await, 0);
            let view = world.parts.activities.get(&key.activity_id).await.unwrap();
            assert_eq!(view.state, ActivityState::Settled);
            assert_eq!(world.live_orders(&key).await.len(), 1);
            world.close().await;
        }
    }

    async fn a_rebuild_is_refused_where_the_engine_holds_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let spec = crate::support::world::spec_of(&Sale::default());
        let id = spec.activity_id.clone();
        world.parts.activities.create(spec, "test").await.unwrap();
        let refused = world.parts.activities.rebuild_stock(&id, None, None, "ann", "").await;
        assert!(matches!(refused, Err(Error::WrongActivityState { .. })), "{refused:?}");
    }

    async fn an_operator_has_a_healthy_offer_rebuilt(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.win(&key, "u1", "r").await;
        world.assert_balanced(&key, 1).await;
        let epoch = world.sql_epoch(&key).await;
        let activities = &world.parts.activities;
        let sku = Some(&key.sku_id);
        let stocks = activities.rebuild_stock(&key.activity_id, sku, None, "ann", "why not").await.unwrap();
        assert_eq!(stocks.len(), 1);
        assert_eq!((stocks[0].epoch, stocks[0].remaining, stocks[0].reserved), (epoch + 1, 9, 1));
        world.assert_balanced(&key, 1).await;
        let query = PageQuery { page_size: 2, page_token: String::new(), activity_id: None };
        let (audit, _) = seckill::audit::list(&world.parts.database, &query).await.unwrap();
        let actions: Vec<&str> = audit.iter().map(|entry| entry.action.as_str()).collect();
        assert_eq!(actions, ["rebuild", "rebuild_stock"]);
        assert_eq!(audit[1].actor, "ann");
        assert!(audit[0].detail.contains("\"reason\":\"operator\""), "{}", audit[0].detail);
    }
}

fn asked_id(key: &OfferKey) -> seckill::domain::ReservationId {
    let asked = request(key, "u1", "r", 1);
    seckill::domain::name_reservation(key, &asked.buyer, asked.request_id.as_ref())
}
