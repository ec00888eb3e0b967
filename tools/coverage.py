"""Lines of the pool that its tests of crashes, models and hostile bytes run: ``make coverage``.

Counters live in files that the processes map, so those that are killed count too. Needs ``rustup component add
llvm-tools``. Writes ``build/coverage.json`` and prints the same, with the lines that nothing came to.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "build" / "coverage"
RESULT = ROOT / "build" / "coverage.json"
FOLDER = "rust/engine/src/shm"
TARGET = "target/coverage"
FLAGS = "-Cinstrument-coverage -Cllvm-args=-runtime-counter-relocation"
TESTS = ("containers", "crash", "hammer", "model", "model_processes", "resets", "shares", "soak")
LINES_LISTED_MAX = 40


def llvm_tool(name: str) -> str:
    """Path of a program of the toolchain's LLVM."""
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = next(line.partition(": ")[2] for line in version.splitlines() if line.startswith("host: "))
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    path = Path(sysroot) / "lib" / "rustlib" / host / "bin" / name
    if not path.exists():
        sys.exit(f"{name} is missing: rustup component add llvm-tools")
    return str(path)


def run_tests() -> list[str]:
    """Run them all, instrumented. Returns the programs that ran."""
    faults = sorted(path.stem for path in (ROOT / "rust/engine/tests").glob("faults_*.rs"))
    tests = [word for name in (*TESTS, *faults) for word in ("--test", name)]
    command = ["cargo", "test", "--locked", "--package", "pegaflow-engine", "--target-dir", TARGET, *tests]
    shutil.rmtree(PROFILES, ignore_errors=True)
    PROFILES.mkdir(parents=True)
    env = os.environ | {"RUSTFLAGS": FLAGS, "LLVM_PROFILE_FILE": str(PROFILES / "%m%c.profraw")}
    built = subprocess.run(
        [*command, "--no-run", "--message-format=json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    ).stdout
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    messages = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    return [message["executable"] for message in messages if message.get("executable")]


def merged_profile() -> Path:
    """One profile of all that ran."""
    merged = PROFILES / "all.profdata"
    files = [str(path) for path in PROFILES.glob("*.profraw")]
    subprocess.run([llvm_tool("llvm-profdata"), "merge", "--sparse", "-o", str(merged), *files], check=True)
    return merged


def covered(programs: list[str]) -> list[dict[str, Any]]:
    """What was come to, file by file."""
    profile = merged_profile()
    objects = [word for program in programs[1:] for word in ("--object", program)]
    command = [llvm_tool("llvm-cov"), "export", "--format=text", f"--instr-profile={profile}", programs[0], *objects]
    exported = subprocess.run([*command, FOLDER], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return sorted(json.loads(exported)["data"][0]["files"], key=lambda file: str(file["filename"]))


def lines_missed(file: dict[str, Any]) -> list[int]:
    """Lines at which a region begins that nothing came to."""
    regions = [segment for segment in file["segments"] if segment[3] and segment[4] and not segment[5]]
    return sorted({line for line, _, count, *_ in regions if count == 0})


def main() -> None:
    """Run, print, write."""
    files = covered(run_tests())
    rows, total, hit = {}, 0, 0
    for file in files:
        name = Path(file["filename"]).name
        lines = file["summary"]["lines"]
        total, hit = total + lines["count"], hit + lines["covered"]
        rows[name] = {"lines": lines["count"], "covered": lines["covered"], "missed": lines_missed(file)}
        missed = " ".join(map(str, rows[name]["missed"][:LINES_LISTED_MAX]))
        print(f"{name:<20}{lines['covered']:>5} of {lines['count']:>5}  {lines['percent']:5.1f} %  {missed}")
    if total == 0:
        sys.exit("No line was counted: do the compiler and llvm-tools belong together?")
    print(f"{'all':<20}{hit:>5} of {total:>5}  {100 * hit / total:5.1f} %")
    RESULT.write_text(json.dumps({"lines": total, "covered": hit, "files": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
