"""Engines of ``multi_gpu``: real vLLM in processes of their own, each on its GPUs, asked at the same time."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm_gpu import RunFailed, end_session, environment, last_line

CHILD = Path(__file__).with_name("_instance_child.py")
GB = 10**9


@dataclass(frozen=True)
class Kind:
    """A way to cache: its connector, and whether instances share what it holds."""

    connector: str
    """``ours``, ``offloading``, ``original`` or ``none``."""

    shared: bool = True
    """One pool for all; else each instance has its share of the bytes for itself."""

    @property
    def name(self) -> str:
        """For tables."""
        own = {
            "ours": "one pool" if self.shared else "a pool each",
            "offloading": "a pool each",
            "original": "a server",
        }
        return f"{self.connector}, {own[self.connector]}" if self.connector in own else "no host cache"


def transfer(
    kind: Kind, number: int, pool_bytes: int, instances: int, shm_dir: Path, more: dict[str, Any]
) -> dict[str, Any] | None:
    """``KVTransferConfig`` of instance ``number``; ``pool_bytes`` is what all have together, ``more`` are options of
    our connector."""
    if kind.connector == "none":
        return None
    if kind.connector == "offloading":
        extra: dict[str, Any] = {"cpu_bytes_to_use": pool_bytes // instances}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra = {}
    if kind.connector == "ours":
        bytes_each = pool_bytes if kind.shared else pool_bytes // instances
        name = "shared" if kind.shared else f"own-{number}"
        extra = {"pegaflow.shm_dir": str(shm_dir), "pegaflow.pool_size": bytes_each, "pegaflow.pool_name": name}
        extra |= more
    return {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@dataclass
class Instance:
    """A child and what it answers."""

    name: str
    log: Path
    process: subprocess.Popen[str]
    seconds_max: float
    started: dict[str, float] = field(default_factory=dict)

    def answer(self) -> Any:
        """The next line, or ``RunFailed``: it is killed when it takes too long."""
        assert self.process.stdout is not None
        timer = threading.Timer(self.seconds_max, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RunFailed(
                f"{self.name} ended early or took more than {self.seconds_max:.0f} s: {last_line(self.log)}"
            )
        return json.loads(line)

    def send(self, wanted: dict[str, Any]) -> None:
        """Say what is wanted; ``answer`` has what comes of it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise RunFailed(f"{self.name} is gone: {last_line(self.log)}") from error

    def wait_ready(self) -> None:
        """Until it serves."""
        self.started = self.answer()

    def ask(self, prompts: Sequence[Sequence[int]], output_tokens: int, at_once: int) -> list[dict[str, Any]]:
        """Requests, and what came of each."""
        self.send({"ask": list(prompts), "output_tokens": output_tokens, "at_once": at_once})
        answers: list[dict[str, Any]] = self.answer()
        return answers

    def metrics(self) -> dict[str, float]:
        """See ``_instance_child``."""
        self.send({"metrics": True})
        sums: dict[str, float] = self.answer()
        return sums

    def digests(self, blocks: int) -> list[list[int]]:
        """A number for the bytes of each block of the GPUs' KV cache, by rank."""
        self.send({"digests": blocks})
        numbers: list[list[int]] = self.answer()
        return numbers

    def kill(self) -> float:
        """kill -9 of all its processes; returns when."""
        when = time.clock_gettime(time.CLOCK_MONOTONIC)
        end_session(self.process)  # type: ignore[arg-type]
        return when


class Instances:
    """Starts them and ends all in the end."""

    def __init__(self, scratch: Path, seconds_max: float, homes: dict[str, Path | None]) -> None:
        self._scratch, self._seconds_max, self._homes = scratch, seconds_max, homes
        self._all: list[Instance] = []

    def __enter__(self) -> "Instances":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            one.kill()

    def environment(self, connector: str, gpus: Sequence[int]) -> dict[str, str]:
        """Of an engine on these GPUs, or on none."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        return environment(self._homes.get(connector)) | visible

    def start(
        self, kind: Kind, engine: dict[str, Any], transfer: dict[str, Any] | None, gpus: Sequence[int]
    ) -> Instance:
        """It is there when ``wait_ready`` returns. ``gpus``: none on a machine without."""
        name = f"{len(self._all) + 1:02}-{kind.name.replace(', ', '-').replace(' ', '-')}"
        settings, log = self._scratch / f"{name}.json", self._scratch / f"{name}.log"
        settings.write_text(json.dumps({"engine": engine, "transfer": transfer}, indent=1))
        print(
            f"{name} on {'GPU ' + ','.join(map(str, gpus)) if gpus else 'CPU'}, log {log}", file=sys.stderr, flush=True
        )
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, str(CHILD), str(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment(kind.connector, gpus),
                start_new_session=True,
            )
        instance = Instance(name, log, process, self._seconds_max)
        self._all.append(instance)
        return instance
