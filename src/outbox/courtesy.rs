//! Orders wait while callers do.
//!
//! A reservation is durable before its order is made, so nobody waits for the order; whoever calls
//! waits for an answer. Where stores and server share their cores, orders would take from a rush a
//! quarter of what it needs. So the poller gives way while the threads that speak gRPC are late, and
//! not for ever: then it works beside the rush until it has caught up.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::admission::room::Room;

/// How long orders wait for callers, from the first row that waits on.
const GIVE_WAY_FOR: Duration = Duration::from_secs(3);
/// How often it is looked whether they still have to.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// How long a poller has given way.
#[derive(Debug, Default)]
pub struct Courtesy {
    since: Option<Instant>,
}

impl Courtesy {
    /// Waits while those who call need the cores, unless orders have waited for long enough.
    pub async fn give_way(&mut self, room: &Room) {
        while room.is_pressed() {
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() >= GIVE_WAY_FOR {
                return;
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// No row waits any more.
    pub fn caught_up(&mut self) {
        self.since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_millis(100);
    const ON_TIME: Duration = Duration::from_millis(1);

    async fn waited(courtesy: &mut Courtesy, room: &Room) -> Duration {
        let begun = Instant::now();
        courtesy.give_way(room).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn orders_wait_while_callers_do_and_no_longer() {
        let (room, mut courtesy) = (Room::new(1_024, 10_000), Courtesy::default());
        assert_eq!(waited(&mut courtesy, &room).await, Duration::ZERO, "nobody is late");
        room.note_lag(LATE);
        let rush = async {
            sleep(Duration::from_secs(2)).await;
            for _ in 0..100 {
                room.note_lag(ON_TIME);
            }
        };
        let (waited, ()) = tokio::join!(waited(&mut courtesy, &room), rush);
        assert!((2.0..2.1).contains(&waited.as_secs_f64()), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rush_that_does_not_end_stops_no_orders() {
        let (room, mut courtesy) = (Room::new(1_024, 10_000), Courtesy::default());
        room.note_lag(LATE);
        let first = waited(&mut courtesy, &room).await;
        assert!((3.0..3.1).contains(&first.as_secs_f64()), "{first:?}");
        assert_eq!(waited(&mut courtesy, &room).await, Duration::ZERO, "until it has caught up");
        courtesy.caught_up();
        let next = waited(&mut courtesy, &room).await;
        assert!((3.0..3.1).contains(&next.as_secs_f64()), "{next:?}");
    }
}
