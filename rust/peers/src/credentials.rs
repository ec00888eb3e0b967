//! Who may talk to whom: a token that both sides know, certificates on both sides, or both.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use pegaflow_engine::{Error, ErrorKind, Result};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::limits::TLS_FILE_BYTES_MAX;

const HEADER: &str = "authorization";

/// Files of one side of TLS, in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate of this host, with what leads to the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the authorities that sign those of the other hosts.
    pub ca: PathBuf,
}

/// What is in these files. Not `Debug`: the key goes to no log.
#[derive(PartialEq, Eq)]
pub(crate) struct Pem {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) ca: Vec<u8>,
}

impl TlsFiles {
    /// Anew each time: certificates are renewed.
    pub(crate) fn read(&self) -> Result<Pem> {
        Ok(Pem { certificate: whole(&self.certificate)?, key: whole(&self.key)?, ca: whole(&self.ca)? })
    }
}

fn whole(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(TLS_FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| invalid(format!("{} cannot be read: {error}", path.display())))?;
    if bytes.len() as u64 > TLS_FILE_BYTES_MAX {
        return Err(invalid(format!("{} is too large to be a certificate or a key", path.display())));
    }
    Ok(bytes)
}

/// What peers show each other. Not `Debug`: the token goes to no log.
#[derive(Clone, Default)]
pub struct Credentials {
    token: Option<MetadataValue<Ascii>>,
    tls: Option<TlsFiles>,
}

impl Credentials {
    /// At least one of the two is needed.
    pub fn new(token: Option<&str>, tls: Option<TlsFiles>) -> Result<Self> {
        if token.is_none() && tls.is_none() {
            return Err(invalid("peers need to know each other: set pegaflow.peer_token, or certificates for TLS"));
        }
        let as_header = |token: &str| {
            let whole = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
            let value = whole.then(|| MetadataValue::try_from(format!("Bearer {token}")).ok()).flatten();
            let mut value = value.ok_or_else(|| {
                invalid("the token of peers is empty or has other characters than visible ASCII: choose another")
            })?;
            value.set_sensitive(true);
            Ok(value)
        };
        Ok(Self { token: token.map(as_header).transpose()?, tls })
    }

    /// Whether the control plane is encrypted.
    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Show the token.
    pub(crate) fn sign(&self, metadata: &mut MetadataMap) {
        if let Some(token) = &self.token {
            metadata.insert(HEADER, token.clone());
        }
    }

    /// Whether the caller has shown the token, if there is one. The time this takes does not tell how much was right.
    pub(crate) fn accepts(&self, metadata: &MetadataMap) -> bool {
        let Some(token) = &self.token else { return true };
        let shown = metadata.get(HEADER).map_or(&[][..], |value| value.as_encoded_bytes());
        same(token.as_encoded_bytes(), shown)
    }

    /// What a server shows, if it does.
    pub(crate) fn tls_files(&self) -> Option<&TlsFiles> {
        self.tls.as_ref()
    }

    pub(crate) fn client_tls(&self, host: &str) -> Result<Option<ClientTlsConfig>> {
        let Some(files) = &self.tls else { return Ok(None) };
        let pem = files.read()?;
        let identity = Identity::from_pem(pem.certificate, pem.key);
        let authority = Certificate::from_pem(pem.ca);
        Ok(Some(ClientTlsConfig::new().identity(identity).ca_certificate(authority).domain_name(host)))
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

fn same(known: &[u8], shown: &[u8]) -> bool {
    let differing = known.iter().enumerate().fold(known.len() ^ shown.len(), |all, (position, byte)| {
        std::hint::black_box(all | usize::from(byte ^ shown.get(position).copied().unwrap_or(!byte)))
    });
    differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_accepted() {
        let token = Credentials::new(Some("secret"), None).unwrap();
        let with = |text: &'static str| {
            let mut metadata = MetadataMap::new();
            metadata.insert(HEADER, MetadataValue::from_static(text));
            metadata
        };
        assert!(token.accepts(&with("Bearer secret")));
        for wrong in ["Bearer secre", "Bearer secrets", "bearer secret", "secret", "Bearer secreT"] {
            assert!(!token.accepts(&with(wrong)), "{wrong}");
        }
        assert!(!token.accepts(&MetadataMap::new()));
        let mut signed = MetadataMap::new();
        token.sign(&mut signed);
        assert!(token.accepts(&signed));
        assert!(!format!("{signed:?}").contains("secret"), "what is printed does not tell it");
    }

    #[test]
    fn peers_that_need_not_know_each_other_are_refused() {
        assert!(Credentials::new(None, None).is_err());
        assert!(Credentials::new(Some(""), None).is_err());
        assert!(Credentials::new(Some("a b"), None).is_err());
    }
}
