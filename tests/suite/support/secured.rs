//! Redis servers that speak TLS, with each other and with us, and want a client certificate.

use std::path::PathBuf;

use seckill::{config::Settings, engine::redis::RedisSettings};
use tempfile::TempDir;

use super::certs::{Authority, Issued, Wanted};

/// The files of servers and clients that trust one authority.
#[derive(Debug)]
pub(crate) struct Secured {
    pub(crate) authority: Authority,
    folder: TempDir,
}

impl Secured {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::new("the shop");
        std::fs::write(folder.path().join("ca.pem"), &authority.pem).unwrap();
        let served = folder.path().join("served");
        std::fs::create_dir(&served).unwrap();
        authority.for_server().write(&served);
        let secured = Self { authority, folder };
        secured.show(&secured.client("sales"));
        secured
    }

    pub(crate) fn client(&self, name: &'static str) -> Issued {
        self.authority.issue(&Wanted { common_name: name, ..Wanted::default() })
    }

    /// Puts another certificate into the files of the client.
    pub(crate) fn show(&self, issued: &Issued) {
        issued.write(self.folder.path());
    }

    pub(crate) fn file(&self, name: &str) -> String {
        let path: PathBuf = self.folder.path().join(name);
        path.to_string_lossy().into_owned()
    }

    /// What a server is started with: TLS on this port, and between servers.
    pub(crate) fn options(&self, port: u16) -> Vec<String> {
        let files = [
            ("--tls-cert-file", self.file("served/cert.pem")),
            ("--tls-key-file", self.file("served/key.pem")),
            ("--tls-ca-cert-file", self.file("ca.pem")),
        ];
        let mut options = vec!["--tls-port".to_owned(), port.to_string()];
        options.extend(["--tls-auth-clients", "yes", "--tls-replication", "yes"].map(String::from));
        for (name, file) in files {
            options.extend([name.to_owned(), file]);
        }
        options
    }

    /// How a client reaches such a server, or several.
    pub(crate) fn set(&self, settings: &mut RedisSettings) {
        settings.ca_file = self.file("ca.pem");
        settings.cert_file = self.file("cert.pem");
        settings.key_file = self.file("key.pem");
    }

    /// The same in the settings of a whole server.
    pub(crate) fn set_all(&self, settings: &mut Settings) {
        settings.engine.ca_file = self.file("ca.pem");
        settings.engine.cert_file = self.file("cert.pem");
        settings.engine.key_file = self.file("key.pem");
    }
}
