//! One typed call per script.

use std::{sync::Arc, time::Duration};

mod reply;

use super::{Engine, EngineError, Script, keys, meter::run};
use crate::domain::{BuyerId, OrderNo, RequestId, ReservationId, TimeMs};
pub(super) use reply::Reply;

macro_rules! script {
    ($($(#[$doc:meta])* $const:ident = $file:literal;)*) => {
        $($(#[$doc])*
        pub const $const: Script = Script {
            name: $file,
            source: concat!(
                include_str!("../../lua/guard.lua"),
                include_str!(concat!("../../lua/", $file, ".lua"))
            ),
        };)*
        /// Every script, in the order of a reservation's life.
        pub const ALL: &[Script] = &[$($const),*];

        /// The place of each script in [`ALL`]: what typed calls name a script by.
        #[derive(Debug, Clone, Copy)]
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "named as the scripts")]
        #[allow(dead_code, reason = "not all of them have a typed call")]
        pub(super) enum Id {
            $($const),*
        }
    };
}

script! {
    WARMUP = "warmup";
    RESERVE = "reserve";
    ACKNOWLEDGE = "acknowledge";
    RELEASE = "release";
    UNACKED = "unacked";
    FIND = "find";
    LEVELS = "levels";
    HOLDINGS = "holdings";
    MEMBERS = "members";
    LOOKUP = "lookup";
    ADD_UNITS = "add_units";
    SET_ASIDE = "set_aside";
    FORGET_ASIDE = "forget_aside";
    PUT_BACK = "put_back";
    ASIDES = "asides";
    TRANSFER_OUT = "transfer_out";
    TRANSFER_IN = "transfer_in";
    TRANSFER_DONE = "transfer_done";
    TRANSFERS = "transfers";
    FREEZE = "freeze";
    REBUILD_BEGIN = "rebuild_begin";
    REBUILD_LOAD = "rebuild_load";
    REBUILD_END = "rebuild_end";
    PURGE = "purge";
    TELL = "tell";
    LOCK_ACQUIRE = "lock_acquire";
    LOCK_EXTEND = "lock_extend";
    LOCK_RELEASE = "lock_release";
    PING = "ping";
}

/// Under which epoch, and after which change, a segment was seen; both only rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp {
    pub epoch: u64,
    pub revision: u64,
}

/// Why a script did nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Neither stock nor meta is there.
    NotWarmed,
    /// The segment must be rebuilt, or is being rebuilt, before it sells on.
    /// `segments` is how many the offer has, as the engine knows it.
    Frozen { stamp: Stamp, reason: String, segments: u32 },
}

/// What a script came to, unless it refused.
pub type Answer<T> = Result<T, Refusal>;

/// One request to take units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Take {
    pub buyer: BuyerId,
    pub reservation_id: ReservationId,
    pub quantity: u32,
    pub order_no: OrderNo,
    /// Whether this attempt of the buyer was counted before.
    pub again: bool,
}

/// A reservation as the engine stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub reservation_id: ReservationId,
    pub quantity: u32,
    pub order_no: OrderNo,
    pub reserve_time: TimeMs,
    /// Known once SQL holds the reservation; `None` before that, and when it never expires.
    pub expire_time: Option<TimeMs>,
}

/// What `reserve` answers to one request, in order of precedence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    Replayed {
        slot: u32,
        record: Record,
        unacked: bool,
    },
    Released,
    /// Too many attempts, counted over all servers.
    RateLimited {
        wait: Duration,
    },
    Duplicate {
        slot: u32,
        record: Record,
        unacked: bool,
    },
    SoldOut,
    Insufficient {
        stock: u64,
    },
    Taken {
        slot: u32,
    },
}

/// The answers of one `reserve` call, in the order of its requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    pub stamp: Stamp,
    pub stock: u64,
    pub answers: Vec<Taken>,
}

/// What `release` came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GivenBack {
    /// The engine can't say now; the row stays due.
    Retry {
        reason: String,
    },
    /// It was not there; the id is marked.
    NotReserved {
        stamp: Stamp,
        stock: u64,
    },
    Released {
        stamp: Stamp,
        stock: u64,
    },
}

/// What `find` knows of a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Held { slot: u32, record: Record, unacked: bool },
    Released,
    NotReserved,
}

/// What `unacked` read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unacked {
    /// Under which all of `entries` were taken.
    pub epoch: u64,
    /// Units that are set aside for adjustments.
    pub aside: u64,
    /// Units that are on their way to other segments.
    pub out: u64,
    pub entries: Vec<Held>,
}

/// What `set_aside` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetAside {
    /// So many units are set aside for the request, now or since before.
    Done { units: u64 },
    /// So many can be had in the segment as it was then, fewer than asked.
    Insufficient { possible: u64, stamp: Stamp },
    /// SQL has decided about this request.
    Decided,
}

/// Units that are set aside for an adjustment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aside {
    pub request_id: RequestId,
    pub units: u64,
    pub time: TimeMs,
}

/// Whether the engine follows what SQL decided about an adjustment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Followed {
    /// Now, or before, or by a rebuild.
    Done,
    /// The engine can't say now.
    Retry { reason: String },
    /// It holds something else than SQL says it must.
    Contradiction { stamp: Stamp },
}

/// A reservation in the engine, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub buyer: BuyerId,
    pub slot: u32,
    pub record: Record,
}

/// What a slot of a buyer holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub record: Record,
    pub unacked: bool,
}

/// The figures of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Levels {
    pub stamp: Stamp,
    pub stock: u64,
    /// Units that the segment was given; of one that is alone, those of the offer. Below 0 where more
    /// were taken off the total here than it was given, with units that came from other segments.
    pub total: i64,
    /// Units of the segment's reservations.
    pub held: u64,
    pub reservations: u64,
    pub unacked: u64,
    /// Units that are set aside, to be taken off the total or put back.
    pub aside: u64,
    /// Units on their way to other segments.
    pub out: u64,
    /// Units that came from other segments, less those that went there for good.
    pub moved: i64,
    /// When the reservation was taken that has been unacknowledged longest.
    pub oldest_unacked: Option<TimeMs>,
}

impl Levels {
    /// Units on sale of those that the segment was given, wherever they are by now. Of each segment it
    /// is the same before and after any step of a transfer, so sums over segments are right also while
    /// units move.
    #[must_use]
    pub fn on_sale(&self) -> i64 {
        signed(self.stock) + signed(self.out) - self.moved
    }

    /// Units on sale, held and set aside of those that the segment was given: all of them.
    #[must_use]
    pub fn accounted(&self) -> i64 {
        self.on_sale() + signed(self.held) + signed(self.aside)
    }
}

/// What `transfer_out` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SentOff {
    /// So many units are on their way, now or since before.
    Out { sequence: u64, units: u64 },
    /// The segment has none on sale.
    Nothing,
}

/// Whether units of another segment arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrived {
    /// Now, or before: the other segment may forget them.
    In { stamp: Stamp },
    /// Not now, and they must not be forgotten.
    Retry { reason: String },
}

/// Units on their way to another segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    pub target: u32,
    pub sequence: u64,
    pub units: u64,
}

/// What [`SegmentScripts::members_page`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Members {
    Buyers,
    Marks,
}

/// A page of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembersPage {
    pub stamp: Stamp,
    pub stock: u64,
    /// The next cursor; 0 at the end.
    pub next: String,
    pub names: Vec<String>,
}

/// What `warmup` came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarmedUp {
    Written,
    Already,
    Mismatch { what: String, found: String, asked: String },
}

/// Whether a step of a rebuild was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RebuildStep {
    Applied,
    /// The engine is at this epoch, or no rebuild is under way.
    Refused {
        epoch: u64,
    },
}

/// The scripts of one segment as typed calls.
#[derive(Debug, Clone)]
pub struct SegmentScripts {
    engine: Arc<dyn Engine>,
    keys: Arc<[String]>,
    /// How many segments the offer has.
    segments: u32,
    max_orders: u32,
    attempts: Option<Attempts>,
}

/// How often a buyer may try to reserve an offer, over all servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempts {
    /// In each window; at least 1.
    pub most: u32,
    /// At least a millisecond.
    pub window: Duration,
}

/// The most reservations that are read at a time.
pub const PAGE: usize = 500;

impl SegmentScripts {
    /// For the segment with these keys, whose buyers may hold `max_orders` reservations each.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, keys: Arc<[String]>, max_orders: u32) -> Self {
        Self { engine, keys, segments: 1, max_orders, attempts: None }
    }

    /// The same, of an offer that has so many segments.
    #[must_use]
    pub fn among(self, segments: u32) -> Self {
        Self { segments, ..self }
    }

    /// The same, with a limit for each buyer.
    #[must_use]
    pub fn limited(self, attempts: Option<Attempts>) -> Self {
        Self { attempts, ..self }
    }

    async fn eval(&self, id: Id, args: Vec<Vec<u8>>) -> Result<Reply, EngineError> {
        run(&*self.engine, id, self.keys.clone(), args).await
    }

    /// Takes units for up to 64 requests in one atomic step.
    ///
    /// # Errors
    /// See [`EngineError`]; after `Unknown` any of the requests may hold units.
    pub async fn reserve(
        &self,
        epoch: u64,
        now: TimeMs,
        takes: impl ExactSizeIterator<Item = &Take>,
    ) -> Result<Answer<Reserved>, EngineError> {
        let mut args = Vec::with_capacity(5 + 4 * takes.len());
        let (most, window_ms) =
            self.attempts.map_or((0, 0), |limit| (limit.most, limit.window.as_millis()));
        args.extend([text(epoch), text(self.max_orders), text(now.0)]);
        args.extend([text(most), text(window_ms)]);
        let mut counters = Vec::new();
        for take in takes {
            if most > 0 {
                counters.push(match take.again {
                    true => self.keys.first().cloned().unwrap_or_default(),
                    false => keys::attempts(&self.keys, take.buyer.as_str()),
                });
            }
            args.push(bytes(take.buyer.as_str()));
            args.push(bytes(take.reservation_id.as_str()));
            args.push(text(take.quantity));
            args.push(bytes(take.order_no.as_str()));
        }
        let keys = match counters.is_empty() {
            true => self.keys.clone(),
            false => self.keys.iter().cloned().chain(counters).collect(),
        };
        let mut reply = run(&*self.engine, Id::RESERVE, keys, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let stock = reply.number()?;
        let mut answers = Vec::new();
        while let Some(mut answer) = reply.nested()? {
            answers.push(match answer.word()?.as_str() {
                "replayed" => Taken::Replayed {
                    slot: answer.number()?,
                    record: answer.record()?,
                    unacked: answer.number::<u32>()? == 1,
                },
                "released" => Taken::Released,
                "rate_limited" => {
                    Taken::RateLimited { wait: Duration::from_millis(answer.number()?) }
                }
                "duplicate" => Taken::Duplicate {
                    slot: answer.number()?,
                    record: answer.record()?,
                    unacked: answer.number::<u32>()? == 1,
                },
                "sold_out" => Taken::SoldOut,
                "insufficient" => Taken::Insufficient { stock: answer.number()? },
                "taken" => Taken::Taken { slot: answer.number()? },
                other => return Err(answer.unexpected(other)),
            });
        }
        Ok(Ok(Reserved { stamp, stock, answers }))
    }

    /// Gives one reservation back; SQL must hold its row as releasing, released or refused.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn release(
        &self,
        row_epoch: u64,
        reservation_id: &ReservationId,
        buyer: &BuyerId,
    ) -> Result<GivenBack, EngineError> {
        let args = vec![
            text(row_epoch),
            bytes(reservation_id.as_str()),
            bytes(buyer.as_str()),
            text(self.max_orders),
            text(self.segments),
        ];
        let mut reply = self.eval(Id::RELEASE, args).await?;
        let status = reply.word()?;
        let stamp = reply.stamp()?;
        Ok(match status.as_str() {
            "retry" => GivenBack::Retry { reason: reply.word()? },
            "not_reserved" => GivenBack::NotReserved { stamp, stock: reply.number()? },
            "released" => GivenBack::Released { stamp, stock: reply.number()? },
            other => return Err(reply.unexpected(other)),
        })
    }

    /// Takes reservations that SQL holds off `unacked`: (buyer, slot, order number, expiry).
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn acknowledge(
        &self,
        epoch: u64,
        written: impl Iterator<Item = (&BuyerId, u32, &OrderNo, Option<TimeMs>)>,
    ) -> Result<Answer<()>, EngineError> {
        let mut args = vec![text(epoch)];
        for (buyer, slot, order_no, expire_time) in written {
            args.push(bytes(&self.member(buyer, slot)));
            args.push(bytes(order_no.as_str()));
            args.push(text(expire_time.map_or(0, |time| time.0)));
        }
        Ok(self.eval(Id::ACKNOWLEDGE, args).await?.head()?.map(|_| ()))
    }

    /// Reads up to `limit` reservations taken before `before` that nobody acknowledged, and the
    /// epoch under which all of them were taken.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn unacked(
        &self,
        before: TimeMs,
        limit: u32,
    ) -> Result<Answer<Unacked>, EngineError> {
        let args = vec![text(before.0), text(limit.min(500)), text(self.segments)];
        let mut reply = self.eval(Id::UNACKED, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let (aside, out) = (reply.number()?, reply.number()?);
        let mut entries = Vec::new();
        while !reply.is_empty() {
            entries.push(self.held(&mut reply)?);
        }
        Ok(Ok(Unacked { epoch: stamp.epoch, aside, out, entries }))
    }

    /// What the engine knows of one reservation.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn find(
        &self,
        reservation_id: &ReservationId,
        buyer: &BuyerId,
    ) -> Result<Answer<(Stamp, Found)>, EngineError> {
        let args = vec![
            bytes(reservation_id.as_str()),
            bytes(buyer.as_str()),
            text(self.max_orders),
            text(self.segments),
        ];
        let mut reply = self.eval(Id::FIND, args).await?;
        if let Some(refusal) = reply.refusal()? {
            return Ok(Err(refusal));
        }
        let status = reply.word()?;
        let stamp = reply.stamp()?;
        let found = match status.as_str() {
            "held" => Found::Held {
                slot: reply.number()?,
                record: reply.record()?,
                unacked: reply.number::<u32>()? == 1,
            },
            "released" => Found::Released,
            "not_reserved" => Found::NotReserved,
            other => return Err(reply.unexpected(other)),
        };
        Ok(Ok((stamp, found)))
    }

    /// Reads the figures.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn levels(&self) -> Result<Answer<Levels>, EngineError> {
        let mut reply = self.eval(Id::LEVELS, vec![text(self.segments)]).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        Ok(Ok(Levels {
            stamp,
            stock: reply.number()?,
            total: reply.number()?,
            held: reply.number()?,
            reservations: reply.number()?,
            unacked: reply.number()?,
            aside: reply.number()?,
            out: reply.number()?,
            moved: reply.number()?,
            oldest_unacked: reply.word()?.parse().ok().map(TimeMs),
        }))
    }

    /// Reads about 500 reservations from `cursor` on, 0 at first, and answers with the next
    /// cursor, 0 at the end. A reservation that is there all the time is read at least once; one
    /// that comes or goes meanwhile may be missed, and one may be read twice.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn holdings_page(
        &self,
        cursor: &str,
    ) -> Result<Answer<(Stamp, String, Vec<Held>)>, EngineError> {
        let args = vec![bytes(cursor), text(PAGE), text(self.segments)];
        let mut reply = self.eval(Id::HOLDINGS, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let next = reply.word()?;
        let mut held = Vec::new();
        while !reply.is_empty() {
            held.push(self.held(&mut reply)?);
        }
        Ok(Ok((stamp, next, held)))
    }

    /// Reads every reservation, as pages of [`SegmentScripts::holdings_page`].
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn holdings(&self) -> Result<Answer<Vec<Held>>, EngineError> {
        let mut held = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            match self.holdings_page(&cursor).await? {
                Ok((_, next, page)) => {
                    held.extend(page);
                    cursor = next;
                }
                Err(refusal) => return Ok(Err(refusal)),
            }
            if cursor == "0" {
                return Ok(Ok(held));
            }
        }
    }

    /// Reads about 500 buyers, or marked ids, from `cursor` on, 0 at first, and answers with the
    /// stock, the next cursor, 0 at the end, and the names. Pages of one stamp together are
    /// everything; a name may come twice.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn members_page(
        &self,
        what: Members,
        cursor: &str,
    ) -> Result<Answer<MembersPage>, EngineError> {
        let word = match what {
            Members::Buyers => "buyers",
            Members::Marks => "released",
        };
        let args = vec![bytes(word), bytes(cursor), text(PAGE)];
        let mut reply = self.eval(Id::MEMBERS, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let stock = reply.number()?;
        let next = reply.word()?;
        let mut names = Vec::new();
        while !reply.is_empty() {
            let mut name = reply.word()?;
            if what == Members::Buyers && self.max_orders > 1 {
                let end = name.rfind('#').ok_or_else(|| reply.unexpected("member"))?;
                name.truncate(end);
            }
            names.push(name);
        }
        Ok(Ok(MembersPage { stamp, stock, next, names }))
    }

    /// Reads what these slots of buyers hold, up to [`PAGE`] of them, in their order.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn lookup(
        &self,
        slots: impl ExactSizeIterator<Item = (&BuyerId, u32)>,
    ) -> Result<Answer<(Stamp, Vec<Option<Seen>>)>, EngineError> {
        let args = slots.map(|(buyer, slot)| bytes(&self.member(buyer, slot))).collect();
        let mut reply = self.eval(Id::LOOKUP, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut seen = Vec::new();
        while let Some(record) = reply.optional_record()? {
            let unacked = reply.number::<u32>()? == 1;
            seen.push(record.map(|record| Seen { record, unacked }));
        }
        Ok(Ok((stamp, seen)))
    }

    /// Puts units on sale that SQL has counted in the total under `epoch`.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn add_units(
        &self,
        epoch: u64,
        request_id: &RequestId,
        units: u64,
    ) -> Result<Followed, EngineError> {
        let args = vec![text(epoch), bytes(request_id.as_str()), text(units), text(self.segments)];
        self.eval(Id::ADD_UNITS, args).await?.followed("added")
    }

    /// Takes unsold units off sale for an adjustment, before SQL decides about it.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn set_aside(
        &self,
        epoch: u64,
        request_id: &RequestId,
        units: u64,
        now: TimeMs,
    ) -> Result<Answer<SetAside>, EngineError> {
        let args = vec![text(epoch), bytes(request_id.as_str()), text(units), text(now.0)];
        let mut reply = self.eval(Id::SET_ASIDE, args).await?;
        let stamp = match reply.head()? {
            Ok(stamp) => stamp,
            Err(refusal) => return Ok(Err(refusal)),
        };
        Ok(Ok(match reply.word()?.as_str() {
            "set_aside" => SetAside::Done { units: reply.number()? },
            "insufficient" => SetAside::Insufficient { possible: reply.number()?, stamp },
            "put_back" | "taken_away" | "added" => SetAside::Decided,
            other => return Err(reply.unexpected(other)),
        }))
    }

    /// Forgets what was set aside: SQL has taken it off the total under `epoch`.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn forget_aside(
        &self,
        epoch: u64,
        request_id: &RequestId,
    ) -> Result<Followed, EngineError> {
        let args = vec![text(epoch), bytes(request_id.as_str()), text(self.segments)];
        self.eval(Id::FORGET_ASIDE, args).await?.followed("taken_away")
    }

    /// Undoes a set-aside of `epoch` that SQL has decided against.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn put_back(
        &self,
        epoch: u64,
        request_id: &RequestId,
    ) -> Result<Followed, EngineError> {
        let args = vec![text(epoch), bytes(request_id.as_str())];
        self.eval(Id::PUT_BACK, args).await?.followed("put_back")
    }

    /// Reads all that is set aside, and the epoch under which it was.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn asides(&self) -> Result<Answer<(u64, Vec<Aside>)>, EngineError> {
        let (mut epoch, mut asides) = (0, Vec::new());
        let mut cursor = "0".to_owned();
        loop {
            let args = vec![bytes(&cursor), text(PAGE), text(self.segments)];
            let mut reply = self.eval(Id::ASIDES, args).await?;
            let stamp = match reply.head()? {
                Ok(stamp) => stamp,
                Err(refusal) => return Ok(Err(refusal)),
            };
            cursor = reply.word()?;
            if stamp.epoch != epoch {
                // A rebuild has dropped what was read before it.
                asides.clear();
                epoch = stamp.epoch;
            }
            while !reply.is_empty() {
                let request_id = reply.word()?;
                let request_id = RequestId::new(&request_id)
                    .map_err(|_| reply.unexpected(&format!("request {request_id}")))?;
                let (units, time) = (reply.number()?, TimeMs(reply.number()?));
                asides.push(Aside { request_id, units, time });
            }
            if cursor == "0" {
                return Ok(Ok((epoch, asides)));
            }
        }
    }

    /// Sends up to `most` units off to segment `target`; what is on its way there since before is
    /// answered instead.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn transfer_out(
        &self,
        epoch: u64,
        target: u32,
        most: u64,
    ) -> Result<Answer<SentOff>, EngineError> {
        let args = vec![text(epoch), text(target), text(most)];
        let mut reply = self.eval(Id::TRANSFER_OUT, args).await?;
        if let Err(refusal) = reply.head()? {
            return Ok(Err(refusal));
        }
        Ok(Ok(match reply.word()?.as_str() {
            "in_flight" | "out" => {
                SentOff::Out { sequence: reply.number()?, units: reply.number()? }
            }
            "nothing" => SentOff::Nothing,
            other => return Err(reply.unexpected(other)),
        }))
    }

    /// Puts units on sale that segment `source` sent off under `epoch`.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn transfer_in(
        &self,
        epoch: u64,
        source: u32,
        sequence: u64,
        units: u64,
    ) -> Result<Arrived, EngineError> {
        let args = vec![text(epoch), text(source), text(sequence), text(units)];
        let mut reply = self.eval(Id::TRANSFER_IN, args).await?;
        let status = reply.word()?;
        let stamp = reply.stamp()?;
        Ok(match status.as_str() {
            "in" | "already_in" => Arrived::In { stamp },
            "retry" => Arrived::Retry { reason: reply.word()? },
            other => return Err(reply.unexpected(other)),
        })
    }

    /// Forgets units that are in at segment `target`, as [`Arrived::In`] of this epoch told.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn transfer_done(
        &self,
        epoch: u64,
        target: u32,
        sequence: u64,
    ) -> Result<Followed, EngineError> {
        let args = vec![text(epoch), text(target), text(sequence)];
        self.eval(Id::TRANSFER_DONE, args).await?.followed("forgotten")
    }

    /// Reads what is on its way to other segments.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn transfers(&self, epoch: u64) -> Result<Answer<Vec<Transfer>>, EngineError> {
        let mut reply = self.eval(Id::TRANSFERS, vec![text(epoch), text(self.segments)]).await?;
        if let Err(refusal) = reply.head()? {
            return Ok(Err(refusal));
        }
        let mut transfers = Vec::new();
        while !reply.is_empty() {
            let (target, sequence) = (reply.number()?, reply.number()?);
            transfers.push(Transfer { target, sequence, units: reply.number()? });
        }
        Ok(Ok(transfers))
    }

    fn held(&self, reply: &mut Reply) -> Result<Held, EngineError> {
        let member = reply.word()?;
        let record = reply.record()?;
        let (buyer, slot) = self
            .split_member(&member)
            .ok_or_else(|| reply.unexpected(&format!("member {member}")))?;
        Ok(Held { buyer, slot, record })
    }

    /// Stops the sale until a rebuild, if the engine is still at this epoch.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn freeze(&self, epoch: u64, reason: &str) -> Result<(), EngineError> {
        self.eval(Id::FREEZE, vec![text(epoch), bytes(reason)]).await.map(|_| ())
    }

    /// Puts the segment on sale for the first time.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn warmup(
        &self,
        epoch: u64,
        units: u64,
        total: u64,
        expire_time: TimeMs,
    ) -> Result<WarmedUp, EngineError> {
        let args =
            vec![text(epoch), text(units), text(total), text(expire_time.0), text(self.segments)];
        let mut reply = self.eval(Id::WARMUP, args).await?;
        Ok(match reply.word()?.as_str() {
            "written" => WarmedUp::Written,
            "already" => WarmedUp::Already,
            "mismatch" => WarmedUp::Mismatch {
                what: reply.word()?,
                found: reply.word()?,
                asked: reply.word()?,
            },
            other => return Err(reply.unexpected(other)),
        })
    }

    /// Empties the segment, to be loaded under a higher epoch.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is refused: start anew under a higher epoch.
    pub async fn rebuild_begin(
        &self,
        epoch: u64,
        total: u64,
        expire_time: TimeMs,
    ) -> Result<RebuildStep, EngineError> {
        let args = vec![text(epoch), text(total), text(expire_time.0), text(self.segments)];
        self.eval(Id::REBUILD_BEGIN, args).await?.step("begun")
    }

    /// Loads chunk number `chunk`, from 1: reservations by buyer and slot, and ids to mark.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn rebuild_load(
        &self,
        epoch: u64,
        chunk: u64,
        held: &[Held],
        marks: &[ReservationId],
    ) -> Result<RebuildStep, EngineError> {
        let mut args = Vec::with_capacity(3 + 2 * held.len() + marks.len());
        args.extend([text(epoch), text(chunk), text(held.len())]);
        for Held { buyer, slot, record } in held {
            args.push(bytes(&self.member(buyer, *slot)));
            args.push(bytes(&record.to_string()));
        }
        args.extend(marks.iter().map(|id| bytes(id.as_str())));
        self.eval(Id::REBUILD_LOAD, args).await?.step("loaded")
    }

    /// Puts the segment back on sale with `stock` units left of `total` that it is given, after `chunks`
    /// chunks.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub async fn rebuild_end(
        &self,
        epoch: u64,
        chunks: u64,
        stock: u64,
        total: u64,
    ) -> Result<RebuildStep, EngineError> {
        let args = vec![text(epoch), text(chunks), text(stock), text(total)];
        self.eval(Id::REBUILD_END, args).await?.step("ended")
    }

    /// Removes the segment, if it was written before `epoch`: answers whether it is gone.
    ///
    /// # Errors
    /// See [`EngineError`]; a repeat is harmless.
    pub async fn purge(&self, epoch: u64) -> Result<bool, EngineError> {
        let mut reply = self.eval(Id::PURGE, vec![text(epoch)]).await?;
        match reply.word()?.as_str() {
            "purged" | "nothing" => Ok(true),
            "refused" => Ok(false),
            other => Err(reply.unexpected(other)),
        }
    }

    /// The member that stands for one slot of a buyer; as `member_of` in guard.lua.
    fn member(&self, buyer: &BuyerId, slot: u32) -> String {
        if self.max_orders == 1 { buyer.to_string() } else { format!("{buyer}#{slot}") }
    }

    fn split_member(&self, member: &str) -> Option<(BuyerId, u32)> {
        if self.max_orders == 1 {
            return Some((BuyerId::new(member).ok()?, 1));
        }
        let (buyer, slot) = member.rsplit_once('#')?;
        Some((BuyerId::new(buyer).ok()?, slot.parse().ok()?))
    }
}

impl std::fmt::Display for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Record { reservation_id, quantity, order_no, reserve_time, expire_time } = self;
        let expire_time = expire_time.map_or(0, |time| time.0);
        write!(f, "{reservation_id} {quantity} {order_no} {} {expire_time}", reserve_time.0)
    }
}

impl std::str::FromStr for Record {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split(' ');
        let mut word = || words.next().ok_or(());
        let record = Record {
            reservation_id: ReservationId::new(word()?).map_err(|_| ())?,
            quantity: word()?.parse().map_err(|_| ())?,
            order_no: OrderNo::new(word()?).map_err(|_| ())?,
            reserve_time: TimeMs(word()?.parse().map_err(|_| ())?),
            expire_time: match word()? {
                "0" => None,
                time => Some(TimeMs(time.parse().map_err(|_| ())?)),
            },
        };
        if words.next().is_some() { Err(()) } else { Ok(record) }
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

fn text(number: impl ToString) -> Vec<u8> {
    number.to_string().into_bytes()
}

fn bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}
