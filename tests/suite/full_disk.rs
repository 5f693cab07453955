//! The disk is full in the middle of a sale: nobody is promised anything, and when there is room
//! again the server goes on by itself.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use futures_util::{StreamExt as _, future, stream};
use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt as _;

use crate::support::{
    calls::{Shop, Win, assert_books, drained, win},
    databases::{self, Fresh},
    process::{Process, Serve},
    small_disk::SmallDisk,
    within,
    world::{Ground, Sale},
};

const CLIENTS: usize = 8;
/// After the first failure every call is refused within this time, while the disk is full. The
/// server's own limit is 50 ms; the rest is for a machine that is busy with others.
const AT_ONCE: Duration = Duration::from_millis(500);
const FULL_FOR: Duration = Duration::from_secs(1);
/// The server serves again this long after there is room.
const BACK: Duration = Duration::from_secs(5);

/// What a process may write to a file from now on, in bytes.
fn limit_files(process: &Process, bytes: &str) {
    let pid = process.id().to_string();
    let limit = format!("--fsize={bytes}:");
    let status = Command::new("prlimit").args(["--pid", &pid, &limit]).status();
    assert!(status.expect("prlimit is part of util-linux").success());
}

async fn health(process: &Process) -> ServingStatus {
    let mut client = HealthClient::new(process.channel().await);
    let request = HealthCheckRequest { service: "seckill.v1.Seckill".to_owned() };
    client.check(request).await.unwrap().into_inner().status()
}

async fn is_healthy(process: &Process, expected: ServingStatus, limit: Duration) {
    let what = format!("health is {expected:?}");
    within(limit, &what, async || (health(process).await == expected).then_some(())).await;
}

/// How one call of the sale went.
struct Call {
    buyer: String,
    sent: Instant,
    answered: Instant,
    answer: Result<Option<Win>, Status>,
}

/// Buyers come all the time, while the disk is full and when there is room again.
async fn survive(fresh: &Fresh, fill: impl FnOnce(&Process), make_room: impl FnOnce(&Process)) {
    let ground = Ground::embedded(fresh);
    let world = ground.world().await;
    let key = world.open_sale(&Sale { total: 100_000, ..Sale::default() }).await;
    world.close().await;
    // Who writes beyond a limit gets a signal that ends it, unless it is ignored; then an error.
    let mut process = Serve::over(&ground.settings()).after("trap '' XFSZ").start().await;
    let shop = Shop::new(&key, process.channel().await);
    let over = AtomicBool::new(false);
    let (won, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let wins = async |more: usize| {
        let wanted = won.load(Ordering::Relaxed) + more;
        within(Duration::from_secs(10), "the sale goes on", async || {
            (won.load(Ordering::Relaxed) >= wanted).then_some(())
        })
        .await;
    };
    let calls = stream::iter((0..).take_while(|_| !over.load(Ordering::Relaxed)))
        .map(async |nth: usize| {
            let buyer = format!("buyer-{nth}");
            let sent = Instant::now();
            let answer = shop.reserve(&buyer, "first").await.map(|answer| win(&answer));
            match &answer {
                Ok(_) => won.fetch_add(1, Ordering::Relaxed),
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    refused.fetch_add(1, Ordering::Relaxed)
                }
            };
            Call { buyer, sent, answered: Instant::now(), answer }
        })
        .buffer_unordered(CLIENTS)
        .collect::<Vec<Call>>();
    let fault = async {
        // Not many: SQLite writes its log of changes anew from the front when that has 4 MiB, and
        // so would have room for a while.
        wins(10).await;
        fill(&process);
        let full = Instant::now();
        is_healthy(&process, ServingStatus::NotServing, Duration::from_secs(10)).await;
        let known = Instant::now();
        let won_before = won.load(Ordering::Relaxed);
        while known.elapsed() < FULL_FOR {
            assert_eq!(health(&process).await, ServingStatus::NotServing);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let meanwhile = won.load(Ordering::Relaxed) - won_before;
        assert_eq!(meanwhile, 0, "{meanwhile} were promised a unit on a full disk");
        assert!(refused.load(Ordering::Relaxed) > 4 * CLIENTS);
        make_room(&process);
        let room = Instant::now();
        is_healthy(&process, ServingStatus::Serving, BACK).await;
        wins(1).await;
        assert!(room.elapsed() < BACK, "it took {:?}", room.elapsed());
        wins(50).await;
        over.store(true, Ordering::Relaxed);
        (full, known, room)
    };
    let (calls, (full, known, room)) = future::join(calls, fault).await;

    for Call { sent, answered, answer, .. } in &calls {
        let Err(status) = answer else { continue };
        assert!(*answered > full, "{status:?}");
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(status.get_details_retry_info().is_some(), "{status:?}");
        let took = *answered - (*sent).max(known);
        assert!(*sent > room || took < AT_ONCE, "{took:?}: {status:?}");
    }
    // Everybody who asks again holds one unit, the same as before.
    let again = stream::iter(&calls)
        .map(async |call| (call, win(&shop.insist(&call.buyer, "first").await)))
        .buffer_unordered(CLIENTS);
    let mut wins = Vec::new();
    for (call, won) in again.collect::<Vec<_>>().await {
        let won = won.expect("there is plenty");
        if let Ok(before) = &call.answer {
            assert_eq!(before.as_ref(), Some(&won));
        }
        wins.push(won);
    }
    drained(process.channel().await, &key).await;
    process.stop().await;
    let log = process.log();
    assert!(!log.contains("panicked"), "{log}");
    assert_books(&ground, &key, &wins).await;
}

/// Works for everybody: no file may grow, nor be written at all, the log neither.
async fn no_file_may_be_written(fresh: &Fresh) {
    let fill = |process: &Process| limit_files(process, "0");
    let make_room = |process: &Process| limit_files(process, "unlimited");
    survive(fresh, fill, make_room).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sale_goes_on_when_files_can_be_written_again() {
    databases::run(Fresh::sqlite().await, no_file_may_be_written).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sale_goes_on_when_a_full_disk_has_room_again() {
    let Some(disk) = SmallDisk::mount(8) else {
        println!("this user may mount nothing, so a limit on files stands in for the full disk");
        return databases::run(Fresh::sqlite().await, no_file_may_be_written).await;
    };
    let on = async |fresh: &Fresh| {
        let make_room = |_: &Process| disk.make_room();
        survive(fresh, |_| disk.fill(), make_room).await;
    };
    databases::run(Fresh::sqlite_in(disk.path()).await, on).await;
}
