//! The clients of examples/, as a user builds and runs them.

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use sea_orm::ConnectionTrait as _;
use seckill::{
    api::pb,
    config::{Role, Token, digest},
    domain::OfferKey,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::OnceCell,
    time::timeout,
};

use crate::{
    clients::python,
    support::{
        calls::{Win, assert_books, drained},
        certs::Authority,
        databases::{self, Fresh},
        process::Serve,
        scrape,
        wire::Wire,
        world::{Ground, SKU, Sale},
    },
};

const LIMIT: Duration = Duration::from_secs(60);
const BUYER: &str = "u1";

#[derive(Debug, Clone, Copy)]
enum Language {
    Python,
    TypeScript,
}

/// Makes a test of each for every language that runs here.
macro_rules! in_every_language {
    ($(async fn $name:ident($language:ident: Language) $body:block)*) => {$(
        mod $name {
            use super::*;

            async fn test($language: Language) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn python() {
                test(Language::Python).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn typescript() {
                test(Language::TypeScript).await;
            }
        }
    )*};
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// Runs what a README tells to run before the client.
async fn prepare(command: &mut Command) {
    let output = timeout(LIMIT, command.output()).await.expect("it ends").unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {output:?}; scripts/install-services installs what it needs"
    );
}

impl Language {
    /// The client, built once.
    async fn client(self) -> Command {
        static PYTHON: OnceCell<()> = OnceCell::const_new();
        static TYPESCRIPT: OnceCell<()> = OnceCell::const_new();
        match self {
            Self::Python => {
                let generate = async || {
                    let script = folder("python").join("generate");
                    prepare(Command::new(script).env("PYTHON", python())).await;
                };
                PYTHON.get_or_init(generate).await;
                let mut client = Command::new(python());
                client.arg(folder("python").join("client.py"));
                client.env("PYTHONDONTWRITEBYTECODE", "1");
                client
            }
            Self::TypeScript => {
                let build = async || {
                    let mut npm = Command::new("npm");
                    prepare(npm.args(["run", "build"]).current_dir(folder("node"))).await;
                };
                TYPESCRIPT.get_or_init(build).await;
                let mut client = Command::new("node");
                client.arg(folder("node").join("dist/src/client.js"));
                client
            }
        }
    }

    async fn buy(self, address: impl ToString, more: &[&str]) -> Output {
        self.buy_with(address, more, &[]).await
    }

    async fn buy_with(
        self,
        address: impl ToString,
        more: &[&str],
        variables: &[(&str, &str)],
    ) -> Output {
        let mut client = self.client().await;
        client.args(["buy", &address.to_string(), "sale", SKU, BUYER]).args(more);
        client.envs(variables.iter().copied());
        timeout(LIMIT, client.kill_on_drop(true).output()).await.expect("it ends").unwrap()
    }

    async fn watch(self, address: impl ToString) -> Watch {
        let mut client = self.client().await;
        client.args(["watch", &address.to_string(), "sale"]);
        let mut child = client
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Watch { child, lines }
    }
}

/// A client that watches.
struct Watch {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watch {
    /// Reads on to this line.
    async fn sees(&mut self, expected: &str) {
        let reading = async {
            loop {
                let line = self.lines.next_line().await.unwrap();
                let line = line.unwrap_or_else(|| panic!("it ended before {expected}"));
                if line == expected {
                    return;
                }
            }
        };
        timeout(LIMIT, reading).await.unwrap_or_else(|_| panic!("never seen: {expected}"));
    }

    /// Ends it, and answers what it had to say on the way.
    async fn errors(mut self) -> String {
        self.child.start_kill().unwrap();
        let output = self.child.wait_with_output().await.unwrap();
        String::from_utf8(output.stderr).unwrap()
    }
}

fn printed(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The lines of a client, with the order's number cut out of the first.
fn lines_and_order(output: &Output) -> (Vec<String>, String) {
    let text = printed(output);
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let (first, order) = lines[0].split_once(", order ").unwrap_or_else(|| panic!("{output:?}"));
    let order = order.to_owned();
    lines[0] = first.to_owned();
    (lines, order)
}

async fn open_sale(ground: &Ground<'_>) -> OfferKey {
    let world = ground.world().await;
    let key = world.open_sale(&Sale { max_orders: 3, ..Sale::default() }).await;
    world.close().await;
    key
}

in_every_language! {
    async fn the_example_buys_once_though_the_server_dies_before_it_answers(language: Language) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let key = open_sale(&ground).await;
            let serve = Serve::over(&ground.settings());
            // The unit is taken and recorded, and nobody is told.
            let mut dying = serve.clone().dying("after_outbox_commit", 1).start().await;
            let wire = Wire::to(dying.addr).await;
            let mut watch = language.watch(wire.addr).await;
            watch.sees("sku-1 remaining=10 reserved=0").await;

            let buying = async { language.buy(wire.addr, &["--request-id", "r1"]).await };
            let restarting = async {
                dying.crashed().await;
                let process = serve.start().await;
                wire.lead_to(process.addr);
                process
            };
            let (bought, mut process) = tokio::join!(buying, restarting);
            assert!(bought.status.success(), "{bought:?}");
            let (lines, order_no) = lines_and_order(&bought);
            assert_eq!(lines, ["reserve: RESERVED again", "payment: paid", "confirm: CONFIRMED"]);
            watch.sees("sku-1 remaining=9 reserved=1").await;
            let said = watch.errors().await;
            assert!(said.contains("calling again"), "{said}");

            let mut seckill = process.seckill().await;
            let by = Some(pb::get_reservation_request::By::Key(pb::ReservationKey {
                activity_id: "sale".into(),
                sku_id: SKU.into(),
                user_id: BUYER.into(),
                request_id: "r1".into(),
            }));
            let answer = seckill.get_reservation(pb::GetReservationRequest { by }).await.unwrap();
            let reservation = answer.into_inner().reservation.unwrap();
            assert_eq!(reservation.state(), pb::ReservationState::Confirmed);
            drained(process.channel().await, &key).await;
            process.stop().await;
            let reservation_id = reservation.reservation_id;
            let win = Win { buyer: BUYER.into(), reservation_id, order_no };
            assert_books(&ground, &key, &[win]).await;
        })
        .await;
    }

    async fn the_example_finds_what_it_won_though_the_sale_was_paused_meanwhile(
        language: Language
    ) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let key = open_sale(&ground).await;
            let serve = Serve::over(&ground.settings());
            let mut dying = serve.clone().dying("after_outbox_commit", 1).start().await;
            let wire = Wire::to(dying.addr).await;
            let buying = async { language.buy(wire.addr, &["--request-id", "r1"]).await };
            let restarting = async {
                dying.crashed().await;
                let world = ground.world().await;
                world.parts.activities.pause(&key.activity_id, "ann", "").await.unwrap();
                world.close().await;
                let process = serve.start().await;
                wire.lead_to(process.addr);
                process
            };
            let (bought, mut process) = tokio::join!(buying, restarting);
            assert!(bought.status.success(), "{bought:?}");
            let (lines, _) = lines_and_order(&bought);
            assert_eq!(lines, ["reserve: RESERVED again", "payment: paid", "confirm: CONFIRMED"]);
            let late = language.buy(wire.addr, &["--request-id", "r2"]).await;
            assert_eq!(late.status.code(), Some(1), "{late:?}");
            assert_eq!(printed(&late), "reserve: PAUSED\n");
            drained(process.channel().await, &key).await;
            process.stop().await;
            let world = ground.world().await;
            assert_eq!(world.live_orders(&key).await.len(), 1);
            world.close().await;
        })
        .await;
    }

    async fn the_example_releases_before_it_refunds(language: Language) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let key = open_sale(&ground).await;
            let no_orders = "CREATE TRIGGER no_orders BEFORE INSERT ON orders BEGIN \
                             SELECT RAISE(ABORT, 'in the way'); END";
            fresh.writer().execute_unprepared(no_orders).await.unwrap();
            let mut process = Serve::over(&ground.settings()).start().await;
            let impatient = [("SECKILL_GIVE_UP_S", "1")];
            let bought = language.buy_with(process.addr, &[], &impatient).await;
            assert_eq!(bought.status.code(), Some(1), "{bought:?}");
            let (lines, _) = lines_and_order(&bought);
            assert_eq!(
                lines,
                [
                    "reserve: RESERVED",
                    "payment: paid",
                    "confirm: NOT_ORDERED_YET",
                    "release: RELEASED",
                    "payment: refunded",
                ]
            );
            // From now on it could become an order, if it were still there.
            fresh.writer().execute_unprepared("DROP TRIGGER no_orders").await.unwrap();
            drained(process.channel().await, &key).await;
            process.stop().await;
            assert_books(&ground, &key, &[]).await;
        })
        .await;
    }

    async fn the_example_gives_back_what_is_not_paid(language: Language) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let key = open_sale(&ground).await;
            let mut process = Serve::over(&ground.settings()).start().await;
            let failed = language.buy(process.addr, &["--payment-fails"]).await;
            assert!(failed.status.success(), "{failed:?}");
            let (lines, _) = lines_and_order(&failed);
            assert_eq!(lines, ["reserve: RESERVED", "payment: failed", "release: RELEASED"]);
            drained(process.channel().await, &key).await;
            process.stop().await;
            assert_books(&ground, &key, &[]).await;
        })
        .await;
    }

    async fn the_example_waits_as_long_as_the_server_says(language: Language) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let mut ground = Ground::redis(fresh).await;
            open_sale(&ground).await;
            let mut process = Serve::over(&ground.settings())
                .with("HTTP__ADDR", "127.0.0.1:0")
                .with("LIMITS__USER_ATTEMPTS", 1)
                .with("LIMITS__USER_WINDOW_MS", 6_000)
                .start()
                .await;
            // Built before the window begins.
            language.client().await;
            let first = language.buy(process.addr, &[]).await;
            assert!(first.status.success(), "{first:?}");
            let second = language.buy(process.addr, &[]).await;
            assert!(second.status.success(), "{second:?}");
            assert_eq!(lines_and_order(&second).0[0], "reserve: RESERVED");
            let metrics = scrape::metrics(process.http_addr()).await;
            let refused = metrics[r#"seckill_reserve_errors_total{reason="rate_limited"}"#];
            // A client that did not wait would have come more often.
            assert!((1.0..=5.0).contains(&refused), "refused {refused} times");
            process.stop().await;
            ground.redis.as_mut().unwrap().kill();
        })
        .await;
    }

    async fn the_example_calls_over_tls_with_a_token(language: Language) {
        const TOKEN: &str = "a-token-of-the-tests";
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let key = open_sale(&ground).await;
            let folder = tempfile::tempdir().unwrap();
            let authority = Authority::new("servers");
            let (cert, certs_key) = authority.for_server().write(folder.path());
            let ca = folder.path().join("ca.pem");
            std::fs::write(&ca, &authority.pem).unwrap();
            let (name, digest) = ("shop".into(), digest(TOKEN.as_bytes()));
            let token = Token { name, role: Role::Order, digest };
            let mut process = Serve::over(&ground.settings())
                .with("TLS__CERT_FILE", cert.display())
                .with("TLS__KEY_FILE", certs_key.display())
                .with("AUTH__TOKENS", token.entry().unwrap())
                .start()
                .await;
            let address = format!("localhost:{}", process.addr.port());
            let ca = ca.display().to_string();
            let over_tls = ("SECKILL_CA_FILE", ca.as_str());
            let stranger = language.buy_with(&address, &[], &[over_tls]).await;
            assert_eq!(stranger.status.code(), Some(1), "{stranger:?}");
            let said = String::from_utf8_lossy(&stranger.stderr);
            assert!(said.starts_with("UNAUTHENTICATED"), "{said}");
            let variables = [over_tls, ("SECKILL_TOKEN", TOKEN)];
            let bought = language.buy_with(&address, &[], &variables).await;
            assert!(bought.status.success(), "{bought:?}");
            assert_eq!(lines_and_order(&bought).0[2], "confirm: CONFIRMED");
            process.stop().await;
            let world = ground.world().await;
            assert_eq!(world.live_orders(&key).await.len(), 1);
            world.close().await;
        })
        .await;
    }

    async fn the_example_takes_no_for_an_answer(language: Language) {
        databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
            let ground = Ground::embedded(fresh);
            let world = ground.world().await;
            let key = world.open_sale(&Sale::default()).await;
            world.close().await;
            let mut process = Serve::over(&ground.settings()).start().await;
            let bought = language.buy(process.addr, &[]).await;
            assert!(bought.status.success(), "{bought:?}");
            let (_, order_no) = lines_and_order(&bought);
            let refused = language.buy(process.addr, &[]).await;
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
            assert_eq!(printed(&refused), "reserve: DUPLICATE\n");
            let wrong = language.buy(process.addr, &["--request-id", "has a space"]).await;
            assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
            assert_eq!(printed(&wrong), "");
            let said = String::from_utf8_lossy(&wrong.stderr);
            assert!(said.starts_with("INVALID_ARGUMENT"), "{said}");
            drained(process.channel().await, &key).await;
            process.stop().await;
            let world = ground.world().await;
            let orders = world.live_orders(&key).await;
            assert_eq!(orders.values().collect::<Vec<_>>(), [&order_no]);
            world.close().await;
        })
        .await;
    }
}
