"""A model that people use: Gemma 3 270M says with the connector what it says without, token by token."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.vllm.engines import ROOT, EngineProcess

MODEL = ROOT / "build" / "models" / "gemma3-270m"
"""From ``make model``. Its windows have 512 tokens."""

ANSWER_TOKENS = 8
OPTIONS = {"max_num_batched_tokens": 256}


def prompts() -> list[list[int]]:
    """A text that is longer than a window, one that ends with a block, and one that goes on from the first."""
    text = (ROOT / "demo" / "text.txt").read_text()
    tokens: list[int] = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    return [tokens[:600], tokens[700:860], tokens[:600] + tokens[1000:1040]]


def one_by_one(engine: EngineProcess, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers, each computed alone: what shares a step may differ in its last bit."""
    return [answer for text in texts for answer in engine.generate([text], ANSWER_TOKENS)]


@pytest.mark.timeout(1800)
def test_gemma_3_270m_says_the_same_cold_warm_and_after_a_restart(
    in_process: EngineProcess, pool: dict[str, Any]
) -> None:
    assert (MODEL / "model.safetensors").exists(), "it is not there: make model"
    texts, pool = prompts(), {**pool, "pool_size": "256mb"}
    with in_process.engine(MODEL, **OPTIONS) as plain:
        cold = one_by_one(plain, texts)
        warm = one_by_one(plain, texts)
    assert [answer["cached"] for answer in cold] == [0, 0, 576]
    assert [answer["cached"] for answer in warm] == [576, 128, 608]
    with in_process.engine(MODEL, pool, **OPTIONS) as engine:
        assert one_by_one(engine, texts) == cold
        assert engine.ask("reset")
        assert one_by_one(engine, texts) == warm
    with in_process.engine(MODEL, pool, **OPTIONS) as engine:
        assert one_by_one(engine, texts) == warm
        metrics = engine.ask("metrics")
    assert metrics["vllm:pega_load_success"] == len(texts)
    assert not metrics.get("vllm:pega_load_failure")
    assert not metrics.get("vllm:pega_hook_errors")
