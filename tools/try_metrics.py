"""Scrape the metrics of a real vLLM server on this machine's CPU: ``python -m tools.try_metrics``.

``examples/single.sh`` serves a tiny model: with one API server, with two, whose metrics prometheus-client gathers from
files, and with two data-parallel engines; ``pegaflow exporter`` stands beside it. A few prompts are asked twice, with
vLLM's own prefix cache emptied in between. Every name must be there once for each engine, and say what has happened
before anybody asks for more.
"""

import os
import shutil
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pegaflow import exporter
from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, prometheus_name
from tools import try_examples as examples
from tools.try_examples import ARGUMENTS, BLOCK_TOKENS, PORT, PROMPTS, ROOT, ask, running, wait_for

EXPORTER_PORT = PORT + 3
EXPORT = "from pegaflow.cli import main; main()"
SETTLE_SECONDS_MAX = 120.0
BLOCKS = sum(len(prompt.split()) // BLOCK_TOKENS for prompt in PROMPTS)
"""Full blocks of all prompts together."""

NOT_WITHOUT_TIER = {name for name in (*exporter._GAUGES, *exporter._COUNTERS) if name.startswith("ssd_")}
NOT_AT_ONCE = {"curve_hit_rate", "hll_estimated_hit_rate"}
"""Ratios that are said once there is enough to tell them from."""


@dataclass(frozen=True)
class Setup:
    """How vLLM is served."""

    name: str
    arguments: tuple[str, ...]
    servers: int
    engines: int


SETUPS = (
    Setup("1 API server", ("--api-server-count", "1"), 1, 1),
    Setup("2 API servers", ("--api-server-count", "2"), 2, 1),
    Setup("2 engines", ("--data-parallel-size", "2"), 2, 2),
)

Scraped = dict[str, list[float]]
"""Values by the name of a series; of a histogram its ``_count`` and ``_sum``."""


def scrape(port: int) -> Scraped:
    """What is said at a port. Ends the command if a name is declared twice, which Prometheus refuses."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    ours = [line for line in text.splitlines() if line.startswith("# TYPE ") and "pega" in line]
    if len(ours) != len(set(ours)):
        sys.exit(f"a metric is declared twice at port {port}")
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("vllm:pega_", "pegaflow_")) and not sample.name.endswith(
                ("_bucket", "_created")
            ):
                found.setdefault(sample.name, []).append(sample.value)
    return found


def vllm_names(servers: int, *, asked: bool) -> set[str]:
    """Series that vLLM's endpoint has before the first request, or after some (``asked``).

    Of several API servers prometheus-client tells the gauges that had a value, the last one, and no others."""
    names = {f"{prometheus_name(key)}_total" for key in COUNTERS}
    names |= {f"{prometheus_name(key)}_{part}" for key in HISTOGRAMS for part in ("count", "sum")}
    if servers == 1:
        return names | {prometheus_name(key) for key in GAUGES}
    used = [key for key in GAUGES if key.startswith("hll_") or key in ("pending_save_requests", "pinned_blocks")]
    return names | {prometheus_name(key) for key in used if asked}


def pool_names() -> set[str]:
    """Series that the exporter has for a pool without an SSD tier, once something was asked for."""
    gauges, counters = set(exporter._GAUGES), set(exporter._COUNTERS)
    always = (gauges | counters) - NOT_WITHOUT_TIER - NOT_AT_ONCE
    return {f"pegaflow_{name}{'_total' if name in counters else ''}" for name in always}


def total(scraped: Scraped, name: str) -> float:
    """Sum over all labels; 0 if there is none."""
    return sum(scraped.get(name, [0.0]))


def serve_and_scrape(setup: Setup, model: Path, folder: Path) -> tuple[Scraped, Scraped, Scraped]:
    """vLLM's metrics before the first request, and vLLM's and the exporter's in the end."""
    pools = tempfile.mkdtemp(dir="/dev/shm", prefix="pegaflow-metrics-")
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "VLLM_SERVER_DEV_MODE": "1",
        "MODEL": str(model), "PORT": str(PORT), "PEGAFLOW_SHM_DIR": pools, "POOL_SIZE": "256mb",
    }  # fmt: skip
    log, log_of_pools = folder / f"{setup.name}.log", folder / f"exporter, {setup.name}.log"
    command = [str(ROOT / "examples" / "single.sh"), *ARGUMENTS, *setup.arguments]
    export = [sys.executable, "-c", EXPORT, "exporter", "--listen", f"127.0.0.1:{EXPORTER_PORT}", "--shm-dir", pools]
    try:
        with running(command, log, environment) as vllm, running(export, log_of_pools, environment) as pools_too:
            wait_for([EXPORTER_PORT], pools_too, log_of_pools)
            wait_for([PORT], vllm, log)
            before = scrape(PORT)
            for prompt in PROMPTS:
                ask(PORT, prompt)
            wait_until_saved()
            reset = urllib.request.Request(f"http://127.0.0.1:{PORT}/reset_prefix_cache", b"", method="POST")
            with urllib.request.urlopen(reset, timeout=60):
                pass
            for prompt in PROMPTS:
                ask(PORT, prompt)
            return before, *settled()
    finally:
        shutil.rmtree(pools)


def wait_until_saved() -> None:
    """Until the exporter has seen all full blocks of the prompts."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while total(scrape(EXPORTER_PORT), "pegaflow_cache_block_insertions_total") < BLOCKS:
        if time.monotonic() > deadline:
            sys.exit("the blocks of the prompts did not get into the pool")
        time.sleep(0.5)


def settled() -> tuple[Scraped, Scraped]:
    """What both say once vLLM has reported the last load and save. Nobody asks for anything more: it reports with its
    steps, of which the last one has to tell all. The exporter gives answers of the last second again."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        vllm, pool = scrape(PORT), scrape(EXPORTER_PORT)
        loaded = total(vllm, "vllm:pega_load_success_total") >= len(PROMPTS)
        seen = total(pool, "pegaflow_load_blocks_total") >= BLOCKS
        there = loaded and seen and not total(vllm, "vllm:pega_pending_save_requests")
        if there or time.monotonic() > deadline:
            return vllm, pool
        time.sleep(0.5)


def claims(setup: Setup, before: Scraped, vllm: Scraped, pool: Scraped) -> dict[str, bool]:
    """What has to be so, by the sentence that says it."""
    tokens = BLOCKS * BLOCK_TOKENS
    first, last = vllm_names(setup.servers, asked=False), vllm_names(setup.servers, asked=True)

    def of_vllm(key: str) -> float:
        return total(vllm, f"vllm:pega_{key}")

    def of_pool(key: str) -> float:
        return total(pool, f"pegaflow_{key}")

    def missing(names: set[str], there: Scraped) -> str:
        left = sorted(names - there.keys())
        return f" (missing: {', '.join(left)})" if left else ""

    return {
        f"vLLM has all names before the first request{missing(first, before)}": first <= before.keys(),
        f"vLLM has all names in the end{missing(last, vllm)}": last <= vllm.keys(),
        f"the exporter has all names{missing(pool_names(), pool)}": pool_names() <= pool.keys(),
        "one series for each name and engine, whichever API server is asked": all(
            len(values) == setup.engines or (name not in first and len(values) < setup.engines)
            for name, values in vllm.items()
        ),
        "the second time all full blocks were found in memory": of_vllm("hit_tokens_ram_total") == tokens,
        "the first time none was": of_vllm("miss_tokens_total") >= tokens,
        "each prompt's blocks were loaded": of_vllm("load_success_total") == len(PROMPTS)
        and of_vllm("load_blocks_sum") == BLOCKS
        and of_vllm("load_duration_seconds_sum") > 0,
        "and saved": of_vllm("save_success_total") >= 1 and of_vllm("save_blocks_sum") >= BLOCKS,
        "nothing is pending in the end": of_vllm("pending_save_requests") == of_vllm("pinned_blocks") == 0,
        "nothing failed": not any(of_vllm(f"{key}_total") for key in ("load_failure", "save_failure", "hook_errors")),
        "the pool has seen the same loads": of_pool("load_blocks_total") == BLOCKS and of_pool("load_bytes_total") > 0,
        "and at least these blocks": of_pool("cache_block_insertions_total") >= BLOCKS
        and of_pool("cache_insertion_bytes_total") == of_pool("cache_resident_bytes") > 0,
        "the pool is no larger than it may be": 0 < of_pool("pool_used_bytes") <= of_pool("pool_capacity_bytes"),
        "the estimates of both are of the same window": of_vllm("hll_total_requests_1h") > 0
        and of_pool("hll_total_requests") > 0,
    }


def main() -> int:
    """Run all; the status is 1 if something is missing or does not add up."""
    folder = Path(tempfile.mkdtemp(prefix="pegaflow-metrics-"))
    examples.use_commands(examples.shims(folder / "bin", None))
    model = examples.make_model(folder / "model")
    good = True
    for setup in SETUPS:
        for claim, holds in claims(setup, *serve_and_scrape(setup, model, folder)).items():
            print(f"{'ok ' if holds else 'NOT'} {setup.name}: {claim}")
            good &= holds
    if good:
        shutil.rmtree(folder)
    else:
        print(f"logs are in {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
