"""All policies by name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pegaflow.replay.engine import Engine
from pegaflow.replay.optimum import best_hits
from pegaflow.replay.queues import Arc, Lru, S3Fifo
from pegaflow.replay.stamped import Probation
from pegaflow.replay.trace import Prompt


class Policy(Protocol):
    """A cache of blocks without bytes."""

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there. Changes nothing."""
        ...

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        ...


POLICIES: dict[str, Callable[[int], Policy]] = {
    "pool": partial(Engine, policy="probation"),
    "pool-lru": partial(Engine, policy="lru"),
    "probation": Probation,
    "lru": Lru,
    "s3fifo": S3Fifo,
    "arc": Arc,
}
"""Each made for so many blocks. The first two are the engine itself, by default and with ``eviction_policy`` "lru"; all
else is simulated."""

OPTIMUM = "optimum"
"""Not a policy: it knows what is to come."""


def hits_of(policy: str, prompts: Sequence[Prompt], blocks_max: int) -> int:
    """Blocks found over all prompts by a cache of ``blocks_max`` (at least 1) blocks that was empty at first."""
    if policy == OPTIMUM:
        return best_hits(prompts, blocks_max)
    cache = POLICIES[policy](blocks_max)
    hits = 0
    for prompt in prompts:
        hits += cache.find(prompt)
        cache.store(prompt)
    return hits
