//! The data plane by TCP: whole parts in order over one stream, each with its checksum.

mod client;
mod inbox;
mod outbox;
mod server;
mod socket;
mod streams;
mod wire;

pub use client::TcpTransport;
pub use server::{TcpCounters, TcpServer};
