"""The pools of a replica whose ranks are on several hosts, as its scheduler half sees them: like one pool.

Nothing of them can be mapped here. So refs are made up here, and what is done with them becomes orders that go to the
ranks with the next step; each rank has blocks of its own, in the pool of its own host, and knows which of its slots a
ref stands for. What the pools have is known from the ranks' answers (see ``shard_asks``), and of what was published.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pegaflow.connector.events import ANNOUNCED_MAX
from pegaflow.connector.metadata import LoadJob, SaveJob, ShardAsk, ShardOrders, ShardSlot

KNOWN_MAX = ANNOUNCED_MAX
"""Blocks of a group that are remembered to be in all pools; the oldest are forgotten first. What is forgotten would be
told of as evicted, if it was told of as stored."""


@dataclass(frozen=True)
class _Reserved:
    space: "ShardNamespace"
    slot: ShardSlot
    names: int
    """See ``ShardPool.names``."""


class ShardPool:
    """Stands for ``Pool``."""

    name, shm_dir, path = "of its own", "", "each host"
    pool_bytes = 0

    def __init__(self) -> None:
        self.names = 0
        """Counts resets and changes of the names of blocks. What was reserved before one of them is never published: a
        rank may get to hear of both at once."""
        self._next_ref = 1
        self._fingerprint: bytes | None = None
        self._reserved: dict[int, _Reserved] = {}
        self._ended: dict[str, list[int]] = {}
        self._resets: list[bytes] = []
        self._asks: list[ShardAsk] = []

    @property
    def has_orders(self) -> bool:
        """Whether ranks have to hear of something."""
        return bool(self._ended or self._resets or self._asks)

    def take_orders(self, loads: Sequence[LoadJob], saves: Sequence[SaveJob]) -> ShardOrders | None:
        """What the ranks have to do in a step with these jobs; handed out once."""
        refs = (ref for job in saves for _, refs, _ in job.blocks for ref in refs)
        slots = {ref: self._reserved[ref].slot for ref in refs if ref in self._reserved}
        if not (self.has_orders or slots or loads):
            return None
        ended, self._ended = self._ended, {}
        resets, self._resets = self._resets, []
        asks, self._asks = self._asks, []
        return ShardOrders(
            **{verb: tuple(refs) for verb, refs in ended.items()},
            resets=tuple(resets),
            asks=tuple(asks),
            slots=slots,
        )

    def refs(self, count: int) -> range:
        """So many refs that nobody had before."""
        first = self._next_ref
        self._next_ref += count
        return range(first, self._next_ref)

    def ask(self, ask: ShardAsk) -> None:
        """Ask all ranks."""
        self._asks.append(ask)

    def withdraw(self, ask: ShardAsk) -> bool:
        """Do not ask. False if ranks were asked already."""
        if ask not in self._asks:
            return False
        self._asks.remove(ask)
        return True

    def reserve(
        self, space: "ShardNamespace", keys: Sequence[bytes], parents: Sequence[bytes | None]
    ) -> list[tuple[int, int]]:
        """A ref for each key."""
        refs = self.refs(len(keys))
        for ref, key, parent in zip(refs, keys, parents, strict=True):
            self._reserved[ref] = _Reserved(space, (bytes(key), parent), self.names)
        return list(enumerate(refs))

    def reset(self, fingerprint: bytes) -> None:
        """Have every rank invalidate its blocks of a fingerprint."""
        self.names += 1
        if fingerprint not in self._resets:
            self._resets.append(fingerprint)

    # -- as Pool ----------------------------------------------------------------------------------------------------

    def namespace(self, fingerprint: bytes, group: int, part_bytes: Sequence[int], *, label: str = "") -> Any:
        """Blocks under a name that all ranks add something of their own to."""
        if fingerprint != self._fingerprint:
            self.names, self._fingerprint = self.names + 1, fingerprint
        return ShardNamespace(self, fingerprint, group, part_bytes)

    def publish(self, refs: Sequence[int]) -> int:
        """Have each rank publish what it has of these blocks."""
        valid = []
        for ref in refs:
            known = self._reserved.pop(ref, None)
            if known is not None and known.names == self.names:
                valid.append(ref)
                known.space.learn([known.slot[0]], [True])
            elif known is not None:
                self._end("aborted", [ref])
        self._end("published", valid)
        return len(valid)

    def abort(self, refs: Sequence[int]) -> None:
        """Have each rank free what it has reserved."""
        self._end("aborted", [ref for ref in refs if self._reserved.pop(ref, None) is not None])

    def quarantine(self, refs: Sequence[int]) -> None:
        """Have each rank give up what it has reserved."""
        self._end("quarantined", [ref for ref in refs if self._reserved.pop(ref, None) is not None])

    def release(self, refs: Iterable[int]) -> None:
        """Have each rank release what it holds."""
        self._end("released", refs)

    def member(self) -> tuple[int, int]:
        """Ranks have nobody to join."""
        return (0, 0)

    def set_nodes(self, namespace: Any, nodes: Any) -> None:
        """Ranks know their own."""

    def grow_ahead(self, namespace: Any) -> None:
        """Ranks see to it."""

    def ssd(self) -> None:
        """There is no tier."""

    def ssd_read_seconds(self, block_bytes: int) -> float | None:
        """There is no tier."""
        return None

    def windows(self) -> list[tuple[int, int, int]]:
        """Nobody keeps statistics."""
        return []

    def close(self) -> None:
        """Ranks leave by themselves."""

    def _end(self, verb: str, refs: Iterable[int]) -> None:
        refs = list(refs)
        if refs:
            self._ended.setdefault(verb, []).extend(refs)


class ShardNamespace:
    """Stands for ``Namespace``. ``contains`` is a guess: it decides what is worth saving, never what is loaded."""

    def __init__(self, pool: ShardPool, fingerprint: bytes, group: int, part_bytes: Sequence[int]) -> None:
        self._pool, self._fingerprint, self.group = pool, fingerprint, group
        self.part_bytes, self.block_bytes = list(part_bytes), sum(part_bytes)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._names = pool.names

    def learn(self, keys: Sequence[bytes], present: Sequence[int]) -> None:
        """What all ranks have of ``keys``, a truth value for each."""
        self._forget_old()
        for key, there in zip(keys, present, strict=True):
            if there:
                self._known[bytes(key)] = None
                self._known.move_to_end(bytes(key))
            else:
                self._known.pop(bytes(key), None)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 if all ranks had it when they were asked last, or were told to publish it since."""
        self._forget_old()
        return bytes(key in self._known for key in keys)

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """Nothing can be found here without asking."""
        return 0

    def reserve(
        self, keys: Sequence[bytes], *, parents: Sequence[bytes | None], evict: bool = True
    ) -> list[tuple[int, int]]:
        """A ref for each key. A rank that has the block already, or no room, leaves it out."""
        return self._pool.reserve(self, keys, parents)

    def reset(self, *, wait: bool = True) -> int:
        """Every rank hears of it with its next step, before anything else of that step."""
        self._pool.reset(self._fingerprint)
        return self._pool.names

    def tiers(self, keys: Sequence[bytes]) -> bytes:
        """As ``contains``."""
        return self.contains(keys)

    def use_ssd(self) -> bool:
        """There is no tier."""
        return False

    def others(self) -> int:
        """Nobody is waited for."""
        return 0

    def note_prompt(self, keys: Sequence[bytes], **found: int | None) -> None:
        """Nobody keeps statistics."""

    def note_loaded(self, blocks: int) -> None:
        """Nobody keeps statistics."""

    def _forget_old(self) -> None:
        """All groups are reset at a time."""
        if self._names != self._pool.names:
            self._names = self._pool.names
            self._known.clear()
