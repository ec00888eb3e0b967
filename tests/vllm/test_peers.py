"""Two hosts, as network namespaces with memory of their own: what one has computed is warm on the other."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demo.two_hosts import MadeUpHost, two_hosts
from tests.vllm.engines import EngineProcess, cached_of, prompt, tokens_of

PORT = 7441
ANSWER_TOKENS = 12
PROMPTS = [prompt(1, 300), prompt(4, 700)]


@pytest.fixture
def hosts() -> Iterator[tuple[MadeUpHost, MadeUpHost]]:
    """Two of them."""
    with two_hosts() as pair:
        yield pair


@pytest.mark.timeout(900)
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
        warm = prefill.generate(PROMPTS, ANSWER_TOKENS)
        answers = decode.generate(PROMPTS, ANSWER_TOKENS)
        assert tokens_of(answers) == tokens_of(warm)
        assert cached_of(answers) == [300, 700]
        assert prefill.ask("reset")
        new = [prompt(2, 333), prompt(3, 20)]
        waiting = threads.submit(decode.generate, new, ANSWER_TOKENS)
        computed = prefill.generate(new, ANSWER_TOKENS)
        assert tokens_of(waiting.result()) == tokens_of(computed)
        assert cached_of(waiting.result()) == [333, 20]
    # What came is in the pool of its host now, and nobody has to be asked for it.
    assert decode.ask("reset")
    prefill.kill()
    again = decode.generate(PROMPTS, ANSWER_TOKENS)
    assert tokens_of(again) == tokens_of(answers)
    assert cached_of(again) == [300, 700]
    # Nobody is left who could bring this one, so nobody waits for it.
    assert cached_of(decode.generate([prompt(8, 100)], 4)) == [0]
    metrics = decode.ask("metrics")
    assert metrics["vllm:pega_hit_tokens_peer"] == 300 + 700 + 333 + 20
    assert metrics["vllm:pega_full_prefix_incomplete"] == 1
    assert not metrics.get("vllm:pega_load_failure")
    assert not metrics.get("vllm:pega_hook_errors")
