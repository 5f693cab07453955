//! What the figures were measured on.

use std::{
    fs,
    io::{Seek as _, SeekFrom, Write as _},
    path::Path,
    process::Command,
    time::Instant,
};

use serde::Serialize;

use super::{Error, Plan, process::Folder};
use crate::{
    engine::redis::{Level, RedisEngine},
    server::redis_settings,
};

/// How often the disk is asked to keep what it was given; and how much that is.
const FSYNCS: usize = 50;
const BLOCK: [u8; 8_192] = [7; 8_192];

/// The machine, what ran on it, and what that was built from.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Machine {
    pub processor: String,
    pub cores: usize,
    pub memory_mib: u64,
    pub kernel: String,
    /// Of the last minute, before anything was measured: what others did.
    pub load_average: f64,
    /// The median of a write of 8 KiB and its fdatasync, in the folder of the bench.
    pub fsync_us: u64,
    pub seckill: String,
    /// What the folder of this program was at: the commit, and whether it was changed.
    pub commit: String,
    pub build: &'static str,
    pub engine: String,
    pub database: String,
}

impl Machine {
    /// Looks around.
    ///
    /// # Errors
    /// The folder can't be written to.
    pub async fn look(plan: &Plan) -> Result<Self, Error> {
        let load = read("/proc/loadavg");
        Ok(Self {
            processor: line_of(&read("/proc/cpuinfo"), "model name").unwrap_or("unknown").into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory_mib(&read("/proc/meminfo")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_average: load.split(' ').next().and_then(|one| one.parse().ok()).unwrap_or(0.0),
            fsync_us: fsync_us(&plan.folder)?,
            seckill: env!("CARGO_PKG_VERSION").to_owned(),
            commit: commit().unwrap_or_else(|| "unknown".to_owned()),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            engine: engine(plan).await?,
            database: if plan.own_database {
                "sqlite, a file in the folder of the bench".to_owned()
            } else {
                plan.settings.database.url.to_string()
            },
        })
    }
}

async fn engine(plan: &Plan) -> Result<String, Error> {
    let Some(settings) = redis_settings(&plan.settings.engine) else {
        return Ok("embedded".to_owned());
    };
    let findings = RedisEngine::check(&settings).await;
    let findings = findings.map_err(|error| Error::Unavailable(error.to_string()))?;
    let texts = findings.into_iter().filter(|finding| finding.level == Level::Fine);
    Ok(texts.map(|finding| finding.text).collect::<Vec<_>>().join(", "))
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first `name : value`.
fn line_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

fn memory_mib(meminfo: &str) -> u64 {
    let kib = line_of(meminfo, "MemTotal").and_then(|line| line.split(' ').next()?.parse().ok());
    kib.unwrap_or(0_u64) / 1_024
}

fn fsync_us(parent: &Path) -> Result<u64, Error> {
    let folder = Folder::inside(parent)?;
    let path = folder.path().join("fsync");
    let measure = || -> std::io::Result<Vec<u128>> {
        let mut file = fs::File::create(&path)?;
        let mut times = Vec::with_capacity(FSYNCS);
        for _ in 0..FSYNCS {
            file.seek(SeekFrom::Start(0))?;
            let begun = Instant::now();
            file.write_all(&BLOCK)?;
            file.sync_data()?;
            times.push(begun.elapsed().as_micros());
        }
        times.sort_unstable();
        Ok(times)
    };
    let times = measure().map_err(|error| Error::Usage(format!("{}: {error}", path.display())))?;
    Ok(u64::try_from(times[times.len() / 2]).unwrap_or(u64::MAX))
}

fn commit() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    let output = Command::new("git")
        .arg("-C")
        .arg(program.parent()?)
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
}
