"""Policies over traces: what they find, that none finds more than can be found, and what is no trace."""

import itertools
import json
import random
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pegaflow.cli.main import cli
from pegaflow.errors import InvalidArgument
from pegaflow.replay.optimum import best_hits
from pegaflow.replay.policies import OPTIMUM, POLICIES, hits_of
from pegaflow.replay.trace import Prompt, distinct_blocks, read_trace

NAMES = [*POLICIES, OPTIMUM]


def random_prompts(seed: int, prompts: int, branches: int, depth: int) -> list[Prompt]:
    """Prompts along a tree: equal blocks have equal blocks before them."""
    chance = random.Random(seed)
    made = []
    for _ in range(prompts):
        path: list[int] = []
        for _ in range(chance.randint(1, depth)):
            path.append(chance.randrange(branches))
        made.append(["/".join(map(str, path[: end + 1])) for end in range(len(path))])
    return made


def requests_of_a_service(seed: int) -> list[Prompt]:
    """System prompts that many share, conversations that come back, and documents that are asked about once."""
    chance = random.Random(seed)
    prompts: list[Prompt] = []
    talks: list[list[int | str]] = []
    for number in range(4000):
        which = int(chance.expovariate(0.3))
        system: list[int | str] = [f"system {which} {block}" for block in range(6)]
        if chance.random() < 0.5:
            prompts.append([*system, *(f"document {number} {block}" for block in range(chance.randint(5, 25)))])
            continue
        if len(talks) < 150 or chance.random() < 0.15:
            talks.append(system)
        talk = talks[-1 - min(int(chance.expovariate(0.02)), len(talks) - 1)]
        talk += [f"{number} {block}" for block in range(chance.randint(1, 4))]
        prompts.append(list(talk))
    return prompts


def hits_of_anything(prompts: list[Prompt], blocks_max: int) -> int:
    """The most that can be found, by trying everything."""
    kept: dict[frozenset[int | str], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int | str], int] = {}
        for cache, hits in kept.items():
            found = next((at for at, block in enumerate(prompt) if block not in cache), len(prompt))
            at_hand = cache | set(prompt)
            for size in range(min(blocks_max, len(at_hand)) + 1):
                for choice in map(frozenset, itertools.combinations(sorted(at_hand), size)):
                    after[choice] = max(after.get(choice, 0), hits + found)
        kept = after
    return max(kept.values())


@pytest.mark.parametrize("name", NAMES)
def test_cache_that_holds_all_finds_all_that_was_there_before(name: str) -> None:
    prompts = random_prompts(1, 300, 3, 6)
    seen: set[int | str] = set()
    expected = 0
    for prompt in prompts:
        expected += next((at for at, block in enumerate(prompt) if block not in seen), len(prompt))
        seen.update(prompt)
    assert hits_of(name, prompts, len(seen)) == expected > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_finds_more_than_the_optimum_or_holds_more_than_it_may(name: str) -> None:
    prompts = random_prompts(2, 500, 3, 6)
    for blocks_max in (1, 2, 7, 30, 100):
        assert 0 <= hits_of(name, prompts, blocks_max) <= best_hits(prompts, blocks_max)
        if name != OPTIMUM:
            cache = POLICIES[name](blocks_max)
            for prompt in prompts:
                cache.find(prompt)
                cache.store(prompt)
            everything = {block for prompt in prompts for block in prompt}
            assert sum(cache.find([block]) for block in everything) <= blocks_max


def test_optimum_is_what_trying_everything_finds() -> None:
    for seed in range(12):
        prompts = random_prompts(seed, 6, 2, 3)
        for blocks_max in (1, 2, 3):
            assert best_hits(prompts, blocks_max) == hits_of_anything(prompts, blocks_max), (seed, blocks_max)


@pytest.mark.parametrize("name", ["pool-lru", "lru"])
def test_tail_of_the_oldest_prompt_goes_first(name: str) -> None:
    cache = POLICIES[name](4)
    cache.store(["a", "a1", "a2"])
    cache.store(["b", "b1"])
    assert (cache.find(["a", "a1", "a2"]), cache.find(["b", "b1"])) == (2, 2)
    cache.store(["a"])
    cache.store(["c", "c1"])
    assert (cache.find(["a", "a1"]), cache.find(["b", "b1"]), cache.find(["c", "c1"])) == (1, 1, 2)


def test_probation_keeps_what_is_used_again_from_a_flood_of_what_is_not() -> None:
    prompts: list[Prompt] = []
    for turn in range(200):
        prompts += [["system", "prompt"], [f"once {turn}", f"{turn}", f"{turn} too"], [f"flood {turn}", f"{turn} more"]]
    assert hits_of("probation", prompts, 6) >= hits_of("lru", prompts, 6)
    assert hits_of("probation", prompts, 4) > hits_of("lru", prompts, 4)


def test_engine_finds_what_the_simulation_of_its_policy_does() -> None:
    prompts = requests_of_a_service(4)
    asked, distinct = sum(map(len, prompts)), distinct_blocks(prompts)
    for share in (0.02, 0.1):
        names = ("pool", "pool-lru", "probation", "lru")
        found = {name: hits_of(name, prompts, int(share * distinct)) / asked for name in names}
        assert found["pool"] == pytest.approx(found["probation"], abs=0.005), share
        assert found["pool-lru"] == pytest.approx(found["lru"], abs=0.005), share
        assert found["pool"] > found["pool-lru"] + 0.01, "else this shows nothing"


def test_engine_of_a_replay_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = POLICIES["pool"](100)
    cache.store(["a", "b"])
    assert (cache.find(["a", "b"]), len(list(tmp_path.iterdir()))) == (2, 1)
    del cache
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgument, match="too large for a replay"):
        POLICIES["pool"](10**12)


@pytest.mark.parametrize(
    "line", ["{}", "[1]", '{"hash_ids": 1}', '{"hash_ids": [1.5]}', '{"hash_ids": [true]}', "x", "[" * 5000]
)
def test_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=r"line 3: .*hash_ids"):
        read_trace(trace)
    answer = CliRunner().invoke(cli, ["replay", str(trace)])
    assert answer.exit_code == 1
    assert "line 3" in answer.output


def test_command_prints_a_table_and_the_same_for_programs(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = random_prompts(3, 100, 3, 5)
    trace.write_text("".join(json.dumps({"hash_ids": prompt}) + "\n" for prompt in prompts))
    answer = CliRunner().invoke(cli, ["replay", str(trace), "--capacity", "10%", "--capacity", "50"])
    assert answer.exit_code == 0
    assert all(name in answer.stdout for name in NAMES)
    answer = CliRunner().invoke(cli, ["replay", str(trace), "--policy", "pool", "--capacity", "10%", "--json"])
    said = json.loads(answer.stdout)
    asked, distinct = sum(map(len, prompts)), distinct_blocks(prompts)
    assert (said["requests"], said["blocks"], said["distinct_blocks"]) == (100, asked, distinct)
    [result] = said["results"]
    assert result["blocks"] == distinct // 10
    assert result["hit_ratio"] == hits_of("pool", prompts, distinct // 10) / asked


@pytest.mark.parametrize("capacity", ["0", "0%", "x", "1.5", "-1", "10%%"])
def test_size_that_is_none_is_refused(capacity: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1]}\n')
    answer = CliRunner().invoke(cli, ["replay", str(trace), f"--capacity={capacity}"])
    assert answer.exit_code == 2
    assert "neither a share" in answer.output


def test_trace_without_prompts_finds_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n")
    answer = CliRunner().invoke(cli, ["replay", str(trace), "--json"])
    assert all(result["hit_ratio"] == 0 for result in json.loads(answer.stdout)["results"])
