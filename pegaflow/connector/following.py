"""A worker's forward passes behind loads that are still arriving: each layer waits for its own bytes, on the device.

A load may be reported to vLLM as soon as all of it was handed to the device. From then until it is over it is open, and
every forward pass, whoever is in it, is kept behind it layer by layer: before an attention layer runs, vLLM names the
layer, and the stream that it runs on is told to wait for the stage that brings the layer's bytes.
"""

from collections.abc import Sequence
from typing import Protocol

STAGES_MAX = 8
"""Stages of one load. The first layer can start when the first of them is there."""

STAGE_BYTES_AIM = 1 << 20
"""Bytes of one block in a stage, if the block has as many: each block and stage costs a copy."""

STAGE_BYTES_MIN = 64 << 10
"""Bytes of one block in a stage at least; shorter copies do not fill the bus."""

PASSES_MAX = 16
"""Forward passes that name nothing new; then a layer that is still missing is taken to have no name."""


class StagedCopier(Protocol):
    """What a copier has to have so that its loads can be followed."""

    def take_queued(self) -> list[int]:
        """Loads in stages of which all was handed to the device since the last call."""
        ...

    def wait_stage(self, copy: int, stage: int, stream: int) -> None:
        """Let a stream wait for a stage of a load."""
        ...

    def stream(self) -> int:
        """The stream that the caller's work goes to."""
        ...


def stage_ends(layer_ends: Sequence[int]) -> tuple[int, ...]:
    """Where stages of about equal size end, given where layers end in a block (bytes); empty if a block is
    too small to be cut."""
    ordered = sorted(layer_ends)
    total = ordered[-1] if ordered else 0
    stages = min(STAGES_MAX, max(2, total // STAGE_BYTES_AIM), total // STAGE_BYTES_MIN)
    ends: list[int] = []
    for stage in range(1, stages + 1):
        end = next(end for end in ordered if end * stages >= total * stage)
        if not ends or end > ends[-1]:
            ends.append(end)
    return tuple(ends) if len(ends) > 1 else ()


class Follower:
    """Which layers wait for which stage, and for which loads."""

    def __init__(self, layer_ends: Sequence[tuple[str, int]]) -> None:
        """``layer_ends``: each layer of the model and where its bytes end in a block."""
        self.stage_ends = stage_ends([end for _, end in layer_ends])
        self._stage_of = {
            name: next(stage for stage, stage_end in enumerate(self.stage_ends) if end <= stage_end)
            for name, end in (layer_ends if self.stage_ends else ())
        }
        self._open: dict[int, dict[int, int]] = {}
        self.forget()

    def forget(self) -> None:
        """No layer counts as named any more."""
        self._unseen = set(self._stage_of)
        self._first: str | None = None
        self._passes_left = PASSES_MAX

    @property
    def ready(self) -> bool:
        """Whether loads can be followed: vLLM has been seen to name every layer that has bytes."""
        return bool(self.stage_ends) and not self._unseen

    @property
    def listens(self) -> bool:
        """Whether it matters which layer comes next."""
        return bool(self._open or (self._unseen and self._passes_left))

    def open(self, copy: int) -> None:
        """Forward passes are to stay behind this load from now on."""
        self._open[copy] = {}

    def close(self, copy: int) -> None:
        """The load is over."""
        self._open.pop(copy, None)

    def layer(self, name: str, copier: StagedCopier | None) -> None:
        """An attention layer is about to run. Its stream waits, the caller does not."""
        if self._unseen:
            self._see(name)
        if self._open and copier is not None:
            # A layer that nobody knew of may read anything.
            self._wait(self._stage_of.get(name, len(self.stage_ends) - 1), copier)

    def everything(self, copier: StagedCopier | None) -> None:
        """Work is about to be queued that reads blocks without naming layers."""
        if self._open and copier is not None:
            self._wait(len(self.stage_ends) - 1, copier)

    def _see(self, name: str) -> None:
        """A pass begins with the layer that was the first of all."""
        self._first = self._first or name
        if name in self._unseen:
            self._unseen.discard(name)
            self._passes_left = PASSES_MAX
        elif name == self._first:
            self._passes_left = max(0, self._passes_left - 1)

    def _wait(self, stage: int, copier: StagedCopier) -> None:
        stream = copier.stream()
        for copy, waited in self._open.items():
            # Stages arrive in order, and streams do not forget.
            if stage > waited.get(stream, -1):
                copier.wait_stage(copy, stage, stream)
                waited[stream] = stage
