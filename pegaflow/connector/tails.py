"""Tails: the last block of a prompt that the prompt does not fill, saved and loaded like a full one.

A tail's key is what vLLM's hash function gives for the tokens that it holds. Other tokens or another number of them
have another key, and no full block can have the same one. The slot holds the whole block; what lies behind the prompt's
last token is of no meaning, and nobody counts it as computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegaflow.connector.geometry import Geometry, GroupKind

if TYPE_CHECKING:
    from pegaflow.connector.request_state import RequestState

TAIL_TOKENS_MIN = 2
"""Shorter tails save nothing: vLLM computes the last token of a prompt in any case."""

NEVER = 1 << 62
"""Tokens that no request has."""

HashTokens = Callable[[Any, int, int, bytes | None], bytes]
"""vLLM's hash of a request's tokens ``start <= token < stop``, given the hash of what is before them."""


@dataclass(frozen=True)
class Tail:
    """The tail of one prompt."""

    block: int
    """Position in the block table."""
    prompt_tokens: int
    key: bytes
    parent: bytes | None
    """Key of the block before it."""


class Tails:
    """What is done about tails in one engine."""

    def __init__(self, geometry: Geometry, hash_tokens: HashTokens | None, *, save: bool, load: bool) -> None:
        """``hash_tokens`` ``None``: there are no tails."""
        plain = len(geometry.groups) == 1 and geometry.groups[0].kind is GroupKind.FULL and not geometry.drafts
        self.possible = plain and hash_tokens is not None
        """Whether this model's prompts can go on from the middle of a block."""
        self._hash_tokens = hash_tokens
        self._save = save and self.possible
        self._load = load and self.possible
        if self.possible:
            self._block_tokens = geometry.groups[0].block_tokens
            self._hashes_per_block = geometry.groups[0].hashes_per_block

    def to_save(self, state: "RequestState", computed_tokens: int) -> Tail | None:
        """The request's tail if it is computed and was not looked at yet."""
        if not self._save or state.tail_looked_at or computed_tokens < int(state.request.num_prompt_tokens):
            return None
        return self._of(state)

    def nothing_before(self, state: "RequestState", computed_tokens: int) -> int:
        """Given that there is no tail to save after ``computed_tokens``: after how many there may be one."""
        prompt_tokens = int(state.request.num_prompt_tokens)
        waits = self._save and not state.tail_looked_at and computed_tokens < prompt_tokens
        return prompt_tokens if waits else NEVER

    def to_load(self, state: "RequestState") -> Tail | None:
        """The request's tail, as long as the sequence has not filled the block."""
        tail = self._of(state) if self._load else None
        if tail is None or int(state.request.num_tokens) >= (tail.block + 1) * self._block_tokens:
            return None
        return tail

    def _of(self, state: "RequestState") -> Tail | None:
        if not state.tail_known:
            state.tail = self._find(state)
            state.tail_known = True
        return state.tail

    def _find(self, state: "RequestState") -> Tail | None:
        request = state.request
        prompt_tokens = int(request.num_prompt_tokens)
        block, tokens = divmod(prompt_tokens, self._block_tokens)
        if tokens < TAIL_TOKENS_MIN or self._hash_tokens is None:
            return None
        hashes = request.block_hashes
        # Where vLLM hashes pieces of a block, the whole ones among the tail's have their hash already.
        hash_tokens = self._block_tokens // self._hashes_per_block
        whole = prompt_tokens // hash_tokens
        key = hashes[whole - 1] if whole else None
        if prompt_tokens % hash_tokens:
            key = self._hash_tokens(request, whole * hash_tokens, prompt_tokens, key)
        assert key is not None
        parent = bytes(hashes[block * self._hashes_per_block - 1]) if block else None
        return Tail(block, prompt_tokens, state.key_of(bytes(key)), parent and state.key_of(parent))
