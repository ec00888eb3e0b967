"""``pegaflow ssd`` on cache files: sound, damaged, in use, foreign, and of other versions."""

import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pegaflow import ssd
from pegaflow.cli.main import cli
from pegaflow.errors import PoolInUse, PoolNotFound, PoolRefused
from tests.unit.ssd_files import FINGERPRINT, ZONES, cache_path, damage, write_cache

LOCK_BYTE = 1 << 40


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["ssd", *map(str, arguments)], catch_exceptions=False)


def answer(*arguments: str | Path, exit_code: int = 0) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output + result.stderr
    return json.loads(result.output)


def sentence(*arguments: str | Path) -> str:
    """What a command that fails says."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    return result.stderr


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Hold the lock that a pool's process holds."""
    with path.open("r+b") as file:
        # struct flock: type, whence, padding, start, length, pid.
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhiqqii", fcntl.F_WRLCK, 0, 0, LOCK_BYTE, 1, 0, 0))
        yield


def test_inspect_counts_what_is_there(tmp_path: Path) -> None:
    path = write_cache(tmp_path, blocks=12)
    (one,) = answer("inspect", tmp_path)["files"]
    assert (one["name"], one["path"], one["state"], one["error"]) == ("default", str(path), "ok", None)
    assert (one["zones"], one["zones_used"], one["records"], one["record_bytes"]) == (ZONES, 3, 12, 12 * 8192)
    assert one["created_unix_s"] == 1_700_000_000
    assert " 3 of 4 " in invoke("inspect", tmp_path).output


def test_verify_reads_what_the_format_says_and_names_namespaces(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_cache(tmp_path, blocks=12)
    report = answer("verify", tmp_path)
    assert (report["ok"], report["records"], report["bytes"], report["problems"]) == (True, 12, 12 * 8192, [])
    held = {"fingerprint": FINGERPRINT.hex(), "group": 0, "records": 12, "bytes": 12 * 8192}
    assert report["namespaces"] == [held]
    assert "sound: 12 blocks" in invoke("verify", tmp_path).output


def test_damaged_block_is_named_and_the_others_are_whole(tmp_path: Path) -> None:
    damage(write_cache(tmp_path, blocks=12), zone=1)
    report = answer("verify", tmp_path, exit_code=1)
    assert (report["ok"], report["records"], report["damaged"], report["unreadable"]) == (False, 11, 1, 0)
    (problem,) = report["problems"]
    assert "zone 1 at block 0 is not as it was written" in problem
    assert problem in invoke("verify", tmp_path).output


def test_blocks_of_a_namespace_that_was_reset_are_no_damage(tmp_path: Path) -> None:
    write_cache(tmp_path, forgotten=3)
    report = answer("verify", tmp_path)
    assert (report["ok"], report["records"], report["forgotten"]) == (True, 0, 10)
    assert answer("inspect", tmp_path)["files"][0]["namespaces_forgotten"] == 1


def test_looking_changes_no_byte(tmp_path: Path) -> None:
    path = write_cache(tmp_path)
    before = path.read_bytes()
    invoke("inspect", tmp_path)
    invoke("verify", tmp_path)
    assert path.read_bytes() == before


def test_cache_in_use_is_listed_but_neither_read_nor_removed(tmp_path: Path) -> None:
    path = write_cache(tmp_path)
    with in_use(path):
        (one,) = answer("inspect", tmp_path)["files"]
        assert (one["state"], one["zones"], one["records"]) == ("in use", ZONES, None)
        assert "in use" in sentence("verify", tmp_path)
        assert "--force" in sentence("rm", tmp_path)
        with pytest.raises(PoolInUse):
            ssd.remove_cache(tmp_path)
        assert path.exists()
        assert invoke("rm", tmp_path, "--force").exit_code == 0
    assert not path.exists()


def test_rm_removes_one_cache_of_several_directories(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
        write_cache(directory)
        write_cache(directory, "other")
    report = answer("rm", *directories, "--name", "other")
    assert [one["directory"] for one in report["files"]] == [str(directory) for directory in directories]
    assert all(one["bytes_freed"] > 0 for one in report["files"])
    for directory in directories:
        assert cache_path(directory).exists()
        assert not cache_path(directory, "other").exists()


def test_missing_cache_is_answered_with_the_names_that_are_there(tmp_path: Path) -> None:
    assert "pegaflow.ssd_cache_path" in sentence("verify", tmp_path)
    write_cache(tmp_path, "llama")
    assert "--name of one that is there (llama)" in sentence("rm", tmp_path)
    with pytest.raises(PoolNotFound):
        ssd.verify_cache([tmp_path])


def test_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    assert "nowhere" in sentence("inspect", tmp_path / "nowhere")


def test_other_layout_version_is_refused_by_name_and_listed(tmp_path: Path) -> None:
    cache_path(tmp_path, version=2).write_bytes(b"from the future")
    assert "layout version 2" in sentence("verify", tmp_path)
    (one,) = answer("inspect", tmp_path)["files"]
    assert (one["state"], one["layout_version"]) == ("refused", 2)
    assert "layout version 2" in invoke("inspect", tmp_path).output


def test_files_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    stranger = cache_path(tmp_path, uid=os.geteuid() + 1)
    stranger.write_bytes(b"not ours")
    assert "belongs to user" in sentence("verify", tmp_path)
    assert "belongs to user" in sentence("rm", tmp_path, "--force")
    assert stranger.exists()
    open_to_all = write_cache(tmp_path, "shared")
    open_to_all.chmod(0o666)
    states = {one["name"]: one["state"] for one in answer("inspect", tmp_path)["files"]}
    assert states == {"default": "refused", "shared": "refused"}
    with pytest.raises(PoolRefused):
        ssd.verify_cache([tmp_path], "shared")


def test_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = write_cache(tmp_path / "elsewhere")
    link = cache_path(tmp_path)
    link.symlink_to(target)
    assert answer("inspect", tmp_path)["files"][0]["state"] == "refused"
    sentence("verify", tmp_path)
    assert invoke("rm", tmp_path).exit_code == 0
    assert target.exists()
    assert not link.is_symlink()


@pytest.mark.parametrize("length", [0, 5000, 70_000])
def test_file_without_a_superblock_is_damaged_and_stays_as_it_is(tmp_path: Path, length: int) -> None:
    path = cache_path(tmp_path)
    path.write_bytes(b"x" * length)
    path.chmod(0o600)
    assert answer("inspect", tmp_path)["files"][0]["state"] == "damaged"
    assert "no valid superblock" in sentence("verify", tmp_path)
    assert path.read_bytes() == b"x" * length


def test_progress_counts_to_the_end_and_may_end_the_work(tmp_path: Path) -> None:
    write_cache(tmp_path)
    seen: list[tuple[int, int]] = []
    ssd.verify_cache([tmp_path], progress=lambda done, total: seen.append((done, total)))
    assert (ZONES, ZONES) in seen
    assert seen[-1] == (10 * 8192, 10 * 8192)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ssd.verify_cache([tmp_path], progress=stop)


@pytest.mark.parametrize("command", ["inspect", "verify", "rm"])
def test_help_has_examples_and_fits_80_columns(command: str) -> None:
    output = CliRunner().invoke(cli, ["ssd", command, "--help"], terminal_width=80).output
    assert f"pegaflow ssd {command}" in output
    assert "Examples:" in output
    assert max(len(line) for line in output.splitlines()) <= 80
