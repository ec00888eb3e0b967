"""All that crosses between the scheduler half and the worker halves: plain dataclasses of plain values.

Scheduler to workers: ``StepPlan``. Workers to scheduler: ``WorkerShape`` once, by itself or in the first report, and
``RankReport`` in every step that has
something to say. ``compat.register_wire_types`` makes vLLM accept them as its own metadata.
"""

from dataclasses import dataclass, field

Rank = tuple[int, int]
"""``(pipeline rank, tensor rank)``."""

GroupBlocks = tuple[int, tuple[int, ...], tuple[int, ...]]
"""``(KV cache group, refs of slots, block ids)``; block ids mean something only together with their group."""


@dataclass(frozen=True)
class PoolAddress:
    """Where workers find the pool, and which part of each block is theirs."""

    name: str
    shm_dir: str
    leader: tuple[int, int]
    """``(row, epoch)`` of the scheduler's process; workers join it."""
    parts: dict[Rank, tuple[int | None, ...]]
    """Part of each rank, by group; ``None``: the rank holds no layer of that group."""
    savers: frozenset[Rank]
    """Ranks that copy on save. The others hold identical bytes and acknowledge at once."""
    namespaces: tuple[tuple[int, bytes, tuple[int, ...]], ...] = ()
    """``(group, fingerprint, bytes of each part)``, for workers that have to know where blocks will be."""
    engine: str = ""
    """Made up at each start of the engine. Ranks whose weights are nobody else's are known by it."""


@dataclass(frozen=True)
class LoadJob:
    """Blocks to copy from leased slots into vLLM's blocks for one request."""

    request_id: str
    blocks: tuple[GroupBlocks, ...]
    doomed: bool = False
    """Copy nothing and report the load as failed, so that vLLM recomputes. There are no refs then, but block ids."""
    follow: bool = False
    """Whether vLLM may go on with the request before the copy is over, its forward pass layer by layer behind it. The
    scheduler half holds the blocks until the ranks report the load."""


@dataclass(frozen=True)
class SaveJob:
    """Blocks to copy into reserved slots once the forward pass of this step has filled them."""

    job_id: int
    blocks: tuple[GroupBlocks, ...]


ShardSlot = tuple[bytes, bytes | None]
"""``(key, key of the block before it)`` of a block that ranks have to reserve slots for by themselves."""


@dataclass(frozen=True)
class ShardAsk:
    """Blocks that each rank is to look for in the pool of its host, to lease, and to report."""

    number: int
    groups: tuple[tuple[int, int, tuple[bytes, ...], bool], ...]
    """``(KV cache group, first ref, keys, chained)``: ref ``first + i`` stands for the block of ``keys[i]`` from now
    on. Of a chained group only what has no gap before it is of use."""

    @property
    def keys(self) -> int:
        """How many, of all groups."""
        return sum(len(keys) for _, _, keys, _ in self.groups)


@dataclass(frozen=True)
class ShardOrders:
    """What ranks that have pools of their own do with them in one step, in the order of the fields."""

    published: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    """Refs that stand for leased blocks, perhaps some that a rank does not hold."""
    resets: tuple[bytes, ...] = ()
    """Fingerprints, without what each rank adds to them."""
    asks: tuple[ShardAsk, ...] = ()
    slots: dict[int, ShardSlot] = field(default_factory=dict)
    """By ref, for the saves of this step."""


@dataclass(frozen=True)
class StepPlan:
    """What the workers have to do in one step. A job is sent once, in one plan."""

    pool: PoolAddress | None = None
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    runs_model: bool = True
    """False in a step without a forward pass, in which vLLM may leave out the hook that starts saves."""
    settle: bool = False
    """Whether nobody steps the engine once it is idle, so that this step has to wait for its own copies."""
    unasked: bool = False
    """Whether this step may read blocks without naming the layers that it reads."""
    shards: ShardOrders | None = None
    """Where each rank uses the pool of its own host. Refs of the jobs then stand for slots that the rank knows."""


@dataclass(frozen=True)
class GroupShape:
    """How one rank holds one KV cache group."""

    part_bytes: int
    digest: str
    """Digest of everything that decides what the bytes of a part mean."""


@dataclass(frozen=True)
class WorkerShape:
    """One rank's layout, sent to the scheduler once after the caches were allocated."""

    rank: Rank
    host: str
    """Boot id of the host; ranks of other hosts cannot map the same pool."""
    groups: tuple[GroupShape, ...] = ()
    problem: str | None = None
    """Why this rank cannot take part, as one sentence."""
    numa_node: int | None = None
    """Node that this rank's device hangs on, where there are several."""


@dataclass(frozen=True)
class SaveOutcome:
    """How one save job ended on one rank, or on several after ``merge``."""

    ranks: int
    failed: frozenset[int]
    """Refs that were not copied by at least one of them."""
    seconds: float

    def merge(self, other: "SaveOutcome") -> "SaveOutcome":
        """Outcome on the ranks of both."""
        return SaveOutcome(self.ranks + other.ranks, self.failed | other.failed, max(self.seconds, other.seconds))


@dataclass(frozen=True)
class LoadOutcome:
    """How one load ended on one rank, or on several after ``merge``."""

    ok: bool
    failed: frozenset[int]
    """Refs that could not be copied by at least one of them; may be empty if the load failed as a whole."""
    seconds: float
    ranks: int = 1

    def merge(self, other: "LoadOutcome") -> "LoadOutcome":
        """Outcome on the ranks of both."""
        ok = self.ok and other.ok
        seconds = max(self.seconds, other.seconds)
        return LoadOutcome(ok, self.failed | other.failed, seconds, self.ranks + other.ranks)


@dataclass(frozen=True)
class ShardAnswer:
    """What some ranks hold of what they were asked for."""

    ranks: int
    present: tuple[bytes, ...]
    """By group, in the order of the question: a byte per key, 1 if all of them hold it."""

    def merge(self, other: "ShardAnswer") -> "ShardAnswer":
        """What the ranks of both hold."""
        pairs = zip(self.present, other.present, strict=True)
        both = tuple(_and(mine, theirs) for mine, theirs in pairs)
        return ShardAnswer(self.ranks + other.ranks, both)


def _and(mine: bytes, theirs: bytes) -> bytes:
    """Bit by bit, as one number each: 64 ranks answer for 65,536 keys."""
    both = int.from_bytes(mine, "little") & int.from_bytes(theirs, "little")
    return both.to_bytes(len(mine), "little")


@dataclass
class RankReport:
    """What finished on one rank since its last report. vLLM adds the reports of all ranks up with ``aggregate``."""

    saves: dict[int, SaveOutcome] = field(default_factory=dict)
    loads: dict[str, LoadOutcome] = field(default_factory=dict)
    problem: str | None = None
    """Why this rank can copy nothing any more, as one sentence."""
    shapes: dict[Rank, WorkerShape] = field(default_factory=dict)
    """How ranks hold the KV cache, if vLLM did not ask for it at the start."""
    answers: dict[int, ShardAnswer] = field(default_factory=dict)
    """By number of the question."""

    def aggregate(self, other: "RankReport") -> "RankReport":
        """Sum of both reports; neither is changed, since vLLM may still be sending one of them."""
        problem, shapes = self.problem or other.problem, {**self.shapes, **other.shapes}
        total = RankReport(dict(self.saves), dict(self.loads), problem, shapes, dict(self.answers))
        for job_id, save in other.saves.items():
            total.saves[job_id] = total.saves[job_id].merge(save) if job_id in total.saves else save
        for request_id, load in other.loads.items():
            total.loads[request_id] = total.loads[request_id].merge(load) if request_id in total.loads else load
        for number, answer in other.answers.items():
            total.answers[number] = total.answers[number].merge(answer) if number in total.answers else answer
        return total

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.problem or self.shapes or self.answers)
