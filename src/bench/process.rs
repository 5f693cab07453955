//! The processes that are measured: this program again, as a server or as the noop.
//!
//! **Promise:** a process that was started here is ended here, in order if it can be and in any case;
//! no other process is ever signalled.

use std::{
    fs::{self, File},
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use uuid::Uuid;

use super::Error;
use crate::metrics;

/// One that keeps nothing reads a million reservations first.
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(30);
const METRICS_LIMIT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
/// How much of a log is shown when a process did not start.
const LOG_TAIL: usize = 2_000;

/// A folder that goes when this does.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new folder inside of `parent`.
    ///
    /// # Errors
    /// It can't be made there.
    pub fn inside(parent: &Path) -> Result<Self, Error> {
        let path = parent.join(format!("seckill-bench-{}", Uuid::now_v7().simple()));
        fs::create_dir(&path)
            .map_err(|error| Error::Usage(format!("no folder in {}: {error}", parent.display())))?;
        Ok(Self(path))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays is in the way of nobody: its name is new each time.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process of ours that serves.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pub grpc: SocketAddr,
    pub http: Option<SocketAddr>,
    log: PathBuf,
    ended: bool,
}

/// What a server prints once it serves.
#[derive(Debug, Deserialize)]
struct Ready {
    grpc_addr: SocketAddr,
    http_addr: Option<SocketAddr>,
}

impl Process {
    /// Starts this program with these arguments and variables, on free ports of loopback, and waits
    /// until it serves. It works and logs in `folder`.
    ///
    /// # Errors
    /// It ended, or did not serve in time; the error has the end of its log.
    pub async fn start(
        args: &[&str],
        variables: &[(&str, &str)],
        folder: &Path,
    ) -> Result<Self, Error> {
        let fault =
            |what: &str, error: &dyn std::fmt::Display| Error::Internal(format!("{what}: {error}"));
        let program = std::env::current_exe().map_err(|error| fault("this program", &error))?;
        let id = Uuid::now_v7().simple().to_string();
        let (out, log) = (folder.join(format!("{id}.out")), folder.join(format!("{id}.log")));
        let file = |path: &Path| File::create(path).map_err(|error| fault("a log", &error));
        let mut command = Command::new(program);
        command
            .args(args)
            .args(["--output", "json"])
            .current_dir(folder)
            // Whoever sets these in a file would win over what is set here.
            .env_remove("SECKILL__ENGINE__URL_FILE")
            .env_remove("SECKILL__DATABASE__URL_FILE")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(file(&out)?)
            .stderr(file(&log)?);
        let child = command.spawn().map_err(|error| fault("a process", &error))?;
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut process = Self { child, grpc: nowhere, http: None, log, ended: false };
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let text = fs::read_to_string(&out).unwrap_or_default();
            if let Some((line, _)) = text.split_once('\n') {
                let Ready { grpc_addr, http_addr } = serde_json::from_str(line)
                    .map_err(|_| Error::Unavailable(format!("{args:?} did not start: {line}")))?;
                process.grpc = grpc_addr;
                process.http = http_addr;
                return Ok(process);
            }
            let ended = process.child.try_wait().map_err(|error| fault("a process", &error))?;
            if ended.is_some() || Instant::now() > deadline {
                process.ended = ended.is_some();
                return Err(Error::Unavailable(format!(
                    "{args:?} did not start: {}{}",
                    text,
                    process.end_of_log()
                )));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// CPU time of the whole process so far.
    ///
    /// # Errors
    /// It has ended.
    pub fn cpu(&self) -> Result<Duration, Error> {
        cpu_of(self.child.id())
    }

    /// Memory that it has in use now (VmRSS), in bytes.
    ///
    /// # Errors
    /// It has ended.
    pub fn memory(&self) -> Result<u64, Error> {
        memory_of(self.child.id(), "VmRSS")
    }

    /// Ends it at once, as a power cut would: it finishes nothing that it has begun.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
        self.ended = true;
    }

    /// How often each script was run by this server so far.
    ///
    /// # Errors
    /// It has no HTTP port, or that does not answer.
    pub async fn engine_calls(&self) -> Result<Vec<(String, u64)>, Error> {
        let addr = self.http.ok_or_else(|| Error::Internal("no HTTP port".to_owned()))?;
        let asked = tokio::time::timeout(METRICS_LIMIT, get(addr, "/metrics")).await;
        let text = match asked {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => return Err(Error::Unavailable(format!("/metrics: {error}"))),
            Err(_) => return Err(Error::Unavailable("/metrics: no answer".to_owned())),
        };
        Ok(calls_by_script(&text))
    }

    /// Asks it to stop and waits until it has.
    ///
    /// # Errors
    /// It did not end in order; then it is gone all the same.
    pub async fn stop(mut self) -> Result<(), Error> {
        self.signal(Signal::TERM);
        let deadline = Instant::now() + STOP_LIMIT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.ended = true;
                    return if status.success() {
                        Ok(())
                    } else {
                        Err(Error::Unavailable(format!(
                            "a server ended with {status}: {}",
                            self.end_of_log()
                        )))
                    };
                }
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => {
                    return Err(Error::Unavailable(format!(
                        "a server did not stop within {STOP_LIMIT:?}: {}",
                        self.end_of_log()
                    )));
                }
                Err(error) => return Err(Error::Internal(format!("a server: {error}"))),
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn signal(&self, signal: Signal) {
        // It has not been waited for, so the id is still its own.
        if let Some(id) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended by itself; `stop` sees that.
            let _ = kill_process(id, signal);
        }
    }

    fn end_of_log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let mut from = text.len().saturating_sub(LOG_TAIL);
        while !text.is_char_boundary(from) {
            from += 1;
        }
        text[from..].trim().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ended {
            // Nothing that it has in hand is needed any more.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// CPU time of a process: what it and the kernel for it have used.
///
/// # Errors
/// There is no such process, or this system has no `/proc`.
pub fn cpu_of(id: u32) -> Result<Duration, Error> {
    let unreadable = || Error::Unavailable(format!("/proc/{id}/stat can't be read"));
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).map_err(|_| unreadable())?;
    let ticks = ticks_of(&stat).ok_or_else(unreadable)?;
    let per_s = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(ticks as f64 / per_s as f64))
}

/// Memory of a process by this name of `/proc/<pid>/status`, in bytes: `VmRSS` has it now, `VmHWM` had
/// the most.
///
/// # Errors
/// There is no such process, or this system has no `/proc`.
pub fn memory_of(id: u32, name: &str) -> Result<u64, Error> {
    let path = format!("/proc/{id}/status");
    let unreadable = || Error::Unavailable(format!("{path} can't be read"));
    let status = fs::read_to_string(&path).map_err(|_| unreadable())?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    Ok(kib.ok_or_else(unreadable)? * 1_024)
}

/// User and system ticks in the text of `/proc/<pid>/stat`.
fn ticks_of(stat: &str) -> Option<u64> {
    // The name in parentheses may hold anything; fields 14 and 15 follow behind it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The name of a process's program.
#[must_use]
pub fn program_of(id: u32) -> Option<String> {
    let mut name = String::new();
    File::open(format!("/proc/{id}/comm")).ok()?.read_to_string(&mut name).ok()?;
    Some(name.trim().to_owned())
}

async fn get(addr: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut socket = TcpStream::connect(addr).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    socket.read_to_string(&mut text).await?;
    Ok(text)
}

/// Adds up the results of each script.
fn calls_by_script(metrics: &str) -> Vec<(String, u64)> {
    let mut calls: Vec<(String, u64)> = Vec::new();
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(metrics::CALLS.name));
    for line in lines {
        let script = line.split_once("script=\"").and_then(|(_, rest)| rest.split_once('"'));
        let count = line.rsplit_once(' ').and_then(|(_, count)| count.parse::<u64>().ok());
        let (Some((script, _)), Some(count)) = (script, count) else { continue };
        match calls.iter_mut().find(|(known, _)| known == script) {
            Some((_, sum)) => *sum += count,
            None => calls.push((script.to_owned(), count)),
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_program_may_look_like_fields() {
        let stat = "7 (a ) 1 2 b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 1";
        assert_eq!(ticks_of(stat), Some(300));
        assert_eq!(ticks_of("7 (a) S 1"), None);
    }

    #[test]
    fn results_of_a_script_are_added_up() {
        let text = "# HELP seckill_engine_calls_total x\n\
                    seckill_engine_calls_total{script=\"reserve\",result=\"ok\"} 5\n\
                    seckill_engine_calls_total{script=\"reserve\",result=\"full\"} 2\n\
                    seckill_engine_calls_total{script=\"ping\",result=\"ok\"} 1\n\
                    seckill_engine_call_seconds_count{script=\"ping\"} 1\n";
        assert_eq!(calls_by_script(text), [("reserve".to_owned(), 7), ("ping".to_owned(), 1)]);
    }

    #[test]
    fn this_process_has_used_some_time() {
        assert!(cpu_of(std::process::id()).is_ok());
    }
}
