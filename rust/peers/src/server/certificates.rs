//! Certificates of a server: looked at for each connection, since they are renewed while it serves.

use std::sync::Arc;

use pegaflow_engine::{Error, ErrorKind, Result};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::described;
use crate::credentials::{Pem, TlsFiles};

/// The protocol of gRPC.
const HTTP_2: &[u8] = b"h2";

/// What a server shows, and whom it believes.
pub(crate) struct Certificates {
    files: TlsFiles,
    /// What was in the files at last, or why they could not be read.
    last: std::result::Result<Pem, String>,
    /// Of the last that could be used.
    config: Arc<ServerConfig>,
}

impl Certificates {
    pub(crate) fn new(files: &TlsFiles) -> Result<Self> {
        let pem = files.read()?;
        let config = config_of(&pem).map_err(|problem| {
            let text = format!("the certificate or key for peers cannot be used: {problem}");
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        Ok(Self { files: files.clone(), last: Ok(pem), config })
    }

    /// For a connection that comes now. Files that cannot be used leave what there was before, and one line for each
    /// change of them: they may be half replaced.
    pub(crate) fn now(&mut self) -> Arc<ServerConfig> {
        let read = self.files.read().map_err(|error| error.to_string());
        if read != self.last {
            match read.as_ref().map_err(String::clone).and_then(config_of) {
                Ok(config) => self.config = config,
                Err(problem) => log::warn!(
                    "pegaflow: the new certificates for peers cannot be used, so those from before stay: {problem}"
                ),
            }
            self.last = read;
        }
        Arc::clone(&self.config)
    }
}

fn config_of(pem: &Pem) -> std::result::Result<Arc<ServerConfig>, String> {
    let certificates = |bytes: &[u8], of: &str| {
        let all = CertificateDer::pem_slice_iter(bytes).collect::<std::result::Result<Vec<_>, _>>();
        all.map_err(|error| format!("{of}: {}", described(&error)))
    };
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates(&pem.ca, "the authorities")?);
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let verifier = verifier.map_err(|error| format!("the authorities: {}", described(&error)))?;
    let key = PrivateKeyDer::from_pem_slice(&pem.key).map_err(|error| format!("the key: {}", described(&error)))?;
    let chain = certificates(&pem.certificate, "the certificate")?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(chain, key));
    let mut config = config.map_err(|error| described(&error))?;
    config.alpn_protocols.push(HTTP_2.to_vec());
    Ok(Arc::new(config))
}
