//! The closed loop over ReserveStream: so many requests are under way on each of a few streams.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use http::{Request, Version};
use prost::{
    Message as _,
    bytes::{BufMut as _, Bytes, BytesMut},
};
use tokio::{net::TcpStream, task::JoinSet};

use super::{Error, Frames, attempt, on_a_thread, thread_cpu};
use crate::{
    api::pb::{self, reserve_stream_response::Result as Answer},
    domain::OfferKey,
};

/// How long the last answers may take.
const LAST_ANSWERS: Duration = Duration::from_secs(10);
const WINDOW_BYTES: u32 = 1 << 24;

/// What is to be sent, and where.
#[derive(Debug, Clone)]
pub struct Streams {
    pub addr: SocketAddr,
    pub offer: OfferKey,
    /// Each stream has buyers of its own, of this series and its number.
    pub series: String,
    /// On a connection each.
    pub streams: usize,
    /// Requests under way on each.
    pub in_flight: usize,
    pub lasts: Duration,
}

/// What the streams came to.
#[derive(Debug, Default)]
pub struct Answered {
    pub counts: BTreeMap<String, u64>,
    /// New reservations that were answered while requests were sent.
    pub in_time: u64,
    pub sending: Duration,
    /// CPU time of the generator, and how long it ran.
    pub cpu: Duration,
    pub lasted: Duration,
}

impl Answered {
    /// New reservations.
    #[must_use]
    pub fn wins(&self) -> u64 {
        self.counts.get(super::RESERVED).copied().unwrap_or(0)
    }

    /// Requests of which nobody knows what they came to.
    #[must_use]
    pub fn unknown(&self) -> u64 {
        let unknown = |name: &&String| name.starts_with("error ");
        self.counts.iter().filter(|(name, _)| unknown(name)).map(|(_, count)| count).sum()
    }

    /// New reservations a second, while requests were sent.
    #[must_use]
    pub fn per_s(&self) -> f64 {
        if self.in_time == 0 {
            // Every answer took longer than requests were sent.
            return self.wins() as f64 / self.lasted.as_secs_f64().max(f64::EPSILON);
        }
        self.in_time as f64 / self.sending.as_secs_f64().max(f64::EPSILON)
    }
}

/// Sends, and waits for the last answer.
///
/// # Errors
/// A stream ended early.
pub async fn run(load: Streams) -> Result<Answered, Error> {
    on_a_thread(move || drive(load)).await
}

async fn drive(load: Streams) -> Result<Answered, Error> {
    let cpu = thread_cpu();
    let begun = Instant::now();
    let each = (0..load.streams).map(|nth| one(&load, nth, begun));
    let answered = tokio::time::timeout(load.lasts + LAST_ANSWERS, try_join_all(each)).await;
    let answered = answered
        .map_err(|_| Error::Unavailable("a stream did not answer all of its requests".into()))??;
    let mut sum = Answered { sending: load.lasts, ..Answered::default() };
    for one in answered {
        sum.in_time += one.in_time;
        for (name, count) in one.counts {
            *sum.counts.entry(name).or_default() += count;
        }
    }
    sum.lasted = begun.elapsed();
    sum.cpu = thread_cpu().saturating_sub(cpu);
    Ok(sum)
}

async fn one(load: &Streams, nth: usize, begun: Instant) -> Result<Answered, Error> {
    let broke = |error: &dyn std::fmt::Display| Error::Unavailable(format!("a stream: {error}"));
    let socket = TcpStream::connect(load.addr).await.map_err(|error| broke(&error))?;
    socket.set_nodelay(true).map_err(|error| broke(&error))?;
    let (sender, connection) = h2::client::Builder::new()
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .handshake::<_, Bytes>(socket)
        .await
        .map_err(|error| broke(&error))?;
    let mut carrying = JoinSet::new();
    carrying.spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection of the generator broke");
        }
    });
    let head = Request::post(format!("http://{}/seckill.v1.Seckill/ReserveStream", load.addr))
        .version(Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(())
        .map_err(|error| broke(&error))?;
    let mut sender = sender.ready().await.map_err(|error| broke(&error))?;
    let (response, mut requests) =
        sender.send_request(head, false).map_err(|error| broke(&error))?;

    let series = format!("{}{nth:03}", load.series);
    let mut buyer = 0;
    let mut some = |count: usize| {
        let mut bodies = BytesMut::new();
        for _ in 0..count {
            let mut request = attempt(&load.offer, &series, buyer, 1);
            // It has to name one request of the stream.
            request.request_id.clone_from(&request.user_id);
            let message = pb::ReserveStreamRequest { request: Some(request) };
            bodies.put_u8(0);
            bodies.put_u32(u32::try_from(message.encoded_len()).expect("names are short"));
            message.encode(&mut bodies).expect("the buffer grows");
            buyer += 1;
        }
        bodies.freeze()
    };
    requests.send_data(some(load.in_flight), false).map_err(|error| broke(&error))?;
    let mut open = load.in_flight;
    let mut body = response.await.map_err(|error| broke(&error))?.into_body();
    let (mut frames, mut answered) = (Frames::default(), Answered::default());
    let mut is_sending = true;
    while let Some(chunk) = body.data().await {
        let chunk = chunk.map_err(|error| broke(&error))?;
        body.flow_control().release_capacity(chunk.len()).map_err(|error| broke(&error))?;
        let in_time = begun.elapsed() < load.lasts;
        let mut ended = 0;
        frames.push(chunk, |message| {
            ended += 1;
            let name = name(&message);
            answered.in_time += u64::from(in_time && name == super::RESERVED);
            *answered.counts.entry(name).or_default() += 1;
        });
        open -= ended;
        if is_sending && in_time && ended > 0 {
            requests.send_data(some(ended), false).map_err(|error| broke(&error))?;
            open += ended;
        } else if is_sending && !in_time {
            is_sending = false;
            requests.send_data(Bytes::new(), true).map_err(|error| broke(&error))?;
        }
    }
    if open > 0 {
        return Err(Error::Unavailable(format!("a stream ended with {open} requests open")));
    }
    Ok(answered)
}

/// What a request came to, as [`super::Seen`] names it.
fn name(message: &[u8]) -> String {
    let Ok(answer) = pb::ReserveStreamResponse::decode(message) else {
        return "error unreadable".to_owned();
    };
    match answer.result {
        Some(Answer::Response(response)) => {
            let name = response.outcome().as_str_name();
            name.strip_prefix("RESERVE_OUTCOME_").unwrap_or(name).to_owned()
        }
        Some(Answer::Error(error)) if error.reason == super::OVERLOADED => error.reason,
        Some(Answer::Error(error)) => format!("error {}", error.reason),
        None => "error unreadable".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wins_that_all_came_late_count_over_all_the_time_that_they_took() {
        let mut answered = Answered {
            counts: BTreeMap::from([(crate::bench::load::RESERVED.to_owned(), 100)]),
            in_time: 50,
            sending: Duration::from_secs(1),
            lasted: Duration::from_secs(4),
            ..Answered::default()
        };
        assert!((answered.per_s() - 50.0).abs() < 1e-9);
        answered.in_time = 0;
        assert!((answered.per_s() - 25.0).abs() < 1e-9);
    }
}
