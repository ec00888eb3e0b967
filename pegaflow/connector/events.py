"""KV events: which blocks an instance can load from the pool, told to routers through vLLM's own publisher.

A block is announced once it is visible in the pool: when this instance has saved it, or finds that somebody else has.
The pool is shared, so blocks go without asking us. Therefore what was announced is looked up again and again, some of
it in each step, and what is gone is announced as removed. A hint that is late costs a router a worse choice, no more.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from pegaflow.connector.geometry import Group
from pegaflow.connector.request_state import RequestState
from pegaflow.keys import group_keys

if TYPE_CHECKING:
    from pegaflow._native import Namespace

ANNOUNCED_MAX = 262_144
"""Blocks that are announced at a time. Of more, those that were looked up the longest ago are announced as removed."""

QUEUED_MAX = 65_536
"""Blocks to announce in one step at most; others are announced when a request meets them the next time."""

LOOK_SECONDS = 0.1
LOOK_BLOCKS_MIN = 256
LOOK_SHARE = 64
"""So often one in so many announced blocks is looked up, but at least so many: all of them in some 6 seconds."""


@dataclass(frozen=True)
class StoredBlock:
    """One block that became visible, as vLLM describes it."""

    group: int
    key: bytes
    """In the pool."""
    block_hash: bytes
    """vLLM's, and so the router's."""
    parent_hash: bytes | None
    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None


@dataclass(frozen=True)
class RemovedBlock:
    """One block that is no longer there."""

    group: int
    block_hash: bytes


class EventMaker(Protocol):
    """Makes vLLM's events."""

    def extra_keys(self, request: Any, start: int, stop: int) -> tuple[Any, ...] | None:
        """What vLLM puts into the hash of the tokens ``start <= token < stop`` besides them."""
        ...

    def stored(self, blocks: Sequence[StoredBlock]) -> Any:
        """Event for a run of blocks of one group, each the child of the one before it."""
        ...

    def removed(self, blocks: Sequence[RemovedBlock]) -> Any:
        """Event for blocks of one group."""
        ...


class Events:
    """What one engine has announced."""

    def __init__(self, maker: EventMaker | None, namespaces: "Callable[[], Mapping[int, Namespace] | None]") -> None:
        """``maker`` ``None``: nobody wants to know, and nothing costs anything."""
        self._maker = maker
        self._namespaces = namespaces
        self._announced: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._queue: list[StoredBlock | RemovedBlock] = []
        self._look_at = 0.0

    @property
    def wanted(self) -> bool:
        """Whether anybody wants to know."""
        return self._maker is not None

    def describe(self, state: RequestState, group: Group, blocks: Sequence[int]) -> list[StoredBlock]:
        """Full blocks of a request, by their positions, for ``visible``."""
        if self._maker is None:
            return []
        request, size = state.request, group.block_tokens
        hashes = group_keys(request.block_hashes, group.hashes_per_block)
        keys = group_keys(state.hashes(), group.hashes_per_block)
        adapter = request.lora_request
        return [
            StoredBlock(
                group.index,
                bytes(keys[block]),
                bytes(hashes[block]),
                bytes(hashes[block - 1]) if block else None,
                tuple(request.all_token_ids[block * size : (block + 1) * size]),
                self._maker.extra_keys(request, block * size, (block + 1) * size),
                adapter.lora_int_id if adapter is not None else None,
                adapter.lora_name if adapter is not None else None,
            )
            for block in blocks
            if block < len(keys)
        ]

    def found(self, state: RequestState, group: Group, start: int, present: bytes) -> None:
        """Blocks of a request from ``start`` on were looked up: ``present`` has a byte for each."""
        if self._maker is None:
            return
        keys = group_keys(state.hashes(), group.hashes_per_block)
        new = [
            block
            for block, there in enumerate(present, start)
            if there and (group.index, bytes(keys[block])) not in self._announced
        ]
        self._announce(self.describe(state, group, new))

    def settle(self, blocks: Sequence[StoredBlock]) -> None:
        """A job that was to bring these blocks to the pool is over: those that are there now are announced."""
        namespaces = self._namespaces() if blocks else None
        if namespaces:
            self._announce([block for block in blocks if namespaces[block.group].contains([block.key])[0]])

    def forget_all(self) -> None:
        """The cache was reset: nothing of what was announced is there any more."""
        self._remove(list(self._announced))

    def take(self) -> list[Any]:
        """vLLM's events since the last call, after a look at some of what was announced."""
        maker = self._maker
        if maker is None:
            return []
        self._look()
        queue, self._queue = self._queue, []
        return [
            maker.stored(run) if isinstance(run[0], StoredBlock) else maker.removed(run)  # type: ignore[arg-type]
            for run in _runs(queue)
        ]

    def _announce(self, blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            name = (block.group, block.key)
            if name in self._announced or len(self._queue) >= QUEUED_MAX:
                continue
            self._announced[name] = block.block_hash
            self._queue.append(block)
        surplus = len(self._announced) - ANNOUNCED_MAX
        if surplus > 0:
            self._remove(list(islice(self._announced, surplus)))

    def _remove(self, names: Sequence[tuple[int, bytes]]) -> None:
        self._queue += [RemovedBlock(name[0], self._announced.pop(name)) for name in names]

    def _look(self) -> None:
        now = time.monotonic()
        if not self._announced or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        namespaces = self._namespaces()
        if namespaces is None:
            self._remove(list(self._announced))
            return
        count = max(LOOK_BLOCKS_MIN, len(self._announced) // LOOK_SHARE)
        names = [name for _, name in zip(range(count), self._announced, strict=False)]
        for group, namespace in namespaces.items():
            own = [name for name in names if name[0] == group]
            for name, there in zip(own, namespace.contains([key for _, key in own]), strict=True):
                if there:
                    self._announced.move_to_end(name)
                else:
                    self._remove([name])


def _runs(queue: Sequence[StoredBlock | RemovedBlock]) -> Iterator[Sequence[StoredBlock | RemovedBlock]]:
    """The queue in order, cut into what one event can say."""
    run: list[StoredBlock | RemovedBlock] = []
    for item in queue:
        if run and not _continues(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _continues(before: StoredBlock | RemovedBlock, item: StoredBlock | RemovedBlock) -> bool:
    if type(before) is not type(item) or before.group != item.group:
        return False
    if isinstance(before, StoredBlock) and isinstance(item, StoredBlock):
        return item.parent_hash == before.block_hash and item.lora_id == before.lora_id
    return True
