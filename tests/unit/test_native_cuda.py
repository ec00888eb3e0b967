"""The CUDA copier without a GPU: refusals, and the way from Python to the driver's interface over a fake driver."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.errors import DeviceError, InvalidArgument
from tests.engine_races import RACES
from tests.unit.native_pools import open_pool

SECONDS_MAX = 240.0

FAKE_LIBCUDA = Path(__file__).parent.parent / "fake_libcuda.c"
NO_SUCH_DEVICE = 10_000


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[_native.Pool]:
    opened = open_pool(tmp_path)
    yield opened
    opened.close()


def test_a_device_that_is_not_there_is_refused(pool: _native.Pool) -> None:
    with pytest.raises(DeviceError, match=r"CUDA cannot be used for transfers: (cuDeviceGet|dlopen|cuInit)"):
        _native.CudaCopier(pool, NO_SUCH_DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "fast"},
        {"ctas": 0},
        {"ring_buffers": 1},
        {"ring_buffer_bytes": 5000},
        {"copy_streams": 0},
        {"register_chunk_bytes": 1 << 39},
    ],
)
def test_impossible_options_are_refused_before_the_driver_is_asked(pool: _native.Pool, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        _native.CudaCopier(pool, NO_SUCH_DEVICE, **options)


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's interface without a device."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", library, FAKE_LIBCUDA], check=True)
    return library


@pytest.mark.parametrize("backend", ["auto", "staged", "direct", "kernel"])
def test_blocks_come_back_over_the_interface_of_the_driver(tmp_path: Path, fake_library: Path, backend: str) -> None:
    program = [sys.executable, "-m", "tests.unit.cuda_round_trip", fake_library, tmp_path, backend]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.parametrize("backend", ["staged", "direct", "kernel"])
@pytest.mark.parametrize("what", [*(race.__name__ for race in RACES), "random", "one", "all"])
def test_engine_copies_over_the_interface_of_the_driver(
    tmp_path: Path, fake_library: Path, what: str, backend: str
) -> None:
    failure = {"one": "2 4 5", "all": "700 4 1000000000"}.get(what)
    environment = {**os.environ, **({"FAKE_CUDA_FAILURE": failure} if failure else {})}
    program = [sys.executable, "-m", "tests.unit.cuda_engine", fake_library, tmp_path, backend, what]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
