"""What does the connector add to the start of an engine?"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._common import Result, finish, median, note, pool_place
from benchmarks._tiny_model import TINY_LLAMA
from benchmarks._vllm_rounds import COMPUTING
from pegaflow import _native

STARTS = 5
EXTRA_SECONDS_AIM = 0.3
START_SECONDS_MAX = 300.0
POOL_BYTES = 4 << 30
"""Of two pools at a time. Engines make room for blocks as soon as they are up, so this much memory may be taken."""
MODEL = Path("build/models/gemma3-270m")

# Each start has a process of its own, and what is timed begins once vLLM has been imported: the time until an engine
# can take requests. Importing takes ten times as long, and varies by more than the connector costs.
CHILD = """
import json, sys, time
settings = json.loads(sys.argv[1])
from vllm import LLM
inside = 0.0
if "kv_transfer_config" in settings:
    start = time.perf_counter()
    from pegaflow.connector import PegaKVConnector
    inside += time.perf_counter() - start
    def timed(function):
        def call(*arguments, **more):
            global inside
            start = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                inside += time.perf_counter() - start
        return call
    for name in ("__init__", "register_kv_caches", "get_handshake_metadata", "bind_gpu_block_pool",
                 "set_xfer_handshake_metadata_pp_aware"):
        setattr(PegaKVConnector, name, timed(getattr(PegaKVConnector, name)))
start = time.perf_counter()
LLM(**settings)
print("\\n" + json.dumps({"seconds": time.perf_counter() - start, "inside": inside}), file=sys.stderr)
"""


def start_seconds(settings: dict[str, Any]) -> tuple[float, float]:
    """Start one engine in a fresh process: seconds in all, and of these inside the connector's own code."""
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, COMPUTING)),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(settings)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        check=False,
    )
    for line in reversed(done.stderr.splitlines()):
        if line.startswith('{"seconds"'):
            answer = json.loads(line)
            return float(answer["seconds"]), float(answer["inside"])
    raise SystemExit(f"The engine did not start (exit {done.returncode}): {done.stdout[-2000:]}{done.stderr[-2000:]}")


def settings_of(place: Path) -> dict[str, Any]:
    """Arguments of an engine without a connector."""
    common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, "dtype": "bfloat16"}
    if (MODEL / "model.safetensors").exists():
        return {"model": str(MODEL), **common}
    note(f"{MODEL} is not there (make model): a tiny model with random weights takes its place.")
    (place / "config.json").write_text(json.dumps(TINY_LLAMA))
    return {"model": str(place), "load_format": "dummy", **common}


def with_connector(settings: dict[str, Any], place: Path, pool: str) -> dict[str, Any]:
    """The same engine with the connector, on a pool that it finds or makes."""
    options = {"pegaflow.pool_name": pool, "pegaflow.shm_dir": str(place), "pegaflow.pool_size": POOL_BYTES}
    transfer = {"kv_connector": "PegaKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    return {**settings, "kv_transfer_config": transfer}


def remove_pool(place: Path, name: str) -> None:
    """Delete a pool's files, so that the next start makes it anew."""
    for pool in json.loads(_native.list_pools(str(place))):
        if pool["name"] == name:
            _native.remove(pool["path"])


def main() -> None:
    """Time starts without the connector, with a new pool and with one that is there, in turns."""
    seconds: dict[str, list[tuple[float, float]]] = {"without": [], "new pool": [], "existing pool": []}
    with pool_place(2 * POOL_BYTES) as place:
        plain = settings_of(place)
        start_seconds(with_connector(plain, place, "kept"))  # also brings files into the page cache
        for number in range(STARTS):
            began = time.perf_counter()
            seconds["without"].append(start_seconds(plain))
            seconds["new pool"].append(start_seconds(with_connector(plain, place, "new")))
            remove_pool(place, "new")
            seconds["existing pool"].append(start_seconds(with_connector(plain, place, "kept")))
            note(f"{number + 1} of {STARTS} rounds, {time.perf_counter() - began:.0f} s")
    base = median([total for total, _ in seconds["without"]])
    results = [Result("start without a connector", base, "s")]
    for kind in ("new pool", "existing pool"):
        value = median([total for total, _ in seconds[kind]])
        inside = median([own for _, own in seconds[kind]])
        results.append(Result(f"start, {kind}", value, "s", "without a connector", base))
        results.append(Result(f"added, {kind}", value - base, "s", "aim", EXTRA_SECONDS_AIM))
        results.append(Result(f"inside our code, {kind}", inside, "s", "aim", EXTRA_SECONDS_AIM))
    finish("start", results)


if __name__ == "__main__":
    main()
