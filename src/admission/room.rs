//! How many reservations may be under way.
//!
//! More under way than the stores can take win nothing; they only wait for each other, and with them
//! everything that is no Reserve. How many are right depends on the machine and its stores, so the
//! outbox measures it (`outbox/pace.rs`), and says so here.
//!
//! Where the stores share their cores with the threads that speak gRPC, fewer are right: while those
//! get no core, calls wait unread, their callers give up, and what is admitted then wins for nobody.
//! A refusal that comes at once is worth more. So the room shrinks while these threads are late.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::Error;

/// A thread that comes to a call so late has too little of a core.
const LATE: Duration = Duration::from_millis(40);
/// Some are always let in.
const LEAST: usize = 4;

/// Places for reservations that are under way.
#[derive(Debug)]
pub struct Room {
    places: Arc<Semaphore>,
    sizes: Mutex<Sizes>,
    owed: AtomicUsize,
}

#[derive(Debug)]
struct Sizes {
    /// How many there ever are.
    most: usize,
    /// How many the outbox can use.
    useful: usize,
    /// How many the threads that speak gRPC bear.
    borne: usize,
    /// How many there are; of them, `owed` are taken away as soon as they are free.
    now: usize,
}

/// One place, free again when it is dropped.
#[derive(Debug)]
pub struct Place {
    room: Arc<Room>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// `size` places, and never more than `most`.
    #[must_use]
    pub fn new(size: usize, most: usize) -> Arc<Self> {
        let now = size.min(most);
        Arc::new(Self {
            places: Arc::new(Semaphore::new(now)),
            sizes: Sizes { most, useful: size, borne: most, now }.into(),
            owed: 0.into(),
        })
    }

    /// A place, if one is free.
    ///
    /// # Errors
    /// [`Error::Overloaded`].
    pub fn enter(self: &Arc<Self>) -> Result<Place, Error> {
        let permit = self.places.clone().try_acquire_owned();
        permit.map(|permit| self.place(permit)).map_err(|_| Error::Overloaded)
    }

    /// A place, as soon as one is free; whoever waits comes before whoever does not.
    ///
    /// # Errors
    /// None that is known: the room is never closed.
    pub async fn wait(self: &Arc<Self>) -> Result<Place, Error> {
        let permit = self.places.clone().acquire_owned().await;
        permit.map(|permit| self.place(permit)).map_err(|_| Error::ShuttingDown)
    }

    /// How many places there are, and how many of them are taken.
    pub fn figures(&self) -> (usize, usize) {
        let size = self.locked().now;
        let owed = self.owed.load(Ordering::Relaxed);
        (size, (size + owed).saturating_sub(self.places.available_permits()))
    }

    fn place(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Place {
        Place { room: self.clone(), permit: Some(permit) }
    }

    /// Makes it so many places, or fewer where so many are not borne. Those in use are not touched: if
    /// they are more, they become fewer as they are left.
    pub fn resize(&self, size: usize) {
        let mut sizes = self.locked();
        sizes.useful = size;
        self.adjust(&mut sizes);
    }

    /// A thread that speaks gRPC came so late to what was due. Told some dozen times a second.
    pub fn note_lag(&self, lag: Duration) {
        let mut sizes = self.locked();
        if lag > LATE {
            sizes.borne = (sizes.now - sizes.now / 4).max(LEAST.min(sizes.most));
        } else if lag < LATE / 2 && sizes.borne < sizes.most {
            sizes.borne = (sizes.borne + sizes.borne.div_ceil(16)).min(sizes.most);
        } else {
            return;
        }
        self.adjust(&mut sizes);
    }

    fn adjust(&self, sizes: &mut Sizes) {
        let (size, now) = (sizes.useful.min(sizes.borne).min(sizes.most), sizes.now);
        if size < now {
            let fewer = now - size;
            let gone = self.places.forget_permits(fewer);
            self.owed.fetch_add(fewer - gone, Ordering::Relaxed);
        } else if size > now {
            let more = size - now;
            let less = |owed: usize| Some(owed.saturating_sub(more));
            let owed = self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            self.places.add_permits(more.saturating_sub(owed.unwrap_or(0)));
        }
        sizes.now = size;
    }

    fn locked(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let owed = &self.room.owed;
        let less = |owed: usize| owed.checked_sub(1);
        if owed.load(Ordering::Relaxed) > 0
            && owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
            && let Some(permit) = self.permit.take()
        {
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_never_larger_than_allowed() {
        let room = Room::new(10, 3);
        let places: Vec<Place> = (0..3).map(|_| room.enter().unwrap()).collect();
        assert!(matches!(room.enter(), Err(Error::Overloaded)));
        drop(places);
        room.resize(100);
        assert_eq!(room.places.available_permits(), 3);
        assert_eq!(room.figures(), (3, 0));
    }

    #[test]
    fn places_are_neither_lost_nor_made_when_the_room_is_resized_in_use() {
        let room = Room::new(2_000, 10_000);
        let mut held: Vec<Place> = (0..1_000).map(|_| room.enter().unwrap()).collect();
        for size in [10, 2_000, 500, 700, 64, 1_500, 1_024] {
            room.resize(size);
            held.truncate(held.len() - 50);
            let free = room.places.available_permits();
            assert_eq!(free, size.saturating_sub(held.len()), "of {size}");
            assert_eq!(room.figures(), (size, held.len()));
        }
        held.clear();
        assert_eq!(room.places.available_permits(), 1_024);
    }

    #[test]
    fn fewer_are_let_in_while_calls_wait_unread_and_as_many_as_before_after_it() {
        let room = Room::new(1_024, 10_000);
        for _ in 0..50 {
            room.note_lag(Duration::from_millis(1));
        }
        assert_eq!(room.figures(), (1_024, 0), "on time");
        room.note_lag(LATE * 2);
        assert_eq!(room.figures(), (768, 0), "late once");
        room.resize(2_000);
        room.note_lag(LATE * 3 / 4);
        assert_eq!(room.figures(), (768, 0), "neither late nor on time");
        for _ in 0..50 {
            room.note_lag(LATE * 2);
        }
        assert_eq!(room.figures(), (LEAST, 0), "late for long");
        let held: Vec<Place> = (0..LEAST).map(|_| room.enter().unwrap()).collect();
        assert!(room.enter().is_err());
        drop(held);
        for _ in 0..150 {
            room.note_lag(Duration::from_millis(1));
        }
        assert_eq!(room.figures(), (2_000, 0), "on time again");
    }

    #[tokio::test]
    async fn whoever_waits_for_a_place_comes_before_whoever_does_not() {
        let room = Room::new(1, 1);
        let first = room.enter().unwrap();
        let mut waiting = Box::pin(room.wait());
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(first);
        assert!(room.enter().is_err());
        drop(waiting.await.unwrap());
        assert!(room.enter().is_ok());
    }
}
