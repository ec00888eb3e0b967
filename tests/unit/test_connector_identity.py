"""What two engines must have in common before they share blocks."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegaflow import weights
from pegaflow.connector.identity import (
    SHARE_DUMMY_VARIABLE,
    ModelIdentity,
    config_problem,
    fixed_factors,
    weights_identity,
    weights_of,
)
from pegaflow.keys import fingerprint
from tests.unit.mini_engine import SINGLE

VERSION = "0.32.0"


def config(**changes: Any) -> Any:
    """A configuration of vLLM as far as it is read; ``changes`` by section."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "model",
            "revision": None,
            "seed": 0,
            "served_model_name": None,
            "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
            "dtype": torch.bfloat16,
            "quantization": None,
            "max_model_len": 1024,
            "multimodal_config": None,
        },
        "cache_config": {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "load_config": {"load_format": "dummy", "download_dir": None},
    }
    return SimpleNamespace(
        speculative_config=None,
        **{name: SimpleNamespace(**(values | changes.get(name, {}))) for name, values in sections.items()},
    )


def media(**options: Any) -> Any:
    known = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "video_pruning_rate": None}
    return config(model_config={"multimodal_config": SimpleNamespace(**(known | options))})


def print_of(made: Any) -> bytes:
    return fingerprint(fixed_factors(made, SINGLE, VERSION))


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_fp8_scale_path": "/scales.json"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_preparation_of_media_changes_the_fingerprint(options: dict[str, Any]) -> None:
    assert len({print_of(config()), print_of(media()), print_of(media(**options))}) == 3


@dataclass
class QuantKey:
    dtype: torch.dtype


@dataclass
class Quantization:
    """As vLLM keeps what a user says of how weights are quantized when they are loaded."""

    linear: QuantKey | None = None
    ignore: tuple[str, ...] = ()


def test_what_is_quantized_and_how_changes_the_fingerprint() -> None:
    options: list[Any] = [
        None,
        {"linear": "fp8"},
        {"linear": "fp8", "ignore": ["lm_head"]},
        Quantization(),
        Quantization(QuantKey(torch.float8_e4m3fn)),
        Quantization(QuantKey(torch.int8)),
        Quantization(QuantKey(torch.int8), ("lm_head",)),
    ]
    made = [config(model_config={"quantization": "online", "quantization_config": one}) for one in options]
    assert len(set(map(print_of, made))) == len(options)


def test_types_of_activations_that_a_checkpoint_names_change_the_fingerprint() -> None:
    def of(dtype: str) -> bytes:
        layers = {"weight": {"dtype": "fp4"}, "input_tensors": {"dtype": dtype}}
        hf_config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "quark", "layers": layers}}
        return print_of(config(model_config={"hf_config": SimpleNamespace(to_dict=lambda: hf_config)}))

    assert of("fp4") != of("fp8_e4m3")


def test_a_class_that_stands_for_a_model_changes_the_fingerprint() -> None:
    overrides = {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}}
    assert print_of(config()) == print_of(config(model_config={"model_class_overrides": {}}))
    assert print_of(config()) != print_of(config(model_config=overrides))


@pytest.mark.parametrize("name", ["cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"])
def test_order_of_tokens_over_context_ranks_changes_the_fingerprint(name: str) -> None:
    assert print_of(config()) == print_of(config(parallel_config={name: 1}))
    assert print_of(config()) != print_of(config(parallel_config={name: 16}))


def test_made_up_weights_are_shared_only_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> list[Any]:
        return [weights_identity("model", None, None, "dummy", 1) for _ in range(2)]

    monkeypatch.delenv(SHARE_DUMMY_VARIABLE, raising=False)
    first, second = twice()
    assert first != second
    monkeypatch.setenv(SHARE_DUMMY_VARIABLE, "1")
    first, second = twice()
    assert first == second != weights_identity("model", None, None, "dummy", 2)


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "a_plugin"])
def test_weights_that_do_not_come_from_files_of_the_model_are_not_shared(
    load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x": torch.ones(8)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "process_started", lambda: time.time() + 60)

    def twice(name: str) -> list[Any]:
        return [weights_identity(str(tmp_path), None, None, name, 0) for _ in range(2)]

    first, second = twice("safetensors")
    assert first == second
    first, second = twice(load_format)
    assert first != second


def test_an_engine_that_may_be_sent_other_weights_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x": torch.ones(8)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "process_started", lambda: time.time() + 60)
    made = config(model_config={"model": str(tmp_path)}, load_config={"load_format": "auto"})
    assert weights_of(made) == weights_of(made)
    made.weight_transfer_config = SimpleNamespace(backend="nccl")
    assert weights_of(made) != weights_of(made)


def test_weights_that_changed_since_the_start_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> list[Any]:
        return [weights_identity(str(tmp_path), None, None, "auto", 0) for _ in range(2)]

    save_file({"x": torch.ones(8)}, tmp_path / "model.safetensors")
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        first, second = twice()
    assert first != second
    assert "newer than this process" in caplog.text
    os.utime(tmp_path / "model.safetensors", (0, 0))
    first, second = twice()
    assert first != second, "a copy that keeps times is new all the same"
    monkeypatch.setattr(weights, "process_started", lambda: time.time() + 60)
    first, second = twice()
    assert first == second
    (tmp_path / "preprocessor_config.json").write_text('{"size": 448}')
    assert twice()[0] != first


def test_weights_that_cannot_be_read_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError("shrunk")

    monkeypatch.setattr("pegaflow.connector.identity.weights_identity", fail)
    prints = []
    for _ in range(2):
        identity = ModelIdentity(config(), SINGLE, VERSION, lambda: b"root")
        assert identity.factors() is None
        identity.sample()
        factors = identity.factors()
        assert factors is not None
        prints.append(fingerprint(factors))
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("latent", "chunked", "prefix_caching", "refused"),
    [(True, False, False, True), (True, True, False, False), (True, False, True, False), (False, False, False, False)],
)
def test_attention_that_does_not_look_at_what_is_before_a_prompt_is_left_alone(
    latent: bool, chunked: bool, prefix_caching: bool, refused: bool
) -> None:
    made = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=latent),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert (config_problem(made) is not None) is refused
