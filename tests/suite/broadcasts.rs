//! What one server does to a sale, and when the others know.

use std::time::{Duration, Instant};

use seckill::api::pb::{
    self, ReserveOutcome, seckill_admin_client::SeckillAdminClient, seckill_client::SeckillClient,
};
use tonic::transport::Channel;

use crate::support::{
    eventually,
    process::{Process, Serve},
    world::{Sale, on_every_redis},
};

async fn asked(channel: &Channel) -> ReserveOutcome {
    let request = pb::ReserveRequest {
        activity_id: "sale".to_owned(),
        sku_id: "sku-1".to_owned(),
        user_id: "u1".to_owned(),
        quantity: Some(1),
        request_id: "r1".to_owned(),
    };
    SeckillClient::new(channel.clone()).reserve(request).await.unwrap().into_inner().outcome()
}

async fn pause(channel: &Channel) {
    let request =
        pb::PauseActivityRequest { activity_id: "sale".to_owned(), reason: "test".into() };
    let answer = SeckillAdminClient::new(channel.clone()).pause_activity(request).await.unwrap();
    let activity = answer.into_inner().activity.unwrap();
    assert_eq!(activity.state(), pb::ActivityState::Paused);
}

async fn resume(channel: &Channel) {
    let request =
        pb::ResumeActivityRequest { activity_id: "sale".to_owned(), reason: "test".into() };
    let answer = SeckillAdminClient::new(channel.clone()).resume_activity(request).await.unwrap();
    let activity = answer.into_inner().activity.unwrap();
    assert_eq!(activity.state(), pb::ActivityState::Active);
}

/// How long it took until every server answered so.
async fn all_answer(channels: &[Channel], expected: ReserveOutcome) -> Duration {
    let begun = Instant::now();
    for channel in channels {
        eventually("it answers as the others", async || {
            (asked(channel).await == expected).then_some(())
        })
        .await;
    }
    begun.elapsed()
}

async fn channels(servers: &[Process]) -> Vec<Channel> {
    let mut channels = Vec::new();
    for server in servers {
        channels.push(server.channel().await);
    }
    channels
}

async fn stop(servers: impl IntoIterator<Item = Process>) {
    for mut server in servers {
        server.stop().await;
    }
}

on_every_redis! {
    async fn a_pause_closes_every_entrance_within_100_ms(
        ground: &Ground<'_>, _redis: &RedisServer
    ) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.parts.activities.move_by_clock().await.unwrap();
        // Nobody reads the activity again by itself.
        let serve = Serve::over(&ground.settings()).with("CATALOG__REFRESH_MS", 30_000);
        let servers = [serve.start().await, serve.start().await, serve.start().await];
        let channels = channels(&servers).await;
        all_answer(&channels, ReserveOutcome::Reserved).await;
        let mut waits = Vec::new();
        for round in 0..10 {
            pause(&channels[round % 3]).await;
            waits.push(all_answer(&channels, ReserveOutcome::Paused).await);
            resume(&channels[(round + 1) % 3]).await;
            all_answer(&channels, ReserveOutcome::Reserved).await;
        }
        // Beside other tests a server may not run at all for that long, but not most of the time.
        waits.sort();
        assert!(waits[waits.len() / 2] < Duration::from_millis(100), "{waits:?}");
        stop(servers).await;
        world.assert_balanced(&key, 1).await;
    }

    async fn a_message_that_is_dropped_heals_by_itself(
        ground: &Ground<'_>, redis: &RedisServer
    ) {
        // May do everything but publish and subscribe.
        let rule = ["ACL", "SETUSER", "mute", "on", ">pass", "~*", "+@all", "resetchannels"];
        redis.command::<String>(&rule).await;
        let world = ground.world().await;
        let key = world.open_sale(&Sale::default()).await;
        world.parts.activities.move_by_clock().await.unwrap();
        let mut settings = ground.settings();
        let url = format!("redis://mute:pass@127.0.0.1:{}", redis.port());
        settings.engine.url = seckill::config::SecretUrl::new(url);
        let serve = Serve::over(&settings).with("CATALOG__REFRESH_MS", 300);
        let servers = [serve.start().await, serve.start().await];
        let channels = channels(&servers).await;
        all_answer(&channels, ReserveOutcome::Reserved).await;
        pause(&channels[0]).await;
        all_answer(&channels, ReserveOutcome::Paused).await;
        resume(&channels[1]).await;
        all_answer(&channels, ReserveOutcome::Reserved).await;
        stop(servers).await;
        world.assert_balanced(&key, 1).await;
    }

    async fn an_activity_that_another_server_warmed_up_sells_at_once(
        ground: &Ground<'_>, _redis: &RedisServer
    ) {
        let world = ground.world().await;
        let key = world.plan_sale(&Sale::default()).await;
        let serve = Serve::over(&ground.settings()).with("CATALOG__REFRESH_MS", 30_000);
        let servers = [serve.start().await];
        let channels = channels(&servers).await;
        all_answer(&channels, ReserveOutcome::NotWarmed).await;
        world.parts.activities.warm_up(&key.activity_id, "test").await.unwrap();
        let waited = all_answer(&channels, ReserveOutcome::Reserved).await;
        assert!(waited < Duration::from_secs(2), "{waited:?}");
        stop(servers).await;
        world.assert_balanced(&key, 1).await;
    }
}
