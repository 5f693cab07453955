//! Traces: a span per call and per step of it, sent to a collector by OTLP.
//!
//! **Promises:** without `traces.endpoint` nothing here does anything. A call that is not sampled
//! costs a look at one header. The collector is never waited for: spans that it does not take are
//! lost. No id of a buyer is in a span.

use std::{
    sync::OnceLock,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderValue};
use opentelemetry::{
    Context, KeyValue, SpanId, TraceFlags, TraceId,
    trace::{
        Span as _, SpanContext, SpanKind, TraceContextExt as _, TraceState, Tracer as _,
        TracerProvider as _,
    },
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use tracing::{Span, Subscriber, field};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};
use uuid::Uuid;

use crate::config::{self, TracesSettings};

/// Under which name spans are made, and nothing else is.
pub(super) const TARGET: &str = "seckill::span";
/// The header of W3C Trace Context that names the caller's span.
const TRACEPARENT: &str = "traceparent";
/// The one that tells the caller of ours.
const TRACERESPONSE: &str = "traceresponse";
/// How long a collector may take.
const EXPORT_LIMIT: Duration = Duration::from_secs(5);
/// How long the last spans may take at the end.
const STOP_LIMIT: Duration = Duration::from_secs(2);

struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    per_thousand: u32,
}

/// Set once, if at all.
static TRACES: OnceLock<Traces> = OnceLock::new();

/// Begins to send spans; needs the runtime that it is called in.
pub(super) fn start<S>(settings: &TracesSettings) -> Result<impl Layer<S> + use<S>, String>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let mut exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(settings.endpoint.expose())
        .with_timeout(EXPORT_LIMIT);
    if let Some(tls) = tls(settings)? {
        exporter = exporter.with_tls_config(tls);
    }
    let exporter = exporter.build().map_err(|error| format!("traces.endpoint: {error}"))?;
    let mut resource = Resource::builder().with_attributes([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", Uuid::now_v7().to_string()),
    ]);
    if !config::names_service() {
        resource = resource.with_service_name("seckill");
    }
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource.build())
        // What is not to be sampled does not come this far.
        .with_sampler(Sampler::AlwaysOn)
        .build();
    let tracer = provider.tracer("seckill");
    let layer = tracing_opentelemetry::layer()
        .with_tracer(tracer.clone())
        .with_location(false)
        .with_threads(false)
        .with_filter(Targets::new().with_target(TARGET, tracing::Level::TRACE));
    let _ = TRACES.set(Traces { provider, tracer, per_thousand: settings.sampled_per_thousand });
    Ok(layer)
}

/// Whom the exporter trusts, and what it shows of itself: by the variables of OpenTelemetry, which the
/// exporter itself does not read.
///
/// # Errors
/// A file can't be used; the sentence names its variable.
pub fn tls(settings: &TracesSettings) -> Result<Option<ClientTlsConfig>, String> {
    if !settings.endpoint.has_scheme_of(&["https"]) {
        return Ok(None);
    }
    let mut tls = ClientTlsConfig::new();
    tls = match pem("CERTIFICATE", "CERTIFICATE-----")? {
        Some((_, ca)) => tls.ca_certificate(Certificate::from_pem(ca)),
        // By itself it would trust nobody.
        None => tls.with_native_roots(),
    };
    let cert = pem("CLIENT_CERTIFICATE", "CERTIFICATE-----")?;
    let key = pem("CLIENT_KEY", "PRIVATE KEY-----")?;
    match (cert, key) {
        (Some((_, cert)), Some((_, key))) => tls = tls.identity(Identity::from_pem(cert, key)),
        (None, None) => {}
        (Some((variable, _)), None) | (None, Some((variable, _))) => {
            return Err(format!(
                "{variable}: a client certificate needs its key, and a key its certificate"
            ));
        }
    }
    Ok(Some(tls))
}

/// What a file of that purpose holds, and the variable that names it.
fn pem(purpose: &str, marker: &str) -> Result<Option<(String, Vec<u8>)>, String> {
    let Some((variable, path)) = config::otlp_file(purpose) else { return Ok(None) };
    let at = format!("{variable} = {}", path.display());
    let pem = std::fs::read(&path).map_err(|cause| format!("{at}: can't be read: {cause}"))?;
    match pem.windows(marker.len()).any(|window| window == marker.as_bytes()) {
        true => Ok(Some((variable, pem))),
        false => Err(format!("{at}: holds no {marker}")),
    }
}

/// Sends what is left.
pub async fn stop() {
    let Some(traces) = TRACES.get() else { return };
    let shutdown = || traces.provider.shutdown_with_timeout(STOP_LIMIT);
    match tokio::task::spawn_blocking(shutdown).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the last spans were not sent"),
        Err(error) => tracing::warn!(%error, "the last spans were not sent"),
    }
}

/// Whether spans are made at all.
pub fn is_on() -> bool {
    TRACES.get().is_some()
}

/// The caller's span, as the headers of his call name it.
#[derive(Debug, Clone, Default)]
pub struct Origin(Option<SpanContext>);

/// Reads the caller's span, if spans are made at all.
pub fn origin(headers: &HeaderMap) -> Origin {
    let named = headers.get(TRACEPARENT).filter(|_| is_on());
    Origin(named.and_then(|value| parent(value.to_str().ok()?)))
}

/// The trace that the headers of a call or of its answer name, whether it is sampled or not.
pub fn told(headers: &HeaderMap) -> Option<String> {
    let named = [TRACEPARENT, TRACERESPONSE].into_iter().find_map(|name| headers.get(name))?;
    parent(named.to_str().ok()?).map(|context| context.trace_id().to_string())
}

/// The span of a call, or of a request of a stream, if it is sampled: the caller's word counts, and
/// otherwise the settings.
pub fn call(name: &str, Origin(parent): Origin) -> Span {
    let Some(traces) = TRACES.get() else { return Span::none() };
    let is_sampled = match &parent {
        Some(parent) => parent.is_sampled(),
        None => traces.samples(),
    };
    if !is_sampled {
        return Span::none();
    }
    // At level error, so that every line of the log that belongs to it shows its trace.
    let span = tracing::error_span!(
        target: TARGET,
        "call",
        otel.name = name.trim_start_matches('/'),
        otel.kind = "server",
        rpc.system = "grpc",
        rpc.grpc.status_code = field::Empty,
        trace_id = field::Empty,
    );
    if let Some(parent) = parent {
        // It has not begun yet, so it takes its parent.
        let _ = span.set_parent(Context::new().with_remote_span_context(parent));
    }
    if let Some(context) = context_of(&span) {
        span.record("trace_id", field::display(context.trace_id()));
    }
    span
}

/// Tells how the call of this span ended.
pub fn ended(span: &Span, code: i32) {
    span.record("rpc.grpc.status_code", code);
}

/// As [`ended`], and tells the caller which span it was.
pub fn answered(span: &Span, code: i32, headers: &mut HeaderMap) {
    ended(span, code);
    let Some(context) = context_of(span) else { return };
    let text = format!("00-{}-{}-01", context.trace_id(), context.span_id());
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(TRACERESPONSE, value);
    }
}

/// The span of a step of the call that we are in, if that has one.
pub fn step(name: &'static str) -> Span {
    if !is_on() || Span::current().is_none() {
        return Span::none();
    }
    tracing::trace_span!(target: TARGET, "step", otel.name = name)
}

/// The trace that we are in, if any.
pub fn trace_id() -> Option<String> {
    is_on().then(|| context_of(&Span::current()))?.map(|context| context.trace_id().to_string())
}

/// The span of work that was done for nobody in particular, if it is sampled.
pub fn worked(name: &'static str, begun: SystemTime, counts: &[(&'static str, usize)]) {
    let Some(traces) = TRACES.get().filter(|traces| traces.samples()) else { return };
    let counts = counts
        .iter()
        .map(|(key, count)| KeyValue::new(*key, i64::try_from(*count).unwrap_or(i64::MAX)));
    traces
        .tracer
        .span_builder(name)
        .with_kind(SpanKind::Internal)
        .with_start_time(begun)
        .with_attributes(counts)
        .start_with_context(&traces.tracer, &Context::new())
        .end();
}

impl Traces {
    fn samples(&self) -> bool {
        fastrand::u32(0..1_000) < self.per_thousand
    }
}

fn context_of(span: &Span) -> Option<SpanContext> {
    if span.is_none() {
        return None;
    }
    let context = span.context();
    let context = context.span().span_context().clone();
    context.is_valid().then_some(context)
}

/// Reads a `traceparent`: `00-{trace id}-{span id}-{flags}`. A later version may have more at its
/// end; what breaks the rules counts as none.
fn parent(text: &str) -> Option<SpanContext> {
    let mut parts = text.split('-');
    let mut hex = |digits: usize| {
        let part = parts.next().filter(|part| part.len() == digits)?;
        let is_hex = part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_hex.then_some(part)
    };
    let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
    if version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn a_parent_is_read_by_the_rules_of_w3c() {
        let good = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let context = parent(&good).expect("a parent");
        assert_eq!(context.trace_id().to_string(), TRACE);
        assert_eq!(context.span_id().to_string(), "00f067aa0ba902b7");
        assert!(context.is_sampled() && context.is_remote());
        let quiet = parent(&format!("00-{TRACE}-00f067aa0ba902b7-02")).expect("a parent");
        assert!(!quiet.is_sampled());
        let later = format!("01-{TRACE}-00f067aa0ba902b7-01-more");
        assert!(parent(&later).is_some());
        for bad in [
            String::new(),
            format!("{good}-more"),
            format!("ff-{TRACE}-00f067aa0ba902b7-01"),
            good.to_uppercase(),
            good.replace(TRACE, &"0".repeat(32)),
            good.replace("00f067aa0ba902b7", "0000000000000000"),
            good.replace("-01", ""),
            good.replace("4bf9", "xbf9"),
            good[..good.len() - 1].to_owned(),
        ] {
            assert_eq!(parent(&bad), None, "{bad}");
        }
    }

    #[test]
    fn nothing_is_made_where_nobody_asked_for_traces() {
        let mut headers = HeaderMap::new();
        let value = format!("00-{TRACE}-00f067aa0ba902b7-01");
        headers.insert(TRACEPARENT, HeaderValue::from_str(&value).expect("a header"));
        let span = call("/seckill.v1.Seckill/Reserve", origin(&headers));
        assert!(span.is_none() && step("script").is_none() && trace_id().is_none());
        let before = headers.len();
        answered(&span, 0, &mut headers);
        assert_eq!(headers.len(), before);
    }
}
