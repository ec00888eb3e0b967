"""Typed face of what ``pegaflow._native`` has of networks beside peers: ports, and the directory of who has what. No
module of its own at run time."""

from collections.abc import Sequence
from typing import Any, final

from pegaflow._native import Namespace, Pool

@final
class Nic:
    """One port of an RDMA device of this host."""

    def __new__(cls, device: str, port: int, gid_index: int, mtu_bytes: int, node: int | None) -> Nic:
        """``device``: such as ``mlx5_0``. ``port``: from 1. ``gid_index``: which of the port's addresses.
        ``mtu_bytes``: path MTU at most, 256 to 4,096. ``node``: NUMA node, if it is known."""

@final
class Directory:
    """Who has what, in a Redis or Valkey that is there already (``docs/directory.md``). Threads of its own talk to it:
    nothing here waits for the network, but ``announce`` and ``close``, for at most a few seconds."""

    url: str
    """Which store, without its password."""

    def __new__(cls, pool: Pool, url: str, *, address: str | None = None) -> Directory:
        """``url``: ``redis://[user:password@]host:port/db``, ``redis+sentinel://host:port,host:port/master/db`` or
        ``redis+cluster://host:port,host:port``; with ``rediss`` over TLS. ``address``: see ``announce``.
        ``InvalidArgument`` for a URL or address that is none; a store that does not answer is no error."""

    def announce(self, address: str | None) -> None:
        """Register all blocks of the pool as those of the server of peers at ``address`` (``host:port``) from now
        on; ``None``: none any more."""

    def find(self, questions: Sequence[tuple[Namespace, Sequence[bytes]]]) -> DirectoryQuery | None:
        """Ask which other hosts have blocks: a namespace and its keys per question. Never waits. ``None``: the store
        is not worth asking now, or too much is being asked."""

    def facts(self) -> dict[str, Any]:
        """``up``, ``problem`` (a sentence, or ``None``) and counters of asking; ``owner``: the same of registering,
        with ``complete`` and ``blocks``, or ``None`` without an address."""

    def close(self) -> None:
        """Take leave. Idempotent."""

@final
class DirectoryQuery:
    """A question to the directory. Forgotten, it is given up."""

    def poll(self) -> list[list[list[str]]] | None:
        """``None`` while the answer is awaited (a fifth of a second at most), else per question, per key: addresses of
        hosts that may have the block in memory, not all of them if they are many. Whether they have it, they say."""

    def best(self, count_max: int) -> list[str] | None:
        """As ``poll``, but the addresses that were named for most keys, the best first."""
