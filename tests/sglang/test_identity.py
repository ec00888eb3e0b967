"""Which engines get the same pages: whatever their bytes depend on is in the fingerprint."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.server_args import ServerArgs

from pegaflow.keys import is_private
from pegaflow.sglang.identity import SERVER_FACTORS, model_factors
from pegaflow.sglang.weight_identity import FORMATS_OF_FILES, OTHER_SOURCES, adapters
from tests.sglang.world import in_child
from tests.vllm.tiny_models import llama_config, make_adapter

OF_OLDER_VERSIONS = {"torchao_config"}
FILES = ("lora_paths", "uno_lora_path", "quantization_param_path", "speculative_draft_model_path", "download_dir")
FILES += ("speculative_draft_load_format", "speculative_draft_model_revision", "weight_cache_mode", "weight_version")


@dataclass(frozen=True)
class Engine:
    """Options of an engine, of which a child makes the factors: what was written before it was forked is old to it."""

    model: Path

    def factors(self, named_version: str = "default", **options: Any) -> dict[str, Any]:
        """Factors of all pools of an engine with these options."""
        given = SimpleNamespace(**{"model_path": str(self.model), "weight_version": "default", **options})
        return in_child(model_factors, given, "1", named_version)


@pytest.fixture
def engine(models: dict[str, Path]) -> Engine:
    """An engine of the first model."""
    return Engine(models["one"])


def test_options_are_those_of_sglang() -> None:
    asked = {*SERVER_FACTORS, *OTHER_SOURCES, *FILES}
    assert {name for name in asked if not hasattr(ServerArgs, name)} == OF_OLDER_VERSIONS


@pytest.mark.parametrize("name", SERVER_FACTORS)
def test_each_option_that_changes_bytes_changes_the_factors(name: str) -> None:
    given = [SimpleNamespace(**{name: value}) for value in ("one", "other")]
    first, second = (model_factors(one, "1", "1")["options"] for one in given)
    assert [key for key in first if first[key] != second[key]] == [name]


@pytest.mark.parametrize(
    "given",
    [
        ["one=/a", "/b"],
        [{"lora_name": "one", "lora_path": "/a", "pinned": True}, {"lora_name": "/b", "lora_path": "/b"}],
        {"one": "/a", "/b": "/b"},
        [LoRARef(lora_name="one", lora_path="/a"), LoRARef(lora_name="/b", lora_path="/b")],
    ],
    ids=["text", "objects", "one object", "references"],
)
def test_adapters_are_found_in_every_form_that_sglang_takes(given: Any) -> None:
    assert adapters(SimpleNamespace(lora_paths=given)) == [("/b", "/b"), ("one", "/a")]
    assert ("", "/c") in adapters(SimpleNamespace(lora_paths=given, uno_lora_path="/c"))


@pytest.mark.parametrize("option", ["lora_paths", "uno_lora_path"])
@pytest.mark.parametrize("change", ["weights", "config", "added tokens", "name"])
def test_adapter_that_was_trained_anew_in_its_place_is_another(
    engine: Engine, tmp_path: Path, option: str, change: str
) -> None:
    made = make_adapter(tmp_path / "adapter", llama_config())

    def factors(name: str = "one") -> dict[str, Any]:
        return engine.factors(**{option: [f"{name}={made}"] if option == "lora_paths" else str(made)})

    before = factors()
    assert not is_private(before)
    assert before != engine.factors()
    assert factors() == before
    if change == "weights":
        make_adapter(made, llama_config(), seed=1)
    elif change == "config":
        config = json.loads((made / "adapter_config.json").read_text())
        (made / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 77}))
    elif change == "added tokens":
        (made / "added_tokens.json").write_text('{"<one>": 256}')
    elif option == "uno_lora_path":
        made = made.rename(tmp_path / "moved")
    after = factors("two" if change == "name" else "one")
    assert not is_private(after)
    assert after != before


def test_adapters_that_changed_places_are_others(engine: Engine, tmp_path: Path) -> None:
    first, second = (make_adapter(tmp_path / str(seed), llama_config(), seed=seed) for seed in range(2))
    before = engine.factors(lora_paths=[f"a={first}", f"b={second}"])
    assert engine.factors(lora_paths=[f"b={second}", f"a={first}"]) == before
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert engine.factors(lora_paths=[f"b={second}", f"a={first}"]) != before


def test_adapter_newer_than_the_process_or_nowhere_keeps_pages_private(engine: Engine, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "adapter", llama_config())

    def touched() -> dict[str, Any]:
        time.sleep(0.2)
        (made / "adapter_config.json").write_text("{}")
        given = SimpleNamespace(model_path=str(engine.model), weight_version="default", lora_paths=[f"one={made}"])
        return model_factors(given, "1", "default")

    assert is_private(in_child(touched))
    assert is_private(engine.factors(lora_paths=[f"one={tmp_path / 'nowhere'}"]))


def test_content_of_scales_counts_and_not_their_path(engine: Engine, tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one.json", "same.json", "other.json"))
    for file, scale in ((one, 1), (same, 1), (other, 2)):
        file.write_text(json.dumps({"scale": scale}))
    first, again, second = (engine.factors(quantization_param_path=str(file)) for file in (one, same, other))
    assert first == again
    assert not is_private(first)
    assert second not in (first, engine.factors())
    one.write_text(json.dumps({"scale": 3}))
    assert engine.factors(quantization_param_path=str(one)) not in (first, second)
    assert is_private(engine.factors(quantization_param_path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "options",
    [
        *({"load_format": name} for name in ("dummy", "remote", "remote_instance", "rdma", "private", "unheard_of")),
        {"speculative_draft_load_format": "dummy"},
        {"speculative_draft_load_format": "remote_instance"},
        *({name: "/somewhere"} for name in OTHER_SOURCES),
        {"weight_cache_mode": "daemon"},
        {"weight_version": "2"},
        {"model_path": None},
    ],
    ids=lambda options: "-".join(f"{name} {value}" for name, value in options.items()),
)
def test_weights_that_files_do_not_tell_are_private(engine: Engine, options: dict[str, Any]) -> None:
    draft = {"speculative_draft_model_path": str(engine.model)} if "speculative" in str(options) else {}
    assert is_private(engine.factors(**draft, **options))


@pytest.mark.parametrize("name", FORMATS_OF_FILES)
def test_weights_from_files_are_shared_and_a_draft_may_have_a_format_of_its_own(engine: Engine, name: str) -> None:
    draft = {"speculative_draft_model_path": str(engine.model), "speculative_draft_load_format": name}
    assert not is_private(engine.factors(load_format=name, weight_cache_mode="off"))
    assert not is_private(engine.factors(**draft))


def test_weights_that_were_named_anew_in_place_are_private() -> None:
    given = SimpleNamespace(model_path=None, weight_version="default")
    reasons = [model_factors(given, "1", version)["weights"] for version in ("default", "2", None)]
    assert [len(one) for one in reasons] == [1, 2, 2]
