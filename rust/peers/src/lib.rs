//! Blocks of other hosts' pools: who answers for a pool, who asks, and how the bytes come. `docs/p2p.md` has the rules.

pub mod client;
pub mod credentials;
pub mod directory;
mod fetch;
pub mod limits;
pub mod network;
mod random;
pub mod rdma;
pub mod server;
mod slot;
mod sync;
pub mod tcp;
pub mod transport;
pub mod wire;

pub use client::{PeerFacts, PeerQuery, Peers, PeersOptions, Question};
pub use credentials::{Credentials, TlsFiles};
pub use fetch::PeerFetch;
pub use server::{PeerServer, ServerFacts, ServerOptions};

/// Messages and services of `proto/peer.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod proto {
    tonic::include_proto!("pegaflow.peer.v1");
}
