//! Who may call what: the one table, and the layer that keeps to it.
//!
//! **Promises:** what is not in the table is not served. A caller is judged before the body of the
//! call is read, so a refusal costs no decoding and asks no store. A token is compared with every
//! entry of the settings by its digest, in a time that depends on neither. What the caller sent as
//! `authorization` is taken out of the request, so nobody behind this layer can write it anywhere.

use std::{collections::HashMap, future, future::Ready, sync::Arc, task};

use futures_util::future::Either;
use http::{HeaderMap, HeaderValue, Request, Response, header::AUTHORIZATION};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use tonic::{Code, body::Body, codegen::Service, transport::server::TcpConnectInfo};
use tower::Layer;

use super::{pb::ErrorReason, status::Fault};
use crate::config::{Role, Settings, Subject, Token, digest};

/// The longest token that is looked at; those of `seckill token new` have 68 bytes.
pub const TOKEN_MAX_BYTES: usize = 512;

/// Who may call one method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Whoever has this role.
    Role(Role),
    /// Everybody, unless auth.open_health is off: then `viewer`.
    Health,
    /// `viewer`, unless auth.open_reflection is on: then everybody.
    Reflection,
}

/// Who may call what, in the order of the proto files.
pub const TABLE: &[(&str, Need)] = &[
    ("seckill.v1.Seckill/Warmup", Need::Role(Role::Ops)),
    ("seckill.v1.Seckill/Reserve", Need::Role(Role::Order)),
    ("seckill.v1.Seckill/ReserveStream", Need::Role(Role::Order)),
    ("seckill.v1.Seckill/Release", Need::Role(Role::Order)),
    ("seckill.v1.Seckill/Confirm", Need::Role(Role::Order)),
    ("seckill.v1.Seckill/GetReservation", Need::Role(Role::Order)),
    ("seckill.v1.Seckill/WatchStock", Need::Role(Role::Viewer)),
    ("seckill.v1.SeckillAdmin/CreateActivity", Need::Role(Role::Ops)),
    // A dashboard needs these two and GetPipelineStatus; they show nothing of buyers.
    ("seckill.v1.SeckillAdmin/GetActivity", Need::Role(Role::Viewer)),
    ("seckill.v1.SeckillAdmin/ListActivities", Need::Role(Role::Viewer)),
    ("seckill.v1.SeckillAdmin/ApproveActivity", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/PauseActivity", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/ResumeActivity", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/EndActivity", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/SettleActivity", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/AdjustStock", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/GetPipelineStatus", Need::Role(Role::Viewer)),
    ("seckill.v1.SeckillAdmin/Reconcile", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/RebuildStock", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/ListDeadLetters", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/RetryDeadLetter", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/DiscardDeadLetter", Need::Role(Role::Ops)),
    ("seckill.v1.SeckillAdmin/ListAudit", Need::Role(Role::Ops)),
    ("grpc.health.v1.Health/Check", Need::Health),
    ("grpc.health.v1.Health/Watch", Need::Health),
    ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Need::Reflection),
    ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Need::Reflection),
];

/// The other end of a connection; in the extensions of each of its calls.
#[derive(Debug, Clone)]
pub struct Peer {
    pub tcp: TcpConnectInfo,
    /// Who it is by its certificate, if the settings know it.
    pub subject: Option<Subject>,
}

/// Who calls; in the extensions of a call whose caller was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The name of the token or of the certificate.
    pub name: Arc<str>,
    pub role: Role,
}

/// The table under the settings of one server.
#[derive(Debug)]
pub struct Access {
    /// Whether callers are asked who they are.
    asks: bool,
    tokens: Vec<Token>,
    /// By path; `None`: everybody may.
    rules: HashMap<String, Option<Role>>,
}

impl Access {
    /// What these settings say. They are valid; an entry that can't be read would let nobody in.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let auth = &settings.auth;
        let viewer_unless = |open: bool| if open { None } else { Some(Role::Viewer) };
        let role = |need: Need| match need {
            Need::Role(role) => Some(role),
            Need::Health => viewer_unless(auth.open_health),
            Need::Reflection => viewer_unless(auth.open_reflection),
        };
        Self {
            asks: settings.asks_callers(),
            tokens: auth.tokens.read().unwrap_or_default(),
            rules: TABLE.iter().map(|(rpc, need)| (format!("/{rpc}"), role(*need))).collect(),
        }
    }

    /// Lets a call pass, with who it is from, or says why not.
    fn judge(&self, request: &mut Request<Body>) -> Result<(), Fault> {
        let authorization = take_authorization(request.headers_mut());
        let peer = request.extensions().get::<Peer>();
        let (tcp, subject) =
            (peer.map(|peer| peer.tcp.clone()), peer.and_then(|p| p.subject.clone()));
        // Where `Request::remote_addr` looks.
        if let Some(tcp) = tcp {
            request.extensions_mut().insert(tcp);
        }
        let path = request.uri().path();
        let Some(role) = self.rules.get(path) else {
            let message = "there is no such method";
            return Err(Fault::new(Code::Unimplemented, ErrorReason::Unimplemented, message));
        };
        if !self.asks {
            return Ok(());
        }
        let Some(needed) = *role else { return Ok(()) };
        let identity = self.identify(authorization, subject)?;
        if identity.role < needed {
            return Err(wrong_role(path, needed, identity.role));
        }
        request.extensions_mut().insert(identity);
        Ok(())
    }

    /// A token goes before a certificate, also a bad one: what a caller claims is never ignored.
    fn identify(
        &self,
        authorization: Authorization,
        subject: Option<Subject>,
    ) -> Result<Identity, Fault> {
        match (authorization, subject) {
            (Authorization::Once(value), _) => {
                bearer(&value).and_then(|token| self.find(token)).ok_or_else(bad_token)
            }
            (Authorization::Many, _) => Err(bad_token()),
            (Authorization::None, Some(Subject { name, role })) => Ok(Identity { name, role }),
            (Authorization::None, None) => Err(missing_token()),
        }
    }

    /// The entry of a token. Every entry is compared, and the place of the right one is picked
    /// without a branch on it.
    fn find(&self, token: &[u8]) -> Option<Identity> {
        let digest = digest(token);
        let (mut found, mut place) = (Choice::from(0), 0_u64);
        for (index, entry) in (0_u64..).zip(&self.tokens) {
            let same = digest.ct_eq(&entry.digest);
            place.conditional_assign(&index, same);
            found |= same;
        }
        let entry = self.tokens.get(usize::try_from(place).ok()?)?;
        bool::from(found).then(|| Identity { name: entry.name.clone(), role: entry.role })
    }
}

enum Authorization {
    None,
    Once(HeaderValue),
    Many,
}

fn take_authorization(headers: &mut HeaderMap) -> Authorization {
    let many = headers.get_all(AUTHORIZATION).iter().nth(1).is_some();
    // This takes all of them.
    match headers.remove(AUTHORIZATION) {
        None => Authorization::None,
        Some(_) if many => Authorization::Many,
        Some(value) => Authorization::Once(value),
    }
}

/// The token of `Bearer token`: visible ASCII, and not too much of it.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, token) = value.as_bytes().split_at_checked(SCHEME.len())?;
    let is_token = (1..=TOKEN_MAX_BYTES).contains(&token.len())
        && token.iter().all(u8::is_ascii_graphic)
        && scheme.eq_ignore_ascii_case(SCHEME);
    is_token.then_some(token)
}

fn missing_token() -> Fault {
    let message = "send a token in the metadata `authorization: Bearer ...`, or connect with a \
                   client certificate that the server knows";
    Fault::new(Code::Unauthenticated, ErrorReason::MissingToken, message)
}

/// It does not say what is wrong, and repeats nothing.
fn bad_token() -> Fault {
    Fault::new(Code::Unauthenticated, ErrorReason::BadToken, "the bearer token is not known")
}

fn wrong_role(path: &str, needed: Role, role: Role) -> Fault {
    let method = path.rsplit('/').next().unwrap_or(path);
    let message = format!("{method} needs the role {needed}; this caller has the role {role}");
    Fault::new(Code::PermissionDenied, ErrorReason::WrongRole, message)
        .with("method", method)
        .with("needed_role", needed.as_str())
        .with("role", role.as_str())
}

/// Refuses calls of those who may not make them.
#[derive(Debug, Clone)]
pub struct Guard(pub Arc<Access>);

/// A service behind [`Guard`].
#[derive(Debug, Clone)]
pub struct Guarded<S> {
    access: Arc<Access>,
    inner: S,
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Guarded { access: self.0.clone(), inner }
    }
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, cx: &mut task::Context<'_>) -> task::Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.access.judge(&mut request) {
            Ok(()) => Either::Right(self.inner.call(request)),
            Err(fault) => Either::Left(future::ready(Ok(fault.into_status().into_http()))),
        }
    }
}

#[cfg(test)]
mod tests;
