"""``pegaflow pools``, ``inspect``, ``verify`` and ``rm`` on pools in every state."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pegaflow.cli.main import cli
from pegaflow.shm import pool as pool_module
from tests.unit.fake_native import FakeNative, listing, namespace, process, refused, tier


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative(
        listing("busy", processes_alive=2, processes_dead=1),
        refused("foreign", "The pool belongs to user 1001; it is not used."),
        listing("default"),
        listing("half", state="creating", processes_alive=0, idle_seconds=400, pool_bytes=None, bytes_used=None),
    )
    monkeypatch.setattr(pool_module, "_native", fake)
    return fake


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def test_pools_lists_every_state_and_the_reason_of_a_refusal(native: FakeNative) -> None:
    result = invoke("pools")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert "2 GiB" in rows["busy"]
    assert "25 %" in rows["busy"]
    assert "refused" in rows["foreign"]
    assert "creating" in rows["half"]
    assert "belongs to user 1001" in result.output


def test_pools_as_json_is_the_documented_object(native: FakeNative) -> None:
    answer = json.loads(invoke("pools", "--json").output)
    assert answer == {"shm_dir": "/dev/shm", "pools": native.pools}


def test_no_pools_is_no_error(native: FakeNative) -> None:
    result = invoke("pools", "--shm-dir", "/mnt/huge")
    assert result.exit_code == 0
    assert "No pools in /mnt/huge" in result.output


def test_tables_fit_80_columns(native: FakeNative) -> None:
    native.pools.append(listing("a-pool-whose-name-is-as-long-as-a-name-may-sensibly-be", processes_alive=12))
    native.report["namespaces"] = [namespace(label="meta-llama/Llama-3.3-70B-Instruct-quantized.w8a8", leases=12345)]
    native.report["processes"] = [process(label="EngineCore_DP0 of a long label", pid=4194304, leader_row=1)]
    for command in (["pools"], ["inspect", "default"], ["gc", "--dry-run"]):
        output = invoke(*command).output
        assert max(len(line) for line in output.splitlines()) <= 80, command


def test_long_names_are_wrapped_and_not_cut(native: FakeNative) -> None:
    name = "n" * 70
    native.pools.append(listing(name))
    assert invoke("pools").output.count("n") >= 70
    assert "\u2026" not in invoke("pools").output


def test_inspect_shows_namespaces_and_processes(native: FakeNative) -> None:
    native.report["processes"].append(process(row=4, pid=4712, alive=False, leader_row=3))
    result = invoke("inspect", "default")
    assert result.exit_code == 0
    for part in ("gemma-3-270m", "abababababab", "1,234", "4711", "4712", "alive", "dead", "row 3", "2 GiB used of"):
        assert part in result.output


def test_inspect_as_json_is_the_report_of_the_engine(native: FakeNative) -> None:
    answer = json.loads(invoke("inspect", "default", "--json").output)
    assert answer == native.report


def test_inspect_of_an_empty_pool_has_no_empty_tables(native: FakeNative) -> None:
    native.report |= {"namespaces": [], "processes": []}
    output = invoke("inspect", "default").output
    assert "Namespaces" not in output
    assert "Processes" not in output


def test_inspect_shows_the_ssd_tier_if_there_is_one(native: FakeNative) -> None:
    assert "On SSD" not in invoke("inspect", "default").output
    native.report["ssd"] = tier(read_bytes=3 << 30, read_bytes_per_second=1 << 30, read_damaged=2)
    output = invoke("inspect", "default").output
    for part in ("On SSD", "serving, led by row 3", "1,234", "56 blocks", "3 GiB at 1 GiB/s", "2 damaged"):
        assert part in output
    native.report["ssd"] = tier(state="recovering", zones_done=7)
    assert "7 of 64 zones" in invoke("inspect", "default").output
    native.report["ssd"] = tier(state="none", leader_row=None)
    assert "led by" not in invoke("inspect", "default").output


@pytest.mark.parametrize("name", ["foreign", "half"])
def test_inspect_of_a_pool_that_cannot_be_used_fails_with_its_reason(native: FakeNative, name: str) -> None:
    result = invoke("inspect", name)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_labels_cannot_move_the_cursor_or_add_markup(native: FakeNative) -> None:
    native.report["namespaces"] = [namespace(label="\x1b[2J[red]x")]
    output = invoke("inspect", "default").output
    assert "\x1b" not in output
    assert "[red]x" in output


def test_pool_may_be_given_as_a_path(native: FakeNative) -> None:
    native.pools.append(listing("other", path="/mnt/huge/other"))
    assert invoke("inspect", "/mnt/huge/other", "--json").exit_code == 0
    assert invoke("inspect", "/mnt/huge/../huge/other/", "--json").exit_code == 0
    missing = invoke("inspect", "/mnt/huge/none")
    assert missing.exit_code == 1
    assert "no pool at /mnt/huge/none" in missing.stderr


def test_same_name_in_two_layouts_means_the_usable_one(native: FakeNative) -> None:
    native.pools.insert(0, refused("default", "Layout version 9 is not ours.") | {"path": "/dev/shm/v9-default"})
    assert json.loads(invoke("inspect", "default", "--json").output)["path"] == "/dev/shm/default"


def test_same_name_twice_asks_for_a_path(native: FakeNative) -> None:
    native.pools.append(listing("default", path="/dev/shm/default-2"))
    result = invoke("rm", "default")
    assert result.exit_code == 1
    assert "/dev/shm/default-2" in result.stderr
    assert native.removed == []


def test_verify_of_a_sound_pool_exits_with_0(native: FakeNative) -> None:
    result = invoke("verify", "default")
    assert result.exit_code == 0
    assert "10 blocks and 9 checksums checked" in result.output
    assert native.verified == [("/dev/shm/default", True)]


def test_verify_lists_every_problem_and_exits_with_1(native: FakeNative) -> None:
    native.verdict |= {"ok": False, "problems": ["slot 3: checksum differs", "slot 9: lost lease"]}
    result = invoke("verify", "default")
    assert result.exit_code == 1
    assert "2 problems" in result.output
    assert "slot 3: checksum differs" in result.output
    assert "slot 9: lost lease" in result.output


def test_verify_of_a_busy_pool_warns_that_it_may_have_changed(native: FakeNative) -> None:
    native.verdict |= {"ok": False, "problems": ["slot 3: checksum differs"]}
    assert "2 processes may have changed it" in invoke("verify", "busy").output


def test_verify_as_json_has_the_verdict_and_the_exit_code(native: FakeNative) -> None:
    native.verdict |= {"ok": False, "problems": ["slot 3: checksum differs"]}
    result = invoke("verify", "default", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == native.verdict | {"name": "default", "path": "/dev/shm/default"}


def test_verify_without_checksums_does_not_ask_for_them(native: FakeNative) -> None:
    invoke("verify", "default", "--no-checksums")
    assert native.verified == [("/dev/shm/default", False)]


def test_rm_removes_an_unused_pool(native: FakeNative) -> None:
    result = invoke("rm", "default")
    assert result.exit_code == 0
    assert native.removed == [("/dev/shm/default", False)]
    assert "Removed default" in result.output


def test_rm_of_a_pool_in_use_refuses_unless_forced(native: FakeNative) -> None:
    result = invoke("rm", "busy")
    assert result.exit_code == 1
    assert "living process" in result.stderr
    assert native.removed == []
    assert invoke("rm", "busy", "--force").exit_code == 0
    assert native.removed == [("/dev/shm/busy", True)]


def test_rm_as_json_says_what_was_freed(native: FakeNative, tmp_path: Any) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "segment").write_bytes(b"x" * 65536)
    native.pools.append(listing("mine", path=str(directory)))
    answer = json.loads(invoke("rm", str(directory), "--json").output)
    assert answer == {"name": "mine", "path": str(directory), "bytes_freed": 65536}
