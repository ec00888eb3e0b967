"""Real vLLM where a fake would only show what we believe of it: adapters, what routers hear, and loads that fail."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.patience import await_
from tests.vllm.engines import BLOCK_TOKENS, EngineProcess, cached_of, connector, prompt, tokens_of

PROMPTS = [prompt(1, 300), prompt(2, 320)]
HITS = [288, 320]
EVENTS_WAIT_MS = 500
MARKS = itertools.count(100)
"""Of prompts that no test has; there are 500 different ones."""

SHORT = prompt(7, 20)
"""Less than a block."""


class Router:
    """Somebody who listens to the KV events of an engine."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def hear_all(self, engine: EngineProcess) -> list[Any]:
        """Events of the connector so far. The last are of a prompt that marks the end."""
        assert engine.ask("reset")  # everything is saved
        mark = prompt(next(MARKS), 64)
        engine.generate([mark], 1)
        return self.hear(engine, lambda events: any(is_of(event, mark) for event in events))

    def hear(self, engine: EngineProcess, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Events of the connector until they are ``enough``; they come with steps of the engine."""
        events: list[Any] = []

        def heard() -> bool:
            engine.generate([SHORT], 1)
            while not enough(events) and self._socket.poll(EVENTS_WAIT_MS):
                batch = self._decode(self._socket.recv_multipart()[2])
                events.extend(event for event in batch.events if getattr(event, "medium", None) == "CPU")
            return enough(events)

        await_(heard)
        return events

    def meet(self, engine: EngineProcess) -> None:
        """Go on until something is heard: what a publisher says before its subscribers have reached it is lost."""

        def meets() -> bool:
            engine.generate([prompt(next(MARKS), 64)], 1)
            return bool(self._socket.poll(EVENTS_WAIT_MS))

        await_(meets)
        self.hear_all(engine)

    def close(self) -> None:
        self._socket.close(linger=0)


def is_of(event: Any, tokens: list[int]) -> bool:
    """Whether a block of this prompt was stored."""
    return isinstance(event, BlockStored) and tokens[: len(event.token_ids)] == list(event.token_ids)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(endpoint(tmp_path))
    yield made
    made.close()


def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


def publishing(tmp_path: Path) -> dict[str, Any]:
    """Options of an engine that publishes KV events."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint(tmp_path)}
    return {"kv_events_config": events}


def test_adapters_meet_their_own_blocks_and_outputs_are_those_without_a_connector(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], tmp_path: Path, router: Router
) -> None:
    ours, other = ("name", 1, str(models["adapter"])), ("name", 2, str(models["adapter, other weights"]))
    renamed = ("another name", 3, str(models["adapter"]))
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with in_process.engine(models["llama"], **lora) as plain:
        expected = [tokens_of(plain.generate(PROMPTS, 20, adapter=adapter)) for adapter in (None, ours, other)]
    assert len({str(tokens) for tokens in expected}) == 3
    with in_process.engine(models["llama"], pool, **lora, **publishing(tmp_path)) as engine:
        router.meet(engine)
        for adapter, tokens in zip((None, ours), expected, strict=False):
            cold = engine.generate(PROMPTS, 20, adapter=adapter)
            assert (tokens_of(cold), cached_of(cold)) == (tokens, [0, 0])
        assert engine.ask("reset")
        warm = engine.generate(PROMPTS, 20, adapter=ours)
        assert (tokens_of(warm), cached_of(warm)) == (expected[1], HITS)
        heard = router.hear_all(engine)
    stored = [event for event in heard if isinstance(event, BlockStored)]
    assert {event.lora_name for event in stored} == {None, "name"}
    assert {event.block_size for event in stored} == {BLOCK_TOKENS}
    tokens = [
        token for event in stored if event.lora_name and event.parent_block_hash is None for token in event.token_ids
    ]
    assert tokens[: HITS[0]] in (PROMPTS[0][: HITS[0]], PROMPTS[1][: HITS[0]])
    with in_process.engine(models["llama"], pool, **lora) as engine:
        # vLLM's hashes know names and directories, and those of the directory are the same here.
        again = engine.generate(PROMPTS, 20, adapter=ours)
        assert (tokens_of(again), cached_of(again)) == (expected[1], HITS)
        for adapter, tokens_expected in ((other, expected[2]), (renamed, expected[1]), (None, expected[0])):
            answer = engine.generate(PROMPTS, 20, adapter=adapter)
            assert tokens_of(answer) == tokens_expected
            assert cached_of(answer) == (HITS if adapter is None else [0, 0])
        assert not engine.ask("metrics").get("vllm:pega_hook_errors")


def test_router_hears_what_is_stored_and_what_is_reset(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], tmp_path: Path, router: Router
) -> None:
    with in_process.engine(models["gemma3"], pool, **publishing(tmp_path)) as engine:
        router.meet(engine)
        engine.generate(PROMPTS[:1], 2)
        stored = router.hear_all(engine)
        assert {event.group_idx for event in stored} >= {0, 1}
        assert {event.kv_cache_spec_kind for event in stored} >= {"full_attention", "sliding_window"}
        assert all(isinstance(event, BlockStored) for event in stored)
        assert engine.ask("reset", connector=True)
        hashes = names_of(stored)
        removed = router.hear(engine, lambda events: names_of(events) >= hashes)
    assert any(isinstance(event, BlockRemoved) for event in removed)
    # Of the prompt that marked the end of the others perhaps, in another group.
    late = [event for event in removed if not isinstance(event, BlockRemoved)]
    assert not names_of(late) & hashes


def names_of(events: list[Any]) -> set[tuple[int, Any]]:
    """Group and hash of each block."""
    return {(event.group_idx, name) for event in events for name in event.block_hashes}


def test_engine_that_pauses_leaves_its_blocks_to_others(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any]
) -> None:
    with in_process.engine(models["llama"], pool) as engine:
        engine.generate(PROMPTS, 2)
        engine.ask("pause")
        assert cached_of(engine.generate(PROMPTS, 2)) == [0, 0]
    with in_process.engine(models["llama"], {**pool, "keep_on_sleep": True}) as engine:
        assert cached_of(engine.generate(PROMPTS, 2)) == HITS
        engine.ask("pause")
        assert cached_of(engine.generate(PROMPTS, 2)) == HITS


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_with_the_policy_fail_a_block_that_cannot_be_loaded_ends_its_request_and_no_other(
    in_process: EngineProcess, models: dict[str, Path], pool: dict[str, Any], name: str
) -> None:
    transfer = {**connector(pool), "kv_load_failure_policy": "fail"}
    with in_process.engine(models[name], kv_transfer_config=transfer) as engine:
        expected = tokens_of(engine.generate(PROMPTS, 20))
        assert engine.ask("reset")
        damage(pool)
        failed = engine.generate([*PROMPTS, prompt(3, 100)], 20)
        assert [answer["reason"] for answer in failed] == ["error", "error", "length"]
        again = engine.generate(PROMPTS, 20)
        assert (tokens_of(again), cached_of(again)) == (expected, [0, 0])
        assert engine.ask("metrics")["vllm:pega_load_failure"] == 2


def damage(pool: dict[str, Any]) -> None:
    """Flip bits in every block."""
    for segment in Path("/dev/shm").glob(f"*{pool['pool_name']}*/*seg*"):
        damaged = bytearray(segment.read_bytes())
        damaged[::509] = bytes(byte ^ 0xFF for byte in damaged[::509])
        with segment.open("r+b") as file:
            file.write(damaged)
