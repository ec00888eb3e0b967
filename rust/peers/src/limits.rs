//! Every maximum of the network.

use std::time::Duration;

/// Version of the protocol; peers of another one are refused.
pub const PROTOCOL_VERSION: u32 = 1;
/// Peers of one client.
pub const PEERS_MAX: usize = 256;
/// Clients of one server.
pub const SESSIONS_MAX: usize = 1024;
/// Keys of one call.
pub const CALL_KEYS_MAX: usize = 1 << 16;
/// Bytes of one message of the control plane.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Calls that a server works on at a time.
pub const CALLS_MAX: usize = 256;
/// Deadline of a call that changes nothing.
pub const FIND_TIME_MAX: Duration = Duration::from_millis(500);
/// Deadline of connecting, greeting and exchanging queue pairs.
pub const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// How long a server holds a lease that is not released.
pub const LEASE_TIME: Duration = Duration::from_secs(10);
/// Bytes of one lease.
pub const LEASE_BYTES_MAX: u64 = 256 << 20;
/// Leases of one client.
pub const SESSION_LEASES_MAX: usize = 64;
/// Leases of a server.
pub const LEASES_MAX: usize = 4096;
/// Part of the server's pool, one in so many bytes, that peers may lease.
pub const LEASED_SHARE: u64 = 4;
/// A client that has not called for so long is gone.
pub const SESSION_SILENCE_MAX: Duration = Duration::from_secs(30);
/// Streams of the TCP data plane that a server serves at a time.
pub const STREAMS_MAX: usize = 64;
/// How long a stream may stand still.
pub const STREAM_STALL_MAX: Duration = Duration::from_secs(5);
/// First pause after a peer failed; doubled up to [`BACKOFF_MAX`].
pub const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// See [`BACKOFF_MIN`].
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// How often a process that could serve tries to.
pub const SERVE_INTERVAL: Duration = Duration::from_millis(200);
