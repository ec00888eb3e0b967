"""How many tokens of a sequence can be restored from the pool, over all KV cache groups.

Nothing is pinned or changed here. A hit counts only if every group can go on from its end: full attention needs all
blocks up to there, a sliding window or a chunk only those that the next token can still see, a recurrent layer the
state at the very end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.tails import Tail


class Index(Protocol):
    """The part of a pool's namespace that matching reads."""

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        """How many consecutive ``keys[start:]`` are present."""
        ...

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte per key: 1 present, 0 absent."""
        ...


@dataclass(frozen=True)
class Need:
    """Blocks of one group that a hit has to bring: ``start <= block < stop``."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Match:
    """A hit: ``tokens`` of the sequence (counted from its beginning) are restorable, given what is computed already."""

    tokens: int
    needs: tuple[Need, ...]


def needs_of(geometry: Geometry, computed_tokens: int, hit_tokens: int) -> tuple[Need, ...]:
    """Blocks to load so that a sequence with ``computed_tokens`` on the device continues at ``hit_tokens``."""
    needs = []
    for group in geometry.groups:
        start, stop = computed_tokens // group.block_tokens, hit_tokens // group.block_tokens
        needs.append(Need(group.index, max(start, group.first_needed(stop)), stop))
    return tuple(needs)


def find_match(
    geometry: Geometry,
    indexes: Mapping[int, Index],
    keys: Mapping[int, Sequence[bytes]],
    computed_tokens: int,
    tokens_max: int,
) -> Match | None:
    """Longest hit beyond ``computed_tokens`` and up to ``tokens_max``; ``None`` if there is none.

    ``indexes`` and ``keys`` are by group. ``computed_tokens`` is a multiple of every group's block.
    """
    align = geometry.align_tokens
    limit = tokens_max // align * align
    for group in geometry.groups:
        limit = min(limit, (len(keys[group.index]) - group.extra_blocks) * group.block_tokens)
        if group.kind is GroupKind.FULL and limit > computed_tokens:
            start = computed_tokens // group.block_tokens
            stop = limit // group.block_tokens + group.extra_blocks
            present = indexes[group.index].lookup(keys[group.index][:stop], start)
            limit = min(limit, (start + present - group.extra_blocks) * group.block_tokens)
    end = limit = limit // align * align
    sparse = [group for group in geometry.groups if group.kind is not GroupKind.FULL]
    if limit > computed_tokens and sparse:
        blocks = [_present(indexes[group.index], keys[group.index], group, computed_tokens, limit) for group in sparse]
        while end > computed_tokens:
            reached = end
            for group, there in zip(sparse, blocks, strict=True):
                reached = _last_restorable(group, there, computed_tokens, reached) // align * align
            if reached == end:
                break
            end = reached
    if end <= computed_tokens:
        return None
    return Match(end, needs_of(geometry, computed_tokens, end))


def with_tail(geometry: Geometry, index: Index, match: Match | None, computed_tokens: int, tail: Tail) -> Match | None:
    """``match`` and the tail behind it, if that is present and begins where ``match`` ends."""
    [group] = geometry.groups
    reached = match.tokens if match is not None else computed_tokens
    if reached != tail.block * group.block_tokens or not index.contains([tail.key])[0]:
        return match
    return Match(tail.prompt_tokens, (Need(group.index, computed_tokens // group.block_tokens, tail.block + 1),))


def _present(index: Index, keys: Sequence[bytes], group: Group, computed_tokens: int, limit: int) -> bytes:
    """Of each block from the first that is not computed up to ``limit``, and those that a hit needs besides: 1 present,
    0 absent."""
    start, stop = computed_tokens // group.block_tokens, limit // group.block_tokens + group.extra_blocks
    return bytes(index.contains(keys[start:stop]))


def _last_restorable(group: Group, present: bytes, computed_tokens: int, end_tokens: int) -> int:
    """The last position up to ``end_tokens`` for which all blocks are present, or computed already, that the next token
    depends on. It goes from run to run of blocks: a scheduler may ask again in every step."""
    start, stop = computed_tokens // group.block_tokens, end_tokens // group.block_tokens
    while stop > start:
        first, last = max(start, group.first_needed(stop)), stop + group.extra_blocks
        absent = present.rfind(0, first - start, last - start)
        if absent < 0:
            return stop * group.block_tokens
        # Whatever needs any block behind that one needs that one, too, up to where a chunk begins.
        behind_run = start + present.rfind(1, 0, absent) + 1 - group.extra_blocks
        stop = min(stop - 1, max(behind_run, first) if group.kind is GroupKind.CHUNK else behind_run)
    return computed_tokens
