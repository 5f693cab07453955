//! A Redis Cluster as the engine: calls find their master, slots move, masters die, and the books
//! balance.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt as _, future};
use seckill::{
    adjustments::Step,
    config::{OptionalAddr, Settings},
    domain::{ActivityId, OfferKey, SkuId},
    engine::{
        Call, Engine, EngineError, Value,
        events::{Event, Heard},
        keys,
        locks::{Locks, WAIT},
        redis::{Finding, Level, OpenError, RedisEngine, RedisSettings},
        scripts,
    },
    server::Server,
};
use tokio_util::task::TaskTracker;

use crate::support::{
    IDENTITY, Segment,
    alerts::assert_seen_by,
    answer, arg,
    cluster::Cluster,
    databases::{self, Fresh},
    eventually,
    redis_server::RedisServer,
    scrape::metrics,
    status,
    storm::{self, Storm},
    within, word,
    world::{Ground, SKU, World},
};

const UNITS: u64 = 300;
const BUYERS: u32 = 900;

/// A server on a cluster, with a sale in each of its three parts.
async fn open(ground: &Ground<'_>, cluster: &Cluster) -> (Server, [Arc<Storm>; 3]) {
    let mut settings = ground.settings();
    cluster.set(&mut settings);
    settings.http.addr = OptionalAddr(Some(([127, 0, 0, 1], 0).into()));
    let server = storm::serve(settings).await;
    let mut storms = Vec::new();
    for master in 0..3 {
        let activity = activity_at(&cluster.servers[master], cluster).await;
        let key = storm::sell(&server, activity, UNITS).await;
        assert_eq!(cluster.owner_of(&stock(&key)).await, master);
        storms.push(Storm::new(&key, UNITS, BUYERS));
    }
    let storms = storms.try_into().ok().unwrap();
    (server, storms)
}

/// An activity whose offer falls to this server.
async fn activity_at(master: &RedisServer, cluster: &Cluster) -> &'static str {
    for name in ["spring", "hat", "lamp", "chair", "pen", "cup", "shoe", "kite", "drum", "oar"] {
        let key = stock(&OfferKey {
            activity_id: ActivityId::new(name).unwrap(),
            sku_id: SkuId::new(SKU).unwrap(),
        });
        if cluster.servers[cluster.owner_of(&key).await].port() == master.port() {
            return name;
        }
    }
    panic!("no name falls to {master:?}")
}

fn stock(key: &OfferKey) -> String {
    keys::segment(key, 0)[0].clone()
}

/// All three sales at once, with `meddle` in the middle of the first.
async fn rage(server: &Server, storms: &[Arc<Storm>; 3], meddle: impl Future<Output = ()>) {
    let [first, second, third] = storms;
    future::join3(
        first.rage(server, meddle),
        second.rage(server, future::ready(())),
        third.rage(server, future::ready(())),
    )
    .await;
}

async fn settle(server: Server, storms: &[Arc<Storm>; 3]) {
    for storm in storms {
        storm.settle(&server).await;
    }
    server.stop().await;
}

async fn a_slot_moves(fresh: &Fresh) {
    let ground = Ground::embedded(fresh);
    let cluster = Cluster::start().await;
    let (server, storms) = open(&ground, &cluster).await;
    let key = stock(&storms[0].key);
    let (slot, from) = (cluster.slot_of(&key).await, cluster.owner_of(&key).await);
    let to = (from + 1) % 3;
    storms[0].let_in(150);
    let meddle = async {
        storms[0].answered(100).await;
        storms[0].let_in(400);
        cluster.open_slot(&slot, from, to).await;
        cluster.carry(&key, from, to).await;
        within(Duration::from_secs(5), "a call meets the moving slot", async || {
            (cluster.errors("TRYAGAIN").await > 0).then_some(())
        })
        .await;
        cluster.carry_all(&slot, from, to).await;
        cluster.close_slot(&slot, from, to).await;
        storms[0].answered(300).await;
        // And back again.
        storms[0].let_in(BUYERS);
        cluster.open_slot(&slot, to, from).await;
        cluster.carry_all(&slot, to, from).await;
        cluster.close_slot(&slot, to, from).await;
    };
    rage(&server, &storms, meddle).await;
    assert_eq!(cluster.owner_of(&key).await, from);
    assert!(cluster.errors("MOVED").await > 0);
    let rebuilds = server.parts.recovery.rebuilds();
    assert!(rebuilds >= 2, "{rebuilds} rebuilds after two moves");
    let [moved, second, third] = storms;
    moved.settle_in_any_order(&server).await;
    second.settle(&server).await;
    third.settle(&server).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_goes_on_while_its_slot_moves_there_and_back() {
    databases::run(Fresh::postgres().await, a_slot_moves).await;
}

/// A master is killed in the middle of the sales, and its replica has all or lacks the last.
async fn a_master_dies(fresh: &Fresh, lags: bool) {
    let ground = Ground::embedded(fresh);
    let mut cluster = Cluster::start().await;
    // Whoever listens does so at any of the masters; at least one at that which will die.
    let engine = cluster.engine().await;
    let mut ears = Vec::new();
    let mut cut_off = 0;
    while cut_off == 0 {
        let mut ear = engine.hear();
        assert_eq!(ear.next().await, Some(Heard::Gap));
        ears.push(ear);
        cut_off = cluster.servers[0].listeners().await;
    }
    let (server, storms) = open(&ground, &cluster).await;
    let owner = cluster.owner_of(&stock(&storms[0].key)).await;
    assert_eq!(owner, 0);
    storms[0].let_in(150);
    let meddle = async {
        storms[0].answered(100).await;
        if lags {
            cluster.servers[owner].leave_replicas_behind().await;
            storms[0].let_in(300);
            storms[0].answered(250).await;
        }
        storms[0].let_in(BUYERS);
        cluster.servers[owner].kill();
        cluster.replaced(owner).await;
    };
    rage(&server, &storms, meddle).await;
    let rebuilds = server.parts.recovery.rebuilds();
    assert!(rebuilds >= 1, "what the replica has was written by another server");
    settle(server, &storms).await;

    // Each is somewhere by now.
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    let told = Event::ActivityChanged { id: ActivityId::new("told").unwrap(), version: 7 };
    let mut gaps = 0;
    for ear in &mut ears {
        loop {
            let heard = tokio::select! {
                heard = ear.next() => heard.unwrap(),
                () = tokio::time::sleep(Duration::from_millis(50)) => {
                    told.tell(&engine).await.unwrap();
                    continue;
                }
            };
            match heard {
                Heard::Gap => gaps += 1,
                Heard::Message(message) if Event::read(&message) == Some(told.clone()) => break,
                Heard::Message(_) => {}
            }
        }
    }
    assert_eq!(gaps, cut_off, "whoever was cut off knows that messages may be missing");
    // The old master comes back, as a replica, and changes nothing.
    cluster.servers[owner].start_again().await;
    engine.probe().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_goes_on_when_a_master_dies() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        a_master_dies(fresh, false).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_goes_on_when_a_replica_that_lags_takes_over() {
    databases::run(Fresh::mysql().await, async |fresh: &Fresh| a_master_dies(fresh, true).await)
        .await;
}

/// A master is away, and nobody can take over: its offer waits, the others sell all the time. Then its
/// replica may.
async fn a_part_is_away(fresh: &Fresh, stop: impl FnOnce(&mut RedisServer)) {
    let ground = Ground::embedded(fresh);
    let mut cluster = Cluster::start().await;
    let (server, storms) = open(&ground, &cluster).await;
    let (parts, http) = (&server.parts, server.http_addr().unwrap());
    let before = metrics(http).await;
    let lost = cluster.owner_of(&stock(&storms[0].key)).await;
    assert_eq!(lost, 0);
    storms.iter().for_each(|storm| storm.let_in(50));
    let meddle = async {
        for storm in &storms {
            storm.answered(50).await;
        }
        cluster.replica_of(lost).signal("STOP");
        stop(&mut cluster.servers[lost]);
        storms[0].let_in(BUYERS);
        // Buyers of the others come all the time, before anybody knows and after.
        let (mut come, mut noticed) = (50, None);
        while come < BUYERS {
            come += 5;
            for storm in &storms[1..] {
                storm.let_in(come);
                storm.answered(come as usize).await;
            }
            assert!(!parts.engine_circuit.is_open(), "the engine is there");
            if storms[0].undecided.load(Ordering::Relaxed) > 0 {
                let since = *noticed.get_or_insert(come);
                if come > since + 100 {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        noticed.expect("the buyers of what is lost were told");
        assert_eq!(parts.engine.parts_away(), 1);
        let away = metrics(http).await;
        assert_eq!(away["seckill_engine_masters_away"], 1.0);
        assert_seen_by(&["SeckillEnginePartDown"], &before, &away);
        assert!(storms[0].answered_now() < 200, "nobody sells what is lost");
        storms[1..].iter().for_each(|storm| storm.let_in(BUYERS));
        cluster.replica_of(lost).signal("CONT");
        cluster.replaced(lost).await;
    };
    rage(&server, &storms, meddle).await;
    for storm in &storms[1..] {
        assert_eq!(storm.undecided.load(Ordering::Relaxed), 0, "everybody was served at once");
    }
    assert_eq!(parts.engine.parts_away(), 0);
    assert_eq!(metrics(http).await["seckill_engine_masters_away"], 0.0);
    assert_eq!(parts.recovery.rebuilds(), 1, "what the replica has was written by another server");
    settle(server, &storms).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_died_stops_only_what_it_owns() {
    databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        a_part_is_away(fresh, RedisServer::kill).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_hangs_stops_only_what_it_owns() {
    databases::run(Fresh::mysql().await, async |fresh: &Fresh| {
        a_part_is_away(fresh, |master| master.signal("STOP")).await;
    })
    .await;
}

/// More and fewer units, each between its two steps when the master dies: both are decided once.
async fn adjustments_through_a_death(fresh: &Fresh) {
    let ground = Ground::embedded(fresh);
    let mut cluster = Cluster::start().await;
    let (server, storms) = open(&ground, &cluster).await;
    let world = World { parts: server.parts.clone(), settings: Settings::default() };
    let (storm, key) = (&storms[0], &storms[0].key);
    storm.let_in(150);
    let meddle = async {
        storm.answered(100).await;
        // In the engine and not in SQL; in SQL and not in the engine.
        let epoch = world.set_aside(key, "fewer", 20).await;
        world.decide(key, "more", 20, Step::Add).await;
        storm.let_in(200);
        cluster.servers[0].kill();
        cluster.replaced(0).await;
        for (request_id, delta) in [("fewer", -20), ("more", 20), ("fewer", -20)] {
            let adjusted = eventually("the adjustment is decided", async || {
                world.adjust(key, request_id, delta).await.ok()
            })
            .await;
            assert!(adjusted.applied, "{adjusted:?}");
        }
        assert!(world.sql_epoch(key).await > epoch, "it was rebuilt in between");
        storm.let_in(BUYERS);
    };
    rage(&server, &storms, meddle).await;
    settle(server, &storms).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adjustments_are_made_once_through_the_death_of_a_master() {
    databases::run(Fresh::postgres().await, adjustments_through_a_death).await;
}

/// The identity under which a script runs that has this key.
async fn identity_at(engine: &RedisEngine, key: &str) -> Result<String, EngineError> {
    let keys = Arc::from([key.to_owned()]);
    match engine.eval(Call { script: IDENTITY, keys, args: Vec::new() }).await? {
        Value::Bulk(text) => Ok(String::from_utf8(text).unwrap()),
        other => panic!("no identity: {other:?}"),
    }
}

async fn run_id(server: &RedisServer) -> String {
    let info: String = server.command(&["INFO", "server"]).await;
    let line = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap();
    line.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_runs_at_the_master_of_its_keys_and_under_its_identity() {
    let cluster = Cluster::start().await;
    let engine = cluster.engine().await;
    let mut owners = Vec::new();
    for at in 0..20 {
        let key = format!("sk:{{{at}}}");
        let owner = run_id(&cluster.servers[cluster.owner_of(&key).await]).await;
        owners.push((key, owner));
    }
    let known = cluster.errors("MOVED").await;
    for (key, owner) in owners {
        let identity = identity_at(&engine, &key).await.unwrap();
        assert!(identity.starts_with(&owner), "{identity}");
    }
    assert_eq!(cluster.errors("MOVED").await, known, "nobody had to be told");

    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    assert_eq!(answer(&segment.reserve(&engine, "ann").await.unwrap()), "taken");
    let stock = segment.0[0].as_str();
    let (slot, from) = (cluster.slot_of(stock).await, cluster.owner_of(stock).await);
    let to = (from + 1) % 3;
    let known = cluster.errors("MOVED").await;
    cluster.open_slot(&slot, from, to).await;

    // ASK: a key that is not there is asked for where the slot moves, under that identity.
    let tag = stock.strip_suffix("stock").unwrap();
    let asked = identity_at(&engine, &format!("{tag}none")).await.unwrap();
    assert!(asked.starts_with(&run_id(&cluster.servers[to]).await), "{asked}");
    assert!(cluster.errors("ASK").await > 0);

    // TRYAGAIN: some keys have gone. Nobody can run the script, and nothing changes.
    cluster.carry(stock, from, to).await;
    let refused = segment.reserve(&engine, "bob").await.unwrap_err();
    assert!(matches!(&refused, EngineError::Full(text) if text.contains("TRYAGAIN")), "{refused}");
    assert!(cluster.errors("TRYAGAIN").await > 0);

    // MOVED: the other server has all of it, and did not write it.
    cluster.carry_all(&slot, from, to).await;
    cluster.close_slot(&slot, from, to).await;
    assert_eq!(cluster.errors("MOVED").await, known);
    let Value::Array(frozen) = segment.reserve(&engine, "bob").await.unwrap() else { panic!() };
    assert_eq!((&frozen[0], &frozen[3]), (&word("frozen"), &word("server")));
    assert_eq!(cluster.errors("MOVED").await, known + 1, "and the map is another one now");
    let held: i64 = cluster.servers[to].command(&["HLEN", &segment.0[2]]).await;
    assert_eq!(held, 1, "ann alone");

    // CLUSTERDOWN: nobody has the slot any more.
    cluster.servers[to].command::<()>(&["CLUSTER", "DELSLOTS", &slot]).await;
    let down = eventually("the member says so", async || {
        let error = segment.reserve(&engine, "bob").await.err()?;
        error.to_string().contains("CLUSTERDOWN").then_some(error)
    });
    let down = down.await;
    assert!(matches!(down, EngineError::PartAway(_)), "{down}");
    engine.probe().await.unwrap();
    let held: i64 = cluster.servers[to].command(&["DBSIZE"]).await;
    assert!(held > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_member_is_checked_before_a_start_and_a_user_needs_no_more_than_is_documented() {
    let mut cluster = Cluster::start().await;
    for server in &cluster.servers {
        let rules = "~sk:* &sk:events +@read +@write +@scripting +@connection +@pubsub -@dangerous \
                     +info +config|get +cluster|info +cluster|slots";
        let set = ["ACL", "SETUSER", "sales", "on", ">pw"].into_iter().chain(rules.split(' '));
        server.command::<()>(&set.collect::<Vec<_>>()).await;
    }
    let settings = RedisSettings::new(cluster.url_of("sales:pw@"));
    let findings = RedisEngine::check(&settings).await.unwrap();
    let texts: Vec<_> = findings.iter().map(|finding| finding.text.as_str()).collect();
    assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{texts:?}");
    assert!(texts.contains(&"the cluster is well: 3 masters, 3 replicas"), "{texts:?}");
    assert!(texts.contains(&"all 6 servers: no key is evicted"), "{texts:?}");

    // Sales, locks and messages work for that user, in every slot.
    let engine: Arc<dyn Engine> = Arc::new(RedisEngine::connect(&settings).await.unwrap());
    let mut ear = engine.hear();
    assert_eq!(ear.next().await, Some(Heard::Gap));
    for at in 0..8 {
        let segment = Segment::of("1111", &format!("s-{at}"));
        segment.warm_up(&*engine, 1).await;
        assert_eq!(answer(&segment.reserve(&*engine, "ann").await.unwrap()), "taken");
        assert_eq!(answer(&segment.reserve(&*engine, "bob").await.unwrap()), "sold_out");
        assert_eq!(status(&segment.release(&*engine, "ann").await.unwrap()), "released");
        // The release tells that there are units again, whichever server the ear is at.
        let Some(Heard::Message(message)) = ear.next().await else { panic!("nothing was told") };
        assert!(matches!(Event::read(&message), Some(Event::Reopened { .. })));
        let purge = segment.eval(&*engine, scripts::PURGE, vec![arg(9)]).await.unwrap();
        assert_eq!(status(&purge), "purged");
    }
    let (locks, tasks) = (Locks::new(engine.clone(), TaskTracker::new()), 0..8);
    for at in tasks {
        let name = format!("lock-{at}");
        let lock = locks.acquire(&name, WAIT).await.unwrap().expect("nobody has it");
        assert!(locks.acquire(&name, Duration::ZERO).await.unwrap().is_none(), "it is held");
        drop(lock);
    }

    let (coverage, one) = ("cluster-require-full-coverage", &cluster.servers[1]);
    one.command::<()>(&["CONFIG", "SET", coverage, "yes"]).await;
    let findings = RedisEngine::check(&settings).await.unwrap();
    let warnings = findings.iter().filter(|finding| finding.level == Level::Warning);
    let warnings: Vec<_> = warnings.map(|finding| finding.text.as_str()).collect();
    assert!(matches!(warnings[..], [warning] if warning.contains(coverage)), "{warnings:?}");

    let replica = &cluster.servers[5];
    replica.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    let error = RedisEngine::connect(&settings).await.unwrap_err();
    assert!(matches!(error, OpenError::Misconfigured(_)), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{}", replica.port())), "{error}");
    replica.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    // A server that is started while a master is away sells what the others have.
    cluster.replica_of(2).signal("STOP");
    let missing = format!("127.0.0.1:{}: what it has is not sold", cluster.servers[2].port());
    cluster.servers[2].kill();
    let findings = RedisEngine::check(&settings).await.unwrap();
    let is_said = |finding: &Finding| finding.text.starts_with(&missing);
    assert!(findings.iter().any(is_said), "{findings:?}");
    RedisEngine::connect(&settings).await.unwrap();

    // One member alone is not the cluster.
    let alone = RedisSettings::new(cluster.servers[0].url());
    let error = RedisEngine::connect(&alone).await.unwrap_err();
    assert!(error.to_string().contains("redis-cluster"), "{error}");
    let standalone = RedisServer::start().await;
    let url = standalone.url().replace("redis://", "redis-cluster://");
    let error = RedisEngine::connect(&RedisSettings::new(url)).await.unwrap_err();
    assert!(error.to_string().contains("no member of a cluster"), "{error}");
}
