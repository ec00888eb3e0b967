"""Typed face of the Rust engine (``pegaflow._native``).

Every call that can take longer than a microsecond releases the GIL. All classes are safe to use from many threads.

Words used here:

* *key*: 1 to 32 bytes; vLLM's block hash, verbatim.
* *ref*: an ``int`` naming a slot at one generation (``generation << 32 | slot``). A ref never names the bytes of
  another block: once the slot is recycled, the ref is stale and every call treats it as absent.
* *part*: one TP x PP rank's share of a block, ``0 <= part < parts``.
* *member*: ``(row, epoch)`` of a process in the pool's process table.

Errors: any call may raise ``pegaflow.errors.ForkedProcess`` (used in a child after ``fork()``), ``PoolClosed``, or
``InvalidArgument``. Others are named at the method.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from pegaflow._native_network import Directory as Directory
from pegaflow._native_network import DirectoryQuery as DirectoryQuery
from pegaflow._native_network import Nic as Nic
from pegaflow._native_network import PeerFetch as PeerFetch
from pegaflow._native_network import PeerQuery as PeerQuery
from pegaflow._native_network import Peers as Peers
from pegaflow._native_network import PeerServer as PeerServer

__version__: str
build_profile: str
"""``"release"`` or ``"debug"``: which build this is."""

LAYOUT_VERSION: int
"""Version of the shared-memory layout; pools of other versions are refused by name."""

@final
class Pool:
    """One shared pool, mapped into this process. Open pools are process-wide singletons: opening the same pool twice
    gives two handles to one mapping and one row of the process table."""

    @staticmethod
    def open(
        name: str,
        *,
        shm_dir: str = "/dev/shm",
        pool_bytes: int | None = None,
        segment_bytes: int | None = None,
        slots_max: int | None = None,
        create: bool = True,
        label: str = "",
        huge_pages: bool = False,
        huge_pages_dir: str | None = None,
        weight: float | None = None,
        policy: str | None = None,
    ) -> Pool:
        """Attach to pool ``name``, creating it if it does not exist and ``create`` is true.

        ``pool_bytes`` (default: the smaller of 30 GB and half of what ``shm_dir`` has left), ``segment_bytes``
        (default 1 GiB, less for small pools) and ``slots_max`` (default ``pool_bytes / 16 KiB``, at least 4,096) are
        only used by the creator; an existing pool keeps its own geometry. So are ``huge_pages`` (keep blocks in
        reserved huge pages if there are enough, with a line in the log if not) and ``huge_pages_dir`` (a directory on a
        hugetlbfs; default: the mount with the most free pages that this user may write). ``label`` is shown by
        ``pegaflow inspect``.
        ``weight`` (0.001 to 1,000,000, default 1) is the process's share of the pool against the weights of others;
        ``policy`` (``"probation"``, the default, or ``"lru"``) says where its new blocks start among those that go.
        Opening the pool again in the same process changes both. Raises ``InvalidArgument`` for others,
        ``PoolNotFound``, ``PoolRefused``, ``ShmFull``, ``PoolBusy`` (process table full).
        """

    name: str
    path: str
    """Directory of the pool's files."""
    shm_dir: str
    pool_bytes: int
    segment_bytes: int
    slots_max: int
    created: bool
    """Whether this process created the pool."""

    def member(self) -> tuple[int, int]:
        """``(row, epoch)`` of this process."""

    def join(self, leader: tuple[int, int]) -> None:
        """Declare that this process copies bytes for the instance led by ``leader``: what the leader has reserved is
        not reused before this process is dead too. Call before the first copy. Raises ``PoolRefused`` if the leader's
        row has been reaped or reused."""

    def namespace(self, fingerprint: bytes, group: int, part_bytes: Sequence[int], *, label: str = "") -> Namespace:
        """Find or create the namespace of ``fingerprint`` (exactly 32 bytes) and KV cache ``group``.

        ``part_bytes`` are the bytes of one block for each part. A slot of part *p* holds at least ``part_bytes[p]``.
        Raises ``PoolRefused`` if the namespace exists with other sizes, ``PoolFull`` if the namespace table is full.
        """

    def release(self, refs: Sequence[int]) -> None:
        """Give up one lease per ref (see ``Namespace.lease``). Releasing more often than leased is an
        ``InvalidArgument``."""

    def publish(self, refs: Sequence[int]) -> int:
        """Make reserved blocks visible, in the order given. A block is published only if all its parts were marked
        written and its namespace was not reset since it was reserved; what cannot be published is freed, and so is a
        block whose key somebody else published first. Returns how many became visible."""

    def abort(self, refs: Sequence[int]) -> None:
        """Free reserved blocks. Only for blocks that no device, NIC or thread can still write."""

    def quarantine(self, refs: Sequence[int]) -> None:
        """Give up reserved blocks that somebody may still be writing: they stay out of use until this process and all
        that joined it are dead, plus the grace period."""

    def mark_written(self, part: int, refs: Sequence[int], checksums: Sequence[int] | None = None) -> int:
        """Say that ``part`` of these reserved blocks is complete in memory. Copies by ``HostCopier`` do this
        themselves. Refs that are stale or not reserved are skipped. Returns how many were marked."""

    def locate(self, ref: int, part: int) -> tuple[str, int, int] | None:
        """``(segment file, offset in bytes, length in bytes)`` of one part of a block, or ``None`` if the ref is
        stale. The bytes are stable only while the caller holds a lease (readers) or the reservation (writers)."""

    def grow_ahead(self, namespace: Namespace) -> None:
        """Ask the background thread to create the namespace's next segments now. Returns at once."""

    def set_nodes(self, namespace: Namespace, nodes: Sequence[int | None]) -> None:
        """Near which NUMA nodes this process makes memory for the parts of the namespace, for segments to come;
        ``None``: anywhere. A preference: where a node has no memory left, others are used."""

    def serve_ssd(
        self,
        directories: Sequence[str],
        *,
        capacity_bytes: int,
        admission: str = "second_touch",
        write_bytes_per_second_max: int = 0,
        read_depth: int = 16,
        write_depth: int = 8,
        backend: str = "auto",
    ) -> None:
        """Keep blocks of this pool in files in ``directories`` (one per device), ``capacity_bytes`` in all: from now on
        a thread of this process leads the pool's SSD tier when no other process does. Returns at once; the thread opens
        the files (``ssd()`` tells how that went), and goes on trying while they are in use. Only the first call in a
        process counts. ``admission``: ``"second_touch"`` (blocks that were used again, and those next to be evicted) or
        ``"all"``. ``write_bytes_per_second_max`` 0: no limit. Depths: operations on their way to one directory, 1 to
        128. ``backend``: ``"auto"``, ``"uring"`` or ``"threads"``.

        Raises ``InvalidArgument`` for options that cannot be, ``ShmFull`` if there is no room for the tier's tables,
        ``PoolRefused`` if the pool has a tier of another version."""

    def ssd(self) -> dict[str, Any] | None:
        """The pool's SSD tier, whoever leads it; ``None`` if the pool has none. ``state`` (``"none"``: nobody leads it,
        ``"recovering"``, ``"serving"`` or ``"off"``: its disks failed), ``leads`` (this process does), ``problem`` (why
        this process cannot lead, one sentence, or ``None``), and integers: ``zones_done`` of ``zones`` (recovery),
        ``records``, ``read_bytes_per_second``, ``queued_bytes`` (asked for and not in memory yet), and counters over
        all leaders that only rise: ``spilled_blocks``, ``spilled_bytes``, ``spill_lost`` (writes that failed),
        ``spill_refused`` (bytes had changed in memory), ``read_blocks``, ``read_bytes``, ``read_joined`` (blocks asked
        for again while they were being read), ``read_missed``, ``read_evicted``, ``read_damaged``, ``read_failed``,
        ``read_dropped`` (read, then not published), ``read_wait_ms_max``, ``requests``, ``requests_refused``,
        ``records_evicted``, ``hints_dropped``, ``ssd_dropped`` (blocks evicted from memory without being on SSD),
        ``resets``, ``turned_off``."""

    def ssd_read_seconds(self, block_bytes: int) -> float | None:
        """How long ``block_bytes`` more bytes from SSD would take by what is queued and the bandwidth of late;
        ``None`` if they would not come: no leader, off, or its disks do not answer."""

    def reap(self) -> int:
        """Clean up after dead processes now. Returns how many process rows were reaped."""

    def rebuild_index(self) -> int:
        """Link every sealed block into the index anew, as the background thread does after damage; lookups miss
        meanwhile. Returns how many blocks are in the index afterwards. Raises ``PoolBusy``."""

    def stats(self) -> dict[str, int]:
        """Counters of this process's use of the pool and a few gauges; keys are stable names such as
        ``lookups``, ``lookup_blocks_hit``, ``blocks_published``, ``blocks_duplicate``, ``blocks_evicted``,
        ``lock_timeouts``, ``lock_wait_us_max``, ``processes_reaped``, ``segments_created``, ``grow_failures``,
        ``bytes_used``."""

    def windows(self) -> list[tuple[int, int, int]]:
        """``(seconds, blocks asked for, distinct blocks missed)`` of late, over all processes: what a cache without
        bounds would not have found either. Empty if this process keeps no statistics."""

    def last_grow_error(self) -> str | None:
        """Why the background thread could not grow the pool last time, as one sentence; ``None`` if it could."""

    def close(self) -> None:
        """Drop this handle. The process leaves the pool when its last handle is closed. Idempotent."""

@final
class Namespace:
    """Blocks of one model, layout and KV cache group."""

    id: int
    parts: int
    part_bytes: list[int]
    block_bytes: int
    """Sum of ``part_bytes``."""

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many consecutive ``keys[start:]`` are present. Takes no lock, changes nothing."""

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 present, 0 absent. Takes no lock, changes nothing."""

    def lease(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> list[int]:
        """Pin the longest run of present ``keys[start:stop]`` and return its refs, in order. Whatever is present of
        ``keys[:start]`` is refreshed, so that a prefix never becomes older than its tail. Leased blocks
        are neither evicted nor overwritten; each ref must be given back once with ``Pool.release``. The leases of a
        dead process are dropped by whoever notices."""

    def touch(self, keys: Sequence[bytes]) -> int:
        """Refresh what is present of a chain of keys, tail oldest. Returns how many were present."""

    def reserve(
        self, keys: Sequence[bytes], *, parents: Sequence[bytes | None] | None = None, evict: bool = True
    ) -> list[tuple[int, int]]:
        """Reserve a slot for each key that is not present: ``[(index of the key, ref), ...]``, in order.

        ``parents[i]`` is the key of the block before ``keys[i]`` in its chain (``None``: it is a first block); by
        default each key is the child of the one before it in ``keys`` and the first has no parent. Never waits: what
        does not fit now is left out (the background thread makes room meanwhile). Stops at the first key that gets no
        slot, so that no chain has a hole."""

    def others(self) -> int:
        """How many other living processes have opened this namespace for themselves, not for a leader that they joined.
        A hint for those who wait for blocks: some may be counted that use another namespace only."""

    def use_ssd(self) -> bool:
        """Have blocks of this namespace, and of the other groups of its fingerprint, written to the pool's SSD tier and
        found there. ``False`` if the pool has no tier (yet). From then on ``reset`` waits until the tier has forgotten,
        for two seconds at most, and raises ``PoolBusy`` if it has not: the blocks are gone for all processes, but could
        come back if the host went down right then."""

    def tiers(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 0 absent, 1 in memory, 2 on SSD as far as is known. Takes no lock, waits for nothing,
        changes nothing. Nothing is on SSD while nobody leads the tier."""

    def prefetch(self, keys: Sequence[bytes], *, parent: bytes | None = None, chained: bool = True) -> Prefetch | None:
        """Have what is on SSD of ``keys`` brought into memory, in their order; what is in memory already is held there
        as well. ``chained``: each key is the child of the one before it and the first one of ``parent`` (``None``: it
        is a first block), and the first key that is nowhere ends it; else no block has a parent and absent ones are
        left out. ``parent`` should be leased. Of more than 1,024 keys, an eighth of the pool or 2 GiB, only the first
        are brought: ask again for the rest. Never waits; ``None`` if nobody leads the tier, it is off, or too many
        requests are open: go on without."""

    def reset(self, *, wait: bool = True) -> int:
        """Invalidate every block of this namespace, and of the other groups of its fingerprint, for all processes at
        once, with one store; reservations made before can never be published. Blocks that are leased keep their bytes
        until they are released. Returns the new epoch. With ``wait``, of a namespace that takes part in an SSD tier:
        when the files have forgotten as well. ``PoolBusy`` if they have not after two seconds, or at once if the tier
        is off or nobody leads it: then the blocks are invalid all the same, but could come back if the host went down
        before the next leader has opened the files."""

    def note_prompt(
        self, keys: Sequence[bytes], *, start: int, ram: int, ssd: int, peer: int, late: int, stop: int | None = None
    ) -> tuple[int, int, int, int, int] | None:
        """Count a prompt of ``keys[:stop]`` in the statistics of the pool, once it is known what of it was found; call
        it once for each prompt. Positions: blocks before ``start`` were not needed, those before ``ram`` were in
        memory, before ``ssd`` they came from SSD, before ``peer`` from other hosts, and those before ``late`` were
        there and not here in time; ``start <= ram <= ssd <= peer <= late <= stop``, else ``InvalidArgument``. Returns
        how many blocks were ``(never stored, evicted, stored under another fingerprint or before a reset, late, with
        an SSD tier that does not serve)``; ``None`` if this process keeps no statistics. Waits for nothing."""

    def note_loaded(self, blocks: int) -> None:
        """Count blocks that were copied from the pool to where they are used."""

    def stats(self) -> dict[str, int]:
        """``slots``, ``slots_free``, ``blocks_sealed``, ``blocks_reserved`` (counted by a scan)."""

@final
class Prefetch:
    """A request to the SSD tier. Dropped without ``close`` it is closed. A process that dies is as good as that."""

    keys: int
    """How many keys were taken."""

    def poll(self) -> int | None:
        """``None`` while blocks are on their way, else how many of the keys were found in memory or brought there,
        from the first on if ``chained``. They are held for up to ten seconds, or until ``close``: lease them first."""

    def found(self) -> int:
        """As ``poll``, but how many it is so far."""

    def close(self) -> None:
        """Give up what the request holds, and ask for no more of it. What is being read comes into memory all the same,
        held by nobody. Idempotent."""

@final
class KVLayout:
    """Where the blocks of one KV cache group lie in this process's memory."""

    def __new__(cls, regions: Sequence[tuple[int, int, int]], blocks: int) -> KVLayout:
        """``regions``: one ``(address, stride_bytes, length_bytes)`` per contiguous fragment of a block: fragment of
        block *b* is ``[address + b * stride_bytes, + length_bytes)``. In a slot the fragments follow each other in
        this order. ``blocks``: number of blocks; ids outside ``0 <= id < blocks`` are refused. The caller keeps the
        memory alive until every job that uses the layout is done."""

    block_bytes: int
    blocks: int

@final
class CopyDone:
    """Outcome of one copy job."""

    job: int
    ok: bool
    failed: list[int]
    """Indices (into the job's ``refs``) that were not copied: stale ref, checksum mismatch, wrong length."""
    bytes: int
    seconds: float
    error: str | None
    """Why the job failed, if the reason is none of these: what the device's driver said."""

@final
class HostCopier:
    """Copies between host memory and slots on its own threads. One job completes once, when its last byte is in
    place."""

    def __new__(cls, pool: Pool, *, threads: int = 0, checksum: bool = True) -> HostCopier:
        """``threads`` 0: the smaller of 4 and the number of CPUs this process may use. ``checksum``: compute a
        checksum of every part on save, and compare it on load where one was stored."""

    threads: int

    def save(self, part: int, layout: KVLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying blocks into reserved slots; parts are marked written as they complete. Returns a job id.
        ``refs`` and ``block_ids`` have equal length. Raises ``PoolBusy`` if too many jobs are queued."""

    def load(self, part: int, layout: KVLayout, refs: Sequence[int], block_ids: Sequence[int]) -> int:
        """Start copying leased slots into blocks. Returns a job id."""

    def poll(self) -> list[CopyDone]:
        """Jobs that completed since the last call. Never waits."""

    def wait(self, timeout_ms: int) -> list[CopyDone]:
        """Like ``poll``, but waits up to ``timeout_ms`` milliseconds for at least one if any is in flight."""

    def in_flight(self) -> int:
        """Jobs started and not yet returned by ``poll`` or ``wait``."""

    def close(self) -> None:
        """Finish what is queued, then stop the threads. Idempotent."""

@final
class CudaCopier:
    """Like ``HostCopier``, between slots and the memory of one CUDA device: layouts hold device addresses, and nothing
    is checksummed. Uses the device's primary context (PyTorch's), streams of its own and one thread; never synchronises
    the device. While ``healthy()``, the device is done with a job once it is reported; afterwards the slots of failed
    saves have to be quarantined rather than aborted, since they may still be written."""

    def __new__(
        cls,
        pool: Pool,
        device: int = 0,
        *,
        backend: str = "auto",
        ctas: int = 32,
        ring_buffers: int = 3,
        ring_buffer_bytes: int = 16_777_216,
        copy_streams: int = 1,
        batch_copies: bool = True,
        direct_bytes_min: int = 0,
        direct_save_bytes_min: int = 0,
        save_bytes_per_second_max: int = 0,
        register: bool = True,
        register_chunk_bytes: int = 16_777_216,
    ) -> CudaCopier:
        """``device``: as PyTorch numbers them. ``backend``: ``"staged"`` (contiguous copies between slots and a ring in
        device memory, a kernel between ring and blocks), ``"direct"`` (a copy per run of bytes), ``"kernel"`` (a kernel
        that uses the slots by itself) or ``"auto"`` (direct where the runs of a block have ``direct_bytes_min`` bytes
        on average, else staged; 0: 1 MiB for loads and 64 KiB for saves if the driver takes many copies in one call,
        else 4 MiB; saves: ``direct_save_bytes_min``, if not 0). ``ctas``: size of a kernel at most. The rings of both
        directions take ``2 * ring_buffers * ring_buffer_bytes`` bytes of device memory. ``copy_streams`` per direction.
        ``batch_copies``: hand several copies over in one call where the driver can. ``save_bytes_per_second_max`` 0: no
        limit. ``register``: page-lock segments as ``register()`` asks, ``register_chunk_bytes`` at a time; what is not
        page-locked goes through page-locked buffers. Raises ``DeviceError`` if there is no driver or device or it has
        no memory left."""

    device: int

    def register(self, namespace: Namespace, part: int) -> None:
        """Page-lock, in the background, the segments that hold ``part`` of the namespace's blocks, now and as the pool
        grows. Chunks that a job needs go first. Without this, everything goes through page-locked buffers."""

    def unregister(self, namespace: Namespace, part: int) -> None:
        """Undo ``register()``, in the background."""

    def set_stepping(self, stepping: bool) -> None:
        """A step of the model begins, or has ended as far as the CPU is concerned. While steps follow each other,
        page-locking leaves the driver alone most of the time; else it goes at full speed."""

    def save(
        self,
        part: int,
        layout: KVLayout,
        refs: Sequence[int],
        block_ids: Sequence[int],
        after_stream: int | None = None,
    ) -> int:
        """Start copying blocks into reserved slots, after all that is queued by now in the CUDA stream
        ``after_stream`` (``torch.cuda.Stream.cuda_stream``; 0 is the default stream). Returns a job id."""

    def load(
        self,
        part: int,
        layout: KVLayout,
        refs: Sequence[int],
        block_ids: Sequence[int],
        after_stream: int | None = None,
        stage_ends: Sequence[int] | None = None,
    ) -> int:
        """Start copying leased slots into blocks, which are not written before all that is queued by now in
        ``after_stream`` is done. Returns a job id. ``stage_ends`` (ascending bytes, the last of them all of a block):
        the first ``stage_ends[0]`` bytes of all blocks arrive before the next of any, and so on; at most 64."""

    def take_queued(self) -> list[int]:
        """Loads in stages of which every byte was handed to the device since the last call, without a failure. Whoever
        uses their blocks on a stream has to ``wait_stage`` first, but need not wait for the copies to be done. A load
        that ends before it is asked for is only reported by ``poll``."""

    def wait_stage(self, job: int, stage: int, stream: int) -> None:
        """Let what is queued in CUDA stream ``stream`` from now on wait until a stage of a load that ``take_queued``
        named is in place. The caller does not wait. Nothing happens if the load is over."""

    def poll(self) -> list[CopyDone]:
        """Jobs that completed since the last call. Never waits."""

    def wait(self, timeout_ms: int) -> list[CopyDone]:
        """Like ``poll``, but waits up to ``timeout_ms`` milliseconds for at least one if any is in flight."""

    def in_flight(self) -> int:
        """Jobs started and not yet returned by ``poll`` or ``wait``. They own their blocks and slots until then."""

    def healthy(self) -> bool:
        """False once the device is lost: then every job fails."""

    def problem(self) -> str | None:
        """Why the device is lost; ``None`` while ``healthy()``."""

    def progress(self) -> dict[str, Any]:
        """How far page-locking has come: ``segments``, ``bytes_seen``, ``bytes_registered`` of them, ``bytes_total``
        (page-locked so far, those of segments that are gone included), ``seconds`` (since it began, without those in
        which there was nothing to do), ``driver_seconds`` (of these, those in which other
        threads waited if they needed the driver) and ``problem`` (why there will be no more, or ``None``)."""

    def stats(self) -> dict[str, int]:
        """``bytes_loaded``, ``bytes_saved``, ``load_moving_us`` and ``save_moving_us`` (bytes were on their way for so
        long), ``bytes_bounced`` (through page-locked buffers), ``pieces_staged``, ``pieces_direct``, ``pieces_kernel``,
        ``bounce_bytes`` (host memory of these buffers) and ``ring_bytes`` (device memory of the rings)."""

    def close(self) -> None:
        """Finish what is queued, then stop and give everything back. Idempotent. Raises ``PoolBusy`` if the device does
        not finish in 30 seconds; then everything stays as it is."""

@final
class ObjectStore:
    """Engine of ``pegaflow.PegaEngine``; see there."""

    @staticmethod
    def open(
        name: str | None,
        *,
        shm_dir: str = "/dev/shm",
        pool_bytes: int | None = None,
        evict: bool = False,
        checksum: bool = True,
    ) -> ObjectStore: ...

    path: str
    pool_bytes: int

    def put(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> str | bytes | None: ...
    def remove(self, key: str) -> str | bytes | None: ...
    def contains(self, key: str) -> bool: ...
    def count(self) -> int: ...
    def keys(self) -> list[str]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

def block_hash(
    algorithm: str, parent: bytes, tokens: Sequence[int], extra_keys: tuple[Any, ...] | None = None
) -> bytes:
    """vLLM's hash of a block, from the hash of the block before it (or vLLM's live ``NONE_HASH``), its tokens and its
    extra keys: ``None``, ``bool``, ``int`` of 64 bits, ``str``, ``bytes`` and tuples of them. ``algorithm``:
    ``"xxhash_cbor"`` (16 bytes) or ``"sha256_cbor"`` (32 bytes); the others pickle and are refused."""

def list_pools(shm_dir: str = "/dev/shm") -> str:
    """JSON list of the pools of this user below ``shm_dir``: ``[{name, path, state, error, pool_bytes, bytes_used,
    processes_alive, processes_dead, idle_seconds, processes_max, namespaces, namespaces_max, slots, slots_max}]``.
    ``state`` is ``"ok"``, ``"refused"`` (see ``error``) or ``"creating"``. Attaches to nothing and changes nothing."""

def inspect(path: str) -> str:
    """JSON description of one pool (directory ``path``): geometry, namespaces with blocks and bytes, leases,
    processes alive and dead. Changes nothing. Raises ``PoolNotFound`` or ``PoolRefused``."""

def verify(path: str, checksums: bool = True, progress: Callable[[int, int], object] | None = None) -> str:
    """JSON report ``{ok, blocks_checked, checksums_checked, problems: [str]}`` over every invariant of
    ``docs/shm-format.md``. Changes nothing; exact when no process is changing the pool meanwhile.
    ``progress`` is called now and then with the slots checked and their total; what it raises is raised at the end.
    Raises ``PoolNotFound`` or ``PoolRefused``."""

def ssd_inspect(directory: str, progress: Callable[[int, int], object] | None = None) -> str:
    """JSON list of the cache files in ``directory`` (fields: ``pegaflow.ssd.CacheFile``). Changes nothing. ``progress``
    is called with the zones looked at and their number, file by file; what it raises ends the call. Raises
    ``PegaFlowError`` if the directory cannot be listed."""

def ssd_verify(directories: Sequence[str], name: str, progress: Callable[[int, int], object] | None = None) -> str:
    """JSON outcome (fields: ``pegaflow.ssd.CheckReport``) of reading every record of cache ``name`` in ``directories``.
    Changes nothing. ``progress`` is called with zones, then with bytes. Raises ``PoolNotFound``, ``PoolInUse``,
    ``PoolRefused`` (not ours, or of another version), ``PoolCorrupt`` (no valid superblock), ``DeviceError``."""

def ssd_remove(directory: str, name: str, force: bool = False) -> int:
    """Delete the file of cache ``name`` in ``directory``. Returns the bytes that it took. Raises ``PoolNotFound``,
    ``PoolRefused`` if it is somebody else's, ``PoolInUse`` if a process has it open and not ``force``."""

def reap(path: str) -> int:
    """Clean up after the dead processes of the pool at ``path``. Returns how many rows were reaped."""

def remove(path: str, force: bool = False) -> None:
    """Delete a pool's files. Raises ``PoolInUse`` if a living process is attached and not ``force``."""

def system_info() -> str:
    """JSON facts that ``pegaflow doctor`` reports and Python cannot see: ``{page_bytes, cpus, memlock_bytes,
    io_uring}`` (``io_uring``: ``"ok"`` or the reason it is refused)."""

def crash_point_arm(name: str, action: str = "kill") -> None:
    """Tests only: kill -9 (``"kill"``) or stop (``"stop"``) this process at the named crash point. Raises
    ``InvalidArgument`` for an unknown name. ``PEGAFLOW_CRASH_POINT=name[:action]`` in the environment does the same."""

def crash_points() -> list[str]:
    """Names of all crash points."""
