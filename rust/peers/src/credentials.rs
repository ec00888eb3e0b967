//! Who may talk to whom: a token that both sides know, certificates on both sides, or both.

use std::path::PathBuf;

use pegaflow_engine::{Error, ErrorKind, Result};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

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

    pub(crate) fn server_tls(&self) -> Result<Option<ServerTlsConfig>> {
        let config = |(identity, ca)| ServerTlsConfig::new().identity(identity).client_ca_root(ca);
        Ok(self.read()?.map(config))
    }

    pub(crate) fn client_tls(&self, host: &str) -> Result<Option<ClientTlsConfig>> {
        let config = |(identity, ca)| ClientTlsConfig::new().identity(identity).ca_certificate(ca).domain_name(host);
        Ok(self.read()?.map(config))
    }

    /// Read anew each time: certificates are renewed.
    fn read(&self) -> Result<Option<(Identity, Certificate)>> {
        let Some(files) = &self.tls else { return Ok(None) };
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| invalid(format!("{} cannot be read: {error}", path.display())))
        };
        let identity = Identity::from_pem(read(&files.certificate)?, read(&files.key)?);
        Ok(Some((identity, Certificate::from_pem(read(&files.ca)?))))
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
