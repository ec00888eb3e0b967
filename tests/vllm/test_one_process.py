"""Scheduler and worker in one process and thread: what comes out is what would have come out without us."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from tests.vllm.engines import BLOCK_TOKENS, EngineProcess, cached_of, prompt, tokens_of

PROMPTS = [prompt(1, 300), prompt(2, 320), prompt(3, 20), prompt(4, 700), [*prompt(1, 200), *prompt(5, 150)]]
"""Ends inside a block; ends with a block; shorter than a block; several chunks; shares a prefix with the first."""

CHUNKED = {"max_num_batched_tokens": 256}


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_outputs_are_those_without_a_connector(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], name: str
) -> None:
    with in_process.engine(models[name], **CHUNKED) as plain:
        expected = tokens_of(plain.generate(PROMPTS, 40))
    with in_process.engine(models[name], pool, **CHUNKED) as engine:
        engine.ask("probe")
        cold = engine.generate(PROMPTS[:4], 40)
        assert tokens_of(cold) == expected[:4]
        assert cached_of(cold) == [0, 0, 0, 0]
        assert engine.ask("reset")
        warm = engine.generate(PROMPTS, 40)
        assert tokens_of(warm) == expected
        first = engine.ask("digests")[0]
    with in_process.engine(models[name], pool, **CHUNKED) as engine:
        engine.ask("probe")
        restarted = engine.generate(PROMPTS, 40)
        assert tokens_of(restarted) == expected
        second = engine.ask("digests")[0]
        metrics = engine.ask("metrics")
    # vLLM recomputes the last token of a prompt, in place only where all attention is full.
    whole = 320 if name == "llama" else 288
    hits = [288, whole, 0, whole_blocks(700), 192]
    assert cached_of(warm) == hits
    assert cached_of(restarted)[:4] == hits[:4]
    assert cached_of(restarted)[4] == whole_blocks(350)
    for digests in (first, second):
        assert digests["loaded"]
        assert digests["loaded"].items() <= first["saved"].items() | second["saved"].items()
    assert metrics["vllm:pega_load_success"] >= 4
    assert not metrics.get("vllm:pega_load_failure")
    assert not metrics.get("vllm:pega_hook_errors")


def test_decoded_blocks_are_cached_too(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        [answer] = engine.generate([prompt(6, 100)], 130)
        assert engine.ask("reset")
        [again] = engine.generate([[*prompt(6, 100), *answer["tokens"]]], 4)
    assert again["cached"] == whole_blocks(100 + 130 - 1)


def test_other_weights_of_the_same_shape_never_hit(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS)
    with in_process.engine(models["llama, other weights"], pool) as engine:
        assert cached_of(engine.generate(PROMPTS[:4])) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "float32"}, {"block_size": 64}, {"prefix_caching_hash_algo": "sha256_cbor"}],
    ids=["data type", "block size", "hash algorithm"],
)
def test_other_layout_or_hashes_never_hit(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], changed: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS[:2])
    with in_process.engine(models["llama"], pool, **changed) as engine:
        assert cached_of(engine.generate(PROMPTS[:2])) == [0, 0]
        assert engine.ask("reset")
        assert all(cached_of(engine.generate(PROMPTS[:2])))


def test_files_elsewhere_with_another_tokenizer_still_hit(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in models["llama"].iterdir():
        # Weights that came after the process would not be shared, and a copy comes now whatever its times say.
        (copy / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink(missing_ok=True)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "Other"}')
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS[:1])
    with in_process.engine(copy, pool, max_model_len=512) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [288]


def test_random_weights_are_told_apart_by_their_seed(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool, load_format="dummy", seed=1) as engine:
        engine.generate(PROMPTS[:1])
    with in_process.engine(models["llama"], pool, load_format="dummy", seed=2) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [0]
    with in_process.engine(models["llama"], pool, load_format="dummy", seed=1) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [288]


def test_reset_of_the_connector_forgets_everything_and_shares_nothing_from_then_on(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS[:2])
        assert engine.ask("reset", connector=True)
        assert cached_of(engine.generate(PROMPTS[:2])) == [0, 0]
        assert engine.ask("reset")
        assert cached_of(engine.generate(PROMPTS[:1])) == [288]
    with in_process.engine(models["llama"], pool) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [0]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_at_any_step_leaves_a_sound_engine(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], steps: int
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        expected = tokens_of(engine.generate(PROMPTS[:1]))
        assert engine.ask("reset")
        engine.ask("start_and_abort", prompt=PROMPTS[0], steps=steps)
        assert engine.ask("reset")
        again = engine.generate(PROMPTS[:1])
        assert tokens_of(again) == expected
        assert cached_of(again) == [288]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_block_that_was_damaged_in_the_pool_is_recomputed(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], name: str
) -> None:
    with in_process.engine(models[name], pool) as engine:
        expected = tokens_of(engine.generate(PROMPTS[:2], 20))
        assert engine.ask("reset")
        for segment in Path("/dev/shm").glob(f"*{pool['pool_name']}*/*seg*"):
            damaged = bytearray(segment.read_bytes())
            # Every block holds at least one of these bytes.
            damaged[::509] = bytes(byte ^ 0xFF for byte in damaged[::509])
            with segment.open("r+b") as file:
                file.write(damaged)
        for _ in range(2):
            again = engine.generate(PROMPTS[:2], 20)
            assert tokens_of(again) == expected
        assert engine.ask("metrics")["vllm:pega_load_failure"] == 2


def test_prompt_logprobs_are_computed_and_not_loaded(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS[:1])
        assert engine.ask("reset")
        assert cached_of(engine.generate(PROMPTS[:1], prompt_logprobs=1)) == [0]


def test_save_only_engine_feeds_others(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], {**pool, "mode": "save_only"}) as engine:
        engine.generate(PROMPTS[:1])
        assert engine.ask("reset")
        assert cached_of(engine.generate(PROMPTS[:1])) == [0]
    with in_process.engine(models["llama"], pool) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [288]


def test_noop_connector_changes_nothing(in_process: EngineProcess, models: dict[str, Path]) -> None:
    noop = {"kv_connector": "NoopKVConnector", "kv_role": "kv_both", "kv_connector_module_path": "pegaflow.connector"}
    with in_process.engine(models["llama"]) as plain:
        expected = plain.generate(PROMPTS[:2])
    with in_process.engine(models["llama"], kv_transfer_config=noop) as engine:
        assert engine.generate(PROMPTS[:2]) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool_sise": "1gb"}, r"did you mean .pegaflow\.pool_size"),
        ({"shm_dir": "/absent"}, "/absent does not exist"),
    ],
    ids=["name", "value"],
)
def test_wrong_option_stops_the_start_and_says_what_to_do(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(AssertionError, match=f"InvalidArgument: .*{message}"),
        in_process.engine(models["llama"], {**pool, **wrong}),
    ):
        raise RuntimeError("the engine started")


def test_pool_that_cannot_be_opened_leaves_vllm_serving(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    made = _native.Pool.open(pool["pool_name"], pool_bytes=64 << 20)
    made.close()
    for file in Path(made.path).iterdir():
        file.write_bytes(b"not a pool" * 1000)
    with in_process.engine(models["llama"], pool) as engine:
        assert cached_of(engine.generate(PROMPTS[:1])) == [0]
        assert engine.ask("reset")
        assert cached_of(engine.generate(PROMPTS[:1])) == [0]
    assert "PegaFlow is off, vLLM goes on without it" in in_process.log.read_text()


def test_unseeded_hashes_are_warned_about_and_never_hit_falsely(
    start_process: Callable[..., EngineProcess], models: dict[str, Path], pool: dict[str, Any]
) -> None:
    process = start_process(PYTHONHASHSEED="")
    outputs = []
    for _ in range(2):
        with process.engine(models["llama"], pool, prefix_caching_hash_algo="xxhash_cbor") as engine:
            outputs.append(engine.generate(PROMPTS[:1]))
            assert engine.ask("reset")
            assert cached_of(engine.generate(PROMPTS[:1])) == [288]
    assert outputs[0] == outputs[1]
    assert cached_of(outputs[1]) == [0]
    assert process.log.read_text().count("PYTHONHASHSEED is not set") == 2
