"""A vLLM engine as a child process: start it, ask it, kill -9 all of it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_WAIT_S_MAX = 900.0
ANSWER_WAIT_S_MAX = 600.0
DEATH_WAIT_S_MAX = 30.0
LOG_LINES_SHOWN = 25
SHM = Path("/dev/shm")

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""One seed for all engines, so that all versions of vLLM name the same block by the same hash."""

COMPUTING = sorted(os.sched_getaffinity(0))
"""Which cores compute, in all engines alike: left to itself vLLM takes others once a connector is set."""

CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable for them."""


class EngineError(Exception):
    """The engine did not start or did not answer."""


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int
    text: str


class Engine:
    """One engine with all its processes; a context manager that leaves none of them behind."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        logs: Path,
        *,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the processes and return at once; see ``wait_ready``. ``command``: what to start them with.
        ``environment``: what they have besides."""
        self.name = name
        self.log = logs / f"{name}.log"
        cores = {CORES: ",".join(map(str, COMPUTING))}
        whole = os.environ | ENVIRONMENT | cores | dict(environment or {})
        if Path(settings["model"]).is_dir():
            whole["HF_HUB_OFFLINE"] = "1"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-m", "demo.worker", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=whole,
                start_new_session=True,  # so that the whole engine can be killed as one process group
            )
        self._unread = b""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_ready(self) -> None:
        """Wait until the engine has served its first, unmeasured request."""
        self._answer(START_WAIT_S_MAX)

    def ask(self, text: str, tokens: int) -> Answer:
        """Continue ``text`` by ``tokens`` tokens."""
        return Answer(**self._call({"do": "ask", "text": text, "tokens": tokens}))

    def reset(self) -> None:
        """Make vLLM forget its own prefix cache. Raises ``EngineError`` if it refuses."""
        if not self._call({"do": "reset"})["reset"]:
            raise EngineError(f"engine {self.name} did not reset its prefix cache, see {self.log}")

    def processes(self) -> list[int]:
        """Process ids of all that belongs to this engine and is not dead."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(pid)]

    def kill(self) -> int:
        """kill -9 every process of the engine at once; returns how many there were."""
        victims = self.processes()
        scratch = shared_scratch_of(victims)
        if victims:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + DEATH_WAIT_S_MAX
        while self.processes():
            if time.monotonic() > deadline:
                raise EngineError(f"processes {self.processes()} of engine {self.name} outlived kill -9")
            time.sleep(0.02)
        for path in scratch:
            path.unlink(missing_ok=True)
        return len(victims)

    def tell_to_close(self) -> None:
        """Ask the engine to end in good order; see ``wait_closed``."""
        self._send({"do": "close"})

    def wait_closed(self) -> None:
        """Wait for the end. Raises ``EngineError`` if it takes too long."""
        try:
            self._process.wait(DEATH_WAIT_S_MAX)
        except subprocess.TimeoutExpired:
            raise EngineError(f"engine {self.name} did not end when told to, see {self.log}") from None

    def _owns(self, pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        # The name in parentheses may hold spaces; after it come state, parent and process group.
        state, _, group = stat.rpartition(")")[2].split()[:3]
        return int(group) == self._process.pid and state not in "ZX"

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        return self._answer(ANSWER_WAIT_S_MAX)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, wait_s_max: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        answers = self._process.stdout.fileno()
        deadline = time.monotonic() + wait_s_max
        while b"\n" not in self._unread:
            readable, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(answers, 1 << 16) if readable else b""
            if not chunk:
                what = "ended" if readable else f"was silent for {wait_s_max:.0f} s"
                raise EngineError(f"engine {self.name} {what}; the end of {self.log}:\n{self._log_end()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def close_all(*engines: Engine) -> None:
    """End engines in good order, all at once."""
    for engine in engines:
        engine.tell_to_close()
    for engine in engines:
        engine.wait_closed()


def shared_scratch_of(pids: list[int]) -> list[Path]:
    """Message queues and semaphores of these processes in shared memory, which nobody removes after a kill -9. Never
    files of a pool. Compared by inode, since a semaphore is mapped under another name than the one it has later."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHM}/" in line}
    names = [path for path in SHM.iterdir() if path.name.startswith(("psm_", "sem.mp-"))]
    return [path for path in names if path.lstat().st_ino in inodes]
