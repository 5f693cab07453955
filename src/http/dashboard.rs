//! The dashboard: three files of the binary, built from `dashboard/` by `make dashboard`.
//!
//! **Promises:** it needs nothing from elsewhere: the policy that goes along allows scripts, styles
//! and calls of this port alone. A browser asks whether a file is still current and gets it again
//! only after an update of the server.

use std::sync::LazyLock;

use axum::{
    Router,
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{
            ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY,
            CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
        },
    },
    response::{IntoResponse, Response},
    routing::get,
};

/// Nothing that is not from this port, nothing inline, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

/// A file, plain and compressed.
#[derive(Debug)]
struct File {
    path: &'static str,
    kind: &'static str,
    plain: &'static [u8],
    gzip: &'static [u8],
}

macro_rules! file {
    ($path:literal, $name:literal, $kind:literal) => {
        File {
            path: $path,
            kind: $kind,
            plain: include_bytes!(concat!("../../dashboard/dist/", $name)),
            gzip: include_bytes!(concat!("../../dashboard/dist/", $name, ".gz")),
        }
    };
}

static FILES: [File; 4] = [
    file!("/", "index.html", "text/html; charset=utf-8"),
    file!("/dashboard.js", "dashboard.js", "text/javascript; charset=utf-8"),
    file!("/dashboard.css", "dashboard.css", "text/css; charset=utf-8"),
    file!("/icon.svg", "icon.svg", "image/svg+xml"),
];

/// What a file is known by, plain and compressed.
static TAGS: LazyLock<Vec<[HeaderValue; 2]>> = LazyLock::new(|| {
    let tag = |bytes| {
        let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
        let start: String =
            digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        HeaderValue::try_from(format!("\"{start}\"")).expect("hexadecimal digits")
    };
    FILES.iter().map(|file| [tag(file.plain), tag(file.gzip)]).collect()
});

/// Adds the files to a router.
pub(super) fn add_to<S: Clone + Send + Sync + 'static>(mut router: Router<S>) -> Router<S> {
    for (file, tags) in FILES.iter().zip(TAGS.iter()) {
        router =
            router.route(file.path, get(move |headers| async move { show(file, tags, &headers) }));
    }
    router
}

fn show(file: &File, [plain, gzip]: &[HeaderValue; 2], headers: &HeaderMap) -> Response {
    let takes_gzip = takes_gzip(headers);
    let tag = if takes_gzip { gzip } else { plain };
    let known = headers.get_all(IF_NONE_MATCH).iter().filter_map(|known| known.to_str().ok());
    let is_known = known.flat_map(|known| known.split(',')).any(|known| {
        let known = known.trim();
        known == "*" || Some(known.trim_start_matches("W/")) == tag.to_str().ok()
    });
    let mut answer = if is_known {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        (if takes_gzip { file.gzip } else { file.plain }).into_response()
    };
    let answers = answer.headers_mut();
    answers.insert(ETAG, tag.clone());
    for (name, value) in [
        // It is asked for again each time, and mostly answered without a body.
        (CACHE_CONTROL, "no-cache"),
        (VARY, "accept-encoding"),
        (CONTENT_TYPE, file.kind),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CONTENT_SECURITY_POLICY, POLICY),
    ] {
        answers.insert(name, HeaderValue::from_static(value));
    }
    if takes_gzip {
        answers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    answer
}

fn takes_gzip(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0));
        name.trim().eq_ignore_ascii_case("gzip") && !refused
    })
}
