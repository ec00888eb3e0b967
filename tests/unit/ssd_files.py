"""Cache files on SSD, written as ``docs/ssd-format.md`` says and without the engine's help."""

import os
import struct
from pathlib import Path

from xxhash import xxh3_64_intdigest

BLOCK = 4096
ZONE_BYTES = 16 * BLOCK
ZONES = 4
ZONES_START = 64 << 10
CACHE_ID = 0x1122334455667788
FINGERPRINT = bytes(range(32))
PART_BYTES = (5000, 300)


def cache_path(directory: Path, name: str = "default", version: int = 1, uid: int | None = None) -> Path:
    """Where the file of a cache lies."""
    return directory / f"pegaflow-ssd-v{version}-{os.geteuid() if uid is None else uid}-{name}"


def superblock(forgotten: int = 0) -> bytes:
    """One copy; ``forgotten``: epoch to which the namespace was raised, 0: never."""
    rest = struct.pack("<IIQQQQQQQ", 1, BLOCK, 7, CACHE_ID, ZONE_BYTES, ZONES, 1_700_000_000, 0, int(forgotten > 0))
    if forgotten:
        rest += FINGERPRINT + struct.pack("<Q", forgotten)
    rest = rest.ljust(BLOCK - 16, b"\0")
    return b"PEGASSD1" + struct.pack("<Q", xxh3_64_intdigest(rest)) + rest


def part(number: int, which: int) -> bytes:
    """Bytes of a part of block ``number``."""
    return bytes((number * 31 + which + position) % 251 for position in range(PART_BYTES[which]))


def record(number: int, zone: int, start: int, before: int) -> tuple[bytes, int]:
    """Block ``number`` at a place, and the checksum of its header."""
    parts = [part(number, which) for which in range(len(PART_BYTES))]
    key = struct.pack(">Q", number)
    rest = struct.pack("<QIIQQIHH", CACHE_ID, zone, start, 7 << 32 | zone, 0, 0, len(key), len(parts))
    rest += FINGERPRINT + key.ljust(32, b"\0") + struct.pack("<QQ", before, 7)
    for which, data in enumerate(parts):
        rest += struct.pack("<QQ", len(data), xxh3_64_intdigest(data, seed=which))
    checksum = xxh3_64_intdigest(rest)
    whole = b"PEGARECD" + struct.pack("<Q", checksum) + rest + b"".join(parts)
    return whole.ljust(-(-len(whole) // BLOCK) * BLOCK, b"\0"), checksum


def write_cache(directory: Path, name: str = "default", blocks: int = 10, forgotten: int = 0) -> Path:
    """A cache of so many blocks, five in a zone, as a killed process leaves it: without summaries."""
    file = bytearray(ZONES_START + ZONES * ZONE_BYTES)
    file[:BLOCK] = file[BLOCK : 2 * BLOCK] = superblock(forgotten)
    for zone in range(ZONES):
        start, before = 0, 0
        for number in range(5 * zone, min(5 * zone + 5, blocks)):
            data, before = record(number, zone, start, before)
            offset = ZONES_START + zone * ZONE_BYTES + start * BLOCK
            file[offset : offset + len(data)] = data
            start += len(data) // BLOCK
    path = cache_path(directory, name)
    path.write_bytes(file)
    path.chmod(0o600)
    return path


def damage(path: Path, zone: int) -> None:
    """Flip a bit in the bytes of a zone's first block."""
    with path.open("r+b") as file:
        file.seek(ZONES_START + zone * ZONE_BYTES + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
