"""The command on real pools: living and killed processes, leftovers, and files that are not ours."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pegaflow import _native
from pegaflow.cli.main import cli
from pegaflow.errors import PoolNotFound
from pegaflow.shm import find_pool, list_pools, open_pool
from tests.patience import WAIT_SECONDS_MAX, await_
from tests.unit.pool_processes import BLOCKS, PART_BYTES, holder, keys, open_namespace, python, store

UID = os.geteuid()


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


@pytest.fixture
def started() -> float:
    """When the test began, in seconds since the epoch."""
    return time.time()


@pytest.fixture
def stored(shm: Path) -> Path:
    """Directory of a pool with blocks that no process uses."""
    child = python(
        "import sys\nfrom tests.unit.pool_processes import open_namespace, store\n"
        "pool, namespace = open_namespace('default', sys.argv[1])\nstore(pool, namespace)\npool.close()",
        str(shm),
    )
    child.communicate(timeout=WAIT_SECONDS_MAX)
    assert child.returncode == 0
    return Path(find_pool("default", shm).path)


def invoke(shm: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--shm-dir", str(shm)], catch_exceptions=False)


def answer(shm: Path, *arguments: str) -> Any:
    result = invoke(shm, *arguments, "--json")
    assert result.exit_code == 0, result.output + result.stderr
    return json.loads(result.output)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below ``directory`` with its contents."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_pool_outlives_its_process_and_is_listed(shm: Path, started: float, stored: Path) -> None:
    (one,) = answer(shm, "pools")["pools"]
    assert (one["name"], one["state"], one["processes_alive"], one["processes_dead"]) == ("default", "ok", 0, 0)
    assert one["path"] == str(stored)
    assert 0 < one["bytes_used"] <= one["pool_bytes"]
    assert 0 <= one["idle_seconds"] <= time.time() - started + 1


def test_inspect_counts_blocks_and_bytes(shm: Path, stored: Path) -> None:
    report = answer(shm, "inspect", "default")
    (namespace,) = report["namespaces"]
    assert namespace["label"] == "tiny model"
    assert namespace["part_bytes"] == [PART_BYTES]
    assert (namespace["blocks_sealed"], namespace["blocks_reserved"], namespace["leases"]) == (BLOCKS, 0, 0)
    assert namespace["bytes_sealed"] == BLOCKS * PART_BYTES
    assert report["geometry"]["layout_version"] == _native.LAYOUT_VERSION
    assert report["bytes_used"] <= report["bytes_max"]
    assert report["processes"] == []


def test_living_process_is_shown_with_what_it_holds(shm: Path) -> None:
    with holder("default", shm) as process:
        report = answer(shm, "inspect", "default")
        (row,) = report["processes"]
        assert (row["pid"], row["alive"], row["label"]) == (process.pid, True, "holder")
        assert (row["leases"], row["reserved"]) == (1, 1)
        assert report["namespaces"][0]["leases"] == 1


def test_pool_in_use_is_neither_removed_nor_collected(shm: Path) -> None:
    with holder("default", shm):
        result = invoke(shm, "rm", "default")
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        time.sleep(2.1)
        (step,) = answer(shm, "gc", "--idle", "1s")["pools"]
        assert step["action"] == "keep"
        # Exact only while nobody changes the pool, and the process may be making it grow.
        await_(lambda: invoke(shm, "verify", "default").exit_code == 0)


def test_forced_removal_leaves_the_survivor_unharmed(shm: Path) -> None:
    with holder("default", shm) as process:
        assert invoke(shm, "rm", "default", "--force").exit_code == 0
        assert list_pools(shm) == []
        assert process.poll() is None
        process.communicate(timeout=WAIT_SECONDS_MAX)
        assert process.returncode == 0


def test_killed_process_is_shown_dead_and_gc_takes_back_what_it_held(shm: Path) -> None:
    with holder("default", shm) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert answer(shm, "pools")["pools"][0]["processes_dead"] == 1
        (row,) = answer(shm, "inspect", "default")["processes"]
        assert (row["alive"], row["leases"], row["reserved"]) == (False, 1, 1)
        (planned,) = answer(shm, "gc", "--dry-run")["pools"]
        assert (planned["action"], planned["done"]) == ("reap", False)
        (step,) = answer(shm, "gc")["pools"]
        assert (step["action"], step["done"], step["processes_reaped"]) == ("reap", True, 1)
        report = answer(shm, "inspect", "default")
        assert report["processes"] == []
        assert report["namespaces"][0]["leases"] == 0
        assert report["namespaces"][0]["blocks_sealed"] == BLOCKS
        assert invoke(shm, "verify", "default").exit_code == 0


def test_gc_removes_an_idle_pool_and_spares_a_recent_one(shm: Path, stored: Path) -> None:
    assert answer(shm, "gc")["pools"][0]["action"] == "keep"
    time.sleep(2.1)
    (planned,) = answer(shm, "gc", "--idle", "1s", "--dry-run")["pools"]
    assert planned["action"] == "remove"
    assert planned["bytes_freed"] > 0
    assert stored.is_dir()
    (step,) = answer(shm, "gc", "--idle", "1s")["pools"]
    assert (step["action"], step["done"], step["bytes_freed"]) == ("remove", True, planned["bytes_freed"])
    assert not stored.exists()


def test_looking_changes_no_byte(shm: Path, stored: Path) -> None:
    before = tree(shm)
    for command in (["pools"], ["inspect", "default"], ["verify", "default"], ["gc", "--dry-run", "--idle", "1s"]):
        assert invoke(shm, *command).exit_code == 0
    assert tree(shm) == before


def test_looking_does_not_make_a_pool_younger(shm: Path, stored: Path) -> None:
    time.sleep(2.1)
    invoke(shm, "inspect", "default")
    invoke(shm, "verify", "default")
    assert answer(shm, "pools")["pools"][0]["idle_seconds"] >= 2


def test_verify_checks_every_block(shm: Path, stored: Path) -> None:
    report = answer(shm, "verify", "default")
    assert (report["ok"], report["problems"]) == (True, [])
    assert report["blocks_checked"] == BLOCKS
    assert report["checksums_checked"] == BLOCKS
    assert answer(shm, "verify", "default", "--no-checksums")["checksums_checked"] == 0


def test_verify_finds_a_flipped_bit(shm: Path, stored: Path) -> None:
    with open_pool("default", shm_dir=shm) as pool:
        namespace = pool.namespace(b"tests of pools".ljust(32, b"\0"), 0, [PART_BYTES])
        (ref,) = namespace.lease(keys(), 3, 4)
        place = pool.locate(ref, 0)
        assert place is not None
        pool.release([ref])
    file, offset, _length = place
    with open(file, "r+b") as segment:
        segment.seek(offset + 100)
        (byte,) = segment.read(1)
        segment.seek(offset + 100)
        segment.write(bytes([byte ^ 0x10]))
    result = invoke(shm, "verify", "default", "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    assert len(report["problems"]) == 1
    assert invoke(shm, "verify", "default", "--no-checksums").exit_code == 0


def test_half_created_pool_is_cleared_away(shm: Path) -> None:
    child = python(
        "import sys\nfrom tests.unit.pool_processes import open_namespace\nopen_namespace('half', sys.argv[1])",
        str(shm),
        PEGAFLOW_CRASH_POINT="create.control_written",
    )
    child.communicate(timeout=WAIT_SECONDS_MAX)
    assert child.returncode == -signal.SIGKILL
    (one,) = answer(shm, "pools")["pools"]
    assert (one["state"], one["processes_alive"]) == ("creating", 0)
    for path in [*Path(one["path"]).iterdir(), Path(one["path"])]:
        os.utime(path)
    assert answer(shm, "gc")["pools"][0]["action"] == "keep"
    long_ago = time.time() - 3600
    for path in [*Path(one["path"]).iterdir(), Path(one["path"])]:
        os.utime(path, (long_ago, long_ago))
    assert answer(shm, "gc", "--dry-run")["pools"][0]["action"] == "remove"
    assert answer(shm, "gc")["pools"][0]["done"] is True
    assert list(shm.iterdir()) == []


def test_half_created_pool_does_not_hinder_the_next_creator(shm: Path) -> None:
    child = python(
        "import sys\nfrom tests.unit.pool_processes import open_namespace\nopen_namespace('half', sys.argv[1])",
        str(shm),
        PEGAFLOW_CRASH_POINT="create.control_written",
    )
    child.communicate(timeout=WAIT_SECONDS_MAX)
    pool, namespace = open_namespace("half", str(shm))
    store(pool, namespace)
    assert namespace.lookup(keys()) == BLOCKS
    pool.close()


def make_foreign(shm: Path) -> dict[str, Path]:
    """Everything that looks like a pool and is none of ours. Only root can make files of another user; the others
    make a pool that is named for one."""
    made = {
        "version": shm / f"pegaflow-v999-{UID}-version",
        "user": shm / f"pegaflow-v{_native.LAYOUT_VERSION}-{UID + 1}-user",
        "link": shm / f"pegaflow-v{_native.LAYOUT_VERSION}-{UID}-link",
        "file": shm / f"pegaflow-v{_native.LAYOUT_VERSION}-{UID}-file",
        "short": shm / f"pegaflow-v{_native.LAYOUT_VERSION}-{UID}-short",
        "noise": shm / f"pegaflow-v{_native.LAYOUT_VERSION}-{UID}-noise",
    }
    for name in ("version", "user", "short", "noise"):
        made[name].mkdir(mode=0o700)
        (made[name] / "control").write_bytes(os.urandom(1 << 20))
        (made[name] / "control").chmod(0o600)
    (made["short"] / "control").write_bytes(b"PEGA")
    elsewhere = shm / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "precious").write_bytes(b"do not touch")
    made["link"].symlink_to(elsewhere)
    made["file"].write_bytes(b"x" * 4096)
    if UID == 0:
        os.chown(made["user"], UID + 1, -1)
    return made


def test_refused_pools_are_listed_with_reasons_beside_sound_ones(shm: Path, stored: Path) -> None:
    made = make_foreign(shm)
    listed = {one["name"]: one for one in answer(shm, "pools")["pools"]}
    assert set(listed) == {*made, "default"}
    assert listed["default"]["state"] == "ok"
    for name in made:
        assert listed[name]["state"] == "refused", name
        assert listed[name]["error"], name
    text = invoke(shm, "pools")
    assert text.exit_code == 0
    assert "refused" in text.output


@pytest.mark.parametrize("name", ["version", "user", "link", "file", "short", "noise"])
@pytest.mark.parametrize("command", ["inspect", "verify", "rm"])
def test_refused_pool_is_one_sentence_for_every_command(shm: Path, command: str, name: str) -> None:
    make_foreign(shm)
    before = tree(shm)
    result = invoke(shm, command, name)
    assert result.exit_code == 1
    assert result.stderr.startswith("pegaflow: ")
    assert result.stderr.count("\n") == 1
    assert tree(shm) == before


def test_gc_never_touches_refused_pools(shm: Path) -> None:
    make_foreign(shm)
    before = tree(shm)
    steps = answer(shm, "gc", "--idle", "1s")["pools"]
    assert {step["action"] for step in steps} == {"keep"}
    assert tree(shm) == before


def test_forced_removal_of_a_link_never_follows_it(shm: Path) -> None:
    make_foreign(shm)
    invoke(shm, "rm", "link", "--force")
    assert (shm / "elsewhere" / "precious").read_bytes() == b"do not touch"


@pytest.mark.parametrize("name", ["version", "short", "noise"])
def test_own_damaged_pool_can_be_removed_by_force(shm: Path, name: str) -> None:
    made = make_foreign(shm)
    assert invoke(shm, "rm", name, "--force").exit_code == 0
    assert not made[name].exists()


def test_files_of_other_programs_are_not_listed(shm: Path) -> None:
    (shm / "sem.other").write_bytes(b"x")
    (shm / "psm_1234").mkdir()
    assert answer(shm, "pools")["pools"] == []


def test_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none", "pools")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_open_pool_does_not_create_unless_asked(shm: Path) -> None:
    with pytest.raises(PoolNotFound), open_pool("default", shm_dir=shm):
        pass
    with open_pool("default", shm_dir=shm, create=True, pool_bytes=4 << 20) as pool:
        assert pool.created
