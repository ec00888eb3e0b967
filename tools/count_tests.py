"""Count the tests of one run: ``python tools/count_tests.py LOG JUNIT_XML`` prints ``N passed, N failed``.

LOG holds what ``cargo test`` printed, JUNIT_XML is pytest's report. The exit status is 1 if a test failed, or if one of
the two ran none at all. Needs nothing but Python, since it also runs where the setup has failed.
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

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
    log, junit = Path(sys.argv[1]), Path(sys.argv[2])
    cargo = cargo_counts(log.read_text(errors="replace")) if log.exists() else (0, 0)
    pytest = pytest_counts(junit.read_text()) if junit.exists() else (0, 0)
    for runner, counts in (("cargo", cargo), ("pytest", pytest)):
        if sum(counts) == 0:
            print(f"{runner} ran no test: see {log}", file=sys.stderr)
    print(f"{cargo[0] + pytest[0]} passed, {cargo[1] + pytest[1]} failed", flush=True)
    return 0 if cargo[0] and pytest[0] and cargo[1] + pytest[1] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
