"""How the command behaves as a whole: help, errors, exit codes, output for programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pegaflow.cli.main import cli
from pegaflow.cli.output import format_bytes, format_count, format_seconds, printable
from pegaflow.errors import PegaFlowError
from pegaflow.shm import pool as pool_module
from pegaflow.shm.report import PoolListing, decode, decode_list
from tests.unit.fake_native import FakeNative, listing

COMMANDS = ("doctor", "pools", "inspect", "verify", "gc", "rm")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative(listing("default"))
    monkeypatch.setattr(pool_module, "_native", fake)
    return fake


def run_in_process(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    program = [sys.executable, "-c", "from pegaflow.cli import main; main()", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=240, env=os.environ | options, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples_and_json(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert f"pegaflow {command}" in result.output
    assert "Examples:" in result.output
    assert "--json" in result.output
    assert "--shm-dir" in result.output


def test_command_alone_shows_all_commands_and_exits_with_0() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.output


def test_help_fits_80_columns() -> None:
    for command in ("", *COMMANDS):
        arguments = [command, "--help"] if command else ["--help"]
        output = CliRunner().invoke(cli, arguments, terminal_width=80).output
        assert max(len(line) for line in output.splitlines()) <= 80, command


def test_version_names_release_build_and_layout() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("pegaflow ")
    assert "layout" in result.output


def test_python_runs_the_package_as_the_command() -> None:
    program = [sys.executable, "-m", "pegaflow"]
    shown = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=240, check=True)
    assert shown.stdout.startswith("pegaflow ")
    wrong = subprocess.run([*program, "pool"], capture_output=True, text=True, timeout=240, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "pegaflow: There is no command 'pool'; did you mean 'pools'?\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["pool"], "did you mean 'pools'"),
        (["nonsense"], "no command 'nonsense'"),
        (["pools", "--jsn"], "--json"),
        (["inspect"], "POOL"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["gc", "--idle", "soon"], "not a time span"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(native: FakeNative, arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("pegaflow: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr


def test_failure_is_one_sentence_and_exit_code_1(native: FakeNative) -> None:
    result = CliRunner().invoke(cli, ["inspect", "defualt"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "pegaflow: There is no pool named 'defualt' in /dev/shm; did you mean 'default'?\n"


def test_refusal_of_the_system_is_no_traceback(native: FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(shm_dir: str) -> str:
        raise PermissionError(13, "Permission denied", shm_dir)

    monkeypatch.setattr(native, "list_pools", refuse)
    result = CliRunner().invoke(cli, ["pools"])
    assert result.exit_code == 1
    assert result.stderr.startswith("pegaflow: The system refused")
    assert "Traceback" not in result.stderr


def test_interrupt_leaves_with_130(native: FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str, checksums: bool) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "verify", interrupted)
    assert CliRunner().invoke(cli, ["verify", "default"]).exit_code == 130


def test_installed_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    result = run_in_process("pools", "--shm-dir", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"shm_dir": str(tmp_path), "pools": []}
    assert result.stderr == ""


def test_installed_command_reports_a_missing_pool_without_traceback(tmp_path: Path) -> None:
    result = run_in_process("inspect", "none", "--shm-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("pegaflow: There is no pool named 'none'")
    assert result.stderr.count("\n") == 1


def test_reader_that_went_away_is_no_traceback() -> None:
    program = f"{sys.executable} -c 'from pegaflow.cli import main; main()' doctor | true"
    result = subprocess.run(["sh", "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (30 * 10**9, "27.9 GiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"),
        (None, "-"),
    ],
)
def test_bytes_are_shown_in_binary_units(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (3600, "1 h"), (7500, "2 h 5 min"), (90061, "1 d 1 h"), (None, "-"), (-5, "0 s")],
)
def test_time_spans_have_at_most_two_units(seconds: int | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_have_plurals() -> None:
    assert format_count(1, "process") == "1 process"
    assert format_count(2, "process") == "2 processes"
    assert format_count(1024, "block") == "1,024 blocks"


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\nc") == "a?[31mb?c"


def test_report_with_a_missing_field_is_refused_by_name() -> None:
    entry = listing()
    del entry["idle_seconds"]
    with pytest.raises(PegaFlowError, match=r"PoolListing\[0\]\.idle_seconds"):
        decode_list(PoolListing, json.dumps([entry]))


@pytest.mark.parametrize("wrong", ["1", True, 1.5, [], None])
def test_report_with_a_field_of_another_type_is_refused_by_name(wrong: object) -> None:
    field = "name" if wrong is None or wrong is True else "bytes_used"
    with pytest.raises(PegaFlowError, match=f"PoolListing.{field}"):
        decode(PoolListing, json.dumps(listing() | {field: wrong}))


def test_report_may_have_fields_of_a_later_release() -> None:
    assert decode(PoolListing, json.dumps(listing() | {"colour": "red"})).name == "default"
