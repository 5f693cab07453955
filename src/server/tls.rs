//! TLS of the gRPC port: the certificate, the CAs of clients, and reading both again.
//!
//! **Promises:** the files are checked before the port opens. New connections get the newest files
//! that were good, and those that are open keep what they began with: a bad new file changes
//! nothing but the log. No session is resumed, so nobody comes in under a certificate that was
//! good once; connections live long, and a handshake each costs little.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwap;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, MissedTickBehavior},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, InconsistentKeys, RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        server::{NoServerSessionStorage, WebPkiClientVerifier},
    },
    server::TlsStream,
};
use tokio_util::sync::CancellationToken;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _};

use crate::{
    config::{ClientCerts, Settings, Subject, TlsSettings},
    metrics,
};

/// How long before its end a certificate is worth a warning.
pub const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 86_400);
/// How often the same warning is repeated.
const REPEAT_WARNING: Duration = Duration::from_secs(86_400);
/// What a client hears that speaks HTTP/2 without TLS.
pub const SPEAKS_TLS: &str = "this port speaks TLS; call it by https";
/// What a TLS connection begins with: a handshake record.
const HANDSHAKE: u8 = 22;
/// What HTTP/2 without TLS begins with.
const PREFACE_BEGIN: &[u8] = b"PRI ";
/// The most that is read of somebody who speaks no TLS before the connection ends.
const REFUSED_BYTES: usize = 64 * 1_024;

/// Why certificates can't be used; each says which setting to look at.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{key} = {}: can't be read: {cause}", path.display())]
    Unreadable { key: &'static str, path: PathBuf, cause: io::Error },
    #[error("{key} = {}: holds no {what} in PEM form", path.display())]
    Empty { key: &'static str, path: PathBuf, what: &'static str },
    #[error("tls.key_file = {}: is not the key of the certificate in tls.cert_file", path.display())]
    OtherKey { path: PathBuf },
    #[error("tls.cert_file = {}: the certificate expired at {when}", path.display())]
    Expired { path: PathBuf, when: When },
    #[error("tls.cert_file = {}: the certificate is good from {when} on, which is later", path.display())]
    NotYet { path: PathBuf, when: When },
    #[error("{key} = {}: can't be used: {cause}", path.display())]
    Unusable { key: &'static str, path: PathBuf, cause: String },
}

/// A moment of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct When(SystemTime);

impl When {
    fn at(unix_s: i64) -> Self {
        // Before 1970 is as good as 1970, and both are over.
        Self(UNIX_EPOCH + Duration::from_secs(u64::try_from(unix_s).unwrap_or(0)))
    }

    fn now() -> Self {
        Self(SystemTime::now())
    }

    /// How long it is until then; nothing once it is over.
    #[must_use]
    pub fn is_in(self) -> Duration {
        self.0.duration_since(SystemTime::now()).unwrap_or_default()
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        prost_types::Timestamp::from(self.0).fmt(f)
    }
}

/// The certificates of one server.
#[derive(Debug)]
pub struct Tls {
    settings: TlsSettings,
    subjects: Vec<Subject>,
    current: ArcSwap<Loaded>,
}

/// What the files came to.
#[derive(Debug)]
struct Loaded {
    /// As they were read, to see whether they have changed.
    contents: Contents,
    config: Arc<ServerConfig>,
    expires: When,
}

#[derive(PartialEq, Eq)]
struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Tls {
    /// Reads and checks the files; `None` where the settings name none.
    ///
    /// # Errors
    /// [`TlsError`].
    pub async fn load(settings: &Settings) -> Result<Option<Arc<Self>>, TlsError> {
        let tls = &settings.tls;
        if tls.cert_file.is_empty() {
            return Ok(None);
        }
        let loaded = Loaded::from(tls, Contents::read(tls).await?)?;
        Ok(Some(Arc::new(Self {
            settings: tls.clone(),
            // The settings were validated; an entry that can't be read lets nobody in.
            subjects: settings.auth.subjects.read().unwrap_or_default(),
            current: ArcSwap::from_pointee(loaded),
        })))
    }

    /// As [`Tls::expires`], for the metrics.
    fn show_expiry(&self) {
        metrics::certificate_ends(self.expires().0);
    }

    /// When the certificate in use ends.
    #[must_use]
    pub fn expires(&self) -> When {
        self.current.load().expires
    }

    /// One handshake, with who the client is by its certificate.
    ///
    /// # Errors
    /// What went wrong, in words that may stand in a log.
    pub(super) async fn accept(
        &self,
        socket: TcpStream,
    ) -> io::Result<(TlsStream<TcpStream>, Option<Subject>)> {
        let socket = expect_tls(socket).await?;
        let acceptor = TlsAcceptor::from(self.current.load().config.clone());
        let stream = acceptor.accept(socket).await?;
        let certificates = stream.get_ref().1.peer_certificates();
        let subject = certificates.and_then(<[_]>::first).and_then(|cert| self.subject(cert));
        Ok((stream, subject))
    }

    /// The first of auth.subjects that is a name of this certificate, whose chain and time were
    /// checked in the handshake.
    fn subject(&self, certificate: &CertificateDer<'_>) -> Option<Subject> {
        let names = names(certificate);
        self.subjects
            .iter()
            .find(|subject| names.iter().any(|name| **name == *subject.name))
            .cloned()
    }

    /// Reads the files now and then, and at SIGHUP, until `shutdown`; says when the end is near.
    pub(super) async fn keep_current(self: Arc<Self>, shutdown: CancellationToken) {
        let mut hangups = signal(SignalKind::hangup())
            .inspect_err(|error| tracing::warn!(%error, "SIGHUP is not heard"))
            .ok();
        let mut ticks = tokio::time::interval(Duration::from_secs(self.settings.reload_s));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut warned = None;
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                _ = ticks.tick() => {}
                () = hangup(&mut hangups) => {}
            }
            match self.reload().await {
                Ok(false) => {}
                Ok(true) => {
                    warned = None;
                    tracing::info!(expires = %self.expires(), "the certificates were read again");
                }
                Err(error) => tracing::error!(
                    %error,
                    "the new certificates are not used; those from before stay in use"
                ),
            }
            self.show_expiry();
            self.warn_of_expiry(&mut warned);
        }
    }

    /// Takes new files into use; answers whether there were any.
    async fn reload(&self) -> Result<bool, TlsError> {
        let contents = Contents::read(&self.settings).await?;
        if contents == self.current.load().contents {
            return Ok(false);
        }
        self.current.store(Arc::new(Loaded::from(&self.settings, contents)?));
        Ok(true)
    }

    fn warn_of_expiry(&self, warned: &mut Option<Instant>) {
        let expires = self.expires();
        let left = expires.is_in();
        if left > EXPIRY_WARNING || warned.is_some_and(|at| at.elapsed() < REPEAT_WARNING) {
            return;
        }
        *warned = Some(Instant::now());
        if left.is_zero() {
            tracing::error!(%expires, "the certificate has expired: clients refuse to connect");
        } else {
            let days = left.as_secs() / 86_400;
            tracing::warn!(%expires, days, "the certificate expires soon; replace its files");
        }
    }
}

async fn hangup(hangups: &mut Option<Signal>) {
    match hangups {
        Some(hangups) => drop(hangups.recv().await),
        None => std::future::pending().await,
    }
}

impl Contents {
    async fn read(settings: &TlsSettings) -> Result<Self, TlsError> {
        let client_ca = match settings.client_ca_file.as_str() {
            "" => None,
            path => Some(read("tls.client_ca_file", path).await?),
        };
        Ok(Self {
            cert: read("tls.cert_file", &settings.cert_file).await?,
            key: read("tls.key_file", &settings.key_file).await?,
            client_ca,
        })
    }
}

async fn read(key: &'static str, path: &str) -> Result<Vec<u8>, TlsError> {
    let read = tokio::fs::read(path).await;
    read.map_err(|cause| TlsError::Unreadable { key, path: path.into(), cause })
}

impl Loaded {
    fn from(settings: &TlsSettings, contents: Contents) -> Result<Self, TlsError> {
        let path = Path::new(&settings.cert_file);
        let chain = certificates("tls.cert_file", path, &contents.cert)?;
        let key_path = Path::new(&settings.key_file);
        let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|_| TlsError::Empty {
            key: "tls.key_file",
            path: key_path.into(),
            what: "private key",
        })?;
        let (begins, expires) = validity(path, &chain[0])?;
        let now = When::now();
        if expires <= now {
            return Err(TlsError::Expired { path: path.into(), when: expires });
        }
        if begins > now {
            return Err(TlsError::NotYet { path: path.into(), when: begins });
        }

        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("ring has suites for TLS 1.2 and 1.3");
        let builder = match &contents.client_ca {
            None => builder.with_no_client_auth(),
            Some(pem) => {
                let roots = Arc::new(roots(Path::new(&settings.client_ca_file), pem)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
                let verifier = match settings.client_certs {
                    ClientCerts::Optional => verifier.allow_unauthenticated(),
                    ClientCerts::Required => verifier,
                };
                let verifier = verifier.build().map_err(|error| TlsError::Unusable {
                    key: "tls.client_ca_file",
                    path: settings.client_ca_file.clone().into(),
                    cause: error.to_string(),
                })?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| unusable(path, key_path, error))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { contents, config: Arc::new(config), expires })
    }
}

fn certificates(
    key: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        // What a parser says of a PEM file may repeat a part of it.
        Ok(_) | Err(_) => Err(TlsError::Empty { key, path: path.into(), what: "certificate" }),
    }
}

fn roots(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    const KEY: &str = "tls.client_ca_file";
    let mut roots = RootCertStore::empty();
    for certificate in certificates(KEY, path, pem)? {
        roots.add(certificate).map_err(|error| TlsError::Unusable {
            key: KEY,
            path: path.into(),
            cause: error.to_string(),
        })?;
    }
    Ok(roots)
}

fn unusable(cert: &Path, key: &Path, error: rustls::Error) -> TlsError {
    if error == rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) {
        return TlsError::OtherKey { path: key.into() };
    }
    TlsError::Unusable { key: "tls.cert_file", path: cert.into(), cause: error.to_string() }
}

/// From when until when a certificate is good.
fn validity(path: &Path, der: &CertificateDer<'_>) -> Result<(When, When), TlsError> {
    let (_, parsed) = X509Certificate::from_der(der).map_err(|error| TlsError::Unusable {
        key: "tls.cert_file",
        path: path.into(),
        cause: error.to_string(),
    })?;
    let validity = parsed.validity();
    Ok((When::at(validity.not_before.timestamp()), When::at(validity.not_after.timestamp())))
}

/// The DNS names and URIs of a certificate. Without any it is the common name, which many a CA
/// takes from the one who asks; so it counts only where nothing better is there.
fn names(der: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(der) else { return Vec::new() };
    let mut names = Vec::new();
    if let Ok(Some(alternative)) = parsed.subject_alternative_name() {
        for name in &alternative.value.general_names {
            if let GeneralName::DNSName(name) | GeneralName::URI(name) = name {
                names.push((*name).to_owned());
            }
        }
    }
    if names.is_empty() {
        let mut common = parsed.subject().iter_common_name();
        if let (Some(name), None) = (common.next(), common.next())
            && let Ok(name) = name.as_str()
        {
            names.push(name.to_owned());
        }
    }
    names
}

/// Passes on who speaks TLS. Who begins with HTTP/2 instead is told in HTTP/2 what is wrong.
async fn expect_tls(mut socket: TcpStream) -> io::Result<TcpStream> {
    let mut begin = [0; PREFACE_BEGIN.len()];
    let mut read = socket.peek(&mut begin).await?;
    if read == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if begin[0] == HANDSHAKE {
        return Ok(socket);
    }
    // More of it comes with the first packet, or it is somebody else.
    if read < begin.len() && PREFACE_BEGIN.starts_with(&begin[..read]) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        read = socket.peek(&mut begin).await?;
    }
    if begin[..read] == *PREFACE_BEGIN {
        socket.write_all(&refusal()).await?;
        socket.shutdown().await?;
        // Unread bytes would have the system drop what was just written.
        let mut rest = vec![0; 4 * 1_024];
        let mut left = REFUSED_BYTES;
        while left > 0 {
            let read = socket.read(&mut rest).await?;
            if read == 0 {
                break;
            }
            left = left.saturating_sub(read);
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the client speaks no TLS"))
}

/// An empty SETTINGS frame, and GOAWAY with a reason that a client may show.
fn refusal() -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const GOAWAY: u8 = 7;
    const INADEQUATE_SECURITY: u8 = 12;
    let mut payload = vec![0, 0, 0, 0, 0, 0, 0, INADEQUATE_SECURITY];
    payload.extend_from_slice(SPEAKS_TLS.as_bytes());
    let length = u8::try_from(payload.len()).expect("a short text");
    let mut frames = vec![0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
    frames.extend_from_slice(&[0, 0, length, GOAWAY, 0, 0, 0, 0, 0]);
    frames.extend_from_slice(&payload);
    frames
}
