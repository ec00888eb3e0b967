"""Without SGLang on the path nothing is collected here: ``make test-sglang`` puts it there."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.stand_ins import stand_in

collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("sglang") is not None:
    collect_ignore_glob = []
    stand_in()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by name, of one shape."""
    from tests.vllm.tiny_models import llama_config, make_model

    root = tmp_path_factory.mktemp("models")
    return {
        "one": make_model(root / "one", llama_config()),
        "other": make_model(root / "other", llama_config(), seed=1),
    }


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool gets the time that it needs to grow, whatever else keeps the machine busy."""
    from pegaflow.sglang import page_store

    monkeypatch.setattr(page_store, "ROOM_WAIT_MS_MAX", 240_000)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory in shared memory for the pools of one test."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pegaflow-sglang-") as path:
        yield Path(path)
