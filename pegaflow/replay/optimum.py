"""The best that any cache of a size could have found, knowing all requests to come (Belady's rule): what is needed
latest goes, and what is never needed again is not kept. A block is needed no later than the next one of its prompt, so
what stays is a prefix by itself."""

import heapq
from collections.abc import Sequence

from pegaflow.replay.trace import Prompt

NEVER = 1 << 62


def best_hits(prompts: Sequence[Prompt], blocks_max: int) -> int:
    """Blocks found over all prompts."""
    needed = _next_uses(prompts)
    kept: dict[int | str, tuple[int, int]] = {}
    queue: list[tuple[tuple[int, int], int, int | str]] = []
    hits = pushed = 0
    for number, prompt in enumerate(prompts):
        hits += next((at for at, block in enumerate(prompt) if block not in kept), len(prompt))
        for position, block in enumerate(prompt):
            due = needed[number][position]
            if due == NEVER:
                kept.pop(block, None)
                continue
            kept[block] = (-due, -position)
            pushed += 1
            heapq.heappush(queue, (kept[block], pushed, block))
        while len(kept) > blocks_max:
            order, _, block = heapq.heappop(queue)
            if kept.get(block) == order:
                del kept[block]
    return hits


def _next_uses(prompts: Sequence[Prompt]) -> list[list[int]]:
    """For each block of each prompt, the number of the prompt that has it next."""
    last: dict[int | str, int] = {}
    uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([last.get(block, NEVER) for block in prompts[number]])
        last.update(dict.fromkeys(prompts[number], number))
    return uses[::-1]
