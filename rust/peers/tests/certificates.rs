//! Certificates that are renewed while a server serves.
#![allow(missing_docs, reason = "tests")]

#[path = "common/authority.rs"]
mod authority;
mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use authority::{files, put, replace, signed};
use common::{ShmDir, until};
use pegaflow_peers::proto::HelloRequest;
use pegaflow_peers::proto::peer_client::PeerClient;
use pegaflow_peers::{Credentials, PeerServer, ServerOptions, TlsFiles};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            LINES.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Whether a host with these files, over a connection of its own, believes the server and is believed.
fn is_greeted(address: &str, shown: &TlsFiles, believed: &TlsFiles) -> bool {
    static SESSIONS: AtomicU8 = AtomicU8::new(1);
    let read = |path| std::fs::read(path).unwrap();
    let tls = ClientTlsConfig::new()
        .identity(Identity::from_pem(read(&shown.certificate), read(&shown.key)))
        .ca_certificate(Certificate::from_pem(read(&believed.ca)))
        .domain_name("127.0.0.1");
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let Ok(channel) = endpoint.connect().await else { return false };
        let version = pegaflow_peers::limits::PROTOCOL_VERSION;
        let session = vec![SESSIONS.fetch_add(1, Ordering::Relaxed); 16];
        PeerClient::new(channel).hello(HelloRequest { version, session, pool_id: 0 }).await.is_ok()
    })
}

#[test]
fn replaced_certificates_are_those_of_the_next_connection_and_broken_ones_of_none() {
    log::set_logger(&Lines).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let dir = ShmDir::new("certificates");
    let (old, new) = (signed(&dir.0.join("old")), signed(&dir.0.join("new")));
    let used = files(&dir.0.join("used"));
    std::fs::create_dir(dir.0.join("used")).unwrap();
    replace(&used, &old);
    let options = ServerOptions {
        listen: "127.0.0.1:0".to_owned(),
        credentials: Credentials::new(None, Some(used.clone())).unwrap(),
        data: None,
        regions: None,
    };
    let server = PeerServer::start(dir.pool("theirs", 4 << 20), options).unwrap();
    let address = until(|| server.facts().address).to_string();
    let greeted = |shown, believed| is_greeted(&address, shown, believed);
    assert!(greeted(&old, &old));
    assert!(!greeted(&new, &old) && !greeted(&old, &new), "nobody knows the other authority yet");

    replace(&used, &new);
    assert!(greeted(&new, &new));
    assert!(!greeted(&new, &old), "the server shows its new certificate");
    assert!(!greeted(&old, &new), "the server believes the new authority alone");

    assert!(LINES.lock().unwrap().is_empty(), "{:?}", LINES.lock().unwrap());
    let whole = std::fs::read(&new.ca).unwrap();
    let broken: [&dyn Fn(); 5] = [
        &|| put(&used.key, b"no key"),
        &|| put(&used.key, &std::fs::read(&old.key).unwrap()),
        &|| std::fs::remove_file(&used.certificate).unwrap(),
        &|| put(&used.ca, &whole[..whole.len() / 2]),
        &|| put(&used.ca, b""),
    ];
    for (number, breaks) in broken.iter().enumerate() {
        replace(&used, &new);
        assert!(greeted(&new, &new));
        breaks();
        assert!(greeted(&new, &new) && greeted(&new, &new), "broken in way {number}: what was before stays");
        assert!(!greeted(&old, &new));
        let lines = LINES.lock().unwrap();
        assert_eq!(lines.len(), number + 1, "one line for each way: {lines:?}");
        assert!(lines[number].contains("those from before stay"), "{lines:?}");
    }
    replace(&used, &old);
    assert!(greeted(&old, &old) && !greeted(&new, &new));
}
