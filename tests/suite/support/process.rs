//! `seckill serve` as a process of its own, to be killed, stopped and started again.

use std::{
    fs::File,
    net::SocketAddr,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use seckill::{api::pb::seckill_client::SeckillClient, config::Settings};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use super::{eventually, within};

/// What a server is started with.
#[derive(Debug, Clone)]
pub(crate) struct Serve {
    variables: Vec<(String, String)>,
    /// What a shell does first, such as lower a limit.
    prelude: String,
}

/// A running server; killed when it goes out of scope.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) addr: SocketAddr,
    child: Child,
    /// Its working directory, which also holds what it printed.
    folder: TempDir,
}

impl Serve {
    /// On a free port over the stores of these settings, and quick to settle what is left behind.
    pub(crate) fn over(settings: &Settings) -> Self {
        Self { variables: Vec::new(), prelude: String::new() }
            .with("GRPC__ADDR", "127.0.0.1:0")
            .with("HTTP__ADDR", "")
            .with("ENGINE__URL", settings.engine.url.expose())
            .with("ENGINE__RESPONSE_TIMEOUT_MS", "500")
            .with("DATABASE__URL", settings.database.url.expose())
            .with("DATABASE__MAX_CONNECTIONS", "5")
            // A debug build among many tests stands still for longer than a server should.
            .with("RESERVE__MAX_WAIT_MS", "1000")
            .with("SWEEPER__GRACE_MS", "500")
            .with("SWEEPER__INTERVAL_MS", "100")
            .with("OUTBOX__POLL_INTERVAL_MS", "50")
    }

    /// With one more setting, as in `SWEEPER__GRACE_MS`.
    pub(crate) fn with(self, setting: &str, value: impl ToString) -> Self {
        self.with_variable(&format!("SECKILL__{setting}"), value)
    }

    /// Dies the n-th time that it reaches this place; see `src/failpoints.rs`.
    pub(crate) fn dying(self, failpoint: &str, nth: u32) -> Self {
        self.with_variable("SECKILL_FAILPOINTS", format!("{failpoint}={nth}"))
    }

    pub(crate) fn with_variable(mut self, name: &str, value: impl ToString) -> Self {
        self.variables.push((name.to_owned(), value.to_string()));
        self
    }

    /// A shell does this first and then becomes the server, as in `ulimit -n 100`.
    pub(crate) fn after(mut self, command: &str) -> Self {
        self.prelude = format!("{command} && ");
        self
    }

    /// Starts the process and waits until it serves.
    pub(crate) async fn start(&self) -> Process {
        let mut process = self.spawn();
        process.serves().await;
        process
    }

    /// Starts the process.
    pub(crate) fn spawn(&self) -> Process {
        let folder = tempfile::tempdir().unwrap();
        let printed = |name: &str| File::create(folder.path().join(name)).unwrap();
        let child = Command::new("/bin/sh")
            .args(["-c", &format!("{}exec \"$0\" serve", self.prelude)])
            .arg(env!("CARGO_BIN_EXE_seckill"))
            .current_dir(folder.path())
            .env_clear()
            .envs(self.variables.iter().cloned())
            .stdin(Stdio::null())
            .stdout(printed("stdout"))
            .stderr(printed("stderr"))
            .spawn()
            .unwrap();
        Process { addr: ([127, 0, 0, 1], 0).into(), child, folder }
    }
}

impl Process {
    /// Where its metrics and probes are, if they were asked for.
    pub(crate) fn http_addr(&self) -> SocketAddr {
        let log = self.log();
        let mut lines = log.lines().filter_map(|line| serde_json::from_str(line).ok());
        let addr =
            lines.find_map(|line: serde_json::Value| line["http_addr"].as_str()?.parse().ok());
        addr.unwrap_or_else(|| panic!("no HTTP port: {log}"))
    }

    /// Waits until it serves.
    pub(crate) async fn serves(&mut self) {
        let limit = Duration::from_secs(20);
        let line = within(limit, "the server serves", async || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("it did not start: {status}\n{}", self.log());
            }
            // It prints the port only when it chose one itself.
            let log = self.log();
            let (_, addr) = log.split_once(r#""message":"serving","addr":""#)?;
            addr.split_once('"').map(|(addr, _)| addr.to_owned())
        });
        self.addr = line.await.parse().unwrap();
    }

    /// How many sockets it has open.
    pub(crate) fn sockets(&self) -> usize {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        // One may be closed while they are read.
        let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    }

    /// What it has written to its log so far.
    pub(crate) fn log(&self) -> String {
        self.printed("stderr")
    }

    fn printed(&self, name: &str) -> String {
        let path: PathBuf = self.folder.path().join(name);
        String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What the kernel says of it in `/proc/PID/NAME`.
    pub(crate) fn proc(&self, name: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.child.id())).unwrap()
    }

    /// How long it has used a processor so far.
    pub(crate) fn cpu_time(&self) -> Duration {
        // Behind the name, which may hold anything; in hundredths of a second on every Linux.
        let stat = self.proc("stat");
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Duration::from_millis(10 * ticks)
    }

    /// The memory that it has in use, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        1_024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    }

    /// A connection of its own.
    pub(crate) async fn channel(&self) -> Channel {
        channel(self.addr).await
    }

    pub(crate) async fn seckill(&self) -> SeckillClient<Channel> {
        SeckillClient::new(self.channel().await)
    }

    /// Asks it to stop, in good order the first time.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal, as in `STOP`.
    pub(crate) fn signal(&self, signal: &str) {
        // It has not been waited for, so the id is still its own.
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Whether it ended by itself, and how.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Ends it on the spot.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    pub(crate) async fn ended(&mut self, limit: Duration) -> ExitStatus {
        within(limit, "the server ends", async || self.child.try_wait().unwrap()).await
    }

    /// Waits until a failpoint has killed it.
    pub(crate) async fn crashed(&mut self) {
        let status = self.ended(Duration::from_secs(20)).await;
        const SIGABRT: i32 = 6;
        assert_eq!(status.signal(), Some(SIGABRT), "{status}\n{}", self.log());
    }

    /// Stops it in good order.
    pub(crate) async fn stop(&mut self) {
        self.terminate();
        let status = self.ended(Duration::from_secs(20)).await;
        assert!(status.success(), "{status}\n{}", self.log());
    }

    /// Waits until the log says this.
    pub(crate) async fn logged(&self, text: &str) {
        eventually(text, async || self.log().contains(text).then_some(())).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            #[expect(clippy::print_stderr, reason = "it helps to see why the test failed")]
            {
                eprintln!("the log of the server at {}:\n{}", self.addr, self.log());
            }
        }
    }
}

/// A connection of its own to a server, whatever it runs in.
pub(crate) async fn channel(addr: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    endpoint.connect().await.unwrap()
}
