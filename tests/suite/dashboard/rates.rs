//! How fast each offer goes, as the page tells it, against what buyers were sold.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use seckill::api::pb::{self, seckill_admin_client::SeckillAdminClient, seckill_client};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tonic::transport::Channel;

use crate::{
    dashboard::{SALE, a_few_offers, converges, open_sale, page, serve},
    support::{
        browser::{Browser, DESK},
        databases::{self, Fresh},
    },
};

/// What the page takes the mean of.
const OVER: Duration = Duration::from_secs(5);
const CABLE: &str = "cable-2m";
const HEADSET: &str = "headset-1";

/// What the page says is taken in a second: of each offer, and of all.
const PACES: &str = "Object.fromEntries([['all', document.querySelector('.facts dd').textContent], \
     ...[...document.querySelectorAll('.offers tbody tr')].map((row) => \
     [row.querySelector('button').textContent, row.children[3].textContent])])";

/// Buyers of one unit each, one after the other, and when they got it.
struct Customers {
    client: seckill_client::SeckillClient<Channel>,
    got: Vec<(String, pb::Reservation, Instant)>,
}

impl Customers {
    fn of(channel: Channel) -> Self {
        Self { client: seckill_client::SeckillClient::new(channel), got: Vec::new() }
    }

    async fn buy(&mut self, sku: &str) {
        let request = pb::ReserveRequest {
            activity_id: SALE.into(),
            sku_id: sku.into(),
            user_id: format!("u-{}", self.got.len()),
            ..Default::default()
        };
        let answer = self.client.reserve(request).await.unwrap().into_inner();
        self.got.push((sku.to_owned(), answer.reservation.unwrap(), Instant::now()));
    }

    async fn give_back(&mut self, sku: &str, units: usize) {
        let of_it = self.got.iter().filter(|(of, ..)| of == sku).take(units);
        for (_, reservation, _) in of_it {
            let request = pb::ReleaseRequest {
                activity_id: SALE.into(),
                sku_id: sku.into(),
                user_id: reservation.user_id.clone(),
                reservation_id: reservation.reservation_id.clone(),
                ..Default::default()
            };
            let answer = self.client.release(request).await.unwrap().into_inner();
            assert_eq!(answer.outcome(), pb::ReleaseOutcome::Released);
        }
    }

    /// How many got one of these per second, lately.
    fn pace(&self, sku: &str, now: Instant) -> f64 {
        let lately =
            |(of, _, at): &&(String, pb::Reservation, Instant)| of == sku && now - *at < OVER;
        let units = u32::try_from(self.got.iter().filter(lately).count()).unwrap();
        f64::from(units) / OVER.as_secs_f64()
    }
}

/// All that the page says from now on, in place of what it has said before.
async fn listen(browser: &mut Browser) {
    browser
        .js(&format!(
            "window.told = []; window.listener ??= new MutationObserver(() => \
             window.told.push(...Object.values({PACES}))); window.listener.observe(\
             document.querySelector('.body'), {{ childList: true, characterData: true, subtree: true }})"
        ))
        .await;
}

async fn told(browser: &mut Browser) -> BTreeSet<String> {
    let told = browser.js("window.told").await;
    told.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Puts the table into another order.
pub(super) async fn order(browser: &mut Browser, by: &str) {
    let choose = format!(
        "{{ const order = document.querySelector('.offers select'); order.value = '{by}'; \
         order.dispatchEvent(new Event('change')); }}"
    );
    browser.js(&choose).await;
}

async fn stands_still(browser: &mut Browser) {
    let still = format!("Object.values({PACES}).every((pace) => pace === '0')");
    browser.until("nothing is taken", &still).await;
}

fn words<const N: usize>(words: [&str; N]) -> BTreeSet<String> {
    words.map(str::to_owned).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rate_of_an_offer_is_what_was_sold_of_it_and_nothing_else() {
    databases::run(Fresh::sqlite().await, async |fresh: &Fresh| {
        let mut server = serve(fresh).start().await;
        let addr = server.http_addr();
        open_sale(&server, a_few_offers()).await;
        let mut browser = Browser::open(DESK).await;
        browser.go(&page(&server)).await;
        stands_still(&mut browser).await;
        browser.press(CABLE).await;

        // While they buy, one offer four times as fast as the other.
        listen(&mut browser).await;
        let mut customers = Customers::of(server.channel().await);
        let mut turns = interval(Duration::from_millis(50));
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut shown = BTreeMap::<String, String>::new();
        let mut agrees = false;
        let begun = Instant::now();
        for turn in 0.. {
            turns.tick().await;
            customers.buy(CABLE).await;
            if turn % 4 == 0 {
                customers.buy(HEADSET).await;
            }
            if turn % 10 != 0 || begun.elapsed() < OVER {
                continue;
            }
            shown = serde_json::from_value(browser.js(PACES).await).unwrap();
            let now = Instant::now();
            let (cable, headset) = (customers.pace(CABLE, now), customers.pace(HEADSET, now));
            let is_near = |name: &str, sold: f64| {
                let pace: f64 = shown[name].parse().unwrap();
                (pace - sold).abs() <= 0.1 * sold + 0.3
            };
            agrees = is_near(CABLE, cable)
                && is_near(HEADSET, headset)
                && is_near("all", cable + headset)
                && ["charger-65w", "phone-256", "tablet-11", "watch-44"]
                    .iter()
                    .all(|sku| shown[*sku] == "0");
            if agrees || turn == 400 {
                break;
            }
        }
        let now = Instant::now();
        assert!(
            agrees,
            "{shown:?}; {} and {}",
            customers.pace(CABLE, now),
            customers.pace(HEADSET, now)
        );
        let beside = "document.querySelector('.chart .aside').textContent";
        let pace = format!("{PACES}['{CABLE}']");
        let same = format!("{beside} === `· ${{{pace}}} taken per second`");
        browser.until("the curve has it too", &same).await;
        let heard = "document.querySelector('.chart svg[role=img]').getAttribute('aria-label')";
        browser
            .until("and says it", &format!("/cable-2m: .*taken per second/.test({heard})"))
            .await;

        order(&mut browser, "fastest").await;
        let first = "[...document.querySelectorAll('.offers tbody button')].slice(0, 2)\
                     .map((button) => button.textContent)";
        assert_eq!(browser.js(first).await, json!([CABLE, HEADSET]));
        order(&mut browser, "sku").await;

        // Nobody buys, some give back, and the offers become smaller and larger.
        stands_still(&mut browser).await;
        listen(&mut browser).await;
        customers.give_back(CABLE, 30).await;
        let mut admin = SeckillAdminClient::new(server.channel().await);
        for (sku, delta) in [(HEADSET, -100), ("tablet-11", 50)] {
            let request = pb::AdjustStockRequest {
                activity_id: SALE.into(),
                sku_id: sku.into(),
                delta,
                request_id: format!("a{delta}"),
                ..Default::default()
            };
            admin.adjust_stock(request).await.unwrap();
        }
        converges(&mut browser, fresh).await;
        assert!(
            told(&mut browser).await.is_subset(&words(["0"])),
            "{:?}",
            told(&mut browser).await
        );

        // Stock that is counted anew is no sale either.
        let request = pb::RebuildStockRequest {
            activity_id: SALE.into(),
            sku_id: CABLE.into(),
            ..Default::default()
        };
        admin.rebuild_stock(request).await.unwrap();
        browser.until("nobody knows", &format!("{pace} === '–'")).await;
        stands_still(&mut browser).await;
        assert_eq!(told(&mut browser).await, words(["0", "–"]));

        // What is sold while the page hears nothing.
        browser
            .js("const ask = window.fetch; window.fetch = async (url, call) => {
                   if (String(url).includes('WatchStock'))
                     await new Promise((go) => { window.held = go; });
                   return ask(url, call);
                 }")
            .await;
        server.kill();
        let lost = format!("Object.values({PACES}).every((pace) => pace === '–')");
        browser.until("nobody knows", &lost).await;
        let mut server = serve(fresh).with("HTTP__ADDR", addr).start().await;
        customers.client = seckill_client::SeckillClient::new(server.channel().await);
        for _ in 0..40 {
            customers.buy(CABLE).await;
        }
        browser.until("it calls again", "window.held").await;
        listen(&mut browser).await;
        browser.js("window.held()").await;
        converges(&mut browser, fresh).await;
        stands_still(&mut browser).await;
        assert_eq!(told(&mut browser).await, words(["0", "–"]));

        // And what is sold from then on.
        customers.buy(CABLE).await;
        browser.until("it goes on", &format!("{pace} === '0.2'")).await;
        assert_eq!(browser.js(PACES).await["all"], json!("0.2"));
        server.stop().await;
    })
    .await;
}
