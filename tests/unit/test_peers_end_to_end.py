"""Two pools over a real connection: who may talk to whom, blocks on SSD, and processes that fork."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pegaflow import _native
from pegaflow.errors import ForkedProcess
from tests.engine_races import PROMPT, STEPS_MAX
from tests.patience import await_, patiently
from tests.real_peers import TOKEN, asking, free_address, served
from tests.unit.certificates import certificates
from tests.unit.mini_engine import SINGLE
from tests.unit.native_engine import engine_on, finish, leases, open_pool
from tests.unit.native_pools import FINGERPRINT, keys, reserve_all
from tests.unit.ssd_pools import in_some_try, pool_with_tier
from tests.unit.test_connector_ssd_real import write

BLOCKS = 12
PART_BYTES = 4096
Tls = tuple[str, str, str]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """``(here, there)``; the second has blocks."""
    made = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        made.append(open_pool(str(tmp_path / name)))
    here, there = made
    namespace = there.namespace(FINGERPRINT, 0, [PART_BYTES])
    refs = reserve_all(namespace, keys(BLOCKS))
    there.mark_written(0, refs)
    assert there.publish(refs) == BLOCKS
    yield here, there
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, Tls]:
    """``(certificate, key, authority)`` of two hosts that do not know each other's authority."""
    both = []
    for name in ("ours", "others"):
        authority, key, certificate = certificates(tmp_path_factory.mktemp(name))
        both.append((str(certificate), str(key), str(authority)))
    return both[0], both[1]


def all_come(peers: Any, here: Any) -> bool:
    """Whether all blocks come, as soon as the peer is not late with an answer."""
    namespace = patiently(lambda: here.namespace(FINGERPRINT, 0, [PART_BYTES]))

    def come() -> bool:
        query = peers.find([(namespace, keys(BLOCKS), True)])
        if query is None:
            return False
        await_(lambda: query.poll() is not None)
        fetch = query.fetch(0, 0, BLOCKS)
        if fetch is None:
            return False
        await_(lambda: fetch.poll() is not None)
        return int(fetch.poll()) == BLOCKS

    await_(come)
    return True


def refused(here: Any, address: str, why: str = "", **options: Any) -> str:
    """What is said of peers that are not to be had. ``why``: a part of it, which a busy host may say late."""
    client = _native.Peers(here, [address], **options)
    try:
        await_(lambda: client.facts()[0]["state"] == "backing off" and why in str(client.facts()[0]["problem"]))
        namespace = patiently(lambda: here.namespace(FINGERPRINT, 0, [PART_BYTES]))
        assert client.find([(namespace, keys(BLOCKS), True)]) is None
        return str(client.facts()[0]["problem"])
    finally:
        client.close()


def test_hosts_whose_certificates_one_authority_has_signed_share_blocks(
    pools: tuple[Any, Any], authorities: tuple[Tls, Tls]
) -> None:
    here, there = pools
    both = {"token": None, "tls": authorities[0]}
    with served(there, **both) as (address, server), asking(here, address, **both) as peers:
        assert all_come(peers, here)
        assert server.facts()["sessions"] >= 1
    with served(there, tls=authorities[0]) as (address, _), asking(here, address, tls=authorities[0]) as peers:
        assert all_come(peers, here), "and a token besides"
        assert refused(here, address, "oken", token="another", tls=authorities[0])


def test_certificates_of_another_authority_or_none_are_refused(
    pools: tuple[Any, Any], authorities: tuple[Tls, Tls]
) -> None:
    here, there = pools
    ours, others = authorities
    # The right authority for the server's certificate, and one's own certificate of another.
    stranger = (others[0], others[1], ours[2])
    with served(there, token=None, tls=ours) as (address, server):
        for options in (
            {"tls": others},
            {"tls": stranger},
            {"token": TOKEN},
        ):
            assert refused(here, address, **options)
        assert server.facts()["sessions"] == 0
        with asking(here, address, token=None, tls=ours) as peers:
            assert all_come(peers, here)
    with served(there) as (address, server):
        assert refused(here, address, token=TOKEN, tls=ours), "a server in the clear is none with certificates"
        assert server.facts()["sessions"] == 0


def test_certificate_that_does_not_name_the_address_is_refused(
    pools: tuple[Any, Any], authorities: tuple[Tls, Tls]
) -> None:
    here, there = pools
    port = int(free_address().rpartition(":")[2])
    with served(there, f"127.0.0.3:{port}", token=None, tls=authorities[0]) as (address, server):
        assert refused(here, address, token=None, tls=authorities[0])
        assert server.facts()["sessions"] == 0


def test_wrong_token_gets_nothing_and_is_told_why(pools: tuple[Any, Any]) -> None:
    here, there = pools
    with served(there) as (address, server):
        assert refused(here, address, "oken", token=TOKEN + "?")
        facts = server.facts()
        assert facts["sessions"] == 0
        assert facts["calls_unknown"] > 0
        assert facts["find_keys"] == 0


def test_blocks_on_the_peers_ssd_are_leased_and_come_to_the_byte(tmp_path: Path) -> None:
    in_some_try(tmp_path, blocks_come_from_the_peers_ssd)


def blocks_come_from_the_peers_ssd(place: Path) -> bool:
    """Whether all of a prompt comes: neither host may be late with anything."""
    with pool_with_tier(place / "there", place / "disk") as there:
        write(there)
    with ExitStack() as stack:
        # As a reboot of that host: another place for the pool, the same disk.
        there = stack.enter_context(pool_with_tier(place / "after", place / "disk"))
        (place / "here").mkdir()
        here = open_pool(str(place / "here"))
        stack.callback(here.close)
        owner = engine_on(there, blocks=400)
        space = owner.store.namespaces()[0]
        address, server = stack.enter_context(served(there))
        peers = stack.enter_context(asking(here, address))
        engine = engine_on(here, SINGLE, blocks=400, peers=peers)
        request = engine.add(PROMPT)
        await_(lambda: 2 in space.tiers(request.block_hashes))
        engine.run(STEPS_MAX)
        if request.hit_tokens < len(PROMPT):
            return False
        assert engine.recorder.counters["hit_tokens_peer"] == request.hit_tokens
        await_(lambda: server.facts()["leases"] == 0)
        assert server.facts()["blocks_from_ssd"] == there.ssd()["read_blocks"] > 0
        finish(engine)
        await_(lambda: leases(there) == 0)
        return True


def test_forked_child_uses_no_peers_and_holds_neither_address_nor_parent(pools: tuple[Any, Any]) -> None:
    here, there = pools
    ready, leave = os.pipe(), os.pipe()
    with served(there) as (address, server), asking(here, address) as peers:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                try:
                    peers.find([])
                except ForkedProcess:
                    del peers, server
                    status = 0
                os.write(ready[1], b"!")
                os.read(leave[0], 1)
            finally:
                os._exit(status)
        assert os.read(ready[0], 1) == b"!"
        assert all_come(peers, here), "the parent goes on"
        server.close()
        host, _, port = address.rpartition(":")
        for number in (int(port), int(port) + 1):
            with socket.socket() as successor:
                successor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                successor.bind((host, number))
                successor.listen()
        os.write(leave[1], b"!")
        assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *leave):
        os.close(end)
