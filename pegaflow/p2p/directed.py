"""Peers that a directory names: asked instead of all that there are, where there are too many hosts for that.

The directory says which hosts may have blocks of a request; these are asked, beside those that were named by hand. A
host that it names in error costs a question in vain. One that it names in malice is told the token, unless peers have
certificates: whoever may write to the directory is trusted. Nothing here waits.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

OWNERS_MAX = 8
"""Hosts of the directory that are asked for one request."""

NAMED_MAX = 128
"""Hosts of the directory that this process stays connected with, those named of late."""

KEYS_SAMPLED_MAX = 256
"""Keys of a question that the directory is asked for: evenly spread, the first one among them."""

CONNECT_SECONDS_MAX = 0.5
"""How long a question waits until hosts that were not known before are connected."""

ANNOUNCE_SECONDS = 0.5
"""Pause between two looks at whether this process answers for its pool."""

Questions = Sequence[tuple[Any, Sequence[bytes], bool]]


class Query(Protocol):
    """``PeerQuery``."""

    def poll(self) -> list[bytes] | None:
        """``None`` while answers are awaited."""
        ...

    def fetch(self, question: int, start: int, stop: int, *, parent: bytes | None = None) -> Any:
        """Bring blocks; ``None``: nobody has the first."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


class Client(Protocol):
    """``Peers``."""

    def find(self, questions: Questions, *, among: Sequence[str] | None = None) -> Query | None:
        """Ask those among these addresses."""
        ...

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Talk to these."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """What is known of each peer."""
        ...

    def read_seconds(self, block_bytes: int) -> float | None:
        """How long so many bytes would take."""
        ...

    def close(self) -> None:
        """Leave all peers."""
        ...


class Asked(Protocol):
    """``DirectoryQuery``."""

    def best(self, count_max: int) -> list[str] | None:
        """Addresses that were named for most keys; ``None`` while the answer is awaited."""
        ...


class Directory(Protocol):
    """``Directory``."""

    def find(self, questions: Sequence[tuple[Any, Sequence[bytes]]]) -> Asked | None:
        """Ask which hosts have blocks; ``None``: not worth asking now."""
        ...

    def hosts(self) -> list[str]:
        """Addresses of some hosts that are there, whatever they have. Never waits."""
        ...

    def announce(self, address: str | None) -> None:
        """Register the pool's blocks as those of the server at ``address``. May wait for seconds."""
        ...

    def close(self) -> None:
        """Take leave. May wait for seconds."""
        ...


def sample(keys: Sequence[bytes]) -> list[bytes]:
    """At most ``KEYS_SAMPLED_MAX`` of ``keys``."""
    step = -(-len(keys) // KEYS_SAMPLED_MAX) or 1
    return list(keys[::step])


class DirectedPeers:
    """As ``Peers``, but each question goes to those that the directory names, and to those that are always asked."""

    def __init__(self, client: Client, directory: Directory, always: Sequence[str]) -> None:
        self._client, self._directory = client, directory
        self._always = tuple(always)
        self._named: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, questions: Questions) -> Query | None:
        """See ``Peers.find``."""
        asked = self._directory.find([(namespace, sample(keys)) for namespace, keys, _ in questions])
        if asked is None:
            return self._client.find(questions, among=self._always) if self._always else None
        return DirectedQuery(self, asked, questions)

    def find_among(self, questions: Questions, named: Sequence[str]) -> Query | None:
        """Ask the hosts that were named, and those that are always asked."""
        return self._client.find(questions, among=[*self._always, *named])

    def know(self, named: Sequence[str]) -> None:
        """Connect with hosts that were named, if that has not been done."""
        with self._lock:
            others = [address for address in named if address not in self._always]
            is_known = all(address in self._named for address in others)
            for address in others:
                self._named[address] = None
                self._named.move_to_end(address)
            if not is_known:
                self._tell()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Hosts that are always asked, from now on."""
        with self._lock:
            self._always = tuple(addresses)
            for address in self._always:
                self._named.pop(address, None)
            self._tell()

    def facts(self) -> list[dict[str, Any]]:
        """See ``Peers.facts``; of the hosts that are connected. If they are few, others that the directory knows are
        connected too: whoever waits for a host has to know that there is one."""
        facts = self._client.facts()
        if sum(peer["state"] != "backing off" for peer in facts) >= OWNERS_MAX:
            return facts
        known = {peer["address"] for peer in facts}
        others = [address for address in self._directory.hosts() if address not in known][:OWNERS_MAX]
        if not others:
            return facts
        self.know(others)
        return self._client.facts()

    def read_seconds(self, block_bytes: int) -> float | None:
        """See ``Peers.read_seconds``."""
        return self._client.read_seconds(block_bytes)

    def close(self) -> None:
        """Leave all peers. The directory is its owner's to close."""
        self._client.close()

    def _tell(self) -> None:
        # What does not fit is forgotten, so that it is connected when it is named again.
        while len(self._named) > max(0, NAMED_MAX - len(self._always)):
            self._named.popitem(last=False)
        self._client.set_addresses([*self._always, *reversed(self._named)])


class DirectedQuery:
    """A question that goes to the directory first, and then to those that it names."""

    def __init__(self, peers: DirectedPeers, asked: Asked, questions: Questions) -> None:
        self._peers, self._asked, self._questions = peers, asked, questions
        self._named: list[str] | None = None
        self._query: Query | None = None
        self._deadline = 0.0

    def poll(self) -> list[bytes] | None:
        """See ``PeerQuery.poll``."""
        if self._query is None:
            if self._named is None:
                self._named = self._asked.best(OWNERS_MAX)
                if self._named is None:
                    return None
                self._peers.know(self._named)
                self._deadline = time.monotonic() + CONNECT_SECONDS_MAX
            self._query = self._peers.find_among(self._questions, self._named)
            if self._query is None:
                waits = bool(self._named) and time.monotonic() < self._deadline
                return None if waits else [b""] * len(self._questions)
        return self._query.poll()

    def fetch(self, question: int, start: int, stop: int, *, parent: bytes | None = None) -> Any:
        """See ``PeerQuery.fetch``."""
        return None if self._query is None else self._query.fetch(question, start, stop, parent=parent)

    def close(self) -> None:
        """Forget it."""
        query, self._query = self._query, None
        if query is not None:
            query.close()


class Announcer:
    """Registers the pool's blocks in a directory while this process answers for the pool, on a thread of its own."""

    def __init__(self, directory: Directory, serving_at: Callable[[], str | None], warn: Callable[[str], None]) -> None:
        """``serving_at``: address at which this process answers, or ``None``."""
        self._directory, self._serving_at, self._warn = directory, serving_at, warn
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pegaflow-announce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Does not wait: a store that hangs may hold the thread for a few seconds."""
        self._closing.set()

    def _run(self) -> None:
        announced: str | None = None
        while not self._closing.wait(ANNOUNCE_SECONDS):
            try:
                address = self._serving_at()
                if address != announced:
                    self._directory.announce(address)
                    announced = address
            except Exception as error:
                self._warn(f"the blocks of this pool are not registered any more: {error}")
                return
