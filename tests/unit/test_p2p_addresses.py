"""Addresses of peers: what is taken, what is refused, and what becomes of names that move or cannot be found."""

import threading
from collections.abc import Sequence

import pytest

from pegaflow.errors import InvalidArgument
from pegaflow.p2p import addresses
from pegaflow.p2p.addresses import Address, Addresses, parse_address, parse_listen, parse_peers


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.2:7441", "10.0.0.2", 7441),
        (" kv-2.example.org:1 ", "kv-2.example.org", 1),
        ("[fd00::2]:65534", "fd00::2", 65534),
        ("[FD00:0:0::2]:9", "fd00::2", 9),
    ],
)
def test_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    address = parse_address(text, "x")
    assert (address.host, address.port) == (host, port)
    assert parse_address(str(address), "x") == address


@pytest.mark.parametrize(
    "text",
    [
        "", "10.0.0.2", ":7441", "fd00::2:7441", "[10.0.0.2]:7441", "[]:1", "a b:7441", "-x:7441", "10.0.0.2:", "h:0",
        "h:65535", "h:x", "http://h:1", "[fe80::1%eth0]:7441", None, 7, ["h:1"],
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_the_name_of_the_option(text: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^pegaflow\.peers must .*\.$"):
        parse_address(text, "pegaflow.peers")


def test_peers_are_a_list_or_a_string_with_commas() -> None:
    both = ("10.0.0.2:7441", "kv.example:7441")
    assert parse_peers("10.0.0.2:7441, kv.example:7441", "x") == both
    assert parse_peers(list(both), "x") == both


@pytest.mark.parametrize("value", [[], "", None, 7, {"a": 1}, ["h:1"] * 257, "h:1,h:1", "10.0.0.2:1,,10.0.0.3:1"])
def test_other_lists_of_peers_are_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="peers"):
        parse_peers(value, "pegaflow.peers")


@pytest.mark.parametrize("text", ["0.0.0.0:7441", "[::]:7441", "224.0.0.1:7441", "localhost:7441", "[::ffff:0:0]:x"])
def test_nobody_serves_a_network_by_accident(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"pegaflow\.peer_listen"):
        parse_listen(text, "pegaflow.peer_listen")


@pytest.mark.parametrize("text", ["10.0.0.2:7441", "127.0.0.1:1", "[fd00::2]:7441"])
def test_one_address_of_this_host_is_served(text: str) -> None:
    assert parse_listen(text, "x") == text


class Names:
    """A name server that says what a test wants."""

    def __init__(self, **behind: list[str]) -> None:
        self.behind = behind
        self.told: list[list[str]] = []
        self.warned: list[str] = []

    def look_up(self, address: Address) -> list[str]:
        if address.host not in self.behind:
            raise OSError(2, "no such name")
        return [f"{host}:{address.port}" for host in self.behind[address.host]]

    def watch(self, *given: str) -> Addresses:
        def tell(hosts: Sequence[str]) -> None:
            self.told.append(list(hosts))

        return Addresses(given, tell, self.warned.append, self.look_up)


def test_name_may_stand_for_several_hosts_that_come_and_go() -> None:
    names = Names(kv=["10.0.0.2", "10.0.0.3"])
    watched = names.watch("10.0.0.1:7", "kv:7", "10.0.0.3:7")
    assert watched.known() == ["10.0.0.1:7", "10.0.0.3:7"], "names are not looked up by who asks"
    watched.refresh()
    watched.refresh()
    names.behind["kv"] = ["10.0.0.9"]
    watched.refresh()
    assert names.told == [["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"], ["10.0.0.1:7", "10.0.0.9:7", "10.0.0.3:7"]]
    assert names.warned == []


def test_name_that_cannot_be_found_any_more_keeps_its_hosts_and_is_named_once() -> None:
    names = Names(kv=["10.0.0.2"])
    watched = names.watch("kv:7", "other:7")
    watched.refresh()
    del names.behind["kv"]
    watched.refresh()
    watched.refresh()
    assert watched.known() == ["10.0.0.2:7"]
    assert [text.split(" cannot")[0] for text in names.warned] == ["the peer other:7", "the peer kv:7"]
    names.behind["kv"] = ["10.0.0.2"]
    watched.refresh()
    del names.behind["kv"]
    watched.refresh()
    assert len(names.warned) == 3, "said again after it had been found again"


def test_number_of_peers_is_bounded() -> None:
    names = Names(kv=[f"10.0.{number // 256}.{number % 256}" for number in range(addresses.PEERS_MAX + 5)])
    watched = names.watch("kv:7")
    watched.refresh()
    watched.refresh()
    assert len(watched.known()) == addresses.PEERS_MAX
    assert len(names.warned) == 1


def test_names_are_looked_up_on_a_thread_that_outlives_failures_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "RETRY_SECONDS", 0.001)
    looked = threading.Event()
    calls = []

    def look_up(address: Address) -> list[str]:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        if len(calls) == 2:
            raise OSError(2, "no such name")
        return ["10.0.0.2:7"]

    warned: list[str] = []
    watched = Addresses(["kv:7"], lambda hosts: looked.set(), warned.append, look_up, seconds=0.001)
    watched.start()
    assert looked.wait(240)
    watched.close()
    assert set(calls) == {"pegaflow-peer-names"}
    assert len(warned) == 2


def test_without_names_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    Addresses(["10.0.0.2:7"], print, print).start()
    assert set(threading.enumerate()) <= before  # those of other tests may just end


def test_names_of_this_host_are_found() -> None:
    assert {"127.0.0.1:7441", "[::1]:7441"} & set(addresses.resolve(Address("localhost", 7441)))
    assert addresses.resolve(Address("10.0.0.2", 7)) == ["10.0.0.2:7"]
    with pytest.raises(OSError):
        addresses.resolve(Address("no-such-host.invalid", 7))
