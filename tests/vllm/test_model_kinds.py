"""Models of every kind: what comes out is what comes out without a connector, cold, warm and after a restart, and every
byte that is loaded was saved."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import EngineProcess, cached_of, prompt, tokens_of

PROMPTS = [prompt(1, 300), prompt(2, 320), prompt(3, 20), prompt(4, 700)]
"""Ends inside a block; ends with a block; shorter than most blocks; several chunks."""

CHUNKED = {"max_num_batched_tokens": 256}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Kind:
    """One model and how much of the prompts is found again."""

    model: str
    hits: list[int]
    options: dict[str, Any] = field(default_factory=dict)


KINDS = {
    # A block less than without a drafter, or what is behind the last whole block.
    "experts and a drafter": Kind("glm4", [256, 288, 0, 640], MTP),
    "recurrent layers and experts": Kind("qwen3_next", [288, 288, 0, 672], {"enable_prefix_caching": True}),
    "chunked local attention": Kind("llama4", [288, 288, 0, 672]),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_those_without_a_connector(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], name: str
) -> None:
    kind = KINDS[name]
    model, options = models[kind.model], {**CHUNKED, **kind.options}
    with in_process.engine(model, **options) as plain:
        expected = tokens_of(plain.generate(PROMPTS, ANSWER_TOKENS))
    saved: set[tuple[str, str]] = set()
    for restarted in (False, True):
        with in_process.engine(model, pool, **options) as engine:
            engine.ask("probe")
            if not restarted:
                cold = engine.generate(PROMPTS, ANSWER_TOKENS)
                assert tokens_of(cold) == expected
                assert cached_of(cold) == [0, 0, 0, 0]
                assert engine.ask("reset")
            warm = engine.generate(PROMPTS, ANSWER_TOKENS)
            assert tokens_of(warm) == expected
            assert cached_of(warm) == kind.hits
            [digests] = engine.ask("digests")
            metrics = engine.ask("metrics")
        saved |= digests["saved"].items()
        assert digests["loaded"]
        assert digests["loaded"].items() <= saved
        assert metrics["vllm:pega_load_success"] == sum(hit > 0 for hit in kind.hits)
        assert not metrics.get("vllm:pega_load_failure")
        assert not metrics.get("vllm:pega_hook_errors")


def test_recurrent_layers_without_states_leave_vllm_serving_and_say_what_to_do(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["qwen3_next"], pool, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert cached_of(engine.generate(PROMPTS[:1], 2)) == [0]
    assert in_process.log.read_text().count("--enable-prefix-caching, and without another") == 1


def test_model_that_vllm_computes_from_the_beginning_only_is_left_alone(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    # The backend that vLLM takes by itself on CPUs without AMX.
    with in_process.engine(models["deepseek"], pool, attention_config={"backend": "CPU_MLA"}) as engine:
        first, again = (engine.generate(PROMPTS[:2], 4) for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    assert cached_of(again) == [0, 0]
    assert in_process.log.read_text().count("(MLA) computes prompts from their beginning only") == 1
