//! Seckill: a gRPC server that reserves the units of flash sales.
//!
//! It never gives out more units than an offer has, and what it answered with RESERVED becomes an
//! order, whatever crashes in between. `ARCHITECTURE.md` tells why things are as they are; this is
//! the map.
//!
//! # The picture
//!
//! ```text
//! order service ── Reserve ─▶ api ─▶ admission ─▶ engine ─────▶ outbox ────▶ reply
//!                             parse  window,      reserve.lua   one commit   RESERVED is durable:
//!                             limits state, load  many requests of many      the row is in SQL
//!                                                 at a time     rows
//!                                                                  │
//!                                               poller ◀── claim ──┘
//!                                                 │ one transaction: orders, counters, row done
//!                                                 ▼
//!                                               orders
//!
//! Release ─▶ SQL first (row releasing, order cancelled) ─▶ release.lua ─▶ row released
//! sweeper:   reservations that nobody acknowledged ─▶ outbox     expired holds ─▶ Release
//! recovery:  engine and SQL disagree ─▶ freeze ─▶ rebuild from SQL under a higher epoch
//! WatchStock ◀── stock_feed: samples watched offers, the newest value wins
//! ```
//!
//! # Two ideas
//!
//! - **The engine proposes, the SQL row disposes.** A reservation exists when its outbox row
//!   exists. The engine gives units back only after SQL holds the row as releasing, released or
//!   refused.
//! - **One repair.** Whenever engine and SQL contradict each other, or the engine may have lost
//!   something, the offer is frozen and rebuilt from SQL under a higher epoch. An insert carries
//!   the epoch under which its units were taken, and SQL refuses any other.
//!
//! # Modules, in reading order
//!
//! | module | what it is about |
//! | --- | --- |
//! | [`domain`] | validated names, requests, outcomes and states; [`error`] is what was not decided |
//! | [`api`] | the gRPC edge: bytes to domain types and back, errors to statuses |
//! | [`admission`] | what is refused without I/O; `catalog` has the activities in memory |
//! | [`reservations`] | reserve, release, confirm: the order of engine and SQL; the heart |
//! | [`engine`] | the Lua scripts as typed calls, on Redis or in this process; [`offer`] is what they sell |
//! | [`outbox`] | `writer` commits reservations in groups, `poller` makes orders, `sweeper` finds the forgotten; [`orders`] places them |
//! | [`recovery`] | freeze and rebuild |
//! | [`activities`] | the life of a sale: create, approve, warm up, start, end |
//! | [`stock_feed`] | WatchStock |
//! | [`database`] | SQLite, PostgreSQL, MySQL: pools, transactions, faults, leases; [`entity`] has the columns |
//! | [`circuit`] | whether a store is there |
//! | [`metrics`] | every name that is counted or measured; [`http`] shows them, the probes and the dashboard |
//! | [`config`] | settings; [`telemetry`] is the log, and traces |
//! | [`server`] | opens, spawns, serves, stops in order |
//! | [`cli`] | the command line; [`books`] compares engine, outbox and orders |
//! | [`mod@bench`] | measures a server from outside, against a call that does nothing |
//!
//! # Invariants, and where each is kept
//!
//! - **I1 Never oversold.** `outbox::writer` raises `offers.reserved` only within `total`, in the
//!   transaction that inserts the rows; a CHECK of the schema is the last net.
//! - **I2 RESERVED is durable.** [`reservations`] answers after the commit of `outbox::writer`.
//! - **I3 No unit is lost.** `outbox::sweeper` finishes what was taken and not recorded,
//!   `outbox::poller` what was released and not given back; [`recovery`] rebuilds the rest.
//! - **I4 At most `max_orders_per_user` live reservations per buyer and offer.** `reserve.lua`
//!   decides; the unique index over the slot in `outbox`, and again in `orders`, decides again.
//! - **I5 A release gives back what was taken, once.** `reservations::release` moves the row under
//!   its lock; `release.lua` gives back the quantity that is stored, if the reservation is there.
//! - **I6 Same request, same answer.** [`domain::name_reservation`] derives the id from the
//!   request; `reserve.lua` looks for a replay before it looks at the stock.
//! - **I7 States only move forward.** Every UPDATE of a state names the states that it may leave.
//! - **I8 An unknown result is never guessed.** [`database::classify`] and
//!   [`engine::EngineError`] tell what is certain; only that is repeated.
//! - **I9 A caller that goes away changes nothing.** [`api`] runs the work of a call in a tracked
//!   task; [`database::Database::begin`] runs in a task of its own.
//! - **I10 Warm-up never touches a sale under way.** `warmup.lua` changes no key that exists; only
//!   a rebuild refills.
//! - **I11 Identifiers are opaque.** [`domain`] keeps them as text; no script turns one into a
//!   number.

// What the rest speaks of.
pub mod domain;
pub mod error;
pub mod offer;

// The way of a reservation.
pub mod api;

pub mod admission;

pub mod reservations;

pub mod engine;

pub mod outbox;

pub mod orders;

// What keeps it whole, and what is sold.
pub mod recovery;

pub mod activities;

pub mod adjustments;

pub mod transfers;

pub mod stock_feed;

pub mod books;

pub mod reconcile;

pub mod audit;

// What it stands on.
pub mod circuit;
pub mod database;
pub mod entity;

pub mod config;
#[doc(hidden)]
pub mod failpoints;
pub mod metrics;
pub mod telemetry;

mod accept;
pub mod http;

// What starts and stops it.
pub mod server;

pub mod cli;

// What measures it.
pub mod bench;

// What proves it.
#[cfg(test)]
mod simulator;
