//! Every maximum of the engine, and what must hold between them.

use std::time::Duration;

/// Models under loom have few of everything, since each of them runs thousands of times.
pub(crate) const fn few(usual: usize, in_models: usize) -> usize {
    if cfg!(loom) { in_models } else { usual }
}

/// Processes that may be attached to one pool at a time; one bit each in a slot's lease words.
pub const PROCESSES_MAX: usize = few(128, 3);
/// Namespaces (fingerprint x KV cache group) of one pool.
pub const NAMESPACES_MAX: usize = few(256, 1);
/// Parts (TP x PP ranks) of one block; one bit each in a slot header.
pub const PARTS_MAX: usize = few(64, 1);
/// Segments, and so extents, of one pool.
pub const SEGMENTS_MAX: u64 = 8192;
/// Slots of one pool.
pub const SLOTS_MAX: u64 = 1 << 28;
/// Slots of one pool at least, however small it is.
pub const SLOTS_MIN: u64 = 4096;
/// Slots per unit in which header ranges are handed to extents.
pub const SLOTS_PER_RANGE: u64 = 64;
/// Locks over the index; each covers every bucket of equal low bits.
pub const STRIPES: usize = few(1024, 2);
/// Characters of a pool name.
pub const POOL_NAME_CHARS_MAX: usize = 64;
/// Bytes of a label that is kept in shared memory.
pub const LABEL_BYTES_MAX: usize = few(64, 8);
/// Smallest segment.
pub const SEGMENT_BYTES_MIN: u64 = 64 << 10;
/// Default and largest automatic segment.
pub const SEGMENT_BYTES_DEFAULT: u64 = 1 << 30;
/// Bytes of a pool; small enough that sums over extents never overflow.
pub const POOL_BYTES_MAX: u64 = 1 << 50;
/// Default pool, where the file system has twice as much left.
pub const POOL_BYTES_DEFAULT: u64 = 30_000_000_000;

/// Longest wait for locks of living siblings in one operation; after it the operation gives up.
pub const LOCK_WAIT_MAX: Duration = Duration::from_millis(20);
/// After a wait that ran out, how long nobody of this process waits for the same holder again.
pub const SLOW_HOLDER_PAUSE: Duration = Duration::from_millis(100);
/// Tries before a waiter starts to sleep between tries.
pub const LOCK_SPINS: u32 = few(64, 1) as u32;
/// Tries between two probes whether the owner of a lock is alive.
pub const LOCK_TRIES_PER_PROBE: u32 = few(4, 1) as u32;
/// Sleep between two tries.
pub const LOCK_SLEEP: Duration = Duration::from_micros(50);

/// Entries of one bucket chain that a walk follows before it calls the chain damaged.
pub const CHAIN_HOPS_MAX: usize = 4096;
/// Times a reader walks a chain again because a writer changed it meanwhile.
pub const READ_RETRIES_MAX: usize = few(64, 2);
/// Entries of a chain that a lookup of many keys steps over before it compares whole keys.
pub const CHAIN_HOPS_AHEAD: usize = 3;
/// Keys whose table entries are fetched together, so that cache misses overlap.
pub const LOOKUP_BATCH: usize = 32;

/// Eviction candidates per scan: at least, and at most.
pub const EVICT_BATCH_MIN: usize = 64;
/// See [`EVICT_BATCH_MIN`].
pub const EVICT_BATCH_MAX: usize = 16_384;
/// Scans for candidates within one call.
pub const EVICT_SCANS_MAX: usize = 2;
/// Blocks of instances within their share that one scan takes out of the way.
pub const GUARDED_MAX: usize = 16_384;
/// How long accounts are good for, unless counting them takes long.
pub const RECOUNT_PAUSE: Duration = Duration::from_millis(100);
/// Counting takes at most one part in so many of the time.
pub const RECOUNT_COST_MAX: u32 = 32;
/// Moves of one block that a reader follows.
pub const MOVES_FOLLOWED_MAX: usize = few(64, 0);
/// Longest wait for leases of blocks that have to move.
pub const LEASED_MOVE_WAIT_MAX: Duration = Duration::from_millis(500);
/// Looks of a reaper at the extents of one process: each of its threads may be at one more step with one of them.
pub const EXTENT_LOOKS_MAX: usize = 8;
/// Extents that are tried in one search for one to take.
pub const EXTENTS_TRIED_MAX: usize = 8;
/// Thousandths of the largest weight of an instance.
pub const WEIGHT_MILLI_MAX: u64 = 1_000_000_000;
/// Thousandths of the weight of an instance that chose none.
pub const WEIGHT_MILLI_DEFAULT: u64 = 1000;

/// How long a slot that a device of a dead process may still write stays out of use.
pub const QUARANTINE_GRACE: Duration = Duration::from_secs(5);
/// Pause between two looks for dead processes.
pub const REAP_INTERVAL: Duration = Duration::from_millis(100);
/// Pause between two looks at everything else, when nothing wakes the background thread.
pub const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(500);
/// How long an opener waits for another process to finish creating the pool.
pub const CREATE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Of extents from this size on, a namespace has a whole one to spare while the pool can grow: making one takes longer
/// than filling a quarter of one.
pub const SPARE_EXTENT_BYTES_MIN: u64 = 256 << 20;
/// Tries to grow with the memory of extents that were taken, [`MAINTENANCE_INTERVAL`] apart: siblings unmap it then.
pub const MEMORY_LOOKS_MAX: usize = 5;
/// How long such memory is waited for before more is taken.
pub const MEMORY_WAIT_MAX: Duration = Duration::from_secs(60);
/// Pause after a failed growth before the next try.
pub const GROW_RETRY_PAUSE: Duration = Duration::from_secs(5);

const _: () = assert!(PROCESSES_MAX <= 128, "the slot header has two lease words of 64 bits");
const _: () = assert!(PARTS_MAX <= 64, "the slot header has one word of part bits");
const _: () = assert!(STRIPES.is_power_of_two());
const _: () = assert!(SLOTS_MAX < u32::MAX as u64, "slot numbers plus one fit 32 bits");
const _: () = assert!(SEGMENTS_MAX < u16::MAX as u64, "extent numbers plus one fit 16 bits");

/// Threads of one copier.
pub const COPY_THREADS_MAX: usize = 64;
/// Threads of one copier that was not told how many; fewer where there are fewer CPUs.
pub const COPY_THREADS_DEFAULT_MAX: usize = 4;
/// Copy jobs of one copier that were started and whose outcome was not fetched yet.
pub const COPY_JOBS_IN_FLIGHT_MAX: usize = 4096;
/// Blocks of all copy jobs of one copier that are not done.
pub const COPY_ITEMS_QUEUED_MAX: usize = 1 << 22;
/// Stages of a load that a forward pass may overtake.
pub const LOAD_STAGES_MAX: usize = 64;
/// Pieces of such a load that are handed to the device ahead of it.
pub const FOLLOWED_PIECES_MAX: usize = 512;
/// Regions of one KV layout: fragments of one block.
pub const COPY_REGIONS_MAX: usize = 1 << 16;
/// Blocks of one KV layout.
pub const COPY_BLOCKS_MAX: u32 = u32::MAX;

/// Bytes of one value of the object store.
pub const OBJECT_VALUE_BYTES_MAX: u64 = 1 << 30;
/// Bytes of a key of the object store, as UTF-8.
pub const OBJECT_KEY_BYTES_MAX: usize = 64 << 10;
/// Values from here on are copied by several threads.
pub const OBJECT_PARALLEL_BYTES_MIN: usize = 1 << 20;
/// Longest wait of the object store for another process in all of one operation.
pub const OBJECT_WAIT_MAX: Duration = Duration::from_secs(2);
/// Smallest pool that an object store creates: each size class takes segments of its own.
pub const OBJECT_POOL_BYTES_MIN: u64 = 1 << 20;
/// Largest segment of a pool that an object store creates, but for pools that would have too many.
pub const OBJECT_SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// Slots at most of a pool that an object store creates; the index takes 4 bytes for each from the start.
pub const OBJECT_SLOTS_MAX: u64 = 8 << 20;

const _: () = assert!(
    OBJECT_VALUE_BYTES_MAX + OBJECT_KEY_BYTES_MAX as u64 + 4096 < u32::MAX as u64,
    "the bytes in use of a value fit 32 bits"
);

/// Bytes that one call to page-lock memory stays below: drivers refuse that many at once.
pub const REGISTRATION_BYTES_MAX: usize = 512 << 30;

/// Blocks whose reuse is followed to estimate what other sizes of a pool would find.
pub const TRAFFIC_SAMPLES_MAX: usize = few(8192, 1);
/// Places in the order of their use; when they are used up, those that are taken are numbered anew.
pub const TRAFFIC_PLACES: usize = 4 * TRAFFIC_SAMPLES_MAX;
/// Slots of the hash table of samples that are tried.
pub const TRAFFIC_PROBES_MAX: usize = 64;
/// Buckets of the histogram of reuse distances: four per octave, the first for all up to 4 KiB.
pub const TRAFFIC_BUCKETS: usize = 168;
/// Registers of an estimate of distinct blocks: its standard error is 1.04 / sqrt(registers), 1.2 %.
pub const TRAFFIC_REGISTERS: usize = 1 << 13;
/// Blocks, counted twice each, of which one of the two filters of stored blocks is full: fewest, and most.
pub const TRAFFIC_SEEN_MIN: u64 = 1 << 13;
/// See [`TRAFFIC_SEEN_MIN`].
pub const TRAFFIC_SEEN_MAX: u64 = 1 << 20;

/// Directories of one SSD cache.
pub const SSD_DIRECTORIES_MAX: usize = 64;
/// Blocks of an SSD cache file at most; no device needs more.
pub const SSD_BLOCK_BYTES_MAX: usize = 64 << 10;
/// Smallest and largest zone of an SSD cache file.
pub const SSD_ZONE_BYTES_MIN: u64 = 16 << 10;
/// See [`SSD_ZONE_BYTES_MIN`].
pub const SSD_ZONE_BYTES_MAX: u64 = 4 << 30;
/// Zones of an SSD cache file: fewest, and most.
pub const SSD_ZONES_MIN: u32 = 4;
/// See [`SSD_ZONES_MIN`].
pub const SSD_ZONES_MAX: u32 = 1 << 20;
/// Namespaces whose forgetting a superblock lists one by one.
pub const SSD_EPOCHS_MAX: usize = 96;
/// Operations on their way to one directory, each way.
pub const SSD_DEPTH_MAX: u16 = 128;
/// Damaged records that a check of an SSD cache names one by one.
pub const SSD_PROBLEMS_MAX: usize = 100;
/// Threads of one SSD cache where there is no io_uring.
pub const SSD_THREADS_MAX: u16 = 256;
/// Bytes of one operation: fewest, and most.
pub const SSD_CHUNK_BYTES_MIN: usize = 4096;
/// See [`SSD_CHUNK_BYTES_MIN`].
pub const SSD_CHUNK_BYTES_MAX: usize = 16 << 20;
/// Reads of one directory that were started and have not ended.
pub const SSD_READS_MAX: usize = 4096;
/// Tries of an operation that moves nothing.
pub const SSD_RETRIES_MAX: u32 = 16;
/// Failed reads in a row that turn a directory off.
pub const SSD_FAILED_READS_MAX: u32 = 8;
/// An operation without an answer for so long turns its directory off.
pub const SSD_HANG_MAX: Duration = Duration::from_secs(10);

/// Requests to the SSD tier of one pool that are open at a time.
pub const SSD_REQUESTS_MAX: usize = 128;
/// Keys of one of them.
pub const SSD_REQUEST_KEYS_MAX: usize = 1024;
/// Buckets of hints, of eight each: fewest, and most.
pub const SSD_HINT_BUCKETS_MIN: u64 = 1 << 9;
/// See [`SSD_HINT_BUCKETS_MIN`].
pub const SSD_HINT_BUCKETS_MAX: u64 = 1 << 22;
/// Capacity of an SSD cache for each bucket.
pub const SSD_BYTES_PER_HINT_BUCKET: u64 = 256 << 10;
/// Bytes of blocks that are being read from SSD, or are held for who asked for them; also a quarter of the pool.
pub const SSD_HELD_BYTES_MAX: u64 = 4 << 30;
/// Pause after no slot was to be had for a block that is to be read from SSD.
pub const SSD_SLOT_PAUSE: Duration = Duration::from_millis(20);
/// A request to the SSD tier that has found blocks waits no longer than this for slots for others.
pub const SSD_SLOT_WAIT_MAX: Duration = Duration::from_millis(100);
/// How long what was read from SSD is held for who asked for it.
pub const SSD_HELD_MAX: Duration = Duration::from_secs(10);
/// How long a reset waits until the SSD tier has forgotten.
pub const SSD_FORGET_WAIT_MAX: Duration = Duration::from_secs(2);
/// Slots that the search for blocks to write to SSD looks at in one round.
pub const SSD_SCAN_SLOTS_MAX: usize = 1 << 16;
/// Pause between two such passes over the pool at least.
pub const SSD_SCAN_PAUSE: Duration = Duration::from_millis(50);
/// The pause is so many times as long as what the pass took.
pub const SSD_SCAN_REST: u32 = 50;
/// Stamps of each namespace that are looked at to tell which blocks are old.
pub const SSD_SAMPLES_MAX: usize = 1024;
/// Blocks that wait to be written to SSD.
pub const SSD_SPILL_QUEUE_MAX: usize = 4096;
/// Blocks that are written to SSD in one round, so that requests are looked at in between.
pub const SSD_SPILLS_PER_ROUND_MAX: usize = 16;
/// Longest time that a block waits in a buffer for others to be written with.
pub const SSD_FLUSH_PAUSE: Duration = Duration::from_millis(50);
/// How often a process that could lead the SSD tier looks whether somebody does.
pub const SSD_LEAD_INTERVAL: Duration = Duration::from_millis(200);
/// How long a new leader tries to open files that are in use, before it lets others lead.
pub const SSD_OPEN_WAIT_MAX: Duration = Duration::from_secs(3);
/// Pause after files could not be opened.
pub const SSD_OPEN_RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Reads that wait for so long while none ends are not worth waiting for.
pub const SSD_STALL_MAX: Duration = Duration::from_millis(500);
/// From a leader of the SSD tier that has not looked around for so long nothing is expected.
pub const SSD_SILENCE_MAX: Duration = Duration::from_secs(1);
/// Bandwidth of reads that is assumed before any was measured.
pub const SSD_BANDWIDTH_ASSUMED: u64 = 500_000_000;
/// How long a process that leaves the pool waits for its disks.
pub const SSD_STOP_WAIT_MAX: Duration = Duration::from_secs(2);

const _: () = assert!(SSD_DIRECTORIES_MAX * (2 * SSD_DEPTH_MAX as usize + 2) < u16::MAX as usize);
