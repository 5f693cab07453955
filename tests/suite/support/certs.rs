//! Certificate authorities and what they sign, made for one test.

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// A day.
pub(crate) const DAY: Duration = Duration::from_secs(86_400);

/// Who signs.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

/// What is signed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    pub(crate) common_name: &'static str,
    pub(crate) dns: &'static [&'static str],
    pub(crate) uri: Option<&'static str>,
    /// From when until when it is good; without it from yesterday for a month.
    pub(crate) validity: Option<(SystemTime, SystemTime)>,
}

/// A certificate with its key, in PEM.
#[derive(Debug, Clone)]
pub(crate) struct Issued {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub(crate) fn issue(&self, wanted: &Wanted) -> Issued {
        let key = KeyPair::generate().unwrap();
        let dns = wanted.dns.iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut params = CertificateParams::new(dns).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if !wanted.common_name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, wanted.common_name);
        }
        if let Some(uri) = wanted.uri {
            params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
        }
        let now = SystemTime::now();
        let (begin, end) = wanted.validity.unwrap_or((now - DAY, now + 30 * DAY));
        (params.not_before, params.not_after) = (begin.into(), end.into());
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        Issued { cert, key: key.serialize_pem() }
    }

    /// A certificate for the server of a test.
    pub(crate) fn for_server(&self) -> Issued {
        self.issue(&Wanted { dns: &["localhost", "127.0.0.1"], ..Wanted::default() })
    }
}

impl Issued {
    /// Writes both files as they would be on a server; answers with their paths.
    pub(crate) fn write(&self, folder: &Path) -> (PathBuf, PathBuf) {
        let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
        std::fs::write(&cert, &self.cert).unwrap();
        std::fs::write(&key, &self.key).unwrap();
        (cert, key)
    }
}

/// A client that trusts this authority, and shows a certificate if it has one.
pub(crate) async fn tls_channel(
    port: u16,
    trusted: &Authority,
    own: Option<&Issued>,
) -> Result<Channel, tonic::transport::Error> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&trusted.pem));
    if let Some(own) = own {
        tls = tls.identity(Identity::from_pem(&own.cert, &own.key));
    }
    let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).unwrap();
    endpoint.tls_config(tls)?.connect_timeout(Duration::from_secs(5)).connect().await
}
