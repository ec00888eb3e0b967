"""Options of the connector: vLLM's ``kv_connector_extra_config`` and the environment become one frozen object.

Every option is ``pegaflow.NAME`` in ``kv_connector_extra_config`` or, if it is not there, ``PEGAFLOW_NAME`` in the
environment. What we do not know is an error that names the option that was probably meant, never silence; in the
environment, where others may have names like ours, it is a line in the log.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pegaflow.errors import InvalidArgument
from pegaflow.p2p.addresses import parse_listen, parse_peers, parse_store
from pegaflow.p2p.devices import parse_nics
from pegaflow.p2p.secrets import TOKEN_VARIABLE, parse_file, read_token
from pegaflow.p2p.shards import on_several_hosts, parse_shards

PREFIX = "pegaflow."
MODES = ("read_write", "save_only")
TRANSFER_BACKENDS = ("auto", "staged", "direct", "kernel")
LAYERWISE = ("auto", "on", "off")
SSD_ADMISSIONS = ("second_touch", "all")
SSD_BACKENDS = ("auto", "uring", "threads")
SSD_DIRECTORIES_MAX = 64
SSD_DEPTH_MAX = 128
SSD_CAPACITY_BYTES_MIN = 64 << 20
SSD_WRITE_BYTES_MIN = 10**6
PREFETCH_WAIT_MS_MAX = 60_000
QPS_PER_PEER_MAX = 16
LOAD_TIMEOUT_SECONDS_MIN = 30.0
CUDA_CTAS_MAX = 1024
CUDA_RING_BYTES_MIN, CUDA_RING_BYTES_MAX = 6 << 20, 6 << 30
SAVE_RATE_BYTES_MIN = 10**6
DIRECT_SAVE_BYTES_MIN = 4096
FULL_PREFIX_SECONDS_MAX = 600.0
EVICTION_POLICIES = ("probation", "lru")
WEIGHT_MIN = 0.001
WEIGHT_MAX = 1e6

_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

# Options of PegaFlow with a server. They have no meaning here, but configurations that hold them must start.
_SERVER_OPTIONS = ("host", "port")

# The same for its SSD cache: a directory has one file, and queues are as long as what is on its way needs.
_SSD_OPTIONS_WITHOUT_EFFECT = ("ssd_cache_shards", "ssd_write_queue_depth", "ssd_prefetch_queue_depth")
_WITHOUT_EFFECT = _SERVER_OPTIONS + _SSD_OPTIONS_WITHOUT_EFFECT

# Options that need a pool with whole blocks.
_NOT_OVER_SEVERAL_HOSTS = ("peers", "peer_listen", "directory", "ssd_cache_path", "wait_for_full_prefix")

# Options whose feature this version does not have, or how they begin, and what to do instead. Accepting them in silence
# would be a lie.
_NIXL = "NixlConnector beside PegaKVConnector in MultiConnector brings blocks from GPU to GPU"
_NOT_HERE = {
    "enable_lfu_admission": f"{PREFIX}eviction_policy says what goes when the pool is full",
    "metaserver_addr": f"{PREFIX}peers or {PREFIX}directory say which hosts are asked",
    "max_prefetch_blocks": f"{PREFIX}prefetch_wait_ms_max bounds how long a request waits",
    "pd_": _NIXL,
    "pd.": _NIXL,
    "nixl.": _NIXL,
}
_ENVIRONMENT_PREFIX = "PEGAFLOW_"

# Variables that are spelt like an option and are none.
_LIKE_OPTIONS = (TOKEN_VARIABLE,)
_ALIKE_MIN = 0.73
"""How much an unknown name has to be like one that there is for that to be proposed, from 0 to 1."""
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Kubernetes gives these to every container for a service whose name begins with ``pegaflow``."""


@dataclass(frozen=True)
class ConnectorConfig:
    """What the user asked for, checked."""

    mode: str = "read_write"
    """``"read_write"``, or ``"save_only"``: store blocks, but never look up or load."""
    pool_name: str = "default"
    pool_bytes: int | None = None
    """Size of the pool if this process creates it; ``None``: what fits (see ``Pool.open``)."""
    shm_dir: str = "/dev/shm"
    segment_bytes: int | None = None
    use_hugepages: bool = False
    """Keep the blocks of a pool that this process creates in reserved huge pages, if there are enough."""
    hugepages_dir: str | None = None
    """A directory on a hugetlbfs; ``None``: any that this user may write."""
    weight: float = 1.0
    """This instance's share of the pool, against the weights of the others that use it."""
    eviction_policy: str = "probation"
    """Where the blocks that this instance stores start among those that go when the pool is full: ``"probation"`` near
    the old end, ``"lru"`` at the young one."""
    transfer_backend: str = "auto"
    """How blocks get to and from a GPU (see ``_native.CudaCopier``); without a GPU it means nothing."""
    cuda_ctas: int = 32
    """CTAs of one kernel at most: how much of a GPU a copy may take, beside a step of the model."""
    cuda_ring_bytes: int = 96 << 20
    """Device memory that copies go through, beside vLLM's KV cache."""
    save_bytes_per_second_max: int = 0
    """What saves of one GPU move at most; 0: as fast as they can."""
    direct_save_bytes_min: int = 0
    """Runs of at least so many bytes are saved without a kernel; 0: see ``_native.CudaCopier``."""
    layerwise: str = "auto"
    """Whether a request on a GPU may run layer by layer behind its own load: ``"auto"`` (when nothing else runs),
    ``"on"`` or ``"off"``."""
    pd_tail_save: bool = False
    """Whether the last block of a prompt is saved too if the prompt does not fill it."""
    pd_tail_load: bool = False
    """Whether such a block is looked up and loaded."""
    wait_for_full_prefix: bool = False
    """Whether a request waits until its whole prompt is in the pool, if another process may be about to save it."""
    wait_for_full_prefix_seconds: float = 30.0
    """How long such a request waits at most; then it takes what is there."""
    keep_on_sleep: bool = False
    """Whether weights stay the same while vLLM is paused or asleep, so that blocks are kept."""
    ssd_directories: tuple[str, ...] = ()
    """Where this process keeps blocks of the pool on SSD, a directory per device; empty: it does not."""
    ssd_capacity_bytes: int = 0
    """Of all directories together."""
    ssd_admission: str = "second_touch"
    """Which blocks are written: ``"second_touch"`` (used again, or next to be evicted) or ``"all"``."""
    ssd_write_bytes_per_second_max: int = 0
    """What is written at most; 0: as fast as the disks take it."""
    ssd_write_depth: int = 8
    """Writes on their way to one directory."""
    ssd_read_depth: int = 16
    """Reads on their way to one directory."""
    ssd_backend: str = "auto"
    """How the kernel is asked: ``"uring"``, ``"threads"`` or ``"auto"``."""
    prefetch_wait_ms_max: int = 5_000
    """How long a request waits at most for blocks that are on SSD or with peers; 0: it takes what is in memory."""
    peers: tuple[str, ...] = ()
    """``"host:port"`` of other hosts' pools, each perhaps a name for several; empty: none is asked."""
    peer_listen: str | None = None
    """``"ip:port"`` at which this process answers peers for the pool, if no sibling does; ``None``: it does not."""
    directory: str | None = field(default=None, repr=False)
    """URL of a Redis or Valkey that says which hosts have what, perhaps with a password; ``None``: none does."""
    peer_token_file: str | None = None
    peer_token: str | None = field(default=None, repr=False)
    """What peers show each other."""
    peer_tls_certificate: str | None = None
    peer_tls_key: str | None = None
    peer_tls_ca: str | None = None
    """Files for TLS, all three or none."""
    nics: tuple[str, ...] | None = None
    """RDMA ports to use; ``None``: all that are there; empty: none, only TCP."""
    qps_per_peer: int = 2
    """Queue pairs to each peer on each port; fewer where there would be more than 32 to one peer."""
    tp_shard_endpoints: tuple[str, ...] = ()
    """One per shard of the tensor-parallel ranks. They say how ranks are divided; nobody is asked there."""
    load_timeout_seconds: float = 120.0
    """A load that takes longer is reported in the log and the metrics; it is never abandoned half-way."""
    instance_id: str | None = None
    """Shown by ``pegaflow inspect``; it names nothing that is shared."""
    notes: tuple[str, ...] = ()
    """Sentences to log once at start."""

    @property
    def peer_tls(self) -> tuple[str, str, str] | None:
        """Files of certificate, key and authorities; ``None`` without TLS."""
        if self.peer_tls_certificate is None or self.peer_tls_key is None or self.peer_tls_ca is None:
            return None
        return self.peer_tls_certificate, self.peer_tls_key, self.peer_tls_ca

    @property
    def shards(self) -> int:
        """How many equal runs of ranks have pools of their own; 1: all of them share one."""
        return len(self.tp_shard_endpoints) if on_several_hosts(self.tp_shard_endpoints) else 1

    @property
    def reads(self) -> bool:
        """Whether blocks may be looked up and loaded."""
        return self.mode == "read_write"


def parse_size(value: Any, name: str = "size") -> int:
    """Bytes of ``"30gb"`` (decimal units), ``"512MiB"`` (binary units), ``"1073741824"`` or an ``int``.

    Raises ``InvalidArgument`` for other types, unknown units and sizes below one byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidArgument(f'{name} must be a size such as "30gb" or a number of bytes, not {value!r}.')
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = match and _SIZE_UNITS.get(match[2].lower())
        if not match or not unit:
            raise InvalidArgument(f'{name}={value!r} is not a size: write "30gb", "512mib" or a number of bytes.')
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if value < 1:
        raise InvalidArgument(f"{name} must be at least one byte, not {value}.")
    return int(value)


def _one_of(choices: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, name: str) -> str:
        if value not in choices:
            raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
        return str(value)

    return parse


def _parse_bool(value: Any, name: str) -> bool:
    text = str(value).lower()
    if not isinstance(value, bool | str | int) or text not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"{name} must be true or false, not {value!r}.")
    return text in ("true", "1")


def _whole(least: int, most: int) -> Callable[[Any, str], int]:
    def parse(value: Any, name: str) -> int:
        text = str(value)
        if isinstance(value, bool) or not text.isdecimal() or not least <= int(text) <= most:
            raise InvalidArgument(f"{name} must be a whole number from {least} to {most}, not {value!r}.")
        return int(text)

    return parse


def _seconds(value: Any, name: str) -> float:
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= FULL_PREFIX_SECONDS_MAX:
        raise InvalidArgument(
            f"{name} must be a number of seconds above 0 and up to {FULL_PREFIX_SECONDS_MAX:.0f}, not {value!r}."
        )
    return seconds


def _size_within(least: int, most: int | None = None) -> Callable[[Any, str], int]:
    def parse(value: Any, name: str) -> int:
        size = parse_size(value, name)
        if size < least or (most is not None and size > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InvalidArgument(f"{name} must be {bounds} bytes, not {size}.")
        return size

    return parse


def _parse_pool_name(value: Any, name: str) -> str:
    if not isinstance(value, str) or not _POOL_NAME.fullmatch(value):
        raise InvalidArgument(
            f"{name} must be 1 to 64 letters, digits, dots, dashes or underscores, and start with a letter or digit, "
            f"not {value!r}."
        )
    return value


def _parse_directory(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise InvalidArgument(f"{name} must be an absolute directory such as /dev/shm, not {value!r}.")
    return value


def _parse_directories(value: Any, name: str) -> tuple[str, ...]:
    """One directory, several in a list, or several in one string with colons between them."""
    given = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= SSD_DIRECTORIES_MAX:
        raise InvalidArgument(f"{name} must be one directory or a list of up to {SSD_DIRECTORIES_MAX}, not {value!r}.")
    directories = tuple(os.path.normpath(_parse_directory(directory, name)) for directory in given)
    if len(set(directories)) < len(directories):
        raise InvalidArgument(f"{name} names a directory twice: give one per device, in {value!r}.")
    return directories


def _parse_weight(value: Any, name: str) -> float:
    try:
        weight = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise InvalidArgument(
            f"{name} must be a positive number from {WEIGHT_MIN} to {WEIGHT_MAX:,.0f}, such as 2 for twice the share "
            f"of an instance with 1, not {value!r}."
        )
    return weight


def _parse_policy(value: Any, name: str) -> str:
    if value not in EVICTION_POLICIES:
        nearest = difflib.get_close_matches(str(value).lower(), EVICTION_POLICIES, n=1, cutoff=0.0)[0]
        raise InvalidArgument(
            f"{name} must be one of {', '.join(EVICTION_POLICIES)}, not {value!r}: did you mean {nearest!r}?"
        )
    return str(value)


@dataclass(frozen=True)
class _Option:
    field: str
    parse: Callable[[Any, str], Any]


_OPTIONS = {
    "mode": _Option("mode", _one_of(MODES)),
    "pool_name": _Option("pool_name", _parse_pool_name),
    "pool_size": _Option("pool_bytes", parse_size),
    "shm_dir": _Option("shm_dir", _parse_directory),
    "segment_size": _Option("segment_bytes", parse_size),
    "use_hugepages": _Option("use_hugepages", _parse_bool),
    "hugepages_dir": _Option("hugepages_dir", _parse_directory),
    "weight": _Option("weight", _parse_weight),
    "eviction_policy": _Option("eviction_policy", _parse_policy),
    "transfer_backend": _Option("transfer_backend", _one_of(TRANSFER_BACKENDS)),
    "cuda_ctas": _Option("cuda_ctas", _whole(1, CUDA_CTAS_MAX)),
    "cuda_ring_size": _Option("cuda_ring_bytes", _size_within(CUDA_RING_BYTES_MIN, CUDA_RING_BYTES_MAX)),
    "save_rate_max": _Option("save_bytes_per_second_max", _size_within(SAVE_RATE_BYTES_MIN)),
    "direct_save_min": _Option("direct_save_bytes_min", _size_within(DIRECT_SAVE_BYTES_MIN)),
    "layerwise": _Option("layerwise", _one_of(LAYERWISE)),
    "pd_tail_save": _Option("pd_tail_save", _parse_bool),
    "pd_tail_load": _Option("pd_tail_load", _parse_bool),
    "wait_for_full_prefix": _Option("wait_for_full_prefix", _parse_bool),
    "wait_for_full_prefix_seconds": _Option("wait_for_full_prefix_seconds", _seconds),
    "keep_on_sleep": _Option("keep_on_sleep", _parse_bool),
    "ssd_cache_path": _Option("ssd_directories", _parse_directories),
    "ssd_cache_capacity": _Option("ssd_capacity_bytes", _size_within(SSD_CAPACITY_BYTES_MIN)),
    "ssd_admission": _Option("ssd_admission", _one_of(SSD_ADMISSIONS)),
    "ssd_write_max": _Option("ssd_write_bytes_per_second_max", _size_within(SSD_WRITE_BYTES_MIN)),
    "ssd_write_inflight": _Option("ssd_write_depth", _whole(1, SSD_DEPTH_MAX)),
    "ssd_prefetch_inflight": _Option("ssd_read_depth", _whole(1, SSD_DEPTH_MAX)),
    "ssd_backend": _Option("ssd_backend", _one_of(SSD_BACKENDS)),
    "prefetch_wait_ms_max": _Option("prefetch_wait_ms_max", _whole(0, PREFETCH_WAIT_MS_MAX)),
    "peers": _Option("peers", parse_peers),
    "peer_listen": _Option("peer_listen", parse_listen),
    "directory": _Option("directory", parse_store),
    "peer_token_file": _Option("peer_token_file", parse_file),
    "peer_tls_cert": _Option("peer_tls_certificate", parse_file),
    "peer_tls_key": _Option("peer_tls_key", parse_file),
    "peer_tls_ca": _Option("peer_tls_ca", parse_file),
    "nics": _Option("nics", parse_nics),
    "qps_per_peer": _Option("qps_per_peer", _whole(1, QPS_PER_PEER_MAX)),
    "tp_shard_endpoints": _Option("tp_shard_endpoints", parse_shards),
}


def parse_config(extra: Mapping[str, Any], environ: Mapping[str, str]) -> ConnectorConfig:
    """Check ``extra`` (``kv_connector_extra_config``) and ``environ``, and return the configuration.

    Raises ``InvalidArgument`` for an unknown option, a value of the wrong type, or a feature this version lacks.
    """
    for key in extra:
        _check_known(key)
    for variable, value in environ.items():
        if value and _may_be_ours(variable):
            _check_here(variable.removeprefix(_ENVIRONMENT_PREFIX).lower(), variable)
    fields: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, option in _OPTIONS.items():
        variable = f"PEGAFLOW_{name.upper()}"
        if PREFIX + name in extra:
            given[name] = PREFIX + name
            fields[option.field] = option.parse(extra[PREFIX + name], PREFIX + name)
        elif environ.get(variable):
            given[name] = variable
            fields[option.field] = option.parse(environ[variable], variable)
    _check_ssd(given)
    if not {"peers", "peer_listen", "directory"}.isdisjoint(given):
        written = given.get("peer_token_file", "")
        fields["peer_token"] = read_token(fields.get("peer_token_file"), written, environ)
    config = ConnectorConfig(**fields, instance_id=environ.get("PEGAFLOW_INSTANCE_ID"))
    _check_peers(config, given)
    _check_shards(config, given)
    if config.pool_bytes and config.segment_bytes and config.segment_bytes > config.pool_bytes:
        raise InvalidArgument(
            f"pegaflow.segment_size ({config.segment_bytes} bytes) must not be larger than pegaflow.pool_size "
            f"({config.pool_bytes} bytes)."
        )
    if (config.pd_tail_save or config.pd_tail_load) and not environ.get("PYTHONHASHSEED"):
        raise InvalidArgument(
            "pegaflow.pd_tail_save and pegaflow.pd_tail_load need hashes that are equal in all processes: set "
            "PYTHONHASHSEED to the same number in the environment of every vLLM that shares the pool."
        )
    notes = _notes(extra, environ)
    if config.tp_shard_endpoints and config.shards == 1:
        notes += (f"{given['tp_shard_endpoints']} is checked, but asks nobody: ranks of one host share one pool.",)
    return replace(config, load_timeout_seconds=_load_timeout(environ), notes=notes)


def _check_ssd(given: Mapping[str, str]) -> None:
    """``given``: what was given, and how it was written."""
    path, capacity = given.get("ssd_cache_path"), given.get("ssd_cache_capacity")
    if path and not capacity:
        raise InvalidArgument(
            f"{path} needs {PREFIX}ssd_cache_capacity: say how much all directories together may take, such as "
            '"512gb"; it is claimed at the start.'
        )
    alone = next((written for name, written in given.items() if name.startswith("ssd_")), None)
    if alone and not path:
        raise InvalidArgument(f"{alone} has no meaning without {PREFIX}ssd_cache_path: say where the cache may be.")


def _check_peers(config: ConnectorConfig, given: Mapping[str, str]) -> None:
    tls = [name for name in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca") if name in given]
    alone = next((given[name] for name in ("peer_token_file", *tls, "nics", "qps_per_peer") if name in given), None)
    if not config.peers and config.peer_listen is None and config.directory is None:
        if alone:
            raise InvalidArgument(
                f"{alone} has no meaning without {PREFIX}peers, {PREFIX}peer_listen or {PREFIX}directory: set one of "
                "them."
            )
        return
    if tls and config.peer_tls is None:
        raise InvalidArgument(
            f"{given[tls[0]]} is not enough: set {PREFIX}peer_tls_cert, {PREFIX}peer_tls_key and {PREFIX}peer_tls_ca."
        )
    if config.peer_token is None and config.peer_tls is None:
        raise InvalidArgument(
            f"{next(given[name] for name in ('peers', 'peer_listen', 'directory') if name in given)} needs "
            f"{PREFIX}peer_token_file, {TOKEN_VARIABLE} in the "
            f"environment or {PREFIX}peer_tls_cert, _key and _ca: hosts that do not know each other share no blocks."
        )


def _check_shards(config: ConnectorConfig, given: Mapping[str, str]) -> None:
    wanted = (name for name in _NOT_OVER_SEVERAL_HOSTS if getattr(config, _OPTIONS[name].field))
    beside = next((given[name] for name in wanted), None)
    if config.shards > 1 and beside:
        raise InvalidArgument(
            f"{beside} cannot be had together with {given['tp_shard_endpoints']} of several hosts, whose pools have a "
            "rank's part of a block each: remove one of them."
        )


def _check_known(key: str) -> None:
    name = key.removeprefix(PREFIX)
    if key.startswith(PREFIX):
        if name in _OPTIONS or name in _WITHOUT_EFFECT:
            return
        _check_here(name, key)
    nearest = _nearest(name)
    what_to_do = (
        f"did you mean {PREFIX + nearest!r}?"
        if nearest
        else "remove it; docs/vllm.md lists all options, docs/migration.md what became of those of others."
    )
    raise InvalidArgument(f"{key!r} is not an option of PegaFlow: {what_to_do}")


def _nearest(name: str) -> str | None:
    """The option that is spelt most like ``name``; ``None`` if none is like it."""
    return next(iter(difflib.get_close_matches(name, [*_OPTIONS, *_WITHOUT_EFFECT], n=1, cutoff=_ALIKE_MIN)), None)


def _check_here(name: str, written: str) -> None:
    # What is spelt like an option is a slip, and is told so.
    if _nearest(name) is not None:
        return
    for start, instead in _NOT_HERE.items():
        if name == start or (start[-1] in "._" and name.startswith(start)):
            raise InvalidArgument(f"{written} is not supported by this version of PegaFlow: remove it; {instead}.")


def _load_timeout(environ: Mapping[str, str]) -> float:
    text = environ.get("PEGA_LOAD_TIMEOUT_SECONDS")
    if not text:
        return ConnectorConfig.load_timeout_seconds
    try:
        return max(LOAD_TIMEOUT_SECONDS_MIN, float(text))
    except ValueError:
        raise InvalidArgument(f"PEGA_LOAD_TIMEOUT_SECONDS must be a number of seconds, not {text!r}.") from None


def _notes(extra: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    for names, why in (
        (_SERVER_OPTIONS, "PegaFlow needs no server any more, the pool is in shared memory."),
        (_SSD_OPTIONS_WITHOUT_EFFECT, "a directory has one cache file, whose queues need no lengths."),
    ):
        named = [PREFIX + name for name in names if PREFIX + name in extra]
        named += [f"PEGAFLOW_{name.upper()}" for name in names if environ.get(f"PEGAFLOW_{name.upper()}")]
        if named:
            notes.append(f"{' and '.join(named)} ignored: {why}")
    return (*notes, *_slips(environ))


def _may_be_ours(variable: str) -> bool:
    """Whether an option may be meant by a variable of the environment."""
    return variable.startswith(_ENVIRONMENT_PREFIX) and not _SERVICE_LINK.search(variable)


def _slips(environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that were probably meant as options. Others have variables that begin like ours, so it is no error."""
    for variable in environ:
        name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
        if not _may_be_ours(variable) or variable in _LIKE_OPTIONS:
            continue
        nearest = _nearest(name)
        if nearest is not None and name not in (*_OPTIONS, *_WITHOUT_EFFECT):
            meant = _ENVIRONMENT_PREFIX + nearest.upper()
            yield f"{variable} in the environment is not an option of PegaFlow and ignored: did you mean {meant}?"
