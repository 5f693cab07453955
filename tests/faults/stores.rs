//! A PostgreSQL or a MariaDB of our own, to be stopped, held and started again.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use sea_orm::{ConnectOptions, ConnectionTrait, DatabaseConnection, DbErr};
use tempfile::TempDir;

use crate::support::{redis_server::RedisServer, small_disk::SmallDisk, within};

/// How long a server may take to start, on a machine that is busy with others.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Which SQL a scenario runs on. SQLite comes with the embedded engine, the others with a Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sql {
    Sqlite,
    Postgres,
    MariaDb,
}

impl Sql {
    pub(crate) const ALL: [Self; 3] = [Self::Sqlite, Self::Postgres, Self::MariaDb];
    pub(crate) const SERVERS: [Self; 2] = [Self::Postgres, Self::MariaDb];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::MariaDb => "mariadb",
        }
    }
}

/// A database server of our own; ended when it goes out of scope.
#[derive(Debug)]
pub(crate) struct SqlServer {
    pub(crate) sql: Sql,
    port: u16,
    folder: TempDir,
    /// What the folder is on, if not on that of all others.
    pub(crate) disk: Option<SmallDisk>,
    /// Who it runs as; neither of the two runs as root.
    user: Option<String>,
    programs: Programs,
    child: Option<Child>,
}

/// Where `scripts/locate.sh` finds the servers.
#[derive(Debug, Clone)]
struct Programs {
    server: String,
    prepare: String,
}

impl SqlServer {
    /// Makes an empty one and starts it.
    pub(crate) async fn start(sql: Sql) -> Self {
        Self::start_on(sql, None).await
    }

    /// With its data on this disk.
    pub(crate) async fn start_on(sql: Sql, disk: Option<SmallDisk>) -> Self {
        let programs = match sql {
            Sql::Postgres => {
                let bin = located("find_postgres");
                Programs { server: format!("{bin}/postgres"), prepare: format!("{bin}/initdb") }
            }
            Sql::MariaDb => Programs {
                server: located("find_mariadb"),
                prepare: located("find_mariadb_install"),
            },
            Sql::Sqlite => panic!("SQLite is no server"),
        };
        let port = RedisServer::free_port();
        let folder = match &disk {
            None => tempfile::tempdir().unwrap(),
            Some(disk) => TempDir::new_in(disk.path()).unwrap(),
        };
        let user = owner(sql, folder.path());
        let mut server = Self { sql, port, folder, disk, user, programs, child: None };
        server.prepare().await;
        server.run().await;
        server
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Of a user who may do anything, to a database that is always there.
    pub(crate) fn admin_url(&self) -> String {
        let scheme = if self.sql == Sql::Postgres { "postgres" } else { "mysql" };
        let name = if self.sql == Sql::Postgres { "postgres" } else { "seckill" };
        format!("{scheme}://seckill@127.0.0.1:{}/{name}", self.port)
    }

    /// Runs one statement, past everything under test.
    pub(crate) async fn run_sql(&self, statement: &str) {
        let db = connect(&self.admin_url()).await.unwrap();
        db.execute_unprepared(statement).await.unwrap();
        db.close().await.unwrap();
    }

    /// Starts it on the data that it left behind, and waits until it answers.
    pub(crate) async fn run(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        let folder = self.folder.path();
        let port = self.port.to_string();
        let at = |name: &str| folder.join(name).display().to_string();
        let args: Vec<String> = match self.sql {
            Sql::Postgres => [
                vec!["-D".to_owned(), at("data")],
                [
                    "listen_addresses=127.0.0.1".to_owned(),
                    format!("port={port}"),
                    format!("unix_socket_directories={}", folder.display()),
                    "max_connections=200".to_owned(),
                    "timezone=UTC".to_owned(),
                ]
                .into_iter()
                .flat_map(|setting| ["-c".to_owned(), setting])
                .collect(),
            ]
            .concat(),
            Sql::MariaDb | Sql::Sqlite => vec![
                "--no-defaults".to_owned(),
                format!("--datadir={}", at("data")),
                format!("--tmpdir={}", folder.display()),
                format!("--socket={}", at("socket")),
                format!("--pid-file={}", at("pid")),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--port={port}"),
                "--skip-name-resolve".to_owned(),
                "--max-connections=200".to_owned(),
                "--character-set-server=utf8mb4".to_owned(),
                "--default-time-zone=+00:00".to_owned(),
                format!("--init-file={}", at("init.sql")),
            ],
        };
        let mut command = self.command(&self.programs.server);
        self.child = Some(command.args(args).spawn().unwrap());
        let url = self.admin_url();
        within(START_LIMIT, "the database answers", async || {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
                panic!("it did not start: {status}\n{}", self.log());
            }
            let db = connect(&url).await.ok()?;
            let answer = db.execute_unprepared("SELECT 1").await;
            db.close().await.ok();
            answer.ok().map(|_| ())
        })
        .await;
    }

    /// Ends it as an operator does who does not wait for clients.
    pub(crate) async fn stop(&mut self) {
        let signal = if self.sql == Sql::Postgres { "INT" } else { "TERM" };
        signal_all(signal, &[self.pid()]);
        let mut child = self.child.take().unwrap();
        within(Duration::from_secs(30), "the database stops", async || child.try_wait().unwrap())
            .await;
    }

    /// Ends it on the spot, with all its processes.
    pub(crate) async fn crash(&mut self) {
        let family = self.family();
        signal_all("KILL", &family);
        self.child.take().unwrap().wait().unwrap();
        // Those that were children of the first are no longer ours to wait for.
        within(Duration::from_secs(10), "all its processes are gone", async || {
            family.iter().all(|pid| state_of(*pid).is_none_or(|state| state == 'Z')).then_some(())
        })
        .await;
    }

    /// Holds it: it accepts connections, by the kernel, and never answers.
    pub(crate) fn hold(&self) {
        // The first alone, so that it makes no more; then all.
        signal_all("STOP", &[self.pid()]);
        signal_all("STOP", &self.family());
    }

    pub(crate) fn let_go(&self) {
        signal_all("CONT", &self.family());
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// Itself and its children.
    fn family(&self) -> Vec<u32> {
        let me = self.pid();
        let mut family = vec![me];
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if parent_of(pid) == Some(me) {
                family.push(pid);
            }
        }
        family
    }

    async fn prepare(&self) {
        let data = self.folder.path().join("data").display().to_string();
        let mut command = self.command(&self.programs.prepare);
        match self.sql {
            Sql::Postgres => command.args(["--pgdata", &data, "--username", "seckill"]).args([
                "--auth",
                "trust",
                "--encoding",
                "UTF8",
                "--no-locale",
                "--no-sync",
            ]),
            Sql::MariaDb | Sql::Sqlite => {
                let init = self.folder.path().join("init.sql");
                fs::write(
                    &init,
                    "CREATE DATABASE IF NOT EXISTS seckill CHARACTER SET utf8mb4;\n\
                     CREATE USER IF NOT EXISTS seckill@'127.0.0.1';\n\
                     GRANT ALL PRIVILEGES ON *.* TO seckill@'127.0.0.1' WITH GRANT OPTION;\n\
                     CREATE USER IF NOT EXISTS shop@'127.0.0.1';\n\
                     GRANT ALL PRIVILEGES ON `seckill\\_%`.* TO shop@'127.0.0.1';\n",
                )
                .unwrap();
                run("chmod", &["644", &init.display().to_string()]);
                command
                    .args(["--no-defaults", &format!("--datadir={data}")])
                    .args(["--auth-root-authentication-method=normal", "--skip-test-db"])
            }
        };
        let mut child = command.spawn().unwrap();
        let ended = within(START_LIMIT, "it is prepared", async || child.try_wait().unwrap()).await;
        assert!(ended.success(), "{}", self.log());
    }

    /// A command as the user who owns the folder, writing to the log there.
    fn command(&self, program: &str) -> Command {
        let mut command = match &self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new("setpriv");
                let group = output("id", &["-g", user]);
                command.args(["--reuid", user, "--regid", &group, "--clear-groups", program]);
                command
            }
        };
        let log = || File::options().create(true).append(true).open(self.log_path()).unwrap();
        command
            .current_dir(self.folder.path())
            .env("TMPDIR", self.folder.path())
            .stdin(Stdio::null())
            .stdout(log())
            .stderr(log());
        command
    }

    fn log_path(&self) -> std::path::PathBuf {
        self.folder.path().join("log")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }
}

impl Drop for SqlServer {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        self.child = None;
        let pid = child.id();
        // At once, without its last words on disk: nobody reads them again.
        for signal in ["CONT", "QUIT"] {
            let _ = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
        }
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if std::time::Instant::now() >= until {
                child.kill().ok();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Who may run this server on that folder; `None` when we may.
fn owner(sql: Sql, folder: &Path) -> Option<String> {
    if output("id", &["-u"]) != "0" {
        return None;
    }
    let names = if sql == Sql::Postgres { ["postgres", "nobody"] } else { ["mysql", "nobody"] };
    let exists = |name: &&str| {
        let id = Command::new("id").args(["-u", name]).stderr(Stdio::null()).output();
        id.is_ok_and(|id| id.status.success())
    };
    let user = names.into_iter().find(exists).expect("an account that is not root");
    run("chown", &[user, &folder.display().to_string()]);
    Some(user.to_owned())
}

/// What a function of `scripts/locate.sh` prints.
pub(crate) fn located(function: &str) -> String {
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/locate.sh");
    let found = output("bash", &["-c", &format!(". {scripts}; {function}")]);
    assert!(!found.is_empty(), "{function} found nothing: run scripts/install-services");
    found
}

/// The library that lies about the time.
pub(crate) fn faketime() -> String {
    let found = located("find_faketime");
    found.lines().next().unwrap_or_default().to_owned()
}

async fn connect(url: &str) -> Result<DatabaseConnection, DbErr> {
    let mut options = ConnectOptions::new(url);
    options.max_connections(1).acquire_timeout(Duration::from_secs(3)).sqlx_logging(false);
    sea_orm::Database::connect(options).await
}

fn signal_all(signal: &str, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    // One may have ended since it was listed.
    let kill = format!("kill -{signal} {} 2>/dev/null; true", pids.join(" "));
    run("sh", &["-c", &kill]);
}

fn parent_of(pid: u32) -> Option<u32> {
    stat_of(pid)?.split(' ').nth(1)?.parse().ok()
}

fn state_of(pid: u32) -> Option<char> {
    stat_of(pid)?.chars().next()
}

/// The line of `/proc/PID/stat` behind the name, which may hold anything.
fn stat_of(pid: u32) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    line.rsplit_once(") ").map(|(_, rest)| rest.to_owned())
}

fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).status().unwrap();
    assert!(status.success(), "{program} {args:?}: {status}");
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
