"""Programs that see a file system of their own at some place, in a mount namespace that ends with them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import WAIT_SECONDS_MAX

ROOT = Path(__file__).parents[1]


def run_on_tmpfs(place: str | Path, size: str, code: str) -> None:
    """Run Python ``code`` with an empty tmpfs of ``size`` (as ``mount`` takes it) at ``place``; it has to end well."""
    mount = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && exec "$3" -c "$4"'
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *as_root, "--mount", "sh", "-c", mount, "sh", size, str(place), sys.executable, code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * WAIT_SECONDS_MAX)
    assert run.returncode == 0, run.stderr
