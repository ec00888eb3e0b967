"""Engines in several processes: tensor parallel workers, siblings on one pool, and sudden death."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from tests.patience import await_
from tests.vllm.engines import BLOCK_TOKENS, EngineProcess, cached_of, prompt, tokens_of

PROMPTS = [prompt(1, 300), prompt(2, 320), prompt(4, 700)]
HITS = [288, 320, 672]


def pool_path(pool: dict[str, Any]) -> str:
    [path] = Path("/dev/shm").glob(f"*{pool['pool_name']}*")
    return str(path)


def assert_sound(pool: dict[str, Any]) -> None:
    """Every invariant of the pool holds and every block has the bytes that were saved."""
    _native.reap(pool_path(pool))
    report = json.loads(_native.verify(pool_path(pool)))
    assert report["ok"], report["problems"]
    assert report["blocks_checked"]


def warm_up(engine: EngineProcess, pool: dict[str, Any]) -> None:
    """Wait until the engine has learned its namespace, and the pool has grown room for blocks that count."""

    def is_cached() -> bool:
        assert engine.ask("reset")
        return cached_of(engine.generate([prompt(9, 40)], 2)) == [32]

    await_(is_cached)
    await_(lambda: all(one["slots"] > one["blocks_sealed"] + one["blocks_reserved"] for one in spaces(pool)))


def spaces(pool: dict[str, Any]) -> list[dict[str, Any]]:
    """Namespaces of the pool."""
    found: list[dict[str, Any]] = json.loads(_native.inspect(pool_path(pool)))["namespaces"]
    return found


def await_saved(pool: dict[str, Any], tokens: int) -> None:
    """Until blocks of so many tokens are there, and none is on its way."""
    await_(
        lambda: all(
            one["blocks_sealed"] >= tokens // BLOCK_TOKENS and not one["blocks_reserved"] for one in spaces(pool)
        )
    )


@pytest.mark.timeout(1800)
def test_tensor_parallel_outputs_are_those_without_a_connector(
    start_process: Callable[..., EngineProcess], models: dict[str, Path], pool: dict[str, Any]
) -> None:
    parallel = {"tensor_parallel_size": 2, "max_num_batched_tokens": 256}
    # vLLM binds each worker to a NUMA node of its own, and small machines have only one.
    process = start_process(multiprocessing=True, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    with process.engine(models["llama"], **parallel) as plain:
        expected = tokens_of(plain.generate(PROMPTS, 20))
    with process.engine(models["llama"], pool, **parallel) as engine:
        engine.ask("probe")
        warm_up(engine, pool)
        cold = engine.generate(PROMPTS, 20)
        assert tokens_of(cold) == expected
        assert cached_of(cold) == [0, 0, 0]
        assert engine.ask("reset")
        warm = engine.generate(PROMPTS, 20)
        assert tokens_of(warm) == expected
        assert cached_of(warm) == HITS
        first = engine.ask("digests")
    with process.engine(models["llama"], pool, **parallel) as engine:
        engine.ask("probe")
        warm_up(engine, pool)
        before = engine.ask("metrics")
        restarted = engine.generate(PROMPTS, 20)
        assert tokens_of(restarted) == expected
        assert cached_of(restarted) == HITS
        second = engine.ask("digests")
        metrics = engine.ask("metrics")  # by way of all processes
    assert metrics["vllm:pega_load_success"] - before["vllm:pega_load_success"] == len(PROMPTS)
    assert not metrics.get("vllm:pega_hook_errors")
    assert len(first) == len(second) == 2
    for rank in range(2):
        for digests in (first[rank], second[rank]):
            assert digests["loaded"]
            assert digests["loaded"].items() <= first[rank]["saved"].items()
    assert first[0]["loaded"] != first[1]["loaded"]
    assert_sound(pool)


@pytest.mark.timeout(1800)
def test_killed_engine_leaves_a_warm_and_sound_pool(
    start_process: Callable[..., EngineProcess],
    in_process: EngineProcess,
    models: dict[str, Path],
    pool: dict[str, Any],
) -> None:
    with in_process.engine(models["llama"]) as plain:
        expected = tokens_of(plain.generate(PROMPTS, 20))
    victim = start_process(multiprocessing=True)
    victim.start(models["llama"], pool)
    warm_up(victim, pool)
    assert tokens_of(victim.generate(PROMPTS[:2], 20)) == expected[:2]
    await_saved(pool, sum(HITS[:2]))
    with in_process.engine(models["llama"], pool) as sibling:
        # A second engine beside the first shares its blocks at once.
        beside = sibling.generate(PROMPTS[:2], 20)
        assert tokens_of(beside) == expected[:2]
        assert cached_of(beside) == HITS[:2]
        many = [prompt(seed, 500) for seed in range(20, 60)]
        threading.Thread(target=lambda: _ignore_death(victim, many), daemon=True).start()
        time.sleep(0.4)
        victim.kill()
        after = sibling.generate(PROMPTS, 20)
        assert tokens_of(after) == expected
    assert_sound(pool)
    with in_process.engine(models["llama"], pool) as engine:
        again = engine.generate(PROMPTS, 20)
        assert tokens_of(again) == expected
        assert cached_of(again) == HITS


def _ignore_death(process: EngineProcess, prompts: list[list[int]]) -> None:
    try:
        process.generate(prompts, 4)
    except (AssertionError, OSError, ValueError):
        return  # it was killed while it worked, which is the point


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", ["part.copied", "publish.odd"])
def test_death_in_the_middle_of_a_save_loses_only_what_was_not_saved(
    start_process: Callable[..., EngineProcess],
    in_process: EngineProcess,
    models: dict[str, Path],
    pool: dict[str, Any],
    point: str,
) -> None:
    victim = start_process()
    victim.start(models["llama"], pool)
    expected = tokens_of(victim.generate(PROMPTS, 20)[:1])
    assert victim.ask("reset")  # all of them are saved
    victim.ask("arm", name=point)
    with pytest.raises(AssertionError, match="died"):
        victim.generate([prompt(7, 300)], 20)
    victim.process.wait(timeout=240)
    assert_sound(pool)
    with in_process.engine(models["llama"], pool) as engine:
        warm = engine.generate(PROMPTS[:1], 20)
        assert tokens_of(warm) == expected
        assert cached_of(warm) == HITS[:1]
        engine.generate([prompt(7, 300)], 20)
        assert engine.ask("reset")
        assert cached_of(engine.generate([prompt(7, 300)], 20)) == [288]
