"""The connector's halves on two real pools: what one engine has computed comes to the other over a real connection."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pegaflow.connector import peer_watch
from tests.engine_races import PROMPT, STEPS_MAX, random_events
from tests.patience import await_
from tests.real_peers import asking, served
from tests.unit.mini_engine import EVERY_KIND, HYBRID, SINGLE
from tests.unit.native_engine import engine_on, finish, leases, open_pool

TEXT = list(range(700, 742))
TRIES = range(1_000, 1_050)
"""First tokens of as many prompts: a peer that got no processor for a while costs a miss, and then there is another
try."""


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Pools of two hosts."""
    made = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        made.append(open_pool(str(tmp_path / name)))
    yield made[0], made[1]
    for pool in made:
        pool.close()


@pytest.fixture
def connected(pools: tuple[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """``(pool here, pool there, connections from here to there)``."""
    here, there = pools
    with ExitStack() as stack:
        address, _ = stack.enter_context(served(there))
        yield here, there, stack.enter_context(asking(here, address))


def is_up(peers: Any) -> bool:
    return bool(peers.facts()[0]["state"] == "up")


def computed_on(pool: Any, prompt: list[int], geometry: Any = SINGLE, **options: Any) -> None:
    engine = engine_on(pool, geometry, blocks=400, **options)
    engine.add(prompt)
    finish(engine)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_prompt_comes_from_the_other_pool_to_the_byte(connected: tuple[Any, Any, Any], kind: str) -> None:
    here, there, peers = connected
    for first in TRIES:
        text = [first, *TEXT[1:]]
        computed_on(there, text, EVERY_KIND[kind])
        await_(lambda: is_up(peers))
        engine = engine_on(here, EVERY_KIND[kind], blocks=400, peers=peers)
        request = engine.add(text)
        engine.run(STEPS_MAX)
        if request.hit_tokens == EVERY_KIND[kind].hit_tokens_max(len(TEXT)):
            break
    assert engine.recorder.counters["hit_tokens_peer"] == request.hit_tokens > 0
    again = engine.add(text)
    finish(engine)
    assert engine.recorder.counters["hit_tokens_ram"] == again.hit_tokens == request.hit_tokens
    await_(lambda: leases(there) == 0)


def test_tail_comes_too_and_decode_waits_for_prefill(connected: tuple[Any, Any, Any]) -> None:
    here, there, peers = connected
    waits = {"wait_for_full_prefix": True, "wait_for_full_prefix_seconds": 600.0, "pd_tail_load": True}
    for first in TRIES:
        text = [first, *TEXT[1:]]
        prefill = engine_on(there, blocks=400, pd_tail_save=True)
        decode = engine_on(here, blocks=400, peers=peers, **waits)
        request = decode.add(text)
        for _ in range(50):
            decode.step()
        assert request.state == "waiting"
        prefill.add(text)
        finish(prefill)
        finish(decode)
        assert "full_prefix_incomplete" not in decode.recorder.counters
        if request.hit_tokens == len(TEXT):
            break
    assert request.hit_tokens == len(TEXT)


def test_peer_that_is_gone_ends_the_wait(pools: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pools
    with ExitStack() as stack:
        address, server = stack.enter_context(served(there))
        peers = stack.enter_context(asking(here, address))
        decode = engine_on(here, blocks=400, peers=peers, wait_for_full_prefix=True, wait_for_full_prefix_seconds=600.0)
        request = decode.add(TEXT)
        for _ in range(50):
            decode.step()
        assert request.state == "waiting"
        server.close()
        monkeypatch.setattr(peer_watch, "GRACE_SECONDS", 0.0)
        decode.scheduler._loads._watch._alive_until = 0.0
        finish(decode)
        assert request.hit_tokens == 0
        assert decode.recorder.counters["full_prefix_incomplete"] == 1


def test_server_that_went_away_in_between_costs_a_miss(pools: tuple[Any, Any]) -> None:
    here, there = pools
    computed_on(there, TEXT)
    with ExitStack() as stack:
        address, server = stack.enter_context(served(there))
        peers = stack.enter_context(asking(here, address))
        server.close()
        engine = engine_on(here, blocks=400, peers=peers)
        request = engine.add(TEXT)
        finish(engine)
        assert request.hit_tokens == 0
        # Another process of that pool takes over under the same address.
        stack.enter_context(served(there, address))
        await_(lambda: is_up(peers))
        later = engine_on(here, blocks=400, peers=peers)
        request = later.add([*TEXT, 1, 2, 3])
        finish(later)
        assert later.recorder.counters["hit_tokens_ram"] == 40, "computed here meanwhile"


def test_other_weights_are_other_blocks(connected: tuple[Any, Any, Any]) -> None:
    here, there, peers = connected
    computed_on(there, TEXT)
    engine = engine_on(here, HYBRID, blocks=400, peers=peers)
    request = engine.add(TEXT)
    finish(engine)
    assert request.hit_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_events_beside_a_peer_leaves_nothing_behind(connected: tuple[Any, Any, Any], seed: int) -> None:
    here, there, peers = connected
    computed_on(there, PROMPT)
    computed_on(there, TEXT)
    random_events(partial(engine_on, here, peers=peers), seed, finish=finish)
    await_(lambda: leases(there) == 0)
