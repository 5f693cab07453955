//! ReserveStream: what Reserve does, for many requests on one stream.
//!
//! **Promises:** each request is answered once, as soon as it is decided; one that fails does not
//! end the stream. At most [`IN_FLIGHT`] are under way; until one is answered no more is read, and the
//! client waits. Each has its place among all reservations of the server, and waits for one rather than
//! being refused. It waits in a task of its own: a client that does not read keeps no place from others.
//! What was begun is finished without the client (I9).

use std::{net::IpAddr, sync::Arc};

use futures_util::{Stream, StreamExt as _, future, stream};
use tonic::Status;

use super::{
    Services, convert, pb,
    stack::mended_status,
    status::{count_error, counted, stream_error},
};
use crate::{admission::Admit, domain::ReserveOutcome, engine::batcher::Caller, error::Error};

/// Requests of one stream that are under way at once.
const IN_FLIGHT: usize = 1_024;

/// Answers `requests` until they end, or until `end`; then those that were begun, and SHUTTING_DOWN.
pub(super) fn answer(
    services: Arc<Services>,
    requests: impl Stream<Item = Result<pb::ReserveStreamRequest, Status>> + Send + 'static,
    address: Option<IpAddr>,
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
            let (services, caller) = (services.clone(), caller.clone());
            async move {
                let request = request.map_err(|status| mended_status(&status))?;
                let request = request.request.unwrap_or_default();
                let request_id = request.request_id.clone();
                let answered = answer_one(&services, &request, address, caller).await;
                let result = match answered {
                    Ok(outcome) => pb::reserve_stream_response::Result::Response(outcome.into()),
                    Err(error) => pb::reserve_stream_response::Result::Error(stream_error(error)),
                };
                Ok(pb::ReserveStreamResponse { request_id, result: Some(result) })
            }
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
        return counted(Err(error));
    }
    let request = convert::reserve(request, false, address).inspect_err(count_error)?;
    let reservations = services.reservations.clone();
    let Ok(place) = reservations.writer.room().enter() else {
        let work = async move {
            let place = reservations.writer.room().wait().await?;
            let admit = reservations.admit_with(Some(place), &request)?;
            reservations.reserve_after(admit, request, caller).await
        };
        return services.run(async { counted(work.await) }).await;
    };
    let admit = reservations.admit_with(Some(place), &request).inspect_err(count_error)?;
    if let Admit::No(outcome) = admit {
        return counted(Ok(outcome));
    }
    let work = async move { counted(reservations.reserve_after(admit, request, caller).await) };
    services.run(work).await
}
