"""What is said of sizes of pools: of those that cannot be, and of those that a pool has which was there before."""

from pathlib import Path

import pytest

from pegaflow.config import parse_config
from pegaflow.errors import InvalidArgument
from pegaflow.opening import open_pool, size_note
from tests.own_tmpfs import run_on_tmpfs

ON_A_FULL_ONE = """
from pegaflow.config import parse_config
from pegaflow.errors import ShmFull
from pegaflow.opening import open_pool
rest = bytes(4096)
with open(SHM_DIR + "/of somebody else", "wb", buffering=0) as file:
    try:
        while True:
            file.write(rest)
    except OSError:
        pass
try:
    open_pool(parse_config({"pegaflow.shm_dir": SHM_DIR}, {}), "sizes")
except ShmFull as error:
    assert SHM_DIR in str(error) and "--shm-size" in str(error), error
else:
    raise SystemExit("a pool was made where there is no room")
"""


def note_of(shm_dir: Path, size: str | None) -> str | None:
    """What is said when a pool of ``size`` is opened, which stays."""
    given = {"pegaflow.shm_dir": str(shm_dir)} | ({"pegaflow.pool_size": size} if size else {})
    config = parse_config(given, {})
    pool = open_pool(config, "sizes")
    try:
        return size_note(pool, config)
    finally:
        pool.close()


def test_pool_that_was_there_keeps_its_size_and_the_user_is_told(tmp_path: Path) -> None:
    assert note_of(tmp_path, "64mib") is None
    # As many whole segments.
    assert note_of(tmp_path, "65mib") is None
    assert note_of(tmp_path, None) is None
    for other in ("1gb", "32mib"):
        note = note_of(tmp_path, other)
        assert note is not None
        assert "pool default is there already and keeps its size of 0.07 GB" in note
        assert f"pegaflow rm {tmp_path}/pegaflow-v" in note


@pytest.mark.parametrize("size", [30, "64", "4kb"])
def test_pool_that_is_too_small_is_refused_by_the_size_that_was_given(tmp_path: Path, size: int | str) -> None:
    config = parse_config({"pegaflow.shm_dir": str(tmp_path), "pegaflow.pool_size": size}, {})
    with pytest.raises(InvalidArgument, match=f"a pool of {config.pool_bytes} bytes .* choose a pool_size of at least"):
        open_pool(config, "sizes")


def test_full_file_system_is_named_where_no_size_was_given(tmp_path: Path) -> None:
    run_on_tmpfs(tmp_path, "1m", f"SHM_DIR = {str(tmp_path)!r}\n{ON_A_FULL_ONE}")
