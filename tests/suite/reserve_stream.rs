//! ReserveStream: one answer per request, errors that end nothing, and the books.

use std::{collections::BTreeMap, time::Duration};

use futures_util::{StreamExt as _, stream};
use seckill::api::pb::{
    self, ReserveOutcome, reserve_stream_response::Result as Answer, seckill_client::SeckillClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::support::{
    eventually,
    process::Serve,
    world::{Sale, on_every_ground},
};

fn asked(buyer: &str, request_id: &str, quantity: i32) -> pb::ReserveStreamRequest {
    pb::ReserveStreamRequest {
        request: Some(pb::ReserveRequest {
            activity_id: "sale".to_owned(),
            sku_id: "sku-1".to_owned(),
            user_id: buyer.to_owned(),
            quantity: Some(quantity),
            request_id: request_id.to_owned(),
        }),
    }
}

fn outcome(answer: &Answer) -> ReserveOutcome {
    match answer {
        Answer::Response(response) => response.outcome(),
        Answer::Error(error) => panic!("{error:?}"),
    }
}

fn reason(answer: &Answer) -> &str {
    match answer {
        Answer::Response(response) => panic!("{response:?}"),
        Answer::Error(error) => &error.reason,
    }
}

on_every_ground! {
    async fn each_request_of_a_stream_is_answered_once_and_the_books_balance(ground: &Ground<'_>) {
        const BUYERS: usize = 3_000;
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 500, ..Sale::default() }).await;
        world.parts.activities.move_by_clock().await.unwrap();
        world.close().await;
        let mut server = Serve::over(&ground.settings()).with("RESERVE__MAX_WAIT_MS", 60_000);
        server = server.with("SWEEPER__GRACE_MS", 5_000);
        let mut server = server.start().await;
        let mut client = SeckillClient::new(server.channel().await);
        let requests: Vec<_> =
            (0..BUYERS).map(|n| asked(&format!("u{n}"), &format!("r{n}"), 1)).collect();
        // And all once more: the same answers.
        let again = requests.clone();
        let mut first = BTreeMap::new();
        for requests in [requests, again] {
            let answers = client.reserve_stream(stream::iter(requests)).await.unwrap();
            let answers: Vec<_> = answers.into_inner().collect().await;
            assert_eq!(answers.len(), BUYERS);
            let mut reserved = 0;
            let mut seen = BTreeMap::new();
            for answer in answers {
                let pb::ReserveStreamResponse { request_id, result } = answer.unwrap();
                let result = result.unwrap();
                let won = outcome(&result) == ReserveOutcome::Reserved;
                assert!(won || outcome(&result) == ReserveOutcome::SoldOut, "{result:?}");
                reserved += i32::from(won);
                let Answer::Response(response) = result else { unreachable!() };
                let id = response.reservation.map(|held| held.reservation_id);
                assert!(seen.insert(request_id, id).is_none(), "answered twice");
            }
            assert_eq!(reserved, 500);
            if first.is_empty() {
                first = seen;
            } else {
                assert_eq!(seen, first);
            }
        }
        server.stop().await;
        let world = ground.world().await;
        world.assert_balanced(&key, 500).await;
    }

    async fn a_request_that_fails_is_answered_and_the_stream_goes_on(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 5, ..Sale::default() }).await;
        world.parts.activities.move_by_clock().await.unwrap();
        world.close().await;
        let mut server = Serve::over(&ground.settings()).start().await;
        let mut client = SeckillClient::new(server.channel().await);
        let (send, requests) = mpsc::channel(10);
        let answers = client.reserve_stream(ReceiverStream::new(requests)).await.unwrap();
        let mut answers = answers.into_inner();
        let mut unknown = asked("u1", "r3", 1);
        unknown.request.as_mut().unwrap().activity_id = "nothing".to_owned();
        for (request, expected) in [
            (asked("u1", "", 1), "INVALID_FIELD"),
            (asked("u 1", "r1", 1), "INVALID_FIELD"),
            (asked("u1", "r2", 0), "INVALID_FIELD"),
            (unknown, "UNKNOWN_ACTIVITY"),
            (pb::ReserveStreamRequest { request: None }, "INVALID_FIELD"),
        ] {
            let request_id = request.request.as_ref().map(|r| r.request_id.clone());
            send.send(request).await.unwrap();
            let answer = answers.next().await.unwrap().unwrap();
            assert_eq!(answer.request_id, request_id.unwrap_or_default());
            assert_eq!(reason(&answer.result.unwrap()), expected);
        }
        send.send(asked("u1", "r4", 1)).await.unwrap();
        let answer = answers.next().await.unwrap().unwrap();
        assert_eq!(outcome(&answer.result.unwrap()), ReserveOutcome::Reserved);
        send.send(asked("u1", "r4", 2)).await.unwrap();
        let answer = answers.next().await.unwrap().unwrap();
        assert_eq!(reason(&answer.result.unwrap()), "REQUEST_ID_CONFLICT");

        // A stop answers what was begun, and says why the stream ends.
        send.send(asked("u2", "r5", 1)).await.unwrap();
        let answer = answers.next().await.unwrap().unwrap();
        assert_eq!(outcome(&answer.result.unwrap()), ReserveOutcome::Reserved);
        server.terminate();
        let end = answers.next().await.unwrap().unwrap_err();
        assert_eq!(end.code(), Code::Unavailable);
        assert_eq!(end.get_details_error_info().unwrap().reason, "SHUTTING_DOWN");
        assert!(server.ended(Duration::from_secs(20)).await.success());
        let world = ground.world().await;
        world.assert_balanced(&key, 2).await;
    }

    async fn a_client_that_leaves_in_the_middle_changes_nothing(ground: &Ground<'_>) {
        let world = ground.world().await;
        let key = world.open_sale(&Sale { total: 2_000, ..Sale::default() }).await;
        world.parts.activities.move_by_clock().await.unwrap();
        world.close().await;
        let mut server = Serve::over(&ground.settings()).start().await;
        let mut client = SeckillClient::new(server.channel().await);
        let requests = (0..2_000).map(|n| asked(&format!("u{n}"), &format!("r{n}"), 1));
        let answers = client.reserve_stream(stream::iter(requests.collect::<Vec<_>>())).await;
        let mut answers = answers.unwrap().into_inner();
        for _ in 0..10 {
            let answer = answers.next().await.unwrap().unwrap();
            assert_eq!(outcome(&answer.result.unwrap()), ReserveOutcome::Reserved);
        }
        drop((answers, client));
        server.stop().await;
        let world = ground.world().await;
        let held = eventually("what was begun is finished", async || {
            let books = world.books(&key).await;
            (books.engine_unacked == 0).then_some(books.orders_units)
        })
        .await;
        assert!((10..=2_000).contains(&held), "{held}");
        world.assert_balanced(&key, held).await;
    }
}
