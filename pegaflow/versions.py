"""Which versions of vLLM are supported, in numbers. What differs between them is in ``connector/compat.py``."""

import re

FIRST = (0, 24)
LAST = (0, 33)
SEED_FIXED = (0, 32)
"""From here on vLLM's sha256 hashes are the same in every process without ``PYTHONHASHSEED``."""

SUPPORTED = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def parse(version: str) -> tuple[int, int] | None:
    """Major and minor number; ``None`` for what has none, such as a build from sources."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def problem(version: str) -> str | None:
    """What is wrong with a version and what to do, as one sentence; ``None`` if it is."""
    parsed = parse(version)
    if parsed is None:
        return f"Supported are {SUPPORTED}."
    if parsed < FIRST:
        return f"Too old to be supported in full: install {SUPPORTED}."
    if parsed > LAST:
        return f"Newer than what was tested: supported are {SUPPORTED}."
    return None
