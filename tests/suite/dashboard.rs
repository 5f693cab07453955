//! The dashboard in a real browser, beside a real server: what it shows is what SQL has.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use sea_orm::{
    ColumnTrait as _, EntityTrait as _, PaginatorTrait as _, QueryFilter as _, sea_query::Expr,
};
use seckill::{
    api::pb::{self, seckill_admin_client::SeckillAdminClient},
    config::{Role, Token, digest},
    entity::{activities, audit, offers, orders, outbox},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;

use crate::support::{
    browser::{Browser, DESK, PHONE},
    databases::{self, Fresh},
    eventually,
    process::{Process, Serve},
    within,
    world::Ground,
};

mod rates;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const SALE: &str = "double-11";

/// A server with the dashboard, over this database.
fn serve(fresh: &Fresh) -> Serve {
    Serve::over(&Ground::embedded(fresh).settings()).with("HTTP__ADDR", "127.0.0.1:0")
}

fn page(server: &Process) -> String {
    format!("http://{}/", server.http_addr())
}

/// Opens a sale of these offers.
async fn open_sale(server: &Process, offers: impl IntoIterator<Item = (String, String, i64)>) {
    let now = SystemTime::now();
    let offers = offers.into_iter().map(|(sku_id, title, total)| pb::OfferSpec {
        sku_id,
        title,
        total,
        price_minor: 1_990,
        currency_code: "CNY".into(),
        ..Default::default()
    });
    let spec = pb::ActivitySpec {
        activity_id: SALE.into(),
        title: "Double Eleven".into(),
        start_time: Some(now.into()),
        end_time: Some((now + Duration::from_secs(7_200)).into()),
        offers: offers.collect(),
        ..Default::default()
    };
    let mut admin = SeckillAdminClient::new(server.channel().await);
    admin.create_activity(pb::CreateActivityRequest { spec: Some(spec) }).await.unwrap();
    let request = pb::ApproveActivityRequest { activity_id: SALE.into(), ..Default::default() };
    admin.approve_activity(request).await.unwrap();
    let request = pb::WarmupRequest { activity_id: SALE.into() };
    server.seckill().await.warmup(request).await.unwrap();
    eventually("the sale is open", async || {
        let request = pb::GetActivityRequest { activity_id: SALE.into() };
        let activity = admin.get_activity(request).await.unwrap().into_inner().activity;
        (activity.unwrap().state() == pb::ActivityState::Active).then_some(())
    })
    .await;
}

fn a_few_offers() -> Vec<(String, String, i64)> {
    [
        ("cable-2m", "Cable, 2 m", 900),
        ("charger-65w", "Charger, 65 W", 420),
        ("headset-1", "Headset", 260),
        ("phone-256", "Phone, 256 GB", 60),
        ("tablet-11", "Tablet, 11 inches", 90),
        ("watch-44", "Watch, 44 mm", 140),
    ]
    .map(|(sku, title, total)| (sku.to_owned(), title.to_owned(), total))
    .to_vec()
}

/// Buyers who want any of these offers, until they are told to stop. Some ask twice, some give
/// back what they got.
struct Buyers<'a> {
    skus: &'a [String],
    /// How long one waits after so many of them.
    pause: fn(u64) -> Duration,
    stop: AtomicBool,
    next: AtomicU64,
}

impl<'a> Buyers<'a> {
    fn of(skus: &'a [String], pause: fn(u64) -> Duration) -> Self {
        Self { skus, pause, stop: AtomicBool::new(false), next: AtomicU64::new(0) }
    }

    async fn buy(&self, channel: Channel) {
        let mut client = pb::seckill_client::SeckillClient::new(channel);
        while !self.stop.load(Ordering::Relaxed) {
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            let user_id = format!("u-{}", if nth.is_multiple_of(7) { nth / 2 } else { nth });
            let place = usize::try_from(nth * nth % 1_009).unwrap() % self.skus.len();
            let (activity_id, sku_id) = (SALE.to_owned(), self.skus[place].clone());
            let request = pb::ReserveRequest {
                activity_id: activity_id.clone(),
                sku_id: sku_id.clone(),
                user_id: user_id.clone(),
                quantity: None,
                request_id: format!("r-{nth}"),
            };
            // A server that is being restarted does not answer.
            let answer = client.reserve(request).await;
            let won = answer.ok().and_then(|answer| answer.into_inner().reservation);
            if let Some(won) = won
                && nth.is_multiple_of(11)
            {
                let reason = "changed my mind".to_owned();
                let reservation_id = won.reservation_id;
                let request =
                    pb::ReleaseRequest { activity_id, sku_id, user_id, reservation_id, reason };
                let _ = client.release(request).await;
            }
            sleep((self.pause)(nth)).await;
        }
    }
}

/// What SQL has of each offer: total, reserved, ordered.
async fn in_sql(fresh: &Fresh) -> BTreeMap<String, [i64; 3]> {
    let rows = offers::Entity::find().all(fresh.reader()).await.unwrap();
    rows.into_iter().map(|row| (row.sku_id, [row.total, row.reserved, row.sold])).collect()
}

/// Grouped by thousands, as the page writes figures.
fn shown(figure: i64) -> String {
    let digits = figure.to_string();
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Waits until the page has the figures of SQL: above, and in each row of the table.
async fn converges(browser: &mut Browser, fresh: &Fresh) {
    within(Duration::from_secs(60), "the page has the figures of SQL", async || {
        let sql = in_sql(fresh).await;
        let expected: Vec<_> = sql
            .iter()
            .map(|(sku, [total, reserved, sold])| {
                json!([sku, shown(total - reserved), shown(*total), shown(*reserved), shown(*sold)])
            })
            .collect();
        let rows = "[...document.querySelectorAll('tbody tr:not([hidden])')].map((row) => \
                    [row.querySelector('button').textContent, ...[1, 4, 5, 6].map((nth) => \
                    row.children[nth].textContent)])";
        let rows = browser.js(rows).await;
        let sum = |at: fn(&[i64; 3]) -> i64| shown(sql.values().map(at).sum());
        let live = orders::Entity::find()
            .filter(orders::Column::State.ne(orders::OrderState::Cancelled))
            .count(fresh.reader())
            .await
            .unwrap();
        let above = browser
            .js("[document.getElementById('remaining').textContent, ...document.querySelector(\
                 '.facts').innerText.split('\\n').filter((line) => /^[\\d,]+$/.test(line))]")
            .await;
        let all = [
            sum(|[total, reserved, _]| total - reserved),
            sum(|[_, reserved, _]| *reserved),
            sum(|[_, _, sold]| *sold),
            shown(live.try_into().unwrap()),
        ];
        let is_above = all.iter().all(|figure| above.as_array().unwrap().contains(&json!(figure)));
        let first = rows.as_array().unwrap().len().min(expected.len());
        (first > 0 && rows == json!(expected[..first]) && is_above).then_some(())
    })
    .await;
}

/// Nothing was complained of, and nobody else was asked.
fn keeps_to_itself(browser: &Browser, page: &str) {
    let foreign: Vec<_> =
        browser.asked().into_iter().filter(|url| !url.starts_with(page)).collect();
    assert_eq!(foreign, Vec::<&str>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_runs_while_the_page_is_open_and_its_figures_are_those_of_sql() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let seconds = std::env::var("SECKILL_SALE_SECONDS").map_or(3, |text| text.parse().unwrap());
        let mut server = serve(fresh).start().await;
        let page = page(&server);
        let mut browser = Browser::open(DESK).await;
        browser.go(&page).await;
        browser.shows("There is no activity yet").await;
        browser.shows("seckill activity create").await;

        open_sale(&server, a_few_offers()).await;
        browser.shows("Double Eleven").await;
        browser
            .until("its stock is live", "document.querySelector('.dot').dataset.state === 'live'")
            .await;
        let skus: Vec<String> = a_few_offers().into_iter().map(|(sku, ..)| sku).collect();
        let buyers = Buyers::of(&skus, |nth| Duration::from_millis(nth / 8));
        let channel = server.channel().await;
        let rush = async {
            tokio::join!(
                buyers.buy(channel.clone()),
                buyers.buy(channel.clone()),
                buyers.buy(channel.clone())
            )
        };
        let look = async {
            sleep(Duration::from_secs(seconds)).await;
            browser.shows("Since its start: Reserved").await;
            let curve = "document.querySelector('.chart path.first').getAttribute('d').length > 40";
            browser.until("the stock is a curve", curve).await;
            // What a person would do with it: choose one offer, and look at it on a phone.
            browser.picture(&picture("dashboard-light")).await;
            assert_eq!(browser.barriers().await, Vec::<String>::new(), "on a desk");
            browser.turn(PHONE).await;
            browser.until("it fits", "document.documentElement.scrollWidth <= innerWidth").await;
            browser.picture(&picture("dashboard-dark-phone")).await;
            let table = "document.querySelector('.scroll')";
            let fits = format!("{table}.scrollWidth <= {table}.clientWidth");
            browser.until("and the table, with how fast each goes", &fits).await;
            assert_eq!(browser.barriers().await, Vec::<String>::new(), "on a phone");
            browser.turn(DESK).await;
            buyers.stop.store(true, Ordering::Relaxed);
        };
        tokio::join!(rush, look);

        converges(&mut browser, fresh).await;
        browser.press("phone-256").await;
        let legend = |part| format!("document.querySelector('.chart .legend {part}').textContent");
        browser.until("one offer is drawn", &format!("{} === 'phone-256'", legend("span"))).await;
        let [total, reserved, _] = in_sql(fresh).await["phone-256"];
        let figure = json!(shown(total - reserved));
        browser.until("with its figure", &format!("{} === {figure}", legend("b"))).await;
        browser.press("Compare now").await;
        browser.shows("Engine, outbox and orders of 6 offers agree").await;
        browser.shows("None: every reservation became an order, or is on its way.").await;

        keeps_to_itself(&browser, &page);
        assert_eq!(browser.complaints(), Vec::<String>::new());
        server.stop().await;
    })
    .await;
}

/// Where pictures go; `make pictures` copies them to docs/images.
fn picture(name: &str) -> PathBuf {
    Path::new(ROOT).join("target/pictures").join(format!("{name}.png"))
}

const VIEWER: &str = "viewer-token-9d1c";
const OPS: &str = "ops-token-e3f0";

/// What the settings have of a token.
fn entry(name: &str, role: Role, token: &str) -> String {
    let digest = digest(token.as_bytes());
    Token { name: name.into(), role, digest }.entry().unwrap()
}

async fn sign_in(browser: &mut Browser, token: &str) {
    browser.press("Sign in").await;
    browser.until("it asks", "document.querySelector('dialog[open] input:focus')").await;
    browser.types(token).await;
    browser.key("Enter", "\r").await;
    browser.until("it has asked", "!document.querySelector('dialog[open]')").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_pauses_with_a_token_and_nobody_else_does() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        // A sale from before tokens were asked for.
        let mut server = serve(fresh).start().await;
        open_sale(&server, a_few_offers()).await;
        server.stop().await;
        let tokens =
            [entry("screen", Role::Viewer, VIEWER), entry("anna", Role::Ops, OPS)].join(",");
        let mut server = serve(fresh).with("AUTH__TOKENS", tokens).start().await;
        let page = page(&server);
        let state = async || {
            activities::Entity::find_by_id(SALE).one(fresh.reader()).await.unwrap().unwrap().state
        };
        let moves_to = async |state: &str| {
            let to = format!("\"to\":\"{state}\"");
            let found = audit::Entity::find().filter(audit::Column::Detail.contains(to));
            found.all(fresh.reader()).await.unwrap()
        };
        let active = state().await;

        let mut browser = Browser::open(DESK).await;
        browser.go(&page).await;
        browser.shows("This server asks who you are").await;
        assert_eq!(browser.barriers().await, Vec::<String>::new(), "of a stranger");
        sign_in(&mut browser, "nonsense").await;
        browser.shows("The server does not know this token").await;
        browser.press("Forget token").await;

        // Somebody who may look.
        sign_in(&mut browser, VIEWER).await;
        browser.shows("of 1,870 units").await;
        browser.press("Pause").await;
        browser.shows("Pause double-11?").await;
        assert_eq!(browser.barriers().await, Vec::<String>::new(), "of a question");
        browser.press("Pause double-11").await;
        let refusal = "The server refused: PauseActivity needs the role ops; this caller has the role \
                       viewer.";
        browser.shows(refusal).await;
        browser.press("Cancel").await;
        browser.press("Compare now").await;
        browser.shows("Reconcile needs the role ops").await;
        assert_eq!(state().await, active);
        assert_eq!(moves_to("paused").await, []);

        // And somebody who runs the sale.
        browser.press("Forget token").await;
        browser.shows("This server asks who you are").await;
        // What a stranger asked is answered when she has signed in.
        browser
            .js("window.asked = 0; const ask = window.fetch; window.fetch = (...call) => {
                   const answer = ask(...call);
                   if (!String(call[0]).includes('GetPipelineStatus') || ++window.asked > 1)
                     return answer;
                   return new Promise((take) => { window.answer = () => take(answer); });
                 }")
            .await;
        browser.until("it asks", "window.answer").await;
        sign_in(&mut browser, OPS).await;
        browser.shows("of 1,870 units").await;
        browser.js("window.asked = 1; window.answer()").await;
        browser.until("it asks again, and later than that", "window.asked > 1").await;
        browser.press("Pause").await;
        browser.js("document.querySelector('dialog input').focus()").await;
        browser.types("the price is wrong").await;
        browser.press("Pause double-11").await;
        browser.shows("Paused").await;
        browser
            .until("it is said", "document.getElementById('said').textContent.includes('paused')")
            .await;
        assert_ne!(state().await, active);
        let [entry] = &moves_to("paused").await[..] else { panic!("one pause") };
        assert_eq!(entry.actor, "anna");
        assert!(entry.detail.contains("the price is wrong"), "{entry:?}");
        browser.press("Resume").await;
        browser.press("Resume double-11").await;
        browser.until("it sells", "document.querySelector('.sale-head .badge.good')").await;
        assert_eq!(state().await, active);
        browser.press("End").await;
        browser.shows("can't be opened again").await;
        browser.key("Escape", "").await;
        browser.until("it is dropped", "!document.querySelector('dialog[open]')").await;
        assert_eq!(state().await, active);
        browser.press("End").await;
        browser.press("End double-11").await;
        browser.shows("seckill activity settle double-11").await;
        assert_eq!(moves_to("ended").await.len(), 1);

        // The token is in this tab alone, and in no address.
        let kept = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])";
        let kept = browser.js(kept).await;
        assert_eq!(kept, json!([""  , {}, {"seckill-token": OPS}]).to_string());
        assert!(browser.asked().iter().all(|url| !url.contains(OPS) && !url.contains(VIEWER)));
        keeps_to_itself(&browser, &page);
        assert_eq!(browser.complaints(), Vec::<String>::new());
        server.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_asked_with_a_forgotten_token_or_of_another_activity_is_not_shown() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        // A sale from before tokens were asked for, with a dead letter.
        let mut server = serve(fresh).start().await;
        open_sale(&server, a_few_offers()).await;
        let request = pb::ReserveRequest {
            activity_id: SALE.into(),
            sku_id: "phone-256".into(),
            user_id: "u-1".into(),
            ..Default::default()
        };
        let answer = server.seckill().await.reserve(request).await.unwrap().into_inner();
        let reservation_id = answer.reservation.unwrap().reservation_id;
        server.stop().await;
        let dead = outbox::Entity::update_many()
            .col_expr(outbox::Column::State, Expr::value(outbox::OutboxState::Dead))
            .exec(fresh.writer())
            .await
            .unwrap();
        assert_eq!(dead.rows_affected, 1);
        // It may have become an order meanwhile.
        orders::Entity::delete_many().exec(fresh.writer()).await.unwrap();
        offers::Entity::update_many()
            .col_expr(offers::Column::Sold, Expr::value(0))
            .exec(fresh.writer())
            .await
            .unwrap();
        let tokens = [entry("screen", Role::Viewer, VIEWER), entry("anna", Role::Ops, OPS)];
        let mut server = serve(fresh).with("AUTH__TOKENS", tokens.join(",")).start().await;

        let mut browser = Browser::open(DESK).await;
        browser.go(&page(&server)).await;
        browser.shows("This server asks who you are").await;
        // Answers of these two come when they are let go, whoever has given them up meanwhile.
        browser
            .js("window.held = []; window.polls = 0; const ask = window.fetch;
                 window.fetch = (url, call) => {
                   if (String(url).includes('GetPipelineStatus')) window.polls += 1;
                   if (!/Reconcile|ListDeadLetters/.test(url)) return ask(url, call);
                   const answer = ask(url, { ...call, signal: undefined });
                   return new Promise((take) => window.held.push(() => take(answer)));
                 }")
            .await;
        let asks = async |browser: &mut Browser| {
            browser.press("Show them").await;
            browser.press("Compare now").await;
            browser.until("both are asked", "window.held.length === 2").await;
        };
        let let_go = "window.polls = 0; window.held.splice(0).forEach((answer) => answer())";
        let shows_nothing = async |browser: &mut Browser| {
            browser.js(let_go).await;
            browser.until("the page asks again, and later than that", "window.polls > 1").await;
            let text = browser.js("document.body.textContent").await;
            let text = text.as_str().unwrap();
            assert!(
                !text.contains(&reservation_id) && !text.contains("of 6 offers agree at"),
                "{text}"
            );
        };
        sign_in(&mut browser, OPS).await;
        asks(&mut browser).await;
        browser.js(let_go).await;
        browser.shows(&reservation_id).await;
        browser.shows("of 6 offers agree at").await;

        // Forgotten, and another one in its place.
        asks(&mut browser).await;
        browser.press("Forget token").await;
        sign_in(&mut browser, VIEWER).await;
        browser.shows("1 reservation could not become an order").await;
        shows_nothing(&mut browser).await;
        // Who looks now is answered.
        asks(&mut browser).await;
        browser.js(let_go).await;
        browser.shows("ListDeadLetters needs the role ops").await;
        browser.shows("Reconcile needs the role ops").await;

        browser.press("Forget token").await;
        sign_in(&mut browser, OPS).await;
        asks(&mut browser).await;
        browser.js("location.hash = 'activity=another'").await;
        browser.shows("There is no activity another").await;
        shows_nothing(&mut browser).await;
        server.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_finds_its_server_again() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let mut server = serve(fresh).start().await;
        let addr = server.http_addr();
        open_sale(&server, a_few_offers()).await;
        let mut browser = Browser::open(DESK).await;
        browser.go(&page(&server)).await;
        browser.shows("1,870 of 1,870 units").await;
        server.kill();
        browser.shows("Trying again in").await;
        browser.shows("The server does not answer.").await;
        let said = "document.getElementById('said').textContent";
        browser.until("it is said", &format!("{said}.startsWith('The connection is lost')")).await;
        // It stays readable, and gives up never.
        browser.shows("1,870 of 1,870 units").await;

        let mut server = serve(fresh).with("HTTP__ADDR", addr).start().await;
        let skus = ["phone-256".to_owned()];
        let buyers = Buyers::of(&skus, |_| Duration::ZERO);
        let channel = server.channel().await;
        let look = async {
            sleep(Duration::from_millis(500)).await;
            buyers.stop.store(true, Ordering::Relaxed);
        };
        tokio::join!(buyers.buy(channel), look);
        browser
            .until("it is live", "document.querySelector('.dot').dataset.state === 'live'")
            .await;
        browser.until("it is said", &format!("{said} === 'Connected again.'")).await;
        converges(&mut browser, fresh).await;
        server.stop().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_offers_stay_smooth() {
    const OFFERS: i64 = 1_000;
    /// What the page may take of one processor.
    const MOST: f64 = 0.5;
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let mut server = serve(fresh).start().await;
        let offer = |nth| (format!("sku-{nth:04}"), format!("Offer {nth}"), 1_000);
        open_sale(&server, (0..OFFERS).map(offer)).await;
        let skus: Vec<String> = (0..OFFERS).map(|nth| offer(nth).0).collect();
        let buyers = Buyers::of(&skus, |_| Duration::from_millis(5));
        let mut browser = Browser::open(DESK).await;
        browser.go(&page(&server)).await;
        browser.shows("1,000,000 of 1,000,000 units").await;
        browser.shows("1 to 50 of 1,000 offers").await;

        // What is dearest: who is first changes all the time.
        rates::order(&mut browser, "fastest").await;
        browser.call("Performance.enable", json!({"timeDomain": "threadTicks"})).await;
        let channel = server.channel().await;
        let measure = async {
            sleep(Duration::from_millis(500)).await;
            browser.trace().await;
            let before = busy(&mut browser).await;
            let begun = Instant::now();
            let gaps = browser
                .js("new Promise((done) => { const gaps = []; let last; const end = \
                     performance.now() + 5000; const frame = (at) => { if (last) gaps.push(at - last); \
                     last = at; if (at < end) requestAnimationFrame(frame); else done(gaps.sort((a, b) \
                     => a - b)); }; requestAnimationFrame(frame); })")
                .await;
            let share = (busy(&mut browser).await - before) / begun.elapsed().as_secs_f64();
            buyers.stop.store(true, Ordering::Relaxed);
            let scripts = browser.scripts().await;
            let gaps = gaps.as_array().unwrap();
            let at = |part: usize| gaps[gaps.len() * part / 100].as_f64().unwrap();
            let (p50, p99) = (at(50), at(99));
            eprintln!(
                "{} frames, {p50:.1} ms at the median, {p99:.1} ms at p99; {:.0} % of a processor",
                gaps.len(),
                100.0 * share
            );
            let longest = *scripts.last().expect("the page does something");
            let long = scripts.iter().filter(|ms| **ms > 16.0).count();
            eprintln!(
                "{} pieces of script, {:.1} ms at p99, {longest:.1} ms at most; {long} above 16 ms",
                scripts.len(),
                scripts[scripts.len() * 99 / 100]
            );
            // Others may keep the processor from the page; what it takes itself is its own.
            assert!(longest < 16.0, "a piece of script takes {longest:.1} ms, and a frame is late");
            assert!(share < MOST, "the page takes {share:.2} of a processor");
            assert!(p50 < 50.0, "a frame takes {p50} ms");
        };
        tokio::join!(buyers.buy(channel.clone()), buyers.buy(channel), measure);

        rates::order(&mut browser, "sku").await;
        assert_eq!(browser.js("document.querySelectorAll('tbody tr').length").await, 50);
        converges(&mut browser, fresh).await;
        browser.press("Next").await;
        browser.shows("51 to 100 of 1,000 offers").await;
        browser.js("document.querySelector('input[type=search]').focus()").await;
        browser.types("sku-0999").await;
        browser.shows("1 offer").await;
        let left = "document.querySelectorAll('tbody tr:not([hidden])').length === 1";
        browser.until("one is left", left).await;
        assert_eq!(browser.complaints(), Vec::<String>::new());
        server.stop().await;
    })
    .await;
}

/// How long the page has kept its processor busy, in seconds.
async fn busy(browser: &mut Browser) -> f64 {
    let metrics = browser.call("Performance.getMetrics", json!({})).await;
    let metrics = metrics["metrics"].as_array().unwrap();
    let task = metrics.iter().find(|metric| metric["name"] == "TaskDuration").unwrap();
    task["value"].as_f64().unwrap()
}

#[test]
fn what_is_committed_is_what_the_sources_build() {
    let built = tempfile::tempdir().unwrap();
    let output = Command::new("node")
        .arg(format!("{ROOT}/dashboard/build.mjs"))
        .arg(built.path())
        .output()
        .expect("make services has put node there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let committed = Path::new(ROOT).join("dashboard/dist");
    for name in ["index.html", "dashboard.js", "dashboard.css", "icon.svg"] {
        let read = |folder: &Path, name: &str| std::fs::read(folder.join(name)).unwrap();
        let plain = read(&committed, name);
        assert!(plain == read(built.path(), name), "{name} is old: run `make dashboard`");
        // Another Node may compress otherwise, but not to something else.
        let zipped = committed.join(format!("{name}.gz"));
        let unzipped = Command::new("gzip").arg("-dc").arg(zipped).output().unwrap();
        assert!(unzipped.stdout == plain, "{name}.gz is not {name}: run `make dashboard`");
    }
}
