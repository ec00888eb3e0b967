"""Request traces: one JSON object a line, with the hashes of the prompt's blocks in ``hash_ids``.

That is the form in which traces of serving systems are published: each hash stands for a block of tokens and all that
is before it, so equal hashes mean equal prefixes.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pegaflow.errors import InvalidArgument

REQUESTS_MAX = 10_000_000
"""Lines of a trace."""

BLOCKS_MAX = 1_000_000
"""Blocks of one request."""

Prompt = Sequence[int | str]
"""Hashes of the blocks of one prompt, in order."""


def read_trace(path: Path) -> list[Prompt]:
    """Prompts in the order of their arrival. Raises ``InvalidArgument`` with the line that is no request."""
    return list(_prompts(path))


def distinct_blocks(prompts: Sequence[Prompt]) -> int:
    """How many blocks a cache that finds all would hold in the end."""
    return len({block for prompt in prompts for block in prompt})


def _prompts(path: Path) -> Iterator[Prompt]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if number > REQUESTS_MAX:
                raise InvalidArgument(f"{path} has more than {REQUESTS_MAX:,} lines: replay a part of it.")
            if line.strip():
                yield _prompt(path, number, line)


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        blocks = json.loads(line)["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError):
        blocks = None
    if not isinstance(blocks, list) or not all(type(block) in (int, str) for block in blocks):
        raise InvalidArgument(
            f"{path}, line {number}: each line has to be a JSON object with the hashes of a prompt's blocks as a list "
            f'"hash_ids" of numbers or strings.'
        )
    if len(blocks) > BLOCKS_MAX:
        raise InvalidArgument(f"{path}, line {number}: a prompt of more than {BLOCKS_MAX:,} blocks.")
    return blocks
