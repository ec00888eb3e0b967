"""A Prometheus of our own for a while: started over targets of this machine, asked over its HTTP API, ended."""

import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.real_peers import free_port
from tools.try_examples import running, wait_for

TARGET_SECONDS_MAX = 120.0
"""For every target to have been scraped once."""


class Refused(Exception):
    """Prometheus does not take a question; the text is its own."""


def find_program(name: str) -> str:
    """Its path. Ends the command with what to do if there is none."""
    found = shutil.which(name)
    if found is None:
        sys.exit(
            f"There is no program {name!r}: install Prometheus (on Debian: apt-get install prometheus), "
            "or say where it is with --prometheus PATH."
        )
    return found


@contextmanager
def prometheus(program: str, targets: Mapping[str, str], scrape_seconds: int, folder: Path) -> Iterator[str]:
    """Address of a server that has scraped all targets (``host:port`` by name of the job) once."""
    jobs = [{"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in targets.items()]
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": f"{scrape_seconds}s"}, "scrape_configs": jobs}))
    port = free_port()
    command = [
        program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    log = folder / "prometheus.log"
    with running(command, log, dict(os.environ)) as process:
        wait_for([port], process, log, "/-/ready")
        address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + TARGET_SECONDS_MAX
        while len(ask(address, "query", query="up == 1")["result"]) < len(targets):
            if time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-4000:]
                sys.exit(f"Prometheus cannot scrape all of {', '.join(targets.values())}:\n{said}")
            time.sleep(0.5)
        yield address


def ask(address: str, path: str, **parameters: str) -> Any:
    """The data of one answer of the API. Raises ``Refused``."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as refused:
        said = json.load(refused)
    if said["status"] != "success":
        raise Refused(said["error"])
    return said["data"]
