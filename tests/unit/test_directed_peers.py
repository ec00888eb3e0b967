"""Questions that go by way of a directory: to whom it names, to those that are always asked, and to nobody else."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.connector.guard import Guard
from pegaflow.connector.peer_link import PeerLink
from pegaflow.connector.peer_watch import PeerWatch
from pegaflow.metrics import Recorder
from pegaflow.p2p import directed
from pegaflow.p2p.directed import KEYS_SAMPLED_MAX, NAMED_MAX, OWNERS_MAX, Announcer, DirectedPeers, sample
from tests.engine_races import STEPS_MAX
from tests.patience import await_
from tests.real_peers import asking, served
from tests.unit.native_engine import engine_on, finish, open_pool
from tests.unit.test_connector_peer_link import Parts, config
from tests.unit.test_connector_peers_real import TEXT, computed_on
from tests.unit.test_native_directory import server

TRIES_MAX = 50
BLOCKS_OF_TEXT = len(TEXT) // 4
QUESTIONS = [("space", [b"1", b"2"], True)]
ANSWER = [b"\1\0"]


class Fakes:
    """The connections, the directory, and what was asked of them."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.named: list[str] | None = None
        self.there: list[str] = []
        self.states: dict[str, str] = {}
        self.directory_up = True
        self.connected: set[str] = set()
        self.among: list[list[str]] = []
        self.sampled: list[list[bytes]] = []
        self.closed = 0

    def set_addresses(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)

    def hosts(self) -> list[str]:
        return self.there

    def facts(self) -> list[dict[str, Any]]:
        return [{"address": address, "state": self.states.get(address, "unknown")} for address in self.addresses]

    def find(self, questions: Any, *, among: Sequence[str] | None = None) -> Any:
        if among is None:
            self.sampled = [keys for _, keys in questions]
            return self if self.directory_up else None
        self.among.append(list(among))
        return self if self.connected & set(among) else None

    def best(self, count_max: int) -> list[str] | None:
        assert count_max == OWNERS_MAX
        return self.named

    def poll(self) -> list[bytes]:
        return ANSWER

    def fetch(self, *what: int, parent: bytes | None = None) -> Any:
        return (*what, parent)

    def close(self) -> None:
        self.closed += 1


def directed_by(fakes: Fakes, *always: str) -> DirectedPeers:
    return DirectedPeers(fakes, fakes, always)  # type: ignore[arg-type]


def test_hosts_that_were_never_named_count_for_those_who_wait() -> None:
    fakes = Fakes()
    peers = directed_by(fakes, "always:1")
    peers.set_addresses(["always:1"])
    watch = PeerWatch(lambda: peers, Guard(Recorder(), lambda reason: None))
    fakes.states["always:1"] = "itself"
    assert watch.alive() == 0
    fakes.there = ["a:1", "b:1"]
    assert watch.alive() == 2
    assert fakes.addresses == ["always:1", "b:1", "a:1"]
    fakes.states |= {"a:1": "up", "b:1": "backing off"}
    assert watch.alive() == 1
    fakes.there = []
    assert watch.alive() == 1, "who is connected stays so"


def test_hosts_are_met_only_as_long_as_few_are_known() -> None:
    fakes = Fakes()
    peers = directed_by(fakes)
    fakes.there = [f"host{number}:1" for number in range(20)]
    assert len(peers.facts()) == OWNERS_MAX
    fakes.there = [f"other{number}:1" for number in range(20)]
    assert {str(peer["address"])[:4] for peer in peers.facts()} == {"host"}
    fakes.states = dict.fromkeys(fakes.addresses[:3], "backing off")
    assert sum(str(peer["address"]).startswith("other") for peer in peers.facts()) == OWNERS_MAX


def test_hosts_that_are_named_are_connected_and_asked_beside_those_that_always_are() -> None:
    fakes = Fakes()
    query = directed_by(fakes, "always:1").find(QUESTIONS)
    assert query is not None
    assert query.poll() is None, "the directory has not answered"
    assert query.fetch(0, 0, 1) is None
    fakes.named = ["a:1", "b:1"]
    assert query.poll() is None, "nobody is connected"
    assert fakes.addresses == ["always:1", "b:1", "a:1"]
    fakes.connected = {"b:1"}
    assert query.poll() == ANSWER
    assert fakes.among[-1] == ["always:1", "a:1", "b:1"]
    assert query.fetch(0, 1, 2, parent=b"1") == (0, 1, 2, b"1")
    query.close()
    query.close()
    assert fakes.closed == 1


def test_hosts_that_never_connect_cost_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(directed.time, "monotonic", lambda: now[0])
    fakes = Fakes()
    fakes.named = ["gone:1"]
    query = directed_by(fakes).find(QUESTIONS)
    assert query is not None
    assert query.poll() is None
    now[0] += directed.CONNECT_SECONDS_MAX
    assert query.poll() == [b""]


def test_directory_that_names_nobody_sends_to_nobody() -> None:
    fakes = Fakes()
    fakes.named = []
    query = directed_by(fakes).find(QUESTIONS)
    assert query is not None
    assert query.poll() == [b""]


def test_directory_that_is_down_leaves_those_that_are_always_asked() -> None:
    fakes = Fakes()
    fakes.directory_up, fakes.connected = False, {"always:1"}
    query = directed_by(fakes, "always:1").find(QUESTIONS)
    assert query is not None
    assert query.poll() == ANSWER
    assert fakes.among == [["always:1"]]
    assert directed_by(fakes).find(QUESTIONS) is None


def test_of_many_hosts_those_named_of_late_stay_connected() -> None:
    fakes = Fakes()
    peers = directed_by(fakes, "always:1")
    for number in range(2 * NAMED_MAX):
        peers.know([f"host{number}:1", "host0:1"])
    assert len(fakes.addresses) == NAMED_MAX
    assert {"always:1", "host0:1", f"host{2 * NAMED_MAX - 1}:1"} <= set(fakes.addresses)
    peers.know(["host1:1"])
    assert "host1:1" in fakes.addresses, "one that did not fit any more is connected when it is named again"
    peers.set_addresses(["other:1"])
    assert fakes.addresses[0] == "other:1"
    assert "always:1" not in fakes.addresses


@pytest.mark.parametrize("count", [0, 1, KEYS_SAMPLED_MAX, KEYS_SAMPLED_MAX + 1, 100_000])
def test_long_questions_are_sampled_evenly(count: int) -> None:
    keys = [index.to_bytes(4, "big") for index in range(count)]
    some = sample(keys)
    assert len(some) <= KEYS_SAMPLED_MAX
    assert some[:1] == keys[:1]
    assert 2 * len(some) >= min(count, KEYS_SAMPLED_MAX)
    assert some == sorted(some)


def test_blocks_are_registered_while_this_process_serves_and_not_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directed, "ANNOUNCE_SECONDS", 0.001)
    announced: list[str | None] = []

    class Remembers(Fakes):
        def announce(self, address: str | None) -> None:
            announced.append(address)

    serving: list[str | None] = [None]
    said: list[str] = []
    announcer = Announcer(Remembers(), lambda: serving[0], said.append)  # type: ignore[arg-type]
    serving[0] = "10.0.0.1:7"
    await_(lambda: announced == ["10.0.0.1:7"])
    serving[0] = None
    await_(lambda: announced == ["10.0.0.1:7", None])
    announcer.close()
    assert said == []


def test_engine_with_a_directory_opens_and_closes_it_with_the_rest() -> None:
    parts = Parts()
    link = PeerLink(config(directory="redis://:secret@host", peer_listen="10.0.0.1:7"), parts.types)
    link.open("pool")  # type: ignore[arg-type]
    assert parts.made == ["directory", "server", "client"]
    assert parts.arguments["directory"] == (("pool", "redis://:secret@host"), {})
    assert isinstance(link.client, DirectedPeers)
    link.close()
    assert parts.open == []


def is_registered(directory: _native.Directory, blocks: int) -> bool:
    """Whether so many blocks are in the store."""
    owner = directory.facts()["owner"]
    return bool(owner["complete"] and owner["blocks"] >= blocks)


def test_prompt_comes_from_a_host_that_only_the_directory_knows(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = open_pool(str(tmp_path / "here"))
    # Room for the texts of all tries.
    sizes = {"pool_bytes": 1 << 20, "segment_bytes": 1 << 16, "slots_max": 1 << 12}
    there = _native.Pool.open("real", shm_dir=str(tmp_path / "there"), **sizes)
    with server(tmp_path) as port, served(there) as (address, _), asking(here) as peers:
        url = f"redis://127.0.0.1:{port}/0"
        registered, directory = _native.Directory(there, url, address=address), _native.Directory(here, url)
        client = DirectedPeers(peers, directory, ())
        engine = engine_on(here, blocks=400, peers=client)
        # A store or host that is slow for once costs a hit, so there are several tries.
        for number in range(1, TRIES_MAX + 1):
            text = [token + 1_000 * number for token in TEXT]
            computed_on(there, text)
            await_(partial(is_registered, registered, number * BLOCKS_OF_TEXT))
            await_(lambda: directory.facts()["up"])
            request = engine.add(text)
            engine.run(STEPS_MAX)
            if request.hit_tokens:
                break
        assert engine.recorder.counters["hit_tokens_peer"] == request.hit_tokens > 0
        assert [peer["address"] for peer in peers.facts()] == [address]
        finish(engine)
        for one in (registered, directory):
            one.close()
    for pool in (here, there):
        pool.close()


def test_decode_waits_for_a_host_that_only_the_directory_knows(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = open_pool(str(tmp_path / "here")), open_pool(str(tmp_path / "there"))
    with server(tmp_path) as port, served(there) as (address, _), asking(here) as client:
        url = f"redis://127.0.0.1:{port}/0"
        owner, directory = _native.Directory(there, url, address=address), _native.Directory(here, url)
        await_(lambda: directory.hosts() == [address])
        assert owner.hosts() == [], "nobody is told of himself"
        peers = DirectedPeers(client, directory, ())
        waits = {"wait_for_full_prefix": True, "wait_for_full_prefix_seconds": 600.0}
        for number in range(TRIES_MAX):
            text = [token + 1_000 * number for token in TEXT]
            decode = engine_on(here, blocks=400, peers=peers, **waits)
            request = decode.add(text)
            for _ in range(50):
                decode.step()
            assert request.state == "waiting"
            computed_on(there, text)
            finish(decode)
            assert "full_prefix_incomplete" not in decode.recorder.counters
            if request.hit_tokens == BLOCKS_OF_TEXT * 4:
                break
        assert request.hit_tokens == BLOCKS_OF_TEXT * 4
        owner.announce(None)
        await_(lambda: directory.hosts() == [])
        owner.close()
        directory.close()
    for pool in (here, there):
        pool.close()
