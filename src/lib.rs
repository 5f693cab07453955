//! Seckill.
pub mod database;
pub mod domain;
pub mod engine;
pub mod entity;
