//! ReserveStream: what Reserve does, for many requests on one stream.
//!
//! **Promises:** each request is answered once, as soon as it is decided; one that fails does not
//! end the stream. At most [`IN_FLIGHT`] are under way; until one is answered no more is read, and the
//! client waits. Each has its place among all reservations of the server, and waits for one rather than
//! being refused. It waits in a task of its own: a client that does not read keeps no place from others.
//! What was begun is finished without the client (I9). Each has a span of its own, below the one that
//! the metadata of the stream names.

use std::{net::IpAddr, sync::Arc};

use futures_util::{Stream, StreamExt as _, future, stream};
use tonic::{Code, Status};
use tracing::{Instrument as _, Span};

use super::{
    Services, convert,
    pb::{self, reserve_stream_response::Result as Answer},
    stack::mended_status,
    status::{count_error, counted, stream_error},
};
use crate::{
    admission::Admit, domain::ReserveOutcome, engine::batcher::Caller, error::Error,
    telemetry::spans,
};

/// Requests of one stream that are under way at once.
const IN_FLIGHT: usize = 1_024;
/// What the span of a request is called.
const SPAN: &str = "seckill.v1.Seckill/ReserveStream request";

/// Where the requests of a stream come from.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub(super) address: Option<IpAddr>,
    pub(super) span: spans::Origin,
}

/// Answers `requests` until they end, or until `end`; then those that were begun, and SHUTTING_DOWN.
pub(super) fn answer(
    services: Arc<Services>,
    requests: impl Stream<Item = Result<pb::ReserveStreamRequest, Status>> + Send + 'static,
    from: Origin,
    end: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Result<pb::ReserveStreamResponse, Status>> + Send + 'static {
    // Lives as long as somebody reads the answers.
    let connection = Arc::new(());
    let caller = Caller::new(&connection, None);
    let end = future::FutureExt::shared(end);
    let ended = end.clone();
    let answers = requests
        .take_until(end)
        .map(move |request| {
            let (services, caller, address) = (services.clone(), caller.clone(), from.address);
            // What can't be read is no request; it ends the stream.
            let span = match &request {
                Ok(_) => spans::call(SPAN, from.span.clone()),
                Err(_) => Span::none(),
            };
            let shown = span.clone();
            let answer = async move {
                let request = request.map_err(|status| mended_status(&status))?;
                let request = request.request.unwrap_or_default();
                let request_id = request.request_id.clone();
                let answered = answer_one(&services, &request, address, caller).await;
                let (code, result) = match answered.map_err(stream_error) {
                    Ok(outcome) => (Code::Ok.into(), Answer::Response(outcome.into())),
                    Err(error) => (error.code, Answer::Error(error)),
                };
                spans::ended(&shown, code);
                Ok(pb::ReserveStreamResponse { request_id, result: Some(result) })
            };
            answer.instrument(span)
        })
        .buffer_unordered(IN_FLIGHT);
    let last = stream::once(async move {
        // Held until here.
        drop(connection);
        future::FutureExt::now_or_never(ended).map(|()| Err(Error::ShuttingDown.into()))
    });
    answers.chain(last.filter_map(future::ready))
}

async fn answer_one(
    services: &Services,
    request: &pb::ReserveRequest,
    address: Option<IpAddr>,
    caller: Caller,
) -> Result<ReserveOutcome, Error> {
    if request.request_id.is_empty() {
        let error = Error::invalid("request_id", "must be set on a stream: it names the answer");
        count_error(&error);
        return Err(error);
    }
    let request = convert::reserve(request, false, address).inspect_err(count_error)?;
    let reservations = services.reservations.clone();
    let Ok(place) = reservations.writer.room().enter() else {
        let offer = request.offer.clone();
        let work = async move {
            let place = reservations.writer.room().wait().await?;
            let admit = spans::step("admission");
            let admit = admit.in_scope(|| reservations.admit_with(Some(place), &request))?;
            reservations.reserve_after(admit, request, caller).await
        };
        return services.run(async move { counted(&offer, work.await) }).await;
    };
    let admit = spans::step("admission");
    let admit = admit.in_scope(|| reservations.admit_with(Some(place), &request));
    let admit = admit.inspect_err(count_error)?;
    if let Admit::No(outcome) = admit {
        return counted(&request.offer, Ok(outcome));
    }
    let offer = request.offer.clone();
    let work =
        async move { counted(&offer, reservations.reserve_after(admit, request, caller).await) };
    services.run(work).await
}
