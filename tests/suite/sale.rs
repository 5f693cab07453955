//! The way of a reservation, on every engine and database.

use seckill::domain::{ReleaseOutcome, ReserveOutcome};

use crate::support::world::{Sale, on_every_ground};

on_every_ground! {
    async fn a_sale_from_warm_up_to_orders(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 3, ..Sale::default() }).await;
        let first = world.win(&key, "u1", "r1").await;
        world.win(&key, "u2", "r1").await;
        world.win(&key, "u3", "r1").await;
        let outcome = world.reserve(&key, "u4", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::SoldOut);

        match world.reserve(&key, "u1", "r1").await.unwrap() {
            ReserveOutcome::Reserved { reservation, replayed: true, .. } => {
                assert_eq!(reservation.reservation_id, first.reservation_id);
                assert_eq!(reservation.order_no, first.order_no);
            }
            other => panic!("{other:?}"),
        }
        match world.reserve(&key, "u1", "r2").await.unwrap() {
            ReserveOutcome::Duplicate { existing: Some(existing) } => {
                assert_eq!(existing.reservation_id, first.reservation_id);
            }
            other => panic!("{other:?}"),
        }
        world.assert_balanced(&key, 3).await;

        let released = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released);
        let again = world.release(&key, "u1", &first.reservation_id).await.unwrap();
        assert_eq!(again, ReleaseOutcome::AlreadyReleased);
        world.assert_balanced(&key, 2).await;

        world.win(&key, "u4", "r2").await;
        let outcome = world.reserve(&key, "u1", "r1").await.unwrap();
        assert_eq!(outcome, ReserveOutcome::Released);
        world.assert_balanced(&key, 3).await;
    }
}
