"""How vLLM cuts a model's KV cache into groups and blocks, in the few numbers that matching and saving need."""

import math
from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """Which earlier blocks a group needs to continue after a prefix."""

    FULL = "full attention"
    """All of them."""
    WINDOW = "sliding window"
    """The last ``window_blocks``."""
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Group:
    """One KV cache group."""

    index: int
    """Position among vLLM's groups; the namespace has the same group number."""
    kind: GroupKind
    block_tokens: int
    hashes_per_block: int
    window_blocks: int = 0
    spec_name: str = ""


@dataclass(frozen=True)
class Geometry:
    """All groups of a model."""

    groups: tuple[Group, ...]
    whole_prompt: bool = False
    """Whether a hit may cover a prompt to its last token. vLLM then recomputes that token in place, which is sound
    only if no group drops blocks that the token's window still needs."""
    lookahead: bool = False
    """Whether a drafter's layers are cached too. Theirs lag one token behind: the last block of a hit is dropped, and a
    block is saved one token late."""

    @property
    def align_tokens(self) -> int:
        """Hits end at multiples of this many tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups)) if self.groups else 1

    @property
    def problem(self) -> str | None:
        """Why this model cannot be cached, as one sentence."""
        if not self.groups:
            return "the model has no KV cache"
        for group in self.groups:
            if group.kind is GroupKind.UNSUPPORTED:
                return f"KV cache group {group.index} ({group.spec_name}) is of a kind that PegaFlow cannot restore yet"
        return None

    def group(self, index: int) -> Group:
        """The group with vLLM's number ``index``."""
        return next(group for group in self.groups if group.index == index)

    def hit_tokens_max(self, tokens: int) -> int:
        """Most tokens that a hit on a sequence of ``tokens`` tokens may cover."""
        usable = tokens if self.whole_prompt else tokens - 1
        return max(0, usable) // self.align_tokens * self.align_tokens
