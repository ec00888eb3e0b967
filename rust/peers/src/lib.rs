//! Blocks of other hosts' pools: who answers for a pool, who asks, and how the bytes come. `docs/p2p.md` has the rules.

pub mod limits;
pub mod transport;

/// Messages and services of `proto/peer.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod proto {
    tonic::include_proto!("pegaflow.peer.v1");
}
