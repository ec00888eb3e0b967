"""What the picture of the board shows: real vLLM with a tiny model, and other processes, on one pool that is too small.

``python -m tools._board_traffic FOLDER NUMBER`` is one of the others, until it is ended: a made-up engine that looks
prompts up, counts them, holds what is there and stores what is not, without bytes.
"""

import importlib
import os
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pegaflow import _native
from tests.real_peers import free_port
from tools import try_examples as examples
from tools.try_examples import ARGUMENTS, ROOT, ask, prompt, running, wait_for

POOL = "default"
POOL_SIZE = "48mb"
"""Less than what is asked for, so that blocks are evicted."""

WORDS = 700
"""Of a prompt: five full blocks of vLLM's, a megabyte of the pool."""

KV_BLOCKS = "48"
"""Of vLLM's own cache: what is asked for again is in the pool or nowhere."""

AT_ONCE = 3
AGAIN_MEAN = 12
"""How many prompts ago those were asked that are asked again, on average; a few of them much longer ago."""

OTHERS = 2
BLOCK_BYTES = 64 << 10
CHAIN_BLOCKS = 16
CHAIN_MEAN = 12
PAUSE_SECONDS = 0.15
"""For which blocks are held and written, as if a model ran meanwhile."""


@dataclass(frozen=True)
class Served:
    """What runs: ``host:port`` of the exporter, vLLM's port, and where the pool is."""

    exporter: str
    port: int
    place: Path


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """vLLM on a pool of its own, and the exporter, until the end of the block. ``folder`` gets the model and logs."""
    scrape, common = (importlib.import_module(f"benchmarks.{name}") for name in ("scrape", "_common"))
    examples.use_commands(examples.shims(folder / "bin", None))
    model, port, log = examples.make_model(folder / "model"), free_port(), folder / "vllm.log"
    command = [
        str(ROOT / "examples" / "single.sh"), *ARGUMENTS, "--host", "127.0.0.1", "--num-gpu-blocks-override", KV_BLOCKS,
    ]  # fmt: skip
    with common.pool_place(64 << 20) as place, scrape.exporter(place) as address:
        environment = {
            **os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "VLLM_SERVER_DEV_MODE": "1",
            "MODEL": str(model), "PORT": str(port), "PEGAFLOW_SHM_DIR": str(place), "POOL": POOL,
            "POOL_SIZE": POOL_SIZE,
        }  # fmt: skip
        with running(command, log, environment) as process:
            wait_for([port], process, log)
            yield Served(address.removeprefix("http://").removesuffix("/metrics"), port, place)


def make_traffic(where: Served, seconds: float, folder: Path) -> None:
    """Ask vLLM beside the others for so long. After two thirds one of the others is ended and vLLM is reset."""
    chance = random.Random(1)  # noqa: S311 - which prompts
    asked, began = 0, time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as threads:
        last = [stack.enter_context(other(where.place, number, folder)) for number in range(1, OTHERS + 1)][-1]
        until_reset = True
        while (passed := time.monotonic() - began) < seconds:
            if until_reset and passed > seconds * 2 / 3:
                until_reset = False
                last.terminate()
                url = f"http://127.0.0.1:{where.port}/reset_prefix_cache?reset_external=true"
                with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=60):
                    pass
            numbers = []
            for _ in range(AT_ONCE):
                again = asked and chance.random() < 0.6
                numbers.append(max(0, asked - 1 - int(chance.expovariate(1 / AGAIN_MEAN))) if again else asked)
                asked += not again
            list(threads.map(lambda number: ask(where.port, prompt(number, WORDS)), numbers))


@contextmanager
def other(place: Path, number: int, folder: Path) -> "Iterator[examples.Process]":
    """One of the others."""
    command = [sys.executable, "-m", "tools._board_traffic", str(place), str(number)]
    with running(command, folder / f"other {number}.log", dict(os.environ)) as process:
        yield process


def use_pool(place: str, number: int) -> None:
    """Be one of the others: conversations that begin alike, some of them asked for much more often."""
    pool = _native.Pool.open(POOL, shm_dir=place, create=False, label=f"other {number}")
    space = pool.namespace(b"another model".ljust(32, b"\0"), 0, [BLOCK_BYTES], label="another model")
    chance = random.Random(number)  # noqa: S311 - which conversations
    while True:
        chain, blocks = int(chance.expovariate(1 / CHAIN_MEAN)), chance.randint(1, CHAIN_BLOCKS)
        keys = [f"{chain} {block}".encode().ljust(16) for block in range(blocks)]
        found = space.lookup(keys)
        space.note_prompt(keys, start=0, ram=found, ssd=found, peer=found, late=found)
        leased = space.lease(keys)
        refs = [ref for _, ref in space.reserve(keys)]
        time.sleep(PAUSE_SECONDS)
        space.note_loaded(len(leased))
        pool.mark_written(0, refs)
        pool.publish(refs)
        pool.release(leased)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    use_pool(sys.argv[1], int(sys.argv[2]))
