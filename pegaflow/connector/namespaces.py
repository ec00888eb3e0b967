"""The pool and the namespaces of one engine, on the scheduler's side.

The pool is opened when the engine starts. Namespaces come later: their size is known once every worker has reported
its layout, and their fingerprint once vLLM has seeded its block hashes and the weights have been sampled. Until then
there is nothing to find, and nobody waits: a thread makes the namespaces as soon as it can, so that the pool has grown
room for blocks when the first request comes.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pegaflow.connector.geometry import Geometry
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import PoolAddress, Rank, WorkerShape
from pegaflow.errors import PegaFlowError, PoolBusy
from pegaflow.keys import fingerprint, is_private, private

if TYPE_CHECKING:
    from pegaflow._native import Namespace, Pool

READY_WAIT_SECONDS_MAX = 3.0
"""How long requests may be put off, counted from the first, until namespaces are ready."""

PREPARE_SECONDS_MAX = 120.0
"""How long the thread that makes the namespaces keeps trying; after that the scheduler's own calls do."""

PREPARE_POLL_SECONDS = 0.01

RETRY_SECONDS = 0.5
"""Pause after the pool was too busy to make the namespaces."""

SSD_SETTLE_SECONDS = 0.25
"""How long requests are put off at the start until the SSD tier knows of the namespaces, ..."""

SSD_RECOVERY_SECONDS_MAX = 3.0
"""... and how long at most while it still looks for what is on the disks."""

SSD_ASK_SECONDS = 1.0
"""Pause between two questions whether the pool has an SSD tier by now."""

RESET_WAIT_SECONDS_MAX = 1.0
"""How long a reset waits for the thread that is making the namespaces."""


class Identity(Protocol):
    """What the fingerprint is made of."""

    label: str
    """Name of the model for people; not part of the fingerprint."""

    def sample(self) -> None:
        """Read what takes long to read, once, before ``factors``."""
        ...

    def factors(self) -> Mapping[str, object] | None:
        """Everything that changes bytes, except layouts; ``None`` while some of it is not known yet."""
        ...


class Store:
    """Pool and namespaces, or the reason why there are none."""

    def __init__(
        self,
        pool: "Pool | None",
        geometry: Geometry,
        identity: Identity,
        ranks: int,
        replicas: int,
        reopen: "Callable[[], Pool] | None" = None,
        shards: int = 1,
    ) -> None:
        """``ranks``: TP x PP workers. ``replicas``: consecutive tensor ranks that hold identical bytes. ``reopen``
        opens a pool that was busy when the engine started. ``shards``: equal runs of tensor ranks, each on a host
        of its own with a pool of its own; ``pool`` then stands for all of them."""
        self.pool = pool
        self._reopen = reopen
        self.off: str | None = None
        """Why the cache is off; ``None`` while it works."""
        self._geometry = geometry
        self._identity = identity
        self._ranks = ranks
        self._replicas = replicas
        self._shards = shards
        self._engine = uuid.uuid4().hex
        self._shapes: dict[Rank, WorkerShape] = {}
        self._told: dict[Rank, WorkerShape] = {}
        self._namespaces: dict[int, Namespace] | None = None
        self._address: PoolAddress | None = None
        self._first_asked: float | None = None
        self._factors: Mapping[str, object] | None = None
        self._private: str | None = None
        """Once set, part of the fingerprint: nobody else finds what this engine saves."""
        self._shared: list[Namespace] = []
        """Stands for what engines share that were not reset; empty while that is not known."""
        self._reset_pending = False
        """Whether what is shared has to be reset as soon as it is known."""
        self._retry_at = 0.0
        self._used = False
        self.ssd = False
        """Whether the pool keeps blocks of these namespaces on SSD too. Not those that are private: nobody would find
        them after a restart."""
        self._ssd_asked = 0.0
        self._ssd_since: float | None = None
        """When the tier was told of new namespaces; ``None`` once it knows them."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        if geometry.problem:
            self.turn_off(geometry.problem + ".")

    @property
    def shares(self) -> bool:
        """Whether others can have blocks that this engine finds."""
        return self._private is None

    def turn_off(self, reason: str) -> None:
        """From now on nothing hits and nothing is saved. Said once."""
        if self.off is None:
            self.off = reason
            self._namespaces = None
            logger.error("PegaFlow is off, vLLM goes on without it: %s", reason)

    def set_shapes(self, shapes: Mapping[Rank, WorkerShape]) -> None:
        """Take the layouts that the workers reported. May come again after a sleep, with the same layouts."""
        if shapes == self._shapes:
            return
        with self._lock:
            self._shapes = dict(shapes)
            self._namespaces, self._shared, self._address = None, [], None
        problem = self._shape_problem()
        if problem:
            self.turn_off(problem)

    def add_shapes(self, shapes: Mapping[Rank, WorkerShape]) -> None:
        """Take the layouts of some workers; see ``set_shapes``."""
        self._told.update(shapes)
        if len(self._told) == self._ranks:
            self.set_shapes(self._told)

    def prepare(self) -> None:
        """Make the namespaces in the background, as soon as everything is known that they depend on."""
        threading.Thread(target=self._prepare, name="pegaflow-namespaces", daemon=True).start()

    def namespaces(self) -> "Mapping[int, Namespace] | None":
        """Namespaces by group; ``None`` if there are none, or none yet. Never waits."""
        if self.off is not None:
            return None
        if not self._used:
            self._check_factors()
        if self._namespaces is None:
            self._create()
        self._used = self._namespaces is not None
        return self._namespaces

    def look_for_ssd(self) -> None:
        """A sibling may have given the pool an SSD tier since. Now and then; never waits."""
        now = time.monotonic()
        if not self.ssd and self._namespaces is not None and now - self._ssd_asked >= SSD_ASK_SECONDS:
            self._ssd_asked = now
            self.ssd = self._use_ssd(self._namespaces)

    def ssd_settles(self) -> bool:
        """Whether the tier does not say yet what it has, so that a request should ask again. Bounded in time."""
        if self._ssd_since is None:
            return False
        waited = time.monotonic() - self._ssd_since
        if waited < SSD_SETTLE_SECONDS:
            return True
        tier = self.pool.ssd() if self.pool is not None and waited < SSD_RECOVERY_SECONDS_MAX else None
        if tier is None or tier["state"] not in ("none", "recovering"):
            self._ssd_since = None
        return self._ssd_since is not None

    def worth_waiting(self) -> bool:
        """Whether a request that finds no namespaces should ask again in the next step. Bounded in time."""
        if self.off:
            return False
        now = time.monotonic()
        if self._first_asked is None:
            self._first_asked = now
        return now - self._first_asked < READY_WAIT_SECONDS_MAX

    def address(self) -> PoolAddress | None:
        """What workers need to open the pool; ``None`` before namespaces exist."""
        return self._address

    def reset(self, for_all: bool = True) -> bool:
        """Invalidate all blocks of this model for every process, with one step, and share nothing from now on: caches
        are reset when weights were replaced, and what they are now cannot be told. False if nothing was done, or the
        files on SSD have not taken note yet, so try again.

        Without namespaces yet, the blocks are invalidated as soon as it is known which they are. ``for_all`` False:
        this engine has computed nothing with other weights yet, so what others find stays valid.
        """
        if not self._lock.acquire(timeout=RESET_WAIT_SECONDS_MAX):
            return False
        try:
            if self._private is not None:
                _reset_memory(self._namespaces or {})
            done = self._reset_shared() if for_all else True
            if self._private is None:
                self._private, self._namespaces, self.ssd = uuid.uuid4().hex, None, False
                logger.info("PegaFlow: the cache was reset, so this engine shares no blocks with others any more.")
        finally:
            self._lock.release()
        return done

    def _reset_shared(self) -> bool:
        """For every process. False if the files on SSD may take note later than this returns."""
        if not self._shared or not self._used:
            self._reset_pending, self._namespaces = True, None
            return True
        try:
            for namespace in self._shared:
                namespace.reset()
        except PoolBusy as error:
            logger.warning("PegaFlow: %s", error)
            tier = self.pool.ssd() if self.pool is not None else None
            return tier is None or tier["state"] in ("none", "off")  # asking again would bring nothing
        return True

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        self._closing.set()
        with self._lock:
            pool, self.pool = self.pool, None
        if self.off is None:
            self.off = "the engine has shut down."
        if pool is not None:
            pool.close()

    def _shape_problem(self) -> str | None:
        for shape in self._shapes.values():
            if shape.problem:
                return shape.problem
        if len(self._shapes) != self._ranks:
            return f"only {len(self._shapes)} of {self._ranks} workers reported how they hold the KV cache."
        for shard in range(self._shards):
            if len({shape.host for rank, shape in self._shapes.items() if self._shard_of(rank) == shard}) > 1:
                return (
                    "ranks on several hosts have no pool in common: set pegaflow.tp_shard_endpoints, an endpoint for "
                    "each host in the order of ranks."
                )
        for rank, shape in self._shapes.items():
            if shape.groups != self._shapes[self._saver_of(rank)].groups:
                return "ranks that should hold identical KV caches report different layouts."
        return None

    def _saver_of(self, rank: Rank) -> Rank:
        # Never one of another host.
        first_of_host = self._shard_of(rank) * (self._ranks // self._shards)
        return rank[0], max(rank[1] - rank[1] % self._replicas, first_of_host)

    def _shard_of(self, rank: Rank) -> int:
        return rank[1] // (self._ranks // self._shards) if self._shards > 1 else 0

    def _prepare(self) -> None:
        try:
            self._identity.sample()
        except Exception as error:  # a thread has nobody to raise to
            self.turn_off(f"the model cannot be identified: {error!r}")
        deadline = time.monotonic() + PREPARE_SECONDS_MAX
        while self._namespaces is None and self.off is None and time.monotonic() < deadline:
            if self._closing.wait(PREPARE_POLL_SECONDS):
                return
            self._create(may_open=True)

    def _check_factors(self) -> None:
        """In a process that had another engine before, the root of that one's hashes may have been seen first."""
        if self._factors is not None and self._identity.factors() != self._factors:
            self._namespaces, self._shared, self._address = None, [], None

    def _create(self, may_open: bool = False) -> None:
        """``may_open``: open the pool too if it is still missing; not for the scheduler, which must not wait."""
        if time.monotonic() < self._retry_at or not self._lock.acquire(blocking=False):
            return  # not again yet, or the other thread is at it
        try:
            if self._namespaces is None and self.off is None and not self._closing.is_set():
                if self.pool is None and may_open and self._reopen is not None:
                    self.pool = self._reopen()
                self._create_locked()
        except PoolBusy as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            logger.warning("PegaFlow: the pool is busy, trying again: %s", error)
        except PegaFlowError as error:
            self.turn_off(str(error))
        finally:
            self._lock.release()

    def _create_locked(self) -> None:
        pool, shapes = self.pool, self._shapes
        factors = self._identity.factors() if pool is not None and shapes else None
        if factors is None:
            return
        assert pool is not None
        savers = sorted({self._saver_of(rank) for rank in shapes})
        layouts = [[[shape.part_bytes, shape.digest] for shape in shapes[rank].groups] for rank in savers]
        factors_all = {**factors, "layouts": layouts, "ranks": savers}
        if self._shards > 1:
            factors_all["shards"] = self._shards
        sizes: dict[int, list[int]] = {}
        parts: dict[Rank, list[int | None]] = {rank: [] for rank in savers}
        nodes: dict[int, list[int | None]] = {}
        for position, group in enumerate(self._geometry.groups):
            own, near = sizes.setdefault(group.index, []), nodes.setdefault(group.index, [])
            for rank in savers:
                size = shapes[rank].groups[position].part_bytes
                parts[rank].append(len(own) if size else None)
                own += [size] if size else []
                near += [shapes[rank].numa_node] if size else []
        if self._reset_pending:
            # Perhaps in the scheduler's own call: the files take note later.
            shared = self._open(pool, fingerprint(factors_all), sizes)
            _reset_memory(shared)
            self._reset_pending, self._shared = False, _one_of_each(shared)
        key = fingerprint(factors_all if self._private is None else {**factors_all, "private": self._private})
        if self._private is not None or is_private(factors):
            key = private(key)
        namespaces = self._open(pool, key, sizes)
        for number, namespace in namespaces.items():
            if any(node is not None for node in nodes[number]):
                pool.set_nodes(namespace, nodes[number])
                logger.info("PegaFlow: new memory for group %d is made on the NUMA nodes %s.", number, nodes[number])
            pool.grow_ahead(namespace)
        named = [(group, key, tuple(own)) for group, own in sizes.items()]
        by_rank = {rank: tuple(parts[self._saver_of(rank)]) for rank in shapes}
        self._address = PoolAddress(
            pool.name, pool.shm_dir, pool.member(), by_rank, frozenset(savers), tuple(named), self._engine
        )
        self._factors, self._namespaces, self.ssd = factors, namespaces, self._use_ssd(namespaces)
        if self._private is None:
            self._shared = _one_of_each(namespaces)
        self._ssd_since = time.monotonic() if self.ssd else None
        block_bytes = sum(namespace.block_bytes for namespace in namespaces.values())
        logger.info(
            "PegaFlow: pool %s at %s (%.1f GB), %d KV cache group(s) of %d bytes per block in all, namespace %s.",
            pool.name, pool.path, pool.pool_bytes / 1e9, len(namespaces), block_bytes, key.hex()[:16],
        )  # fmt: skip

    def _use_ssd(self, namespaces: "Mapping[int, Namespace]") -> bool:
        return self._private is None and all(namespace.use_ssd() for namespace in _one_of_each(namespaces))

    def _open(self, pool: "Pool", key: bytes, sizes: Mapping[int, list[int]]) -> "dict[int, Namespace]":
        return {group: pool.namespace(key, group, own, label=self._identity.label) for group, own in sizes.items()}


def _one_of_each(namespaces: "Mapping[int, Namespace]") -> "list[Namespace]":
    """All groups of one fingerprint have one epoch and one place on SSD: one of them stands for all."""
    return list(namespaces.values())[:1]


def _reset_memory(namespaces: "Mapping[int, Namespace]") -> None:
    for namespace in _one_of_each(namespaces):
        namespace.reset(wait=False)
