"""The workload of the sharing benchmarks is the same everywhere, and as skewed and as shared as it says."""

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks._shared_prefixes import TOKEN_ID_MIN, SharedPrefixes, instance_of

ROOT = Path(__file__).parents[2]
SMALL = SharedPrefixes(prefixes=8, prefix_tokens=96, tail_tokens=17, vocabulary=512)


def test_another_process_makes_the_same_prompts() -> None:
    code = (
        "from benchmarks._shared_prefixes import SharedPrefixes\n"
        "print(SharedPrefixes(prefixes=8, prefix_tokens=96, tail_tokens=17, vocabulary=512).prompt(41))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{SMALL.prompt(41)}\n"


def test_prompts_have_their_prefix_and_a_tail_of_their_own() -> None:
    prompts = [SMALL.prompt(number) for number in range(100)]
    assert all(len(prompt) == SMALL.prompt_tokens == 113 for prompt in prompts)
    assert all(prompt[:96] == SMALL.prefix(SMALL.rank(number)) for number, prompt in enumerate(prompts))
    assert len({tuple(prompt[96:]) for prompt in prompts}) == 100
    assert len({tuple(SMALL.prefix(rank)) for rank in range(8)}) == 8
    assert all(TOKEN_ID_MIN <= token < 512 for prompt in prompts for token in prompt)


def test_another_seed_makes_other_prompts() -> None:
    other = dataclasses.replace(SMALL, seed=2)
    assert other.prefix(0) != SMALL.prefix(0)
    assert [other.rank(number) for number in range(100)] != [SMALL.rank(number) for number in range(100)]


@pytest.mark.parametrize(("skew", "first_share"), [(0.0, 1 / 8), (1.0, 1 / 2.7179), (2.0, 1 / 1.5274)])
def test_popularity_follows_the_law_of_zipf(skew: float, first_share: float) -> None:
    workload = dataclasses.replace(SMALL, skew=skew)
    asked = Counter(workload.rank(number) for number in range(4000))
    assert asked[0] / 4000 == pytest.approx(first_share, abs=0.04)
    assert set(asked) == set(range(8))


def test_instances_take_turns() -> None:
    assert [instance_of(number, 3) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_caches_apart_find_less_than_one_for_all_by_one_prefix_for_each_instance() -> None:
    numbers, block = range(400), 32
    one = SMALL.found_at_most(numbers, 2, shared=True, block_tokens=block)
    apart = SMALL.found_at_most(numbers, 2, shared=False, block_tokens=block)
    asked = 400 * SMALL.prompt_tokens
    assert one * asked == pytest.approx((400 - 8) * 96)
    assert apart * asked == pytest.approx((400 - 2 * 8) * 96)


def test_only_full_blocks_are_found() -> None:
    found = SMALL.found_at_most(range(400), 1, shared=True, block_tokens=64)
    assert found * 400 * SMALL.prompt_tokens == pytest.approx((400 - 8) * 64)
