"""Signatures of every hook in every supported version, as ``tools/vllm_hooks.py`` read them, against our connector."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import vllm

from pegaflow import versions
from pegaflow.connector import PegaKVConnector
from tools import vllm_hooks

HOOKS_FILE = Path(__file__).parent / "vllm_hooks.json"
KNOWN: dict[str, Any] = json.loads(HOOKS_FILE.read_text())
CASES = [(name, words, at[-1]) for name, signatures in KNOWN["hooks"].items() for words, at in signatures.items()]

DEFAULTS_THAT_FIT = {
    "bind_connector_metadata": "keeps the plan of a step",
    "bind_kv_cache_manager": "hands the block pool to bind_gpu_block_pool",
    "clear_connector_metadata": "forgets the plan of a step",
    "finish_forward": "nothing to do: saves start with wait_for_save",
    "get_external_cache_hit_sources": "all of a hit is from host memory",
    "get_finished_count": "every rank reports each load",
    "get_kv_connector_kv_cache_events": "the scheduler's half knows them",
    "get_loaded_kv_cache_group_ids": "all groups",
    "get_mem_pool_context": "vLLM allocates as it likes",
    "has_connector_metadata": "whether there is a plan",
    "requires_piecewise_for_cudagraph": "no",
    "reset_capture_state": "nothing is kept of a capture",
    "role": "which half this is",
    "set_host_xfer_buffer_ops": "we copy from and to the caches themselves",
    "supports_divergent_local_hybrid_hits": "no",
    "take_events": "none",
}
MAY_LACK = {"vllm.v1.metrics.cache_hit_source.CacheHitSource"}
"""What we can do without."""


def accepts(method: Any, words: list[str]) -> None:
    """Call ``method``'s signature as vLLM may: by position, and by name."""
    names = [word.rstrip("=") for word in words if not word.startswith("*") and word != "abstract"]
    by_name = {word.strip("*") for word in words if word.startswith("*") and not word.startswith("**")}
    signature = inspect.signature(method)
    signature.bind(*names, **dict.fromkeys(by_name))
    signature.bind(**dict.fromkeys([*names, *by_name]))
    if any(word.startswith("**") for word in words):
        signature.bind(*names, something_new=None)


@pytest.mark.parametrize(("name", "words", "version"), CASES, ids=[f"{name}-{last}" for name, _, last in CASES])
def test_hook_of_every_version_is_ours_or_its_default_fits(name: str, words: str, version: str) -> None:
    ours = PegaKVConnector.__dict__.get(name)
    if ours is None and name not in DEFAULTS_THAT_FIT:
        # Written in a class that ours inherits from, and nothing is known of it.
        raise AssertionError(f"vLLM {version} has a hook {name}({words}) that nobody has thought of")
    if isinstance(ours, property):
        assert words == ""
    elif ours is not None:
        accepts(getattr(PegaKVConnector, name).__get__(object.__new__(PegaKVConnector)), words.split())


def test_what_must_be_written_is_ours() -> None:
    abstract = {name for name, signatures in KNOWN["hooks"].items() if any("abstract" in words for words in signatures)}
    assert len(abstract) >= 7
    assert abstract <= set(PegaKVConnector.__dict__)


def test_versions_lack_nothing_that_is_imported_for_certain() -> None:
    assert {version: lacks for version, lacks in KNOWN["lacks"].items() if set(lacks) - MAY_LACK} == {}


def test_every_supported_version_is_known() -> None:
    known = {versions.parse(version) for version in KNOWN["versions"]}
    supported = {(0, minor) for minor in range(versions.FIRST[1], versions.LAST[1] + 1)}
    assert known == supported


def test_file_says_what_the_installed_version_has() -> None:
    installed = Path(vllm.__file__).parent.parent
    version = ".".join(map(str, vllm_hooks.version_of(installed)))
    now = vllm_hooks.describe([installed])
    assert now["lacks"][version] == KNOWN["lacks"][version], "make vllm-hooks"
    then = {
        name: {words: [version]}
        for name, signatures in KNOWN["hooks"].items()
        for words, at in signatures.items()
        if version in at
    }
    assert now["hooks"] == then
