"""Policies of the literature on queues of single blocks. The blocks of a prompt are stored last one first, so that its
tail goes before its head here as well."""

from collections import OrderedDict

from pegaflow.replay.trace import Prompt

Queue = OrderedDict[int | str, None]


def _found(prompt: Prompt, *queues: Queue) -> int:
    for position, block in enumerate(prompt):
        if not any(block in queue for queue in queues):
            return position
    return len(prompt)


def _oldest(queue: Queue) -> int | str:
    return queue.popitem(last=False)[0]


class Lru:
    """Least recently used."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: Queue = OrderedDict()

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        return _found(prompt, self._blocks)

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
            if len(self._blocks) > self._blocks_max:
                _oldest(self._blocks)


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for what was used again."""

    SMALL = 0.1
    USES_MAX = 3

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._small_max = max(1, int(blocks_max * self.SMALL))
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._uses: dict[int | str, int] = {}

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        return _found(prompt, self._small, self._main)

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        for block in reversed(prompt):
            if block in self._uses:
                self._uses[block] = min(self.USES_MAX, self._uses[block] + 1)
                continue
            while len(self._uses) >= self._blocks_max:
                self._evict()
            self._uses[block] = 0
            if block in self._ghosts:
                del self._ghosts[block]
                self._main[block] = None
            else:
                self._small[block] = None

    def _evict(self) -> None:
        while self._small and (len(self._small) >= self._small_max or not self._main):
            block = _oldest(self._small)
            if not self._uses[block]:
                del self._uses[block]
                self._ghosts[block] = None
                if len(self._ghosts) > self._blocks_max:
                    _oldest(self._ghosts)
                return
            self._uses[block] = 0
            self._main[block] = None
        while True:
            block = _oldest(self._main)
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._main[block] = None


class Arc:
    """ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again, with a border that moves."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._once_aim = 0.0
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._once_gone: Queue = OrderedDict()
        self._again_gone: Queue = OrderedDict()

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        return _found(prompt, self._once, self._again)

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        for block in reversed(prompt):
            self._use(block)

    def _use(self, block: int | str) -> None:
        if block in self._once:
            del self._once[block]
            self._again[block] = None
        elif block in self._again:
            self._again.move_to_end(block)
        elif block in self._once_gone:
            step = max(1.0, len(self._again_gone) / len(self._once_gone))
            self._once_aim = min(float(self._blocks_max), self._once_aim + step)
            self._make_room(block)
            del self._once_gone[block]
            self._again[block] = None
        elif block in self._again_gone:
            step = max(1.0, len(self._once_gone) / len(self._again_gone))
            self._once_aim = max(0.0, self._once_aim - step)
            self._make_room(block)
            del self._again_gone[block]
            self._again[block] = None
        else:
            self._store_new(block)

    def _store_new(self, block: int | str) -> None:
        seen_once = len(self._once) + len(self._once_gone)
        if seen_once >= self._blocks_max:
            if self._once_gone:
                _oldest(self._once_gone)
                self._make_room(block)
            else:
                _oldest(self._once)
        else:
            if seen_once + len(self._again) + len(self._again_gone) >= 2 * self._blocks_max:
                _oldest(self._again_gone)
            self._make_room(block)
        self._once[block] = None

    def _make_room(self, block: int | str) -> None:
        if len(self._once) + len(self._again) < self._blocks_max:
            return
        over = len(self._once) > self._once_aim or (block in self._again_gone and len(self._once) == self._once_aim)
        if self._once and (over or not self._again):
            self._once_gone[_oldest(self._once)] = None
        else:
            self._again_gone[_oldest(self._again)] = None
