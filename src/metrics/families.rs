//! The table of names: everything that is counted or measured, in the order of the documentation.

/// What a family is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Counter,
    Gauge,
    /// With these upper bounds.
    Histogram(&'static [f64]),
}

impl Kind {
    /// As in `# TYPE`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

/// All series of one name.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    /// The text of `# HELP`.
    pub help: &'static str,
}

macro_rules! families {
    ($($const:ident = $name:literal, $kind:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub(crate) const $const: Family = Family {
            name: $name,
            kind: $kind,
            labels: &[$($label),*],
            help: $help,
        };)*
        /// Every family, in the order of the documentation.
        pub const FAMILIES: &[Family] = &[$($const),*];
    };
}

/// A script takes from a few microseconds to a timeout.
const CALL_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
];
const REBUILD_SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// What a caller waits for.
pub(super) const HANDLING_SECONDS: &[f64] =
    &[0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const COMMIT_SECONDS: &[f64] =
    &[0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
pub(super) const WAIT_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
];
/// A timer is 1 ms late at rest.
pub(super) const LAG_SECONDS: &[f64] =
    &[0.001, 0.002_5, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28];
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

families! {
    CALLS_STARTED = "grpc_server_started_total", Kind::Counter,
        ["grpc_service", "grpc_method", "grpc_type"],
        "Calls that came in.";
    CALLS_HANDLED = "grpc_server_handled_total", Kind::Counter,
        ["grpc_service", "grpc_method", "grpc_type", "grpc_code"],
        "Calls that ended, by their code; Canceled also when the caller left.";
    MESSAGES_RECEIVED = "grpc_server_msg_received_total", Kind::Counter,
        ["grpc_service", "grpc_method", "grpc_type"],
        "Messages that came in whole: of a unary call one, of a stream each.";
    MESSAGES_SENT = "grpc_server_msg_sent_total", Kind::Counter,
        ["grpc_service", "grpc_method", "grpc_type"],
        "Messages that went out; an answer that is nothing but a status is none.";
    HANDLING_TIMES = "grpc_server_handling_seconds", Kind::Histogram(HANDLING_SECONDS),
        ["grpc_service", "grpc_method", "grpc_type"],
        "How long calls took, from their headers to the answer; streams to their end.";
    RESERVE_OUTCOMES = "seckill_reserve_outcomes_total", Kind::Counter, ["outcome"],
        "Reserve calls and requests of ReserveStream that were decided.";
    OFFER_OUTCOMES = "seckill_offer_outcomes_total", Kind::Counter,
        ["activity_id", "sku_id", "outcome"],
        "The same by offer; of at most 200 offers, and of all others together.";
    RESERVE_ERRORS = "seckill_reserve_errors_total", Kind::Counter, ["reason"],
        "Those that were not decided, by why.";
    SOLD_OUT_FROM_MEMORY = "seckill_reserve_sold_out_from_memory_total", Kind::Counter, [],
        "Answers SOLD_OUT that asked no store.";
    ROOM = "seckill_reserve_room_places", Kind::Gauge, [],
        "How many reservations may be under way, by what the database and the threads of gRPC take.";
    ROOM_TAKEN = "seckill_reserve_room_taken", Kind::Gauge, [],
        "How many are under way.";
    THREAD_LAG = "seckill_grpc_thread_lag_seconds", Kind::Histogram(LAG_SECONDS), [],
        "How late the threads of gRPC came to what was due, each asked 40 times a second.";
    POOL_WAITS = "seckill_pool_wait_seconds", Kind::Histogram(WAIT_SECONDS), ["pool"],
        "How long requests waited for a run of reserve.lua, and transactions for a connection.";
    ENGINE_REQUESTS = "seckill_engine_requests", Kind::Gauge, ["state"],
        "Requests that wait for a run of reserve.lua, or are in one that is under way.";
    ENGINE_BATCHES = "seckill_engine_batch_requests", Kind::Histogram(ROWS), [],
        "How many requests one run of reserve.lua decided.";
    WRITER_ROWS = "seckill_writer_rows", Kind::Gauge, ["state"],
        "Reservations that wait for a commit to the outbox, or are in one that is under way.";
    GROUP_ROWS = "seckill_writer_group_rows", Kind::Histogram(ROWS), [],
        "How many reservations one commit to the outbox recorded.";
    GROUP_TIMES = "seckill_writer_group_seconds", Kind::Histogram(COMMIT_SECONDS), [],
        "How long such a transaction took, from its begin to its commit.";
    WRITER_WAIT = "seckill_writer_longest_wait_seconds", Kind::Gauge, [],
        "How long the reservation has waited for such a group that has waited longest.";
    LOOKUPS = "seckill_lookups_waiting", Kind::Gauge, [],
        "Calls of Release, Confirm and GetReservation that wait for their turn in SQL.";
    OUTBOX_ROWS = "seckill_outbox_rows", Kind::Gauge, ["state"],
        "Outbox rows that have work left, or wait for an operator.";
    OUTBOX_LAG = "seckill_outbox_lag_seconds", Kind::Gauge, [],
        "How long the outbox row has been due that has been due longest.";
    UNACKED = "seckill_unacked_reservations", Kind::Gauge, [],
        "Taken in the engine, and not yet known there to be in SQL.";
    UNACKED_AGE = "seckill_unacked_age_seconds", Kind::Gauge, [],
        "How long ago the oldest of these was taken; 0 if there is none.";
    BATCH_ORDERS = "seckill_poller_batch_orders", Kind::Histogram(ROWS), [],
        "How many orders one transaction of the poller made.";
    BATCH_TIMES = "seckill_poller_batch_seconds", Kind::Histogram(COMMIT_SECONDS), [],
        "How long such a transaction took, from its begin to its commit.";
    POLLED_ROWS = "seckill_poller_rows_total", Kind::Counter, ["result"],
        "What became of outbox rows that this server polled.";
    SWEPT = "seckill_sweeper_settled_total", Kind::Counter, [],
        "Forgotten reservations that the sweeper settled.";
    SWEEP_TIMES = "seckill_sweeper_pass_seconds", Kind::Histogram(COMMIT_SECONDS), [],
        "How long a pass of the sweeper over all offers took.";
    EXPIRED_HOLDS = "seckill_holds_expired_total", Kind::Counter, [],
        "Holds that were given back since nobody confirmed them.";
    WORKER_FAILURES = "seckill_worker_failures_total", Kind::Counter, ["worker"],
        "Passes of background workers that failed or were put off.";
    WATCH_STREAMS = "seckill_watch_streams", Kind::Gauge, [],
        "Open WatchStock streams.";
    OFFER_TOTAL = "seckill_offer_total_units", Kind::Gauge, ["activity_id", "sku_id"],
        "Units of an offer on sale; of at most 200 offers.";
    OFFER_REMAINING = "seckill_offer_remaining_units", Kind::Gauge, ["activity_id", "sku_id"],
        "Units of it that can still be reserved.";
    BUILD_INFO = "seckill_build_info", Kind::Gauge, ["version", "engine", "database"],
        "Always 1; the labels say what runs.";
    DATABASE_UP = "seckill_database_up", Kind::Gauge, [],
        "Whether the database answers: 1 or 0.";
    DATABASE_ERRORS = "seckill_database_errors_total", Kind::Counter, ["fault"],
        "Statements, begins and commits that failed, by what is certain of them.";
    ENGINE_UP = "seckill_engine_up", Kind::Gauge, [],
        "Whether the stock engine answers: 1 or 0.";
    MASTERS_AWAY = "seckill_engine_masters_away", Kind::Gauge, [],
        "Masters of a Redis Cluster that are away while the others sell on.";
    CALLS = "seckill_engine_calls_total", Kind::Counter, ["script", "result"],
        "Scripts that were run, by what is certain of them.";
    CALL_TIMES = "seckill_engine_call_seconds", Kind::Histogram(CALL_SECONDS), ["script"],
        "How long a script took, as the server waited for it.";
    DIVERGENCE = "seckill_engine_divergence_total", Kind::Counter, ["reason"],
        "How often this server had an offer frozen, since engine and SQL disagreed.";
    FROZEN_OFFERS = "seckill_engine_frozen_offers", Kind::Gauge, [],
        "Offers that do not sell until this server, or another one, has rebuilt them.";
    REBUILDS = "seckill_engine_rebuilds_total", Kind::Counter, ["reason"],
        "Rebuilds of an offer from SQL that this server finished.";
    REBUILD_TIMES = "seckill_engine_rebuild_seconds", Kind::Histogram(REBUILD_SECONDS), [],
        "How long such a rebuild kept its offer frozen.";
    COLD_ACTIVITIES = "seckill_activities_not_warmed", Kind::Gauge, [],
        "Activities that are past their start and do not start, since nobody warmed them up.";
    STARTING_COLD = "seckill_activities_starting_cold", Kind::Gauge, [],
        "Activities that start within 15 minutes and are not warmed up.";
    DEAD_LETTERS = "seckill_dead_letters", Kind::Gauge, [],
        "Reservations that could not become orders and wait for an operator.";
    DIFFERENCES = "seckill_reconcile_differences", Kind::Gauge, ["kind"],
        "Contradictions of engine, outbox and orders, by this server's last comparison of each activity.";
    CERTIFICATE_ENDS = "seckill_tls_certificate_expiry_timestamp_seconds", Kind::Gauge, [],
        "When the certificate of the gRPC port ends, as a Unix time; 0 without TLS.";
    PROCESS_CPU = "process_cpu_seconds_total", Kind::Counter, [],
        "Processor time that the process has used.";
    PROCESS_RESIDENT = "process_resident_memory_bytes", Kind::Gauge, [],
        "Memory of the process that is in RAM.";
    PROCESS_VIRTUAL = "process_virtual_memory_bytes", Kind::Gauge, [],
        "Address space of the process.";
    PROCESS_THREADS = "process_threads", Kind::Gauge, [],
        "Threads of the process.";
    PROCESS_OPEN_FDS = "process_open_fds", Kind::Gauge, [],
        "Files and sockets that the process has open.";
    PROCESS_MAX_FDS = "process_max_fds", Kind::Gauge, [],
        "How many it may have open.";
    PROCESS_START = "process_start_time_seconds", Kind::Gauge, [],
        "When the process started, as a Unix time.";
}
