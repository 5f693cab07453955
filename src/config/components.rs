//! The components that have settings, each with documentation, default and range per key.
//!
//! What stands here is what people read in `config.example.toml`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::{ClientCerts, Level, LogFormat, OptionalAddr, SecretText, SecretUrl, Subjects, Tokens};
use crate::domain::Networks;

/// How large `seckill` lets a span of time be set: one day, in milliseconds.
const DAY_MS: u64 = 86_400_000;

/// One key of the settings file, for messages and for `config.example.toml`.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    /// Its documentation, line by line.
    pub(super) docs: &'static [&'static str],
    /// What may be written there, as the end of a sentence that begins with "must be".
    pub(super) allowed: String,
    pub(super) default: toml::Value,
    /// Whether no message may repeat a value that can't be read.
    pub(super) is_secret: bool,
}

impl Key {
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

/// A value that breaks its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Breach {
    /// As in `outbox.batch`.
    pub(super) key: String,
    /// The value as it may be shown.
    pub(super) value: String,
    /// A sentence that goes on from the value.
    pub(super) text: String,
}

/// What the type of a setting accepts.
trait Kind: Serialize {
    const ALLOWED: &'static str;
    const IS_SECRET: bool = false;
}

macro_rules! kinds {
    ($($kind:ty: $allowed:literal,)*) => {
        $(impl Kind for $kind { const ALLOWED: &'static str = $allowed; })*
    };
}

impl Kind for Tokens {
    const ALLOWED: &'static str = "a list of name:role:sha256";
    const IS_SECRET: bool = true;
}

impl Kind for SecretText {
    const ALLOWED: &'static str = "a text";
    const IS_SECRET: bool = true;
}

kinds! {
    bool: "true or false",
    String: "a text",
    u32: "a whole number",
    u64: "a whole number",
    usize: "a whole number",
    SocketAddr: "an IP address and a port, such as 127.0.0.1:50051",
    OptionalAddr: "empty, or an IP address and a port, such as 127.0.0.1:9090",
    SecretUrl: "a URL",
    Networks: "networks and addresses, separated by commas",
    Subjects: "a list of name=role",
    ClientCerts: "one of optional, required",
    Level: "one of off, error, warn, info, debug, trace",
    LogFormat: "one of auto, text, json",
}

/// A part of the settings that one component reads.
pub(super) trait Component {
    const SECTION: &'static str;
    const ABOUT: &'static [&'static str];

    fn keys() -> Vec<Key>;

    /// Holds every value against its range.
    fn check_ranges(&self, breaches: &mut Vec<Breach>);
}

/// Declares a component: its fields with documentation, default and range.
macro_rules! component {
    (
        $(#[doc = $about:literal])*
        $name:ident = $section:literal {
            $(
                $(#[doc = $doc:literal])*
                $field:ident: $kind:ty = $default:expr $(=> $range:expr)?;
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $field: $kind, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl Component for $name {
            const SECTION: &'static str = $section;
            const ABOUT: &'static [&'static str] = &[$($about),*];

            fn keys() -> Vec<Key> {
                let default = Self::default();
                vec![$(
                    Key {
                        section: $section,
                        name: stringify!($field),
                        docs: &[$($doc),*],
                        allowed: {
                            let allowed = <$kind as Kind>::ALLOWED.to_owned();
                            $( let allowed = format!("{allowed} in {:?}", $range); )?
                            allowed
                        },
                        default: toml::Value::try_from(&default.$field)
                            .expect("every kind of setting has a TOML value"),
                        is_secret: <$kind as Kind>::IS_SECRET,
                    },
                )*]
            }

            fn check_ranges(&self, breaches: &mut Vec<Breach>) {
                let _ = &breaches;
                $( $(
                    if !($range).contains(&self.$field) {
                        breaches.push(Breach {
                            key: format!("{}.{}", $section, stringify!($field)),
                            value: self.$field.to_string(),
                            text: format!("must be {} in {:?}", <$kind as Kind>::ALLOWED, $range),
                        });
                    }
                )? )*
            }
        }
    };
}

component! {
    /// The port that order services, operators and dashboards call.
    GrpcSettings = "grpc" {
        /// Where to listen. Port 0 takes a free one. An address that others can reach needs
        /// auth.tokens or tls.client_ca_file, or `seckill serve --insecure`.
        addr: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 50051);
        /// How many threads speak gRPC, each for its share of the connections; 0: as many as there are
        /// processors.
        threads: usize = 0 => 0..=1_024;
        /// How many calls one connection may have open; the client queues what is above. Few: in a rush
        /// a call is better off in its caller's queue, where its deadline ends it, than unread in
        /// ours, where it holds up Release and health.
        max_concurrent_streams: u32 = 100 => 1..=100_000;
        /// How many connections may be open; more wait until one closes.
        max_connections: usize = 10_000 => 1..=1_000_000;
        /// After how long a connection is asked to go, give or take a tenth, so that clients spread over
        /// new servers.
        max_connection_age_s: u64 = 600 => 1..=86_400;
        /// After how long a stream such as WatchStock ends; its client calls again.
        max_stream_age_s: u64 = 3_600 => 1..=86_400;
        /// How often an idle connection is asked whether it is still there.
        keepalive_s: u64 = 30 => 1..=7_200;
        /// How long a new connection may take for its TLS handshake and its first words.
        first_byte_timeout_ms: u64 = 5_000 => 10..=60_000;
        /// How long the message of a call may take to arrive, whatever the caller's own deadline.
        request_timeout_ms: u64 = 30_000 => 10..=600_000;
        /// How long a stop waits for calls that are under way.
        shutdown_grace_ms: u64 = 15_000 => 0..=600_000;
    }
}

component! {
    /// The port for metrics, probes and the dashboard, over HTTP/1.1.
    HttpSettings = "http" {
        /// Where to listen. Port 0 takes a free one; empty: there is no such port. Who reads
        /// metrics and probes is not asked who he is, so an address that others can reach needs
        /// http.open, or `seckill serve --insecure`.
        addr: OptionalAddr =
            OptionalAddr(Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090)));
        /// Whether others may read metrics and probes at this port.
        open: bool = false;
        /// Whether the dashboard is at `/`, with the calls that it makes (gRPC-Web). At an address
        /// that others can reach it is there only where the gRPC port lets the same callers in:
        /// with auth.tokens and tls.terminated_in_front, or where grpc.addr is open by `--insecure`.
        dashboard: bool = true;
    }
}

component! {
    /// Who may call the gRPC port. Without any token and without tls.client_ca_file everybody may
    /// do everything.
    AuthSettings = "auth" {
        /// The tokens that are let in, each as `name:role:sha256`, in a variable with commas or
        /// line ends between them. The role is `viewer`, `order` or `ops`. `seckill token new`
        /// makes a token and its entry; the token itself never stands here.
        tokens: Tokens = Tokens::default();
        /// The client certificates that are let in, each as `name=role`. The name is a DNS name or
        /// a URI of the certificate, or its common name if it has neither.
        subjects: Subjects = Subjects::default();
        /// Whether health is open to callers without a token.
        open_health: bool = true;
        /// Whether reflection is open to callers without a token.
        open_reflection: bool = false;
    }
}

component! {
    /// TLS of the gRPC port. The files are PEM, and are read again while the server runs.
    TlsSettings = "tls" {
        /// The server's certificate and those between it and its CA, in this order. Empty: no TLS.
        cert_file: String = String::new();
        /// The private key of that certificate.
        key_file: String = String::new();
        /// The CAs whose client certificates are let in, by auth.subjects. Empty: none are.
        client_ca_file: String = String::new();
        /// `optional`: whoever shows no certificate needs a token. `required`: nobody connects
        /// without one.
        client_certs: ClientCerts = ClientCerts::Optional;
        /// How often to look whether the files have changed; SIGHUP has them read at once.
        reload_s: u64 = 60 => 1..=86_400;
        /// Whether a proxy or a mesh in front of this server has TLS, so that tokens may be taken
        /// without TLS at an address that others can reach.
        terminated_in_front: bool = false;
    }
}

component! {
    /// The stock engine, which runs the Lua scripts.
    EngineSettings = "engine" {
        /// `redis://[user:password@]host:port[/db]`,
        /// `redis-cluster://[user:password@]host:port,host:port` or
        /// `redis-sentinel://[user:password@]host:port,host:port/master`; with `rediss` in place of
        /// `redis` over TLS. Empty: the embedded engine, inside this process and for this one
        /// alone; its stock is rebuilt from the database at each start.
        url: SecretUrl = SecretUrl::new("");
        /// How many connections to a server of the engine share the work.
        connections: usize = 2 => 1..=64;
        /// How long a new connection may take.
        connect_timeout_ms: u64 = 1_000 => 10..=60_000;
        /// How long a reply may take; after that it is unknown whether the script ran.
        response_timeout_ms: u64 = 1_000 => 10..=60_000;
        /// The CAs that the servers' certificates are checked against, for a URL with TLS. Empty:
        /// those of the system. This file and the next two are PEM, and are read again for each
        /// new connection.
        ca_file: String = String::new();
        /// The certificate that the servers are shown, and those between it and its CA.
        cert_file: String = String::new();
        /// The private key of that certificate.
        key_file: String = String::new();
        /// The user at the Sentinels, which have users of their own. Empty: the default one.
        sentinel_user: String = String::new();
        /// The password at the Sentinels. Empty: they want none.
        sentinel_password: SecretText = SecretText::new("");
    }
}

component! {
    /// The SQL database, which has the last word on who holds a unit.
    DatabaseSettings = "database" {
        /// `sqlite://path`, `sqlite::memory:`, `postgres://user@host/name` or
        /// `mysql://user@host/name`. The environment variable `SECKILL__DATABASE__URL_FILE` names
        /// a file that holds it.
        url: SecretUrl = SecretUrl::new("sqlite://data/seckill.db");
        /// The most connections of one server process, beside the one of its probe; SQLite: readers,
        /// beside the one writer.
        max_connections: u32 = 10 => 1..=1_000;
        /// How long to wait at start for a database that does not answer yet.
        connect_timeout_ms: u64 = 5_000 => 1..=3_600_000;
        /// How long to wait for a connection of the pool.
        acquire_timeout_ms: u64 = 3_000 => 1..=3_600_000;
        /// When the server gives up on a statement; SQLite has no such limit.
        statement_timeout_ms: u64 = 5_000 => 1..=3_600_000;
        /// When the server gives up waiting for a lock; MySQL counts it in whole seconds.
        lock_timeout_ms: u64 = 3_000 => 1..=3_600_000;
    }
}

component! {
    /// Admission of Reserve.
    ReserveSettings = "reserve" {
        /// How many reservations may be under way at once, at most; more are refused with OVERLOADED.
        /// The server itself keeps to as many as its database writes without making them wait.
        max_in_flight: usize = 10_000 => 1..=1_000_000;
        /// How long a reservation may wait for the engine before it is refused with OVERLOADED, and how
        /// long one may be seen waiting for the outbox: nothing was taken then. Keep it well below the
        /// deadlines of callers: what is answered too late was work for nothing.
        max_wait_ms: u64 = 200 => 1..=60_000;
        /// How long a server believes that an offer is sold out after the engine said so; until then
        /// it refuses by itself who holds nothing. This bounds how late it hears of units that came
        /// back when a message gets lost. 0: it asks the engine each time.
        believe_sold_out_ms: u64 = 200 => 0..=10_000;
    }
}

component! {
    /// How often callers of Reserve may ask. Beyond that they hear RATE_LIMITED, and when to come
    /// back. `_per_s` 0: no limit; `_burst` 0: as many at once as in a second.
    LimitsSettings = "limits" {
        /// For one activity, on this server.
        activity_per_s: u32 = 0 => 0..=100_000_000;
        /// For one activity, at once.
        activity_burst: u32 = 0 => 0..=100_000_000;
        /// For one user, on this server.
        user_per_s: u32 = 0 => 0..=1_000_000;
        /// For one user, at once.
        user_burst: u32 = 0 => 0..=1_000_000;
        /// For one address, on this server; a network of 64 bits in IPv6.
        address_per_s: u32 = 0 => 0..=100_000_000;
        /// For one address, at once.
        address_burst: u32 = 0 => 0..=100_000_000;
        /// Networks whose addresses have no limit, such as those of order services:
        /// `10.0.0.0/8, 192.0.2.7`.
        address_unlimited: Networks = Networks::default();
        /// How many attempts one user has for one offer within `user_window_ms`, over all servers;
        /// 0: no limit. Counted in the engine, with the reservation itself.
        user_attempts: u32 = 0 => 0..=1_000_000;
        /// See `user_attempts`.
        user_window_ms: u64 = 1_000 => 1..=DAY_MS;
        /// Networks whose calls are not taken at all.
        denied: Networks = Networks::default();
        /// Networks of proxies that name the caller's address in `x-forwarded-for`; nobody else is
        /// believed.
        proxies: Networks = Networks::default();
    }
}

component! {
    /// The outbox, which makes orders of reservations.
    OutboxSettings = "outbox" {
        /// How often to look for rows that nobody told the poller about.
        poll_interval_ms: u64 = 500 => 1..=60_000;
        /// How many rows one transaction takes, at most; fewer where they take long.
        batch: u32 = 500 => 1..=10_000;
        /// After how many failed attempts a row becomes a dead letter.
        max_attempts: u32 = 12 => 1..=1_000;
        /// How long a row waits after its first failure; it doubles with each further one.
        backoff_ms: u64 = 200 => 1..=DAY_MS;
        /// The longest wait between two attempts.
        max_backoff_ms: u64 = 300_000 => 1..=DAY_MS;
    }
}

component! {
    /// The sweeper, which finds reservations that no outbox row acknowledges.
    SweeperSettings = "sweeper" {
        /// How often to look.
        interval_ms: u64 = 1_000 => 10..=60_000;
        /// How old a reservation must be before it counts as forgotten.
        grace_ms: u64 = 5_000 => 10..=600_000;
    }
}

component! {
    /// Offers of several segments.
    SegmentsSettings = "segments" {
        /// How often units are spread anew, so that no segment has less than half of its share while
        /// others have more. 0: never; then a segment gets units only when a buyer finds too few.
        balance_ms: u64 = 1_000 => 0..=60_000;
    }
}

component! {
    /// The expiry of holds.
    HoldsSettings = "holds" {
        /// How often to look for holds that have expired.
        interval_ms: u64 = 500 => 10..=60_000;
    }
}

component! {
    /// The activities in memory.
    CatalogSettings = "catalog" {
        /// How often to read them from the database again.
        refresh_ms: u64 = 1_000 => 10..=30_000;
    }
}

component! {
    /// WatchStock.
    WatchSettings = "watch" {
        /// How often the stock of a watched offer is read.
        sample_ms: u64 = 50 => 5..=1_000;
        /// After how long without a change a stream shows that it is alive.
        heartbeat_ms: u64 = 10_000 => 100..=15_000;
    }
}

component! {
    /// The log, on stderr.
    LogSettings = "log" {
        /// `off`, `error`, `warn`, `info`, `debug` or `trace`. The environment variable RUST_LOG
        /// overrides it, module by module.
        level: Level = Level::Info;
        /// `text`, `json`, or `auto`: text on a terminal and JSON elsewhere.
        format: LogFormat = LogFormat::Auto;
    }
}

component! {
    /// Traces of calls, sent by OTLP over gRPC. The variables of OpenTelemetry count too: those that
    /// stand for the settings below (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    /// OTEL_TRACES_SAMPLER and its _ARG, OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none) unless one of
    /// ours is set, and those that name the service (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES),
    /// send headers (OTEL_EXPORTER_OTLP_HEADERS), and name files for TLS
    /// (OTEL_EXPORTER_OTLP_CERTIFICATE, …_CLIENT_CERTIFICATE, …_CLIENT_KEY).
    TracesSettings = "traces" {
        /// Where the collector is: `http://host:4317` or `https://host:4317`. Empty: there are no
        /// traces.
        endpoint: SecretUrl = SecretUrl::new("");
        /// How many of a thousand calls are traced, of those whose callers do not say in a
        /// `traceparent`.
        sampled_per_thousand: u32 = 10 => 0..=1_000;
    }
}
