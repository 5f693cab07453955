//! Makes connections to one server, with TLS and a login where they are set.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ::redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo,
    ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, RedisError, TlsCertificates,
    aio::{AsyncPushSender, MultiplexedConnection, SendError},
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use bb8_redis::bb8::{ErrorSink, ManageConnection};
use tokio::sync::watch;

use super::{
    info::{Info, policy_finding},
    link::Link,
    reply::plain_text,
    settings::{Finding, OpenError, RedisSettings},
    target::{Host, Kind, Login, Target},
};

/// Makes connections to one server, also for a pool.
#[derive(Debug, Clone)]
pub(super) struct Dialer {
    pub(super) host: Host,
    login: Login,
    tls: bool,
    settings: Arc<RedisSettings>,
}

/// What a server is looked at as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Master,
    /// May become the master at any time.
    Replica,
}

impl Dialer {
    /// To a server that holds stock, or may.
    pub(super) fn new(host: Host, target: &Target, settings: &Arc<RedisSettings>) -> Self {
        let (login, settings) = (target.login.clone(), settings.clone());
        Self { host, login, tls: target.tls, settings }
    }

    /// To a Sentinel.
    pub(super) fn to_sentinel(host: Host, target: &Target, settings: &Arc<RedisSettings>) -> Self {
        let (login, settings) = (settings.sentinel_login(), settings.clone());
        Self { host, login, tls: target.tls, settings }
    }

    /// Opens a connection that hands over what the server sends unasked.
    ///
    /// # Errors
    /// What went wrong, without a password.
    pub(super) async fn open(
        &self,
        unasked: impl AsyncPushSender,
    ) -> Result<MultiplexedConnection, String> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.settings.connect_timeout()))
            .set_response_timeout(Some(self.settings.response_timeout()))
            .set_pipeline_buffer_size(self.settings.pipeline_buffer)
            .set_push_sender(unasked);
        let client = self.client().await?;
        let opened = client.get_multiplexed_async_connection_with_config(&config).await;
        opened.map_err(|error| self.readable(&error))
    }

    /// A connection on which nothing is sent unasked.
    pub(super) async fn open_quiet(&self) -> Result<MultiplexedConnection, String> {
        self.open(|_| Ok::<_, SendError>(())).await
    }

    /// Certificates are read anew for each connection: it is seldom, and new files are taken into
    /// use without a restart.
    async fn client(&self) -> Result<Client, String> {
        // RESP3, since only with it redis-rs tells of a connection that closed while it was idle.
        let mut login = RedisConnectionInfo::default()
            .set_db(self.login.database)
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("seckill", env!("CARGO_PKG_VERSION"));
        if let Some(user) = &self.login.user {
            login = login.set_username(user);
        }
        if let Some(password) = &self.login.password {
            login = login.set_password(password);
        }
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(1));
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(Duration::from_millis(self.settings.tcp_user_timeout_ms));
        let (host, port) = (self.host.name.clone(), self.host.port);
        let addr = match self.tls {
            false => ConnectionAddr::Tcp(host, port),
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
        };
        let info = addr.into_connection_info().map_err(|error| self.readable(&error))?;
        let info = info.set_redis_settings(login).set_tcp_settings(tcp);
        let client = match self.tls {
            false => Client::open(info),
            true => Client::build_with_tls(info, certificates(&self.settings).await?),
        };
        client.map_err(|error| self.readable(&error))
    }

    /// A connection of its own, and what the server tells about itself on it.
    pub(super) async fn info(&self) -> Result<(MultiplexedConnection, Info), OpenError> {
        let unreachable = |cause| OpenError::Unreachable { address: self.host.to_string(), cause };
        let mut connection = self.open_quiet().await.map_err(unreachable)?;
        let info = Info::ask(&mut connection).await;
        Ok((connection, info.map_err(|error| unreachable(self.readable(&error)))?))
    }

    /// Looks at everything about the server that matters to a sale.
    pub(super) async fn check(&self, kind: &Kind, role: Role) -> Result<Vec<Finding>, OpenError> {
        let (mut connection, info) = self.info().await?;
        let mut findings = vec![info.version_finding()];
        match role {
            Role::Master => findings.push(info.master_finding()),
            Role::Replica => {}
        }
        match kind {
            Kind::Cluster => findings.extend(coverage_finding(&mut connection).await),
            Kind::Server | Kind::Sentinel(_) if info.is_in_cluster() => {
                findings.push(Finding::error(
                    "the server is a member of a cluster: name some of its members in a URL with \
                 redis-cluster",
                ))
            }
            Kind::Server | Kind::Sentinel(_) => {}
        }
        let policy = ::redis::cmd("CONFIG").arg("GET").arg("maxmemory-policy").take();
        let policy: Result<HashMap<String, String>, _> = policy.query_async(&mut connection).await;
        findings.push(policy_finding(policy.ok().as_ref()));
        findings.push(info.aof_finding());
        Ok(findings)
    }

    /// The text without the password.
    pub(super) fn hide(&self, text: &str) -> String {
        self.login.hide(text)
    }

    pub(super) fn readable(&self, error: &RedisError) -> String {
        self.login.hide(&plain_text(error))
    }
}

impl ManageConnection for Dialer {
    type Connection = Arc<Link>;
    type Error = String;

    async fn connect(&self) -> Result<Self::Connection, Self::Error> {
        let broken = Arc::new(AtomicBool::new(false));
        let closed = broken.clone();
        let note_closed = move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                closed.store(true, Ordering::Relaxed);
            }
            Ok::<_, SendError>(())
        };
        let mut connection = self.open(note_closed).await?;
        let info = Info::ask(&mut connection).await.map_err(|error| self.readable(&error))?;
        Ok(Arc::new(Link::new(connection, info.identity()?, broken)))
    }

    async fn is_valid(&self, link: &mut Self::Connection) -> Result<(), Self::Error> {
        link.read_identity().await.map(drop)
    }

    fn has_broken(&self, link: &mut Self::Connection) -> bool {
        link.is_broken()
    }
}

/// Whether the others stop with a master that is away; nothing where nobody may ask.
async fn coverage_finding(connection: &mut MultiplexedConnection) -> Option<Finding> {
    const NAME: &str = "cluster-require-full-coverage";
    let setting = ::redis::cmd("CONFIG").arg("GET").arg(NAME).take();
    let setting: HashMap<String, String> = setting.query_async(connection).await.ok()?;
    let is_full = setting.get(NAME).is_some_and(|value| value == "yes");
    is_full.then(|| {
        Finding::warning(format!(
            "{NAME} is yes: while one master is away no offer is sold on the others either; set it \
             to no"
        ))
    })
}

/// Hands the pool's failed dials to whoever waits for one; a pool alone would keep them waiting. The
/// log hears of the first, now and then of how many it were, and of the end.
#[derive(Debug, Clone)]
pub(super) struct DialErrors {
    pub(super) host: Host,
    pub(super) last: watch::Sender<String>,
    told: Arc<Mutex<Told>>,
}

/// What the log knows of a server that can't be reached.
#[derive(Debug, Default)]
struct Told {
    is_away: bool,
    at: Option<Instant>,
    /// Failed dials that it does not know of.
    untold: u64,
}

impl Told {
    /// How often a server that stays away is told again.
    const AGAIN_AFTER: Duration = Duration::from_secs(10);
    /// How often one that comes and goes is.
    const GONE_AGAIN_AFTER: Duration = Duration::from_secs(1);

    /// A dial failed: how many have since the last line, if there is to be another one.
    fn failed(&mut self, now: Instant) -> Option<u64> {
        self.untold += 1;
        let pause = if self.is_away { Self::AGAIN_AFTER } else { Self::GONE_AGAIN_AFTER };
        if self.at.is_some_and(|at| now.saturating_duration_since(at) < pause) {
            return None;
        }
        (self.is_away, self.at) = (true, Some(now));
        Some(std::mem::take(&mut self.untold))
    }

    /// A dial succeeded: how many had failed since the last line, if there was one.
    fn succeeded(&mut self, now: Instant) -> Option<u64> {
        let untold = std::mem::take(&mut self.untold);
        std::mem::take(&mut self.is_away).then(|| {
            self.at = Some(now);
            untold
        })
    }
}

impl DialErrors {
    pub(super) fn new(host: Host) -> Self {
        Self { host, last: watch::Sender::default(), told: Arc::default() }
    }

    /// The server can be reached.
    pub(super) fn end(&self) {
        let told =
            self.told.lock().unwrap_or_else(PoisonError::into_inner).succeeded(Instant::now());
        if let Some(failed) = told {
            tracing::info!(address = %self.host, failed, "connected again");
        }
    }
}

impl ErrorSink<String> for DialErrors {
    fn sink(&self, error: String) {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).failed(Instant::now());
        if let Some(failed) = told {
            tracing::warn!(address = %self.host, cause = %error, failed, "no connection");
        }
        self.last.send_replace(error);
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<String>> {
        Box::new(self.clone())
    }
}

/// What the files hold.
///
/// # Errors
/// Which of them is no use, and why; nothing of what it holds.
pub(super) async fn certificates(settings: &RedisSettings) -> Result<TlsCertificates, String> {
    let RedisSettings { ca_file, cert_file, key_file, .. } = settings;
    let root_cert = read("ca_file", ca_file, "CERTIFICATE-----").await?;
    let client_cert = read("cert_file", cert_file, "CERTIFICATE-----").await?;
    let client_key = read("key_file", key_file, "PRIVATE KEY-----").await?;
    let client_tls = client_cert
        .zip(client_key)
        .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
    Ok(TlsCertificates { client_tls, root_cert })
}

async fn read(key: &str, path: &str, marker: &str) -> Result<Option<Vec<u8>>, String> {
    if path.is_empty() {
        return Ok(None);
    }
    let pem = tokio::fs::read(path).await;
    let pem = pem.map_err(|cause| format!("engine.{key} = {path}: can't be read: {cause}"))?;
    let holds = pem.windows(marker.len()).any(|window| window == marker.as_bytes());
    match holds {
        true => Ok(Some(pem)),
        false => Err(format!(
            "engine.{key} = {path}: holds no {} in PEM form",
            marker.trim_end_matches('-').to_lowercase()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_away_is_told_once_and_every_ten_seconds_and_at_its_end() {
        let (mut told, begun) = (Told::default(), Instant::now());
        let after = |ms| begun + Duration::from_millis(ms);
        assert_eq!(told.succeeded(begun), None, "nobody knew otherwise");
        assert_eq!(told.failed(after(0)), Some(1), "at once");
        let lines: Vec<_> = (1..=500).filter_map(|nth| told.failed(after(50 * nth))).collect();
        assert_eq!(lines, [200, 200], "in 25 s");
        assert_eq!(told.succeeded(after(25_000)), Some(100));
        assert_eq!(told.succeeded(after(25_000)), None, "another connection of the same server");

        // One that comes and goes is no more than a line a second each way.
        assert_eq!(told.failed(after(25_050)), None);
        assert_eq!(told.succeeded(after(25_100)), None, "nobody heard that it was away again");
        assert_eq!(told.failed(after(26_100)), Some(1));
    }
}
