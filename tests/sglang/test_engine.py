"""SGLang's whole engine on the backend: what one has computed and written, another process loads instead."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang.whole_engine import Answer, remove_leftovers, whole_engine
from tests.sglang.world import KILLED, Setup, in_child

PROMPT = [7 + 3 * number % 450 for number in range(200)]
WHOLE_PAGES = 192
"""Tokens of the prompt that fill pages of 16."""


def answer(setup: Setup) -> Answer:
    """What an engine says that is started for it."""
    with whole_engine(setup) as engine:
        return engine.ask(PROMPT)


def answer_and_die(setup: Setup) -> None:
    """The same, without an orderly end."""
    with whole_engine(setup) as engine:
        engine.ask(PROMPT)
        os.kill(os.getpid(), KILLED)


@pytest.fixture(params=[("page_first_direct", True), ("layer_first", False)], ids=["by address", "as tensors"])
def setup(request: pytest.FixtureRequest, models: dict[str, Path], shm_dir: Path) -> Iterator[Setup]:
    """An engine of a layout that SGLang can copy without kernels of its own."""
    layout, by_address = request.param
    made = Setup(models["one"], shm_dir, layout=layout, by_address=by_address)
    yield made
    remove_leftovers(made)


def test_engine_loads_what_a_killed_one_has_written(setup: Setup) -> None:
    computed = in_child(answer, replace(setup, options=(("pegaflow.pool_name", "reference"),)))
    assert (computed.from_storage, computed.from_host, computed.from_device) == (0, 0, 0)
    in_child(answer_and_die, setup, signalled=KILLED)
    loaded = in_child(answer, setup)
    assert (loaded.from_storage, loaded.from_host, loaded.from_device) == (WHOLE_PAGES, 0, 0)
    assert loaded.kv == computed.kv
    assert loaded.tokens == computed.tokens
