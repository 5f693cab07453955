//! The contract, compiled.

/// The messages and stubs of `seckill.v1`.
#[allow(
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::pedantic
)]
pub mod pb {
    tonic::include_proto!("seckill.v1");
}
