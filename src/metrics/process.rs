//! The process, under the names that every exporter uses; from `/proc`, so on Linux alone.

use std::{
    fs,
    sync::LazyLock,
    time::{SystemTime, UNIX_EPOCH},
};

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

/// Writes what the system tells; a figure that it does not tell is 0.
pub(super) fn write(text: &mut String) {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program may hold anything; what follows it are numbers.
    let numbers: Vec<u64> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().map(|word| word.parse().unwrap_or(0)).collect())
        .unwrap_or_default();
    // As proc(5) counts them, from 1; the name is the second.
    let field = |nth: usize| as_gauge(numbers.get(nth - 3).copied().unwrap_or(0));
    let ticks_per_s = as_gauge(rustix::param::clock_ticks_per_second());
    let page = as_gauge(rustix::param::page_size() as u64);
    let open_fds = fs::read_dir("/proc/self/fd").map_or(0, |folder| folder.count());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let start = booted_s().map_or(*FIRST_SEEN_S, |booted| booted + field(22) / ticks_per_s);
    for (family, value) in [
        (PROCESS_CPU, (field(14) + field(15)) / ticks_per_s),
        (PROCESS_RESIDENT, field(24) * page),
        (PROCESS_VIRTUAL, field(23)),
        (PROCESS_THREADS, field(20)),
        // The folder itself is open while it is read.
        (PROCESS_OPEN_FDS, as_gauge(open_fds.saturating_sub(1) as u64)),
        (PROCESS_MAX_FDS, limit.current.map_or(f64::INFINITY, as_gauge)),
        (PROCESS_START, start),
    ] {
        head(text, family);
        let value = if value == f64::INFINITY { "+Inf".to_owned() } else { value.to_string() };
        line(text, family.name, "", value);
    }
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
