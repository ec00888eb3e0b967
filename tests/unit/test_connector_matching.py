"""Hit length over groups, compared with a search that tries every length."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.matching import Need, find_match, needs_of
from tests.unit.mini_engine import HYBRID, SINGLE, full_group, window_group


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


def restorable(geometry: Geometry, blocks: dict[int, Sequence[bool]], computed: int, end: int) -> bool:
    """Whether every block that a sequence of ``end`` tokens needs is there or computed."""
    for group in geometry.groups:
        first, stop = computed // group.block_tokens, end // group.block_tokens
        if group.kind is GroupKind.WINDOW:
            first = max(first, stop - group.window_blocks)
        if not all(blocks[group.index][first:stop]):
            return False
    return True


groups = st.builds(
    lambda index, window, size: full_group(index, size) if window == 0 else window_group(index, window, size),
    st.just(0),
    st.integers(0, 4),
    st.sampled_from([4, 8]),
)


@given(
    st.lists(groups, min_size=1, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=24, max_size=24), min_size=3, max_size=3),
    st.integers(0, 5),
    st.integers(0, 100),
)
def test_hit_is_the_longest_that_every_group_can_restore(
    made: list[Group], presence: list[list[bool]], computed_blocks: int, tokens_max: int
) -> None:
    numbered = tuple(
        Group(index, group.kind, group.block_tokens, group.hashes_per_block, group.window_blocks, "")
        for index, group in enumerate(made)
    )
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


def test_window_needs_only_its_last_blocks() -> None:
    assert needs_of(HYBRID, 0, 40) == (Need(0, 0, 10), Need(1, 8, 10), Need(2, 4, 5))
    assert needs_of(HYBRID, 32, 40) == (Need(0, 8, 10), Need(1, 8, 10), Need(2, 4, 5))


def test_drafter_drops_the_last_block_of_a_hit() -> None:
    geometry = Geometry(SINGLE.groups, lookahead=True)
    match = find_match(geometry, {0: Present([True] * 10)}, {0: [key(i) for i in range(10)]}, 0, 40)
    assert match is not None
    assert match.tokens == 36


def test_hit_never_covers_a_token_that_vllm_must_compute() -> None:
    assert SINGLE.hit_tokens_max(40) == 40
    assert HYBRID.hit_tokens_max(40) == 32
    assert HYBRID.hit_tokens_max(0) == 0


def test_unknown_kind_of_group_is_named() -> None:
    geometry = Geometry((full_group(0), Group(1, GroupKind.UNSUPPORTED, 4, 1, 0, "MambaSpec")))
    assert "MambaSpec" in (geometry.problem or "")
    assert Geometry(()).problem
    assert HYBRID.problem is None
