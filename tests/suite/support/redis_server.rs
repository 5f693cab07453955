//! A Redis of its own for a test: on a free port, in a directory that goes away with it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use redis::{FromRedisValue, aio::MultiplexedConnection};
use seckill::engine::{
    embedded::{Dumped, DumpedContent},
    redis::{RedisEngine, RedisSettings},
};
use tempfile::TempDir;

use super::eventually;

/// Stopped, by its process id, when it goes out of scope.
#[derive(Debug)]
pub(crate) struct RedisServer {
    port: u16,
    directory: TempDir,
    options: Vec<String>,
    /// The first settings of a Sentinel, which keeps what it learns in the same file.
    sentinel: Option<String>,
    /// In front of the host, as in `user:password@`.
    login: String,
    child: Option<Child>,
}

impl RedisServer {
    /// A server that keeps nothing on disk.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With an append-only file that is synced at every write.
    pub(crate) async fn start_with_aof() -> Self {
        Self::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await
    }

    /// With options of the command line, which win over those here.
    pub(crate) async fn start_with(options: &[&str]) -> Self {
        let mut server = Self {
            port: Self::free_port(),
            directory: tempfile::tempdir().unwrap(),
            options: options.iter().map(ToString::to_string).collect(),
            sentinel: None,
            login: String::new(),
            child: None,
        };
        server.start_again().await;
        server
    }

    /// A Sentinel with these settings, which a test speaks to as `login`, as in `:password@`; options
    /// of the command line win over them.
    pub(crate) async fn start_sentinel(settings: &str, login: &str, options: &[String]) -> Self {
        let mut server = Self {
            port: Self::free_port(),
            directory: tempfile::tempdir().unwrap(),
            options: options.to_vec(),
            sentinel: Some(settings.to_owned()),
            login: login.to_owned(),
            child: None,
        };
        server.start_again().await;
        server
    }

    /// A port on which nobody listens now, and which no other test gets. It is below those that
    /// outgoing connections take, so it is still free when a server that was killed is started again.
    pub(crate) fn free_port() -> u16 {
        static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ports = std::iter::repeat_with(|| fastrand::u16(20_000..32_000)).filter(is_free);
        ports.find(|port| given.insert(*port)).unwrap()
    }

    /// Starts the process, on the same port and directory as before.
    pub(crate) async fn start_again(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        let binary = binary();
        let mut command = Command::new(&binary);
        match &self.sentinel {
            None => command
                .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""])
                .args(["--enable-debug-command", "local", "--repl-diskless-sync-delay", "0"])
                .args(["--logfile", "redis.log", "--dir"])
                .arg(self.directory.path())
                .args(&self.options),
            Some(settings) => {
                command.arg(self.sentinel_file(settings)).arg("--sentinel").args(&self.options)
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| {
            panic!(
                "{binary} can't be started ({error}): install redis-server 7 or newer, or name \
                 one in SECKILL_TEST_REDIS_SERVER"
            )
        });
        self.child = Some(child);
        eventually("redis-server accepts connections", async || {
            self.assert_alive();
            let mut connection = self.connect().await.ok()?;
            match redis::cmd("PING").query_async::<String>(&mut connection).await {
                Ok(_) => Some(()),
                // Up, and wants a password.
                Err(error) => (error.code() == Some("NOAUTH")).then_some(()),
            }
        })
        .await;
    }

    /// Panics with the last that it said if it ended by itself.
    fn assert_alive(&mut self) {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().unwrap());
        if let Some(status) = ended {
            let name = if self.sentinel.is_some() { "sentinel.log" } else { "redis.log" };
            let log = std::fs::read_to_string(self.directory.path().join(name));
            let log = log.unwrap_or_else(|error| error.to_string());
            let from = log.lines().count().saturating_sub(5);
            let last: Vec<&str> = log.lines().skip(from).collect();
            panic!("redis-server ended by itself, {status}: {}", last.join("\n"));
        }
    }

    fn sentinel_file(&self, settings: &str) -> PathBuf {
        let path = self.directory.path().join("sentinel.conf");
        if !path.exists() {
            let (port, folder) = (self.port, self.directory.path().display());
            let own = format!("port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile sentinel.log\n");
            std::fs::write(&path, own + settings).unwrap();
        }
        path
    }

    /// Kills the process on the spot.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Sends it a signal, as in `STOP`.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().expect("it runs").id();
        let kill = format!("kill -{signal} {pid}");
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Takes the end of the append-only file away, as a machine does that loses its power before
    /// the file was synced. Only while it does not run.
    pub(crate) fn cut_aof(&self, bytes: u64) {
        assert!(self.child.is_none(), "it runs");
        let folder = self.directory.path().join("appendonlydir");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let newest = files.filter(|path| path.to_string_lossy().ends_with(".incr.aof")).max();
        let file = std::fs::File::options().write(true).open(newest.unwrap()).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(len.saturating_sub(bytes)).unwrap();
    }

    /// Kills it and starts it again.
    pub(crate) async fn restart(&mut self) {
        self.kill();
        self.start_again().await;
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The port at which other servers, and clients with TLS, know it.
    pub(crate) fn known_port(&self) -> u16 {
        let mut options = self.options.iter();
        let tls = options.find(|option| *option == "--tls-port").and_then(|_| options.next());
        tls.map_or(self.port, |port| port.parse().unwrap())
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}127.0.0.1:{}", self.login, self.port)
    }

    pub(crate) async fn engine(&self) -> RedisEngine {
        RedisEngine::connect(&RedisSettings::new(self.url())).await.unwrap()
    }

    /// A connection past the engine, to look and to meddle.
    pub(crate) async fn connect(&self) -> redis::RedisResult<MultiplexedConnection> {
        let timeout = Some(std::time::Duration::from_secs(5));
        let config = redis::AsyncConnectionConfig::new()
            .set_response_timeout(timeout)
            .set_connection_timeout(timeout);
        let client = redis::Client::open(self.url())?;
        client.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Makes it a replica of the other, or follow it again, and waits until it is in step.
    pub(crate) async fn follow(&self, primary: &RedisServer) {
        self.command::<()>(&["REPLICAOF", "127.0.0.1", &primary.known_port().to_string()]).await;
        eventually("the replica is in step", async || {
            let here: String = self.command(&["INFO", "replication"]).await;
            let there: String = primary.command(&["INFO", "replication"]).await;
            let up = field(&here, "master_link_status") == Some("up");
            let in_step = field(&here, "master_repl_offset") == field(&there, "master_repl_offset");
            (up && in_step).then_some(())
        })
        .await;
    }

    /// Makes a replica a primary of its own: from here on it falls behind, as one that a failover
    /// chooses although the last writes have not reached it.
    pub(crate) async fn promote(&self) {
        self.command::<()>(&["REPLICAOF", "NO", "ONE"]).await;
    }

    /// Ends every connection of a client, as Sentinel does when it changes a server's role.
    pub(crate) async fn drop_clients(&self) {
        self.command::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    }

    /// Lets no replica follow any more, and those that do fall behind from now on.
    pub(crate) async fn leave_replicas_behind(&self) {
        self.command::<()>(&["ACL", "SETUSER", "default", "-psync"]).await;
        self.command::<i64>(&["CLIENT", "KILL", "TYPE", "replica"]).await;
    }

    /// How often it has answered with this error code, as in `MOVED`.
    pub(crate) async fn errors(&self, code: &str) -> u64 {
        let stats: String = self.command(&["INFO", "errorstats"]).await;
        let count = field(&stats, &format!("errorstat_{code}"));
        count.map_or(0, |count| count.trim_start_matches("count=").parse().unwrap())
    }

    /// How many listen to what servers tell each other.
    pub(crate) async fn listeners(&self) -> usize {
        let (_, listeners): (String, usize) =
            self.command(&["PUBSUB", "NUMSUB", "sk:events"]).await;
        listeners
    }

    /// Whether it runs, and takes itself for a master.
    pub(crate) async fn is_master(&self) -> bool {
        let Ok(mut connection) = self.connect().await else { return false };
        let info = redis::cmd("INFO").arg("replication").take();
        let info: redis::RedisResult<String> = info.query_async(&mut connection).await;
        info.is_ok_and(|info| field(&info, "role") == Some("master"))
    }

    /// Whether it follows the server at this port, and is in step.
    pub(crate) async fn follows(&self, port: u16) -> bool {
        let info: String = self.command(&["INFO", "replication"]).await;
        field(&info, "master_port") == Some(port.to_string().as_str())
            && field(&info, "master_link_status") == Some("up")
    }

    /// Listens on this port from now on: clients that knew another server there find this one.
    pub(crate) async fn move_to(&mut self, port: u16) {
        self.command::<()>(&["CONFIG", "SET", "port", &port.to_string()]).await;
        self.port = port;
    }

    /// Runs one command, past the engine.
    pub(crate) async fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut connection = self.connect().await.unwrap();
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(word);
        }
        command.query_async(&mut connection).await.unwrap_or_else(|e| panic!("{words:?}: {e}"))
    }

    /// Everything it holds, as [`seckill::engine::embedded::EmbeddedEngine::dump`] shows it.
    pub(crate) async fn dump(&self) -> BTreeMap<String, Dumped> {
        let mut connection = self.connect().await.unwrap();
        let keys: Vec<String> =
            redis::cmd("KEYS").arg("*").query_async(&mut connection).await.unwrap();
        let mut dump = BTreeMap::new();
        for key in keys {
            if let Some(dumped) = dump_key(&mut connection, &key).await {
                dump.insert(key, dumped);
            }
        }
        dump
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The value behind `name:` in the text of INFO.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

async fn dump_key(connection: &mut MultiplexedConnection, key: &str) -> Option<Dumped> {
    async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, words: &[&str]) -> T {
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(word);
        }
        command.query_async(connection).await.unwrap()
    }
    let kind: String = ask(connection, &["TYPE", key]).await;
    let content = match kind.as_str() {
        // Gone since: its time was over.
        "none" => return None,
        "string" => DumpedContent::Text(ask(connection, &["GET", key]).await),
        "hash" => DumpedContent::Hash(ask(connection, &["HGETALL", key]).await),
        "set" => {
            let members: Vec<Vec<u8>> = ask(connection, &["SMEMBERS", key]).await;
            DumpedContent::Set(BTreeSet::from_iter(members))
        }
        "zset" => DumpedContent::SortedSet(
            ask(connection, &["ZRANGE", key, "0", "-1", "WITHSCORES"]).await,
        ),
        other => panic!("no dump of a {other}"),
    };
    let expires_at: i64 = ask(connection, &["PEXPIRETIME", key]).await;
    Some(Dumped { content, expires_at: (expires_at >= 0).then_some(expires_at) })
}

#[allow(clippy::disallowed_methods, reason = "a setting of the tests, not of the server")]
fn binary() -> String {
    std::env::var("SECKILL_TEST_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}
