"""Typed face of what ``pegaflow._native`` has of networks: ports, the directory of who has what, and peers. No module
of its own at run time."""

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

    def hosts(self) -> list[str]:
        """Addresses of servers of other pools that were there a few seconds ago, 16 at most; empty while the store is
        not there. Never waits."""

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

@final
class PeerServer:
    """Answers peers on other hosts for the pool while no other process of it does. Dropped it is closed."""

    def __new__(
        cls,
        pool: Pool,
        listen: str,
        *,
        token: str | None = None,
        tls: tuple[str, str, str] | None = None,
        nics: Sequence[Nic] | None = None,
    ) -> PeerServer:
        """``listen``: ``IP:port`` of the control plane, no wildcard; the port behind it is that of the data plane by
        TCP. ``token`` and ``tls`` (PEM files: certificate, key, authorities): what peers must show, at least one of the
        two. ``nics``: ports for RDMA; the log names those that cannot be used. Raises ``InvalidArgument``."""

    def facts(self) -> dict[str, Any]:
        """``serving``, ``address``, ``problem`` (other than that another process serves), ``sessions``, ``leases``,
        ``leased_bytes``, and counters, of which those of the data plane while it serves."""

    def close(self) -> None:
        """Stop within a bounded time: the address is free, leases are given back. Idempotent."""

@final
class Peers:
    """This process's connections to the pools of other hosts. Dropped without ``close`` it is closed."""

    def __new__(
        cls,
        pool: Pool,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tls: tuple[str, str, str] | None = None,
        nics: Sequence[Nic] | None = None,
        qps_per_peer: int = 2,
    ) -> Peers:
        """``addresses``: ``host:port`` of each peer, at most 256; ``pool`` itself is left alone. ``token``, ``tls``,
        ``nics``: as for ``PeerServer``. ``qps_per_peer``: queue pairs to each peer on each port, at most 32 to a peer
        in all. Raises ``InvalidArgument``."""

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Ask these from now on, and no others."""

    def find(
        self, questions: Sequence[tuple[Namespace, Sequence[bytes], bool]], *, among: Sequence[str] | None = None
    ) -> PeerQuery | None:
        """Ask all peers, or those at ``among``, at a time. A question is ``(namespace, keys, chained)``; ``chained``:
        each key is the child of the one before it, and what is behind the first absent one is of no interest. Never
        waits; ``None``: no peer is there, or too many questions are open. At most 64 questions and 65,536 keys, else
        ``InvalidArgument``."""

    def facts(self) -> list[dict[str, Any]]:
        """Per peer: ``address``, ``state`` (``"up"``, ``"backing off"``, ``"itself"``, ``"unknown"``), ``problem``,
        ``transport`` (``"rdma"``, ``"tcp"``, ``None`` before the first fetch), ``rtt_us``, ``bytes_per_second``
        (recent), ``queued_bytes``, and counters."""

    def read_seconds(self, block_bytes: int) -> float | None:
        """Seconds that so many more bytes would take behind what is queued; ``None``: no peer is up."""

    def close(self) -> None:
        """Stop. Reads that are under way end with their leases, after ten seconds at the latest. Idempotent."""

@final
class PeerQuery:
    """A question to all peers."""

    def poll(self) -> list[bytes] | None:
        """``None`` while answers are awaited (550 ms at most), else per question a byte per key: 1 some peer has it in
        memory, 2 on SSD, 0 none."""

    def fetch(self, question: int, start: int, stop: int, *, parent: bytes | None = None) -> PeerFetch | None:
        """Bring ``keys[start:stop]`` of a question into memory, from several peers. ``parent``: of the first if chained
        and not ``keys[start - 1]``. Never waits; ``None``: nobody has the first, or too much is on its way."""

    def close(self) -> None:
        """Forget it; what is being fetched goes on. Idempotent."""

@final
class PeerFetch:
    """Blocks on their way from peers; used like ``Prefetch``. Dropped without ``close`` it is closed."""

    keys: int
    """How many keys it is for: fewer than asked for if nobody has the rest or there is no room for it."""

    def poll(self) -> int | None:
        """As of ``Prefetch``."""

    def found(self) -> int:
        """As ``poll``, but how many it is so far."""

    def close(self) -> None:
        """As of ``Prefetch``. Idempotent."""
