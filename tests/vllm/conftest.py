"""Models, pools and engine processes for tests with a real vLLM."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import EngineProcess
from tests.vllm.tiny_models import (
    deepseek_config,
    gemma3_config,
    glm4_config,
    llama4_config,
    llama_config,
    make_adapter,
    make_model,
    qwen3_next_config,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts engines."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models and adapters by name."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_model(root / "llama", llama_config()),
        "llama, other weights": make_model(root / "llama-other", llama_config(), seed=1),
        "gemma3": make_model(root / "gemma3", gemma3_config()),
        "adapter": make_adapter(root / "adapter", llama_config()),
        "adapter, other weights": make_adapter(root / "adapter-other", llama_config(), seed=1),
        "deepseek": make_model(root / "deepseek", deepseek_config()),
        "qwen3_next": make_model(root / "qwen3_next", qwen3_next_config()),
        "glm4": make_model(root / "glm4", glm4_config()),
        "llama4": make_model(root / "llama4", llama4_config()),
    }


@pytest.fixture(scope="module")
def in_process(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A process whose engines run in one thread. It starts after ``models`` were made: blocks of weights that are newer
    than their process are not shared."""
    process = EngineProcess(tmp_path_factory.mktemp("log") / "engine.log")
    yield process
    process.stop()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """More engine processes, ended after the test."""
    started: list[EngineProcess] = []

    def start(**options: Any) -> EngineProcess:
        started.append(EngineProcess(tmp_path / f"engine{len(started)}.log", **options))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.stop()


@pytest.fixture
def pool() -> Iterator[dict[str, Any]]:
    """Options of a pool that nobody else has, removed after the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield {"pool_name": name, "pool_size": "64mb"}
    for path in Path("/dev/shm").glob(f"*{name}*"):
        shutil.rmtree(path, ignore_errors=True)
