"""Beside other engines and other connectors: prefill and decode apart, and vLLM's MultiConnector in both orders."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import EngineProcess, cached_of, connector, prompt, tokens_of

PROMPTS = [prompt(1, 300), prompt(2, 320), prompt(3, 20), prompt(4, 700), prompt(5, 33), prompt(6, 1)]
"""Inside a block; with a block; shorter than a block; several chunks; one token in the last block; one token."""

HITS = [300, 320, 20, 700, 32, 0]
"""All but what vLLM computes anyway: of a prompt that is there to its end, it recomputes the last token."""

CHUNKED = {"max_num_batched_tokens": 256}
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def expected(in_process: EngineProcess, models: dict[str, Path]) -> list[list[int]]:
    """What comes out without any connector."""
    with in_process.engine(models["llama"], **CHUNKED) as plain:
        return tokens_of(plain.generate(PROMPTS, ANSWER_TOKENS))


@pytest.fixture
def prefill(
    start_process: Callable[..., EngineProcess], models: dict[str, Path], pool: dict[str, Any]
) -> EngineProcess:
    """An instance that computes prompts."""
    process = start_process()
    process.start(models["llama"], {**pool, "pd_tail_save": True}, role="kv_producer", **CHUNKED)
    return process


@pytest.mark.timeout(1800)
def test_decode_instance_computes_no_more_than_the_last_token_of_a_prompt(
    in_process: EngineProcess,
    models: dict[str, Path],
    pool: dict[str, Any],
    expected: list[list[int]],
    prefill: EngineProcess,
) -> None:
    options = {**pool, "pd_tail_load": True, "wait_for_full_prefix": True, "wait_for_full_prefix_seconds": 500}
    with in_process.engine(models["llama"], options, role="kv_consumer") as decode, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(decode.generate, PROMPTS, ANSWER_TOKENS)
        first = tokens_of(prefill.generate(PROMPTS, 1))
        answers = waiting.result()
        assert first == [tokens[:1] for tokens in expected]
        assert tokens_of(answers) == expected
        assert cached_of(answers) == HITS
        # The prefill instance loads too, and what was decoded is there for the next turn.
        assert prefill.ask("reset")
        turn = [*PROMPTS[0], *answers[0]["tokens"], 7]
        assert cached_of(prefill.generate([turn], 1)) == [320]
        # Salts are part of a tail's key.
        prefill.generate(PROMPTS[:1], 1, salt="theirs")
        assert decode.ask("reset")
        [salted] = decode.generate(PROMPTS[:1], ANSWER_TOKENS, salt="theirs")
        assert (salted["tokens"], salted["cached"]) == (expected[0], 300)
        # Nobody is left who could bring this prompt, so nobody waits for it.
        prefill.kill()
        alone = decode.generate([prompt(8, 100)], 4)
        assert cached_of(alone) == [0]
        metrics = decode.ask("metrics")
    assert metrics["vllm:pega_full_prefix_incomplete"] == 1
    assert not metrics.get("vllm:pega_load_failure")
    assert not metrics.get("vllm:pega_hook_errors")


@pytest.mark.timeout(1800)
def test_other_connector_in_either_order_changes_no_output_and_both_are_filled(
    in_process: EngineProcess,
    models: dict[str, Path],
    pool: dict[str, Any],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }

    def together(*children: dict[str, Any]) -> dict[str, Any]:
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(children)},
        }

    # Ours only saves, and what the other loads is saved like what was computed.
    ours = connector({**pool, "mode": "save_only"})
    with in_process.engine(models["llama"], kv_transfer_config=together(ours, files)) as engine:
        assert tokens_of(engine.generate(PROMPTS[:2], ANSWER_TOKENS)) == expected[:2]
        assert engine.ask("reset")
        warm = engine.generate(PROMPTS[:2], ANSWER_TOKENS)
        assert tokens_of(warm) == expected[:2]
        assert all(cached_of(warm))
        assert not engine.ask("metrics").get("vllm:pega_load_success")
    # Ours comes second: it loads what only it has.
    with in_process.engine(models["llama"], kv_transfer_config=together(files, connector(pool))) as engine:
        assert tokens_of(engine.generate(PROMPTS[3:4], ANSWER_TOKENS)) == expected[3:4]
        for file in (tmp_path / "files").glob("*/*"):
            file.unlink()
        for directory in (tmp_path / "files").iterdir():
            directory.rmdir()
        assert engine.ask("reset")
        warm = engine.generate([PROMPTS[0], PROMPTS[3]], ANSWER_TOKENS)
        assert tokens_of(warm) == [expected[0], expected[3]]
        assert cached_of(warm) == [288, 672]
        metrics = engine.ask("metrics")
        assert metrics["vllm:pega_load_success"] == 2
        assert not metrics.get("vllm:pega_hook_errors")
