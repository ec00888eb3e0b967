"""Look at the built wheel and try it with bare interpreters: ``python tools/wheel_test.py WHEEL [VERSION...]``.

Each interpreter gets a new virtual environment with pip, the wheel and what it asks for, and runs
``tests/wheel_smoke.py``. Without versions: all of ``VERSIONS`` for which there is an interpreter on this machine or to
be had by uv; the others are named in the end. Versions that were asked for have to be there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
WHEEL_BYTES_MAX = 10_000_000
NAME = re.compile(r"pegaflow-[^-]+-cp310-abi3-manylinux_2_(?P<glibc>\d+)_\w+\.whl")
LIBRARY = "pegaflow/_native.abi3.so"
LIBRARIES_ALLOWED = ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2")
SHM_DIR = "/dev/shm"
SECONDS_MAX = 900.0
"""Of each program, however slow a mirror is."""


def problems_of(wheel: Path) -> list[str]:
    """What is wrong with the file itself, a sentence each."""
    name = NAME.fullmatch(wheel.name)
    if name is None:
        return [f"{wheel.name} is no abi3 wheel for manylinux."]
    problems = []
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        problems.append(f"{wheel.name} has {wheel.stat().st_size:,} bytes, at most {WHEEL_BYTES_MAX:,}.")
    with zipfile.ZipFile(wheel) as files:
        library = files.read(LIBRARY)
        boms = [json.loads(files.read(one)) for one in files.namelist() if "/sboms/" in one]
    about = {bom["metadata"]["component"]["purl"].split("/")[0] for bom in boms if bom["bomFormat"] == "CycloneDX"}
    if about != {"pkg:cargo", "pkg:pypi"}:
        problems.append(f"The wheel has SBOMs of {about or 'nothing'}: it needs one of its crates and one for Python.")
    newest = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library))
    if newest > int(name["glibc"]):
        problems.append(f"The library needs glibc 2.{newest}, the wheel's name says 2.{name['glibc']}.")
    if re.search(r"\.(?:debug_info|symtab)\b", shown_by_readelf(library, "--sections")):
        problems.append("The library has debug information or symbols that nobody needs: strip it.")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", shown_by_readelf(library, "--dynamic"))
    others = sorted(set(needed) - set(LIBRARIES_ALLOWED))
    return problems + [f"The library needs {other}, which manylinux does not promise." for other in others]


def shown_by_readelf(library: bytes, what: str) -> str:
    """What binutils say about the library."""
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(library)
        copy.flush()
        command = ["readelf", "--wide", what, copy.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def interpreter(version: str) -> str | None:
    """A program that is Python ``version``: on PATH, of pyenv, or whatever uv has or fetches."""
    candidates = [f"python{version}", *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))]
    if is_python("python3", version):
        candidates.insert(0, "python3")
    for candidate in candidates:
        if is_python(candidate, version):
            return candidate
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        return None
    environ = os.environ | {"UV_PYTHON_INSTALL_DIR": str(ROOT / "build" / "python")}
    with suppress(subprocess.TimeoutExpired):
        install = [uv, "python", "install", "--no-bin", version]
        subprocess.run(install, env=environ, capture_output=True, check=False, timeout=SECONDS_MAX)
    find = [uv, "python", "find", "--managed-python", version]
    found = subprocess.run(find, env=environ, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def is_python(program: str, version: str) -> bool:
    """Whether it runs, and is of this version."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    if shutil.which(program) is None:
        return False
    told = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
    return told.stdout.strip() == version


def works_with(wheel: Path, python: str) -> bool:
    """Install it with pip in a new environment and run the smoke test there."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory(prefix="wheel-test-") as folder, tempfile.TemporaryDirectory(dir=SHM_DIR) as place:
        inside = f"{folder}/venv/bin/python"
        for command in (
            [python, "-m", "venv", f"{folder}/venv"],
            [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel.resolve())],
            [inside, str(ROOT / "tests" / "wheel_smoke.py"), place],
        ):
            try:
                done = subprocess.run(command, cwd=folder, env=environ, check=False, timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired:
                return False
            if done.returncode != 0:
                return False
    return True


def main() -> int:
    """0 if nothing is wrong."""
    wheel, asked = Path(sys.argv[1]), sys.argv[2:]
    problems = problems_of(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    absent, tried = [], 0
    for version in asked or VERSIONS:
        python = interpreter(version)
        if python is None:
            absent.append(version)
            continue
        tried += 1
        works = works_with(wheel, python)
        print(f"Python {version} ({python}): {'works' if works else 'does not work'}", flush=True)
        if not works:
            problems.append(f"It does not work with Python {version} ({python}).")
    if absent:
        print(f"not tried, for want of an interpreter: Python {', '.join(absent)}")
    if (asked and absent) or not tried:
        problems.append("Not every version that was asked for could be tried.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
