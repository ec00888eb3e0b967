"""What the demo shows, in order. Two engines start at a time; requests never overlap, so that times are comparable."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo.engine import Answer, Engine, close_all
from demo.report import COLD, Row
from pegaflow import _native

POOL = "pegaflow-demo"
POOL_SIZE = "2gb"
BLOCK_TOKENS = 32
WRITE_WAIT_SECONDS_MAX = 60
SSD_SIZE = "1gb"
SETTLE_SECONDS = 4
"""An engine that has just become ready keeps a core busy for a while, and its neighbour's first answer is timed."""
TOKENS = 32
"""How far the text is continued."""


@dataclass
class Demo:
    """The scenarios over one model and one text."""

    model: str
    text: str
    logs: Path
    ssd: Path
    """Where blocks may be kept on a disk."""
    console: Console
    rows: list[Row] = field(default_factory=list)
    prompt_tokens: int = 0

    def run(self) -> list[Row]:
        """Run everything and return the rows; an ``EngineError`` ends it early."""
        with self._pool(), contextlib.ExitStack() as engines:
            reference, first = self._start(engines, "reference", "first")
            text, rounded = self._references(reference)
            reference.kill()
            self._row(COLD, first, text)
            first.reset()
            self._row("warm: vLLM's own prefix cache reset", first, rounded)
            self._say(f"kill -9 of the whole first engine: {first.kill()} processes")
            second, beside = self._start(engines, "second", "beside")
            self._row("warm: fresh process after kill -9", second, rounded)
            self._row("warm: second instance beside it", beside, rounded)
            self._await_written()
            killed = second.kill() + beside.kill()
            remove_pool()
            self._say(f"kill -9 of all {killed} processes, and the pool removed, as a reboot does it")
            (after,) = self._start(engines, "after")
            self._row("warm from SSD: all killed, pool removed", after, rounded)
            with self._busy("Closing the engine"):
                close_all(after)
        return self.rows

    def _references(self, plain: Engine) -> tuple[str, str]:
        """The text with no cache at all, and the text with vLLM's own prefix cache (a cached prefix is computed in
        pieces of other sizes, so rounding may differ). Each is asked for twice: what vLLM does not repeat by itself,
        no cache can be measured against."""
        cold, warm = self._ask(plain), self._ask(plain)
        plain.reset()
        again, rewarmed = self._ask(plain), self._ask(plain)
        self._add("no connector", cold, again.text, must_hit=False)
        self._add("no connector, vLLM's own prefix cache", warm, rewarmed.text, must_hit=False)
        if cold.text != warm.text:
            self._say("vLLM's own prefix cache changes the text by rounding: warm rows are compared with its text")
        return cold.text, warm.text

    def _await_written(self) -> None:
        """Until the blocks of the text are on SSD, which nobody hurries to write."""
        with self._busy("Letting the blocks get to the disk"):
            pool = _native.Pool.open(POOL, create=False, label="demo")
            try:
                written, deadline = -1, time.monotonic() + WRITE_WAIT_SECONDS_MAX
                while time.monotonic() < deadline:
                    tier = pool.ssd()
                    if tier is None or tier["spilled_blocks"] == written > 0:
                        break
                    written = tier["spilled_blocks"]
                    time.sleep(SETTLE_SECONDS)
            finally:
                pool.close()

    def _row(self, scenario: str, engine: Engine, expected: str) -> None:
        self._add(scenario, self._ask(engine), expected, must_hit=scenario.startswith("warm"))

    def _add(self, scenario: str, answer: Answer, expected: str, *, must_hit: bool) -> None:
        row = Row(scenario, round(answer.ttft_s, 4), answer.cached_tokens, answer.text == expected, must_hit)
        self.prompt_tokens = answer.prompt_tokens
        self.rows.append(row)
        self._say(f"{scenario}: first token after {row.ttft_s:.3f} s, {row.cached_tokens:,} tokens from the cache")

    def _ask(self, engine: Engine) -> Answer:
        with self._busy(f"Engine {engine.name} reads and continues the text"):
            return engine.ask(self.text, TOKENS)

    def _start(self, engines: contextlib.ExitStack, *names: str) -> list[Engine]:
        """Start engines side by side; all but the reference use the pool."""
        started = time.monotonic()
        self._say(f"starting vLLM: engines {' and '.join(names)} (one to two minutes)")
        settings = {name: self._settings(connector=name != "reference") for name in names}
        pair = [engines.enter_context(Engine(name, settings[name], self.logs)) for name in names]
        for engine in pair:
            with self._busy(f"Waiting for engine {engine.name}"):
                engine.wait_ready()
            self._say(f"engine {engine.name} is ready after {time.monotonic() - started:.0f} s")
        with self._busy("Letting the engines come to rest"):
            time.sleep(SETTLE_SECONDS)
        return pair

    def _settings(self, *, connector: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": self.model,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "max_model_len": -1,  # as long as the KV cache has room for
            "max_num_seqs": 4,
            "prefix_caching_hash_algo": "sha256_cbor",
        }
        return settings | ({"kv_transfer_config": connector_config(self.ssd)} if connector else {})

    @contextlib.contextmanager
    def _pool(self) -> Iterator[None]:
        """A pool, and a directory of its blocks on SSD, that do not exist before the demo, nor after it."""
        remove_pool()
        shutil.rmtree(self.ssd, ignore_errors=True)
        self.ssd.mkdir(parents=True)
        try:
            yield
        finally:
            remove_pool()
            shutil.rmtree(self.ssd, ignore_errors=True)

    def _say(self, what: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {what}", highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        """A spinner and a running clock, gone when it is done; on something that is no terminal, a line."""
        if not self.console.is_terminal:
            self._say(what)
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield


def connector_config(ssd: Path) -> dict[str, Any]:
    """What a user gives as ``--kv-transfer-config``."""
    return {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "pegaflow.pool_name": POOL,
            "pegaflow.pool_size": POOL_SIZE,
            "pegaflow.ssd_cache_path": str(ssd.resolve()),
            "pegaflow.ssd_cache_capacity": SSD_SIZE,
            "pegaflow.ssd_admission": "all",
        },
    }


def remove_pool() -> None:
    """Remove the demo's pool if there is one. Its engines are dead by now, or were never started."""
    for pool in json.loads(_native.list_pools()):
        if pool["name"] == POOL:
            _native.remove(pool["path"], force=True)
