"""What ``pegaflow doctor`` says about tables of pools that may run out."""

import json
from pathlib import Path

from click.testing import CliRunner

from pegaflow import _native
from pegaflow.cli import checks_pools
from pegaflow.cli.finding import OK, WARNING, Finding
from pegaflow.cli.main import cli
from pegaflow.shm.report import PoolListing
from tests.unit.fake_native import listing, refused


def look(**fields: object) -> Finding:
    return checks_pools.pool_tables([PoolListing(**listing(**fields))])  # type: ignore[arg-type]


def test_tables_with_room_are_said_and_are_ok() -> None:
    finding = look(namespaces=3, processes_alive=2, slots=2048)
    assert (finding.level, finding.advice) == (OK, "")
    assert finding.value == "default: 3 of 256 namespaces, 2 of 128 processes, 2,048 of 524,288 slots"


def test_pool_that_runs_out_of_namespaces_is_a_warning_that_says_what_helps() -> None:
    assert look(namespaces=230).level == OK
    for used in (231, 256):
        finding = look(name="many", namespaces=used)
        assert finding.level == WARNING
        assert "'pegaflow rm many'" in finding.advice
        assert "pegaflow.pool_name" in finding.advice


def test_pool_that_runs_out_of_processes_is_a_warning() -> None:
    assert look(processes_alive=115, processes_dead=13).level == OK, "rows of the dead are taken again"
    finding = look(processes_alive=120)
    assert finding.level == WARNING
    assert "further engines" in finding.advice


def test_slots_that_run_out_before_the_memory_are_a_warning() -> None:
    finding = look(slots=500_000)
    assert finding.level == WARNING
    assert "--block-size" in finding.advice
    assert look(slots=524_288, bytes_used=8 << 30).level == OK, "a full pool evicts"


def test_every_pool_that_can_be_used_is_looked_at() -> None:
    pools = [listing("a"), refused("b", "another user's"), listing("c", namespaces=256)]
    finding = checks_pools.pool_tables([PoolListing(**one) for one in pools])
    assert [value.partition(":")[0] for value in finding.value.split("; ")] == ["a", "c"]
    assert "of c are" in finding.advice
    assert "of a are" not in finding.advice
    assert checks_pools.pool_tables([]) == Finding(checks_pools.NAME, OK, "no pools yet")


def test_doctor_counts_the_namespaces_of_a_real_pool(tmp_path: Path) -> None:
    pool = _native.Pool.open("full", pool_bytes=4 << 20, shm_dir=str(tmp_path), create=True)
    before = _tables(tmp_path)
    for number in range(240):
        pool.namespace(number.to_bytes(32, "little"), 0, [4096])
    after = _tables(tmp_path)
    pool.close()
    assert before["value"].startswith("full: 0 of 256 namespaces, 1 of 128 processes, ")
    assert (before["level"], after["level"]) == (OK, WARNING)
    assert after["value"].startswith("full: 240 of 256 namespaces, 1 of 128 processes, ")


def _tables(shm_dir: Path) -> dict[str, str]:
    answer = json.loads(CliRunner().invoke(cli, ["doctor", "--shm-dir", str(shm_dir), "--json"]).output)
    (found,) = [one for one in answer["findings"] if one["name"] == checks_pools.NAME]
    return dict(found)
