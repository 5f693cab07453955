//! Seckill.
pub mod api;
pub mod circuit;
pub mod cli;
pub mod config;
pub mod database;
pub mod domain;
pub mod engine;
pub mod entity;
pub mod error;
mod failpoints;
pub mod offer;
pub mod telemetry;
