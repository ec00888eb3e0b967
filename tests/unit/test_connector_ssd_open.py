"""How an engine gives its pool an SSD tier, and what happens if it cannot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.config import ConnectorConfig
from pegaflow.connector import connector
from pegaflow.errors import InvalidArgument, PoolRefused, ShmFull
from tests.fakes import FakePool

SSD = ConnectorConfig(
    ssd_directories=("/mnt/nvme0", "/mnt/nvme1"),
    ssd_capacity_bytes=1 << 40,
    ssd_admission="all",
    ssd_write_bytes_per_second_max=5,
    ssd_write_depth=3,
    ssd_read_depth=4,
    ssd_backend="threads",
)


class Asked(FakePool):
    """A pool that remembers how it was asked to serve, and refuses if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.asked: list[Any] = []

    def serve_ssd(self, directories: Any, **options: Any) -> None:
        self.asked.append((directories, options))
        if self.error:
            raise self.error


def opened(monkeypatch: pytest.MonkeyPatch, pool: FakePool, config: ConnectorConfig) -> Any:
    monkeypatch.setattr(connector, "_open_pool", lambda *arguments: pool)
    return connector._open_with_ssd(config, "engine")


def test_options_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Asked()
    assert opened(monkeypatch, pool, SSD) is pool
    options = {
        "capacity_bytes": 1 << 40,
        "admission": "all",
        "write_bytes_per_second_max": 5,
        "read_depth": 4,
        "write_depth": 3,
        "backend": "threads",
    }
    assert pool.asked == [(("/mnt/nvme0", "/mnt/nvme1"), options)]


def test_without_a_path_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Asked()
    assert opened(monkeypatch, pool, ConnectorConfig()) is pool
    assert pool.asked == []


@pytest.mark.parametrize("error", [PoolRefused("a tier of another version"), ShmFull("no room for its tables")])
def test_pool_without_a_tier_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    pool = Asked(error)
    assert opened(monkeypatch, pool, SSD) is pool
    assert not pool.closed
    assert str(error) in caplog.text


def test_options_that_cannot_be_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Asked(InvalidArgument("too small"))
    with pytest.raises(InvalidArgument, match="too small"):
        opened(monkeypatch, pool, SSD)
    assert pool.closed


def test_size_that_a_pool_does_not_have_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *more: said.append(text % more))
    link: Any = SimpleNamespace(open=lambda pool: None)
    for pool_bytes in (8 << 20, 64 << 20):
        config = ConnectorConfig(shm_dir=str(tmp_path), pool_bytes=pool_bytes)
        connector._open_whole(config, "engine", link).close()
    (line,) = said
    assert "pool default is there already and keeps its size of 0.01 GB" in line
