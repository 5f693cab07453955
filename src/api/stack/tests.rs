use std::{convert::Infallible, future, sync::atomic};

use futures_util::{StreamExt as _, stream};
use http_body::Body as _;
use tonic_types::StatusExt as _;
use tower::service_fn;

use super::*;
use crate::config::Settings;

fn call(grpc_timeout: Option<&str>) -> Request<Body> {
    let uri = "/seckill.v1.Seckill/Reserve";
    let mut request = Request::builder().uri(uri).body(Body::empty()).unwrap();
    if let Some(text) = grpc_timeout {
        request.headers_mut().insert("grpc-timeout", text.parse().unwrap());
    }
    request
}

/// Sends one call through all layers to a service that answers so.
async fn through<F>(
    request: Request<Body>,
    answer: impl FnMut(Request<Body>) -> F,
) -> Response<Body>
where
    F: Future<Output = Result<Response<Body>, Infallible>>,
{
    layers(&Settings::default()).layer(service_fn(answer)).call(request).await.unwrap()
}

fn status(response: &Response<Body>) -> Status {
    Status::from_header_map(response.headers()).expect("a status in the headers")
}

fn reason(status: &Status) -> String {
    status.get_details_error_info().expect("an ErrorInfo").reason
}

/// The frames of a body, down to its trailers.
async fn trailers(mut body: Body) -> (usize, HeaderMap) {
    let begun = std::time::Instant::now();
    let mut data = 0;
    loop {
        assert!(begun.elapsed() < Duration::from_secs(10), "the body does not end");
        let frame = future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        match frame.expect("trailers at the end").unwrap().into_trailers() {
            Ok(trailers) => return (data, trailers),
            Err(_) => data += 1,
        }
    }
}

/// A body of one frame every `pace`, for ever.
struct Endless(Pin<Box<dyn futures_util::Stream<Item = Frame<Bytes>> + Send>>);

impl Endless {
    fn new(pace: Duration) -> Self {
        Self(Box::pin(stream::repeat(()).then(move |()| async move {
            if !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            Frame::data(Bytes::from_static(b"frame"))
        })))
    }
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.poll_next_unpin(cx).map(|frame| frame.map(Ok))
    }
}

#[test]
fn grpc_timeouts_are_read_as_the_protocol_says() {
    let cases = [
        ("1H", Some(Duration::from_secs(3_600))),
        ("2M", Some(Duration::from_secs(120))),
        ("3S", Some(Duration::from_secs(3))),
        ("200m", Some(Duration::from_millis(200))),
        ("0m", Some(Duration::ZERO)),
        ("7u", Some(Duration::from_micros(7))),
        ("99999999n", Some(Duration::from_nanos(99_999_999))),
        ("99999999H", Some(Duration::from_secs(359_999_996_400))),
        ("100000000n", None),
        ("", None),
        ("m", None),
        ("5", None),
        ("-1m", None),
        ("+1m", None),
        ("1.5S", None),
        ("1x", None),
        (" 1m", None),
        ("1mm", None),
    ];
    for (text, expected) in cases {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().unwrap());
        assert_eq!(timeout(&headers), expected, "{text:?}");
    }
    let mut headers = HeaderMap::new();
    headers.insert("grpc-timeout", http::HeaderValue::from_bytes(b"1\xffm").unwrap());
    assert_eq!(timeout(&headers), None);
    assert_eq!(timeout(&HeaderMap::new()), None);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_takes_too_long_is_deadline_exceeded() {
    let begun = Instant::now();
    let response = through(call(Some("200m")), |request| {
        assert!(request.extensions().get::<Deadline>().is_some());
        future::pending()
    })
    .await;
    assert_eq!(begun.elapsed(), Duration::from_millis(200));
    let status = status(&response);
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(reason(&status), "DEADLINE_EXCEEDED");
}

#[tokio::test]
async fn a_deadline_is_seen_before_its_timer_has_fired() {
    let mut call = Box::pin(through(call(Some("5m")), |_| future::pending()));
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert!(call.as_mut().poll(&mut context).is_pending());
    // Nothing awaits here, so the runtime gets no chance to fire a timer.
    let end = Instant::now() + Duration::from_millis(10);
    while Instant::now() < end {
        std::hint::spin_loop();
    }
    let Poll::Ready(response) = call.as_mut().poll(&mut context) else {
        panic!("tonic's timer would be asked next");
    };
    assert_eq!(status(&response).code(), Code::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_deadline_has_passed_is_not_begun() {
    for text in ["0m", "0n"] {
        let begun = Arc::new(atomic::AtomicBool::new(false));
        let seen = begun.clone();
        let response = through(call(Some(text)), |_| {
            let seen = seen.clone();
            async move {
                seen.store(true, atomic::Ordering::SeqCst);
                Ok(Response::new(Body::empty()))
            }
        })
        .await;
        assert_eq!(status(&response).code(), Code::DeadlineExceeded);
        assert!(!begun.load(atomic::Ordering::SeqCst), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_deadline_waits_and_has_none_in_its_extensions() {
    for text in [None, Some("soon"), Some("99999999H")] {
        let response = through(call(text), |request| async move {
            tokio::time::sleep(Duration::from_secs(86_400)).await;
            assert_eq!(request.extensions().get::<Deadline>().is_some(), text == Some("99999999H"));
            Ok(Response::new(Body::empty()))
        })
        .await;
        assert!(!response.headers().contains_key(Status::GRPC_STATUS), "{text:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_at_its_deadline() {
    // The one that waits between frames, and the one that always has another.
    for pace in [Duration::from_millis(30), Duration::from_secs(3_600)] {
        let begun = Instant::now();
        let response = through(call(Some("100m")), |_| async move {
            Ok(Response::new(Body::new(Endless::new(pace))))
        })
        .await;
        let (frames, trailers) = trailers(response.into_body()).await;
        assert_eq!(begun.elapsed(), Duration::from_millis(100));
        assert_eq!(frames, if pace < Duration::from_secs(1) { 3 } else { 0 });
        let status = Status::from_header_map(&trailers).unwrap();
        assert_eq!(status.code(), Code::DeadlineExceeded);
        assert_eq!(reason(&status), "DEADLINE_EXCEEDED");
    }
}

#[tokio::test]
async fn a_stream_that_never_waits_ends_at_its_deadline() {
    let response = through(call(Some("20m")), |_| async {
        Ok(Response::new(Body::new(Endless::new(Duration::ZERO))))
    })
    .await;
    let (_, trailers) = trailers(response.into_body()).await;
    assert_eq!(Status::from_header_map(&trailers).unwrap().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn a_panic_becomes_internal_without_its_text() {
    let response = through(call(None), |_| async { panic!("secret") }).await;
    let status = status(&response);
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(reason(&status), "INTERNAL");
    assert!(!format!("{status:?}").contains("secret"));
}

#[tokio::test]
async fn statuses_of_tonic_are_mended_and_all_others_stay() {
    let cases: Vec<(Status, Code, Option<&str>)> = vec![
        (
            Status::internal("Missing request message."),
            Code::InvalidArgument,
            Some("MALFORMED_MESSAGE"),
        ),
        (Status::out_of_range("too large"), Code::ResourceExhausted, Some("MESSAGE_TOO_LARGE")),
        (
            Status::resource_exhausted("too large when decompressed"),
            Code::ResourceExhausted,
            Some("MESSAGE_TOO_LARGE"),
        ),
        (Status::unimplemented(""), Code::Unimplemented, Some("UNIMPLEMENTED")),
        // Of the health service.
        (Status::not_found("service not registered"), Code::NotFound, None),
        // Ours.
        (Error::internal("x").into(), Code::Internal, Some("INTERNAL")),
        (Error::Overloaded.into(), Code::ResourceExhausted, Some("OVERLOADED")),
        (Error::Unimplemented("Reserve").into(), Code::Unimplemented, Some("UNIMPLEMENTED")),
    ];
    for (given, code, expected) in cases {
        let text = given.message().to_owned();
        let mut given = Some(given);
        let response =
            through(call(None), |_| future::ready(Ok(given.take().unwrap().into_http()))).await;
        let found = status(&response);
        assert_eq!(found.code(), code, "{text}");
        let info = found.get_details_error_info();
        assert_eq!(info.as_ref().map(|info| info.reason.as_str()), expected, "{text}");
        let layers_outside_see = response.extensions().get::<Status>().unwrap();
        assert_eq!(layers_outside_see.code(), code, "{text}");
    }
}

#[tokio::test]
async fn what_else_tonic_says_stays_in_the_headers() {
    let response = through(call(None), |_| async {
        let mut response: Response<Body> = Status::unimplemented("unknown encoding").into_http();
        response.headers_mut().insert("grpc-accept-encoding", "identity".parse().unwrap());
        Ok(response)
    })
    .await;
    assert_eq!(response.headers()["grpc-accept-encoding"], "identity");
    assert_eq!(status(&response).message(), "unknown encoding");
}
