"""Hit length over groups, compared with a search that tries every length."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.matching import Need, find_match, needs_of
from tests.unit.mini_engine import (
    CHUNKED,
    DRAFTED,
    DRAFTED_RECURRENT,
    HYBRID,
    RECURRENT,
    SINGLE,
    chunk_group,
    full_group,
    state_group,
    window_group,
)


class Present:
    """An index that has some of its keys."""

    def __init__(self, blocks: Sequence[bool]) -> None:
        self._present = {key(index) for index, there in enumerate(blocks) if there}

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> int:
        count = 0
        while start + count < len(keys) and keys[start + count] in self._present:
            count += 1
        return count

    def contains(self, keys: Sequence[bytes]) -> bytes:
        return bytes(key in self._present for key in keys)


def key(index: int) -> bytes:
    return index.to_bytes(4, "big")


def needed(group: Group, end: int) -> range:
    """Blocks of a group that the token after ``end`` tokens depends on, told from the tokens that it sees."""
    stop = end // group.block_tokens
    first = {
        GroupKind.FULL: 0,
        GroupKind.WINDOW: stop - group.window_blocks,
        GroupKind.CHUNK: (end - end % (group.chunk_tokens or 1)) // group.block_tokens,
        GroupKind.STATE: stop - 1,
    }[group.kind]
    return range(max(0, first), stop)


def restorable(geometry: Geometry, blocks: dict[int, Sequence[bool]], computed: int, end: int) -> bool:
    """Whether every block that a sequence of ``end`` tokens needs is there or computed, and for a drafter one more."""
    for group in geometry.groups:
        wanted = [block for block in needed(group, end) if block >= computed // group.block_tokens]
        stop = end // group.block_tokens
        wanted += range(stop, stop + group.extra_blocks)
        if not all(block < len(blocks[group.index]) and blocks[group.index][block] for block in wanted):
            return False
    return True


sizes = st.sampled_from([4, 8])
groups = st.one_of(
    st.builds(
        lambda size, drafts, lag: replace(full_group(0, size), drafts=drafts, lag_tokens=lag * drafts),
        sizes,
        st.booleans(),
        st.sampled_from([0, 3, 4]),
    ),
    st.builds(
        lambda window, size, drafts: replace(window_group(0, window, size), drafts=drafts),
        st.integers(0, 4),
        sizes,
        st.booleans(),
    ),
    st.builds(lambda chunk, size: chunk_group(0, chunk, size), st.sampled_from([8, 12, 16, 20]), sizes),
    st.builds(lambda size: state_group(0, size), sizes),
)


@given(
    st.lists(groups, min_size=1, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=3, max_size=3),
    st.integers(0, 5),
    st.integers(0, 100),
)
@example([full_group(), chunk_group(0, 8)], [[True] * 24, [False] * 24, [False] * 24], 0, 12)
@example([replace(full_group(), drafts=True), state_group(0)], [[True] * 24] * 3, 0, 40)
def test_hit_is_the_longest_that_every_group_can_restore(
    made: list[Group], presence: list[list[bool]], computed_blocks: int, tokens_max: int
) -> None:
    numbered = tuple(replace(group, index=index) for index, group in enumerate(made))
    geometry = Geometry(numbered)
    computed = computed_blocks * geometry.align_tokens
    blocks = {index: presence[index] for index in range(len(numbered))}
    indexes = {index: Present(blocks[index]) for index in blocks}
    keys = {index: [key(number) for number in range(24)] for index in blocks}
    match = find_match(geometry, indexes, keys, computed, tokens_max)
    limit = min([tokens_max, *(24 * group.block_tokens for group in numbered)])
    ends = range(limit // geometry.align_tokens * geometry.align_tokens, computed, -geometry.align_tokens)
    best = next((end for end in ends if restorable(geometry, blocks, computed, end)), None)
    assert (match.tokens if match else None) == best
    for need in match.needs if match else ():
        group = numbered[need.group]
        wanted = needed(group, match.tokens)
        first = computed // group.block_tokens
        assert [*range(need.start, need.stop)] == [block for block in wanted if block >= first]


def test_window_needs_only_its_last_blocks() -> None:
    assert needs_of(HYBRID, 0, 40) == (Need(0, 0, 10), Need(1, 8, 10), Need(2, 4, 5))
    assert needs_of(HYBRID, 32, 40) == (Need(0, 8, 10), Need(1, 8, 10), Need(2, 4, 5))


def test_chunk_needs_what_the_next_token_sees_of_it() -> None:
    assert needs_of(CHUNKED, 0, 40)[0] == Need(0, 8, 10)
    assert needs_of(CHUNKED, 36, 40)[0] == Need(0, 9, 10)
    assert needs_of(CHUNKED, 0, 32)[0] == Need(0, 8, 8)


def test_recurrent_layers_need_the_state_at_the_end_alone() -> None:
    assert needs_of(RECURRENT, 0, 40) == (Need(0, 0, 5), Need(1, 4, 5), Need(2, 4, 5))
    present = {0: Present([True] * 5), 1: Present([True, False, True, False, False]), 2: Present([False, True, True])}
    keys = {index: [key(number) for number in range(5)] for index in range(3)}
    match = find_match(RECURRENT, present, keys, 0, 40)
    assert match is not None
    assert match.tokens == 24


def test_drafter_drops_the_last_block_of_a_hit() -> None:
    match = find_match(DRAFTED, {0: Present([True] * 10)}, {0: [key(i) for i in range(10)]}, 0, 40)
    assert match is not None
    assert match.tokens == 36


def test_hit_never_covers_a_token_that_vllm_must_compute() -> None:
    assert SINGLE.hit_tokens_max(40) == 40
    assert HYBRID.hit_tokens_max(40) == 32
    assert HYBRID.hit_tokens_max(0) == 0
    assert RECURRENT.hit_tokens_max(40) == 32
    assert DRAFTED.hit_tokens_max(40) == 36
    assert DRAFTED_RECURRENT.hit_tokens_max(40) == 32
    assert DRAFTED_RECURRENT.hit_tokens_max(7) == 0


def test_unknown_kind_of_group_is_named() -> None:
    geometry = Geometry((full_group(0), Group(1, GroupKind.UNSUPPORTED, 4, 1, 0, "MambaSpec")))
    assert "MambaSpec" in (geometry.problem or "")
    assert Geometry(()).problem
    assert HYBRID.problem is None
