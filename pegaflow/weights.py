"""What identifies a model's weights, wherever they lie: a digest of samples taken from every tensor of every file.

Reading 100 GB before the first request is out of the question, so content is sampled: all headers, and pieces of every
tensor spread from its first to its last byte. A fine-tune of any tensor changes its samples; names of directories,
tokenizer files and file times do not count.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
PIECE_BYTES = 512
PIECES_PER_TENSOR = 16
PIECES_PER_FILE_MAX = 65_536
PIECES_PER_OPAQUE_FILE = 4_096
HEADER_BYTES_MAX = 256 << 20


def weights_digest(path: str) -> str | None:
    """SHA-256 (hex) that identifies the weights in directory or file ``path``; ``None`` if there are none."""
    root = Path(path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(entry for entry in root.iterdir() if entry.suffix in WEIGHT_SUFFIXES and entry.is_file())
    else:
        return None
    if not files:
        return None
    total = hashlib.sha256()
    for file in files:
        # A single file stands for itself whatever it is called; in a directory names tell the shards apart.
        name = "" if root.is_file() else file.name
        total.update(f"{len(name)}:{name}:{file.stat().st_size}:".encode())
        total.update(_file_digest(file))
    return total.hexdigest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    size = path.stat().st_size
    if size == 0:
        return digest.digest()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hasattr(data, "madvise"):
            data.madvise(mmap.MADV_RANDOM)
        for begin, end in _pieces(data, size):
            digest.update(data[begin:end])
    return digest.digest()


def _pieces(data: mmap.mmap, size: int) -> Iterator[tuple[int, int]]:
    tensors = _safetensors_ranges(data, size)
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


def _safetensors_ranges(data: mmap.mmap, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """``(end of header, byte range of each tensor)``; ``None`` if this is not a well-formed safetensors file."""
    if size < 8:
        return None
    header_end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < header_end <= min(size, HEADER_BYTES_MAX):
        return None
    try:
        header = json.loads(data[8:header_end])
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        ranges = sorted((header_end + int(begin), header_end + int(end)) for begin, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if any(not header_end <= begin <= end <= size for begin, end in ranges):
        return None
    return header_end, ranges


def local_snapshot(model: str, revision: str | None, cache_dir: str | None) -> str | None:
    """Directory or file that holds ``model`` on this host: a path, or a hub repository that was downloaded before.

    Never asks the network. ``None`` if the weights are somewhere else (an object store, for instance).
    """
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    except ValueError:
        return None  # not a repository name at all
    return os.path.dirname(found) if isinstance(found, str) else None
