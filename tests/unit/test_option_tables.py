"""The tables of options in the documents list every option that there is, with its default."""

import re
from pathlib import Path

import pytest

from pegaflow import config
from pegaflow.config import PREFIX, ConnectorConfig, parse_size

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?P<keys>`pegaflow\.[^|]*) \|(?P<default>[^|]*)\|[^|]+\|$", re.MULTILINE)
NAME = re.compile(r"`pegaflow\.(\w+)`")


def table_of(document: str) -> dict[str, str]:
    """Default of each option as the document says it."""
    rows = [(NAME.findall(row["keys"]), row["default"].strip()) for row in ROW.finditer((ROOT / document).read_text())]
    names = [name for names, _ in rows for name in names]
    assert len(names) == len(set(names)), "an option is listed twice"
    return {name: default for names, default in rows for name in names}


NOT_SET = [("save_rate_max", 0), ("direct_save_min", 0), ("ssd_write_max", 0), ("ssd_cache_capacity", 0)]
WITHOUT_EFFECT = {*config._SERVER_OPTIONS, *config._SSD_OPTIONS_WITHOUT_EFFECT}
FOR_SPECIALISTS = {
    "hugepages_dir", "ssd_write_inflight", "ssd_prefetch_inflight", "ssd_backend", "qps_per_peer", "peer_tls_key",
    "peer_tls_ca", "peer_tls_cert", "tp_shard_endpoints", "direct_save_min",
}  # fmt: skip
"""The README leaves them to the document, with SSD options that have no effect."""


def test_all_options_are_listed_and_no_others() -> None:
    known = {*config._OPTIONS, *WITHOUT_EFFECT}
    assert set(table_of("docs/vllm.md")) == known
    assert set(table_of("README.md")) == known - FOR_SPECIALISTS - set(config._SSD_OPTIONS_WITHOUT_EFFECT)


@pytest.mark.parametrize("document", ["docs/vllm.md", "README.md"])
def test_defaults_are_those_of_the_code(document: str) -> None:
    defaults = ConnectorConfig()
    for name, said in table_of(document).items():
        if name in WITHOUT_EFFECT:
            assert said == ""
            continue
        value = getattr(defaults, config._OPTIONS[name].field)
        plain = said.strip("`")
        if value in (None, ()) or (name, value) in NOT_SET:
            assert plain, f"{PREFIX}{name}: say what happens without it"
            assert not plain.isdigit(), name
        elif isinstance(value, bool):
            assert plain == str(value).lower(), name
        elif isinstance(value, int):
            assert parse_size(plain.replace(" ", "")) == value, name
        elif isinstance(value, float):
            assert float(plain) == value, name
        else:
            assert plain == value, name


def test_environment_variables_are_listed() -> None:
    text = (ROOT / "docs/vllm.md").read_text()
    for variable in (
        "PEGA_LOAD_TIMEOUT_SECONDS", "PEGAFLOW_PEER_TOKEN", "PEGAFLOW_INSTANCE_ID", "PEGAFLOW_SHARE_DUMMY_WEIGHTS",
    ):  # fmt: skip
        assert f"| `{variable}` |" in text
