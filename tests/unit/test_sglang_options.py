"""Each option of vLLM's connector is one of SGLang's backend too, or has a reason why it is not."""

import re
from pathlib import Path
from typing import Any

import pytest

from pegaflow import config
from pegaflow.config import PREFIX, ConnectorConfig
from pegaflow.errors import InvalidArgument
from pegaflow.sglang.options import MEANINGLESS, NAMES, parse_options

ROOT = Path(__file__).resolve().parents[2]

VALUES: dict[str, Any] = {
    "pool_name": "other",
    "pool_size": "1gb",
    "shm_dir": "/mnt/shm",
    "segment_size": "64mib",
    "use_hugepages": "true",
    "hugepages_dir": "/mnt/huge",
    "weight": "3",
    "eviction_policy": "lru",
    "ssd_cache_path": "/mnt/ssd",
    "ssd_cache_capacity": "1gb",
    "ssd_admission": "all",
    "ssd_write_max": "100mb",
    "ssd_write_inflight": "3",
    "ssd_prefetch_inflight": "3",
    "ssd_backend": "threads",
    "prefetch_wait_ms_max": "7",
}
"""A value of each option of the backend, other than its default."""


def test_every_option_of_the_connector_is_accepted_or_has_a_reason() -> None:
    accepted, refused = set(NAMES), set(MEANINGLESS)
    assert accepted | refused == set(config._OPTIONS)
    assert not accepted & refused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("from_environment", [False, True], ids=["extra config", "environment"])
def test_accepted_option_changes_its_field(name: str, from_environment: bool) -> None:
    with_it = dict(VALUES) if name.startswith("ssd_") else {name: VALUES[name]}
    if from_environment:
        parsed = parse_options(None, {f"PEGAFLOW_{one.upper()}": value for one, value in with_it.items()})
    else:
        parsed = parse_options({PREFIX + one: value for one, value in with_it.items()}, {})
    field = config._OPTIONS[name].field
    assert getattr(parsed, field) != getattr(ConnectorConfig(), field)


@pytest.mark.parametrize(("name", "reason"), MEANINGLESS.items())
def test_option_without_a_meaning_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"{PREFIX}{name} has no meaning with SGLang ({reason})")):
        parse_options({PREFIX + name: "7"}, {})


@pytest.mark.parametrize("name", config._WITHOUT_EFFECT)
def test_option_that_has_no_effect_with_vllm_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="has no meaning with SGLang"):
        parse_options({PREFIX + name: "7"}, {})


def test_document_lists_the_options_that_are_accepted() -> None:
    text = (ROOT / "docs/sglang.md").read_text()
    (paragraph,) = re.findall(r"`pegaflow\.pool_name`, .*?\.\s", text, re.DOTALL)
    assert set(re.findall(r"`(?:pegaflow\.)?([a-z_]+)`", paragraph)) == set(NAMES)
