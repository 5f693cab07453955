//! A server that has no file descriptor left: nobody new is let in, those who are connected are
//! served, and when there are descriptors again all is as before.

use std::time::Duration;

use tokio::{net::TcpStream, time::Instant};

use crate::support::{
    alerts::assert_seen_by,
    calls::{Shop, drained, win},
    process::{Process, Serve},
    scrape::{get_over, read_metrics},
    within,
    world::{Sale, on_every_ground},
};

/// Descriptors of the server; a quiet one has some 30.
const LIMIT: usize = 100;
const HOGS: usize = LIMIT + 50;
/// How long the server is left alone without a descriptor.
const STARVED: Duration = Duration::from_secs(2);
const REFUSED: &str = "connections are not accepted";

/// Asks over a connection that stays.
async fn is_alive(socket: &mut TcpStream) {
    let answer = get_over(socket, "/livez").await;
    assert_eq!(answer.code, 200, "{answer:?}");
}

fn refusals(process: &Process, port: &str) -> usize {
    let log = process.log();
    log.lines().filter(|line| line.contains(REFUSED) && line.contains(port)).count()
}

on_every_ground! {
    async fn a_server_without_descriptors_serves_who_is_there_and_lets_others_in_later(
        ground: &Ground<'_>
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 1_000, ..Sale::default() }).await;
        world.close().await;
        let mut process = Serve::over(&ground.settings())
            .with("HTTP__ADDR", "127.0.0.1:0")
            .with("GRPC__FIRST_BYTE_TIMEOUT_MS", 60_000)
            .after(&format!("ulimit -n {LIMIT}"))
            .start()
            .await;
        let shop = Shop::new(&key, process.channel().await);
        // Whatever connections the stores need are made.
        let buyers: Vec<String> = (0..40).map(|nth| format!("early-{nth}")).collect();
        let early = buyers.iter().map(|buyer| shop.insist(buyer, "first"));
        assert!(futures_util::future::join_all(early).await.iter().all(|won| win(won).is_some()));
        let mut probe = TcpStream::connect(process.http_addr()).await.unwrap();
        is_alive(&mut probe).await;
        let before = read_metrics(&get_over(&mut probe, "/metrics").await);
        assert_eq!(before["process_max_fds"], LIMIT as f64);
        let open = before["process_open_fds"];
        assert!(open < 0.9 * LIMIT as f64, "{open}");

        let mut hogs = Vec::new();
        for (port, addr, many) in [("gRPC", process.addr, HOGS), ("HTTP", process.http_addr(), 3)] {
            for _ in 0..many {
                hogs.push(TcpStream::connect(addr).await.unwrap());
            }
            within(Duration::from_secs(10), "the port accepts nothing", async || {
                (refusals(&process, port) > 0).then_some(())
            })
            .await;
        }

        let (cpu, began) = (process.cpu_time(), Instant::now());
        while began.elapsed() < STARVED {
            tokio::time::sleep(STARVED / 10).await;
            is_alive(&mut probe).await;
        }
        let (cpu, took) = (process.cpu_time() - cpu, began.elapsed());
        assert!(cpu < took / 4, "{cpu:?} of a processor in {took:?}, with nothing to do");
        for nth in 0..20 {
            let answer = shop.insist(&format!("starved-{nth}"), "first").await;
            assert!(win(&answer).is_some(), "{answer:?}");
            is_alive(&mut probe).await;
        }
        let starved = read_metrics(&get_over(&mut probe, "/metrics").await);
        assert_seen_by(&["SeckillFilesRunOut"], &before, &starved);
        let open = starved["process_open_fds"];
        assert!(open > 0.9 * LIMIT as f64, "{open}");
        let start = "process_start_time_seconds";
        assert_eq!(starved[start], before[start]);
        let cpu = "process_cpu_seconds_total";
        assert!(starved[cpu] >= before[cpu], "it is counted on");
        // A line in five seconds from each port.
        let most = 2 * (2 + usize::try_from(began.elapsed().as_secs()).unwrap() / 5);
        let lines = refusals(&process, "");
        assert!(lines <= most, "{lines} lines in the log");

        drop(hogs);
        let late = within(Duration::from_secs(10), "others are let in", async || {
            let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", process.addr));
            let channel = endpoint.unwrap().connect_timeout(Duration::from_secs(1)).connect().await;
            Some(Shop::new(&key, channel.ok()?))
        })
        .await;
        assert!(win(&late.insist("late", "first").await).is_some());
        let mut other_probe = TcpStream::connect(process.http_addr()).await.unwrap();
        is_alive(&mut other_probe).await;
        drained(process.channel().await, &key).await;
        process.stop().await;
        let world = ground.world().await;
        world.assert_balanced(&key, 40 + 20 + 1).await;
        world.close().await;
    }
}
