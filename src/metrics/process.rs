//! The process, under the names that every exporter uses; from `/proc`, so on Linux alone.
//!
//! **Promise:** a process without a descriptor left shows that, and no figure falls to 0 for it: what
//! has to be opened is kept open.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    sync::{LazyLock, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::io::Errno;

use super::{
    as_gauge,
    families::{
        PROCESS_CPU, PROCESS_MAX_FDS, PROCESS_OPEN_FDS, PROCESS_RESIDENT, PROCESS_START,
        PROCESS_THREADS, PROCESS_VIRTUAL,
    },
    head, line,
};

/// When the metrics were first asked for is near enough where the system does not tell.
static FIRST_SEEN_S: LazyLock<f64> = LazyLock::new(|| {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
});

/// What the system tells of the process; it is made anew for who reads from its beginning.
static STAT: OnceLock<File> = OnceLock::new();
/// The process started once, whatever the clock does.
static START_S: OnceLock<f64> = OnceLock::new();

/// Writes what the system tells; a figure that it does not tell is 0.
pub(super) fn write(text: &mut String) {
    let stat = read_stat().unwrap_or_default();
    // The name of the program may hold anything; what follows it are numbers.
    let numbers: Vec<u64> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().map(|word| word.parse().unwrap_or(0)).collect())
        .unwrap_or_default();
    // As proc(5) counts them, from 1; the name is the second.
    let field = |nth: usize| as_gauge(numbers.get(nth - 3).copied().unwrap_or(0));
    let ticks_per_s = as_gauge(rustix::param::clock_ticks_per_second());
    let page = as_gauge(rustix::param::page_size() as u64);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let max_fds = limit.current.map_or(f64::INFINITY, as_gauge);
    let start = START_S.get().copied().or_else(|| {
        let start = booted_s()? + field(22) / ticks_per_s;
        Some(*START_S.get_or_init(|| start))
    });
    for (family, value) in [
        (PROCESS_CPU, (field(14) + field(15)) / ticks_per_s),
        (PROCESS_RESIDENT, field(24) * page),
        (PROCESS_VIRTUAL, field(23)),
        (PROCESS_THREADS, field(20)),
        (PROCESS_OPEN_FDS, open_fds(max_fds)),
        (PROCESS_MAX_FDS, max_fds),
        (PROCESS_START, start.unwrap_or(*FIRST_SEEN_S)),
    ] {
        head(text, family);
        let value = if value == f64::INFINITY { "+Inf".to_owned() } else { value.to_string() };
        line(text, family.name, "", value);
    }
}

/// How many descriptors are in use; all, where there is none left to count them by.
fn open_fds(max: f64) -> f64 {
    match fs::read_dir("/proc/self/fd") {
        // The folder itself is open while it is read.
        Ok(folder) => as_gauge(folder.count().saturating_sub(1) as u64),
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => max,
        Err(_) => 0.0,
    }
}

fn read_stat() -> io::Result<String> {
    let file = match STAT.get() {
        Some(file) => file,
        None => {
            let file = File::open("/proc/self/stat")?;
            STAT.get_or_init(|| file)
        }
    };
    // A name of 64 bytes and some fifty numbers.
    let mut text = vec![0; 2_048];
    let read = file.read_at(&mut text, 0)?;
    text.truncate(read);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn booted_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_system_tells_of_this_process() {
        let mut text = String::new();
        write(&mut text);
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("a number")
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("later").as_secs_f64();
        assert!((value("process_start_time_seconds") - now).abs() < 3_600.0, "{text}");
        let (resident, all) =
            (value("process_resident_memory_bytes"), value("process_virtual_memory_bytes"));
        assert!(resident > 1e6 && resident < all, "{text}");
        assert!(value("process_threads") >= 2.0, "{text}");
        let open = value("process_open_fds");
        assert!(open >= 3.0 && open <= value("process_max_fds"), "{text}");
    }
}
