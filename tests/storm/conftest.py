"""What storms change in the process is undone behind them."""

from collections.abc import Iterator

import pytest

import pegaflow.weights


@pytest.fixture(autouse=True, scope="package")
def start_of_the_process() -> Iterator[None]:
    """Storms take their adapters for older than the process (``vllm_objects.adapter``)."""
    before = pegaflow.weights.process_started
    yield
    pegaflow.weights.process_started = before
