"""Count the tests of one run: ``python tools/count_tests.py LOG JUNIT_XML...`` prints ``N passed, N failed``, and
``N not run`` behind it for parts that this machine could not run.

LOG holds what ``cargo test`` printed, and a line ``not run: WHAT (WHY)`` for each such part; each JUNIT_XML is a report
of pytest. The exit status is 1 if a test failed, or if one of them ran none at all. Needs nothing but Python, since it
also runs where the setup has failed.
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

NOT_RUN = re.compile(r"^not run: .+$", re.MULTILINE)
CARGO_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;", re.MULTILINE)


def cargo_counts(log: str) -> tuple[int, int]:
    """``(passed, failed)`` over all of cargo's test binaries."""
    results = [(int(passed), int(failed)) for passed, failed in CARGO_RESULT.findall(log)]
    return sum(passed for passed, _ in results), sum(failed for _, failed in results)


def pytest_counts(junit: str) -> tuple[int, int]:
    """``(passed, failed)``; an error outside a test counts as a failed one."""
    passed = failed = 0
    for suite in ElementTree.fromstring(junit).iter("testsuite"):  # noqa: S314 - written by our own pytest
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    return passed, failed


def main() -> int:
    """Print the totals; returns the exit status."""
    log, reports = Path(sys.argv[1]), [Path(report) for report in sys.argv[2:]]
    text = log.read_text(errors="replace") if log.exists() else ""
    cargo, not_run = cargo_counts(text), NOT_RUN.findall(text)
    counts = {"cargo": cargo}
    for report in reports:
        counts[f"pytest ({report.name})"] = pytest_counts(report.read_text()) if report.exists() else (0, 0)
    for runner, of_runner in counts.items():
        if sum(of_runner) == 0:
            print(f"{runner} ran no test: see {log}", file=sys.stderr)
    for part in not_run:
        print(part, file=sys.stderr)
    passed, failed = (sum(of_runner[at] for of_runner in counts.values()) for at in range(2))
    print(f"{passed} passed, {failed} failed" + f", {len(not_run)} not run" * bool(not_run), flush=True)
    return 0 if all(of_runner[0] for of_runner in counts.values()) and failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
