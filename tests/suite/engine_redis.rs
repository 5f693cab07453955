//! The engine on Redis while things go wrong around it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use seckill::engine::{
    Call, Engine, EngineError, Script, Value,
    embedded::EmbeddedEngine,
    redis::{Level, OpenError, RedisEngine, RedisSettings},
    scripts,
};
use tokio::task::JoinSet;

use crate::support::{
    Segment, answer, arg, eventually, identity, redis_server::RedisServer, status, within, word,
};

/// Replies what it was given.
const ECHO: Script = Script { name: "echo", source: "return ARGV[2]" };

async fn echo(engine: &dyn Engine, number: usize) -> Result<Value, EngineError> {
    let keys = Arc::from([format!("sk:{{echo:{number}}}")]);
    engine.eval(Call { script: ECHO, keys, args: vec![arg(number)] }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_survive_script_flush_under_64_concurrent_calls() {
    let server = RedisServer::start().await;
    let engine = Arc::new(server.engine().await);
    let segment = Segment::of("1111", "a");
    segment.warm_up(&*engine, 10_000).await;
    let done = Arc::new(AtomicBool::new(false));
    let mut buyers = JoinSet::new();
    for task in 0..64 {
        let (engine, segment) = (Arc::clone(&engine), segment.clone());
        buyers.spawn(async move {
            for turn in 0..40 {
                let reply = segment.reserve(&*engine, &format!("b-{task}-{turn}")).await.unwrap();
                assert_eq!(answer(&reply), "taken");
            }
        });
    }
    let flushes = async {
        let mut flushes = 0;
        while !done.load(Ordering::Relaxed) {
            let () = server.command(&["SCRIPT", "FLUSH"]).await;
            flushes += 1;
        }
        flushes
    };
    let bought = async {
        while let Some(task) = buyers.join_next().await {
            task.unwrap();
        }
        done.store(true, Ordering::Relaxed);
    };
    let (flushes, ()) = tokio::join!(flushes, bought);
    assert!(flushes > 3, "only {flushes} flushes in the meantime");
    let left: u64 = server.command(&["GET", &segment.0[0]]).await;
    assert_eq!(left, 10_000 - 64 * 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_units_are_taken_by_64_tasks_and_never_more() {
    let server = RedisServer::start().await;
    let engines: [Arc<dyn Engine>; 2] =
        [Arc::new(server.engine().await), Arc::new(EmbeddedEngine::new())];
    for engine in engines {
        let segment = Segment::of("1111", "a");
        segment.warm_up(&*engine, 1_000).await;
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            let (engine, segment) = (Arc::clone(&engine), segment.clone());
            tasks.spawn(async move {
                let mut answers = BTreeMap::<String, usize>::new();
                for turn in 0..50 {
                    // Every buyer comes through two tasks.
                    let buyer = format!("b-{}", (task * 50 + turn) % 1_600);
                    let reply = segment.reserve(&*engine, &buyer).await.unwrap();
                    *answers.entry(answer(&reply)).or_default() += 1;
                }
                answers
            });
        }
        let mut answers = BTreeMap::<String, usize>::new();
        while let Some(task) = tasks.join_next().await {
            for (answer, count) in task.unwrap() {
                *answers.entry(answer).or_default() += count;
            }
        }
        assert_eq!(answers["taken"], 1_000, "{}: {answers:?}", engine.kind());
        assert_eq!(answers["taken"] + answers["replayed"] + answers["sold_out"], 64 * 50);
    }
}

#[tokio::test]
async fn a_demoted_server_runs_nothing_and_the_engine_works_again_after_its_promotion() {
    let (server, other) = tokio::join!(RedisServer::start(), RedisServer::start());
    let engine = server.engine().await;
    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    let before = identity(&engine).await.unwrap();

    let port = other.port().to_string();
    let () = server.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    for turn in 0..20 {
        match segment.reserve(&engine, &format!("b-{turn}")).await {
            Err(refused) => assert!(matches!(refused, EngineError::NotRun(_)), "{refused}"),
            // Once it has taken over the other's data there is nothing here to write to.
            Ok(reply) => assert_eq!(status(&reply), "not_warmed"),
        }
    }
    assert!(matches!(engine.probe().await, Err(EngineError::NotRun(_))));

    let () = server.command(&["REPLICAOF", "NO", "ONE"]).await;
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    let after = identity(&engine).await.unwrap();
    assert_ne!(before, after, "a promotion makes another server");
    let () = server.command(&["FLUSHALL"]).await;
    segment.warm_up(&engine, 10).await;
    assert_eq!(answer(&segment.reserve(&engine, "ann").await.unwrap()), "taken");
}

#[tokio::test]
async fn a_redis_that_was_killed_is_usable_within_two_seconds_of_its_return() {
    let mut server = RedisServer::start_with_aof().await;
    let engine = server.engine().await;
    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    assert_eq!(answer(&segment.reserve(&engine, "ann").await.unwrap()), "taken");

    server.kill();
    let away = tokio::time::Instant::now();
    for turn in 0..50 {
        let lost = segment.reserve(&engine, &format!("b-{turn}")).await.unwrap_err();
        assert!(!matches!(lost, EngineError::Script(_)), "{lost}");
    }
    assert!(away.elapsed() < Duration::from_secs(2), "callers waited: {:?}", away.elapsed());

    server.start_again().await;
    let reply = within(Duration::from_secs(2), "the engine runs scripts", async || {
        segment.reserve(&engine, "eve").await.ok()
    })
    .await;
    // The data is there and was written under another identity: a fact to be rebuilt from.
    let Value::Array(items) = reply else { panic!("{reply:?}") };
    assert_eq!((&items[0], &items[3]), (&word("frozen"), &word("server")));
}

#[tokio::test]
async fn a_restart_while_nobody_calls_costs_no_call() {
    let mut server = RedisServer::start().await;
    let engine = server.engine().await;
    let before = identity(&engine).await.unwrap();
    server.restart().await;
    let after =
        eventually("the connection is known to be gone", async || identity(&engine).await.ok())
            .await;
    assert_ne!(before, after);
    engine.probe().await.unwrap();
}

#[tokio::test]
async fn a_late_answer_is_unknown_and_never_becomes_the_answer_of_another_call() {
    let server = RedisServer::start().await;
    let settings = RedisSettings { response_timeout_ms: 150, ..RedisSettings::new(server.url()) };
    let engine = Arc::new(RedisEngine::connect(&settings).await.unwrap());
    assert_eq!(echo(&*engine, 0).await, Ok(word(0)));

    let sleep = server.command::<()>(&["DEBUG", "SLEEP", "0.8"]);
    let calls = async {
        let unknown =
            eventually("a call is not answered in time", async || echo(&*engine, 0).await.err())
                .await;
        assert!(matches!(unknown, EngineError::Unknown(_)), "{unknown}");
        let mut tasks = JoinSet::new();
        for number in 1..100 {
            let engine = Arc::clone(&engine);
            tasks.spawn(async move { (number, echo(&*engine, number).await) });
        }
        while let Some(task) = tasks.join_next().await {
            let (number, reply) = task.unwrap();
            match reply {
                Ok(reply) => assert_eq!(reply, word(number)),
                Err(EngineError::Unknown(_) | EngineError::NotRun(_) | EngineError::Full(_)) => {}
                Err(error @ (EngineError::PartAway(_) | EngineError::Script(_))) => {
                    panic!("{error}")
                }
            }
        }
    };
    tokio::join!(sleep, calls);
    eventually("the engine is well", async || engine.probe().await.ok()).await;
    for number in 100..600 {
        assert_eq!(echo(&*engine, number).await, Ok(word(number)));
    }
}

#[tokio::test]
async fn an_engine_that_missed_a_change_of_identity_reads_it_again_and_repeats_the_call() {
    let server = RedisServer::start().await;
    let stale = server.engine().await;
    let before = identity(&stale).await.unwrap();
    let () = server.command(&["DEBUG", "CHANGE-REPL-ID"]).await;
    let fresh = server.engine().await;
    assert_ne!(before, identity(&fresh).await.unwrap());

    let segment = Segment::of("1111", "a");
    segment.warm_up(&fresh, 10).await;
    assert_eq!(answer(&segment.reserve(&stale, "ann").await.unwrap()), "taken");
    assert_eq!(status(&segment.release(&stale, "ann").await.unwrap()), "released");
}

#[tokio::test]
async fn without_memory_reserve_changes_nothing_and_release_still_works() {
    let server = RedisServer::start().await;
    let engine = server.engine().await;
    let segment = Segment::of("1111", "a");
    segment.warm_up(&engine, 10).await;
    assert_eq!(answer(&segment.reserve(&engine, "ann").await.unwrap()), "taken");
    let before = server.dump().await;

    let () = server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = segment.reserve(&engine, "bob").await.unwrap_err();
    assert!(matches!(&refused, EngineError::Full(text) if text.starts_with("OOM")), "{refused}");
    assert_eq!(server.dump().await, before, "nothing changed");
    assert_eq!(status(&segment.release(&engine, "ann").await.unwrap()), "released");

    let () = server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    let levels = segment.eval(&engine, scripts::LEVELS, vec![]).await.unwrap();
    let Value::Array(levels) = levels else { panic!("{levels:?}") };
    assert_eq!(levels[3], Value::Int(10));
}

#[tokio::test]
async fn a_server_that_may_evict_keys_is_refused_at_start() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let error = RedisEngine::connect(&RedisSettings::new(server.url())).await.unwrap_err();
    assert!(matches!(error, OpenError::Misconfigured(_)), "{error}");
    assert!(error.to_string().contains("set maxmemory-policy noeviction"), "{error}");
}

#[tokio::test]
async fn a_replica_is_refused_at_start() {
    let (server, other) = tokio::join!(RedisServer::start(), RedisServer::start());
    let port = other.port().to_string();
    let () = server.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    let error = RedisEngine::connect(&RedisSettings::new(server.url())).await.unwrap_err();
    assert!(error.to_string().contains("replica"), "{error}");
}

#[tokio::test]
async fn a_server_that_does_not_allow_config_is_taken_with_a_warning() {
    let server = RedisServer::start_with_aof().await;
    let () =
        server.command(&["ACL", "SETUSER", "sales", "on", ">pw", "~*", "+@all", "-config"]).await;
    let settings = RedisSettings::new(format!("redis://sales:pw@127.0.0.1:{}", server.port()));
    let findings = RedisEngine::check(&settings).await.unwrap();
    let warnings: Vec<_> = findings.iter().filter(|f| f.level == Level::Warning).collect();
    assert!(matches!(&warnings[..], [one] if one.text.contains("CONFIG GET")), "{findings:?}");
    let engine = RedisEngine::connect(&settings).await.unwrap();
    assert_eq!(echo(&engine, 1).await, Ok(word(1)));
}

#[tokio::test]
async fn no_error_holds_the_password() {
    let server = RedisServer::start_with(&["--requirepass", "right-horse"]).await;
    let url = format!("redis://:wrong-horse@127.0.0.1:{}", server.port());
    let error = RedisEngine::connect(&RedisSettings::new(url)).await.unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("WRONGPASS"), "{error}");
    assert!(!format!("{error} {error:?}").contains("horse"), "{error:?}");

    let url = format!("redis://:right-horse@127.0.0.1:{}", server.port());
    let engine = RedisEngine::connect(&RedisSettings::new(url)).await.unwrap();
    assert!(!format!("{engine:?}").contains("horse"));
}

#[tokio::test]
async fn nobody_listening_is_told_with_the_address() {
    let mut server = RedisServer::start().await;
    server.kill();
    let error = RedisEngine::connect(&RedisSettings::new(server.url())).await.unwrap_err();
    let address = format!("127.0.0.1:{}", server.port());
    assert!(error.to_string().contains(&address), "{error}");
}
