"""How close do writing and reading blocks on SSD come to the disk itself, and how long does recovery take?"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._common import Result, finish, note

TOTAL_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20
# On disk, header included; so that one read is one operation of fio's block size.
RECORD_BYTES = CHUNK_BYTES
DEPTH = 8
ROUNDS = 3
RECORDS = 1_000_000
BUILD = ("cargo", "build", "--release", "--locked", "--quiet", "--package", "pegaflow-engine", "--example", "ssd-speed")
PROGRAM = Path("target/release/examples/ssd-speed")
BACKENDS = {"uring": "io_uring", "threads": "psync"}
AIM_SECONDS = {"clean stop": 2.0, "crash": 10.0}


def run(*arguments: str) -> dict[str, float]:
    """One run of the program; what it prints."""
    done = subprocess.run([str(PROGRAM), *arguments], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def fio(place: Path, way: str, engine: str) -> float | None:
    """GB/s of raw writes or reads of one file; ``None`` without fio."""
    if shutil.which("fio") is None:
        return None
    if way == "write":
        # Both write to space that was claimed and never written.
        (place / "raw").unlink(missing_ok=True)
    # Threads have one operation each.
    jobs, depth = (DEPTH, 1) if engine == "psync" else (1, DEPTH)
    share = TOTAL_BYTES // jobs
    arguments = [
        "fio", "--name=raw", f"--filename={place / 'raw'}", f"--rw={way}", f"--bs={CHUNK_BYTES}", f"--iodepth={depth}",
        f"--ioengine={engine}", "--direct=1", f"--size={share}", f"--numjobs={jobs}", f"--offset_increment={share}",
        "--group_reporting", "--output-format=json", "--thread", "--fallocate=posix",
    ]  # fmt: skip
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[way]["bw_bytes"]) / 1e9


def pool(*arguments: str) -> dict[str, float]:
    """The same through a pool and its leader; what the process prints."""
    command = [sys.executable, "-m", "benchmarks._ssd_pool_child", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def moves(place: Path) -> list[Result]:
    """Spill and prefetch by both back-ends, of a store alone and through a pool, in turns with fio; the best of all
    rounds, since disks have neighbours."""
    best: dict[tuple[str, str, str], float] = {}
    totals = (str(TOTAL_BYTES), str(RECORD_BYTES))
    for _ in range(ROUNDS):
        for backend, engine in BACKENDS.items():
            for ours, raw in (("spill", "write"), ("prefetch", "read")):
                note(f"{ours} by {backend} ...")
                speed = fio(place, raw, engine)
                if speed is not None:
                    best[ours, backend, "fio"] = max(speed, best.get((ours, backend, "fio"), 0.0))
                if ours == "spill":
                    for file in place.glob("pegaflow-ssd-*"):
                        file.unlink()
                answers = {
                    "": run(ours, str(place), backend, *totals, str(CHUNK_BYTES), str(DEPTH)),
                    " through the pool": pool(ours, str(place), backend, *totals, str(DEPTH)),
                }
                for how, answer in answers.items():
                    if answer["gb_per_s"] > best.get((ours + how, backend, "ours"), 0.0):
                        best[ours + how, backend, "ours"] = answer["gb_per_s"]
                        best[ours + how, backend, "cpu"] = answer["cpu_s_per_gb"]
    results = []
    for ours in ("spill", "prefetch"):
        for backend in BACKENDS:
            raw_speed = best.get((ours, backend, "fio"))
            reference = None if raw_speed is None else f"fio, {BACKENDS[backend]}"
            for how in ("", " through the pool"):
                name = f"{ours}{how}, {backend}"
                results.append(Result(name, best[ours + how, backend, "ours"], "GB/s", reference, raw_speed))
                results.append(Result(f"{name}, CPU", best[ours + how, backend, "cpu"], "s/GB"))
    return results


def recovery(place: Path) -> list[Result]:
    """A million records, after a clean stop and after a crash."""
    results = []
    for how, fill in (("clean stop", "fill-clean"), ("crash", "fill-crash")):
        note(f"recovery after a {how} ...")
        for file in place.iterdir():
            file.unlink()
        run(fill, str(place), str(RECORDS))
        answer = run("recover", str(place), str(RECORDS))
        if answer["records"] != RECORDS:
            raise SystemExit(f"{answer['records']} of {RECORDS} records were found after a {how}.")
        name = f"recovery of {RECORDS:,}, {how}"
        results.append(Result(name, answer["seconds"], "s", "aim", AIM_SECONDS[how]))
        results.append(Result(f"memory per record, {how}", answer["bytes_per_record"], "bytes"))
    return results


def main() -> None:
    """Run, print, write. ``PEGAFLOW_SSD_DIR`` names a directory on the disk; default: below ``build``."""
    subprocess.run(BUILD, check=True)
    if shutil.which("fio") is None:
        note("fio is not installed: nothing to compare with")
    base = Path(os.environ.get("PEGAFLOW_SSD_DIR", "build"))
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ssd-bench-", dir=base) as folder:
        place = Path(folder)
        results = moves(place) + recovery(place)
    finish("ssd", results)


if __name__ == "__main__":
    main()
