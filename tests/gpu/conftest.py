"""Pools and copiers for the tests on a GPU. Without a GPU nothing here is collected."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.cli.cuda_probe import probe_cuda

_driver = probe_cuda()
collect_ignore_glob = ["test_*.py"] if isinstance(_driver, str) or not _driver.devices else []

POOL_BYTES = 2 << 30
SEGMENT_BYTES = 64 << 20


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A directory in shared memory that goes away with its pools."""
    place = Path(tempfile.mkdtemp(prefix="pegaflow-gpu-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def pool(shm_dir: Path) -> Iterator[_native.Pool]:
    """A pool of many small segments, so that copies meet their borders."""
    opened = _native.Pool.open("gpu", shm_dir=str(shm_dir), pool_bytes=POOL_BYTES, segment_bytes=SEGMENT_BYTES)
    yield opened
    opened.close()


@pytest.fixture
def copier_of(pool: _native.Pool) -> Iterator[Callable[..., _native.CudaCopier]]:
    """Makes copiers of the pool; they are closed afterwards."""
    made: list[_native.CudaCopier] = []

    def make(**options: object) -> _native.CudaCopier:
        made.append(_native.CudaCopier(pool, 0, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for copier in made:
        copier.close()
