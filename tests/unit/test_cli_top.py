"""``pegaflow top``: what is in all pools, what moved between two looks, and what people see of it."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pegaflow.cli import top
from pegaflow.cli.main import cli
from pegaflow.cli.top_traffic import SPARKS, spark
from pegaflow.shm.pool import inspect_if_ok, inspect_pool, list_pools
from pegaflow.shm.report import InspectReport, NamespaceReport, ProcessReport, TierReport
from pegaflow.shm.traffic import (
    CurveReport,
    NamespaceTraffic,
    PointReport,
    PressureReport,
    TrafficReport,
    WindowReport,
    counts_of,
)
from tests.unit.pool_processes import BLOCKS, PART_BYTES, keys, open_namespace, store

COLUMNS = 80


def invoke(shm: Path, *arguments: str) -> Result:
    arguments = ("top", "--interval", "0.1", "--shm-dir", str(shm), *arguments)
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def seen(views: list[top.PoolView]) -> str:
    console = Console(width=COLUMNS, highlight=False)
    with console.capture() as capture:
        console.print(top.render(views, "/dev/shm"))
    return capture.get()


@pytest.fixture
def view_of(tmp_path: Path) -> Callable[..., top.PoolView]:
    """A real pool's view with its parts replaced."""
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    [listing] = list_pools(str(tmp_path))
    report = inspect_pool(listing.path)
    pool.close()

    def make(**parts: Any) -> top.PoolView:
        return top.PoolView(listing, dataclasses.replace(report, **parts), None)

    return make


def tier(**fields: Any) -> TierReport:
    numbers = {field.name: 0 for field in dataclasses.fields(TierReport)}
    return TierReport(**{**numbers, "state": "serving", "leader_row": 0, **fields})


def report_of(view: top.PoolView) -> InspectReport:
    assert view.report is not None
    return view.report


def test_blocks_leases_and_processes_are_shown_and_nothing_is_changed(tmp_path: Path) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    leases = namespace.lease(keys()[:3])
    answer = json.loads(invoke(tmp_path, "--once", "--json").output)
    assert (answer["shm_dir"], answer["interval_ms"]) == (str(tmp_path), 100)
    [one] = answer["pools"]
    assert one["listing"]["state"] == "ok"
    [space] = one["report"]["namespaces"]
    assert (space["blocks_sealed"], space["leases"], space["label"]) == (BLOCKS, 3, "tiny model")
    assert one["rates"] == dict.fromkeys((field.name for field in dataclasses.fields(top.Rates)), 0)
    output = invoke(tmp_path, "--once").output
    for text in ("default", "ok", "tiny model", "holder", "alive", f"{BLOCKS * PART_BYTES // 1024} KiB", "4 MiB"):
        assert text in output
    assert max(map(len, output.splitlines())) <= COLUMNS
    assert len(leases) == 3
    pool.close()


def test_rates_are_those_between_two_looks(view_of: Callable[..., top.PoolView]) -> None:
    old, new = view_of(ssd=tier(spilled_bytes=100, read_bytes=5)), view_of(ssd=tier(spilled_bytes=300, read_bytes=45))
    [space] = report_of(new).namespaces
    fewer = dataclasses.replace(space, bytes_sealed=space.bytes_sealed - 60)
    looks = [
        top.Look(10.0, ((old.listing, report_of(old)),)),
        top.Look(12.0, ((new.listing, dataclasses.replace(report_of(new), namespaces=[fewer])),)),
    ]
    [view] = top.compare(*looks)
    assert view.rates == top.Rates(-30, 100, 20, 0)
    assert "-30 B" in seen([view])


def test_a_pool_that_was_made_anew_or_lost_its_tier_has_no_wrong_rates(view_of: Callable[..., top.PoolView]) -> None:
    old, again = view_of(ssd=tier(spilled_bytes=100)), view_of(ssd=tier(spilled_bytes=10), created_unix_s=1)
    gone = view_of(ssd=None)
    before = top.Look(10.0, ((old.listing, report_of(old)),))
    [view] = top.compare(before, top.Look(11.0, ((again.listing, report_of(again)),)))
    assert view.rates is None
    [view] = top.compare(before, top.Look(11.0, ((gone.listing, report_of(gone)),)))
    assert view.rates == top.Rates(0, 0, 0, 0)
    [view] = top.compare(before, top.Look(11.0, ((old.listing, None),)))
    assert (view.report, view.rates) == (None, None)
    assert "damaged" in seen([view])


def test_a_full_view_fits_80_columns_and_names_what_it_leaves_out(view_of: Callable[..., top.PoolView]) -> None:
    large = 987_654_321_987
    [space], [process] = report_of(view_of()).namespaces, report_of(view_of()).processes
    spaces: list[NamespaceReport] = [
        dataclasses.replace(
            space, group=group, label=f"company/a-model-{group}", bytes_sealed=large, blocks_sealed=9_999
        )
        for group in range(top.ROWS_MAX + 5)
    ]
    processes: list[ProcessReport] = [
        dataclasses.replace(process, pid=4_000_000 + row, used_bytes=large, share_bytes=large, leases=1_234)
        for row in range(top.ROWS_MAX + 1)
    ]
    ssd = tier(records=12_345_678, queued_bytes=large, read_wait_ms_max=12_345)
    view = view_of(namespaces=spaces, processes=processes, ssd=ssd, bytes_max=100 * large)
    text = seen([dataclasses.replace(view, rates=top.Rates(-large, large, large, 5))])
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "and 5 namespaces more" in text
    assert "and 1 process more" in text
    assert "\u2026" not in text, "something was cut off"


def test_labels_of_others_move_no_cursor(view_of: Callable[..., top.PoolView]) -> None:
    [space] = report_of(view_of()).namespaces
    text = seen([view_of(namespaces=[dataclasses.replace(space, label="\x1b[2Jgone[red]")])])
    assert "\x1b" not in text
    assert "gone[red]" in text


def test_no_pools_and_wrong_use_are_one_sentence(tmp_path: Path) -> None:
    assert invoke(tmp_path, "--once").output.startswith("No pools in ")
    assert json.loads(invoke(tmp_path, "--once", "--json").output)["pools"] == []
    refused = invoke(tmp_path, "--json")
    assert refused.exit_code == 2
    assert "--once" in refused.stderr
    assert CliRunner().invoke(cli, ["top", "--interval", "0"]).exit_code == 2


def test_it_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # Whoever runs the tests in the background ignores interrupts, and so would this.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from pegaflow.cli import main; main()",
            "top",
            "--interval",
            "0.1",
            "--shm-dir",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "80"},
    )
    try:
        assert process.stdout is not None
        read = ""
        while read.count("tiny model") < 3:  # a picture is drawn again and again
            line = process.stdout.readline()
            assert line, "it ended by itself"
            read += line
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 130
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()
        pool.close()


def test_a_pool_that_goes_between_listing_and_look_has_no_report(tmp_path: Path) -> None:
    pool, _ = open_namespace("default", str(tmp_path))
    [listing] = list_pools(str(tmp_path))
    assert inspect_if_ok(listing) == inspect_pool(listing.path)
    assert inspect_if_ok(dataclasses.replace(listing, state="creating")) is None
    pool.close()
    shutil.rmtree(listing.path)
    assert inspect_if_ok(listing) is None


def test_where_blocks_were_found_why_not_and_what_other_sizes_would_find_is_shown(tmp_path: Path) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    prompt = [*keys(), *(bytes([number]) * 16 for number in (100, 101))]
    for _ in range(10):
        namespace.note_prompt(prompt, start=0, ram=BLOCKS, ssd=BLOCKS, peer=BLOCKS, late=BLOCKS)
    answer = json.loads(invoke(tmp_path, "--once", "--json").output)
    [one] = answer["pools"]
    traffic = one["report"]["traffic"]
    [counts] = traffic["namespaces"]
    assert (counts["prompts"], counts["hit_ram"], counts["miss_never_stored"]) == (10, 10 * BLOCKS, 20)
    assert one["lately"] == dict.fromkeys(one["lately"], 0)
    [point] = [point for point in traffic["curve"]["points"] if point["bytes"] == one["report"]["bytes_max"]]
    assert point["hit_ppm"] == 980_000, "all but two, the first time"
    assert [window["hit_ppm"] for window in traffic["windows"]] == [980_000] * 3, "two distinct ones were missed"
    lines = invoke(tmp_path, "--once").output.splitlines()
    assert ["default", "start", "100", "80.0", "0", "0", "20.0", "0", "0", "0", "0"] in [line.split() for line in lines]
    assert any(line.split()[-8:] == ["98.0"] * 8 for line in lines if line.startswith("default"))
    assert max(map(len, lines)) <= COLUMNS
    pool.close()


def test_tables_of_prompts_fit_80_columns_however_large_their_numbers(view_of: Callable[..., top.PoolView]) -> None:
    counts = NamespaceTraffic(0, *(123_456_789_012 for _ in dataclasses.fields(NamespaceTraffic)[1:]))
    sizes = [int(report_of(view_of()).bytes_max * part) for part in (0.25, 0.5, 1, 2, 4, 8)]
    curve = CurveReport(1, 2, 3, 4, [PointReport(size, 1_000_000) for size in sizes])
    windows = [WindowReport(seconds, 1, 0, 1_000_000) for seconds in (300, 3600, 86400)]
    traffic = TrafficReport([counts], windows, curve, PressureReport(*3 * (123_456_789_012,)))
    text = seen([dataclasses.replace(view_of(traffic=traffic), lately=counts_of(traffic))])
    assert "last" in text
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "100.0" in text
    assert spark(curve) == 6 * SPARKS[-1]
