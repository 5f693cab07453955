//! Seckill.
pub mod circuit;
pub mod database;
pub mod domain;
pub mod engine;
pub mod entity;
pub mod error;
mod failpoints;
pub mod offer;
