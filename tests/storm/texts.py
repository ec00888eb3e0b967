"""Sequences whose continuation, and whose KV content, follow from their beginning."""

from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 500
FIRST_TOKEN = 3

Numbers = NDArray[np.uint64]


def number(*key: object) -> int:
    """64 bits that follow from ``key`` alone, in every process."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def chance(*key: object) -> float:
    """``0 <= chance < 1``, from ``key`` alone: what is left out of a run does not change what happens to the rest."""
    return number(*key) / 2**64


@cache
def factors(width: int, *place: object) -> Numbers:
    """Odd numbers for each rank, group, layer and set of weights."""
    return np.array([number("factor", index, *place) | 1 for index in range(width)], dtype=np.uint64)


class Text:
    """A prompt and how the model goes on with it. ``context``: what changes KV content beside the tokens."""

    def __init__(self, prompt: list[int], more: int, context: str = "") -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        chain = number("text", context)
        values = []
        for position in range(len(prompt) + more + 1):
            if position >= len(self.tokens):
                self.tokens.append(FIRST_TOKEN + chain % VOCABULARY)
            chain = hash((chain, self.tokens[position])) & (2**64 - 1)
            values.append(chain)
        self.values: Numbers = np.array(values, dtype=np.uint64)
        """One number for each position, which depends on all tokens up to it."""
        self.limit = len(prompt) + more

    def content(self, start: int, stop: int, width: int, *place: object) -> Numbers:
        """What a KV cache holds for positions ``start <= position < stop``: ``width`` numbers for each. ``place``:
        rank, group, layer, weights."""
        numbers: Numbers = self.values[start:stop, None] * factors(width, *place)
        return numbers
