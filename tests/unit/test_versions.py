"""Versions of vLLM that are not supported are told from those that are, in a clear sentence."""

from types import SimpleNamespace

import pytest
import vllm

from pegaflow import versions
from pegaflow.connector import connector
from pegaflow.connector.geometry import Geometry


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.23.4", "Too old"),
        ("0.34.0", "Newer than"),
        ("1.0", "Newer than"),
        ("dev", "Supported are"),
        ("", "Supported"),
    ],
)
def test_version_outside_gets_a_clear_sentence(version: str, words: str) -> None:
    problem = versions.problem(version)
    assert problem is not None
    assert problem.startswith(words)
    assert "0.24 to 0.33" in problem


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.32.0+cpu", "0.33.1rc1"])
def test_supported_version_gets_none(version: str) -> None:
    assert versions.problem(version) is None


@pytest.mark.parametrize(("version", "warnings"), [("0.40.1", 1), ("0.32.0", 0)])
def test_connector_says_at_the_start_that_a_version_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"))
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        connector._warn(config, Geometry(()))
    assert sum("Newer than what was tested" in record.getMessage() for record in caplog.records) == warnings
