"""The totals that CI ends with count every test and never hide a failure."""

from pathlib import Path

import pytest

from tools import count_tests

CARGO_LOG = """
running 2 tests
test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
GOOD_JUNIT = '<testsuites><testsuite name="pytest" errors="0" failures="0" skipped="0" tests="7"/></testsuites>'
BAD_JUNIT = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="1" tests="10"/></testsuites>'


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, log: str | None, junit: str | None) -> int:
    for name, text in (("log", log), ("xml", junit)):
        if text is not None:
            (folder / name).write_text(text)
    monkeypatch.setattr("sys.argv", ["count_tests", str(folder / "log"), str(folder / "xml")])
    return count_tests.main()


def test_each_report_of_pytest_counts_and_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("test result: ok. 1 passed; 0 failed;")
    (tmp_path / "one").write_text(GOOD_JUNIT)
    (tmp_path / "two").write_text(GOOD_JUNIT)
    monkeypatch.setattr("sys.argv", ["count_tests", *(str(tmp_path / name) for name in ("log", "one", "two"))])
    assert count_tests.main() == 0
    assert capsys.readouterr().out == "15 passed, 0 failed\n"
    (tmp_path / "two").unlink()
    assert count_tests.main() == 1


def test_counts_of_both_runners_are_added(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, CARGO_LOG, BAD_JUNIT) == 1
    assert capsys.readouterr().out == "21 passed, 5 failed\n"


def test_what_was_not_run_is_no_pass_and_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "test result: ok. 1 passed; 0 failed;\nnot run: tests over RDMA (no QEMU)\n"
    assert run(monkeypatch, tmp_path, log, GOOD_JUNIT) == 0
    printed = capsys.readouterr()
    assert printed.out == "8 passed, 0 failed, 1 not run\n"
    assert "tests over RDMA (no QEMU)" in printed.err


@pytest.mark.parametrize(
    ("log", "junit", "status"),
    [
        ("test result: ok. 1 passed; 0 failed;", GOOD_JUNIT, 0),
        ("test result: FAILED. 1 passed; 1 failed;", GOOD_JUNIT, 1),
        ("test result: ok. 1 passed; 0 failed;", BAD_JUNIT, 1),
        ("error: could not compile", GOOD_JUNIT, 1),
        ("test result: ok. 1 passed; 0 failed;", None, 1),
        (None, GOOD_JUNIT, 1),
    ],
)
def test_failures_and_missing_runs_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str | None, junit: str | None, status: int
) -> None:
    assert run(monkeypatch, tmp_path, log, junit) == status
