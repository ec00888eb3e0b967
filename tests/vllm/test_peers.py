"""Two hosts, as network namespaces with memory of their own: what one has computed is warm on the other."""

import itertools
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demo.two_hosts import MadeUpHost, two_hosts
from tests.patience import await_
from tests.vllm.engines import EngineProcess, cached_of, prompt, tokens_of

PORT = 7441
ANSWER_TOKENS = 12
SEEDS = itertools.count(10)
Answers = list[dict[str, Any]]


@pytest.fixture
def hosts() -> Iterator[tuple[MadeUpHost, MadeUpHost]]:
    """Two of them."""
    with two_hosts() as pair:
        yield pair


def in_some_try(
    lengths: list[int], answer: Callable[[list[list[int]]], tuple[Answers, Answers]]
) -> tuple[list[list[int]], Answers, int]:
    """``(prompts, what the decode side says, tokens that came)`` once new prompts of these lengths come whole from the
    other host: one that got no processor for a while costs a hit, and the tokens of all tries count."""
    came = 0
    prompts: list[list[int]] = []
    answers: Answers = []

    def comes() -> bool:
        nonlocal came, prompts, answers
        prompts = [prompt(next(SEEDS), length) for length in lengths]
        computed, answers = answer(prompts)
        assert tokens_of(answers) == tokens_of(computed)
        came += sum(cached_of(answers))
        return cached_of(answers) == lengths

    await_(comes)
    return prompts, answers, came


@pytest.mark.timeout(1800)
def test_prompt_of_one_host_is_warm_on_the_other_and_decode_waits_for_prefill(
    start_process: Callable[..., EngineProcess],
    models: dict[str, Path],
    hosts: tuple[MadeUpHost, MadeUpHost],
) -> None:
    """Prefill and decode apart: the decode side has nothing to do but each prompt's last token."""
    a, b = hosts
    environment = {"PEGAFLOW_PEER_TOKEN": secrets.token_hex(32), "VLLM_HOST_IP": "127.0.0.1"}
    prefill, decode = (start_process(command=host.command, **environment) for host in hosts)
    common: dict[str, Any] = {"pool_size": "64mb", "nics": "none"}
    serves = {**common, "shm_dir": str(a.shm_dir), "peer_listen": f"{a.address}:{PORT}", "pd_tail_save": True}
    asks = {**common, "shm_dir": str(b.shm_dir), "peers": f"{a.address}:{PORT}", "pd_tail_load": True}
    asks |= {"wait_for_full_prefix": True, "wait_for_full_prefix_seconds": 500, "prefetch_wait_ms_max": 60_000}
    # One after the other: a host that was asked before it served is left alone for a while.
    prefill.start(models["llama"], serves, role="kv_producer")
    decode.start(models["llama"], asks, role="kv_consumer")
    with ThreadPoolExecutor(1) as threads:

        def before(prompts: list[list[int]]) -> tuple[Answers, Answers]:
            computed = prefill.generate(prompts, ANSWER_TOKENS)
            return computed, decode.generate(prompts, ANSWER_TOKENS)

        def beside(prompts: list[list[int]]) -> tuple[Answers, Answers]:
            waiting = threads.submit(decode.generate, prompts, ANSWER_TOKENS)
            computed = prefill.generate(prompts, ANSWER_TOKENS)
            return computed, waiting.result()

        prompts, answers, came = in_some_try([300, 700], before)
        assert prefill.ask("reset")
        came += in_some_try([333, 20], beside)[2]
    # What came is in the pool of its host now, and nobody has to be asked for it.
    assert decode.ask("reset")
    prefill.kill()
    again = decode.generate(prompts, ANSWER_TOKENS)
    assert tokens_of(again) == tokens_of(answers)
    assert cached_of(again) == [300, 700]
    incomplete = decode.ask("metrics").get("vllm:pega_full_prefix_incomplete", 0)
    # Nobody is left who could bring this one, so nobody waits for it.
    assert cached_of(decode.generate([prompt(8, 100)], 4)) == [0]
    metrics = decode.ask("metrics")
    assert metrics["vllm:pega_hit_tokens_peer"] == came
    assert metrics["vllm:pega_full_prefix_incomplete"] == incomplete + 1
    assert not metrics.get("vllm:pega_load_failure")
    assert not metrics.get("vllm:pega_hook_errors")
