//! Seckill.
pub mod activities;
pub mod admission;
pub mod api;
pub mod circuit;
pub mod config;
pub mod database;
pub mod domain;
pub mod engine;
pub mod entity;
pub mod error;
mod failpoints;
pub mod offer;
pub mod orders;
pub mod outbox;
pub mod recovery;
pub mod reservations;
pub mod server;
pub mod stock_feed;
