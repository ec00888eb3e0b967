"""Requests that share prefixes, as those of several instances behind a router without affinity.

Each prompt is one of ``prefixes`` prefixes, the popular ones far more often than the others (Zipf), and a tail that no
other prompt has. Requests go round the instances in turn, so each instance sees each prefix sooner or later: where
their caches are apart, each of them computes it once, and keeps it.

A prompt is told by the seed and its number alone. Nothing is imported but the standard library.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

TOKEN_ID_MIN = 10
"""Below are those that mean something in many vocabularies."""


@dataclass(frozen=True)
class SharedPrefixes:
    """The requests of one run: the same for the same values."""

    prefixes: int
    """How many different ones there are."""
    prefix_tokens: int
    tail_tokens: int
    """Of each prompt, behind its prefix; at least 1."""
    vocabulary: int
    """Token ids are less than this."""
    skew: float = 1.0
    """Exponent of Zipf's law: the prefix of rank r is asked for in proportion to ``1 / r ** skew``; 0 is evenly."""
    seed: int = 1

    def rank(self, number: int) -> int:
        """Which prefix request ``number`` has: 0 is the most popular one."""
        return self._draw("rank", number).choices(range(self.prefixes), cum_weights=self._weights)[0]

    def prefix(self, rank: int) -> list[int]:
        """Token ids of a prefix."""
        return self._tokens("prefix", rank, self.prefix_tokens)

    def prompt(self, number: int) -> list[int]:
        """Token ids of request ``number``, from 0."""
        return self.prefix(self.rank(number)) + self._tokens("tail", number, self.tail_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Of each request."""
        return self.prefix_tokens + self.tail_tokens

    def found_at_most(self, numbers: Iterable[int], instances: int, shared: bool, block_tokens: int) -> float:
        """Share of the prompts' tokens that caches without limits find in requests ``numbers``, in full blocks.

        ``shared``: one cache for all of the instances, else one for each. The caches are empty in the beginning, and
        have a prefix as soon as it was asked for.
        """
        seen: set[tuple[int, int]] = set()
        found = asked = 0
        for number in numbers:
            where = (0 if shared else instance_of(number, instances), self.rank(number))
            found += self.prefix_tokens // block_tokens * block_tokens if where in seen else 0
            asked += self.prompt_tokens
            seen.add(where)
        return found / asked

    @cached_property
    def _weights(self) -> list[float]:
        return list(accumulate((rank + 1) ** -self.skew for rank in range(self.prefixes)))

    def _draw(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {kind} {number}")

    def _tokens(self, kind: str, number: int, count: int) -> list[int]:
        draw = self._draw(kind, number)
        return [draw.randrange(TOKEN_ID_MIN, self.vocabulary) for _ in range(count)]


def instance_of(number: int, instances: int) -> int:
    """Which instance request ``number`` goes to: they take turns, whatever they have cached."""
    return number % instances
