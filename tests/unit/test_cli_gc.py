"""``pegaflow gc``: what it removes, what it never touches, and that a dry run changes nothing."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pegaflow.cli.main import cli
from pegaflow.errors import PegaFlowError, PoolInUse, PoolNotFound
from pegaflow.shm import pool as pool_module
from tests.unit.fake_native import FakeNative, listing, refused

DAY = 86400


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative()
    monkeypatch.setattr(pool_module, "_native", fake)
    return fake


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["gc", *arguments], catch_exceptions=False)


def actions(*arguments: str) -> dict[str, str]:
    answer = json.loads(invoke("--json", *arguments).output)
    return {one["name"]: one["action"] for one in answer["pools"]}


def creating(name: str, **fields: Any) -> dict[str, Any]:
    return listing(name, state="creating", pool_bytes=None, bytes_used=None, **fields)


def test_idle_pool_is_removed_and_a_recent_one_kept(native: FakeNative) -> None:
    native.pools = [listing("old", idle_seconds=8 * DAY), listing("recent", idle_seconds=6 * DAY)]
    assert actions() == {"old": "remove", "recent": "keep"}
    assert native.removed == [("/dev/shm/old", False)]


def test_idle_span_is_the_callers(native: FakeNative) -> None:
    native.pools = [listing("old", idle_seconds=7200)]
    assert actions("--idle", "3h") == {"old": "keep"}
    assert actions("--idle", "2h") == {"old": "remove"}


def test_idle_0_removes_no_pool(native: FakeNative) -> None:
    native.pools = [
        listing("ancient", idle_seconds=4000 * DAY),
        listing("dead", idle_seconds=9 * DAY, processes_dead=1),
    ]
    assert actions("--idle", "0") == {"ancient": "keep", "dead": "reap"}
    assert native.removed == []
    assert native.reaped == ["/dev/shm/dead"]


def test_pool_with_a_living_process_is_only_reaped(native: FakeNative) -> None:
    native.pools = [listing("busy", idle_seconds=99 * DAY, processes_alive=1, processes_dead=2)]
    result = invoke()
    assert native.removed == []
    assert native.reaped == ["/dev/shm/busy"]
    assert "reaped 2 dead processes" in result.output


def test_refused_pool_is_kept_with_its_reason(native: FakeNative) -> None:
    native.pools = [refused("foreign", "It belongs to user 1001.")]
    result = invoke()
    assert result.exit_code == 0
    assert "user 1001" in result.output
    assert native.removed == []


def test_half_created_pool_is_removed_once_its_creator_is_gone(native: FakeNative) -> None:
    native.pools = [
        creating("abandoned", idle_seconds=61),
        creating("fresh", idle_seconds=3),
        creating("slow", idle_seconds=600, processes_alive=1),
    ]
    assert actions("--idle", "0") == {"abandoned": "remove", "fresh": "keep", "slow": "keep"}
    assert native.removed == [("/dev/shm/abandoned", False)]


def test_dry_run_changes_nothing_and_says_what_it_would_do(native: FakeNative) -> None:
    native.pools = [
        listing("old", idle_seconds=8 * DAY),
        listing("dead", processes_dead=1),
        creating("abandoned", idle_seconds=100),
    ]
    before = list(native.pools)
    planned = actions("--dry-run")
    text = invoke("--dry-run").output
    assert native.pools == before
    assert native.removed == []
    assert native.reaped == []
    assert planned == {"old": "remove", "dead": "reap", "abandoned": "remove"}
    assert "Would remove 2 pools" in text
    assert "Nothing was changed" in text
    assert actions() == planned


def test_bytes_are_counted_from_the_files(native: FakeNative, tmp_path: Any) -> None:
    directory = tmp_path / "old"
    directory.mkdir()
    (directory / "segment-0").write_bytes(b"x" * 131072)
    native.pools = [listing("old", path=str(directory), idle_seconds=8 * DAY)]
    (step,) = json.loads(invoke("--json", "--shm-dir", str(tmp_path)).output)["pools"]
    assert step["bytes_freed"] == 131072
    assert step["done"] is True


@pytest.mark.parametrize("command", ["gc", "rm"])
def test_bytes_of_blocks_elsewhere_are_counted_too(native: FakeNative, tmp_path: Any, command: str) -> None:
    pool, blocks = tmp_path / "old", tmp_path / "hugetlbfs"
    for directory, size in ((pool, 65536), (blocks, 131072)):
        directory.mkdir()
        (directory / "file").write_bytes(b"x" * size)
    native.pools = [listing("old", path=str(pool), segments_path=str(blocks), idle_seconds=8 * DAY)]
    words = ["rm", str(pool)] if command == "rm" else ["gc"]
    result = CliRunner().invoke(cli, [*words, "--json", "--shm-dir", str(tmp_path)], catch_exceptions=False)
    answer = json.loads(result.output)
    assert answer.get("pools", [answer])[0]["bytes_freed"] == 65536 + 131072


@pytest.mark.parametrize("error", [PoolInUse("A process came."), PoolNotFound("Another gc was faster.")])
def test_losing_a_race_is_no_failure(native: FakeNative, error: Exception) -> None:
    native.pools = [listing("old", idle_seconds=8 * DAY)]
    native.refuse_removal_of["/dev/shm/old"] = error
    result = invoke("--json")
    (step,) = json.loads(result.output)["pools"]
    assert result.exit_code == 0
    assert (step["action"], step["reason"], step["error"], step["bytes_freed"]) == ("keep", str(error), None, 0)


def test_one_failure_does_not_protect_the_others(native: FakeNative) -> None:
    native.pools = [listing("first", idle_seconds=8 * DAY), listing("second", idle_seconds=8 * DAY)]
    native.refuse_removal_of["/dev/shm/first"] = PegaFlowError("The file system is read-only.")
    result = invoke()
    assert result.exit_code == 1
    assert "read-only" in result.output
    assert native.removed == [("/dev/shm/second", False)]


def test_nothing_to_do_is_said(native: FakeNative) -> None:
    result = invoke()
    assert result.exit_code == 0
    assert "nothing to do" in result.output
