//! Who calls, and which servers are trusted: what every client command takes.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use clap::Args;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tonic::{
    metadata::{Ascii, MetadataValue},
    transport::{Certificate, ClientTlsConfig, Identity},
};

use super::failure::Failure;

/// Who calls, and which servers are trusted.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = super::CALLING)]
pub struct Credentials {
    /// The bearer token to call with. Others on this machine can read arguments: rather use the
    /// variable, or --token-file.
    #[arg(
        long,
        global = true,
        value_name = "TOKEN",
        env = "SECKILL_TOKEN",
        hide_env_values = true,
        value_parser = Secret::parse
    )]
    token: Option<Secret>,
    /// A file that holds the bearer token.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SECKILL_TOKEN_FILE",
        hide_env_values = true
    )]
    token_file: Option<PathBuf>,
    /// The CA of an https server, in PEM [without it: those that this machine trusts].
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SECKILL_CA_FILE",
        hide_env_values = true
    )]
    ca_file: Option<PathBuf>,
    /// A client certificate to call with, in PEM; needs --key-file.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SECKILL_CERT_FILE",
        hide_env_values = true
    )]
    cert_file: Option<PathBuf>,
    /// The private key of --cert-file, in PEM.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SECKILL_KEY_FILE",
        hide_env_values = true
    )]
    key_file: Option<PathBuf>,
}

/// A text that is not shown.
#[derive(Clone)]
struct Secret(String);

impl Secret {
    #[expect(clippy::unnecessary_wraps, reason = "clap wants it so; nothing may repeat the text")]
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Credentials {
    /// The value of `authorization`, if there is a token.
    pub(super) fn authorization(&self) -> Result<Option<MetadataValue<Ascii>>, Failure> {
        let token = self.token.as_ref().map(|token| token.0.trim()).filter(|text| !text.is_empty());
        let (token, source) = match (token, &self.token_file) {
            (Some(_), Some(_)) => {
                let text = "a token and --token-file are both given; leave one of them out";
                return Err(Failure::Usage(text.to_owned()));
            }
            (Some(token), None) => (token.to_owned(), "--token".to_owned()),
            (None, Some(path)) => {
                let token = String::from_utf8_lossy(&read("--token-file", path)?).trim().to_owned();
                (token, named("--token-file", path))
            }
            (None, None) => return Ok(None),
        };
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Failure::Usage(format!("{source}: is no token of visible ASCII")));
        }
        let value = format!("Bearer {token}").parse();
        let mut value: MetadataValue<Ascii> = value.expect("visible ASCII");
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// What is trusted, and who we are, in TLS.
    pub(super) fn tls(&self) -> Result<ClientTlsConfig, Failure> {
        let tls = match &self.ca_file {
            None => ClientTlsConfig::new().with_native_roots(),
            Some(path) => {
                let pem = certificates("--ca-file", path)?;
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem))
            }
        };
        match (&self.cert_file, &self.key_file) {
            (None, None) => Ok(tls),
            (Some(cert), Some(key)) => {
                let cert = certificates("--cert-file", cert)?;
                let pem = read("--key-file", key)?;
                if PrivateKeyDer::from_pem_slice(&pem).is_err() {
                    let named = named("--key-file", key);
                    return Err(Failure::Usage(format!(
                        "{named}: holds no private key in PEM form"
                    )));
                }
                Ok(tls.identity(Identity::from_pem(cert, pem)))
            }
            (Some(_), None) => Err(Failure::Usage("--cert-file needs --key-file".to_owned())),
            (None, Some(_)) => Err(Failure::Usage("--key-file needs --cert-file".to_owned())),
        }
    }

    /// A flag that means nothing without TLS, if one is given.
    pub(super) fn tls_flag(&self) -> Option<&'static str> {
        let flags = [
            ("--ca-file", &self.ca_file),
            ("--cert-file", &self.cert_file),
            ("--key-file", &self.key_file),
        ];
        flags.into_iter().find(|(_, path)| path.is_some()).map(|(flag, _)| flag)
    }
}

fn named(flag: &str, path: &Path) -> String {
    format!("{flag} {}", path.display())
}

fn read(flag: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    let read = fs::read(path);
    read.map_err(|error| Failure::Usage(format!("{}: can't be read: {error}", named(flag, path))))
}

fn certificates(flag: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    let pem = read(flag, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    if found.is_ok_and(|found| !found.is_empty()) {
        return Ok(pem);
    }
    Err(Failure::Usage(format!("{}: holds no certificate in PEM form", named(flag, path))))
}
