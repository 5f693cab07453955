use std::time::Instant;
/// When the caller stops waiting; in the extensions of a request that has a `grpc-timeout`.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub Instant);
