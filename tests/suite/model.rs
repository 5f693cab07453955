//! Random sequences of calls, faults and repairs on two servers, against a small model.
//!
//! Each step is a call or something that happens to a server, to the engine or to time. The model
//! knows what must be answered and what the books must show; a sequence that ends in a
//! contradiction is shrunk and kept in `proptest-regressions/`, and runs first from then on.
//!
//! No worker runs beside the steps, and a step ends when nothing moves any more, so a sequence
//! always goes the same way.

use proptest::{
    collection,
    prelude::{Just, Strategy, any, prop_oneof},
    test_runner::{Config, FileFailurePersistence, TestCaseError, TestRunner},
};

use crate::support::databases::{self, Fresh};

mod asked;
mod engine;
mod expected;
mod real;

use engine::{Kind, Stage};
use expected::Id;

/// Steps of all sequences together on one engine and SQLite, unless SECKILL_MODEL_STEPS says how many.
const STEPS: u32 = 5_200;
/// The longest sequence.
const LONGEST: u32 = 80;

const BUYERS: u8 = 4;
const REQUESTS: u8 = 3;
/// An offer has one, or so many: then most homes have too few, and nobody has as many as she may ask
/// for once each has sold something.
const MOST_SEGMENTS: u32 = 3;

/// What fails on the way of a Reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReserveFault {
    None,
    /// The server dies after the script: nobody has its reply.
    ReplyLost,
    /// The server dies before it tells the engine that SQL has the row.
    NotAcknowledged,
}

/// What fails on the way of a Release, behind its commit in SQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReleaseFault {
    None,
    NotRun,
    ReplyLost,
}

/// How the engine loses something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Everything,
    /// It restarts: empty, or with what it had on disk.
    Restart,
    /// It goes back by so many steps, with another identity if it failed over.
    GoesBack {
        steps: usize,
        failed_over: bool,
    },
}

#[derive(Debug, Clone)]
enum Step {
    Reserve {
        server: usize,
        id: Id,
        quantity: u32,
        fault: ReserveFault,
    },
    Release {
        server: usize,
        buyer: u8,
        id: Id,
        fault: ReleaseFault,
    },
    Confirm {
        server: usize,
        buyer: u8,
        id: Id,
    },
    GetByRequest {
        server: usize,
        id: Id,
    },
    GetById {
        server: usize,
        id: Id,
    },
    WarmUp {
        server: usize,
    },
    Status {
        server: usize,
    },
    Poll {
        server: usize,
    },
    Sweep {
        server: usize,
    },
    Expire {
        server: usize,
    },
    /// Every hold that runs now is over.
    HoldsEnd,
    /// A row that waits for its order has used up its attempts.
    DeadLetter {
        id: Id,
    },
    Lose(Loss),
    /// A server dies while it moves units to another segment: it has sent them off, they have
    /// arrived, or they are forgotten where they were.
    Transfer {
        server: usize,
        source: u32,
        target: u32,
        scripts: u8,
    },
    Balance {
        server: usize,
    },
    /// A server dies between two calls, and another one starts in its place.
    Crash {
        server: usize,
    },
    End {
        server: usize,
    },
}

fn id() -> impl Strategy<Value = Id> {
    (0..BUYERS, 0..REQUESTS).prop_map(|(buyer, request)| Id { buyer, request })
}

fn server() -> impl Strategy<Value = usize> {
    0..2usize
}

/// Most often the buyer whose reservation it is.
fn owned() -> impl Strategy<Value = (u8, Id)> {
    (id(), 0..BUYERS, 0..8u8)
        .prop_map(|(id, other, odd)| (if odd == 0 { other } else { id.buyer }, id))
}

fn step() -> impl Strategy<Value = Step> {
    let reserve_fault = prop_oneof![
        6 => Just(ReserveFault::None),
        1 => Just(ReserveFault::ReplyLost),
        1 => Just(ReserveFault::NotAcknowledged),
    ];
    let release_fault = prop_oneof![
        4 => Just(ReleaseFault::None),
        1 => Just(ReleaseFault::NotRun),
        1 => Just(ReleaseFault::ReplyLost),
    ];
    let loss = prop_oneof![
        2 => Just(Loss::Everything),
        2 => Just(Loss::Restart),
        3 => (1..4usize, any::<bool>())
            .prop_map(|(steps, failed_over)| Loss::GoesBack { steps, failed_over }),
    ];
    prop_oneof![
        16 => (server(), id(), 1..4u32, reserve_fault).prop_map(|(server, id, quantity, fault)| {
            // One unit more often than not, and now and then more than is allowed.
            Step::Reserve { server, id, quantity: [1, 1, 2, 3][quantity as usize], fault }
        }),
        8 => (server(), owned(), release_fault)
            .prop_map(|(server, (buyer, id), fault)| Step::Release { server, buyer, id, fault }),
        4 => (server(), owned())
            .prop_map(|(server, (buyer, id))| Step::Confirm { server, buyer, id }),
        2 => (server(), id()).prop_map(|(server, id)| Step::GetByRequest { server, id }),
        1 => (server(), id()).prop_map(|(server, id)| Step::GetById { server, id }),
        1 => server().prop_map(|server| Step::WarmUp { server }),
        1 => server().prop_map(|server| Step::Status { server }),
        5 => server().prop_map(|server| Step::Poll { server }),
        3 => server().prop_map(|server| Step::Sweep { server }),
        3 => server().prop_map(|server| Step::Expire { server }),
        2 => Just(Step::HoldsEnd),
        1 => id().prop_map(|id| Step::DeadLetter { id }),
        4 => loss.prop_map(Step::Lose),
        2 => server().prop_map(|server| Step::Crash { server }),
        4 => (server(), 0..MOST_SEGMENTS, 1..MOST_SEGMENTS, 1..=3u8)
            .prop_map(|(server, source, far, scripts)| {
                Step::Transfer { server, source, target: (source + far) % MOST_SEGMENTS, scripts }
            }),
        1 => server().prop_map(|server| Step::Balance { server }),
    ]
}

/// Of how many segments the offer is, and what happens. The sale ends in some of the sequences only,
/// and never at once.
fn sequence() -> impl Strategy<Value = (u32, Vec<Step>)> {
    let segments = prop_oneof![2 => Just(1), 1 => Just(MOST_SEGMENTS)];
    let steps = collection::vec(step(), 1..LONGEST as usize);
    (segments, steps, 0..4u8, server()).prop_map(|(segments, mut steps, ends, server)| {
        if ends == 0 {
            steps.insert(steps.len() * 3 / 4, Step::End { server });
        }
        (segments, steps)
    })
}

/// Runs sequences of so many steps together.
fn run(steps: u32, engine: Kind, fresh: impl AsyncFn() -> Fresh) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/proptest-regressions/model.txt");
    let mut runner = TestRunner::new(Config {
        cases: steps.div_ceil(LONGEST / 2),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(kept))),
        max_shrink_time: 120_000,
        max_shrink_iters: 4_000,
        ..Config::default()
    });
    let stage = runtime.block_on(Stage::open(engine));
    let outcome = runner.run(&sequence(), |(segments, steps)| {
        runtime.block_on(async {
            let mut outcome = Ok(());
            let test =
                async |fresh: &Fresh| outcome = real::run(&stage, fresh, segments, &steps).await;
            databases::run(fresh().await, test).await;
            outcome.map_err(TestCaseError::fail)
        })
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

fn steps() -> u32 {
    match std::env::var("SECKILL_MODEL_STEPS") {
        Ok(steps) => steps.parse().expect("SECKILL_MODEL_STEPS is a number of steps"),
        Err(_) => STEPS,
    }
}

mod random_calls_and_faults_are_answered_as_the_model_says {
    use super::*;

    #[test]
    fn embedded_sqlite() {
        run(steps(), Kind::Embedded, Fresh::sqlite);
    }

    #[test]
    fn redis_sqlite() {
        run(steps(), Kind::Redis, Fresh::sqlite);
    }

    // A database of a server is slow to make, and the model is the same.
    #[test]
    fn redis_postgres() {
        run(steps() / 20, Kind::Redis, Fresh::postgres);
    }

    #[test]
    fn redis_mysql() {
        run(steps() / 20, Kind::Redis, Fresh::mysql);
    }
}
