"""What is said of sizes of pools."""

from pathlib import Path

from pegaflow.config import parse_config
from pegaflow.opening import open_pool, size_note


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
