//! The data plane by RDMA: one-sided reads from the peer's registered segments.

mod abi;
mod answering;
mod channel;
mod client;
mod device;
mod library;
mod node;
mod packet_numbers;
mod queue_pair;
mod remote;
mod segments;
mod server;
mod wait;

pub use client::RdmaTransport;
pub use device::Nic;
pub use server::RdmaServer;
