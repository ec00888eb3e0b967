//! Every maximum of the network.

use std::time::Duration;

/// Version of the protocol; peers of another one are refused.
pub const PROTOCOL_VERSION: u32 = 2;
/// Peers of one client.
pub const PEERS_MAX: usize = 256;
/// Clients of one server.
pub const SESSIONS_MAX: usize = 1024;
/// Keys of one call.
pub const CALL_KEYS_MAX: usize = 1 << 16;
/// Bytes of one file of certificates.
pub const TLS_FILE_BYTES_MAX: u64 = 1 << 20;
/// Bytes of one message of the control plane.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Calls that a server works on at a time.
pub const CALLS_MAX: usize = 256;
/// Besides, greetings, releases and looks at its health, which wait for nothing.
pub const EXTRA_CALLS_MAX: usize = 256;
/// Addresses behind the name of one peer that are tried.
pub const HOST_ADDRESSES_MAX: usize = 8;
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
/// A peer that had no room for a channel so often in a row has failed.
pub const TURNED_AWAY_MAX: u32 = 16;
/// First pause after a peer failed; doubled up to [`BACKOFF_MAX`].
pub const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// See [`BACKOFF_MIN`].
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// How often a process that could serve tries to.
pub const SERVE_INTERVAL: Duration = Duration::from_millis(200);
/// Questions of one call.
pub const CALL_QUESTIONS_MAX: usize = 64;
/// Keys that a server looks up before it lets others of its calls go on.
pub const FIND_BATCH_KEYS: usize = 1024;
/// How long a server works on one call at most.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(10);
/// Connections of known clients that a server has open at a time.
pub const CONNECTIONS_MAX: usize = 2 * SESSIONS_MAX;
/// They are at most one for so many files that the process may open.
pub const CONNECTION_FILES: u64 = 4;
/// Connections over which nobody has shown the token yet: at most one for so many of known clients. The oldest makes
/// room for the next.
pub const STRANGERS_SHARE: usize = 4;
/// A connection over which nobody has shown the token for so long is closed.
pub const ADMISSION_TIME_MAX: Duration = CONNECT_TIME_MAX.saturating_mul(3);
/// Calls of one connection at a time.
pub const CONNECTION_CALLS_MAX: u32 = 32;
/// Pause between two pings on a connection where nothing is said.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);
/// How often a server looks which leases and sessions have ended.
pub const EXPIRY_INTERVAL: Duration = Duration::from_millis(50);
/// How long a server waits for its SSDs for one lease.
pub const LEASE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Pause between two looks whether they have answered.
pub const LEASE_WAIT_PAUSE: Duration = Duration::from_millis(1);
/// Threads of a server that wait for devices.
pub const WAITING_THREADS_MAX: usize = 8;
/// How long a process that stops waits for tasks of its control plane.
pub const STOP_WAIT_MAX: Duration = Duration::from_secs(2);
/// How often a client tells a server that it is there.
pub const GREETING_INTERVAL: Duration = Duration::from_secs(5);
/// How often a peer that turned out to be this pool itself is asked again.
pub const ITSELF_INTERVAL: Duration = Duration::from_secs(30);
/// Questions to peers that were asked and not answered yet.
pub const QUERIES_MAX: usize = 256;
/// Bytes that a client asks of one peer at a time.
pub const CHUNK_BYTES_MAX: u64 = 32 << 20;
/// Bytes of blocks that a client has asked peers for.
pub const FLIGHT_BYTES_MAX: u64 = 1 << 30;
/// Part of the client's pool, one in so many bytes, that may be on its way.
pub const FLIGHT_SHARE: u64 = 4;
/// How long a fetch waits for slots in its own pool.
pub const SLOT_WAIT_MAX: Duration = Duration::from_millis(100);
/// Pause between two looks whether there are any.
pub const SLOT_PAUSE: Duration = Duration::from_millis(2);
/// A client reads no more from a lease that ends so soon.
pub const LEASE_MARGIN: Duration = Duration::from_millis(500);
/// How long blocks that were fetched are held for who asked for them.
pub const HELD_MAX: Duration = Duration::from_secs(10);
/// A channel that was not used for so long is closed.
pub const CHANNEL_IDLE_MAX: Duration = Duration::from_secs(15);
/// Bandwidth of a peer that is assumed before any was measured, bytes per second.
pub const BANDWIDTH_ASSUMED: f64 = 1e9;
/// How long a stream may go without a request.
pub const STREAM_IDLE_MAX: Duration = Duration::from_secs(60);
/// A stream without traffic is probed so often, and given up after so many probes.
pub const STREAM_PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// See [`STREAM_PROBE_INTERVAL`].
pub const STREAM_PROBES_MAX: u32 = 3;
/// Parts of one request.
pub const STREAM_REQUEST_PARTS_MAX: usize = 512;
/// A client ends a request once it asks for so much.
pub const STREAM_REQUEST_BYTES: u64 = 8 << 20;
/// Parts that a client has asked for and not got yet. Their requests fit into the smallest buffers of the kernel even
/// if each part has a request of its own: neither side can wait for the other to read.
pub const STREAM_AHEAD_PARTS_MAX: usize = 1024;
/// A client asks for no more once so much is on its way.
pub const STREAM_AHEAD_BYTES_MAX: u64 = 64 << 20;
/// Bytes that are hashed and moved at a time: they stay in the cache of the processor in between.
pub const STREAM_PIECE_BYTES: usize = 256 << 10;
/// Bytes of one RDMA READ.
pub const RDMA_READ_BYTES_MAX: u64 = 8 << 20;
/// READs of one queue pair that are handed to the device at a time.
pub const RDMA_DEPTH_MAX: u32 = 128;
/// How often a device sends again what nobody acknowledges. (7 means for ever to some.)
pub const RDMA_RETRIES: u8 = 6;
/// Time before it does: 4.096 us times two to the power of this, 67 ms. A dead peer shows after all of them, 0.47 s.
pub const RDMA_TIMEOUT_CODE: u8 = 14;
/// Queue pairs of one session.
pub const RDMA_SESSION_PAIRS_MAX: usize = 32;
/// Queue pairs of a server.
pub const RDMA_PAIRS_MAX: usize = 4096;
/// Segments of one call.
pub const RDMA_REGIONS_MAX: usize = 1024;
/// How often completions are looked for before the thread goes to sleep.
pub const RDMA_LOOKS_MAX: usize = 64;
/// How long READs may take to end once their queue pairs are told to, and again for the queue pairs to be destroyed.
/// After that slots are left to the quarantine.
pub const RDMA_DRAIN_TIME_MAX: Duration = Duration::from_secs(1);
/// A channel of which some queue pairs have failed is used for so long; then all ports are tried again.
pub const RDMA_WORN_TIME_MAX: Duration = Duration::from_secs(30);

// Of the directory.

/// Hosts in its URL.
pub const DIRECTORY_HOSTS_MAX: usize = 64;
/// Masters of its cluster.
pub const DIRECTORY_NODES_MAX: usize = 1024;
/// Connecting to one server, and asking who is in charge.
pub const DIRECTORY_CONNECT_TIME_MAX: Duration = Duration::from_secs(1);
/// Asking hosts of the URL who is in charge, and connecting to all that are; what is left is asked the next time.
pub const DIRECTORY_CONNECT_ALL_TIME_MAX: Duration = Duration::from_secs(3);
/// How long an owner waits for a reply.
pub const DIRECTORY_PATIENCE: Duration = Duration::from_secs(2);
/// Deadline of a question.
pub const DIRECTORY_FIND_TIME_MAX: Duration = Duration::from_millis(200);
/// Keys of a question; of more, the beginnings are asked.
pub const DIRECTORY_FIND_KEYS_MAX: usize = 1 << 14;
/// Questions that wait.
pub const DIRECTORY_FINDS_MAX: usize = 64;
/// Owners that are named for one key.
pub const DIRECTORY_KEY_OWNERS_MAX: usize = 16;
/// Owners that a process remembers.
pub const DIRECTORY_OWNERS_MAX: usize = 1 << 14;
/// Bytes of an owner's record.
pub const DIRECTORY_RECORD_BYTES_MAX: usize = 600;
/// Owners of which an owner sees with each refresh whether they are still there.
pub const DIRECTORY_OWNERS_LOOKED_AT: usize = 4;
/// Numbers that a pool tries before it finds one that no other has.
pub const DIRECTORY_NUMBERS_MAX: u64 = 16;
/// First pause after the directory failed; doubled up to [`DIRECTORY_BACKOFF_MAX`].
pub const DIRECTORY_BACKOFF_MIN: Duration = Duration::from_millis(250);
/// See [`DIRECTORY_BACKOFF_MIN`]; short, since everything is to be registered again ten seconds after it is back.
pub const DIRECTORY_BACKOFF_MAX: Duration = Duration::from_secs(1);
/// How often an owner says that it is there, and looks what the store still has.
pub const DIRECTORY_REFRESH: Duration = Duration::from_secs(3);
/// An owner that has not said so for so long is dead.
pub const DIRECTORY_RECORD_LIFE: Duration = Duration::from_secs(10);
/// Entries of an owner that was dead for so long are taken away.
pub const DIRECTORY_DEAD_AFTER: Duration = Duration::from_secs(600);
/// How long a bucket stays after the last registration in it; longer than [`DIRECTORY_REPAIR_TIME`].
pub const DIRECTORY_BUCKET_LIFE: Duration = Duration::from_secs(24 * 3600);
/// An owner registers everything again in that time at most.
pub const DIRECTORY_REPAIR_TIME: Duration = Duration::from_secs(6 * 3600);
/// Blocks that are registered again at least, if there are as many.
pub const DIRECTORY_REPAIRS_PER_SECOND: f64 = 200.0;
/// For each so many blocks that are registered again one bucket is looked through.
pub const DIRECTORY_REPAIR_BUCKETS: u64 = 16;
/// Entries of a bucket on average from which on finer buckets are made: from 128 on a server keeps them in a form that
/// takes five times the memory.
pub const DIRECTORY_BUCKET_ENTRIES_MAX: u32 = 96;
/// Changes in one round trip.
pub const DIRECTORY_BATCH_MAX: usize = 2048;
/// Blocks that are gone, and not taken away yet.
pub const DIRECTORY_GONE_MAX: usize = 1 << 16;
/// Commands of one round trip that are given to the new servers of their slots one by one; if more slots than that have
/// moved for good it is better to ask for all of them anew.
pub const DIRECTORY_REDIRECTIONS_MAX: usize = 64;
/// Slots that are looked at between two writes.
pub const DIRECTORY_SCAN_SLOTS_MAX: usize = 1 << 16;
/// Pause between two looks at all slots.
pub const DIRECTORY_PASS_PAUSE: Duration = Duration::from_millis(500);
/// The pause is at least so many times what a look takes.
pub const DIRECTORY_PASS_REST: u32 = 20;
/// Buckets by which is seen how full they are.
pub const DIRECTORY_SAMPLES: usize = 16;
