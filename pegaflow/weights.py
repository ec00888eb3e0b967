"""What identifies a model's weights, wherever they lie: a digest of samples taken from every tensor of every file.

Reading 100 GB before the first request is out of the question, so content is sampled: all headers, and pieces of every
tensor spread from its first to its last byte. A fine-tune of any tensor changes its samples; names of directories,
tokenizer files and file times do not count. A hub's cache names files by the hash of all their bytes; that counts too.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
PIECE_BYTES = 512
PIECES_PER_TENSOR = 16
PIECES_PER_FILE_MAX = 65_536
PIECES_PER_OPAQUE_FILE = 4_096
HEADER_BYTES_MAX = 256 << 20
LINKS_MAX = 40
"""As many as the kernel follows."""

START_SECONDS_MIN = 0.1
"""Within so many seconds of its start no process has loaded weights; the kernel counts starts in ticks of 10 ms."""

CLOCK_LOOKS = 5
"""Of which the fastest counts."""

PROCESSOR_CONFIGS = "*processor*_config.json"
PROCESSOR_CONFIG_BYTES_MAX = 16 << 20

_Read = Callable[[int, int], bytes]
"""Bytes ``begin <= offset < end`` of a file."""


def weights_digest(path: str) -> str | None:
    """SHA-256 (hex) that identifies the weights in directory or file ``path``; ``None`` if there are none."""
    root = Path(path)
    files = _weight_files(root)
    if not files:
        return None
    total = hashlib.sha256()
    for file in files:
        # A single file stands for itself whatever it is called; in a directory names tell the shards apart.
        name = "" if root.is_file() else file.name
        total.update(f"{len(name)}:{name}:{file.stat().st_size}:".encode())
        total.update(_file_digest(file))
        total.update(_blob_name(file).encode())
    return total.hexdigest()


def processors_digest(path: str) -> str:
    """SHA-256 (hex) of the files next to the weights that say how images and the like are prepared."""
    root = Path(path)
    total = hashlib.sha256()
    for file in sorted((root if root.is_dir() else root.parent).glob(PROCESSOR_CONFIGS)):
        with file.open("rb") as opened:
            content = opened.read(PROCESSOR_CONFIG_BYTES_MAX)
        total.update(f"{len(file.name)}:{file.name}:{len(content)}:".encode())
        total.update(content)
    return total.hexdigest()


def changed_since_start(path: str) -> bool:
    """Whether weights were put there after this process started, which may have loaded what was there before. Files
    that are named by their content cannot be overwritten by others."""
    started = process_started() + START_SECONDS_MIN
    files = (file for file in _weight_files(Path(path)) if not _blob_name(file))
    return any(max(stat.st_mtime, stat.st_ctime) > started for stat in map(Path.stat, files))


Stamps = tuple[tuple[str, int, int, int, int], ...]
"""Name, time of the content, time of any change (ns), length and inode of whatever says which bytes a path has."""


def stamps(path: str) -> Stamps:
    """Of each file of weights and of the configurations beside them, of the links on the way there, of the directory,
    and of what a hub's cache calls its newest revision. Something changes when one of them is replaced, added or
    removed, whatever times a copy keeps."""
    root = Path(path)
    files = _weight_files(root) + (sorted(root.glob("*config.json")) if root.is_dir() else [])
    if root.parent.name == "snapshots":
        files += sorted((root.parent.parent / "refs").glob("main"))
    stats: dict[str, os.stat_result] = {}
    for place in (root, *files):
        stats |= {f"link {link}": link.lstat() for link in _links(place)}
        stats[str(place)] = place.stat()
    return tuple((name, s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for name, s in stats.items())


def stamped_since_start(stamped: Stamps) -> bool:
    """Whether any of this was changed after this process started. Nobody can set the time of the change itself."""
    started_ns = int((process_started() + START_SECONDS_MIN) * 1e9)
    return any(max(written_ns, changed_ns) > started_ns for _, written_ns, changed_ns, _, _ in stamped)


def process_started() -> float:
    """When this process was started, in seconds since the epoch."""
    with open("/proc/self/stat", "rb") as stat:
        ticks = int(stat.read().rpartition(b")")[2].split()[19])
    return min(_machine_started() for _ in range(CLOCK_LOOKS))[1] + ticks / os.sysconf("SC_CLK_TCK")


def _machine_started() -> tuple[float, float]:
    """How long a look at both clocks took, and when the machine was started, too early by no more than that: who has
    to wait for a processor in between must not take files for older than the process."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = time.time()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    return after - before, now - after


def _links(path: Path) -> Iterator[Path]:
    """Each symbolic link that is followed on the way to ``path``."""
    rest = Path.cwd() / path
    for _ in range(LINKS_MAX):
        link = next((place for place in reversed((rest, *rest.parents)) if place.is_symlink()), None)
        if link is None:
            return
        yield link
        rest = link.parent / link.readlink() / rest.relative_to(link)


def _weight_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if root.is_dir():
        return sorted(entry for entry in root.iterdir() if entry.suffix in WEIGHT_SUFFIXES and entry.is_file())
    return []


def _blob_name(file: Path) -> str:
    """Name of the file in a hub's cache that ``file`` links to: the hash of its content; empty for other files."""
    if not file.is_symlink():
        return ""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" else ""


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Not mapped: a file that shrinks meanwhile is an error here and would be SIGBUS there.
        descriptor = file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(descriptor).st_size
        for begin, end in _pieces(lambda begin, end: _read(descriptor, begin, end), size) if size else ():
            digest.update(_read(descriptor, begin, end))
    return digest.digest()


def _read(descriptor: int, begin: int, end: int) -> bytes:
    pieces = []
    while begin < end:
        piece = os.pread(descriptor, end - begin, begin)
        if not piece:
            raise OSError("a file of weights became shorter while it was read")
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)


def _pieces(read: _Read, size: int) -> Iterator[tuple[int, int]]:
    tensors = _safetensors_ranges(read, size)
    if tensors is None:
        yield 0, min(size, 1 << 20)
        yield from _spread(0, size, PIECES_PER_OPAQUE_FILE)
        return
    header_end, ranges = tensors
    yield 0, header_end
    pieces = max(2, min(PIECES_PER_TENSOR, PIECES_PER_FILE_MAX // max(1, len(ranges))))
    for begin, end in ranges:
        yield from _spread(begin, end, pieces)


def _spread(begin: int, end: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Evenly spread pieces of ``[begin, end)`` that always include its first and last bytes."""
    if end - begin <= pieces * PIECE_BYTES:
        yield begin, end
        return
    last = end - PIECE_BYTES
    for index in range(pieces):
        start = begin + (last - begin) * index // (pieces - 1)
        yield start, start + PIECE_BYTES


def _safetensors_ranges(read: _Read, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """``(end of header, byte range of each tensor)``; ``None`` if this is not a well-formed safetensors file."""
    if size < 8:
        return None
    header_end = 8 + int.from_bytes(read(0, 8), "little")
    if not 8 < header_end <= min(size, HEADER_BYTES_MAX):
        return None
    try:
        header = json.loads(read(8, header_end))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        ranges = sorted((header_end + int(begin), header_end + int(end)) for begin, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if any(not header_end <= begin <= end <= size for begin, end in ranges):
        return None
    return header_end, ranges


def local_snapshot(
    model: str, revision: str | None, cache_dir: str | None, config_name: str = "config.json"
) -> str | None:
    """Directory or file that holds ``model`` on this host: a path, or a hub repository that was downloaded before.
    ``config_name``: a file that it has.

    Never asks the network. ``None`` if the weights are somewhere else (an object store, for instance).
    """
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, config_name, cache_dir=cache_dir, revision=revision)
    except ValueError:
        return None  # not a repository name at all
    return os.path.dirname(found) if isinstance(found, str) else None
