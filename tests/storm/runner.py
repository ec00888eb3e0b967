"""The model runner of one rank, without a model: it keeps tables as vLLM's does, reads what attention would read and
writes what the tokens say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.storm.plan import EnginePlan
from tests.storm.texts import Numbers, Text
from tests.storm.vllm_objects import layer_names

NEVER_WRITTEN = np.uint64(0xEEEEEEEEEEEEEEEE)


class WrongBytes(AssertionError):
    """The model would have read something else than it should."""


@dataclass
class Running:
    """A request as the model runner knows it."""

    text: Text
    tables: list[list[int]]
    tokens: int
    """How many are known."""


@dataclass(frozen=True)
class Chunk:
    """What one step computes of one request: positions ``start <= position < stop``."""

    name: str
    running: Running
    start: int
    stop: int


class Runner:
    """One rank."""

    def __init__(
        self, plan: EnginePlan, rank: int, connector: Any, texts: Callable[[str], Text], failed_late: set[int]
    ) -> None:
        """``texts``: of each request. ``failed_late``: blocks that were lost after vLLM was told to go on."""
        self.plan, self.rank, self.connector, self._texts, self._failed_late = plan, rank, connector, texts, failed_late
        self._misread = ""
        self.weights = f"weights {plan.model.seed}"
        self.running: dict[str, Running] = {}
        self.compared = 0
        layers, blocks, tokens = plan.model.layers, plan.blocks, plan.model.groups[0].block_tokens
        outer = (blocks, layers) if plan.model.block_outermost else (layers, blocks)
        # All groups share the memory, as vLLM has it: a block belongs to one of them at a time.
        self._backing = torch.zeros((*outer, 1, tokens, 4 * plan.model.width), dtype=torch.bfloat16)
        by_layer = self._backing.transpose(0, 1) if plan.model.block_outermost else self._backing
        self.caches = {
            name: by_layer[layer]
            for group in range(len(plan.model.groups))
            for layer, name in enumerate(layer_names(plan, group))
        }
        numbers = self._backing.view(torch.int64).numpy().view(np.uint64).reshape((*outer, tokens, plan.model.width))
        self._memory: Numbers = numbers.transpose(1, 0, 2, 3) if plan.model.block_outermost else numbers
        self._memory[:] = NEVER_WRITTEN

    def forget(self) -> None:
        """The caches were unmapped."""
        self._memory[:] = NEVER_WRITTEN

    def run(self, step: Any, config: Any) -> ModelRunnerOutput:
        """Execute one step as vLLM's model runner does."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            for name in step.finished_req_ids:
                self.running.pop(name, None)
            self.connector.handle_preemptions(step.kv_connector_metadata)
            chunks = self._take(step)
            if not chunks:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(step, config)
            with (
                set_forward_context(None, config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as transfers,
            ):
                self._forward(chunks)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        if self._misread:
            raise WrongBytes(f"vLLM was not kept from going on: {self._misread}")
        names = [chunk.name for chunk in chunks]
        tokens = [self._sample(chunk) for chunk in chunks]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=transfers,
        )

    # -- tables -------------------------------------------------------------------------------------------------------

    def _take(self, step: Any) -> list[Chunk]:
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            text = self._texts(new.req_id)
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.running[new.req_id] = Running(text, [list(ids) for ids in new.block_ids], len(known))
            computed[new.req_id] = new.num_computed_tokens
            self._wipe(self.running[new.req_id].tables, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            running = self.running[name]
            computed[name] = cached.num_computed_tokens[index]
            ids = cached.new_block_ids[index]
            resumed = name in cached.resumed_req_ids
            known = running.text.prompt_tokens + cached.num_output_tokens[index]
            running.tokens = known if resumed else min(running.tokens, known)
            if resumed:
                running.tables = [list(table) for table in ids]
                self._wipe(running.tables, computed[name])
            elif ids is not None:
                self._wipe(ids, 0)
                for table, added in zip(running.tables, ids, strict=True):
                    table.extend(added)
        return [
            Chunk(name, self.running[name], computed[name], computed[name] + count)
            for name, count in step.num_scheduled_tokens.items()
        ]

    def _wipe(self, tables: Any, computed_tokens: int) -> None:
        """Blocks that are new to a request hold anything but what they should."""
        for group, table in zip(self.plan.model.groups, tables, strict=True):
            fresh = [block for block in table[-(-computed_tokens // group.block_tokens) :] if block]
            if fresh:
                self._memory[:, fresh] = NEVER_WRITTEN

    # -- forward pass -------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[Chunk]) -> None:
        for layer in range(self.plan.model.layers):
            for group in range(len(self.plan.model.groups)):
                name = f"group{group}.layer{layer}"
                self.connector.wait_for_layer_load(name)
                if self.plan.model.groups[group].state:
                    for chunk in chunks:
                        self._read(chunk, group, layer)
                    for chunk in chunks:
                        self._write_state(chunk, group, layer)  # in the place of the state before
                    continue
                # Requests of one step may share what one of them computes in it: all write before any reads.
                for chunk in chunks:
                    self._write(chunk, group, layer)
                for chunk in chunks:
                    self._read(chunk, group, layer)
                self.connector.save_kv_layer(name, self.caches[name], None)

    def _places(self, chunk: Chunk, group: int, start: int, stop: int) -> tuple[Any, Any]:
        size = self.plan.model.groups[group].block_tokens
        positions = np.arange(start, stop)
        table = np.asarray(chunk.running.tables[group])
        # A state has one place in its block, whichever token it is of.
        return table[positions // size], positions % size * (not self.plan.model.groups[group].state)

    def _read(self, chunk: Chunk, group: int, layer: int) -> None:
        """See that everything that attention reads is what it should be. What was lost on the way may be read, as
        long as nobody hears what is computed from it."""
        kind = self.plan.model.groups[group]
        start = chunk.start - 1 if kind.state else kind.first_seen(chunk.start)
        if start >= chunk.start or start < 0:
            return
        blocks, offsets = self._places(chunk, group, start, chunk.start)
        found = self._memory[layer, blocks, offsets]
        expected = self._content(chunk, start, chunk.start, group, layer)
        self.compared += len(found)
        wrong = (found != expected).any(axis=1)
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        self._misread = (
            f"{chunk.name}, rank {self.rank}, group {group}, layer {layer}: position {start + at} in block "
            f"{int(blocks[at])} is not what its tokens say ({int(wrong.sum())} of {len(found)} positions; computed "
            f"{chunk.start}, {'never written' if found[at][0] == NEVER_WRITTEN else found[at].tobytes()}; "
            f"table {chunk.running.tables[group]})"
        )
        if not set(blocks[wrong].tolist()) <= self._failed_late:
            raise WrongBytes(self._misread)

    def _write(self, chunk: Chunk, group: int, layer: int) -> None:
        blocks, offsets = self._places(chunk, group, chunk.start, chunk.stop)
        self._memory[layer, blocks, offsets] = self._content(chunk, chunk.start, chunk.stop, group, layer)

    def _write_state(self, chunk: Chunk, group: int, layer: int) -> None:
        blocks, offsets = self._places(chunk, group, chunk.stop - 1, chunk.stop)
        self._memory[layer, blocks, offsets] = self._content(chunk, chunk.stop - 1, chunk.stop, group, layer)

    def _content(self, chunk: Chunk, start: int, stop: int, group: int, layer: int) -> Numbers:
        return chunk.running.text.content(start, stop, self.plan.model.width, self.rank, group, layer, self.weights)

    def _sample(self, chunk: Chunk) -> list[int]:
        running = chunk.running
        if chunk.stop < running.tokens:
            return []
        running.tokens += 1
        return [running.text.tokens[chunk.stop]]
