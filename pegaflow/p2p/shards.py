"""``pegaflow.tp_shard_endpoints``: how the tensor-parallel ranks of one replica are divided into shards.

A server of PegaFlow once held the blocks of the ranks beside it, and the option said where each was. Now ranks use the
pool of their own host. Shards of one host share one pool, which has blocks of all of their parts, and need nothing.
Where the endpoints are on several hosts, each rank has blocks of its own in the pool of its host, and the scheduler
asks the ranks (see ``connector.shard_asks``). Either way nobody is asked at an endpoint.
"""

import ipaddress
from collections.abc import Sequence
from typing import Any

from pegaflow.errors import InvalidArgument
from pegaflow.p2p.addresses import Address, parse_address

SHARDS_MAX = 64
"""Endpoints of one option."""

THIS_HOST = "localhost"


def parse_shards(value: Any, name: str) -> tuple[str, ...]:
    """``"host:port"``, with or without ``http://``, of each shard in the order of ranks; in a list, or in one string
    with commas between them. Raises ``InvalidArgument``."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= SHARDS_MAX:
        raise InvalidArgument(f'{name} must be a list of up to {SHARDS_MAX} times "host:port", not {value!r}.')
    endpoints = [parse_address(_without_scheme(one), name) for one in given]
    if len(set(endpoints)) < len(endpoints):
        raise InvalidArgument(f"{name} names an endpoint twice in {value!r}: name each shard once, in order of ranks.")
    return tuple(str(one) for one in endpoints)


def on_several_hosts(endpoints: Sequence[str]) -> bool:
    """Whether shards are on different hosts, as far as their endpoints say."""
    return len(set(_hosts(endpoints))) > 1


def shards_beside(endpoints: Sequence[str], number: int) -> int:
    """How many shards are on the host of one of them, that one included."""
    hosts = _hosts(endpoints)
    return hosts.count(hosts[number])


def check_ranks(endpoints: Sequence[str], tensor_ranks: int, all_ranks: int, token_ranks: int, name: str) -> None:
    """Raises ``InvalidArgument`` if the ranks of a replica cannot be divided into so many equal, contiguous shards.
    ``token_ranks``: ranks over which context parallelism spreads the tokens."""
    shards = len(endpoints)
    if token_ranks > 1 or all_ranks != tensor_ranks:
        raise InvalidArgument(
            f"{name} is for tensor parallelism alone, not with pipeline or context parallelism: remove it."
        )
    if tensor_ranks % shards:
        raise InvalidArgument(
            f"{name} names {shards} shards, into which {tensor_ranks} tensor-parallel ranks cannot be divided equally."
        )


def _without_scheme(text: Any) -> Any:
    return text.strip().removeprefix("http://").removesuffix("/") if isinstance(text, str) else text


def _hosts(endpoints: Sequence[str]) -> list[str]:
    return [_host_of(parse_address(one, "")) for one in endpoints]


def _host_of(address: Address) -> str:
    try:
        return THIS_HOST if ipaddress.ip_address(address.host).is_loopback else address.host
    except ValueError:
        return address.host.lower()
