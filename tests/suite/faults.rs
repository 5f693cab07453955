//! Many buyers, two servers, and faults at random: whatever happens, it ends balanced, and what
//! was answered stays true.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use seckill::{
    domain::{ConfirmOutcome, OfferKey, ReleaseOutcome, ReservationId, ReserveOutcome},
    error::Error,
    outbox::sweeper::sweep,
};

use crate::support::{
    stage::Gate,
    world::{Ground, Sale, World, on_every_ground},
};

const ROUNDS: usize = 30;
const AT_ONCE: usize = 8;
const BUYERS: u32 = 9;
const REQUESTS: u32 = 3;
const TOTAL: u64 = 6;

type Request = (String, String);

/// What callers have heard.
#[derive(Debug, Default)]
struct Heard {
    reserved: BTreeMap<Request, ReservationId>,
    confirmed: BTreeSet<Request>,
    /// Asked for, whatever the answer was.
    release_asked: BTreeSet<Request>,
    released: BTreeSet<Request>,
}

enum Did {
    Reserve(Request, Result<ReserveOutcome, Error>),
    Release(Request, Result<ReleaseOutcome, Error>),
    Confirm(Request, Result<ConfirmOutcome, Error>),
    Worked(Result<(), Error>),
}

struct Storm {
    key: OfferKey,
    servers: [(World, Arc<Gate>); 2],
    rng: fastrand::Rng,
    heard: Heard,
}

impl Storm {
    fn pick(&mut self) -> usize {
        self.rng.usize(0..2)
    }

    /// Something goes wrong, or will with the next call of that kind.
    async fn fault(&mut self, ground: &Ground<'_>, world: &World) {
        let at = self.pick();
        let lost = [
            "reserve",
            "release",
            "acknowledge",
            "rebuild_begin",
            "rebuild_load",
            "rebuild_end",
            "freeze",
            "unacked",
        ];
        let refused = ["reserve", "release", "find", "levels", "rebuild_begin"];
        match self.rng.u8(0..12) {
            0 => ground.flush(world, &self.key).await,
            1 => {
                let offer = world.offer(&self.key).await;
                let epoch = world.sql_epoch(&self.key).await;
                offer.segments.first().scripts.freeze(epoch, "storm").await.unwrap();
            }
            2..=4 => self.servers[at].1.lose_reply(lost[self.rng.usize(0..lost.len())]),
            5 | 6 => self.servers[at].1.refuse(refused[self.rng.usize(0..refused.len())]),
            // A server dies behind the script.
            7 => {
                let buyer = format!("u{}", self.rng.u32(0..BUYERS));
                let request_id = format!("r{}", self.rng.u32(0..REQUESTS));
                self.servers[at].0.take_and_die(&self.key, &buyer, &request_id).await;
            }
            _ => {}
        }
    }

    async fn round(&mut self) {
        let released_before = self.heard.released.clone();
        let reserved_before = self.heard.reserved.keys().cloned().collect();
        let mut plans = Vec::new();
        for _ in 0..AT_ONCE {
            let at = self.pick();
            let request = (
                format!("u{}", self.rng.u32(0..BUYERS)),
                format!("r{}", self.rng.u32(0..REQUESTS)),
            );
            let known = self.heard.reserved.iter().nth(self.rng.usize(0..12));
            let known = known.map(|(request, id)| (request.clone(), id.clone()));
            plans.push((at, self.rng.u8(0..10), request, known));
        }
        for (_, what, _, known) in &plans {
            if let (6 | 7, Some((request, _))) = (what, known) {
                self.heard.release_asked.insert(request.clone());
            }
        }
        let (key, servers) = (&self.key, &self.servers);
        let all = plans.into_iter().map(|(at, what, request, known)| async move {
            let server = &servers[at].0;
            let parts = &server.parts;
            match (what, known) {
                (6 | 7, Some((request, id))) => {
                    let outcome = server.release(key, &request.0, &id).await;
                    Did::Release(request, outcome)
                }
                (8, Some((request, id))) => {
                    let outcome = server.confirm(key, &request.0, &id).await;
                    Did::Confirm(request, outcome)
                }
                (9, _) if at == 0 => {
                    let swept = sweep(&parts.reservations, Duration::ZERO).await;
                    Did::Worked(swept.map(|_| ()))
                }
                (9, _) => {
                    let pass = parts.poller(&server.settings).run_once().await;
                    Did::Worked(pass.map(|_| ()))
                }
                _ => {
                    let outcome = server.reserve(key, &request.0, &request.1).await;
                    Did::Reserve(request, outcome)
                }
            }
        });
        for did in futures_util::future::join_all(all).await {
            self.hear(did, &reserved_before, &released_before);
        }
        for (server, _) in &self.servers {
            server.close_circuits().await;
        }
    }

    /// Within a round the calls run at once, so only what was heard before it must hold in all.
    fn hear(
        &mut self,
        did: Did,
        reserved_before: &BTreeSet<Request>,
        released_before: &BTreeSet<Request>,
    ) {
        let heard = &mut self.heard;
        let failure = match did {
            Did::Reserve(request, Ok(outcome)) => {
                match outcome {
                    ReserveOutcome::Reserved { reservation, .. } => {
                        assert!(
                            !released_before.contains(&request),
                            "{request:?} is back: {reservation:?}"
                        );
                        let id = reservation.reservation_id;
                        let known = heard.reserved.insert(request.clone(), id.clone());
                        assert!(known.is_none_or(|known| known == id), "{request:?}");
                    }
                    ReserveOutcome::Released => {
                        assert!(heard.release_asked.contains(&request), "{request:?}");
                    }
                    ReserveOutcome::SoldOut | ReserveOutcome::Duplicate { .. } => {
                        let has_won = reserved_before.contains(&request);
                        assert!(!has_won, "a winner hears {outcome:?}: {request:?}");
                    }
                    other => panic!("{other:?}"),
                }
                return;
            }
            Did::Release(request, Ok(outcome)) => {
                match outcome {
                    ReleaseOutcome::Released | ReleaseOutcome::AlreadyReleased => {
                        assert!(!heard.confirmed.contains(&request), "{request:?}");
                        heard.released.insert(request);
                    }
                    ReleaseOutcome::Confirmed => {}
                    other => panic!("{request:?}: {other:?}"),
                }
                return;
            }
            Did::Confirm(request, Ok(outcome)) => {
                match outcome {
                    ConfirmOutcome::Confirmed(_) => {
                        assert!(!released_before.contains(&request), "{request:?}");
                        heard.confirmed.insert(request);
                    }
                    ConfirmOutcome::Released | ConfirmOutcome::NotOrderedYet => {}
                    other => panic!("{request:?}: {other:?}"),
                }
                return;
            }
            Did::Worked(Ok(())) => return,
            Did::Reserve(_, Err(error))
            | Did::Release(_, Err(error))
            | Did::Confirm(_, Err(error))
            | Did::Worked(Err(error)) => error,
        };
        assert!(
            matches!(
                failure,
                Error::OfferFrozen(_) | Error::EngineUnavailable | Error::DatabaseUnavailable
            ),
            "{failure:?}"
        );
    }

    /// Nothing fails any more: it comes back by itself, and all that was said is true.
    async fn calm(&self, world: &World) {
        for (_, gate) in &self.servers {
            gate.open();
        }
        let heard = &self.heard;
        for (request, id) in &heard.reserved {
            let outcome = world.reserve_decided(&self.key, &request.0, &request.1).await;
            match outcome {
                ReserveOutcome::Reserved { reservation, .. } => {
                    assert_eq!(&reservation.reservation_id, id);
                    assert!(!heard.released.contains(request), "{request:?} is back");
                }
                ReserveOutcome::Released => {
                    assert!(heard.release_asked.contains(request), "{request:?} is lost");
                    assert!(!heard.confirmed.contains(request), "{request:?} is lost");
                }
                other => panic!("{request:?}: {other:?}"),
            }
        }
        world.healthy(&self.key).await;
        let held = world.books(&self.key).await.orders_units;
        world.assert_balanced(&self.key, held).await;
        // And what is left can be sold, to the last unit.
        for n in held..i64::try_from(TOTAL).unwrap() {
            let outcome = world.reserve_decided(&self.key, &format!("late-{n}"), "r1").await;
            assert!(matches!(outcome, ReserveOutcome::Reserved { .. }), "{outcome:?}");
        }
        let outcome = world.reserve_decided(&self.key, "too-late", "r1").await;
        assert_eq!(outcome, ReserveOutcome::SoldOut);
        world.assert_balanced(&self.key, i64::try_from(TOTAL).unwrap()).await;
    }
}

async fn storm(ground: &Ground<'_>, world: &World, max_orders: u32) {
    let key = world.open_sale(&Sale { total: TOTAL, max_orders, ..Sale::default() }).await;
    let seed = fastrand::u64(..);
    #[allow(clippy::print_stdout, reason = "shown when the test fails")]
    {
        println!("storm with seed {seed}");
    }
    let servers = [world.beside().await, world.beside().await];
    let rng = fastrand::Rng::with_seed(seed);
    let mut storm = Storm { key, servers, rng, heard: Heard::default() };
    for _ in 0..ROUNDS {
        storm.fault(ground, world).await;
        storm.round().await;
    }
    storm.calm(world).await;
}

on_every_ground! {
    async fn a_storm_of_faults_ends_balanced_and_every_answer_stays_true(ground: &Ground<'_>) {
        let world = ground.world().await;
        storm(ground, &world, 1).await;
    }

    async fn a_storm_over_buyers_with_two_orders_ends_balanced_too(ground: &Ground<'_>) {
        let world = ground.world().await;
        storm(ground, &world, 2).await;
    }
}
