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
    CHUNK = "chunked local attention"
    """Those of the chunk of ``chunk_tokens`` that the next token is in; none if it is the first of a chunk."""
    STATE = "recurrent state"
    """The last one alone: it holds the state after its last token, which stands for all tokens before. vLLM makes such
    blocks only where it stops computing."""
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
    chunk_tokens: int = 0
    drafts: bool = False
    """Whether a drafter's layers are among it. They look ahead: what they hold of a block's last token depends on the
    token after it. So a hit has to match one block more than it brings."""
    lag_tokens: int = 0
    """How many of the last tokens that were computed a drafter may compute anew."""

    def first_needed(self, stop: int) -> int:
        """The first block that a sequence needs to continue behind block ``stop - 1``."""
        if self.kind is GroupKind.WINDOW:
            return max(0, stop - self.window_blocks)
        if self.kind is GroupKind.CHUNK:
            return stop * self.block_tokens // self.chunk_tokens * self.chunk_tokens // self.block_tokens
        return max(0, stop - 1) if self.kind is GroupKind.STATE else 0

    @property
    def extra_blocks(self) -> int:
        """How many blocks behind its end a hit needs besides."""
        return -(-(self.lag_tokens + 1) // self.block_tokens) if self.drafts else 0


@dataclass(frozen=True)
class Geometry:
    """All groups of a model."""

    groups: tuple[Group, ...]
    whole_prompt: bool = False
    """Whether a hit may cover a prompt to its last token. vLLM then recomputes that token in place, which is sound
    only if no group drops blocks that the token's window still needs."""
    why_unsupported: str | None = None
    """A sentence about groups of a kind that cannot be restored, where there is more to say than their kind."""

    @property
    def drafts(self) -> bool:
        """Whether a drafter's layers are cached too."""
        return any(group.drafts for group in self.groups)

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
                unknown = f"KV cache group {group.index} ({group.spec_name}) is of a kind that PegaFlow cannot restore"
                return self.why_unsupported or unknown
        return None

    def group(self, index: int) -> Group:
        """The group with vLLM's number ``index``."""
        return next(group for group in self.groups if group.index == index)

    def hit_tokens_max(self, tokens: int) -> int:
        """Most tokens that a hit on a sequence of ``tokens`` tokens may cover."""
        usable = tokens if self.whole_prompt else tokens - 1
        for group in self.groups:
            usable = min(usable, (tokens // group.block_tokens - group.extra_blocks) * group.block_tokens)
        return max(0, usable) // self.align_tokens * self.align_tokens
