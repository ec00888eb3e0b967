"""What does a pool lose while the disk of its SSD tier fails, or hangs?"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._common import Result, finish, median, note, pool_place

PLACE = Path(os.environ.get("PEGAFLOW_SSD_DIR", "build"))
SHM_BYTES = 2 * (256 << 20)
READY_SECONDS_MAX = 30.0
WARM_ROUNDS = 10
ROUNDS = 600
HANG_SECONDS = 9.0
"""Of rounds beside a disk that hangs: at ten seconds the tier gives it up."""


class Child:
    """A process that does rounds on a pool of its own."""

    def __init__(self, shm_dir: Path, ssd_dir: Path | None = None, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks._dead_disk_child", str(shm_dir)]
        command += [str(ssd_dir)] if ssd_dir else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )

    def ask(self, what: str) -> str:
        """One line for another."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise SystemExit("A process of the benchmark ended early.")
        return answer

    def round(self) -> float:
        """Seconds."""
        return float(self.ask("round"))

    def wait_for(self, state: str) -> None:
        """Until the tier is in ``state``."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        while self.ask("state") != state:
            if time.monotonic() > deadline:
                raise SystemExit(f"The SSD tier did not get to be {state}.")
            time.sleep(0.05)


@contextmanager
def child(stack: ExitStack, *arguments: object, **environment: str) -> Iterator[Child]:
    """A process that is killed in the end: one that hangs in the kernel's stead does not end by itself."""
    place = stack.enter_context(pool_place(SHM_BYTES))
    made = Child(place, *arguments, environment)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def library(place: Path) -> Path:
    """The shim that kills disks, compiled."""
    path = place / "dead_disk.so"
    source = Path(__file__).with_name("_dead_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", path, source, "-ldl"], check=True)
    return path


def compare(name: str, place: Path, shim: Path, seconds_max: float | None, **how: str) -> list[Result]:
    """Rounds beside a disk that dies, in turns with rounds of a pool without one."""
    note(f"{name} ...")
    ssd, trigger = place / name.replace(" ", "-"), place / f"{name.replace(' ', '-')}.trigger"
    ssd.mkdir()
    preload = {"LD_PRELOAD": str(shim.resolve()), "DEAD_DISK_TRIGGER": str(trigger.resolve())} | how
    with ExitStack() as stack:
        plain = stack.enter_context(child(stack))
        dying = stack.enter_context(child(stack, ssd, **preload))
        dying.wait_for("serving")
        for _ in range(WARM_ROUNDS):
            plain.round()
            dying.round()
        if name != "disk works":
            trigger.touch()
        seconds: tuple[list[float], list[float]] = ([], [])
        started = time.monotonic()
        while len(seconds[0]) < ROUNDS if seconds_max is None else time.monotonic() - started < seconds_max:
            # Neither is always the second, which finds the processor's cache full of the other's bytes.
            for which in (0, 1) if len(seconds[0]) % 2 else (1, 0):
                seconds[which].append((dying, plain)[which].round())
        state = dying.ask("state")
    note(f"{name}: {len(seconds[0])} rounds in turns; in the end the tier was {state}")
    return [
        Result(f"save and load 128 blocks, {name}", 1e3 * median(seconds[0]), "ms", "no SSD", 1e3 * median(seconds[1]))
    ]


def main() -> None:
    """Run it and report."""
    PLACE.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="dead-disk-", dir=PLACE))
    try:
        shim = library(place)
        results = compare("disk works", place, shim, None)
        results += compare("every operation fails", place, shim, None)
        results += compare("no operation ends", place, shim, HANG_SECONDS, DEAD_DISK_HANGS="1")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    finish("dead_disk", results)


if __name__ == "__main__":
    main()
